"""A small residual network whose streaming is worth testing: repeated blocks, a tied embedding, odd sizes.

`run` trains it from any placement and returns everything that must be equal.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import zinf_jax as zinf

VOCAB, DIM = 97, 40  # 97 x 40 and 40 x 120: no power of two, nothing aligned
BASE_CONFIG: dict[str, Any] = {
    "streaming": {"max_unit_bytes": 100_000, "min_io_bytes": 4096, "chunk_bytes": 100_000},
    "gradient_clipping": 0.5,
}
TIERS = ("device", "host", "nvme")


def init(key: jax.Array, num_blocks: int = 6) -> dict[str, Any]:
    keys = jax.random.split(key, 2 * num_blocks + 1)
    params: dict[str, Any] = {"embedding": jax.random.normal(keys[0], (VOCAB, DIM)) * 0.1}
    for i in range(num_blocks):
        params[f"block_{i}"] = {
            "up": jax.random.normal(keys[2 * i + 1], (DIM, 3 * DIM)) * 0.1,
            "bias": jnp.zeros(3 * DIM),
            "down": jax.random.normal(keys[2 * i + 2], (3 * DIM, DIM)) * 0.1,
        }
    return params


def loss(params: dict[str, Any], batch: dict[str, Any]) -> jax.Array:
    x = params["embedding"][batch["x"]]
    for i in range(len(params) - 1):
        block = params[f"block_{i}"]
        x = x + jnp.tanh(x @ block["up"] + block["bias"]) @ block["down"]
    logits = (x @ params["embedding"].T).astype(jnp.float32)
    picked = jax.nn.log_softmax(logits)[jnp.arange(x.shape[0]), batch["y"]]
    return -jnp.mean(picked)


def batch(size: int = 16, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.integers(0, VOCAB, size).astype(np.int32) for name in ("x", "y")}


def placed(tier: str, **other: str) -> dict[str, Any]:
    return {"placement": {"weights": tier, "optimizer": tier, "gradients": tier, **other}}


def config(*parts: dict[str, Any]) -> dict[str, Any]:
    """BASE_CONFIG with sections merged in."""
    merged: dict[str, Any] = {}
    for part in (BASE_CONFIG, *parts):
        for key, value in part.items():
            merged[key] = {**merged.get(key, {}), **value} if isinstance(value, dict) else value
    return merged


@dataclasses.dataclass
class Result:
    """What a run computed, bit for bit."""

    losses: list[float]
    norms: list[float]
    skipped: list[bool]
    params: dict[str, bytes]
    moments: dict[str, dict[str, bytes]]
    stats: zinf.Stats
    plan: zinf.Plan

    @property
    def bits(self) -> Any:
        return repr((self.losses, self.norms, self.skipped)), self.params, self.moments


def run(*parts: dict[str, Any], steps: int = 3, optimizer: Any = None, trainer: Any = None, **kwargs: Any) -> Result:
    """Trains for some steps on batches 0, 1, ..."""
    if trainer is None:
        size = kwargs.pop("batch_size", 16)
        chosen = zinf.optim.adamw(1e-2, weight_decay=0.1) if optimizer is None else optimizer
        params = kwargs.pop("params", None) or zinf.lazy(init, jax.random.key(0))
        with zinf.Trainer(kwargs.pop("loss_fn", loss), params, chosen, config(*parts), **kwargs) as made:
            return run(trainer=made, steps=steps, batch_size=size)
    first = trainer.global_step
    outs = [trainer.step(batch(kwargs.get("batch_size", 16), seed=first + i)) for i in range(steps)]
    moments = trainer.opt_state()
    return Result(
        [o.loss for o in outs],
        [o.grad_norm for o in outs],
        [o.skipped for o in outs],
        {name: value.tobytes() for name, value in trainer.iter_params()},
        {s: {k: v.tobytes() for k, v in d.items()} for s, d in moments.items() if s != "count"},
        trainer.stats(),
        trainer.plan,
    )
