"""Checkpoints, retained steps, and bringing stored bytes into a run.

    CHECKPOINT/run.json        written last: a directory without it is not a checkpoint
    CHECKPOINT/weights.pages   the pages' weights, as on the NVMe tier
    CHECKPOINT/optimizer.pages their records

Guarantees: a checkpoint appears whole or not at all (built beside, synced, renamed); it holds weights, masters,
optimizer slots, step, rng, loss scale, `state` and `user_state`, all of one step; every chunk is checked when it is
read. Saving and loading stream through the chunk frames.
"""

import contextlib
import os
import pathlib
import secrets
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

import aio_ffi
from zinf_jax.errors import ConfigError, CorruptionError, ResumeError, StoreError
from zinf_jax.plan import Chunk
from zinf_jax.stream.chunks import OPTIMIZER, ChunkFrame
from zinf_jax.stream.engine import VERSIONED, StreamEngine, state_extents
from zinf_jax.stream.pager import WEIGHTS
from zinf_jax.stream.records import RecordFormat
from zinf_jax.tier import Page, PageStore
from zinf_jax.tier.directories import make_directory, sync_directory
from zinf_jax.train.manifest import encode_tables
from zinf_jax.train.rundir import LOCK, OWNER_FILE, RunDir, write_json
from zinf_jax.train.source import RETAINED, Source, fallbacks, retained_steps

Progress = Callable[[int, int], None]


