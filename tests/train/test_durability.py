"""Steps that are kept, damage that is found, and drives that share the pages."""

import errno
import json

import jax
import pytest

import aio_ffi
import zinf_jax as zinf
from aio_ffi import _testing
from tests.train import blocks
from tests.train.blocks import config, placed, run
from tests.train.exact import everything
from zinf_jax.train import setup

NVME = placed("nvme")


def trainer(*parts, **kwargs):
    params = zinf.lazy(blocks.init, jax.random.key(0))
    return zinf.Trainer(blocks.loss, params, zinf.optim.adamw(1e-2, weight_decay=0.1), config(NVME, *parts), **kwargs)


def advance(made, steps):
    return run(trainer=made, steps=steps)


def step_on(made):
    """One step, whose update is left owed: `advance` looks at the state and so finishes it."""
    made.step(blocks.batch(16, seed=made.global_step))


def state_after(steps):
    with trainer() as made:
        advance(made, steps)
        return everything(made)


# --- steps that are kept in place -----------------------------------------------------------------------------------


def test_a_kept_step_costs_no_copy_and_can_be_gone_back_to(tmp_path):
    with trainer(run_dir=tmp_path) as made:
        advance(made, 2)
        made.params()  # everything of step 2 is written
        before = made._engine.store.statistics().bytes_written
        saved = made.save()
        assert made._engine.store.statistics().bytes_written == before
        advance(made, 3)
        assert made.retained() == [2]
    with trainer(run_dir=tmp_path, resume="auto") as made:
        made.prepare(blocks.batch())
        assert made.global_step == 5 and everything(made) == state_after(5)
    with trainer(run_dir=tmp_path, resume=saved) as made:
        made.prepare(blocks.batch())
        assert made.global_step == 2 and everything(made) == state_after(2)
        advance(made, 2)
    with trainer(run_dir=tmp_path, resume="auto") as made:
        made.prepare(blocks.batch())
        assert made.global_step == 4 and everything(made) == state_after(4)


def test_keeping_a_step_waits_for_nothing(tmp_path):
    """Its update is owed when `save` returns; the next steps make it durable and kept, or `close` does."""
    with trainer(run_dir=tmp_path) as made:
        kept = []
        for step in (1, 2, 3):
            step_on(made)
            assert not made._engine.updates.complete
            kept.append(made.save())
            assert not made._engine.updates.complete, "nothing was waited for"
            assert made.retained() == [*range(1, step + 1)]
            assert not kept[-1].exists()
        made.params()  # finishes step 3's update: it could only begin when step 2 was durable
        assert kept[0].exists() and kept[1].exists()
    assert kept[2].exists()
    for step, path in enumerate(kept, 1):
        with trainer(run_dir=tmp_path / f"from_{step}", resume=path) as made:
            made.prepare(blocks.batch())
            assert made.global_step == step and everything(made) == state_after(step)


def test_a_step_is_given_up_only_when_the_one_that_replaces_it_is_durable(tmp_path):
    with trainer(run_dir=tmp_path) as made:
        step_on(made)
        first = made.save()
        step_on(made)
        made.params()
        made._run.wait(made._engine)
        assert first.exists()
        step_on(made)
        second = made.save()
        made.release(1)
        assert made.retained() == [3]
        assert first.exists() and not second.exists(), "a crash now must leave one of them"
        step_on(made)
        made.params()
        assert second.exists() and not first.exists()
        step_on(made)
        made.save(replaces=[3])
        assert made.retained() == [5]
        made.release(5)  # before it was kept: nothing replaces step 3
        step_on(made)
        assert made.retained() == [3]
        made.save()
        made.release(3)
        made.release(6)  # that step 3 was given up holds
        assert made.retained() == []
        step_on(made)
    assert not list((tmp_path / "retained").iterdir())


def test_a_step_between_commits_can_be_kept(tmp_path):
    with trainer({"streaming": {"durability": "every_4"}}, run_dir=tmp_path) as made:
        advance(made, 2)
        kept = made.save()
        assert kept.exists()
        advance(made, 3)
    with trainer(run_dir=tmp_path / "other", resume=kept) as made:
        made.prepare(blocks.batch())
        assert everything(made) == state_after(2)


