"""The counters of an engine."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from aio_ffi._native import ffi, lib


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Counters of an engine since it was made.

    Attributes:
      bytes_read, bytes_written: Moved, failed transfers' parts included.
      num_reads, num_writes, num_requests: Transfers asked for, and their sum.
      num_pieces: Kernel requests they became.
      num_submits: io_submit calls.
      num_short: Requests that moved less than asked and were continued.
      num_eagain: Times the kernel's queue was full.
      num_retries: Requests made again after EINTR or EAGAIN.
      num_fallbacks: Direct requests refused with EINVAL and made through the page cache.
      bounced: Transfers whose address, offset or length was off the alignment.
      bounce_bytes: Memory held in bounce buffers.
      num_failed: Transfers that failed.
      in_flight, max_in_flight: Transfers, now and at most.
      busy_s: Seconds with at least one transfer in flight.
      queue_depth, num_rings, num_workers: As granted.
    """

    bytes_read: int
    bytes_written: int
    num_reads: int
    num_writes: int
    num_pieces: int
    num_submits: int
    num_short: int
    num_eagain: int
    num_retries: int
    num_fallbacks: int
    bounced: int
    bounce_bytes: int
    num_failed: int
    in_flight: int
    max_in_flight: int
    busy_s: float
    queue_depth: int
    num_rings: int
    num_workers: int

    @classmethod
    def total(cls, several: Sequence["Statistics"]) -> "Statistics":
        """Of several engines together."""
        return cls(**{f.name: sum(getattr(s, f.name) for s in several) for f in dataclasses.fields(cls)})

    @property
    def num_requests(self) -> int:
        return self.num_reads + self.num_writes


def read_statistics(engine: Any) -> Statistics:
    """A snapshot of the C engine's counters."""
    raw = ffi.new("zaio_statistics *")
    lib.zaio_engine_statistics(engine, raw)
    renamed = {"bounced": raw.num_bounced, "busy_s": raw.busy_ns / 1e9}
    names = [field.name for field in dataclasses.fields(Statistics) if field.name not in renamed]
    return Statistics(**{name: getattr(raw, name) for name in names}, **renamed)
