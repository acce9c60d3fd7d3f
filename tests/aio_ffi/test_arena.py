"""Exact size, huge pages, locking within limits, fork safety, views."""

import os
import pathlib
import signal

import numpy as np
import pytest

import aio_ffi
from tests.aio_ffi.conftest import run_python

MIB = 1 << 20


@pytest.mark.parametrize("pages", range(1, 11))
def test_every_address_is_aligned(pages):
    """FS05: helper buffers too must suit direct transfers."""
    with aio_ffi.Arena(pages * 4096 - 7, lock=False) as arena:
        assert arena.num_bytes == pages * 4096
        assert arena.address % (2 * MIB) == 0
        assert arena.array(0, 1).ctypes.data == arena.address


EXACT = """
import aio_ffi
def resident():
    return sum(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith(("RssAnon", "RssShmem")))
def mapped():
    return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith("VmSize"))
aio_ffi.Arena(4096).touch()
before, before_mapped, size = resident(), mapped(), int(1.2 * (64 << 20))
arenas = [aio_ffi.Arena(size) for _ in range(5)]
for arena in arenas: arena.touch()
grown = resident() - before
assert 5 * size <= grown + 4096 * 20, grown
assert grown <= 1.05 * 5 * size, (grown, 5 * size)
assert mapped() - before_mapped <= 1.05 * 5 * size, mapped() - before_mapped
"""


def test_measured_equals_asked():
    """ME03: five of 1.20 GiB cost 10.01 GiB where sizes were rounded up to powers of two."""
    done = run_python(EXACT)
    assert done.returncode == 0, done.stderr


def test_huge_pages_are_there():
    with aio_ffi.Arena(8 * MIB, lock=False) as arena:
        arena.touch()
        report = arena.report()
        assert report["resident_bytes"] == 8 * MIB
        if not arena.huge_pages:
            pytest.skip("transparent huge pages are off on this machine")
        assert report["huge_bytes"] > 0
    with aio_ffi.Arena(8 * MIB, huge_pages=False, lock=False) as arena:
        assert not arena.huge_pages


def test_touch_keeps_content():
    with aio_ffi.Arena(MIB, lock=False) as arena:
        arena.array(5000, 1)[0] = 9
        arena.touch()
        assert arena.array(5000, 1)[0] == 9
        assert arena.array(0, MIB).sum() == 9


def test_close_refuses_while_a_view_lives():
    arena = aio_ffi.Arena(MIB, lock=False)
    part = arena.array(0, MIB)[100:200].view(np.int16)
    with pytest.raises(BufferError, match="1 live views"):
        arena.close()
    del part
    arena.close()
    arena.close()
    with pytest.raises(ValueError, match="closed"):
        arena.array(0, 1)


def test_a_view_outlives_its_arena():
    view = aio_ffi.Arena(MIB, lock=False).array(0, MIB)
    view[:] = 3
    assert view.sum() == 3 * MIB


def test_the_memory_is_given_back():
    def mapped() -> bool:
        return f"\n{address:x}-" in pathlib.Path("/proc/self/maps").read_text()

    arena = aio_ffi.Arena(MIB, lock=False)
    address = arena.address
    view = arena.array(0, 10)
    del arena
    assert mapped()
    del view
    assert not mapped()


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (0, MIB + 1), (MIB, 1), (0, -1)])
def test_views_stay_inside(offset, length):
    with aio_ffi.Arena(MIB, lock=False) as arena, pytest.raises(ValueError, match="outside"):
        arena.array(offset, length)


def test_sizes_and_wishes_are_checked():
    with pytest.raises(ValueError, match="at least 1 byte"):
        aio_ffi.Arena(0)
    with pytest.raises(ValueError, match="lock must be"):
        aio_ffi.Arena(10, lock="yes")
    with pytest.raises(MemoryError):
        aio_ffi.Arena(1 << 60)


LOCKING = """
import os, resource, sys, aio_ffi
resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))
if os.getuid() == 0:
    os.setuid(65534)  # drops CAP_IPC_LOCK
small, large = aio_ffi.Arena(64 << 10), aio_ffi.Arena(4 << 20)
assert small.locked and small.lock_reason == "", small.lock_reason
assert not large.locked
assert "RLIMIT_MEMLOCK is 1048576" in large.lock_reason and "ulimit -l" in large.lock_reason, large.lock_reason
large.array(0, 4 << 20)[:] = 1  # and is usable
try:
    aio_ffi.Arena(4 << 20, lock=True)
    sys.exit("locked beyond the limit")
except OSError as error:
    assert "RLIMIT_MEMLOCK" in str(error)
assert not aio_ffi.Arena(4096, lock=False).locked
"""


def test_locking_within_the_limit():
    """Measured on the reference: without CAP_IPC_LOCK start-up aborted on an assert after mlock failed."""
    done = run_python(LOCKING)
    if "cannot be loaded" in done.stderr or "No module named" in done.stderr:
        pytest.skip("the checkout cannot be read by nobody")
    assert done.returncode == 0, done.stderr


FORK = """
import os, sys, aio_ffi
arena = aio_ffi.Arena(4 << 20, lock=False)
view = arena.array(0, 4 << 20)
view[:] = 5
child = os.fork()
if child == 0:
    if sys.argv[1] == "touch":
        view[0] = 1
    del view, arena
    os._exit(0)
_, status = os.waitpid(child, 0)
assert (view == 5).all()
print(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.parametrize(("act", "status"), [("leave", 0), ("touch", -signal.SIGSEGV)])
def test_fork(act, status):
    """The child has no copy: pages under transfer never become copy-on-write."""
    done = run_python(FORK, act)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == status


def test_a_report_is_complete():
    with aio_ffi.Arena(MIB) as arena:
        report = arena.report()
        assert report["fork_safe"] is True
        assert report["locked"] == arena.locked
        assert arena.locked or arena.lock_reason
        assert os.path.exists("/proc/self/smaps") and report["resident_bytes"] <= MIB
