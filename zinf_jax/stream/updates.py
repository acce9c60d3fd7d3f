"""The fused update: which kernel call changes which bytes of a chunk.

Guarantees: elementwise, so the same bits whatever the chunking, the order of chunks, and the time at which a chunk is
updated.
"""

from typing import Protocol

import numpy as np

from zinf_jax.optim import kernels
from zinf_jax.plan import Chunk, Plan, Tier
from zinf_jax.stream.chunks import ChunkFrame
from zinf_jax.stream.gradients import Collected
from zinf_jax.stream.pipeline import Compute
from zinf_jax.stream.records import RangeOf, RecordFormat, ranges_of
from zinf_jax.stream.stats import Counters
from zinf_jax.stream.trace import Lane
from zinf_jax.tier import Layout


class BoundRule(Protocol):
    """What the update asks of an optimizer that was bound to the leaves."""

    @property
    def rule(self) -> kernels.FusedRule: ...

    def coefficients(self, leaf_index: int, count: int) -> np.ndarray: ...


class FusedUpdate:
    """Applies a fused optimizer to chunks of a run."""

    def __init__(
        self, layout: Layout, plan: Plan, record: RecordFormat, counters: Counters, *, num_threads: int | None = None
    ) -> None:
        self._layout = layout
        self._plan = plan
        self._record = record
        self._counters = counters
        self._num_threads = num_threads

    def of(self, rule: BoundRule, count: int, gradient_scale: float, gradients: Collected) -> Compute:
        """What updates a chunk that is in memory.

        Args:
          rule: The optimizer, bound.
          count: Updates applied before this one.
          gradient_scale: Multiplies gradients in fp32 (clip factor, loss scale, micro-batch weights).
          gradients: Of the step.
        """
        coefficients: dict[int, np.ndarray] = {}

        def compute(chunk: Chunk, frame: ChunkFrame) -> None:
            name = self._layout.pages[chunk.page].name
            with self._counters.timed("host_work_s"), self._counters.tracer.span(Lane.UPDATE, name, start=chunk.start):
                ranges = self._ranges(chunk, frame, rule, count, coefficients, gradients)
                kernels.update(rule.rule, ranges, gradient_scale=gradient_scale, num_threads=self._num_threads)

        return compute

    def _ranges(
        self, chunk: Chunk, frame: ChunkFrame, rule: BoundRule, count: int, coefficients: dict[int, np.ndarray],
        gradients: Collected,
    ) -> list[kernels.Range]:  # fmt: skip
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
                    part_gradient(part, frame, gradients, self._plan.tiers[chunk.page].gradients),
                    tuple(slot[here] for slot in slots),
                    coefficients[index],
                )
            )
        return ranges


def part_gradient(part: RangeOf, frame: ChunkFrame, gradients: Collected, tier: Tier) -> np.ndarray | None:
    """The gradient of one range; None where it is zero because no unit reads the piece."""
    if not gradients.covers(part.segment.piece):
        return None
    if tier is Tier.DEVICE:
        return gradients.device_rows(part.segment.piece)[part.row][part.in_shard]
    return None if frame.gradient is None else frame.gradient[part.here]
