"""The update for optimizers without a fused kernel: optax's own, through XLA, on what streams by.

Guarantees: as for `updates`; leaves whose update is elementwise are updated chunk by chunk, the others are gathered
whole (all that are coupled at once), updated, and written back in a second pass over their pages. The optimizer's small
state advances once, after all groups.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from zinf_jax.leaves import Leaf
from zinf_jax.optim import kernels
from zinf_jax.plan import Chunk, Plan
from zinf_jax.stream.chunks import ChunkFrame, ChunkIO
from zinf_jax.stream.gradients import Collected
from zinf_jax.stream.pipeline import stream_chunks
from zinf_jax.stream.records import RangeOf, RecordFormat, ranges_of
from zinf_jax.stream.stats import Counters
from zinf_jax.stream.trace import Lane
from zinf_jax.stream.updates import part_gradient
from zinf_jax.tier import Layout, from_rows, to_rows


class Group(Protocol):
    @property
    def leaves(self) -> tuple[int, ...]: ...
    @property
    def elementwise(self) -> bool: ...


class GenericBoundRule(Protocol):
    """What this module asks of an optax transformation that was bound to the leaves."""

    @property
    def groups(self) -> tuple[Any, ...]: ...
    def slots_of(self, leaf_index: int) -> tuple[str, ...]: ...
    def update_group(
        self, group: Any, masters: Sequence[Any], gradients: Sequence[Any], slots: Sequence[Sequence[Any]],
        *, gradient_scale: float,
    ) -> tuple[list[np.ndarray], list[list[np.ndarray]]]: ...  # fmt: skip
    def end_step(self) -> None: ...
    def drop_step(self) -> None: ...


class _Vectors:
    """Master, gradient and slots of a leaf that is gathered whole: rows of each piece."""

    def __init__(self, layout: Layout, leaf: Leaf, num_slots: int) -> None:
        self.leaf, self.layout = leaf, layout
        self.rows: dict[Any, list[np.ndarray]] = {}
        for piece in leaf.pieces:
            page, segment = layout.segment(piece)
            shape = (page.num_tp, page.num_ranks, segment.shard_size)
            self.rows[piece] = [np.zeros(shape, np.float32) for _ in range(2 + num_slots)]

    def whole(self, axis_sizes: Mapping[str, int]) -> list[np.ndarray]:
        """Each vector in the leaf's own shape."""
        columns = []
        for i in range(len(next(iter(self.rows.values())))):
            parts = [
                from_rows(rows[i], self.leaf, *self.layout.segment(piece), axis_sizes)
                for piece, rows in self.rows.items()
            ]
            columns.append(np.stack(parts).reshape(self.leaf.shape))
        return columns

    def replace(self, values: Sequence[np.ndarray], axis_sizes: Mapping[str, int]) -> None:
        """Takes new (master, slots...), each in the leaf's shape."""
        for number, value in enumerate(values):
            pieces = np.asarray(value).reshape(self.leaf.num_pieces, *self.leaf.piece_shape)
            for piece, rows in self.rows.items():
                page, segment = self.layout.segment(piece)
                index = 0 if number == 0 else number + 1
                rows[index] = to_rows(pieces[piece.index], self.leaf, page, segment, axis_sizes)


