"""What a graph looks like, and the parameter trees and outputs that real functions have."""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from tests.graph.reference import check, check_evaluation, close, normal, unit_bytes, whole
from zinf_jax.graph import cut_function
from zinf_jax.graph.interpret import evaluate_units, grad_units, gradient_tree
from zinf_jax.leaves import LeafKind, classify

D = 16


class Block(nn.Module):
    dropout: float = 0.1

    @nn.compact
    def __call__(self, x, rng_on):
        mask = nn.make_causal_mask(x[..., 0])
        y = nn.LayerNorm()(x)
        y = nn.MultiHeadDotProductAttention(2, deterministic=not rng_on, dropout_rate=self.dropout)(y, mask=mask)
        x = x + y
        y = nn.Dense(4 * D)(nn.LayerNorm()(x))
        return x + nn.Dense(D)(nn.gelu(y))


class Gpt(nn.Module):
    num_layers: int
    vocab: int = 64

    @nn.compact
    def __call__(self, tokens, rng_on=True):
        embed = nn.Embed(self.vocab, D)
        x = embed(tokens) + nn.Embed(32, D)(jnp.arange(tokens.shape[1]))
        for i in range(self.num_layers):
            x = Block(name=f"block_{i}")(x, rng_on)
        return embed.attend(nn.LayerNorm()(x))


def gpt_loss(num_layers: int) -> Any:
    model = Gpt(num_layers)

    def loss(params, tokens, rng):
        logits = model.apply(params, tokens, rngs={"dropout": rng})
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1).mean()

    return model, loss


def random_like(shapes: Any) -> Any:
    flat, treedef = jax.tree.flatten(shapes)
    return jax.tree.unflatten(treedef, [normal(i, *leaf.shape, scale=0.2) for i, leaf in enumerate(flat)])


def gpt(num_layers: int) -> tuple[Any, Any, tuple[Any, ...]]:
    model, loss = gpt_loss(num_layers)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 8)))
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), tokens, False))
    return loss, shapes, (tokens, jax.random.key(3))


def test_an_unmodified_gpt_with_a_tied_embedding() -> None:
    loss, shapes, args = gpt(8)
    params = random_like(shapes)
    graph = check(loss, params, args, 20_000)
    assert [unit.name for unit in graph.units[1:9]] == [f"block_{i}" for i in range(8)]
    assert len(graph.units) == 10 and len(graph.programs) == 3
    # The mask and the dropout keys are made in each unit: the residual stream alone crosses, and the outer inputs.
    for unit in graph.units[1:9]:
        assert len(set(unit.inputs) - set(graph.outer_inputs)) == 1 and len(unit.outputs) == 1
        assert len(unit.operands) == 1
    tied = [unit.index for unit in graph.units if any("Embed_0" in graph.leaves[p.leaf].name for p in unit.pieces)]
    assert tied == [0, 9]
    assert graph.units[1].flops == 2 * 16 * D * D * 12 + 2 * 2 * 2 * 2 * 8 * 8 * 8


def test_units_are_the_same_when_their_programs_are_compiled() -> None:
    loss, shapes, args = gpt(2)
    params = random_like(shapes)
    leaves = classify(params)
    graph = cut_function(loss, params, leaves, args, max_unit_bytes=20_000)
    output, gradients = grad_units(graph, params, args, jit=True)
    expected, expected_gradients = whole(loss, params, args, leaves)
    close(output, expected, 1e-6)
    for got, want in zip(jax.tree.leaves(gradient_tree(graph, params, gradients)), expected_gradients, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6)


def test_eighty_layers_are_cut_in_seconds_and_compile_a_handful() -> None:
    loss, shapes, args = gpt(80)
    started = time.process_time()
    jax.make_jaxpr(loss)(shapes, *args)
    traced = time.process_time() - started
    started = time.process_time()
    graph = cut_function(loss, shapes, classify(shapes), args, max_unit_bytes=20_000)
    took = time.process_time() - started
    assert len(graph.units) == 82 and len(graph.programs) == 3
    assert took < 3 * traced + 5


