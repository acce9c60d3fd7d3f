"""The passes over the units: one compiled program after the other, with every transfer running ahead of it.

Guarantees:
  * Programs are dispatched in schedule order, the casts and the weight gradients that units have apart beside them. At
    most `max_in_flight` are dispatched before the oldest one's outputs are ready; whatever happens at the end of a
    program (its gradients leave, its residuals are spilled, its pages' frames become free) happens then, in order.
  * Micro-batches run inside the loop over units: a page is fetched once per pass, a unit's gradient is summed on
    the device, in micro-batch order, and leaves once.
  * While it waits for the device it lets updates advance. A page is acquired only after its owed update; pages whose
    gradient is whole are handed to the update at once where a step asks for that.
  * The executor decides nothing: order, tiers, places and times are the plan's.
"""

import collections
import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zinf_jax.graph.types import UnitGraph, ValueId
from zinf_jax.plan import Phase, Plan, Position
from zinf_jax.stream.gradients import GradientCollector
from zinf_jax.stream.held import Held
from zinf_jax.stream.overlap import OverlappedUpdates
from zinf_jax.stream.pager import Pager
from zinf_jax.stream.programs import Executable, UnitExecutables
from zinf_jax.stream.residuals import ResidualStore
from zinf_jax.stream.side_lane import SideLane
from zinf_jax.stream.stats import Counters
from zinf_jax.stream.trace import Lane

Key = tuple[ValueId, int]  # value, micro-batch
_POLL_S = 0.002  # between looks at the device while an update is under way: little beside a program, or a chunk


@dataclasses.dataclass
class _InFlight:
    """A dispatched program, with the one that was split off it: what to wait for, and what to do then."""

    outputs: Any
    output_bytes: int
    temp_bytes: int
    retire: Callable[[], None]
    beside_bytes: int = 0
    name: str = ""


