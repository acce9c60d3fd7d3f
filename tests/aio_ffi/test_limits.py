"""Real limits of real file systems."""

import contextlib
import errno
import os
import pathlib
import subprocess
import tempfile
from collections.abc import Iterator

import pytest

import aio_ffi
from aio_ffi import _filesystem
from tests.aio_ffi.conftest import fill, run_python

MIB = 1 << 20


@contextlib.contextmanager
def mounted(kind: str, options: str) -> Iterator[pathlib.Path]:
    """A small file system of its own, or a skip that says why not."""
    with tempfile.TemporaryDirectory(prefix="aio_mount_") as folder:
        target = pathlib.Path(folder)
        with tempfile.NamedTemporaryFile() as image:
            source = kind
            if kind == "ext4":
                image.truncate(24 * MIB)
                made = subprocess.run(
                    ["mkfs.ext4", "-q", "-O", "^has_journal", image.name], capture_output=True, text=True
                )
                if made.returncode:
                    pytest.skip(f"mkfs.ext4: {made.stderr}")
                source = image.name
            done = subprocess.run(["mount", "-t", kind, "-o", options, source, folder], capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"mount -t {kind}: {done.stderr.strip()}")
            try:
                yield target
            finally:
                subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize(("fs", "options"), [("ext4", "loop"), ("tmpfs", "size=16m")])
def test_full_disk(engine, arena, fs, options):
    """IO01: a full disk shows as a short success first. Earlier files stay whole; with space, a retry succeeds."""
    with mounted(fs, options) as folder:
        earlier, data = fill(arena.array(0, 4 * MIB), 1), fill(arena.array(4 * MIB, 32 * MIB), 2)
        (folder / "ballast").write_bytes(bytes(6 * MIB))
        with engine.open(folder / "earlier", num_bytes=earlier.size) as file, engine.open(folder / "big") as big:
            engine.write(file, 0, earlier).wait()
            with pytest.raises(aio_ffi.AioError) as caught:
                engine.write(big, 0, data).wait()
            assert caught.value.errno == errno.ENOSPC
            assert caught.value.done < data.size
            found = arena.array(40 * MIB, earlier.size)
            engine.read(file, 0, found).wait()
            assert (found == earlier).all()
            (folder / "ballast").unlink()
            os.truncate(folder / "big", 0)
            part = data[: 6 * MIB]
            engine.write(big, 0, part).wait()
            assert (folder / "big").read_bytes() == part.tobytes()
        (folder / "big").unlink()


def test_reserve_refuses_at_once(engine, disk):
    """With the numbers, and leaving nothing behind."""
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    with pytest.raises(aio_ffi.AioError, match="free space, choose another directory") as caught:
        engine.open(disk / "huge", num_bytes=free + (64 << 30))
    assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)
    assert str(free + (64 << 30)) in str(caught.value)
    assert not (disk / "huge").exists()


def test_reserve_on_a_full_disk_keeps_what_was_there(engine, arena):
    with mounted("tmpfs", "size=8m") as folder:
        (folder / "kept").write_bytes(b"k" * MIB)
        with pytest.raises(aio_ffi.AioError) as caught:
            engine.open(folder / "kept", num_bytes=100 * MIB)
        assert caught.value.errno == errno.ENOSPC
        assert (folder / "kept").read_bytes() == b"k" * MIB


FILE_SIZE_LIMIT = """
import errno, resource, sys, numpy as np, aio_ffi
MIB = 1 << 20
arena = aio_ffi.Arena(8 * MIB, lock=False)
data = arena.array(0, 8 * MIB)
data[:] = np.random.default_rng(0).integers(0, 256, data.size, np.uint8)
with aio_ffi.Engine(aio_ffi.EngineOptions(engine=sys.argv[2])) as engine, engine.open(sys.argv[1]) as file:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * MIB + 1000, resource.RLIM_INFINITY))
    try:
        engine.write(file, 0, data).wait()
        sys.exit("a write past the limit succeeded")
    except aio_ffi.AioError as error:
        assert error.errno == errno.EFBIG, error
        assert error.done < 8 * MIB
    assert file.num_bytes <= 4 * MIB + 1000
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    engine.write(file, 0, data).wait()
    assert open(sys.argv[1], "rb").read() == data.tobytes()
"""


def test_file_size_limit(kind, path):
    """Measured on the reference: a write that hit the limit at 4 of 8 MiB returned success."""
    done = run_python(FILE_SIZE_LIMIT, str(path), kind)
    assert done.returncode == 0, done.stderr


UNWRITABLE = """
import os, sys, aio_ffi
os.setuid(65534)
for call in (aio_ffi.probe, lambda d: aio_ffi.Engine().open(os.path.join(d, "new"))):
    try:
        call(sys.argv[1])
        sys.exit("wrote to a directory that is not ours")
    except PermissionError as error:
        assert sys.argv[1] in str(error), error
"""


