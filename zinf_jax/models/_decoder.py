"""A decoder-only Flax transformer, plain enough to read in one sitting; nothing in it knows that it will be streamed.

Pre-norm blocks of RMSNorm, causal attention and a GELU MLP, learned positions, no biases, an untied output head.

Weights may be stored in any dtype (the trainer hands them over in bf16 or fp16 where the config says so); every product
is done in `matmul_dtype`, to which the weight is cast first: a CPU without bf16 units multiplies bf16 many times slower
than float32. Activations between blocks are in `matmul_dtype` too. Norms, softmax and the loss are in float32.

Shapes: B batch, T tokens, D model, H heads, K head, V vocabulary.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from zinf_jax.errors import ConfigError
from zinf_jax.models._spec import ModelSpec


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Sizes and options of a decoder.

    Attributes:
      dim, num_layers, num_heads, vocab_size, seq_len: Sizes; `seq_len` is the number of learned positions.
      mlp_ratio: Hidden size of the MLP over `dim`.
      tied: The output projection is the token embedding, transposed.
      scan: Layers are stacked and run by `nn.scan`; otherwise unrolled.
      remat: Each block is recomputed in backward. Streamed training ignores it and goes by `streaming.remat_policy`.
      dropout: Rate after the embedding, attention and MLP; above 0 the loss takes an rng.
      param_dtype: Dtype in which `init_fn` makes the weights.
      matmul_dtype: Dtype of products and activations.
    """

    dim: int = 512
    num_layers: int = 6
    num_heads: int = 8
    vocab_size: int = 16384
    seq_len: int = 256
    mlp_ratio: int = 4
    tied: bool = False
    scan: bool = False
    remat: bool = True
    dropout: float = 0.0
    param_dtype: str = "float32"
    matmul_dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("dim", "num_layers", "num_heads", "vocab_size", "seq_len", "mlp_ratio"):
            if getattr(self, name) < 1:
                raise ConfigError(f"decoder: {name} must be at least 1, got {getattr(self, name)}")
        if self.dim % self.num_heads:
            raise ConfigError(f"decoder: dim ({self.dim}) must be a multiple of num_heads ({self.num_heads})")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"decoder: dropout must be in [0, 1), got {self.dropout}")
        for name in ("param_dtype", "matmul_dtype"):
            if getattr(self, name) not in ("float32", "bfloat16", "float16"):
                raise ConfigError(f"decoder: {name} is {getattr(self, name)!r}: float32, bfloat16 or float16")


SIZES: dict[str, DecoderConfig] = {
    "tiny": DecoderConfig(dim=64, num_layers=2, num_heads=4, vocab_size=512, seq_len=32),
    "25m": DecoderConfig(dim=512, num_layers=6, num_heads=8, vocab_size=8192),
    "50m": DecoderConfig(dim=512, num_layers=12, num_heads=8),
    "125m": DecoderConfig(dim=768, num_layers=12, num_heads=12),
    "350m": DecoderConfig(dim=1024, num_layers=24, num_heads=16),
    "1.3b": DecoderConfig(dim=2048, num_layers=24, num_heads=16),
    "2.7b": DecoderConfig(dim=2560, num_layers=32, num_heads=32),
    "4.2b": DecoderConfig(dim=3072, num_layers=36, num_heads=24),
    "5.1b": DecoderConfig(dim=3584, num_layers=32, num_heads=28),
    "6.7b": DecoderConfig(dim=4096, num_layers=32, num_heads=32),
}
"""Named sizes. "25m" has 27.4M parameters with its vocabulary of 8192; the larger ones are named by their parameters
with a vocabulary of 16384. The step benchmark compares 50m to 1.3b."""


def _init(stddev: float = 0.02) -> Any:
    return nn.initializers.normal(stddev)


def _dtypes(c: DecoderConfig) -> dict[str, Any]:
    return {"dtype": jnp.dtype(c.matmul_dtype), "param_dtype": jnp.dtype(c.param_dtype)}


