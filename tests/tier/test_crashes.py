"""Whatever moment the power goes, and whatever the drive then forgets, the last committed step is there, bit for bit.

Runs are recorded over the real store and log; every prefix of what they did is a moment for a power cut, with several
states of the disk each. Every state is recovered from with the real code and compared with what was committed.
"""

import dataclasses
import os
import pathlib
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator

import pytest

import aio_ffi
from tests.tier.recording import Cuts, Event, Killed, Recorder, RecordingDisk, RecordingEngine, State
from tests.tier.small_run import OPTIONS, PAGES, History, Shape, SmallRun, chunks, names, retained_files
from zinf_jax.errors import StoreError


class Wrong(AssertionError):
    """A state from which the run was not what it had promised to be."""


@dataclasses.dataclass
class Promises:
    """What the run had told to be durable by some moment."""

    committed: int = -1  # token
    given_up: set[int] = dataclasses.field(default_factory=set)
    retained: dict[int, int] = dataclasses.field(default_factory=dict)  # step -> token
    _attempted: int = -1

    def hear(self, event: Event) -> None:
        if event.path == "attempted":
            self._attempted = event.data
        elif event.path == "committed":
            self.committed = event.data
        elif event.path == "opened":  # what it goes on from; what was attempted beyond it is done again
            self.committed = event.data
            self.given_up |= set(range(event.data + 1, self._attempted + 1))
        elif event.path == "retained":
            self.retained[event.data[0]] = event.data[1]
        elif event.path == "released":
            self.retained.pop(event.data, None)

    def copy(self) -> "Promises":
        return Promises(self.committed, set(self.given_up), dict(self.retained), self._attempted)


@pytest.fixture
def folder() -> Iterator[pathlib.Path]:
    """In memory where there is such a file system: a state is looked at for a few milliseconds."""
    memory = pathlib.Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="zinf-crash-", dir=memory if memory.is_dir() else None) as path:
        yield pathlib.Path(path)


class Checker:
    """Recovers from states and compares. Counts those that differ from all before."""

    def __init__(self, folder: pathlib.Path, history: History, shape: Shape) -> None:
        self.folder, self.history = folder, history
        self.shape = dataclasses.replace(shape, options=OPTIONS, background=False)
        self.num_states = 0
        self._seen: set[tuple[bytes, int, tuple[tuple[int, int], ...]]] = set()

    def check(self, state: State, promises: Promises) -> bool:
        """Returns False where the same was checked before.

        Raises:
          Wrong: a promise does not hold.
        """
        key = (state.digest(), promises.committed, tuple(sorted(promises.retained.items())))
        if key in self._seen:
            return False
        self._seen.add(key)
        self.num_states += 1
        root = self.folder / "state"
        shutil.rmtree(root, ignore_errors=True)
        state.write_to(root)
        try:
            run = SmallRun(root, self.history, self.shape)
        except (StoreError, RuntimeError, ValueError, KeyError) as error:
            raise Wrong(f"recovery failed: {error!r}") from error
        try:
            self._compare(run, state, promises)
        finally:
            run.close()
        return True

    def _compare(self, run: SmallRun, state: State, promises: Promises) -> None:
        last = run.log.last
        if last is None:
            if promises.committed >= 0:
                raise Wrong(f"no committed step, {promises.committed} was")
        else:
            token = last.meta["token"]
            if token < promises.committed:
                raise Wrong(f"commit {token} is the last, {promises.committed} had returned")
            if token in promises.given_up:
                raise Wrong(f"commit {token} is there, which an earlier recovery had not found")
            self._whole(run, state, token, last.tables, "committed")
        kept = retained_files(run.root)
        for step, token in promises.retained.items():
            if step not in kept or kept[step][0] != token:
                raise Wrong(f"step {step} was retained and is not there")
        for step, (token, tables) in kept.items():
            self._whole(run, state, token, tables, f"retained {step}")

    def _whole(self, run: SmallRun, state: State, token: int, tables: dict, what: str) -> None:
        for kind in PAGES:
            wrong = run.store.verify(kind, tables[kind], names(kind))
            if wrong:
                raise Wrong(f"{what}: {wrong[0]}")
        for kind, _, _, index in chunks():
            place, bank = run.store.extents[kind].places[index], int(tables[kind].bank[index])
            path, offset = run.store.files.position(kind, place, bank)
            data = memoryview(state.files[os.path.relpath(path, run.root)])[offset : offset + place.num_bytes]
            if data != self.history.bytes[token][kind][index].data:
                raise Wrong(f"{what}: bytes of another step pass as good")


