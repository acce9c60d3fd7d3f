"""The trainer: a loss function, an optimizer and a config in; exact training steps out.

It owns the run's counters (step, loss scale, rng, user state) and its directory; bytes are the engine's. Everything is
set up at the first batch (or `prepare`), since the order of a step is known only when the loss was traced.
"""

import copy
import dataclasses
import os
import pathlib
import shutil
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zinf_jax import config as config_module
from zinf_jax.config import Config
from zinf_jax.errors import ConfigError, NonFiniteError, ZinfError
from zinf_jax.graph.lazy import Lazy, initializer
from zinf_jax.leaves import Leaf, LeafKind
from zinf_jax.optim import clipping, loss_scale
from zinf_jax.plan import Plan
from zinf_jax.stream.engine import StreamEngine
from zinf_jax.stream.stats import Stats
from zinf_jax.stream.trace import Lane
from zinf_jax.train import checkpoint, relayout, setup
from zinf_jax.train import manifest as manifest_module
from zinf_jax.train.account import Account
from zinf_jax.train.evaluate import Evaluator
from zinf_jax.train.run import Run
from zinf_jax.train.signature import LossSignature
from zinf_jax.train.tracing import StepRecorder
from zinf_jax.train.updating import StepUpdates


@dataclasses.dataclass(frozen=True)
class StepOutput:
    """What a step returns.

    Attributes:
      loss: Mean over micro-batches, by weight where the loss is `Weighted`.
      aux: The loss function's aux as numpy arrays, stacked over micro-batches; None without.
      grad_norm: Global norm of the gradient before clipping.
      step: Steps taken, this one included unless it was skipped.
      skipped: The gradient was not finite: nothing was changed.
      learning_rate: That was applied, where the optimizer tells.
      loss_scale: That was used (1.0 but for fp16).
    """

    loss: float
    aux: Any
    grad_norm: float
    step: int
    skipped: bool
    learning_rate: float | None = None
    loss_scale: float = 1.0


