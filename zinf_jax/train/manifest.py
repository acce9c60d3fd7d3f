"""What is stored beside the pages' bytes, as JSON: no pickle is ever written or loaded.

Two parts: what stays as it is while a run lasts (the pages' layout, sizes, paths), and the counters that belong to one
step (step, rng, loss scale, `state`, `user_state`, the optimizer's small state). A commit record holds the latter; a
checkpoint's or a retained step's manifest holds both, and the tables of the versions.
"""

import base64
import os
import pathlib
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from zinf_jax.errors import ResumeError
from zinf_jax.optim import kernels
from zinf_jax.stream.engine import VERSIONED, StreamEngine
from zinf_jax.tier import Table, Tables

FORMAT = 2
COUNTERS = ("step", "num_skipped", "rng", "state", "user_state", "loss_scale", "optimizer_state")


def fingerprint() -> dict[str, Any]:
    """What the bits of a run depend on beside its inputs."""
    return {
        "jax": jax.__version__,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "backend": jax.default_backend(),
        "num_devices": jax.device_count(),
        "machine": platform.machine(),
        "num_cores": len(os.sched_getaffinity(0)),
        "kernels": kernels.variant(),
    }


def describe_run(
    engine: StreamEngine, *, status: str, run_id: str, slots: Sequence[str], paths: Sequence[pathlib.Path]
) -> dict[str, Any]:
    """What stays while a run lasts.

    Args:
      engine: The run's.
      status: "open": pages are in use and of no step; "closed": at rest at the last commit; "live": the last commit
        holds, whatever happens; "saved": a checkpoint; "retained": a step of a live run.
      run_id: Names the run.
      slots: Of the optimizer.
      paths: Directories of the page files.
    """
    return {
        "format": FORMAT,
        "status": status,
        "run_id": run_id,
        "slots": list(slots),
        "weights_dtype": str(engine.record.weights),
        "chunk_elements": engine.plan.chunk_elements,
        "paths": [str(path) for path in paths],
        "shares": list(engine.shares),
        "num_versions": engine.store.versions.num_banks[VERSIONED[0]],
        "layout": engine.layout.to_json(),
        "fingerprint": fingerprint(),
    }


def counters(
    *,
    step: int,
    num_skipped: int,
    rng: Any,
    state: Any,
    user_state: Any,
    small: Mapping[str, np.ndarray],
    scale: Any,
) -> dict[str, Any]:
    """What belongs to one step beside the pages."""
    return {
        "step": step,
        "num_skipped": num_skipped,
        "rng": encode_rng(rng),
        "state": None if state is None else encode_state(state),
        "user_state": user_state,
        "loss_scale": scale,
        "optimizer_state": {name: encode_array(value) for name, value in small.items()},
    }


def encode_tables(tables: Mapping[str, Table]) -> dict[str, Any]:
    return {
        kind: {name: encode_array(array) for name, array in table.arrays().items()} for kind, table in tables.items()
    }


def decode_tables(values: Mapping[str, Any]) -> Tables:
    return {
        kind: Table.of({name: decode_array(array) for name, array in table.items()}) for kind, table in values.items()
    }


def encode_array(array: Any) -> dict[str, Any]:
    array = np.asarray(array)
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {"dtype": str(array.dtype), "shape": list(array.shape), "data": data}


def decode_array(value: Mapping[str, Any]) -> np.ndarray:
    dtype = np.dtype(getattr(ml_dtypes, value["dtype"], None) or value["dtype"])
    return np.frombuffer(base64.b64decode(value["data"]), dtype).reshape(value["shape"]).copy()


def encode_rng(key: Any) -> dict[str, Any]:
    """A PRNG key, typed or raw, as JSON."""
    if hasattr(key, "dtype") and jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key):
        return {"impl": str(key.dtype._impl.name), **encode_array(jax.random.key_data(key))}
    return {"impl": None, **encode_array(key)}


def decode_rng(value: Mapping[str, Any]) -> Any:
    data = decode_array(value)
    return data if value["impl"] is None else jax.random.wrap_key_data(jnp.asarray(data), impl=value["impl"])


def encode_state(state: Any) -> list[Any]:
    """The leaves of the user's `state`."""
    return [encode_rng(leaf) for leaf in jax.tree.leaves(state)]


def decode_state(values: list[Any], like: Any) -> Any:
    """Raises ResumeError: the stored state has another number of leaves."""
    flat, tree = jax.tree.flatten(like)
    if len(flat) != len(values):
        raise ResumeError(f"the checkpoint's state has {len(values)} leaves, this one has {len(flat)}")
    return jax.tree.unflatten(tree, [decode_rng(v) for v in values])
