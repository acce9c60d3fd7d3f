"""The engine: submits transfers, hands out handles, loses no error.

Guarantees:
  * A transfer's buffer is kept alive, and its arena mapped, until the transfer is complete, whatever happens to the
    handle, the file or the engine.
  * `wait` returns only if every byte asked for was moved; else it raises, each time it is called.
  * An error that nobody waits for is raised by the next call on the engine once its handle is dropped, and by `close`
    in any case.
  * There is no order between transfers in flight: wait for a write before reading what it wrote. Reads overtake
    writes that wait in the queue.
  * After an error the engine goes on working.
  * At interpreter exit, transfers in flight are waited for; the process never aborts.
  * A forked child cannot use it (the threads are not there), and is told so.

Everything may be called from any thread.
"""

import errno
import os
import warnings
import weakref

import numpy as np

from aio_ffi._checksum import check_seed
from aio_ffi._core import LANE_RINGS, LANE_THREADS, Core, finalize
from aio_ffi._errors import AioError, AioWarning
from aio_ffi._file import File, NativeFile, open_descriptors, reserve
from aio_ffi._filesystem import DirectSupport, no_direct, probe_direct, probe_direct_read
from aio_ffi._native import ffi, lib
from aio_ffi._options import EngineOptions
from aio_ffi._request import Handle, Request
from aio_ffi._statistics import Statistics, read_statistics


