"""A model and data that compile in a second, as factories that a config can name."""

import signal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from zinf_jax.models import ModelSpec, next_token_loss
from zinf_jax.train import data


class _Net(nn.Module):
    @nn.compact
    def __call__(self, tokens, noise=None):
        x = nn.Embed(257, 16, name="tokens")(tokens).astype(jnp.float32)
        if noise is not None:
            x = x * jax.random.bernoulli(noise, 0.9, x.shape)
        x = x + nn.gelu(nn.Dense(32, name="up", dtype=jnp.float32)(x)) @ jnp.ones((32, 16))
        return nn.Dense(257, name="head", dtype=jnp.float32)(x)


def model(*, dropout: bool = True) -> ModelSpec:
    """Predicts a byte from the one before it."""
    net = _Net()

    def eval_loss(params, batch):
        return next_token_loss(net.apply({"params": params}, batch["tokens"][:, :-1]), batch["tokens"][:, 1:])

    def loss(params, batch, rng):
        return next_token_loss(net.apply({"params": params}, batch["tokens"][:, :-1], rng), batch["tokens"][:, 1:])

    return ModelSpec(
        "tiny",
        lambda rng: net.init(rng, np.zeros((1, 2), np.int32))["params"],
        loss if dropout else eval_loss,
        eval_loss_fn=eval_loss,
        logits_fn=lambda params, tokens: net.apply({"params": params}, tokens),
        takes_rng=dropout,
        vocab_size=257,
        seq_len=8,
    )


def stopping_model(*, signal_name: str) -> ModelSpec:
    """Asks for the end while the run is being set up."""
    signal.raise_signal(signal.Signals[signal_name])
    return model()


def stopping_text(request: data.DataRequest, *, signals: dict, **kwargs) -> data.Data:
    """Text whose batch n (counted from 1, by process) comes with signal `signals[n]`, as from a scheduler."""
    made = data.text(request, **kwargs)
    return data.dataclasses.replace(made, train=_Stopping(made.train, {int(k): v for k, v in signals.items()}))


class _Stopping:
    def __init__(self, inner, signals):
        self._inner, self._signals, self._count = inner, signals, 0
        self.get_state, self.set_state = inner.get_state, self._set_state

    def _set_state(self, state):
        self._count = 0
        self._inner.set_state(state)

    def __next__(self):
        self._count += 1
        for name in self._signals.get(self._count, []):
            signal.raise_signal(signal.Signals[name])
        return next(self._inner)
