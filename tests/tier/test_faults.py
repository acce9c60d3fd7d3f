"""Whatever fails, and whenever: a run ends with the right numbers, or with an error that says so.

Random schedules of faults under the real store and log. Each runs a few steps (read, change, write, commit, retain),
starts again after an error, and is then looked at: no committed step is lost; `verify` finds exactly what the drive
spoiled; the newest whole step can be gone on from, and gives the right numbers.
"""

import collections
import pathlib
import random
import shutil
import tempfile
from collections.abc import Iterator

import numpy as np
import pytest

from tests.tier.faulty import SILENT, Faults, FaultyDisk, FaultyEngine
from tests.tier.small_run import PAGES, History, Shape, SmallRun, advance, chunks, names, same, zeros
from zinf_jax.errors import CorruptionError, StoreError
from zinf_jax.tier import Tables, files, store

NUM_STEPS = 5
KINDS = tuple(PAGES)


@pytest.fixture
def folder() -> Iterator[pathlib.Path]:
    memory = pathlib.Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="zinf-fault-", dir=memory if memory.is_dir() else None) as path:
        yield pathlib.Path(path)


def truth(step: int):
    """What every step is, whatever happened on the way."""
    state = zeros()
    for done in range(1, step + 1):
        for kind, _, _, index in chunks():
            state[kind][index] = advance(state[kind][index], done, index)
    return state


TRUTH = {step: truth(step) for step in range(NUM_STEPS + 2)}


class Schedule:
    """One schedule of faults and what became of it."""

    def __init__(self, root: pathlib.Path, seed: int) -> None:
        self.root, self.rng, self.history = root, random.Random(seed), History()
        self.shape = Shape(
            num_paths=self.rng.choice([1, 2]), num_banks=self.rng.choice([2, 2, 3]),
            compact_bytes=self.rng.choice([900, 1 << 20]), background=self.rng.random() < 0.3,
        )  # fmt: skip
        self.faults = Faults.draw(self.rng)
        self.retain_at = self.rng.choice([None, 1, 2, 3])
        self.committed, self.retained = -1, set()
        self.errors: list[BaseException] = []

    def _hear(self, what, value):
        if what == "committed":
            self.committed = value
        elif what == "retained":
            self.retained.add(value[0])

    def open(self, *, faulty: bool = True) -> SmallRun:
        self.faults.armed = faulty
        return SmallRun(
            self.root, self.history, self.shape, mark=self._hear, disk=FaultyDisk(self.faults),
            make_engine=lambda options: FaultyEngine(options, self.faults),
        )  # fmt: skip

    def life(self) -> None:
        """From where the run is to its end, or to an error."""
        run = None
        try:
            run = self.open()
            if run.log.last is None:
                run.initialise()
            for number in range(NUM_STEPS - run.step):
                run.take_step(self.rng, wrong_first=number % 2 == 1)
                run.commit()
                if run.step == self.retain_at:
                    run.retain()
            run.settle()
            # No wrong bytes pass as good: what reads return without an error is the truth.
            assert same(run.read(), TRUTH[run.step]), "wrong bytes were returned as good"
        except StoreError as error:
            self.errors.append(error)
            raise
        finally:
            self._end(run)

    def _end(self, run: SmallRun | None) -> None:
        try:
            if run is not None:
                run.close()
        except StoreError as error:
            self.errors.append(error)

    def play(self) -> str:
        """Returns "finished", or what the error was, of the first life."""
        outcome = "finished"
        for number in range(2):
            try:
                self.life()
                break
            except StoreError as error:
                assert str(error), error
                if number == 0:
                    outcome = type(error).__name__
        self.look()
        return outcome

    # --- afterwards, on a machine without faults -----------------------------------------------------------------

    def look(self) -> None:
        run = self.open(faulty=False)
        try:
            if run.log.last is None:
                assert self.committed < 0, "a committed step is lost"
                return
            assert run.log.last.meta["token"] >= self.committed, "a committed step is lost"
            assert set(run.store.versions.retained) >= self.retained, "a retained step is lost"
            candidates = [(run.log.last.meta["step"], run.log.last.tables)]
            if run.log.previous is not None:
                candidates.append((run.log.previous.meta["step"], run.log.previous.tables))
            candidates += sorted(run.store.versions.retained.items(), key=lambda found: -found[0])
            whole = [step for step, tables in candidates if self._agrees(run, step, tables)]
            self._last_is_as_it_should_be(run, whole)
            if whole:
                chosen = next((step, tables) for step, tables in candidates if step == whole[0])
                self._go_on(run, *chosen)
        finally:
            self._end(run)

    def _agrees(self, run: SmallRun, step: int, tables: Tables) -> bool:
        """Does `verify` say of every chunk what a comparison with the truth says? Is the step whole?"""
        whole = True
        for kind in KINDS:
            wrong = run.store.verify(kind, tables[kind], names(kind))
            expected = []
            for _, page, _, index in (c for c in chunks() if c[0] == kind):
                place, bank = run.store.extents[kind].places[index], int(tables[kind].bank[index])
                path, offset = run.store.files.position(kind, place, bank)
                found = np.fromfile(path, np.uint8, place.num_bytes, offset=offset)
                if not np.array_equal(found, TRUTH[step][kind][index]):
                    expected.append((page, path, offset))
            assert len(wrong) == len(expected), (step, wrong, expected)
            for error, (page, path, offset) in zip(wrong, expected, strict=True):
                assert isinstance(error, CorruptionError)
                assert f"page 'page_{page}'" in str(error) and f"offset {offset} of {path}" in str(error)
            whole &= not wrong
        return whole

    def _last_is_as_it_should_be(self, run: SmallRun, whole: list[int]) -> None:
        """The last and the retained steps are whole, but for what the drive spoiled without a word."""
        assert run.log.last is not None
        steps = {run.log.last.meta["step"]: run.log.last.tables, **run.store.versions.retained}
        for step, tables in steps.items():
            spoiled = False
            for kind in KINDS:
                for index, place in enumerate(run.store.extents[kind].places):
                    spoiled |= (
                        run.store.files.position(kind, place, int(tables[kind].bank[index])) in self.faults.damaged
                    )
            assert (step in whole) or spoiled, f"step {step} is damaged, and no fault did it"

    def _go_on(self, run: SmallRun, step: int, tables: Tables) -> None:
        """From the newest whole step on: to the end, with the right numbers."""
        run.store.versions.adopt(tables)
        run.step, run.state = step, {kind: [a.copy() for a in arrays] for kind, arrays in TRUTH[step].items()}
        assert same(run.read(), TRUTH[step])
        run.commit()  # as a run does that goes back
        run.settle()
        while run.step < NUM_STEPS:
            run.take_step(self.rng)
            run.commit()
        run.settle()
        assert same(run.read(), TRUTH[run.step])


