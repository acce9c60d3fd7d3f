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

from zinf_jax.graph.apart import Apart
from zinf_jax.graph.casts import Cast, given_casts, parameter_casts
from zinf_jax.graph.types import Program, Unit, UnitGraph, ValueId
from zinf_jax.stream.binding import Binding, Slot, bind
from zinf_jax.tier import Layout, Topology, from_rows, to_rows

COMPILER_OPTIONS = {"xla_allow_excess_precision": False}


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
      casts: (pages) -> cast pieces, which the others take: once for all micro-batches of a pass. None where there are
        none.
      recasts: (pages, cast pieces of a like unit) -> cast pieces, in the memory of those.
      cast_avals: What they give.
      forward: (pages, cast pieces, inputs, operands) -> outputs.
      backward: (pages, cast pieces, inputs, operands, saved, cotangents) -> ([], input cotangents, gradient rows). None
        where nothing is differentiated, or where `turn` does it.
      turn: (pages, cast pieces, inputs, operands, seed) -> (outputs, input cotangents, gradient rows).
      gradients: (crossing, and what `backward` or `turn` took) -> gradient rows. Those then give `crossing` instead.
        None where they are one program.
      crossing_bytes: Of that.
    """

    binding: Binding
    forward: Executable
    casts: Executable | None = None
    recasts: Executable | None = None
    cast_avals: tuple[jax.ShapeDtypeStruct, ...] = ()
    backward: Executable | None = None
    turn: Executable | None = None
    gradients: Executable | None = None
    crossing_bytes: int = 0

    def can_recast(self, pieces: Sequence[Any]) -> bool:
        """Have these the shapes and dtypes of this unit's casts?"""
        return [(x.shape, x.dtype) for x in pieces] == [(x.shape, x.dtype) for x in self.cast_avals]

    def sizes(self, saved_bytes: int) -> dict[str, int]:
        """The bytes of a `UnitShape`; `saved_bytes` are of what the unit's own backward reads."""
        last, late, casts = self.turn or self.backward, self.gradients, self.casts
        rows = late.output_bytes if late else 0
        return {
            "forward_bytes": self.forward.output_bytes - saved_bytes,
            "forward_temp_bytes": self.forward.temp_bytes,
            "backward_bytes": (last.output_bytes if last else 0) + rows,
            "backward_temp_bytes": last.temp_bytes if last else 0,
            "gradient_temp_bytes": late.temp_bytes if late else 0,
            "crossing_bytes": self.crossing_bytes,
            "cast_bytes": casts.output_bytes + casts.temp_bytes if casts else 0,
        }


