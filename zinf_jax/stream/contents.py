"""Whole states in and out of their tiers: initialisation, leaves as arrays, and the bytes of checkpoints.

Guarantees: at most one page's parameters and the chunk frames are in memory at once, whatever the model's size.
Used between steps only, from the main thread.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from zinf_jax.leaves import Leaf, LeafKind, Piece
from zinf_jax.optim import kernels
from zinf_jax.plan import Chunk, Plan
from zinf_jax.stream.chunks import ChunkFrame, ChunkIO
from zinf_jax.stream.pipeline import stream_chunks
from zinf_jax.stream.records import RecordFormat, ranges_of
from zinf_jax.tier import Layout, Page, Segment, from_rows, to_rows


class Initializer(Protocol):
    """Makes the values of pieces, in the user's dtype and `Leaf.piece_shape`."""

    def make(self, pieces: Sequence[Piece]) -> list[np.ndarray]: ...


InitSlots = Callable[[int, np.ndarray], Sequence[Any]]
"""(leaf index, fp32 masters of a range) -> initial value of each slot there: a number, or an array like the range."""


class Contents:
    """The weights and records of one run."""

    def __init__(
        self,
        layout: Layout,
        plan: Plan,
        record: RecordFormat,
        io: ChunkIO,
        axis_sizes: dict[str, int],
        init_slots: InitSlots,
    ) -> None:
        self._layout = layout
        self._plan = plan
        self._record = record
        self._io = io
        self._axis_sizes = axis_sizes
        self._init_slots = init_slots

    def chunks_of(self, page: Page) -> list[Chunk]:
        """The chunks of any page, trained or not."""
        size = self._plan.chunk_elements
        return [
            Chunk(page.index, start, min(start + size, page.num_elements))
            for start in range(0, page.num_elements, size)
        ]

    def initialise(self, initializer: Initializer, progress: Callable[[int, int], None] | None = None) -> None:
        """Makes and stores every page, one at a time.

        Args:
          initializer: Makes the values.
          progress: Called with (pages done, pages).
        """
        for page in self._layout.pages:
            values = initializer.make([segment.piece for segment in page.segments])
            rows = [self._master_rows(page, s, v) for s, v in zip(page.segments, values, strict=True)]
            del values

            def fill(chunk: Chunk, frame: ChunkFrame, page: Page = page, rows: list[np.ndarray] = rows) -> None:
                self._fill(page, rows, chunk, frame)

            stream_chunks(self.chunks_of(page), self._io, fill, read=False)
            if progress is not None:
                progress(page.index + 1, len(self._layout.pages))

    def _master_rows(self, page: Page, segment: Segment, value: np.ndarray) -> np.ndarray:
        """A piece as `[num_tp, num_ranks, shard_size]`: fp32 where it is trained, else in the page's dtype."""
        leaf = self._layout.leaves[segment.piece.leaf]
        dtype = np.dtype(np.float32) if page.trainable else page.dtype
        value = np.asarray(value)
        if not page.trainable and page.dtype == kernels.BF16 and value.dtype != page.dtype:
            flat = np.ascontiguousarray(value, np.float32).reshape(-1)
            value = kernels.split_master(flat)[0].reshape(value.shape)  # one rounding for every writer of weights
        return to_rows(value.astype(dtype, copy=False), leaf, page, segment, self._axis_sizes)

    def _fill(self, page: Page, rows: Sequence[np.ndarray], chunk: Chunk, frame: ChunkFrame) -> None:
        weights = frame.weights.view(page.dtype)
        frame.weights[:] = 0
        frame.record[:] = 0
        masters, slots = self._record.split(frame.record) if page.trainable else (None, ())
        by_piece = {segment.piece: array for segment, array in zip(page.segments, rows, strict=True)}
        for part in ranges_of(page, self._layout.leaves, chunk.start, chunk.stop):
            source, here = by_piece[part.segment.piece][part.row][part.in_shard], part.here
            if not page.trainable:
                weights[here] = source
                continue
            source = np.ascontiguousarray(source)
            self._record.store_master(source, weights[here], masters, here)
            for slot, value in zip(slots, self._init_slots(part.leaf.index, source), strict=False):
                slot[here] = value

    def reset_slots(self, page: Page, chunk: Chunk, frame: ChunkFrame) -> None:
        """Makes the optimizer's slots of a trained chunk anew, from the weights and masters that are in the frame."""
        weights = frame.weights.view(page.dtype)
        masters, slots = self._record.split(frame.record)
        for slot in slots:
            slot[:] = 0
        for part in ranges_of(page, self._layout.leaves, chunk.start, chunk.stop):
            here = part.here
            if masters is None:
                source = weights[here]
            elif page.dtype == kernels.BF16:
                source = kernels.join_master(weights[here], masters[here])
            else:
                source = masters[here]
            for slot, value in zip(slots, self._init_slots(part.leaf.index, source), strict=False):
                slot[here] = value

    def pieces(self, page: Page, *, slot: int | None = None, master: bool = True) -> Iterator[tuple[Piece, np.ndarray]]:
        """Values of a page's pieces, as arrays of `Leaf.piece_shape`.

        Args:
          page: Which.
          slot: An optimizer slot (fp32) instead of the weights.
          master: fp32 masters of trained pieces; False: the weights as the loss sees them.
        """
        wide = page.trainable and (master or slot is not None)
        flat = np.empty(page.num_elements, np.float32 if wide else page.dtype)

        def read(chunk: Chunk, frame: ChunkFrame) -> None:
            out = flat[chunk.start : chunk.stop]
            masters, slots = self._record.split(frame.record) if page.trainable else (None, ())
            weights = frame.weights.view(page.dtype)
            if slot is not None:
                out[:] = slots[slot]
            elif not wide or masters is None:
                out[:] = weights
            elif page.dtype == kernels.BF16:
                kernels.join_master(weights, masters, out)
            else:
                out[:] = masters

        stream_chunks(self.chunks_of(page), self._io, read, write=False)
        rows = flat.reshape(page.shape)
        for segment in page.segments:
            leaf = self._layout.leaves[segment.piece.leaf]
            part = rows[:, :, segment.offset : segment.offset + segment.shard_size]
            yield segment.piece, from_rows(part, leaf, page, segment, self._axis_sizes)

    def leaf(self, leaf: Leaf, *, slot: int | None = None, master: bool = True) -> np.ndarray:
        """A whole leaf in its own shape (all slices of a stacked one)."""
        dtype = np.float32 if leaf.kind is LeafKind.TRAINABLE and (master or slot is not None) else leaf.dtype
        out = np.empty((leaf.num_pieces, *leaf.piece_shape), dtype)
        for page_index in dict.fromkeys(self._layout.where[piece][0] for piece in leaf.pieces):
            for piece, value in self.pieces(self._layout.pages[page_index], slot=slot, master=master):
                if piece.leaf == leaf.index:
                    out[piece.index] = value
        return out.reshape(leaf.shape)

    def visit(
        self, pages: Sequence[Page], see: Callable[[Page, Chunk, ChunkFrame], None], *, read: bool, write: bool
    ) -> None:
        """Calls `see` with the bytes of every chunk of some pages, in order: reads them before, writes them after."""
        for page in pages:

            def one(chunk: Chunk, frame: ChunkFrame, page: Page = page) -> None:
                see(page, chunk, frame)

            stream_chunks(self.chunks_of(page), self._io, one, read=read, write=write)
