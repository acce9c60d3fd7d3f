"""Values of an init function before anything is computed: equations with operands, parts of values, structural keys.

One value is one object, compared by identity; equations and constants are compared by structure (`canonical`).
"""

import dataclasses
import math
from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.interpreters.partial_eval import dce_rules

# What of a value is wanted: (dim, start, size) per restricted dim, in order of dim. A size of None is one index, and the
# dim is dropped.
Sel = tuple[tuple[int, int, int | None], ...]

_CALLS = {  # primitive -> parameter that holds what it calls; the parameter's other meanings do not matter to values
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
}


def sel_shape(shape: Sequence[int], sel: Sel) -> tuple[int, ...]:
    """The shape of what a selection leaves of an array."""
    chosen = {dim: size for dim, _, size in sel}
    sizes = [chosen.get(dim, size) for dim, size in enumerate(shape)]
    return tuple(size for size in sizes if size is not None)


def compose(outer: Sel, inner: Sel) -> Sel:
    """The selection that equals `outer`, then `inner` of its result."""
    result = {dim: (start, size) for dim, start, size in outer}
    dropped = {dim for dim, _, size in outer if size is None}
    for dim, start, size in inner:
        kept = -1
        real = -1
        while kept < dim:
            real += 1
            kept += real not in dropped
        before = result.get(real, (0, None))[0]
        result[real] = (before + start, size)
    return tuple((dim, *result[dim]) for dim in sorted(result))


# ---------------------------------------------------------------------------------------------------------------------
# Values before anything is computed.


@dataclasses.dataclass(frozen=True, eq=False)
class Known:
    """A value that exists: an argument, a constant, or what was evaluated from those."""

    value: Any
    literal: bool = False  # stands in the program's text rather than among its operands

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(np.shape(self.value))

    @property
    def dtype(self) -> Any:
        return self.value.dtype if hasattr(self.value, "dtype") else jnp.result_type(self.value)


@dataclasses.dataclass(frozen=True, eq=False)
class Missing:
    """An argument of which only shape and dtype are known."""

    name: str
    shape: tuple[int, ...]
    dtype: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Out:
    """An output of an equation."""

    node: "Node"
    position: int

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.node.eqn.outvars[self.position].aval.shape)

    @property
    def dtype(self) -> Any:
        return self.node.eqn.outvars[self.position].aval.dtype


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """A selection of another value, as a value."""

    ref: "Ref"
    sel: Sel

    @property
    def shape(self) -> tuple[int, ...]:
        return sel_shape(self.ref.shape, self.sel)

    @property
    def dtype(self) -> Any:
        return self.ref.dtype


Ref = Known | Missing | Out | Part


class Node:
    """An equation with its operands. `Known` and all kinds of `Ref` compare by identity: one value, one object."""

    def __init__(self, eqn: JaxprEqn, inputs: Sequence[Ref]):
        self.eqn = eqn
        self.inputs = tuple(inputs)
        self.outs = tuple(Out(self, k) for k in range(len(eqn.outvars)))
        self._single: dict[int, Node] = {}
        self._cache: dict[Hashable, Any] = {}

    @property
    def name(self) -> str:
        return self.eqn.primitive.name

    def single(self, position: int) -> "Node":
        """This node without what only its other outputs need (scan, cond); its output is the last that is not dropped."""
        if position not in self._single:
            used = [k == position for k in range(len(self.outs))]
            used_inputs, eqn = dce_rules[self.eqn.primitive](used, self.eqn)
            assert eqn is not None
            inputs = [ref for ref, keep in zip(self.inputs, used_inputs, strict=True) if keep]
            self._single[position] = Node(eqn, inputs)
        return self._single[position]

    def cached(self, key: Hashable, make: Callable[[], Any]) -> Any:
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    def output_of(self, var: Var) -> int:
        return next(k for k, other in enumerate(self.eqn.outvars) if other is var)


def read_jaxpr(jaxpr: Jaxpr | ClosedJaxpr) -> tuple[Jaxpr, Sequence[Any]]:
    """A jaxpr and its constants, whether it stands in a ClosedJaxpr or carries none."""
    return (jaxpr.jaxpr, jaxpr.consts) if isinstance(jaxpr, ClosedJaxpr) else (jaxpr, ())