@pytest.mark.parametrize("limit", [1, 2000, 5000, 9000, 40_000, 10**9])
def test_every_limit_is_kept(limit) -> None:
    loss, shapes, args = gpt(4)
    graph = cut_function(loss, shapes, classify(shapes), args, max_unit_bytes=limit)
    readers = [sum(bool(graph.leaves[p.leaf].size) for p in unit.pieces) for unit in graph.units]
    assert all(size <= limit or count == 1 for size, count in zip(unit_bytes(graph), readers, strict=True))
    assert len(graph.programs) <= 20
    if limit == 10**9:
        assert len(graph.units) <= 3


def test_every_kind_of_leaf() -> None:
    params = {
        "w": normal(0, 4, 4),
        "frozen": normal(1, 4),
        "ids": jnp.arange(4),
        "flag": np.array(True),
        "empty": jnp.zeros((0, 3)),
        "scalar": jnp.float32(0.7),
        "python": 1.5,
        "count": 3,
        "key": jax.random.key(1),
        "keys": jax.random.split(jax.random.key(2), 3),
        "unused": normal(3, 5),
        "activation": jnp.tanh,
        "none": None,
    }

    def loss(p, x):
        noise = jax.random.normal(p["key"], (4,)) + jax.random.normal(p["keys"][1], (4,))
        y = p["activation"](x @ p["w"] * p["frozen"] + noise) * p["scalar"] * p["python"] ** p["count"]
        y = jnp.where(p["flag"], y[:, p["ids"]], 0) + p["empty"].sum()
        return (y**2).mean(), {"ids": p["ids"] + 1, "flag": p["flag"], "w": p["w"], "key": p["key"]}

    leaves = classify(params)
    mask = jax.tree.unflatten(
        jax.tree.structure(params), [leaf.name != "frozen" and leaf.kind is LeafKind.TRAINABLE for leaf in leaves]
    )
    graph = check(loss, params, (normal(5, 2, 4),), 50, trainable=mask)
    trained = {graph.leaves[piece.leaf].name for piece in graph.trained_pieces}
    assert trained == {"w", "scalar", "python"}
    aval = next(a for u in graph.units for p, a in zip(u.pieces, graph.programs[u.program].piece_avals, strict=True)
                if graph.leaves[p.leaf].name == "python")  # fmt: skip
    assert aval.weak_type and aval.dtype == jnp.float32


def test_weights_reach_the_loss_in_the_compute_dtype() -> None:
    params = {"w": normal(0, 4, 4)}
    seen = []

    def loss(p, x):
        seen.append(p["w"].dtype)
        return (x @ p["w"].astype(jnp.float32)).sum()

    leaves = classify(params, compute_dtype=jnp.bfloat16)
    graph = cut_function(loss, params, leaves, (normal(1, 2, 4),), max_unit_bytes=100)
    _, gradients = grad_units(graph, params, (normal(1, 2, 4),))
    assert seen == [jnp.bfloat16]
    assert [g.dtype for g in gradients.values()] == [jnp.bfloat16]


def test_gradients_stop_below_the_lowest_trainable_unit() -> None:
    params = {f"w{i}": normal(i, D, D, scale=0.3) for i in range(6)}

    def loss(p, x):
        for i in range(6):
            x = jnp.tanh(x @ p[f"w{i}"])
        return (x**2).mean()

    trainable = {f"w{i}": i in (2, 3, 5) for i in range(6)}
    graph = check(loss, params, (normal(9, 4, D),), D * D * 4, trainable=trainable)
    assert graph.backward == (5, 4, 3, 2)
    assert [graph.programs[u.program].diff_inputs for u in graph.units[:4]] == [(False,), (False,), (False,), (True,)]
    assert [graph.programs[u.program].diff_pieces for u in graph.units[2:]] == [(True,), (True,), (False,), (True,)]


def test_a_loss_without_gradients_has_no_backward() -> None:
    def loss(p, x):
        return jax.lax.stop_gradient((x @ p["w"]).sum())

    graph = check(loss, {"w": normal(0, 4, 4)}, (normal(1, 2, 4),), 100)
    assert graph.backward == () and not graph.trained_pieces


