"""A run's machinery, put together: from a cut graph and budgets to arena, store, executor and updater.

Everything is created once, in an order in which what cannot work fails early: cut, lay out, compile, plan (refuses what
does not fit), then memory, then disk space, then parameters page by page.
"""

import dataclasses
import pathlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

import aio_ffi
from zinf_jax.errors import PlanError
from zinf_jax.graph import POLICIES, RematPolicy, keep_residuals
from zinf_jax.graph.types import UnitGraph, ValueId
from zinf_jax.machine import available_host_bytes
from zinf_jax.plan import (
    Hardware,
    PageShape,
    PlacementOptions,
    Plan,
    StepShape,
    StreamOptions,
    Tier,
    UnitShape,
    make_plan,
)
from zinf_jax.stream import heap
from zinf_jax.stream.ahead import ReadAhead
from zinf_jax.stream.chunks import OPTIMIZER, ChunkIO
from zinf_jax.stream.commit import Committer
from zinf_jax.stream.contents import Contents, InitSlots
from zinf_jax.stream.executor import Executor
from zinf_jax.stream.generic_updates import GenericUpdater
from zinf_jax.stream.gradients import GRADIENTS, Collected, GradientCollector
from zinf_jax.stream.overlap import OverlappedUpdates
from zinf_jax.stream.pager import WEIGHTS, Pager
from zinf_jax.stream.pipeline import ChunkPipeline, Compute
from zinf_jax.stream.programs import UnitCompiler, UnitExecutables, can_turn
from zinf_jax.stream.records import RecordFormat
from zinf_jax.stream.residuals import RESIDUALS, ResidualStore
from zinf_jax.stream.stats import Counters, rss_bytes
from zinf_jax.stream.trace import Lane
from zinf_jax.stream.updates import FusedUpdate
from zinf_jax.tier import (
    CommitLog,
    FrameArena,
    FrameSpan,
    KindExtents,
    Layout,
    LayoutOptions,
    PageStore,
    Topology,
    build_layout,
)