Steps = Callable[[SmallRun, random.Random], None]


@dataclasses.dataclass
class Recording:
    start: State
    events: list[Event]
    promises: Promises  # before the first event
    since: int = 0  # the event at which something went wrong first


def record(
    root: pathlib.Path, history: History, shape: Shape, steps: Steps, rng: random.Random, *,
    kills: tuple[int, ...] = (), failing_syncs: frozenset[int] = frozenset(), deaf: frozenset[str] = frozenset(),
    deaf_opening: frozenset[str] = frozenset(), flaws: frozenset[str] = frozenset(), promises: Promises | None = None,
) -> Recording:  # fmt: skip
    """Runs `steps` over a recorder. The process is killed at operations `kills`, one life after the other, and started
    again; the last life goes on to its end.

    Args:
      deaf: Methods of the log's disk that do nothing, and "page_directories" for the store's; `deaf_opening`: while a
        run is being opened.
    """
    for drive in (*shape.paths(root), root / "commits", root / "retained"):
        drive.mkdir(parents=True, exist_ok=True)
    start, promises = State.read_from(root), promises or Promises()
    recorder = Recorder(root, failing_syncs=failing_syncs)
    with recorder.installed(deaf="page_directories" in deaf):
        for kill in (*kills, None):
            recorder.kill_at = None if kill is None else recorder.num_operations + kill
            disk, run = RecordingDisk(recorder), None
            disk.deaf = set(deaf | deaf_opening)
            try:
                run = SmallRun(
                    root, history, shape, disk=disk, mark=recorder.mark, flaws=flaws,
                    make_engine=lambda options: RecordingEngine(options, recorder),
                )  # fmt: skip
                disk.deaf = set(deaf)
                if run.log.last is None:
                    run.initialise()
                steps(run, rng)
                run.settle()
            except (Killed, StoreError):
                pass
            finally:
                recorder.kill_at = None
                end(run)
            recorder.all_completed()
    return Recording(start, recorder.events, promises, recorder.first_fault or 0)


def end(run: SmallRun | None) -> None:
    """Gives up what a dead process held."""
    if run is not None:
        try:
            run.close()
        except (Killed, StoreError, aio_ffi.AioError):
            return


def sweep(
    recording: Recording, checker: Checker, rng: random.Random, *, per_cut: int = 2, every: int = 1
) -> Iterator[tuple[State, Promises]]:
    """Checks states of every cut, or of those after a kill or a failed sync; yields those that were new."""
    cuts, promises = Cuts(recording.start), recording.promises.copy()
    for number, event in enumerate([Event("mark"), *recording.events]):
        if event.name == "mark":
            promises.hear(event)
        if number:
            cuts.apply(event)
        if number % every or number < recording.since:
            continue
        states = [cuts.state(None), cuts.state(None, keep=True)]
        states += [cuts.state(rng) for _ in range(per_cut if cuts.num_open else 0)]
        for state in states:
            if checker.check(state, promises):
                yield state, promises.copy()


def dense(run: SmallRun, rng: random.Random) -> None:
    for _ in range(3):
        run.take_step(rng)
        run.commit()


