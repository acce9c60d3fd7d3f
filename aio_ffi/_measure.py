"""How fast a directory is, by this library itself: what the planner and `bench-io` use."""

import contextlib
import dataclasses
import os
import secrets
import time
from collections.abc import Callable

import numpy as np

from aio_ffi._arena import Arena
from aio_ffi._engine import Engine
from aio_ffi._file import File
from aio_ffi._filesystem import PROBE_PREFIX
from aio_ffi._options import EngineOptions
from aio_ffi._request import Handle

REQUEST_BYTES = 16 << 20  # about a page of a model; block_size splits it
NUM_FRAMES = 8


@dataclasses.dataclass(frozen=True)
class Bandwidth:
    """Measured rates in GB/s (1e9 bytes per second).

    Attributes:
      read_gbps, write_gbps: Each alone.
      mixed_read_gbps, mixed_write_gbps: Both at once, half the requests each.
      num_bytes: Moved per measurement.
      engine, direct: What was measured.
    """

    read_gbps: float
    write_gbps: float
    mixed_read_gbps: float
    mixed_write_gbps: float
    num_bytes: int
    engine: str
    direct: bool


def measure(
    directory: str | os.PathLike[str],
    *,
    num_bytes: int = 1 << 28,
    options: EngineOptions | None = None,
    request_bytes: int = REQUEST_BYTES,
) -> Bandwidth:
    """Writes, reads, and does both at once, on a file of `num_bytes` in `directory` that is removed afterwards.

    The file is written once before the clock starts (a first write also allocates), and the page cache is not involved
    where O_DIRECT works. Blocks for about 5 x `num_bytes` of transfers.

    Raises:
      AioError: No space, or a transfer failed.
      OSError: The directory cannot be written.
      ValueError: `num_bytes` or `request_bytes` is not positive.
    """
    if num_bytes < 1 or request_bytes < 1:
        raise ValueError(f"num_bytes and request_bytes must be positive, got {num_bytes} and {request_bytes}")
    request_bytes = min(request_bytes, num_bytes)
    path = os.path.join(os.fspath(directory), f"{PROBE_PREFIX}{os.getpid()}_{secrets.token_hex(4)}")
    arena = Arena(NUM_FRAMES * request_bytes, lock=False)
    arena.touch()
    frames = [arena.array(i * request_bytes, request_bytes) for i in range(NUM_FRAMES)]
    try:
        with Engine(options) as engine, engine.open(path, num_bytes=num_bytes) as file:
            sweep(engine, file, frames, num_bytes, "w")
            file.sync()
            write_s = sweep(engine, file, frames, num_bytes, "w")
            read_s = sweep(engine, file, frames, num_bytes, "r")
            mixed_s = sweep(engine, file, frames, num_bytes, "rw")
            name = engine.name if file.direct else "threads_buffered"
            direct = file.direct
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    total = num_bytes / 1e9
    return Bandwidth(total / read_s, total / write_s, total / 2 / mixed_s, total / 2 / mixed_s, num_bytes, name, direct)


def sweep(engine: Engine, file: File, frames: list[np.ndarray], num_bytes: int, pattern: str) -> float:
    """Goes once over the file, `pattern` ("r", "w", "rw") repeated request by request. Returns seconds.

    Every frame has a request in flight; with a "w" in the pattern and no O_DIRECT, fdatasync is part of the time.
    """
    start_s = time.perf_counter()
    in_flight: list[Handle | None] = [None] * len(frames)
    for number, offset in enumerate(range(0, num_bytes, frames[0].size)):
        slot = number % len(frames)
        previous = in_flight[slot]
        if previous is not None:
            previous.wait()
        frame = frames[slot][: num_bytes - offset]
        start: Callable[[File, int, np.ndarray], Handle] = (
            engine.read if pattern[number % len(pattern)] == "r" else engine.write
        )
        in_flight[slot] = start(file, offset, frame)
    for handle in in_flight:
        if handle is not None:
            handle.wait()
    if "w" in pattern and not file.direct:
        file.sync()
    return time.perf_counter() - start_s
