"""Keeps what a policy names from a unit's forward to its backward, instead of computing it again.

A unit's vector-Jacobian product, taken under `jax.checkpoint` with the policy, is a pytree of arrays, and that is where
a program is cut in two. Arrays that are arguments of the unit are arguments of its backward as well; those that depend
on parameters alone (their casts) are made again there, so that no policy keeps a copy of the weights; the others become
outputs of the forward, values like any other to the planner and to what spills them.
"""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from zinf_jax.errors import ConfigError
from zinf_jax.graph import _jaxpr
from zinf_jax.graph._diff import data_flow
from zinf_jax.graph._flops import flops_of
from zinf_jax.graph.types import Program, UnitGraph

PolicyName = Literal["nothing_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable", "everything_saveable"]
"""Of `jax.checkpoint_policies`. The first is what units do without this module."""

POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)

RematPolicy = PolicyName | tuple[str, ...]
"""A policy, or names given with `jax.ad_checkpoint.checkpoint_name`: what has one of them is kept."""


def keep_residuals(graph: UnitGraph, policy: RematPolicy, units: Collection[int]) -> UnitGraph:
    """The graph, with units whose backward goes on from what the policy keeps.

    Gradients are the same up to rounding: other programs, so other fusions.

    Args:
      graph: As cut.
      policy: What is kept.
      units: Indices of those that change; others, and those without a backward, stay.

    Raises:
      ConfigError: nothing in these units has one of the names.
    """
    if policy == POLICIES[0]:
        return graph
    changing = [unit for unit in graph.units if unit.index in units and unit.index in graph.backward]
    rule, which = _rule(policy), dict.fromkeys(unit.program for unit in changing)
    if not isinstance(policy, str):
        _check_names(policy, [graph.programs[index] for index in which])
    splits = {index: _Split(graph.programs[index], rule) for index in which}
    numbers = {program: len(graph.programs) + i for i, program in enumerate(splits)}
    flops = {program: split.backward_flops() for program, split in splits.items()}
    values, changed = list(graph.values), list(graph.units)
    for unit in changing:
        split = splits[unit.program]
        outputs = (*unit.outputs, *range(len(values), len(values) + len(split.made)))
        values.extend(_jaxpr.struct_of(var) for var in split.made)
        changed[unit.index] = dataclasses.replace(
            unit, program=numbers[unit.program], outputs=outputs, saved=tuple(outputs[i] for i in split.saved),
            backward_flops=flops[unit.program],
        )  # fmt: skip
    programs = (*graph.programs, *(splits[program].program(number) for program, number in numbers.items()))
    return dataclasses.replace(graph, units=tuple(changed), programs=programs, values=tuple(values))


def _rule(policy: RematPolicy) -> Callable[..., Any]:
    """As `jax.checkpoint` takes it."""
    if isinstance(policy, str):
        return getattr(jax.checkpoint_policies, policy)
    return jax.checkpoint_policies.save_only_these_names(*policy)


def _check_names(names: Sequence[str], programs: Sequence[Program]) -> None:
    found = set().union(*(_names(_jaxpr.trace(program.forward, *_avals(program)).block) for program in programs))
    if missing := [name for name in names if name not in found]:
        raise ConfigError(
            f"remat_policy: no value is named {missing[0]!r} in what is recomputed; the names there are "
            f"{sorted(found) or 'none'}: give some with jax.ad_checkpoint.checkpoint_name, or use one of "
            f"{', '.join(POLICIES)}"
        )


def _avals(program: Program) -> tuple[list[Any], list[Any], list[Any]]:
    return list(program.piece_avals), list(program.input_avals), list(program.operand_avals)


