"""Any optax transformation, streamed: its own update runs through XLA on the CPU, group of leaves by group of leaves.

`tx.init` and `tx.update` are traced once on abstract values. What their jaxprs say (`_traced.py`) gives,
per leaf, which vectors of its state can rest in its pages (*slots*), which leaves must be updated together, and whether
any range of a leaf can be updated on its own. The rest of the state (counts, schedules, factored rows) is small and
stays in host memory.

Guarantees:
  - Each element's result does not depend on how an elementwise leaf is cut into ranges: ranges are padded to fixed
    block sizes, so that the same compiled loop computes each element.
  - Nothing of the state is changed before `end_step`: an update can be repeated, or the step dropped (`drop_step`).
  - Slots are stored in f32. State that optax keeps in bf16 or f16 is converted at both ends, exactly.

Slower than the fused kernels (optax makes several passes over memory; whole leaves or the whole model may have to be in
memory at once); `note` says so, and what to use instead.
"""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from zinf_jax.errors import ConfigError
from zinf_jax.graph import _jaxpr
from zinf_jax.graph._equal import Keys
from zinf_jax.graph._jaxpr import Block
from zinf_jax.leaves import Leaf
from zinf_jax.optim import _analysis, _traced
from zinf_jax.optim.rules import BoundRule, Rule, trained_part

_LOG = logging.getLogger(__name__)

_EXACT = {"xla_allow_excess_precision": False}
# Lengths that elementwise updates are compiled for; a range is covered by the largest that fit, the last one padded.
_BLOCKS = (1 << 18, 1 << 15, 1 << 12)


@dataclasses.dataclass(frozen=True)
class Group:
    """Leaves that are updated together.

    Attributes:
      leaves: `Leaf.index` of each.
      elementwise: Any range of the (one) leaf can be updated on its own; otherwise whole leaves are needed.
    """

    leaves: tuple[int, ...]
    elementwise: bool


@dataclasses.dataclass(frozen=True)
class GenericRule(Rule):
    """An optax transformation without a fused kernel."""

    transformation: optax.GradientTransformation

    fused = False

    @property
    def name(self) -> str:
        return "an optax transformation"

    @property
    def note(self) -> str:
        return (
            "this optimizer has no fused kernel: it runs through XLA on the host, several times slower; "
            "zinf.optim.adamw, adam, lion, sgd and adagrad are fused"
        )

    def bind(self, leaves: Sequence[Leaf], params_tree: Any) -> "GenericBoundRule":
        return GenericBoundRule(self, leaves, params_tree)


def as_rule(transformation: Any) -> Rule:
    """The rule of a `zinf.optim` transformation, or a `GenericRule` for any other.

    Raises:
      ConfigError: not an optax transformation.
    """
    if isinstance(transformation, optax.MultiSteps):
        transformation = transformation.gradient_transformation()
    rule = getattr(transformation, "rule", None)
    if isinstance(rule, Rule):
        return rule
    if not (callable(getattr(transformation, "init", None)) and callable(getattr(transformation, "update", None))):
        raise ConfigError(f"the optimizer must be an optax transformation, got {type(transformation).__name__}")
    return GenericRule(transformation)


class _Programs:
    """Compiled blocks; equal ones share a program."""

    def __init__(self) -> None:
        self._keys = Keys(differentiate=False)
        self._by_key: dict[Any, Callable[..., list[Any]]] = {}
        self._by_block: dict[Any, tuple[Any, Callable[..., list[Any]]]] = {}  # by id; the block is kept alive

    def of(self, block: Block) -> Callable[..., list[Any]]:
        known = self._by_block.get(id(block))
        if known is None:
            key = _analysis.key_of(block, self._keys)
            if key not in self._by_key:
                self._by_key[key] = _compile(block)
            known = self._by_block[id(block)] = (block, self._by_key[key])
        return known[1]

    def of_vectors(self, plan: _traced.Plan, size: int) -> Callable[..., list[Any]]:
        """An elementwise plan's update for f32 vectors of one length."""
        known = self._by_block.get((id(plan), size))
        if known is None:
            block = _vector_block(plan.update, size)
            known = self._by_block[(id(plan), size)] = (plan, self.of(block))
        return known[1]


