"""What processes that were killed left behind: found by name, shown, and removed if that is wanted.

    NVME_PATH/zinf-RUN_ID/          pages, if the run directory that signed them is gone or holds another run
    */zinf-run-XXXXXXXX/            the directory of a run without a run_dir
    */.NAME.XXXXXXXX.tmp            a checkpoint that was being written, or a manifest
    */.abandoned-step_N-XXXXXX/     a checkpoint of a later step than the run went back to
    RUN_DIR/.generate-XXXXXXXX/     the copy that a text was generated from
    RUN_DIR/commits/*.log.tmp       a journal that was being compacted
    RUN_DIR/commits.damaged-N/      a log that was set aside when the run went on from a retained step
    */.aio_probe_PID_*, .zinf-probe-*    files that tried a drive

Guarantees: only names that this package makes are ever listed or removed; nothing whose owner lives (it is asked
again, with its lock held, at the moment of removal); nothing that a manifest refers to; no link is followed. A name
that has no owner to ask is left alone until it has not been touched for `QUIET_S`.
"""

import contextlib
import dataclasses
import os
import pathlib
import re
import shutil
import stat
import time
from collections.abc import Iterable, Iterator, Sequence

from zinf_jax.errors import OwnerError, ResumeError
from zinf_jax.train.rundir import LOCK, MANIFEST, OWNER_FILE, RunDir, held_by, read_manifest, signed_by
from zinf_jax.train.source import CHECKPOINTS, COMMITS, PAGES, RETAINED

QUIET_S = 600.0

_PAGES = re.compile(r"zinf-([0-9a-f]{12})")
_TEMPORARY_RUN = re.compile(r"zinf-run-[a-z0-9_]{8}")
_UNFINISHED = re.compile(r"\.(.+)\.[0-9a-f]{8}\.tmp")
_ABANDONED = re.compile(r"\.abandoned-step_\d+-[0-9a-f]{6}")
_GENERATE = re.compile(r"\.generate-[a-z0-9_]{8}")
_JOURNAL = re.compile(r"(commits|prepare-\d+)\.log\.tmp")
_DAMAGED = re.compile(COMMITS + r"\.damaged-\d+")
_PROBE = re.compile(r"\.aio_probe_(\d+)_[0-9a-f]{8}")
_TRIED = re.compile(r"\.zinf-probe-[a-z0-9_]{8}")
_PAGE_FILES = {"weights.pages", "optimizer.pages", "gradients.pages", "residuals.pages", OWNER_FILE}
_CHECKPOINT_FILES = _PAGE_FILES | {MANIFEST, LOCK}


@dataclasses.dataclass(frozen=True)
class Leftover:
    """Something that nobody needs.

    Attributes:
      path: A file or directory.
      what: For people.
      why: How it is known that nobody needs it.
      num_bytes: On the disk.
    """

    path: pathlib.Path
    what: str
    why: str
    num_bytes: int


def find(paths: Iterable[str | os.PathLike[str]]) -> list[Leftover]:
    """Looks in directories: an `nvme_path`, a run directory, a folder of runs or checkpoints, a temporary directory.

    Each is searched itself, and so are run directories in it (one level down). Changes nothing.

    Raises:
      FileNotFoundError, NotADirectoryError: a path is no directory.
    """
    found: dict[pathlib.Path, Leftover] = {}
    for path in paths:
        path = pathlib.Path(path).absolute()
        if not stat.S_ISDIR(path.stat().st_mode):
            raise NotADirectoryError(20, "not a directory", str(path))
        for folder in _folders(path):
            for entry in _entries(folder):
                leftover = _judge(entry)
                if leftover is not None:
                    found.setdefault(leftover.path, leftover)
    whole = [leftover for leftover in found.values() if leftover.path.parent not in found]
    return sorted(whole, key=lambda leftover: leftover.path)


