"""The commit log: what a run finds of its steps when it is opened again."""

import itertools
import pathlib
import random
import shutil

import numpy as np
import pytest

from tests.tier import group
from tests.tier.group import same, tables_at
from zinf_jax.errors import ResumeError, StoreError
from zinf_jax.tier.commits import CommitLog, read_commits
from zinf_jax.tier.journal import Journal, parse, read
from zinf_jax.tier.versions import delta


def holds(commit, step: int) -> bool:
    return commit.meta["step"] == step and same(commit.tables, tables_at(step))


def run(path: pathlib.Path, first: int, last: int, **options) -> None:
    log = CommitLog(path, **options)
    for step in range(first, last + 1):
        log.commit({"step": step, "rng": [step, 2]}, tables_at(step))
        assert holds(log.last, step)
        assert step == 0 or holds(log.previous, step - 1)
    log.close()


@pytest.mark.parametrize("compact_bytes", [1, 600, 1 << 20])
@pytest.mark.parametrize("per_life", [1, 2, 7])
def test_the_last_two_commits_are_found(tmp_path, compact_bytes, per_life):
    for first in range(0, 14, per_life):
        run(tmp_path / "log", first, first + per_life - 1, compact_bytes=compact_bytes)
        last = first + per_life - 1
        for found in (read_commits(tmp_path / "log"), _opened(tmp_path / "log")):
            assert holds(found[0], last)
            assert (found[1] is None) == (last == 0) and (last == 0 or holds(found[1], last - 1))


def _opened(path):
    log = CommitLog(path)
    log.close()
    return log.last, log.previous


def test_a_new_log_has_no_commit(tmp_path):
    assert _opened(tmp_path / "a" / "b") == (None, None)
    assert read_commits(tmp_path / "a" / "b") == (None, None)
    assert read_commits(tmp_path / "nowhere") == (None, None) and not (tmp_path / "nowhere").exists()


def test_compaction_keeps_the_log_small(tmp_path):
    sizes = []
    log = CommitLog(tmp_path, compact_bytes=3000)
    for step in range(200):
        log.commit({"step": step}, tables_at(step % 30))
        sizes.append(log.num_bytes)
    log.close()
    assert max(sizes) < 2 * 3000 + 2000 and min(sizes[100:]) < max(sizes[100:]) - 1000


def test_a_step_that_was_prepared_but_not_committed_is_dropped(tmp_path):
    run(tmp_path, 0, 3)
    log = CommitLog(tmp_path)
    log._prepares.append(log._meta(tables_at(4), full=False), delta(tables_at(4), tables_at(3)))
    log.close()
    assert holds(read_commits(tmp_path)[0], 3)
    assert len(read(tmp_path / "prepare-0.log")) == 5, "looking changes nothing"
    assert holds(_opened(tmp_path)[0], 3)
    assert len(read(tmp_path / "prepare-0.log")) == 4
    run(tmp_path, 4, 5)
    assert holds(_opened(tmp_path)[0], 5)


def test_the_first_step_prepared_but_not_committed_is_dropped(tmp_path):
    log = CommitLog(tmp_path)
    log._prepares.append(log._meta(tables_at(9), full=True), delta(tables_at(9), None))
    log.close()
    assert _opened(tmp_path) == (None, None)
    run(tmp_path, 0, 1)
    assert holds(_opened(tmp_path)[0], 1)


@pytest.mark.parametrize("lost", [1, 2, 9])
def test_a_commit_whose_prepare_is_gone_is_refused(tmp_path, lost):
    run(tmp_path, 0, 3)
    records = read(tmp_path / "prepare-0.log")
    (tmp_path / "prepare-0.log").unlink()
    journal = Journal(tmp_path / "prepare-0.log")
    journal.replace(records[: max(0, len(records) - lost)])
    journal.close()
    for look in (read_commits, CommitLog):
        with pytest.raises(ResumeError, match=r"prepare-0.log lacks the record of committed step 3: resume from"):
            look(tmp_path)


