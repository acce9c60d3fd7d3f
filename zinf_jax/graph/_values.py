"""Values of an init function before anything is computed: equations with operands, and parts of values.

One value is one object, compared by identity. Calls are looked through, so one equation of a jaxpr that is called twice
makes two nodes.
"""

import dataclasses
import math
from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zinf_jax.graph import _jaxpr
from zinf_jax.graph._jaxpr import Atom, Block, Eqn, Var

# What of a value is wanted: (dim, start, size) per restricted dim, in order of dim. A size of None is one index, and
# the dim is dropped.
Sel = tuple[tuple[int, int, int | None], ...]

_MAX_LITERAL_BYTES = 1 << 20


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
        kept, real = -1, -1
        while kept < dim:
            real += 1
            kept += real not in dropped
        before = result.get(real, (0, None))[0]
        result[real] = (before + start, size)
    return tuple((dim, *result[dim]) for dim in sorted(result))


def is_key(value: Any) -> bool:
    return jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def is_exact(dtype: Any) -> bool:
    """Integers, bools and keys: their arithmetic has the same bits wherever it is done."""
    return jnp.issubdtype(dtype, jax.dtypes.prng_key) or not jnp.issubdtype(dtype, jnp.inexact)


def num_bytes(value: Any) -> int:
    """Bytes of what has a shape and a dtype; a key counts as 16."""
    return math.prod(value.shape) * (16 if is_key(value) else np.dtype(value.dtype).itemsize)


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


@dataclasses.dataclass(frozen=True, eq=False)
class Slot:
    """A value of a program that is being written: an operand or a result."""

    number: int
    shape: tuple[int, ...]
    dtype: Any


Ref = Known | Missing | Out | Part
Value = Known | Slot  # what a Ref becomes
Pull = Generator[tuple[Ref, Sel], Value, Any]  # yields what it needs, gets it sent back


def trim(ref: Ref, sel: Sel) -> Sel:
    """The selection without what restricts nothing."""
    shape = ref.shape
    return tuple((dim, start, size) for dim, start, size in sel if size is None or (start, size) != (0, shape[dim]))


class Node:
    """An equation with its operands, and what was derived from it."""

    def __init__(self, eqn: Eqn, inputs: Sequence[Ref]):
        self.eqn = eqn
        self.inputs = tuple(inputs)
        self.outs = tuple(Out(self, position) for position in range(len(eqn.outvars)))
        self._cache: dict[Hashable, Any] = {}

    @property
    def name(self) -> str:
        return self.eqn.primitive.name

    def cached(self, key: Hashable, make: Callable[[], Any]) -> Any:
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    def single(self, position: int) -> tuple["Node", int]:
        """A node without what only the other outputs need (inside a scan as well), and the output's place in it."""
        return self.cached(("single", position), lambda: self._single(position))

    def _single(self, position: int) -> tuple["Node", int]:
        refs = {var: ref for var, ref in zip(self.eqn.invars, self.inputs, strict=True) if not _jaxpr.is_literal(var)}
        wanted = self.eqn.outvars[position]
        smaller, used = _jaxpr.restrict(Block(tuple(refs), (wanted,), (self.eqn,)), [True])
        (eqn,) = smaller.eqns
        renamed = dict(
            zip(smaller.invars, (r for r, keep in zip(refs.values(), used, strict=True) if keep), strict=True)
        )
        node = Node(eqn, [_read(renamed, atom) for atom in eqn.invars])
        return node, next(k for k, var in enumerate(eqn.outvars) if var is smaller.outvars[0])


def _read(env: dict[Var, Ref], atom: Atom) -> Ref:
    return Known(atom.val, literal=True) if _jaxpr.is_literal(atom) else env[atom]


def flatten(block: Block, args: Sequence[Ref]) -> list[Ref]:
    """The outputs of a block as values made from its arguments."""
    env: dict[Var, Ref] = {var: _constant(value) for var, value in block.consts}
    env.update(zip(block.invars, args, strict=True))
    for eqn in block.eqns:
        inputs = [_read(env, atom) for atom in eqn.invars]
        body = _jaxpr.inlined_body(eqn, custom=True)
        outputs: Sequence[Ref] = Node(eqn, inputs).outs if body is None else flatten(body, inputs)
        env.update(zip(eqn.outvars, outputs, strict=True))
    return [_read(env, atom) for atom in block.outvars]


def _constant(value: Any) -> Known:
    """A closed-over constant. Unless it is large it stays in the program's text, as it would in the user's own jit."""
    return Known(value, literal=not is_key(value) and num_bytes(value) <= _MAX_LITERAL_BYTES)
