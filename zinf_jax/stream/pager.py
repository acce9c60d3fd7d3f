"""The pager: the only owner of residency and of the transfers of weights.

Guarantees:
  * It follows the plan's residencies and decides nothing. A page that a unit needs is in a frame or on its way; if not,
    the plan is wrong and an assertion says so.
  * `release(t)` is called when everything up to position t - max_in_flight is done: frames whose residency ends
    at t are then nobody's, and may be filled anew.
  * A page whose update is still due is updated in its frame before it is used, and its frame is kept until the new
    version is written: the pager asks its `PageUpdates`.
  * A handle lives as long as its residency. Handles of resident pages live until `invalidate`, which the update calls
    before it changes their bytes: no handle outlives a change.
Only the main thread calls it.
"""

import contextlib
import time
from collections.abc import Mapping
from typing import Protocol

import jax
import numpy as np

from zinf_jax.plan import Plan, Span, Tier
from zinf_jax.stream.stats import Counters
from zinf_jax.stream.trace import Lane
from zinf_jax.tier import FrameArena, FrameSpan, Layout, Page, PageStore, PendingIO, Topology, put_rows

WEIGHTS = "weights"


def page_rows(page: Page, frame: np.ndarray) -> np.ndarray:
    """A frame's bytes (uint8) as the page's array `[num_tp, num_ranks, row_size]`."""
    return frame.view(page.dtype).reshape(page.shape)


class PageUpdates(Protocol):
    """What the pager asks of updates that are still due when the next step begins."""

    def is_due(self, page_index: int) -> bool:
        """Is the page's update not computed yet?"""
        ...

    def ensure(self, page_index: int) -> None:
        """Blocks until it is."""
        ...

    def release(self, page_index: int) -> None:
        """Blocks until no transfer of the page's update is under way: its frame is free, its new version readable."""
        ...