def test_a_log_cut_off_anywhere_gives_the_step_that_is_whole(tmp_path):
    """At every byte: the commits' log decides, and the prepares' log is ahead of it."""
    run(tmp_path / "log", 0, 3)
    whole = (tmp_path / "log" / "commits.log").read_bytes()
    ends = [int(n) for n in np.cumsum([0, *_lengths(whole)])]
    for end in range(0, len(whole) + 1, 5):
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        shutil.copytree(tmp_path / "log", tmp_path / "copy")
        (tmp_path / "copy" / "commits.log").write_bytes(whole[:end])
        last, previous = _opened(tmp_path / "copy")
        expected = sum(end >= e for e in ends) - 2
        assert (last is None) if expected < 0 else holds(last, expected), end
        assert (previous is None) if expected < 1 else holds(previous, expected - 1)


def _lengths(data: bytes) -> list[int]:
    starts = parse(data)[1]
    return [b - a for a, b in itertools.pairwise(starts)]


@pytest.mark.parametrize("name", ["prepare-0.log", "commits.log"])
def test_damage_before_the_end_is_refused(tmp_path, name):
    run(tmp_path, 0, 3)
    data = bytearray((tmp_path / name).read_bytes())
    data[len(data) // 3] ^= 4
    (tmp_path / name).write_bytes(data)
    for look in (read_commits, CommitLog):
        with pytest.raises(StoreError, match=f"damaged at offset.*{name}"):
            look(tmp_path)
    assert (tmp_path / name).read_bytes() == data


def test_looking_does_not_disturb_the_owner(tmp_path):
    """Another process looks at any moment of a run, also between the two records of a step."""
    log = CommitLog(tmp_path, compact_bytes=700)
    append = log._commits.append

    def looked_at(meta, arrays=None):
        found = read_commits(tmp_path)[0]
        assert found is None or holds(found, meta["step"] - 1)
        return append(meta, arrays)

    log._commits.append = looked_at  # type: ignore[method-assign]
    for step in range(12):
        log.commit({"step": step}, tables_at(step))
        assert holds(read_commits(tmp_path)[0], step)
    log.close()
    assert holds(_opened(tmp_path)[0], 11)


@pytest.mark.parametrize("num_processes", [2, 3])
def test_processes_that_are_killed_agree_on_the_last_step(tmp_path, num_processes):
    """Real processes, one of which dies at any of its calls: before its record, between the two, in a compaction."""
    chance, durable, lives, killed = random.Random(num_processes), -1, 0, 0
    while durable < 11:
        victim = chance.randrange(num_processes)
        kills = {victim: chance.randint(1, 30)} if lives < 14 else {}
        said = group.run_together(tmp_path, num_processes, 12, kills)
        opened = {value for lines in said for what, value in lines if what == "opened"}
        done = [value for lines in said for what, value in lines if what == "done"]
        assert len({last for last, _, _ in opened}) <= 1, (lives, said)
        for last, before, whole in opened:
            assert whole and last >= durable, (lives, last, durable)
            # Once pages of a later step were written, the step before the last may be gone.
            assert before in (last - 1, None)
            durable = last
        durable = max([durable, *done])
        killed += not all(lines[-1:] == [("end", None)] for lines in said)
        lives += 1
    assert killed >= 8
    for process in range(num_processes):
        last, _ = read_commits(tmp_path, process=process)
        assert last is not None and last.meta["step"] == 11
        assert same(last.tables, tables_at(11, process))


def test_a_step_that_only_some_processes_have_prepared_is_not_committed(tmp_path):
    group.run_together(tmp_path, 2, 3, {})
    log = CommitLog(tmp_path, process=1, peers=_Gone(1))
    with pytest.raises(ConnectionError):
        log.commit({"step": 3}, tables_at(3, 1))
    log.close()
    assert read(tmp_path / "prepare-1.log")[-1].sequence == 4, "three steps, and the one that only it has prepared"
    said = group.run_together(tmp_path, 2, 4, {})
    assert [lines[0] for lines in said] == [("opened", (2, 1, True))] * 2


class _Gone:
    """Peers that answer a number of times."""

    def __init__(self, answers):
        self._answers = answers

    def gather(self, value):
        self._answers -= 1
        if self._answers < 0:
            raise ConnectionError("gone")
        return [value, value]
