"""A run that is killed again and again ends with the bits of one that was not.

Each attempt is a process that dies by SIGKILL at a random event (see `kill_worker`) or after a random time; sometimes
the power fails too: what was not synced is cut, put back or scribbled over. The next attempt resumes with "auto". Every
loss that any attempt saw, and at the end parameters, moments, counters and retained steps, must be those of the
undisturbed run.
"""

import collections
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys

import pytest

from tests.train import kill_worker
from zinf_jax.stream.engine import VERSIONED
from zinf_jax.train import leftovers
from zinf_jax.train.rundir import LOCK, OWNER_FILE, read_manifest
from zinf_jax.train.source import extents_of, open_source, page_directories, retained_steps
from zinf_jax.train.source import read_commits as read_committed
from zinf_jax.train.verify import verify

STEPS = 8
SMALL = {"chunk_bytes": 20_000, "max_unit_bytes": 60_000}
BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 16, "loss_scale_window": 2}}


def variant(overlap, durability="step", precision=None):
    return {**(precision or {}), "streaming": {**SMALL, "update_overlap": overlap, "durability": durability}}


VARIANTS = {
    "none": variant("none"),
    "backward-bf16": variant("backward", precision=BF16),
    "next_forward": variant("next_forward"),
    "auto-fp16": variant("auto", precision=FP16),
    "next_forward-bf16-every_3": variant("next_forward", "every_3", BF16),
    "backward-fp16-every_2": variant("backward", "every_2", FP16),
    "two-drives": variant("auto", precision=BF16) | {"nvme_path": ["fast", "slow"]},
}


# Initialising and updating, committing, compacting, retaining, and what happens once.
MOMENTS = (
    "write weights", "write optimizer", "sync pages", "prepare-0.log", "commits.log", ".log.tmp", "step_", "checkpoint",
)  # fmt: skip


class Server:
    """The process that forks attempts."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.train.kill_worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._references: dict[str, dict] = {}
        self.deaths: collections.Counter[str] = collections.Counter()

    def attempt(self, run_dir, side, config, steps=STEPS, **how):
        side.mkdir(exist_ok=True, parents=True)
        if "nvme_path" in config:
            config = config | {"nvme_path": [str(drive) for drive in drives(side, config)]}
        request = {"run_dir": str(run_dir), "side": str(side), "config": config, "steps": steps, **how}
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if "killed_at" in answer:
            self.deaths[place_of(answer["killed_at"])] += 1
        return answer

    def reference(self, name):
        """What the undisturbed run computes, and how many events it has."""
        if name not in self._references:
            run_dir, side = self.folder / f"straight-{name}", self.folder / f"side-straight-{name}"
            answer = self.attempt(run_dir, side, VARIANTS[name])
            assert answer["status"] == 0, answer
            answer["losses"] = losses(side)
            self._references[name] = answer
        return self._references[name]

    def close(self):
        self._process.communicate()


def drives(side, config):
    return [side / name for name in config.get("nvme_path", [])]


def place_of(event):
    """An event without what differs from run to run."""
    return "".join(c for c in event if not c.isdigit())[:40]


def losses(side):
    """{(batch, step, skipped): (loss, aux)}; the same key with two values fails."""
    found = {}
    for line in (side / "losses.txt").read_text().splitlines():
        if line.startswith("start"):
            continue
        batch, step, skipped, *values = line.split()
        assert found.setdefault((batch, step, skipped), values) == values, line
    return found


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    made = Server(tmp_path_factory.mktemp("kills"))
    yield made
    made.close()


# --- power cuts --------------------------------------------------------------------------------------------------


def power_cut(run_dir, side, chance):
    """What was not synced is lost, or is anything."""
    for kept in (side / "old").iterdir():  # names whose directory was not synced
        if chance.random() < 0.5:
            os.replace(kept, kept.name.replace("%", "/"))
            (side / "synced" / kept.name).unlink(missing_ok=True)  # the old file was synced as a whole
        else:
            kept.unlink()
    for note in (side / "synced").iterdir():
        log, synced = pathlib.Path(note.name.replace("%", "/")), int(note.read_text())
        if log.exists() and log.stat().st_size > synced:
            tail = log.stat().st_size - synced
            with open(log, "r+b") as file:
                file.truncate(synced + chance.randrange(tail + 1))
                if chance.random() < 0.5:
                    file.seek(synced + chance.randrange(tail + 1))
                    file.write(chance.randbytes(chance.randrange(200)))
    scribble(run_dir, side, chance)


def scribble(run_dir, side, chance):
    """Extents that no committed or retained step needs hold anything, and files end after the last that one needs."""
    needed = collections.defaultdict(list)
    manifest = read_manifest(run_dir)
    sources = [open_source(path, run_dir) for _, path in retained_steps(run_dir)]
    if manifest is not None and read_committed(run_dir)[0] is not None:
        sources.append(open_source(run_dir, run_dir))
    for source in sources:
        directories, extents = page_directories(source.path, source.manifest), extents_of(source.manifest)
        for kind in VERSIONED:
            for place, bank in zip(extents[kind].places, source.tables[kind].bank, strict=True):
                begin = int(bank) * extents[kind].bank_bytes[place.path] + place.offset
                needed[directories[place.path] / f"{kind}.pages"].append((begin, begin + place.num_bytes))
    for path in [*(run_dir / "pages").glob("*.pages"), *side.glob("*/zinf-*/*.pages")]:
        data = bytearray(path.read_bytes())
        kept = [(begin, end, data[begin:end]) for begin, end in needed[path]]
        data[:] = chance.randbytes(len(data))
        for begin, end, value in kept:
            data[begin:end] = value
        bank = len(data) if manifest is None else whole_banks(path, manifest, needed[path])
        path.write_bytes(data[: min(bank, len(data))])


def whole_banks(path, manifest, needed):
    """A file is extended by whole banks, and synced with them."""
    size = path.stat().st_size
    if path.stem not in VERSIONED:
        return size
    bank = sum(extents_of(manifest)[path.stem].bank_bytes)
    return min(size, bank * -(-max((end for _, end in needed), default=size) // bank))


# --- the chains --------------------------------------------------------------------------------------------------


def chain(server, name, number, chance, *, limit, timed=0.2, cuts=0.4, how="kill"):
    """Kills one run until it is done; or ends it in another way, which `how` says.

    Returns:
      How often it was killed.
    """
    reference = server.reference(name)
    run_dir, side = server.folder / f"run-{number}", server.folder / f"side-{number}"
    kills, cut = 0, False
    while True:
        options = {"seed": chance.randrange(1 << 30), "how": how}
        if kills >= limit:
            pass
        elif chance.random() < timed:
            options["kill_after_s"] = chance.uniform(0.2, 1) * reference["wall_s"]
        elif chance.random() < 0.5:
            options |= {"among": chance.choice(MOMENTS), "kill_at": chance.randint(1, 12)}
        else:
            # Mostly a step or two further; now and then early (resume itself) or anywhere.
            per_step = reference["events"] // STEPS
            options["kill_at"] = chance.randint(1, chance.choice([12, 4 * per_step, 4 * per_step, reference["events"]]))
        answer = server.attempt(run_dir, side, VARIANTS[name], **options)
        where = f"{name}, run {number}, kill {kills} {'after a power cut ' * cut}at {answer.get('killed_at')}: {answer}"
        assert answer["status"] in (0, -9 if how == "kill" or "kill_after_s" in options else 1), where
        if answer["status"] == 0 and how != "kill" and "killed_at" in answer and kills < limit:
            kills += 1  # it was harmless there
        if answer["status"] == 0:
            break
        if answer["status"] == 1:
            assert EXPECTED[how] in answer["error"], where
        kills += 1
        cut = "killed_at" in answer and chance.random() < cuts
        if cut:
            power_cut(run_dir, side, chance)
        if (run_dir / "run.json").exists():
            report = verify(run_dir)
            assert report.whole, (where, cut, report)
    assert answer["result"] == reference["result"], name
    assert losses(side) == reference["losses"], name
    assert not {p.name for p in run_dir.rglob("*") if ".tmp" in p.name}
    assert verify(run_dir).whole
    for drive in drives(side, VARIANTS[name]):
        clean_old([drive], [path for path in drive.iterdir() if not (path / OWNER_FILE).exists()])
        assert len([*drive.iterdir()]) == 1, "pages of an attempt that never had a manifest are left"
    assert_saved(side, server.folder / f"side-straight-{name}")
    shutil.rmtree(run_dir)
    return kills


def clean_old(folders, unowned):
    """Removes what killed attempts left. What had no owner yet is nobody's only once it is old."""
    for path in unowned:
        for entry in (*path.iterdir(), path):
            os.utime(entry, (0, 0))
    for found in leftovers.find(folders):
        assert found.path in unowned and leftovers.delete(found), found


