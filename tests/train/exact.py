"""Losses whose gradients are given by the batch, so that the right value of a case can be said exactly."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import zinf_jax as zinf

SMALL: dict[str, Any] = {"streaming": {"max_unit_bytes": 1 << 20, "min_io_bytes": 1, "chunk_bytes": 1}}


def linear(params: Any, batch: Any) -> jax.Array:
    """Gradient of every element of every floating leaf: the mean of the batch's `g`."""
    leaves = [x for x in jax.tree.leaves(params) if jnp.issubdtype(x.dtype, jnp.floating)]
    total = sum(jnp.sum(x, dtype=jnp.float32) for x in leaves)
    return total * jnp.mean(batch["g"])


def quadratic(params: Any, batch: Any) -> jax.Array:
    """A different gradient for every element."""
    scale = jnp.mean(batch["g"])
    leaves = [x for x in jax.tree.leaves(params) if jnp.issubdtype(x.dtype, jnp.floating)]
    return sum(jnp.sum((x - scale * jnp.cos(jnp.arange(x.size)).reshape(x.shape).astype(x.dtype)) ** 2) for x in leaves)


def ones(value: float = 1.0, size: int = 1) -> dict[str, np.ndarray]:
    return {"g": np.full(size, value, np.float32)}


def micro(*values: float) -> dict[str, np.ndarray]:
    """A batch of one sample per micro-batch."""
    return {"g": np.array(values, np.float32)}


def merge(*parts: dict[str, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for part in (SMALL, *parts):
        for key, value in part.items():
            merged[key] = {**merged.get(key, {}), **value} if isinstance(value, dict) else value
    return merged


def on(tier: str) -> dict[str, Any]:
    return {"placement": {"weights": tier, "optimizer": tier, "gradients": tier}}


def trainer(loss_fn: Any, params: Any, optimizer: Any, *parts: dict[str, Any], **kwargs: Any) -> zinf.Trainer:
    return zinf.Trainer(loss_fn, params, optimizer, merge(*parts), **kwargs)


def everything(made: zinf.Trainer) -> Any:
    """All state of a run, bit for bit."""
    moments = made.opt_state()
    return (
        {name: np.asarray(value).tobytes() for name, value in made.iter_params()},
        {s: {k: v.tobytes() for k, v in d.items()} for s, d in moments.items() if s != "count"},
        made.global_step,
        made.num_skipped,
    )