VERSIONED = (WEIGHTS, OPTIMIZER)
"""Kinds of state that belong to a step; gradients and residuals are never valid after a crash."""


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """How a run is streamed; see the owners of the parts.

    Attributes:
      lowered: Names of stream options that nobody chose: a plan may ask for less there, so as to fit.
    """

    placement: PlacementOptions = dataclasses.field(default_factory=PlacementOptions)
    stream: StreamOptions = dataclasses.field(default_factory=StreamOptions)
    layout: LayoutOptions = dataclasses.field(default_factory=LayoutOptions)
    aio: aio_ffi.EngineOptions = dataclasses.field(default_factory=aio_ffi.EngineOptions)
    max_unit_bytes: int = 1 << 30
    device_memory: int | None = None
    host_memory: int | None = None
    lock: str | bool = "auto"
    num_threads: int | None = None
    lowered: frozenset[str] = frozenset()

    def streams(self) -> Iterator[StreamOptions]:
        """What to plan with, from most to least host memory: overlap needs frames of its own for the update."""
        yield self.stream
        if "update_overlap" not in self.lowered or self.stream.update_overlap == "none":
            return
        smaller = dataclasses.replace(self.stream, update_overlap="next_forward", update_hold=0)
        yield smaller
        least = {"num_chunk_frames": 2, "lookahead": 1, "chunk_bytes": smaller.chunk_bytes // 4}
        given: dict[str, Any] = {}
        for names in (("num_chunk_frames",), tuple(least)):
            given = {name: min(least[name], getattr(smaller, name)) for name in names if name in self.lowered}
            if given:
                yield dataclasses.replace(smaller, **given)
        apart = dataclasses.replace(smaller, update_overlap="none")
        yield apart
        if given:
            yield dataclasses.replace(apart, **given)


@dataclasses.dataclass(frozen=True)
class StepProgram:
    """A loss function, cut, compiled and described for the planner.

    Attributes:
      graph, executables: What to run.
      shape: What the planner sees.
      value_shardings: Of every value.
      weight_value: The value that weights micro-batches, or None.
      state_values: (outer input, result) pairs.
    """

    graph: UnitGraph
    executables: tuple[UnitExecutables, ...]
    shape: StepShape
    value_shardings: Mapping[ValueId, Any]
    weight_value: ValueId | None
    state_values: tuple[tuple[ValueId, ValueId], ...]


def shared_leaves(graph: UnitGraph) -> frozenset[int]:
    """Leaves of which a piece is read by more than one unit (tied embeddings): they have pages of their own."""
    seen: set[Any] = set()
    shared = set()
    for unit in graph.units:
        for piece in set(unit.pieces):
            if piece in seen:
                shared.add(piece.leaf)
            seen.add(piece)
    return frozenset(shared)


def make_layout(graph: UnitGraph, topology: Topology, options: LayoutOptions) -> Layout:
    return build_layout(
        graph.leaves, options,
        num_ranks=topology.num_ranks, axis_sizes=topology.axis_sizes, shared=shared_leaves(graph),
    )  # fmt: skip


def page_shapes(layout: Layout, record: RecordFormat, gradient_dtype: np.dtype) -> tuple[PageShape, ...]:
    return tuple(
        PageShape(
            page.name,
            page.num_bytes,
            page.num_elements * record.itemsize if page.trainable else 0,
            page.num_elements * gradient_dtype.itemsize if page.trainable else 0,
            page.num_elements,
        )
        for page in layout.pages
    )


def step_program(
    graph: UnitGraph,
    layout: Layout,
    topology: Topology,
    record: RecordFormat,
    *,
    gradient_dtype: np.dtype,
    outer_shardings: Mapping[ValueId, Any],
    group_sizes: tuple[int, ...],
    weight_value: ValueId | None = None,
    state_values: Sequence[tuple[ValueId, ValueId]] = (),
    remat_policy: RematPolicy = POLICIES[0],
    progress: Callable[[int, int], None] | None = None,
) -> StepProgram:
    """Compiles a graph, with units whose backward goes on from what `remat_policy` keeps, and describes it for the
    planner."""
    weighted = weight_value is not None and sum(group_sizes) > 1
    turn = can_turn(graph) and not weighted
    # The turn is forward and backward in one: nothing is computed again there.
    graph = keep_residuals(graph, remat_policy, range(len(graph.units) - turn))
    compiler = UnitCompiler(graph, layout, topology, gradient_dtype=gradient_dtype)
    executables = compiler.compile_all(outer_shardings, turn=turn, progress=progress)
    ways = len(topology.mesh.local_devices)

    def value_bytes(value: ValueId) -> int:
        aval, sharding = graph.values[value], compiler.value_shardings.get(value, topology.replicated)
        shard = sharding.shard_shape(tuple(aval.shape))
        return int(np.prod(shard, dtype=np.int64)) * aval.dtype.itemsize * ways

    units = []
    for unit, exe in zip(graph.units, executables, strict=True):
        diff = graph.programs[unit.program].diff_pieces
        wanted = [p for p, d in zip(unit.pieces, diff, strict=True) if d] if unit.index in graph.backward else []
        units.append(
            UnitShape(
                unit.name, exe.binding.pages, tuple(dict.fromkeys(layout.where[p][0] for p in wanted)),
                unit.inputs, unit.outputs, unit.saved,
                flops=unit.flops, backward_flops=unit.backward_flops,
                **exe.sizes(saved_bytes=sum(map(value_bytes, unit.saved))),
            )
        )  # fmt: skip
    keys = {i for i, aval in enumerate(graph.values) if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended)}
    shape = StepShape(
        pages=page_shapes(layout, record, gradient_dtype),
        units=tuple(units),
        backward=graph.backward,
        value_bytes=tuple(value_bytes(v) for v in range(len(graph.values))),
        outer_values=frozenset(graph.outer_inputs),
        kept_values=frozenset(graph.results) | keys,
        group_sizes=group_sizes,
        turn=turn,
    )
    return StepProgram(graph, executables, shape, dict(compiler.value_shardings), weight_value, tuple(state_values))


def hardware_of(topology: Topology, options: EngineOptions) -> Hardware:
    """Budgets: as given, else what the machine has free."""
    available = available_host_bytes()
    device = topology.mesh.local_devices[0]
    stats = None if topology.aliases else device.memory_stats()
    per_device = (stats or {}).get("bytes_limit", available)
    ways = 1 if topology.aliases else len(topology.mesh.local_devices)
    return Hardware(
        device_memory=options.device_memory * len(topology.mesh.local_devices)
        if options.device_memory is not None
        else per_device * ways,
        host_memory=options.host_memory if options.host_memory is not None else available * 4 // 5,
        aliases=topology.aliases,
        cache_pages=options.host_memory is not None,
        freed=heap.choose(bounded=options.host_memory is not None),
    )


