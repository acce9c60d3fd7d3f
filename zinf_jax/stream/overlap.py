"""When each chunk's update runs: after backward, as soon as its gradient is complete, or just before its next use.

An update is *owed* from the moment its step's norm is known until every chunk is computed and written. Owed chunks run
beside the next step's forward pass, in the order in which it needs their pages; a page that the pager has fetched is
updated in its frame, so its weights are not read twice. While a step's backward pass runs, its update may be run ahead
(`speculate`) as if nothing were clipped: every chunk's old version stays, and if the norm says otherwise the update is
owed as a whole. All of it gives the same bits: an update is elementwise, and each chunk's runs once on the old version.

Guarantees:
  * A page is not used, and no version of the run is read or saved, before its owed update is computed.
  * No page is written before the commit of the step before is durable (`may_write`).
  * An error leaves what was not computed owed; what was computed is the chunk's newest version.
Main thread only.
"""

import statistics
from collections.abc import Callable, Iterable

from zinf_jax.plan import Chunk, Plan, Tier
from zinf_jax.stream.ahead import ReadAhead
from zinf_jax.stream.chunks import OPTIMIZER
from zinf_jax.stream.gradients import Collected
from zinf_jax.stream.pager import WEIGHTS, Pager
from zinf_jax.stream.pipeline import ChunkPipeline, Compute
from zinf_jax.stream.stats import Counters
from zinf_jax.tier import PageStore

MakePipeline = Callable[[Compute, Collected], ChunkPipeline]


class OverlapChooser:
    """Should a step's update run ahead of its norm? The bits are the same either way.

    "auto" runs ahead only while norms leave the gradients as they are, and only where that is the faster: it tries both
    for a few steps each, keeps to the better one, and looks again now and then.

    Args:
      mode: `StreamOptions.update_overlap`.
      clips: There is a bound on the norm, so that running ahead can be in vain.
    """

    PATIENCE = 2  # steps in a row that were not clipped, before "auto" expects the next one not to be
    TRIAL = 4  # steps that try one way; the first still has the other way's work to finish and is not counted
    PERIOD = 128  # steps from trial to trial

    def __init__(self, mode: str, *, clips: bool) -> None:
        self._mode = mode
        self._quiet = 0 if clips else self.PATIENCE
        self._phase = 0  # of the period, in steps
        self._times: dict[bool, list[float]] = {True: [], False: []}  # of the trials, by whether they ran ahead
        self._ahead_is_faster = True
        self.num_undone = 0

    @property
    def runs_ahead(self) -> bool:
        if self._mode != "auto":
            return self._mode == "backward"
        if self._quiet < self.PATIENCE:
            return False
        trial = self._phase // self.TRIAL
        return trial == 0 or (trial > 1 and self._ahead_is_faster)

    def saw(self, *, as_assumed: bool, undone: bool) -> None:
        """A step's norm is known.

        Args:
          as_assumed: Nothing was clipped or skipped.
          undone: Work that had run ahead was in vain.
        """
        self._quiet = self._quiet + 1 if as_assumed else 0
        self.num_undone += undone

    def took(self, seconds: float) -> None:
        """A step is over."""
        if self._quiet <= self.PATIENCE:  # the step itself was not free to choose: trials begin anew
            self._phase, self._times = 0, {True: [], False: []}
            return
        trial, step = divmod(self._phase, self.TRIAL)
        if trial < 2 and step:
            self._times[trial == 0].append(seconds)
        if trial == 1 and step == self.TRIAL - 1:
            ahead, not_ahead = (statistics.median(self._times[way]) for way in (True, False))
            self._ahead_is_faster = ahead <= not_ahead
            self._times = {True: [], False: []}
        self._phase = (self._phase + 1) % self.PERIOD