class Trainer:
    """Trains a model whose state is on any tier. See `zinf_jax.Trainer` for the arguments."""

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        params: Any,
        optimizer: Any = None,
        config: Any = None,
        *,
        mesh: jax.sharding.Mesh | None = None,
        has_aux: bool = False,
        rng: Any = None,
        state: Any = None,
        run_dir: Any = None,
        resume: Any = None,
        overwrite: bool = False,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        self.config: Config = config_module.load({} if config is None else config)
        config_module.check_paths(self.config, run_dir)
        self._loss_fn = loss_fn
        self._params = params
        self._optimizer = config_module.build_optimizer(self.config) if optimizer is None else optimizer
        self._signature = LossSignature.of(loss_fn, has_state=state is not None, has_aux=has_aux)
        self._topology = setup.make_topology(self.config, mesh)
        self._abstract = params.abstract if isinstance(params, Lazy) else setup.without_values(params)
        self._leaves = setup.classify_params(self._abstract, self.config)
        self._rng = jax.random.key(self.config.seed) if rng is None else rng
        self._progress = progress
        self.state = state
        self.user_state: Any = None
        self._taken_user_state: Any = None  # as of the last step that was taken
        self._failed_user_state: Any = None  # as of the last one that failed
        self.global_step = 0
        self.num_skipped = 0
        self._skipped_in_a_row = 0
        self._loss_scale = loss_scale.create(self.config.fp16) if self.config.fp16.enabled else None
        self._engine: StreamEngine | None = None
        self._broken: BaseException | None = None
        self._account = Account()
        self._recorder = StepRecorder()
        self._run = Run(self.config, run_dir, resume, overwrite)
        self.run_dir = self._run.path
        self._finalizer = weakref.finalize(self, _clean, self._run)

    # --- setting up ---------------------------------------------------------------------------------------------

    def prepare(self, batch: Any) -> "Trainer":
        """Traces, cuts, plans, reserves memory and disk, and initialises or restores, for batches like this one.

        Args:
          batch: As for `step`; `ShapeDtypeStruct`s will do.

        Returns:
          This trainer.

        Raises:
          ConfigError, PlanError, CutError, StoreError: it cannot work; nothing was trained.
        """
        if self._engine is not None:
            return self
        self._check_open()
        built = setup.build_step(
            self._loss_fn, self._signature, self._abstract, self.config, self._topology, self._optimizer, batch,
            state=self.state, rng=self._rng, durability=self._run.durability, check=self._check_source,
            progress=self._report,
        )  # fmt: skip
        self._batching, self._traced, self._rule = built.batching, built.traced, built.rule
        self._leaves = built.setup.layout.leaves
        make = initializer(self._params, self._leaves)
        for text in (*self._traced.graph.warnings, *make.warnings):
            warnings.warn(text, stacklevel=2)
        in_place = self._run.source is not None and self._run.source.in_place
        self._engine = engine = self._run.open_engine(built.setup, setup.slot_initialiser(self._rule))
        self._updates = StepUpdates(engine, self._rule, clips=self.config.gradient_clipping > 0)
        try:
            if self._run.source is None:
                engine.contents.initialise(make, lambda d, t: self._report("initialise", d, t))
            else:
                self._restore_counters(self._run.restore(engine, self._report))
            engine.store.step = self.global_step
            self._run.begin(engine, tuple(self._rule.slots), self._counters())
        except BaseException:
            engine.close(delete=not in_place)
            if not in_place:
                self._run.remove_pages()
            self._engine = None
            raise
        self._params = None  # the engine's pages are the only copy from here on
        self._evaluator = Evaluator(engine, self._abstract)
        self._finalizer.detach()
        self._finalizer = weakref.finalize(self, _clean, self._run, engine)
        return self

    def _check_source(self, rule: Any, leaves: tuple[Leaf, ...]) -> dict[str, Any] | None:
        """The manifest whose pages are used as they are, once what there is to resume from is known to fit."""
        source = self._run.source
        if source is None:
            return None
        source.check(self.config.compute_dtype, rule.slots, weights_only=self._run.weights_only)
        self._run.same_pages = relayout.stored_pages_fit(source, leaves, self._topology)
        return source.manifest if self._run.same_pages else None

    def _report(self, what: str, done: int, total: int) -> None:
        if self._progress is not None:
            self._progress(what, done, total)

    @property
    def plan(self) -> Plan:
        """The plan of a training step; print it. There after `prepare` or the first step."""
        return self._ready().plan

    @property
    def _failure(self) -> BaseException | None:
        """The error after which the pages may be of two steps."""
        return self._broken or (None if self._engine is None else self._engine.updates.failed)

    def _ready(self) -> StreamEngine:
        if (failure := self._failure) is not None:
            raise ZinfError(
                f"this trainer stopped at an earlier error ({failure}); its state may be a mix of two steps: "
                "resume from the last committed step or a checkpoint"
            ) from failure
        self._check_open()
        if self._engine is None:
            raise ConfigError("nothing is set up yet: call prepare(batch) or step(batch) first")
        return self._engine

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise ZinfError("this trainer is closed: make another one (resume='auto' goes on from where it stopped)")

    def _at_rest(self) -> StreamEngine:
        """The engine, with every update of the steps taken so far done."""
        engine = self._ready()
        engine.settle()
        return engine

    # --- training -----------------------------------------------------------------------------------------------

    def step(self, batch: Any) -> StepOutput:
        """One optimizer step.

        Args:
          batch: Pytree of arrays, dim 0 = micro-batch size x accumulation (this process's share); always of the same
            shapes.

        Raises:
          ConfigError: the batch does not fit.
          StoreError: I/O failed. After an error in the update the trainer refuses to go on.
          NonFiniteError: too many skips in a row.
        """
        try:
            return self._step(batch)
        except BaseException:
            self._failed_user_state = copy.deepcopy(self.user_state)
            raise

    def _step(self, batch: Any) -> StepOutput:
        self.prepare(batch)
        engine = self._ready()
        if setup.Batching.of(batch, self.config, self._topology) != self._batching:
            raise ConfigError(
                f"this trainer was planned for batches like {self._batching.described}, got {setup.describe(batch)}: "
                "drop or pad the odd one, or use another trainer"
            )
        self._recorder.begin(engine.counters.tracer)
        self._account.begin(engine)
        scale = 1.0 if self._loss_scale is None else self._loss_scale.scale
        with engine.counters.tracer.span(Lane.HOST_TO_DEVICE, "batch"):
            outer = self._outer_inputs(batch)
        try:
            weighted = self._traced.parts.weight is not None and self._batching.num_micro > 1
            divisor = None if weighted else scale * self._batching.num_micro
            results = engine.executor.run(outer, scale, speculate=self._updates.ahead(self.global_step, divisor))
            squares = engine.gradients.finish()
        except BaseException:
            engine.updates.abort()  # unless one had failed, the step can be taken again
            raise
        self._account.middle()
        parts = [self._signature.split(jax.tree.unflatten(self._traced.graph.out_tree, r)) for r in results]
        weights = self._weights(parts, engine.executor.weight_unit)
        clip = clipping.clip(squares, scale * sum(weights), self.config.gradient_clipping or None)
        self._updates.settle(clip, scale * sum(weights))
        if self._loss_scale is not None:
            self._loss_scale = loss_scale.update(self._loss_scale, overflow=clip.skip)
        if not clip.skip:
            self._update(clip.gradient_scale, parts[-1].state)
        self._after(clip.skip)
        output = self._output(parts, weights, clip.norm, clip.skip, scale)
        end_s = self._account.end(engine)
        self._recorder.end(output.step + clip.skip, self._account.start_s, end_s)
        self._updates.took(end_s - self._account.start_s)
        if self._skipped_in_a_row >= self.config.max_consecutive_skips:
            raise NonFiniteError(
                f"{self._skipped_in_a_row} steps in a row had non-finite gradients (loss {output.loss}): lower the "
                "learning rate, check the data, or raise max_consecutive_skips"
            )
        return output

    def _outer_inputs(self, batch: Any) -> list[dict[int, Any]]:
        """Per micro-batch, its arguments on the devices, by value id."""
        step_rng = jax.random.fold_in(self._rng, self.global_step) if self._signature.wants_rng else None
        outer = []
        for index, micro in enumerate(self._batching.split(batch)):
            rng = None if step_rng is None else jax.random.fold_in(step_rng, index)
            flat = jax.tree.leaves(self._signature.arguments(self.state, micro, rng))
            first = 0 if index == 0 else self._traced.num_state
            outer.append(
                {
                    value: jax.device_put(array, self._traced.outer_shardings[value])
                    for value, array in list(zip(self._traced.graph.outer_inputs, flat, strict=True))[first:]
                }
            )
        return outer

    def _weights(self, parts: list[Any], unit: float) -> list[float]:
        """Of the micro-batches, in units of what the executor scaled by."""
        if parts[0].weight is None or len(parts) == 1:
            return [1.0] * len(parts)
        return [float(p.weight) / unit for p in parts]

    def _update(self, gradient_scale: float, new_state: Any) -> None:
        """The pages and the counters that belong to them change together, or this trainer is at its end."""
        engine, count = self._ready(), self.global_step
        self._run.mark_in_use(engine)
        try:
            self.state = new_state
            self.global_step += 1
            self._taken_user_state, self._failed_user_state = copy.deepcopy(self.user_state), None
            self._skipped_in_a_row = 0
            self._updates.apply(count, gradient_scale, self._commit_of_step)
        except BaseException as error:
            self._broken = error
            raise

    def _commit_of_step(self) -> Callable[[], None]:
        """As of this step, though its pages may be written only when the next one is under way."""
        if not self._run.durability.due(self.global_step):
            return lambda: None
        engine, counters = self._ready(), self._counters()
        self._run.expect(counters)
        return lambda: self._run.commit(engine, counters)

    def _after(self, skipped: bool) -> None:
        if skipped:
            self._taken_user_state = copy.deepcopy(self.user_state)
            self.num_skipped += 1
            self._skipped_in_a_row += 1
            warnings.warn(
                f"step {self.global_step + 1} skipped: its gradient is not finite ({self._skipped_in_a_row} in a row)",
                stacklevel=3,
            )

    def _output(self, parts: list[Any], weights: list[float], norm: float, skipped: bool, scale: float) -> StepOutput:
        losses = [float(p.loss) for p in parts]
        loss = losses[0]
        if len(losses) > 1:
            total = sum(weights)  # 0: a mean over nothing
            loss = sum(x * w for x, w in zip(losses, weights, strict=True)) / total if total else float("nan")
        aux = None
        if self._signature.has_aux:
            aux = jax.tree.map(lambda *xs: np.stack([np.asarray(x) for x in xs]), *(p.aux for p in parts))
        rates = self._rule.hyperparameters(self.global_step - (0 if skipped else 1))
        return StepOutput(loss, aux, norm, self.global_step, skipped, rates.get("learning_rate"), scale)

    def stats(self) -> Stats:
        """What was measured: of the last step, and in all."""
        return self._account.stats(self._ready(), updates_undone=self._updates.num_undone)

    def trace(self, path: Any, steps: int = 1) -> None:
        """Records the next `steps` steps and then writes them to `path`, for Perfetto and `zinf timeline`.

        Args:
          path: Of the file, gzipped if it ends in `.gz`. Written early, with what there is, if the trainer is closed.
          steps: How many. The first step of a process is slower than those after it.

        Raises:
          ConfigError: see `StepRecorder.request`.
        """
        self._recorder.request(path, steps)

    # --- looking ------------------------------------------------------------------------------------------------

    def evaluate(self, fn: Callable[..., Any], batch: Any) -> Any:
        """`fn(params, batch)`, streamed, forward only. The batch is not split into micro-batches.

        Returns:
          What `fn` returns, on the devices.
        """
        self._at_rest()
        return self._evaluator(fn, batch)

    def iter_params(self, *, master: bool = True) -> Iterator[tuple[str, np.ndarray]]:
        """(name, value) leaf by leaf: fp32 masters of trained leaves, or with `master=False` what the loss sees."""
        engine = self._at_rest()
        for leaf in engine.layout.leaves:
            if leaf.kind is not LeafKind.STATIC:
                yield leaf.name, engine.contents.leaf(leaf, master=master)

    def params(self, *, master: bool = True) -> Any:
        """The whole parameter tree in host memory, in the user's own structure. For small models and tests."""
        engine = self._at_rest()
        flat, treedef = jax.tree.flatten(self._abstract)
        values = [self._user_leaf(engine, leaf, value, master) for leaf, value in zip(self._leaves, flat, strict=True)]
        return jax.tree.unflatten(treedef, values)

    def _user_leaf(self, engine: StreamEngine, leaf: Leaf, value: Any, master: bool) -> Any:
        if leaf.kind is LeafKind.STATIC:
            return value
        array = engine.contents.leaf(leaf, master=master)
        if leaf.key_impl is not None:
            return jax.random.wrap_key_data(jnp.asarray(array), impl=leaf.key_impl)
        return array

    def opt_state(self) -> dict[str, Any]:
        """{"count": n, slot: {leaf name: fp32 array}} in host memory. For small models and tests."""
        engine = self._at_rest()
        trained = [leaf for leaf in self._leaves if leaf.kind is LeafKind.TRAINABLE]
        slots: dict[str, dict[str, np.ndarray]] = {}
        for leaf in trained:
            names = self._rule.slots if self._rule.fused else self._rule.slots_of(leaf.index)
            for i, name in enumerate(names):
                slots.setdefault(name, {})[leaf.name] = engine.contents.leaf(leaf, slot=i)
        return {"count": self.global_step, **slots}

    # --- saving -------------------------------------------------------------------------------------------------

    def _counters(self) -> dict[str, Any]:
        """What belongs to the step beside the pages."""
        return manifest_module.counters(
            step=self.global_step, num_skipped=self.num_skipped, rng=self._rng, state=self.state,
            user_state=self._user_state_of_step(), small={} if self._rule.fused else self._rule.state_dict(),
            scale=None if self._loss_scale is None else loss_scale.to_json(self._loss_scale),
        )  # fmt: skip

    def _user_state_of_step(self) -> Any:
        """What the user noted for the step that was taken; not for one that failed, whose batch must come again."""
        failed = self._failed_user_state is not None and self.user_state == self._failed_user_state
        return copy.deepcopy(self._taken_user_state if failed else self.user_state)

    def _restore_counters(self, manifest: dict[str, Any]) -> None:
        if self._run.weights_only:
            return
        self.global_step = manifest["step"]
        self.num_skipped = manifest["num_skipped"]
        self.user_state = manifest["user_state"]
        self._taken_user_state = copy.deepcopy(self.user_state)
        self._rng = manifest_module.decode_rng(manifest["rng"])
        if manifest["loss_scale"] is not None and self._loss_scale is not None:
            self._loss_scale = loss_scale.from_json(manifest["loss_scale"])
        if not self._rule.fused:
            small = {name: manifest_module.decode_array(value) for name, value in manifest["optimizer_state"].items()}
            self._rule.load_state_dict(small)
        if manifest["state"] is not None and self.state is not None:
            self.state = manifest_module.decode_state(manifest["state"], self.state)

    def save(self, path: Any = None, *, replaces: Sequence[int] = ()) -> pathlib.Path:
        """Keeps the state of this step, everything that a resume needs.

        Args:
          path: A new directory, that appears whole or not at all. None: kept in place, without a copy: its extents are
            not used again until `release`.
          replaces: Steps kept in place that are given up once this one is durable.

        Returns:
          What `resume` takes: `path`, or a file under `run_dir/retained`. That file appears when the step is durable,
          which this does not wait for: while the next step runs, or in `close`.

        Raises:
          ConfigError: the path is taken; or without one, durability is off.
          StoreError: no room, or I/O failed; nothing is left behind.
        """
        if path is None:
            return self._run.retain(self._ready(), self._counters(), replaces)
        engine = self._at_rest()
        content = self._run.describe(engine, "saved") | self._counters()
        return checkpoint.save(engine, pathlib.Path(path), content)

    @property
    def durable(self) -> bool:
        """Are steps committed, so that a crash loses at most those since the last commit?"""
        return self._run.durability.every > 0

    def retained(self) -> list[int]:
        """The steps that are kept in place, those included that will be once they are durable."""
        return self._run.retained()

    def release(self, step: int) -> None:
        """Gives up a step that was kept in place.

        Raises:
          ConfigError: it is not kept.
        """
        if step not in self.retained():
            raise ConfigError(f"step {step} is not kept in {self.run_dir}: there are {self.retained() or 'none'}")
        self._run.release(self._ready(), step)

    def close(self) -> None:
        """Brings everything to rest: a run with a run_dir can be resumed in place, the files of others are removed.

        Raises:
          StoreError: what was still under way failed; the last committed step holds.
        """
        self._recorder.close()
        try:
            if self._engine is not None and self._failure is None and not self._run.temporary:
                self._run.rest(self._at_rest(), self._counters())
        finally:
            self._finalizer()
            self._engine = None

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _clean(run: Run, engine: StreamEngine | None = None) -> None:
    """Ends transfers, frees memory, removes a temporary run's files, gives the directory up."""
    if os.getpid() != run.pid:
        return  # a forked child that ends: the run is its parent's
    try:
        if engine is not None:
            engine.close(delete=run.temporary)
    finally:
        if run.temporary:
            run.remove_pages()
            shutil.rmtree(run.path, ignore_errors=True)
        run.directory.release()


__all__ = ["StepOutput", "Trainer"]
