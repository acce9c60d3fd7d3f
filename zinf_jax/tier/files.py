"""Page files: one per kind of state on each path, opened, reserved, synced and deleted together.

A path is a directory on a drive; each has an I/O engine of its own, so that a slow drive's queue does not hold back the
others. Space is reserved at the start: a disk that is too small fails before the first step, with the numbers.

Guarantees: files and directories are private (0600, 0700), and their names durable once this class is made; only files
that it names are ever deleted; a failed sync is fatal and never retried.
"""

import contextlib
import errno
import os
import pathlib
import shutil
from collections.abc import Callable, Mapping, Sequence

import numpy as np

import aio_ffi
from zinf_jax.errors import StoreError
from zinf_jax.tier.directories import make_directory, sync_directory
from zinf_jax.tier.extents import KindExtents, Place
from zinf_jax.units import format_bytes


class PageFiles:
    """The page files of one run.

    Args:
      paths: Directories, created where missing.
      extents: Per kind; a kind without chunks has no file.
      banks: Copies of the space, per kind.
      options: The I/O engines'.
      reuse: Kinds whose files are there, and how many banks they must have.
      sparse: Kinds whose files are not reserved but grow (state that lives in memory and is written only at close).
      make_engine: Makes an I/O engine from its options.

    Raises:
      StoreError: a disk has no room, with how much is needed and free; or a file to reuse is missing or too short.
    """

    def __init__(
        self,
        paths: Sequence[pathlib.Path],
        extents: Mapping[str, KindExtents],
        banks: Mapping[str, int],
        options: aio_ffi.EngineOptions,
        *,
        reuse: Mapping[str, int] | None = None,
        sparse: frozenset[str] = frozenset(),
        make_engine: Callable[[aio_ffi.EngineOptions], aio_ffi.Engine] = aio_ffi.Engine,
    ) -> None:
        self.paths = tuple(pathlib.Path(path) for path in paths)
        self.extents = dict(extents)
        self.banks = dict(banks)
        self.engines: list[aio_ffi.Engine] = []
        self._files: dict[tuple[str, int], aio_ffi.File] = {}
        self._sparse = sparse
        try:
            for path in self.paths:
                make_directory(path)
                self.engines.append(make_engine(options))
            if not reuse:
                self._check_room()
            for kind in self.extents:
                for path_number in range(len(self.paths)):
                    self._open(kind, path_number, reuse=(reuse or {}).get(kind, 0))
            for path in self.paths:  # also what an earlier process made, which may have died before it came to this
                sync_directory(path)
        except BaseException:
            self.close()
            raise

    def file_bytes(self, kind: str, path_number: int) -> int:
        return self.extents[kind].bank_bytes[path_number] * self.banks[kind]

    def file_path(self, kind: str, path_number: int) -> pathlib.Path:
        return self.paths[path_number] / f"{kind}.pages"

    def _open(self, kind: str, path_number: int, *, reuse: int) -> None:
        num_bytes, path = self.file_bytes(kind, path_number), self.file_path(kind, path_number)
        if not num_bytes:
            return
        sparse = kind in self._sparse
        if reuse and not sparse:
            places = [p for p in self.extents[kind].places if p.path == path_number]
            there = self.extents[kind].bank_bytes[path_number] * (min(reuse, self.banks[kind]) - 1)
            there += max(p.offset + p.num_bytes for p in places)
            found = path.stat().st_size if path.exists() else None
            if found is None:
                raise StoreError(errno.ENOENT, f"{kind} pages are gone, expected {there} bytes", str(path))
            if found < there:
                raise StoreError(0, f"{kind} pages are cut short: {found} bytes, expected {there}", str(path))
        try:
            reserve = None if sparse else num_bytes
            self._files[kind, path_number] = self.engines[path_number].open(str(path), num_bytes=reserve, create=True)
        except OSError as error:
            free = shutil.disk_usage(self.paths[path_number]).free
            raise StoreError(
                error.errno,
                f"cannot reserve {format_bytes(num_bytes)} for {kind} pages ({format_bytes(free)} free): {error}",
                str(path),
            ) from error

    def _check_room(self) -> None:
        """Asks each file system whether all that is still to be reserved there fits."""
        needed: dict[int, int] = {}
        where: dict[int, pathlib.Path] = {}
        kinds: dict[str, int] = {}
        for kind in self.extents:
            for number, path in enumerate(self.paths):
                if kind in self._sparse:
                    continue
                file, device = self.file_path(kind, number), os.stat(path).st_dev
                there = file.stat().st_blocks * 512 if file.exists() else 0
                needed[device] = needed.get(device, 0) + self.file_bytes(kind, number) - there
                where.setdefault(device, path)
                kinds[kind] = kinds.get(kind, 0) + self.file_bytes(kind, number)
        for device, num_bytes in needed.items():
            free = shutil.disk_usage(where[device]).free
            if num_bytes > free:
                table = ", ".join(
                    f"{kind} {format_bytes(n)}" + (f" in {self.banks[kind]} versions" if self.banks[kind] > 1 else "")
                    for kind, n in kinds.items()
                    if n
                )
                advice = "turn durability off (one version instead of two), " if max(self.banks.values()) > 1 else ""
                raise StoreError(
                    28,
                    f"the run needs {format_bytes(num_bytes)} more on the disk of {where[device]}, "
                    f"{format_bytes(free)} are free ({table}): free some, choose another nvme_path or add one, "
                    f"{advice}or keep a kind of state on the host",
                    str(where[device]),
                )

    def grow(self, banks: Mapping[str, int]) -> None:
        """Reserves more banks.

        Raises:
          StoreError: no room; the files are as large as before.
        """
        for kind, count in banks.items():
            for number in range(len(self.paths)):
                file = self._files.get((kind, number))
                num_bytes = self.extents[kind].bank_bytes[number] * count
                if file is None or kind in self._sparse or file.num_bytes >= num_bytes:
                    continue
                try:
                    self.engines[number].open(str(self.file_path(kind, number)), num_bytes=num_bytes).close()
                except OSError as error:
                    raise StoreError(
                        error.errno, f"cannot reserve one more version of {kind} pages: {error}",
                        str(self.file_path(kind, number)),
                    ) from error  # fmt: skip
            self.banks[kind] = max(self.banks[kind], count)

    def position(self, kind: str, place: Place, bank: int) -> tuple[str, int]:
        """File and offset of an extent, for people."""
        return str(self.file_path(kind, place.path)), bank * self.extents[kind].bank_bytes[place.path] + place.offset

    def start(
        self, operation: str, kind: str, place: Place, bank: int, array: np.ndarray, seed: int
    ) -> "aio_ffi.Handle":
        """Starts a transfer of a whole extent; its checksum starts from `seed`.

        Raises:
          AioError: of an earlier transfer that nobody waited for.
        """
        assert array.nbytes == place.num_bytes, (kind, place, array.nbytes)
        assert 0 <= bank < self.banks.get(kind, 1), (kind, bank, self.banks)
        offset = bank * self.extents[kind].bank_bytes[place.path] + place.offset
        engine = self.engines[place.path]
        return getattr(engine, operation)(self._files[kind, place.path], offset, array, seed=seed)

    def sync(self, kinds: Sequence[str]) -> None:
        """Makes completed writes of these kinds durable, on every path. From any thread; transfers go on meanwhile.

        Raises:
          StoreError: it failed. Fatal: a second attempt would report success without the bytes.
        """
        for (kind, number), file in self._files.items():
            if kind not in kinds:
                continue
            try:
                file.sync(wait=False)
            except aio_ffi.AioError as error:
                path = str(self.file_path(kind, number))
                raise StoreError(error.errno, f"sync of {kind} pages: {error.strerror or error}", path) from error

    def close(self) -> None:
        """Waits for transfers in flight and closes everything.

        Raises:
          StoreError: a transfer that nobody waited for had failed. All is closed nevertheless.
        """
        for file in self._files.values():
            with contextlib.suppress(aio_ffi.AioError):
                file.close()
        self._files.clear()
        first: aio_ffi.AioError | None = None
        for engine in self.engines:
            try:
                engine.close()
            except aio_ffi.AioError as error:
                first = first or error
        if first is not None:
            raise StoreError(first.errno, f"at close: {first.strerror or first}", first.filename) from first

    def delete(self) -> None:
        """Closes and removes the files that this class makes, and the directories if nothing else is in them."""
        self.close()
        for number, path in enumerate(self.paths):
            for kind in self.extents:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self.file_path(kind, number))
            with contextlib.suppress(OSError):
                path.rmdir()