def test_state_weights_and_outer_inputs_as_results() -> None:
    def loss(p, state, batch, rng):
        x, weight = batch
        y = jnp.tanh(x @ p["w"])
        mean = 0.9 * state["mean"] + 0.1 * y.mean(0)
        new_state = {
            "mean": mean,
            "count": state["count"] + 1,
            "same": state["same"],
            "rng": jax.random.fold_in(rng, 1),
        }
        total = weight.sum()
        return ((y - mean) ** 2).sum() / total, total, new_state, (0.0, jnp.int32(3), mean, mean)

    state = {"mean": jnp.zeros(4), "count": jnp.int32(0), "same": jnp.ones(2)}
    args = (state, (normal(1, 3, 4), jnp.ones(3)), jax.random.key(0))
    graph = check(loss, {"w": normal(0, 4, 4)}, args, 100)
    assert set(graph.results) & set(graph.outer_inputs)
    check_evaluation(loss, {"w": normal(0, 4, 4)}, args, 100)


def test_a_function_of_parameters_alone_and_one_without_any() -> None:
    params = {"a": normal(0, 4, 4), "b": normal(1, 4, 4)}
    check(lambda p, x: jnp.sum(p["a"] @ p["b"]) + jnp.sum(p["a"] ** 2), params, (normal(2, 2),), 64)
    check(lambda p, x: p["a"][0, 0], params, (normal(2, 2),), 64)
    check(lambda p, x: (x**2).sum(), params, (normal(2, 2),), 64)
    check(lambda p, x: x.sum(), {}, (normal(2, 2),), 64)
    graph = check_evaluation(lambda p, x: x, params, (normal(2, 2),), 64)
    assert not graph.units


def test_values_of_the_batch_alone_are_recomputed_where_cheap_and_carried_where_dear() -> None:
    params = {f"w{i}": normal(i, 64, 64, scale=0.1) for i in range(4)}

    def loss(p, x):
        mask = jnp.tril(jnp.ones((64, 64))) * (x[0] > 0)
        dear = jnp.linalg.cholesky(x.T @ x + 100 * jnp.eye(64))
        for i in range(4):
            x = jnp.tanh(x @ (p[f"w{i}"] * mask) @ dear)
        return (x**2).mean()

    graph = check(loss, params, (normal(9, 8, 64),), 64 * 64 * 4)
    shapes = [graph.values[v].shape for unit in graph.units[1:] for v in set(unit.inputs) - set(graph.outer_inputs)]
    assert shapes.count((64, 64)) == 3 and shapes.count((8, 64)) == 3


def test_a_cut_is_made_where_the_fewest_bytes_cross() -> None:
    params = {"up": normal(0, 4, 64), "down": normal(1, 64, 4), "up2": normal(2, 4, 32), "down2": normal(3, 32, 4)}

    def loss(p, x):
        x = jnp.tanh(x @ p["up"]) @ p["down"]
        return ((jnp.sin(x @ p["up2"]) @ p["down2"]) ** 2).mean()

    graph = check(loss, params, (normal(9, 8, 4),), 2 * 4 * 64 * 4)
    assert [graph.values[unit.outputs[0]].shape for unit in graph.units] == [(8, 4), ()]


def test_equal_units_with_other_cotangents_do_not_share() -> None:
    params = {f"w{i}": normal(i, D, D, scale=0.3) for i in range(4)}

    def loss(p, x):
        for i in range(4):
            x = jnp.tanh(x @ p[f"w{i}"])
        return (x**2).mean()

    trainable = {"w0": True, "w1": True, "w2": False, "w3": True}
    graph = check(loss, params, (normal(9, 4, D),), D * D * 4, trainable=trainable)
    assert graph.units[1].program != graph.units[2].program


def test_evaluation_takes_any_output() -> None:
    _, shapes, args = gpt(3)
    model, _ = gpt_loss(3)
    params = random_like(shapes)

    def logits(p, tokens):
        return {"logits": model.apply(p, tokens, False), "tokens": tokens}

    graph = check_evaluation(logits, params, args[:1], 20_000)
    assert len(graph.units) == 5
    assert not any(program.differentiable for program in graph.programs)
    assert evaluate_units(graph, params, args[:1])["logits"].shape == (2, 8, 64)


def test_parameters_need_not_exist() -> None:
    loss, shapes, args = gpt(2)
    abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(jnp.shape(a), jnp.result_type(a)), args[:1])
    key = jax.eval_shape(lambda: jax.random.key(0))
    graph = cut_function(loss, shapes, classify(shapes), (*abstract, key), max_unit_bytes=20_000)
    assert len(graph.units) == 4
