"""Is a run whole? Reads every chunk of its committed step and of the steps that it retains, and compares checksums.

Changes nothing, builds no model, starts no JAX device: where chunks lie and how large they are follows from what is
stored with the run. The directory is owned meanwhile, so that nobody trains on it (a retained step and a checkpoint do
not change, and need no owner). Memory: see `tier.sweep`.
"""

import contextlib
import dataclasses
import errno
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

import aio_ffi
from zinf_jax.errors import ResumeError, StoreError
from zinf_jax.stream.engine import VERSIONED
from zinf_jax.tier import Tables
from zinf_jax.tier.journal import parse
from zinf_jax.tier.store import chunk_seed
from zinf_jax.tier.sweep import sweep
from zinf_jax.tier.versions import NOWHERE
from zinf_jax.train.manifest import COUNTERS, FORMAT
from zinf_jax.train.rundir import MANIFEST, RunDir, read_manifest
from zinf_jax.train.source import (
    CHECKPOINTS,
    COMMITS,
    RETAINED,
    Source,
    open_source,
    read_commits,
    retained_steps,
)

_STAYS = ("format", "status", "run_id", "slots", "weights_dtype", "chunk_elements", "paths", "shares", "num_versions",
          "layout", "fingerprint")  # fmt: skip

Progress = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True)
class Problem:
    """Something that is not as it was written.

    Attributes:
      what: For people.
      page, kind, file, offset, num_bytes: Of a chunk; "" and None where the problem is not in one.
      step: In which the chunk was written.
      expected, found: Checksums, or sizes.
    """

    what: str
    page: str = ""
    kind: str = ""
    file: str = ""
    offset: int | None = None
    num_bytes: int | None = None
    step: int | None = None
    expected: str = ""
    found: str = ""


@dataclasses.dataclass(frozen=True)
class StepReport:
    """A step that can be resumed from.

    Attributes:
      step: Its number.
      where: "committed", "the commit before", "retained" or "checkpoint".
      path: What a resume is given.
      num_chunks, num_bytes: That were read.
      problems: What is wrong.
    """

    step: int
    where: str
    path: pathlib.Path
    num_chunks: int
    num_bytes: int
    problems: tuple[Problem, ...]


@dataclasses.dataclass(frozen=True)
class Report:
    """What was found.

    Attributes:
      path: That was looked at.
      what: "run directory", "retained step" or "checkpoint".
      steps: The committed one first.
      problems: That belong to no single step.
      notes: What is unusual but no damage.
      advice: What can be done.
    """

    path: pathlib.Path
    what: str
    steps: tuple[StepReport, ...]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    advice: tuple[str, ...]

    @property
    def whole(self) -> bool:
        return not self.problems and not any(step.problems for step in self.steps if step.where != _BEFORE)


_BEFORE = "the commit before"


def verify(path: str | pathlib.Path, progress: Progress | None = None) -> Report:
    """Checks a run directory, a retained step's file or a checkpoint.

    Args:
      path: Which.
      progress: Called with (bytes read, bytes).

    Returns:
      What was found; damage is no exception.

    Raises:
      ResumeError: there is no run at `path`.
      OwnerError: the run is being trained.
    """
    path = pathlib.Path(path).absolute()
    name = path.name if path.is_file() else MANIFEST
    folder = path.parent if path.is_file() else path
    if path.is_file() and (folder.name != RETAINED or re.fullmatch(r"step_\d+\.json", name) is None):
        raise ResumeError(f"{path} is not a retained step, checkpoint or run directory")
    if not (folder / name).exists():
        raise ResumeError(f"{path} is not a checkpoint, retained step or run directory: it has no {MANIFEST}")
    try:
        manifest = read_manifest(folder, name)
        wrong = _check_manifest(manifest)
    except (ResumeError, OSError) as error:
        manifest, wrong = None, [str(error)]
    if manifest is None or wrong:
        problems = tuple(Problem(f"manifest: {text}", file=str(folder / name)) for text in wrong)
        return Report(path, "run directory", (), problems, (), tuple(_advice(path, (), problems)))
    if path.is_file() or manifest["status"] == "saved":
        what = "retained step" if path.is_file() else "checkpoint"
        with _Chunks() as chunks:
            step = chunks.check([_Candidate.of(what if what == "checkpoint" else "retained", path)], progress)
        if not path.exists():
            raise ResumeError(f"{path} was released while it was verified")
        return Report(path, what, tuple(step), (), (), tuple(_advice(path, step, ())))
    with _owned(path):
        return _verify_run(path, manifest, progress)


@contextlib.contextmanager
def _owned(path: pathlib.Path) -> Iterator[None]:
    try:
        directory = RunDir(path)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        yield  # nobody can train what cannot be written
        return
    try:
        yield
    finally:
        directory.release()