def save(engine: StreamEngine, path: pathlib.Path, content: dict[str, Any]) -> pathlib.Path:
    """Writes a checkpoint directory.

    Args:
      engine: At rest.
      path: Where to.
      content: The manifest, but for the tables.

    Raises:
      ConfigError: the path is taken.
      StoreError: no room, or I/O failed; nothing is left behind.
    """
    path = path.absolute()
    if path.exists():
        raise ConfigError(f"{path} exists already: choose another path or remove it")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    temporary.mkdir(mode=0o700)
    owned = RunDir(temporary)  # so that nobody takes it for the leftover of a dead process
    try:
        extents = state_extents(engine.layout.pages, engine.record, engine.plan.chunk_elements, (1.0,))
        store = PageStore([temporary], extents, dict.fromkeys(VERSIONED, 1), engine.options.aio)
        store.step = content["step"]
        try:
            _copy(engine, store, to_store=True)
            store.sync(VERSIONED)
            tables = encode_tables(store.versions.working)
        finally:
            store.close()
        own = {"status": "saved", "paths": [], "shares": [1.0], "num_versions": 1, "tables": tables}
        write_json(temporary / "run.json", content | own)
        os.rename(temporary, path)
        (path / LOCK).unlink()
        sync_directory(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        owned.release()
    return path


def retain(
    engine: StreamEngine, run_dir: pathlib.Path, content: dict[str, Any], replaces: Sequence[int] = ()
) -> pathlib.Path:
    """Keeps the committed step: its extents are not used again until it is released. Copies nothing.

    Args:
      engine: At rest, its last step committed.
      run_dir: Of the run.
      content: The manifest, but for the tables.
      replaces: Retained steps that are given up once this one is durable.

    Returns:
      The file that a resume can be given.

    Raises:
      StoreError: no room for one more version of the pages; nothing changed.
    """
    versions, step = engine.store.versions, content["step"]
    assert versions.committed is not None
    path = retained_path(run_dir, step)
    make_directory(path.parent)
    reserve(engine, {step}, replaces)
    try:
        write_json(path, content | {"status": "retained", "tables": encode_tables(versions.committed)})
    except OSError as error:
        raise StoreError(error.errno, f"cannot keep step {step}: {error.strerror}", str(path)) from error
    versions.retained[step] = versions.committed
    for other in sorted(set(replaces) - {step}):
        release(engine, run_dir, other)
    return path


def retained_path(run_dir: pathlib.Path, step: int) -> pathlib.Path:
    return run_dir / RETAINED / f"step_{step:08}.json"


def reserve(engine: StreamEngine, steps: Collection[int], replaces: Collection[int]) -> None:
    """Makes room for the versions that a run needs once it retains `steps` too.

    Raises:
      StoreError: there is none; nothing changed.
    """
    kept = {*engine.store.versions.retained, *steps} - (set(replaces) - set(steps))
    engine.store.grow(num_versions(len(kept), engine.plan.options.num_versions), VERSIONED)


def num_versions(num_retained: int, planned: int) -> int:
    """Extents per chunk that a run needs: as planned; and beside retained steps, which are never changed, one that is
    committed and one that is being written."""
    return max(2 + num_retained, planned) if num_retained else planned


def release(engine: StreamEngine, run_dir: pathlib.Path, step: int) -> None:
    """Gives a retained step up: its extents are free."""
    for found, path in retained_steps(run_dir):
        if found == step:
            path.unlink()
            sync_directory(path.parent)
    engine.store.versions.retained.pop(step, None)


def load(
    engine: StreamEngine,
    source: Source,
    progress: Progress | None = None,
    *,
    weights_only: bool = False,
) -> None:
    """Brings stored bytes into the run's tiers.

    Args:
      engine: To fill.
      source: A checkpoint, a retained step, or the run's own pages (whose tables the store has adopted).
      progress: Called with (pages done, pages).
      weights_only: Take weights and masters alone and make the optimizer's state anew.

    Raises:
      ResumeError: it holds pages of other sizes.
      StoreError: a file is cut short, unreadable or damaged.
    """
    stored = RecordFormat.of(engine.record.weights, len(source.manifest["slots"]))
    if any(len(source.tables[kind].bank) != len(extents.places) for kind, extents in source.extents.items()):
        raise ResumeError(f"{source.path} holds pages of other sizes than this run: the model or mesh differs")
    if source.in_place:
        store = engine.store
    else:
        store = open_store(source, engine.options.aio)
    try:
        if weights_only:
            _load_weights(engine, store, stored, progress)
        else:
            _copy(engine, store, to_store=False, progress=progress)
    finally:
        if not source.in_place:
            store.close()


def open_store(source: Source, options: aio_ffi.EngineOptions) -> PageStore:
    """The page files of another run or a checkpoint.

    Raises:
      StoreError: a file is missing or cut short.
    """
    banks = {kind: max(1, source.tables[kind].num_banks) for kind in VERSIONED}
    store = PageStore(source.paths, source.extents, banks, options, reuse=banks)
    store.versions.adopt(source.tables)
    return store


def _load_weights(engine: StreamEngine, store: PageStore, stored: RecordFormat, progress: Progress | None) -> None:
    """Weights and masters from a store whose records are `stored`."""

    def see(page: Page, chunk: Chunk, frame: ChunkFrame) -> None:
        number = engine.io.number(chunk)
        pending = [store.read_chunk(WEIGHTS, page.index, number, frame.weights, page.name)]
        record = np.empty((chunk.stop - chunk.start) * stored.itemsize if page.trainable else 0, np.uint8)
        if record.nbytes and stored.master is not None:
            pending.append(store.read_chunk(OPTIMIZER, page.index, number, record, page.name))
        for transfer in pending:
            transfer.wait()
        if page.trainable:
            source, _ = stored.split(record)
            target, _ = engine.record.split(frame.record)
            if source is not None and target is not None:
                target[:] = source
            engine.contents.reset_slots(page, chunk, frame)
        if progress is not None and chunk.stop == page.num_elements:
            progress(page.index + 1, len(engine.layout.pages))

    engine.contents.visit(engine.layout.pages, see, read=False, write=True)


def bring_to_rest(engine: StreamEngine) -> None:
    """Writes what lives in memory alone to the run's own files."""
    if not engine.plan.options.write_through:
        _copy(engine, engine.store, to_store=True)


def _copy(engine: StreamEngine, store: PageStore, *, to_store: bool, progress: Progress | None = None) -> None:
    """Moves all chunks between the run's tiers and a store's files; leaves alone what is there already."""
    own, record = store is engine.store, engine.record

    def see(page: Page, chunk: Chunk, frame: ChunkFrame) -> None:
        tiers, number = engine.plan.tiers[page.index], engine.io.number(chunk)
        for kind, tier, data, item in (
            (WEIGHTS, tiers.weights, frame.weights, page.dtype.itemsize),
            (OPTIMIZER, tiers.optimizer, frame.record, record.itemsize if page.trainable else 0),
        ):
            if not item or (own and tier.value == "nvme"):
                continue
            if to_store:
                frame.pending.append(store.write_chunk(kind, page.index, number, data, page.name))
            else:
                store.read_chunk(kind, page.index, number, data, page.name).wait()
        if progress is not None and chunk.stop == page.num_elements:
            progress(page.index + 1, len(engine.layout.pages))

    pages = [
        page
        for page, tiers in zip(engine.layout.pages, engine.plan.tiers, strict=True)
        if not own or tiers.weights != "nvme" or (page.trainable and tiers.optimizer != "nvme")
    ]
    engine.contents.visit(pages, see, read=to_store, write=not to_store and not own)


def choose_whole(engine: StreamEngine, source: Source, run_dir: pathlib.Path, progress: Progress | None) -> Source:
    """The newest step from `source` back whose every chunk is what was written.

    Raises:
      CorruptionError: there is none.
    """
    problems: list[str] = []
    for candidate in (source, *fallbacks(source, run_dir)):
        wrong = verify(engine.store, candidate, progress)
        if not wrong:
            return candidate
        problems.append(f"step {candidate.manifest['step']}: {wrong[0]}")
    raise CorruptionError("no step of this run is whole.\n  " + "\n  ".join(problems))


def verify(store: PageStore, source: Source, progress: Progress | None = None) -> list[CorruptionError]:
    """Reads every chunk of a step and compares checksums.

    Returns:
      What is wrong.
    """
    names = page_names(source.manifest, store)
    total = sum(store.sizes[kind] for kind in VERSIONED)
    done = 0

    def seen(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if progress is not None:
            progress(done, total)

    return [
        error for kind in VERSIONED for error in store.verify(kind, source.tables[kind], names[kind].__getitem__, seen)
    ]


def page_names(content: Mapping[str, Any], store: PageStore) -> dict[str, list[str]]:
    """Per kind, the page's name of each chunk."""
    pages = content["layout"]["pages"]
    return {
        kind: [page["name"] for number, page in enumerate(pages) for _ in store.extents[kind].chunks_of(number)]
        for kind in VERSIONED
    }


def delete_pages(directory: pathlib.Path) -> None:
    """Removes a run's directory of pages: only names that this package makes, and itself if nothing else is in it."""
    for name in (*(f"{kind}.pages" for kind in (*VERSIONED, "gradients", "residuals")), OWNER_FILE):
        with contextlib.suppress(FileNotFoundError):
            (directory / name).unlink()
    with contextlib.suppress(OSError):
        directory.rmdir()