class Pager:
    """Weights of one run.

    Args:
      layout: The pages.
      topology: Where they go.
      arena: Holds the frames.
      store: The NVMe tier.
      resident: Arena spans of the pages that are always there.
      counters: Told about hits, fetches and stalls.
    """

    def __init__(
        self,
        layout: Layout,
        topology: Topology,
        arena: FrameArena,
        store: PageStore,
        resident: Mapping[int, FrameSpan],
        counters: Counters,
    ) -> None:
        self._layout = layout
        self._topology = topology
        self._arena = arena
        self._store = store
        self._resident = dict(resident)
        self._counters = counters
        self._plan: Plan | None = None
        self._spans: dict[int, Span] = {}  # what is in a frame or on its way, by page
        self._reads: dict[int, PendingIO] = {}
        self._handles: dict[int, jax.Array] = {}
        self._ends: dict[int, list[Span]] = {}
        self._updates: PageUpdates | None = None

    def attach(self, updates: PageUpdates) -> None:
        """From here on pages are updated by it before they are used."""
        self._updates = updates

    @property
    def aliases(self) -> bool:
        """Device arrays share the frames' memory: nothing is copied."""
        return self._topology.aliases

    def begin(self, plan: Plan) -> None:
        """Starts the passes of a plan: nothing streamed is in a frame, unless `prefetch` was called for this plan."""
        if self._plan is plan:
            return
        if self._plan is not None:  # what was fetched ahead is for another plan
            self.finish()
        assert not self._spans, self._spans
        self._plan = plan
        self._ends = {}
        for spans in plan.fetches.values():
            for span in spans:
                self._ends.setdefault(span.residency.end, []).append(span)

    def prefetch(self, plan: Plan) -> None:
        """Between steps: issues what the first position of the next passes would issue."""
        self.begin(plan)
        for span in plan.fetches.get(0, ()):
            self._issue(span)

    def release(self, position: int) -> None:
        """Drops what ends at `position`."""
        for span in self._ends.pop(position, ()):
            self._drop(span)
        if not self._topology.aliases:
            self._drop_copies(position)

    def _drop_copies(self, position: int) -> None:
        """Frees device copies that neither a program in flight nor the next two read; device-tier pages stay."""
        plan = self._plan
        assert plan is not None
        first, last = max(0, position - plan.options.max_in_flight + 1), min(position + 2, len(plan.positions))
        needed = {page for p in plan.positions[first:last] for page in plan.shape.units[p.unit].pages}
        for page in [p for p in self._handles if p not in needed and plan.tiers[p].weights is not Tier.DEVICE]:
            del self._handles[page]

    def issue(self, position: int) -> None:
        """Issues the reads that start at `position`."""
        assert self._plan is not None
        for span in self._plan.fetches.get(position, ()):
            if position or int(span.residency.key[1]) not in self._spans:  # the first may have been fetched ahead
                self._issue(span)

    def finish(self) -> None:
        """Ends the passes: drops everything that is streamed."""
        for span in list(self._spans.values()):
            self._drop(span)
        self._plan = None

    def cancel(self) -> None:
        """Between steps: gives up what was fetched ahead."""
        if self._plan is not None:
            self.finish()

    def abort(self) -> None:
        """After an error: waits for what is in flight, so that no transfer touches a frame later."""
        for read in self._reads.values():
            with contextlib.suppress(OSError):
                read.wait()
        self._reads.clear()
        self.finish()

    def acquire(self, page_index: int) -> jax.Array:
        """The page on its devices, `[num_tp, num_ranks, row_size]`. Waits for its read.

        Raises:
          StoreError: the read failed.
        """
        page = self._layout.pages[page_index]
        if self._updates is not None:
            self._updates.ensure(page_index)
        span = self._resident.get(page_index)
        if span is None:
            assert page_index in self._spans, f"page {page.name!r} is used but was not planned to be fetched"
            span = FrameSpan(self._spans[page_index].offset, page.num_bytes)
            read = self._reads.pop(page_index, None)
            if read is not None:
                if not read.done():
                    with self._counters.timed("read_stall_s", read):
                        read.wait()
                else:
                    read.wait()
        self._counters.add("fetch_hits")
        if page_index not in self._handles:
            rows = page_rows(page, self._arena.view(span))
            sharding = self._topology.weights_sharding(page, self._layout.leaves)
            start = time.perf_counter()
            self._handles[page_index] = handle = put_rows(rows, sharding)
            if not self._topology.aliases:
                self._counters.add("h2d_bytes", page.num_bytes)
                self._counters.tracer.until_ready(
                    Lane.HOST_TO_DEVICE, page.name, start, handle, bytes=page.num_bytes, kind=WEIGHTS
                )
        return self._handles[page_index]

    def prepare(self, page_index: int) -> jax.Array | None:
        """What `acquire` gives if the page's bytes are there already, so that its copy to the device overlaps with
        compute. Else None."""
        read = self._reads.get(page_index)
        there = page_index in self._resident or page_index in self._spans
        due = self._updates is not None and self._updates.is_due(page_index)
        if there and not due and (read is None or read.done()):
            return self.acquire(page_index)
        return None

    def holds(self, page_index: int) -> bool:
        """Is a streamed page in a frame, or on its way there?"""
        return page_index in self._spans

    def held_frame(self, page_index: int) -> tuple[np.ndarray, list[PendingIO]]:
        """The bytes of a page that is in a frame (uint8), and the read that fills them if it is still under way."""
        span = FrameSpan(self._spans[page_index].offset, self._layout.pages[page_index].num_bytes)
        read = self._reads.get(page_index)
        return self._arena.view(span), [] if read is None else [read]

    def resident_frame(self, page_index: int) -> np.ndarray | None:
        """Bytes of a page that is always there (uint8), or None. The update works on them in place."""
        span = self._resident.get(page_index)
        return None if span is None else self._arena.view(span)

    def invalidate(self, page_index: int) -> None:
        """The page's bytes are about to change: forgets its handle."""
        self._handles.pop(page_index, None)

    def close(self) -> None:
        """Forgets all handles, so that the arena can go."""
        self._handles.clear()

    def pinned_host(self, page_index: int) -> jax.Array:
        """A resident page as an array of memory kind `pinned_host` over its frame (no copy on the CPU backend).

        On CUDA it is a copy in the runtime's pinned pool, whose cap no plan knows: nothing in a step calls this.
        """
        page = self._layout.pages[page_index]
        frame = self.resident_frame(page_index)
        assert frame is not None, f"page {page.name!r} is not resident"
        sharding = self._topology.weights_sharding(page, self._layout.leaves).with_memory_kind("pinned_host")
        return put_rows(page_rows(page, frame), sharding)

    def _issue(self, span: Span) -> None:
        page_index = int(span.residency.key[1])
        page = self._layout.pages[page_index]
        assert page_index not in self._spans
        if self._updates is not None:  # an update that ran ahead writes the version that is to be read
            self._updates.release(page_index)
        frame = self._arena.lease(FrameSpan(span.offset, page.num_bytes), f"weights of {page.name}")
        self._spans[page_index] = span
        self._reads[page_index] = self._store.read_page(WEIGHTS, page_index, frame, page.name)
        self._counters.add("fetches")

    def _drop(self, span: Span) -> None:
        page_index = int(span.residency.key[1])
        if self._updates is not None:
            self._updates.release(page_index)
        read = self._reads.pop(page_index, None)
        if read is not None:
            read.wait()
        self._handles.pop(page_index, None)
        del self._spans[page_index]
        self._arena.release(FrameSpan(span.offset, self._layout.pages[page_index].num_bytes))