class _Split:
    """A program in two.

    Attributes:
      made: Variables that the forward gives beside the program's outputs.
      saved: Which of the forward's results, those included, the backward reads.
    """

    def __init__(self, program: Program, policy: Callable[..., Any]) -> None:
        self._program = program

        def run(pieces: Sequence[Any], inputs: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
            assert program.forward_vjp is not None
            outputs, pull = program.forward_vjp(pieces, inputs, operands, policy)
            arrays, self._tree = jax.tree.flatten(pull)
            return [*outputs, *arrays]

        self._block = _without_casts_to_itself(_jaxpr.trace(run, *_avals(program)).block)
        count = len(program.output_avals)
        outputs, self._arrays = self._block.outvars[:count], self._block.outvars[count:]
        first = len(program.piece_avals)
        inputs = self._block.invars[first : first + len(program.input_avals)]
        changing = data_flow(self._block, set(inputs))
        kept = [a for a in dict.fromkeys(self._variables()) if a in changing and a not in self._block.invars]
        self.made = [var for var in kept if var not in outputs]
        self._results = [*outputs, *self.made]
        self._kept, self.saved = kept, [self._results.index(var) for var in kept]
        self._forward = _jaxpr.needed(self._block.eqns, self._results, effects=True)
        again = set(self._variables()) - set(kept)
        self._again = _jaxpr.needed(self._block.eqns, again)

    def backward_flops(self) -> int:
        """Of the backward, what it computes again included."""
        given = self._program
        saved = [_jaxpr.struct_of(var) for var in self._kept]
        cotangents = [aval for aval, diff in zip(given.output_avals, given.diff_outputs, strict=True) if diff]
        block = _jaxpr.trace(self.program(given.index).backward, *_avals(given), saved, cotangents).block
        return sum(map(flops_of, block.eqns))

    def _variables(self) -> list[Any]:
        return [atom for atom in self._arrays if not _jaxpr.is_literal(atom)]

    def program(self, index: int) -> Program:
        given = self._program
        return dataclasses.replace(
            given,
            index=index,
            output_avals=(*given.output_avals, *(_jaxpr.struct_of(var) for var in self.made)),
            diff_outputs=(*given.diff_outputs, *(False for _ in self.made)),
            forward=self._run_forward,
            vjp=self._vjp,
            forward_vjp=None,
        )

    def _run_forward(self, pieces: Sequence[Any], inputs: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
        env = self._bound(pieces, inputs, operands)
        _jaxpr.run(self._forward, env)
        return [_jaxpr.value_of(env, atom) for atom in self._results]

    def _vjp(self, pieces: Sequence[Any], inputs: Sequence[Any], operands: Sequence[Any], saved: Sequence[Any]) -> Any:
        env = self._bound(pieces, inputs, operands)
        env.update(zip(self._kept, saved, strict=True))
        _jaxpr.run(self._again, env)
        return jax.tree.unflatten(self._tree, [_jaxpr.value_of(env, atom) for atom in self._arrays])

    def _bound(self, pieces: Sequence[Any], inputs: Sequence[Any], operands: Sequence[Any]) -> dict[Any, Any]:
        env = dict(self._block.consts)
        env.update(zip(self._block.invars, (*pieces, *inputs, *operands), strict=True))
        return env


def _without_casts_to_itself(block: _jaxpr.Block) -> _jaxpr.Block:
    """Without reductions of a value's precision to the one it has.

    JAX marks with them what a policy keeps, so that XLA keeps no more bits of it. Units are compiled so that it never
    does, and each would be a copy.
    """
    env: dict[Any, Any] = {}
    eqns = []
    for eqn in block.eqns:
        atoms = [_jaxpr.lookup(env, atom) for atom in eqn.invars]
        if eqn.primitive.name == "reduce_precision" and _keeps_all(eqn):
            env[eqn.outvars[0]] = atoms[0]
        else:
            eqns.append(_jaxpr.with_atoms(eqn, atoms, eqn.outvars))
    results = tuple(_jaxpr.lookup(env, atom) for atom in block.outvars)
    return dataclasses.replace(block, outvars=results, eqns=tuple(eqns))


def _keeps_all(eqn: Any) -> bool:
    info = jnp.finfo(eqn.invars[0].aval.dtype)
    return bool(eqn.params["exponent_bits"] >= info.nexp and eqn.params["mantissa_bits"] >= info.nmant)


def _names(block: _jaxpr.Block) -> set[str]:
    found = set()
    for eqn in block.eqns:
        if eqn.primitive.name == "name":
            found.add(eqn.params["name"])
        for inner in _jaxpr.inner_jaxprs(eqn.params):
            found |= _names(_jaxpr.open_block(inner))
    return found