def _check_manifest(manifest: Mapping[str, Any] | None) -> list[str]:
    if not isinstance(manifest, Mapping):
        return ["it is no JSON object"]
    if manifest.get("format") != FORMAT:
        return [f"it has format {manifest.get('format')!r}, this version reads {FORMAT}"]
    needed = _STAYS + ((*COUNTERS, "tables") if manifest.get("status") in ("saved", "retained") else ())
    missing = [key for key in needed if key not in manifest]
    return [f"it lacks {', '.join(missing)}"] if missing else []


def _verify_run(path: pathlib.Path, manifest: dict[str, Any], progress: Progress | None) -> Report:
    problems: list[Problem] = []
    notes: list[str] = []
    candidates: list[_Candidate] = []
    before: _Candidate | None = None
    if manifest["status"] == "open":
        text = "interrupted while its pages were in use (durability is off): they are of no step, and were not read"
        problems.append(Problem(text, file=str(path / MANIFEST)))
    else:
        notes += _torn(path / COMMITS, problems)
        try:
            last, previous = read_commits(path)
            if last is None:
                raise ResumeError(f"{path / COMMITS} holds no committed step")
        except (ResumeError, StoreError, ValueError, KeyError) as error:
            if not problems:
                problems.append(Problem(f"commits: {error}", file=str(path / COMMITS)))
        else:
            source = Source(path, manifest | last.meta, last.tables, True)
            candidates.append(_Candidate("committed", source))
            if previous is not None:
                before = _Candidate(_BEFORE, Source(path, manifest | previous.meta, previous.tables, True))
    for _, file in retained_steps(path):
        try:
            wrong = _check_manifest(read_manifest(file.parent, file.name))
            if wrong:
                raise ResumeError("; ".join(wrong))
            candidates.append(_Candidate.of("retained", file))
        except (ResumeError, OSError, ValueError, KeyError) as error:
            problems.append(Problem(f"retained step: {error}", file=str(file)))
    with _Chunks() as chunks:
        steps = chunks.check(candidates, progress)
        if before is not None and steps and steps[0].where == "committed" and steps[0].problems:
            steps += chunks.check([before], progress)  # what integrity.fallback would go back to first
    return Report(
        path, "run directory", tuple(steps), tuple(problems), tuple(notes), tuple(_advice(path, steps, problems))
    )


def _torn(folder: pathlib.Path, problems: list[Problem]) -> Iterator[str]:
    """Looks at the logs by themselves."""
    for file in sorted(folder.glob("*.log")):
        data = file.read_bytes()
        try:
            _, ends = parse(data, str(file))
        except StoreError as error:
            problems.append(Problem(f"commits: {error}", file=str(file)))
            continue
        end = ends[-1] if ends else 0
        if end < len(data):
            yield (
                f"{file.name} ends in {len(data) - end} bytes of a record that was not finished when the process died: "
                "a resume drops them"
            )


@dataclasses.dataclass(frozen=True)
class _Candidate:
    where: str
    source: Source

    @classmethod
    def of(cls, where: str, path: pathlib.Path) -> "_Candidate":
        return cls(where, open_source(path, path.parent.parent if path.is_file() else path))


