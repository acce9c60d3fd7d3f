"""AL01, AL06: a frame is free only when its last reader is done. Every frame is poisoned as soon as it is free.

A reader that is late, or a handle that outlives its frame, then sees NaN, and no bit of the result would be right.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.train import blocks
from tests.train.blocks import placed, run
from tests.train.test_memory import trainer
from zinf_jax.stream.chunks import ChunkIO
from zinf_jax.tier import FrameArena, FrameSpan

POISON = 0xFF  # NaN in every floating dtype


@pytest.fixture
def poisoned(monkeypatch):
    """Frames are overwritten at release, and chunk frames before each reuse."""
    counts = {"frames": 0, "chunks": 0, "ahead": 0}
    release, start, read_record = FrameArena.release, ChunkIO.start, ChunkIO.read_record

    def poisoning_release(self, span):
        release(self, span)
        self.view(span)[:] = POISON
        counts["frames"] += 1

    def poison(self, slot):
        size = self._plan.chunk_frame_bytes
        if size:
            self._arena.view(FrameSpan(self._plan.update_offset + slot * size, size))[:] = POISON

    def poisoning_start(self, chunk, slot, **kwargs):
        if kwargs.get("record") is None:
            poison(self, slot)
        counts["chunks"] += 1
        return start(self, chunk, slot, **kwargs)

    def poisoning_read_record(self, chunk, slot):
        poison(self, slot)
        counts["ahead"] += 1
        return read_record(self, chunk, slot)

    monkeypatch.setattr(FrameArena, "release", poisoning_release)
    monkeypatch.setattr(ChunkIO, "start", poisoning_start)
    monkeypatch.setattr(ChunkIO, "read_record", poisoning_read_record)
    return counts


@pytest.mark.parametrize("lookahead", [0, 3])
@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_no_reader_is_late(poisoned, lookahead, max_in_flight):
    streaming = {"lookahead": lookahead, "max_in_flight": max_in_flight, "chunk_bytes": 1}
    got = run(placed("nvme", residuals="nvme"), {"streaming": streaming, "gradient_accumulation_steps": 2})
    counted = dict(poisoned)
    assert counted["frames"] > 50 and counted["chunks"] > 50 and counted["ahead"] > 5
    assert np.isfinite(got.losses).all()
    assert got.bits == run(placed("device"), {"gradient_accumulation_steps": 2}).bits


@pytest.mark.parametrize("num_chunk_frames", [1, 2, 3])
@pytest.mark.parametrize("engine", ["libaio", "threads_buffered"])
def test_al06_a_chunk_frame_is_free_when_its_write_is_done(poisoned, num_chunk_frames, engine):
    """Writes in blocks of 4 KiB, one at a time, are slow enough to be overtaken."""
    streaming = {"num_chunk_frames": num_chunk_frames, "chunk_bytes": 1}
    aio = {"engine": engine, "block_size": 4096, "queue_depth": 1}
    got = run(placed("nvme"), {"streaming": streaming, "aio": aio}, {"bf16": {"enabled": True}})
    assert got.bits == run(placed("host"), {"bf16": {"enabled": True}}).bits


def test_evaluation_and_its_results_do_not_live_in_frames(poisoned):
    with trainer(placed("nvme")) as made:
        made.prepare(blocks.batch())
        found = made.evaluate(lambda p, b: [jnp.sum(p["embedding"]), p["block_3"]["up"]], blocks.batch())
        made.step(blocks.batch())
        assert np.isfinite(found[0]) and np.isfinite(found[1]).all()


@pytest.mark.parametrize("weights", ["host", "device"])
def test_al08_resident_pages_are_pinned_host_arrays_over_the_arena(weights):
    """Memory kind and address after each step: state never drifts to another place."""
    with trainer({"placement": {"weights": weights, "optimizer": "host", "gradients": "host"}}) as made:
        made.prepare(blocks.batch())
        engine = made._engine
        for seed in range(2):
            made.step(blocks.batch(seed=seed))
            for page in engine.layout.pages:
                array = engine.pager.pinned_host(page.index)
                frame = engine.pager.resident_frame(page.index)
                assert array.sharding.memory_kind == "pinned_host"
                if engine.topology.aliases:
                    assert array.addressable_data(0).unsafe_buffer_pointer() == frame.ctypes.data
                np.testing.assert_array_equal(np.asarray(array).reshape(-1), frame.view(page.dtype))
                del array
