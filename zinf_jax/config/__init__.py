"""The config: one schema, from YAML, JSON, gin, a DeepSpeed file or a dict. See README.md for the mapping."""

from zinf_jax.config._build import build_optimizer, build_schedule, decay_mask
from zinf_jax.config._load import load
from zinf_jax.config._paths import check_paths, uses_nvme
from zinf_jax.config._reference import deepspeed_rows, entries, markdown
from zinf_jax.config._schema import BatchSizes, Config, numpy_dtype

__all__ = [
    "BatchSizes",
    "Config",
    "build_optimizer",
    "build_schedule",
    "check_paths",
    "decay_mask",
    "deepspeed_rows",
    "entries",
    "load",
    "markdown",
    "numpy_dtype",
    "uses_nvme",
]
