"""Restricts a jaxpr to one slice of one of its outputs, and compiles that.

The jaxpr of an init function is read backwards from what is wanted, so nothing else is ever made: the model's forward
pass, the other leaves and the other slices of a stacked leaf drop out. Three things make it cheap and exact:

* A *selection* (`Sel`) is pushed from a value to the values it is made from, through the rules of `_slice_rules`:
  a scan's output to one run of its body, a vmapped one to one of the split keys. Where no rule knows how, the value is
  made whole and indexed, and the result says how many bytes that took.
* Integers and PRNG keys that depend on constants only (a chain of `fold_in`, split keys, rng counters) are evaluated
  at once, exactly; a program then starts at its key. So block 79 runs the program of block 0 with another operand.
* Floating arithmetic is never evaluated outside a compiled program: `normal * std` differs in its last bit between
  eager and jitted code. Its literals stay literals: XLA turns a division by a constant into a multiplication.

Bitwise equality with the whole jitted init rests on XLA giving one element the same bits whatever the array around
it; the tests hold it to that.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from zinf_jax.errors import InitError
from zinf_jax.graph._slice_rules import slice_rule, whole_rule
from zinf_jax.graph._values import (
    ById,
    Known,
    Missing,
    Part,
    Pull,
    Ref,
    Sel,
    Slot,
    Value,
    compose,
    eqn_key,
    is_exact,
    literal_key,
    num_bytes,
    read_jaxpr,
    sel_shape,
    trim,
)

_MAX_FOLD_BYTES = 1 << 16
_DATA_PRIMITIVES = frozenset({"random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform"})
_COMPILER_OPTIONS = {"xla_allow_excess_precision": False}


@dataclasses.dataclass(frozen=True)
class _Instruction:
    function: Callable[..., Sequence[Any]]
    inputs: tuple[Value, ...]
    outputs: tuple[Slot, ...]


@functools.lru_cache(maxsize=4096)
def _exact_eqn(eqn_id: "ById") -> bool:
    """An equation over integers and keys alone, all the way down, that is not meant to make data."""
    eqn = eqn_id.value
    if eqn.primitive.name in _DATA_PRIMITIVES or eqn.effects:
        return False
    if not all(is_exact(v.aval.dtype) for v in (*eqn.invars, *eqn.outvars)):
        return False
    inner = [read_jaxpr(j)[0] for value in eqn.params.values() for j in (value if isinstance(value, tuple) else (value,))
             if isinstance(j, Jaxpr | ClosedJaxpr)]  # fmt: skip
    return all(_exact_eqn(ById(e)) for jaxpr in inner for e in jaxpr.eqns)


def bind(eqn: JaxprEqn, *args: Any) -> Sequence[Any]:
    params = eqn.primitive.get_bind_params(eqn.params)
    with eqn.ctx.manager:
        result = eqn.primitive.bind(*args, **params)
    return result if eqn.primitive.multiple_results else [result]


class Writer:
    """Writes the program of one wanted value. Not reused; `known` outlives it and is shared by all pieces.

    Values are pulled by generators that yield what they need and get it sent back, run on an explicit stack: an init
    function that counts through 80 layers is deeper than Python's recursion limit.
    """

    def __init__(self, known: dict[tuple[Ref, Sel], Known]):
        self._known = known
        self._memo: dict[tuple[Ref, Sel], Value] = {}
        self._instructions: list[_Instruction] = []
        self._keys: list[Hashable] = []
        self._operands: dict[Known, Slot] = {}
        self._num_slots = 0
        self.largest_indexed = 0  # bytes of the largest value that was made whole to take a part of it

    def pull(self, ref: Ref, sel: Sel = ()) -> Value:
        wanted = (ref, trim(ref, sel))
        stack: list[tuple[tuple[Ref, Sel], Pull]] = []
        value: Value | None = self._find(wanted)
        if value is None:
            stack.append((wanted, self._pull(*wanted)))
        while stack:
            key, generator = stack[-1]
            try:
                need = generator.send(value)  # type: ignore[arg-type]  # None starts a generator
            except StopIteration as stop:
                stack.pop()
                value = stop.value
                assert value is not None
                self._memo[key] = value
                if isinstance(value, Known):
                    self._known[key] = value
                continue
            need = (need[0], trim(*need))
            value = self._find(need)
            if value is None:
                stack.append((need, self._pull(*need)))
        assert value is not None
        return value

    def remember(self, ref: Ref, value: Value) -> None:
        """For outputs that were written together with the one that was asked for."""
        self._memo[(ref, ())] = value

    def _find(self, key: tuple[Ref, Sel]) -> Value | None:
        found = self._memo.get(key)
        return self._known.get(key) if found is None else found

    def _pull(self, ref: Ref, sel: Sel) -> Pull:
        if isinstance(ref, Known):
            return self.index(ref, sel)
        if isinstance(ref, Missing):
            raise InitError(f"depends on the value of {ref.name}, which was given as a shape only; give the array")
        if isinstance(ref, Part):
            return (yield ref.ref, compose(ref.sel, sel))
        if not sel:
            return (yield from whole_rule(self, ref))
        result = yield from slice_rule(self, ref, sel)
        if result is not None:
            return result
        whole = yield ref, ()
        return self.index(whole, sel)

    def index(self, value: Value, sel: Sel) -> Value:
        """Takes a part of a value that exists as a whole."""
        if not sel:
            return value
        shape = sel_shape(value.shape, sel)
        dropped = tuple(dim for dim, _, size in sel if size is None)
        if isinstance(value, Known):
            where: list[Any] = [slice(None)] * len(value.shape)
            for dim, start, size in sel:
                where[dim] = start if size is None else slice(start, start + size)
            return Known(value.value[tuple(where)])
        self.largest_indexed = max(self.largest_indexed, num_bytes(value))
        sizes = list(value.shape)
        for dim, _, size in sel:
            sizes[dim] = 1 if size is None else size
        dims = tuple(dim for dim, _, _ in sel)

        def take(whole: Any, *starts: Any) -> Sequence[Any]:
            at = [jnp.int32(0)] * len(sizes)
            for dim, start in zip(dims, starts, strict=True):
                at[dim] = start
            return [jax.lax.squeeze(jax.lax.dynamic_slice(whole, at, sizes), dropped)]

        starts = [Known(np.int32(start)) for _, start, _ in sel]
        return self.emit(("index", dims, tuple(sizes), dropped), take, [value, *starts], [(shape, value.dtype)])[0]

    def equation(self, eqn: JaxprEqn, inputs: Sequence[Value], outputs: Sequence[tuple[Any, Any]]) -> list[Value]:
        """Writes an equation on given operands, which may be parts of the original ones."""
        fold = _exact_eqn(ById(eqn))
        return self.emit(eqn_key(eqn), functools.partial(bind, eqn), inputs, outputs, fold=fold)

    def emit(
        self,
        key: Hashable,
        function: Callable[..., Sequence[Any]],
        inputs: Sequence[Value],
        outputs: Sequence[tuple[tuple[int, ...], Any]],
        *,
        fold: bool = False,
    ) -> list[Value]:
        """Writes one instruction, or evaluates it where it is exact and small and all its operands are known."""
        known = [value for value in inputs if isinstance(value, Known)]
        if fold and len(known) == len(inputs) and self._foldable(outputs):
            results = function(*(value.value for value in known))
            return [Known(r if _is_key(r) else np.asarray(r)) for r in results]
        arguments = tuple(self._argument(value) for value in inputs)
        slots = tuple(self._slot(shape, dtype) for shape, dtype in outputs)
        names = tuple(a.number if isinstance(a, Slot) else literal_key(a.value) for a in arguments)
        self._keys.append((key, names, tuple((s.shape, str(s.dtype)) for s in slots)))
        self._instructions.append(_Instruction(function, arguments, slots))
        return list(slots)

    def _foldable(self, outputs: Sequence[tuple[tuple[int, ...], Any]]) -> bool:
        return all(
            is_exact(dtype) and num_bytes(jax.ShapeDtypeStruct(shape, dtype)) <= _MAX_FOLD_BYTES
            for shape, dtype in outputs
        )

    def _argument(self, value: Value) -> Value:
        if isinstance(value, Slot) or value.literal:
            return value
        if value not in self._operands:
            self._operands[value] = self._slot(value.shape, value.dtype)
        return self._operands[value]

    def _slot(self, shape: tuple[int, ...], dtype: Any) -> Slot:
        self._num_slots += 1
        return Slot(self._num_slots, tuple(shape), dtype)

    def key_data(self, value: Value, shape: tuple[int, ...]) -> Value:
        return self.emit("key_data", lambda keys: [jax.random.key_data(keys)], [value], [(shape, np.dtype("uint32"))])[
            0
        ]

    def finish(self, value: Value) -> tuple[Hashable, list[Any], Callable[..., Any]]:
        """(structural key, operands, function of the operands) of the program that makes `value`."""
        result = self._argument(value)
        operands = list(self._operands.items())
        avals = tuple((slot.number, slot.shape, str(slot.dtype)) for _, slot in operands)
        name = result.number if isinstance(result, Slot) else literal_key(result.value)
        instructions = tuple(self._instructions)
        slots = [slot for _, slot in operands]

        def run(*arguments: Any) -> Any:
            env = dict(zip(slots, arguments, strict=True))
            for instruction in instructions:
                inputs = [v.value if isinstance(v, Known) else env[v] for v in instruction.inputs]
                env.update(zip(instruction.outputs, instruction.function(*inputs), strict=True))
            return result.value if isinstance(result, Known) else env[result]

        return (tuple(self._keys), avals, name), [k.value for k, _ in operands], run


def _is_key(value: Any) -> bool:
    return jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def compile_program(run: Callable[..., Any], operands: Sequence[Any]) -> Any:
    return jax.jit(run, compiler_options=_COMPILER_OPTIONS).lower(*operands).compile()
