"""An optax transformation traced for one parameter tree: what can be streamed, and the blocks that compute it. Pure."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax

from zinf_jax.errors import ConfigError
from zinf_jax.graph import _jaxpr
from zinf_jax.graph._jaxpr import Block
from zinf_jax.leaves import Leaf, path_name
from zinf_jax.optim import _analysis

_SLOT_DTYPES = ("float32", "bfloat16", "float16")  # all exact in f32


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one group of leaves is computed. Parameters and state leaves go by position.

    Attributes:
      params: Among the trained leaves.
      slots: Of each of them: its slots, among the flattened state.
      small: The group's other state.
      update: Block from some of (params, gradients, state, scalars) to some of (new params, new state).
      inputs: Which it takes, as positions in that list.
      outputs: Which it gives.
      elementwise: One leaf, and any range of it can be computed on its own.
    """

    params: tuple[int, ...]
    slots: tuple[tuple[int, ...], ...]
    small: tuple[int, ...]
    update: Block = dataclasses.field(repr=False)
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    elementwise: bool


@dataclasses.dataclass(frozen=True)
class TracedOptimizer:
    """See the module.

    Attributes:
      leaves: The trained leaves.
      state_avals, state_names: Of the flattened optax state.
      slot_names: Of each state leaf, without the path of the parameter that it belongs to.
      globals: Positions of state that depends on no parameter and no gradient.
      plans: One per group.
      scalars: Block from the globals to the scalars of a step.
      advance: Block from the globals at `advance_inputs` to their next values.
      init: Block from params to the state.
      init_depends: Which params each state leaf starts from.
    """

    leaves: tuple[Leaf, ...]
    state_avals: tuple[Any, ...]
    state_names: tuple[str, ...]
    slot_names: dict[int, str]
    globals: tuple[int, ...]
    plans: tuple[Plan, ...]
    scalars: Block = dataclasses.field(repr=False)
    advance: Block = dataclasses.field(repr=False)
    advance_inputs: tuple[int, ...]
    init: Block = dataclasses.field(repr=False)
    init_depends: tuple[frozenset[int], ...]

    @property
    def num_inputs(self) -> int:
        """Of the traced update: params, gradients, state. The scalars follow."""
        return 2 * len(self.leaves) + len(self.state_avals)


def trace(tx: optax.GradientTransformation, leaves: Sequence[Leaf], params: Any) -> TracedOptimizer:
    """Traces `tx` on the trained leaves.

    Args:
      tx: Any optax transformation whose update takes gradients, state and params.
      leaves: The trained leaves.
      params: Tree of their f32 `ShapeDtypeStruct`s, as optax sees it.

    Raises:
      ConfigError: the update needs other arguments, or changes the structure or a shape of its state.
    """
    state, block = _trace_update(tx, params)
    flat = jax.tree_util.tree_flatten_with_path(state)[0]
    paths, avals = [path for path, _ in flat], tuple(aval for _, aval in flat)
    param_paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]
    shapes = [tuple(aval.shape) for aval in avals]
    if [var.aval.shape for var in block.outvars] != [leaf.shape for leaf in leaves] + shapes:
        raise ConfigError("the optimizer's update changes the shape of a parameter or of its state")
    num = len(leaves)
    depends = _analysis.dependencies(block)
    structure = _analysis.structure_of(depends, [leaf.shape for leaf in leaves], shapes)
    early = _analysis.hoist_scalars(block, [2 * num + k for k in structure.globals])
    advance, advance_inputs = _analysis.select(block, [num + k for k in structure.globals])
    init = _analysis.inline(_jaxpr.trace(tx.init, params).block)

    plans, slot_names = [], {}
    for members, states in structure.groups:
        slots: list[list[int]] = [[] for _ in members]
        small: list[int] = []
        for k in states:
            owner = _owner(avals[k], paths[k], members, leaves, param_paths)
            if owner is None:
                small.append(k)
            else:
                slots[members.index(owner)].append(k)
                slot_names[k] = path_name(paths[k][: len(paths[k]) - len(param_paths[owner])]) or f"slot_{k}"
        outputs = sorted([*members, *(num + k for k in states)])
        update, inputs = _analysis.select(early.rest, outputs)
        alone = len(members) == 1 and not small
        elementwise = alone and _analysis.is_elementwise(update, leaves[members[0]].shape)
        plans.append(Plan(members, tuple(map(tuple, slots)), tuple(small), update, inputs, tuple(outputs), elementwise))
    return TracedOptimizer(
        leaves=tuple(leaves),
        state_avals=avals,
        state_names=tuple(map(path_name, paths)),
        slot_names=slot_names,
        globals=structure.globals,
        plans=tuple(plans),
        scalars=early.scalars,
        advance=advance,
        advance_inputs=tuple(i - 2 * num for i in advance_inputs),
        init=init,
        init_depends=tuple(_analysis.dependencies(init)),
    )


def _trace_update(tx: optax.GradientTransformation, params: Any) -> tuple[Any, Block]:
    """The state's avals, and the block of update and apply_updates."""

    def update(params: Any, gradients: Any, state: Any) -> Any:
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.eval_shape(tx.init, params)
    try:
        traced = _jaxpr.trace(update, params, params, state)
    except TypeError as error:
        raise ConfigError(f"the optimizer's update needs more than gradients, state and params: {error}") from error
    if traced.out_tree != jax.tree.structure((params, state)):
        raise ConfigError("the optimizer's update changes the structure of its state; it cannot be streamed")
    return state, _analysis.inline(traced.block)


def _owner(
    aval: Any, path: Sequence[Any], members: tuple[int, ...], leaves: Sequence[Leaf], param_paths: Sequence[Any]
) -> int | None:
    """The parameter in whose pages a state leaf can rest: by its shape, and by its path where there are several."""
    if np.dtype(aval.dtype).name not in _SLOT_DTYPES:
        return None
    alike = [i for i in members if leaves[i].shape == tuple(aval.shape)]
    if len(members) > 1:
        alike = [i for i in alike if tuple(path[len(path) - len(param_paths[i]) :]) == tuple(param_paths[i])]
    return alike[0] if len(alike) == 1 else None
