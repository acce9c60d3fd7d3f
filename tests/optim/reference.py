"""numpy and optax versions of what the kernels do: slow and obviously right."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax

from zinf_jax.leaves import Leaf, classify
from zinf_jax.optim import kernels

BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {"f32": np.dtype(np.float32), "bf16": BF16, "f16": np.dtype(np.float16)}
EXACT = {"xla_allow_excess_precision": False}


def split_master(master: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rounds to nearest, ties up, so that 16 bits hold the remainder; NaNs become 0x7fc00000 first."""
    bits = np.where(np.isnan(master), np.uint32(0x7FC00000), master.view(np.uint32)).astype(np.int64)
    high = (bits + 0x8000) >> 16
    return high.astype(np.uint16).view(BF16), (bits - (high << 16)).astype(np.int16)


def join_master(weights: np.ndarray, remainder: np.ndarray) -> np.ndarray:
    return ((weights.view(np.uint16).astype(np.int64) << 16) + remainder).astype(np.uint32).view(np.float32)


def squared_norm(values: np.ndarray) -> float:
    """fp64 sums of 65,536-element blocks, each in 16 lanes that are added as a tree, added in order."""
    wide = values.astype(np.float64)
    if values.dtype != np.float16:
        wide[np.abs(wide) < 2.0**-126] = 0.0  # denormals count as zero
    total = 0.0
    for start in range(0, wide.size, 65536):
        block = wide[start : start + 65536]
        padded = np.zeros(-(-block.size // 16) * 16)
        padded[: block.size] = block
        lanes = np.zeros(16)
        for row in padded.reshape(-1, 16):
            lanes = lanes + row * row
        while lanes.size > 1:
            lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
        total += float(lanes[0])
    return total


def ulps(a: np.ndarray, b: np.ndarray, scale: np.ndarray | None = None) -> np.ndarray:
    """|a - b| in units in the last place of the largest of |a|, |b| and |scale|; denormals are zero, NaNs are equal."""
    tiny = np.finfo(np.float32).tiny
    a, b = (np.where(np.abs(x) < tiny, np.float32(0), x) for x in (a, b))
    largest = np.maximum(np.abs(a), np.abs(b))
    if scale is not None:
        largest = np.maximum(largest, np.abs(scale))
    with np.errstate(invalid="ignore"):
        distance = np.abs(a.astype(np.float64) - b) / np.spacing(np.maximum(largest, tiny))
    return np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0, distance)


def jitted_step(tx: optax.GradientTransformation) -> Any:
    """update and apply_updates in one program, as an in-memory training step has them."""

    def step(params: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(step, compiler_options=EXACT)


def avals(params: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), params)


def table(params: Any) -> tuple[Leaf, ...]:
    return classify(params)


def wide_floats(rng: np.random.Generator, size: int, *, spread: int = 12) -> np.ndarray:
    """f32 of both signs over many magnitudes, with zeros and denormals."""
    values = rng.standard_normal(size) * 10.0 ** rng.integers(-spread, spread, size)
    values[::101] = 0.0
    values[7::103] = -0.0
    values[11::107] = 1e-40
    return values.astype(np.float32)


class HostOptimizer:
    """Runs a fused transformation over a tree with the kernels, as the executor does."""

    def __init__(self, tx: Any, params: Any, *, weights: str = "f32") -> None:
        self.rule = tx.rule
        self.leaves, self.treedef = table(params), jax.tree.structure(params)
        self.bound = self.rule.bind(self.leaves, avals(params))
        self.masters = [np.array(x, np.float32).reshape(-1) for x in jax.tree.leaves(params)]
        self.shapes = [np.shape(x) for x in jax.tree.leaves(params)]
        self.slots = [
            tuple(np.full(m.size, self.bound.slot_init(s), np.float32) for s in self.bound.slots) for m in self.masters
        ]
        self.count = 0
        self.weights, self.remainders = self._weights(weights)

    def _weights(self, name: str) -> tuple[list[np.ndarray], list[Any]]:
        if name == "bf16":
            pairs = [kernels.split_master(m) for m in self.masters]
            return [w for w, _ in pairs], [r for _, r in pairs]
        if name == "f16":
            return [m.astype(np.float16) for m in self.masters], list(self.masters)
        return self.masters, [None] * len(self.masters)

    def step(self, gradients: Any, *, gradient_scale: float = 1.0, num_threads: int = 1) -> None:
        flat = [None if g is None else np.asarray(g).reshape(-1) for g in gradients]
        ranges = [
            kernels.Range(w, r, g, s, self.bound.coefficients(i, self.count))
            for i, (w, r, g, s) in enumerate(zip(self.weights, self.remainders, flat, self.slots, strict=True))
        ]
        kernels.update(self.rule, ranges, gradient_scale=gradient_scale, num_threads=num_threads)
        self.count += 1

    def master(self, i: int) -> np.ndarray:
        if self.remainders[i] is None:
            return self.weights[i]
        if self.weights[i].dtype == np.float16:
            return self.remainders[i]
        return join_master(self.weights[i], self.remainders[i])
