"""The journal: records that are durable when `append` returns, in a file that survives being cut off anywhere.

    MAGIC | payload bytes u32 | CRC32C u32 | sequence u64 | payload      one after the other; all but MAGIC is summed

A payload is JSON (its length first) followed by the bytes of named arrays. A record that is not whole ends the journal:
it was being written when the power went. If whole records follow a damaged one, that is not a torn tail but damage, and
is refused. The file is replaced (written beside, synced, renamed, directory synced) when it has grown.

Guarantees: after `append` returned, the record is found by any later `Journal`; `replace` leaves either the old records
or the new ones. What a `Journal` finds when it is opened is durable when it has opened, also where the process before
died between writing and syncing, or its sync failed. One writer at a time: the owner of the run directory. `read`
changes nothing and needs no ownership.
"""

import dataclasses
import errno
import json
import os
import pathlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

import aio_ffi
from zinf_jax.errors import StoreError
from zinf_jax.tier.directories import sync_directory

MAGIC = b"zinfjrnl"
_HEADER = struct.Struct("<8sIIQ")
MAX_PAYLOAD = 1 << 31
TEMPORARY = ".tmp"


@dataclasses.dataclass(frozen=True)
class Record:
    """An entry.

    Attributes:
      sequence: Counts up by one.
      meta: JSON values.
      arrays: By name.
    """

    sequence: int
    meta: dict[str, Any]
    arrays: dict[str, np.ndarray]


class Disk:
    """What the journal asks of the operating system, so that tests can see and break it."""

    def open(self, path: pathlib.Path) -> int:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def read(self, path: pathlib.Path) -> bytes:
        return path.read_bytes() if path.exists() else b""

    def write(self, fd: int, data: bytes, offset: int) -> None:
        view = memoryview(data)
        while view:
            done = os.pwrite(fd, view, offset)
            if done <= 0:
                raise OSError(28, "write stored nothing")
            view, offset = view[done:], offset + done

    def truncate(self, fd: int, num_bytes: int) -> None:
        os.ftruncate(fd, num_bytes)

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def replace(self, source: pathlib.Path, target: pathlib.Path) -> None:
        os.replace(source, target)

    def sync_directory(self, path: pathlib.Path) -> None:
        sync_directory(path)


class Journal:
    """A journal file.

    Args:
      path: Made where missing.
      disk: The operating system.

    Attributes:
      records: What was in it when it was opened.

    Raises:
      StoreError: it is damaged before its end, or what was found cannot be made durable.
    """

    def __init__(self, path: pathlib.Path, *, disk: Disk | None = None) -> None:
        self.path = pathlib.Path(path)
        self._disk = disk or Disk()
        data = self._disk.read(self.path)
        self.records, starts = parse(data, str(self.path))
        self._end = starts[-1]
        self._sequence = self.records[-1].sequence if self.records else 0
        self._broken: StoreError | None = None
        self._fd = self._disk.open(self.path)
        try:
            self._settle(data, starts)
        except OSError as error:
            self.close()
            raise self._fail("open", error) from error

    def _settle(self, data: bytes, starts: list[int]) -> None:
        """Makes durable what was found: it may have been in the page cache alone."""
        if len(data) > self._end:  # a torn tail: cut, so that a later record cannot follow it
            self._disk.truncate(self._fd, self._end)
        if len(starts) > 1:
            # Written again, since after a sync that failed the kernel takes unwritten pages for written. Records before
            # the last one were durable when it was begun.
            self._disk.write(self._fd, data[starts[-2] : self._end], starts[-2])
        self._disk.sync(self._fd)
        self._disk.sync_directory(self.path.parent)

    @property
    def num_bytes(self) -> int:
        return self._end

    @property
    def last_sequence(self) -> int:
        return self._sequence

    def append(self, meta: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None) -> int:
        """Adds a record and makes it durable. From any one thread at a time.

        Returns:
          Its sequence number.

        Raises:
          StoreError: it could not be written or synced; the journal takes no further records.
        """
        self._check()
        data = encode(Record(self._sequence + 1, dict(meta), dict(arrays or {})))
        try:
            self._disk.write(self._fd, data, self._end)
            self._disk.sync(self._fd)
        except OSError as error:
            raise self._fail("append to", error) from error
        self._end += len(data)
        self._sequence += 1
        return self._sequence

    def replace(self, records: Sequence[Record]) -> None:
        """Replaces all records by these. Sequence numbers go on from the last of them.

        Raises:
          StoreError: it failed; the file holds the old records or the new ones.
        """
        self._check()
        data = b"".join(map(encode, records))
        temporary = self.path.with_name(self.path.name + TEMPORARY)
        try:
            fd = self._disk.open(temporary)
            try:
                self._disk.truncate(fd, 0)
                self._disk.write(fd, data, 0)
                self._disk.sync(fd)
            except BaseException:
                self._disk.close(fd)
                raise
            self._disk.replace(temporary, self.path)
            self._disk.close(self._fd)
            self._fd, self._end = fd, len(data)
            self._sequence = records[-1].sequence if records else self._sequence
            self._disk.sync_directory(self.path.parent)
        except OSError as error:
            raise self._fail("compact", error) from error

    def _check(self) -> None:
        if self._broken is not None:
            raise self._broken

    def _fail(self, what: str, error: OSError) -> StoreError:
        # What is durable now is unknown: a second attempt could succeed without the bytes.
        text = f"cannot {what} the journal: {error.strerror or error}; resume from the last committed step"
        self._broken = StoreError(error.errno, text, str(self.path))
        return self._broken

    def close(self) -> None:
        if self._fd >= 0:
            self._disk.close(self._fd)
            self._fd = -1