def test_a_kept_step_of_another_run_is_only_read(tmp_path):
    with trainer(run_dir=tmp_path / "a") as made:
        advance(made, 2)
        saved = made.save()
        advance(made, 2)
    with trainer(run_dir=tmp_path / "b", resume=saved) as made:
        made.prepare(blocks.batch())
        assert everything(made) == state_after(2)
        advance(made, 1)
    with trainer(run_dir=tmp_path / "a", resume="auto") as made:
        made.prepare(blocks.batch())
        assert everything(made) == state_after(4)


def test_room_for_kept_steps_is_made_and_used_again(tmp_path):
    with trainer({"streaming": {"num_retained": 1}}, run_dir=tmp_path) as made:
        size = {}
        for step in range(1, 6):
            advance(made, 1)
            made.save(replaces=made.retained())
            size[step] = sum(file.stat().st_size for file in (tmp_path / "pages").glob("*.pages"))
        assert made.retained() == [5]
        assert len(set(size.values())) == 1, "one kept step at a time needs the room of one"
    with trainer({"streaming": {"num_retained": 1}}, run_dir=tmp_path, resume="auto") as made:
        made.prepare(blocks.batch())
        room = sum(file.stat().st_size for file in (tmp_path / "pages").glob("*.pages"))
        assert room == size[5], "a resume needs no more"
        advance(made, 1)
        made.save()
        assert made.retained() == [5, 6]
        assert sum(file.stat().st_size for file in (tmp_path / "pages").glob("*.pages")) > size[5]
        made.release(5)
        with pytest.raises(zinf.ConfigError, match=r"there are \[6\]"):
            made.release(5)


def test_a_step_cannot_be_kept_in_place_without_durability(tmp_path):
    with trainer({"streaming": {"durability": "off"}}, run_dir=tmp_path) as made:
        advance(made, 1)
        with pytest.raises(zinf.ConfigError, match="durability"):
            made.save()


# --- damage ---------------------------------------------------------------------------------------------------------


def place_of(made, kind, index, byte=17):
    """(file, offset) of a byte of a chunk's newest version."""
    store = made._engine.store
    place, bank = store.extents[kind].places[index], int(store.versions.working[kind].bank[index])
    path, offset = store.files.position(kind, place, bank)
    return path, offset + byte


def damage(where):
    """One bit changes on the disk."""
    path, offset = where
    with open(path, "r+b") as file:
        file.seek(offset)
        value = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([value ^ 4]))


@pytest.mark.parametrize("kind", ["weights", "optimizer"])
def test_a_flipped_bit_is_named_and_never_trained_on(tmp_path, kind):
    with trainer(run_dir=tmp_path) as made:
        advance(made, 2)
        everything(made)
        where = place_of(made, kind, 1)
    damage(where)
    with trainer(run_dir=tmp_path, resume="auto") as made, pytest.raises(zinf.CorruptionError) as caught:
        for step in range(2):
            made.step(blocks.batch(seed=step))
    for part in (kind, "of page", "at offset", where[0], "step 2", "checksum", "expected", "integrity.fallback"):
        assert part in str(caught.value), str(caught.value)


@pytest.mark.parametrize("kept", [True, False])
def test_a_resume_goes_back_to_the_newest_step_that_is_whole(tmp_path, kept):
    with trainer(run_dir=tmp_path) as made:
        advance(made, 1)
        if kept:
            made.save()
        advance(made, 2)
        everything(made)
        where = place_of(made, "optimizer", 0)
    damage(where)
    with (
        pytest.warns(UserWarning, match="step 3 of .* is damaged: going on from step 2"),
        trainer({"integrity": {"fallback": True}}, run_dir=tmp_path, resume="auto") as made,
    ):
        made.prepare(blocks.batch())
        assert made.global_step == 2 and everything(made) == state_after(2)
        advance(made, 2)
    with trainer(run_dir=tmp_path, resume="auto") as made:
        made.prepare(blocks.batch())
        assert made.global_step == 4 and everything(made) == state_after(4)


