"""Models far larger than memory: peak memory, planned and measured, of a few steps of configs that keep all on NVMe.

    python scripts/bench_large.py                                          # 1.3B and 4.2B parameters
    python scripts/bench_large.py --configs configs/decoder_1.3b_nvme.yaml --steps 3 --json large.json

Each config runs in a process of its own, with its pages in a temporary folder that is removed afterwards (12 bytes per
parameter, more with spilled gradients: 59 GB for 4.2B). Peak RSS is VmHWM over the whole life of the process, and over
the steps alone; it must lie under the limit, and within a tenth of the plan's figure.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _bench import GIB, Worker, WorkerError, end_on_sigterm, temporary_folder, worker_argv, worker_env, write_json
from rich.console import Console
from rich.table import Table

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
MAX_RSS_GIB = {"decoder_1.3b_nvme": 2.5, "decoder_4.2b_nvme": 6.0}
TOLERANCE = 0.10  # of the plan's figure
console = Console(width=None if sys.stdout.isatty() else 150, highlight=False)


def run(config: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Sets one config up, trains, and removes its files.

    Raises:
      WorkerError: it failed, or took too long.
    """
    with (
        temporary_folder(args.nvme_path, "bench-large") as folder,
        console.status(f"{config.stem}: setting up") as line,
    ):
        free = shutil.disk_usage(folder).free
        console.print(f"{config.stem}: {free / 1e9:.0f} GB free in {folder.parent}")
        spec = {"kind": "configured", "config": str(config), "folder": str(folder / "run")}
        with Worker(
            config.stem, worker_argv(), spec, log_dir=args.nvme_path, env=worker_env(), start_timeout_s=args.timeout
        ) as worker:
            plan = worker.call("plan", timeout_s=60)
            console.print(plan["table"], markup=False)
            replies = []
            for number in range(args.steps):
                line.update(f"{config.stem}: step {number + 1}/{args.steps}")
                replies.append(worker.call("steps", count=1, timeout_s=args.timeout))
                console.print(f"{config.stem}: step {number + 1}: {replies[-1]['times_s'][0]:.1f} s, "
                              f"loss {replies[-1]['loss']:.4f}")  # fmt: skip
            model = worker.call("model", timeout_s=60)
    return {
        "config": config.stem,
        **model,
        "plan": plan,
        "init_peak_rss_bytes": worker.ready["init_peak_rss_bytes"],
        "steps": replies,
        "max_rss_gib": MAX_RSS_GIB.get(config.stem),
    }


def verdicts(row: dict[str, Any]) -> list[str]:
    """What does not hold of one run."""
    plan, last = row["plan"], row["steps"][-1]
    peak = max(row["init_peak_rss_bytes"], last["peak_rss_bytes"])
    found = []
    limit = row["max_rss_gib"]
    if limit is not None and peak > limit * GIB:
        found.append(f"peak RSS {peak / GIB:.2f} GiB is over {limit} GiB")
    pairs = [("peak RSS", peak, plan["peak_rss_bytes"])]
    pairs.append(("peak device bytes", last["stats"]["peak_device_bytes"], plan["device_bytes"]))
    for what, measured, planned in pairs:
        if measured > planned:
            found.append(f"{what}: measured {measured / GIB:.3f} GiB, planned only {planned / GIB:.3f}")
        elif measured < (1 - TOLERANCE) * planned:
            found.append(f"{what}: measured {measured / GIB:.3f} GiB, planned {planned / GIB:.3f}: more than 10% off")
    return found


def table(rows: Sequence[dict[str, Any]]) -> Table:
    result = Table(title="Peak memory and bytes per step", title_justify="left")
    columns = ("config", "params", "step s", "loss first, last", "peak RSS GiB", "of it steps", "planned")
    for column in (*columns, "device GiB", "planned", "bytes/param", "planned"):
        result.add_column(column, justify="right")
    for row in rows:
        plan, last, count = row["plan"], row["steps"][-1], row["num_params"]
        gib = [
            f"{value / GIB:.2f}"
            for value in (
                max(row["init_peak_rss_bytes"], last["peak_rss_bytes"]), last["peak_rss_bytes"], plan["peak_rss_bytes"],
                last["stats"]["peak_device_bytes"], plan["device_bytes"],
            )
        ]  # fmt: skip
        step_s = statistics.median(reply["times_s"][0] for reply in row["steps"])
        moved = (last["read_bytes"] + last["write_bytes"], plan["read_bytes"] + plan["write_bytes"])
        losses = f"{row['steps'][0]['loss']:.3f}, {last['loss']:.3f}"
        per_param = [f"{value / count:.1f}" for value in moved]
        result.add_row(row["config"], f"{count / 1e9:.2f}B", f"{step_s:.1f}", losses, *gib, *per_param)
    return result


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = [CONFIGS / f"{name}.yaml" for name in MAX_RSS_GIB]
    parser.add_argument("--configs", type=Path, nargs="+", default=default)
    parser.add_argument("--steps", type=int, default=3, help="at least 2, to see that nothing grows (3)")
    parser.add_argument("--nvme-path", type=Path, default=Path("bench-pages"), help="folder on the drive to be used")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for set-up, and for each step")
    parser.add_argument("--json", type=Path, help="write everything there")
    args = parser.parse_args(argv)
    end_on_sigterm()
    rows, failures = [], []
    for config in args.configs:
        try:
            rows.append(run(config, args))
            failures += [f"{config.stem}: {text}" for text in verdicts(rows[-1])]
        except WorkerError as error:
            failures.append(f"{config.stem}: {error}")
        if args.json:
            write_json(args.json, {"rows": rows, "failures": failures})
    console.print(table(rows))
    for failure in failures:
        console.print(f"FAILED {failure}", style="red", markup=False)
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
