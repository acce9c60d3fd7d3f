"""Cutting works on models that nobody here wrote: loss, auxiliary results and gradients equal `jax.grad`'s."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.graph.models import MODELS, Model
from zinf_jax.graph.cut import cut_function
from zinf_jax.graph.interpret import grad_units
from zinf_jax.graph.types import UnitGraph
from zinf_jax.leaves import Leaf, LeafKind, classify

# What the quick suite leaves to the slow one: other members of a family that it has.
_SLOW = {"linen_resnet", "stax_convnet", "hf_roberta", "hf_bart", "hf_clip", "hf_vit", "hf_llama", "linen_lstm",
         "hf_whisper", "haiku_layer_stack", "nnx_scan", "hf_t5", "equinox_mlp"}  # fmt: skip
_NAMES = [pytest.param(name, marks=pytest.mark.slow if name in _SLOW else ()) for name in MODELS]
# Programs of a few equal layers and what stands before and behind them.
_MAX_PROGRAMS = {"linen_resnet": 5}


@pytest.fixture(autouse=True)
def fast_compile() -> Iterator[None]:
    """Compile time is what these tests take; the numbers do not need optimised code."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def reference(model: Model, params: Any, leaves: tuple[Leaf, ...]) -> tuple[jax.Array, Any, dict[int, jax.Array]]:
    """(loss, aux, gradient by leaf) with `jax.grad`."""
    flat, tree = jax.tree.flatten(params)
    trained = [leaf.index for leaf in leaves if leaf.kind is LeafKind.TRAINABLE]

    def loss(values: list[Any], args: Any) -> Any:
        full = list(flat)
        for index, value in zip(trained, values, strict=True):
            full[index] = value
        out = model.loss_fn(jax.tree.unflatten(tree, full), *args)
        return out if model.has_aux else (out, None)

    (value, aux), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))([flat[k] for k in trained], model.args)
    return value, aux, dict(zip(trained, grads, strict=True))


def leaf_gradient(graph: UnitGraph, gradients: dict[Any, Any], leaf: Leaf) -> np.ndarray:
    """The gradient of a leaf from those of its pieces; a piece without one has none."""
    stacked = graph.leaves[leaf.index]
    parts = [np.asarray(gradients.get(piece, np.zeros(stacked.piece_shape))) for piece in stacked.pieces]
    return np.stack(parts).reshape(leaf.shape)


def numbers(tree: Any) -> list[np.ndarray]:
    leaves = jax.tree.leaves(tree)
    return [np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x) for x in leaves]


@pytest.mark.parametrize("name", _NAMES)
def test_gradients_of_units_are_those_of_jax_grad(name: str) -> None:
    model = MODELS[name]()
    params = model.params()
    leaves = classify(params)
    num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves if leaf.kind is LeafKind.TRAINABLE)

    graph = cut_function(model.loss_fn, params, leaves, model.args, max_unit_bytes=num_bytes // 4)
    out, gradients = grad_units(graph, params, model.args, jit=True)

    loss, aux, expected = reference(model, params, leaves)
    np.testing.assert_allclose(out[0] if model.has_aux else out, loss, rtol=2e-6)
    for ours, theirs in zip(numbers(out[1] if model.has_aux else None), numbers(aux), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    whole = np.sqrt(sum(float(jnp.sum(g**2)) for g in expected.values()))
    for index, gradient in expected.items():
        error = np.linalg.norm(leaf_gradient(graph, gradients, leaves[index]) - gradient)
        # Some gradients are zero but for rounding (a key's bias, a bias before a norm): those, against the whole.
        limit = model.rtol * np.linalg.norm(gradient) + 1e-6 * whole
        assert error <= limit, f"{leaves[index].name}: off by {error}, limit {limit}"

    assert len(graph.units) >= 4
    stacked = {leaf.name for leaf in graph.leaves if leaf.stack_ndim}
    assert stacked == {leaf.name for leaf in leaves if model.stack_ndim(leaf.name)}
    assert len(graph.programs) <= model.max_programs, [(unit.name, unit.program) for unit in graph.units]