def delete(leftover: Leftover) -> bool:
    """Removes one, if it is still what it was. Returns whether it did.

    Raises:
      OSError: it cannot be removed.
    """
    path = leftover.path
    if _judge(path) is None:
        return False
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return True
    with contextlib.ExitStack() as stack:
        if (path / LOCK).exists():  # nobody can take it while it is being removed
            try:
                stack.callback(RunDir(path).release)
            except OwnerError:
                return False
        if _PAGES.fullmatch(path.name):  # whatever a user put there stays
            for name in _PAGE_FILES:
                (path / name).unlink(missing_ok=True)
            for entry in _entries(path):
                if _passing(entry.name):
                    entry.unlink()
            with contextlib.suppress(OSError):
                path.rmdir()
        else:
            shutil.rmtree(path)
    return not path.exists()


def remove_own(
    run_dir: pathlib.Path,
    run_id: str,
    pages: Sequence[pathlib.Path] = (),
    nvme_paths: Sequence[str | os.PathLike[str]] = (),
) -> list[pathlib.Path]:
    """What this run's own dead processes left: the caller owns the directory, so none of it is in use.

    Args:
      run_dir, run_id: The run.
      pages: Its directories of pages.
      nvme_paths: Where earlier runs of the directory may have had theirs.

    Returns:
      What was removed. What cannot be removed stays.
    """
    removed = []
    for folder in (run_dir, *(run_dir / name for name in (COMMITS, RETAINED, CHECKPOINTS)), *pages):
        for entry in _entries(folder):
            own = _UNFINISHED.fullmatch(entry.name) or _GENERATE.fullmatch(entry.name) or _JOURNAL.fullmatch(entry.name)
            if own and not _is_link(entry) and held_by(entry) is None:
                _remove(entry)
                removed.append(entry)
    for folder in map(pathlib.Path, nvme_paths):
        for entry in _entries(folder):
            name = _PAGES.fullmatch(entry.name)
            if name and name[1] != run_id and not _is_link(entry) and signed_by(entry) == run_dir.absolute():
                _remove(entry)
                removed.append(entry)
    return removed