@dataclasses.dataclass(frozen=True)
class StepSetup:
    """Everything about a training step that is known before memory or disk is touched.

    Attributes:
      program: The training step.
      layout: The pages.
      topology: The mesh.
      record: How optimizer state is stored.
      gradient_dtype: The same on every tier.
      options: Budgets and sizes.
      fused: The optimizer has a host kernel.
      update_bytes: Host memory that the update needs beside its frames.
    """

    program: StepProgram
    layout: Layout
    topology: Topology
    record: RecordFormat
    gradient_dtype: np.dtype
    options: EngineOptions
    fused: bool = True
    update_bytes: int = 0

    def plan(self) -> Plan:
        """The first of `EngineOptions.streams` that fits. Raises PlanError: the budgets are too small for all."""
        options, failure = self.options, None
        hardware, held = hardware_of(self.topology, options), rss_bytes()
        for stream in options.streams():
            try:
                return make_plan(
                    self.program.shape, hardware, options.placement, stream,
                    weights_itemsize=max((p.dtype.itemsize for p in self.layout.pages if p.trainable), default=4),
                    record_itemsize=self.record.itemsize, gradient_itemsize=self.gradient_dtype.itemsize,
                    base_rss_bytes=held, update_bytes=self.update_bytes,
                )  # fmt: skip
            except PlanError as error:
                failure = error
        assert failure is not None
        raise failure


class StreamEngine:
    """Owns the arena, the store and everything that moves bytes between them for one run.

    Args:
      setup: The step.
      init_slots: Initial values of the optimizer's slots.
      paths: Directories for the files of the NVMe tier, one per drive.
      shares: Relative bandwidth of each.
      reuse: The files are there already and hold the state, in so many banks; 0: they are made.
      num_versions: Extents per chunk; None: as planned. Retained steps need more.

    Raises:
      PlanError: the budgets are too small.
      StoreError: the disk is too small.
    """

    def __init__(
        self,
        setup: StepSetup,
        init_slots: InitSlots,
        paths: Sequence[pathlib.Path],
        *,
        shares: Sequence[float] = (1.0,),
        reuse: int = 0,
        num_versions: int | None = None,
    ) -> None:
        self.program, self.layout, self.topology = setup.program, setup.layout, setup.topology
        self.record, self.options = setup.record, setup.options
        self.counters = Counters()
        self.plan = setup.plan()
        values_wait = any(unit.saved for unit in setup.program.graph.units)
        heap.apply(self.plan.hardware.freed, values_wait=values_wait)
        self.arena = FrameArena(self.plan.arena_bytes, lock=self.options.lock)
        if not self.topology.aliases and (reason := self.arena.register(self.topology.mesh.local_devices[0].client)):
            warnings.warn(reason, stacklevel=2)
        self.shares = tuple(shares)
        try:
            self.store = self._make_store(setup, paths, reuse, num_versions or self.plan.options.num_versions)
        except BaseException:
            self.arena.close()
            raise
        self.committer: Committer | None = None
        self.store.observer = self.counters.tracer.transfer
        several = self.topology.mesh.devices.size > 1
        self.counters.tracer.notes[Lane.COLLECTIVES] = "inside the unit programs" if several else "none: one device"
        self._wire(setup.gradient_dtype, init_slots, setup.fused)

    def _make_store(self, setup: StepSetup, paths: Sequence[pathlib.Path], reuse: int, num_versions: int) -> PageStore:
        plan, layout = self.plan, self.layout
        extents = state_extents(layout.pages, self.record, plan.chunk_elements, self.shares)
        spilled = [
            page.num_elements * setup.gradient_dtype.itemsize
            if plan.tiers[page.index].gradients is Tier.NVME and page.trainable
            else 0
            for page in layout.pages
        ]
        per_chunk = plan.chunk_elements * setup.gradient_dtype.itemsize
        extents[GRADIENTS] = KindExtents.deal([split_chunks(n, per_chunk) for n in spilled], self.shares)
        sizes = [span.residency.num_bytes for span in plan.spans if span.residency.key[0] == "residual_out"]
        extents[RESIDUALS] = KindExtents.deal([[n] for n in sizes], self.shares)
        write_through = plan.options.write_through
        sparse = {
            kind
            for kind in VERSIONED
            if not write_through and not any(getattr(t, kind) is Tier.NVME for t in plan.tiers)
        }
        banks = {kind: max(num_versions, reuse) if kind in VERSIONED else 1 for kind in extents}
        there = dict.fromkeys(VERSIONED, reuse) if reuse else None
        store = PageStore(paths, extents, banks, self.options.aio, reuse=there, sparse=frozenset(sparse))
        store.versions.num_banks |= dict.fromkeys(VERSIONED, num_versions)
        return store

    def _wire(self, gradient_dtype: np.dtype, init_slots: InitSlots, fused: bool) -> None:
        plan, layout, program = self.plan, self.layout, self.program
        resident = {
            page: FrameSpan(offset, layout.pages[page].num_bytes)
            for (kind, page), offset in plan.resident.items()
            if kind == WEIGHTS
        }
        self.pager = Pager(layout, self.topology, self.arena, self.store, resident, self.counters)
        self.gradients = GradientCollector(
            program.graph, layout, plan, gradient_dtype, self.arena, self.store, self.counters
        )  # fmt: skip
        residuals = ResidualStore(program.graph, plan, self.arena, self.store, program.value_shardings, self.counters)
        self.io = ChunkIO(
            layout, plan, self.record, gradient_dtype, self.arena, self.store, self.pager, self.counters
        )  # fmt: skip
        self.fused = FusedUpdate(layout, plan, self.record, self.counters, num_threads=self.options.num_threads)
        self.generic = GenericUpdater(layout, plan, self.record, self.io, self.counters, self.topology.axis_sizes)
        self.read_ahead = ReadAhead(self.io)
        self.updates = OverlappedUpdates(
            plan, self.store, self.pager, self._pipeline, self.read_ahead, self.counters
        )  # fmt: skip
        if fused:
            self.pager.attach(self.updates)
            self.gradients.attach(self.updates.release)
        self.contents = Contents(layout, plan, self.record, self.io, dict(self.topology.axis_sizes), init_slots)
        self.executor = Executor(
            program.graph, plan, program.executables, device_operands(program.graph, self.topology), self.pager,
            self.gradients, residuals, self.counters,
            updates=self.updates if fused else None, weight_value=program.weight_value,
            state_values=program.state_values,
        )  # fmt: skip

    def _pipeline(self, compute: Compute, gradients: Collected) -> ChunkPipeline:
        return ChunkPipeline(
            self.io, compute, gradients=gradients, may_write=self.may_write, wait_to_write=self._wait_to_write,
            on_written=self._on_written, ahead=self.read_ahead,
        )  # fmt: skip

    def may_write(self) -> bool:
        """Is the last step durable, so that pages may change?"""
        return self.committer is None or self.committer.may_write()

    def _on_written(self, num_bytes: int) -> None:
        """Beside backward, where the drive has little else to do, new versions are made durable as they come."""
        if self.committer is not None and self.updates.speculating:
            self.committer.sync_ahead(num_bytes)

    def _wait_to_write(self) -> None:
        if self.committer is not None:
            self.committer.wait()

    def attach_log(self, log: CommitLog) -> None:
        """From here on steps can be committed to `log`, and no page is written while a commit is under way."""
        self.committer = Committer(log, self.store, VERSIONED, self.counters)
        self.committer.observer = lambda start, end: self.counters.tracer.add(Lane.COMMIT, "commit", start, end)
        self.store.before_write = lambda kind: self._wait_to_write() if kind in VERSIONED else None

    def settle(self) -> None:
        """Brings the pages to the state of the last step: nothing is owed, nothing is fetched ahead.

        Raises:
          StoreError: a transfer failed.
        """
        self.updates.finish()
        self.updates.cancel()
        self.pager.cancel()

    def close(self, *, delete: bool = False) -> None:
        """Ends all transfers and gives memory back. With `delete`, removes the files too. Does not finish updates.

        Raises:
          StoreError: a commit in the background had failed.
        """
        try:
            if self.committer is not None:
                self.committer.close()
        finally:
            self.updates.abort()
            self.pager.abort()
            self._close(delete)

    def _close(self, delete: bool) -> None:
        self.pager.close()
        if delete:
            self.store.delete()
        else:
            self.store.close()
        self.arena.close()


