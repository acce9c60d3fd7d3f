"""Records that are read before their update is asked for: right bits whatever the order, and no frame is lost."""

import errno

import numpy as np
import pytest

import zinf_jax as zinf
from aio_ffi import _testing
from tests.train import blocks
from tests.train.blocks import placed, run
from tests.train.test_memory import everything, trainer
from zinf_jax.stream.ahead import MAX_IN_FLIGHT, ReadAhead
from zinf_jax.stream.chunks import OPTIMIZER, ChunkIO
from zinf_jax.stream.overlap import OverlappedUpdates

SMALL = {"chunk_bytes": 1}  # 4,096 elements: each block has several chunks


def mode(update_overlap="next_forward", **streaming):
    return {"streaming": SMALL | {"update_overlap": update_overlap} | streaming}


@pytest.fixture
def count(monkeypatch):
    """Reads ahead, and frames that were taken as they had been filled."""
    counts = {"read": 0, "taken": 0}
    read_record, take = ChunkIO.read_record, ReadAhead.take

    def counting_read(self, chunk, slot):
        counts["read"] += 1
        return read_record(self, chunk, slot)

    def counting_take(self, chunk):
        found = take(self, chunk)
        counts["taken"] += found is not None
        return found

    monkeypatch.setattr(ChunkIO, "read_record", counting_read)
    monkeypatch.setattr(ReadAhead, "take", counting_take)
    return counts


@pytest.mark.parametrize("num_chunk_frames", [1, 3, 50])
@pytest.mark.parametrize("update_overlap", ["next_forward", "backward"])
def test_what_was_read_ahead_is_used_and_no_bit_changes(count, tmp_path, update_overlap, num_chunk_frames):
    streaming = mode(update_overlap, durability="step", num_chunk_frames=num_chunk_frames)
    got = run(placed("nvme"), streaming, {"gradient_clipping": 1e9}, run_dir=tmp_path, steps=5)
    assert got.bits == run(placed("host"), {"gradient_clipping": 1e9}, steps=5).bits
    assert count["taken"] >= (5 if num_chunk_frames == 50 else 1)
    if num_chunk_frames == 50:  # room for all: each chunk once and a step, at most those that the end gives up
        assert count["read"] <= count["taken"] + 50


@pytest.mark.parametrize("num_chunk_frames", [1, 3, 50])
def test_another_order_than_was_expected(count, monkeypatch, num_chunk_frames):
    """Frames that were filled for later chunks give way."""
    read_in = OverlappedUpdates._read_in
    monkeypatch.setattr(OverlappedUpdates, "_read_in", lambda self, order: read_in(self, list(order)[::-1]))
    got = run(placed("nvme"), mode(num_chunk_frames=num_chunk_frames))
    assert got.bits == run(placed("host")).bits
    assert count["read"] > 0
    if num_chunk_frames < 50:
        assert count["read"] > count["taken"], "some gave way"


def test_what_is_wanted_first_is_read_first():
    """In the order of the next forward's uses, or in that in which backward completes gradients."""
    with trainer(placed("nvme"), mode(num_chunk_frames=9)) as made:
        made.step(blocks.batch())
        updates, plan, found = made.prepare(blocks.batch())._engine.updates, made.plan, []
        for backwards in (False, True):
            made.params()  # nothing is read ahead
            updates.expect(backwards=backwards)
            updates.issue(0)
            found.append(next(iter(made._engine.read_ahead._filled)).page)
    for page, uses in zip(found, (plan.first_uses, plan.last_uses), strict=True):
        assert uses[page] == min(uses[other] for other in plan.chunks_of)
    assert found[0] != found[1]


def test_frames_are_added_unless_their_number_is_given():
    numbers = []
    for streaming in (SMALL, SMALL | {"num_chunk_frames": 4}):
        with trainer(placed("nvme"), {"streaming": streaming}) as made:
            numbers.append(made.prepare(blocks.batch()).plan.num_chunk_frames)
    assert numbers[0] > numbers[1] == 4


def test_steps_that_are_undone_or_skipped(count, tmp_path):
    """Running ahead in vain, and steps without an update, leave what was read valid or read anew."""
    sixteen = {"fp16": {"enabled": True, "initial_scale_power": 22, "hysteresis": 1}, "gradient_clipping": 1e-3}
    expected = run(placed("host"), sixteen, steps=8)
    assert any(expected.skipped) and not all(expected.skipped)
    got = run(placed("nvme"), sixteen, mode("backward", durability="step"), run_dir=tmp_path, steps=8)
    assert got.bits == expected.bits and count["taken"] > 0


def test_frames_are_free_again_when_the_state_is_looked_at():
    with trainer(placed("nvme"), mode(num_chunk_frames=9)) as made:
        for seed in range(2):
            made.step(blocks.batch(seed=seed))
        engine = made._engine
        engine.updates.finish()
        engine.updates.issue(0)
        assert len(engine.read_ahead.slots) <= 9 - MAX_IN_FLIGHT
        made.params()
        assert sorted(engine.read_ahead.slots) == list(range(9))
        frames = 9 * engine.plan.chunk_frame_bytes
        assert made.stats().peak_host_bytes == engine.arena.peak_leased_bytes + frames <= engine.plan.host_bytes
        assert made.step(blocks.batch(seed=2)).step == 3


def test_a_chunk_that_was_written_meanwhile_is_read_anew():
    with trainer(placed("nvme"), mode(num_chunk_frames=9)) as made:
        made.step(blocks.batch())
        made.params()
        engine = made._engine
        chunk = engine.plan.chunks[3]
        engine.read_ahead.begin([chunk])
        assert engine.read_ahead.advance() and not engine.read_ahead.advance()
        size = engine.store.extents[OPTIMIZER].places[engine.store.extents[OPTIMIZER].first[chunk.page]].num_bytes
        engine.store.step += 1
        number = engine.io.number(chunk)
        engine.store.write_chunk(OPTIMIZER, chunk.page, number, np.zeros(size, np.uint8), "a page").wait()
        assert engine.read_ahead.take(chunk) is None
        assert len(engine.read_ahead.slots) == 9


@pytest.mark.parametrize("durability", ["step", "off"])
def test_an_error_surfaces_where_the_record_is_needed(tmp_path, durability):
    """Nothing is trained on it, and the run goes on from its last committed step."""
    made = trainer(placed("nvme"), mode(durability=durability), run_dir=tmp_path)
    with pytest.raises(zinf.StoreError) as caught, made:
        made.step(blocks.batch(seed=0))
        engine = made._engine
        engine.updates.finish()
        if engine.committer is not None:
            engine.committer.wait()
        with _testing.inject(engine.store.files.engines[0], "read", value=-errno.EIO, times=1):
            engine.updates.issue(0)
            assert len(engine.read_ahead.slots) < engine.io.num_frames
            for _, read, _ in engine.read_ahead._filled.values():
                while not read.done():
                    pass
        made.step(blocks.batch(seed=1))
        made.step(blocks.batch(seed=2))
    assert caught.value.errno == errno.EIO and "read of optimizer of page" in str(caught.value)
    if durability == "step":
        with trainer(placed("nvme"), mode(), run_dir=tmp_path, resume="auto") as again:
            first = again.prepare(blocks.batch()).global_step
            assert first in (1, 2)
            for seed in range(first, 3):
                again.step(blocks.batch(seed=seed))
            found = everything(again)
        with trainer(placed("host")) as plain:
            for seed in range(3):
                plain.step(blocks.batch(seed=seed))
            assert everything(plain) == found