class Engine:
    """Asynchronous reads and writes of files.

    Args:
      options: See `EngineOptions`.

    Attributes:
      name: "libaio", "threads_direct" or "threads_buffered": what direct files go through here.
      reason: Why it is not libaio, and how to get it; "" if it is.

    Raises:
      AioError: The engine named in the options cannot be had ("auto" always can).
    """

    def __init__(self, options: EngineOptions | None = None):
        self.options = options or EngineOptions()
        self._core = core = Core(self.options)
        self._statistics: Statistics | None = None
        self.reason = core.reason
        if self.options.engine in ("auto", "libaio"):
            self.name = "threads_direct" if core.reason else "libaio"
        else:
            self.name = self.options.engine
        self._support: dict[int, DirectSupport] = {}
        self._finalizer = weakref.finalize(self, finalize, core)

    def open(
        self,
        path: str | os.PathLike[str],
        *,
        num_bytes: int | None = None,
        create: bool = True,
        readonly: bool = False,
        direct: bool | None = None,
    ) -> File:
        """Opens a file for transfers. Blocks.

        Args:
          path: A new file gets mode 0600. An existing one keeps its content, and its mode unless `create`.
          num_bytes: Reserve space up to this size now, so that no later write can find the disk full.
          create: Make it if it is absent.
          readonly: Reads alone; implies create=False.
          direct: None: O_DIRECT where it works (tried with a real write, once per file system), else the page cache,
            with one `AioWarning`. True: or raise. False: page cache.

        Raises:
          AioError: ENOSPC and the numbers where the space is not there; ENOTSUP where direct=True cannot be had.
          OSError: The file cannot be opened.
        """
        self._check_usable()
        path = os.fspath(path)
        create = create and not readonly
        support = self._direct_support(path, create or not readonly, direct)
        fd, buffered, created = open_descriptors(path, create=create, readonly=readonly, direct=support.direct)
        try:
            if create and not created and os.fstat(buffered).st_mode & 0o077:
                os.fchmod(buffered, 0o600)
            reserved = num_bytes is not None and reserve(buffered, path, num_bytes, created=created)
            native = self._adopt(fd, buffered, path, support)
        except BaseException:
            os.close(buffered)
            if fd != buffered:
                os.close(fd)
            raise
        return File(native, support, reserved, buffered)

    def read(self, file: File, offset: int, array: np.ndarray, *, seed: int | None = None) -> Handle:
        """Starts reading `array.nbytes` bytes at `offset` into a C-contiguous, writable array. Does not block.

        Args:
          seed: Makes `Handle.checksum`, the CRC32C of the whole array started from this uint32, part of the transfer:
            the thread that completes it computes it, without the GIL. None: nothing is computed.

        Raises:
          AioError: An earlier operation that nobody waited for failed (this one was not started then).
          ValueError: The array, the offset, the seed, or a closed file or engine.
        """
        return self._submit(lib.ZAIO_READ, file, offset, array, seed)

    def write(self, file: File, offset: int, array: np.ndarray, *, seed: int | None = None) -> Handle:
        """Starts writing a C-contiguous array at `offset`; its bytes must not change until complete. See `read`."""
        return self._submit(lib.ZAIO_WRITE, file, offset, array, seed)

    def statistics(self) -> Statistics:
        """A snapshot of the counters; after `close`, the last ones."""
        if self._statistics is not None:
            return self._statistics
        return read_statistics(self._core.engine)

    def close(self) -> None:
        """Waits for everything in flight, closes the files, ends the threads. Idempotent.

        Raises:
          AioError: An operation failed and nobody has seen it yet. The engine is closed all the same.
        """
        core = self._core
        if core.closed or core.pid != os.getpid():
            return
        core.shutdown()
        self._statistics = self.statistics()
        self._finalizer.detach()
        with core.lock:
            core.raise_lost(also_held=True)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, kind: object, exception: BaseException | None, traceback: object) -> None:
        try:
            self.close()
        except AioError as error:
            if exception is None:
                raise
            # The exception on its way is what the user must see; this one goes with it.
            exception.add_note(f"and the I/O engine, on close: {error}")

    def _submit(self, kind: int, file: File, offset: int, array: np.ndarray, seed: int | None) -> Handle:
        core = self._core
        if os.getpid() != core.pid:
            self._check_usable()
        try:
            buffer = ffi.from_buffer("char[]", array, require_writable=kind == lib.ZAIO_READ)
        except (BufferError, TypeError, ValueError) as error:
            raise ValueError(
                f"a transfer needs a C-contiguous{' writable' if kind == lib.ZAIO_READ else ''} uint8 array: {error}"
            ) from error
        if offset < 0:
            raise ValueError(f"offset must not be negative, got {offset}")
        start = -1 if seed is None else check_seed(seed)
        with core.lock:
            if core.closed:
                raise ValueError("the I/O engine is closed")
            core.reap()
            if core.failed:
                core.raise_lost(also_held=False)
            native = file._native
            if native not in core.files:
                native.check_open()
                raise ValueError(f"file {file.path} belongs to another engine")
            with native.lock:  # a close from another thread comes before or after, never in between
                native.check_open()
                request = Request(core, native, kind, offset, buffer, len(buffer), start)
            core.pending.append(request)
        return Handle(request)

    def _check_usable(self) -> None:
        core = self._core
        if core.pid != os.getpid():
            raise RuntimeError(
                f"this I/O engine belongs to process {core.pid}; its threads do not survive a fork: make one in the "
                "child, or start the child with the spawn method"
            )
        with core.lock:
            if core.closed:
                raise ValueError("the I/O engine is closed")
            core.reap()
            core.raise_lost(also_held=False)

    def _adopt(self, fd: int, buffered: int, path: str, support: DirectSupport) -> NativeFile:
        core = self._core
        # Buffered transfers block inside io_submit: kernel AIO is asynchronous for direct files alone.
        lane = LANE_RINGS if self.name == "libaio" and support.direct else LANE_THREADS
        out = ffi.new("zaio_file **")
        with core.lock:
            rc = lib.zaio_file_create(
                core.engine, fd, buffered, support.direct, support.alignment, support.mem_alignment, lane, out
            )
            if rc < 0:
                raise AioError(-rc, f"cannot start I/O threads: {os.strerror(-rc)}", operation="open", path=path)
            native = NativeFile(core, out[0], path)
            core.files.add(native)
        return native

    def _direct_support(self, path: str, writable: bool, direct: bool | None) -> DirectSupport:
        if direct is False or self.name == "threads_buffered":
            return no_direct("the page cache was asked for")
        directory = os.path.dirname(path) or "."
        device = os.stat(directory).st_dev
        support = self._support.get(device)
        if support is None:
            try:
                support = probe_direct(directory) if writable else probe_direct_read(path)
            except PermissionError:
                if not os.path.exists(path):
                    raise
                support = probe_direct_read(path)
            if writable:
                self._support[device] = support
            if not support.direct and direct is None:
                warnings.warn(AioWarning(f"{support.reason}; using the page cache"), stacklevel=3)
        if direct and not support.direct:
            raise AioError(errno.ENOTSUP, support.reason, operation="open", path=path)
        return support