def device_operands(graph: UnitGraph, topology: Topology) -> list[Any]:
    return [jax.device_put(operand, topology.replicated) for operand in graph.operands]


def split_chunks(num_bytes: int, chunk_bytes: int) -> list[int]:
    """Sizes of the chunks of a page."""
    full, rest = divmod(num_bytes, chunk_bytes) if chunk_bytes else (0, 0)
    return [chunk_bytes] * full + ([rest] if rest else [])


class SizedPage(Protocol):
    """What the place of a page's chunks depends on."""

    @property
    def num_elements(self) -> int: ...
    @property
    def itemsize(self) -> int: ...
    @property
    def trainable(self) -> bool: ...


def state_extents(
    pages: Sequence[SizedPage], record: RecordFormat, chunk_elements: int, shares: Sequence[float]
) -> dict[str, KindExtents]:
    """Where the chunks of weights and records lie: a function of what is stored with a run."""
    extents = {}
    for kind in VERSIONED:
        chunks = []
        for page in pages:
            item = page.itemsize if kind == WEIGHTS else (record.itemsize if page.trainable else 0)
            chunks.append(split_chunks(page.num_elements * item, chunk_elements * item))
        extents[kind] = KindExtents.deal(chunks, shares)
    return extents


__all__ = [
    "EngineOptions",
    "StepProgram",
    "StepSetup",
    "StreamEngine",
    "hardware_of",
    "make_layout",
    "step_program",
]
