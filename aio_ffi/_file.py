"""A file of an engine: its descriptors, its space, its durability."""

import contextlib
import errno
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from aio_ffi._errors import AioError
from aio_ffi._filesystem import DirectSupport
from aio_ffi._native import ffi, lib

FILE_MODE = 0o600
SLICE_NS = 100_000_000  # a wait in C is cut here, so that Ctrl-C is seen


class NativeFile:
    """Owns the C file and, through it, the two descriptors.

    `lock` guards `closed`, `handle` and `num_users`, and is held briefly, except by a `close` that waits. `changed`
    is its condition: a user left.
    """

    def __init__(self, engine: Any, handle: Any, path: str):
        self._engine = engine  # the C engine must outlive the C file
        self._pid = os.getpid()
        self.handle = handle
        self.path = path
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.num_users = 0
        self.closed = False

    @contextlib.contextmanager
    def used(self) -> Iterator[Any]:
        """Keeps the C file open within the context, without holding the lock. Yields it."""
        with self.lock:
            self.check_open()
            self.num_users += 1
        try:
            yield self.handle
        finally:
            with self.lock:
                self.num_users -= 1
                self.changed.notify_all()

    def check_open(self) -> None:
        if self.closed:
            raise ValueError(f"file {self.path} is closed")

    def wait_idle(self) -> None:
        while not lib.zaio_file_wait_idle(self.handle, SLICE_NS):
            pass

    def close(self) -> None:
        if self.closed or os.getpid() != self._pid:
            return
        with self.lock:
            while self.num_users:
                self.changed.wait()
            if self.closed:
                return
            self.wait_idle()
            self.closed = True
            rc = lib.zaio_file_free(self.handle)
            self.handle = ffi.NULL
        if rc < 0:
            raise AioError(-rc, f"close: {os.strerror(-rc)}", operation="close", path=self.path)


class File:
    """An open file. Made by `Engine.open`; closed by itself, its engine, or when nobody refers to it.

    Attributes:
      path: As given.
      direct: Whole aligned blocks go past the page cache.
      reason: Why not direct; "" if it is.
      alignment: Offsets and lengths that are multiples of it take the fast path.
      reserved: Its space was allocated by `open(num_bytes=...)`.
    """

    def __init__(self, native: NativeFile, support: DirectSupport, reserved: bool, fd: int):
        self._native = native
        self._fd = fd  # the C file's; for fstat alone
        self.path = native.path
        self.direct = support.direct
        self.reason = support.reason
        self.alignment = support.alignment
        self.reserved = reserved
        self._sync_error: AioError | None = None
        self._sync_lock = threading.Lock()  # one fdatasync at a time: of two, the kernel tells one alone of a failure
        self._finalizer = weakref.finalize(self, native.close)

    @property
    def closed(self) -> bool:
        return self._native.closed

    @property
    def num_bytes(self) -> int:
        """Its size now."""
        with self._native.lock:
            self.check_open()
            return os.fstat(self._fd).st_size

    def sync(self, *, wait: bool = True) -> None:
        """Waits for this file's transfers in flight, then makes all written bytes durable (fdatasync).

        Blocks its own thread; others may go on submitting, waiting and asking for `num_bytes` meanwhile. Syncs of one
        file run one after the other. A `close` waits for it.

        Args:
          wait: False: transfers in flight are not waited for, and whether they become durable is not said. For a
            caller that has seen its writes complete while others' go on.

        A failure is final: the kernel has dropped the pages it could not write and would report success to a second
        attempt. Every later sync of this file raises the same error.

        Raises:
          AioError: fdatasync failed, now or earlier.
          ValueError: The file is closed.
        """
        with self._native.used() as handle:
            if wait and self._sync_error is None:
                self._native.wait_idle()
            with self._sync_lock:
                if self._sync_error is not None:
                    raise self._sync_error
                rc = lib.zaio_file_sync(handle)
                if rc == 0:
                    return
                self._sync_error = AioError(
                    -rc,
                    f"fdatasync: {os.strerror(-rc)}; what was written since the last sync may be lost, and a retry "
                    "could not tell: go back to the last durable state",
                    operation="sync",
                    path=self.path,
                )
                raise self._sync_error

    def close(self) -> None:
        """Waits for its transfers in flight, then closes. Does not sync. Idempotent."""
        self._finalizer.detach()
        self._native.close()

    def check_open(self) -> None:
        self._native.check_open()

    def __enter__(self) -> "File":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"File({self.path!r}, direct={self.direct})"


def open_descriptors(path: str, *, create: bool, readonly: bool, direct: bool) -> tuple[int, int, bool]:
    """Opens `path` twice, with and without O_DIRECT (or once). Returns (fd, buffered fd, whether it was created)."""
    flags = (os.O_RDONLY if readonly else os.O_RDWR) | os.O_CLOEXEC
    created = False
    if create:
        with contextlib.suppress(FileExistsError):
            os.close(os.open(path, flags | os.O_CREAT | os.O_EXCL, FILE_MODE))
            created = True
    buffered = os.open(path, flags)
    if not direct:
        return buffered, buffered, created
    try:
        fd = os.open(path, flags | os.O_DIRECT)
    except OSError:
        os.close(buffered)
        raise
    if not os.path.samestat(os.fstat(fd), os.fstat(buffered)):
        os.close(fd)
        os.close(buffered)
        raise AioError(errno.ESTALE, "replaced while it was being opened", operation="open", path=path)
    return fd, buffered, created


def reserve(fd: int, path: str, num_bytes: int, *, created: bool) -> bool:
    """Allocates space up to `num_bytes`; a larger file is left alone. Returns False where the fs cannot allocate.

    On failure a file that existed keeps its size, and one that was just created is removed.
    """
    stat, space = os.fstat(fd), os.fstatvfs(fd)
    before = stat.st_size
    # Asking first: an allocation that cannot succeed would fill the disk for everybody before it gives up.
    if num_bytes - stat.st_blocks * 512 > space.f_bavail * space.f_frsize:
        _undo(fd, path, before, created)
        raise _no_space(errno.ENOSPC, path, num_bytes)
    rc = lib.zaio_reserve(fd, num_bytes) if num_bytes else 0
    if rc in (-errno.EOPNOTSUPP, -errno.ENOSYS):
        if num_bytes > before:
            os.ftruncate(fd, num_bytes)
        return False
    if rc < 0:
        _undo(fd, path, before, created)
        raise _no_space(-rc, path, num_bytes)
    return True


def _undo(fd: int, path: str, before: int, created: bool) -> None:
    with contextlib.suppress(OSError):
        os.ftruncate(fd, before)
        if created:
            os.unlink(path)


def _no_space(code: int, path: str, num_bytes: int) -> AioError:
    stat = os.statvfs(os.path.dirname(path) or ".")
    free = stat.f_bavail * stat.f_frsize
    return AioError(
        code,
        f"cannot reserve {num_bytes} bytes ({num_bytes / 2**30:.2f} GiB): {os.strerror(code)}; {free} bytes "
        f"({free / 2**30:.2f} GiB) are free: free space, choose another directory, or ask for less",
        operation="reserve",
        path=path,
        length=num_bytes,
    )
