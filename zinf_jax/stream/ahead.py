"""Optimizer records on their way to host memory before their update is asked for.

What a record is before an update is known as soon as the update before is written, long before the gradient is: so the
drive, which has little else to do beside backward, fills the update's frames then, in the order in which the updates
will want them.

Guarantees:
  * A frame is either free, filled ahead, or a pipeline's: never two of them.
  * What is taken is the chunk's newest version. One that was written meanwhile is read anew.
  * At most `MAX_IN_FLIGHT` reads are under way: a page that a unit waits for does not wait for these.
Main thread only.
"""

import collections
import contextlib
from collections.abc import Iterable

from zinf_jax.plan import Chunk
from zinf_jax.stream.chunks import ChunkIO
from zinf_jax.tier import PendingIO

MAX_IN_FLIGHT = 2


class ReadAhead:
    """Reads records of chunks into free frames.

    Args:
      io: Moves them.

    Attributes:
      slots: Frames that are free. A pipeline takes them from there and gives them back.
    """

    def __init__(self, io: ChunkIO) -> None:
        self._io = io
        self._todo: collections.OrderedDict[Chunk, None] = collections.OrderedDict()
        self._filled: dict[Chunk, tuple[int, PendingIO, object]] = {}  # frame, read, version; in the order of use
        self.slots = list(range(io.num_frames - 1, -1, -1))

    def begin(self, chunks: Iterable[Chunk]) -> None:
        """The order of the updates to come. The versions before them are written. What is filled already stays."""
        self._todo = collections.OrderedDict.fromkeys(chunk for chunk in chunks if self._io.has_record(chunk))

    @property
    def active(self) -> bool:
        """Is there anything that could advance?"""
        return bool(self._todo and self.slots)

    def advance(self) -> bool:
        """Starts what can be started without waiting. Returns whether anything was."""
        moved = False
        while self._todo and self.slots and self._num_in_flight() < MAX_IN_FLIGHT:
            chunk, _ = self._todo.popitem(last=False)
            if chunk in self._filled:
                continue
            slot = self.slots[-1]
            read = self._io.read_record(chunk, slot)
            self.slots.pop()
            self._filled[chunk] = (slot, read, self._io.record_version(chunk))
            moved = True
        return moved

    def _num_in_flight(self) -> int:
        return sum(not read.done() for _, read, _ in self._filled.values())

    def take(self, chunk: Chunk) -> tuple[int, PendingIO] | None:
        """The frame that was filled for a chunk, which is the caller's from now on, and its read. None: there is none.

        A chunk that is asked for is not read ahead any more.
        """
        self._todo.pop(chunk, None)
        if chunk not in self._filled:
            return None
        slot, read, version = self._filled.pop(chunk)
        if version != self._io.record_version(chunk):
            self._release(slot, read)
            return None
        return slot, read

    def give_up(self) -> bool:
        """Frees the frame that is wanted last. Returns False where none is filled."""
        if not self._filled:
            return False
        chunk = next(reversed(self._filled))
        slot, read, _ = self._filled.pop(chunk)
        self._release(slot, read)
        return True

    def cancel(self) -> None:
        """Frees all frames; nothing is read ahead until the next `begin`."""
        self._todo.clear()
        while self.give_up():
            pass

    def _release(self, slot: int, read: PendingIO) -> None:
        with contextlib.suppress(OSError):  # nobody wants it any more; whoever reads it again hears of it
            read.wait()
        self.slots.append(slot)
