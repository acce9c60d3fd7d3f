"""Inlines calls, and unrolls scans over stacked parameters, on a `Tape`.

A scan that takes slices of parameters runs its body once per slice, so that each slice is a piece. A scan that does
not (over time, with the weights as constants) stays one equation.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from zinf_jax.errors import CutError
from zinf_jax.graph import _jaxpr
from zinf_jax.graph._jaxpr import Atom, Block, Eqn, Scan, Var
from zinf_jax.graph._slices import PARAM, Tape
from zinf_jax.units import format_bytes

# A longer scan is unrolled only where each of its slices is worth a unit. Constants, so that how a leaf is paged
# depends on the function alone.
_MAX_LENGTH = 512
_MIN_SLICE_BYTES = 1 << 16

_FOLDED: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "max": np.maximum, "min": np.minimum, "neg": np.negative,
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
    "and": np.bitwise_and, "or": np.bitwise_or, "not": np.bitwise_not,
    "select_n": lambda which, *cases: cases[int(which)],
    "convert_element_type": lambda value: value,
}  # fmt: skip


class Expander:
    """Writes a block onto a tape.

    Args:
      keep_custom: Leave custom_jvp/custom_vjp equations whole (their rules matter).
    """

    def __init__(self, tape: Tape, *, keep_custom: bool) -> None:
        self._tape = tape
        self._keep_custom = keep_custom
        self.warnings: list[str] = []

    def run(self, block: Block, args: Sequence[Atom]) -> list[Atom]:
        """Appends the block's equations, applied to `args`; returns its results."""
        env: dict[Var, Atom] = dict(zip(block.invars, args, strict=True))
        env.update((var, self._tape.const(value, var.aval)) for var, value in block.consts)
        for eqn in block.eqns:
            outs = self._equation(eqn, [self._read(env, atom) for atom in eqn.invars])
            env.update(zip(eqn.outvars, outs, strict=True))
        return [self._read(env, atom) for atom in block.outvars]

    def _read(self, env: dict[Var, Atom], atom: Atom) -> Atom:
        if _jaxpr.is_literal(atom):
            return self._tape.const(atom.val, atom.aval) if atom.aval.shape else atom
        return env[atom]

    def _equation(self, eqn: Eqn, reads: Sequence[Atom]) -> Sequence[Atom]:
        custom = not self._keep_custom or not any(_jaxpr.is_floating(atom) for atom in reads)
        if (body := _jaxpr.inlined_body(eqn, custom=custom)) is not None:
            return self.run(body, reads)
        if (scan := _jaxpr.scan_of(eqn)) is not None and self._is_stack(scan, reads):
            return self._unroll(scan, reads)
        if (folded := _fold(eqn, reads)) is not None:
            return [folded]
        if (indexed := self._indexed(eqn, reads)) is not None:
            return [indexed]
        _check_effects(eqn)
        outs = [_jaxpr.fresh_like(var) for var in eqn.outvars]
        self._tape.add(_jaxpr.with_atoms(eqn, reads, outs))
        return outs

    def _indexed(self, eqn: Eqn, reads: Sequence[Atom]) -> Atom | None:
        """One slice of a stacked parameter at a place that is known by now: a loop's counter."""
        if not _is_row(eqn) or self._tape.kind(reads[0]) != PARAM or not all(map(_jaxpr.is_literal, reads[1:])):
            return None
        place = min(max(int(reads[1].val), 0), reads[0].aval.shape[0] - 1)  # as a dynamic slice does
        element = self._tape.element(reads[0], place)
        return None if element is None else self._tape.stack([element])

    def _counted_bytes(self, scan: Scan, reads: Sequence[Atom]) -> int:
        """Bytes per turn of constants of the loop that it indexes, if it counts: `fori_loop` over layers."""
        xs = reads[scan.num_consts :]
        makers = [self._tape.maker(x) for x in xs]
        counts = any(_jaxpr.is_literal(x) and not x.aval.shape and np.issubdtype(x.aval.dtype, np.integer) for x in xs)
        if not counts and not any(maker is not None and maker.primitive.name == "iota" for maker in makers):
            return 0
        rows = _indexed_arguments(scan.body)
        num_bytes = 0
        for const, var in zip(reads[: scan.num_consts], scan.body.invars, strict=False):
            if var in rows and self._tape.kind(const) == PARAM and (e := self._tape.element(const, 0)) is not None:
                num_bytes += _jaxpr.bytes_of(e)
        return num_bytes

    def _is_stack(self, scan: Scan, reads: Sequence[Atom]) -> bool:
        """Does the scan take slices of parameters that can be pieces?"""
        if scan.length == 0:
            return False
        tape, num_bytes = self._tape, self._counted_bytes(scan, reads)
        for x in reads[scan.num_consts + scan.num_carry :]:
            if tape.kind(x) != PARAM:
                continue
            element = tape.element(x, 0)
            if element is not None and tape.sources(element) != tape.sources(x):
                num_bytes += _jaxpr.bytes_of(element)
            elif _jaxpr.bytes_of(x) >= _MIN_SLICE_BYTES:
                maker = tape.maker(x)
                what = f"made by {maker.primitive.name}" if maker is not None else "whole"
                self.warnings.append(
                    f"a scan takes slices of a parameter value of {format_bytes(_jaxpr.bytes_of(x))} ({what}) that "
                    f"cannot be sliced: each of its units reads all of it; stack layers along the leading dim"
                )
        return num_bytes > 0 and (scan.length <= _MAX_LENGTH or num_bytes >= _MIN_SLICE_BYTES)

    def _unroll(self, scan: Scan, reads: Sequence[Atom]) -> list[Atom]:
        first = scan.num_consts
        consts, carry, xs = reads[:first], list(reads[first : first + scan.num_carry]), reads[first + scan.num_carry :]
        # All slices of values that flow from the batch are taken before the first turn: each crosses cuts by itself.
        columns = [self._slices(x, scan.length) for x in xs]
        turns = range(scan.length - 1, -1, -1) if scan.reverse else range(scan.length)
        made: list[list[Atom]] = [[] for _ in scan.body.outvars[scan.num_carry :]]
        for i in turns:
            outs = self.run(scan.body, [*consts, *carry, *(column[i] for column in columns)])
            carry = outs[: scan.num_carry]
            for column, value in zip(made, outs[scan.num_carry :], strict=True):
                column.append(value)
        return [*carry, *(self._tape.stack(column[::-1] if scan.reverse else column) for column in made)]

    def _slices(self, x: Atom, length: int) -> list[Atom]:
        tape = self._tape
        if tape.kind(x) == PARAM or tape.kind(x) == 0 or tape.is_stacked(x):
            elements = [tape.element(x, i) for i in range(length)]
            return [tape.index(x, i) if element is None else element for i, element in enumerate(elements)]
        if tape.kind(x) & PARAM:
            return [tape.take(x, i) for i in range(length)]
        return [tape.index(x, i) for i in range(length)]