def test_without_any_whole_step_a_resume_says_so(tmp_path):
    with trainer(run_dir=tmp_path) as made:
        advance(made, 2)
        everything(made)
        store = made._engine.store
        files = [store.files.position("optimizer", store.extents["optimizer"].places[0], bank) for bank in (0, 1)]
    for path, offset in files:
        damage((path, offset + 5))
    with (
        trainer({"integrity": {"fallback": True}}, run_dir=tmp_path, resume="auto") as made,
        pytest.raises(zinf.CorruptionError, match="no step of this run is whole"),
    ):
        made.prepare(blocks.batch())


# --- several drives -------------------------------------------------------------------------------------------------


def drives(tmp_path, count=2):
    paths = [tmp_path / f"drive_{i}" for i in range(count)]
    for path in paths:
        path.mkdir()
    return {"nvme_path": [str(path) for path in paths]}


def test_pages_are_dealt_out_by_bandwidth_and_found_again(tmp_path, monkeypatch):
    """One folder is four times as slow: it gets a fifth of the bytes, and the bits are the same."""
    real, rates = aio_ffi.measure, {"drive_0": 4.0, "drive_1": 1.0}

    def throttled(path, **kwargs):
        found = real(path, num_bytes=1 << 20, options=kwargs.get("options"))
        rate = rates[path.parent.name]
        return setup.dataclasses.replace(found, read_gbps=rate, write_gbps=rate)

    monkeypatch.setattr(aio_ffi, "measure", throttled)
    small = {"streaming": {"chunk_bytes": 1}}
    with trainer(small, drives(tmp_path), run_dir=tmp_path / "run") as made:
        advance(made, 2)
        bank = made._engine.store.extents["optimizer"].bank_bytes
        assert 3 < bank[0] / bank[1] < 6  # whole chunks, some 20 of them
    monkeypatch.setattr(aio_ffi, "measure", lambda *a, **k: pytest.fail("measured again"))
    with trainer(small, {"nvme_path": [str(tmp_path / f"drive_{i}") for i in (0, 1)]},
                 run_dir=tmp_path / "run", resume="auto") as made:  # fmt: skip
        made.prepare(blocks.batch())
        advance(made, 1)
        assert everything(made) == state_after(3)


def test_a_failing_drive_is_named(tmp_path):
    with trainer({"streaming": {"chunk_bytes": 1}}, drives(tmp_path), run_dir=tmp_path / "run") as made:
        advance(made, 1)
        everything(made)
        engine = made._engine.store.files.engines[1]
        with _testing.inject(engine, "read", value=-errno.EIO), pytest.raises(zinf.StoreError) as caught:
            made.step(blocks.batch())
        assert "drive_1" in str(caught.value) and caught.value.errno == errno.EIO


def test_a_slow_drive_changes_no_bit(tmp_path):
    with trainer({"streaming": {"chunk_bytes": 1}}, drives(tmp_path, 3), run_dir=tmp_path / "run") as made:
        made.prepare(blocks.batch())
        with _testing.inject(made._engine.store.files.engines[2], "delay", value=2000):
            advance(made, 2)
            assert everything(made) == state_after(2)


# --- the log --------------------------------------------------------------------------------------------------------


def test_the_log_stays_small(tmp_path, monkeypatch):
    from zinf_jax.tier import commits

    monkeypatch.setattr(commits, "COMPACT_BYTES", 20_000)
    with trainer(run_dir=tmp_path) as made:
        sizes = []
        for _ in range(40):
            advance(made, 1)
            sizes.append(sum(file.stat().st_size for file in (tmp_path / "commits").glob("*.log")))
    assert max(sizes) < 60_000
    with trainer(run_dir=tmp_path, resume="auto") as made:
        made.prepare(blocks.batch())
        assert made.global_step == 40


def test_a_run_directory_holds_its_commits_as_json_and_bytes(tmp_path):
    with trainer(run_dir=tmp_path) as made:
        made.user_state = {"next": 1}
        advance(made, 1)
    assert json.loads((tmp_path / "run.json").read_text())["status"] == "live"
    assert {file.name for file in (tmp_path / "commits").iterdir()} == {"commits.log", "prepare-0.log"}
    assert all(file.stat().st_mode & 0o077 == 0 for file in tmp_path.rglob("*.log"))
