"""The engine: submits transfers, hands out handles, loses no error.

Guarantees:
  * A transfer's buffer is kept alive, and its arena mapped, until the transfer is complete, whatever happens to the
    handle, the file or the engine.
  * `wait` returns only if every byte asked for was moved; else it raises, each time it is called.
  * An error that nobody waits for is raised by the next call on the engine once its handle is dropped, and by `close` in any case.
  * There is no order between transfers in flight: wait for a write before reading what it wrote. Reads overtake writes.
  * After an error the engine goes on working.
  * At interpreter exit, transfers in flight are waited for; the process never aborts.
  * A forked child cannot use it (the threads are not there), and is told so.

Everything may be called from any thread.
"""

import collections
import dataclasses
import errno
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Iterable

import numpy as np

from aio_ffi._errors import AioError, AioWarning
from aio_ffi._file import SLICE_NS, File, NativeFile, open_descriptors, reserve
from aio_ffi._filesystem import DirectSupport, no_direct, probe_direct, probe_direct_read
from aio_ffi._native import ffi, lib
from aio_ffi._options import EngineOptions

LANE_RINGS, LANE_THREADS = 0, 1


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Counters of an engine since it was made.

    Attributes:
      bytes_read, bytes_written: Moved, failed transfers' parts included.
      num_reads, num_writes, num_requests: Transfers asked for, and their sum.
      num_pieces: Kernel requests they became.
      num_submits: io_submit calls.
      num_short: Requests that moved less than asked and were continued.
      num_eagain: Times the kernel's queue was full.
      num_retries: Requests made again after EINTR or EAGAIN.
      bounced: Transfers whose address, offset or length was off the alignment.
      bounce_bytes: Memory held in bounce buffers.
      num_failed: Transfers that failed.
      in_flight, max_in_flight: Transfers, now and at most.
      busy_s: Seconds with at least one transfer in flight.
      queue_depth, num_rings, num_workers: As granted.
    """

    bytes_read: int
    bytes_written: int
    num_reads: int
    num_writes: int
    num_pieces: int
    num_submits: int
    num_short: int
    num_eagain: int
    num_retries: int
    bounced: int
    bounce_bytes: int
    num_failed: int
    in_flight: int
    max_in_flight: int
    busy_s: float
    queue_depth: int
    num_rings: int
    num_workers: int

    @property
    def num_requests(self) -> int:
        return self.num_reads + self.num_writes


class _Request:
    """A transfer: what it needs alive, and its outcome once known. Referred to by its handle and by the core."""

    __slots__ = ("buffer", "core", "dropped", "error", "file", "kind", "length", "observed", "offset", "op")

    def __init__(self, core: "_Core", file: NativeFile, kind: int, offset: int, buffer: "object", length: int):
        self.core = core
        self.file = file
        self.kind = kind
        self.offset = offset
        self.length = length
        self.buffer: object | None = buffer
        self.error: AioError | None = None
        self.dropped = False  # its handle is gone
        self.observed = False  # its outcome was seen by somebody
        out = ffi.new("zaio_op **")
        rc = lib.zaio_submit(core.engine, file.handle, kind, buffer, length, offset, out)
        if rc < 0:
            self.buffer = None
            raise AioError(
                -rc, f"cannot submit: {os.strerror(-rc)}", operation=self.operation, path=file.path, offset=offset, length=length
            )
        self.op = ffi.gc(out[0], lib.zaio_op_free)

    @property
    def operation(self) -> str:
        return "read" if self.kind == lib.ZAIO_READ else "write"

    def done(self) -> bool:
        if self.buffer is None:
            return True
        if not lib.zaio_op_done(self.op):
            return False
        self._settle()
        return True

    def wait(self, timeout: float | None) -> bool:
        if self.buffer is None:
            return True
        until = None if timeout is None else time.monotonic_ns() + int(timeout * 1e9)
        while True:
            left = SLICE_NS if until is None else min(SLICE_NS, until - time.monotonic_ns())
            if lib.zaio_op_wait(self.op, max(left, 0)):
                self._settle()
                return True
            if left <= 0:
                return False

    def _settle(self) -> None:
        """Reads the outcome and lets go of the buffer. Idempotent, also between threads."""
        result = ffi.new("zaio_result *")
        lib.zaio_op_result(self.op, result)
        if (result.error or result.end_of_file) and self.error is None:
            self.error = self._make_error(result)
        self.buffer = None

    def _make_error(self, result: "object") -> AioError:
        code = result.error or errno.ENODATA  # type: ignore[attr-defined]
        at = result.error_offset  # type: ignore[attr-defined]
        done = result.num_done  # type: ignore[attr-defined]
        what = "end of file" if result.end_of_file else os.strerror(code)  # type: ignore[attr-defined]
        name = errno.errorcode.get(code, str(code))
        message = (
            f"{self.operation} of {self.length} bytes at offset {self.offset}: {what} ({name}) at offset {at}; "
            f"{done} bytes were moved"
        )
        return AioError(
            code, message, operation=self.operation, path=self.file.path, offset=self.offset, length=self.length, done=done
        )


class Handle:
    """A transfer in flight. `wait` for it; dropping it is safe, and its error then comes with the next call."""

    __slots__ = ("_request",)

    def __init__(self, request: _Request):
        self._request = request

    def done(self) -> bool:
        """True when complete, failed or not. Never blocks."""
        return self._request.done()

    def wait(self, timeout: float | None = None) -> None:
        """Blocks until complete; may be called again, with the same outcome. Ctrl-C interrupts the wait alone.

        Raises:
          AioError: Not every byte was moved.
          TimeoutError: Not complete after `timeout` seconds; it goes on.
        """
        request = self._request
        if not request.wait(timeout):
            raise TimeoutError(
                f"{request.operation} of {request.length} bytes at offset {request.offset} of {request.file.path} "
                f"is not complete after {timeout} s"
            )
        request.observed = True
        if request.error is not None:
            raise request.error

    def __del__(self) -> None:
        request = getattr(self, "_request", None)
        if request is not None:
            request.dropped = True

    def __repr__(self) -> str:
        request = self._request
        state = "in flight" if not request.done() else "failed" if request.error else "done"
        return f"Handle({request.operation} {request.length} bytes at {request.offset} of {request.file.path}, {state})"


class _Core:
    """What must live until nothing is in flight. Refers to no Engine, so that an engine nobody refers to is collected."""

    def __init__(self, options: EngineOptions):
        self.pid = os.getpid()
        self.lock = threading.RLock()
        self.closed = False
        self.options = options
        self.engine, self.reason = _create(options)
        self.pending: collections.deque[_Request] = collections.deque()
        self.failed: list[_Request] = []
        self.files: weakref.WeakSet[NativeFile] = weakref.WeakSet()
        self._num_failed_seen = 0

    def reap(self) -> None:
        """Lets go of what is complete; keeps what failed and was not seen. Caller holds the lock."""
        pending = self.pending
        num_failed = lib.zaio_engine_num_failed(self.engine)
        if num_failed != self._num_failed_seen:
            self._num_failed_seen = num_failed
            self.pending = pending = collections.deque(r for r in pending if not self._settled(r))
        while pending and self._settled(pending[0]):
            pending.popleft()
        if self.failed:
            self.failed = [r for r in self.failed if not r.observed]

    def _settled(self, request: _Request) -> bool:
        if not request.done():
            return False
        if request.error is not None and not request.observed:
            self.failed.append(request)
        return True

    def raise_lost(self, *, also_held: bool) -> None:
        """Raises the first error that nobody will ask for, the others as its notes. Caller holds the lock."""
        lost = [r for r in self.failed if not r.observed and (r.dropped or also_held)]
        if not lost:
            return
        for request in lost:
            request.observed = True
        error = lost[0].error
        assert error is not None
        error.add_note("(of an earlier operation that nobody waited for)")
        for other in lost[1:]:
            error.add_note(f"also: {other.error}")
        raise error

    def drain(self) -> None:
        while self.pending:
            if self.pending[0].wait(None):
                self._settled(self.pending.popleft())

    def shutdown(self) -> None:
        """Drains, closes the files and ends the threads. Raises nothing that was lost; `raise_lost` does."""
        if self.pid != os.getpid():
            return
        with self.lock:
            if self.closed:
                return
            self.drain()
            self.closed = True
            for file in list(self.files):
                file.close()
            lib.zaio_engine_close(self.engine)

    def __del__(self) -> None:
        if getattr(self, "engine", None) and self.closed and self.pid == os.getpid():
            lib.zaio_engine_free(self.engine)


def _create(options: EngineOptions) -> tuple["object", str]:
    """Makes the C engine; with "auto", one without rings where the kernel grants none. Returns it and why."""
    wants_rings = options.engine in ("auto", "libaio")
    native = ffi.new("zaio_options *")
    native.block_size = options.block_size
    native.queue_depth = options.queue_depth
    native.num_rings = options.thread_count if wants_rings else 0
    native.num_workers = options.num_workers
    native.single_submit = options.single_submit
    native.overlap_events = options.overlap_events
    out = ffi.new("zaio_engine **")
    rc = lib.zaio_engine_create(native, out)
    if rc == 0:
        return out[0], "" if wants_rings else f"engine={options.engine!r} was asked for"
    reason = _why_no_rings(-rc)
    if options.engine != "auto":
        raise AioError(-rc, f"engine {options.engine!r}: {reason}", operation="setup", path="")
    native.num_rings = 0
    rc = lib.zaio_engine_create(native, out)
    if rc < 0:
        raise AioError(-rc, f"cannot make an I/O engine: {os.strerror(-rc)}", operation="setup", path="")
    return out[0], reason


def _why_no_rings(code: int) -> str:
    note = ffi.string(lib.zaio_build_note()).decode()
    if note:
        return f"built without kernel AIO ({note}): install the kernel headers (linux-libc-dev) and build again"
    if code == errno.EAGAIN:
        return (
            "io_setup: EAGAIN, the machine's asynchronous requests (fs.aio-max-nr) are used up: "
            "`sysctl -w fs.aio-max-nr=1048576` as root"
        )
    if code in (errno.ENOSYS, errno.EPERM):
        return (
            f"io_setup: {errno.errorcode[code]}, this kernel or container (seccomp) has no asynchronous I/O: run with a "
            "profile that allows io_setup, io_submit, io_getevents and io_destroy"
        )
    return f"io_setup: {errno.errorcode.get(code, code)} ({os.strerror(code)})"


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
        self._core = core = _Core(self.options)
        self._statistics: Statistics | None = None
        self.reason = core.reason
        if self.options.engine in ("auto", "libaio"):
            self.name = "threads_direct" if core.reason else "libaio"
        else:
            self.name = self.options.engine
        self._support: dict[int, DirectSupport] = {}
        self._finalizer = weakref.finalize(self, _finalize, core)

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

    def read(self, file: File, offset: int, array: np.ndarray) -> Handle:
        """Starts reading `array.nbytes` bytes at `offset` into a C-contiguous, writable array. Does not block.

        Raises:
          AioError: An earlier operation that nobody waited for failed (this one was not started then).
          ValueError: The array, the offset, or a closed file or engine.
        """
        return self._submit(lib.ZAIO_READ, file, offset, array)

    def write(self, file: File, offset: int, array: np.ndarray) -> Handle:
        """Starts writing a C-contiguous array at `offset`; its bytes must not change until complete. Else like `read`."""
        return self._submit(lib.ZAIO_WRITE, file, offset, array)

    def statistics(self) -> Statistics:
        """A snapshot of the counters; after `close`, the last ones."""
        if self._statistics is not None:
            return self._statistics
        raw = ffi.new("zaio_statistics *")
        lib.zaio_engine_statistics(self._core.engine, raw)
        renamed = {"bounced": raw.num_bounced, "busy_s": raw.busy_ns / 1e9}
        names = [field.name for field in dataclasses.fields(Statistics) if field.name not in renamed]
        return Statistics(**{name: getattr(raw, name) for name in names}, **renamed)

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

    def __exit__(self, *exc: object) -> None:
        try:
            self.close()
        except AioError as error:
            if exc[1] is None:
                raise
            # The exception on its way is what the user must see; this one goes with it.
            exc[1].add_note(f"and the I/O engine, on close: {error}")  # type: ignore[attr-defined]

    def _submit(self, kind: int, file: File, offset: int, array: np.ndarray) -> Handle:
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
        with core.lock:
            if core.closed:
                raise ValueError("the I/O engine is closed")
            core.reap()
            if core.failed:
                core.raise_lost(also_held=False)
            native = file._native
            if native.closed:
                file.check_open()
            if native not in core.files:
                raise ValueError(f"file {file.path} belongs to another engine")
            request = _Request(core, native, kind, offset, buffer, len(buffer))
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
                support = probe_direct_read(path)
            if writable:
                self._support[device] = support
            if not support.direct and direct is None:
                warnings.warn(AioWarning(f"{support.reason}; using the page cache"), stacklevel=3)
        if direct and not support.direct:
            raise AioError(errno.ENOTSUP, support.reason, operation="open", path=path)
        return support


def wait_all(handles: Iterable[Handle]) -> None:
    """Waits for all of them, also after one has failed; then raises the first error, the others as its notes."""
    first: AioError | None = None
    for handle in handles:
        try:
            handle.wait()
        except AioError as error:
            if first is None:
                first = error
            else:
                first.add_note(f"also: {error}")
    if first is not None:
        raise first


def _finalize(core: _Core) -> None:
    """For an engine that was dropped without close, and at interpreter exit."""
    core.shutdown()
    try:
        with core.lock:
            core.raise_lost(also_held=True)
    except AioError as error:
        print(f"aio_ffi: {error}", *getattr(error, "__notes__", []), sep="\n  ", file=sys.stderr)
