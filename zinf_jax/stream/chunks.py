"""Chunks of pages on their way to and from the host: the one way in which weights and records are read and written.

Guarantees:
  * `start` gives views: into the frame of a slot for what is on NVMe (and reads it), into the resident place otherwise,
    or into a frame in which the pager holds the page.
  * A resident page's handle is dropped before its bytes can change.
  * A slot's frame is in use from `start` until the transfers of its last `write` were waited for.
"""

import numpy as np

from zinf_jax.plan import Chunk, Plan, Tier
from zinf_jax.stream.gradients import GRADIENTS, Collected
from zinf_jax.stream.pager import WEIGHTS, Pager
from zinf_jax.stream.records import RecordFormat
from zinf_jax.stream.stats import Counters
from zinf_jax.tier import FrameArena, FrameSpan, Layout, PageStore, PendingIO

OPTIMIZER = "optimizer"


class ChunkFrame:
    """One chunk in memory.

    Attributes:
      weights, record: uint8 views.
      gradient: In the gradient's dtype, `[stop - start]`; None where it is elsewhere.
      pending: Transfers that use the frame.
    """

    __slots__ = ("gradient", "pending", "record", "weights")

    def __init__(self) -> None:
        self.pending: list[PendingIO] = []
        self.weights = self.record = np.empty(0, np.uint8)
        self.gradient: np.ndarray | None = None

    def done(self) -> bool:
        return all(transfer.done() for transfer in self.pending)


