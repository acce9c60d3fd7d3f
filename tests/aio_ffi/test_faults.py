"""Every failure that the kernel can answer with, met by the real engine."""
# ruff: noqa: SIM117 - nested `with`s show what is injected around what

import errno

import numpy as np
import pytest

import aio_ffi
from aio_ffi import _testing
from tests.aio_ffi.conftest import fill

BLOCK = 1 << 16
SIZE = 16 * BLOCK
LOST = (errno.ENOSPC, errno.EFBIG, errno.EIO, errno.EDQUOT)


@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("code", LOST)
def test_errors_name_everything(engine, arena, path, operation, code):
    """NV05, IO01: a negative result was taken for success. The queue stays usable, a retry succeeds."""
    data = fill(arena.array(0, SIZE))
    with engine.open(path, num_bytes=2 * SIZE) as file:
        engine.write(file, SIZE, data).wait()
        start = engine.read if operation == "read" else engine.write
        with _testing.inject(engine, operation, value=-code, after=3, times=1):
            with pytest.raises(aio_ffi.AioError) as caught:
                start(file, SIZE, data).wait()
        error = caught.value
        assert (error.errno, error.operation, error.filename) == (code, operation, str(path))
        assert (error.offset, error.length) == (SIZE, SIZE)
        assert error.done <= SIZE - BLOCK
        for part in (errno.errorcode[code], str(path), str(SIZE), "bytes were moved", operation):
            assert part in str(error)
        start(file, SIZE, data).wait()
    assert engine.statistics().num_failed == 1


@pytest.mark.parametrize("cap", [512, 4096, 5000, BLOCK - 4096, BLOCK - 1])
@pytest.mark.parametrize("skew", [0, 1])
def test_short_transfers_are_continued(engine, arena, path, cap, skew):
    """NV08, IO01: a positive short count was taken for success."""
    written, found = fill(arena.array(skew, SIZE)), arena.array((4 << 20) + skew, SIZE)
    found[:] = 0
    with engine.open(path) as file:
        with _testing.inject(engine, "write", value=cap), _testing.inject(engine, "read", value=cap):
            engine.write(file, 0, written).wait()
            engine.read(file, 0, found).wait()
    np.testing.assert_array_equal(found, written)
    assert path.read_bytes() == written.tobytes()
    assert engine.statistics().num_short > 0


def test_a_refused_direct_request_goes_through_the_page_cache(make_engine, arena, path):
    """EINVAL on an aligned request: once is worked around and counted; where the page cache fails too, it is raised."""
    engine = make_engine()
    written = fill(arena.array(0, SIZE))
    with engine.open(path) as file:
        if not file.direct:
            pytest.skip(file.reason)
        with _testing.inject(engine, "write", value=-errno.EINVAL, times=1):
            engine.write(file, 0, written).wait()
        assert path.read_bytes() == written.tobytes()
        assert engine.statistics().num_fallbacks == 1
        with _testing.inject(engine, "write", value=-errno.EINVAL), pytest.raises(aio_ffi.AioError) as caught:
            engine.write(file, 0, written).wait()
        assert caught.value.errno == errno.EINVAL


def test_no_progress_is_an_error(engine, arena, path):
    with engine.open(path, num_bytes=SIZE) as file:
        with _testing.inject(engine, "write", value=0, after=2), pytest.raises(aio_ffi.AioError) as caught:
            engine.write(file, 0, fill(arena.array(0, SIZE))).wait()
        assert caught.value.errno == errno.EIO
        with _testing.inject(engine, "read", value=0), pytest.raises(aio_ffi.AioError, match="end of file"):
            engine.read(file, 0, arena.array(0, SIZE)).wait()


@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN])
def test_interrupted_transfers_are_made_again(engine, arena, path, code):
    written = fill(arena.array(0, SIZE))
    with engine.open(path) as file:
        with _testing.inject(engine, "write", value=-code, after=1, times=5):
            engine.write(file, 0, written).wait()
    assert path.read_bytes() == written.tobytes()
    assert engine.statistics().num_retries == 5


