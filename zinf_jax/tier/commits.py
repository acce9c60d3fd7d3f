"""Commits: which step of a run is durable, on all its processes.

    DIRECTORY/prepare-P.log   process P: what each of its chunks is at, per step
    DIRECTORY/commits.log     process 0: the steps that all processes have prepared, with the run's counters

The order, per step: the pages' writes complete -> every page file synced -> every process's prepare record durable ->
process 0's commit record durable -> only then may a page of the next step be written. A step is committed when its
commit record is there; a prepare record without one is a step that was not finished.

Guarantees: `last` is the newest committed step, whatever moment the power went, and the same one on all processes that
open the run together. The committed step before it can still be found (`previous`), as long as no page of a later step
was written.
"""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from zinf_jax.errors import ResumeError
from zinf_jax.tier.directories import make_directory
from zinf_jax.tier.journal import Disk, Journal, Record, read
from zinf_jax.tier.versions import Table, Tables, apply_delta, copy_tables, delta

COMPACT_BYTES = 4 << 20


@dataclasses.dataclass(frozen=True)
class Commit:
    """A committed step: the run's counters, and the tables of this process's chunks."""

    meta: dict[str, Any]
    tables: Tables


class Peers(Protocol):
    """How the processes of a run hear of each other."""

    def gather(self, value: int) -> Sequence[int]:
        """Blocks until every process has called it. Returns their values, by process.

        Raises:
          OSError: a process is gone.
        """
        ...


class Alone:
    """The only process of a run."""

    def gather(self, value: int) -> Sequence[int]:
        return (value,)


class CommitLog:
    """The commits of a run, as one process sees and writes them. All processes open it, and commit, together.

    Args:
      directory: Of the logs, the same for all processes; made where missing.
      process: This one's number. Only process 0 writes commit records.
      peers: All processes of the run.
      compact_bytes: A log that has grown beyond this is written anew.
      disk: The operating system.

    Raises:
      StoreError: a log is damaged.
      ResumeError: a committed step has no prepare record.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        *,
        process: int = 0,
        peers: Peers | None = None,
        compact_bytes: int = COMPACT_BYTES,
        disk: Disk | None = None,
    ) -> None:
        make_directory(directory)
        self._process = process
        self._peers = peers or Alone()
        self._compact_bytes = compact_bytes
        self._prepares = Journal(directory / f"prepare-{process}.log", disk=disk)
        self._commits = Journal(directory / "commits.log", disk=disk) if process == 0 else None
        self._peers.gather(0)  # what the commit records say is durable from here on
        commits = read(directory / "commits.log", disk=disk) if self._commits is None else self._commits.records
        self.last, self.previous = _replay(self._prepares.records, commits, process, str(self._prepares.path))
        self._drop_unfinished()
        self._tables = None if self.last is None else copy_tables(self.last.tables)
        self._prepares.records = []
        if self._commits is not None:
            self._commits.records = []

    def _drop_unfinished(self) -> None:
        """Removes prepare records of a step that was not committed: the next one is a change to the committed step."""
        committed = -1 if self.last is None else int(self.last.meta["prepare"][str(self._process)])
        kept = [record for record in self._prepares.records if record.sequence <= committed]
        if len(kept) < len(self._prepares.records):
            self._prepares.replace(kept)

    def commit(self, meta: Mapping[str, Any], tables: Tables) -> None:
        """Makes a step durable, whose pages are, on all processes. Blocks; from any one thread at a time.

        Args:
          meta: The run's counters, the same on all processes; JSON values, with "step".
          tables: Of the step. They must not change afterwards.

        Raises:
          StoreError: it failed: the step before is the committed one, or this one; nobody can tell without opening
          anew.
          OSError: another process is gone; the same holds.
        """
        prepared = self._peers.gather(self._prepare(tables))
        meta = {**meta, "prepare": {str(process): sequence for process, sequence in enumerate(prepared)}}
        if self._commits is not None:
            if self._commits.num_bytes > self._compact_bytes and self.last is not None:
                self._commits.replace([Record(self._commits.last_sequence, self.last.meta, {})])
            self._commits.append(meta)
        self._peers.gather(0)
        self._tables = tables
        self.previous, self.last = self.last, Commit(meta, tables)

    def _prepare(self, tables: Tables) -> int:
        """Makes this process's record of a step durable. Returns the number by which a commit record names it."""
        old = self._tables
        if self._prepares.num_bytes > self._compact_bytes and old is not None:
            # Up to the step that is committed now, so that both it and the next one can be found afterwards.
            full = Record(self._prepares.last_sequence, self._meta(old, full=True), delta(old, None))
            self._prepares.replace([full])
        return self._prepares.append(self._meta(tables, full=old is None), delta(tables, old))

    def _meta(self, tables: Tables, *, full: bool) -> dict[str, Any]:
        return {"full": full, "num_chunks": {kind: len(table.bank) for kind, table in tables.items()}}

    @property
    def num_bytes(self) -> int:
        return self._prepares.num_bytes + (0 if self._commits is None else self._commits.num_bytes)

    def close(self) -> None:
        self._prepares.close()
        if self._commits is not None:
            self._commits.close()


def read_commits(directory: pathlib.Path, *, process: int = 0) -> tuple[Commit | None, Commit | None]:
    """The last committed step and the one before, of a run that another process may own. Changes nothing.

    Raises:
      StoreError: a log is damaged.
      ResumeError: a committed step has no prepare record.
    """
    # Commits first: whatever a live owner adds meanwhile, each of them has its prepare record.
    commits = read(directory / "commits.log")
    path = directory / f"prepare-{process}.log"
    return _replay(read(path), commits, process, str(path))


def _replay(
    prepares: Sequence[Record], commits: Sequence[Record], process: int, path: str
) -> tuple[Commit | None, Commit | None]:
    """The last commit and the one before."""
    wanted = {int(r.meta["prepare"][str(process)]): r.meta for r in commits[-2:]}
    found: list[Commit] = []
    tables: Tables = {}
    for record in prepares:
        if record.meta["full"]:
            kinds = dict.fromkeys(name.split("/")[0] for name in record.arrays)
            tables = {kind: Table.empty(record.meta["num_chunks"][kind]) for kind in kinds}
        apply_delta(tables, record.arrays)
        if record.sequence in wanted:
            found.append(Commit(wanted[record.sequence], copy_tables(tables)))
    if wanted and (not found or found[-1].meta is not commits[-1].meta):
        raise ResumeError(
            f"{path} lacks the record of committed step {commits[-1].meta['step']}: "
            "resume from a retained step or a checkpoint"
        )
    return (found[-1] if found else None), (found[-2] if len(found) > 1 else None)
