"""When two equations compute the same thing: keys that are equal for structurally equal equations.

Never by printed text (closed-over constants and custom rules print alike) and never by object identity where there is
structure (every layer has its own thunks). A key covers primitive, parameters compared deeply (jaxprs with variables
renumbered, arrays by content, functions by code and closure) and types. A custom rule counts as what it computes: the
jaxpr of its vjp, traced. What has no structure, such as an unknown object, is compared by identity: never wrong, at
worst a program too many.

One `Keys` serves one cut: keys are small integers that mean nothing outside it.
"""

import dataclasses
import enum
import functools
import hashlib
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from zinf_jax.graph import _jaxpr
from zinf_jax.graph._jaxpr import Atom, Block, Eqn


class Keys:
    """Interns structural keys.

    Args:
      differentiate: Custom rules are part of what an equation computes.
    """

    def __init__(self, *, differentiate: bool) -> None:
        self._differentiate = differentiate
        self._interned: dict[Any, int] = {}
        self._params: dict[Any, tuple[Any, int]] = {}  # by id; the object is kept alive
        self._arrays: dict[int, tuple[Any, Any]] = {}
        self._rules: dict[int, tuple[Any, Block | None]] = {}

    def intern(self, key: Any) -> int:
        return self._interned.setdefault(key, len(self._interned))

    def equation(self, eqn: Eqn) -> int:
        """Primitive, parameters and types of an equation; not which values it reads, nor the values of literals."""
        types_in = tuple(self.type(atom) for atom in eqn.invars)
        types_out = tuple(self.type(var) for var in eqn.outvars)
        return self.intern(("eqn", self._computation(eqn), types_in, types_out))

    def type(self, atom: Atom) -> int:
        aval = atom.aval
        return self.intern(("aval", aval.shape, aval.dtype, bool(getattr(aval, "weak_type", False))))

    def array(self, value: Any) -> Any:
        """Content, dtype and shape of an array or scalar."""
        known = self._arrays.get(id(value))
        if known is None:
            known = self._arrays[id(value)] = (value, array_key(value))
        return known[1]

    def rule(self, eqn: Eqn) -> Block | None:
        """What a custom_jvp/vjp equation computes with its derivative: (args, cotangents) -> (results, gradients).

        Cotangents and gradients are those of its floating results and arguments. None where it cannot be traced.
        """
        known = self._rules.get(id(eqn.params))
        if known is None:
            known = self._rules[id(eqn.params)] = (eqn.params, _trace_rule(eqn))
        return known[1]

    def _computation(self, eqn: Eqn) -> int:
        place = (id(eqn.params), eqn.primitive)
        known = self._params.get(place)
        if known is None:
            known = self._params[place] = (eqn.params, self._new_computation(eqn))
        return known[1]

    def _new_computation(self, eqn: Eqn) -> int:
        name = eqn.primitive.name
        if _jaxpr.is_custom(eqn):
            body = _jaxpr.inlined_body(eqn, custom=True)
            assert body is not None
            if not self._differentiate:
                return self.intern((name, self._block(body)))
            rule = self.rule(eqn)
            if rule is None:
                return self.intern((name, _Identity(eqn.params)))
            return self.intern((name, self._block(body), Keys._block(self._forward_only, rule)))
        # A context says things such as where to compute; contexts are interned by JAX.
        context = _Identity(getattr(eqn, "ctx", None))
        return self.intern((eqn.primitive, name, self._freeze(dict(eqn.params)), context))

    @functools.cached_property
    def _forward_only(self) -> "Keys":
        """For traced rules: a custom rule that is still in there is called, not differentiated again."""
        keys = Keys(differentiate=False)
        keys._interned, keys._arrays = self._interned, self._arrays
        return keys

    def _block(self, block: Block) -> int:
        numbers: dict[Any, int] = {}
        for var in (*block.invars, *(var for var, _ in block.consts)):
            numbers[var] = len(numbers)
        head = tuple(self.type(var) for var in block.invars)
        consts = tuple(self.array(value) for _, value in block.consts)

        def reference(atom: Atom) -> Any:
            return ("literal", self.array(atom.val), self.type(atom)) if _jaxpr.is_literal(atom) else numbers[atom]

        rows = []
        for eqn in block.eqns:
            row = (self.equation(eqn), tuple(reference(atom) for atom in eqn.invars))
            for var in eqn.outvars:
                numbers[var] = len(numbers)
            rows.append(self.intern(row))
        return self.intern(("block", head, consts, tuple(rows), tuple(reference(atom) for atom in block.outvars)))

    def _freeze(self, value: Any) -> Any:
        """A hashable key of a parameter's value."""
        if hasattr(value, "eqns"):
            return ("jaxpr", self._block(_jaxpr.open_block(value)))
        if value is None or isinstance(value, bool | int | str | bytes | enum.Enum | type | np.dtype):
            return (type(value).__name__, value)
        if isinstance(value, float | complex):
            return (type(value).__name__, repr(value))
        if isinstance(value, jax.Array | np.ndarray | np.generic):
            return ("array", self.array(value))
        if isinstance(value, tuple | list):
            return (type(value), tuple(self._freeze(entry) for entry in value))
        if isinstance(value, Mapping):
            return ("map", tuple((str(key), self._freeze(value[key])) for key in sorted(value, key=str)))
        if isinstance(value, set | frozenset):
            return ("set", frozenset(self._freeze(entry) for entry in value))
        if isinstance(value, functools.partial):
            return ("partial", *(self._freeze(part) for part in (value.func, value.args, value.keywords)))
        if isinstance(value, types.FunctionType):
            return self._function(value)
        return self._object(value)

    def _function(self, fn: Callable[..., Any]) -> Any:
        """Equal code over equal closures, defaults and globals computes the same."""
        cells = []
        for cell in fn.__closure__ or ():
            try:
                cells.append(cell.cell_contents)
            except ValueError:  # not filled yet
                cells.append(None)
        if any(entry is fn for entry in cells):
            return _Identity(fn)
        parts = (tuple(cells), fn.__defaults__, fn.__kwdefaults__)
        try:
            return ("function", fn.__code__, id(fn.__globals__), self._freeze(parts))
        except RecursionError:
            return _Identity(fn)

    def _object(self, value: Any) -> Any:
        if dataclasses.is_dataclass(value):  # its own equality may be that of a function in it
            fields = tuple(getattr(value, field.name) for field in dataclasses.fields(value))
            return (type(value), self._freeze(fields))
        try:
            hash(value)
        except TypeError:
            return _Identity(value)
        return value if type(value).__eq__ is not object.__eq__ else _Identity(value)


