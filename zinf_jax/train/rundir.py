"""A run directory: one owner at a time, a manifest that is replaced whole, private files.

    RUN_DIR/owner.lock     held (flock) while a trainer is open; says who holds it
    RUN_DIR/run.json       the manifest: what is needed to resume, and whether the pages are at rest
    RUN_DIR/pages/         the NVMe tier, unless nvme_path says otherwise

Guarantees:
  * A second trainer on the same directory is refused, in the same process too, with who holds it. A dead owner's lock
    is gone with it (the kernel drops it, so a reused PID cannot be mistaken). On file systems without locks the
    owner's PID, start time and boot decide.
  * The manifest is never half-written: written beside, synced, renamed, directory synced.
"""

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import secrets
import socket
import time
from typing import Any

from zinf_jax.errors import OwnerError, ResumeError

MANIFEST = "run.json"
LOCK = "owner.lock"
_NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOLCK}


class RunDir:
    """An owned run directory.

    Raises:
      OwnerError: another live trainer owns it.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.path = pathlib.Path(path)
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._fd = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._take()
        except BaseException:
            os.close(self._fd)
            raise

    def _take(self) -> None:
        holder = self._holder()
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise self._owned(holder) from None
            if error.errno not in _NO_LOCKS:
                raise
            if holder is not None and _is_alive(holder):
                raise self._owned(holder) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, json.dumps(_identity()).encode(), 0)

    def _holder(self) -> dict[str, Any] | None:
        try:
            return json.loads(os.pread(self._fd, 4096, 0) or b"null")
        except ValueError:
            return None

    def _owned(self, holder: dict[str, Any] | None) -> OwnerError:
        who = "another trainer"
        if holder:
            since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder["since"]))
            who = f"process {holder['pid']} on {holder['host']} (since {since})"
        return OwnerError(
            f"run directory {self.path} belongs to {who}: stop that run, close its trainer, or use another run_dir"
        )

    def read_manifest(self) -> dict[str, Any] | None:
        return read_manifest(self.path)

    def write_manifest(self, manifest: dict[str, Any]) -> None:
        write_json(self.path / MANIFEST, manifest)

    def release(self) -> None:
        """Gives the directory up. Safe to call twice."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = -1


def read_manifest(path: pathlib.Path) -> dict[str, Any] | None:
    """The manifest of a run directory or checkpoint; None where there is none.

    Raises:
      ResumeError: it is there but cannot be read.
    """
    file = pathlib.Path(path) / MANIFEST
    try:
        return json.loads(file.read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ResumeError(f"{file} is not a manifest: {error}") from error


def write_json(path: pathlib.Path, value: Any) -> None:
    """Replaces a file whole and durably; mode 0600."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(fd, "w") as file:
            json.dump(value, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    sync_directory(path.parent)


def sync_directory(path: pathlib.Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _start_ticks(pid: int) -> str | None:
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return stat.rsplit(")", 1)[1].split()[19]


def _boot_id() -> str:
    try:
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _identity() -> dict[str, Any]:
    pid = os.getpid()
    return {
        "pid": pid,
        "start_ticks": _start_ticks(pid),
        "boot_id": _boot_id(),
        "host": socket.gethostname(),
        "since": time.time(),
    }


def _is_alive(holder: dict[str, Any]) -> bool:
    """Is the process that wrote this still running? A process on another host counts as alive: nobody can know."""
    if holder.get("host") != socket.gethostname():
        return True
    if holder.get("boot_id") != _boot_id():
        return False
    return _start_ticks(int(holder["pid"])) == holder.get("start_ticks")
