"""ZeRO-Infinity for JAX: train models larger than device and host memory, bit for bit as in memory.

import zinf_jax as zinf

with zinf.Trainer(loss_fn, zinf.lazy(init_fn, key), zinf.optim.adamw(1e-4), "config.yaml") as trainer:
    for batch in batches:
        out = trainer.step(batch)
"""

from zinf_jax import optim
from zinf_jax.config import Config
from zinf_jax.errors import (
    ConfigError,
    CorruptionError,
    CutError,
    InitError,
    NonFiniteError,
    OwnerError,
    PlanError,
    ResumeError,
    StoreError,
    ZinfError,
)
from zinf_jax.graph.lazy import lazy
from zinf_jax.plan import Plan
from zinf_jax.stream.stats import Stats
from zinf_jax.train.trainer import StepOutput, Trainer
from zinf_jax.train.weighted import Weighted

__version__ = "0.1.0"

__all__ = [
    "Config",
    "ConfigError",
    "CorruptionError",
    "CutError",
    "InitError",
    "NonFiniteError",
    "OwnerError",
    "Plan",
    "PlanError",
    "ResumeError",
    "Stats",
    "StepOutput",
    "StoreError",
    "Trainer",
    "Weighted",
    "ZinfError",
    "lazy",
    "optim",
]
