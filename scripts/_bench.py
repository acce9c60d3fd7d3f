"""What the step benchmarks share: worker processes that take turns, process counters, medians, files that go away.

Every variant lives in a process of its own, so that memory, arenas and thread pools do not mix, and computes only when
told to. The parent alternates the two sides of a pair (A B A B ...), because absolute times drift on a shared machine
and only ratios of the same minutes mean anything.

Guarantees: a worker that dies, hangs or answers with an error raises `WorkerError` with the end of its log; no worker
outlives its `with` block; only the standard library is imported, since the reference system's interpreter, which has
neither JAX nor this package, runs this file too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import selectors
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Reply = dict[str, Any]
GIB = 1 << 30
SCRIPTS = Path(__file__).resolve().parent
LOG_LINES = 12  # of a failed worker's log, in the error
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
MALLOC = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1"}  # of all sides with JAX alike


class WorkerError(RuntimeError):
    """A worker died, hung, or answered with an error. The message holds the end of its log."""


@dataclasses.dataclass(frozen=True)
class ModelSize:
    """A decoder as in `zinf_jax.models.SIZES`: repeated for an interpreter without JAX, and tested equal."""

    name: str
    dim: int
    num_layers: int
    num_heads: int
    vocab_size: int = 16384
    seq_len: int = 256

    @property
    def num_params(self) -> int:
        per_block = 12 * self.dim**2 + 2 * self.dim
        return self.num_layers * per_block + (2 * self.vocab_size + self.seq_len + 1) * self.dim


SIZES = {
    size.name: size
    for size in (
        ModelSize("tiny", 64, 2, 4, 512, 32),
        ModelSize("50m", 512, 12, 8),
        ModelSize("125m", 768, 12, 12),
        ModelSize("350m", 1024, 24, 16),
        ModelSize("1.3b", 2048, 24, 16),
        ModelSize("2.7b", 2560, 32, 32),
        ModelSize("4.2b", 3072, 36, 24),
        ModelSize("5.1b", 3584, 32, 28),
        ModelSize("6.7b", 4096, 32, 32),
    )
}


# --- the process's own counters ---------------------------------------------------------------------------------------


def io_counters() -> dict[str, int]:
    """Bytes that this process has caused to be read from and written to storage (page-cache hits excluded)."""
    pairs = (line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    counters = {key: int(value) for key, value in pairs}
    return {"read_bytes": counters["read_bytes"], "write_bytes": counters["write_bytes"]}


def reset_peak_rss() -> None:
    """Sets VmHWM to the current resident size, so that initialisation does not count."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_rss_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmHWM in /proc/self/status")


# --- the worker's side ------------------------------------------------------------------------------------------------


def serve(build: Callable[[dict[str, Any]], Mapping[str, Callable[..., Reply]]]) -> None:
    """Runs a worker: `build(spec)` makes the commands, then each line on stdin runs one.

    The protocol has a copy of stdout to itself; whatever libraries print goes to the log.
    """
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(run: Callable[[], Reply]) -> bool:
        try:
            reply = run()
        except BaseException as error:  # The parent must hear of everything, an interrupt and a SystemExit too.
            traceback.print_exc()
            channel.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
            return False
        channel.write(json.dumps(reply) + "\n")
        return True

    commands: Mapping[str, Callable[..., Reply]] = {}

    def start() -> Reply:
        nonlocal commands
        commands = build(json.loads(sys.argv[-1]))
        init_peak = peak_rss_bytes()
        reset_peak_rss()
        return {"init_peak_rss_bytes": init_peak}

    if not answer(start):
        raise SystemExit(1)
    for line in sys.stdin:
        request = json.loads(line)
        command = commands[request.pop("command")]
        answer(lambda command=command, request=request: command(**request))  # type: ignore[misc]


def timed_steps(step: Callable[[], None], count: int) -> Reply:
    """Times `count` steps one by one; `step` must block until all its effects are done, writes to storage included."""
    before, times = io_counters(), []
    for _ in range(count):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    after = io_counters()
    moved = {key: (after[key] - before[key]) / count for key in after}
    return {"times_s": times, **moved, "peak_rss_bytes": peak_rss_bytes()}


