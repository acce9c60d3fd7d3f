"""What a file system can do: its type, and whether O_DIRECT really works there, tried with a real write and read."""

import contextlib
import dataclasses
import errno
import mmap
import os
import pathlib
import secrets

from aio_ffi._native import ffi, lib

PAGE_BYTES = mmap.PAGESIZE
# What file systems answer that accept O_DIRECT at open and refuse it at the transfer, or refuse both.
REFUSALS = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EPERM, errno.ENOSYS, errno.EIO})
PROBE_PREFIX = ".aio_probe_"


@dataclasses.dataclass(frozen=True)
class DirectSupport:
    """Whether O_DIRECT works in a directory.

    Attributes:
      direct: It does, for writes and reads.
      alignment: Of offset and length, in bytes, at least a page (parts of a page go through the page cache).
      mem_alignment: Of the buffer's address.
      reason: Why not, with the file system's type; "" if it works.
    """

    direct: bool
    alignment: int
    mem_alignment: int
    reason: str


def no_direct(reason: str) -> DirectSupport:
    return DirectSupport(False, PAGE_BYTES, 1, reason)


def fs_type(path: str | os.PathLike[str]) -> str:
    """The type of the file system that holds an existing path, from /proc/self/mountinfo ("unknown" without it)."""
    try:
        device = os.stat(path).st_dev
        lines = pathlib.Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    wanted = f"{os.major(device)}:{os.minor(device)}"
    real = os.path.realpath(path) + "/"
    # A later mount hides an earlier one at the same place. Where no device fits (btrfs subvolumes), the place decides.
    found = [("", "unknown")]
    for line in lines:
        fields = line.split()
        place, kind = fields[4].rstrip("/") + "/", fields[fields.index("-") + 1]
        if fields[2] == wanted:
            found.append(("/" * len(real), kind))
        elif real.startswith(place):
            found.append((place, kind))
    return max(enumerate(found), key=lambda entry: (len(entry[1][0]), entry[0]))[1][1]


def probe_direct(directory: str) -> DirectSupport:
    """Writes and reads one aligned page with O_DIRECT in a new file of `directory`, then removes it.

    Raises:
      OSError: The directory cannot be written at all (missing, not a directory, permission, read-only, full).
    """
    path = os.path.join(directory, f"{PROBE_PREFIX}{os.getpid()}_{secrets.token_hex(4)}")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        return _try_direct(path, directory)
    finally:
        os.close(fd)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _try_direct(path: str, directory: str) -> DirectSupport:
    step = "open"
    try:
        fd = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        return _refused(error, step, directory)
    try:
        mem_alignment, alignment = dio_alignment(fd)
        with mmap.mmap(-1, alignment) as page:
            pattern = secrets.token_bytes(64) * (alignment // 64)
            page[:] = pattern
            step = "write"
            if os.pwritev(fd, [page], 0) != alignment:
                return no_direct(f"{directory} ({fs_type(directory)}): a direct write of one page was cut short")
            page[:] = bytes(alignment)
            step = "read"
            if os.preadv(fd, [page], 0) != alignment or page[:] != pattern:
                return no_direct(f"{directory} ({fs_type(directory)}): a direct read did not return what was written")
    except OSError as error:
        return _refused(error, step, directory)
    finally:
        os.close(fd)
    return DirectSupport(True, alignment, mem_alignment, "")


def _refused(error: OSError, step: str, directory: str) -> DirectSupport:
    if error.errno not in REFUSALS:
        raise error
    name = errno.errorcode.get(error.errno or 0, str(error.errno))
    return no_direct(
        f"{directory} ({fs_type(directory)}) refuses O_DIRECT at {step} ({name}): use a directory on a local file "
        "system (ext4, xfs) for direct I/O"
    )


def probe_direct_read(path: str) -> DirectSupport:
    """Whether O_DIRECT reads of an existing file work, for directories that cannot be written."""
    directory = os.path.dirname(path) or "."
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        return _refused(error, "open", directory)
    try:
        mem_alignment, alignment = dio_alignment(fd)
        with mmap.mmap(-1, alignment) as page:
            os.preadv(fd, [page], 0)
    except OSError as error:
        return _refused(error, "read", directory)
    finally:
        os.close(fd)
    return DirectSupport(True, alignment, mem_alignment, "")


def dio_alignment(fd: int) -> tuple[int, int]:
    """(of the buffer, of offset and length) for direct transfers: statx's answer, or a page where it has none."""
    memory, offset = ffi.new("int64_t *"), ffi.new("int64_t *")
    if lib.zaio_dio_align(fd, memory, offset) < 0:
        return PAGE_BYTES, PAGE_BYTES
    return max(int(memory[0]), 1), max(int(offset[0]), PAGE_BYTES)
