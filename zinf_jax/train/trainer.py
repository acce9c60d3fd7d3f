"""The trainer: a loss function, an optimizer and a config in; exact training steps out.

It owns the run's counters (step, loss scale, rng, user state) and its directory; bytes are the engine's. Everything is
set up at the first batch (or `prepare`), since the order of a step is known only when the loss was traced.
"""

import dataclasses
import pathlib
import secrets
import shutil
import tempfile
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zinf_jax import config as config_module
from zinf_jax.config import Config
from zinf_jax.errors import ConfigError, NonFiniteError, ResumeError, ZinfError
from zinf_jax.graph.lazy import Initializer, Lazy, initializer
from zinf_jax.leaves import Leaf, LeafKind
from zinf_jax.optim import clipping, loss_scale
from zinf_jax.plan import Plan
from zinf_jax.stream.engine import StreamEngine
from zinf_jax.stream.stats import Stats, peak_rss_bytes
from zinf_jax.tier import Layout
from zinf_jax.train import checkpoint, setup
from zinf_jax.train.evaluate import Evaluator
from zinf_jax.train.rundir import RunDir, read_manifest
from zinf_jax.train.signature import LossSignature


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
        config_module.check_paths(self.config)
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
        self.global_step = 0
        self.num_skipped = 0
        self._skipped_in_a_row = 0
        self._loss_scale = loss_scale.create(self.config.fp16) if self.config.fp16.enabled else None
        self._engine: StreamEngine | None = None
        self._broken: BaseException | None = None
        self._totals: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._num_steps = 0
        self._open_directory(run_dir, resume, overwrite)

    # --- the run directory -------------------------------------------------------------------------------------

    def _open_directory(self, run_dir: Any, resume: Any, overwrite: bool) -> None:
        # "auto" goes on with what this very run did, whatever it once started from.
        self._weights_only = self.config.restore == "weights" and resume != "auto"
        self._temporary = run_dir is None
        if self._temporary:
            base = self.config.nvme_path[0] if self.config.nvme_path else None
            if base is not None:
                pathlib.Path(base).mkdir(parents=True, exist_ok=True)
            run_dir = tempfile.mkdtemp(prefix="zinf-run-", dir=base)
        self.run_dir = pathlib.Path(run_dir)
        self._dir = RunDir(self.run_dir)
        try:
            manifest = self._dir.read_manifest()
            self._source = self._find_source(manifest, resume, overwrite)
            stored = None if self._source is None else self._source.manifest
            in_place = self._source is not None and self._source.in_place
            continues = stored is not None and manifest is not None and stored["run_id"] == manifest["run_id"]
            if manifest is not None and not continues and not overwrite:
                raise ResumeError(
                    f"{self.run_dir} holds another run, at step {manifest['step']}: pass overwrite=True to give that "
                    "one up, or another run_dir"
                )
            self._run_id = stored["run_id"] if stored is not None and continues else secrets.token_hex(6)
            self._in_use = False  # is the manifest's word "closed" wrong?
            if manifest is not None and not in_place:
                checkpoint.delete_pages(manifest)
        except BaseException:
            self._dir.release()
            raise
        self._finalizer = weakref.finalize(self, _clean, self._dir, self.run_dir, self._temporary)

    def _find_source(self, manifest: dict[str, Any] | None, resume: Any, overwrite: bool) -> "checkpoint.Source | None":
        if resume is None:
            if manifest is not None and not overwrite:
                raise ResumeError(
                    f"{self.run_dir} holds a run at step {manifest['step']}: pass resume='auto' to continue it, "
                    "overwrite=True to start anew, or another run_dir"
                )
            return None
        if resume == "auto":
            return checkpoint.find_latest(self.run_dir)
        return checkpoint.open_source(pathlib.Path(resume), self.run_dir)

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
        built = setup.build_step(
            self._loss_fn, self._signature, self._abstract, self.config, self._topology, self._optimizer, batch,
            state=self.state, rng=self._rng, check=self._check_source, progress=self._report,
        )  # fmt: skip
        self._batching, self._traced, self._rule = built.batching, built.traced, built.rule
        self._leaves = built.setup.layout.leaves
        make = initializer(self._params, self._leaves)
        for text in (*self._traced.graph.warnings, *make.warnings):
            warnings.warn(text, stacklevel=2)
        in_place = self._source is not None and self._source.in_place
        directory = setup.pages_directory(self.config, self.run_dir, self._run_id)
        init_slots = setup.slot_initialiser(self._rule)
        self._engine = StreamEngine(built.setup, init_slots, directory, reuse=in_place)
        try:
            self._fill(make, in_place)
        except BaseException:
            self._engine.close(delete=not in_place)
            self._engine = None
            raise
        self._params = None  # the engine's pages are the only copy from here on
        self._evaluator = Evaluator(self._engine, self._abstract)
        if not in_place:  # a run that is only looked at stays closed
            self._mark_in_use()
        self._finalizer.detach()
        self._finalizer = weakref.finalize(
            self, _clean, self._dir, self.run_dir, self._temporary, self._engine, directory
        )
        return self

    def _check_source(self, rule: Any) -> dict[str, Any] | None:
        """The manifest to resume from, if any, once it is known to fit."""
        if self._source is None:
            return None
        self._source.check(self.config.compute_dtype, rule.slots, self._topology, weights_only=self._weights_only)
        return self._source.manifest

    def _fill(self, make: Initializer, in_place: bool) -> None:
        assert self._engine is not None
        if self._source is None:
            self._engine.contents.initialise(make, lambda d, t: self._report("initialise", d, t))
        else:
            if in_place and self._weights_only:  # the optimizer's pages are about to change
                self._mark_in_use()
            checkpoint.load(
                self._engine, self._source, lambda d, t: self._report("restore", d, t),
                weights_only=self._weights_only,
            )  # fmt: skip
            self._restore_counters(self._source.manifest)

    def _mark_in_use(self) -> None:
        """From here on the pages change: a run that dies now cannot be resumed in place."""
        if not self._in_use:
            self._dir.write_manifest(self._manifest("open"))
            self._in_use = True

    def _report(self, what: str, done: int, total: int) -> None:
        if self._progress is not None:
            self._progress(what, done, total)

    @property
    def plan(self) -> Plan:
        """The plan of a training step; print it. There after `prepare` or the first step."""
        return self._ready().plan

    def _ready(self) -> StreamEngine:
        if self._broken is not None:
            raise ZinfError(
                f"this trainer stopped at an earlier error ({self._broken}); its state may be a mix of two steps: "
                "resume from a checkpoint"
            ) from self._broken
        if self._engine is None:
            raise ConfigError("nothing is set up yet: call prepare(batch) or step(batch) first")
        return self._engine

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
        self.prepare(batch)
        engine = self._ready()
        if setup.Batching.of(batch, self.config, self._topology) != self._batching:
            raise ConfigError(
                f"this trainer was planned for batches like {self._batching.described}, got {setup.describe(batch)}: "
                "drop or pad the odd one, or use another trainer"
            )
        start = time.perf_counter()
        before = engine.store.statistics()
        engine.counters.take()
        scale = 1.0 if self._loss_scale is None else self._loss_scale.scale
        results = engine.executor.run(self._outer_inputs(batch), scale)
        squares = engine.gradients.finish()
        middle = time.perf_counter()
        parts = [self._signature.split(jax.tree.unflatten(self._traced.graph.out_tree, r)) for r in results]
        weights = self._weights(parts, engine.executor.weight_unit)
        clip = clipping.clip(squares, scale * sum(weights), self.config.gradient_clipping or None)
        if not clip.skip:
            self._update(clip.gradient_scale, parts[-1].state)
        self._after(clip.skip)
        output = self._output(parts, weights, clip.norm, clip.skip, scale)
        self._account(engine, before, start, middle)
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
        engine = self._ready()
        self._mark_in_use()
        try:
            engine.updater.run(self._rule, self.global_step, gradient_scale)
            self.state = new_state
            self.global_step += 1
            self._skipped_in_a_row = 0
        except BaseException as error:
            self._broken = error
            raise

    def _after(self, skipped: bool) -> None:
        if self._loss_scale is not None:
            self._loss_scale = loss_scale.update(self._loss_scale, overflow=skipped)
        if skipped:
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

    def _account(self, engine: StreamEngine, before: Any, start: float, middle: float) -> None:
        after, end = engine.store.statistics(), time.perf_counter()
        values = engine.counters.take()
        values |= {
            "step_time_s": end - start,
            "pass_time_s": middle - start,
            "update_time_s": end - middle,
            "nvme_bytes_read": after.bytes_read - before.bytes_read,
            "nvme_bytes_written": after.bytes_written - before.bytes_written,
        }
        self._num_steps += 1
        self._last = values
        for total, name in (
            ("total_time_s", "step_time_s"),
            ("total_nvme_bytes_read", "nvme_bytes_read"),
            ("total_nvme_bytes_written", "nvme_bytes_written"),
            ("total_read_stall_s", "read_stall_s"),
            ("total_write_stall_s", "write_stall_s"),
        ):
            self._totals[total] = self._totals.get(total, 0) + values.get(name, 0)

    def stats(self) -> Stats:
        """What was measured: of the last step, and in all."""
        engine = self._ready()
        known = {f.name for f in dataclasses.fields(Stats)}
        resident = sum(1 for _ in engine.plan.resident)
        return Stats(
            num_steps=self._num_steps,
            peak_host_bytes=engine.arena.num_bytes if resident else engine.arena.peak_leased_bytes,
            peak_device_bytes=engine.counters.peak_device_bytes,
            peak_rss_bytes=peak_rss_bytes(),
            **{k: v for k, v in (self._last | self._totals).items() if k in known},  # type: ignore[arg-type]
        )

    # --- looking ------------------------------------------------------------------------------------------------

    def evaluate(self, fn: Callable[..., Any], batch: Any) -> Any:
        """`fn(params, batch)`, streamed, forward only. The batch is not split into micro-batches.

        Returns:
          What `fn` returns, on the devices.
        """
        self._ready()
        return self._evaluator(fn, batch)

    def iter_params(self, *, master: bool = True) -> Iterator[tuple[str, np.ndarray]]:
        """(name, value) leaf by leaf: fp32 masters of trained leaves, or with `master=False` what the loss sees."""
        engine = self._ready()
        for leaf in engine.layout.leaves:
            if leaf.kind is not LeafKind.STATIC:
                yield leaf.name, engine.contents.leaf(leaf, master=master)

    def params(self, *, master: bool = True) -> Any:
        """The whole parameter tree in host memory, in the user's own structure. For small models and tests."""
        engine = self._ready()
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
        engine = self._ready()
        trained = [leaf for leaf in self._leaves if leaf.kind is LeafKind.TRAINABLE]
        slots: dict[str, dict[str, np.ndarray]] = {}
        for leaf in trained:
            names = self._rule.slots if self._rule.fused else self._rule.slots_of(leaf.index)
            for i, name in enumerate(names):
                slots.setdefault(name, {})[leaf.name] = engine.contents.leaf(leaf, slot=i)
        return {"count": self.global_step, **slots}

    # --- saving -------------------------------------------------------------------------------------------------

    def _manifest(self, status: str) -> dict[str, Any]:
        engine = self._ready()
        return checkpoint.manifest(
            engine, status=status, run_id=self._run_id, step=self.global_step, num_skipped=self.num_skipped,
            rng=self._rng, state=self.state, user_state=self.user_state, slots=self._rule.slots,
            small={} if self._rule.fused else self._rule.state_dict(),
            scale=None if self._loss_scale is None else loss_scale.to_json(self._loss_scale),
            directory=str(setup.pages_directory(self.config, self.run_dir, self._run_id)),
        )  # fmt: skip

    def _restore_counters(self, manifest: dict[str, Any]) -> None:
        if self._weights_only:
            return
        self.global_step = manifest["step"]
        self.num_skipped = manifest["num_skipped"]
        self.user_state = manifest["user_state"]
        self._rng = checkpoint.decode_rng(manifest["rng"])
        if manifest["loss_scale"] is not None and self._loss_scale is not None:
            self._loss_scale = loss_scale.from_json(manifest["loss_scale"])
        if not self._rule.fused:
            small = {name: checkpoint.decode_array(value) for name, value in manifest["optimizer_state"].items()}
            self._rule.load_state_dict(small)
        if manifest["state"] is not None and self.state is not None:
            self.state = checkpoint.decode_state(manifest["state"], self.state)

    def save(self, path: Any) -> pathlib.Path:
        """Writes a checkpoint: everything that a resume needs, in a new directory that appears whole or not at all.

        Raises:
          ConfigError: the path is taken.
          StoreError: no room, or I/O failed; nothing is left behind.
        """
        engine = self._ready()
        return checkpoint.save(engine, pathlib.Path(path), self._manifest("saved"))

    def close(self) -> None:
        """Brings everything to rest: a run with a run_dir can be resumed in place, the files of others are removed."""
        if self._engine is not None and self._broken is None and not self._temporary and self._in_use:
            checkpoint.bring_to_rest(self._engine)
            self._dir.write_manifest(self._manifest("closed"))
        self._finalizer()
        self._engine = None

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _clean(
    run_dir: RunDir,
    path: pathlib.Path,
    temporary: bool,
    engine: StreamEngine | None = None,
    directory: pathlib.Path | None = None,
) -> None:
    """Ends transfers, frees memory, removes a temporary run's files, gives the directory up."""
    if engine is not None:
        engine.close(delete=temporary)
    if temporary:
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)
        shutil.rmtree(path, ignore_errors=True)
    run_dir.release()


__all__ = ["Layout", "StepOutput", "Trainer", "read_manifest"]
