"""Gradients on their way from the units' programs to the update, on any tier, and their exact norm.

Guarantees:
  * A piece's gradient is the sum of its contributions (units that read it, times groups of micro-batches), added in the
    order of the schedule, in the gradient's dtype: the same bits on every tier.
  * Its squared norm is taken once, when it is complete: fp64 over fixed blocks of each rank's shard, in leaf order.
  * A spilled page is written when its last piece is complete. Until its frame's time is over an update can read it
    there; the frame is free when both are done.
Only the main thread calls it.
"""

from collections import Counter
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from zinf_jax.graph.types import UnitGraph
from zinf_jax.leaves import Piece
from zinf_jax.optim import kernels
from zinf_jax.plan import Plan, Span, Tier
from zinf_jax.stream.stats import Counters
from zinf_jax.stream.trace import Lane
from zinf_jax.tier import FrameArena, FrameSpan, Layout, Page, PageStore, PendingIO, Segment, row_views

GRADIENTS = "gradients"


class Collected:
    """The gradients of one step, for its update."""

    def __init__(
        self, covered: frozenset[Piece], frames: Mapping[int, np.ndarray], on_device: Mapping[Piece, jax.Array]
    ) -> None:
        self._covered = covered
        self._frames = frames
        self._on_device = on_device

    def covers(self, piece: Piece) -> bool:
        """Does any unit give this piece a gradient? If not, it is zero."""
        return piece in self._covered

    def resident_rows(self, page: Page) -> np.ndarray | None:
        """The page's gradient in memory, flat over its rows; None where it is on NVMe only, or on the device."""
        frame = self._frames.get(page.index)
        return None if frame is None else frame.reshape(-1)

    def device_rows(self, piece: Piece) -> Mapping[tuple[int, int], np.ndarray]:
        """Host views of a device-tier gradient: (tp, rank) -> `[shard_size]`."""
        return row_views(self._on_device[piece])


