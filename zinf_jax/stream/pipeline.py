"""A pipeline of chunks: read, compute, write over a bounded number of frames, without blocking unless asked to.

Guarantees:
  * A chunk's frame is free only when its writes are complete. Chunks are computed in the order in which they were
    added; reads run as far ahead as there are frames. With one frame all is synchronous.
  * `advance` never waits; `finish` and `compute` do, and count for what.
  * After `abandon`, which is how an error ends, no transfer is in flight; what was not computed is given back.
Main thread only.
"""

import collections
from collections.abc import Callable, Iterable

from zinf_jax.plan import Chunk
from zinf_jax.stream.ahead import ReadAhead
from zinf_jax.stream.chunks import ChunkFrame, ChunkIO
from zinf_jax.stream.gradients import Collected

Compute = Callable[[Chunk, ChunkFrame], None]


class _Task:
    __slots__ = ("chunk", "frame", "held", "slot")

    def __init__(self, chunk: Chunk, held: bool) -> None:
        self.chunk = chunk
        self.held = held
        self.slot = -1
        self.frame = ChunkFrame()


class ChunkPipeline:
    """Chunks on their way through the host.

    Args:
      io: Moves them.
      compute: Called for each chunk with its bytes in memory.
      gradients: Bring these gradients too.
      read: False: the bytes are about to be made, not changed.
      write: False: the bytes are only looked at.
      may_write: Says whether a page may be written now; `wait_to_write` blocks until it may.
      on_written: Told the bytes of each chunk whose new version is complete.
      ahead: Has filled frames for some chunks, and shares the frames. None: nothing else uses them.
    """

    def __init__(
        self,
        io: ChunkIO,
        compute: Compute,
        *,
        gradients: Collected | None = None,
        read: bool = True,
        write: bool = True,
        may_write: Callable[[], bool] = lambda: True,
        wait_to_write: Callable[[], None] = lambda: None,
        on_written: Callable[[int], None] = lambda num_bytes: None,
        ahead: ReadAhead | None = None,
    ) -> None:
        self._io = io
        self._compute = compute
        self._gradients = gradients
        self._read = read
        self._write = write
        self._may_write = may_write
        self._wait_to_write = wait_to_write
        self._on_written = on_written
        self._todo: collections.deque[_Task] = collections.deque()
        self._reading: collections.deque[_Task] = collections.deque()
        self._writing: list[_Task] = []
        self._ahead = ahead or ReadAhead(io)
        self._slots = self._ahead.slots
        self._waiting: collections.Counter[int] = collections.Counter()  # page -> chunks that are not computed
        self._open: collections.Counter[int] = collections.Counter()  # page -> chunks that are not written

    def add(self, chunk: Chunk, *, held: bool = False) -> None:
        """Takes a chunk. `held`: its weights are in the pager's frame."""
        self._todo.append(_Task(chunk, held))
        self._waiting[chunk.page] += 1
        self._open[chunk.page] += 1

    @property
    def idle(self) -> bool:
        return not (self._todo or self._reading or self._writing)

    def advance(self) -> bool:
        """Does what can be done without waiting: at most one chunk is computed.

        Returns:
          Whether anything moved.

        Raises:
          StoreError: a transfer failed. Call `abandon`.
        """
        moved = self._retire_writes()
        moved |= self._start_reads()
        if self._reading and self._reading[0].frame.done() and self._may_write():
            self._compute_next()
            moved = True
        return moved

    def waits(self, page: int) -> bool:
        """Are there chunks of a page that were added and are not computed?"""
        return self._waiting[page] > 0

    def compute(self, page: int) -> None:
        """Blocks until all chunks of a page that were added are computed."""
        self._run_until(lambda: not self.waits(page))

    def write(self, page: int) -> None:
        """Blocks until all chunks of a page that were added are written."""
        self._run_until(lambda: not self._open[page])

    def finish(self) -> None:
        """Blocks until everything that was added is written."""
        self._run_until(lambda: self.idle)

    def _run_until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            if not self.advance():
                self._block()

    def _block(self) -> None:
        """Nothing can move: waits for the oldest transfer."""
        if self._reading:
            self._io.wait(self._reading[0].frame, "read_stall_s")
            self._wait_to_write()
        else:
            self._io.wait(self._writing[0].frame, "write_stall_s")

    def _retire_writes(self) -> bool:
        done = [task for task in self._writing if task.frame.done()]
        for task in done:
            self._io.wait(task.frame, "write_stall_s")
            self._writing.remove(task)
            self._slots.append(task.slot)
            self._open[task.chunk.page] -= 1
            self._on_written(task.frame.weights.nbytes + task.frame.record.nbytes)
        return bool(done)

    def _start_reads(self) -> bool:
        moved = False
        while self._todo:
            task = self._todo[0]
            found = self._ahead.take(task.chunk)
            stuck = found is None and not self._slots
            # Frames that were filled for later chunks give way only where nothing else will free one.
            if stuck and (self._reading or self._writing or not self._ahead.give_up()):
                break
            task.slot, record = found or (self._slots.pop(), None)
            try:
                task.frame = self._io.start(
                    task.chunk, task.slot, gradients=self._gradients, read=self._read, held=task.held, record=record
                )
            except BaseException:
                self._slots.append(task.slot)
                raise
            self._reading.append(self._todo.popleft())
            moved = True
        return moved

    def _compute_next(self) -> None:
        task = self._reading[0]
        self._io.wait(task.frame, "read_stall_s")
        self._compute(task.chunk, task.frame)
        self._writing.append(self._reading.popleft())
        self._waiting[task.chunk.page] -= 1
        if self._write:
            self._io.write(task.chunk, task.frame)

    def abandon(self) -> tuple[list[Chunk], OSError | None]:
        """Waits for all transfers and forgets what was not computed.

        Returns:
          The chunks that were not computed; and why the new version of one that was is lost, if any is.
        """
        for task in self._reading:
            self._io.abandon(task.frame)
        failures = [self._io.abandon(task.frame) for task in self._writing]
        left = [task.chunk for task in [*self._reading, *self._todo]]
        self._slots += [task.slot for task in [*self._reading, *self._writing]]
        self._todo.clear()
        self._reading.clear()
        self._writing.clear()
        self._waiting.clear()
        self._open.clear()
        return left, next((error for error in failures if error is not None), None)


def stream_chunks(
    chunks: Iterable[Chunk],
    io: ChunkIO,
    compute: Compute,
    *,
    gradients: Collected | None = None,
    read: bool = True,
    write: bool = True,
) -> None:
    """Takes chunks through a pipeline, one after the other, and waits for all of it.

    Raises:
      StoreError: a transfer failed; all others are complete when it is raised.
    """
    pipeline = ChunkPipeline(io, compute, gradients=gradients, read=read, write=write)
    for chunk in chunks:
        pipeline.add(chunk)
    try:
        pipeline.finish()
    except BaseException:
        pipeline.abandon()
        raise
