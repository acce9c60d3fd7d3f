"""Lazy init: every piece on its own has the bits that the whole jitted init gives it, and nothing else is made."""

import functools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.graph.models import MODELS, flat_init
from zinf_jax.errors import InitError
from zinf_jax.graph import _init_lazy
from zinf_jax.graph.lazy import Initializer, initializer, lazy
from zinf_jax.leaves import Leaf, LeafKind, Piece, classify, with_stacks

KEY = jax.random.key(4)
_QUICK = {
    "linen_gpt_scan",
    "linen_remat_scan",
    "nnx_scan",
    "nnx_batchnorm",
    "equinox_mlp",
    "haiku_layer_stack",
    "hf_gpt2",
}


def table(params: Any, stack_ndim: Callable[[str], int] = lambda name: 0) -> tuple[Leaf, ...]:
    leaves = classify(params)
    return with_stacks(leaves, {leaf.index: stack_ndim(leaf.name) for leaf in leaves})


def check(init: Callable[[Any], Any], stack_ndim: Callable[[str], int] = lambda name: 0, key: Any = KEY) -> Initializer:
    """Makes each piece in a call of its own and compares bits."""
    params = lazy(init, key)
    leaves = table(params.abstract, stack_ndim)
    made = initializer(params, leaves)
    expected = flat_init(init, key)
    for leaf, whole in zip(leaves, expected, strict=True):
        if leaf.kind is LeafKind.STATIC:
            assert jax.tree.leaves(params.abstract)[leaf.index] is not None
            continue
        data = np.asarray(jax.random.key_data(whole) if leaf.key_impl else whole)
        pieces = data.reshape(leaf.num_pieces, *leaf.piece_shape)
        for piece in leaf.pieces:
            (value,) = made.make([piece])
            assert (value.shape, value.dtype) == (leaf.piece_shape, data.dtype), leaf.name
            assert value.tobytes() == pieces[piece.index].tobytes(), (leaf.name, piece)
    return made


def stacked(name: str) -> int:
    return 1


# ---------------------------------------------------------------------------------------------------- whole models


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in _QUICK else pytest.mark.slow) for name in MODELS]
)
def test_pieces_of_a_model_have_the_bits_of_the_whole_init(name: str) -> None:
    model = MODELS[name]()
    assert check(model.init, model.stack_ndim).warnings == ()


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + nn.Dense(8)(nn.gelu(nn.Dense(12)(nn.LayerNorm()(x))))


class Deep(nn.Module):
    depth: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in range(self.depth):
            x = Block(name=f"block_{layer}")(x)
        return x


def test_what_depends_on_no_argument_is_evaluated_as_a_constant() -> None:
    """XLA folds sin of a constant with other code than it compiles for sin of an operand (Whisper's positions)."""
    rates = np.linspace(0.1, 3, 24).astype(np.float32)

    def init(key: jax.Array) -> Any:
        del key
        angles = jnp.exp(-jnp.log(10000.0) / 31 * jnp.arange(32)) * jnp.arange(40)[:, None]
        return {"positions": jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], 1), "rates": jnp.exp(jnp.sin(rates))}

    check(init, lambda name: int(name == "rates"))


def test_equal_layers_share_programs() -> None:
    def num_programs(depth: int) -> int:
        params = lazy(Deep(depth).init, KEY, jax.ShapeDtypeStruct((2, 8), jnp.float32))
        leaves = table(params.abstract)
        made = initializer(params, leaves)
        made.make([piece for leaf in leaves for piece in leaf.pieces])
        return len(made._programs)  # type: ignore[attr-defined]

    assert num_programs(2) == num_programs(24) == 2  # two kernels; zeros and ones need no program


def _loop_over_keys(key: jax.Array, depth: int) -> Any:
    return {f"b{i}": jax.random.normal(k, (8, 16)) for i, k in enumerate(jax.random.split(key, depth))}


