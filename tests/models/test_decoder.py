"""The decoder: sizes, causality, dtypes, and that its variants are the same function."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zinf_jax.errors import ConfigError
from zinf_jax.models import SIZES, ModelSpec, build, decoder, spec_of

TINY = {"dim": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 64, "seq_len": 16}


def _init(spec):
    """Parameters of the right shapes; compiling the real init takes longer than most of these tests."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(spec.init_fn, jax.random.key(0))
    return jax.tree.map(lambda x: (0.02 * rng.normal(size=x.shape)).astype(x.dtype), shapes)


def _tokens(rows=2, length=17, seed=0):
    return {"tokens": np.random.default_rng(seed).integers(0, 64, (rows, length), dtype=np.int32)}


@pytest.mark.parametrize(
    ("size", "low", "high"),
    [("25m", 25e6, 30e6), ("125m", 105e6, 130e6), ("1.3b", 1.2e9, 1.4e9), ("4.2b", 4e9, 4.4e9)],
)
def test_sizes_have_their_number_of_parameters(size, low, high):
    assert low <= decoder(size).num_params() <= high


def test_every_size_is_valid():
    for name in SIZES:
        assert decoder(name).seq_len == SIZES[name].seq_len


def test_a_token_sees_only_earlier_ones():
    spec = decoder(**TINY)
    params = _init(spec)
    tokens = _tokens()["tokens"][:, :-1]
    changed = tokens.copy()
    changed[:, 9] = (changed[:, 9] + 1) % 64
    logits_fn = jax.jit(spec.logits_fn)
    before, after = logits_fn(params, tokens), logits_fn(params, changed)
    np.testing.assert_array_equal(before[:, :9], after[:, :9])
    assert np.all(np.any(before[:, 9:] != after[:, 9:], axis=-1))


@pytest.mark.parametrize("tied", [False, True])
def test_scan_remat_and_unrolled_are_the_same_function(tied):
    unrolled, scanned = (decoder(**TINY, tied=tied, scan=scan, remat=scan) for scan in (False, True))
    params = _init(unrolled)

    def stack(tree):
        blocks = [tree[f"block_{i}"] for i in range(TINY["num_layers"])]
        rest = {k: v for k, v in tree.items() if not k.startswith("block_")}
        return rest | {"blocks": jax.tree.map(lambda *leaves: np.stack(leaves), *blocks)}

    assert jax.tree.map(np.shape, stack(params)) == jax.tree.map(np.shape, _init(scanned))
    loss, grads = jax.jit(jax.value_and_grad(unrolled.loss_fn))(params, _tokens())
    scan_loss, scan_grads = jax.jit(jax.value_and_grad(scanned.loss_fn))(stack(params), _tokens())
    np.testing.assert_allclose(loss, scan_loss, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), stack(grads), scan_grads)


def test_bf16_weights_are_multiplied_in_float32():
    spec = decoder(**TINY, remat=False)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), _init(spec))
    jaxpr = jax.make_jaxpr(spec.loss_fn)(params, _tokens())
    dots = [e for e in jaxpr.eqns if e.primitive.name == "dot_general"]
    assert len(dots) >= 4 * TINY["num_layers"] + 1
    assert all(v.aval.dtype == jnp.float32 for e in dots for v in e.invars)
    assert jax.eval_shape(jax.grad(spec.loss_fn), params, _tokens())["head"]["kernel"].dtype == jnp.bfloat16


def test_matmul_dtype_is_the_dtype_of_activations():
    spec = decoder(**TINY, remat=False, matmul_dtype="bfloat16", param_dtype="bfloat16")
    params = jax.eval_shape(spec.init_fn, jax.random.key(0))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}
    assert jax.eval_shape(spec.loss_fn, params, _tokens()).dtype == jnp.float32


def test_dropout_follows_its_rng_and_is_off_in_evaluation():
    spec = decoder(**TINY, dropout=0.5)
    params = _init(spec)
    loss_fn = jax.jit(spec.loss_fn)
    losses = [float(loss_fn(params, _tokens(), jax.random.key(i))) for i in (1, 1, 2)]
    assert spec.takes_rng and losses[0] == losses[1] != losses[2]
    plain = jax.jit(decoder(**TINY).loss_fn)(params, _tokens())
    np.testing.assert_allclose(jax.jit(spec.validation_loss_fn)(params, _tokens()), plain, rtol=1e-6)


def test_initial_loss_is_that_of_a_uniform_guess():
    spec = decoder(**TINY)
    assert abs(float(jax.jit(spec.loss_fn)(jax.jit(spec.init_fn)(jax.random.key(0)), _tokens())) - np.log(64)) < 0.1


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"size": "3b"}, "one of tiny, 25m"),
        ({"dims": 3}, "unknown option 'dims'"),
        ({"dim": 30, "num_heads": 4}, r"dim \(30\) must be a multiple of num_heads \(4\)"),
        ({"dropout": 1.0}, "got 1.0"),
        ({"matmul_dtype": "int8"}, "int8"),
        ({"num_layers": 0}, "got 0"),
    ],
)
def test_wrong_options_are_named(kwargs, message):
    with pytest.raises(ConfigError, match=message):
        decoder(**kwargs)


@pytest.mark.parametrize(
    ("factory", "kwargs", "message"),
    [
        ("zinf_jax.models", {}, "package.module:function"),
        ("no_such_module:f", {}, "cannot import 'no_such_module'"),
        ("zinf_jax.models:no_such", {}, "no function 'no_such'"),
        ("zinf_jax.models:spec_of", {"nothing": 1}, "cannot be called with"),
        ("zinf_jax.units:format_bytes", {"num_bytes": 1}, "must return a ModelSpec"),
    ],
)
def test_wrong_factories_are_named(factory, kwargs, message):
    with pytest.raises(ConfigError, match=message):
        build(factory, kwargs)


def test_any_function_that_returns_a_spec_is_a_factory():
    spec = build("zinf_jax.models:decoder", TINY)
    assert isinstance(spec, ModelSpec) and spec.vocab_size == 64
    assert spec_of(SIZES["tiny"]).num_params() == decoder("tiny").num_params()
