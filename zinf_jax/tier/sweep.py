"""Reading many extents once each, several at a time, through one bounded buffer: to look at them, not to keep them."""

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import numpy as np

import aio_ffi
from zinf_jax.units import ceil_to

BUFFER_BYTES = 64 << 20
ALIGN = 4096
Wanted = TypeVar("Wanted")


def sweep(
    wanted: Iterable[tuple[Wanted, int]], start: Callable[[Wanted, np.ndarray], "aio_ffi.Handle"], largest: int
) -> Iterator[tuple[Wanted, "aio_ffi.Handle"]]:
    """Starts reads and gives them back in order, each complete or failed: `wait` returns or raises at once.

    Args:
      wanted: What to read, and its bytes.
      start: Starts reading one into an aligned uint8 array of its size.
      largest: Most bytes of one; at least two of them fit in the buffer.

    Raises:
      AioError: what `start` raises; everything that was started is complete then.
    """
    slot = ceil_to(max(largest, 1), ALIGN)
    whole = np.empty(max(BUFFER_BYTES, 2 * slot) + ALIGN, np.uint8)
    buffer = whole[-whole.ctypes.data % ALIGN :]
    width = (buffer.nbytes - ALIGN) // slot
    pending: deque[tuple[Wanted, aio_ffi.Handle]] = deque()
    try:
        for number, (item, num_bytes) in enumerate(wanted):
            if len(pending) == width:
                yield _complete(pending)
            at = number % width * slot
            pending.append((item, start(item, buffer[at : at + num_bytes])))
        while pending:
            yield _complete(pending)
    finally:
        while pending:
            _complete(pending)


def _complete(pending: "deque[tuple[Wanted, aio_ffi.Handle]]") -> "tuple[Wanted, aio_ffi.Handle]":
    item, handle = pending.popleft()
    with contextlib.suppress(aio_ffi.AioError):  # the caller sees it when it waits
        handle.wait()
    return item, handle
