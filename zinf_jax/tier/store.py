"""The NVMe tier: chunks of pages in page files, each version checked against its checksum on every read.

Which bank a chunk's newest bytes are in, and with which checksum, is the `Versions`' business; where that is on which
drive, the `PageFiles`'. The checksum (CRC32C) starts from kind, chunk and version, so that neither another chunk's
bytes nor an older version's (a write that was lost) can pass as good.

Guarantees:
  * `read_*` and `write_*` only start a transfer; the array is in use until `wait` of the returned `PendingIO` returns.
    Only the main thread starts transfers and waits.
  * `wait` of a read returns only if the bytes are those that were written; `wait` of a write makes them the chunk's
    newest version.
"""

import functools
import pathlib
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

import aio_ffi
from zinf_jax.errors import CorruptionError, StoreError
from zinf_jax.tier.extents import KindExtents
from zinf_jax.tier.files import PageFiles
from zinf_jax.tier.sweep import sweep
from zinf_jax.tier.versions import NOWHERE, Table, Versions


def chunk_seed(kind: str, index: int, version: int) -> int:
    """What a chunk's checksum starts from."""
    return aio_ffi.crc32c(struct.pack("<IQ", index, version), _kind_seed(kind))


@functools.cache
def _kind_seed(kind: str) -> int:
    return aio_ffi.crc32c(kind.encode())


class _Part:
    """One extent's transfer."""

    __slots__ = ("after", "expected", "handle")

    def __init__(self, handle: "aio_ffi.Handle", expected: int | None, after: Callable[[int], None] | None, /) -> None:
        self.handle = handle
        self.expected = expected
        self.after = after


class PendingIO:
    """A transfer that was started. `what` names it for people: "write of optimizer of page block_3".

    `observer` is told once, when it was waited for and had not failed.
    """

    __slots__ = (
        "_describe", "_observer", "_parts", "_submitted_s", "_where", "kind", "num_bytes", "operation", "page", "what",
    )  # fmt: skip

    def __init__(
        self,
        parts: list[_Part],
        what: str,
        about: tuple[str, str, str, int],
        describe: Callable[[int, int], CorruptionError],
        where: Callable[[int], str],
        observer: "Callable[[PendingIO], None] | None",
    ) -> None:
        self._parts = parts
        self._describe = describe
        self._where = where
        self._observer = observer
        self._submitted_s = time.perf_counter()
        self.what = what
        self.operation, self.kind, self.page, self.num_bytes = about

    def times(self) -> tuple[float, float, bool]:
        """Start and end in seconds of `time.perf_counter()`, and whether the engine measured them: else until now."""
        if not self._parts or not self.done():
            return self._submitted_s, time.perf_counter(), False
        handles = [part.handle for part in self._parts]
        return min(h.start_s for h in handles), max(h.done_s for h in handles), True

    def done(self) -> bool:
        return all(part.handle.done() for part in self._parts)

    def wait(self) -> None:
        """Blocks until the transfer is complete, also where a part of it failed. Calling it again is harmless.

        Raises:
          CorruptionError: the bytes that were read are not those that were written.
          StoreError: the transfer failed or moved fewer bytes than asked.
        """
        first: StoreError | None = None
        for number, part in enumerate(self._parts):  # all of them, since the array is in use until the last is complete
            try:
                part.handle.wait()
            except aio_ffi.AioError as error:
                if first is None:
                    text = f"{self.what}{self._where(number)}: {error.strerror or error}"
                    first = StoreError(error.errno, text, error.filename)
                    first.__cause__ = error
                continue
            found = part.handle.checksum
            if part.expected is not None and found != part.expected:
                first = first or self._describe(number, found)
            elif part.after is not None:
                part.after(found)
                part.after = None
        if first is not None:
            raise first
        if self._observer is not None:
            self._observer(self)
            self._observer = None


