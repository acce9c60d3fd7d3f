"""Compiles units: page arrays in, values and gradient rows out. Equal units share one executable.

A unit's programs take whole pages (sharded over `fsdp`), gather them once, and slice the leaves out; XLA makes the
slices part of the consumers. Gradients leave leaf by leaf as rows `[num_tp, num_ranks, shard_size]`, sharded over
`fsdp` where gradients are (a reduce-scatter, or an all-reduce and a slice): concatenating them into one vector
would cost a fifth of the whole pass on XLA:CPU.

Everything is compiled with `xla_allow_excess_precision=False`: with it on, two blocks in one unit and in two units give
different bits, and placement must never change a result.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from zinf_jax.graph.types import Program, Unit, UnitGraph, ValueId
from zinf_jax.leaves import Leaf
from zinf_jax.tier import Layout, Page, Segment, Topology, from_rows, to_rows

COMPILER_OPTIONS = {"xla_allow_excess_precision": False}


@dataclasses.dataclass(frozen=True)
class Place:
    """A stored piece: in which of a program's page arguments, and where there."""

    argument: int
    page: Page
    segment: Segment


@dataclasses.dataclass(frozen=True)
class Slot:
    """Where a program finds one of its pieces.

    Attributes:
      places: One, unless the layout stores slice by slice a leaf that this program reads whole.
      leaf: As the layout stores it.
      shape: Of the piece as the program reads it.
      index: Slice of a leaf that is stored whole but read slice by slice; None otherwise.
    """

    places: tuple[Place, ...]
    leaf: Leaf
    shape: tuple[int, ...]
    index: int | None

    @property
    def signature(self) -> tuple[Any, ...]:
        """Equal for slots that the same executable can serve."""
        places = tuple(
            (p.argument, p.page.shape, str(p.page.dtype), p.segment.offset, p.segment.shard_size, p.segment.size)
            for p in self.places
        )
        return (places, self.leaf.piece_shape, self.leaf.spec, self.leaf.stack_ndim, self.shape, self.index)


@dataclasses.dataclass(frozen=True)
class Binding:
    """A unit mapped onto pages: `pages` are its page arguments, in order of first use."""

    pages: tuple[int, ...]
    slots: tuple[Slot, ...]


def bind(unit: Unit, leaves: Sequence[Leaf], layout: Layout) -> Binding:
    """Maps a unit onto pages. The layout may be older than the cut: stacked leaves are then put together or sliced.

    Args:
      unit: Whose pieces are those of `leaves`.
      leaves: The graph's table.
      layout: The pages that exist.
    """
    pages: list[int] = []
    slots = []
    for piece in unit.pieces:
        leaf, stored = leaves[piece.leaf], layout.leaves[piece.leaf]
        if leaf.stack_ndim == stored.stack_ndim:
            wanted, index = [piece], None
        else:
            wanted, index = list(stored.pieces), piece.index if leaf.stack_ndim else None
        places = []
        for part in wanted:
            page, segment = layout.segment(part)
            if page.index not in pages:
                pages.append(page.index)
            places.append(Place(pages.index(page.index), page, segment))
        slots.append(Slot(tuple(places), stored, leaf.piece_shape, index))
    return Binding(tuple(pages), tuple(slots))


@dataclasses.dataclass(frozen=True)
class Executable:
    """A compiled program and what it needs beside its arguments.

    Attributes:
      call: The compiled function.
      output_bytes, temp_bytes: Of outputs, and of temporaries while it runs, summed over this process's devices.
      output_shardings: As compiled.
      text: HLO after optimisation, on demand.
    """

    call: Callable[..., Any]
    output_bytes: int
    temp_bytes: int
    output_shardings: Any

    def text(self) -> str:
        return self.call.as_text()  # type: ignore[attr-defined]


@dataclasses.dataclass(frozen=True)
class UnitExecutables:
    """What the executor calls for one unit.

    Attributes:
      binding: Its pages.
      forward: (pages, inputs, operands) -> outputs.
      backward: (pages, inputs, operands, saved, cotangents) -> (gradient rows, input cotangents). None where nothing is
        differentiated, or where `turn` does it.
      turn: (pages, inputs, operands, seed) -> (outputs, gradient rows, input cotangents).
    """

    binding: Binding
    forward: Executable
    backward: Executable | None
    turn: Executable | None


