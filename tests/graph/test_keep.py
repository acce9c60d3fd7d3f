"""What backward goes on from instead of computing it again: gradients, sizes and names."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import zinf_jax as zinf
from tests.graph.models import MODELS
from tests.graph.test_models import leaf_gradient, numbers
from zinf_jax.graph import POLICIES, cut_function, keep_residuals
from zinf_jax.graph.interpret import grad_units
from zinf_jax.leaves import LeafKind, classify

WIDTH, ROWS, LAYERS = 8, 4, 4
# One member of each family, and what is unusual: custom rules, loops and conditions, dropout, batch statistics.
_QUICK = ("linen_gpt", "nnx_batchnorm", "equinox_transformer", "hf_t5", "custom_rules", "control_flow", "plain_stacked")


@pytest.fixture(autouse=True)
def fast_compile():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.parametrize("policy", POLICIES[1:])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in _QUICK else pytest.mark.slow) for name in MODELS]
)
def test_gradients_are_those_of_computing_again(name, policy):
    model = MODELS[name]()
    params = model.params()
    leaves = classify(params)
    num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves if leaf.kind is LeafKind.TRAINABLE)
    graph = cut_function(model.loss_fn, params, leaves, model.args, max_unit_bytes=num_bytes // 4)
    kept = keep_residuals(graph, policy, range(len(graph.units)))
    out, gradients = grad_units(graph, params, model.args, jit=True)
    same, again = grad_units(kept, params, model.args, jit=True)

    for ours, theirs in zip(numbers(same), numbers(out), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert again.keys() == gradients.keys()
    whole = np.sqrt(sum(float(jnp.sum(jnp.square(g))) for g in gradients.values()))
    for leaf in leaves:
        if leaf.kind is LeafKind.TRAINABLE:
            first, second = leaf_gradient(graph, gradients, leaf), leaf_gradient(kept, again, leaf)
            # Against the whole as well: some gradients are sums that cancel (a contrastive loss's temperature).
            error, limit = np.linalg.norm(first - second), model.rtol * np.linalg.norm(first) + 3e-5 * whole
            assert error <= limit, f"{leaf.name}: off by {error}, limit {limit}"
    assert len(kept.programs) <= 2 * len(graph.programs), "equal units still share programs"


def cut(loss, policy, *, dtype=jnp.float32, units=None):
    """A stack of `LAYERS` layers of `loss(layer, x)`, cut one by one, before and after."""

    def whole(params, x):
        for layer in params:
            x = loss(layer, x)
        return jnp.sum(x.astype(jnp.float32) ** 2)

    params = [{"w": jnp.full((WIDTH, WIDTH), 0.1, dtype), "b": jnp.zeros(WIDTH, dtype)} for _ in range(LAYERS)]
    args = (jnp.ones((ROWS, WIDTH), jnp.float32),)
    size = (WIDTH * WIDTH + WIDTH) * jnp.dtype(dtype).itemsize
    graph = cut_function(whole, params, classify(params, compute_dtype=jnp.dtype(dtype)), args, max_unit_bytes=size)
    assert len(graph.units) >= LAYERS
    return graph, keep_residuals(graph, policy, range(len(graph.units)) if units is None else units)


def dense(layer, x):
    return jnp.tanh(jnp.sin(x @ layer["w"].astype(jnp.float32) + layer["b"].astype(jnp.float32)))


def shapes(graph, unit):
    return [(graph.values[v].shape, graph.values[v].dtype) for v in graph.units[unit].saved]


def test_matrix_products_are_kept_and_not_computed_again():
    graph, kept = cut(dense, "dots_saveable")
    forward = 2 * ROWS * WIDTH * WIDTH
    assert shapes(kept, 1) == [((ROWS, WIDTH), jnp.float32)]
    assert graph.units[1].backward_flops == 3 * forward and kept.units[1].backward_flops == 2 * forward
    assert graph.units[1].flops == kept.units[1].flops == forward


def test_what_depends_on_parameters_alone_is_never_kept():
    """A cast of the weights would be a second copy of them that lives through the whole step."""
    _, kept = cut(dense, "everything_saveable", dtype=jnp.bfloat16)
    for unit in kept.units:
        assert unit.saved and all(shape == (ROWS, WIDTH) for shape, _ in shapes(kept, unit.index))


def test_named_values_are_kept_and_no_others():
    def named(layer, x):
        return jnp.tanh(checkpoint_name(jnp.sin(checkpoint_name(x @ layer["w"], "product")), "sine") + layer["b"])

    for names, count in ((("sine",), 1), (("product", "sine"), 2)):
        graph, kept = cut(named, names)
        assert [len(kept.units[i].saved) for i in range(1, LAYERS - 1)] == [count] * (LAYERS - 2)
        params = [{"w": jnp.eye(WIDTH) * (i + 1), "b": jnp.ones(WIDTH)} for i in range(LAYERS)]
        args = (jnp.linspace(0, 1, ROWS * WIDTH).reshape(ROWS, WIDTH),)
        first, second = grad_units(graph, params, args)[1], grad_units(kept, params, args)[1]
        for piece, gradient in first.items():
            np.testing.assert_allclose(second[piece], gradient, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("loss", "known"), [(dense, "none"), (lambda p, x: checkpoint_name(dense(p, x), "y"), "'y'")])
def test_a_name_that_nothing_has_is_refused(loss, known):
    with pytest.raises(zinf.ConfigError, match="no value is named 'products'") as caught:
        cut(loss, ("products",))
    assert known in str(caught.value) and "dots_saveable" in str(caught.value)


def test_only_the_chosen_units_change():
    graph, kept = cut(dense, "dots_saveable", units=range(2))
    assert [bool(unit.saved) for unit in kept.units][:3] == [True, True, False]
    assert kept.units[2] == graph.units[2]
    unchanged = keep_residuals(graph, "nothing_saveable", range(len(graph.units)))
    assert unchanged is graph


def test_a_value_that_is_an_output_as_well_is_kept_once():
    """The next unit's input is this unit's own residual: the derivative of exp is its result."""
    graph, kept = cut(lambda layer, x: jnp.exp(x @ layer["w"] + layer["b"]), "everything_saveable")
    unit = kept.units[1]
    assert unit.outputs == graph.units[1].outputs
    assert set(unit.saved) & set(kept.units[2].inputs)
