"""What `gpu_check.sh` runs: stages with a time limit each, and one report that hides nothing.

Every stage is a process of its own. One that fails, takes too long or cannot be run is reported as such, and makes the
exit status 1; the others still run, as long as the time for all lasts.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TOTAL_S = 450.0
TAIL_LINES = 40

TESTS = (
    "tests/aio_ffi/test_round_trip.py",
    "tests/aio_ffi/test_arena.py",
    "tests/aio_ffi/test_faults.py",
    "tests/optim/test_kernels.py",
    "tests/tier",
    "tests/stream",
    "tests/train/test_invariants.py",
    "tests/train/test_checkpoint.py",
)


@dataclasses.dataclass(frozen=True)
class Stage:
    """A command and the seconds that it may take."""

    name: str
    argv: list[str]
    limit_s: float
    env: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Result:
    """How a stage ended. `data`: the JSON object in the last line of its output, if there is one."""

    name: str
    ok: bool
    seconds: float
    why: str
    output: str
    data: Any = None


def run(stage: Stage, left_s: float) -> Result:
    """Runs one stage; never raises for what the stage does."""
    limit_s = min(stage.limit_s, left_s)
    if limit_s < 5:
        return Result(stage.name, False, 0.0, "not run: no time was left", "")
    start = time.monotonic()
    process = subprocess.Popen(
        stage.argv, cwd=ROOT, env={**os.environ, **stage.env}, text=True, errors="replace", start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    why = ""
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        why = f"took more than {limit_s:.0f} s"
        output = _end(process)
    if not why and process.returncode:
        why = f"ended with status {process.returncode}"
    data = None
    for line in output.splitlines()[-1:]:
        try:
            data = json.loads(line) if line.startswith("{") else None
        except ValueError:
            data = None
    return Result(stage.name, not why, time.monotonic() - start, why, output, data)


def _end(process: subprocess.Popen[str]) -> str:
    """Ends a stage and all that it started, with a moment to clean up. Returns what it had printed."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        output, _ = process.communicate(timeout=10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    return output


def stages(args: argparse.Namespace) -> list[Stage]:
    """In the order in which they matter."""
    python, out = sys.executable, Path(args.out).resolve()
    own = [python, "scripts/_gpu_stages.py"]
    flags = ["--allow-cpu"] if args.allow_cpu else []
    if args.allow_cpu:
        sizes, variants, steps = "tiny", "device,nvme", ["--io-bytes", str(1 << 25), "--rounds", "1", "--steps", "2"]
        tests: Sequence[str] = TESTS[:1] + TESTS[3:4]
    else:
        sizes, variants, tests = "350m,1.3b", "device,host,nvme", TESTS
        steps = ["--matmul-dtype", "bfloat16", "--rounds", "2", "--steps", "3"]
    bench = ["--sizes", sizes, "--variants", variants, "--nvme-path", args.nvme_path, *steps]
    has_pytest = importlib.util.find_spec("pytest") is not None
    runner = [python, "-m", "pytest", "-q", "-x", "--tb=short"] if has_pytest else [*own, "tests"]
    present = [name for name in tests if (ROOT / name).exists()]
    memory = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # several processes share the device
    return [
        Stage("machine", [*own, "machine", *flags], 60),
        Stage("build aio_ffi", [python, "aio_ffi/_build.py"], 60),
        Stage("build host kernels", [python, "zinf_jax/optim/_build.py"], 150),
        Stage("placement keeps the bits", [*own, "bits", *flags], 100, memory),
        Stage("copies and compute at once", [*own, "copies", *flags], 60, memory),
        Stage(
            "step benchmark",
            [python, "scripts/bench_step.py", *bench, "--json", str(out / "gpu_step.json")],
            200,
            memory,
        ),
        Stage("tests", [*runner, *present], 150, memory),
    ]


def report(results: list[Result], started: str, total_s: float) -> str:
    """Markdown: a table of the stages, then the end of each one's output."""
    lines = [
        "# GPU check",
        "",
        f"{started}, {total_s:.0f} s in all.",
        "",
        "| stage | result | seconds |",
        "| --- | --- | --- |",
    ]
    lines += [f"| {r.name} | {'ok' if r.ok else '**FAILED**: ' + r.why} | {r.seconds:.0f} |" for r in results]
    for result in results:
        tail = result.output.strip().splitlines()[-TAIL_LINES if result.ok else -4 * TAIL_LINES :]
        lines += ["", f"## {result.name}", "", "```", *tail, "```"]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=".", help="folder for gpu_check.md, gpu_check.json and gpu_step.json")
    parser.add_argument("--nvme-path", default="bench-pages", help="folder on the drive to be used")
    parser.add_argument("--allow-cpu", action="store_true", help="run at a tiny size where there is no accelerator")
    parser.add_argument("--limit", type=float, default=TOTAL_S, help=f"seconds for all stages ({TOTAL_S:.0f})")
    args = parser.parse_args(argv)
    started, start = time.strftime("%Y-%m-%d %H:%M:%S"), time.monotonic()
    out, results = Path(args.out), []
    with tempfile.TemporaryDirectory(prefix="gpu-check-cache-") as cache:
        # The stages compile many of the same programs.
        os.environ |= {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        _run_all(stages(args), out, results, started, start, args.limit)
    failed = [r.name for r in results if not r.ok]
    print(f"FAILED: {', '.join(failed)}" if failed else "all stages ok")
    return 1 if failed else 0


def _run_all(todo: list[Stage], out: Path, results: list[Result], started: str, start: float, limit_s: float) -> None:
    for stage in todo:
        print(f"{stage.name} ...", flush=True)
        results.append(run(stage, limit_s - (time.monotonic() - start)))
        last = results[-1]
        print(f"{stage.name}: {'ok' if last.ok else 'FAILED: ' + last.why} ({last.seconds:.0f} s)", flush=True)
        # Written after every stage: what is known survives whatever happens next.
        total_s = time.monotonic() - start
        (out / "gpu_check.md").write_text(report(results, started, total_s))
        whole = {"started": started, "seconds": total_s, "stages": [dataclasses.asdict(r) for r in results]}
        (out / "gpu_check.json").write_text(json.dumps(whole, indent=2) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
