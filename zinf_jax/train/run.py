"""A run's place on disk: who owns it, what it goes on from, and which of its steps are durable.

With durability on, the run's status is "live": whatever happens, its last commit holds. With durability off it is
"open" while its pages are in use (they are then of no step), and "closed" at rest.
"""

import dataclasses
import errno
import itertools
import os
import pathlib
import secrets
import shutil
import tempfile
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from zinf_jax.config import Config
from zinf_jax.errors import ConfigError, ResumeError, StoreError
from zinf_jax.stream.contents import InitSlots
from zinf_jax.stream.engine import VERSIONED, StepSetup, StreamEngine
from zinf_jax.tier import CommitLog
from zinf_jax.tier.directories import sync_directory
from zinf_jax.train import checkpoint, relayout, setup
from zinf_jax.train.leftovers import remove_own
from zinf_jax.train.manifest import COUNTERS, describe_run
from zinf_jax.train.rundir import MANIFEST, RunDir, belongs, read_manifest, sign_pages, signed_by
from zinf_jax.train.source import (
    COMMITS,
    RETAINED,
    Source,
    find_latest,
    open_source,
    page_directories,
    read_commits,
    retained_steps,
)


class Run:
    """A run directory that this process owns.

    Args:
      config: Says where pages go and how durable steps are.
      run_dir: None: a temporary one, removed at the end.
      resume: None, "auto" or a path; see `Trainer`.
      overwrite: Give up the run that is there.

    Attributes:
      source: What the run goes on from; None: a new run.
      durability: Which steps are committed.
      same_pages: The source's pages are used as they are; else their contents are laid out anew.
      weights_only: Only weights and masters are taken from `source`.

    Raises:
      OwnerError: another live trainer owns the directory.
      ResumeError: another run is there, or there is nothing to resume from.
    """

    def __init__(self, config: Config, run_dir: Any, resume: Any, overwrite: bool) -> None:
        self._config = config
        self.same_pages = True
        self.pid = os.getpid()
        self._paths: list[pathlib.Path] = []
        self._committed: dict[str, Any] | None = None
        self._coming: dict[str, Any] | None = None  # counters of the step whose commit follows its update
        self._keeps: dict[int, _Keep] = {}  # steps to be retained once they are durable
        # "auto" goes on with what this very run did, whatever it once started from.
        self.weights_only = config.restore == "weights" and resume != "auto"
        self.temporary = run_dir is None
        if self.temporary:
            run_dir = tempfile.mkdtemp(prefix="zinf-run-", dir=config.nvme_path[0] if config.nvme_path else None)
        self.path = pathlib.Path(run_dir)
        self.durability = setup.Durability.of(config, has_run_dir=not self.temporary)
        if self.temporary and config.streaming.durability not in (None, "off"):
            warnings.warn("durability needs a run_dir: without one nothing can be resumed", stacklevel=4)
        self.directory = RunDir(self.path)
        try:
            manifest = read_manifest(self.path)
            self.source = self._find_source(manifest, resume, overwrite)
            stored = None if self.source is None else self.source.manifest
            continues = stored is not None and manifest is not None and stored["run_id"] == manifest["run_id"]
            if manifest is not None and not continues and not overwrite:
                raise ResumeError(
                    f"{self.path} holds another run{self._at_step(manifest)}: pass overwrite=True to give that one "
                    "up, or another run_dir"
                )
            self.run_id = str(stored["run_id"]) if stored is not None and continues else secrets.token_hex(6)
            self._status = manifest["status"] if self._in_place and manifest is not None else None
            if not self._in_place:
                self._give_up(manifest)
            else:  # what was found becomes durable before any page is written
                self._whole_log()
                if (self.path / RETAINED).exists():
                    sync_directory(self.path / RETAINED)
        except BaseException:
            self.directory.release()
            raise

    def _whole_log(self) -> None:
        """Makes what the log says durable. One that is damaged is set aside if a retained step was named: the pages are
        that step's from now on.

        Raises:
          StoreError, ResumeError: it is damaged, and what is to be gone on with is in it.
        """
        folder = self.path / COMMITS
        try:
            CommitLog(folder).close()
        except (StoreError, ResumeError) as error:
            damaged = isinstance(error, ResumeError) or error.errno == errno.EBADMSG
            assert self.source is not None
            if not damaged or self.source.path == self.path:
                raise
            number = next(n for n in itertools.count(1) if not self.path.joinpath(f"{COMMITS}.damaged-{n}").exists())
            aside = self.path / f"{COMMITS}.damaged-{number}"
            folder.rename(aside)
            sync_directory(self.path)
            warnings.warn(f"{error}. Set aside as {aside}: going on from {self.source.path}", stacklevel=5)

    def _find_source(self, manifest: dict[str, Any] | None, resume: Any, overwrite: bool) -> Source | None:
        if resume is None:
            if manifest is not None and not overwrite:
                raise ResumeError(
                    f"{self.path} holds a run{self._at_step(manifest)}: pass resume='auto' to continue it, "
                    "overwrite=True to start anew, or another run_dir"
                )
            return None
        if resume == "auto":
            return find_latest(self.path)
        return open_source(pathlib.Path(resume), self.path)

    def _at_step(self, manifest: dict[str, Any]) -> str:
        """Where a run is, for people."""
        try:
            last, _ = read_commits(self.path)
        except (ResumeError, StoreError):
            return " whose commits are damaged"
        return "" if last is None or manifest["status"] == "open" else f" at step {last.meta['step']}"

    @property
    def _in_place(self) -> bool:
        return self.source is not None and self.source.in_place

    def _give_up(self, manifest: dict[str, Any] | None) -> None:
        """Removes what an earlier run left here; its checkpoints stay. What names the rest goes first: at no moment is
        there a run whose pages are gone."""
        (self.path / MANIFEST).unlink(missing_ok=True)
        sync_directory(self.path)
        for folder in (self.path / COMMITS, self.path / RETAINED, *self.path.glob(f"{COMMITS}.damaged-*")):
            shutil.rmtree(folder, ignore_errors=True)
        if manifest is not None:
            for directory in page_directories(self.path, manifest):
                if belongs(directory, self.path, manifest["run_id"]):
                    checkpoint.delete_pages(directory)

    # --- the engine ---------------------------------------------------------------------------------------------

    def open_engine(self, step: StepSetup, init_slots: InitSlots) -> StreamEngine:
        """Memory and files for a step.

        Raises:
          PlanError, StoreError, ConfigError: it does not fit, or a path cannot be used.
        """
        paths = setup.pages_directories(self._config, self.path, self.run_id)
        if self.source is not None and self._in_place:
            paths = self.source.paths
        for path in paths:
            if not belongs(path, self.path, self.run_id):
                raise ResumeError(
                    f"{self.path} is a copy of {signed_by(path)}, whose pages in {path} it would change: resume into "
                    "another run_dir, naming the run or one of its checkpoints"
                )
            sign_pages(path, self.path)
        self._paths = paths
        try:
            return self._make_engine(step, init_slots, paths)
        except BaseException:
            if not self._in_place:
                self.remove_pages()
            raise

    def _make_engine(self, step: StepSetup, init_slots: InitSlots, paths: list[pathlib.Path]) -> StreamEngine:
        if self.source is None or not self._in_place:
            shares = setup.measure_shares(paths, step.options.aio)
            engine = StreamEngine(step, init_slots, paths, shares=shares)
        else:
            retained = [open_source(path, self.path) for _, path in retained_steps(self.path)]
            before = self.source.before()
            tables = [self.source.tables, *(r.tables for r in retained)]
            used = max(1, *(t[kind].num_banks for t in tables for kind in VERSIONED))
            # The commit before may be gone back to, if it is still there; nothing depends on it.
            older = max((before.tables[kind].num_banks for kind in VERSIONED), default=1) if before else 1
            wanted = checkpoint.num_versions(len(retained), step.options.stream.num_versions)
            engine = StreamEngine(
                step, init_slots, paths, shares=self.source.manifest["shares"], reuse=used,
                num_versions=max(wanted, older),
            )  # fmt: skip
            engine.store.versions.retained = {r.manifest["step"]: r.tables for r in retained}
        return engine

    def remove_pages(self) -> None:
        """Removes the page files of a run that leaves nothing. Its engine is closed."""
        for path in self._paths:
            checkpoint.delete_pages(path)

    def restore(self, engine: StreamEngine, report: Callable[[str, int, int], None]) -> dict[str, Any]:
        """Brings the source's bytes into the engine.

        Returns:
          The counters that belong to them.

        Raises:
          ResumeError, StoreError: they do not fit, or are damaged.
        """
        assert self.source is not None
        if self.source.in_place:
            engine.store.versions.adopt(self.source.tables)
            if self._config.integrity.fallback:
                chosen = checkpoint.choose_whole(
                    engine, self.source, self.path, lambda done, total: report("verify", done, total)
                )
                if chosen is not self.source:
                    warnings.warn(
                        f"step {self.source.manifest['step']} of {self.path} is damaged: going on from step "
                        f"{chosen.manifest['step']}", stacklevel=5,
                    )  # fmt: skip
                    self.source = chosen
                    engine.store.versions.adopt(chosen.tables)
            if self.weights_only:
                self._go_back()
        load = checkpoint.load if self.same_pages else relayout.load
        load(engine, self.source, lambda done, total: report("restore", done, total), weights_only=self.weights_only)
        return self.source.manifest

    def _go_back(self) -> None:
        """Restoring weights alone changes pages: what is durable must not need those of a later step then."""
        assert self.source is not None
        if self.durability.every:
            log = CommitLog(self.path / COMMITS)
            if log.last is None or not _same(log.last.tables, self.source.tables):
                log.commit({name: self.source.manifest[name] for name in COUNTERS}, self.source.tables)
            log.close()
        else:
            self._status = "open"
            self.directory.write_manifest(self.directory.read_manifest() | {"status": "open"})  # type: ignore[operator]

    def begin(self, engine: StreamEngine, slots: tuple[str, ...], counters: dict[str, Any]) -> None:
        """The engine holds the state of a step: makes it durable, or notes that it is in use.

        Args:
          engine: At rest.
          slots: Of the optimizer.
          counters: Of the step.
        """
        self._slots = slots
        if self.durability.every:
            for path in (self.path.parent, *self._paths):  # names of files are durable when their directory is
                sync_directory(path)
            log = CommitLog(self.path / COMMITS)
            known = log.last is not None and self._in_place and log.last.meta["step"] == counters["step"]
            same = known and self.source is not None and _same(log.last.tables, self.source.tables)  # type: ignore[union-attr]
            self._committed = counters if same else None
            engine.attach_log(log)
            assert engine.committer is not None
            engine.committer.on_durable = lambda meta: self._keep(engine, meta["step"])
            if not same or self._status != "live" or self.weights_only:
                self.commit(engine, counters)
                self.wait(engine)
            self._set_status(engine, "live")
        elif not self._in_place:  # a run that is only looked at stays closed
            self.mark_in_use(engine)
        remove_own(self.path, self.run_id, self._paths, self._config.nvme_path or ())

    def mark_in_use(self, engine: StreamEngine) -> None:
        """Without durability: from here on the pages change, and a run that dies cannot be resumed in place."""
        if not self.durability.every and self._status != "open":
            self._set_status(engine, "open")

    def _set_status(self, engine: StreamEngine, status: str) -> None:
        if self._status != status or status == "live":
            self.directory.write_manifest(self.describe(engine, status))
            self._status = status

    def describe(self, engine: StreamEngine, status: str) -> dict[str, Any]:
        return describe_run(engine, status=status, run_id=self.run_id, slots=self._slots, paths=self._paths)

    # --- durable steps ------------------------------------------------------------------------------------------

    def expect(self, counters: dict[str, Any]) -> None:
        """A step's update is owed, and will be committed with these."""
        self._coming = counters

    def commit(self, engine: StreamEngine, counters: dict[str, Any]) -> None:
        """Starts making the engine's state durable, whose writes are complete."""
        assert engine.committer is not None
        engine.committer.launch(counters)
        self._committed = counters

    def wait(self, engine: StreamEngine) -> None:
        """Blocks until the last commit is durable."""
        assert engine.committer is not None
        engine.committer.wait()

    def rest(self, engine: StreamEngine, counters: dict[str, Any]) -> None:
        """At the end: makes the engine's state durable, if it is not yet."""
        if self.durability.every:
            assert engine.committer is not None
            engine.committer.wait()
            if self._committed != counters:  # also where only `user_state`, or what a skipped step leaves, is new
                self.commit(engine, counters)
                self.wait(engine)
        elif self._status == "open":
            engine.store.step = counters["step"]
            checkpoint.bring_to_rest(engine)
            engine.store.sync(VERSIONED)
            log = CommitLog(self.path / COMMITS)
            log.commit(counters, engine.store.versions.snapshot(VERSIONED))
            log.close()
            self._set_status(engine, "closed")

    def retain(self, engine: StreamEngine, counters: dict[str, Any], replaces: Sequence[int] = ()) -> pathlib.Path:
        """Keeps the state of a step, without a copy, and gives others up for it.

        Waits for nothing where the step's commit is on its way: it is kept when that is durable.

        Raises:
          ConfigError: durability is off.
          StoreError: no room for one more version.
        """
        if not self.durability.every:
            raise ConfigError(
                "a step can be kept in place only with streaming.durability: step or every_N and a run_dir: turn it "
                "on, or give save() a path"
            )
        assert engine.committer is not None
        content = self.describe(engine, "retained") | counters
        if counters == self._coming and not (engine.updates.complete and engine.committer.may_write()):
            checkpoint.reserve(engine, {*self._keeps, counters["step"]}, replaces)
            self._keeps[counters["step"]] = _Keep(content, frozenset(replaces))
            return checkpoint.retained_path(self.path, counters["step"])
        engine.settle()
        self.rest(engine, counters)
        return checkpoint.retain(engine, self.path, content, replaces)

    def _keep(self, engine: StreamEngine, step: int) -> None:
        """A step is durable: it is kept now if that was asked for, before a page of the next one is written."""
        keep = self._keeps.pop(step, None)
        if keep is not None:
            checkpoint.retain(engine, self.path, keep.content, sorted(keep.gives_up))

    def retained(self) -> list[int]:
        """Steps that are kept, or will be once they are durable."""
        replaced = {step for keep in self._keeps.values() for step in keep.gives_up}
        return sorted(({step for step, _ in retained_steps(self.path)} | self._keeps.keys()) - replaced)

    def release(self, engine: StreamEngine, step: int) -> None:
        """Gives up a step. While one that may be meant to replace it is not durable yet, it waits for that."""
        dropped = self._keeps.pop(step, None)
        if dropped is not None:
            for other in sorted(dropped.released):
                self.release(engine, other)
        elif self._keeps:
            self._keeps[max(self._keeps)].released.add(step)
        else:
            checkpoint.release(engine, self.path, step)


@dataclasses.dataclass(frozen=True)
class _Keep:
    """A step that will be retained once it is durable.

    Attributes:
      content: Its manifest but for the tables.
      replaces: Steps that are given up for it, and only for it.
      released: Steps that were given up since.
    """

    content: dict[str, Any]
    replaces: frozenset[int]
    released: set[int] = dataclasses.field(default_factory=set)

    @property
    def gives_up(self) -> set[int]:
        return self.released | self.replaces


def _same(one: Any, other: Any) -> bool:
    return all(len(one[kind].changed_since(other[kind])) == 0 for kind in one)