class ChunkIO:
    """Reads and writes chunks of one run.

    Args:
      layout, plan, record: Sizes and places.
      gradient_dtype: Of the collected gradients.
      arena, store, pager: Where bytes are.
      counters: Told about stalls.

    Attributes:
      peak_frames: Most frames that were in use at once.
    """

    def __init__(
        self,
        layout: Layout,
        plan: Plan,
        record: RecordFormat,
        gradient_dtype: np.dtype,
        arena: FrameArena,
        store: PageStore,
        pager: Pager,
        counters: Counters,
    ) -> None:
        self._layout = layout
        self._plan = plan
        self._record = record
        self._gradient_dtype = np.dtype(gradient_dtype)
        self._arena = arena
        self._store = store
        self._pager = pager
        self._counters = counters
        self.peak_frames = 0

    @property
    def num_frames(self) -> int:
        return self._plan.num_chunk_frames

    def number(self, chunk: Chunk) -> int:
        """Which of its page's chunks it is."""
        return chunk.start // self._plan.chunk_elements

    def has_record(self, chunk: Chunk) -> bool:
        """Is the chunk's optimizer record on NVMe?"""
        stored = self._record.itemsize > 0 and self._layout.pages[chunk.page].trainable
        return stored and self._plan.tiers[chunk.page].optimizer is Tier.NVME

    def record_version(self, chunk: Chunk) -> object:
        """Equal for as long as nothing writes the chunk's record."""
        return self._store.newest(OPTIMIZER, chunk.page, self.number(chunk))

    def read_record(self, chunk: Chunk, slot: int) -> PendingIO:
        """Starts reading a chunk's record to where `start` expects it in the slot's frame."""
        frame = ChunkFrame()
        self._place(frame, slot, OPTIMIZER, chunk, self._record.itemsize, self._weights_bytes(chunk), True)
        return frame.pending[0]

    def _weights_bytes(self, chunk: Chunk) -> int:
        """Room at the start of a slot's frame for a chunk's weights: there whether or not they are in it."""
        page = self._layout.pages[chunk.page]
        streamed = self._plan.tiers[chunk.page].weights is Tier.NVME
        return (chunk.stop - chunk.start) * page.dtype.itemsize if streamed else 0

    def start(
        self,
        chunk: Chunk,
        slot: int,
        *,
        gradients: Collected | None,
        read: bool = True,
        held: bool = False,
        record: PendingIO | None = None,
    ) -> ChunkFrame:
        """Finds what a chunk needs in memory, or starts reading it into the slot's frame.

        Args:
          chunk: Which.
          slot: 0 <= slot < num_frames, free.
          gradients: Bring the gradient too, from there.
          read: False: leave the frame's bytes as they are, the caller fills them.
          held: The weights are in the pager's frame, or on their way there: they are changed in place.
          record: `read_record` was called for this chunk and slot, and gave this.
        """
        frame = ChunkFrame()
        if record is not None:
            frame.pending.append(record)
        try:
            self._fill(frame, chunk, slot, gradients, read, held, record is not None)
        except BaseException:
            self.abandon(frame)
            raise
        return frame

    def _fill(
        self, frame: ChunkFrame, chunk: Chunk, slot: int, gradients: Collected | None, read: bool, held: bool,
        has_record: bool,
    ) -> None:  # fmt: skip
        page, tiers = self._layout.pages[chunk.page], self._plan.tiers[chunk.page]
        item, used = page.dtype.itemsize, self._weights_bytes(chunk)
        resident = self._pager.resident_frame(chunk.page)
        if held:
            whole, arriving = self._pager.held_frame(chunk.page)
            frame.weights = whole[chunk.start * item : chunk.stop * item]
            frame.pending += arriving
        elif resident is not None:
            self._pager.invalidate(chunk.page)
            frame.weights = resident[chunk.start * item : chunk.stop * item]
        else:
            frame.weights, _ = self._place(frame, slot, WEIGHTS, chunk, item, 0, read)
        item = self._record.itemsize if page.trainable else 0
        if tiers.optimizer is Tier.NVME and item:
            wanted = read and not has_record
            frame.record, used = self._place(frame, slot, OPTIMIZER, chunk, item, used, wanted)
        elif item:
            base = self._plan.resident[(OPTIMIZER, chunk.page)]
            frame.record = self._arena.view(FrameSpan(base + chunk.start * item, (chunk.stop - chunk.start) * item))
        if gradients is None or tiers.gradients is Tier.DEVICE:
            return
        rows = gradients.resident_rows(page)
        if rows is not None:
            frame.gradient = rows[chunk.start : chunk.stop]
        elif tiers.gradients is Tier.NVME:
            there = any(gradients.covers(s.piece) for s in page.segments)
            data, used = self._place(frame, slot, GRADIENTS, chunk, self._gradient_dtype.itemsize, used, there)
            frame.gradient = data.view(self._gradient_dtype)

    def _place(
        self, frame: ChunkFrame, slot: int, kind: str, chunk: Chunk, item: int, used: int, read: bool
    ) -> tuple[np.ndarray, int]:
        """The next bytes of a slot's frame, and the read that fills them."""
        num_bytes = (chunk.stop - chunk.start) * item
        self.peak_frames = max(self.peak_frames, slot + 1)  # slots are taken from the lowest up
        span = FrameSpan(self._plan.update_offset + slot * self._plan.chunk_frame_bytes, self._plan.chunk_frame_bytes)
        target = self._arena.view(span.part(used, num_bytes))
        if read:
            name = self._layout.pages[chunk.page].name
            frame.pending.append(self._store.read_chunk(kind, chunk.page, self.number(chunk), target, name))
        return target, used + num_bytes

    def wait(self, frame: ChunkFrame, stall: str) -> None:
        """Waits for a frame's transfers and counts what that took as `stall`."""
        pending, frame.pending = frame.pending, []
        for transfer in pending:
            if transfer.done():
                transfer.wait()
            else:
                with self._counters.timed(stall, transfer):
                    transfer.wait()

    def abandon(self, frame: ChunkFrame) -> OSError | None:
        """After an error: waits for a frame's transfers. Returns the first one's own error."""
        first: OSError | None = None
        for transfer in frame.pending:
            try:
                transfer.wait()
            except OSError as error:
                first = first or error
        frame.pending = []
        return first

    def write(self, chunk: Chunk, frame: ChunkFrame) -> None:
        """Starts writing a chunk's new version: what is on NVMe, and all of it where commits hold everything."""
        page, tiers = self._layout.pages[chunk.page], self._plan.tiers[chunk.page]
        record_item = self._record.itemsize if page.trainable else 0
        for kind, tier, data, item in (
            (WEIGHTS, tiers.weights, frame.weights, page.dtype.itemsize),
            (OPTIMIZER, tiers.optimizer, frame.record, record_item),
        ):
            if item and (tier is Tier.NVME or self._plan.options.write_through):
                number = self.number(chunk)
                frame.pending.append(self._store.write_chunk(kind, chunk.page, number, data, page.name))
