"""What steps took: added up step by step, given out as an immutable record."""

import dataclasses
import time
from typing import Any

from zinf_jax.stream.engine import StreamEngine
from zinf_jax.stream.stats import Stats, peak_rss_bytes

_TOTALS = {
    "total_time_s": "step_time_s",
    "total_nvme_bytes_read": "nvme_bytes_read",
    "total_nvme_bytes_written": "nvme_bytes_written",
    "total_read_stall_s": "read_stall_s",
    "total_write_stall_s": "write_stall_s",
}


class Account:
    """Of one trainer. A step is between `begin` and `end`; `middle` is when its norm was known."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._last: dict[str, float] = {}
        self._totals: dict[str, float] = {}

    def begin(self, engine: StreamEngine) -> None:
        self._before = engine.store.statistics()
        engine.counters.take()
        self.start_s = time.perf_counter()

    def middle(self) -> None:
        self._middle_s = time.perf_counter()

    def end(self, engine: StreamEngine) -> float:
        """Returns the end, in seconds of `time.perf_counter()`."""
        after, end = engine.store.statistics(), time.perf_counter()
        values = engine.counters.take()
        values |= {
            "step_time_s": end - self.start_s,
            "pass_time_s": self._middle_s - self.start_s,
            "update_time_s": end - self._middle_s,
            "nvme_bytes_read": after.bytes_read - self._before.bytes_read,
            "nvme_bytes_written": after.bytes_written - self._before.bytes_written,
        }
        self._num_steps += 1
        self._last = values
        for total, name in _TOTALS.items():
            self._totals[total] = self._totals.get(total, 0) + values.get(name, 0)
        return end

    def stats(self, engine: StreamEngine, *, updates_undone: int) -> Stats:
        known = {f.name for f in dataclasses.fields(Stats)}
        counted: dict[str, Any] = {k: v for k, v in (self._last | self._totals).items() if k in known}
        arena, plan = engine.arena, engine.plan
        frames = engine.io.peak_frames * plan.chunk_frame_bytes if plan.overlaps else 0  # else where the passes' are
        return Stats(
            num_steps=self._num_steps,
            updates_undone=updates_undone,
            process_nvme_bytes_written=engine.store.statistics().bytes_written,
            peak_host_bytes=arena.num_bytes if plan.resident else arena.peak_leased_bytes + frames,
            peak_device_bytes=engine.counters.peak_device_bytes,
            peak_rss_bytes=peak_rss_bytes(),
            **counted,
        )