class _Chunks:
    """Reads chunks of steps. A chunk that several steps share is read once."""

    def __init__(self) -> None:
        self._engine = aio_ffi.Engine(aio_ffi.EngineOptions())
        self._files: dict[str, aio_ffi.File | None] = {}
        self._seen: dict[tuple[Any, ...], Problem | None] = {}

    def __enter__(self) -> "_Chunks":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(aio_ffi.AioError):  # of a read whose problem is reported
            self._engine.close()

    def check(self, candidates: Sequence[_Candidate], progress: Progress | None) -> list[StepReport]:
        """Raises StoreError: a candidate's tables are of another layout (never reported as whole)."""
        works = [_Work.of(candidate) for candidate in candidates]
        total = sum(place.num_bytes for work in works for place in work.places)
        done = 0

        def report(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            if progress is not None:
                progress(done, total)

        return [self._check(work, report) for work in works]

    def _check(self, work: "_Work", report: Callable[[int], None]) -> StepReport:
        problems = list(work.problems) + self._check_files(work)
        broken = {problem.file for problem in problems if problem.file}
        todo = [item for item in work.places if item.file not in broken]
        problems += self._read([item for item in todo if item.key not in self._seen], report)
        for item in work.places:
            if item.key in self._seen and (known := self._seen[item.key]) is not None and known not in problems:
                problems.append(known)
        source = work.candidate.source
        return StepReport(
            int(source.manifest["step"]), work.candidate.where, source.path, len(work.places),
            sum(item.num_bytes for item in work.places), tuple(problems),
        )  # fmt: skip

    def _check_files(self, work: "_Work") -> list[Problem]:
        """Are the page files there, and long enough for what the step needs?"""
        needed: dict[str, int] = {}
        for item in work.places:
            needed[item.file] = max(needed.get(item.file, 0), item.offset + item.num_bytes)
        problems = []
        for file, num_bytes in needed.items():
            path = pathlib.Path(file)
            if not path.exists():
                problems.append(Problem("the page file is missing", file=file, expected=f"{num_bytes} bytes"))
            elif (found := path.stat().st_size) < num_bytes:
                text = "the page file is cut short"
                problems.append(Problem(text, file=file, expected=f"{num_bytes} bytes", found=f"{found} bytes"))
        return problems

    def _read(self, items: Sequence["_Item"], report: Callable[[int], None]) -> list[Problem]:
        found: list[Problem] = []
        wanted = [(item, item.num_bytes) for item in items]
        for item, handle in sweep(wanted, self._start, max((n for _, n in wanted), default=0)):
            problem = None
            try:
                handle.wait()
            except aio_ffi.AioError as error:
                problem = item.problem("cannot be read", found=str(error))
            else:
                if handle.checksum != item.checksum:
                    problem = item.problem("not what was written", found=f"{handle.checksum:08x}")
            self._seen[item.key] = problem
            if problem is not None:
                found.append(problem)
            report(item.num_bytes)
        return found

    def _start(self, item: "_Item", data: np.ndarray) -> "aio_ffi.Handle":
        return self._engine.read(self._open(item.file), item.offset, data, seed=item.seed)

    def _open(self, file: str) -> "aio_ffi.File":
        opened = self._files.get(file)
        if opened is None:
            opened = self._files[file] = self._engine.open(file, readonly=True)
        return opened


@dataclasses.dataclass(frozen=True)
class _Item:
    """A chunk of a step."""

    kind: str
    page: str
    file: str
    offset: int
    num_bytes: int
    step: int
    checksum: int
    seed: int

    @property
    def key(self) -> tuple[Any, ...]:
        return self.file, self.offset, self.checksum, self.seed

    def problem(self, what: str, *, found: str) -> Problem:
        return Problem(
            what, self.page, self.kind, self.file, self.offset, self.num_bytes, self.step, f"{self.checksum:08x}", found
        )


@dataclasses.dataclass(frozen=True)
class _Work:
    candidate: _Candidate
    places: tuple[_Item, ...]
    problems: tuple[Problem, ...]

    @classmethod
    def of(cls, candidate: _Candidate) -> "_Work":
        source = candidate.source
        tables: Tables = source.tables
        extents, directories = source.extents, source.paths
        items: list[_Item] = []
        problems: list[Problem] = []
        for kind in VERSIONED:
            places = extents[kind].places
            if kind not in tables or len(tables[kind].bank) != len(places):
                problems.append(Problem(f"the tables of {kind} are not those of this layout", kind=kind))
                continue
            names = [p["name"] for n, p in enumerate(source.manifest["layout"]["pages"])
                     for _ in extents[kind].chunks_of(n)]  # fmt: skip
            table = tables[kind]
            for index, place in enumerate(places):
                bank, version = int(table.bank[index]), int(table.version[index])
                file = str(directories[place.path] / f"{kind}.pages")
                if bank == NOWHERE:
                    problems.append(Problem("was never written", names[index], kind, num_bytes=place.num_bytes))
                    continue
                offset = bank * extents[kind].bank_bytes[place.path] + place.offset
                seed = chunk_seed(kind, index, version)
                items.append(
                    _Item(kind, names[index], file, offset, place.num_bytes, version, int(table.checksum[index]), seed)
                )
        return cls(candidate, tuple(items), tuple(problems))


def _advice(path: pathlib.Path, steps: Iterable[StepReport], problems: Iterable[Problem]) -> Iterator[str]:
    """What can be done about it."""
    steps = list(steps)
    bad = [step for step in steps if step.problems]
    if not bad and not list(problems):
        return
    good = [step for step in steps if not step.problems]
    committed = next((step for step in steps if step.where == "committed"), None)
    if committed is not None and not committed.problems:
        yield f"the committed step {committed.step} is whole: the run goes on with resume='auto'"
    elif good:
        newest = max(good, key=lambda step: step.step)
        yield (
            f"step {newest.step} ({newest.where}) is whole: resume='auto' with integrity.fallback: true goes back to it"
            " (a resume without goes on from the damaged one, and overwrites this one where it is not kept in place)"
            if committed is not None
            else f"step {newest.step} ({newest.where}) is whole: resume={str(newest.path)!r}"
        )
    for step in bad:
        if step.where == "retained":
            yield f"give the retained step {step.step} up: trainer.release({step.step}), or remove {step.path}"
    run_dir = path.parent.parent if path.is_file() else path
    saved = sorted((run_dir / CHECKPOINTS).glob("step_*"))
    if saved:
        yield f"there are checkpoints to resume from, verify them: {', '.join(map(str, saved))}"
    elif not good:
        yield "nothing of this run is known to be whole: resume from a checkpoint made elsewhere, or start anew"
    if bad:
        yield "check the drive (smartctl -a, dmesg): it returned other bytes than it was given"


__all__ = ["Problem", "Report", "StepReport", "verify"]