def test_an_endless_eagain_ends(engine, arena, path):
    with engine.open(path) as file, _testing.inject(engine, "write", value=-errno.EAGAIN):
        with pytest.raises(aio_ffi.AioError) as caught:
            engine.write(file, 0, arena.array(0, 4096)).wait()
    assert caught.value.errno == errno.EAGAIN


@pytest.mark.parametrize("rings", [1, 3])
def test_partial_submission_and_reverse_completion(make_engine, arena, path, rings):
    """IO03: io_submit takes one of n, completions come back in another order."""
    engine = make_engine(thread_count=rings)
    written, found = fill(arena.array(0, SIZE)), arena.array(4 << 20, SIZE)
    found[:] = 0
    with engine.open(path) as file:
        with _testing.inject(engine, "accept", value=1), _testing.inject(engine, "reverse"):
            engine.write(file, 0, written).wait()
            engine.read(file, 0, found).wait()
    np.testing.assert_array_equal(found, written)
    assert engine.statistics().num_submits >= 32


@pytest.mark.parametrize(("after", "times"), [(0, 1), (1, 3), (0, 1 << 40)])
def test_submission_finds_the_queue_full(make_engine, arena, path, after, times):
    """EAGAIN with and without others in flight, once and for ever."""
    engine = make_engine()
    written, found = fill(arena.array(0, SIZE)), arena.array(4 << 20, SIZE)
    found[:] = 0
    with engine.open(path) as file:
        with (
            _testing.inject(engine, "accept", value=2),
            _testing.inject(engine, "submit", value=-errno.EAGAIN, after=after, times=times),
        ):
            engine.write(file, 0, written).wait()
            engine.read(file, 0, found).wait()
    np.testing.assert_array_equal(found, written)
    assert engine.statistics().num_eagain >= min(times, 3)


def test_submission_takes_nothing_or_is_interrupted(make_engine, arena, path):
    engine = make_engine()
    written = fill(arena.array(0, SIZE))
    with engine.open(path) as file:
        for value in (0, -errno.EINTR):
            with _testing.inject(engine, "submit", value=value, after=0, times=3):
                engine.write(file, 0, written).wait()
            assert path.read_bytes() == written.tobytes()


def test_submission_refuses_one_request(make_engine, arena, path):
    engine = make_engine()
    data = fill(arena.array(0, SIZE))
    with engine.open(path) as file:
        with _testing.inject(engine, "submit", value=-errno.EBADF, times=1), pytest.raises(aio_ffi.AioError) as caught:
            engine.write(file, 0, data).wait()
        assert caught.value.errno == errno.EBADF
        engine.write(file, 0, data).wait()


def test_getevents_is_interrupted(make_engine, arena, path):
    engine = make_engine()
    with engine.open(path) as file, _testing.inject(engine, "getevents", value=-errno.EINTR, times=20):
        engine.write(file, 0, fill(arena.array(0, SIZE))).wait()


def test_a_broken_ring_fails_its_requests_and_goes_on_blocking(make_engine, arena, path):
    engine = make_engine()
    data = fill(arena.array(0, SIZE))
    with engine.open(path) as file:
        with _testing.inject(engine, "getevents", value=-errno.EINVAL, times=1):
            with pytest.raises(aio_ffi.AioError) as caught:
                engine.write(file, 0, data).wait()
            assert caught.value.errno == errno.EINVAL
        engine.write(file, 0, data).wait()
        assert path.read_bytes() == data.tobytes()


def test_setup_gets_a_smaller_depth(make_engine):
    """aio-max-nr nearly used up: half the depth, and half again."""
    with _testing.failing_setup(errno.EAGAIN, times=2):
        engine = make_engine(queue_depth=8)
    assert engine.name == "libaio"
    assert engine.statistics().queue_depth == 2


