"""Directories whose entries are durable: a file that was synced is lost all the same if its name was not."""

import errno
import os
import pathlib

_NO_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}  # file systems that cannot sync a directory


def sync_directory(path: pathlib.Path) -> None:
    """Makes the names in a directory durable. Raises OSError: it failed."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(fd)


def make_directory(path: pathlib.Path) -> None:
    """Makes a private directory, and those above it, where missing; the names of those it made are durable."""
    path = path.absolute()
    missing = [p for p in (path, *path.parents) if not p.exists()]
    for directory in reversed(missing):
        directory.mkdir(mode=0o700, exist_ok=True)
        sync_directory(directory.parent)
