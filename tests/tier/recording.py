"""A disk that remembers what it was asked, and every state in which a power cut may leave it.

A `Recorder` sits under the real store and the real log: `RecordingEngine` and `RecordingDisk` pass everything on to
real files and note each write, size change, sync, new name, rename and sync of a directory. `Cuts` replays the notes
and gives, after any of them, states that the kernel and the drive may leave behind:

  * a write that no sync covers is lost, kept, or torn at sectors of 512 bytes, each on its own and in any order; a
    write covered by a sync (one that began after the write was complete) is there;
  * a size that no sync covers may be the old one or the new one, with zeros where the data did not come;
  * a new name or a rename is there or not until its directory is synced;
  * after a failed sync, what it covered stays visible to the machine, but no later sync makes it durable (the kernel
    has marked the pages clean), unless it is written again.

A process that is killed loses nothing that it wrote, but nothing more becomes durable either: `Recorder.kill_at`.
"""

import contextlib
import dataclasses
import hashlib
import os
import pathlib
import random
import threading
import unittest.mock
from collections.abc import Iterator
from typing import Any

import numpy as np

import aio_ffi
from zinf_jax.tier import files, journal

SECTOR = 512


class Killed(BaseException):
    """The process ends here."""


@dataclasses.dataclass(frozen=True)
class Event:
    """What happened. `name`: create, unlink, rename, syncdir (of `path`, for rename to `target`); write, done, size,
    sync (of file number `inode`); mark (`data` is for the test)."""

    name: str
    path: str = ""
    target: str = ""
    inode: int = -1
    offset: int = 0
    data: Any = b""
    number: int = -1  # done: of which event; sync: what was complete before this event is covered
    failed: bool = False


class Recorder:
    """Notes of all that is done under one directory.

    Args:
      root: The directory.
      kill_at: The operation (write, sync, rename, ...) at which the process is killed, half-way through a log's write.
      failing_syncs: Numbers of the syncs of files that fail.
    """

    def __init__(
        self, root: pathlib.Path, *, kill_at: int | None = None, failing_syncs: frozenset[int] = frozenset()
    ) -> None:
        self.root = root
        self.events: list[Event] = []
        self.kill_at = kill_at
        self.failing_syncs = failing_syncs
        self.num_operations = self.num_syncs = 0
        self.inodes: dict[str, int] = {}
        self.first_fault: int | None = None  # the event at which a process was killed or a sync failed first
        self._in_flight: set[int] = set()
        self._lock = threading.Lock()
        self._num_inodes = 0
        for name in sorted(self.name(p) for p in root.rglob("*") if p.is_file()):
            self.inode(root / name, known=True)

    def name(self, path: Any) -> str:
        return os.path.relpath(path, self.root)

    def note(self, event: Event) -> int:
        with self._lock:
            self.events.append(event)
            return len(self.events) - 1

    def mark(self, what: str, value: Any = None) -> None:
        self.note(Event("mark", path=what, data=value))

    def operation(self) -> bool:
        """Counts one; True if the process ends during it."""
        with self._lock:
            self.num_operations += 1
            killed = self.kill_at is not None and self.num_operations >= self.kill_at
            if killed and self.first_fault is None:
                self.first_fault = len(self.events)
            return killed

    def end_here(self) -> None:
        if self.operation():
            raise Killed

    def inode(self, path: Any, *, known: bool = False) -> int:
        """The number of a file that exists; one that is new is noted."""
        name = self.name(path)
        if name not in self.inodes:
            self.inodes[name] = self._num_inodes
            self._num_inodes += 1
            if not known:
                self.note(Event("create", path=name, inode=self.inodes[name]))
        return self.inodes[name]

    def started(self, inode: int, offset: int, data: bytes) -> int:
        number = self.note(Event("write", inode=inode, offset=offset, data=data))
        self._in_flight.add(number)
        return number

    def completed(self, number: int) -> None:
        if number in self._in_flight:
            self._in_flight.discard(number)
            self.note(Event("done", number=number))

    def all_completed(self) -> None:
        """After a kill: the kernel ends what was in flight."""
        for number in sorted(self._in_flight):
            self.completed(number)

    def sync(self, inode: int, begin: int) -> bool:
        """Notes a sync; returns whether it is to fail."""
        with self._lock:
            failed = self.num_syncs in self.failing_syncs
            self.num_syncs += 1
        number = self.note(Event("sync", inode=inode, number=begin, failed=failed))
        if failed and self.first_fault is None:
            self.first_fault = number
        return failed

    @contextlib.contextmanager
    def installed(self, *, deaf: bool = False) -> Iterator["Recorder"]:
        """Within the context the page files' directories are watched too; with `deaf`, as if they were never synced."""
        disk = RecordingDisk(self)
        disk.deaf = {"sync_directory"} if deaf else set()
        with unittest.mock.patch.object(files, "sync_directory", disk.sync_directory):
            yield self