class GenericUpdater:
    """Applies any optax transformation to all pages of a run."""

    def __init__(
        self,
        layout: Layout,
        plan: Plan,
        record: RecordFormat,
        io: ChunkIO,
        counters: Counters,
        axis_sizes: Mapping[str, int],
    ) -> None:
        self._layout = layout
        self._plan = plan
        self._record = record
        self._io = io
        self._counters = counters
        self._axis_sizes = dict(axis_sizes)

    def run(self, rule: GenericBoundRule, gradient_scale: float, gradients: Collected) -> None:
        """Updates every trainable page, now.

        Args:
          rule: The optimizer, bound; it has its own counters.
          gradient_scale: Multiplies gradients in fp32 (clip factor, loss scale, micro-batch weights).
          gradients: Of the step.

        Raises:
          StoreError: a transfer failed. Pages may then hold a mix of old and new state.
        """
        self._gradients = gradients
        rule.drop_step()
        by_leaf = {group.leaves[0]: group for group in rule.groups if group.elementwise}

        def compute(chunk: Chunk, frame: ChunkFrame) -> None:
            name = self._layout.pages[chunk.page].name
            with self._counters.timed("host_work_s"), self._counters.tracer.span(Lane.UPDATE, name, start=chunk.start):
                for part in self._parts(chunk):
                    if part.leaf.index in by_leaf:
                        self._update_part(rule, by_leaf[part.leaf.index], chunk, part, frame, gradient_scale)

        stream_chunks(self._chunks(set(by_leaf)), self._io, compute, gradients=gradients)
        for group in rule.groups:
            if not group.elementwise:
                with self._counters.tracer.span(Lane.UPDATE, "leaves that are updated together"):
                    self._update_whole(rule, group, gradient_scale)
        rule.end_step()

    def _chunks(self, leaves: set[int]) -> list[Chunk]:
        """The chunks that hold a part of one of these leaves."""
        return [c for c in self._plan.chunks if any(part.leaf.index in leaves for part in self._parts(c))]

    def _parts(self, chunk: Chunk) -> list[RangeOf]:
        page = self._layout.pages[chunk.page]
        return list(ranges_of(page, self._layout.leaves, chunk.start, chunk.stop))

    def _gradient(self, chunk: Chunk, part: RangeOf, frame: ChunkFrame) -> np.ndarray | None:
        return part_gradient(part, frame, self._gradients, self._plan.tiers[chunk.page].gradients)

    def _update_part(
        self, rule: GenericBoundRule, group: Any, chunk: Chunk, part: RangeOf, frame: ChunkFrame, scale: float
    ) -> None:
        master, slots = self._views(rule, chunk, part, frame)
        gradient = self._gradient(chunk, part, frame)
        new_masters, new_slots = rule.update_group(group, [master], [gradient], [slots], gradient_scale=scale)
        self._put(chunk, part, frame, new_masters[0], new_slots[0])

    def _views(
        self, rule: GenericBoundRule, chunk: Chunk, part: RangeOf, frame: ChunkFrame
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """fp32 master (a copy where it is split) and the leaf's slots of one range."""
        page, here = self._layout.pages[chunk.page], part.here
        weights = frame.weights.view(page.dtype)[here]
        masters, slots = self._record.split(frame.record)
        if masters is None:
            master = weights
        elif page.dtype == kernels.BF16:
            master = kernels.join_master(weights, masters[here])
        else:
            master = masters[here]
        return master, [slot[here] for slot in slots[: len(rule.slots_of(part.leaf.index))]]

    def _put(
        self, chunk: Chunk, part: RangeOf, frame: ChunkFrame, master: np.ndarray, new_slots: Sequence[np.ndarray]
    ) -> None:
        page, here = self._layout.pages[chunk.page], part.here
        weights = frame.weights.view(page.dtype)[here]
        masters, slots = self._record.split(frame.record)
        self._record.store_master(np.ascontiguousarray(master, np.float32), weights, masters, here)
        for slot, value in zip(slots, new_slots, strict=False):
            slot[here] = value

    def _update_whole(self, rule: GenericBoundRule, group: Any, scale: float) -> None:
        leaves = self._layout.leaves
        vectors = {i: _Vectors(self._layout, leaves[i], len(rule.slots_of(i))) for i in group.leaves}
        chunks = self._chunks(set(group.leaves))

        def gather(chunk: Chunk, frame: ChunkFrame) -> None:
            for part in self._parts(chunk):
                if part.leaf.index in vectors:
                    master, slots = self._views(rule, chunk, part, frame)
                    gradient = self._gradient(chunk, part, frame)
                    for target, source in zip(
                        vectors[part.leaf.index].rows[part.segment.piece],
                        [master, gradient, *slots],
                        strict=True,
                    ):
                        if source is not None:
                            target[part.row][part.in_shard] = source

        stream_chunks(chunks, self._io, gather, gradients=self._gradients, write=False)
        columns = [vectors[i].whole(self._axis_sizes) for i in group.leaves]
        new_masters, new_slots = rule.update_group(
            group, [c[0] for c in columns], [c[1] for c in columns], [c[2:] for c in columns], gradient_scale=scale
        )
        for i, master, slots in zip(group.leaves, new_masters, new_slots, strict=True):
            vectors[i].replace([master, *slots], self._axis_sizes)

        def scatter(chunk: Chunk, frame: ChunkFrame) -> None:
            for part in self._parts(chunk):
                if part.leaf.index in vectors:
                    rows = vectors[part.leaf.index].rows[part.segment.piece]
                    master, *slots = (rows[i][part.row][part.in_shard] for i in (0, *range(2, len(rows))))
                    self._put(chunk, part, frame, master, slots)

        stream_chunks(chunks, self._io, scatter)


def whole_bytes(rule: Any, leaves: Sequence[Leaf]) -> int:
    """Host bytes that the largest group of leaves which are updated whole needs beside the frames."""
    return max(
        (
            sum(leaves[i].size * 4 * 2 * (2 + len(rule.slots_of(i))) for i in group.leaves)
            for group in rule.groups
            if not group.elementwise
        ),
        default=0,
    )