@pytest.mark.parametrize(
    ("code", "remedy"), [(errno.EAGAIN, "aio-max-nr"), (errno.ENOSYS, "seccomp"), (errno.EPERM, "seccomp")]
)
def test_setup_fails(make_engine, arena, path, code, remedy):
    with _testing.failing_setup(code):
        with pytest.raises(aio_ffi.AioError, match=remedy):
            make_engine("libaio")
        engine = make_engine("auto")
        found = aio_ffi.probe(path.parent)
    assert engine.name == found.engine == "threads_direct"
    assert remedy in engine.reason
    assert remedy in found.reason
    with engine.open(path) as file:
        written = fill(arena.array(0, SIZE))
        engine.write(file, 0, written).wait()
    assert path.read_bytes() == written.tobytes()


def test_a_failed_sync_is_final(engine, arena, path):
    with engine.open(path) as file:
        engine.write(file, 0, arena.array(0, 4096)).wait()
        with _testing.inject(engine, "sync", value=-errno.EIO, times=1):
            with pytest.raises(aio_ffi.AioError, match="fdatasync") as caught:
                file.sync()
        assert (caught.value.errno, caught.value.operation) == (errno.EIO, "sync")
        with pytest.raises(aio_ffi.AioError, match="fdatasync"):
            file.sync()  # the kernel would say yes now


def test_a_slow_drive(engine, arena, path):
    """Each piece is held back, so a transfer lasts at least that long, and its bytes are the same."""
    written, found = fill(arena.array(0, 4 * BLOCK)), arena.array(4 << 20, 4 * BLOCK)
    with engine.open(path) as file:
        engine.write(file, 0, written).wait()
        with _testing.inject(engine, "delay", value=30_000, after=1, times=2):
            handles = [engine.read(file, i * BLOCK, found[i * BLOCK : (i + 1) * BLOCK]) for i in range(4)]
            aio_ffi.wait_all(handles)
        # A ring's completions queue up behind one that is held back; the threads lane holds back two.
        assert sum(handle.done_s - handle.start_s >= 0.03 for handle in handles) >= 2
        assert max(handle.done_s - handle.start_s for handle in handles) < 30
    np.testing.assert_array_equal(found, written)


def test_a_delay_fires_by_number(engine, arena, path):
    with engine.open(path) as file:
        with _testing.inject(engine, "delay", value=10_000_000, after=1, times=1):
            handle = engine.write(file, 0, arena.array(0, BLOCK))
            handle.wait()
    assert handle.done_s - handle.start_s < 10


@pytest.mark.parametrize("skew", [0, 1])
@pytest.mark.parametrize("bit", [0, 12_345, BLOCK * 8 + 3])
def test_a_drive_that_returns_a_wrong_bit(engine, arena, path, skew, bit):
    """Of one piece; nothing but the checksum tells. Writes do not count as calls of the site."""
    written, found = fill(arena.array(0, 4 * BLOCK)), arena.array((4 << 20) + skew, 4 * BLOCK)
    with engine.open(path) as file:
        with _testing.inject(engine, "flip", value=bit, after=2, times=1):
            engine.write(file, 0, written).wait()
            handle = engine.read(file, 0, found, seed=0)
            handle.wait()
        wrong = np.flatnonzero(found != written)
        assert wrong.size == 1
        assert wrong[0] % BLOCK == bit % (BLOCK * 8) // 8
        assert found[wrong[0]] ^ written[wrong[0]] == 1 << bit % 8
        assert handle.checksum == aio_ffi.crc32c(found) != aio_ffi.crc32c(written)
        engine.read(file, 0, found).wait()
    np.testing.assert_array_equal(found, written)


def test_wait_all_waits_for_all(engine, arena, path):
    with engine.open(path, num_bytes=SIZE) as file:
        with _testing.inject(engine, "write", value=-errno.EIO, times=2):
            handles = [engine.write(file, i * BLOCK, arena.array(i * BLOCK, BLOCK)) for i in range(8)]
            with pytest.raises(aio_ffi.AioError) as caught:
                aio_ffi.wait_all(handles)
        assert all(handle.done() for handle in handles)
        assert len(caught.value.__notes__) == 1