def play_all(folder: pathlib.Path, seeds: range) -> tuple[collections.Counter, collections.Counter]:
    outcomes: collections.Counter = collections.Counter()
    fired: collections.Counter = collections.Counter()
    for seed in seeds:
        root = folder / str(seed)
        schedule = Schedule(root, seed)
        try:
            outcome = schedule.play()
        except BaseException as error:
            error.add_note(f"schedule {seed}: {schedule.shape}, fired {schedule.faults.fired}")
            raise
        outcomes[outcome] += 1
        fired.update(set(schedule.faults.fired))
        loud = [f for f in schedule.faults.fired if f[1] not in SILENT]
        assert not loud or schedule.errors, f"schedule {seed}: {loud} fired and nobody was told"
        shutil.rmtree(root, ignore_errors=True)
    return outcomes, fired


@pytest.mark.parametrize("part", range(4))
def test_random_faults(folder, part):
    outcomes, fired = play_all(folder, range(part * 250, (part + 1) * 250))
    assert set(outcomes) == {"finished", "StoreError", "CorruptionError"} and min(outcomes.values()) > 5
    assert len(fired) >= 14, f"faults that came about: {sorted(fired)}"


@pytest.mark.slow
def test_many_random_faults(folder):
    play_all(folder, range(10_000, 16_000))


def test_a_store_that_does_not_compare_checksums_is_caught(folder, monkeypatch):
    """Can these tests fail?"""

    class Trusting(store._Part):
        def __init__(self, handle, expected, after):
            super().__init__(handle, None, after)

    monkeypatch.setattr(store, "_Part", Trusting)
    with pytest.raises(AssertionError, match="wrong bytes were returned as good"):
        play_all(folder, range(200))


def test_a_run_that_goes_on_after_a_failed_sync_is_caught(folder, monkeypatch):
    sync = files.PageFiles.sync

    def deaf(self, kinds):
        try:
            sync(self, kinds)
        except StoreError:
            return

    monkeypatch.setattr(files.PageFiles, "sync", deaf)
    with pytest.raises(AssertionError, match="nobody was told"):
        play_all(folder, range(200))