class _Block(nn.Module):
    config: DecoderConfig

    def _dense(self, features: int, name: str, stddev: float = 0.02) -> nn.Dense:
        return nn.Dense(features, use_bias=False, kernel_init=_init(stddev), name=name, **_dtypes(self.config))

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        c = self.config
        # Outputs of a residual branch start small, so that the stream's variance does not grow with the depth.
        stddev_out = 0.02 / (2 * c.num_layers) ** 0.5
        h_BTD = _norm(c, "norm_attention")(x_BTD)
        q_BTHK, k_BTHK, v_BTHK = (
            part.reshape(*part.shape[:-1], c.num_heads, c.dim // c.num_heads)
            for part in jnp.split(self._dense(3 * c.dim, "qkv")(h_BTD), 3, axis=-1)
        )
        h_BTHK = jax.nn.dot_product_attention(q_BTHK, k_BTHK, v_BTHK, is_causal=True)
        h_BTD = self._dense(c.dim, "out", stddev_out)(h_BTHK.reshape(x_BTD.shape))
        x_BTD = x_BTD + _dropout(self, h_BTD)
        h_BTF = nn.gelu(self._dense(c.mlp_ratio * c.dim, "up")(_norm(c, "norm_mlp")(x_BTD)), approximate=True)
        return x_BTD + _dropout(self, self._dense(c.dim, "down", stddev_out)(h_BTF))


class Decoder(nn.Module):
    """int32 tokens[B, T] -> float32 logits[B, T, V]. Dropout is active where an rng named "dropout" is given."""

    config: DecoderConfig

    @nn.compact
    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        c = self.config
        dtypes = _dtypes(c)
        embed = nn.Embed(c.vocab_size, c.dim, embedding_init=_init(), name="tokens", **dtypes)
        positions = nn.Embed(c.seq_len, c.dim, embedding_init=_init(), name="positions", **dtypes)
        x_BTD = embed(tokens_BT) + positions(jnp.arange(tokens_BT.shape[-1]))[None]
        x_BTD = self._blocks(_dropout(self, x_BTD))
        x_BTD = _norm(c, "norm")(x_BTD)
        if c.tied:
            return embed.attend(x_BTD).astype(jnp.float32)
        head = nn.Dense(c.vocab_size, use_bias=False, kernel_init=_init(), name="head", **dtypes)
        return head(x_BTD).astype(jnp.float32)

    def _blocks(self, x_BTD: jax.Array) -> jax.Array:
        c = self.config
        # Inside scan XLA cannot merge the recomputation with the first computation anyway.
        block = nn.remat(_Block, prevent_cse=not c.scan) if c.remat else _Block
        if not c.scan:
            for i in range(c.num_layers):
                x_BTD = block(c, name=f"block_{i}")(x_BTD)
            return x_BTD
        stack = nn.scan(
            lambda layer, x, _: (layer(x), None),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=c.num_layers,
        )
        return stack(block(c, name="blocks"), x_BTD, None)[0]


def _norm(c: DecoderConfig, name: str) -> nn.RMSNorm:
    return nn.RMSNorm(epsilon=1e-6, name=name, **_dtypes(c))


def _dropout(module: nn.Module, x: jax.Array) -> jax.Array:
    rate = module.config.dropout  # type: ignore[attr-defined]
    if not rate or not module.has_rng("dropout"):
        return x
    return nn.Dropout(rate, deterministic=False)(x)


def next_token_loss(logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """Mean cross entropy in nats per token."""
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits_BTV, targets_BT))


def decoder(size: str | None = None, **options: Any) -> ModelSpec:
    """The model factory for configs: a named size, any of its values replaced.

    Args:
      size: A key of `SIZES`, or None for the defaults of `DecoderConfig`.
      **options: Fields of `DecoderConfig`.

    Returns:
      A spec whose batches are {"tokens": int32[B, T + 1]} with T <= seq_len.

    Raises:
      ConfigError: an unknown size or option, or values that cannot work.
    """
    if size is not None and size.lower() not in SIZES:
        raise ConfigError(f"decoder: size {size!r} is unknown; one of {', '.join(SIZES)}")
    base = DecoderConfig() if size is None else SIZES[size.lower()]
    unknown = sorted(set(options) - {field.name for field in dataclasses.fields(DecoderConfig)})
    if unknown:
        known = ", ".join(field.name for field in dataclasses.fields(DecoderConfig))
        raise ConfigError(f"decoder: unknown option {unknown[0]!r}; the options are {known}")
    return spec_of(dataclasses.replace(base, **options), name=f"decoder-{size}" if size else "decoder")


def spec_of(config: DecoderConfig, *, name: str = "decoder") -> ModelSpec:
    """The functions of one decoder."""
    model = Decoder(config)

    def init_fn(rng: jax.Array) -> Any:
        return model.init(rng, jnp.zeros((1, min(config.seq_len, 8)), np.int32))["params"]

    def logits_fn(params: Any, tokens_BT: jax.Array) -> jax.Array:
        return model.apply({"params": params}, tokens_BT)  # type: ignore[return-value]

    def eval_loss_fn(params: Any, batch: Any) -> jax.Array:
        return next_token_loss(logits_fn(params, batch["tokens"][:, :-1]), batch["tokens"][:, 1:])

    def dropout_loss_fn(params: Any, batch: Any, rng: jax.Array) -> jax.Array:
        logits = model.apply({"params": params}, batch["tokens"][:, :-1], rngs={"dropout": rng})
        return next_token_loss(logits, batch["tokens"][:, 1:])  # type: ignore[arg-type]

    return ModelSpec(
        name=name,
        init_fn=init_fn,
        loss_fn=dropout_loss_fn if config.dropout else eval_loss_fn,
        eval_loss_fn=eval_loss_fn,
        logits_fn=logits_fn,
        batch_fn=lambda size: {"tokens": jax.ShapeDtypeStruct((size, config.seq_len + 1), np.int32)},
        takes_rng=bool(config.dropout),
        vocab_size=config.vocab_size,
        seq_len=config.seq_len,
    )
