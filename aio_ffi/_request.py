"""A transfer in flight, and the handle that its caller holds.

The request owns what C needs: the op and the buffer. It refers to the core, never to the engine, and the core refers to
it until its outcome is known: so neither a dropped handle nor a dropped engine can free memory under a transfer.
"""

import errno
import os
import time
from collections.abc import Iterable
from typing import Any

from aio_ffi._errors import AioError
from aio_ffi._file import SLICE_NS, NativeFile
from aio_ffi._native import ffi, lib


class Request:
    """A transfer: what it needs alive, and its outcome once known. Referred to by its handle and by the core."""

    __slots__ = (
        "buffer",
        "core",
        "dropped",
        "error",
        "file",
        "kind",
        "length",
        "observed",
        "offset",
        "op",
        "result",
        "seed",
    )

    def __init__(self, core: Any, file: NativeFile, kind: int, offset: int, buffer: Any, length: int, seed: int):
        self.core = core  # keeps the C engine, whose mutex a wait needs
        self.file = file
        self.kind = kind
        self.offset = offset
        self.length = length
        self.seed = seed  # of the checksum; negative: none
        self.buffer: Any = buffer
        self.error: AioError | None = None
        self.result: Any = None  # C's, once known
        self.dropped = False  # its handle is gone
        self.observed = False  # its outcome was seen by somebody
        out = ffi.new("zaio_op **")
        rc = lib.zaio_submit(core.engine, file.handle, kind, buffer, length, offset, seed, out)
        if rc < 0:
            self.buffer = None
            raise self._error(-rc, f"cannot submit: {os.strerror(-rc)}", 0)
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
        self.result = result
        self.buffer = None

    def _make_error(self, result: Any) -> AioError:
        code = result.error or errno.ENODATA
        what = "end of file" if result.end_of_file else os.strerror(code)
        name = errno.errorcode.get(code, str(code))
        message = f"{what} ({name}) at offset {result.error_offset}; {result.num_done} bytes were moved"
        return self._error(code, message, result.num_done)

    def _error(self, code: int, what: str, done: int) -> AioError:
        return AioError(
            code,
            f"{self.operation} of {self.length} bytes at offset {self.offset}: {what}",
            operation=self.operation,
            path=self.file.path,
            offset=self.offset,
            length=self.length,
            done=done,
        )


class Handle:
    """A transfer in flight. `wait` for it; dropping it is safe, and its error then comes with the next call."""

    __slots__ = ("_request",)

    def __init__(self, request: Request):
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

    @property
    def start_s(self) -> float:
        """When it was submitted, on the clock of `time.monotonic` (on Linux also `time.perf_counter`), in seconds.

        Raises:
          ValueError: It is not complete.
        """
        return self._result().start_ns * 1e-9

    @property
    def done_s(self) -> float:
        """When its last piece completed, which can be long before anybody waits for it. See `start_s`."""
        return self._result().done_ns * 1e-9

    @property
    def checksum(self) -> int:
        """CRC32C of the whole array, started from the seed that `read` or `write` was given: `crc32c(array, seed)`.

        Raises:
          ValueError: No seed was given, it is not complete, or it failed.
        """
        request = self._request
        what = f"the {request.operation} of {request.length} bytes at offset {request.offset} of {request.file.path}"
        if request.seed < 0:
            raise ValueError(f"{what} has no checksum: pass seed=0 to `Engine.{request.operation}`")
        result = self._result()
        if request.error is not None:
            raise ValueError(f"{what} failed and has no checksum: {request.error}")
        return result.checksum

    def _result(self) -> Any:
        request = self._request
        if not request.done():
            raise ValueError(
                f"the {request.operation} of {request.length} bytes at offset {request.offset} of {request.file.path} "
                "is not complete: wait for it first"
            )
        return request.result

    def __del__(self) -> None:
        request = getattr(self, "_request", None)
        if request is not None:
            request.dropped = True

    def __repr__(self) -> str:
        request = self._request
        state = "in flight" if not request.done() else "failed" if request.error else "done"
        return f"Handle({request.operation} {request.length} bytes at {request.offset} of {request.file.path}, {state})"


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
