"""Who keeps what alive, and what happens to errors that nobody waits for."""
# ruff: noqa: SIM117 - nested `with`s show what is injected around what

import errno
import gc
import os
import signal
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest

import aio_ffi
from aio_ffi import _testing
from tests.aio_ffi.conftest import ROOT, fill, run_python

SIZE = 1 << 20


def test_a_dropped_handle_keeps_its_buffer(engine, path):
    """The array's only owner is the transfer: C must not write to freed memory."""
    path.write_bytes(b"x" * SIZE)
    with engine.open(path) as file:
        array = np.zeros(SIZE, np.uint8)
        alive = weakref.ref(array)
        with _testing.closed_gate(engine, "submit"):
            engine.read(file, 0, array)
            del array
            gc.collect()
            assert alive() is not None
        file.sync()
        engine.read(file, 0, np.zeros(10, np.uint8)).wait()  # any call lets go of what is complete
        gc.collect()
        assert alive() is None


def test_a_transfer_keeps_its_arena(engine, path):
    path.write_bytes(b"x" * SIZE)
    arena = aio_ffi.Arena(SIZE, lock=False)
    with engine.open(path) as file:
        with _testing.closed_gate(engine, "submit"):
            handle = engine.read(file, 0, arena.array(0, SIZE))
            with pytest.raises(BufferError, match="1 live views"):
                arena.close()
        handle.wait()
        arena.close()  # the outcome was seen: nothing holds it, the handle included


def test_a_dropped_engine_drains(kind, path, arena):
    data = fill(arena.array(0, SIZE))
    engine = aio_ffi.Engine(aio_ffi.EngineOptions(engine=kind, block_size=4096))
    engine.write(engine.open(path), 0, data)
    del engine
    gc.collect()
    assert path.read_bytes() == data.tobytes()


def test_a_dropped_error_comes_with_the_next_call(engine, arena, path):
    with engine.open(path, num_bytes=SIZE) as file:
        with _testing.inject(engine, "write", value=-errno.ENOSPC, times=1):
            engine.write(file, 0, arena.array(0, 4096))
            file.sync()
        with pytest.raises(aio_ffi.AioError, match="write of 4096 bytes") as caught:
            engine.write(file, 0, arena.array(0, 4096))
        assert caught.value.errno == errno.ENOSPC
        assert "nobody waited" in caught.value.__notes__[0]
        engine.write(file, 0, arena.array(0, 4096)).wait()  # said once
    engine.close()


def test_an_error_whose_handle_is_held_waits_for_its_owner(engine, arena, path):
    with engine.open(path, num_bytes=SIZE) as file:
        with _testing.inject(engine, "write", value=-errno.EIO, times=1):
            held = engine.write(file, 0, arena.array(0, 4096))
            file.sync()
        engine.write(file, 0, arena.array(0, 4096)).wait()
        for _ in range(2):  # the same outcome each time
            with pytest.raises(aio_ffi.AioError):
                held.wait()
    engine.close()


def test_close_raises_what_nobody_saw(engine, arena, path):
    file = engine.open(path, num_bytes=SIZE)
    with _testing.inject(engine, "write", value=-errno.EIO, times=2):
        handles = [engine.write(file, i * 4096, arena.array(0, 4096)) for i in range(2)]
        file.sync()
    with pytest.raises(aio_ffi.AioError) as caught:
        engine.close()
    assert len(caught.value.__notes__) == 2
    assert all(handle.done() for handle in handles)
    engine.close()
    assert engine.statistics().num_failed == 2  # still to be had
    with pytest.raises(ValueError, match="closed"):
        engine.open(path)


def test_the_exception_on_its_way_stays_visible(engine, arena, path):
    """IO05: the first, real exception was hidden by the teardown."""
    with pytest.raises(KeyError) as caught, engine:
        file = engine.open(path, num_bytes=SIZE)
        with _testing.inject(engine, "write", value=-errno.EIO, times=1):
            engine.write(file, 0, arena.array(0, 4096))
            file.sync()
        raise KeyError("mine")
    assert "on close" in caught.value.__notes__[0]


