"""Which equations stand at one place, and which are repeated wherever they are needed.

A *step* is an equation that runs once, in order. Its *helpers* are cheap equations that run again in every unit whose
steps need them, so that their results never cross a cut:

* of parameters alone, when the result is about as large as what it is made of (casts, transposes, normalisations):
  carrying it would carry every weight across every cut;
* of the batch alone, when it is cheap (masks, positions, one-hot labels, casts);
* of constants alone.

What depends on parameters alone and is small (the terms of an L2 penalty) is a step, but not where the trace has it:
it moves to a step that reads the same piece, or else to just before its first use.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

from zinf_jax.graph import _jaxpr
from zinf_jax.graph._equal import Keys
from zinf_jax.graph._jaxpr import Eqn, Var
from zinf_jax.graph._linear import Linear, variables

_PARAM, _BATCH = 1, 2
_TINY_BYTES = 4096  # a value of the batch alone that is carried without a thought
_HEAVY = frozenset(
    """
    dot_general conv_general_dilated ragged_dot ragged_dot_general scan while cond sort top_k approx_top_k fft
    cumsum cumprod cummax cummin cumlogsumexp reduce_window reduce_window_sum reduce_window_max cholesky qr svd eigh
    lu triangular_solve custom_linear_solve pallas_call custom_jvp_call custom_vjp_call scatter scatter-add
    householder_product random_gamma pure_callback io_callback ffi_call shard_map
    """.split()  # noqa: SIM905
)
_COSTLY = {"random_bits": 30, "threefry2x32": 30, "exp": 4, "log": 4, "sin": 4, "cos": 4, "tanh": 4, "pow": 8}
# Parameters of these hold positions, in which equal layers differ: they are better done once, up front.
_POSITIONAL = frozenset({"slice", "dynamic_slice", "gather", "random_split", "pad"})


@dataclasses.dataclass(frozen=True)
class Step:
    """An equation at its place, with the helpers that it needs, in order, and what they all read from elsewhere."""

    eqn: Eqn
    helpers: tuple[Eqn, ...]
    pieces: tuple[Var, ...]
    values: tuple[Var, ...]  # outer inputs and results of steps
    shape: int  # equal for steps of equal structure, helpers included
    early: bool  # small and of the batch alone, done up front: its result is as good as an outer input


@dataclasses.dataclass(frozen=True)
class _Closure:
    """What a repeated value is made of."""

    helpers: frozenset[int] = frozenset()
    pieces: frozenset[Var] = frozenset()
    values: frozenset[Var] = frozenset()
    cost: int = 0


def place(linear: Linear, keys: Keys) -> list[Step]:
    """Decides what is a step, and orders the steps. May append equations that copy results to `linear`."""
    return _Placer(linear, keys).run()


class _Placer:
    def __init__(self, linear: Linear, keys: Keys) -> None:
        self._linear, self._keys = linear, keys
        self._outer = set(linear.outer)
        self._kind: dict[Var, int] = {var: _PARAM for var in linear.pieces} | {var: _BATCH for var in linear.outer}
        self._kind.update((var, 0) for var in linear.consts)
        self._closures: dict[Var, _Closure] = {}  # of helpers' results
        self._shapes: dict[Var, int] = {}
        self._early: set[Var] = set()  # made up front, from outer inputs alone
        self._uses: dict[Var, int] = {}
        for eqn in linear.eqns:
            for var in variables(eqn.invars):
                self._uses[var] = self._uses.get(var, 0) + 1

    def run(self) -> list[Step]:
        first: list[int] = []
        main: list[int] = []
        floating: list[int] = []
        for index, eqn in enumerate(self._linear.eqns):
            kind, closure = self._look(eqn)
            self._kind.update((var, kind) for var in eqn.outvars)
            if self._repeats(eqn, kind, closure):
                self._make_helper(index, eqn, closure)
            elif kind == _BATCH and self._is_early(eqn, closure):
                self._early.update(eqn.outvars)
                first.append(index)
            elif kind == _PARAM and not eqn.effects:
                floating.append(index)
            else:
                main.append(index)
        main += self._copy_results()
        order = _float([*first, *main], floating, {i: self._step(i) for i in (*first, *main, *floating)})
        return order

    def _copy_results(self) -> list[int]:
        """A result that is made by helpers gets a step that copies it."""
        linear, copies = self._linear, []
        results = list(linear.results)
        for position, var in enumerate(results):
            if var in self._closures:
                copies.append(len(linear.eqns))
                results[position] = _jaxpr.append(linear.eqns, jnp.copy, [var])
                self._kind[results[position]] = self._kind[var]
                assert len(linear.eqns) == copies[-1] + 1
        linear.results = tuple(results)
        return copies

    def _look(self, eqn: Eqn) -> tuple[int, _Closure]:
        kind = 0
        helpers: set[int] = set()
        pieces: set[Var] = set()
        values: set[Var] = set()
        cost = _COSTLY.get(eqn.primitive.name, 1) * max(
            (math.prod(a.aval.shape) for a in (*eqn.invars, *eqn.outvars)), default=1
        )
        for var in dict.fromkeys(variables(eqn.invars)):
            kind |= self._kind[var]
            if var in self._linear.pieces:
                pieces.add(var)
            elif (closure := self._closures.get(var)) is not None:
                helpers |= closure.helpers
                pieces |= closure.pieces
                values |= closure.values
                cost += closure.cost
            elif var not in self._linear.consts:
                values.add(var)
        return kind, _Closure(frozenset(helpers), frozenset(pieces), frozenset(values), cost)

    def _repeats(self, eqn: Eqn, kind: int, closure: _Closure) -> bool:
        if eqn.effects or kind == _PARAM | _BATCH:
            return False
        name, count = eqn.primitive.name, len(closure.helpers) + 1
        made = sum(_jaxpr.bytes_of(var) for var in eqn.outvars)
        if kind == _PARAM:
            read = sum(_jaxpr.bytes_of(var) for var in (*closure.pieces, *closure.values))
            shared = name in _HEAVY and sum(self._uses.get(var, 0) for var in eqn.outvars) > 4
            return 4 * made >= read and not shared
        if name in _HEAVY or any(var not in self._outer and var not in self._early for var in closure.values):
            return False
        elements = sum(math.prod(var.aval.shape) for var in eqn.outvars)
        if kind == 0:
            return count <= 32 and closure.cost <= 64 * max(elements, 4096)
        if made <= _TINY_BYTES and name in _POSITIONAL:
            return False
        return count <= 64 and closure.cost <= 64 * max(elements, 256)

    def _is_early(self, eqn: Eqn, closure: _Closure) -> bool:
        made = sum(_jaxpr.bytes_of(var) for var in eqn.outvars)
        available = all(var in self._outer or var in self._early for var in closure.values)
        return made <= _TINY_BYTES and available and not eqn.effects

    def _make_helper(self, index: int, eqn: Eqn, closure: _Closure) -> None:
        full = dataclasses.replace(closure, helpers=closure.helpers | {index})
        shape = self._shape(eqn)
        for position, var in enumerate(eqn.outvars):
            self._closures[var] = full
            self._shapes[var] = self._keys.intern(("helper", shape, position))

    def _shape(self, eqn: Eqn) -> int:
        """A key of what an equation computes down to pieces and values of certain types."""
        reads = []
        for atom in eqn.invars:
            if _jaxpr.is_literal(atom):
                reads.append(("literal", 0))
            elif atom in self._shapes:
                reads.append(("helper", self._shapes[atom]))
            elif atom in self._linear.pieces:
                reads.append(("piece", 0))
            else:
                reads.append(("const" if atom in self._linear.consts else "value", 0))
        return self._keys.intern(("shape", self._keys.equation(eqn), tuple(reads)))

    def _step(self, index: int) -> Step:
        eqn = self._linear.eqns[index]
        _, closure = self._look(eqn)
        helpers = tuple(self._linear.eqns[i] for i in sorted(closure.helpers))
        reads = list(dict.fromkeys(v for e in (*helpers, eqn) for v in variables(e.invars)))
        return Step(
            eqn,
            helpers,
            tuple(var for var in reads if var in closure.pieces),
            tuple(var for var in reads if var in closure.values),
            self._shape(eqn),
            early=any(var in self._early for var in eqn.outvars),
        )


def _float(fixed: list[int], floating: list[int], steps: dict[int, Step]) -> list[Step]:
    """Puts the floating steps among the fixed ones: by a step that reads the same piece, or before the first use."""
    position = {index: place for place, index in enumerate(fixed)}
    first_use: dict[Var, int] = {}
    first_read: dict[Var, int] = {}
    for place, index in enumerate(fixed):
        for var in steps[index].values:
            first_use.setdefault(var, place)
        for var in steps[index].pieces:
            first_read.setdefault(var, place)
    inserted: dict[int, list[int]] = {}
    for index in sorted(floating, reverse=True):
        step = steps[index]
        place = min((first_use.get(var, len(fixed)) for var in step.eqn.outvars), default=len(fixed))
        anchors = [first_read[var] for var in step.pieces if first_read.get(var, place) < place]
        place = max(anchors, default=place)
        inserted.setdefault(place, []).append(index)
        for var in step.values:
            first_use[var] = min(place, first_use.get(var, place))
    ordered: list[Step] = []
    for place in range(len(fixed) + 1):
        ordered += [steps[index] for index in reversed(inserted.get(place, []))]
        if place < len(fixed):
            ordered.append(steps[fixed[place]])
    assert len(position) + len(floating) == len(ordered)
    return ordered


def live_bytes(steps: list[Step], results: Iterable[Any]) -> list[int]:
    """Bytes made by steps before each place and still needed at or after it; one entry more than steps."""
    made: dict[Var, int] = {}
    last: dict[Var, int] = {}
    for place, step in enumerate(steps):
        for var in step.values:
            last[var] = place
        if not step.early:
            made.update((var, place) for var in step.eqn.outvars)
    change = [0] * (len(steps) + 2)
    for var, place in made.items():
        if last.get(var, -1) > place:
            change[place + 1] += _jaxpr.bytes_of(var)
            change[last[var] + 1] -= _jaxpr.bytes_of(var)
    live, total = [], 0
    for place in range(len(steps) + 1):
        total += change[place]
        live.append(total)
    return live
