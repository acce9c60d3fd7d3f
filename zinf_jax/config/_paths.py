"""Checks the directories for pages, in the first second of a run and before any parameter exists."""

import os
import shutil
import tempfile
from pathlib import Path

from zinf_jax.config._schema import Config
from zinf_jax.errors import ConfigError
from zinf_jax.units import format_bytes


def uses_nvme(config: Config) -> bool:
    """Whether anything is, or by the plan could be, on nvme."""
    placement = config.placement
    return any(
        tier in ("nvme", None)
        for tier in (placement.weights, placement.optimizer, placement.gradients, placement.residuals)
    )


def check_paths(config: Config, run_dir: str | Path | None = None, *, needed_bytes: int = 0) -> tuple[Path, ...]:
    """Makes sure that a run can write its files, and makes the directories.

    Args:
      config: Its `nvme_path` is checked wherever the state is placed: at the latest, a closed run's pages rest there.
      run_dir: Where the run's own files go, and pages without an `nvme_path`; None: a temporary directory. May be
        relative, and is made with its parents: it is named by hand, not by a file that came from another machine.
      needed_bytes: What the plan will write, over all directories; 0: unknown yet.

    Returns:
      The directories for pages, absolute; empty if no page can be on nvme, or if neither `nvme_path` nor `run_dir` says
      where.

    Raises:
      ConfigError: a path is empty, relative, a symlink, a file, missing with its parent, not writable, on a disk that
        is too full.
    """
    own: tuple[Path, ...] = ()
    if run_dir is not None:
        if not str(run_dir).strip():
            raise ConfigError("run_dir is empty: name a directory, or leave it out for a temporary one")
        own = (_usable("run_dir", Path(run_dir).absolute(), parents=True),)
    if config.nvme_path is None:
        paths = own
    else:
        paths = tuple(_usable("nvme_path", Path(path), parents=False) for path in config.nvme_path)
    if not uses_nvme(config):
        return ()
    _check_space(paths, needed_bytes)
    return paths


def _usable(key: str, path: Path, *, parents: bool) -> Path:
    if not str(path).strip() or path == Path():
        raise ConfigError(f"{key} is empty: name a directory on a local drive")
    if not path.is_absolute():
        raise ConfigError(
            f"{key} = {str(path)!r}: a relative path depends on where it is run; write {str(path.absolute())!r}"
        )
    if path.is_symlink():
        raise ConfigError(
            f"{key} = {str(path)!r}: a symlink could be pointed elsewhere under a run; write {str(path.resolve())!r}"
        )
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{key} = {str(path)!r}: is a file, not a directory; name a directory")
    if not path.exists():
        if not parents and not path.parent.is_dir():
            raise ConfigError(
                f"{key} = {str(path)!r}: neither it nor {str(path.parent)!r} exists; mount the drive, or change {key} "
                f"to a directory on a local drive"
            )
        try:
            path.mkdir(mode=0o700, parents=parents, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{key} = {str(path)!r}: cannot be made ({error.strerror}); change {key}") from None
    try:
        with tempfile.NamedTemporaryFile(dir=path, prefix=".zinf-probe-") as probe:
            probe.write(b"x")
            probe.flush()
    except OSError as error:
        raise ConfigError(
            f"{key} = {str(path)!r}: not writable ({error.strerror}); change {key}, or the directory's owner"
        ) from None
    return path


def _check_space(paths: tuple[Path, ...], needed_bytes: int) -> None:
    free = {os.stat(path).st_dev: shutil.disk_usage(path).free for path in paths}
    if needed_bytes > sum(free.values()):
        raise ConfigError(
            f"nvme_path needs {format_bytes(needed_bytes)}, but {', '.join(map(str, paths))} "
            f"has {format_bytes(sum(free.values()))} free: add a drive to nvme_path, or put less on nvme"
        )