def assert_saved(side, straight):
    """The checkpoint has the bits of the undisturbed run's; what killed attempts left of it can be cleaned."""
    clean_old([side / "saved"], [*(side / "saved").glob(".*")])
    assert os.listdir(side / "saved") == os.listdir(straight / "saved")
    saved, wanted = side / kill_worker.SAVED, straight / kill_worker.SAVED
    assert verify(saved).whole
    # A process that died between its last two calls has left its lock, which is nobody's.
    assert {*os.listdir(saved)} - {LOCK} == {*os.listdir(wanted)}
    for pages in wanted.glob("*.pages"):
        assert (saved / pages.name).read_bytes() == pages.read_bytes(), pages.name


def kill(server, seed, num_kills, names, limit):
    chance, kills, number = random.Random(seed), 0, 0
    while kills < num_kills:
        name = names[number % len(names)]
        kills += chain(server, name, f"{seed}-{number}", chance, limit=min(limit, num_kills - kills))
        number += 1
    return kills


def test_a_run_that_is_killed_again_and_again(server):
    names = ["none", "backward-bf16", "next_forward", "auto-fp16", "two-drives"]
    assert kill(server, 1, 30, names, limit=6) == 30


EXPECTED = {"raise": "Stopped", "full": "No space left", "term": "SystemExit"}


@pytest.mark.parametrize("how", EXPECTED)
def test_a_run_that_ends_in_the_middle_otherwise(server, how):
    """An exception anywhere, a full disk, SIGTERM: the user sees that one, and the run goes on from there."""
    chance = random.Random(how)
    assert chain(server, "next_forward", how, chance, limit=5, timed=0, cuts=0, how=how)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_two_hundred_kills(server, capsys):
    seed = int(os.environ.get("ZINF_KILL_SEED", "2"))
    assert kill(server, seed, 200, list(VARIANTS), limit=9) == 200
    with capsys.disabled():
        print(f"\nseed {seed}: 200 kills; at events: {dict(server.deaths.most_common())}")
