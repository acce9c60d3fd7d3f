"""Elements of stacked values: pushes "element i of the leading dim" through equations down to pieces of leaves.

A cast, a transpose or a normalisation of a stacked leaf, indexed by a layer, becomes the same of one slice; nothing
reads the whole leaf then. What has no rule here gives None: the caller must take the whole value.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from zinf_jax.graph import _jaxpr
from zinf_jax.graph._jaxpr import Atom, Block, Eqn, Var

Slot = tuple[int, tuple[int, ...]]
PARAM, BATCH = 1, 2

_ELEMENTWISE = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp convert_element_type copy copy_p cos
    cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite le lgamma log log1p
    logistic lt max min mul ne neg nextafter not or pow real reduce_precision rem round rsqrt select_n sign sin sinh
    sqrt square stop_gradient sub tan tanh xor
    """.split()  # noqa: SIM905
)
REDUCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "reduce_sum": lax.add,
    "reduce_max": lax.max,
    "reduce_min": lax.min,
    "reduce_prod": lax.mul,
    "reduce_and": lax.bitwise_and,
    "reduce_or": lax.bitwise_or,
}


class Tape:
    """Equations being written, with what is known of each variable.

    Attributes:
      eqns: In order.
      pieces, slots: Which slot of which leaf a variable is, and back.
      consts: Concrete arrays.
    """

    def __init__(self) -> None:
        self.eqns: list[Eqn] = []
        self.pieces: dict[Var, Slot] = {}
        self.slots: dict[Slot, Var] = {}
        self.consts: dict[Var, Any] = {}
        self._const_vars: dict[int, Var] = {}
        self._made: dict[Var, tuple[Eqn, int]] = {}
        self._kinds: dict[Var, int] = {}
        self._stacked: dict[Var, list[Atom]] = {}
        self._elements: dict[tuple[Var, int], Atom | None] = {}
        self._templates: dict[Any, tuple[Any, Block]] = {}

    def add_piece(self, slot: Slot, aval: Any) -> Var:
        """The variable of a slot, made at first use."""
        if slot not in self.slots:
            var = self.slots[slot] = _jaxpr.new_var(aval)
            self.pieces[var] = slot
            self._kinds[var] = PARAM
        return self.slots[slot]

    def add_outer(self, var: Var) -> None:
        self._kinds[var] = BATCH

    def const(self, value: Any, aval: Any) -> Atom:
        """A concrete array: one variable for one object. A scalar is a literal."""
        if not aval.shape and not jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended):
            return _jaxpr.literal(np.asarray(value, aval.dtype)[()], aval)
        if id(value) not in self._const_vars:
            var = self._const_vars[id(value)] = _jaxpr.new_var(aval)
            self.consts[var] = value  # also keeps the object, whose id is the key
        return self._const_vars[id(value)]

    def add(self, eqn: Eqn) -> None:
        self.eqns.append(eqn)
        kind = 0
        for atom in eqn.invars:
            kind |= self.kind(atom)
        for position, var in enumerate(eqn.outvars):
            self._kinds[var] = kind
            self._made[var] = (eqn, position)

    def kind(self, atom: Atom) -> int:
        """Bits: depends on parameters, on other arguments. 0 for what is constant."""
        return 0 if _jaxpr.is_literal(atom) else self._kinds.get(atom, 0)

    def apply(self, key: Any, fn: Callable[..., Any], atoms: Sequence[Atom]) -> Atom:
        """Appends the equations of a function of `jax.lax` with one result; `key` says which function it is."""
        types = tuple((a.aval.shape, a.aval.dtype, bool(getattr(a.aval, "weak_type", False))) for a in atoms)
        if (key, types) not in self._templates:
            block = _jaxpr.trace(fn, *(_jaxpr.struct_of(atom) for atom in atoms)).block
            self._templates[key, types] = (fn, block)  # the function keeps alive what an id in the key names
        return _jaxpr.instantiate(self._templates[key, types][1], atoms, self.add)[0]

    def sources(self, atom: Atom) -> set[Slot]:
        """The slots that a value is made of."""
        found: set[Slot] = set()
        seen: set[Var] = set()
        stack = [] if _jaxpr.is_literal(atom) else [atom]
        while stack:
            var = stack.pop()
            if var in seen:
                continue
            seen.add(var)
            if var in self.pieces:
                found.add(self.pieces[var])
            elif var in self._made:
                stack += [a for a in self._made[var][0].invars if not _jaxpr.is_literal(a)]
        return found

    def maker(self, atom: Atom) -> Eqn | None:
        return None if _jaxpr.is_literal(atom) or atom not in self._made else self._made[atom][0]

    def is_elementwise(self, eqn: Eqn) -> bool:
        return eqn.primitive.name in _ELEMENTWISE and len(eqn.outvars) == 1

    def stack(self, elements: Sequence[Atom]) -> Atom:
        """The elements as one value; whoever takes element i of it gets it back."""
        rows = [
            self.apply("row", lambda x: lax.broadcast_in_dim(x, (1, *x.shape), tuple(range(1, x.ndim + 1))), [atom])
            for atom in elements
        ]
        result = rows[0] if len(rows) == 1 else self.apply("stack", lambda *xs: lax.concatenate(xs, 0), rows)
        self._stacked[result] = list(elements)
        return result

    def index(self, atom: Atom, i: int) -> Atom:
        """Element i by a dynamic slice: the index is a literal argument, so that equal layers stay equal."""
        shape = atom.aval.shape
        start = _jaxpr.literal(np.int32(i), _jaxpr.aval_of(np.int32(0)))

        def take(x: Any, at: Any) -> Any:
            zeros = [np.int32(0)] * (len(shape) - 1)
            return lax.squeeze(lax.dynamic_slice_p.bind(x, at, *zeros, slice_sizes=(1, *shape[1:])), (0,))

        return self.apply("index", take, [atom, start])

    def is_stacked(self, atom: Atom) -> bool:
        """Was it made by `stack`?"""
        return atom in self._stacked

    def take(self, atom: Atom, i: int) -> Atom:
        """Element i by a static slice."""
        shape = atom.aval.shape
        start, stop = (i,) + (0,) * (len(shape) - 1), (i + 1, *shape[1:])
        return self.apply(("take", start, stop), lambda x: lax.squeeze(lax.slice(x, start, stop), (0,)), [atom])

    def element(self, atom: Atom, i: int) -> Atom | None:
        """Element i of the leading dim of a value of parameters or constants alone, or None."""
        if _jaxpr.is_literal(atom) or not atom.aval.shape:
            return None
        if (atom, i) not in self._elements:
            self._elements[atom, i] = self._find_element(atom, i)
        return self._elements[atom, i]

    def _find_element(self, var: Var, i: int) -> Atom | None:
        if var in self._stacked:
            return self._stacked[var][i]
        if var in self.pieces:
            leaf, prefix = self.pieces[var]
            aval = self._sliced_aval(var)
            return self.add_piece((leaf, (*prefix, i)), aval)
        if var in self.consts:
            value = self.consts[var]
            if jax.dtypes.issubdtype(var.aval.dtype, jax.dtypes.extended):
                return None
            return self.const(np.asarray(value)[i], self._sliced_aval(var))
        eqn = self._made[var][0] if var in self._made else None
        if eqn is None or len(eqn.outvars) != 1 or self._kinds[var] & BATCH or eqn.effects:
            return None
        if eqn.primitive.name in _ELEMENTWISE:
            return self._elementwise(eqn, i)
        rule = _RULES.get(eqn.primitive.name)
        return None if rule is None else rule(self, eqn, i)

    def _sliced_aval(self, var: Var) -> Any:
        return _jaxpr.shaped(var.aval.shape[1:], var.aval.dtype, bool(getattr(var.aval, "weak_type", False)))

    def _elementwise(self, eqn: Eqn, i: int) -> Atom | None:
        """Operands have the result's rank (a dim of 1 is repeated), or none."""
        shape = eqn.outvars[0].aval.shape
        atoms = []
        for atom in eqn.invars:
            if not atom.aval.shape:
                atoms.append(atom)
                continue
            if len(atom.aval.shape) != len(shape):
                return None
            element = self.element(atom, i) if atom.aval.shape[0] == shape[0] else self.unwrap(atom)
            if element is None:
                return None
            atoms.append(element)
        return self.bind(eqn, atoms)

    def unwrap(self, atom: Atom) -> Atom:
        """The only element of a leading dim of 1, which is no stack."""
        return self.apply("unwrap", lambda x: lax.squeeze(x, (0,)), [atom])

    def bind(self, eqn: Eqn, atoms: Sequence[Atom], **changes: Any) -> Atom:
        """The equation again, on other atoms and with some parameters changed."""
        key = ("bind", eqn.primitive, id(eqn.params), tuple(sorted(changes.items())))
        return self.apply(key, lambda *xs: _jaxpr.bind(eqn, xs, **changes)[0], atoms)


