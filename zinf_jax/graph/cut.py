"""Cuts a function of parameters into a linear sequence of units."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from zinf_jax.errors import CutError
from zinf_jax.graph import _jaxpr
from zinf_jax.graph._build import Builder
from zinf_jax.graph._equal import Keys
from zinf_jax.graph._linear import Linear, linearize
from zinf_jax.graph._place import Step, live_bytes, place
from zinf_jax.graph._segment import Steps, choose_cuts
from zinf_jax.graph.types import UnitGraph
from zinf_jax.leaves import Leaf
from zinf_jax.units import format_bytes

# Repeated blocks smaller than this share of the limit are taken several at a time.
_MIN_SHARE = 16
_MIN_BYTES = 1 << 20
_OPAQUE = frozenset({"shard_map", "custom_partitioning", "xla_pmap", "pallas_call"})


def cut_function(
    fn: Callable[..., Any],
    params: Any,
    leaves: Sequence[Leaf],
    args: Sequence[Any],
    *,
    max_unit_bytes: int,
    differentiate: bool = True,
    stacks: Mapping[int, int] | None = None,
) -> UnitGraph:
    """Cuts `fn(params, *args)` into units.

    Units run one after the other and compute what `fn` does; a unit's backward gives the gradients of the loss with
    respect to its trainable pieces. Units are about one repeated block of the model each, and equal blocks share a
    program.

    Args:
      fn: (params, *args) -> pytree of arrays. With `differentiate`, its first leaf is the loss: a floating scalar.
      params: Pytree of arrays or abstract values; only shapes are used, but static leaves hold their value.
      leaves: `classify(params)`: one per leaf, in flattening order.
      args: Pytrees of abstract values (one micro-batch, rng, state). Never differentiated.
      max_unit_bytes: Parameter bytes that a unit reads. A single equation that reads more is a unit of its own.
      stacks: `stack_ndim` by leaf index where pages exist already (those of a training cut, for evaluation): leaves
        not in it are not stacked. None: whatever the function allows.
      differentiate: False for evaluation: no unit has a backward.

    Raises:
      CutError: the loss is not a floating scalar; an equation cannot be cut (a custom_vjp around the whole model) or
        has side effects.
      ValueError: `max_unit_bytes` is not positive.
    """
    if max_unit_bytes <= 0:
        raise ValueError(f"max_unit_bytes must be positive, got {max_unit_bytes}")
    linear = linearize(fn, params, leaves, args, keep_custom=differentiate, stacks=stacks)
    if differentiate:
        _check_loss(linear)
    keys = Keys(differentiate=differentiate)
    steps = place(linear, keys)
    _refuse_opaque(linear, steps, max_unit_bytes)
    groups, warnings = _group(linear, steps, max_unit_bytes)
    builder = Builder(linear, keys, linear.results[0] if differentiate else None)
    units = builder.build(groups)
    programs = tuple(builder.programs)
    trained = {
        piece
        for unit in units
        for piece, diff in zip(unit.pieces, programs[unit.program].diff_pieces, strict=True)
        if diff
    }
    results = tuple(builder.value_id(var) for var in linear.results)
    return UnitGraph(
        leaves=linear.leaves,
        units=tuple(units),
        programs=programs,
        values=tuple(builder.values),
        outer_inputs=tuple(builder.value_id(var) for var in linear.outer),
        operands=tuple(builder.operands),
        results=results,
        out_tree=linear.out_tree,
        trained_pieces=frozenset(trained),
        backward=tuple(unit.index for unit in reversed(units) if programs[unit.program].differentiable),
        warnings=(*linear.warnings, *warnings),
    )


def _check_loss(linear: Linear) -> None:
    if not linear.results:
        raise CutError("the loss function returns nothing; it must return a scalar loss, or (loss, aux)")
    loss = linear.results[0]
    if loss.aval.shape != () or not _jaxpr.is_floating(loss) or np.issubdtype(loss.aval.dtype, np.complexfloating):
        kind = f"{loss.aval.dtype}{list(loss.aval.shape)}"
        raise CutError(f"the loss must be a real floating scalar, got {kind}; reduce it, for example with .mean()")


def _refuse_opaque(linear: Linear, steps: list[Step], max_unit_bytes: int) -> None:
    """Refuses an equation that holds most of the model and that nobody can look into."""
    sizes = {var: _jaxpr.bytes_of(var) for step in steps for var in step.pieces}
    total = sum(sizes.values())
    for step in steps:
        num_bytes = sum(sizes[var] for var in step.pieces)
        opaque = _jaxpr.is_custom(step.eqn) or step.eqn.primitive.name in _OPAQUE
        if opaque and num_bytes > max_unit_bytes and 2 * num_bytes > total and len(step.pieces) > 1:
            raise CutError(
                f"equation {_jaxpr.name_of(step.eqn)} holds {format_bytes(num_bytes)} of {format_bytes(total)} of the "
                f"parameters and cannot be cut, because its derivative or its placement is the user's own; the limit "
                f"is {format_bytes(max_unit_bytes)}: apply it to a part of the model, or raise max_unit_bytes"
            )


def _group(linear: Linear, steps: list[Step], max_unit_bytes: int) -> tuple[list[list[Step]], list[str]]:
    """Splits the steps into units; warns about units that read more than they should."""
    sizes = {var: _jaxpr.bytes_of(var) for var in linear.pieces}
    view = Steps(
        hashes=[step.shape for step in steps],
        reads=[[(var, sizes[var]) for var in step.pieces if sizes[var]] for step in steps],
        live=live_bytes(steps, linear.results),
    )
    min_bytes = min(_MIN_BYTES, math.ceil(max_unit_bytes / _MIN_SHARE))
    borders = [0, *choose_cuts(view, max_unit_bytes, min_bytes), len(steps)]
    groups, warnings = [], []
    for start, stop in itertools.pairwise(borders):
        if start == stop:
            continue
        groups.append(steps[start:stop])
        num_bytes = view.piece_bytes(start, stop)
        if num_bytes > max_unit_bytes:
            largest = max(steps[start:stop], key=lambda step: sum(sizes[var] for var in step.pieces))
            warnings.append(
                f"equation {_jaxpr.name_of(largest.eqn)} reads {format_bytes(num_bytes)} of parameters at once, "
                f"more than max_unit_bytes ({format_bytes(max_unit_bytes)})"
            )
    return groups, warnings
