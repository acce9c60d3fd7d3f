"""The NVMe tier on real files: what is read is what was written, and errors say about which page they are."""

import errno
import os
import shutil
import stat
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import aio_ffi
import zinf_jax as zinf
from aio_ffi import _testing
from zinf_jax.tier import PageStore

PAGE = 4096
SIZES = {"weights": 64 * PAGE, "optimizer": 128 * PAGE, "gradients": 0}
OPTIONS = aio_ffi.EngineOptions(block_size=1 << 16, queue_depth=8)


@pytest.fixture(scope="module")
def arena():
    return aio_ffi.Arena(1 << 20, lock=False)


@pytest.fixture
def store(tmp_path):
    made = PageStore(tmp_path / "pages", SIZES, OPTIONS)
    yield made
    made.close()


def filled(arena, num_bytes, seed=0, offset=0):
    array = arena.array(offset, num_bytes)
    array[:] = np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)
    return array


def test_pages_come_back(store, arena):
    one, two = filled(arena, 3 * PAGE, 1), filled(arena, 3 * PAGE, 2, 4 * PAGE)
    for transfer in [store.write("weights", PAGE, one, "a"), store.write("weights", 4 * PAGE, two, "b")]:
        transfer.wait()
    found = arena.array(8 * PAGE, 6 * PAGE)
    store.read("weights", PAGE, found, "a and b").wait()
    np.testing.assert_array_equal(found, np.concatenate([one, two]))
    statistics = store.statistics()
    assert (statistics.bytes_written, statistics.bytes_read, statistics.bounced) == (6 * PAGE, 6 * PAGE, 0)


def test_files_are_reserved_private_and_only_where_needed(store):
    files = {p.name: p.stat() for p in store.directory.iterdir()}
    assert set(files) == {"weights.pages", "optimizer.pages"}
    for name, found in files.items():
        assert found.st_size == SIZES[name.split(".")[0]] and found.st_blocks * 512 >= found.st_size
        assert stat.S_IMODE(found.st_mode) == 0o600
    assert stat.S_IMODE(store.directory.stat().st_mode) == 0o700


def test_a_sparse_kind_takes_space_only_when_it_is_written(tmp_path, arena):
    store = PageStore(tmp_path, {"weights": 1 << 50}, OPTIONS, sparse=frozenset({"weights"}))
    store.write("weights", 1 << 40, filled(arena, PAGE), "far").wait()
    found = arena.array(PAGE, PAGE)
    store.read("weights", 1 << 40, found, "far").wait()
    np.testing.assert_array_equal(found, arena.array(0, PAGE))
    assert (tmp_path / "weights.pages").stat().st_blocks * 512 < 1 << 20
    store.close()


@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_errors_name_the_page(store, arena, operation, code):
    """NV05: operation, kind, page, offset, bytes, file and errno; the store goes on working."""
    data = filled(arena, 2 * PAGE)
    with _testing.inject(store._engine, operation, value=-code, times=1):
        transfer = getattr(store, operation)("optimizer", 8 * PAGE, data, "block_3")
        with pytest.raises(zinf.StoreError) as caught:
            transfer.wait()
    error = caught.value
    assert error.errno == code and error.filename == str(store.directory / "optimizer.pages")
    for part in (f"{operation} of optimizer of page 'block_3' at offset {8 * PAGE}, {2 * PAGE} bytes",
                 errno.errorcode[code], "optimizer.pages"):  # fmt: skip
        assert part in str(error), str(error)
    store.write("optimizer", 8 * PAGE, data, "block_3").wait()
    store.read("optimizer", 8 * PAGE, data, "block_3").wait()


def test_an_error_that_nobody_waited_for_comes_up_at_the_next_call(store, arena):
    with _testing.inject(store._engine, "write", value=-errno.EIO, times=1):
        transfer = store.write("weights", 0, filled(arena, PAGE), "lost")
        while not transfer._handle.done():
            pass
        del transfer
    with pytest.raises(zinf.StoreError) as caught:
        for _ in range(2):  # the first call may be in time to see the handle alive
            store.read("weights", PAGE, arena.array(PAGE, PAGE), "other").wait()
    assert caught.value.errno == errno.EIO


