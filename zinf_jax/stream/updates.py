"""The update: optimizer state streams through frames in chunks: read, fused update in place, write from the same frame.

Guarantees:
  * A chunk's frame is free only when its writes are complete; reads run up to `num_chunk_frames - 2` chunks ahead, so
    that at any time one chunk is being computed, one written, the others read. With one frame all is synchronous.
  * Nothing is changed before the first chunk is computed: the caller decides about skipping before calling `run`.
Only one thread calls it at a time, and never while a program that reads the weights is running.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np

from zinf_jax.optim import kernels
from zinf_jax.plan import Chunk, Plan, Tier
from zinf_jax.stream.chunks import ChunkFrame, ChunkIO
from zinf_jax.stream.gradients import GradientCollector
from zinf_jax.stream.records import RangeOf, RecordFormat, ranges_of
from zinf_jax.stream.stats import Counters
from zinf_jax.tier import Layout


class BoundRule(Protocol):
    """What the update asks of an optimizer that was bound to the leaves."""

    @property
    def rule(self) -> kernels.FusedRule: ...

    def coefficients(self, leaf_index: int, count: int) -> np.ndarray: ...


def stream_chunks(
    chunks: Iterable[Chunk],
    io: ChunkIO,
    compute: Callable[[Chunk, ChunkFrame], None],
    *,
    gradients: bool,
    read: bool = True,
    write: bool = True,
) -> None:
    """Pipelines read, compute and write over the plan's chunk frames.

    Args:
      chunks: In order.
      io: Moves them.
      compute: Called for each chunk, in order, with its bytes in memory.
      gradients: Bring the collected gradients too.
      read: False: the bytes are about to be made, not changed.
      write: False: the bytes are only looked at.

    Raises:
      StoreError: a transfer failed; all others are complete when it is raised.
    """
    todo = list(chunks)
    ahead = max(0, io.num_frames - 2)
    frames: list[ChunkFrame | None] = [None] * io.num_frames
    started = 0
    try:
        for number, chunk in enumerate(todo):
            while started < min(number + ahead + 1, len(todo)):
                slot = started % len(frames)
                io.wait(frames[slot], "write_stall_s")
                frames[slot] = io.start(todo[started], slot, gradients=gradients, read=read)
                started += 1
            current = frames[number % len(frames)]
            assert current is not None
            io.wait(current, "read_stall_s")
            compute(chunk, current)
            if write:
                io.write(chunk, current)
        for frame in frames:
            io.wait(frame, "write_stall_s")
    except BaseException:
        for frame in frames:
            io.abandon(frame)
        raise


class Updater:
    """Applies a fused optimizer to all pages of a run."""

    def __init__(
        self,
        layout: Layout,
        plan: Plan,
        record: RecordFormat,
        io: ChunkIO,
        gradients: GradientCollector,
        counters: Counters,
        *,
        num_threads: int | None = None,
    ) -> None:
        self._layout = layout
        self._plan = plan
        self._record = record
        self._io = io
        self._gradients = gradients
        self._counters = counters
        self._num_threads = num_threads

    def run(self, rule: BoundRule, count: int, gradient_scale: float) -> None:
        """Updates every trainable page.

        Args:
          rule: The optimizer, bound.
          count: Updates applied before this one.
          gradient_scale: Multiplies gradients in fp32 (clip factor, loss scale, micro-batch weights).

        Raises:
          StoreError: a transfer failed. Pages may then hold a mix of old and new state.
        """
        coefficients: dict[int, np.ndarray] = {}

        def compute(chunk: Chunk, frame: ChunkFrame) -> None:
            with self._counters.timed("host_work_s"):
                ranges = self._ranges(chunk, frame, rule, count, coefficients)
                kernels.update(rule.rule, ranges, gradient_scale=gradient_scale, num_threads=self._num_threads)

        stream_chunks(self._plan.chunks, self._io, compute, gradients=True)

    def _ranges(
        self, chunk: Chunk, frame: ChunkFrame, rule: BoundRule, count: int, coefficients: dict[int, np.ndarray]
    ) -> list[kernels.Range]:
        page = self._layout.pages[chunk.page]
        weights = frame.weights.view(page.dtype)
        master, slots = self._record.split(frame.record)
        ranges = []
        for part in ranges_of(page, self._layout.leaves, chunk.start, chunk.stop):
            index, here = part.leaf.index, part.here
            if index not in coefficients:
                coefficients[index] = rule.coefficients(index, count)
            ranges.append(
                kernels.Range(
                    weights[here],
                    None if master is None else master[here],
                    part_gradient(part, frame, self._gradients, self._plan.tiers[chunk.page].gradients),
                    tuple(slot[here] for slot in slots),
                    coefficients[index],
                )
            )
        return ranges


def part_gradient(part: RangeOf, frame: ChunkFrame, gradients: GradientCollector, tier: Tier) -> np.ndarray | None:
    """The gradient of one range; None where it is zero because no unit reads the piece."""
    if not gradients.covers(part.segment.piece):
        return None
    if tier is Tier.DEVICE:
        return gradients.device_rows(part.segment.piece)[part.row][part.in_shard]
    return None if frame.gradient is None else frame.gradient[part.here]
