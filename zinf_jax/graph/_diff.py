"""Which values carry a cotangent, found over the whole program before anything is cut or differentiated.

A derivative is linear in its tangents, so a result whose tangent does not depend on an argument's tangent (by data flow
in the traced jvp) has no derivative with respect to it: that is how `stop_gradient`, rounding and custom rules that
drop a gradient are seen, without asking JAX for its symbolic zeros. Control flow is taken apart: a loop's dependencies
are the fixed point of its body's.
"""

from collections.abc import Sequence
from typing import Any

import jax

from zinf_jax.graph import _jaxpr
from zinf_jax.graph._equal import Keys
from zinf_jax.graph._jaxpr import Block, Eqn, Var

# Per result, the positions of the arguments on which it depends differentiably.
Dependencies = tuple[frozenset[int], ...]


class Differentials:
    """Differentiable dependencies of equations, remembered by structure."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._known: dict[int, Dependencies] = {}

    def of(self, eqn: Eqn) -> Dependencies:
        if not any(_jaxpr.is_floating(atom) for atom in eqn.invars):
            return (frozenset(),) * len(eqn.outvars)
        key = self._keys.equation(eqn)
        if key not in self._known:
            self._known[key] = self._find(eqn)
        return self._known[key]

    def _find(self, eqn: Eqn) -> Dependencies:
        if (scan := _jaxpr.scan_of(eqn)) is not None:
            return self._scan(scan)
        if (loop := _jaxpr.while_of(eqn)) is not None:
            return self._while(*loop)
        if (branches := _jaxpr.branches_of(eqn)) is not None:
            found = [self.block(branch) for branch in branches]
            merged = [frozenset().union(*(deps[out] for deps in found)) for out in range(len(eqn.outvars))]
            return tuple(frozenset(position + 1 for position in deps) for deps in merged)
        if _jaxpr.is_custom(eqn):
            return self._custom(eqn)
        if eqn.primitive.name == "optimization_barrier":  # its tangents go through one barrier, but stay apart
            return tuple(frozenset((i,)) if _jaxpr.is_floating(a) else frozenset() for i, a in enumerate(eqn.invars))
        body = _jaxpr.inlined_body(eqn)
        return self.block(body) if body is not None else self._primitive(eqn)

    def block(self, block: Block) -> Dependencies:
        """Of each result of a block on its arguments."""
        reached: dict[Var, frozenset[int]] = {var: frozenset((i,)) for i, var in enumerate(block.invars)}
        nothing: frozenset[int] = frozenset()
        for eqn in block.eqns:
            sources = [nothing if _jaxpr.is_literal(a) else reached.get(a, nothing) for a in eqn.invars]
            if not any(sources):
                continue
            for var, deps in zip(eqn.outvars, self.of(eqn), strict=True):
                reached[var] = nothing.union(*(sources[position] for position in deps))
        return tuple(
            reached.get(atom, nothing) if not _jaxpr.is_literal(atom) and _jaxpr.is_floating(atom) else nothing
            for atom in block.outvars
        )

    def _scan(self, scan: _jaxpr.Scan) -> Dependencies:
        return _loop(self.block(scan.body), scan.num_consts, scan.num_carry)

    def _while(self, cond: Block, body: Block, num_cond: int, num_body: int) -> Dependencies:
        num_carry = len(body.outvars)
        found = _loop(self.block(body), num_body, num_carry)
        return tuple(frozenset(position + num_cond for position in deps) for deps in found)

    def _custom(self, eqn: Eqn) -> Dependencies:
        rule = self._keys.rule(eqn)
        floating = [i for i, atom in enumerate(eqn.invars) if _jaxpr.is_floating(atom)]
        results = [i for i, var in enumerate(eqn.outvars) if _jaxpr.is_floating(var)]
        if rule is None:
            return _dense(eqn)
        first = len(eqn.invars)
        gradients = rule.outvars[len(eqn.outvars) :]
        cotangents = {var: results[i] for i, var in enumerate(rule.invars[first:])}
        flow = data_flow(rule, set(cotangents))
        found: list[set[int]] = [set() for _ in eqn.outvars]
        for position, gradient in zip(floating, gradients, strict=True):
            for source in frozenset() if _jaxpr.is_literal(gradient) else flow.get(gradient, frozenset()):
                found[cotangents[source]].add(position)
        return tuple(frozenset(entry) for entry in found)

    def _primitive(self, eqn: Eqn) -> Dependencies:
        floating = [i for i, atom in enumerate(eqn.invars) if _jaxpr.is_floating(atom)]
        results = [i for i, var in enumerate(eqn.outvars) if _jaxpr.is_floating(var)]

        def tangents_out(primals: list[Any], tangents: list[Any]) -> list[Any]:
            def run(*chosen: Any) -> list[Any]:
                full = list(primals)
                for index, value in zip(floating, chosen, strict=True):
                    full[index] = value
                outs = _jaxpr.bind(eqn, full)
                return [outs[index] for index in results]

            return jax.jvp(run, [primals[index] for index in floating], tangents)[1]

        structs = [_jaxpr.struct_of(atom) for atom in eqn.invars]
        directions = [jax.ShapeDtypeStruct(structs[i].shape, structs[i].dtype) for i in floating]
        try:
            block = _jaxpr.trace(tangents_out, structs, directions).block
        except Exception:  # not differentiable in this direction: assume everything, the unit's own trace decides
            return _dense(eqn)
        position = {var: floating[i] for i, var in enumerate(block.invars[len(structs) :])}
        flow = data_flow(block, set(position))
        found = [frozenset[int]()] * len(eqn.outvars)
        for index, atom in zip(results, block.outvars, strict=True):
            if not _jaxpr.is_literal(atom):
                found[index] = frozenset(position[var] for var in flow.get(atom, frozenset()))
        return tuple(found)


def _dense(eqn: Eqn) -> Dependencies:
    every = frozenset(i for i, atom in enumerate(eqn.invars) if _jaxpr.is_floating(atom))
    return tuple(every if _jaxpr.is_floating(var) else frozenset() for var in eqn.outvars)


def data_flow(block: Block, sources: set[Var]) -> dict[Var, frozenset[Var]]:
    """For each variable, the sources that its value depends on at all."""
    reached: dict[Var, frozenset[Var]] = {var: frozenset((var,)) for var in sources}
    nothing: frozenset[Var] = frozenset()
    for eqn in block.eqns:
        deps = nothing.union(*(reached.get(a, nothing) for a in eqn.invars if not _jaxpr.is_literal(a)))
        if deps:
            reached.update((var, deps) for var in eqn.outvars)
    return reached


def _loop(body: Dependencies, num_consts: int, num_carry: int) -> Dependencies:
    """The fixed point of a loop's body over its carry. Arguments are (consts, carry, xs), results (carry, ys)."""
    carry = [frozenset((num_consts + i,)) for i in range(num_carry)]  # nothing run yet: each is its initial value

    def through(deps: frozenset[int]) -> frozenset[int]:
        inside = range(num_consts, num_consts + num_carry)
        return frozenset().union(*(carry[p - num_consts] if p in inside else frozenset((p,)) for p in deps))

    while True:
        grown = [old | through(deps) for old, deps in zip(carry, body, strict=False)]
        if grown == carry:
            break
        carry = grown
    return (*carry, *(through(deps) for deps in body[num_carry:]))


def active_variables(eqns: Sequence[Eqn], sources: set[Var], differentials: Differentials) -> set[Var]:
    """The variables that depend differentiably on one of the sources."""
    active = set(sources)
    for eqn in eqns:
        positions = {i for i, atom in enumerate(eqn.invars) if not _jaxpr.is_literal(atom) and atom in active}
        if positions:
            found = differentials.of(eqn)
            active.update(var for var, deps in zip(eqn.outvars, found, strict=True) if deps & positions)
    return active


def reached_from(eqns: Sequence[Eqn], wanted: set[Var], active: set[Var], differentials: Differentials) -> set[Var]:
    """The active variables that receive a cotangent when the wanted ones do."""
    reached = set(wanted)
    for eqn in reversed(eqns):
        outs = [i for i, var in enumerate(eqn.outvars) if var in reached]
        if outs:
            found = differentials.of(eqn)
            for position in frozenset().union(*(found[i] for i in outs)):
                atom = eqn.invars[position]
                if not _jaxpr.is_literal(atom) and atom in active:
                    reached.add(atom)
    return reached