def flatten(jaxpr: Jaxpr | ClosedJaxpr, args: Sequence[Ref]) -> list[Ref]:
    """The outputs of a jaxpr, as values made from its arguments; calls are inlined."""
    inner, consts = read_jaxpr(jaxpr)
    env: dict[Var, Ref] = dict(zip(inner.constvars, map(known_constant, consts), strict=True))
    env.update(zip(inner.invars, args, strict=True))

    def read(atom: Any) -> Ref:
        return Known(atom.val, literal=True) if isinstance(atom, Literal) else env[atom]

    for eqn in inner.eqns:
        inputs = [read(atom) for atom in eqn.invars]
        parameter = _CALLS.get(eqn.primitive.name)
        if parameter is None:
            outputs: Sequence[Ref] = Node(eqn, inputs).outs
        else:
            outputs = flatten(eqn.params[parameter], inputs)
        env.update(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in inner.outvars]


def known_constant(value: Any) -> Known:
    """A closed-over constant. A floating scalar stays in the program's text, as it would in the user's own jit."""
    floating = hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.floating)
    return Known(value, literal=floating and np.size(value) == 1)


# ---------------------------------------------------------------------------------------------------------------------
# Structural keys: equal keys, equal programs.


class ById:
    """Something without a useful equality: equal to itself alone. Holds it, so that its id is not used again."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ById) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def canonical(value: Any) -> Hashable:
    """A hashable that is equal for equation parameters that mean the same."""
    if isinstance(value, Jaxpr | ClosedJaxpr):
        return _jaxpr_key(*read_jaxpr(value))
    if isinstance(value, dict):
        return tuple((key, canonical(value[key])) for key in sorted(value))
    if isinstance(value, list) or type(value) is tuple:
        return tuple(canonical(item) for item in value)
    if isinstance(value, np.ndarray | np.generic | jax.Array) or hasattr(value, "__array__"):
        return _array_key(value)
    try:
        hash(value)
    except TypeError:
        return ById(value)
    return (type(value), value)


def _array_key(value: Any) -> Hashable:
    small = not jnp.issubdtype(value.dtype, jax.dtypes.prng_key) and np.size(value) <= 64
    if not small:
        return ById(value)
    array = np.asarray(value)
    return (array.dtype.str, str(array.dtype), array.shape, array.tobytes())


def _jaxpr_key(jaxpr: Jaxpr, consts: Sequence[Any]) -> Hashable:
    numbers: dict[Var, int] = {}

    def define(var: Var) -> Hashable:
        numbers[var] = len(numbers)
        return var.aval

    def use(atom: Any) -> Hashable:
        return (literal_key(atom.val), atom.aval) if isinstance(atom, Literal) else numbers[atom]

    head = (tuple(map(define, jaxpr.constvars)), tuple(map(define, jaxpr.invars)), tuple(map(canonical, consts)))
    body = tuple(
        (eqn_key(eqn), tuple(map(use, eqn.invars)), tuple(define(v) for v in eqn.outvars)) for eqn in jaxpr.eqns
    )
    return (head, body, tuple(map(use, jaxpr.outvars)))


def eqn_key(eqn: JaxprEqn) -> Hashable:
    """What an equation computes, without its operands."""
    params = {name: value for name, value in eqn.params.items() if name not in ("name", "debug_info")}
    return (eqn.primitive.name, canonical(params), eqn.ctx)


def literal_key(value: Any) -> Hashable:
    # The bytes, because 0.0 == -0.0 and 1 == 1.0 == True; the type, because a Python scalar is weakly typed.
    array = np.asarray(value)
    return (type(value), str(array.dtype), array.shape, array.tobytes())


@dataclasses.dataclass(frozen=True, eq=False)
class Slot:
    """A value of the program that is being written: an operand or a result."""

    number: int
    shape: tuple[int, ...]
    dtype: Any


Value = Known | Slot
Pull = Generator[tuple[Ref, Sel], Value, Any]


def num_bytes(value: Any) -> int:
    """Bytes of a value; a key counts as its key data."""
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return 16 * math.prod(value.shape)
    return math.prod(value.shape) * np.dtype(value.dtype).itemsize


def is_exact(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.prng_key) or not jnp.issubdtype(dtype, jnp.inexact)


def trim(ref: Ref, sel: Sel) -> Sel:
    """The selection without what restricts nothing."""
    shape = ref.shape
    return tuple((dim, start, size) for dim, start, size in sel if size is None or (start, size) != (0, shape[dim]))