def _two_keys_a_layer(key: jax.Array, depth: int) -> Any:
    keys = jax.random.split(key, 2 * depth)
    return {f"b{i}": [jax.random.normal(keys[2 * i], (8, 16)), jax.random.uniform(keys[2 * i + 1], (5,))]
            for i in range(depth)}  # fmt: skip


def _every_other_key(key: jax.Array, depth: int) -> Any:
    return {f"b{i}": jax.random.normal(jax.random.split(key, 2 * depth)[1::2][i], (8, 16)) for i in range(depth)}


def _chained(key: jax.Array, depth: int) -> Any:
    made = {}
    for i in range(depth):
        key, own = jax.random.split(key)
        made[f"b{i}"] = jax.random.normal(own, (8, 16))
    return made


def _rows_of_one_array(key: jax.Array, depth: int) -> Any:
    rows = jax.random.normal(key, (depth, 8, 16)) * 0.1
    return {f"b{i}": rows[i] for i in range(depth)}


def _parts_of_one_product(key: jax.Array, depth: int) -> Any:
    made = jax.random.normal(key, (4 * depth, 8)) @ jnp.ones((8, 8))
    return {f"b{i}": made[4 * i : 4 * i + 4] for i in range(depth)}


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize(
    "init",
    [_loop_over_keys, _two_keys_a_layer, _every_other_key, _chained, _rows_of_one_array, _parts_of_one_product],
    ids=lambda init: init.__name__,
)
def test_what_is_compiled_does_not_grow_with_the_number_of_layers(
    init: Callable[..., Any], raw: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither programs nor what evaluates keys: a slice at each place was a program of 1.6 MB per layer."""
    key = jax.random.key_data(KEY) if raw else KEY

    def num_compiled(depth: int) -> tuple[int, int]:
        whole = functools.partial(init, depth=depth)
        check(whole, key=key)  # the bits; and what is compiled once per depth for keys of that number
        params = lazy(whole, key)
        leaves = table(params.abstract)
        made = initializer(params, leaves)
        caplog.clear()
        with jax.log_compiles():
            made.make([piece for leaf in leaves for piece in leaf.pieces])
        compiled = [r for r in caplog.records if r.getMessage().startswith("Finished XLA compilation")]
        return len(made._programs), len(compiled)  # type: ignore[attr-defined]

    few, many = num_compiled(3), num_compiled(24)
    assert few == many
    assert 0 < few[0] <= 2 and few[1] <= few[0]


def test_a_slice_of_what_cannot_be_sliced_is_no_reason_to_make_a_stack_whole() -> None:
    """The 6 x 6 matrix of each layer is made whole to take 4 rows of it, as the init function says."""

    def make(key: jax.Array) -> jax.Array:
        return (jax.random.normal(key, (6, 6)) @ jnp.ones((6, 6)))[:4]

    made = check(lambda key: {"w": jax.lax.map(make, jax.random.split(key, 5))}, stacked)
    assert made.warnings == () and not made.whole_leaves


# ------------------------------------------------------------------------------------------------- slices of stacks


def _carried_key(key: jax.Array, *, reverse: bool) -> Any:
    def body(key: jax.Array, _: None) -> Any:
        key, own = jax.random.split(key)
        return key, {"w": jax.random.normal(own, (3, 2)), "b": jnp.zeros(2)}

    return jax.lax.scan(body, key, None, length=4, reverse=reverse)[1]


def _float_carry(key: jax.Array, *, reverse: bool) -> Any:
    def body(carry: jax.Array, key: jax.Array) -> Any:
        carry = jnp.tanh(carry * 1.5 + jax.random.normal(key, (3,)))
        return carry, (carry * 2, jax.random.normal(key, (2,)))

    return jax.lax.scan(body, jnp.ones(3), jax.random.split(key, 4), reverse=reverse)[1]


def _vmapped(init: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], Any]:
    return lambda key: {"w": jax.vmap(init)(jax.random.split(key, 3))}


def _orthogonal(key: jax.Array) -> jax.Array:
    return jax.nn.initializers.orthogonal()(key, (6, 4), jnp.float32)


SLICED: dict[str, tuple[Callable[[Any], Any], int]] = {
    "scan with a carried key": (functools.partial(_carried_key, reverse=False), 1),
    "reversed scan with a carried key": (functools.partial(_carried_key, reverse=True), 1),
    "scan with a data-dependent carry": (functools.partial(_float_carry, reverse=False), 1),
    "reversed scan with a data-dependent carry": (functools.partial(_float_carry, reverse=True), 1),
    "vmapped module": (lambda key: jax.vmap(lambda k: Block().init(k, jnp.ones((2, 8))))(jax.random.split(key, 3)), 1),
    "vmapped orthogonal": (_vmapped(_orthogonal), 1),
    "vmapped bf16": (_vmapped(lambda key: jax.random.normal(key, (5, 3), jnp.bfloat16)), 1),
    "vmapped normalised": (
        _vmapped(lambda key: (lambda w: w / jnp.linalg.norm(w, axis=0))(jax.random.normal(key, (6, 5)))), 1
    ),
    "vmapped ints": (_vmapped(lambda key: jax.random.randint(key, (5,), 0, 9)), 1),
    "vmapped twice": (
        lambda key: jax.vmap(jax.vmap(lambda k: jax.random.normal(k, (3,))))(jax.random.split(key, (2, 3))), 2
    ),
    "vmapped, then reshaped": (
        lambda key: jax.vmap(lambda k: jax.random.normal(k, (3,)))(jax.random.split(key, 6)).reshape(2, 3, 3), 2
    ),
    "one key": (lambda key: {"w": jax.random.normal(key, (5, 8, 3)) * 0.02, "b": jnp.zeros((5, 3))}, 1),
    "one key, transposed": (lambda key: jax.random.normal(key, (3, 2, 4)).transpose(1, 0, 2)[::-1], 1),
    "stacked trees": (
        lambda key: jax.tree.map(
            lambda *x: jnp.stack(x), *[Block().init(k, jnp.ones((2, 8))) for k in jax.random.split(key, 3)]
        ), 1
    ),
    "concatenated": (
        lambda key: jnp.concatenate([jax.random.normal(k, (2, 3)) for k in jax.random.split(key, 2)]), 1
    ),
    "keys": (lambda key: jax.random.split(key, 3), 1),
    "counter": (lambda key: jnp.arange(6)[:, None] * jnp.ones((6, 2)), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", SLICED)
def test_slices_of_a_stacked_leaf(name: str) -> None:
    init, stack_ndim = SLICED[name]
    made = check(init, lambda _: stack_ndim)
    assert made.warnings == () and not made.whole_leaves


@pytest.mark.parametrize(
    ("init", "key"),
    [
        (lambda key: jnp.cumsum(jax.random.normal(key, (4, 3)), 0), KEY),
        # A batch of rbg keys does not give the bits of each key.
        (
            lambda key: jax.vmap(lambda k: jax.random.normal(k, (3,)))(jax.random.split(key, 4)),
            jax.random.key(0, impl="rbg"),
        ),
    ],
    ids=["cumsum", "rbg"],
)  # fmt: skip
def test_what_cannot_be_sliced_is_made_whole_and_named(init: Callable[[Any], Any], key: jax.Array) -> None:
    made = check(lambda k: {"w": init(k), "b": jax.random.normal(jax.random.key(0), (4,))}, stacked, key)
    assert made.whole_leaves == {1}
    assert made.warnings == ("w: its init cannot be sliced; it is made whole (48 B)",)
    leaf = Leaf(1, "w", (4, 3), np.dtype("float32"), LeafKind.TRAINABLE, stack_ndim=1)
    one, four = made.make([leaf.pieces[2]]), made.make(leaf.pieces)
    assert one[0].tobytes() == four[2].tobytes()
    assert made.peak_bytes([Piece(1, 0)]) >= 48


def test_large_results_are_made_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_init_lazy, "_BLOCK_BYTES", 512)

    def init(key: jax.Array) -> Any:
        first, second = jax.random.split(key)
        return {
            "embedding": jax.nn.initializers.normal(0.02)(first, (50, 16), jnp.float32),
            "stack": jax.vmap(lambda k: jax.nn.initializers.lecun_normal()(k, (30, 7), jnp.float32))(
                jax.random.split(second, 3)
            ),
            "sums": jnp.cumsum(jax.random.normal(second, (40, 5)), 0),
        }

    made = check(init, lambda name: int(name == "stack"))
    embedding, stack = Piece(0, 0), Piece(1, 1)
    assert made.peak_bytes([embedding]) < 3 * 50 * 16 * 4 + 8 * 512
    assert made.peak_bytes([embedding, stack]) >= 4 * (50 * 16 + 30 * 7)


# ------------------------------------------------------------------------------------------------- nothing is made


def test_abstract_tree_keeps_keys_and_static_leaves() -> None:
    params = lazy(lambda key: {"key": key, "w": jnp.zeros((3, 2), jnp.bfloat16), "f": jnp.tanh, "p": 0.5}, KEY)
    assert params.abstract["w"] == jax.ShapeDtypeStruct((3, 2), jnp.bfloat16)
    assert params.abstract["key"].dtype == KEY.dtype
    assert params.abstract["f"] is jnp.tanh and params.abstract["p"] == 0.5
    leaves = table(params.abstract)
    made = initializer(params, leaves)
    by_name = {leaf.name: leaf.pieces[0] for leaf in leaves}
    scalar, key = made.make([by_name["p"], by_name["key"]])
    assert scalar.dtype == np.float32 and scalar == 0.5
    np.testing.assert_array_equal(key, jax.random.key_data(KEY))
    with pytest.raises(InitError, match="f: not an array"):
        made.make([by_name["f"]])


def test_a_counter_through_hundreds_of_layers_is_no_recursion() -> None:
    def init(key: jax.Array) -> jax.Array:
        for layer in range(400):
            key = jax.random.fold_in(key, layer)
        return jax.random.key_data(key)

    params = lazy(init, KEY)
    (value,) = initializer(params, table(params.abstract)).make([Piece(0, 0)])
    np.testing.assert_array_equal(value, init(KEY))


def test_what_a_leaf_does_not_need_can_be_abstract() -> None:
    batch = jax.ShapeDtypeStruct((2, 8), jnp.float32)
    params = lazy(Block().init, KEY, batch)
    made = initializer(params, table(params.abstract))
    (value,) = made.make([Piece(1, 0)])
    np.testing.assert_array_equal(value, jax.tree.leaves(jax.jit(Block().init)(KEY, jnp.ones((2, 8))))[1])

    params = lazy(lambda key, x: {"w": jax.random.normal(key, (2,)) + x.mean()}, KEY, batch)
    with pytest.raises(InitError, match=r"w: depends on the value of argument 0/1, .* give the array"):
        initializer(params, table(params.abstract)).make([Piece(0, 0)])


def test_a_table_of_another_tree_is_refused() -> None:
    params = lazy(lambda key: {"w": jnp.zeros((3, 2))}, KEY)
    with pytest.raises(InitError, match="w: its shape is"):
        initializer(params, table({"w": jnp.zeros((2, 3))}))
    with pytest.raises(InitError, match="1 leaves, its table 2"):
        initializer(params, table({"w": jnp.zeros((2, 3)), "b": jnp.zeros(2)}))


_RSS = """
import resource, jax, jax.numpy as jnp
from zinf_jax.graph.lazy import initializer, lazy
from zinf_jax.leaves import classify, with_stacks

def init(key):
    first, second = jax.random.split(key)
    layer = lambda k: jax.random.uniform(k, (1024, 1)) * jnp.linspace(0, 1, 2048)
    table = jax.random.uniform(second, (12288, 1024))
    return {"layers": jax.vmap(layer)(jax.random.split(first, 122)), "table": table}

params = lazy(init, jax.random.key(0))
leaves = with_stacks(classify(params.abstract), {0: 1})
made = initializer(params, leaves)
pieces = [piece for leaf in leaves for piece in leaf.pieces]
planned = max(made.peak_bytes([piece]) for piece in (pieces[0], pieces[-1]))
jax.jit(lambda x: x + 1)(jnp.ones(3))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
total = sum(made.make([piece])[0].nbytes for piece in pieces)
print(total, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024, planned)
"""


def test_a_model_of_a_gibibyte_is_never_whole() -> None:
    done = subprocess.run([sys.executable, "-c", _RSS], capture_output=True, text=True, check=True)
    total, grown, planned = map(int, done.stdout.split())
    assert total >= 1 << 30
    assert grown < 250 << 20
    assert planned < 200 << 20


# ------------------------------------------------------------------------------------------------- arrays that exist


def test_pieces_of_arrays_are_views() -> None:
    array = np.arange(24.0).reshape(4, 3, 2).astype(np.float32)
    tree: dict[str, Any] = {"w": array, "s": 2.0, "k": jax.random.split(KEY, 3), "i": jnp.arange(4)}
    leaves = table(tree, lambda name: int(name == "w"))
    made = initializer(tree, leaves)
    by_name = {leaf.name: leaf for leaf in leaves}
    (piece,) = made.make([by_name["w"].pieces[2]])
    np.testing.assert_array_equal(piece, array[2])
    assert np.shares_memory(piece, array)
    scalar, keys, ints = made.make([by_name["s"].pieces[0], by_name["k"].pieces[0], by_name["i"].pieces[0]])
    assert scalar.dtype == np.float32 and scalar == 2.0
    np.testing.assert_array_equal(keys, jax.random.key_data(tree["k"]))
    np.testing.assert_array_equal(ints, [0, 1, 2, 3])
    assert made.peak_bytes([by_name["w"].pieces[0]]) == 24


def test_arrays_that_are_gone_or_abstract_are_named() -> None:
    tree = {"w": jnp.ones((4, 3))}
    made = initializer(tree, table(tree))
    tree["w"].delete()
    with pytest.raises(InitError, match="w: the array was donated"):
        made.make([Piece(0, 0)])
    abstract = {"w": jax.ShapeDtypeStruct((2,), jnp.float32)}
    with pytest.raises(InitError, match="w: is a ShapeDtypeStruct"):
        initializer(abstract, table(abstract))


_SHARDED = """
import jax, numpy as np
jax.config.update("jax_num_cpu_devices", 4)
from jax.sharding import NamedSharding, PartitionSpec as P
from zinf_jax.graph.lazy import initializer
from zinf_jax.leaves import classify, with_stacks

mesh = jax.make_mesh((2, 2), ("a", "b"))
whole = np.arange(6 * 4 * 8, dtype=np.float32).reshape(6, 4, 8)
for spec in (P("a", "b"), P(None, "a"), P(None, None, ("a", "b")), P("a"), P()):
    tree = {"w": jax.device_put(whole, NamedSharding(mesh, spec))}
    for stack in (0, 1, 2):
        leaves = with_stacks(classify(tree), {0: stack})
        made = initializer(tree, leaves)
        for piece, expected in zip(leaves[0].pieces, whole.reshape(-1, *leaves[0].piece_shape), strict=True):
            np.testing.assert_array_equal(made.make([piece])[0], expected)
print("ok")
"""


def test_sharded_arrays_are_read_shard_by_shard() -> None:
    done = subprocess.run([sys.executable, "-c", _SHARDED], capture_output=True, text=True)
    assert done.stdout == "ok\n", done.stderr
