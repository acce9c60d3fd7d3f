"""In which order, and in how many requests, the queue reaches the kernel."""
# ruff: noqa: SIM117 - nested `with`s show what is injected around what

import errno
import statistics
import time

import pytest

import aio_ffi
from aio_ffi import _testing
from tests.aio_ffi.conftest import fill

BLOCK = 1 << 16


def test_reads_go_first(engine, arena, path):
    path.write_bytes(b"x" * BLOCK * 8)
    _testing.start_trace(engine)
    with engine.open(path) as file:
        with _testing.closed_gate(engine, "submit"):
            handles = []
            for i in range(4):
                handles.append(engine.write(file, i * BLOCK, arena.array(i * BLOCK, BLOCK)))
                handles.append(engine.read(file, (4 + i) * BLOCK, arena.array((4 + i) * BLOCK, BLOCK)))
        aio_ffi.wait_all(handles)
    pieces = _testing.trace(engine)
    assert [piece.kind for piece in pieces] == ["read"] * 4 + ["write"] * 4
    for half in (pieces[:4], pieces[4:]):
        assert [piece.offset for piece in half] == sorted(piece.offset for piece in half)


def test_pieces_spread_over_rings(make_engine, arena, path):
    engine = make_engine(thread_count=3, queue_depth=8)
    _testing.start_trace(engine)
    with engine.open(path) as file:
        if not file.direct:
            pytest.skip(file.reason)
        with _testing.closed_gate(engine, "submit"):
            handle = engine.write(file, 0, fill(arena.array(0, 24 * BLOCK)))
            _testing.wait_at_gate(engine, "submit", count=3)
        handle.wait()
    assert {piece.worker for piece in _testing.trace(engine)} == {0, 1, 2}


def test_depth_bounds_what_is_in_flight(make_engine, arena, path):
    engine = make_engine(queue_depth=4)
    _testing.start_trace(engine)
    with engine.open(path) as file:
        if not file.direct:
            pytest.skip(file.reason)
        with _testing.closed_gate(engine, "complete"):
            handle = engine.write(file, 0, arena.array(0, 16 * BLOCK))
            _testing.wait_at_gate(engine, "complete")
            assert len(_testing.trace(engine)) == 4
        handle.wait()
    assert len(_testing.trace(engine)) == 16


@pytest.mark.parametrize("single", [False, True])
def test_batches(make_engine, arena, path, single):
    engine = make_engine(single_submit=single, queue_depth=16)
    with engine.open(path) as file:
        if not file.direct:
            pytest.skip(file.reason)
        engine.write(file, 0, arena.array(0, 16 * BLOCK)).wait()
    counted = engine.statistics()
    assert counted.num_pieces == 16
    assert counted.num_submits == (16 if single else 1)


def test_without_overlap_a_batch_completes_first(make_engine, arena, path):
    engine = make_engine(overlap_events=False, queue_depth=4)
    written = fill(arena.array(0, 18 * BLOCK + 100))
    with engine.open(path) as file:
        if not file.direct:
            pytest.skip(file.reason)
        engine.write(file, 0, written).wait()
    assert path.read_bytes() == written.tobytes()
    assert engine.statistics().num_submits == 5


def test_a_failed_transfer_is_not_sent_to_its_end(make_engine, arena, path):
    engine = make_engine(queue_depth=2)
    with engine.open(path) as file:
        with _testing.inject(engine, "write", value=-errno.EIO, times=1), pytest.raises(aio_ffi.AioError):
            engine.write(file, 0, arena.array(0, 100 * BLOCK)).wait()
    assert engine.statistics().num_pieces < 100


def test_counters(engine, arena, path):
    with engine.open(path) as file:
        engine.write(file, 0, arena.array(0, 4 * BLOCK)).wait()
        engine.read(file, 0, arena.array(0, BLOCK)).wait()
    counted = engine.statistics()
    assert (counted.bytes_written, counted.bytes_read) == (4 * BLOCK, BLOCK)
    assert (counted.num_writes, counted.num_reads, counted.num_requests) == (1, 1, 2)
    assert counted.in_flight == 0
    assert counted.max_in_flight == 1
    assert 0 < counted.busy_s < 60


def test_submission_is_cheap(make_engine, arena, path):
    """Of 16 MiB: microseconds, not the time of the transfer. The bound is generous: the machine may be busy."""
    engine = make_engine(block_size=1 << 20, queue_depth=32)
    frame = arena.array(0, 16 << 20)
    with engine.open(path, num_bytes=frame.size) as file:
        engine.write(file, 0, frame).wait()
        with _testing.closed_gate(engine, "complete"):
            first, costs, handles = engine.read(file, 0, frame), [], []
            _testing.wait_at_gate(engine, "complete") if file.direct else None
            for _ in range(20):
                start = time.perf_counter()
                handles.append(engine.read(file, 0, frame))
                costs.append(time.perf_counter() - start)
        aio_ffi.wait_all([first, *handles])
    assert statistics.median(costs) < 50e-6


def test_timings_are_on_the_clock_of_python(engine, arena, path):
    """From the submit to the last piece: not to the wait, which comes later."""
    with engine.open(path, num_bytes=4 * BLOCK) as file:
        before = time.monotonic()
        with _testing.closed_gate(engine, "submit"):
            handle = engine.write(file, 0, arena.array(0, 4 * BLOCK))
            for name in ("start_s", "done_s"):
                with pytest.raises(ValueError, match=r"write of 262144 bytes at offset 0 .* is not complete"):
                    getattr(handle, name)
            opened = time.monotonic()
        while not handle.done():
            pass
        after = time.monotonic()
        handle.wait()
        assert before <= handle.start_s <= opened <= handle.done_s <= after
        assert abs(handle.done_s - time.perf_counter()) < 60
        empty = engine.write(file, 0, arena.array(0, 0))
        assert after <= empty.start_s <= empty.done_s
        with _testing.inject(engine, "write", value=-errno.EIO, times=1):
            failed = engine.write(file, 0, arena.array(0, BLOCK))
            with pytest.raises(aio_ffi.AioError):
                failed.wait()
        assert after <= failed.start_s <= failed.done_s