class UnitCompiler:
    """Compiles the programs of one graph for one layout and topology. Main thread only."""

    def __init__(
        self,
        graph: UnitGraph,
        layout: Layout,
        topology: Topology,
        *,
        gradient_dtype: Any,
    ) -> None:
        self._graph = graph
        self._layout = layout
        self._topology = topology
        self._gradient_dtype = gradient_dtype
        self._cache: dict[Any, Executable] = {}
        self.value_shardings: dict[ValueId, NamedSharding] = {}

    @property
    def num_executables(self) -> int:
        return len(self._cache)

    def executables(self) -> tuple[Executable, ...]:
        return tuple(self._cache.values())

    def compile_all(
        self,
        outer_shardings: Mapping[ValueId, NamedSharding],
        *,
        turn: bool,
        progress: Callable[[int, int], None] | None = None,
    ) -> tuple[UnitExecutables, ...]:
        """Compiles every unit, in order: a unit's input shardings are what its producers gave.

        Args:
          outer_shardings: Of the outer inputs.
          turn: Compile the last unit's forward and backward as one program.
          progress: Called with (units done, units).
        """
        self.value_shardings = dict(outer_shardings)
        result = []
        for unit in self._graph.units:
            last = turn and unit.index == len(self._graph.units) - 1
            result.append(self._compile_unit(unit, turn=last))
            if progress is not None:
                progress(unit.index + 1, len(self._graph.units))
        return tuple(result)

    def _compile_unit(self, unit: Unit, *, turn: bool) -> UnitExecutables:
        program = self._graph.programs[unit.program]
        binding = bind(unit, self._graph.leaves, self._layout)
        arguments = self._arguments(unit, program, binding)
        forward = self._compile(unit, binding, "forward", self._forward(program, binding), arguments)
        for value, sharding in zip(unit.outputs, forward.output_shardings, strict=True):
            self.value_shardings.setdefault(value, sharding)
        if unit.index not in self._graph.backward or not program.differentiable:
            return UnitExecutables(binding, forward, None, None)
        if turn:
            seed = self._aval(jax.ShapeDtypeStruct((), jnp.float32), self._topology.replicated)
            function = self._turn(program, binding, unit)
            return UnitExecutables(
                binding, forward, None, self._compile(unit, binding, "turn", function, (*arguments, seed))
            )
        cotangents = [
            self._aval(self._graph.values[v], self.value_shardings[v])
            for v, diff in zip(unit.outputs, program.diff_outputs, strict=True)
            if diff
        ]
        saved = [self._aval(self._graph.values[v], self.value_shardings[v]) for v in unit.saved]
        backward = self._compile(
            unit, binding, "backward", self._backward(program, binding, unit), (*arguments, saved, cotangents)
        )
        return UnitExecutables(binding, forward, backward, None)

    def _arguments(self, unit: Unit, program: Program, binding: Binding) -> tuple[Any, ...]:
        topology, layout = self._topology, self._layout
        pages = [
            self._aval(
                jax.ShapeDtypeStruct(layout.pages[p].shape, layout.pages[p].dtype),
                topology.weights_sharding(layout.pages[p], layout.leaves),
            )
            for p in binding.pages
        ]
        inputs = [self._aval(self._graph.values[v], self.value_shardings[v]) for v in unit.inputs]
        operands = [self._aval(aval, topology.replicated) for aval in program.operand_avals]
        return pages, inputs, operands

    def _aval(self, aval: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type)

    def _compile(
        self, unit: Unit, binding: Binding, phase: str, function: Callable[..., Any], arguments: Sequence[Any]
    ) -> Executable:
        leaves, _ = jax.tree.flatten(arguments)
        outputs = None
        if phase != "forward":
            outputs = tuple(self.value_shardings[v] for v in unit.inputs)
        key = (
            phase, unit.program, tuple(slot.signature for slot in binding.slots),
            tuple((a.shape, str(a.dtype), a.sharding) for a in leaves), outputs,
        )  # fmt: skip
        if key not in self._cache:
            compiled = jax.jit(function, compiler_options=COMPILER_OPTIONS).lower(*arguments).compile()
            memory = compiled.memory_analysis()
            ways = len(self._topology.mesh.local_devices)
            made = 0 if memory is None else memory.output_size_in_bytes * ways
            temporary = 0 if memory is None else memory.temp_size_in_bytes * ways
            self._cache[key] = Executable(compiled, made, temporary, compiled.output_shardings)
        return self._cache[key]

    def _pieces(self, binding: Binding, pages: Sequence[Any]) -> list[Any]:
        topology, leaves = self._topology, self._layout.leaves
        gathered = []
        for index, array in zip(binding.pages, pages, strict=True):
            page = self._layout.pages[index]
            # A no-op on one device; over `fsdp` it is the unit's one all-gather of this page.
            gathered.append(jax.lax.with_sharding_constraint(array, topology.gathered_sharding(page, leaves)))
        return [self._piece(slot, gathered) for slot in binding.slots]

    def _piece(self, slot: Slot, gathered: Sequence[Any]) -> Any:
        topology, parts = self._topology, []
        for place in slot.places:
            s = place.segment
            rows = gathered[place.argument][:, :, s.offset : s.offset + s.shard_size]
            part = from_rows(rows, slot.leaf, place.page, s, topology.axis_sizes, jnp)
            if slot.leaf.spec:
                part = jax.lax.with_sharding_constraint(part, topology.leaf_sharding(slot.leaf))
            parts.append(part)
        if slot.index is not None:
            whole = jnp.stack(parts) if len(parts) > 1 else parts[0]
            return jnp.reshape(whole, (-1, *slot.shape))[slot.index]
        return parts[0] if len(parts) == 1 else jnp.reshape(jnp.stack(parts), slot.shape)

    def _rows(self, program: Program, binding: Binding, gradients: Sequence[Any]) -> list[Any]:
        topology = self._topology
        slots = [slot for slot, diff in zip(binding.slots, program.diff_pieces, strict=True) if diff]
        rows = []
        for slot, gradient in zip(slots, gradients, strict=True):
            assert len(slot.places) == 1 and slot.index is None, "a training step is cut along its layout"
            page, segment = slot.places[0].page, slot.places[0].segment
            value = to_rows(gradient.astype(self._gradient_dtype), slot.leaf, page, segment, topology.axis_sizes, jnp)
            sharding = topology.gradient_sharding(page, self._layout.leaves)
            rows.append(jax.lax.with_sharding_constraint(value, sharding))
        return rows

    def _forward(self, program: Program, binding: Binding) -> Callable[..., Any]:
        def forward(pages: Any, inputs: Any, operands: Any) -> Any:
            return self._fixed(program.forward(self._pieces(binding, pages), inputs, operands))

        return forward

    def _fixed(self, outputs: Sequence[Any]) -> list[Any]:
        """On one device, outputs get the one sharding that everything has, so that equal units stay equal."""
        if self._topology.mesh.size > 1:
            return list(outputs)
        return [jax.lax.with_sharding_constraint(x, self._topology.replicated) for x in outputs]

    def _backward(self, program: Program, binding: Binding, unit: Unit) -> Callable[..., Any]:
        shardings = self._cotangent_shardings(program, unit)

        def backward(pages: Any, inputs: Any, operands: Any, saved: Any, cotangents: Any) -> Any:
            gradients, back = program.backward(self._pieces(binding, pages), inputs, operands, saved, cotangents)
            back = [jax.lax.with_sharding_constraint(x, s) for x, s in zip(back, shardings, strict=True)]
            return self._rows(program, binding, gradients), back

        return backward

    def _turn(self, program: Program, binding: Binding, unit: Unit) -> Callable[..., Any]:
        shardings = self._cotangent_shardings(program, unit)
        loss_at = unit.outputs.index(self._graph.loss)

        def turn(pages: Any, inputs: Any, operands: Any, seed: Any) -> Any:
            assert program.forward_vjp is not None
            outputs, pull = program.forward_vjp(self._pieces(binding, pages), inputs, operands)
            gradients, back = program.gradients(pull, [seed.astype(outputs[loss_at].dtype)])
            back = [jax.lax.with_sharding_constraint(x, s) for x, s in zip(back, shardings, strict=True)]
            return self._fixed(outputs), self._rows(program, binding, gradients), back

        return turn

    def _cotangent_shardings(self, program: Program, unit: Unit) -> list[NamedSharding]:
        return [self.value_shardings[v] for v, diff in zip(unit.inputs, program.diff_inputs, strict=True) if diff]


def can_turn(graph: UnitGraph) -> bool:
    """May the last unit's forward and backward be one program? It must make the loss and start the backward pass."""
    if not graph.backward or not graph.units:
        return False
    last = graph.units[-1]
    program = graph.programs[last.program]
    only_loss = [v for v, diff in zip(last.outputs, program.diff_outputs, strict=True) if diff] == [graph.loss]
    return graph.backward[0] == last.index and program.differentiable and only_loss
