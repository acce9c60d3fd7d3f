"""A run's machinery, put together: from a cut graph and budgets to arena, store, executor and updater.

Everything is created once, in an order in which what cannot work fails early: cut, lay out, compile, plan (refuses what
does not fit), then memory, then disk space, then parameters page by page.
"""

import dataclasses
import pathlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

import aio_ffi
from zinf_jax.graph.types import UnitGraph, ValueId
from zinf_jax.plan import (
    BYTES_OF,
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
from zinf_jax.stream.chunks import ChunkIO
from zinf_jax.stream.contents import Contents, InitSlots
from zinf_jax.stream.executor import Executor
from zinf_jax.stream.generic_updates import GenericUpdater
from zinf_jax.stream.gradients import GRADIENTS, GradientCollector
from zinf_jax.stream.pager import WEIGHTS, Pager
from zinf_jax.stream.programs import UnitCompiler, UnitExecutables, can_turn
from zinf_jax.stream.records import RecordFormat
from zinf_jax.stream.residuals import RESIDUALS, ResidualStore, residual_slots
from zinf_jax.stream.stats import Counters, return_freed_memory, rss_bytes
from zinf_jax.stream.updates import Updater
from zinf_jax.tier import FrameArena, FrameSpan, Layout, LayoutOptions, PageStore, Topology, build_layout
from zinf_jax.units import ceil_to

SECTOR = 4096


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """How a run is streamed; see the owners of the parts."""

    placement: PlacementOptions = dataclasses.field(default_factory=PlacementOptions)
    stream: StreamOptions = dataclasses.field(default_factory=StreamOptions)
    layout: LayoutOptions = dataclasses.field(default_factory=LayoutOptions)
    aio: aio_ffi.EngineOptions = dataclasses.field(default_factory=aio_ffi.EngineOptions)
    max_unit_bytes: int = 1 << 30
    device_memory: int | None = None
    host_memory: int | None = None
    lock: str | bool = "auto"
    num_threads: int | None = None


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
    progress: Callable[[int, int], None] | None = None,
) -> StepProgram:
    """Compiles a graph and describes it for the planner."""
    weighted = weight_value is not None and sum(group_sizes) > 1
    turn = can_turn(graph) and not weighted
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
        last = exe.turn or exe.backward
        units.append(
            UnitShape(
                unit.name, exe.binding.pages, tuple(dict.fromkeys(layout.where[p][0] for p in wanted)),
                unit.inputs, unit.outputs, exe.forward.output_bytes, last.output_bytes if last else 0, unit.flops,
                exe.forward.temp_bytes, last.temp_bytes if last else 0,
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
    )


def available_host_bytes() -> int:
    """MemAvailable, or what the cgroup still allows if that is less."""
    available = 1 << 40
    with open("/proc/meminfo") as meminfo:
        for line in meminfo:
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    limit, used = pathlib.Path("/sys/fs/cgroup/memory.max"), pathlib.Path("/sys/fs/cgroup/memory.current")
    try:
        text = limit.read_text().strip()
        if text != "max":
            available = min(available, max(0, int(text) - int(used.read_text())))
    except (OSError, ValueError):
        pass
    return available


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
        """Raises PlanError: the budgets are too small."""
        options = self.options
        return make_plan(
            self.program.shape, hardware_of(self.topology, options), options.placement, options.stream,
            weights_itemsize=max((p.dtype.itemsize for p in self.layout.pages if p.trainable), default=4),
            record_itemsize=self.record.itemsize, gradient_itemsize=self.gradient_dtype.itemsize,
            base_rss_bytes=rss_bytes(), update_bytes=self.update_bytes,
        )  # fmt: skip


class StreamEngine:
    """Owns the arena, the store and everything that moves bytes between them for one run.

    Args:
      setup: The step.
      init_slots: Initial values of the optimizer's slots.
      directory: For the files of the NVMe tier.
      reuse: The files are there already and hold the state.

    Raises:
      PlanError: the budgets are too small.
      StoreError: the disk is too small.
    """

    def __init__(
        self, setup: StepSetup, init_slots: InitSlots, directory: pathlib.Path, *, reuse: bool = False
    ) -> None:
        self.program, self.layout, self.topology = setup.program, setup.layout, setup.topology
        self.record, self.options = setup.record, setup.options
        self.counters = Counters()
        return_freed_memory()
        self.plan = setup.plan()
        self.arena = FrameArena(self.plan.arena_bytes, lock=self.options.lock)
        if not self.topology.aliases and (reason := self.arena.register(self.topology.mesh.local_devices[0].client)):
            warnings.warn(reason, stacklevel=2)
        self.offsets, sizes, sparse = _file_layout(self.plan)
        try:
            self.store = PageStore(directory, sizes, self.options.aio, reuse=reuse, sparse=sparse)
        except BaseException:
            self.arena.close()
            raise
        self._wire(setup.gradient_dtype, init_slots, setup.fused)

    def _wire(self, gradient_dtype: np.dtype, init_slots: InitSlots, fused: bool) -> None:
        plan, layout, program = self.plan, self.layout, self.program
        resident = {
            page: FrameSpan(offset, layout.pages[page].num_bytes)
            for (kind, page), offset in plan.resident.items()
            if kind == WEIGHTS
        }
        self.pager = Pager(
            layout, self.topology, self.arena, self.store, self.offsets[WEIGHTS], resident, self.counters
        )
        self.gradients = GradientCollector(
            program.graph, layout, plan, gradient_dtype, self.arena, self.store, self.offsets[GRADIENTS], self.counters
        )
        residuals = ResidualStore(program.graph, plan, self.arena, self.store, program.value_shardings, self.counters)
        self.io = ChunkIO(
            layout, plan, self.record, gradient_dtype, self.arena, self.store, self.pager, self.gradients,
            self.offsets, self.counters,
        )  # fmt: skip
        self.updater: Updater | GenericUpdater
        parts = (layout, plan, self.record, self.io, self.gradients, self.counters)
        if fused:
            self.updater = Updater(*parts, num_threads=self.options.num_threads)
        else:
            self.updater = GenericUpdater(*parts, self.topology.axis_sizes)
        self.contents = Contents(layout, plan, self.record, self.io, dict(self.topology.axis_sizes), init_slots)
        self.executor = Executor(
            program.graph, plan, program.executables, device_operands(program.graph, self.topology), self.pager,
            self.gradients, residuals, self.counters,
            weight_value=program.weight_value, state_values=program.state_values,
        )  # fmt: skip

    def close(self, *, delete: bool = False) -> None:
        """Ends all transfers and gives memory back. With `delete`, removes the files too."""
        self.pager.close()
        if delete:
            self.store.delete()
        else:
            self.store.close()
        self.arena.close()


def device_operands(graph: UnitGraph, topology: Topology) -> list[Any]:
    return [jax.device_put(operand, topology.replicated) for operand in graph.operands]


def _file_layout(plan: Plan) -> tuple[dict[str, dict[int, int]], dict[str, int], frozenset[str]]:
    """Offsets of pages per kind, file sizes, and which files only grow (kinds of which no page lives on NVMe)."""
    offsets: dict[str, dict[int, int]] = {}
    sizes: dict[str, int] = {}
    sparse = set()
    for kind, attribute in BYTES_OF.items():
        offset, table = 0, {}
        for index, page in enumerate(plan.shape.pages):
            table[index] = offset
            num_bytes = getattr(page, attribute)
            on_nvme = getattr(plan.tiers[index], kind) is Tier.NVME
            if kind != GRADIENTS or on_nvme:
                offset += ceil_to(num_bytes, SECTOR)
        offsets[kind], sizes[kind] = table, offset
        if not any(getattr(t, kind) is Tier.NVME for t in plan.tiers):
            sparse.add(kind)
    slots = residual_slots(plan)
    if slots:
        last = max(slots, key=slots.__getitem__)
        sizes[RESIDUALS] = slots[last] + ceil_to(plan.shape.value_bytes[last[0]], SECTOR)
    return offsets, sizes, frozenset(sparse)


__all__ = [
    "EngineOptions",
    "StepProgram",
    "StepSetup",
    "StreamEngine",
    "available_host_bytes",
    "hardware_of",
    "make_layout",
    "step_program",
]
