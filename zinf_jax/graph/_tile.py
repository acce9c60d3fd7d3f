"""Stacked leaves outside their scans: tiled by slice where that is possible, assembled where it is not.

An L2 term over a stacked leaf becomes the sum, in order, of one term per slice. Whatever has no such form reads all
slices at once, and a warning names it.
"""

from collections.abc import Sequence
from typing import Any

from jax import lax

from zinf_jax.graph import _jaxpr
from zinf_jax.graph._jaxpr import Atom, Eqn, Var
from zinf_jax.graph._slices import PARAM, REDUCTIONS, Tape

MAX_SLICES = 512
_SPLITTERS = frozenset({"slice", "squeeze", "split"})


class Tiler:
    """Rewrites the equations of a tape. `depths` says over how many leading dims each leaf is stacked."""

    def __init__(self, tape: Tape, depths: dict[int, int]) -> None:
        self._tape, self._depths = tape, depths

    def run(self) -> dict[Var, Atom]:
        """Rewrites in place; returns what stands for the variables that were replaced."""
        tape, env = self._tape, dict[Var, Atom]()
        old, tape.eqns = tape.eqns, []
        for eqn in old:
            reads = [_jaxpr.lookup(env, atom) for atom in eqn.invars]
            if any(read is not atom for read, atom in zip(reads, eqn.invars, strict=True)):
                eqn = _jaxpr.with_atoms(eqn, reads, eqn.outvars)
            outs = self._tiled(eqn)
            if outs is None:
                tape.add(eqn)
            else:
                env.update(zip(eqn.outvars, outs, strict=True))
        return env

    def _tiled(self, eqn: Eqn) -> list[Atom] | None:
        name = eqn.primitive.name
        if name not in REDUCTIONS and name not in _SPLITTERS and name != "dot_general":
            return None
        if any(self._tape.kind(atom) != PARAM for atom in eqn.invars) or not self._has_parts(eqn.invars):
            return None
        if name in REDUCTIONS:
            out = self._reduction(eqn)
        elif name == "dot_general":
            out = self._inner_product(eqn)
        else:
            return self._split(eqn)
        return None if out is None else [out]

    def _has_parts(self, atoms: Sequence[Atom]) -> bool:
        """Are the values made of a stacked leaf as a whole, or of several leaves put together?"""
        for atom in atoms:
            if any(len(prefix) < self._depths.get(leaf, 0) for leaf, prefix in self._tape.sources(atom)):
                return True
        return False

    def _reduction(self, eqn: Eqn) -> Atom | None:
        tape, axes, shape = self._tape, eqn.params["axes"], eqn.invars[0].aval.shape
        if not axes:
            return None
        if len(axes) == len(shape):
            parts = self._parts(eqn.invars[0])
            if parts is None or len(parts) < 2:
                return None
            reduced = [tape.bind(eqn, [part], axes=tuple(range(len(part.aval.shape)))) for part in parts]
            return self._combine(eqn.primitive.name, reduced)
        elements = self._elements(eqn.invars[0])
        if elements is None:
            return None
        rest = tuple(axis - 1 for axis in axes if axis)
        reduced = [tape.bind(eqn, [element], axes=rest) if rest else element for element in elements]
        return self._combine(eqn.primitive.name, reduced) if 0 in axes else tape.stack(reduced)

    def _combine(self, name: str, parts: Sequence[Atom]) -> Atom:
        total = parts[0]
        for part in parts[1:]:
            total = self._tape.apply(("combine", name), REDUCTIONS[name], [total, part])
        return total

    def _elements(self, atom: Atom) -> list[Atom] | None:
        length = atom.aval.shape[0] if atom.aval.shape else 0
        if not 0 < length <= MAX_SLICES:
            return None
        elements = [self._tape.element(atom, i) for i in range(length)]
        return None if None in elements else elements

    def _parts(self, atom: Atom) -> list[Atom] | None:
        """Values that together hold the same numbers as `atom`, in any order: its slices, at whatever depth."""
        if not self._has_parts([atom]):
            return [atom]
        maker = self._tape.maker(atom)
        if maker is not None and maker.primitive.name in ("reshape", "transpose"):
            return self._parts(maker.invars[0])
        if maker is not None and maker.primitive.name == "concatenate":
            return self._all_parts(maker.invars)
        elements = self._elements(atom)
        if elements is not None:
            return self._all_parts(elements)
        if maker is not None and len(set(maker.invars)) == 1 and self._tape.is_elementwise(maker):
            parts = self._parts(maker.invars[0])  # a cast or square of something reshaped
            return None if parts is None else [self._tape.bind(maker, [part] * len(maker.invars)) for part in parts]
        return None

    def _all_parts(self, atoms: Sequence[Atom]) -> list[Atom] | None:
        parts: list[Atom] = []
        for atom in atoms:
            found = self._parts(atom)
            if found is None:
                return None
            parts += found
        return parts

    def _inner_product(self, eqn: Eqn) -> Atom | None:
        """`vdot` of two raveled leaves: the sum of their slices' products."""
        if any(len(atom.aval.shape) != 1 for atom in eqn.invars):
            return None
        columns = [self._ravel_parts(atom) for atom in eqn.invars]
        if any(column is None for column in columns):
            return None
        left, right = columns
        if [part.aval.shape for part in left] != [part.aval.shape for part in right] or len(left) < 2:
            return None
        return self._combine("reduce_sum", [self._tape.bind(eqn, pair) for pair in zip(left, right, strict=True)])

    def _ravel_parts(self, atom: Atom) -> Any:
        maker = self._tape.maker(atom)
        source = maker.invars[0] if maker is not None and maker.primitive.name == "reshape" else atom
        elements = self._elements(source)
        if elements is None:
            return None
        return [self._tape.apply("ravel", lambda x: lax.reshape(x, (x.size,)), [element]) for element in elements]

    def _split(self, eqn: Eqn) -> list[Atom] | None:
        """Static slices of a stack, such as `params[3]` in a Python loop."""
        tape, source = self._tape, eqn.invars[0]
        name, params = eqn.primitive.name, eqn.params
        if name == "squeeze":
            if 0 not in params["dimensions"] or (element := tape.element(source, 0)) is None:
                return None
            rest = tuple(dim - 1 for dim in params["dimensions"] if dim)
            return [tape.apply(("squeeze", rest), lambda x: lax.squeeze(x, rest), [element]) if rest else element]
        ranges = split_ranges(eqn)
        if ranges is None:
            return None
        outs = []
        for start, stop in ranges:
            elements = [tape.element(source, i) for i in range(start, stop)]
            if None in elements or not elements:
                return None
            outs.append(tape.stack(elements))
        return outs


def split_ranges(eqn: Eqn) -> list[tuple[int, int]] | None:
    """The ranges of the leading dim that a slice or split takes, where it takes all of the other dims."""
    shape, params = eqn.invars[0].aval.shape, eqn.params
    if eqn.primitive.name == "split":
        if params["axis"] != 0:
            return None
        starts = [sum(int(size) for size in params["sizes"][:i]) for i in range(len(params["sizes"]))]
        return [(start, start + int(size)) for start, size in zip(starts, params["sizes"], strict=True)]
    if eqn.primitive.name != "slice" or params["strides"] not in (None, (1,) * len(shape)):
        return None
    if tuple(params["start_indices"][1:]) != (0,) * (len(shape) - 1) or params["limit_indices"][1:] != shape[1:]:
        return None
    return [(params["start_indices"][0], params["limit_indices"][0])]
