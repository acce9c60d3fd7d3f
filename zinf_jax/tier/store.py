"""The NVMe tier: page bytes in a few large files, read and written with offsets that the layout gives.

One file per kind of state (weights, optimizer, gradients, residuals), reserved at the start so that a disk that is
too small fails before the first step. Every completion is compared with its request by the engine below; here the
error learns which page it was about.

Guarantees: `read` and `write` only start a transfer; the array is in use until `wait` of the returned `PendingIO`
returns. Any thread may wait; only the main thread starts transfers.
"""

import contextlib
import os
import pathlib
import shutil
from collections.abc import Mapping

import numpy as np

import aio_ffi
from zinf_jax.errors import StoreError
from zinf_jax.units import format_bytes


class PendingIO:
    """A transfer that was started. `what` names it for people: "write of optimizer of page block_3"."""

    __slots__ = ("_handle", "what")

    def __init__(self, handle: "aio_ffi.Handle", what: str) -> None:
        self._handle = handle
        self.what = what

    def done(self) -> bool:
        return self._handle.done()

    def wait(self) -> None:
        """Blocks until the transfer is complete.

        Raises:
          StoreError: the transfer failed or moved fewer bytes than asked.
        """
        try:
            self._handle.wait()
        except aio_ffi.AioError as error:
            raise StoreError(error.errno, f"{self.what}: {error.strerror or error}", error.filename) from error


class PageStore:
    """Files of page bytes in one directory.

    Args:
      directory: Created with mode 0700 where it is missing.
      sizes: Bytes to reserve per kind; a kind of size 0 has no file.
      options: The I/O engine's.
      reuse: Open what is there instead of creating it.
      sparse: Kinds whose file is not reserved but grows (state that lives in memory and is written only at close).

    Raises:
      StoreError: the disk has no room, with how much is needed and free; or a file to reuse is missing or too short.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        sizes: Mapping[str, int],
        options: aio_ffi.EngineOptions,
        *,
        reuse: bool = False,
        sparse: frozenset[str] = frozenset(),
    ) -> None:
        self.directory = pathlib.Path(directory)
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._engine = aio_ffi.Engine(options)
        self._files: dict[str, aio_ffi.File] = {}
        self.sizes = dict(sizes)
        try:
            if not reuse:
                self._check_room({k: n for k, n in sizes.items() if k not in sparse})
            for kind, num_bytes in sizes.items():
                if num_bytes:
                    self._files[kind] = self._open(kind, num_bytes, reuse=reuse, sparse=kind in sparse)
        except BaseException:
            self.close()
            raise

    def _open(self, kind: str, num_bytes: int, *, reuse: bool, sparse: bool) -> "aio_ffi.File":
        path = self.directory / f"{kind}.pages"
        if reuse and path.exists() and not sparse and path.stat().st_size < num_bytes:
            raise StoreError(
                0, f"{kind} pages are cut short: {path.stat().st_size} bytes, expected {num_bytes}", str(path)
            )
        try:
            reserve = None if sparse else num_bytes
            return self._engine.open(str(path), num_bytes=reserve, create=True)
        except OSError as error:
            free = shutil.disk_usage(self.directory).free
            raise StoreError(
                error.errno,
                f"cannot reserve {format_bytes(num_bytes)} for {kind} pages ({format_bytes(free)} free): {error}",
                str(path),
            ) from error

    def _check_room(self, sizes: Mapping[str, int]) -> None:
        there = sum(
            (self.directory / f"{kind}.pages").stat().st_blocks * 512
            for kind in sizes
            if (self.directory / f"{kind}.pages").exists()
        )
        needed, free = sum(sizes.values()) - there, shutil.disk_usage(self.directory).free
        if needed > free:
            table = ", ".join(f"{kind} {format_bytes(n)}" for kind, n in sizes.items() if n)
            raise StoreError(
                28,
                f"the run needs {format_bytes(needed)} more on the disk of {self.directory}, {format_bytes(free)} are "
                f"free ({table}): free some, choose another nvme_path, or keep a kind of state on the host",
                str(self.directory),
            )

    def read(self, kind: str, offset: int, array: np.ndarray, page: str) -> PendingIO:
        """Starts filling `array` (uint8) from `offset` of the kind's file.

        Raises:
          StoreError: an earlier transfer, which nobody waited for, had failed.
        """
        return self._start("read", kind, offset, array, page)

    def write(self, kind: str, offset: int, array: np.ndarray, page: str) -> PendingIO:
        """Starts writing `array` (uint8) at `offset` of the kind's file. Raises as `read` does."""
        return self._start("write", kind, offset, array, page)

    def _start(self, operation: str, kind: str, offset: int, array: np.ndarray, page: str) -> PendingIO:
        file = self._files[kind]
        assert offset + array.nbytes <= self.sizes[kind], (kind, offset, array.nbytes, self.sizes[kind])
        what = f"{operation} of {kind} of page {page!r} at offset {offset}, {array.nbytes} bytes"
        try:
            return PendingIO(getattr(self._engine, operation)(file, offset, array), what)
        except aio_ffi.AioError as error:  # of an earlier transfer that nobody waited for, or no room in the queue
            raise StoreError(error.errno, f"before the {what}: {error.strerror or error}", error.filename) from error

    def sync(self) -> None:
        """Makes all completed writes durable.

        Raises:
          StoreError: it failed. Fatal: a second attempt would report success without the bytes.
        """
        for kind, file in self._files.items():
            try:
                file.sync()
            except aio_ffi.AioError as error:
                raise StoreError(error.errno, f"sync of {kind} pages: {error.strerror or error}", file.path) from error

    def statistics(self) -> "aio_ffi.Statistics":
        return self._engine.statistics()

    def close(self) -> None:
        for file in self._files.values():
            with contextlib.suppress(aio_ffi.AioError):
                file.close()
        self._files.clear()
        self._engine.close()

    def delete(self) -> None:
        """Closes and removes the files that this class makes, and the directory if nothing else is in it."""
        self.close()
        for kind in self.sizes:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.directory / f"{kind}.pages")
        with contextlib.suppress(OSError):
            self.directory.rmdir()