# --- the parent's side ------------------------------------------------------------------------------------------------


class Worker:
    """A process that waits for commands. Use as a context manager: its end is the process's end."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        spec: Mapping[str, Any],
        *,
        log_dir: Path,
        env: Mapping[str, str] | None = None,
        start_timeout_s: float = 600.0,
    ) -> None:
        self.name = name
        self._log_path = log_dir / f"{name.replace(' ', '_')}.log"
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [*argv, json.dumps(spec)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **(env or {})},
            )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._process.stdout, selectors.EVENT_READ)
        self._buffer = b""
        try:
            self.ready: Reply = self._receive(start_timeout_s)
        except BaseException:
            self.close()
            raise

    def call(self, command: str, *, timeout_s: float, **arguments: Any) -> Reply:
        """Runs one command and waits for its reply.

        Raises:
          WorkerError: no reply in `timeout_s`, an error, or the process is gone.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"command": command, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure(f"is gone before {command!r}") from None
        return self._receive(timeout_s)

    def _receive(self, timeout_s: float) -> Reply:
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not self._selector.select(left):
                raise self._failure(f"gave no answer in {timeout_s:.0f} s")
            piece = os.read(self._process.stdout.fileno(), 1 << 16)
            if not piece:
                raise self._failure(f"ended with status {self._process.wait()}")
            self._buffer += piece
        line, self._buffer = self._buffer.split(b"\n", 1)
        reply: Reply = json.loads(line)
        if "error" in reply:
            raise self._failure(reply["error"])
        return reply

    def _failure(self, what: str) -> WorkerError:
        tail = self._log_path.read_text(errors="replace").strip().splitlines()[-LOG_LINES:]
        return WorkerError(f"worker {self.name!r}: {what}\n" + "\n".join(f"    | {line}" for line in tail))

    def close(self, grace_s: float = 60.0) -> None:
        """Lets the process end by itself (end of its input) for a while, then makes it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._selector.close()
        self._process.stdout.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def worker_argv() -> list[str]:
    """How the JAX workers are started."""
    return [sys.executable, str(SCRIPTS / "_bench_workers.py")]


def worker_env() -> dict[str, str]:
    """This checkout on the path."""
    return {"PYTHONPATH": os.pathsep.join([str(SCRIPTS.parent), *filter(None, [os.environ.get("PYTHONPATH")])])}


@dataclasses.dataclass
class Series:
    """The replies of one worker over all its turns."""

    times_s: list[float] = dataclasses.field(default_factory=list)
    last: Reply = dataclasses.field(default_factory=dict)

    @property
    def median_s(self) -> float:
        return statistics.median(self.times_s)


def alternate(
    workers: Sequence[Worker],
    *,
    num_rounds: int,
    num_steps: int,
    timeout_s: float,
    progress: Callable[[str], None] = lambda _: None,
    after_round: Callable[[], None] = lambda: None,
) -> list[Series]:
    """Lets the workers take turns, `num_steps` at a time. The caller has warmed them up.

    `after_round` measures what the rounds are compared with: it drifts as they do.
    """
    series = [Series() for _ in workers]
    for turn in range(num_rounds):
        for worker, record in zip(workers, series, strict=True):
            progress(f"round {turn + 1}/{num_rounds}: {worker.name}")
            record.last = worker.call("steps", count=num_steps, timeout_s=timeout_s)
            record.times_s += record.last["times_s"]
        after_round()
    return series


def end_on_sigterm() -> None:
    """Lets `finally` clauses run when this process is told to end, so that no page files stay behind."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


@contextlib.contextmanager
def temporary_folder(parent: Path, name: str) -> Iterator[Path]:
    """A new folder under `parent` that is removed at the end, whatever happens; and `parent`, if this made it."""
    made = not parent.exists()
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=parent.resolve()))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if made:
            with contextlib.suppress(OSError):  # something else is there by now
                parent.rmdir()


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
