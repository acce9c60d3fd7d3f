"""The NVMe tier on real files: what is read is what was written, and errors say about which page they are."""

import errno
import os
import re
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
from zinf_jax.errors import CorruptionError
from zinf_jax.tier import KindExtents, PageStore, sweep

SECTOR = 4096
PAGES = {"weights": [[3 * SECTOR, 5000], [SECTOR]], "optimizer": [[2 * SECTOR] * 3, [600]], "gradients": []}
OPTIONS = aio_ffi.EngineOptions(block_size=1 << 16, queue_depth=8)


def extents(shares=(1.0,), pages=PAGES):
    return {kind: KindExtents.deal(chunks, shares) for kind, chunks in pages.items()}


def make(*paths, banks=2, **options):
    shares = (1.0,) * len(paths)
    kinds = {kind: banks if kind != "gradients" else 1 for kind in PAGES}
    return PageStore(paths, extents(shares), kinds, OPTIONS, **options)


@pytest.fixture(scope="module")
def arena():
    return aio_ffi.Arena(1 << 20, lock=False)


@pytest.fixture
def store(tmp_path):
    made = make(tmp_path / "pages")
    yield made
    made.close()


def filled(arena, num_bytes, seed=0, offset=0):
    array = arena.array(offset, num_bytes)
    array[:] = np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)
    return array


def directory(store):
    return store.files.paths[0]


def test_pages_come_back(store, arena):
    one, two = filled(arena, 3 * SECTOR + 5000, 1), filled(arena, SECTOR, 2, 8 * SECTOR)
    transfers = [store.write_page("weights", 0, one, "a"), store.write_page("weights", 1, two, "b")]
    for transfer in transfers:
        transfer.wait()
        assert transfer.done()
        transfer.wait()
    found = arena.array(16 * SECTOR, 3 * SECTOR + 5000)
    store.read_page("weights", 0, found, "a").wait()
    np.testing.assert_array_equal(found, one)
    chunk = arena.array(24 * SECTOR, 5000)
    store.read_chunk("weights", 0, 1, chunk, "a").wait()
    np.testing.assert_array_equal(chunk, one[3 * SECTOR :])
    statistics = store.statistics()
    assert statistics.bytes_written == 4 * SECTOR + 5000 and statistics.bytes_read == 3 * SECTOR + 10000
    assert store.sizes == {"weights": 6 * SECTOR, "optimizer": 7 * SECTOR, "gradients": 0}


def test_a_version_does_not_touch_the_one_before(store, arena):
    old, new, found = (filled(arena, SECTOR, n, 4 * n * SECTOR) for n in range(3))
    store.step = 1
    store.write_chunk("weights", 1, 0, old, "b").wait()
    before = store.versions.snapshot(("weights",))
    store.versions.commit(before)
    store.versions.begin()
    store.step = 2
    transfer = store.write_chunk("weights", 1, 0, new, "b")
    store.read_chunk("weights", 1, 0, found, "b").wait()
    np.testing.assert_array_equal(found, old)  # until the write was waited for, the newest version is the old one
    transfer.wait()
    store.read_chunk("weights", 1, 0, found, "b").wait()
    np.testing.assert_array_equal(found, new)
    store.versions.revert("weights", 2)
    store.read_chunk("weights", 1, 0, found, "b").wait()
    np.testing.assert_array_equal(found, old)


def test_pages_lie_on_all_drives(tmp_path, arena):
    paths = [tmp_path / "one", tmp_path / "two"]
    store = make(*paths)
    data = filled(arena, 6 * SECTOR)
    store.write_page("optimizer", 0, data, "a").wait()
    found = arena.array(8 * SECTOR, 6 * SECTOR)
    store.read_page("optimizer", 0, found, "a").wait()
    np.testing.assert_array_equal(found, data)
    assert {p.path for p in store.extents["optimizer"].places} == {0, 1}
    assert [engine.statistics().bytes_written for engine in store.files.engines] == [4 * SECTOR, 2 * SECTOR]
    store.sync(("optimizer",))
    store.delete()
    assert not any(path.exists() for path in paths)


def test_files_are_reserved_private_and_only_where_needed(store):
    files = {p.name: p.stat() for p in directory(store).iterdir()}
    assert set(files) == {"weights.pages", "optimizer.pages"}
    for name, found in files.items():
        assert found.st_size == 2 * store.sizes[name.split(".")[0]] and found.st_blocks * 512 >= found.st_size
        assert stat.S_IMODE(found.st_mode) == 0o600
    assert stat.S_IMODE(directory(store).stat().st_mode) == 0o700


