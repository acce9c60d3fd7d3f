"""The plan: everything that is decided before a step, as a value that can be printed, compared and tested."""

import dataclasses
from collections.abc import Mapping
from functools import cached_property

from zinf_jax.plan.placement import PageTiers
from zinf_jax.plan.schedule import Phase, Position, Residency, ValueLife
from zinf_jax.plan.shape import Freed, Hardware, StepShape, StreamOptions, Tier
from zinf_jax.units import format_bytes

PROCESS_SLACK_BYTES = 64 << 20
"""What a process's own heap grows by while it trains: Python objects, allocator rounding."""
HOLES_BYTES = 160 << 20
"""With a tenth of the values: holes between those that wait for backward in the C library's heaps (up to 120 MiB in 24
steps of 350M parameters)."""
KEPT_BYTES = 256 << 20
"""Likewise, where freed buffers are kept for the next step in the heap of each thread."""


@dataclasses.dataclass(frozen=True)
class BudgetItem:
    """A line of the memory table."""

    tier: Tier
    kind: str
    num_bytes: int
    note: str


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Elements `[start, stop)` of a page (rows one after the other), updated as one."""

    page: int
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class Span:
    """A residency and its place in the arena."""

    residency: Residency
    offset: int


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Bytes moved to and from NVMe per step (the update's apart too), and times; None where a rate was not measured.

    With update_overlap "auto" they are those of an update beside the next forward; `ahead_read_bytes` are read on top
    where it runs beside backward. That is less than nothing where it meets gradients in frames that would be spilled.
    """

    read_bytes: int
    write_bytes: int
    compute_s: float | None
    pass_io_s: float | None
    update_io_s: float | None
    update_host_s: float | None
    flops: int
    overlaps: bool = False
    update_read_bytes: int = 0
    update_write_bytes: int = 0
    ahead_read_bytes: int = 0

    @property
    def step_s(self) -> float | None:
        """Passes and update one after the other or, where they overlap, together: as slow as the slowest resource."""
        if self.compute_s is None or self.update_host_s is None:
            return None
        if self.overlaps:
            return max(self.compute_s + self.update_host_s, (self.pass_io_s or 0.0) + (self.update_io_s or 0.0))
        return max(self.compute_s, self.pass_io_s or 0.0) + max(self.update_io_s or 0.0, self.update_host_s)


