"""Scans over stacked layers, and other uses of stacked leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from tests.graph.reference import check, check_evaluation, normal, unit_bytes
from zinf_jax.graph import cut_function
from zinf_jax.leaves import classify

L, D = 5, 8
SLICE = 4 * (D * D + D)


def params(length: int = L) -> dict[str, jax.Array]:
    return {"w": normal(0, length, D, D, scale=0.3), "b": normal(1, length, D), "head": normal(2, D, D)}


def batch() -> jax.Array:
    return normal(7, 4, D)


def body(x, layer):
    return x + jnp.tanh(x @ layer["w"] + layer["b"]), None


def stack_loss(p, x, **kwargs):
    x, _ = jax.lax.scan(body, x, {"w": p["w"], "b": p["b"]}, **kwargs)
    return ((x @ p["head"]) ** 2).mean()


def depths(graph) -> dict[str, int]:
    return {leaf.name: leaf.stack_ndim for leaf in graph.leaves}


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("remat", [False, True])
def test_each_slice_is_a_unit_and_they_share_a_program(reverse, remat) -> None:
    layer = jax.checkpoint(body) if remat else body

    def loss(p, x):
        x, _ = jax.lax.scan(layer, x, {"w": p["w"], "b": p["b"]}, reverse=reverse)
        return ((x @ p["head"]) ** 2).mean()

    graph = check(loss, params(), (batch(),), SLICE)
    assert depths(graph) == {"w": 1, "b": 1, "head": 0}
    assert max(unit_bytes(graph)) == SLICE and len(graph.units) == L + 1
    assert len({unit.program for unit in graph.units[1:L]}) == 1
    order = [unit.pieces[0].index for unit in graph.units[:L]]
    assert order == (list(range(L))[::-1] if reverse else list(range(L)))
    assert graph.units[2].name in ("w..b[2]", "b..w[2]")


def test_how_a_leaf_is_stacked_does_not_depend_on_the_limit() -> None:
    for limit in (10, SLICE, 2 * SLICE, 10**9):
        graph = check(stack_loss, params(), (batch(),), limit)
        assert depths(graph) == {"w": 1, "b": 1, "head": 0}


def test_small_slices_are_taken_several_at_a_time() -> None:
    graph = check(stack_loss, params(8), (batch(),), 64 * SLICE)
    assert len(graph.units) < 4


def test_a_scan_of_one_layer() -> None:
    assert depths(check(stack_loss, params(1), (batch(),), SLICE))["w"] == 1


def test_a_scan_of_no_layers() -> None:
    check(stack_loss, params(0), (batch(),), SLICE)


def test_collected_values_per_layer_rngs_and_mixed_carries() -> None:
    def loss(p, x, rng):
        def layer(carry, xs):
            x, count, seen = carry
            w, b, key, scale = xs
            x = x + jax.random.bernoulli(key, 0.8, x.shape) * jnp.tanh(x @ w + b) * scale.mean()
            return (x, count + 1, seen | (x > 1)), (x.mean(), count, jnp.argmax(x))

        start = (x, 0, jnp.zeros(x.shape, bool))
        xs = (p["w"], p["b"], jax.random.split(rng, L), x[None] * jnp.arange(L)[:, None, None])
        (x, count, seen), (means, counts, best) = jax.lax.scan(layer, start, xs)
        return ((x @ p["head"]) ** 2).mean() + means.sum(), {"n": count, "seen": seen, "counts": counts, "best": best}

    graph = check(loss, params(), (batch(), jax.random.key(3)), SLICE)
    assert len({unit.program for unit in graph.units[1:L]}) == 1


def test_activations_are_sliced_and_their_cotangents_collected() -> None:
    def loss(p, x):
        xs = jnp.tanh(x[:, None] @ p["head"]).transpose(1, 0, 2).repeat(L, 0)

        def layer(x, xs):
            w, b, extra = xs
            return x + jnp.tanh(x @ w + b + extra), x

        x, ys = jax.lax.scan(layer, x, (p["w"], p["b"], xs))
        again, _ = jax.lax.scan(lambda x, xs: (x + xs[0] @ xs[1], None), x, (ys, p["w"]))
        return (again**2).mean()

    graph = check(loss, params(), (batch(),), SLICE)
    assert len({unit.program for unit in graph.units}) < len(graph.units)


def test_slices_through_casts_moves_and_normalisations() -> None:
    def loss(p, x):
        w = p["w"].astype(jnp.bfloat16).astype(jnp.float32)
        w = w / jnp.sqrt((w**2).sum(axis=(1, 2), keepdims=True) + 1e-6)
        w = jnp.moveaxis(jnp.moveaxis(w, 0, 1), 1, 0)
        w = jnp.swapaxes(w, 1, 2)
        b = jnp.flip(p["b"].reshape(L, 2, D // 2).reshape(L, D), 0)[:, ::-1]
        both = jnp.concatenate([w, b[:, None]], axis=1)

        def layer(x, wb):
            return x + jnp.tanh(x @ wb[:D] + wb[D]), None

        return ((jax.lax.scan(layer, x, both)[0] @ p["head"]) ** 2).mean()

    graph = check(loss, params(), (batch(),), SLICE, tolerance=1e-2)
    assert depths(graph) == {"w": 1, "b": 1, "head": 0}
    assert max(unit_bytes(graph)) <= SLICE


def test_low_rank_updates_merged_up_front() -> None:
    p = {**params(), "a": jnp.ones((L, D, 2)) / 4, "c": jnp.ones((L, 2, D)) / 4}

    def loss(p, x):
        merged = p["w"] + jnp.einsum("lir,lro->lio", p["a"], p["c"])
        x, _ = jax.lax.scan(body, x, {"w": merged, "b": p["b"]})
        return (x**2).mean()

    graph = check(loss, p, (batch(),), 2 * SLICE)
    assert depths(graph)["a"] == depths(graph)["c"] == depths(graph)["w"] == 1


@pytest.mark.parametrize("grouped", [False, True])
def test_nested_scans(grouped) -> None:
    shape = (6, D, D) if grouped else (2, 3, D, D)
    p = {"w": normal(0, *shape, scale=0.3), "v": jnp.ones((2, D))}

    def loss(p, x):
        w = p["w"].reshape(2, 3, D, D)

        def outer(x, wv):
            ws, v = wv
            x, _ = jax.lax.scan(jax.checkpoint(lambda x, w: (x + jnp.tanh(x @ w), None)), x * v, ws)
            return x, None

        return (jax.lax.scan(jax.checkpoint(outer), x, (w, p["v"]))[0] ** 2).mean()

    graph = check(loss, p, (batch(),), 4 * (D * D + D))
    assert depths(graph) == {"w": 1 if grouped else 2, "v": 1}
    assert len(graph.units) <= 8 and len(graph.programs) <= 4 and max(unit_bytes(graph)) <= 4 * (D * D + D)


def test_a_scan_over_time_stays_one_equation() -> None:
    def loss(p, x):
        def cell(h, x):
            h = jnp.tanh(x @ p["head"] + h @ p["w"][0])
            return h, h

        _, hs = jax.lax.scan(cell, x, jnp.stack([x] * 6))
        return (hs**2).mean()

    graph = check(loss, params(1), (batch(),), 10**6)
    assert len(graph.units) == 1
    assert depths(graph)["head"] == 0


def test_a_loop_counter_becomes_an_operand() -> None:
    def loss(p, x):
        def layer(carry, layer):
            i, x = carry
            x = jax.lax.cond(i % 2 == 0, jnp.sin, jnp.cos, x) + i.astype(jnp.float32)
            return (i + 1, jnp.tanh(x @ layer["w"])), i * 2

        (_, x), twice = jax.lax.scan(layer, (jnp.int32(0), x), {"w": p["w"]})
        return (x**2).mean(), twice

    graph = check(loss, params(), (batch(),), 4 * D * D)
    assert len({unit.program for unit in graph.units[1:-1]}) == 1


@pytest.mark.parametrize("scanned", [False, True])
def test_loops_that_index_a_stacked_leaf_by_their_counter(scanned) -> None:
    def loss(p, x):
        def layer(i, x):
            w = jax.tree.map(lambda leaf: leaf[i], {"w": p["w"], "b": p["b"]})
            return x + jnp.tanh(x @ w["w"] + w["b"]) * jax.lax.dynamic_index_in_dim(p["b"], i, keepdims=False)

        if scanned:
            x, _ = jax.lax.scan(lambda x, i: (layer(i, x), None), x, jnp.arange(L))
        else:
            x = jax.lax.fori_loop(0, L, layer, x)
        return ((x @ p["head"]) ** 2).mean()

    graph = check(loss, params(), (batch(),), SLICE)
    assert depths(graph) == {"w": 1, "b": 1, "head": 0}
    assert max(unit_bytes(graph)) <= SLICE and len({unit.program for unit in graph.units[1:L]}) == 1


def test_a_loop_that_indexes_by_the_batch_reads_the_whole_leaf() -> None:
    def loss(p, x, start):
        def layer(i, x):
            return x + jnp.tanh(x @ p["w"][(i + start) % L])

        return (jax.lax.fori_loop(0, L, layer, x) ** 2).mean()

    graph = check(loss, params(), (batch(), jnp.int32(2)), SLICE)
    assert depths(graph)["w"] == 0
    assert any("max_unit_bytes" in warning for warning in graph.warnings)


def test_python_loops_over_a_stacked_leaf_are_sliced() -> None:
    def loss(p, x):
        b = jnp.split(p["b"], L)
        for i in range(L):
            x = x + jnp.tanh(x @ p["w"].astype(jnp.bfloat16).astype(jnp.float32)[i] + b[i][0])
        return ((x @ p["head"]) ** 2).mean()

    graph = check(loss, params(), (batch(),), SLICE, tolerance=1e-2)
    assert depths(graph) == {"w": 1, "b": 1, "head": 0}
    assert max(unit_bytes(graph)) <= SLICE


@pytest.mark.parametrize(
    "term",
    [
        lambda p: sum(jnp.sum(w**2) for w in p.values()),
        lambda p: jnp.vdot(p["w"], p["w"]),
        lambda p: sum(jnp.linalg.norm(w) for w in jax.tree.leaves(p)),
        lambda p: jnp.sqrt((p["w"] ** 2).sum(axis=(1, 2))).sum() + p["b"].mean(0).max() + jnp.abs(p["w"]).max(),
        lambda p: jnp.sum(ravel_pytree(p)[0] ** 2),
        lambda p: jnp.mean(jnp.square(p["w"].reshape(-1))) + jnp.sum(p["w"].T.astype(jnp.bfloat16).astype(jnp.float32)),
    ],
    ids=["l2", "vdot", "norm", "per-layer", "raveled", "reshaped"],
)
@pytest.mark.parametrize("first", [True, False])
def test_terms_over_stacked_leaves_are_tiled_by_slice(term, first) -> None:
    def loss(p, x):
        penalty = term(p) if first else 0.0
        main = stack_loss(p, x)
        return main + 0.1 * (penalty if first else term(p))

    graph = check(loss, params(), (batch(),), SLICE, tolerance=1e-5)
    assert depths(graph) == {"w": 1, "b": 1, "head": 0}
    assert max(unit_bytes(graph)) <= SLICE and not graph.warnings
    assert sum(len(unit.pieces) for unit in graph.units if len(unit.pieces) == 2) >= 2 * (L - 1)


def test_a_use_that_cannot_be_tiled_is_named_with_its_bytes() -> None:
    def loss(p, x):
        return stack_loss(p, x) + (jnp.cumsum(p["w"], axis=0) ** 2).mean()

    graph = check(loss, params(), (batch(),), SLICE)
    assert any("w (1.25 KiB)" in warning and "cumsum" in warning for warning in graph.warnings)
    assert depths(graph)["w"] == 1


def test_a_leaf_stacked_along_another_dim_is_named() -> None:
    p = {"w": normal(0, 64, L, 64), "b": jnp.ones((L, 64))}

    def loss(p, x):
        def layer(x, wb):
            return jnp.tanh(x @ wb[0] + wb[1]), None

        return (jax.lax.scan(layer, x, (jnp.moveaxis(p["w"], 1, 0), p["b"]))[0] ** 2).mean()

    graph = check(loss, p, (jnp.ones((2, 64)),), 10**6)
    assert depths(graph) == {"w": 0, "b": 1}
    assert any("80.00 KiB" in warning for warning in graph.warnings)


def test_slices_of_a_stack_as_results() -> None:
    def loss(p, x):
        w = p["w"].astype(jnp.bfloat16).astype(jnp.float32)
        return stack_loss(p, x) + w.sum(), (p["w"][0], w[2], p["b"], p["w"][1:3])

    check(loss, params(), (batch(),), SLICE)


def test_elements_that_were_dead_in_the_scan_and_are_used_later() -> None:
    def loss(p, x):
        w = p["w"].astype(jnp.bfloat16).astype(jnp.float32)
        _, ys = jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), c), x, w)  # nobody reads what the last one makes
        return (ys**2).mean() + w.sum(), w

    check(loss, params(), (batch(),), SLICE, tolerance=1e-2)


def test_evaluation_with_the_stacks_of_training() -> None:
    graph = check(stack_loss, params(), (batch(),), SLICE)
    stacks = {leaf.index: leaf.stack_ndim for leaf in graph.leaves}

    def first_layer(p, x):
        return x @ p["w"][0] + p["w"].sum(0)[0]

    def mean_weight(p, x):
        return jnp.sort(p["w"], axis=0)[0] + jax.lax.scan(lambda c, h: (c + h, None), x[0], p["head"])[0]

    for fn in (stack_loss, first_layer, mean_weight):
        evaluated = check_evaluation(fn, params(), (batch(),), SLICE, stacks=stacks)
        assert depths(evaluated) == depths(graph)


def test_a_long_scan_over_thin_slices_stays_whole() -> None:
    p = {"table": jnp.ones((600, 2))}

    def loss(p, x):
        return jax.lax.scan(lambda c, row: (c + (row * x[0, 0]).sum(), None), 0.0, p["table"])[0]

    graph = check(loss, p, (batch(),), 10**6)
    assert depths(graph) == {"table": 0} and len(graph.units) == 1


def test_frozen_stacks_and_integer_slices() -> None:
    p = {**params(), "table": jnp.arange(L * 4).reshape(L, 4)}

    def loss(p, x):
        def layer(x, xs):
            w, b, ids = xs
            return x + jnp.tanh(x @ w + b) * (ids.sum() / 30.0), None

        return (jax.lax.scan(layer, x, (p["w"], p["b"], p["table"]))[0] ** 2).mean()

    trainable = {"w": False, "b": True, "head": True, "table": False}
    graph = check(loss, p, (batch(),), 2 * SLICE, trainable=trainable)
    assert depths(graph)["table"] == 1
    assert all(graph.leaves[piece.leaf].name == "b" for piece in graph.trained_pieces)


def test_cutting_a_deep_stack_is_quick() -> None:
    p = jax.eval_shape(lambda: params(80))
    graph = cut_function(stack_loss, p, classify(p), (batch(),), max_unit_bytes=SLICE)
    assert len(graph.units) == 81 and len(graph.programs) == 3
    assert np.prod([leaf.num_pieces for leaf in graph.leaves]) == 80 * 80