class GradientCollector:
    """Gradients of one run.

    Args:
      graph, layout, plan: What is collected, and where it goes.
      dtype: The gradient's dtype, the same on every tier.
      arena, store: The memory and the NVMe tier.
      counters: Told about stalls and copies.
    """

    def __init__(
        self,
        graph: UnitGraph,
        layout: Layout,
        plan: Plan,
        dtype: np.dtype,
        arena: FrameArena,
        store: PageStore | None,
        counters: Counters,
    ) -> None:
        self._layout = layout
        self._plan = plan
        self._dtype = np.dtype(dtype)
        self._arena = arena
        self._store = store
        self._counters = counters
        num_groups = len(plan.shape.group_sizes)
        self._expected: Counter[Piece] = Counter()
        for unit_index in graph.backward:
            unit = graph.units[unit_index]
            for piece, diff in zip(unit.pieces, graph.programs[unit.program].diff_pieces, strict=True):
                if diff:
                    self._expected[piece] += num_groups
        self._pieces_of: Counter[int] = Counter(layout.where[piece][0] for piece in self._expected)
        self._spans = {int(s.residency.key[1]): s for s in plan.spans if s.residency.key[0] == GRADIENTS}
        self._add = jax.jit(jnp.add, donate_argnums=0)
        self._wait_for_update: Callable[[int], None] = lambda page: None
        self._reset()

    def attach(self, wait_for_update: Callable[[int], None]) -> None:
        """From here on a frame is kept until what this waits for, an update that may read the page's gradient there."""
        self._wait_for_update = wait_for_update

    def _reset(self) -> None:
        self._seen: Counter[Piece] = Counter()
        self._complete: Counter[int] = Counter()
        self._norms: dict[Piece, float] = {}
        self._on_device: dict[Piece, jax.Array] = {}
        self._frames: dict[int, np.ndarray] = {}
        self._ready: list[int] = []
        self.collected = Collected(frozenset(self._expected), self._frames, self._on_device)
        self._writes: dict[int, PendingIO] = {}
        self._ends: dict[int, list[Span]] = {}

    def begin(self) -> None:
        """Starts a step: no gradient is there. What the step before `collected` stays readable until this step's first
        contribution to the page: a resident frame is then filled anew."""
        self._reset()
        for span in self._spans.values():
            self._ends.setdefault(span.residency.end, []).append(span)

    def take_complete(self) -> list[int]:
        """Pages whose gradient is whole since the last call."""
        pages, self._ready = self._ready, []
        return pages

    def release(self, position: int) -> None:
        """Frees frames whose time is over, waiting for their writes."""
        for span in self._ends.pop(position, ()):
            self._free(span)

    def add(self, piece: Piece, rows: jax.Array) -> None:
        """Adds a contribution `[num_tp, num_ranks, shard_size]`, which is ready.

        Raises:
          StoreError: an earlier spill failed.
        """
        page, segment = self._layout.segment(piece)
        first = self._seen[piece] == 0
        self._seen[piece] += 1
        with self._counters.timed("host_work_s"):
            if self._plan.tiers[page.index].gradients is Tier.DEVICE:
                self._on_device[piece] = rows if first else self._add(self._on_device[piece], rows)
            else:
                with self._counters.tracer.span(Lane.DEVICE_TO_HOST, page.name, kind=GRADIENTS, bytes=rows.nbytes):
                    self._store_rows(page, segment, rows, first)
            if self._seen[piece] == self._expected[piece]:
                self._finish_piece(page, segment)

    def _store_rows(self, page: Page, segment: Segment, rows: jax.Array, first: bool) -> None:
        frame = self._frame(page)
        for row, source in row_views(rows).items():
            target = frame[row[0], row[1], segment.offset : segment.offset + segment.shard_size]
            (kernels.copy if first else kernels.accumulate)(target, source)
            self._counters.add("d2h_bytes", source.nbytes)

    def _frame(self, page: Page) -> np.ndarray:
        """The page's gradient, `[num_tp, num_ranks, row_size]`, in its resident place or in a leased frame."""
        if page.index not in self._frames:
            num_bytes = page.num_elements * self._dtype.itemsize
            resident = self._plan.resident.get((GRADIENTS, page.index))
            if resident is not None:
                frame = self._arena.view(FrameSpan(resident, num_bytes))
            else:
                span = FrameSpan(self._spans[page.index].offset, num_bytes)
                frame = self._arena.lease(span, f"gradients of {page.name}")
            self._frames[page.index] = frame.view(self._dtype).reshape(page.shape)
        return self._frames[page.index]

    def _finish_piece(self, page: Page, segment: Segment) -> None:
        with self._counters.tracer.span(Lane.UPDATE, "norm", page=page.name):
            self._norms[segment.piece] = self._squared_norm(page, segment)
        self._complete[page.index] += 1
        if self._complete[page.index] < self._pieces_of[page.index]:
            return
        if self._plan.tiers[page.index].gradients is Tier.NVME:
            assert self._store is not None
            frame = self._frames[page.index].reshape(-1).view(np.uint8)
            self._writes[page.index] = self._store.write_page(GRADIENTS, page.index, frame, page.name)
        self._ready.append(page.index)

    def _squared_norm(self, page: Page, segment: Segment) -> float:
        if self._plan.tiers[page.index].gradients is Tier.DEVICE:
            rows = row_views(self._on_device[segment.piece])
        else:
            part = slice(segment.offset, segment.offset + segment.shard_size)
            frame = self._frames[page.index]
            rows = {(t, r): frame[t, r, part] for t in range(page.num_tp) for r in range(page.num_ranks)}
        return sum(kernels.squared_norm(rows[key]) for key in sorted(rows))

    def _free(self, span: Span) -> None:
        page_index = int(span.residency.key[1])
        self._wait_for_update(page_index)
        write = self._writes.pop(page_index)
        with self._counters.timed("write_stall_s", write):
            write.wait()
        frame = self._frames.pop(page_index)
        self._arena.release(FrameSpan(span.offset, frame.nbytes))

    def finish(self) -> tuple[float, ...]:
        """Ends the passes: all spills are written, their frames free.

        Returns:
          The squared norm of each leaf's gradient that is not zero by construction, in leaf order.

        Raises:
          StoreError: a spill failed; the frames are free, and the step can be repeated.
        """
        try:
            for position in sorted(self._ends):
                self.release(position)
        except BaseException:
            self.abort()
            raise
        by_leaf: dict[int, list[Piece]] = {}
        for piece in sorted(self._norms):
            by_leaf.setdefault(piece.leaf, []).append(piece)
        return tuple(sum(self._norms[piece] for piece in pieces) for _, pieces in sorted(by_leaf.items()))

    def abort(self) -> None:
        """After an error: waits for writes in flight and frees the frames."""
        for write in self._writes.values():
            try:
                write.wait()
            except OSError:  # the step's first error is what the caller sees
                continue
        for page_index, frame in list(self._frames.items()):
            if page_index in self._spans and (GRADIENTS, page_index) not in self._plan.resident:
                self._arena.release(FrameSpan(self._spans[page_index].offset, frame.nbytes))
        self._reset()
