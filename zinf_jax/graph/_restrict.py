"""Restricts an init function to one slice of one of its outputs, and compiles that.

The init function's equations are read backwards from what is wanted, so nothing else is ever made: the model's forward
pass, the other leaves and the other slices of a stacked leaf drop out. Three things make it cheap and exact:

* A *selection* is pushed from a value to the values it is made from, through the rules of `_slice_rules`: a scan's
  output to one run of its body, a vmapped one to one of the split keys. Where no rule knows how, the value is made
  whole and indexed, and the writer says how many bytes that took.
* Integers and PRNG keys that depend on constants only (a chain of `fold_in`, split keys, rng counters) are evaluated
  at once, exactly; a program then starts at its key. So block 79 runs the program of block 0 with another operand.
* Floating arithmetic is never evaluated outside a compiled program: `normal * std` differs in its last bit between
  eager and jitted code. Its literals stay literals: XLA turns a division by a constant into a multiplication.

Bitwise equality with the whole jitted init rests on XLA giving an element the same bits whatever the array around it;
the tests hold it to that.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zinf_jax.errors import InitError
from zinf_jax.graph import _jaxpr
from zinf_jax.graph._equal import Keys
from zinf_jax.graph._jaxpr import Eqn
from zinf_jax.graph._slice_rules import slice_rule, whole_rule
from zinf_jax.graph._values import (
    Known,
    Missing,
    Node,
    Part,
    Pull,
    Ref,
    Sel,
    Slot,
    Value,
    compose,
    is_exact,
    is_key,
    num_bytes,
    sel_shape,
    trim,
)

_MAX_FOLD_BYTES = 1 << 16
_DATA_PRIMITIVES = frozenset({"random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform"})
_COMPILER_OPTIONS = {"xla_allow_excess_precision": False}


class Shared:
    """What the programs of one init function share: evaluated values, and keys of equations."""

    def __init__(self) -> None:
        self.known: dict[tuple[Ref, Sel], Known] = {}
        self.keys = Keys(differentiate=False)
        self._exact: dict[int, tuple[Any, bool]] = {}  # by id; the object is kept alive

    def is_exact(self, eqn: Eqn) -> bool:
        """An equation over integers and keys alone, all the way down, that is not meant to make data."""
        cached = self._exact.get(id(eqn))
        if cached is None:
            cached = self._exact[id(eqn)] = (eqn, self._is_exact(eqn))
        return cached[1]

    def _is_exact(self, eqn: Eqn) -> bool:
        if eqn.primitive.name in _DATA_PRIMITIVES or eqn.effects:
            return False
        if not all(is_exact(atom.aval.dtype) for atom in (*eqn.invars, *eqn.outvars)):
            return False
        return all(self.is_exact(inner) for jaxpr in _jaxpr.inner_jaxprs(eqn.params) for inner in jaxpr.eqns)


@dataclasses.dataclass(frozen=True)
class _Instruction:
    function: Callable[..., Sequence[Any]]
    inputs: tuple[Value, ...]
    outputs: tuple[Slot, ...]


class Writer:
    """Writes the program of one wanted value.

    Values are pulled by generators that yield what they need and get it sent back, run on an explicit stack: an init
    function that counts through 80 layers is deeper than Python's recursion limit.
    """

    def __init__(self, shared: Shared):
        self._shared = shared
        self._memo: dict[tuple[Ref, Sel], Value] = {}
        self._instructions: list[_Instruction] = []
        self._names: list[Hashable] = []
        self._operands: dict[Known, Slot] = {}
        self._fills: dict[Slot, Known] = {}
        self._num_slots = 0
        self.largest_indexed = 0  # bytes of the largest value that was made whole to take a part of it

    def pull(self, ref: Ref, sel: Sel = ()) -> Value:
        """Writes what makes a part of a value.

        Raises:
          InitError: it depends on the value of an argument that is abstract.
        """
        wanted = (ref, trim(ref, sel))
        stack: list[tuple[tuple[Ref, Sel], Pull]] = []
        value = self._find(wanted)
        if value is None:
            stack.append((wanted, self._pull(*wanted)))
        while stack:
            key, generator = stack[-1]
            try:
                need = generator.send(value)  # type: ignore[arg-type]  # None starts a generator
            except StopIteration as stop:
                stack.pop()
                value = self._keep(key, stop.value)
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

    def _keep(self, key: tuple[Ref, Sel], value: Value) -> Value:
        self._memo[key] = value
        if isinstance(value, Known):
            self._shared.known[key] = value
        return value

    def _find(self, key: tuple[Ref, Sel]) -> Value | None:
        found = self._memo.get(key)
        return self._shared.known.get(key) if found is None else found

    def _pull(self, ref: Ref, sel: Sel) -> Pull:
        if isinstance(ref, Known):
            return self._index(ref, sel)
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
        return self._index(whole, sel)

    def _index(self, value: Value, sel: Sel) -> Value:
        """Takes a part of a value that exists as a whole."""
        if not sel:
            return value
        sizes = list(value.shape)
        for dim, _, size in sel:
            sizes[dim] = 1 if size is None else size
        if isinstance(value, Known):
            where: list[Any] = [slice(None)] * len(sizes)
            for dim, start, size in sel:
                where[dim] = start if size is None else slice(start, start + size)
            return Known(_part(value.value, tuple(where)), value.literal)
        self.largest_indexed = max(self.largest_indexed, num_bytes(value))
        dims = tuple(dim for dim, _, _ in sel)
        shape = sel_shape(value.shape, sel)

        def take(whole: Any, *starts: Any) -> Sequence[Any]:
            at = [jnp.int32(0)] * len(sizes)
            for dim, start in zip(dims, starts, strict=True):
                at[dim] = start
            return [jax.lax.dynamic_slice(whole, at, sizes).reshape(shape)]

        starts = [Known(np.int32(start)) for _, start, _ in sel]
        return self.emit(("index", dims, tuple(sizes), shape), take, [value, *starts], [(shape, value.dtype)])[0]

    def equation(self, eqn: Eqn, inputs: Sequence[Value], shapes: Sequence[tuple[int, ...]]) -> list[Value]:
        """Writes an equation on given operands, which may be parts of the original ones."""
        outputs = [(shape, var.aval.dtype) for shape, var in zip(shapes, eqn.outvars, strict=True)]
        key = self._shared.keys.equation(eqn)
        function = functools.partial(_bind, eqn)
        results = self.emit(key, function, inputs, outputs, fold=self._shared.is_exact(eqn))
        if eqn.primitive.name == "broadcast_in_dim":
            self.note_fill(results[0], inputs)
        return results

    def node(self, node: Node, position: int, sel: Sel, inputs: Sequence[Value]) -> Value:
        """Writes a node's own equation on parts of its operands; all its outputs are cut alike."""
        return self.equation(node.eqn, inputs, [sel_shape(out.shape, sel) for out in node.outs])[position]

    def lax(self, node: Node, sel: Sel, inputs: Sequence[Value], function: Callable[..., Any], key: Hashable) -> Value:
        """Writes a function that stands for a node's equation on parts of its operands."""
        out = node.outs[0]
        fold = is_exact(out.dtype) and node.name not in _DATA_PRIMITIVES
        outputs = [(sel_shape(out.shape, sel), out.dtype)]
        return self.emit(("lax", node.name, key), lambda *args: [function(*args)], inputs, outputs, fold=fold)[0]

    def key(self, eqn: Eqn) -> Hashable:
        return self._shared.keys.equation(eqn)

    def note_fill(self, result: Value, inputs: Sequence[Value]) -> None:
        """The result is a literal, broadcast: as a final result it needs no program."""
        source = inputs[0] if inputs else None
        if isinstance(source, Slot):
            source = self._fills.get(source)
        if isinstance(result, Slot) and source is not None and source.literal and source.shape == ():
            self._fills[result] = source

    def key_data(self, value: Value, shape: tuple[int, ...]) -> Value:
        outputs = [(shape, np.dtype("uint32"))]
        return self.emit("key_data", lambda keys: [jax.random.key_data(keys)], [value], outputs, fold=True)[0]

    def emit(
        self,
        key: Hashable,
        function: Callable[..., Sequence[Any]],
        inputs: Sequence[Value],
        outputs: Sequence[tuple[tuple[int, ...], Any]],
        *,
        fold: bool = False,
    ) -> list[Value]:
        """Writes one instruction; with `fold`, evaluates it where it is small and all its operands are known.

        Args:
          key: Equal for functions that compute the same from operands of the same shapes.
          function: Takes arrays, returns a sequence of arrays.
          inputs: Its operands.
          outputs: (shape, dtype) of its results.
          fold: Its results do not depend on how they are compiled.
        """
        avals = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in outputs]
        known = [value.value for value in inputs if isinstance(value, Known)]
        if fold and len(known) == len(inputs) and all(num_bytes(aval) <= _MAX_FOLD_BYTES for aval in avals):
            # What depends on no argument stays a constant of the program: XLA evaluates sin of a constant by other
            # code than sin of an operand.
            literal = all(value.literal for value in inputs if isinstance(value, Known))
            return [Known(r) if is_key(r) else Known(np.asarray(r), literal) for r in function(*known)]
        arguments = tuple(self._argument(value) for value in inputs)
        slots = tuple(self._slot(shape, dtype) for shape, dtype in outputs)
        self._names.append((key, tuple(map(self._name, arguments)), tuple(s.shape for s in slots)))
        self._instructions.append(_Instruction(function, arguments, slots))
        return list(slots)

    def _argument(self, value: Value) -> Value:
        if isinstance(value, Slot) or value.literal:
            return value
        if value not in self._operands:
            self._operands[value] = self._slot(value.shape, value.dtype)
        return self._operands[value]

    def _slot(self, shape: tuple[int, ...], dtype: Any) -> Slot:
        self._num_slots += 1
        return Slot(self._num_slots, tuple(shape), dtype)

    def _name(self, value: Value) -> Hashable:
        if isinstance(value, Slot):
            return value.number
        # The type as well: a Python scalar is weakly typed.
        return (type(value.value), self._shared.keys.array(value.value))

    def constant(self, value: Value) -> np.ndarray | None:
        """The wanted value if it needs no program."""
        if isinstance(value, Known):
            return np.asarray(value.value, value.dtype)
        if value in self._fills:
            return np.full(value.shape, self._fills[value].value, value.dtype)
        return None

    def finish(self, value: Value) -> tuple[Hashable, list[Any], Callable[..., Any]]:
        """(structural key, operands, function of the operands) of the program that makes `value`."""
        assert isinstance(value, Slot)
        operands, slots = list(self._operands), list(self._operands.values())
        instructions = tuple(self._instructions)

        def run(*arguments: Any) -> Any:
            env = dict(zip(slots, arguments, strict=True))
            for instruction in instructions:
                inputs = [v.value if isinstance(v, Known) else env[v] for v in instruction.inputs]
                env.update(zip(instruction.outputs, instruction.function(*inputs), strict=True))
            return env[value]

        avals = tuple((slot.number, slot.shape, str(slot.dtype)) for slot in slots)
        return (tuple(self._names), avals, value.number), [operand.value for operand in operands], run


def _bind(eqn: Eqn, *values: Any) -> list[Any]:
    return _jaxpr.bind(eqn, values)


def _part(value: Any, where: tuple[Any, ...]) -> Any:
    """A part of an array or of an array of keys, taken on the host: JAX would compile a program for each place."""
    if is_key(value):
        data = np.asarray(jax.random.key_data(value))
        return jax.random.wrap_key_data(data[where], impl=jax.random.key_impl(value))
    return np.asarray(value)[where]


def compile_program(run: Callable[..., Any], operands: Sequence[Any]) -> Any:
    return jax.jit(run, compiler_options=_COMPILER_OPTIONS).lower(*operands).compile()
