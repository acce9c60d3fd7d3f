"""A small run over the real store and the real log: it keeps the protocol, or breaks it in a chosen way.

Every step reads chunks, changes them, and commits. The bytes of each attempted step are kept in a `History`, so that
what is found after a crash can be compared with what that step really was.
"""

import dataclasses
import json
import pathlib
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import aio_ffi
from zinf_jax.errors import StoreError
from zinf_jax.stream.commit import Committer
from zinf_jax.stream.stats import Counters
from zinf_jax.tier import CommitLog, KindExtents, PageStore, Tables
from zinf_jax.tier.journal import Disk
from zinf_jax.tier.versions import NOWHERE
from zinf_jax.train.manifest import decode_tables, encode_tables

PAGES = {"weights": [[4096, 8192], [5000]], "optimizer": [[8192, 4100], [4096, 6000]]}
OPTIONS = aio_ffi.EngineOptions(engine="threads_buffered", queue_depth=2, block_size=1 << 16)
Bytes = dict[str, list[np.ndarray]]
FLAWS = ("commit_before_sync", "one_path_unsynced", "reuse_retained", "write_before_commit", "retain_without_rename")


class QuietDisk(Disk):
    """Syncs nothing: for recoveries that are not themselves looked at."""

    def sync(self, fd: int) -> None:
        pass

    def sync_directory(self, path: pathlib.Path) -> None:
        pass


