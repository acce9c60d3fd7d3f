"""What must live until nothing is in flight: the C engine, the requests, the files."""

import collections
import errno
import os
import sys
import threading
import weakref
from typing import Any

from aio_ffi._errors import AioError
from aio_ffi._file import NativeFile
from aio_ffi._native import ffi, lib
from aio_ffi._options import EngineOptions
from aio_ffi._request import Request

LANE_RINGS, LANE_THREADS = 0, 1


class Core:
    """One per engine. Refers to no `Engine`, so that an engine that nobody refers to is collected, and drained."""

    def __init__(self, options: EngineOptions):
        self.pid = os.getpid()
        self.lock = threading.RLock()
        self.closed = False
        self.options = options
        self.engine, self.reason = _create(options)
        self.pending: collections.deque[Request] = collections.deque()
        self.failed: list[Request] = []
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

    def _settled(self, request: Request) -> bool:
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
        """Drains, closes the files and ends the threads. Errors of transfers are kept for `raise_lost`."""
        if self.pid != os.getpid():
            return
        with self.lock:
            if self.closed:
                return
            self.drain()
            self.closed = True
            errors = [error for file in list(self.files) if (error := _close(file))]
            lib.zaio_engine_close(self.engine)
        if errors:
            raise errors[0]

    # Bound as defaults: when the interpreter ends, the module's own names are gone before the last engine is.
    def __del__(self, _free: Any = lib.zaio_engine_free, _getpid: Any = os.getpid) -> None:
        if getattr(self, "engine", None) and self.closed and self.pid == _getpid():
            _free(self.engine)


def _close(file: NativeFile) -> AioError | None:
    try:
        file.close()
    except AioError as error:
        return error
    return None


def finalize(core: Core) -> None:
    """For an engine that was dropped without close, and at interpreter exit."""
    try:
        core.shutdown()
        with core.lock:
            core.raise_lost(also_held=True)
    except AioError as error:
        print(f"aio_ffi: {error}", *getattr(error, "__notes__", []), sep="\n  ", file=sys.stderr)


def _create(options: EngineOptions) -> tuple[Any, str]:
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
            f"io_setup: {errno.errorcode[code]}, this kernel or container (seccomp) has no asynchronous I/O: run with "
            "a profile that allows io_setup, io_submit, io_getevents and io_destroy"
        )
    return f"io_setup: {errno.errorcode.get(code, code)} ({os.strerror(code)})"
