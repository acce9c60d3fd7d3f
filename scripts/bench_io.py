"""Reads and writes of a page file by aio_ffi, beside fio on the same file: `python scripts/bench_io.py`.

Compared: sequential transfers of the whole file with O_DIRECT, 1 MiB requests, the same depth, buffers on huge pages
(fio: libaio, `GLIBC_TUNABLES=glibc.malloc.hugetlb=1`). Ours come from 16 MiB pages, as training sends them. Runs
alternate, and which of the two goes first changes with every pair, because a shared disk drifts by tens of per cent
within a minute: the ratio is the median of the pairs' ratios. The floor is fio's figure: what the disk gives to a
program that does nothing else. Without fio only ours is printed.
"""

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import aio_ffi
from aio_ffi import _measure

GOAL = 0.95
PATTERNS = {"read": "r", "write": "w", "mixed": "rw"}
FIO_RW = {"read": "read", "write": "write", "mixed": "readwrite"}
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_bytes(text: str) -> int:
    """ "512M" or "4G" (binary units)."""
    digits = text.upper().removesuffix("IB").removesuffix("B")
    unit = digits[-1] if digits and digits[-1] in UNITS else ""
    try:
        return int(float(digits.removesuffix(unit)) * UNITS[unit])
    except ValueError:
        raise argparse.ArgumentTypeError(f"want a size such as 512M or 4G, got {text!r}") from None


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", default=".", help="on the disk to measure (default: here)")
    parser.add_argument("--sizes", type=parse_bytes, nargs="+", default=[1 << 30, 4 << 30])
    parser.add_argument("--repeats", type=int, default=5, help="pairs of runs per size and direction")
    parser.add_argument("--queue-depth", type=int, default=32)
    parser.add_argument("--block-size", type=parse_bytes, default=1 << 20)
    parser.add_argument("--thread-count", type=int, default=1, help="rings (ours only)")
    parser.add_argument("--engine", choices=aio_ffi.ENGINES, default="auto")
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures here")
    parser.add_argument("--check", action="store_true", help=f"exit 1 if reads or writes fall under {GOAL} of fio")
    return parser.parse_args(argv)


def fio_gbps(path: pathlib.Path, num_bytes: int, direction: str, options: aio_ffi.EngineOptions) -> float:
    """One pass over the existing file by fio, in GB/s (reads and writes together)."""
    command = [
        "fio", "--name=pass", f"--filename={path}", f"--size={num_bytes}", f"--rw={FIO_RW[direction]}",
        "--ioengine=libaio", "--direct=1", f"--bs={options.block_size}", f"--iodepth={options.queue_depth}",
        "--overwrite=1", "--thread", "--output-format=json",
    ]  # fmt: skip
    environment = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"fio failed: {done.stderr.strip() or done.stdout.strip()}")
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    return (job["read"]["bw_bytes"] + job["write"]["bw_bytes"]) / 1e9


def measure_size(
    folder: pathlib.Path, num_bytes: int, repeats: int, options: aio_ffi.EngineOptions, has_fio: bool
) -> list[dict]:
    """All directions at one size. Returns one record each."""
    path = folder / f".bench_io_{os.getpid()}"
    request_bytes = min(_measure.REQUEST_BYTES, num_bytes)
    arena = aio_ffi.Arena(_measure.NUM_FRAMES * request_bytes)
    arena.touch()
    frames = [arena.array(i * request_bytes, request_bytes) for i in range(_measure.NUM_FRAMES)]
    records = []
    try:
        with aio_ffi.Engine(options) as engine, engine.open(path, num_bytes=num_bytes) as file:
            _measure.sweep(engine, file, frames, num_bytes, "w")  # the first write also allocates
            file.sync()
            for direction, pattern in PATTERNS.items():

                def ours(pattern: str = pattern) -> float:
                    return num_bytes / _measure.sweep(engine, file, frames, num_bytes, pattern) / 1e9

                def fio(direction: str = direction) -> float:
                    return fio_gbps(path, num_bytes, direction, options)

                pairs = run_pairs(ours, fio if has_fio else None, repeats)
                records.append(summarise(direction, num_bytes, engine.name, file.direct, pairs))
    finally:
        path.unlink(missing_ok=True)
    return records


def run_pairs(
    ours: Callable[[], float], fio: Callable[[], float] | None, repeats: int
) -> list[tuple[float, float | None]]:
    """Alternates the two; the one that goes first changes with every pair."""
    pairs: list[tuple[float, float | None]] = []
    for number in range(repeats):
        if fio is None:
            pairs.append((ours(), None))
        elif number % 2:
            theirs = fio()
            pairs.append((ours(), theirs))
        else:
            mine = ours()
            pairs.append((mine, fio()))
    return pairs


def summarise(
    direction: str, num_bytes: int, engine: str, direct: bool, pairs: list[tuple[float, float | None]]
) -> dict:
    theirs = [fio for _, fio in pairs if fio is not None]
    ratios = [ours / fio for ours, fio in pairs if fio is not None]
    return {
        "direction": direction,
        "num_bytes": num_bytes,
        "engine": engine,
        "direct": direct,
        "ours_gbps": statistics.median(ours for ours, _ in pairs),
        "fio_gbps": statistics.median(theirs) if theirs else None,
        "ratio": statistics.median(ratios) if ratios else None,
        "ratio_min": min(ratios, default=None),
        "ratio_max": max(ratios, default=None),
        "ours_all": [ours for ours, _ in pairs],
        "fio_all": theirs,
    }


def print_table(records: list[dict], console: Console) -> None:
    table = Table(title="GB/s, medians; floor: fio; ratio: median of the pairs, lowest, highest")
    for column in ("file", "direction", "engine", "ours", "fio", "ours / fio", "low", "high", "goal"):
        table.add_column(column, justify="left" if column in ("direction", "engine") else "right", no_wrap=True)
    for record in records:
        ratio = record["ratio"]
        table.add_row(
            f"{record['num_bytes'] / 2**30:g} GiB",
            record["direction"],
            f"{record['engine']}{'' if record['direct'] else ' (buffered)'}",
            f"{record['ours_gbps']:.2f}",
            "-" if ratio is None else f"{record['fio_gbps']:.2f}",
            *("-" if record[key] is None else f"{record[key]:.2f}" for key in ("ratio", "ratio_min", "ratio_max")),
            "" if record["direction"] == "mixed" else f"{GOAL}",
        )
    console.print(table)


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    console = Console()
    options = aio_ffi.EngineOptions(
        block_size=arguments.block_size,
        queue_depth=arguments.queue_depth,
        thread_count=arguments.thread_count,
        engine=arguments.engine,
    )
    folder = pathlib.Path(arguments.directory)
    found = aio_ffi.probe(folder, options)
    console.print(f"{folder.resolve()}: {found.fs_type}, engine {found.engine}, alignment {found.alignment}")
    if found.reason:
        console.print(f"not the best engine: {found.reason}")
    has_fio = shutil.which("fio") is not None
    if not has_fio:
        console.print("fio is not installed (apt install fio): only ours is measured")
    records: list[dict] = []
    for num_bytes in arguments.sizes:
        records += measure_size(folder, num_bytes, arguments.repeats, options, has_fio)
    print_table(records, console)
    if arguments.json:
        arguments.json.write_text(json.dumps({"probe": vars(found), "records": records}, indent=2) + "\n")
    missed = [r for r in records if r["direction"] != "mixed" and r["ratio"] is not None and r["ratio"] < GOAL]
    for record in missed:
        console.print(f"below the goal: {record['direction']} of {record['num_bytes'] / 2**30:g} GiB")
    return 1 if missed and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