@dataclasses.dataclass(frozen=True)
class Plan:
    """A planned step.

    Attributes:
      tiers: Per page, where its kinds of state live.
      spilled: Residual values that leave the device, and to where.
      positions, lives: The order of units and the lives of values.
      spans: Frames of everything that is streamed during the passes.
      resident: Arena offset of each (kind, page) that stays there.
      host_residuals: Arena offset of each (value, micro-batch of its group) that waits in host memory.
      stream_offset, stream_bytes: Where the passes' frames lie.
      chunks, chunk_elements, chunk_frame_bytes, num_chunk_frames, update_offset: The update.
      arena_bytes: All host memory of the run.
      device_bytes: Planned peak of values, programs and pages on the device.
      base_rss_bytes: Of the process before any of it.
      scratch_bytes: Host memory beside the arena that the update needs.
      items: The memory table.
      prediction: Bytes and times.
    """

    shape: StepShape = dataclasses.field(repr=False)
    options: StreamOptions
    hardware: Hardware
    tiers: tuple[PageTiers, ...] = dataclasses.field(repr=False)
    spilled: Mapping[int, Tier] = dataclasses.field(repr=False)
    positions: tuple[Position, ...] = dataclasses.field(repr=False)
    lives: tuple[ValueLife, ...] = dataclasses.field(repr=False)
    spans: tuple[Span, ...] = dataclasses.field(repr=False)
    resident: Mapping[tuple[str, int], int] = dataclasses.field(repr=False)
    host_residuals: Mapping[tuple[int, int], int] = dataclasses.field(repr=False)
    stream_offset: int
    stream_bytes: int
    chunks: tuple[Chunk, ...] = dataclasses.field(repr=False)
    chunk_elements: int
    chunk_frame_bytes: int
    num_chunk_frames: int
    update_offset: int
    arena_bytes: int
    device_bytes: int
    base_rss_bytes: int
    scratch_bytes: int
    items: tuple[BudgetItem, ...]
    prediction: Prediction

    @property
    def host_bytes(self) -> int:
        """What counts against `host_memory`."""
        return self.arena_bytes + self.scratch_bytes

    @property
    def peak_rss_bytes(self) -> int:
        """Of the process: what it held before, the arena, and on a CPU the device's memory too."""
        device = self.device_bytes if self.hardware.aliases else 0
        if device:
            device += self._freed_bytes(device)
        return self.base_rss_bytes + PROCESS_SLACK_BYTES + self.host_bytes + device

    def _freed_bytes(self, device_bytes: int) -> int:
        """What the C library holds beside the device's memory, of what was freed."""
        freed = self.hardware.freed
        if freed is Freed.KEPT:
            return device_bytes // 10 + KEPT_BYTES
        if freed is Freed.SHARED or any(unit.saved for unit in self.shape.units):
            return device_bytes // 10 + HOLES_BYTES
        return 0

    @property
    def overlaps(self) -> bool:
        """Does the update share the time of the passes?"""
        return self.options.update_overlap != "none"

    @cached_property
    def chunks_of(self) -> Mapping[int, tuple[Chunk, ...]]:
        """Trained page -> its chunks."""
        result: dict[int, tuple[Chunk, ...]] = {}
        for chunk in self.chunks:
            result[chunk.page] = (*result.get(chunk.page, ()), chunk)
        return result

    @cached_property
    def first_uses(self) -> Mapping[int, int]:
        """Page -> the first position that reads it."""
        result: dict[int, int] = {}
        for position in self.positions:
            for page in self.shape.units[position.unit].pages:
                result.setdefault(page, position.index)
        return result

    @cached_property
    def last_uses(self) -> Mapping[int, int]:
        """Page -> the last position that reads it."""
        return {page: p.index for p in self.positions for page in self.shape.units[p.unit].pages}

    @cached_property
    def fetches(self) -> Mapping[int, tuple[Span, ...]]:
        """Position -> spans of weights whose read is issued there."""
        return self._by_start("weights")

    def _by_start(self, kind: str) -> dict[int, tuple[Span, ...]]:
        result: dict[int, tuple[Span, ...]] = {}
        for span in self.spans:
            if span.residency.key[0] == kind:
                start = span.residency.start
                result[start] = (*result.get(start, ()), span)
        return result

    def table(self) -> str:
        """The memory table: what needs how much on which tier."""
        lines = [f"{'tier':8} {'what':24} {'bytes':>12}  note"]
        for item in sorted(self.items, key=lambda i: (list(Tier).index(i.tier), -i.num_bytes)):
            lines.append(f"{item.tier.value:8} {item.kind:24} {format_bytes(item.num_bytes):>12}  {item.note}")
        lines.append(
            f"host arena {format_bytes(self.arena_bytes)} of {format_bytes(self.hardware.host_memory)}; device "
            f"{format_bytes(self.device_bytes)} of {format_bytes(self.hardware.device_memory)}; process peak "
            f"{format_bytes(self.peak_rss_bytes)} (held before: {format_bytes(self.base_rss_bytes)})"
        )
        return "\n".join(lines)

    def timeline(self, max_rows: int = 60) -> str:
        """Which pages are fetched and dropped at which position."""
        ends: dict[int, list[str]] = {}
        for span in self.spans:
            if span.residency.key[0] == "weights":
                ends.setdefault(span.residency.end, []).append(self.shape.pages[int(span.residency.key[1])].name)
        lines = [f"{'pos':>4} {'pass':8} {'unit':28} fetch issued -> dropped"]
        for position in self.positions:
            issued = [self.shape.pages[int(s.residency.key[1])].name for s in self.fetches.get(position.index, ())]
            name = self.shape.units[position.unit].name
            drop = ends.get(position.index, [])
            note = ", ".join(issued) + (f"  -> {', '.join(drop)}" if drop else "")
            lines.append(f"{position.index:4} {position.phase.value:8} {name[:28]:28} {note}")
        if len(lines) > max_rows:
            half = max_rows // 2
            lines = [*lines[:half], f"     ... {len(lines) - 2 * half} more ...", *lines[-half:]]
        return "\n".join(lines)

    def summary(self) -> str:
        """Bytes per step and predicted times."""
        p = self.prediction
        num_elements = sum(page.num_elements for page in self.shape.pages if page.gradient_bytes) or 1
        moved = (p.read_bytes + p.write_bytes) / num_elements
        text = (
            f"NVMe per step: read {format_bytes(p.read_bytes)}, write {format_bytes(p.write_bytes)} "
            f"({moved:.1f} bytes per parameter)"
        )
        if p.ahead_read_bytes:
            more = "more" if p.ahead_read_bytes > 0 else "less"
            text += f", {format_bytes(abs(p.ahead_read_bytes))} {more} where the update runs beside backward"
        named = {"compute": p.compute_s, "I/O of the passes": p.pass_io_s, "I/O of the update": p.update_io_s,
                 "host work of the update": p.update_host_s, "step": p.step_s}  # fmt: skip
        known = [f"{name} {value:.3g} s" for name, value in named.items() if value is not None]
        return text + ("\npredicted: " + ", ".join(known) if known else "")

    def __str__(self) -> str:
        return "\n".join([self.table(), self.summary(), self.timeline()])


__all__ = ["BudgetItem", "Chunk", "Phase", "Plan", "Prediction", "Span"]