def _compile(block: Block) -> Callable[..., list[Any]]:
    """Compiles a block so that it rounds as it would inside the whole update.

    XLA replaces a division by a scalar with a multiplication by its reciprocal where the scalar has one reader. In the
    whole update a bias correction has a reader per leaf; here the scalars are returned too, to have another one.
    """
    scalars = [i for i, var in enumerate(block.invars) if not var.aval.shape]
    compiled = jax.jit(
        lambda *args: (_jaxpr.evaluate(block, *args), [args[i] for i in scalars]), compiler_options=_EXACT
    )
    return lambda *args: compiled(*args)[0]


def _vector_block(block: Block, size: int) -> Block:
    """An elementwise block with every vector f32 [size]: the same for leaves of all shapes."""
    dtypes = [var.aval.dtype for var in block.invars]
    body = _analysis.at_size(block, size)

    def run(*args: Any) -> list[Any]:
        return [x.astype(jnp.float32) for x in body(*(x.astype(d) for x, d in zip(args, dtypes, strict=True)))]

    avals = [
        jax.ShapeDtypeStruct((size,), np.float32) if var.aval.shape else jax.ShapeDtypeStruct((), var.aval.dtype)
        for var in block.invars
    ]
    return _analysis.inline(_jaxpr.trace(run, *avals).block)


def _on_cpu(function: Callable[..., list[Any]], arguments: Sequence[Any]) -> list[Any]:
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return function(*arguments)


