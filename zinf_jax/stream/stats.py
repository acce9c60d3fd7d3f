"""What a run measured: mutable counters with one owner, and the immutable record that callers see."""

import dataclasses
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from zinf_jax.stream.trace import Lane, Tracer, Transfer

_CAUSES = {  # of stalls in a trace, by counter; others are called after theirs
    "read_stall_s": "read not complete",
    "write_stall_s": "write before reuse",
    "device_wait_s": "device",
    "update_stall_s": "update",
    "commit_stall_s": "commit",
}
_SHORTEST_STALL_S = 10e-6  # looking whether something is done is no stall


@dataclasses.dataclass(frozen=True)
class Stats:
    """Figures of the last step and of the whole run. Bytes and seconds.

    Attributes:
      num_steps: Steps run, skipped ones included.
      step_time_s, pass_time_s, update_time_s: Of the last step: all, passes over the units, update.
      read_stall_s: Waited for a read that was not complete when a program needed it.
      write_stall_s: Waited for a write before its frame could be used again.
      update_stall_s: Waited for an owed update before a page could be used; what it waited for counts as read_stall_s
        or write_stall_s too.
      commit_stall_s: Waited for the step before to be durable.
      device_wait_s: Waited for the device: compute that transfers are hidden behind.
      host_work_s: Gradient copies, norms and fused updates on the host.
      fetch_hits: Uses of a page that was in a frame, or on its way, when it was needed.
      fetch_misses: Uses of a page that nobody had planned to fetch. Always 0.
      fetches: Reads of weight pages.
      pages_ahead: Pages whose update was started before the norm was known.
      updates_undone: Steps whose updates had run ahead in vain, since the start.
      nvme_bytes_read, nvme_bytes_written: By the I/O engine, last step.
      h2d_bytes, d2h_bytes: Moved between host and device, last step; on the CPU backend only what was copied.
      total_*: The same since the start.
      process_nvme_bytes_written: By the I/O engine since it was opened, initialising and restoring pages included.
        Checkpoints are not: they may lie on another drive.
      peak_host_bytes: Most arena bytes in use: leased at once, resident, and frames of the update.
      peak_device_bytes: Most bytes of device arrays seen alive, plus the largest program's temporaries.
      peak_rss_bytes: Of the process (VmHWM).
    """

    num_steps: int = 0
    step_time_s: float = 0.0
    pass_time_s: float = 0.0
    update_time_s: float = 0.0
    read_stall_s: float = 0.0
    write_stall_s: float = 0.0
    update_stall_s: float = 0.0
    commit_stall_s: float = 0.0
    device_wait_s: float = 0.0
    host_work_s: float = 0.0
    fetch_hits: int = 0
    fetch_misses: int = 0
    fetches: int = 0
    pages_ahead: int = 0
    updates_undone: int = 0
    nvme_bytes_read: int = 0
    nvme_bytes_written: int = 0
    h2d_bytes: int = 0
    d2h_bytes: int = 0
    total_time_s: float = 0.0
    total_nvme_bytes_read: int = 0
    total_nvme_bytes_written: int = 0
    process_nvme_bytes_written: int = 0
    total_read_stall_s: float = 0.0
    total_write_stall_s: float = 0.0
    peak_host_bytes: int = 0
    peak_device_bytes: int = 0
    peak_rss_bytes: int = 0


class Counters:
    """Adds up during a step, and has the tracer that those who count also tell. Main thread only."""

    def __init__(self) -> None:
        self.tracer = Tracer()
        self.values: dict[str, float] = {}
        self.peak_device_bytes = 0

    def add(self, name: str, amount: float = 1) -> None:
        self.values[name] = self.values.get(name, 0) + amount

    @contextmanager
    def timed(self, name: str, of: Transfer | None = None, **args: Any) -> Iterator[None]:
        """Adds the time of a `with` block; a wait (`*_stall_s`, `*_wait_s`) is a stall in a trace.

        Args:
          name: The counter.
          of: The transfer that is waited for.
          args: For a trace: what else is known of the cause.
        """
        start = time.perf_counter()
        try:
            yield
        finally:
            end = time.perf_counter()
            self.add(name, end - start)
            if self.tracer.recording and end - start > _SHORTEST_STALL_S and name.endswith(("_stall_s", "_wait_s")):
                if of is not None:
                    args = {"page": of.page, "kind": of.kind, "under_way_s": end - of.times()[0], **args}
                cause = _CAUSES.get(name, name.rsplit("_", 2)[0])
                what = " of ".join(str(args[key]) for key in ("kind", "page", "program") if key in args)
                self.tracer.add(Lane.STALL, f"{cause}: {what}" if what else cause, start, end, cause=cause, **args)

    def take(self) -> dict[str, float]:
        """The counts since the last call."""
        values, self.values = self.values, {}
        return values


def peak_rss_bytes() -> int:
    """VmHWM of this process: can be reset through /proc/self/clear_refs, unlike ru_maxrss."""
    try:
        with open("/proc/self/status") as status:
            for line in status:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_peak_rss() -> None:
    """Lets `peak_rss_bytes` begin anew; where the system cannot, it goes on counting from the process's start."""
    with suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def rss_bytes() -> int:
    """Resident bytes now."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()
    except OSError:
        return peak_rss_bytes()