def _is_row(eqn: Eqn) -> bool:
    """Does it take one slice along the leading dim, whole otherwise?"""
    if eqn.primitive.name != "dynamic_slice" or not eqn.invars[0].aval.shape:
        return False
    return tuple(eqn.params["slice_sizes"]) == (1, *eqn.invars[0].aval.shape[1:])


def _indexed_arguments(block: Block) -> set[Var]:
    """The arguments of a block of which it takes such slices, itself or in what it calls."""
    found: set[Var] = set()
    for eqn in block.eqns:
        if _is_row(eqn):
            found.add(eqn.invars[0])
        elif (body := _jaxpr.inlined_body(eqn)) is not None:
            inner = _indexed_arguments(body)
            pairs = zip(eqn.invars, body.invars, strict=True)
            found.update(atom for atom, var in pairs if var in inner and not _jaxpr.is_literal(atom))
    return found & set(block.invars)


def _fold(eqn: Eqn, reads: Sequence[Atom]) -> Atom | None:
    """A loop counter and what is decided by it: integer scalars of literals alone."""
    if eqn.primitive.name not in _FOLDED or not all(_jaxpr.is_literal(atom) for atom in reads):
        return None
    aval = eqn.outvars[0].aval
    exact = all(np.issubdtype(a.aval.dtype, np.integer) or a.aval.dtype == np.bool_ for a in (*reads, *eqn.outvars))
    if not exact or aval.shape:
        return None
    with np.errstate(over="ignore"):  # machine integers wrap around in JAX as well
        value = _FOLDED[eqn.primitive.name](*(np.asarray(atom.val, atom.aval.dtype)[()] for atom in reads))
    return _jaxpr.literal(np.asarray(value).astype(aval.dtype)[()], aval)


def _check_effects(eqn: Eqn) -> None:
    for effect in eqn.effects:
        if type(effect).__name__ != "DebugEffect":
            raise CutError(
                f"equation {_jaxpr.name_of(eqn)} has the side effect {effect}: units run more than once (backward "
                f"recomputes them), so it would happen twice; use unordered jax.debug.print or jax.debug.callback, or "
                f"return the value"
            )
