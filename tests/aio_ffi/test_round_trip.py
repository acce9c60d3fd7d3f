"""Any length at any offset from any address comes back, and nothing around it changes."""

import os

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import aio_ffi
from aio_ffi import _testing
from tests.aio_ffi.conftest import KINDS, fill

BLOCK = 1 << 16
LENGTHS = (
    0,
    1,
    2,
    448,
    511,
    512,
    513,
    4095,
    4096,
    4097,
    BLOCK - 1,
    BLOCK,
    BLOCK + 1,
    3 * BLOCK - 1,
    3 * BLOCK + 1,
    512448,
)


@pytest.mark.parametrize("length", LENGTHS)
def test_any_length(engine, arena, path, length):
    """NV01: the tail was refused by the kernel and nobody looked."""
    written, found = fill(arena.array(0, length), length), arena.array(1 << 20, length)
    found[:] = 0
    with engine.open(path) as file:
        engine.write(file, 0, written).wait()
        assert file.num_bytes == length  # padding is never visible
        engine.read(file, 0, found).wait()
    np.testing.assert_array_equal(found, written)
    assert path.read_bytes() == written.tobytes()
    assert engine.statistics().num_fallbacks == 0  # nothing misaligned reached a direct descriptor


def test_28_824_000_bytes(engine, arena, path):
    """NV01's own size."""
    written = fill(arena.array(0, 28_824_000))
    with engine.open(path) as file:
        engine.write(file, 0, written).wait()
    assert np.array_equal(np.fromfile(path, np.uint8), written)


@pytest.mark.parametrize("offset", [0, 4096, 1 << 20])
@pytest.mark.parametrize("length", [1, 100, 4096 + 100])
def test_surroundings_untouched(engine, arena, path, offset, length):
    """NV16: the tail of a write at an offset went to another place."""
    before = fill(arena.array(0, 2 << 20), 1).copy()
    path.write_bytes(before.tobytes())
    with engine.open(path) as file:
        engine.write(file, offset, fill(arena.array(0, length), 2)).wait()
    before[offset : offset + length] = arena.array(0, length)
    assert np.array_equal(np.fromfile(path, np.uint8), before)


@pytest.mark.parametrize("kind", ["libaio", "threads_direct"])
def test_skewed_buffer_is_bounced(make_engine, kind, arena, path):
    """FS01: an address off by one was refused at the write."""
    engine = make_engine(kind)
    written = fill(arena.array(1, 4096))
    with engine.open(path) as file:
        if not file.direct:
            pytest.skip(file.reason)
        engine.write(file, 0, written).wait()
        assert engine.statistics().bounced == 1
        found = arena.array((1 << 20) + 3, 4096)
        engine.read(file, 0, found).wait()
        assert engine.statistics().bounced == 2
        np.testing.assert_array_equal(found, written)
        engine.read(file, 0, arena.array(0, 4096)).wait()
        assert engine.statistics().bounced == 2  # the fast path is not


def test_partial_writes_in_one_page_at_once(engine, arena, path):
    """Neighbours in one block, all in flight together: none undoes the other's bytes."""
    size, step = 4 * 4096, 37
    whole = fill(arena.array(0, size), 3)
    with engine.open(path, num_bytes=size) as file:
        handles = [engine.write(file, at, whole[at : at + step]) for at in range(0, size, step)]
        aio_ffi.wait_all(handles)
    assert path.read_bytes() == whole.tobytes()


def test_ordinary_numpy_memory(engine, path):
    written = fill(np.empty(300_001, np.uint8))
    found = np.zeros_like(written)
    with engine.open(path) as file:
        engine.write(file, 5, written).wait()
        engine.read(file, 5, found).wait()
    assert np.array_equal(found, written)