class PageStore:
    """Chunks of one run, in versions.

    Args:
      paths: Directories of the page files.
      extents: Per kind.
      banks: Versions that have room, per kind; 1: changed in place.
      options, reuse, sparse, make_engine: See `PageFiles`.

    Attributes:
      versions: The tables.
      step: What new versions are numbered by.
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
        self.files = PageFiles(
            paths, extents, banks, options, reuse=reuse, sparse=sparse, make_engine=make_engine
        )  # fmt: skip
        self.extents = dict(extents)
        self.versions = Versions({kind: len(e.places) for kind, e in extents.items()}, banks)
        self.step = 0
        self.before_write: Callable[[str], None] = lambda kind: None
        self.observer: Callable[[PendingIO], None] | None = None  # of transfers that are started from now on

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of one version, per kind."""
        return {kind: e.num_bytes for kind, e in self.extents.items()}

    # --- reading ------------------------------------------------------------------------------------------------

    def read_page(self, kind: str, page: int, array: np.ndarray, name: str) -> PendingIO:
        """Starts filling `array` (uint8) with a page's newest version."""
        return self._start("read", kind, self.extents[kind].chunks_of(page), array, name)

    def read_chunk(self, kind: str, page: int, number: int, array: np.ndarray, name: str) -> PendingIO:
        """Starts filling `array` (uint8) with the newest version of a page's chunk number `number`."""
        return self._start("read", kind, [self.extents[kind].first[page] + number], array, name)

    def newest(self, kind: str, page: int, number: int) -> tuple[int, int]:
        """Where the newest version of a page's chunk is, and its number: changes whenever the chunk does."""
        index, table = self.extents[kind].first[page] + number, self.versions.working[kind]
        return int(table.bank[index]), int(table.version[index])

    # --- writing ------------------------------------------------------------------------------------------------

    def write_page(self, kind: str, page: int, array: np.ndarray, name: str) -> PendingIO:
        """Starts writing a new version of all chunks of a page."""
        return self._start("write", kind, self.extents[kind].chunks_of(page), array, name)

    def write_chunk(self, kind: str, page: int, number: int, array: np.ndarray, name: str) -> PendingIO:
        """Starts writing a new version of a chunk."""
        return self._start("write", kind, [self.extents[kind].first[page] + number], array, name)

    def _start(self, operation: str, kind: str, chunks: Iterable[int], array: np.ndarray, name: str) -> PendingIO:
        chunks = list(chunks)
        what = f"{operation} of {kind} of page {name!r}, {array.nbytes} bytes"
        if operation == "write":
            self.before_write(kind)
        table, offset = self.versions.working[kind], 0
        parts: list[_Part] = []
        banks: list[tuple[int, int, int]] = []
        for index in chunks:
            place = self.extents[kind].places[index]
            data = array[offset : offset + place.num_bytes]
            offset += place.num_bytes
            if operation == "write":
                bank, version = self.versions.target(kind, index), self.step
                after, expected = self._recorder(kind, index, bank, version), None
            else:
                bank, version = int(table.bank[index]), int(table.version[index])
                after, expected = None, int(table.checksum[index])
                assert bank != NOWHERE, f"chunk {index} of {kind} of page {name!r} was never written"
            try:
                handle = self.files.start(operation, kind, place, bank, data, chunk_seed(kind, index, version))
            except aio_ffi.AioError as error:  # of an earlier transfer that nobody waited for, or no room in the queue
                self._abandon(parts)
                raise StoreError(
                    error.errno, f"before the {what}: {error.strerror or error}", error.filename
                ) from error
            parts.append(_Part(handle, expected, after))
            banks.append((index, bank, version))
        assert offset == array.nbytes, (what, offset)

        def describe(number: int, found: int) -> CorruptionError:
            index, bank, version = banks[number]
            return self._corruption(kind, index, bank, version, parts[number].expected or 0, found, name)

        def where(number: int) -> str:
            index, bank, _ = banks[number]
            place = self.extents[kind].places[index]
            return f" ({place.num_bytes} at offset {self.files.position(kind, place, bank)[1]})"

        return PendingIO(parts, what, (operation, kind, name, array.nbytes), describe, where, self.observer)

    def _abandon(self, parts: list[_Part]) -> None:
        for part in parts:
            try:
                part.handle.wait()
            except aio_ffi.AioError:
                continue

    def _recorder(self, kind: str, index: int, bank: int, version: int) -> Callable[[int], None]:
        return lambda checksum: self.versions.record(kind, index, bank, checksum, version)

    def _corruption(
        self, kind: str, index: int, bank: int, version: int, expected: int, found: int, name: str
    ) -> CorruptionError:
        place = self.extents[kind].places[index]
        file, offset = self.files.position(kind, place, bank)
        return CorruptionError(
            f"{kind} of page {name!r} is not what was written: {place.num_bytes} bytes at offset {offset} of {file}, "
            f"written in step {version}, have checksum {found:08x}, expected {expected:08x}. Nothing was trained on "
            "them. Resume with integrity.fallback: true to go back to the newest step that is whole, if one is left "
            "(zinf verify says which), or from a checkpoint; check the drive"
        )

    # --- whole states -------------------------------------------------------------------------------------------

    def verify(
        self, kind: str, table: Table, names: Callable[[int], str], progress: Callable[[int], None] | None = None
    ) -> list[CorruptionError]:
        """Reads every chunk of a kind as `table` says and compares checksums.

        Args:
          kind: Which.
          table: Banks, checksums, versions.
          names: Name of a chunk's page.
          progress: Called with the bytes of each chunk that was read.

        Returns:
          What is wrong, in order of chunks.

        Raises:
          StoreError: an earlier transfer that nobody waited for had failed.
        """
        places = self.extents[kind].places

        def start(index: int, data: np.ndarray) -> "aio_ffi.Handle":
            seed = chunk_seed(kind, index, int(table.version[index]))
            return self.files.start("read", kind, places[index], int(table.bank[index]), data, seed)

        wrong: list[CorruptionError] = []
        wanted = [(i, place.num_bytes) for i, place in enumerate(places) if table.bank[i] != NOWHERE]
        try:
            for index, handle in sweep(wanted, start, max((n for _, n in wanted), default=0)):
                if (error := self._compare(kind, index, table, handle, names(index))) is not None:
                    wrong.append(error)
                if progress is not None:
                    progress(places[index].num_bytes)
        except aio_ffi.AioError as error:
            text = f"before the read of {kind}: {error.strerror or error}"
            raise StoreError(error.errno, text, error.filename) from error
        return wrong

    def _compare(
        self, kind: str, index: int, table: Table, handle: "aio_ffi.Handle", name: str
    ) -> CorruptionError | None:
        """What is wrong with a chunk that was read."""
        bank, version, expected = (int(x[index]) for x in (table.bank, table.version, table.checksum))
        try:
            handle.wait()
        except aio_ffi.AioError as error:
            file, offset = self.files.position(kind, self.extents[kind].places[index], bank)
            return CorruptionError(f"{kind} of page {name!r} cannot be read at offset {offset} of {file}: {error}")
        if handle.checksum == expected:
            return None
        return self._corruption(kind, index, bank, version, expected, handle.checksum, name)

    def sync(self, kinds: Sequence[str]) -> None:
        """Makes completed writes durable; see `PageFiles.sync`."""
        self.files.sync(kinds)

    def grow(self, num_banks: int, kinds: Sequence[str]) -> None:
        """Makes room for more versions. Raises StoreError: there is none; nothing changed."""
        wanted = {kind: max(num_banks, self.versions.num_banks[kind]) for kind in kinds}
        self.files.grow(wanted)
        self.versions.num_banks |= wanted

    def statistics(self) -> "aio_ffi.Statistics":
        """Of all paths together."""
        return aio_ffi.Statistics.total([engine.statistics() for engine in self.files.engines])

    def close(self) -> None:
        self.files.close()

    def delete(self) -> None:
        """Closes and removes the files, and the directories if nothing else is in them."""
        self.files.delete()
