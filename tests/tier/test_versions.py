"""Which bank a version goes to: never one that is still needed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from zinf_jax.tier.versions import NOWHERE, Table, Versions, apply_delta, copy_tables, delta

KINDS = {"weights": 3, "optimizer": 2}


class ShadowPaging(RuleBasedStateMachine):
    """Random steps, with a model of what each bank holds: a number for each write.

    The rules are those of the engine: a page is written only when the commit before is durable, retaining makes room
    first, and a step may run ahead only where `can_revert` says so.
    """

    @initialize(num_banks=st.integers(2, 4))
    def start(self, num_banks):
        self.wanted = num_banks
        self.versions = Versions(KINDS, dict.fromkeys(KINDS, num_banks))
        self.disk: dict[tuple[str, int, int], int] = {}
        self.count = 0
        self.pending = None
        self.revertible: set[tuple[str, int]] = set()
        self.undone = True
        self.lost: set[tuple[str, int]] = set()  # base versions that were given up
        for kind, n in KINDS.items():
            for index in range(n):
                self._write(kind, index)
        self.versions.commit(self.versions.snapshot(tuple(KINDS)))
        self.number = 0
        self.begin()

    def _write(self, kind, index):
        if self.pending is not None:
            self.collect()
        bank = self.versions.target(kind, index)
        assert 0 <= bank < self.versions.num_banks[kind]
        if bank == self.versions.base[kind].bank[index] and self.count >= sum(KINDS.values()):
            self.lost.add((kind, index))
        self.count += 1
        self.disk[kind, index, bank] = self.count
        self.versions.record(kind, index, bank, self.count, self.count % 7)

    @rule()
    def begin(self):
        self.versions.begin()
        self.lost.clear()
        self.revertible.clear()

    @rule(kind=st.sampled_from(list(KINDS)), index=st.integers(0, 1))
    def write(self, kind, index):
        if self.pending is None and self.versions.can_revert(kind, index) and (kind, index) not in self.lost:
            self.revertible.add((kind, index))
        else:
            self.revertible.discard((kind, index))
        self._write(kind, index)

    @rule()
    def revert(self):
        for kind, index in self.revertible:
            self.versions.revert(kind, index)
            assert self.versions.working[kind].checksum[index] == self.versions.base[kind].checksum[index]
        self.revertible.clear()

    @precondition(lambda self: self.pending is None)
    @rule()
    def launch(self):
        """A commit begins: until it is durable, the one before counts."""
        self.pending = self.versions.snapshot(tuple(KINDS))

    @precondition(lambda self: self.pending is not None)
    @rule()
    def collect(self):
        self.versions.commit(self.pending)
        self.pending = None

    @precondition(lambda self: len(self.versions.retained) < 4)
    @rule()
    def retain(self):
        if self.pending is not None:
            self.collect()
        self.begin()  # at rest
        self.number += 1
        banks = max(2 + len(self.versions.retained) + 1, *self.versions.num_banks.values())
        self.versions.num_banks = dict.fromkeys(KINDS, banks)
        self.versions.retained[self.number] = self.versions.committed

    @precondition(lambda self: self.versions.retained)
    @rule(which=st.integers(0, 3))
    def release(self, which):
        steps = sorted(self.versions.retained)
        self.versions.retained.pop(steps[which % len(steps)])

    @rule()
    def restart(self):
        """A new process adopts what is committed; with fewer banks than there were, where they are not needed."""
        old, self.pending = self.versions, None
        self.versions = Versions(KINDS, dict.fromkeys(KINDS, self.wanted + len(old.retained)))
        self.versions.retained = old.retained
        self.versions.adopt(old.committed)
        self.lost.clear()
        self.revertible.clear()

    def _holds(self, tables, *, but=frozenset()):
        for kind, table in tables.items():
            for index in range(len(table.bank)):
                if (kind, index) not in but:
                    assert self.disk[kind, index, int(table.bank[index])] == table.checksum[index], (kind, index)

    @invariant()
    def what_is_needed_is_there(self):
        if not hasattr(self, "versions") or self.versions.committed is None:
            return
        self._holds(self.versions.committed)
        self._holds(self.versions.working)
        for tables in self.versions.retained.values():
            self._holds(tables)
        if self.pending is not None:
            self._holds(self.pending)
        self._holds(self.versions.base, but=self.lost)


ShadowPaging.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestShadowPaging = ShadowPaging.TestCase


def test_two_banks_take_turns():
    versions = Versions({"weights": 1}, {"weights": 2})
    banks = []
    for step in range(4):
        versions.begin()
        banks.append(versions.target("weights", 0))
        versions.record("weights", 0, banks[-1], step, step)
        assert versions.target("weights", 0) == banks[-1], "done again, it goes to the same place"
        versions.commit(versions.snapshot(["weights"]))
    assert banks == [0, 1, 0, 1]


def test_steps_between_commits_use_one_bank():
    """With durability every N steps the committed version stays, and the newest is changed in place."""
    versions = Versions({"weights": 1}, {"weights": 2})
    versions.record("weights", 0, versions.target("weights", 0), 1, 1)
    versions.commit(versions.snapshot(["weights"]))
    for step in range(2, 5):
        versions.begin()
        assert versions.can_revert("weights", 0) == (step == 2)
        bank = versions.target("weights", 0)
        assert bank == 1
        versions.record("weights", 0, bank, step, step)


def test_one_bank_is_changed_in_place():
    versions = Versions({"gradients": 1}, {"gradients": 1})
    versions.record("gradients", 0, 0, 1, 1)
    versions.begin()
    assert versions.target("gradients", 0) == 0 and not versions.can_revert("gradients", 0)


def test_too_few_banks_are_told():
    versions = Versions({"weights": 1}, {"weights": 2})
    for step in range(2):
        versions.begin()
        versions.record("weights", 0, versions.target("weights", 0), step, step)
        versions.commit(versions.snapshot(["weights"]))
        versions.retained[step] = versions.committed
    versions.begin()
    with pytest.raises(AssertionError, match=r"no bank is free for weights: 2 banks, kept \[0, 1\]"):
        versions.target("weights", 0)


def tables_of(data: st.DataObject, num_chunks: dict[str, int]) -> dict[str, Table]:
    return {
        kind: Table(
            *(
                np.array(data.draw(st.lists(st.integers(0, high), min_size=n, max_size=n)), dtype)
                for high, dtype in ((255, np.uint8), (2, np.uint32), (2**32 - 1, np.uint32))
            )
        )
        for kind, n in num_chunks.items()
    }


@given(st.data())
def test_a_delta_brings_tables_forward(data):
    sizes = {"weights": data.draw(st.integers(0, 5)), "optimizer": data.draw(st.integers(0, 3))}
    old, new = tables_of(data, sizes), tables_of(data, sizes)
    for kind in sizes:  # some chunks stay
        for index in data.draw(st.sets(st.sampled_from(range(sizes[kind])))) if sizes[kind] else ():
            for name, array in new[kind].arrays().items():
                array[index] = old[kind].arrays()[name][index]
    changed = delta(new, old)
    assert all(len(changed[f"{kind}/index"]) == len(new[kind].changed_since(old[kind])) for kind in sizes)
    found = copy_tables(old)
    apply_delta(found, changed)
    whole = {kind: Table.empty(n) for kind, n in sizes.items()}
    apply_delta(whole, delta(new, None))
    for tables in (found, whole):
        assert all(len(tables[kind].changed_since(new[kind])) == 0 for kind in sizes)
    assert all(table.bank.dtype == np.uint8 and table.version.dtype == np.uint32 for table in found.values())


def test_a_delta_of_other_tables_is_refused():
    one, other = {"weights": Table.empty(5)}, {"weights": Table.empty(3)}
    with pytest.raises(ValueError, match="chunk 4 of weights, which has 3"):
        apply_delta(other, delta(one, None))


def test_tables_know_their_banks():
    table = Table.empty(3)
    assert table.num_banks == 0 and set(table.bank) == {NOWHERE}
    table.bank[1] = 249
    assert table.num_banks == 250


def test_adopted_tables_are_copies():
    versions, table = Versions({"weights": 1}, {"weights": 2}), Table.empty(1)
    table.bank[0] = 1
    versions.adopt({"weights": table})
    table.bank[0] = 0
    versions.record("weights", 0, 0, 5, 5)
    assert versions.committed is not None
    assert (versions.committed["weights"].bank[0], versions.base["weights"].bank[0]) == (1, 1)
    with pytest.raises(AssertionError):
        versions.adopt({"weights": Table.empty(2)})
