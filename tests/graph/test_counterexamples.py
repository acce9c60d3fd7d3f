"""Functions on which a plausible cutter gives wrong numbers, or refuses for no reason."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.graph.reference import check, normal, unit_bytes
from zinf_jax.errors import CutError
from zinf_jax.graph import cut_function
from zinf_jax.graph.interpret import grad_units
from zinf_jax.leaves import classify

D = 8
LIMIT = D * D * 4 + 4 * D  # one dense layer


def layers(num: int, seed: int = 0) -> dict[str, jax.Array]:
    return {f"w{i}": normal(seed + i, D, D, scale=0.3) for i in range(num)}


def batch(seed: int = 9) -> jax.Array:
    return normal(seed, 4, D)


def test_closed_over_constants_are_operands_not_part_of_the_program() -> None:
    masks = [np.eye(D, dtype=np.float32) * (i + 1) for i in range(4)]

    def loss(p, x):
        for i in range(4):
            x = jnp.tanh(x @ (p[f"w{i}"] * masks[i]))
        return (x**2).mean()

    graph = check(loss, layers(4), (batch(),), LIMIT)
    assert len({unit.program for unit in graph.units[:3]}) <= 2  # the first one's input has no cotangent
    assert len(graph.operands) >= 4


def test_equal_constants_are_one_operand() -> None:
    def loss(p, x):
        for i in range(4):
            x = jnp.tanh(x @ (p[f"w{i}"] * np.full((D, D), 0.5, np.float32)))
        return (x**2).mean()

    assert len(check(loss, layers(4), (batch(),), LIMIT).operands) == 1


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def scaled(x, factor):
    return jnp.sin(x)


scaled.defvjp(lambda x, factor: (scaled(x, factor), x), lambda factor, x, ct: (factor * ct * jnp.cos(x),))


def test_two_custom_vjp_rules_with_equal_forwards_do_not_share() -> None:
    def loss(p, x):
        for i in range(6):
            x = scaled(x @ p[f"w{i}"], 1.0 if i % 2 else -2.0)
        return (x**2).mean()

    graph = check(loss, layers(6), (batch(),), LIMIT)
    assert graph.units[1].program != graph.units[2].program
    assert graph.units[1].program == graph.units[3].program


def test_equal_custom_rules_share_although_their_thunks_differ() -> None:
    def loss(p, x):
        for i in range(6):

            @jax.custom_vjp
            def act(x):
                return jnp.tanh(x)

            act.defvjp(lambda x: (act(x), x), lambda x, ct: (ct * x,))
            x = act(x @ p[f"w{i}"])

            @jax.custom_jvp
            def act2(x):
                return jnp.cos(x)

            act2.defjvp(lambda primals, tangents: (jnp.cos(primals[0]), 3 * tangents[0]))
            x = act2(x)
        return (x**2).mean()

    graph = check(loss, layers(6), (batch(),), LIMIT)
    assert len(graph.programs) == 3
    assert len(graph.units) == 6


def test_sqrt_behind_stop_gradient_gives_no_nan() -> None:
    params = {**layers(2), "p": jnp.zeros((D,))}

    def loss(p, x):
        root = jnp.sqrt(p["p"] * x)  # 0: its derivative is infinite
        x = jnp.tanh(x @ p["w0"])
        x = x + jax.lax.stop_gradient(root)
        return ((x @ p["w1"]) ** 2).mean()

    graph = check(loss, params, (jnp.abs(batch()),), 40)
    assert not any(graph.leaves[piece.leaf].name == "p" for piece in graph.trained_pieces)


def test_while_loop_on_batch_floats_is_not_refused() -> None:
    def loss(p, x):
        y = jax.lax.while_loop(lambda y: (y**2).sum() > 1, lambda y: y * 0.5, x)
        for i in range(3):
            x = jnp.tanh((x + y) @ p[f"w{i}"])
        return (x**2).mean()

    check(loss, layers(3), (batch(),), LIMIT)


def test_while_loop_on_a_stopped_parameter_is_not_refused() -> None:
    def loss(p, x):
        start = jax.lax.stop_gradient(p["w0"]) * 4
        scale = jax.lax.while_loop(lambda y: (y**2).sum() > 1, lambda y: y * 0.5, start)
        return ((jnp.tanh(x @ p["w0"]) @ (scale * p["w1"])) ** 2).mean()

    check(loss, layers(2), (batch(),), LIMIT)


def test_casts_of_all_parameters_up_front_do_not_cross_cuts() -> None:
    def loss(p, x):
        p = jax.tree.map(lambda w: w.astype(jnp.bfloat16), p)
        x = x.astype(jnp.bfloat16)
        for i in range(5):
            x = jnp.tanh(x @ p[f"w{i}"])
        return (x.astype(jnp.float32) ** 2).mean()

    graph = check(loss, layers(5), (batch(),), LIMIT, tolerance=1e-2)
    assert len(graph.units) == 5 and max(unit_bytes(graph)) <= LIMIT
    for unit in graph.units:
        assert len(unit.inputs) <= 1 and len(unit.outputs) == 1


def test_a_cast_that_two_units_need_is_made_in_both() -> None:
    def loss(p, x):
        p = jax.tree.map(lambda w: w.astype(jnp.bfloat16).astype(jnp.float32), p)
        tied = p["w0"].T
        for i in range(4):
            x = jnp.tanh(x @ p[f"w{i}"])
        return ((x @ tied) ** 2).mean()

    graph = check(loss, layers(4), (batch(),), LIMIT, tolerance=1e-2)
    assert all(graph.values[value].shape != (D, D) for unit in graph.units for value in unit.inputs)
    assert [unit.index for unit in graph.units if unit.pieces == graph.units[0].pieces] == [0, len(graph.units) - 1]


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, lambda f: jax.jit(jax.checkpoint(jax.jit(f)))])
def test_a_wrapped_loss_is_cut_like_a_bare_one(wrap) -> None:
    def loss(p, x):
        for i in range(5):
            x = jax.jit(lambda x, w: jnp.tanh(x @ w))(x, p[f"w{i}"])
        return (x**2).mean()

    graph = check(wrap(loss), layers(5), (batch(),), LIMIT)
    bare = check(loss, layers(5), (batch(),), LIMIT)
    assert [(u.program, u.pieces) for u in graph.units] == [(u.program, u.pieces) for u in bare.units]
    assert len(graph.units) == 5 and len(graph.programs) == 3


def test_l2_term_reads_each_parameter_in_the_unit_that_has_it() -> None:
    def loss(p, x):
        penalty = sum(jnp.sum(w**2) for w in p.values())
        for i in range(5):
            x = jnp.tanh(x @ p[f"w{i}"])
        return (x**2).mean() + 1e-2 * penalty

    graph = check(loss, layers(5), (batch(),), LIMIT)
    assert len(graph.units) == 5
    assert sum(len(unit.pieces) for unit in graph.units) == 5


def test_a_clip_by_the_norm_of_all_parameters_needs_two_passes() -> None:
    def loss(p, x):
        norm = jnp.sqrt(sum(jnp.sum(w**2) for w in p.values()))
        p = jax.tree.map(lambda w: w / jnp.maximum(norm, 1.0), p)
        for i in range(4):
            x = jnp.tanh(x @ p[f"w{i}"])
        return (x**2).mean()

    graph = check(loss, layers(4), (batch(),), LIMIT)
    assert max(unit_bytes(graph)) <= LIMIT


def test_whole_model_in_a_custom_vjp_is_refused_by_name() -> None:
    @jax.custom_vjp
    def whole_model(p, x):
        for i in range(4):
            x = jnp.tanh(x @ p[f"w{i}"])
        return x

    whole_model.defvjp(lambda p, x: (whole_model(p, x), (p, x)), lambda res, ct: jax.tree.map(jnp.zeros_like, res))
    params = layers(4)
    leaves = classify(params)

    def loss(p, x):
        return (whole_model(p, x) ** 2).mean()

    with pytest.raises(CutError, match=r"custom_vjp_call.*whole_model"):
        cut_function(loss, params, leaves, (batch(),), max_unit_bytes=LIMIT)
    # Where it fits it is a unit, and where nothing is differentiated its rule does not matter.
    assert len(cut_function(loss, params, leaves, (batch(),), max_unit_bytes=8 * LIMIT).units) == 1
    assert len(cut_function(loss, params, leaves, (batch(),), max_unit_bytes=LIMIT, differentiate=False).units) == 4


def test_whole_model_in_a_shard_map_is_refused_by_name() -> None:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec

    def inner(p, x):
        for i in range(4):
            x = jnp.tanh(x @ p[f"w{i}"])
        return x

    def loss(p, x):
        return (
            jax.shard_map(inner, mesh=mesh, in_specs=(spec(), spec("data")), out_specs=spec("data"))(p, x) ** 2
        ).mean()

    with pytest.raises(CutError, match="shard_map"):
        cut_function(loss, layers(4), classify(layers(4)), (batch(),), max_unit_bytes=LIMIT)


def test_debug_prints_happen_once_in_forward_and_not_in_backward(capfd) -> None:
    def loss(p, x):
        for i in range(3):
            x = jnp.tanh(x @ p[f"w{i}"])
            jax.debug.print("layer {i}", i=i)
        return (x**2).mean()

    params = layers(3)
    graph = cut_function(loss, params, classify(params), (batch(),), max_unit_bytes=LIMIT)
    capfd.readouterr()
    grad_units(graph, params, (batch(),))
    jax.effects_barrier()
    assert sorted(capfd.readouterr().out.split()) == sorted(["layer", "0", "layer", "1", "layer", "2"])


def test_ordered_effects_are_refused_by_name() -> None:
    def loss(p, x):
        jax.debug.print("{x}", x=x.sum(), ordered=True)
        return ((x @ p["w0"]) ** 2).mean()

    with pytest.raises(CutError, match=r"debug_print|debug_callback"):
        cut_function(loss, layers(1), classify(layers(1)), (batch(),), max_unit_bytes=LIMIT)


@pytest.mark.parametrize(
    ("fn", "what"),
    [
        (lambda p, x: x @ p["w0"], r"float32\[4, 8\]"),
        (lambda p, x: jnp.argmax(x @ p["w0"]), "int32"),
        (lambda p, x: (), "nothing"),
    ],
)
def test_a_loss_that_is_no_scalar_is_refused(fn, what) -> None:
    with pytest.raises(CutError, match=what):
        cut_function(fn, layers(1), classify(layers(1)), (batch(),), max_unit_bytes=LIMIT)


def test_the_limit_must_be_positive() -> None:
    with pytest.raises(ValueError, match="got 0"):
        cut_function(lambda p, x: x.sum(), {}, (), (batch(),), max_unit_bytes=0)