class RecordingDisk(journal.Disk):
    """A journal's disk.

    Attributes:
      deaf: Names of methods whose effect is not noted, as if they were not called: a wrong protocol.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.deaf: set[str] = set()
        self._fds: dict[int, int] = {}

    def open(self, path: pathlib.Path) -> int:
        self.recorder.end_here()
        fd = super().open(path)
        self._fds[fd] = self.recorder.inode(path)
        return fd

    def write(self, fd: int, data: bytes, offset: int) -> None:
        killed = self.recorder.operation()
        if killed:
            data = data[: len(data) // 2]
        super().write(fd, data, offset)
        self.recorder.completed(self.recorder.started(self._fds[fd], offset, bytes(data)))
        if killed:
            raise Killed

    def truncate(self, fd: int, num_bytes: int) -> None:
        self.recorder.end_here()
        super().truncate(fd, num_bytes)
        self.recorder.note(Event("size", inode=self._fds[fd], offset=num_bytes))

    def sync(self, fd: int) -> None:
        self.recorder.end_here()
        if "sync" in self.deaf:
            return
        if self.recorder.sync(self._fds[fd], len(self.recorder.events)):
            raise OSError(5, "Input/output error")

    def close(self, fd: int) -> None:
        self._fds.pop(fd, None)
        super().close(fd)

    def replace(self, source: pathlib.Path, target: pathlib.Path) -> None:
        self.recorder.end_here()
        super().replace(source, target)
        names, old = self.recorder.inodes, self.recorder.name(source)
        new = self.recorder.name(target)
        names[new] = names.pop(old)
        self.recorder.note(Event("rename", path=old, target=new, inode=names[new]))

    def unlink(self, path: pathlib.Path) -> None:
        self.recorder.end_here()
        path.unlink()
        name = self.recorder.name(path)
        self.recorder.inodes.pop(name)
        self.recorder.note(Event("unlink", path=name))

    def sync_directory(self, path: pathlib.Path) -> None:
        self.recorder.end_here()
        if "sync_directory" not in self.deaf:
            self.recorder.note(Event("syncdir", path=self.recorder.name(path)))


class RecordingHandle:
    def __init__(self, inner: aio_ffi.Handle, recorder: Recorder, number: int) -> None:
        self._inner, self._recorder, self._number = inner, recorder, number

    def done(self) -> bool:
        if self._inner.done():
            self._recorder.completed(self._number)
            return True
        return False

    def wait(self, timeout: float | None = None) -> None:
        self._inner.wait(timeout)
        self._recorder.completed(self._number)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class RecordingFile:
    def __init__(self, inner: aio_ffi.File, recorder: Recorder, inode: int) -> None:
        self._inner, self._recorder, self.inode = inner, recorder, inode

    def sync(self, **how: Any) -> None:
        # What it waits for beyond the protocol does not count: only what was complete before it began.
        self._recorder.end_here()
        begin = len(self._recorder.events)
        self._inner.sync(**how)
        if self._recorder.sync(self.inode, begin):
            raise aio_ffi.AioError(5, "fdatasync: injected", operation="sync", path=self._inner.path)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class RecordingEngine(aio_ffi.Engine):
    def __init__(self, options: aio_ffi.EngineOptions, recorder: Recorder) -> None:
        super().__init__(options)
        self._recorder = recorder

    def open(self, path: Any, **how: Any) -> Any:
        self._recorder.end_here()
        before = os.path.getsize(path) if os.path.exists(path) else 0
        file = super().open(path, **how)
        inode = self._recorder.inode(path)
        if file.num_bytes != before:
            self._recorder.note(Event("size", inode=inode, offset=file.num_bytes))
        return RecordingFile(file, self._recorder, inode)

    def write(self, file: Any, offset: int, array: np.ndarray, *, seed: int | None = None) -> Any:
        self._recorder.end_here()
        number = self._recorder.started(file.inode, offset, array.tobytes())
        return RecordingHandle(super().write(file, offset, array, seed=seed), self._recorder, number)


# --- what a power cut may leave -------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Pending:
    event: Event
    done: int  # the event with which it was complete; -1: it is not
    doomed: bool = False


@dataclasses.dataclass(frozen=True)
class State:
    """Files by name."""

    files: dict[str, bytes]

    def digest(self) -> bytes:
        digest = hashlib.blake2b(digest_size=16)
        for name in sorted(self.files):
            digest.update(name.encode() + b"\0" + len(self.files[name]).to_bytes(8, "little"))
            digest.update(self.files[name])
        return digest.digest()

    def write_to(self, root: pathlib.Path) -> None:
        for name, data in self.files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(data)

    @classmethod
    def read_from(cls, root: pathlib.Path) -> "State":
        return cls({os.path.relpath(p, root): p.read_bytes() for p in root.rglob("*") if p.is_file()})


class Cuts:
    """Replays a recorder's notes one by one.

    Args:
      start: The durable state before the first note.
    """

    def __init__(self, start: State) -> None:
        self._names = {name: number for number, name in enumerate(sorted(start.files))}
        self._durable = {number: bytearray(start.files[name]) for name, number in self._names.items()}
        self._pending: dict[int, list[_Pending]] = {}
        self._renames: list[Event] = []
        self._writes: dict[int, _Pending] = {}
        self._count = 0

    def apply(self, event: Event) -> None:
        number, self._count = self._count, self._count + 1
        if event.name in ("create", "rename", "unlink"):
            self._renames.append(event)
            if event.name == "create":
                self._durable.setdefault(event.inode, bytearray())
        elif event.name == "syncdir":
            kept = []
            for change in self._renames:
                if (os.path.dirname(change.path) or ".") == event.path:
                    _rename(self._names, change)
                else:
                    kept.append(change)
            self._renames = kept
        elif event.name in ("write", "size"):
            pending = _Pending(event, number if event.name == "size" else -1)
            self._writes[number] = pending
            self._pending.setdefault(event.inode, []).append(pending)
        elif event.name == "done":
            self._writes[event.number].done = number
        elif event.name == "sync":
            self._sync(event)

    def _sync(self, event: Event) -> None:
        left = []
        for pending in self._pending.get(event.inode, []):
            covered = 0 <= pending.done < event.number
            if event.failed:
                pending.doomed |= covered and pending.event.name == "write"
            if event.failed or pending.doomed or not covered:
                left.append(pending)
                continue
            _change(self._durable[event.inode], pending.event)
            # Its bytes replace what an earlier write, that can no more be made durable, may have left.
            left = [p for p in left if not (p.doomed and _covers(pending.event, p.event))]
        self._pending[event.inode] = left

    def state(self, rng: random.Random | None, *, keep: bool = False) -> State:
        """One that a power cut may leave now: without `rng` all that is not synced is lost, or with `keep` kept."""
        contents: dict[int, bytes] = {}
        names = dict(self._names)
        for change in self._renames:
            if keep if rng is None else rng.random() < 0.5:
                _rename(names, change)
        for inode in set(names.values()):
            data = bytearray(self._durable[inode])
            pending = list(self._pending.get(inode, []))
            if rng is not None and not any(p.event.name == "size" for p in pending):
                rng.shuffle(pending)
            for one in pending:
                if rng is None:
                    if keep:
                        _change(data, one.event)
                else:
                    _maybe_change(data, one.event, rng)
            contents[inode] = bytes(data)
        return State({name: contents[inode] for name, inode in names.items()})

    @property
    def num_open(self) -> int:
        """How much is not durable."""
        return len(self._renames) + sum(map(len, self._pending.values()))


def _rename(names: dict[str, int], change: Event) -> None:
    if change.name == "create":
        names[change.path] = change.inode
    elif change.name == "unlink":
        names.pop(change.path, None)
    else:
        if names.get(change.path) == change.inode:
            del names[change.path]
        names[change.target] = change.inode


def _covers(later: Event, earlier: Event) -> bool:
    if later.name == "size":
        return earlier.offset + len(earlier.data) > later.offset
    return later.offset <= earlier.offset and earlier.offset + len(earlier.data) <= later.offset + len(later.data)


def _change(data: bytearray, event: Event) -> None:
    if event.name == "size":
        _resize(data, event.offset)
        return
    _resize(data, max(len(data), event.offset + len(event.data)))
    data[event.offset : event.offset + len(event.data)] = event.data


def _resize(data: bytearray, size: int) -> None:
    del data[size:]
    data.extend(bytes(size - len(data)))


def _maybe_change(data: bytearray, event: Event, rng: random.Random) -> None:
    fate = rng.randrange(4)
    if fate == 0:
        if event.name == "write" and rng.random() < 0.3:  # the new size came without the bytes
            _resize(data, max(len(data), event.offset + len(event.data)))
    elif fate == 1 or event.name == "size":
        _change(data, event)
    else:
        at, end = event.offset, event.offset + len(event.data)
        kept = rng.random()
        while at < end:
            stop = min(end, (at // SECTOR + 1) * SECTOR)
            if rng.random() < kept:
                piece = event.data[at - event.offset : stop - event.offset]
                _change(data, dataclasses.replace(event, offset=at, data=piece))
            at = stop