class OverlappedUpdates:
    """The updates of one run.

    Args:
      plan: Order of use, chunks.
      store, pager: Where bytes are.
      make_pipeline: Of a compute function and the gradients it needs.
      ahead: Reads records before their update is asked for.
      counters: Told about stalls.

    Attributes:
      failed: The error at which an update stopped: pages may then be of two steps.
    """

    def __init__(
        self,
        plan: Plan,
        store: PageStore,
        pager: Pager,
        make_pipeline: MakePipeline,
        ahead: ReadAhead,
        counters: Counters,
    ) -> None:
        self._plan = plan
        self._store = store
        self._pager = pager
        self._make_pipeline = make_pipeline
        self._read_ahead = ahead
        self._counters = counters
        self._owed: dict[int, list[Chunk]] = {}  # page -> chunks that no pipeline has taken
        self._pipeline: ChunkPipeline | None = None
        self._ahead: set[int] | None = None  # pages whose update was started before the norm was known
        self._on_complete: Callable[[], None] | None = None
        self._order = sorted(plan.chunks_of, key=lambda page: (plan.first_uses.get(page, len(plan.positions)), page))
        self._next = 0
        self._backwards = False
        self._expected = False  # the order of the updates to come is known to the reads ahead
        self.failed: BaseException | None = None

    def expect(self, *, backwards: bool) -> None:
        """Before the passes of a step: will its updates run beside backward, or beside the next forward?"""
        if self._backwards != backwards:
            self._backwards, self._expected = backwards, False

    def _begin_reading(self) -> None:
        """Once the update before is written, the next one's records can be read."""
        if self._expected or not self.complete:
            return
        order = self._order
        if self._backwards:
            order = sorted(order, key=lambda page: (self._plan.last_uses.get(page, -1), page))
        self._read_in(order)
        self._expected = True

    def _read_in(self, order: Iterable[int]) -> None:
        if not self._plan.overlaps:
            return  # the frames are where those of the passes are
        self._read_ahead.begin(chunk for page in order for chunk in self._plan.chunks_of[page])

    def cancel(self) -> None:
        """Gives up what was read ahead: its frames are free."""
        self._read_ahead.cancel()
        self._expected = False

    # --- an update that is certain ------------------------------------------------------------------------------

    def owe(self, step: int, compute: Compute, gradients: Collected, on_complete: Callable[[], None]) -> None:
        """The step's norm is known: all its updates are to be done. What ran ahead counts.

        Args:
          step: Which the update completes.
          compute: Updates a chunk.
          gradients: Of the step.
          on_complete: Called when every chunk's new version is written.
        """
        assert self.complete, "the update before is not complete"
        if self._ahead is None:
            self._start(step, compute, gradients)
            self._read_in(self._order)
        self._ahead = None
        self._on_complete = on_complete
        self._next = 0

    def _start(self, step: int, compute: Compute, gradients: Collected) -> None:
        self._store.step = step
        self._store.versions.begin()
        self._pipeline = self._make_pipeline(compute, gradients)
        self._owed = {page: list(chunks) for page, chunks in self._plan.chunks_of.items()}

    @property
    def active(self) -> bool:
        """Is there anything that could advance?"""
        return self._read_ahead.active or (self._pipeline is not None and not self._pipeline.idle)

    @property
    def complete(self) -> bool:
        """Is nothing owed or under way?"""
        return self._on_complete is None

    def issue(self, position: int) -> None:
        """Starts the updates of the pages that are first used up to `lookahead` positions after this one."""
        if self.complete:
            self._begin_reading()
            self._read_ahead.advance()
            return
        limit = position + self._plan.options.lookahead
        while self._next < len(self._order):
            page = self._order[self._next]
            if self._plan.first_uses.get(page, len(self._plan.positions)) > limit:
                break
            self._take(page)
            self._next += 1

    def _take(self, page: int) -> None:
        assert self._pipeline is not None
        for chunk in self._owed.pop(page, ()):
            self._pipeline.add(chunk, held=self._pager.holds(page))

    def advance(self) -> bool:
        """Does what can be done without waiting. Returns whether anything moved."""
        moved = False
        if self._pipeline is not None:
            moved = bool(self._guarded(self._pipeline.advance))
            self._finish_if_done()
        return self._read_ahead.advance() or moved

    def is_due(self, page_index: int) -> bool:
        if self.complete or self._pipeline is None:
            return False
        return page_index in self._owed or self._pipeline.waits(page_index)

    def ensure(self, page_index: int) -> None:
        """Blocks until the page's owed update is computed."""
        if not self.is_due(page_index):
            return
        self._take(page_index)
        assert self._pipeline is not None
        pipeline = self._pipeline
        with self._counters.timed("update_stall_s"):
            self._guarded(lambda: pipeline.compute(page_index))

    def release(self, page_index: int) -> None:
        """Blocks until no transfer of the page's update is under way: its frame is free, its new version readable."""
        if self._pipeline is not None and not self._pipeline.idle:
            pipeline = self._pipeline
            self._guarded(lambda: pipeline.write(page_index))

    def finish(self) -> None:
        """Blocks until nothing is owed."""
        if self.complete:
            return
        for page in self._order:
            self._take(page)
        assert self._pipeline is not None
        self._guarded(self._pipeline.finish)
        self._finish_if_done()

    def _finish_if_done(self) -> None:
        if self.complete or self._owed or self._pipeline is None or not self._pipeline.idle:
            return
        done, self._on_complete = self._on_complete, None
        self._pipeline, self._expected = None, False
        assert done is not None
        done()

    def _guarded(self, action: Callable[[], bool | None]) -> bool | None:
        """After an error, what was not computed is owed again."""
        try:
            return action()
        except BaseException as error:
            self.failed = error
            self.abort()
            raise

    def abort(self) -> None:
        """Waits for transfers; what was not computed is owed again, to be read anew, and what ran ahead is undone."""
        if self._ahead is not None:
            self.undo()
        self.cancel()
        if self._pipeline is None:
            return
        left, lost = self._pipeline.abandon()
        self.failed = self.failed or lost
        for chunk in left:
            self._owed.setdefault(chunk.page, []).append(chunk)
        self._next = 0

    # --- an update that may have to be undone --------------------------------------------------------------------

    def _can_undo(self, page: int) -> bool:
        tiers, extents = self._plan.tiers[page], self._store.extents
        if tiers.weights is not Tier.NVME or tiers.optimizer is not Tier.NVME:
            return False
        versions = self._store.versions
        kinds = [kind for kind in (WEIGHTS, OPTIMIZER) if len(extents[kind].chunks_of(page))]
        return all(versions.can_revert(kind, index) for kind in kinds for index in extents[kind].chunks_of(page))

    def speculate(self, step: int, compute: Compute, gradients: Collected) -> None:
        """Before backward: the step's update is assumed to be this one, and may run ahead where it can be undone.

        Nothing happens where it cannot: then `speculating` stays false.
        """
        assert self.complete
        self._start(step, compute, gradients)
        if any(self._can_undo(page) for page in self._order):
            self._ahead = set()
        else:
            self._pipeline, self._owed = None, {}

    @property
    def speculating(self) -> bool:
        return self._ahead is not None

    def run_ahead(self, pages: Iterable[int]) -> None:
        """These pages' gradients are whole, and nothing in this step reads the pages any more."""
        assert self._ahead is not None
        for page in pages:
            if page in self._owed and self._can_undo(page):
                self._ahead.add(page)
                self._counters.add("pages_ahead")
                self._take(page)

    def undo(self) -> None:
        """The norm says otherwise: the old versions are the newest ones again."""
        if self._ahead is None:
            return
        if self._pipeline is not None:
            self._pipeline.abandon()
        for page in self._ahead:
            for kind in (WEIGHTS, OPTIMIZER):
                for index in self._store.extents[kind].chunks_of(page):
                    self._store.versions.revert(kind, index)
        self._ahead, self._pipeline, self._owed = None, None, {}