class UnitCompiler:
    """Compiles the programs of one graph for one layout and topology. Main thread only.

    On one device of the CPU backend, which runs programs side by side, casts and weight gradients are programs of their
    own. Elsewhere a device runs one program after the other, and an all-gather or reduce-scatter is part of each.
    """

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
        self._apart = topology.aliases and topology.mesh.size == 1
        self._casts: dict[int, tuple[Cast, ...]] = {}
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
        pages, *rest = self._arguments(unit, program, binding)
        casts, cast_pieces = self._compile_casts(unit, binding, pages)
        arguments = (pages, cast_pieces, *rest)
        forward = self._compile(unit, binding, "forward", self._forward(program, binding), arguments)
        for value, sharding in zip(unit.outputs, forward.output_shardings, strict=True):
            self.value_shardings.setdefault(value, sharding)
        units = UnitExecutables(binding, forward, **casts)
        if unit.index not in self._graph.backward or not program.differentiable:
            return units
        if turn:
            seed = self._aval(jax.ShapeDtypeStruct((), jnp.float32), self._topology.replicated)
            function = self._turn(program, binding, unit)
            main, late = self._compile_backward(unit, binding, "turn", function, (*arguments, seed))
            return dataclasses.replace(units, turn=main, **late)
        cotangents = [
            self._aval(self._graph.values[v], self.value_shardings[v])
            for v, diff in zip(unit.outputs, program.diff_outputs, strict=True)
            if diff
        ]
        saved = [self._aval(self._graph.values[v], self.value_shardings[v]) for v in unit.saved]
        function = self._backward(program, binding, unit)
        main, late = self._compile_backward(unit, binding, "backward", function, (*arguments, saved, cotangents))
        return dataclasses.replace(units, backward=main, **late)

    def _compile_casts(self, unit: Unit, binding: Binding, pages: Any) -> tuple[dict[str, Any], list[Any]]:
        """What there is of casts in a unit's `UnitExecutables`, and what they give."""
        program = self._graph.programs[unit.program]
        casts = self._casts_of(program)
        if not casts:
            return {}, []
        shapes = [jax.ShapeDtypeStruct(program.piece_avals[cast.piece].shape, cast.dtype) for cast in casts]
        given = [self._aval(shape, self._topology.replicated) for shape in shapes]

        def make(pages: Any, replaced: Any = ()) -> Any:
            pieces = self._pieces(binding, pages)
            return self._fixed([pieces[cast.piece].astype(cast.dtype) for cast in casts])

        first = self._compile(unit, binding, "casts", make, (pages,))
        again = self._compile(unit, binding, "recasts", make, (pages, given), donate_argnums=1, keep_unused=True)
        return {"casts": first, "recasts": again, "cast_avals": tuple(given)}, given

    def _compile_backward(
        self, unit: Unit, binding: Binding, phase: str, function: Callable[..., Any], arguments: Sequence[Any]
    ) -> tuple[Executable, dict[str, Any]]:
        """The backward or turn of a unit, and `gradients` and `crossing_bytes` where those are apart."""
        if not self._apart:
            return self._compile(unit, binding, phase, function, arguments), {}
        num_outputs = 0

        def in_two(*args: Any) -> tuple[list[Any], list[Any]]:
            nonlocal num_outputs
            outputs, back, rows = function(*args)
            num_outputs = len(outputs)
            return list(rows), [*outputs, *back]

        two = Apart(in_two, *arguments)
        if not two.splits:
            return self._compile(unit, binding, phase, function, arguments), {}

        def early(*args: Any) -> Any:
            found, crossing = two.early(*args)
            return found[:num_outputs], found[num_outputs:], crossing

        main = self._compile(unit, binding, phase, early, arguments)
        shardings = main.output_shardings[2]
        crossing = [self._aval(x, s) for x, s in zip(two.crossing, shardings, strict=True)]
        late = self._compile(unit, binding, f"gradients of {phase}", two.late, (crossing, *arguments))
        return main, {"gradients": late, "crossing_bytes": sum(x.size * x.dtype.itemsize for x in crossing)}

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
        self,
        unit: Unit,
        binding: Binding,
        phase: str,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        **options: Any,
    ) -> Executable:
        leaves, _ = jax.tree.flatten(arguments)
        outputs = None
        if phase not in ("casts", "recasts", "forward"):
            outputs = tuple(self.value_shardings[v] for v in unit.inputs)
        key = (
            phase, unit.program, tuple(slot.signature for slot in binding.slots),
            tuple((a.shape, str(a.dtype), a.sharding) for a in leaves), outputs,
        )  # fmt: skip
        if key not in self._cache:
            compiled = jax.jit(function, compiler_options=COMPILER_OPTIONS, **options).lower(*arguments).compile()
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

    def _casts_of(self, program: Program) -> tuple[Cast, ...]:
        if not self._apart:
            return ()
        if program.index not in self._casts:
            self._casts[program.index] = parameter_casts(program)
        return self._casts[program.index]

    def _forward(self, program: Program, binding: Binding) -> Callable[..., Any]:
        run = given_casts(program.forward, self._casts_of(program))

        def forward(pages: Any, cast_pieces: Any, inputs: Any, operands: Any) -> Any:
            return self._fixed(run(self._pieces(binding, pages), cast_pieces, inputs, operands))

        return forward

    def _fixed(self, outputs: Sequence[Any]) -> list[Any]:
        """On one device, outputs get the one sharding that everything has, so that equal units stay equal."""
        if self._topology.mesh.size > 1:
            return list(outputs)
        return [jax.lax.with_sharding_constraint(x, self._topology.replicated) for x in outputs]

    def _backward(self, program: Program, binding: Binding, unit: Unit) -> Callable[..., Any]:
        shardings = self._cotangent_shardings(program, unit)

        run = given_casts(program.backward, self._casts_of(program))

        def backward(pages: Any, cast_pieces: Any, inputs: Any, operands: Any, saved: Any, cotangents: Any) -> Any:
            gradients, back = run(self._pieces(binding, pages), cast_pieces, inputs, operands, saved, cotangents)
            back = [jax.lax.with_sharding_constraint(x, s) for x, s in zip(back, shardings, strict=True)]
            return [], back, self._rows(program, binding, gradients)

        return backward

    def _turn(self, program: Program, binding: Binding, unit: Unit) -> Callable[..., Any]:
        shardings = self._cotangent_shardings(program, unit)
        loss_at = unit.outputs.index(self._graph.loss)

        def both(pieces: Any, inputs: Any, operands: Any, seed: Any) -> Any:
            assert program.forward_vjp is not None
            outputs, pull = program.forward_vjp(pieces, inputs, operands)
            return outputs, *program.gradients(pull, [seed.astype(outputs[loss_at].dtype)])

        run = given_casts(both, self._casts_of(program))

        def turn(pages: Any, cast_pieces: Any, inputs: Any, operands: Any, seed: Any) -> Any:
            outputs, gradients, back = run(self._pieces(binding, pages), cast_pieces, inputs, operands, seed)
            back = [jax.lax.with_sharding_constraint(x, s) for x, s in zip(back, shardings, strict=True)]
            return self._fixed(outputs), back, self._rows(program, binding, gradients)

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
