"""Models that nobody here wrote, or written the way others write them: what cutting and lazy init must work on.

`MODELS[name]()` makes a `Model`. Everything is tiny, and has enough depth that a cut into several units and the sharing
of programs between layers can be seen. Nothing is downloaded: transformers' models get random weights.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

SEQ, BATCH, VOCAB, WIDTH = 6, 2, 19, 16


@dataclasses.dataclass(frozen=True)
class Model:
    """A model and its loss.

    Attributes:
      loss_fn: (params, *args) -> loss, or (loss, anything else).
      init: key -> params. Traceable; params may hold leaves that are not arrays.
      args: What the loss takes after params: (batch,), (batch, rng), (state, batch) or (state, batch, rng).
      has_aux: The loss function returns (loss, anything else).
      stack_ndim: Number of stacked dims of a leaf, by its name.
      max_programs: Programs that a cut into at least four units should need at most: equal layers share.
      rtol: How close gradients are to `jax.grad`'s, relative to a leaf's norm.
    """

    loss_fn: Callable[..., Any]
    init: Callable[[jax.Array], Any]
    args: tuple[Any, ...]
    has_aux: bool = False
    stack_ndim: Callable[[str], int] = lambda name: 0
    max_programs: int = 10
    rtol: float = 1e-5

    def params(self, seed: int = 0) -> Any:
        """A parameter tree: random floats (no zero biases that would hide a mistake), other leaves from `init`."""
        static: dict[str, Any] = {}

        def others(key: jax.Array) -> list[Any]:
            leaves, static["tree"] = jax.tree.flatten(self.init(key))
            static["leaves"] = [jax.typeof(leaf) if _is_float(leaf) else leaf for leaf in leaves]
            return [leaf for leaf in leaves if _is_array(leaf) and not _is_float(leaf)]

        made = iter(jax.jit(others)(jax.random.key(seed)))
        rng = np.random.default_rng(seed)
        leaves = [next(made) if _is_array(leaf) else leaf for leaf in static["leaves"]]
        floating = [isinstance(leaf, jax.core.ShapedArray) for leaf in leaves]
        values = [
            jnp.asarray(rng.normal(0.1, 0.2, leaf.shape), leaf.dtype) if is_float else leaf
            for leaf, is_float in zip(leaves, floating, strict=True)
        ]
        return jax.tree.unflatten(static["tree"], values)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray)


def _is_float(leaf: Any) -> bool:
    return _is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating)


def flat_init(init: Callable[[jax.Array], Any], key: jax.Array) -> list[Any]:
    """The flattened result of `jax.jit(init)(key)`, for trees that hold other things than arrays as well."""
    static: list[Any] = []

    def arrays(key: jax.Array) -> list[Any]:
        leaves = jax.tree.leaves(init(key))
        static[:] = [None if _is_array(leaf) else leaf for leaf in leaves]
        return [leaf for leaf in leaves if _is_array(leaf)]

    made = iter(jax.jit(arrays)(key))
    return [next(made) if leaf is None else leaf for leaf in static]


MODELS: dict[str, Callable[[], Model]] = {}


def model(make: Callable[[], Model]) -> Callable[[], Model]:
    MODELS[make.__name__] = make
    return make


def tokens(shape: tuple[int, ...] = (BATCH, SEQ), vocab: int = VOCAB, seed: int = 1) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(2, vocab, shape), jnp.int32)


def floats(*shape: int, seed: int = 2) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    logp = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.take_along_axis(logp, labels[..., None], -1).mean()


# --------------------------------------------------------------------------------------------------------- flax linen


def _linen_block(width: int = WIDTH, dropout: float = 0.0) -> Any:
    import flax.linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> Any:
            h = nn.LayerNorm()(x)
            h = nn.MultiHeadDotProductAttention(num_heads=2, qkv_features=width)(h, mask=mask)
            x = x + nn.Dropout(dropout, deterministic=not dropout)(h)
            h = nn.Dense(4 * width)(nn.LayerNorm()(x))
            h = nn.Dense(width)(nn.gelu(h))
            return x + nn.Dropout(dropout, deterministic=not dropout)(h)

    return Block


def _linen_gpt(
    depth: int, make_stack: Callable[[Any], Callable[[jax.Array, jax.Array], jax.Array]], dropout: float
) -> Any:
    import flax.linen as nn

    class GPT(nn.Module):
        @nn.compact
        def __call__(self, ids: jax.Array) -> jax.Array:
            embed = nn.Embed(VOCAB, WIDTH)
            x = embed(ids) + self.param("positions", nn.initializers.normal(0.02), (SEQ, WIDTH))
            x = make_stack(_linen_block(dropout=dropout))(x, nn.make_causal_mask(ids))
            return embed.attend(nn.LayerNorm()(x))

    return GPT()


def _linen_model(gpt: Any, *, dropout: bool = False, **kwargs: Any) -> Model:
    def loss_fn(params: Any, batch: Any, rng: Any = None) -> jax.Array:
        rngs = {"dropout": rng} if dropout else None
        return cross_entropy(gpt.apply({"params": params}, batch["ids"], rngs=rngs)[:, :-1], batch["ids"][:, 1:])

    def init(key: jax.Array) -> Any:
        return gpt.init({"params": key, "dropout": key}, tokens())["params"]

    args: tuple[Any, ...] = ({"ids": tokens()},)
    return Model(loss_fn, init, (*args, jax.random.key(7)) if dropout else args, **kwargs)


@model
def linen_gpt() -> Model:
    """Unrolled, tied embedding, dropout with the rng as an argument."""

    def stack(block: Any) -> Any:
        def run(x: jax.Array, mask: jax.Array) -> jax.Array:
            for layer in range(4):
                x = block(name=f"block_{layer}")(x, mask)
            return x

        return run

    return _linen_model(_linen_gpt(4, stack, 0.1), dropout=True)


@model
def linen_gpt_remat_jitted() -> Model:
    """nn.remat around each block; the loss is jitted, and casts all parameters up front."""
    import flax.linen as nn

    def stack(block: Any) -> Any:
        def run(x: jax.Array, mask: jax.Array) -> jax.Array:
            for layer in range(4):
                x = nn.remat(block)(name=f"block_{layer}")(x, mask)
            return x

        return run

    plain = _linen_model(_linen_gpt(4, stack, 0.0))

    @jax.jit
    def loss_fn(params: Any, batch: Any) -> jax.Array:
        cast = jax.tree.map(lambda p: p.astype(jnp.bfloat16).astype(jnp.float32), params)
        return plain.loss_fn(cast, batch)

    # The two uses of the embedding are rounded to bf16 one by one where the cast is repeated at each.
    return dataclasses.replace(plain, loss_fn=loss_fn, rtol=2**-8)


@model
def linen_gpt_scan() -> Model:
    """nn.scan over the blocks, an rng split for each."""
    import flax.linen as nn

    def stack(block: Any) -> Any:
        class Scanned(nn.Module):
            @nn.compact
            def __call__(self, x: jax.Array, mask: jax.Array) -> Any:
                return block()(x, mask), None

        def run(x: jax.Array, mask: jax.Array) -> jax.Array:
            scanned = nn.scan(
                Scanned,
                variable_axes={"params": 0},
                split_rngs={"params": True, "dropout": True},
                in_axes=nn.broadcast,
                length=4,
            )
            return scanned(name="layers")(x, mask)[0]

        return run

    gpt = _linen_gpt(4, stack, 0.1)
    return _linen_model(gpt, dropout=True, stack_ndim=lambda name: int("layers" in name))


@model
def linen_remat_scan() -> Model:
    """nn.remat_scan: two nested scans with remat, over (2, 2) layers."""
    import flax.linen as nn

    class MLPBlock(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            h = nn.Dense(2 * WIDTH)(nn.RMSNorm()(x))
            return x + nn.Dense(WIDTH)(nn.silu(h))

    class Net(nn.Module):
        @nn.compact
        def __call__(self, ids: jax.Array) -> jax.Array:
            x = nn.Embed(VOCAB, WIDTH)(ids)
            x = nn.remat_scan(MLPBlock, lengths=(2, 2))(name="layers")(x)
            return nn.Dense(VOCAB)(x)

    return _linen_model(Net(), stack_ndim=lambda name: 2 if "layers" in name else 0)


@model
def linen_resnet() -> Model:
    """Convolutions, BatchNorm statistics in the state, dropout."""
    import flax.linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            h = nn.Conv(8, (3, 3), use_bias=False)(x)
            h = nn.relu(nn.BatchNorm(use_running_average=False)(h))
            h = nn.BatchNorm(use_running_average=False)(nn.Conv(8, (3, 3), use_bias=False)(h))
            return nn.relu(x + h)

    class ResNet(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.Conv(8, (3, 3))(x)
            for _ in range(3):
                x = Block()(x)
            x = nn.max_pool(x, (2, 2), (2, 2)).mean((1, 2))
            x = nn.Dropout(0.5, deterministic=False)(x)
            return nn.Dense(5)(x)

    net = ResNet()
    images = floats(4, 8, 8, 3)
    variables = net.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, images)

    def loss_fn(params: Any, state: Any, batch: Any, rng: jax.Array) -> Any:
        logits, new_state = net.apply(
            {"params": params, "batch_stats": state}, batch["x"], rngs={"dropout": rng}, mutable=["batch_stats"]
        )
        return cross_entropy(logits, batch["y"]), new_state["batch_stats"]

    def init(key: jax.Array) -> Any:
        return net.init({"params": key, "dropout": key}, images)["params"]

    batch = {"x": images, "y": tokens((4,), 5)}
    return Model(loss_fn, init, (variables["batch_stats"], batch, jax.random.key(3)), has_aux=True)


@model
def linen_lstm() -> Model:
    """Two nn.RNN layers: the scan is over time, its parameters are constants of the loop."""
    import flax.linen as nn

    class Net(nn.Module):
        @nn.compact
        def __call__(self, ids: jax.Array) -> jax.Array:
            x: Any = nn.Embed(VOCAB, WIDTH)(ids)
            x = nn.RNN(nn.LSTMCell(WIDTH))(x)
            x = nn.RNN(nn.GRUCell(WIDTH))(x)
            return nn.Dense(VOCAB)(x)

    return _linen_model(Net())


# ----------------------------------------------------------------------------------------------------------- flax nnx


@model
def nnx_transformer() -> Model:
    """nnx with dropout: the parameters are a State, the rng counts travel through the state."""
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)
            self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
            self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            x = x + self.attention(self.norm(x))
            return x + self.dropout(self.down(nnx.gelu(self.up(x))))

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
            self.blocks = nnx.List([Block(rngs) for _ in range(3)])
            self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

        def __call__(self, ids: jax.Array) -> jax.Array:
            x = self.embed(ids)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    return _nnx_model(Net, lambda net, batch: cross_entropy(net(batch), batch), tokens())


@model
def nnx_batchnorm() -> Model:
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.first = nnx.Linear(6, WIDTH, rngs=rngs)
            self.hidden = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(4)])
            self.norms = nnx.List([nnx.BatchNorm(WIDTH, rngs=rngs) for _ in range(4)])
            self.dropout = nnx.Dropout(0.2, rngs=rngs)
            self.last = nnx.Linear(WIDTH, 3, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            x = self.first(x)
            for linear, norm in zip(self.hidden, self.norms, strict=True):
                x = self.dropout(nnx.relu(norm(linear(x))))
            return self.last(x)

    return _nnx_model(Net, lambda net, batch: jnp.mean(net(batch) ** 2), floats(8, 6))


@model
def nnx_scan() -> Model:
    """Layers made by nnx.vmap over split rngs, run by nnx.scan."""
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return x + nnx.gelu(self.linear(self.norm(x)))

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            @nnx.split_rngs(splits=4)
            @nnx.vmap(in_axes=(0,), out_axes=0)
            def make(rngs: nnx.Rngs) -> Block:
                return Block(rngs)

            self.layers = make(rngs)
            self.head = nnx.Linear(WIDTH, 3, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            def run(x: jax.Array, block: Block) -> jax.Array:
                return block(x)

            return self.head(run(x, self.layers))

    made = _nnx_model(Net, lambda net, batch: jnp.mean(net(batch) ** 2), floats(4, WIDTH))
    return dataclasses.replace(made, stack_ndim=lambda name: int("layers" in name))


def _nnx_model(net_class: Any, loss: Callable[[Any, Any], jax.Array], batch: Any) -> Model:
    from flax import nnx

    parts: Any = nnx.split(net_class(nnx.Rngs(0)), nnx.Param, ...)
    graphdef, _, state = parts

    def loss_fn(params: Any, state: Any, batch: Any) -> Any:
        net = nnx.merge(graphdef, params, state, copy=True)  # variables may change at this trace level only
        value = loss(net, batch)
        new_parts: Any = nnx.split(net, nnx.Param, ...)
        return value, new_parts[2]

    def init(key: jax.Array) -> Any:
        return nnx.split(net_class(nnx.Rngs(key)), nnx.Param, ...)[1]

    return Model(loss_fn, init, (state, batch), has_aux=True)


# ------------------------------------------------------------------------------------------------------------ equinox


@model
def equinox_mlp() -> Model:
    """The module itself is the parameter tree: its activation function is a leaf that is not an array."""
    import equinox as eqx

    def init(key: jax.Array) -> Any:
        return eqx.nn.MLP(6, 3, WIDTH, 4, activation=jax.nn.gelu, key=key)

    def loss_fn(mlp: Any, batch: Any) -> jax.Array:
        return jnp.mean((jax.vmap(mlp)(batch["x"]) - batch["y"]) ** 2)

    return Model(loss_fn, init, ({"x": floats(5, 6), "y": floats(5, 3)},))


@model
def equinox_transformer() -> Model:
    """eqx.partition: the arrays are the parameters, None stands for the rest; dropout keys split by the user."""
    import equinox as eqx

    class Block(eqx.Module):
        norm: eqx.nn.LayerNorm
        attention: eqx.nn.MultiheadAttention
        mlp: eqx.nn.MLP
        dropout: eqx.nn.Dropout

        def __init__(self, key: jax.Array):
            first, second = jax.random.split(key)
            self.norm = eqx.nn.LayerNorm(WIDTH)
            self.attention = eqx.nn.MultiheadAttention(2, WIDTH, key=first)
            self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 2 * WIDTH, 1, key=second)
            self.dropout = eqx.nn.Dropout(0.1)

        def __call__(self, x: jax.Array, key: jax.Array) -> jax.Array:
            h = jax.vmap(self.norm)(x)
            x = x + self.attention(h, h, h)
            return x + self.dropout(jax.vmap(self.mlp)(x), key=key)

    class Net(eqx.Module):
        embed: eqx.nn.Embedding
        blocks: list[Block]
        head: eqx.nn.Linear

        def __init__(self, key: jax.Array):
            keys = jax.random.split(key, 5)
            self.embed = eqx.nn.Embedding(VOCAB, WIDTH, key=keys[0])
            self.blocks = [Block(k) for k in keys[1:4]]
            self.head = eqx.nn.Linear(WIDTH, VOCAB, key=keys[4])

        def __call__(self, ids: jax.Array, key: jax.Array) -> jax.Array:
            x = jax.vmap(self.embed)(ids)
            for block, k in zip(self.blocks, jax.random.split(key, 3), strict=True):
                x = block(x, k)
            return jax.vmap(self.head)(x)

    static = eqx.partition(Net(jax.random.key(0)), eqx.is_inexact_array)[1]

    def init(key: jax.Array) -> Any:
        return eqx.partition(Net(key), eqx.is_inexact_array)[0]

    def loss_fn(params: Any, batch: jax.Array, rng: jax.Array) -> jax.Array:
        net = eqx.combine(params, static)
        return cross_entropy(jax.vmap(net)(batch, jax.random.split(rng, BATCH)), batch)

    return Model(loss_fn, init, (tokens(), jax.random.key(5)))


# ------------------------------------------------------------------------------------------------------- haiku, others


def _haiku_block(x: Any) -> Any:
    import haiku as hk

    norm = hk.LayerNorm(-1, True, True)
    x = x + hk.MultiHeadAttention(2, WIDTH // 2, w_init_scale=1.0)(norm(x), norm(x), norm(x))
    h = jax.nn.gelu(hk.Linear(2 * WIDTH)(x))
    return x + hk.dropout(hk.next_rng_key(), 0.1, hk.Linear(WIDTH)(h))


def _haiku_model(stack: Callable[[jax.Array], jax.Array], **kwargs: Any) -> Model:
    import haiku as hk

    def forward(ids: jax.Array) -> jax.Array:
        return hk.Linear(VOCAB)(stack(hk.Embed(VOCAB, WIDTH)(ids)))

    net = hk.transform(forward)

    def loss_fn(params: Any, batch: jax.Array, rng: jax.Array) -> jax.Array:
        return cross_entropy(net.apply(params, rng, batch), batch)

    return Model(loss_fn, lambda key: net.init(key, tokens()), (tokens(), jax.random.key(11)), **kwargs)


@model
def haiku_transformer() -> Model:
    def stack(x: jax.Array) -> jax.Array:
        for _ in range(3):
            x = _haiku_block(x)
        return x

    return _haiku_model(stack)


@model
def haiku_layer_stack() -> Model:
    """hk.layer_stack: a scan over stacked parameters."""
    import haiku as hk

    def stack(x: jax.Array) -> jax.Array:
        return hk.experimental.layer_stack(4)(_haiku_block)(x)

    return _haiku_model(stack, stack_ndim=lambda name: int("layer_stack" in name))


@model
def stax_convnet() -> Model:
    """jax.example_libraries.stax: parameters in nested tuples, empty ones among them."""
    from jax.example_libraries import stax

    layers = [stax.Conv(4, (3, 3), padding="SAME"), stax.BatchNorm(), stax.Relu]
    init_fn, apply_fn = stax.serial(*layers * 3, stax.AvgPool((2, 2)), stax.Flatten, stax.Dense(7), stax.LogSoftmax)
    shape = (2, 6, 6, 3)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        return -jnp.mean(jnp.take_along_axis(apply_fn(params, batch["x"]), batch["y"][:, None], 1))

    return Model(loss_fn, lambda key: init_fn(key, shape)[1], ({"x": floats(*shape), "y": tokens((2,), 7)},))


# ------------------------------------------------------------------------------------------------------- transformers


def _hf(module_class: Any, config: Any, loss: Callable[..., jax.Array], batch: dict[str, Any], **options: Any) -> Model:
    """A Flax model of transformers with random weights; dropout on."""
    net = module_class(config, _do_init=False, **options)

    def init(key: jax.Array) -> Any:
        return net.init_weights(key, net.input_shape)

    def loss_fn(params: Any, batch: Any, rng: jax.Array) -> jax.Array:
        return loss(net, params, batch, rng)

    return Model(loss_fn, init, (batch, jax.random.key(13)))


class _OldNumpy:
    def __getattr__(self, name: str) -> Any:
        return getattr(jnp, name)

    @staticmethod
    def clip(x: jax.Array, a_min: Any = None, a_max: Any = None) -> jax.Array:
        return jnp.clip(x, a_min, a_max)


def _language_loss(net: Any, params: Any, batch: Any, rng: jax.Array) -> jax.Array:
    logits = net(batch["ids"], params=params, dropout_rng=rng, train=True).logits
    return cross_entropy(logits[:, :-1], batch["ids"][:, 1:])


@model
def hf_gpt2() -> Model:
    from transformers import FlaxGPT2LMHeadModel, GPT2Config

    config = GPT2Config(n_layer=3, n_embd=WIDTH, n_head=2, vocab_size=VOCAB, n_positions=8)
    return _hf(FlaxGPT2LMHeadModel, config, _language_loss, {"ids": tokens()})


@model
def hf_llama() -> Model:
    from transformers import FlaxLlamaForCausalLM, LlamaConfig

    config = LlamaConfig(
        num_hidden_layers=3, hidden_size=WIDTH, intermediate_size=24, num_attention_heads=2, vocab_size=VOCAB,
        max_position_embeddings=32,
    )  # fmt: skip
    return _hf(FlaxLlamaForCausalLM, config, _language_loss, {"ids": tokens()})


@model
def hf_bert() -> Model:
    """Masked language model with a tied decoder, next-sentence head and an unused pooler beside it."""
    from transformers import BertConfig, FlaxBertForMaskedLM

    config = BertConfig(
        num_hidden_layers=3, hidden_size=WIDTH, intermediate_size=32, num_attention_heads=2, vocab_size=VOCAB,
        max_position_embeddings=8,
    )  # fmt: skip
    return _hf(FlaxBertForMaskedLM, config, _language_loss, {"ids": tokens()})


@model
def hf_roberta() -> Model:
    from transformers import FlaxRobertaForSequenceClassification, RobertaConfig

    config = RobertaConfig(
        num_hidden_layers=2, hidden_size=WIDTH, intermediate_size=32, num_attention_heads=2, vocab_size=VOCAB,
        max_position_embeddings=12, num_labels=3,
    )  # fmt: skip

    def loss(net: Any, params: Any, batch: Any, rng: jax.Array) -> jax.Array:
        logits = net(batch["ids"], params=params, dropout_rng=rng, train=True).logits
        return cross_entropy(logits, batch["labels"])

    return _hf(FlaxRobertaForSequenceClassification, config, loss, {"ids": tokens(), "labels": tokens((BATCH,), 3)})


@model
def hf_t5() -> Model:
    """Encoder and decoder, cross attention, relative position biases that all layers of a side share."""
    from transformers import FlaxT5ForConditionalGeneration, T5Config
    from transformers.models.t5 import modeling_flax_t5

    modeling_flax_t5.jnp = cast(Any, _OldNumpy())  # it calls clip(a_max=...), which JAX has removed

    config = T5Config(
        num_layers=2, num_decoder_layers=2, d_model=WIDTH, d_ff=32, d_kv=8, num_heads=2, vocab_size=VOCAB,
        relative_attention_num_buckets=4,
    )  # fmt: skip

    def loss(net: Any, params: Any, batch: Any, rng: jax.Array) -> jax.Array:
        logits = net(
            batch["ids"], decoder_input_ids=batch["targets"], params=params, dropout_rng=rng, train=True
        ).logits
        return cross_entropy(logits[:, :-1], batch["targets"][:, 1:])

    return _hf(FlaxT5ForConditionalGeneration, config, loss, {"ids": tokens(), "targets": tokens(seed=3)})


@model
def hf_bart() -> Model:
    from transformers import BartConfig, FlaxBartForConditionalGeneration

    config = BartConfig(
        encoder_layers=2, decoder_layers=2, d_model=WIDTH, encoder_ffn_dim=32, decoder_ffn_dim=32, vocab_size=VOCAB,
        encoder_attention_heads=2, decoder_attention_heads=2, max_position_embeddings=8,
        pad_token_id=1, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=2,
    )  # fmt: skip

    def loss(net: Any, params: Any, batch: Any, rng: jax.Array) -> jax.Array:
        logits = net(
            batch["ids"], decoder_input_ids=batch["targets"], params=params, dropout_rng=rng, train=True
        ).logits
        return cross_entropy(logits[:, :-1], batch["targets"][:, 1:])

    return _hf(FlaxBartForConditionalGeneration, config, loss, {"ids": tokens(), "targets": tokens(seed=3)})


@model
def hf_vit() -> Model:
    from transformers import FlaxViTForImageClassification, ViTConfig

    config = ViTConfig(
        num_hidden_layers=3, hidden_size=WIDTH, intermediate_size=32, num_attention_heads=2, image_size=8, patch_size=4,
        num_labels=3,
    )  # fmt: skip

    def loss(net: Any, params: Any, batch: Any, rng: jax.Array) -> jax.Array:
        logits = net(batch["pixels"], params=params, dropout_rng=rng, train=True).logits
        return cross_entropy(logits, batch["labels"])

    return _hf(FlaxViTForImageClassification, config, loss, {"pixels": floats(2, 3, 8, 8), "labels": tokens((2,), 3)})


@model
def hf_whisper() -> Model:
    from transformers import FlaxWhisperForConditionalGeneration, WhisperConfig

    config = WhisperConfig(
        encoder_layers=2, decoder_layers=2, d_model=WIDTH, encoder_ffn_dim=32, decoder_ffn_dim=32, vocab_size=VOCAB,
        encoder_attention_heads=2, decoder_attention_heads=2, num_mel_bins=4, max_source_positions=6,
        max_target_positions=8, pad_token_id=1, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2,
    )  # fmt: skip

    def loss(net: Any, params: Any, batch: Any, rng: jax.Array) -> jax.Array:
        logits = net(
            batch["features"], decoder_input_ids=batch["targets"], params=params, dropout_rng=rng, train=True
        ).logits
        return cross_entropy(logits[:, :-1], batch["targets"][:, 1:])

    batch = {"features": floats(2, 4, 12), "targets": tokens(seed=3)}
    return _hf(FlaxWhisperForConditionalGeneration, config, loss, batch, input_shape=(1, 4, 12))


@model
def hf_clip() -> Model:
    """Two towers and a contrastive loss over both."""
    from transformers import CLIPConfig, FlaxCLIPModel

    tower = {"num_hidden_layers": 2, "hidden_size": WIDTH, "intermediate_size": 32, "num_attention_heads": 2}
    config = CLIPConfig(
        text_config={**tower, "vocab_size": VOCAB, "max_position_embeddings": 8, "eos_token_id": 2},
        vision_config={**tower, "image_size": 8, "patch_size": 4},
        projection_dim=8,
    )

    def loss(net: Any, params: Any, batch: Any, rng: jax.Array) -> jax.Array:
        out = net(batch["ids"], batch["pixels"], params=params, dropout_rng=rng, train=True)
        return cross_entropy(out.logits_per_text, jnp.arange(BATCH))

    batch = {"ids": tokens(), "pixels": floats(BATCH, 3, 8, 8)}
    return _hf(FlaxCLIPModel, config, loss, batch, input_shape=((1, SEQ), (1, 8, 8, 3)))


# -------------------------------------------------------------------------------------------------------- plain JAX


@jax.custom_vjp
def _clipped(x: jax.Array) -> jax.Array:
    return x * jax.nn.sigmoid(x)


_clipped.defvjp(lambda x: (_clipped(x), x), lambda x, g: (jnp.clip(g, -0.01, 0.01) * jax.nn.sigmoid(x),))


@jax.custom_vjp
def _straight_through(x: jax.Array) -> jax.Array:
    return x * jax.nn.sigmoid(x)


_straight_through.defvjp(lambda x: (_straight_through(x), None), lambda _, g: (g,))


@jax.custom_jvp
def _leaky(x: jax.Array) -> jax.Array:
    return jnp.maximum(x, 0.1 * x)


@_leaky.defjvp
def _leaky_jvp(primals: Any, tangents: Any) -> Any:
    (x,), (t,) = primals, tangents
    return _leaky(x), jnp.where(x > 0, t, 0.3 * t)


@model
def custom_rules() -> Model:
    """Layers with equal forward passes and different custom rules."""
    rules: list[Any] = [_clipped, _straight_through, _leaky, _clipped, _straight_through, _leaky]

    def init(key: jax.Array) -> Any:
        return [
            {"w": jax.random.normal(k, (WIDTH, WIDTH)) / 4, "b": jnp.zeros(WIDTH)} for k in jax.random.split(key, 6)
        ]

    def loss_fn(params: Any, batch: jax.Array) -> jax.Array:
        x = batch
        for layer, rule in zip(params, rules, strict=True):
            x = x + rule(x @ layer["w"] + layer["b"])
        return jnp.mean(x**2)

    return Model(loss_fn, init, (floats(3, WIDTH),))


@model
def control_flow() -> Model:
    """cond, switch, while and fori on values of the batch and of the parameters, inside layers."""

    def init(key: jax.Array) -> Any:
        keys = jax.random.split(key, 4)
        return {
            f"layer_{k}": {"w": jax.random.normal(keys[k], (WIDTH, WIDTH)) / 4, "gate": jnp.ones(())} for k in range(4)
        }

    def layer(params: Any, x: jax.Array, count: Any) -> jax.Array:
        h = x @ params["w"]
        h = jax.lax.cond(params["gate"] * h.sum() > 0, jnp.tanh, lambda v: params["gate"] * jnp.sin(v), h)
        h = jax.lax.fori_loop(0, 3, lambda i, v: v + jnp.tanh(v @ params["w"]) / (i + 2), h)
        return x + jax.lax.switch(count, [lambda v: v, lambda v: v * params["gate"], jnp.cos], h)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        # How many halvings until the batch is small: a loop on batch floats, without a derivative.
        halvings = jax.lax.while_loop(lambda s: s[0].max() > 1, lambda s: (s[0] / 2, s[1] + 1), (x, 0))[1]
        for name in sorted(params):
            x = layer(params[name], x, halvings % 3)
        return jnp.mean(x**2)

    return Model(loss_fn, init, ({"x": floats(3, WIDTH)},))


@model
def plain_stacked() -> Model:
    """Hand-written scan over stacked parameters; L2 term on them; integer, frozen-like, unused and scalar leaves."""

    def init(key: jax.Array) -> Any:
        keys = jax.random.split(key, 4)
        return {
            "layers": {
                "w": jax.vmap(lambda k: jax.random.normal(k, (WIDTH, WIDTH)) / 4)(keys),
                "b": jnp.zeros((4, WIDTH)),
            },
            "order": jnp.arange(WIDTH)[::-1],
            "scale": jnp.float32(1.5),
            "unused": jnp.ones((3,)),
            "empty": jnp.zeros((0, 2)),
            "key": jax.random.key(3),
        }

    def loss_fn(params: Any, batch: jax.Array) -> jax.Array:
        def body(x: jax.Array, layer: Any) -> Any:
            return x + jnp.tanh(x @ layer["w"] + layer["b"]), None

        noise = jax.random.normal(params["key"], batch.shape) * 0.1
        x = jax.lax.scan(body, (batch + noise)[:, params["order"]] * params["scale"], params["layers"])[0]
        return jnp.mean(x**2) + 1e-3 * jnp.sum(params["layers"]["w"] ** 2)

    return Model(loss_fn, init, (floats(3, WIDTH),), stack_ndim=lambda name: int("layers" in name))