def test_a_sync_that_failed_is_an_error_for_good(store):
    with (
        _testing.inject(store._engine, "sync", value=-errno.EIO, times=1),
        pytest.raises(zinf.StoreError, match="sync"),
    ):
        store.sync()
    with pytest.raises(zinf.StoreError, match="sync of weights pages"):
        store.sync()


def test_nothing_is_written_outside_a_kind(store, arena):
    with pytest.raises(AssertionError):
        store.write("weights", 63 * PAGE, filled(arena, 2 * PAGE), "last")


def test_a_disk_that_is_too_small_is_refused_with_the_numbers(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(zinf.StoreError) as caught:
        PageStore(tmp_path / "pages", {"weights": 1 << 20, "optimizer": free + (8 << 30)}, OPTIONS)
    assert caught.value.errno == errno.ENOSPC
    for part in ("GiB more", "are free", "weights 1.00 MiB", "optimizer", "another nvme_path", str(tmp_path)):
        assert part in str(caught.value), str(caught.value)
    assert list((tmp_path / "pages").iterdir()) == [], "nothing was reserved"


def test_space_that_is_reserved_already_is_not_asked_for_again(tmp_path):
    """A dead run's files are reused where they are: only what is missing must be free."""
    PageStore(tmp_path, SIZES, OPTIONS).close()
    blocks = sum(p.stat().st_blocks for p in tmp_path.iterdir())
    PageStore(tmp_path, SIZES, OPTIONS).close()
    assert sum(p.stat().st_blocks for p in tmp_path.iterdir()) == blocks


def test_a_truncated_file_is_an_error_at_opening_and_at_reading(tmp_path, arena):
    """It aborted the process of the reference system."""
    store = PageStore(tmp_path, SIZES, OPTIONS)
    os.truncate(tmp_path / "weights.pages", 10 * PAGE)
    with pytest.raises(zinf.StoreError, match=r"read of weights of page 'block_9' at offset 36864"):
        store.read("weights", 9 * PAGE, arena.array(0, 2 * PAGE), "block_9").wait()
    store.close()
    with pytest.raises(zinf.StoreError, match=rf"weights pages are cut short: {10 * PAGE} bytes, expected {64 * PAGE}"):
        PageStore(tmp_path, SIZES, OPTIONS, reuse=True)


FILE_SIZE_LIMIT = """
    import errno, resource, sys
    import aio_ffi
    import zinf_jax as zinf
    from zinf_jax.tier import PageStore

    MIB = 1 << 20
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * MIB, resource.RLIM_INFINITY))
    try:
        PageStore(sys.argv[1], {"weights": 8 * MIB}, aio_ffi.EngineOptions())
        sys.exit("reserved more than a file may have")
    except zinf.StoreError as error:
        assert error.errno == errno.EFBIG and "cannot reserve 8.00 MiB for weights" in str(error), error
    data = aio_ffi.Arena(2 * MIB, lock=False).array(0, 2 * MIB)
    store = PageStore(sys.argv[1], {"weights": 8 * MIB}, aio_ffi.EngineOptions(), sparse=frozenset({"weights"}))
    store.write("weights", 2 * MIB, data, "fits").wait()
    try:
        store.write("weights", 3 * MIB, data, "block_7").wait()
        sys.exit("a write past the limit succeeded")
    except zinf.StoreError as error:
        assert error.errno == errno.EFBIG and "page 'block_7'" in str(error), error
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    store.write("weights", 3 * MIB, data, "block_7").wait()
    store.close()
"""


def test_io01_a_file_size_limit_is_an_error_not_a_short_success(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FILE_SIZE_LIMIT), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_delete_removes_its_own_files_only(store):
    (store.directory / "notes.txt").write_text("mine")
    store.delete()
    assert [p.name for p in store.directory.iterdir()] == ["notes.txt"]
    (store.directory / "notes.txt").unlink()
    store.delete()
    assert not store.directory.exists()
