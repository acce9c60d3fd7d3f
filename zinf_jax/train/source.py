"""What a run can be resumed from: itself at its last committed step, a step that it retained, or a checkpoint.

RUN_DIR/run.json                       what stays while a run lasts
RUN_DIR/commits/                       its commits: which step is durable, and where
RUN_DIR/retained/step_00000012.json    a step that is kept: its extents are not used again
RUN_DIR/checkpoints/step_00000012/     a copy, with a run.json of its own
"""

import dataclasses
import functools
import math
import pathlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from zinf_jax.errors import ResumeError
from zinf_jax.leaves import LeafKind
from zinf_jax.stream.engine import state_extents
from zinf_jax.stream.records import RecordFormat
from zinf_jax.tier import Commit, KindExtents, Tables
from zinf_jax.tier import read_commits as read_log
from zinf_jax.train.manifest import FORMAT, decode_tables, fingerprint
from zinf_jax.train.rundir import read_manifest

CHECKPOINTS = "checkpoints"
COMMITS = "commits"
RETAINED = "retained"
PAGES = "pages"


@dataclasses.dataclass(frozen=True)
class Source:
    """Something to resume from.

    Attributes:
      path: The checkpoint, the retained step's file, or the run directory itself.
      manifest: What stays, and the counters of the step.
      tables: Where the step's chunks are.
      in_place: The run directory's own pages go on to be used.
      previous: For a run directory: the counters and tables of the commit before, which may still be whole.
    """

    path: pathlib.Path
    manifest: dict[str, Any]
    tables: Tables
    in_place: bool
    previous: "tuple[dict[str, Any], Tables] | None" = None

    @property
    def paths(self) -> list[pathlib.Path]:
        """Directories of its page files."""
        return page_directories(self.path, self.manifest)

    @functools.cached_property
    def extents(self) -> dict[str, KindExtents]:
        """Where its chunks lie."""
        return extents_of(self.manifest)

    def before(self) -> "Source | None":
        """The commit before this one."""
        if self.previous is None:
            return None
        counters, tables = self.previous
        return dataclasses.replace(self, manifest=self.manifest | counters, tables=tables, previous=None)

    def check(self, weights_dtype: Any, slots: Sequence[str], *, weights_only: bool) -> None:
        """Can this run go on from here? Warns where the environment differs in what bits depend on.

        Args:
          weights_dtype, slots: This run's.
          weights_only: Only weights and masters are taken, so the optimizer may be another.

        Raises:
          ResumeError: another precision or other optimizer state.
        """
        if self.manifest["weights_dtype"] != str(weights_dtype):
            raise ResumeError(
                f"{self.path} holds {self.manifest['weights_dtype']} weights, this config trains in {weights_dtype}: "
                "use the same bf16/fp16 section"
            )
        if self.manifest["slots"] != list(slots) and (self.in_place or not weights_only):
            advice = "restore into another run_dir" if weights_only else "use the same optimizer, or restore: weights"
            raise ResumeError(
                f"{self.path} holds optimizer state {self.manifest['slots']}, this optimizer keeps {list(slots)}: "
                + advice
            )
        found, stored = fingerprint(), self.manifest["fingerprint"]
        changed = [f"{k}: {stored[k]!r} -> {found[k]!r}" for k in found if stored.get(k) != found[k]]
        if changed:
            warnings.warn("resuming in another environment, bits may differ: " + "; ".join(changed), stacklevel=4)


def page_directories(path: pathlib.Path, manifest: Mapping[str, Any]) -> list[pathlib.Path]:
    """Where the page files of a run directory, retained step or checkpoint are.

    Pages inside a run directory move with it; those under an `nvme_path` stay where they were made.
    """
    if manifest["status"] == "saved":
        return [path]
    run_dir = path.parent.parent if path.is_file() else path
    paths = [pathlib.Path(name) for name in manifest["paths"]]
    return [run_dir.absolute() / PAGES if found.name == PAGES else found for found in paths]


class _StoredPage(NamedTuple):
    num_elements: int
    itemsize: int
    trainable: bool


