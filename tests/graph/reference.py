"""What a cut is compared with: `jax.value_and_grad` of the whole function, and what must hold of every graph."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zinf_jax.graph import UnitGraph, cut_function
from zinf_jax.graph.interpret import evaluate_units, grad_units, gradient_tree
from zinf_jax.leaves import LeafKind, classify


def normal(seed: int, *shape: int, scale: float = 1.0) -> jax.Array:
    """Random floats, without the seconds that jax.random takes to compile."""
    return jnp.asarray(scale * np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def check(
    fn: Any,
    params: Any,
    args: tuple[Any, ...],
    max_unit_bytes: int,
    *,
    tolerance: float = 2e-6,
    trainable: Any = None,
    exact: bool = False,
) -> UnitGraph:
    """Cuts `fn`, runs the units and compares outputs and gradients with JAX on the whole function."""
    leaves = classify(params, trainable=trainable)
    graph = cut_function(fn, params, leaves, args, max_unit_bytes=max_unit_bytes)
    check_invariants(graph, max_unit_bytes)
    output, gradients = grad_units(graph, params, args)
    expected, expected_gradients = whole(fn, params, args, leaves)
    close(output, expected, tolerance, exact)
    actual = jax.tree.structure(params).flatten_up_to(gradient_tree(graph, params, gradients))
    compare_gradients(graph, actual, expected_gradients, tolerance, exact)
    return graph


def whole(fn: Any, params: Any, args: tuple[Any, ...], leaves: Any) -> tuple[Any, list[Any]]:
    """The function's output, and the gradient of its first leaf for each trainable leaf (None for others)."""
    flat, treedef = jax.tree.flatten(params)
    trainable = [leaf.index for leaf in leaves if leaf.kind is LeafKind.TRAINABLE]

    def loss(chosen: list[Any]) -> Any:
        full = list(flat)
        for index, value in zip(trainable, chosen, strict=True):
            full[index] = value
        output = fn(jax.tree.unflatten(treedef, full), *args)
        return jax.tree.leaves(output)[0], output

    gradients, output = jax.grad(loss, has_aux=True)([flat[index] for index in trainable])
    full: list[Any] = [None] * len(flat)
    for index, value in zip(trainable, gradients, strict=True):
        full[index] = value
    return output, full


def compare_gradients(graph: UnitGraph, actual: list[Any], expected: list[Any], tolerance: float, exact: bool) -> None:
    largest = max((float(jnp.abs(g).max()) for g in expected if g is not None and g.size), default=0.0)
    for leaf, got, want in zip(graph.leaves, actual, expected, strict=True):
        if want is None:
            assert got is None
            continue
        assert got.shape == want.shape and got.dtype == want.dtype, leaf.name
        if exact:
            np.testing.assert_array_equal(got, want, err_msg=leaf.name)
        else:
            bound = tolerance * max(1.0, largest)
            np.testing.assert_allclose(
                np.asarray(got, np.float64), np.asarray(want, np.float64), rtol=tolerance, atol=bound, err_msg=leaf.name
            )


def close(actual: Any, expected: Any, tolerance: float, exact: bool = False) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for got, want in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert jnp.shape(got) == jnp.shape(want) and jnp.result_type(got) == jnp.result_type(want)
        if jax.dtypes.issubdtype(jnp.result_type(want), jax.dtypes.prng_key):
            got, want = jax.random.key_data(got), jax.random.key_data(want)
        if exact:
            np.testing.assert_array_equal(got, want)
        else:
            np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=10 * tolerance, atol=tolerance)


def check_evaluation(fn: Any, params: Any, args: tuple[Any, ...], max_unit_bytes: int, **kwargs: Any) -> UnitGraph:
    """Cuts without differentiation, runs the units and compares the output."""
    graph = cut_function(
        fn, params, classify(params), args, max_unit_bytes=max_unit_bytes, differentiate=False, **kwargs
    )
    check_invariants(graph, max_unit_bytes)
    assert not graph.backward and not graph.trained_pieces
    close(evaluate_units(graph, params, args), fn(params, *args), 2e-6)
    return graph


def unit_bytes(graph: UnitGraph) -> list[int]:
    """Parameter bytes that each unit reads."""
    leaves = graph.leaves
    return [sum(leaves[p.leaf].piece_size * leaves[p.leaf].dtype.itemsize for p in unit.pieces) for unit in graph.units]


def check_invariants(graph: UnitGraph, max_unit_bytes: int) -> None:
    """What holds for every graph."""
    known = set(graph.outer_inputs)
    receiving = {graph.loss}
    for unit in graph.units:
        program = graph.programs[unit.program]
        assert set(unit.inputs) <= known, "a value is read before it is made"
        assert not set(unit.outputs) & known, "a value is made twice"
        known |= set(unit.outputs)
        assert len(set(unit.pieces)) == len(unit.pieces) and len(set(unit.inputs)) == len(unit.inputs)
        for piece, aval in zip(unit.pieces, program.piece_avals, strict=True):
            leaf = graph.leaves[piece.leaf]
            assert aval.shape == leaf.piece_shape and aval.dtype == leaf.dtype and 0 <= piece.index < leaf.num_pieces
        for value, aval in zip(
            (*unit.inputs, *unit.outputs), (*program.input_avals, *program.output_avals), strict=True
        ):
            assert graph.values[value].shape == aval.shape and graph.values[value].dtype == aval.dtype
        for operand, aval in zip(unit.operands, program.operand_avals, strict=True):
            assert jnp.shape(graph.operands[operand]) == aval.shape
    assert set(graph.results) <= known
    for unit in reversed(graph.units):
        program = graph.programs[unit.program]
        assert tuple(v in receiving for v in unit.outputs) == program.diff_outputs or not program.differentiable
        assert program.differentiable == (unit.index in graph.backward)
        assert program.differentiable == any((*program.diff_pieces, *program.diff_inputs))
        assert not (program.differentiable and not any(program.diff_outputs))
        receiving |= {v for v, diff in zip(unit.inputs, program.diff_inputs, strict=True) if diff}
    assert not receiving & set(graph.outer_inputs) - {graph.loss}, "a batch value receives a cotangent"
    assert list(graph.backward) == sorted(graph.backward, reverse=True)
    too_large = sum(num_bytes > max_unit_bytes for num_bytes in unit_bytes(graph))
    assert too_large == sum("max_unit_bytes" in warning for warning in graph.warnings)
    assert {unit.program for unit in graph.units} == set(range(len(graph.programs)))