def sparse(run: SmallRun, rng: random.Random) -> None:
    """Some chunks a step, some of them first with a guess that is taken back; not every step is committed."""
    for number in range(5):
        run.take_step(rng, share=0.4, wrong_first=number % 2 == 1)
        if number % 3 != 1:
            run.commit()


def keeping(run: SmallRun, rng: random.Random) -> None:
    """Steps are retained and released on the way."""
    for number in range(5):
        run.take_step(rng, share=0.7)
        run.commit()
        if number in (1, 2):
            run.retain()
        if number == 3 and run.store.versions.retained:
            run.settle()
            run.release(min(run.store.versions.retained))


SHAPES = {
    "one drive": Shape(),
    "two drives": Shape(num_paths=2),
    "three versions": Shape(num_banks=3, num_paths=2),
    "small log": Shape(compact_bytes=900, num_paths=2),
    "background": Shape(background=True, num_banks=3, compact_bytes=900),
}
STEPS = {"dense": dense, "sparse": sparse, "keeping": keeping}
WHOLE = 6  # states of each recording from which a recovery is recorded in its turn


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_power_cut_at_any_moment(folder, shape, steps):
    """At any moment of a run, and at any moment of the recovery from that."""
    rng, history = random.Random(f"{shape} {steps}"), History()
    recording = record(folder / "run", history, SHAPES[shape], STEPS[steps], rng)
    checker = Checker(folder, history, SHAPES[shape])
    found = list(sweep(recording, checker, rng))
    first = checker.num_states
    for number, (state, promises) in enumerate(rng.sample(found, min(WHOLE, len(found)))):
        root = folder / f"again_{number}"
        state.write_to(root)

        def one_more(run: SmallRun, rng: random.Random) -> None:
            run.take_step(rng, share=0.5)
            run.commit()

        again = record(root, history, SHAPES[shape], one_more, rng, promises=promises)
        for _ in sweep(again, checker, rng, per_cut=1, every=2):
            pass
    print(checker.num_states, "states")
    assert first > 100 and checker.num_states > first


@pytest.mark.parametrize("shape", ["two drives", "small log", "background"])
def test_a_killed_process_and_then_a_power_cut(folder, shape):
    """What a dead process left in the page cache is found by the next one, which must make it durable before it relies
    on it."""
    total = 0
    for seed in range(6):
        rng, history = random.Random(f"{shape} {seed}"), History()
        root = folder / str(seed)
        kills = tuple(rng.randrange(1, 150) for _ in range(rng.randrange(1, 4)))
        recording = record(root, history, SHAPES[shape], STEPS[rng.choice(list(STEPS))], rng, kills=kills)
        checker = Checker(folder, history, SHAPES[shape])
        for _ in sweep(recording, checker, rng, per_cut=1, every=6):
            pass
        total += checker.num_states
    print(total, "states")
    assert total > 200


def kill_at_each_operation_of_a_commit(folder, shape, *, deaf_opening=frozenset(), seeds=1):
    total = 0
    for seed in range(seeds):
        for kill in range(1, 40):
            rng, history = random.Random(seed), History()
            root = folder / f"{seed}_{kill}"

            def commit_killed(run: SmallRun, rng: random.Random, kill: int = kill) -> None:
                recorder = run._disk.recorder  # type: ignore[attr-defined]
                run.take_step(rng)
                run.commit()
                run.take_step(rng)
                if recorder.kill_at is not None:
                    recorder.kill_at = recorder.num_operations + kill
                run.commit()

            recording = record(root, history, shape, commit_killed, rng, kills=(10**6,), deaf_opening=deaf_opening)
            checker = Checker(folder, history, shape)
            for _ in sweep(recording, checker, rng, per_cut=1, every=6):
                pass
            total += checker.num_states
            shutil.rmtree(root)
            if sum(event.path == "opened" for event in recording.events if event.name == "mark") == 0:
                break  # beyond the commit's last operation
    return total


