"""Slices of what scans and conditionals make.

A scan's output at index i is one run of the body on slice i, with the carry as it is after i steps: run alone (without
what the body's carry does not need), or read from a history that is made once, where it is keys and counters.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from zinf_jax.graph import _jaxpr
from zinf_jax.graph._jaxpr import Block, Scan
from zinf_jax.graph._values import Known, Node, Part, Pull, Ref, Sel, Value, flatten, is_exact, num_bytes

if TYPE_CHECKING:
    from zinf_jax.graph._restrict import Writer

_MAX_HISTORY_BYTES = 1 << 20


def chosen_branch(node: Node) -> list[Ref] | None:
    """The outputs of the branch of a `cond` whose index is known."""
    branches = _jaxpr.branches_of(node.eqn)
    if branches is None or not isinstance(node.inputs[0], Known):
        return None
    index = min(max(int(np.asarray(node.inputs[0].value)), 0), len(branches) - 1)
    return node.cached("branch", lambda: flatten(branches[index], node.inputs[1:]))


def scan_rule(writer: "Writer", node: Node, position: int, sel: Sel) -> Pull:
    """Index i of a stacked output, or a part of it."""
    node, position = node.single(position)
    scan = _jaxpr.scan_of(node.eqn)
    assert scan is not None
    if position < scan.num_carry or not sel or sel[0][0] != 0 or sel[0][2] is not None:
        return None
    index = sel[0][1]
    outputs = node.cached(("body", index), lambda: _run_body(node, scan, index))
    return (yield outputs[position], tuple((dim - 1, start, size) for dim, start, size in sel[1:]))


def _time(scan: Scan, step: Any) -> Any:
    """The index into xs and ys of a step, or the step of an index."""
    return scan.length - 1 - step if scan.reverse else step


def _split(scan: Scan, flat: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """(consts, carry, xs)"""
    first, second = scan.num_consts, scan.num_consts + scan.num_carry
    return list(flat[:first]), list(flat[first:second]), list(flat[second:])


def _run_body(node: Node, scan: Scan, index: int) -> list[Ref]:
    consts, init, xs = _split(scan, node.inputs)
    step = _time(scan, index)
    carry: Sequence[Ref] = Carry(node, scan, step).outs if step and init else init
    return flatten(scan.body, [*consts, *carry, *(Part(x, ((0, index, None),)) for x in xs)])


class Carry(Node):
    """The carry of a scan after a number of steps."""

    def __init__(self, node: Node, scan: Scan, step: int):
        super().__init__(node.eqn, node.inputs)
        self.outs = self.outs[: scan.num_carry]
        self.owner, self.scan, self.step = node, scan, step


@dataclasses.dataclass(frozen=True)
class _CarryLoop:
    """A scan without its outputs. `used` says which of (consts, carry, xs) its body takes."""

    scan: Scan
    body: Block
    used: tuple[bool, ...]

    def next(self, consts: Sequence[Any], carry: Sequence[Any], xs: Sequence[Any]) -> list[Any]:
        values = (*consts, *carry, *xs)
        return _jaxpr.evaluate(self.body, *(value for value, keep in zip(values, self.used, strict=True) if keep))

    @property
    def is_exact(self) -> bool:
        return all(is_exact(atom.aval.dtype) for eqn in self.body.eqns for atom in (*eqn.invars, *eqn.outvars))

    def history(self, flat: Sequence[Any]) -> list[Any]:
        """The carry after each step, stacked: of exact values, so that it does not matter how it is compiled."""
        consts, init, xs = _split(self.scan, flat)

        def body(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            carry = self.next(consts, carry, x)
            return carry, carry

        def run() -> list[Any]:
            arrays = [None if x is None else jnp.flip(x, 0) if self.scan.reverse else jnp.asarray(x) for x in xs]
            return jax.lax.scan(body, list(map(jnp.asarray, init)), arrays, length=self.scan.length)[1]

        return jax.jit(run)()

    def run(self, steps: Any, *flat: Any) -> list[Any]:
        consts, init, xs = _split(self.scan, flat)

        def body(step: Any, carry: list[Any]) -> list[Any]:
            time = _time(self.scan, step)
            slices = [None if x is None else jax.lax.dynamic_index_in_dim(x, time, keepdims=False) for x in xs]
            return self.next(consts, carry, slices)

        return jax.lax.fori_loop(0, steps, body, init)


def _carry_loop(scan: Scan) -> _CarryLoop:
    num_outputs = len(scan.body.outvars) - scan.num_carry
    body, used = _jaxpr.restrict(scan.body, [True] * scan.num_carry + [False] * num_outputs)
    return _CarryLoop(scan, body, used)


def carry_rule(writer: "Writer", node: Carry, position: int) -> Pull:
    scan = node.scan
    loop: _CarryLoop = node.owner.cached("carry loop", lambda: _carry_loop(scan))
    # The initial carry is always there; a const or xs that no carry needs stays away.
    wanted = [keep or scan.num_consts <= k < scan.num_consts + scan.num_carry for k, keep in enumerate(loop.used)]
    inputs: list[Value] = []
    for ref, keep in zip(node.inputs, wanted, strict=True):
        if keep:
            inputs.append((yield ref, ()))

    def spread(values: Sequence[Any]) -> list[Any]:
        given = iter(values)
        return [next(given) if keep else None for keep in wanted]

    held = scan.length * sum(num_bytes(out) for out in node.outs)
    known = [value.value for value in inputs if isinstance(value, Known)]
    if len(known) == len(inputs) and loop.is_exact and held <= _MAX_HISTORY_BYTES:
        history = node.owner.cached("history", lambda: loop.history(spread(known)))
        values: list[Value] = [Known(stacked[node.step - 1]) for stacked in history]
    else:
        key = ("carry", writer.key(node.eqn), tuple(wanted))
        run = functools.partial(_run_loop, loop, spread)
        avals = [(out.shape, out.dtype) for out in node.outs]
        values = writer.emit(key, run, [Known(np.int32(node.step)), *inputs], avals)
    for out, value in zip(node.outs, values, strict=True):
        writer.remember(out, value)
    return values[position]


def _run_loop(loop: _CarryLoop, spread: Any, steps: Any, *values: Any) -> list[Any]:
    return loop.run(steps, *spread(values))