@hypothesis.given(
    writes=st.lists(st.tuples(st.integers(0, 40_000), st.integers(0, 20_000), st.integers(0, 600)), max_size=6),
    kind=st.sampled_from(KINDS),
    rings=st.integers(1, 3),
)
@hypothesis.settings(max_examples=40, deadline=None)
def test_like_a_bytearray(writes, kind, rings, arena, disk):
    """Sequences of writes of any shape, blocks of one page, compared with a bytearray."""
    path = disk / "property"
    expected = bytearray()
    options = aio_ffi.EngineOptions(engine=kind, block_size=4096, queue_depth=2, thread_count=rings)
    with aio_ffi.Engine(options) as engine, engine.open(path) as file:
        for seed, (offset, length, skew) in enumerate(writes):
            data = fill(arena.array(skew, length), seed)
            engine.write(file, offset, data).wait()
            if length:
                expected.extend(bytes(max(0, offset + length - len(expected))))
                expected[offset : offset + length] = data.tobytes()
        found = arena.array(1 << 20, len(expected))
        engine.read(file, 0, found).wait()
        assert found.tobytes() == bytes(expected)
    assert path.read_bytes() == bytes(expected)
    path.unlink()


@pytest.mark.parametrize("size", [2**31, 2**31 + 4096, 2**32 + 512])
def test_beyond_32_bits(engine, arena, path, size):
    """NV07: a count became negative above 2 GiB. The file is sparse."""
    written, found = fill(arena.array(0, 4096), size % 97), arena.array(4096, 4096)
    found[:] = 0
    with engine.open(path) as file:
        os.truncate(path, size)
        engine.write(file, size - 4096, written).wait()
        assert file.num_bytes == size
        engine.read(file, size - 4096, found).wait()
    np.testing.assert_array_equal(found, written)


@pytest.mark.slow
def test_2_gib_in_one_call(make_engine, path):
    """NV08: one kernel request moves at most 0x7ffff000 bytes; the last page was lost."""
    engine = make_engine(block_size=1 << 30, queue_depth=4)
    # Untouched pages all share the kernel's zero page: the write costs disk, not memory.
    arena = aio_ffi.Arena(2**31, lock=False)
    last = fill(arena.array(2**31 - 4096, 4096)).copy()
    with engine.open(path, num_bytes=2**31) as file:
        engine.write(file, 0, arena.array(0, 2**31)).wait()
        found = arena.array(0, 4096)
        engine.read(file, 2**31 - 4096, found).wait()
    np.testing.assert_array_equal(found, last)


def test_request_is_split_to_blocks(make_engine, arena, path, kind):
    engine = make_engine(kind, block_size=8192)
    _testing.start_trace(engine)
    with engine.open(path) as file:
        engine.write(file, 0, fill(arena.array(0, 5 * 8192 + 100))).wait()
    pieces = [piece.num_bytes for piece in _testing.trace(engine)]
    assert max(pieces) <= 8192
    assert sum(pieces) == 5 * 8192 + 100


def test_reads_past_the_end_raise(engine, arena, path):
    path.write_bytes(b"x" * 5000)
    with engine.open(path) as file:
        for offset, length, done in ((0, 5001, 5000), (5000, 1, 0), (8192, 4096, 0), (0, 8192, 5000)):
            with pytest.raises(aio_ffi.AioError, match="end of file") as caught:
                engine.read(file, offset, arena.array(0, length)).wait()
            assert (caught.value.offset, caught.value.length, caught.value.done) == (offset, length, done)
        engine.read(file, 0, arena.array(0, 5000)).wait()  # and the engine goes on


def test_what_is_not_an_array_is_refused(engine, arena, path):
    with engine.open(path) as file:
        frozen = arena.array(0, 100)
        frozen.flags.writeable = False
        with pytest.raises(ValueError, match="writable"):
            engine.read(file, 0, frozen)
        with pytest.raises(ValueError, match="contiguous"):
            engine.write(file, 0, arena.array(0, 100)[::2])
        with pytest.raises(ValueError, match="negative"):
            engine.write(file, -1, frozen)
        engine.write(file, 0, frozen).wait()
    with pytest.raises(ValueError, match="closed"):
        engine.write(file, 0, frozen)