def test_a_process_killed_at_each_operation_of_a_commit(folder):
    total = kill_at_each_operation_of_a_commit(folder, Shape(compact_bytes=900))
    print(total, "states")
    assert total > 100


@pytest.mark.parametrize("seed", range(6))
def test_a_failed_sync_and_then_a_power_cut(folder, seed):
    """After a sync that failed the bytes are seen by the next process, and may still not be on the drive."""
    rng, history, shape = random.Random(seed), History(), Shape(compact_bytes=900 if seed % 2 else 1 << 20)
    total = 0
    for number in range(4, 16):
        root = folder / f"{number}"
        steps = STEPS["dense"]
        recording = record(root, history, shape, steps, rng, failing_syncs=frozenset([number]), kills=(10**6,))
        checker = Checker(folder, history, shape)
        for _ in sweep(recording, checker, rng, per_cut=1, every=6):
            pass
        total += checker.num_states
    print(total, "states")


@pytest.mark.parametrize("options", [aio_ffi.EngineOptions(queue_depth=4, block_size=1 << 16), OPTIONS])
def test_a_run_through_each_engine(tmp_path, folder, options):
    """The kernel's own asynchronous I/O, where there is one, in the same protocol."""
    rng, history, shape = random.Random(3), History(), Shape(num_paths=2, options=options)
    recording = record(tmp_path, history, shape, sparse, rng)
    checker = Checker(folder, history, shape)
    for _ in sweep(recording, checker, rng):
        pass
    assert checker.num_states > 100


# --- can it fail? ----------------------------------------------------------------------------------------------------


def caught(folder: pathlib.Path, shape: Shape, steps: Steps, **wrong: frozenset[str]) -> str:
    """What the checker says about a protocol that is wrong."""
    for seed in range(4):
        rng, history = random.Random(seed), History()
        try:
            recording = record(folder / str(seed), history, shape, steps, rng, **wrong)  # type: ignore[arg-type]
            checker = Checker(folder, history, shape)
            for _ in sweep(recording, checker, rng):
                pass
        except (Wrong, AssertionError) as error:
            return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("shape", "steps", "wrong", "message"),
    [
        (Shape(), dense, {"flaws": frozenset({"commit_before_sync"})}, "not what was written|cut short"),
        (Shape(), dense, {"flaws": frozenset({"one_path_unsynced"})}, "not what was written|cut short"),
        (Shape(), keeping, {"flaws": frozenset({"reuse_retained"})}, "retained .* is not what was written"),
        (Shape(), keeping, {"flaws": frozenset({"retain_without_rename"})}, "recovery failed"),
        (
            Shape(background=True),
            dense,
            {"flaws": frozenset({"write_before_commit"})},
            "not what was written",
        ),
        (
            Shape(compact_bytes=900),
            dense,
            {"deaf": frozenset({"sync_directory"})},
            "had returned|no committed step|lacks",
        ),
        (Shape(), dense, {"deaf": frozenset({"page_directories"})}, "pages are gone"),
        (Shape(), dense, {"deaf": frozenset({"sync"})}, "had returned|no committed step|recovery failed"),
    ],
    ids=[
        "commit before the pages are synced",
        "one kind of pages not synced",
        "extents of a retained step used again",
        "a retained step's file written in place",
        "pages written before the commit is durable",
        "directory not synced after a rename",
        "directories of page files not synced",
        "log not synced",
    ],
)
def test_a_wrong_protocol_is_caught(folder, shape, steps, wrong, message):
    with pytest.raises(Wrong, match=message):
        raise Wrong(caught(folder, shape, steps, **wrong))


def test_a_recovery_that_relies_on_the_page_cache_is_caught(folder):
    """It finds a record that a killed process wrote and nobody synced, and overwrites the step before."""
    with pytest.raises(Wrong):
        kill_at_each_operation_of_a_commit(
            folder, Shape(), deaf_opening=frozenset({"sync", "sync_directory", "write"}), seeds=4
        )