@dataclasses.dataclass
class History:
    """The bytes of every attempted commit, by a token that its record carries."""

    bytes: dict[int, Bytes] = dataclasses.field(default_factory=dict)
    steps: dict[int, int] = dataclasses.field(default_factory=dict)

    def add(self, step: int, state: Bytes) -> int:
        token = len(self.bytes)
        self.bytes[token] = {kind: [a.copy() for a in arrays] for kind, arrays in state.items()}
        self.steps[token] = step
        return token


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a run is like.

    Attributes:
      num_paths: Drives.
      num_banks: Versions that have room.
      compact_bytes: Of the log.
      background: Commits run beside reads, in the trainer's own way.
    """

    num_paths: int = 1
    num_banks: int = 2
    compact_bytes: int = 1 << 20
    background: bool = False
    options: aio_ffi.EngineOptions = OPTIONS

    def extents(self) -> dict[str, KindExtents]:
        return {kind: KindExtents.deal(pages, (2.0, 1.0)[: self.num_paths]) for kind, pages in PAGES.items()}

    def paths(self, root: pathlib.Path) -> list[pathlib.Path]:
        return [root / f"drive_{number}" for number in range(self.num_paths)]


class SmallRun:
    """Opens what is at `root` and goes on from there.

    Args:
      root: Holds everything.
      history: Of this run, over all processes.
      mark: Told what is known to be durable: ("committed", token), ("retained", (step, token)), ("released", step),
        ("opened", token).
      flaws: Rules that are broken, of `FLAWS`.
    """

    def __init__(
        self,
        root: pathlib.Path,
        history: History,
        shape: Shape,
        *,
        make_engine: Callable[[aio_ffi.EngineOptions], aio_ffi.Engine] = aio_ffi.Engine,
        disk: Disk | None = None,
        mark: Callable[[str, Any], None] = lambda what, value: None,
        flaws: frozenset[str] = frozenset(),
    ) -> None:
        assert flaws <= set(FLAWS), flaws
        self.root, self.history, self.shape, self.flaws = root, history, shape, flaws
        self._disk, self._mark = disk or QuietDisk(), mark
        self.log = CommitLog(root / "commits", compact_bytes=shape.compact_bytes, disk=self._disk)
        self.committer: Committer | None = None
        try:
            self._open_store(make_engine)
        except BaseException:
            self.log.close()
            raise

    def _open_store(self, make_engine: Callable[[aio_ffi.EngineOptions], aio_ffi.Engine]) -> None:
        if (self.root / "retained").exists():
            self._disk.sync_directory(self.root / "retained")
        kept, last = retained_files(self.root), self.log.last
        wanted = self.shape.num_banks + len(kept)
        tables = [commit.tables for commit in (last, self.log.previous) if commit is not None]
        tables += [tables for _, tables in kept.values()]
        used = max([0, *(1 + max(int(b) for b in t[kind].bank if b != NOWHERE) for t in tables for kind in PAGES)])
        self.store = PageStore(
            self.shape.paths(self.root), self.shape.extents(), dict.fromkeys(PAGES, max(wanted, used)),
            self.shape.options, reuse=dict.fromkeys(PAGES, used) if used else None, make_engine=make_engine,
        )  # fmt: skip
        self.store.versions.num_banks = dict.fromkeys(PAGES, wanted)
        try:
            if "reuse_retained" not in self.flaws:
                self.store.versions.retained = {step: tables for step, (_, tables) in kept.items()}
            if last is None:
                self.step, self.state = 0, zeros()
            else:
                self.store.versions.adopt(last.tables)
                self.token = last.meta["token"]
                self.step, self.state = last.meta["step"], self.history.bytes[self.token]
                self._mark("opened", self.token)
            self.state = {kind: [a.copy() for a in arrays] for kind, arrays in self.state.items()}
            if self.shape.background:
                self._attach()
        except BaseException:
            self.store.close()
            raise

    def _attach(self) -> None:
        commit = self.log.commit

        def marked(meta: Mapping[str, Any], tables: Tables) -> None:
            commit(meta, tables)
            self._mark("committed", meta["token"])

        self.log.commit = marked  # type: ignore[method-assign]
        self.committer = Committer(self.log, self.store, tuple(PAGES), Counters())
        if "write_before_commit" in self.flaws:
            return
        self.store.before_write = lambda kind: self.committer and self.committer.wait()  # type: ignore[assignment]

    # --- steps ----------------------------------------------------------------------------------------------------

    def initialise(self) -> None:
        """Writes the state of step 0 and commits it."""
        for kind, pages in PAGES.items():
            for page, chunks in enumerate(pages):
                data = np.zeros(sum(chunks), np.uint8)
                self.store.write_page(kind, page, data, f"page_{page}").wait()
        self.commit()

    def take_step(self, rng: random.Random, *, share: float = 1.0, wrong_first: bool = False) -> None:
        """Changes about `share` of the chunks; with `wrong_first` after changes that are taken back."""
        versions = self.store.versions
        self.store.step = self.step + 1
        if self.committer is not None and "write_before_commit" not in self.flaws:
            self.committer.may_write()
        versions.begin()
        if wrong_first:
            self._speculate(rng)
        chosen = [where for where in chunks() if rng.random() < share] or [next(chunks())]
        pending = []
        for kind, page, number, index in chosen:
            old = np.empty(PAGES[kind][page][number], np.uint8)
            self.store.read_chunk(kind, page, number, old, f"page_{page}").wait()
            assert np.array_equal(old, self.state[kind][index]), "wrong bytes were returned as good"
            new = advance(old, self.step + 1, index)
            pending.append((self.store.write_chunk(kind, page, number, new, f"page_{page}"), new))
            self.state[kind][index] = advance(self.state[kind][index], self.step + 1, index)
        for transfer, _ in reversed(pending):  # completions come in any order
            transfer.wait()
        self.step += 1

    def _speculate(self, rng: random.Random) -> None:
        """Overwrites new versions of some chunks, then goes back."""
        if self.committer is not None:
            self.committer.wait()
        versions, pending = self.store.versions, []
        for kind, page, number, index in chunks():
            if rng.random() < 0.5 and versions.can_revert(kind, index):
                noise = np.frombuffer(rng.randbytes(PAGES[kind][page][number]), np.uint8)
                pending.append((kind, index, self.store.write_chunk(kind, page, number, noise, f"page_{page}"), noise))
        for _, _, transfer, _ in pending:
            transfer.wait()
        for kind, index, _, _ in pending:
            versions.revert(kind, index)

    def commit(self) -> None:
        token = self.history.add(self.step, self.state)
        meta = {"step": self.step, "token": token}
        self._mark("attempted", token)
        self.token = token
        if self.committer is not None:
            self.committer.launch(meta)
            return
        tables = self.store.versions.snapshot(tuple(PAGES))
        if "commit_before_sync" in self.flaws:
            self.log.commit(meta, tables)
            self._mark("committed", token)
            self.store.sync(tuple(PAGES))
        else:
            self.store.sync(("weights",) if "one_path_unsynced" in self.flaws else tuple(PAGES))
            self.log.commit(meta, tables)
            self._mark("committed", token)
        self.store.versions.commit(tables)

    def settle(self) -> None:
        """Blocks until the last commit is durable."""
        if self.committer is not None:
            self.committer.wait()

    def retain(self) -> None:
        """Keeps the committed step, as `zinf_jax.train.checkpoint.retain` does."""
        self.settle()
        versions = self.store.versions
        assert versions.committed is not None
        self.store.grow(2 + len({*versions.retained, self.step}), tuple(PAGES))
        path = self.root / "retained" / f"step_{self.step:08}.json"
        content = {"step": self.step, "token": self.token, "tables": encode_tables(versions.committed)}
        try:
            self._write_json(path, content)
        except OSError as error:
            raise StoreError(error.errno, f"cannot retain step {self.step}: {error.strerror}", str(path)) from error
        self._mark("retained", (self.step, self.token))
        if "reuse_retained" not in self.flaws:
            versions.retained[self.step] = versions.committed

    def _write_json(self, path: pathlib.Path, content: Any) -> None:
        path.parent.mkdir(exist_ok=True)
        in_place = "retain_without_rename" in self.flaws
        temporary = path if in_place else path.with_suffix(".tmp")
        fd = self._disk.open(temporary)
        self._disk.truncate(fd, 0)
        self._disk.write(fd, json.dumps(content).encode(), 0)
        self._disk.sync(fd)
        self._disk.close(fd)
        if not in_place:
            self._disk.replace(temporary, path)
        self._disk.sync_directory(path.parent)

    def release(self, step: int) -> None:
        self._mark("released", step)
        path = self.root / "retained" / f"step_{step:08}.json"
        getattr(self._disk, "unlink", pathlib.Path.unlink)(path)
        self._disk.sync_directory(path.parent)
        self.store.versions.retained.pop(step, None)

    def close(self) -> None:
        try:
            if self.committer is not None:
                self.committer.close()
            else:
                self.log.close()
        finally:
            self.store.close()

    # --- looking --------------------------------------------------------------------------------------------------

    def read(self, tables: Tables | None = None) -> Bytes:
        """All bytes, checked: of the newest versions, or of other tables."""
        working = self.store.versions.working
        if tables is not None:
            self.store.versions.working = tables
        try:
            found = zeros()
            for kind, page, number, index in chunks():
                self.store.read_chunk(kind, page, number, found[kind][index], f"page_{page}").wait()
            return found
        finally:
            self.store.versions.working = working


def chunks() -> Any:
    """(kind, page, number in the page, index) of all chunks."""
    for kind, pages in PAGES.items():
        index = 0
        for page, sizes in enumerate(pages):
            for number in range(len(sizes)):
                yield kind, page, number, index
                index += 1


def names(kind: str) -> Callable[[int], str]:
    table = [f"page_{page}" for page, sizes in enumerate(PAGES[kind]) for _ in sizes]
    return table.__getitem__


def zeros() -> Bytes:
    return {kind: [np.zeros(n, np.uint8) for sizes in pages for n in sizes] for kind, pages in PAGES.items()}


def advance(old: np.ndarray, step: int, index: int) -> np.ndarray:
    """An update: each byte depends on the old one, so a wrong read shows for ever."""
    place = np.arange(len(old), dtype=np.int64)
    return (old * np.uint8(5) + (place * (step % 89 + 3) + 7 * index + step).astype(np.uint8)).astype(np.uint8)


def same(one: Bytes, other: Bytes) -> bool:
    return all(np.array_equal(a, b) for kind in PAGES for a, b in zip(one[kind], other[kind], strict=True))


def retained_files(root: pathlib.Path) -> dict[int, tuple[int, Tables]]:
    """step -> (token, tables) of the steps that are retained at `root`."""
    found = {}
    for path in sorted((root / "retained").glob("step_*.json")):
        content = json.loads(path.read_text())
        found[content["step"]] = (content["token"], decode_tables(content["tables"]))
    return found
