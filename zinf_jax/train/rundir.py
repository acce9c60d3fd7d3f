"""A run directory: one owner at a time, a manifest that is replaced whole, private files.

    RUN_DIR/owner.lock     held (flock) while a trainer is open; says who holds it
    RUN_DIR/run.json       the manifest: what is needed to resume, and whether the pages are at rest
    RUN_DIR/commits/       which step is durable
    RUN_DIR/retained/      steps that are kept
    RUN_DIR/pages/         the NVMe tier, unless nvme_path says otherwise

Guarantees:
  * A second trainer on the same directory is refused, in the same process too, with who holds it. A dead owner's lock
    is gone with it (the kernel drops it, so a reused PID cannot be mistaken). On file systems without locks the
    owner's PID, start time and boot decide. A child that was forked does not keep its dead parent's lock.
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
import weakref
from typing import Any

from zinf_jax.errors import OwnerError, ResumeError
from zinf_jax.tier.directories import sync_directory

MANIFEST = "run.json"
LOCK = "owner.lock"
OWNER_FILE = "run_dir"  # in a directory of pages
_GLANCES, _GLANCE_S = 10, 0.02  # a lock that no live process has signed is being looked at, or about to be signed
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
        _OPEN.add(self)

    def _take(self) -> None:
        for patience in range(_GLANCES, -1, -1):
            holder = _holder(self._fd)
            locked = _lock(self._fd)
            if locked or (locked is None and not (holder and _is_alive(holder))):
                break
            if patience == 0 or (holder and _is_alive(holder)):
                raise self._owned(holder)
            time.sleep(_GLANCE_S)
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, json.dumps(_identity()).encode(), 0)

    def _owned(self, holder: dict[str, Any] | None) -> OwnerError:
        who = describe_holder(holder)
        if holder and not _is_alive(holder):
            who += "; that one is gone, but a process that it started still holds the lock"
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
        _OPEN.discard(self)

    def _forget(self) -> None:
        """In a forked child, which owns nothing: an open descriptor would keep the lock when the parent has died."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


_OPEN: "weakref.WeakSet[RunDir]" = weakref.WeakSet()


def _forget_all() -> None:
    for owned in list(_OPEN):
        owned._forget()
    _OPEN.clear()


os.register_at_fork(after_in_child=_forget_all)


def held_by(path: pathlib.Path) -> str | None:
    """Who owns a directory now; None: nobody. Only looks: makes no file, keeps no lock.

    Raises:
      OSError: the lock cannot be looked at.
    """
    try:
        fd = os.open(pathlib.Path(path) / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        holder = _holder(fd)
        locked = _lock(fd)
        if locked or (locked is None and not (holder and _is_alive(holder))):
            return None
        return describe_holder(holder)
    finally:
        os.close(fd)


def _lock(fd: int) -> bool | None:
    """Takes the lock. False: somebody has it; None: this file system has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        if error.errno not in _NO_LOCKS:
            raise
        return None


def _holder(fd: int) -> dict[str, Any] | None:
    """What an owner wrote of itself, as far as it can be read."""
    try:
        found = json.loads(os.pread(fd, 4096, 0) or b"null")
    except ValueError:
        return None
    return found if isinstance(found, dict) and isinstance(found.get("pid"), int) else None


def describe_holder(holder: dict[str, Any] | None) -> str:
    if not holder:
        return "another process"
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.get("since", 0)))
    return f"process {holder['pid']} on {holder.get('host', 'an unknown host')} (since {since})"


def read_manifest(path: pathlib.Path, name: str = MANIFEST) -> dict[str, Any] | None:
    """The manifest of a run directory or checkpoint; None where there is none.

    Raises:
      ResumeError: it is there but cannot be read.
    """
    file = pathlib.Path(path) / name
    try:
        return json.loads(file.read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ResumeError(f"{file} is not a manifest: {error}") from error


def write_json(path: pathlib.Path, value: Any) -> None:
    """Replaces a file whole and durably; mode 0600."""
    write_private(path, json.dumps(value, indent=1))


def write_private(path: pathlib.Path, text: str) -> None:
    """Replaces a file whole and durably; mode 0600."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(fd, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    sync_directory(path.parent)


def sign_pages(directory: pathlib.Path, run_dir: pathlib.Path) -> None:
    """Makes a directory for pages, private, and notes in it whose it is: before anything else is in it, and durably."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    signature = directory / OWNER_FILE
    text = str(run_dir.absolute()) + "\n"
    if not signature.exists() or signature.read_text() != text or signature.stat().st_mode & 0o077:
        write_private(signature, text)
    sync_directory(directory.parent)


def signed_by(directory: pathlib.Path) -> pathlib.Path | None:
    """The run directory that a directory of pages says it belongs to; None: it does not say."""
    try:
        text = (directory / OWNER_FILE).read_text().strip()
    except (OSError, ValueError):
        return None
    return pathlib.Path(text) if text else None


def belongs(directory: pathlib.Path, run_dir: pathlib.Path, run_id: str) -> bool:
    """Are these pages the run's own? Not if another directory, of which `run_dir` is a copy, signed and has them."""
    signed = signed_by(directory)
    if signed is None or signed.resolve() == run_dir.resolve() or directory.parent.resolve() == run_dir.resolve():
        return True
    with contextlib.suppress(ResumeError, OSError):
        other = read_manifest(signed)
        return other is None or other.get("run_id") != run_id
    return True


def _start_ticks(pid: int) -> str | None:
    """When a process was started, in ticks since boot; None: there is none, or it is dead and only not waited for."""
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rsplit(")", 1)[1].split()
    return None if fields[0] in "ZX" else fields[19]


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
    if holder.get("start_ticks") is None:  # written where /proc cannot be read
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(holder["pid"], 0)
            return True
        return False
    return _start_ticks(holder["pid"]) == holder["start_ticks"]
