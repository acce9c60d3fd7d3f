"""Drives and disks that fail on command, under the real store and the real log.

A `Faults` is a schedule: at which operation which fault. `FaultyEngine` and `FaultyDisk` ask it at each operation and
do what it says to real files; everything else is passed on. What was spoiled on the drive is noted in `damaged`.
"""

import dataclasses
import errno
import os
import pathlib
import random
from typing import Any

import numpy as np

import aio_ffi
from zinf_jax.tier.journal import Disk

READ_FAULTS = ("eio", "flip_read")
WRITE_FAULTS = ("eio", "enospc", "short", "torn", "lost", "flip_disk", "misplaced")
SYNC_FAULTS = ("eio",)
LOG_FAULTS = ("eio", "enospc", "short")
SILENT = ("torn", "lost", "flip_disk", "misplaced")
"""Writes that report success: the drive lies."""


@dataclasses.dataclass
class Faults:
    """What goes wrong when.

    Attributes:
      plan: (operation, number of it) -> fault. Operations: "read", "write", "sync", "log_write", "log_sync",
        "log_replace", "log_directory".
      fired: Which have come about.
      armed: False: all goes well, nothing is counted.
    """

    plan: dict[tuple[str, int], str]
    rng: random.Random
    armed: bool = True
    fired: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    damaged: set[tuple[str, int]] = dataclasses.field(default_factory=set)  # (file, offset) of extents
    counts: dict[str, int] = dataclasses.field(default_factory=dict)

    @classmethod
    def draw(cls, rng: random.Random) -> "Faults":
        plan: dict[tuple[str, int], str] = {}
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            operation, faults, most = rng.choice(
                [
                    ("read", READ_FAULTS, 40), ("write", WRITE_FAULTS, 50), ("write", WRITE_FAULTS, 50),
                    ("sync", SYNC_FAULTS, 12), ("log_write", LOG_FAULTS, 12), ("log_sync", ("eio",), 12),
                    ("log_replace", ("eio",), 3), ("log_directory", ("eio",), 4),
                ]
            )  # fmt: skip
            first, fault = rng.randrange(most), rng.choice(faults)
            for number in range(first, first + rng.choice([1, 1, 2, 100])):
                plan[operation, number] = fault
        return cls(plan, rng)

    def next(self, operation: str) -> str | None:
        if not self.armed:
            return None
        number = self.counts.get(operation, 0)
        self.counts[operation] = number + 1
        fault = self.plan.get((operation, number))
        if fault is not None:
            self.fired.append((operation, fault))
        return fault


class FailedHandle:
    """A transfer that ended with an error, after some of it was done."""

    def __init__(self, error: aio_ffi.AioError, inner: Any = None) -> None:
        self._error, self._inner = error, inner

    def done(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> None:
        if self._inner is not None:
            self._inner.wait()
        raise self._error


class ChangedHandle:
    """A transfer that reports success. `after` is done to the drive, or to the array, when it is complete."""

    def __init__(self, inner: Any, after: Any, checksum: Any = None) -> None:
        self._inner, self._after, self._checksum = inner, after, checksum

    def done(self) -> bool:
        return False

    def wait(self, timeout: float | None = None) -> None:
        self._inner.wait(timeout)
        if self._after is not None:
            self._after()
            self._after = None

    @property
    def checksum(self) -> int:
        return self._inner.checksum if self._checksum is None else self._checksum()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class FaultyFile:
    def __init__(self, inner: aio_ffi.File, faults: Faults) -> None:
        self._inner, self._faults, self._error = inner, faults, None

    def sync(self, **how: Any) -> None:
        if self._error is None and self._faults.next("sync"):
            self._error = aio_ffi.AioError(errno.EIO, "fdatasync: injected", operation="sync", path=self._inner.path)
        if self._error is not None:
            raise self._error
        self._inner.sync(**how)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class FaultyEngine(aio_ffi.Engine):
    def __init__(self, options: aio_ffi.EngineOptions, faults: Faults) -> None:
        super().__init__(options)
        self._faults = faults

    def open(self, path: Any, **how: Any) -> Any:
        return FaultyFile(super().open(path, **how), self._faults)

    def read(self, file: Any, offset: int, array: np.ndarray, *, seed: int | None = None) -> Any:
        fault = self._faults.next("read")
        if fault == "eio":
            return self._failed("read", file, offset, array, errno.EIO)
        handle = super().read(file, offset, array, seed=seed)
        if fault == "flip_read":

            def flip() -> None:
                array[self._faults.rng.randrange(len(array))] ^= 1 << self._faults.rng.randrange(8)

            return ChangedHandle(handle, flip, lambda: aio_ffi.crc32c(array, seed or 0))
        return handle

    def write(self, file: Any, offset: int, array: np.ndarray, *, seed: int | None = None) -> Any:
        fault, rng, where = self._faults.next("write"), self._faults.rng, (file.path, offset)
        part = rng.randrange(0, len(array)) // 512 * 512
        if fault in ("eio", "enospc", "short"):
            code = errno.EIO if fault == "eio" else errno.ENOSPC
            begun = None
            if fault == "short" and part:
                begun = super().write(file, offset, array[:part].copy())
            self._faults.damaged.discard(where)
            return self._failed("write", file, offset, array, code, begun)
        if fault is None:
            self._faults.damaged.discard(where)
            return super().write(file, offset, array, seed=seed)
        self._faults.damaged.add(where)
        written, at = array.copy(), offset
        if fault == "lost":
            written = written[:0]
        elif fault == "torn":
            written = written[:part]
        elif fault == "flip_disk":
            written[rng.randrange(len(array))] ^= 1 << rng.randrange(8)
        elif fault == "misplaced":  # shifted within its extent
            written = np.roll(written, 512)
        handle = super().write(file, at, written) if len(written) else None
        checksum = aio_ffi.crc32c(array, seed or 0)
        return ChangedHandle(handle or _Nothing(), None, lambda: checksum)

    def _failed(self, operation: str, file: Any, offset: int, array: Any, code: int, begun: Any = None) -> Any:
        error = aio_ffi.AioError(
            code, f"{operation}: {os.strerror(code)} (injected)", operation=operation, path=file.path,
            offset=offset, length=len(array),
        )  # fmt: skip
        return FailedHandle(error, begun)


class _Nothing:
    start_s = done_s = 0.0

    def wait(self, timeout: float | None = None) -> None:
        return


class FaultyDisk(Disk):
    """After a sync that failed, what it covered may be gone from the file or not, as the kernel likes."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._last: tuple[int, int] | None = None  # file size before the last write

    def _fail(self, code: int) -> None:
        raise OSError(code, os.strerror(code) + " (injected)")

    def write(self, fd: int, data: bytes, offset: int) -> None:
        fault = self._faults.next("log_write")
        if fault == "eio":
            self._fail(errno.EIO)
        if fault in ("enospc", "short"):
            super().write(fd, data[: self._faults.rng.randrange(len(data))], offset)
            self._fail(errno.ENOSPC)
        self._last = (fd, os.fstat(fd).st_size)
        super().write(fd, data, offset)

    def sync(self, fd: int) -> None:
        if self._faults.next("log_sync"):
            if self._last is not None and self._last[0] == fd and self._faults.rng.random() < 0.5:
                super().truncate(fd, self._last[1])
            self._fail(errno.EIO)

    def replace(self, source: pathlib.Path, target: pathlib.Path) -> None:
        if self._faults.next("log_replace"):
            self._fail(errno.EIO)
        super().replace(source, target)

    def sync_directory(self, path: pathlib.Path) -> None:
        if self._faults.next("log_directory"):
            self._fail(errno.EIO)
