"""What a directory and this machine allow: tried, not guessed."""

import contextlib
import dataclasses
import errno
import os
import secrets

from aio_ffi._arena import Arena
from aio_ffi._engine import Engine
from aio_ffi._errors import AioError
from aio_ffi._filesystem import PROBE_PREFIX, DirectSupport, fs_type, no_direct, probe_direct
from aio_ffi._options import EngineOptions

MEMORY_FS = ("tmpfs", "ramfs")


@dataclasses.dataclass(frozen=True)
class Probe:
    """What was found.

    Attributes:
      directory: That was asked about.
      engine: The best engine that works there: "libaio", "threads_direct" or "threads_buffered".
      direct: O_DIRECT works.
      alignment: Offsets and lengths that are multiples of it take the fast path.
      fs_type: Type of the file system.
      reason: Why not a better engine, and how to get it, or that this is no disk; "" for libaio on a disk.
    """

    directory: str
    engine: str
    direct: bool
    alignment: int
    fs_type: str
    reason: str


def probe(directory: str | os.PathLike[str], options: EngineOptions | None = None) -> Probe:
    """Writes and reads a small file in `directory` through an engine, with O_DIRECT if that works, and removes it.

    Raises:
      OSError: The directory is missing, not a directory, not writable, or full.
      AioError: An explicit `options.engine` cannot be had.
    """
    directory = os.fspath(directory)
    options = options or EngineOptions()
    remove_leftovers(directory)
    support = probe_direct(directory)
    with Engine(options) as engine:
        name, reason = engine.name, engine.reason
        if name == "threads_buffered":
            support = no_direct(f"engine={name!r} was asked for")
        elif not support.direct:
            name, reason = "threads_buffered", support.reason
        failure = _round_trip(engine, directory, support)
    if failure and options.engine == "auto" and name == "libaio":
        # Seen in sandboxes that let io_setup pass and refuse io_submit.
        below = probe(directory, dataclasses.replace(options, engine="threads_direct"))
        return dataclasses.replace(below, reason=f"kernel AIO was granted, but {failure}")
    if failure:
        raise AioError(errno.EIO, f"probe: {failure}", operation="probe", path=directory)
    kind = fs_type(directory)
    if kind in MEMORY_FS:
        reason = f"{reason}; " if reason else ""
        reason += f"{kind} is memory, not a disk: what is stored in {directory} counts against host memory"
    return Probe(directory, name, support.direct, support.alignment, kind, reason)


def _round_trip(engine: Engine, directory: str, support: DirectSupport) -> str:
    """Writes and reads back two blocks. Returns "" or what went wrong; ENOSPC and its like are raised."""
    path = os.path.join(directory, f"{PROBE_PREFIX}{os.getpid()}_{secrets.token_hex(4)}")
    num_bytes = 2 * support.alignment
    arena = Arena(2 * num_bytes, lock=False)
    written, found = arena.array(0, num_bytes), arena.array(num_bytes, num_bytes)
    written[:] = bytearray(secrets.token_bytes(num_bytes))
    try:
        with engine.open(path, direct=support.direct) as file:
            engine.write(file, 0, written).wait()
            engine.read(file, 0, found).wait()
    except AioError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        return str(error)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    return "" if (written == found).all() else "a read did not return what was written"


def remove_leftovers(directory: str) -> None:
    """Removes probe files of processes that were killed in the middle of a probe."""
    for entry in os.scandir(directory):
        if not entry.name.startswith(PROBE_PREFIX):
            continue
        pid = entry.name[len(PROBE_PREFIX) :].split("_")[0]
        if pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
            with contextlib.suppress(OSError):
                os.unlink(entry.path)