class Executor:
    """Runs the passes of one graph.

    Args:
      graph, plan, executables: What to run.
      operands: The graph's operands on the devices.
      pager, gradients, residuals: Where bytes are; the last two are None for evaluation.
      updates: Overlapped with the passes; None for evaluation.
      weight_value: The value by which micro-batches are weighted, if any.
      state_values: (outer input, result) pairs: a micro-batch's result is the next one's input.
      counters: Told about waits.
    """

    def __init__(
        self,
        graph: UnitGraph,
        plan: Plan,
        executables: Sequence[UnitExecutables],
        operands: Sequence[Any],
        pager: Pager,
        gradients: GradientCollector | None,
        residuals: ResidualStore | None,
        counters: Counters,
        *,
        updates: OverlappedUpdates | None = None,
        weight_value: ValueId | None = None,
        state_values: Sequence[tuple[ValueId, ValueId]] = (),
    ) -> None:
        self._graph = graph
        self._plan = plan
        self._executables = executables
        self._operands = operands
        self._pager = pager
        self._gradients = gradients
        self._residuals = residuals
        self._counters = counters
        self._updates = updates
        self._speculate: Callable[[], None] | None = None
        self._whole: set[int] = set()
        self._weight_value = weight_value
        self._state_values = tuple(state_values)
        self._sum = jax.jit(lambda xs, ys: [x + y for x, y in zip(xs, ys, strict=True)], donate_argnums=0)
        self._add = jax.jit(jnp.add, donate_argnums=0)
        self.weight_unit = 1.0
        self._before, self._beside = SideLane("casts"), SideLane("gradients")
        self._forget()
        self._in_flight: collections.deque[_InFlight] = collections.deque()
        sizes = plan.shape.group_sizes
        starts = [sum(sizes[:g]) for g in range(len(sizes))]
        self._micros = [range(s, s + n) for s, n in zip(starts, sizes, strict=True)]
        self._last_reads = self._find_last_reads()
        self._spill_at = self._find_spills()

    def run(
        self,
        outer: Sequence[Mapping[ValueId, Any]],
        seed: float = 1.0,
        *,
        speculate: Callable[[], None] | None = None,
    ) -> list[list[Any]]:
        """Runs all passes.

        Args:
          outer: Per micro-batch, its outer inputs on the devices. State inputs are needed for the first only.
          seed: The loss scale.
          speculate: Tells the updates to run ahead, as soon as those of the step before are complete.

        Returns:
          Per micro-batch, the graph's results, ready.
        """
        for micro, inputs in enumerate(outer):
            self._keep(list(inputs), micro, list(inputs.values()))
        self._loss_scale = np.float32(seed)
        self.weight_unit = 1.0
        self._speculate, self._whole = speculate, set()
        self._pager.begin(self._plan)
        if self._updates is not None:
            self._updates.expect(backwards=speculate is not None)
        if self._gradients is not None:
            self._gradients.begin()
        try:
            for position in self._plan.positions:
                self._run_position(position)
            self._drain(0)
            if self._updates is not None:
                self._updates.finish()  # of the step before: pages that no unit reads
            self._pager.finish()
            if self._residuals is not None:
                self._residuals.finish()
            results = [[self._result(v, m) for v in self._graph.results] for m in range(len(outer))]
            return jax.block_until_ready(results)
        except BaseException:
            self._abort()
            raise
        finally:
            self._forget()

    def _forget(self) -> None:
        self._values, self._cotangents, self._totals, self._casts = Held(), Held(), Held(), Held()
        self._dispatched: Any = ()

    def _result(self, value: ValueId, micro: int) -> Any:
        """A result is the caller's to keep: an input that is passed through may alias the memory of the batch."""
        array = self._values[(value, micro)]
        return jnp.copy(array) if value in self._plan.shape.outer_values else array

    def prefetch(self) -> None:
        """Between steps: starts what the next step's first position needs."""
        self._pager.prefetch(self._plan)
        if self._updates is not None:
            self._updates.issue(0)
            self._updates.advance()

    def _abort(self) -> None:
        if self._updates is not None:
            self._updates.abort()
        # What is not in flight yet reads frames too.
        for outputs in [*(program.outputs for program in self._in_flight), *self._casts.values(), self._dispatched]:
            with contextlib.suppress(Exception):  # the step's first error is what the caller sees
                jax.block_until_ready([x for x in jax.tree.leaves(outputs) if not x.is_deleted()])
        self._in_flight.clear()
        self._pager.abort()
        if self._gradients is not None:
            self._gradients.abort()
        if self._residuals is not None:
            self._residuals.abort()

    def _run_position(self, position: Position) -> None:
        self._drain(self._plan.options.max_in_flight - 1)
        self._release(position.index)
        self._pager.issue(position.index)
        if self._updates is not None:
            self._updates.issue(position.index)
        if self._residuals is not None:
            self._residuals.issue(position.index)
        executables = self._executables[position.unit]
        pages = [self._pager.acquire(page) for page in executables.binding.pages]
        if position.index not in self._casts:
            self._cast(position.index, executables, pages)
        casts = self._casts[position.index]
        name = f"{position.phase} {self._graph.units[position.unit].name}"
        for micro in self._micros[position.group]:
            self._drain(self._plan.options.max_in_flight - 1)
            start = time.perf_counter()
            if position.phase is Phase.FORWARD:
                self._forward(position, micro, executables, pages, casts)
            else:
                self._backward(position, micro, executables, pages, casts)
            program = self._in_flight[-1]
            program.name = name
            self._counters.tracer.until_ready(Lane.DEVICE_COMPUTE, name, start, program.outputs, micro=micro)
            self._note_memory()
        if position.index + 1 < len(self._plan.positions) and self._plan.options.lookahead:
            self._prepare(self._plan.positions[position.index + 1])

    def _prepare(self, following: Position) -> None:
        """While a position's programs run: copies the next one's pages to the device, if they are there, and casts."""
        executables = self._executables[following.unit]
        pages = [self._pager.prepare(page) for page in executables.binding.pages]
        if executables.casts is not None and all(page is not None for page in pages):
            self._drain(max(1, self._plan.options.max_in_flight - 1))
            self._cast(following.index, executables, pages)
            self._note_memory()

    def _cast(self, position: int, executables: UnitExecutables, pages: list[Any]) -> None:
        """Makes a position's casts, in the memory of those that are the oldest, which nothing in flight reads."""
        oldest = self._casts.pop(position - max(2, self._plan.options.max_in_flight))
        if executables.casts is None or executables.recasts is None:
            self._casts[position] = []
        elif oldest and executables.can_recast(oldest):
            self._casts[position] = self._before.run(executables.recasts.call, pages, oldest)
        else:
            self._casts[position] = self._before.run(executables.casts.call, pages)

    def _note_memory(self) -> None:
        """Device bytes now: the arrays that are held, and what the programs in flight need beside them."""
        num_bytes = self._values.num_bytes + self._cotangents.num_bytes + self._totals.num_bytes
        num_bytes += sum(p.output_bytes for p in self._in_flight)
        num_bytes += self._casts.num_bytes
        num_bytes += max((p.temp_bytes for p in self._in_flight), default=0)  # they run one after the other
        num_bytes += max((p.beside_bytes for p in self._in_flight), default=0)
        self._counters.peak_device_bytes = max(self._counters.peak_device_bytes, num_bytes)

    def _release(self, position: int) -> None:
        """Frees all frames whose time ends here, before any is taken: the plan may give their place away at once."""
        self._pager.release(position)
        if self._gradients is not None:
            self._gradients.release(position)
        if self._residuals is not None:
            self._residuals.release(position)

    def _drain(self, leave: int) -> None:
        """Retires programs, oldest first, until at most `leave` are in flight."""
        while len(self._in_flight) > leave:
            program = self._in_flight.popleft()
            # A deleted array was given to a later program to add to: that one is waited for in its turn.
            self._wait([x for x in jax.tree.leaves(program.outputs) if not x.is_deleted()], program.name)
            program.retire()

    def _wait(self, arrays: list[Any], name: str) -> None:
        """Waits for the device, and lets updates advance meanwhile."""
        while self._updates is not None and not all(x.is_ready() for x in arrays):
            if not self._updates.active:
                break
            if not self._updates.advance():
                with self._counters.timed("device_wait_s", program=name):
                    time.sleep(_POLL_S)
        with self._counters.timed("device_wait_s", program=name):
            jax.block_until_ready(arrays)

    def _arrays(self, values: Sequence[ValueId], micro: int) -> list[Any]:
        arrays = []
        for value in values:
            key = (value, micro)
            if key not in self._values and self._residuals is not None and self._residuals.spills(value):
                self._values[key] = self._residuals.get(value, micro)
            arrays.append(self._values[key] if key in self._values else self._state_input(value, micro))
        return arrays

    def _state_input(self, value: ValueId, micro: int) -> Any:
        """`state` passes from micro-batch to micro-batch: the input of one is the result of the one before."""
        result = dict(self._state_values)[value]
        self._values[(value, micro)] = self._values[(result, micro - 1)]
        return self._values[(value, micro)]

    def _forward(self, position: Position, micro: int, executables: UnitExecutables, *weights: list[Any]) -> None:
        unit = self._graph.units[position.unit]
        operands = [self._operands[i] for i in unit.operands]
        outputs = executables.forward.call(*weights, self._arrays(unit.inputs, micro), operands)
        self._keep(unit.outputs, micro, outputs)
        size = self._plan.shape.units[position.unit]
        retire = functools.partial(self._retire, position, micro)
        self._in_flight.append(_InFlight(outputs, size.forward_bytes, size.forward_temp_bytes, retire))

    def _backward(self, position: Position, micro: int, executables: UnitExecutables, *weights: list[Any]) -> None:
        unit = self._graph.units[position.unit]
        program = self._graph.programs[unit.program]
        operands = [self._operands[i] for i in unit.operands]
        inputs = self._arrays(unit.inputs, micro)
        main: Executable | None
        rest: list[Any]
        if position.phase is Phase.TURN:
            main, rest = executables.turn, [self._loss_scale]
        else:
            saved = self._arrays(unit.saved, micro)
            cotangents = [
                self._take_cotangent(value, micro)
                for value, diff in zip(unit.outputs, program.diff_outputs, strict=True)
                if diff
            ]
            main, rest = executables.backward, [saved, cotangents]
        assert main is not None
        arguments = (*weights, inputs, operands, *rest)
        outputs, back, rows = self._dispatched = main.call(*arguments)
        if position.phase is Phase.TURN:
            self._keep(unit.outputs, micro, outputs)
        add: Callable[..., Any] = self._sum
        if executables.gradients is not None:
            rows = self._beside.run(executables.gradients.call, rows, *arguments)
            self._dispatched = outputs, back, rows
            add = functools.partial(self._beside.run, self._sum)
        targets = [value for value, diff in zip(unit.inputs, program.diff_inputs, strict=True) if diff]
        for value, cotangent in zip(targets, back, strict=True):
            key = (value, micro)
            old = self._cotangents.get(key)
            self._cotangents[key] = cotangent if old is None else self._add(old, cotangent)
        total = self._totals.pop(position.unit)
        if rows:
            self._totals[position.unit] = rows if total is None else add(total, rows)
        last = micro == self._micros[position.group][-1]
        waits = (self._totals.get(position.unit) or (), [self._cotangents[(v, micro)] for v in targets])
        if last:
            self._totals.pop(position.unit)
        if last and not self._pager.aliases:
            for array in waits[0]:
                array.copy_to_host_async()  # on its own stream, while the next unit computes
        size = self._plan.shape.units[position.unit]
        retire = functools.partial(self._retire, position, micro, waits[0] if last and rows else ())
        self._in_flight.append(
            _InFlight(waits, size.backward_bytes, size.backward_temp_bytes, retire, size.gradient_temp_bytes)
        )

    def _take_cotangent(self, value: ValueId, micro: int) -> Any:
        if value == self._graph.loss and (value, micro) not in self._cotangents:
            return self._seed(micro)
        return self._cotangents.pop((value, micro))

    def _seed(self, micro: int) -> np.ndarray:
        """The cotangent of a micro-batch's loss: the loss scale, times its weight over the mean weight of the first
        group (so that fp16 does not overflow on token counts). The caller divides by the sum of these weights."""
        seed = self._loss_scale
        if self._weight_value is not None and self._plan.shape.num_micro_batches > 1:
            weights = [float(self._values[(self._weight_value, m)]) for m in self._micros[0]]
            self.weight_unit = sum(weights) / len(weights) or 1.0
            seed = np.float32(seed * np.float32(float(self._values[(self._weight_value, micro)]) / self.weight_unit))
        return np.asarray(seed).astype(self._graph.values[self._graph.loss].dtype)

    def _keep(self, values: Sequence[ValueId], micro: int, arrays: Sequence[Any]) -> None:
        for value, array in zip(values, arrays, strict=True):
            self._values[(value, micro)] = array

    def _retire(self, position: Position, micro: int, rows: Sequence[Any] = ()) -> None:
        """The program is done: gradients leave, values that nobody reads any more are dropped, residuals spilled."""
        if rows:
            assert self._gradients is not None
            unit = self._graph.units[position.unit]
            diff = self._graph.programs[unit.program].diff_pieces
            pieces = [piece for piece, wanted in zip(unit.pieces, diff, strict=True) if wanted]
            for piece, array in zip(pieces, rows, strict=True):
                self._gradients.add(piece, array)
        if position.phase is not Phase.FORWARD and micro == self._micros[position.group][-1]:
            self._run_ahead(position)
        for value in self._spill_at.get(position.index, ()):
            assert self._residuals is not None
            self._residuals.put(value, micro, self._values.pop((value, micro)))
        for value in self._last_reads.get(position.index, ()):
            self._values.pop((value, micro))

    def _run_ahead(self, position: Position) -> None:
        """Hands pages whose gradient is whole, and that nothing in this step reads again, to the update."""
        if self._updates is None or self._gradients is None or self._speculate is None:
            return
        if position.index + 1 == len(self._plan.positions):
            return  # the norm is known next: the rest is updated for certain, in the frames of the next step's weights
        if not self._updates.speculating:
            if not self._updates.complete:
                return
            self._speculate()
            if not self._updates.speculating:  # no old version would stay, or not while the last commit is under way
                return
        self._whole.update(self._gradients.take_complete())
        pages = [page for page in self._whole if self._plan.last_uses[page] <= position.index]
        self._whole.difference_update(pages)
        self._updates.run_ahead(sorted(pages))

    def _find_last_reads(self) -> dict[int, list[ValueId]]:
        """Position -> values that are dead after it."""
        kept = self._plan.shape.kept_values | {result for _, result in self._state_values}
        dead: dict[int, list[ValueId]] = {}
        for life in self._plan.lives:
            if life.value not in kept:
                last = life.last_backward if life.is_residual else life.last_forward
                dead.setdefault(last, []).append(life.value)
        return dead

    def _find_spills(self) -> dict[int, list[ValueId]]:
        """Position -> residuals that leave the device after it."""
        leave: dict[int, list[ValueId]] = {}
        for life in self._plan.lives:
            if life.value in self._plan.spilled:
                leave.setdefault(life.last_forward, []).append(life.value)
        return leave