def test_wait_times_out_and_goes_on(engine, arena, path):
    with engine.open(path) as file:
        with _testing.closed_gate(engine, "submit"):
            handle = engine.write(file, 0, arena.array(0, 4096))
            assert not handle.done()
            with pytest.raises(TimeoutError, match="write of 4096 bytes at offset 0"):
                handle.wait(0.01)
            assert engine.statistics().in_flight == 1
        handle.wait()
        assert handle.done()


def test_many_threads(engine, disk):
    """Submitting and waiting from several threads, each its own file."""
    errors = []

    def work(seed: int) -> None:
        try:
            name = disk / f"thread_{seed}"
            data, found = fill(np.empty(200_000, np.uint8), seed), np.zeros(200_000, np.uint8)
            with engine.open(name) as file:
                for _ in range(5):
                    engine.write(file, seed, data).wait()
                    engine.read(file, seed, found).wait()
                    np.testing.assert_array_equal(found, data)
            name.unlink()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


IN_FLIGHT = """
import sys, numpy as np, aio_ffi
engine = aio_ffi.Engine(aio_ffi.EngineOptions(engine=sys.argv[2]))
file = engine.open(sys.argv[1])
handle = engine.write(file, 0, np.ones(50_000_000, np.uint8))
"""


def test_raise_while_in_flight(kind, path):
    """IO05: a raise between submit and wait shows itself, the process ends, without a core."""
    done = run_python(IN_FLIGHT + "raise ValueError('the original')", str(path), kind, timeout=30)
    assert done.returncode == 1
    assert done.stderr.strip().endswith("ValueError: the original")
    assert path.stat().st_size == 50_000_000  # waited for at exit


def test_a_lost_error_is_printed_at_exit(path):
    code = IN_FLIGHT + "from aio_ffi import _testing\nfault = _testing.inject(engine, 'write', value=-28)\n"
    done = run_python(code + "fault.__enter__()\nengine.write(file, 0, np.ones(10, np.uint8))", str(path), "libaio")
    assert "ENOSPC" in done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, -signal.SIGTERM)])
def test_signals_interrupt_a_wait(path, number, code):
    """The wait is in C and would not end by itself: Ctrl-C must get through."""
    script = (
        IN_FLIGHT
        + """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite that runs in the background ignores it
from aio_ffi import _testing
with _testing.closed_gate(engine, "submit"):
    stuck = engine.write(file, 0, np.ones(10, np.uint8))
    print("waiting", flush=True)
    stuck.wait()
"""
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(path), "libaio"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(number)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == code
    if number == signal.SIGINT:
        assert "KeyboardInterrupt" in stderr


def test_a_forked_child_is_told(path):
    code = (
        IN_FLIGHT
        + """
import os
child = os.fork()
if child == 0:
    try:
        engine.write(file, 0, np.ones(10, np.uint8))
    except RuntimeError as error:
        os._exit(7 if "fork" in str(error) else 8)
    os._exit(9)
_, status = os.waitpid(child, 0)
handle.wait()
sys.exit(os.waitstatus_to_exitcode(status))
"""
    )
    assert run_python(code, str(path), "libaio").returncode == 7


def test_a_forked_child_may_exit(path):
    """Its destructors must not join threads that are not there."""
    code = (
        IN_FLIGHT
        + """
import os, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 and later warn of any fork beside threads
child = os.fork()
if child == 0:
    sys.exit(0)
_, status = os.waitpid(child, 0)
handle.wait()
sys.exit(os.waitstatus_to_exitcode(status))
"""
    )
    done = run_python(code, str(path), "libaio", timeout=20)
    assert (done.returncode, done.stderr) == (0, "")


def test_two_engines_one_path(arena, path):
    """An engine's files are its own."""
    with aio_ffi.Engine() as one, aio_ffi.Engine() as two, one.open(path) as file:
        with pytest.raises(ValueError, match="another engine"):
            two.write(file, 0, arena.array(0, 10))