def _remove(path: pathlib.Path) -> None:
    with contextlib.suppress(OSError):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _folders(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Where leftovers can be: the directory, and what belongs to run directories here and one level down."""
    yield path
    for run_dir in (path, *(entry for entry in _entries(path) if entry.is_dir() and not _is_link(entry))):
        for name in (CHECKPOINTS, COMMITS, RETAINED, PAGES):
            if (run_dir / LOCK).exists() and (run_dir / name).is_dir():
                yield run_dir / name
        if run_dir != path and ((run_dir / LOCK).exists() or run_dir.name == CHECKPOINTS or _is_pages(run_dir)):
            yield run_dir


def _is_pages(path: pathlib.Path) -> bool:
    return _PAGES.fullmatch(path.name) is not None


def _entries(folder: pathlib.Path) -> list[pathlib.Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _is_link(path: pathlib.Path) -> bool:
    return path.is_symlink()


def _judge(path: pathlib.Path) -> Leftover | None:
    """Is this a leftover?"""
    try:
        if _is_link(path) or path.stat().st_uid != os.getuid():
            return None
        verdict = _directory(path) if path.is_dir() else _file(path)
        return None if verdict is None else Leftover(path, *verdict, _num_bytes(path))
    except OSError:  # gone meanwhile, or not ours to look at
        return None


def _file(path: pathlib.Path) -> tuple[str, str] | None:
    if probe := _PROBE.fullmatch(path.name):
        if not pathlib.Path(f"/proc/{probe[1]}").exists():
            return "file that tried a drive", f"process {probe[1]} is gone"
        return None
    if _TRIED.fullmatch(path.name) and _is_quiet(path):
        return "file that tried a drive", _quiet()
    if _JOURNAL.fullmatch(path.name) and path.parent.name == COMMITS:
        return _unowned(path.parent.parent, "unfinished journal", path)
    if _UNFINISHED.fullmatch(path.name):
        run_dir = path.parent.parent if path.parent.name == RETAINED else path.parent
        return _unowned(run_dir, "unfinished manifest", path)
    return None


def _directory(path: pathlib.Path) -> tuple[str, str] | None:
    names = {entry.name for entry in _entries(path)}
    if found := _PAGES.fullmatch(path.name):
        return _pages(path, found[1], names)
    if _TEMPORARY_RUN.fullmatch(path.name) and LOCK in names:
        return _unowned(path, "run without a run_dir", path)
    if _UNFINISHED.fullmatch(path.name) and all(name in _CHECKPOINT_FILES or _passing(name) for name in names):
        run_dir = path.parent.parent if path.parent.name == CHECKPOINTS else path
        return _unowned(run_dir, "unfinished checkpoint", path) if held_by(path) is None else None
    if _ABANDONED.fullmatch(path.name) and path.parent.name == CHECKPOINTS:
        return _unowned(path.parent.parent, "abandoned checkpoint", path, "the run went back to an earlier step")
    if _DAMAGED.fullmatch(path.name) and (path.parent / LOCK).exists():
        return _unowned(path.parent, "damaged commit log", path, "the run went on without it")
    if _GENERATE.fullmatch(path.name):
        return _unowned(path, "copy for generation", path)
    return None


def _unowned(owner: pathlib.Path, what: str, path: pathlib.Path, why: str = "") -> tuple[str, str] | None:
    """A leftover unless its owner lives. Without a lock to ask, time decides."""
    if (owner / LOCK).exists():
        return None if held_by(owner) is not None else (what, why or "its process is gone")
    return (what, why or _quiet()) if _is_quiet(path) else None


def _pages(path: pathlib.Path, run_id: str, names: set[str]) -> tuple[str, str] | None:
    """Pages under an nvme_path belong to the run directory that signed them."""
    if not all(name in _PAGE_FILES or _passing(name) for name in names):
        return None
    run_dir = signed_by(path)
    if run_dir is None:
        unsigned = not names & _PAGE_FILES and _is_quiet(path)  # it is signed before pages are made
        return ("pages", f"nobody signed them; {_quiet()}") if unsigned else None
    if not run_dir.exists():
        # A drive that is not mounted looks the same: its mount point must at least be there.
        return ("pages", f"{run_dir} is gone") if run_dir.parent.exists() and _is_quiet(path) else None
    if held_by(run_dir) is not None:
        return None
    if _TEMPORARY_RUN.fullmatch(run_dir.name) and (run_dir / LOCK).exists():
        return "pages", f"the process of {run_dir} is gone"
    try:
        manifest = read_manifest(run_dir)
    except ResumeError:
        return None  # damaged, not gone
    if manifest is None:
        return ("pages", f"{run_dir} holds no run") if _has_no_saves(run_dir) else None
    if manifest.get("run_id") == run_id or _refers(run_dir, manifest, path):
        return None
    return "pages", f"{run_dir} holds another run now"


def _passing(name: str) -> bool:
    """A file that is there for a moment only."""
    return bool(_PROBE.fullmatch(name) or _UNFINISHED.fullmatch(name))


def _has_no_saves(run_dir: pathlib.Path) -> bool:
    return not any((run_dir / RETAINED).glob("step_*.json"))


def _refers(run_dir: pathlib.Path, manifest: dict[str, object], path: pathlib.Path) -> bool:
    """Does the run's manifest, or that of a step it retains, name these pages?"""
    manifests = [manifest]
    for retained in (run_dir / RETAINED).glob("step_*.json"):
        with contextlib.suppress(ResumeError):
            manifests.append(read_manifest(retained.parent, retained.name) or {})
    return any(str(path) in (found.get("paths") or ()) for found in manifests)  # type: ignore[operator]


def _is_quiet(path: pathlib.Path) -> bool:
    newest = max((entry.lstat().st_mtime for entry in (path, *(_entries(path) if path.is_dir() else ()))), default=0)
    return time.time() - newest > QUIET_S


def _quiet() -> str:
    return f"not touched for {QUIET_S / 60:.0f} minutes"


def _num_bytes(path: pathlib.Path) -> int:
    total = 0
    for entry in (path, *(path.rglob("*") if path.is_dir() else ())):
        with contextlib.suppress(OSError):
            total += entry.lstat().st_blocks * 512
    return total


__all__ = ["Leftover", "delete", "find", "remove_own"]