class GenericBoundRule(BoundRule):
    """See the module. Used by one thread.

    Attributes:
      groups: In order of their first leaf; each trained leaf stands in exactly one.
      slots: Names of the slots of the leaf that has most; `slots_of` gives those of one leaf.
      elementwise: All groups are.
      note: For people: what makes it slow or large. Logged once, as a warning.
    """

    fused = False

    def __init__(self, rule: GenericRule, leaves: Sequence[Leaf], params_tree: Any) -> None:
        self.rule = rule
        trained, params = trained_part(leaves, params_tree)
        self._traced = _traced.trace(rule.transformation, trained, params)
        self._num = len(trained)
        self._position = {leaf.index: i for i, leaf in enumerate(trained)}
        self._programs = _Programs()
        self.groups = tuple(
            Group(tuple(trained[i].index for i in plan.params), plan.elementwise) for plan in self._traced.plans
        )
        self.elementwise = all(group.elementwise for group in self.groups)
        self.slots = max((self.slots_of(leaf.index) for leaf in trained), key=len, default=())
        self._state = self._initial_state()
        self._pending: dict[int, Any] = {}
        self._scalars: list[Any] | None = None
        self.note = self._describe()
        _LOG.warning("%s", self.note)

    def _describe(self) -> str:
        parts = [self.rule.note]
        whole = [group for group in self.groups if not group.elementwise]
        together = max((len(group.leaves) for group in self.groups), default=0)
        if together > 1:
            parts.append(
                f"{together} leaves are coupled and must be in host memory at once (a global norm inside the "
                "optimizer? use the config's gradient_clipping instead of optax.clip_by_global_norm)"
            )
        elif whole:
            parts.append(f"{len(whole)} of {len(self.groups)} leaves are updated whole, not in chunks")
        return "; ".join(parts)

    # --- slots -------------------------------------------------------------------------------------------------

    def _slot_positions(self, leaf_index: int) -> tuple[int, ...]:
        position = self._position[leaf_index]
        return next(p.slots[p.params.index(position)] for p in self._traced.plans if position in p.params)

    def slots_of(self, leaf_index: int) -> tuple[str, ...]:
        """Names of one leaf's slots, in the order in which `update_group` takes them."""
        return tuple(self._traced.slot_names[k] for k in self._slot_positions(leaf_index))

    def slot_init(self, slot: str) -> float:
        """The value with which a slot starts in every leaf.

        Raises:
          ConfigError: it starts from the parameters, or differs between leaves: use `init_slots`.
        """
        values = set()
        for leaf in self._traced.leaves:
            for k in self._slot_positions(leaf.index):
                if self._traced.slot_names[k] != slot:
                    continue
                if self._traced.init_depends[k]:
                    raise ConfigError(f"slot {slot!r} of {leaf.name!r} starts from its parameter: use init_slots")
                block, _ = _analysis.select(self._traced.init, [k])
                if leaf.shape and not _analysis.is_elementwise(block, leaf.shape):
                    raise ConfigError(f"slot {slot!r} of {leaf.name!r} has no constant initial value: use init_slots")
                values.add(float(np.asarray(_on_cpu(_analysis.at_size(block, 1), [])[0], np.float32)[0]))
        if len(values) != 1:
            raise ConfigError(f"slot {slot!r} starts with {sorted(values)}, not with one value: use init_slots")
        return values.pop()

    def init_slots(self, leaf_index: int, master: np.ndarray) -> list[np.ndarray]:
        """The initial slots of one leaf, f32, in the shape of `master`.

        Args:
          leaf_index: `Leaf.index`.
          master: f32, the whole leaf or, where its init is elementwise, a flat range of it.

        Raises:
          ConfigError: a slot starts from another leaf's parameters.
        """
        position = self._position[leaf_index]
        shape, results = self._traced.leaves[position].shape, []
        for k in self._slot_positions(leaf_index):
            block, inputs = _analysis.select(self._traced.init, [k])
            if any(i != position for i in inputs):
                raise ConfigError(f"the optimizer's state {self._traced.state_names[k]!r} starts from other parameters")
            if _analysis.is_elementwise(block, shape):
                function, argument = _analysis.at_size(block, master.size), master.reshape(-1)
            else:
                # A scalar comes with the padding of its row, whose slots mean nothing.
                function, argument = _compile(block), master.reshape(shape) if shape else master.reshape(-1)[0]
            value = np.array(_on_cpu(function, [argument] * len(inputs))[0]).astype(np.float32)
            results.append(value.reshape(master.shape) if shape else np.full(master.shape, value.reshape(-1)[0]))
        return results

    def _initial_state(self) -> dict[int, Any]:
        """The small state: everything that is no slot, by position."""
        traced = self._traced
        kept = [k for k in range(len(traced.state_avals)) if k not in traced.slot_names]
        for k in kept:
            if traced.init_depends[k]:
                raise ConfigError(
                    f"the optimizer's state {traced.state_names[k]!r} starts from parameter values and does not have "
                    "the shape of one parameter: it cannot be streamed"
                )
        block, _ = _analysis.select(traced.init, kept)
        return dict(zip(kept, _on_cpu(_compile(block), []), strict=True)) if kept else {}

    # --- the step ----------------------------------------------------------------------------------------------

    def update_group(
        self,
        group: Group | int,
        masters: Sequence[np.ndarray],
        gradients: Sequence[np.ndarray | None],
        slots: Sequence[Sequence[np.ndarray]],
        count: int | None = None,
        *,
        gradient_scale: float = 1.0,
    ) -> tuple[list[np.ndarray], list[list[np.ndarray]]]:
        """Computes one group's update. Changes none of its arguments.

        Args:
          group: One of `groups`, or its index.
          masters: Per leaf of the group, f32: the whole leaf, or the same flat range of everything if elementwise.
          gradients: Likewise, f32, bf16 or f16; None: zeros.
          slots: Per leaf, its slots in the order of `slots_of`, f32.
          count: Not used: the state has its own counters. Here for the fused rules' sake.
          gradient_scale: Multiplies the gradients in f32.

        Returns:
          (new masters, new slots), in the shapes given.
        """
        del count
        plan = self._traced.plans[group if isinstance(group, int) else self.groups.index(group)]
        scale = np.float32(gradient_scale)
        scaled = [
            np.zeros(m.shape, np.float32) if g is None else np.asarray(g, np.float32).reshape(m.shape) * scale
            for m, g in zip(masters, gradients, strict=True)
        ]
        flat_slots = [value for part in slots for value in part]
        run = self._update_range if plan.elementwise else self._update_whole
        new = run(plan, [*masters, *scaled, *flat_slots])
        new_masters = [new[i].reshape(m.shape) for i, m in zip(plan.params, masters, strict=True)]
        new_slots = [
            [new[self._num + k].reshape(m.shape) for k in ks] for ks, m in zip(plan.slots, masters, strict=True)
        ]
        return new_masters, new_slots

    def _input_positions(self, plan: _traced.Plan) -> list[int]:
        """Of a group's masters, gradients and slots among the update's inputs."""
        slots = [2 * self._num + k for ks in plan.slots for k in ks]
        return [*plan.params, *(self._num + i for i in plan.params), *slots]

    def _arguments(self, plan: _traced.Plan, values: dict[int, Any]) -> list[Any]:
        """What the plan's block takes: `values` by position, small state and scalars from here."""
        scalars, first = self._current_scalars(), self._traced.num_inputs
        chosen = []
        for position in plan.inputs:
            if position in values:
                chosen.append(values[position])
            elif position >= first:
                chosen.append(scalars[position - first])
            else:
                chosen.append(self._state[position - 2 * self._num])
        return chosen

    def _current_scalars(self) -> list[Any]:
        if self._scalars is None:
            arguments = [self._state[k] for k in self._traced.globals]
            self._scalars = _on_cpu(self._programs.of(self._traced.scalars), arguments)
        return self._scalars

    def _update_whole(self, plan: _traced.Plan, arrays: list[np.ndarray]) -> dict[int, np.ndarray]:
        avals = {2 * self._num + k: self._traced.state_avals[k] for ks in plan.slots for k in ks}
        values = {}
        for position, array in zip(self._input_positions(plan), arrays, strict=True):
            if position in avals:
                values[position] = array.reshape(avals[position].shape).astype(avals[position].dtype)
            else:
                values[position] = array.reshape(self._traced.leaves[position % self._num].shape)
        results = _on_cpu(self._programs.of(plan.update), self._arguments(plan, values))
        new = dict(zip(plan.outputs, results, strict=True))
        self._pending.update((k, new.pop(self._num + k)) for k in plan.small)
        return {position: np.array(value).astype(np.float32) for position, value in new.items()}

    def _update_range(self, plan: _traced.Plan, arrays: list[np.ndarray]) -> dict[int, np.ndarray]:
        flat = [np.ascontiguousarray(array).reshape(-1) for array in arrays]
        length, start = flat[0].size, 0
        results = [np.empty(length, np.float32) for _ in plan.outputs]
        while start < length:
            size = next((b for b in _BLOCKS if b <= length - start), _BLOCKS[-1])
            stop = min(start + size, length)
            parts = [_padded(array[start:stop], size) for array in flat]
            values = dict(zip(self._input_positions(plan), parts, strict=True))
            function = self._programs.of_vectors(plan, size)
            for result, value in zip(results, _on_cpu(function, self._arguments(plan, values)), strict=True):
                result[start:stop] = np.asarray(value)[: stop - start]
            start = stop
        return dict(zip(plan.outputs, results, strict=True))

    def end_step(self) -> None:
        """Commits the small state: to be called once per step, after every group was updated."""
        if self._traced.globals:
            arguments = [self._state[k] for k in self._traced.advance_inputs]
            values = _on_cpu(self._programs.of(self._traced.advance), arguments)
            self._pending.update(zip(self._traced.globals, values, strict=True))
        self._state.update(self._pending)
        self.drop_step()

    def drop_step(self) -> None:
        """Forgets what the groups computed for the small state since `end_step`: a skipped or repeated step."""
        self._pending = {}
        self._scalars = None

    def hyperparameters(self, count: int) -> dict[str, float]:
        """`learning_rate` where the state holds one (`optax.inject_hyperparams`)."""
        del count
        for k, value in self._state.items():
            if self._traced.state_names[k].endswith("hyperparams/learning_rate") and np.size(value) == 1:
                return {"learning_rate": float(np.asarray(value).reshape(()))}
        return {}

    # --- checkpoints -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, np.ndarray]:
        """The small state by its path in optax's state: numpy arrays, PRNG keys as their data."""
        return {self._traced.state_names[k]: np.array(_key_data(value)) for k, value in self._state.items()}

    def load_state_dict(self, values: dict[str, np.ndarray]) -> None:
        """The inverse of `state_dict`.

        Raises:
          ConfigError: names or shapes are not those of this optimizer.
        """
        names = {self._traced.state_names[k]: k for k in self._state}
        if set(names) != set(values):
            raise ConfigError(f"the stored optimizer state has {sorted(values)}, this optimizer has {sorted(names)}")
        loaded = {}
        for name, k in names.items():
            old, new = self._state[k], values[name]
            if np.shape(new) != np.shape(_key_data(old)):
                raise ConfigError(f"{name!r} has shape {np.shape(_key_data(old))}, stored is {np.shape(new)}")
            array = jnp.asarray(new, _key_data(old).dtype)
            loaded[k] = jax.random.wrap_key_data(array, impl=jax.random.key_impl(old)) if _is_key(old) else array
        self._state = loaded
        self.drop_step()


def _is_key(value: Any) -> bool:
    return jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def _key_data(value: Any) -> Any:
    return jax.random.key_data(value) if _is_key(value) else value


def _padded(part: np.ndarray, size: int) -> np.ndarray:
    if part.size == size:
        return part
    full = np.zeros(size, part.dtype)
    full[: part.size] = part
    return full