def read(path: pathlib.Path, *, disk: Disk | None = None) -> list[Record]:
    """The records of a journal that another process may be writing; none where there is no file.

    Raises:
      StoreError: it is damaged before its end.
    """
    return parse((disk or Disk()).read(path), str(path))[0]


def encode(record: Record) -> bytes:
    names = list(record.arrays)
    table = [[n, str(record.arrays[n].dtype), list(record.arrays[n].shape)] for n in names]
    head = json.dumps({"meta": record.meta, "arrays": table}, separators=(",", ":")).encode()
    parts = [struct.pack("<I", len(head)), head, *(np.ascontiguousarray(record.arrays[n]).tobytes() for n in names)]
    payload = b"".join(parts)
    assert len(payload) < MAX_PAYLOAD, len(payload)
    checksum = _checksum(payload, record.sequence)
    return _HEADER.pack(MAGIC, len(payload), checksum, record.sequence) + payload


def _checksum(payload: bytes, sequence: int) -> int:
    return aio_ffi.crc32c(payload, aio_ffi.crc32c(struct.pack("<IQ", len(payload), sequence)))


def parse(data: bytes, name: str = "journal") -> tuple[list[Record], list[int]]:
    """The records of a journal's bytes, where each begins, and where the last one ends.

    Raises:
      StoreError: whole records follow a damaged one.
    """
    records: list[Record] = []
    starts, offset = [0], 0
    while (found := _record_at(data, offset, records[-1].sequence if records else None)) is not None:
        record, offset = found
        records.append(record)
        starts.append(offset)
    after, at = records[-1].sequence if records else 0, offset
    while (at := data.find(MAGIC, at + 1)) >= 0:
        later = _record_at(data, at, None)
        if later is not None and later[0].sequence > after:
            raise StoreError(
                errno.EBADMSG,
                f"damaged at offset {offset}: a whole record (number {later[0].sequence}) follows at {at}. The drive "
                "lost or changed what it had acknowledged: resume from a retained step or a checkpoint",
                name,
            )
    return records, starts


def _record_at(data: bytes, offset: int, previous: int | None) -> tuple[Record, int] | None:
    if offset + _HEADER.size > len(data):
        return None
    magic, length, checksum, sequence = _HEADER.unpack_from(data, offset)
    begin, end = offset + _HEADER.size, offset + _HEADER.size + length
    if magic != MAGIC or end > len(data) or (previous is not None and sequence != previous + 1):
        return None
    payload = data[begin:end]
    if _checksum(payload, sequence) != checksum:
        return None
    return _decode(payload, sequence), end


def _decode(payload: bytes, sequence: int) -> Record:
    (length,) = struct.unpack_from("<I", payload)
    head = json.loads(payload[4 : 4 + length])
    arrays, offset = {}, 4 + length
    for name, dtype_name, shape in head["arrays"]:
        dtype = np.dtype(getattr(ml_dtypes, dtype_name, None) or dtype_name)
        count = int(np.prod(shape, dtype=np.int64))
        arrays[name] = np.frombuffer(payload, dtype, count, offset).reshape(shape)
        offset += count * dtype.itemsize
    return Record(sequence, head["meta"], arrays)