class _Identity:
    """Equal to itself only; keeps the object alive so that its id is not used again."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def array_key(value: Any) -> Any:
    """Equal for arrays that are equal bit for bit, in dtype and shape."""
    if hasattr(value, "dtype") and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        return ("key", str(value.dtype), array_key(jax.random.key_data(value)))
    array = np.asarray(value)
    if array.dtype == object:
        return _Identity(value)
    data = array.tobytes()
    return (array.shape, str(array.dtype), data if len(data) <= 64 else hashlib.sha256(data).digest())


def _trace_rule(eqn: Eqn) -> Block | None:
    floating = [index for index, atom in enumerate(eqn.invars) if _jaxpr.is_floating(atom)]
    results = [index for index, var in enumerate(eqn.outvars) if _jaxpr.is_floating(var)]

    def with_gradient(args: list[Any], cotangents: list[Any]) -> Any:
        def run(*chosen: Any) -> tuple[list[Any], list[Any]]:
            full = list(args)
            for index, value in zip(floating, chosen, strict=True):
                full[index] = value
            outs = _jaxpr.bind(eqn, full)
            return [outs[index] for index in results], outs

        _, pull, outs = jax.vjp(run, *(args[index] for index in floating), has_aux=True)
        return outs, pull(cotangents)

    args = [_jaxpr.struct_of(atom) for atom in eqn.invars]
    cotangents = [jax.ShapeDtypeStruct(eqn.outvars[i].aval.shape, eqn.outvars[i].aval.dtype) for i in results]
    try:
        return _jaxpr.trace(with_gradient, args, cotangents).block
    except Exception:  # a user's rule may refuse; then it is compared by identity, and its unit's own trace reports
        return None