Rule = Callable[[Tape, Eqn, int], Atom | None]


def _transpose(tape: Tape, eqn: Eqn, i: int) -> Atom | None:
    source, order = eqn.invars[0], tuple(eqn.params["permutation"])
    while (maker := tape.maker(source)) is not None and maker.primitive.name == "transpose":
        source, order = maker.invars[0], tuple(maker.params["permutation"][dim] for dim in order)
    if order[0] != 0 or (element := tape.element(source, i)) is None:
        return None
    rest = tuple(dim - 1 for dim in order[1:])
    return tape.apply(("transpose", rest), lambda x: lax.transpose(x, rest), [element])


def _reshape(tape: Tape, eqn: Eqn, i: int) -> Atom | None:
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if len(eqn.invars) != 1 or not before or 0 in before:
        return None
    rest = after[1:]

    def shaped(atom: Atom | None) -> Atom | None:
        if atom is None or atom.aval.shape == rest:
            return atom
        return tape.apply(("reshape", rest), lambda x: lax.reshape(x, rest), [atom])

    if before[0] == after[0]:
        return shaped(tape.element(eqn.invars[0], i))
    if len(before) > 1 and before[0] * before[1] == after[0]:  # (a, b, ...) -> (a*b, ...)
        outer = tape.element(eqn.invars[0], i // before[1])
        return None if outer is None else shaped(tape.element(outer, i % before[1]))
    if len(after) > 1 and after[0] * after[1] == before[0]:  # (a*b, ...) -> (a, b, ...)
        parts = [tape.element(eqn.invars[0], i * after[1] + j) for j in range(after[1])]
        return None if None in parts else shaped(tape.stack(parts))
    if before[0] == 1:
        inner = tape.element(eqn.invars[0], 0)
        if inner is None or not inner.aval.shape:
            return None
        return tape.element(tape.apply(("reshape", after), lambda x: lax.reshape(x, after), [inner]), i)
    return None


def _broadcast(tape: Tape, eqn: Eqn, i: int) -> Atom | None:
    if len(eqn.invars) != 1:
        return None
    source, dims, shape = eqn.invars[0], eqn.params["broadcast_dimensions"], eqn.params["shape"]
    if 0 in dims and source.aval.shape[0] == shape[0]:
        element, kept = tape.element(source, i), tuple(dim - 1 for dim in dims[1:])
        if dims[0] != 0 or element is None:
            return None
    elif 0 in dims:  # a leading dim of 1 that is repeated
        element, kept = tape.unwrap(source), tuple(dim - 1 for dim in dims[1:])
        if dims[0] != 0:
            return None
    else:
        element, kept = source, tuple(dim - 1 for dim in dims)
    rest = tuple(shape[1:])
    return tape.apply(("broadcast", rest, kept), lambda x: lax.broadcast_in_dim(x, rest, kept), [element])


def _squeeze(tape: Tape, eqn: Eqn, i: int) -> Atom | None:
    dims = eqn.params["dimensions"]
    if 0 in dims:
        inner = tape.element(eqn.invars[0], 0)
        rest = tuple(dim - 1 for dim in dims if dim)
        if inner is None:
            return None
        if rest:
            inner = tape.apply(("squeeze", rest), lambda x: lax.squeeze(x, rest), [inner])
        return tape.element(inner, i)
    if (element := tape.element(eqn.invars[0], i)) is None:
        return None
    rest = tuple(dim - 1 for dim in dims)
    return tape.apply(("squeeze", rest), lambda x: lax.squeeze(x, rest), [element])


def _reduce(tape: Tape, eqn: Eqn, i: int) -> Atom | None:
    axes = eqn.params["axes"]
    if 0 in axes or (element := tape.element(eqn.invars[0], i)) is None:
        return None
    return tape.bind(eqn, [element], axes=tuple(axis - 1 for axis in axes))


def _concatenate(tape: Tape, eqn: Eqn, i: int) -> Atom | None:
    dim = eqn.params["dimension"]
    if dim:
        parts = [tape.element(atom, i) for atom in eqn.invars]
        if None in parts:
            return None
        return tape.apply(("concatenate", dim - 1), lambda *xs: lax.concatenate(xs, dim - 1), parts)
    for atom in eqn.invars:
        if i < atom.aval.shape[0]:
            return tape.element(atom, i)
        i -= atom.aval.shape[0]
    return None


def _slice(tape: Tape, eqn: Eqn, i: int) -> Atom | None:
    starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
    strides = eqn.params["strides"] or (1,) * len(starts)
    element = tape.element(eqn.invars[0], starts[0] + i * strides[0])
    if element is None:
        return None
    rest = (tuple(starts[1:]), tuple(limits[1:]), tuple(strides[1:]))
    if rest == ((0,) * len(rest[0]), element.aval.shape, (1,) * len(rest[0])):
        return element
    return tape.apply(("slice", rest), lambda x: lax.slice(x, *rest), [element])


def _rev(tape: Tape, eqn: Eqn, i: int) -> Atom | None:
    dims = eqn.params["dimensions"]
    length = eqn.invars[0].aval.shape[0]
    element = tape.element(eqn.invars[0], length - 1 - i if 0 in dims else i)
    rest = tuple(dim - 1 for dim in dims if dim)
    if element is None or not rest:
        return element
    return tape.apply(("rev", rest), lambda x: lax.rev(x, rest), [element])


def _dot_general(tape: Tape, eqn: Eqn, i: int) -> Atom | None:
    contract, (left_batch, right_batch) = eqn.params["dimension_numbers"]
    if tuple(left_batch[:1]) != (0,) or tuple(right_batch[:1]) != (0,):
        return None
    elements = [tape.element(atom, i) for atom in eqn.invars]
    if None in elements:
        return None

    def less(dims: Sequence[int]) -> tuple[int, ...]:
        return tuple(dim - 1 for dim in dims)

    numbers = ((less(contract[0]), less(contract[1])), (less(left_batch[1:]), less(right_batch[1:])))
    return tape.bind(eqn, elements, dimension_numbers=numbers)


def _iota(tape: Tape, eqn: Eqn, i: int) -> Atom | None:
    aval = eqn.outvars[0].aval
    if len(aval.shape) != 1 or not np.issubdtype(aval.dtype, np.number):
        return None
    return tape.const(np.asarray(i, aval.dtype), _jaxpr.shaped((), aval.dtype))


_RULES: dict[str, Rule] = {
    "transpose": _transpose,
    "reshape": _reshape,
    "broadcast_in_dim": _broadcast,
    "squeeze": _squeeze,
    "concatenate": _concatenate,
    "slice": _slice,
    "rev": _rev,
    "dot_general": _dot_general,
    "iota": _iota,
    **dict.fromkeys(REDUCTIONS, _reduce),
}
