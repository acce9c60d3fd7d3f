"""Versions: which bank holds a chunk's bytes, of which step, with which checksum. Pure bookkeeping, no I/O.

Shadow paging: a chunk is never overwritten while a committed or retained step needs it. The next version goes to
another bank; a commit makes the new tables the committed ones. Going back (a speculative update that was wrong, a step
that is skipped, a crash) is to take older tables again.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

MAX_BANKS = 250
NOWHERE = 255  # bank of a chunk that was never written


@dataclasses.dataclass
class Table:
    """Of all chunks of one kind: `bank` uint8[n], `checksum` uint32[n], `version` uint32[n]."""

    bank: np.ndarray
    checksum: np.ndarray
    version: np.ndarray

    @classmethod
    def empty(cls, num_chunks: int) -> "Table":
        return cls(
            np.full(num_chunks, NOWHERE, np.uint8), np.zeros(num_chunks, np.uint32), np.zeros(num_chunks, np.uint32)
        )

    def copy(self) -> "Table":
        return Table(self.bank.copy(), self.checksum.copy(), self.version.copy())

    @property
    def num_banks(self) -> int:
        """Of the banks in use, the highest plus one."""
        return int(np.max(self.bank.astype(np.int64) + 1, where=self.bank != NOWHERE, initial=0))

    def arrays(self) -> dict[str, np.ndarray]:
        return {"bank": self.bank, "checksum": self.checksum, "version": self.version}

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray]) -> "Table":
        return cls(
            np.array(arrays["bank"], np.uint8), np.array(arrays["checksum"], np.uint32),
            np.array(arrays["version"], np.uint32),
        )  # fmt: skip

    def changed_since(self, other: "Table") -> np.ndarray:
        """Indices of the chunks that differ, uint32."""
        differs = (self.bank != other.bank) | (self.checksum != other.checksum) | (self.version != other.version)
        return np.flatnonzero(differs).astype(np.uint32)


Tables = dict[str, Table]


def copy_tables(tables: Mapping[str, Table]) -> Tables:
    return {kind: table.copy() for kind, table in tables.items()}


class Versions:
    """The tables of one run.

    Args:
      num_chunks: Per kind.
      num_banks: Per kind; a kind with one bank is changed in place.

    Attributes:
      working: What the newest bytes are.
      base: As of the start of the step being taken: what an update reads, and what `revert` goes back to.
      committed: As of the last commit, None before the first.
      retained: Tables of the steps whose extents are kept out of reuse.
    """

    def __init__(self, num_chunks: Mapping[str, int], num_banks: Mapping[str, int]) -> None:
        assert all(1 <= n <= MAX_BANKS for n in num_banks.values()), num_banks
        self.num_banks = dict(num_banks)
        self.working: Tables = {kind: Table.empty(n) for kind, n in num_chunks.items()}
        self.base: Tables = copy_tables(self.working)
        self.committed: Tables | None = None
        self.retained: dict[int, Tables] = {}

    def begin(self) -> None:
        """A new step's changes start here."""
        self.base = copy_tables(self.working)

    def revert(self, kind: str, index: int) -> None:
        """The chunk's newest version is the one of `base` again."""
        for name, array in self.base[kind].arrays().items():
            getattr(self.working[kind], name)[index] = array[index]

    def target(self, kind: str, index: int) -> int:
        """The bank that the chunk's next version goes to: not the base's, nor one that must survive.

        A version that was begun in this step (a speculative one that is done again) is overwritten.

        Raises:
          AssertionError: there is none: too few banks were planned.
        """
        if self.num_banks[kind] == 1:
            return 0
        kept = self.kept(kind, index)
        base = int(self.base[kind].bank[index])
        if base not in kept and not self._shadows_base(kind):
            return base if base != NOWHERE else self._lowest(kind, kept)
        return self._lowest(kind, kept | {base})

    def _shadows_base(self, kind: str) -> bool:
        """Is there room to keep the step's base version although no commit needs it?"""
        return self.num_banks[kind] >= 3 + len(self.retained)

    def _lowest(self, kind: str, kept: set[int]) -> int:
        free = next((bank for bank in range(self.num_banks[kind]) if bank not in kept), None)
        assert free is not None, f"no bank is free for {kind}: {self.num_banks[kind]} banks, kept {sorted(kept)}"
        return free

    def kept(self, kind: str, index: int) -> set[int]:
        """Banks of the chunk that a committed or retained step needs."""
        tables = [*([self.committed] if self.committed is not None else []), *self.retained.values()]
        banks = {int(t[kind].bank[index]) for t in tables if kind in t}
        banks.discard(NOWHERE)
        return banks

    def can_revert(self, kind: str, index: int) -> bool:
        """Will writing the next version leave the base version as it is?"""
        return self.num_banks[kind] > 1 and self.target(kind, index) != int(self.base[kind].bank[index])

    def record(self, kind: str, index: int, bank: int, checksum: int, version: int) -> None:
        """A chunk's new version is complete on its extent."""
        table = self.working[kind]
        table.bank[index], table.checksum[index], table.version[index] = bank, checksum, version

    def commit(self, tables: Tables) -> None:
        """These tables are durable: what only the earlier commit needed is free."""
        self.committed = tables

    def adopt(self, tables: Mapping[str, Table]) -> None:
        """Starts from stored tables, which are committed."""
        for kind, table in tables.items():
            assert len(table.bank) == len(self.working[kind].bank), (kind, len(table.bank))
            self.working[kind] = table.copy()
        self.begin()
        self.committed = {kind: self.working[kind].copy() for kind in tables}

    def snapshot(self, kinds: Sequence[str]) -> Tables:
        return {kind: self.working[kind].copy() for kind in kinds}


def delta(new: Mapping[str, Table], old: Mapping[str, Table] | None) -> dict[str, np.ndarray]:
    """What changed, as named arrays: `kind/index`, `kind/bank`, ...; everything where `old` is None."""
    arrays: dict[str, np.ndarray] = {}
    for kind, table in new.items():
        index = np.arange(len(table.bank), dtype=np.uint32) if old is None else table.changed_since(old[kind])
        arrays[f"{kind}/index"] = index
        arrays |= {f"{kind}/{name}": array[index] for name, array in table.arrays().items()}
    return arrays


def apply_delta(tables: Mapping[str, Table], arrays: Mapping[str, Any]) -> None:
    """Brings `tables` forward by a delta, in place.

    Raises:
      ValueError: the delta is about other tables.
    """
    for kind, table in tables.items():
        index = arrays[f"{kind}/index"]
        if len(index) and int(index.max()) >= len(table.bank):
            raise ValueError(f"chunk {int(index.max())} of {kind}, which has {len(table.bank)}")
        for name, array in table.arrays().items():
            array[index] = arrays[f"{kind}/{name}"]
