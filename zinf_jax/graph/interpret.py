"""Runs a `UnitGraph` in memory, unit by unit: the slow, obviously right executor that tests compare with."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zinf_jax.graph.types import Program, Unit, UnitGraph
from zinf_jax.leaves import LeafKind, Piece

Run = Callable[..., Any]


def piece_values(graph: UnitGraph, params: Any) -> dict[Piece, Any]:
    """Every piece of a parameter tree, as programs take it: in the leaf's dtype, key data for keys."""
    pieces: dict[Piece, Any] = {}
    for leaf, value in zip(graph.leaves, jax.tree.leaves(params), strict=True):
        if leaf.kind is LeafKind.STATIC:
            continue
        data = jax.random.key_data(value) if leaf.key_impl else jnp.asarray(value, leaf.dtype)
        slices = data.reshape((leaf.num_pieces, *leaf.piece_shape))
        pieces.update((piece, slices[piece.index]) for piece in leaf.pieces)
    return pieces


def evaluate_units(graph: UnitGraph, params: Any, args: Sequence[Any], *, jit: bool = False) -> Any:
    """What the function returns, computed unit by unit."""
    run = _runner(jit)
    values = _forward(graph, piece_values(graph, params), args, run)
    return jax.tree.unflatten(graph.out_tree, [values[i] for i in graph.results])


def grad_units(
    graph: UnitGraph, params: Any, args: Sequence[Any], *, jit: bool = False
) -> tuple[Any, dict[Piece, Any]]:
    """What the function returns, and the gradient of the loss for each piece that has one."""
    run = _runner(jit)
    pieces = piece_values(graph, params)
    values = _forward(graph, pieces, args, run)
    cotangents: dict[int, Any] = {graph.loss: jnp.ones_like(values[graph.loss])}
    gradients: dict[Piece, Any] = {}
    for index in graph.backward:
        unit = graph.units[index]
        program = graph.programs[unit.program]
        received = [cotangents[v] for v, diff in zip(unit.outputs, program.diff_outputs, strict=True) if diff]
        by_piece, by_input = run(program.backward)(
            *_arguments(graph, unit, pieces, values), [values[v] for v in unit.saved], received
        )
        _add(gradients, _chosen(unit.pieces, program.diff_pieces), by_piece)
        _add(cotangents, _chosen(unit.inputs, program.diff_inputs), by_input)
    return jax.tree.unflatten(graph.out_tree, [values[i] for i in graph.results]), gradients


def gradient_tree(graph: UnitGraph, params: Any, gradients: dict[Piece, Any]) -> Any:
    """Gradients of pieces as a tree like `params`: zeros where a trainable piece has none, None for other leaves."""
    flat, treedef = jax.tree.flatten(params)
    full: list[Any] = []
    for leaf, _ in zip(graph.leaves, flat, strict=True):
        if leaf.kind is not LeafKind.TRAINABLE:
            full.append(None)
            continue
        parts = [gradients.get(piece, jnp.zeros(leaf.piece_shape, leaf.dtype)) for piece in leaf.pieces]
        full.append(jnp.stack(parts).reshape(leaf.shape) if parts else jnp.zeros(leaf.shape, leaf.dtype))
    return jax.tree.unflatten(treedef, full)


def _runner(jit: bool) -> Callable[[Any], Run]:
    """Compiles each program once, or traces it as it goes."""
    compiled: dict[Any, Run] = {}

    def run(fn: Any) -> Run:
        if not jit:
            return fn
        if fn not in compiled:
            compiled[fn] = jax.jit(fn)
        return compiled[fn]

    return run


def _forward(
    graph: UnitGraph, pieces: dict[Piece, Any], args: Sequence[Any], run: Callable[[Any], Run]
) -> dict[int, Any]:
    values = dict(zip(graph.outer_inputs, jax.tree.leaves(list(args)), strict=True))
    for unit in graph.units:
        program: Program = graph.programs[unit.program]
        outputs = run(program.forward)(*_arguments(graph, unit, pieces, values))
        values.update(zip(unit.outputs, outputs, strict=True))
    return values


def _arguments(
    graph: UnitGraph, unit: Unit, pieces: dict[Piece, Any], values: dict[int, Any]
) -> tuple[list[Any], list[Any], list[Any]]:
    return (
        [pieces[piece] for piece in unit.pieces],
        [values[value] for value in unit.inputs],
        [graph.operands[operand] for operand in unit.operands],
    )


def _chosen(keys: Sequence[Any], mask: Sequence[bool]) -> list[Any]:
    return [key for key, chosen in zip(keys, mask, strict=True) if chosen]


def _add(sums: dict[Any, Any], keys: Sequence[Any], values: Sequence[Any]) -> None:
    """Two uses of one value within a unit are summed by the unit itself; across units, here."""
    for key, value in zip(keys, values, strict=True):
        sums[key] = value if key not in sums else sums[key] + value
