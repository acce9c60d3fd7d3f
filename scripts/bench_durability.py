"""What crash safety costs a step: checksums, commits, and steps that are kept in place.

    python scripts/bench_durability.py                 # 125M parameters, everything on NVMe
    python scripts/bench_durability.py --size 350m --steps 12 --json durability.json

One run trains and takes turns: a step, and a step after which the state is kept in place. Beside the medians stand

  checksums  the step's bytes at the rate of one core's CRC32C (measured here), over the step's time on all cores: every
             byte that is read or written is summed once
  commit     what the main thread waited for a commit to be durable, over the step; and how long commits took beside it
  kept step  what `trainer.save()` took, over the step; and the difference of the medians of both kinds of step

A difference of medians is good to the noise of the step times; both are shown.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from _bench import SIZES, end_on_sigterm, temporary_folder, write_json
from _bench_report import limited
from _bench_workers import LEARNING_RATE, WEIGHT_DECAY, batches, model_of
from rich.console import Console
from rich.table import Table

MAX_SHARES = {"checksums": 0.03, "commit": 0.01, "kept step": 0.005}
console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)


def checksum_gbps(num_bytes: int = 64 << 20) -> float:
    """Of one core, over memory that no cache holds."""
    import aio_ffi

    data = np.random.default_rng(0).integers(0, 256, num_bytes, dtype=np.uint8)
    times = []
    for _ in range(9):
        start = time.perf_counter()
        aio_ffi.crc32c(data)
        times.append(time.perf_counter() - start)
    return num_bytes / statistics.median(times) / 1e9


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    import zinf_jax as zinf

    model = model_of({"size": args.size, "matmul_dtype": "float32"}, remat=False)
    config = {
        "bf16": {"enabled": True},
        "gradient_clipping": args.clipping,
        "placement": {"weights": "nvme", "optimizer": "nvme", "gradients": "host"},
        "nvme_path": str(folder),
        "streaming": {"durability": "step", "num_retained": 1},
    }
    params = zinf.lazy(model.init_fn, jax.random.key(0))
    tx = zinf.optim.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    (batch,) = batches(model, 1, count=1)
    plain: list[float] = []
    after_save: list[float] = []
    saves: list[float] = []
    waits: list[float] = []
    moved: list[int] = []
    with zinf.Trainer(model.loss_fn, params, tx, config, run_dir=folder / "run") as trainer:
        trainer.prepare(batch)
        for _ in range(args.warmup):
            trainer.step(batch)
        trainer.trace(folder / "trace.json", steps=2 * args.steps)
        for number in range(2 * args.steps):
            start = time.perf_counter()
            trainer.step(batch)
            (after_save if number % 2 else plain).append(time.perf_counter() - start)
            stats = trainer.stats()
            waits.append(stats.commit_stall_s)
            moved.append(stats.nvme_bytes_read + stats.nvme_bytes_written)
            if number % 2 == 0:  # what a kept step costs shows in the next one too
                start = time.perf_counter()
                trainer.save(replaces=trainer.retained())
                saves.append(time.perf_counter() - start)
    commits = commit_times(folder / "trace.json")
    step_s, rate = statistics.median(plain), checksum_gbps()
    cores = len(os.sched_getaffinity(0))
    checksum_s = statistics.median(moved) / rate / 1e9
    shares = {
        "checksums": checksum_s / (step_s * cores),
        "commit": statistics.median(waits) / step_s,
        "kept step": statistics.median(saves) / step_s,
    }
    return {
        "size": args.size, "steps_s": plain, "steps_after_save_s": after_save, "saves_s": saves, "waits_s": waits,
        "commits_s": commits, "bytes_per_step": statistics.median(moved), "crc32c_gbps": rate, "cores": cores,
        "checksum_s": checksum_s, "step_s": step_s, "shares": shares,
    }  # fmt: skip


def commit_times(trace: Path) -> list[float]:
    """Seconds of the commits in a trace."""
    events = json.loads(trace.read_text())["traceEvents"]
    return [event["dur"] / 1e6 for event in events if event.get("ph") == "X" and event["name"] == "commit"]


def table(found: dict[str, Any]) -> Table:
    shares, step_s = found["shares"], found["step_s"]
    differ = statistics.median(found["steps_after_save_s"]) - step_s
    spread = max(found["steps_s"]) - min(found["steps_s"])
    commits = statistics.median(found["commits_s"]) if found["commits_s"] else 0.0
    rows = {
        "checksums": (
            f"{found['checksum_s']:.3f} core-s",
            f"{found['bytes_per_step'] / 1e9:.2f} GB at {found['crc32c_gbps']:.1f} GB/s, {found['cores']} cores",
        ),
        "commit": (
            f"{statistics.median(found['waits_s']) * 1e3:.1f} ms waited",
            f"{commits:.2f} s beside the step",
        ),
        "kept step": (
            f"{statistics.median(found['saves_s']) * 1e3:.1f} ms",
            f"the next step {differ:+.2f} s (steps vary by {spread:.2f} s)",
        ),
    }
    drawn = Table(title=f"{found['size']}: a step takes {step_s:.2f} s", title_justify="left")
    for column in ("", "share of a step", "measured", "beside it"):
        drawn.add_column(column)
    for name, cells in rows.items():
        drawn.add_row(name, limited(shares[name], MAX_SHARES[name], "{:.2%}"), *cells)
    return drawn


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    summary, details = (__doc__ or "").split("\n", 1)
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="125m", help="(125m)")
    parser.add_argument("--steps", type=int, default=6, help="of each kind (6)")
    parser.add_argument("--warmup", type=int, default=3, help="(3)")
    parser.add_argument(
        "--clipping", type=float, default=1.0, help="bound on the norm; random weights exceed 1.0 (1.0)"
    )
    parser.add_argument("--nvme-path", type=Path, default=Path("bench-pages"), help="folder on the drive to be used")
    parser.add_argument("--json", type=Path, help="write everything there")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    end_on_sigterm()
    with temporary_folder(args.nvme_path, "bench-durability") as folder:
        found = measure(args, folder)
    if args.json:
        write_json(args.json, found)
    console.print(table(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
