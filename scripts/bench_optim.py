"""The fused host AdamW against memory bandwidth, jitted optax, and torch's and DeepSpeed's AdamW where installed.

    python scripts/bench_optim.py                         # 10M and 100M parameters, fp32 and bf16
    python scripts/bench_optim.py --sizes 1e7 --rounds 5 --json optim.json

All contenders take turns within a round, on huge pages (XLA's own memory excepted), and each figure is a median over
rounds; ratios are those of the medians of one run, since absolute rates drift on a shared machine. Bytes count each
byte read or written once, per parameter:

    triad           8 read, 4 written: a = b + s c in C, with the kernels' threads; ordinary stores, and stores that go
                    past the caches ("stream"), which save the read of what is overwritten
    fused fp32     16 read (weight, gradient, two moments), 12 written
    fused bf16     14 read (weight, remainder, gradient: 2 each; moments), 12 written

optax does the same update jitted: fp32 throughout, or an fp32 master from which bf16 weights are rounded; as its users
write it, and with donated state ("in place"), which saves XLA fresh memory. torch and DeepSpeed run fp32 only (their
bf16 variants keep other state).
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import mmap
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

from zinf_jax import optim
from zinf_jax.leaves import classify
from zinf_jax.optim import kernels

HUGE_PAGE = 2 << 20
LEARNING_RATE = 1e-3
TRIAD_TARGET, OPTAX_TARGET = 0.9, 5.0
BF16 = np.dtype(ml_dtypes.bfloat16)


@dataclasses.dataclass(frozen=True)
class Contender:
    """One thing to time.

    Attributes:
      run: One update of all parameters; returns when it is done.
      bytes_per_param: Read and written.
    """

    name: str
    run: Callable[[], None]
    bytes_per_param: int


def huge_vector(size: int, dtype: Any) -> np.ndarray:
    """A zeroed vector on huge pages, aligned to one."""
    dtype = np.dtype(dtype)
    num_bytes = size * dtype.itemsize
    memory = mmap.mmap(-1, num_bytes + 2 * HUGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    raw = np.frombuffer(memory, np.uint8)
    start = -raw.ctypes.data % HUGE_PAGE
    vector = raw[start : start + num_bytes].view(dtype)
    kernels.zero(vector)
    return vector


def filled(size: int, dtype: Any, seed: int, scale: float = 1.0) -> np.ndarray:
    vector = huge_vector(size, dtype)
    block = np.random.default_rng(seed).standard_normal(min(size, 1 << 20)) * scale
    for start in range(0, size, block.size):
        vector[start : start + block.size] = block[: size - start].astype(vector.dtype)
    return vector


def contenders(size: int, precision: str, threads: int) -> list[Contender]:
    master, gradient = filled(size, np.float32, 0), filled(size, np.float32, 1)
    mu, nu = filled(size, np.float32, 2, 0.1), filled(size, np.float32, 3)
    np.square(nu, out=nu)
    triads = [
        Contender(f"triad{' stream' if past else ''}", triad_of(master, gradient, mu, past, threads), 12)
        for past in (False, True)
    ]
    num_bytes = 28 if precision == "fp32" else 26
    optaxes = [
        Contender(name, optax_of(master, gradient, precision, donate=name != "optax"), num_bytes)
        for name in ("optax", "optax in place")
    ]
    peers = peers_of(master, gradient, threads) if precision == "fp32" else []
    if precision == "fp32":
        weights, remainder = master, None
    else:
        weights, remainder = huge_vector(size, BF16), huge_vector(size, np.int16)
        kernels.split_master(master, weights, remainder)
        low = huge_vector(size, BF16)
        kernels.split_master(gradient, low, np.empty(size, np.int16))
        gradient = low
    fused = Contender("fused", fused_of(weights, remainder, gradient, (mu, nu), threads), num_bytes)
    return [*triads, fused, *optaxes, *peers]


def triad_of(a: np.ndarray, b: np.ndarray, like: np.ndarray, past: bool, threads: int) -> Callable[[], None]:
    target = huge_vector(like.size // 4 * 4, np.float32)
    b, c = a[: target.size], b[: target.size]
    return lambda: kernels.triad(target, b, c, 0.5, nontemporal=past, num_threads=threads)


def fused_of(
    weights: np.ndarray, remainder: np.ndarray | None, gradient: np.ndarray, slots: tuple[np.ndarray, ...], threads: int
) -> Callable[[], None]:
    rule = optim.adamw(LEARNING_RATE).rule  # type: ignore[attr-defined]
    shape = jax.ShapeDtypeStruct(weights.shape, np.float32)
    bound, count = rule.bind(classify({"w": shape}), {"w": shape}), iter(range(1 << 30))

    def run() -> None:
        part = kernels.Range(weights, remainder, gradient, slots, bound.coefficients(0, next(count)))
        kernels.update(rule, [part], num_threads=threads)

    return run


def optax_of(master: np.ndarray, gradient: np.ndarray, precision: str, *, donate: bool) -> Callable[[], None]:
    """One jitted step: update and apply_updates."""
    tx, low = optax.adamw(LEARNING_RATE), precision == "bf16"

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads.astype(jnp.float32), state, params)
        params = optax.apply_updates(params, updates)
        return params, state, params.astype(jnp.bfloat16) if low else None

    compiled = jax.jit(step, donate_argnums=(0, 1) if donate else ())
    params, grads = jnp.array(master), jnp.array(gradient, jnp.bfloat16 if low else jnp.float32)
    held = [params, tx.init(params)]

    def run() -> None:
        params, state, weights = compiled(*held, grads)
        jax.block_until_ready((params, state, weights))
        held[:] = params, state

    return run


def peers_of(master: np.ndarray, gradient: np.ndarray, threads: int) -> list[Contender]:
    """torch's fused AdamW, and DeepSpeed's, where they can be imported."""
    if importlib.util.find_spec("torch") is None:
        return []
    import torch

    torch.set_num_threads(threads)

    def prepared(make: Callable[[Any], Any]) -> Callable[[], None]:
        param = torch.nn.Parameter(torch.from_numpy(master.copy()))
        param.grad = torch.from_numpy(gradient)
        optimizer = make([param])
        return lambda: optimizer.step()

    fused = prepared(lambda params: torch.optim.AdamW(params, LEARNING_RATE, weight_decay=1e-4, fused=True))
    found = [Contender("torch fused", fused, 28)]
    if importlib.util.find_spec("deepspeed") is not None:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        found.append(
            Contender("DeepSpeed", prepared(lambda p: DeepSpeedCPUAdam(p, LEARNING_RATE, weight_decay=1e-4)), 28)
        )
    return found


def measure(size: int, precision: str, rounds: int, threads: int) -> list[dict[str, Any]]:
    """Rows of figures: medians over rounds in which all contenders take turns."""
    field = contenders(size, precision, threads)
    times: dict[str, list[float]] = {contender.name: [] for contender in field}
    for number in range(rounds + 1):
        for contender in field:
            start = time.perf_counter()
            contender.run()
            if number:  # the first round warms up: pages, compilation
                times[contender.name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in times.items()}
    rates = {c.name: size * c.bytes_per_param / medians[c.name] / 1e9 for c in field}
    return [
        {
            "params": size,
            "precision": precision,
            "name": c.name,
            "median_s": medians[c.name],
            "best_s": min(times[c.name]),
            "bytes_per_param": c.bytes_per_param,
            "gbps": rates[c.name],
            "gparams_per_s": size / medians[c.name] / 1e9,
            "of_triad": rates[c.name] / rates["triad"],
            "of_stream_triad": rates[c.name] / rates["triad stream"],
            "times_optax": medians["optax"] / medians[c.name],
        }
        for c in field
    ]


def print_table(console: Console, rows: list[dict[str, Any]]) -> None:
    table = Table(
        "params", "precision", "", "median ms", "best ms", "GB/s", "Gparam/s", "of triad", "of stream", "x optax"
    )
    for row in rows:
        triad = row["name"].startswith("triad")
        table.add_row(
            f"{row['params'] / 1e6:g}M",
            row["precision"],
            row["name"],
            f"{row['median_s'] * 1e3:.2f}",
            f"{row['best_s'] * 1e3:.2f}",
            f"{row['gbps']:.1f}",
            "" if triad else f"{row['gparams_per_s']:.3f}",
            f"{row['of_triad']:.2f}",
            f"{row['of_stream_triad']:.2f}",
            "" if triad else f"{row['times_optax']:.1f}",
            style="bold" if row["name"] == "fused" else None,
            end_section=row is rows[-1],
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=float, nargs="+", default=[1e7, 1e8], help="parameters")
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    rows: list[dict[str, Any]] = []
    for size in arguments.sizes:
        for precision in arguments.precisions:
            rows += measure(int(size), precision, arguments.rounds, arguments.threads)
    console.print(
        f"kernels {kernels.variant()}, {arguments.threads} threads, {platform.processor() or platform.machine()}"
    )
    print_table(console, rows)
    fused = [row for row in rows if row["name"] == "fused"]
    triad, times = min(row["of_triad"] for row in fused), min(row["times_optax"] for row in fused)
    console.print(
        f"fused, worst case: {triad:.2f} of the triad's byte rate (target {TRIAD_TARGET}), "
        f"{times:.1f} x optax (target {OPTAX_TARGET:g})"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps({"threads": arguments.threads, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
