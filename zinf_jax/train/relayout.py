"""Resuming where the pages must be others than the stored ones: another number of fsdp ranks, or other stacks.

This run's pages are laid out anew and filled chunk by chunk; each chunk finds its elements in the source's files, so
nothing but the run's own chunk frames is in memory. The source is verified first, whole, and then only read, through
the
page cache: its pieces start at any offset, which direct I/O refuses. A record's elements are scattered over its master
and slots (`stream.records`).
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from zinf_jax.errors import ConfigError, ResumeError, StoreError
from zinf_jax.leaves import Leaf, LeafKind
from zinf_jax.plan import Chunk
from zinf_jax.stream.chunks import OPTIMIZER, ChunkFrame
from zinf_jax.stream.engine import StreamEngine
from zinf_jax.stream.pager import WEIGHTS
from zinf_jax.stream.records import RangeOf, RecordFormat, ranges_of
from zinf_jax.tier import Page, Run, StoredLayout, Topology
from zinf_jax.tier.layout import tp_axes
from zinf_jax.train import checkpoint
from zinf_jax.train.source import Source


def stored_pages_fit(source: Source, leaves: Sequence[Leaf], topology: Topology) -> bool:
    """Can this run use the source's pages as they are? If not, `load` copies their contents.

    Raises:
      ResumeError: not, and they are the run's own pages; or they are split over other tensor-parallel axes.
      ConfigError: they are of another model.
    """
    stored = StoredLayout(leaves, source.manifest["layout"])
    sizes = topology.axis_sizes
    try:
        fit = [
            stored.fits(leaf, int(np.prod([sizes.get(axis, 1) for axis in tp_axes(leaf)])), topology.num_ranks)
            for leaf in leaves
            if leaf.kind is not LeafKind.STATIC
        ]
    except ConfigError as error:
        raise ResumeError(f"{source.path}: {error}") from None
    if not all(fit) and source.in_place:
        ranks = sorted({page.num_ranks for page in stored.pages})
        raise ResumeError(
            f"the pages of {source.path} are laid out for {ranks[0]} fsdp ranks and the loss of that time, this mesh "
            f"has {topology.num_ranks}: they cannot be changed in place; resume from a checkpoint, or from this "
            "directory (resume=PATH), into another run_dir"
        )
    return all(fit)


def load(
    engine: StreamEngine,
    source: Source,
    progress: Callable[[int, int], None] | None = None,
    *,
    weights_only: bool = False,
) -> None:
    """Fills a run's pages with a source's contents, bit for bit.

    Args:
      engine: To fill.
      source: A checkpoint, or another run at rest.
      progress: Called with (pages done, pages).
      weights_only: Take weights and masters alone and make the optimizer's state anew.

    Raises:
      StoreError: a file is cut short, unreadable or damaged.
    """
    with _Files(source, engine) as files:

        def see(page: Page, chunk: Chunk, frame: ChunkFrame) -> None:
            frame.weights[:] = 0
            frame.record[:] = 0
            for part in ranges_of(page, engine.layout.leaves, chunk.start, chunk.stop):
                files.fill(page, part, frame, slots=not weights_only)
            if weights_only and page.trainable:
                engine.contents.reset_slots(page, chunk, frame)
            if progress is not None and chunk.stop == page.num_elements:
                progress(page.index + 1, len(engine.layout.pages))

        engine.contents.visit(engine.layout.pages, see, read=False, write=True)


class _Files:
    """The page files of a source, read by leaf element. A context manager."""

    def __init__(self, source: Source, engine: StreamEngine) -> None:
        content: Mapping[str, Any] = source.manifest
        self._stored = StoredLayout(engine.layout.leaves, content["layout"])
        self._record = engine.record
        self._stored_record = RecordFormat.of(engine.record.weights, len(content["slots"]))
        self._chunk_elements: int = content["chunk_elements"]
        self._tables = source.tables
        if any(len(source.tables[kind].bank) != len(extents.places) for kind, extents in source.extents.items()):
            raise ResumeError(f"{source.path}: its tables are not those of its pages")
        self._store = checkpoint.open_store(source, engine.options.aio)
        self._fds: dict[str, int] = {}
        try:
            if wrong := checkpoint.verify(self._store, source):
                raise wrong[0]
        except BaseException:
            self._store.close()
            raise

    def __enter__(self) -> "_Files":
        return self

    def __exit__(self, *_: object) -> None:
        self._store.close()
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def fill(self, page: Page, part: RangeOf, frame: ChunkFrame, *, slots: bool) -> None:
        """Reads the elements of one range of a chunk to their places in its frame; padding is left alone."""
        tp, rank = part.row
        first = rank * part.segment.shard_size + part.shard_start
        count = min(first + part.stop - part.start, part.segment.size) - first
        weights = frame.weights.view(page.dtype)
        master, vectors = self._record.split(frame.record) if page.trainable else (None, ())
        at = part.start
        for run in self._stored.runs(part.segment, tp, first, count):
            for chunk, inside, size, length in self._chunks(run):
                target = slice(at, at + length)
                self._read(WEIGHTS, run, chunk, inside * page.itemsize, weights[target])
                if page.trainable:
                    places = self._places(size, inside)
                    if master is not None:
                        self._read(OPTIMIZER, run, chunk, places[0], master[target])
                    for place, vector in zip(places[1:], vectors if slots else (), strict=False):
                        self._read(OPTIMIZER, run, chunk, place, vector[target])
                at += length

    def _chunks(self, run: Run) -> Iterator[tuple[int, int, int, int]]:
        """(chunk, first element in it, its elements, elements of the run) for each chunk that a run crosses."""
        start, stop = run.start, run.start + run.count
        while start < stop:
            chunk, inside = divmod(start, self._chunk_elements)
            size = min(self._chunk_elements, run.page.num_elements - chunk * self._chunk_elements)
            length = min(stop - start, size - inside)
            yield chunk, inside, size, length
            start += length

    def _places(self, size: int, inside: int) -> list[int]:
        """Byte offsets of element `inside` in a record of `size`: of the master, and of each slot."""
        master = self._stored_record.master.itemsize if self._stored_record.master else 0
        slots = range(self._stored_record.num_slots)
        return [inside * master, *(size * master + 4 * (size * slot + inside) for slot in slots)]

    def _read(self, kind: str, run: Run, chunk: int, byte: int, out: np.ndarray) -> None:
        extents = self._store.extents[kind]
        index = extents.first[run.page.index] + chunk
        path, base = self._store.files.position(kind, extents.places[index], int(self._tables[kind].bank[index]))
        offset, view, done = base + byte, out.view(np.uint8).data, 0
        what = f"read of the stored {kind} of page {run.page.name!r}"
        while done < view.nbytes:
            try:
                if path not in self._fds:
                    self._fds[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                moved = os.preadv(self._fds[path], [view[done:]], offset + done)
            except OSError as error:
                raise StoreError(error.errno, f"{what} at offset {offset + done}: {error.strerror}", path) from error
            if not moved:
                raise StoreError(0, f"{what}: cut short, at offset {offset + done} there is nothing", path)
            done += moved