def extents_of(manifest: Mapping[str, Any]) -> dict[str, KindExtents]:
    """Where the chunks of a stored run lie, from its manifest alone."""
    pages = [
        _StoredPage(
            math.prod(page["shape"]), jnp.dtype(page["dtype"]).itemsize, page["kind"] == LeafKind.TRAINABLE.value
        )
        for page in manifest["layout"]["pages"]
    ]  # fmt: skip
    record = RecordFormat.of(jnp.dtype(manifest["weights_dtype"]), len(manifest["slots"]))
    return state_extents(pages, record, manifest["chunk_elements"], manifest["shares"])


def find_latest(run_dir: pathlib.Path) -> Source | None:
    """What `resume="auto"` takes: the run's last committed step, else its newest checkpoint, else nothing (a new run).

    Raises:
      ResumeError: the run was interrupted without commits and has no checkpoint.
    """
    own = read_manifest(run_dir)
    if own is not None and own["status"] in ("closed", "live"):
        return _committed(run_dir, own, in_place=True)
    saved = [
        (m["step"], path)
        for path in (run_dir / CHECKPOINTS).glob("*")
        if not path.name.startswith(".")
        and (m := read_manifest(path)) is not None
        and (own is None or m["run_id"] == own["run_id"])
    ]
    if saved:
        return open_source(max(saved)[1], run_dir)
    if own is not None:
        raise ResumeError(
            f"{run_dir} was interrupted while its pages were in use (durability is off) and has no checkpoint under "
            f"{CHECKPOINTS}/: start anew with overwrite=True, and save from time to time (train.save_every)"
        )
    return None


def _committed(run_dir: pathlib.Path, own: dict[str, Any], *, in_place: bool) -> Source:
    _check_format(run_dir, own)
    last, before = read_commits(run_dir)
    if last is None:
        raise ResumeError(f"{run_dir} has no committed step: start anew with overwrite=True")
    previous = None if before is None else (before.meta, before.tables)
    return Source(run_dir, own | last.meta, last.tables, in_place, previous)


def read_commits(run_dir: pathlib.Path) -> tuple[Commit | None, Commit | None]:
    """A run's last commit and the one before, without changing a byte: whoever owns the run goes on writing them.

    Raises:
      ResumeError, StoreError: see `CommitLog`.
    """
    return read_log(run_dir / COMMITS)


def _check_format(path: pathlib.Path, found: dict[str, Any]) -> None:
    if found["format"] != FORMAT:
        raise ResumeError(f"{path} has format {found['format']}, this version reads {FORMAT}")


def open_source(path: pathlib.Path, run_dir: pathlib.Path) -> Source:
    """A named checkpoint, retained step or run directory.

    Raises:
      ResumeError: there is none at `path`, or its pages are not at rest.
    """
    if path.is_file() and path.parent.name == RETAINED:
        found = read_manifest(path.parent, path.name)
        assert found is not None
        _check_format(path, found)
        in_place = path.parent.parent.resolve() == run_dir.resolve()
        return Source(path, found, decode_tables(found["tables"]), in_place)
    found = read_manifest(path)
    if found is None:
        raise ResumeError(f"{path} is not a checkpoint, retained step or run directory: it has no run.json")
    _check_format(path, found)
    if found["status"] == "open":
        raise ResumeError(f"{path} was interrupted while its pages were in use: resume from one of its checkpoints")
    if found["status"] == "saved":
        return Source(path, found, decode_tables(found["tables"]), in_place=False)
    # Reading another run's committed step from where it is leaves that run as it is.
    return _committed(path, found, in_place=path.resolve() == run_dir.resolve())


def retained_steps(run_dir: pathlib.Path) -> list[tuple[int, pathlib.Path]]:
    """(step, file) of the steps that a run retains, in order."""
    files = sorted((run_dir / RETAINED).glob("step_*.json"))
    return [(int(file.stem.removeprefix("step_")), file) for file in files]


def fallbacks(source: Source, run_dir: pathlib.Path) -> list[Source]:
    """Where to go back to from a damaged step: the commit before, then retained steps, the newest first."""
    found = [s for s in [source.before()] if s is not None]
    for step, path in reversed(retained_steps(run_dir)):
        if step < source.manifest["step"]:
            found.append(open_source(path, run_dir))
    return found