def test_unwritable_directory(disk):
    if os.getuid():
        pytest.skip("needs root, to become somebody else")
    folder = disk / "closed"
    folder.mkdir(mode=0o755)
    disk.chmod(0o755)
    done = run_python(UNWRITABLE, str(folder))
    if "cannot be loaded" in done.stderr or "No module named" in done.stderr:
        pytest.skip("the checkout cannot be read by nobody")
    assert done.returncode == 0, done.stderr
    assert not list(folder.iterdir())


def test_read_only_file_system(kind, make_engine, arena):
    """An existing file can be read, also directly; writing is refused by name."""
    with mounted("tmpfs", "size=8m") as folder:
        (folder / "weights").write_bytes(b"w" * 8192)
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        engine = make_engine(kind)
        with engine.open(folder / "weights", readonly=True) as file:
            found = arena.array(0, 8192)
            engine.read(file, 0, found).wait()
            assert found.tobytes() == b"w" * 8192
            with pytest.raises(aio_ffi.AioError) as caught:
                engine.write(file, 0, found).wait()
            assert caught.value.errno == errno.EBADF
        with pytest.raises(OSError) as refused:
            aio_ffi.probe(folder)
        assert refused.value.errno == errno.EROFS


@pytest.mark.parametrize("bad", ["missing", "file"])
def test_not_a_directory(disk, bad):
    (disk / "file").write_bytes(b"")
    with pytest.raises(OSError) as caught:
        aio_ffi.probe(disk / bad)
    assert str(disk / bad) in str(caught.value)


def test_a_file_system_without_direct_io(make_engine, arena):
    """ramfs refuses O_DIRECT at open: buffered, one warning with the type, and it works."""
    with mounted("ramfs", "defaults") as folder:
        found = aio_ffi.probe(folder)
        assert (found.engine, found.direct, found.fs_type) == ("threads_buffered", False, "ramfs")
        assert "ramfs" in found.reason
        engine = make_engine("auto")
        with pytest.warns(aio_ffi.AioWarning, match="ramfs") as warned:
            file = engine.open(folder / "a")
            engine.open(folder / "b")
        assert len(warned) == 1
        assert not file.direct
        written = fill(arena.array(3, 10 * 65536 + 5))
        engine.write(file, 7, written).wait()
        assert (folder / "a").read_bytes()[7:] == written.tobytes()
        with pytest.raises(aio_ffi.AioError, match="ramfs"):
            engine.open(folder / "c", direct=True)
        engine.close()


@pytest.mark.parametrize("code", sorted({errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM}))
def test_refused_at_the_write(disk, monkeypatch, code):
    """FS03: merged and FUSE mounts accept the flag, and the read, and refuse the write. (None to be had here.)"""

    def refuse(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(_filesystem.os, "pwritev", refuse)
    found = aio_ffi.probe(disk)
    assert (found.engine, found.direct) == ("threads_buffered", False)
    assert found.fs_type in found.reason
    assert "write" in found.reason
    assert not list(disk.glob(".aio_probe*"))


def test_probe_leaves_nothing_and_clears_dead_ones(disk):
    dead = disk / ".aio_probe_999999999_00"
    dead.write_bytes(b"left by a killed process")
    found = aio_ffi.probe(disk)
    assert not list(disk.glob(".aio_probe*"))
    assert found.alignment % 4096 == 0
    assert (found.engine == "libaio") == (found.reason == "")


def test_memory_is_no_disk():
    with mounted("tmpfs", "size=8m") as folder:
        assert "memory, not a disk" in aio_ffi.probe(folder).reason


@pytest.mark.parametrize("explicit", ["libaio", "threads_direct", "threads_buffered"])
def test_probe_of_one_engine(disk, explicit):
    found = aio_ffi.probe(disk, aio_ffi.EngineOptions(engine=explicit))
    if found.direct or explicit == "threads_buffered":
        assert found.engine == explicit


def test_modes(engine, path):
    with engine.open(path) as file:
        assert path.stat().st_mode & 0o777 == 0o600
        assert not os.get_inheritable(file._fd)
    path.chmod(0o644)
    with engine.open(path, create=False):
        assert path.stat().st_mode & 0o777 == 0o644
    with engine.open(path):
        assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileNotFoundError):
        engine.open(str(path) + ".absent", create=False)


def test_measure(disk):
    measured = aio_ffi.measure(disk, num_bytes=8 * MIB, request_bytes=3 * MIB)
    assert min(measured.read_gbps, measured.write_gbps, measured.mixed_read_gbps, measured.mixed_write_gbps) > 0
    assert not list(disk.glob(".aio_probe*"))
    with pytest.raises(ValueError, match="positive"):
        aio_ffi.measure(disk, num_bytes=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 1000}, "multiple of 4096"),
        ({"block_size": 1 << 31}, "at most"),
        ({"queue_depth": 0}, "positive"),
        ({"queue_depth": 5000}, "at most 4096"),
        ({"thread_count": 0.5}, "positive integer, got 0.5"),
        ({"thread_count": 65}, "at most 64"),
        ({"single_submit": 1}, "True or False"),
        ({"engine": "uring"}, "got 'uring'"),
    ],
)
def test_options_validate_themselves(options, message):
    with pytest.raises(ValueError, match=message):
        aio_ffi.EngineOptions(**options)