def test_names_are_durable(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr("zinf_jax.tier.files.sync_directory", synced.append)
    monkeypatch.setattr("zinf_jax.tier.directories.sync_directory", synced.append)
    make(tmp_path / "a" / "one", tmp_path / "two").close()
    assert synced == [tmp_path, tmp_path / "a", tmp_path, tmp_path / "a" / "one", tmp_path / "two"]


def test_a_sparse_kind_takes_space_only_when_it_is_written(tmp_path, arena):
    far = {"weights": KindExtents.deal([[1 << 40], [SECTOR]], (1.0,))}
    store = PageStore([tmp_path], far, {"weights": 1}, OPTIONS, sparse=frozenset({"weights"}))
    store.write_chunk("weights", 1, 0, filled(arena, SECTOR), "far").wait()
    found = arena.array(SECTOR, SECTOR)
    store.read_chunk("weights", 1, 0, found, "far").wait()
    np.testing.assert_array_equal(found, arena.array(0, SECTOR))
    assert (tmp_path / "weights.pages").stat().st_blocks * 512 < 1 << 20
    store.close()


def test_what_was_sparse_can_be_reserved_later(tmp_path, arena):
    """State that was in memory is on the drive in the next run; the last chunk need not fill its sectors."""
    store = make(tmp_path, banks=1, sparse=frozenset({"weights", "optimizer"}))
    transfer = store.write_page("optimizer", 1, filled(arena, 600), "b")
    transfer.wait()
    tables = store.versions.working
    store.close()
    size = (tmp_path / "optimizer.pages").stat().st_size
    os.truncate(tmp_path / "optimizer.pages", 6 * SECTOR + 600)
    assert size >= 6 * SECTOR + 600
    again = make(tmp_path, banks=2, reuse={"optimizer": 1})
    again.versions.adopt(tables)
    found = arena.array(SECTOR, 600)
    again.read_page("optimizer", 1, found, "b").wait()
    np.testing.assert_array_equal(found, arena.array(0, 600))
    again.close()


@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_errors_name_the_page(store, arena, operation, code):
    """NV05: operation, kind, page, offset, bytes, file and errno; the store goes on working."""
    data = filled(arena, 2 * SECTOR)
    store.write_chunk("optimizer", 0, 1, data, "block_3").wait()
    with _testing.inject(store.files.engines[0], operation, value=-code, times=1):
        transfer = getattr(store, f"{operation}_chunk")("optimizer", 0, 1, data, "block_3")
        for _ in range(2):
            with pytest.raises(zinf.StoreError) as caught:
                transfer.wait()
    error = caught.value
    assert error.errno == code and error.filename == str(directory(store) / "optimizer.pages")
    for part in (f"{operation} of optimizer of page 'block_3', {2 * SECTOR} bytes", f"at offset {2 * SECTOR}",
                 errno.errorcode[code], "optimizer.pages"):  # fmt: skip
        assert part in str(error), str(error)
    store.write_chunk("optimizer", 0, 1, data, "block_3").wait()
    store.read_chunk("optimizer", 0, 1, data, "block_3").wait()


@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_transfer_that_failed_is_at_its_end(store, arena, operation):
    """IO03, AL06: the array can be used again, though only the first of three parts failed."""
    data = filled(arena, 6 * SECTOR)
    store.write_page("optimizer", 0, data, "a").wait()
    engine = store.files.engines[0]
    with _testing.inject(engine, operation, value=-errno.EIO, times=1):
        with _testing.closed_gate(engine, "submit"):
            transfer = getattr(store, f"{operation}_page")("optimizer", 0, data, "a")
        with pytest.raises(zinf.StoreError):
            transfer.wait()
    assert all(part.handle._request.buffer is None for part in transfer._parts), "none is in flight"
    store.read_page("optimizer", 0, data, "a").wait()  # nor is an error left over for the next call


def test_a_write_that_failed_is_no_version(store, arena):
    """IO01: the old version stays the newest one, and the same write can be tried again."""
    old, new = filled(arena, 6 * SECTOR, 1), filled(arena, 6 * SECTOR, 2, 8 * SECTOR)
    store.write_page("optimizer", 0, old, "a").wait()
    store.versions.commit(store.versions.snapshot(("optimizer",)))
    store.versions.begin()
    with (
        _testing.inject(store.files.engines[0], "write", value=-errno.ENOSPC, times=3),
        pytest.raises(zinf.StoreError),
    ):
        store.write_page("optimizer", 0, new, "a").wait()
    found = arena.array(16 * SECTOR, 6 * SECTOR)
    store.read_page("optimizer", 0, found, "a").wait()
    np.testing.assert_array_equal(found, old)
    store.write_page("optimizer", 0, new, "a").wait()
    store.read_page("optimizer", 0, found, "a").wait()
    np.testing.assert_array_equal(found, new)


def test_an_error_that_nobody_waited_for_comes_up_at_the_next_call(store, arena):
    store.write_chunk("weights", 0, 0, filled(arena, 3 * SECTOR), "other").wait()
    with _testing.inject(store.files.engines[0], "write", value=-errno.EIO, times=1):
        transfer = store.write_chunk("weights", 1, 0, filled(arena, SECTOR), "lost")
        while not transfer.done():
            pass
        del transfer
    with pytest.raises(zinf.StoreError, match="before the read of weights of page 'other'") as caught:
        for _ in range(2):  # the first call may be in time to see the handle alive
            store.read_chunk("weights", 0, 0, arena.array(4 * SECTOR, 3 * SECTOR), "other").wait()
    assert caught.value.errno == errno.EIO


def test_an_error_that_nobody_waited_for_comes_up_at_close(tmp_path, arena):
    """And all drives are closed."""
    store = make(tmp_path / "one", tmp_path / "two")
    engines = store.files.engines
    with _testing.inject(engines[0], "write", value=-errno.EIO, times=1):
        place = next(i for i, p in enumerate(store.extents["optimizer"].places) if p.path == 0)
        transfer = store.write_chunk("optimizer", 0, place, filled(arena, 2 * SECTOR), "lost")
        while not transfer.done():
            pass
        del transfer
    with pytest.raises(zinf.StoreError, match="at close") as caught:
        store.close()
    assert caught.value.errno == errno.EIO
    for engine in engines:
        with pytest.raises(ValueError, match="closed"):
            engine.open(str(tmp_path / "x"))
    store.close()


def test_a_sync_that_failed_is_an_error_for_good(store):
    with (
        _testing.inject(store.files.engines[0], "sync", value=-errno.EIO, times=1),
        pytest.raises(zinf.StoreError, match="sync of weights pages"),
    ):
        store.sync(("weights", "optimizer"))
    with pytest.raises(zinf.StoreError, match="sync of weights pages"):
        store.sync(("weights",))
    store.sync(("optimizer",))


# --- what is not what was written -----------------------------------------------------------------------------------


def damage(store, kind, index, at=7):
    """Flips a bit of a chunk's newest version on the drive; returns its file and offset."""
    place, bank = store.extents[kind].places[index], int(store.versions.working[kind].bank[index])
    path, offset = store.files.position(kind, place, bank)
    store.sync((kind,))
    with open(path, "r+b") as file:
        file.seek(offset + at)
        byte = file.read(1)[0]
        file.seek(offset + at)
        file.write(bytes([byte ^ 16]))
        file.flush()
        os.fsync(file.fileno())
    return path, offset


@pytest.mark.parametrize("at", [0, 2047, 4999])
def test_one_bit_is_noticed_and_named(store, arena, at):
    store.step = 3
    data = filled(arena, 3 * SECTOR + 5000)
    store.write_page("weights", 0, data, "block_1").wait()
    path, offset = damage(store, "weights", 1, at)
    found = arena.array(8 * SECTOR, 3 * SECTOR + 5000)
    with pytest.raises(CorruptionError) as caught:
        store.read_page("weights", 0, found, "block_1").wait()
    expected = int(store.versions.working["weights"].checksum[1])
    for part in ("weights of page 'block_1' is not what was written", f"5000 bytes at offset {offset} of {path}",
                 "in step 3", f"expected {expected:08x}", "integrity.fallback: true"):  # fmt: skip
        assert part in str(caught.value), str(caught.value)
    assert re.search(r"have checksum [0-9a-f]{8},", str(caught.value))
    store.read_chunk("weights", 0, 0, found[: 3 * SECTOR], "block_1").wait()
    np.testing.assert_array_equal(found[: 3 * SECTOR], data[: 3 * SECTOR])


def test_a_write_that_the_drive_lost_is_noticed(store, arena):
    """What stands there is whole, but of an older version, or another chunk's."""
    data = filled(arena, SECTOR, 1)
    store.step = 1
    store.write_chunk("weights", 1, 0, data, "b").wait()
    table = store.versions.working["weights"]
    table.version[2] = 2  # as if the same bytes' next version had been written
    with pytest.raises(CorruptionError, match="written in step 2"):
        store.read_chunk("weights", 1, 0, data, "b").wait()
    # The same bytes in the same step: only the seed tells the chunks apart.
    two = np.concatenate([data[:2048]] * 4)
    for number in range(2):
        store.write_chunk("optimizer", 0, number, two, "a").wait()
    checksums = store.versions.working["optimizer"].checksum
    assert checksums[0] != checksums[1]


def test_verify_names_what_is_wrong(store, arena, monkeypatch):
    store.step = 5
    for kind in ("weights", "optimizer"):
        for page, chunks in enumerate(PAGES[kind]):
            store.write_page(kind, page, filled(arena, sum(chunks), page), f"p{page}").wait()
    names = ["p0", "p0", "p0", "p1"].__getitem__
    seen, tables = [], store.versions.snapshot(("optimizer",))["optimizer"]
    for size in (1, 5 * SECTOR, 64 * SECTOR):  # two at a time, and all at once
        monkeypatch.setattr(sweep, "BUFFER_BYTES", size)
        assert store.verify("optimizer", tables, names, seen.append) == []
    assert seen == [2 * SECTOR] * 3 + [600] + seen[4:] and len(seen) == 12
    places = [damage(store, "optimizer", index) for index in (1, 3)]
    wrong = store.verify("optimizer", tables, names)
    assert len(wrong) == 2
    for error, (path, offset), page in zip(wrong, places, ("p0", "p1"), strict=True):
        assert f"page '{page}'" in str(error) and f"offset {offset} of {path}" in str(error)
    with _testing.inject(store.files.engines[0], "read", value=-errno.EIO):  # all of them: any can be the first
        wrong = store.verify("optimizer", tables, names)
    assert len(wrong) == 4
    for chunk, error in enumerate(wrong):
        assert f"optimizer of page '{names(chunk)}' cannot be read at offset" in str(error)


def test_a_chunk_that_was_never_written_cannot_be_read(store, arena):
    with pytest.raises(AssertionError, match="chunk 2 of weights of page 'b' was never written"):
        store.read_chunk("weights", 1, 0, arena.array(0, SECTOR), "b")


def test_nothing_is_written_outside_a_chunk(store, arena):
    for size in (SECTOR - 512, SECTOR + 512):
        with pytest.raises(AssertionError):
            store.write_chunk("weights", 1, 0, filled(arena, size), "last")


# --- room -----------------------------------------------------------------------------------------------------------


def test_a_disk_that_is_too_small_is_refused_with_the_numbers(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    pages = {"weights": [[1 << 20]], "optimizer": [[free // 2 + (8 << 30)]]}
    with pytest.raises(zinf.StoreError) as caught:
        PageStore([tmp_path / "pages"], extents(pages=pages), {"weights": 1, "optimizer": 2}, OPTIONS)
    assert caught.value.errno == errno.ENOSPC
    for part in ("GiB more", "are free", "weights 1.00 MiB", "optimizer", "in 2 versions", "another nvme_path",
                 "turn durability off", str(tmp_path)):  # fmt: skip
        assert part in str(caught.value), str(caught.value)
    assert list((tmp_path / "pages").iterdir()) == [], "nothing was reserved"


def test_space_that_is_reserved_already_is_not_asked_for_again(tmp_path):
    """A dead run's files are reused where they are: only what is missing must be free."""
    make(tmp_path).close()
    blocks = sum(p.stat().st_blocks for p in tmp_path.iterdir())
    make(tmp_path).close()
    assert sum(p.stat().st_blocks for p in tmp_path.iterdir()) == blocks


def test_room_for_one_more_version(store, arena):
    data = filled(arena, SECTOR)
    store.write_chunk("weights", 1, 0, data, "b").wait()
    store.grow(4, ("weights",))
    assert (directory(store) / "weights.pages").stat().st_size == 4 * store.sizes["weights"]
    assert store.versions.num_banks == {"weights": 4, "optimizer": 2, "gradients": 1}
    for step in range(3):
        store.versions.commit(store.versions.snapshot(("weights",)))
        assert store.versions.committed is not None
        store.versions.retained[step] = store.versions.committed
        store.versions.begin()
        store.step = step + 1
        store.write_chunk("weights", 1, 0, filled(arena, SECTOR, step), "b").wait()
    assert store.versions.working["weights"].bank[2] == 3
    store.sync(("weights",))
    store.grow(2, ("weights",))
    assert store.versions.num_banks["weights"] == 4, "it never shrinks"


def test_no_room_for_one_more_version_changes_nothing(store):
    sizes = {p.name: p.stat().st_size for p in directory(store).iterdir()}
    before = dict(store.versions.num_banks)
    with pytest.raises(zinf.StoreError, match="cannot reserve one more version of weights pages") as caught:
        store.grow(1 << 40, ("weights", "optimizer"))
    assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)
    assert {p.name: p.stat().st_size for p in directory(store).iterdir()} == sizes
    assert store.versions.num_banks == before and store.files.banks == before


def test_a_truncated_file_is_an_error_at_opening_and_at_reading(tmp_path, arena):
    """It aborted the process of the reference system."""
    store = make(tmp_path)
    store.write_page("weights", 0, filled(arena, 3 * SECTOR + 5000), "block_9").wait()
    store.sync(("weights",))
    os.truncate(tmp_path / "weights.pages", SECTOR)
    with pytest.raises(zinf.StoreError, match=r"read of weights of page 'block_9'.*at offset"):
        store.read_page("weights", 0, arena.array(8 * SECTOR, 3 * SECTOR + 5000), "block_9").wait()
    store.close()
    expected = 6 * SECTOR + 6 * SECTOR
    with pytest.raises(zinf.StoreError, match=rf"weights pages are cut short: {SECTOR} bytes, expected {expected}"):
        make(tmp_path, reuse={"weights": 2, "optimizer": 2})


def test_a_file_that_is_gone_is_an_error_at_opening(tmp_path):
    make(tmp_path).close()
    (tmp_path / "optimizer.pages").unlink()
    with pytest.raises(zinf.StoreError, match="optimizer pages are gone") as caught:
        make(tmp_path, reuse={"weights": 1, "optimizer": 1})
    assert caught.value.errno == errno.ENOENT and caught.value.filename == str(tmp_path / "optimizer.pages")
    assert not (tmp_path / "optimizer.pages").exists()


FILE_SIZE_LIMIT = """
    import errno, resource, sys
    import aio_ffi
    import zinf_jax as zinf
    from zinf_jax.tier import KindExtents, PageStore

    MIB = 1 << 20
    extents = {"weights": KindExtents.deal([[2 * MIB], [MIB], [2 * MIB], [3 * MIB]], (1.0,))}
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * MIB, resource.RLIM_INFINITY))
    try:
        PageStore([sys.argv[1]], extents, {"weights": 1}, aio_ffi.EngineOptions())
        sys.exit("reserved more than a file may have")
    except zinf.StoreError as error:
        assert error.errno == errno.EFBIG and "cannot reserve 8.00 MiB for weights" in str(error), error
    data = aio_ffi.Arena(2 * MIB, lock=False).array(0, 2 * MIB)
    data[:] = 7
    store = PageStore([sys.argv[1]], extents, {"weights": 1}, aio_ffi.EngineOptions(), sparse=frozenset({"weights"}))
    store.write_page("weights", 0, data, "fits").wait()
    try:
        store.write_page("weights", 2, data, "block_7").wait()
        sys.exit("a write past the limit succeeded")
    except zinf.StoreError as error:
        assert error.errno == errno.EFBIG and "page 'block_7'" in str(error), error
    data[:] = 0
    store.read_page("weights", 0, data, "fits").wait()
    assert data.min() == 7
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    store.write_page("weights", 2, data, "block_7").wait()
    data[:] = 0
    store.read_page("weights", 2, data, "block_7").wait()
    assert data.min() == 7
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
    (directory(store) / "notes.txt").write_text("mine")
    store.delete()
    assert [p.name for p in directory(store).iterdir()] == ["notes.txt"]
    (directory(store) / "notes.txt").unlink()
    store.delete()
    assert not directory(store).exists()
