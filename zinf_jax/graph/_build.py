"""From groups of steps to units that share programs.

Units are equal when their equations are, wired alike, over arguments of equal types, with the same cotangents coming
and going. Closed-over arrays become operands; so do literals in which equal units differ.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from zinf_jax.graph import _jaxpr
from zinf_jax.graph._diff import Differentials, active_variables, reached_from
from zinf_jax.graph._equal import Keys
from zinf_jax.graph._flops import flops_of
from zinf_jax.graph._jaxpr import Atom, Eqn, Var
from zinf_jax.graph._linear import Linear
from zinf_jax.graph._names import unit_name
from zinf_jax.graph._place import Step
from zinf_jax.graph.types import Program, Unit
from zinf_jax.leaves import LeafKind, Piece

# Where a literal stands: equation, argument.
_Spot = tuple[int, int]


@dataclasses.dataclass
class _Draft:
    """A unit before it has a program."""

    eqns: list[Eqn]
    pieces: list[Var]
    inputs: list[Var]
    consts: list[Var]
    literals: dict[_Spot, Any]
    outputs: list[Var]
    diff_pieces: tuple[bool, ...] = ()
    diff_inputs: tuple[bool, ...] = ()
    diff_outputs: tuple[bool, ...] = ()


class Builder:
    """Makes units and programs. One per cut.

    Args:
      linear: The flat program.
      loss: The variable of the loss, or None where nothing is differentiated.
    """

    def __init__(self, linear: Linear, keys: Keys, loss: Var | None) -> None:
        self._linear, self._keys, self._loss = linear, keys, loss
        self._leaves, self._piece_of = linear.leaves, linear.pieces
        self._differentials = Differentials(keys)
        self.values: list[jax.ShapeDtypeStruct] = []
        self._ids: dict[Var, int] = {}
        self.operands: list[Any] = []
        self._operand_ids: dict[Any, int] = {}
        self.programs: list[Program] = []
        for var in linear.outer:
            self.value_id(var)

    def value_id(self, var: Var) -> int:
        if var not in self._ids:
            self._ids[var] = len(self.values)
            self.values.append(_jaxpr.struct_of(var))
        return self._ids[var]

    def build(self, groups: Sequence[Sequence[Step]]) -> list[Unit]:
        drafts = self._draft(groups)
        self._mark(drafts)
        members: dict[Any, list[int]] = {}
        for index, draft in enumerate(drafts):
            members.setdefault(self._signature(draft), []).append(index)
        program_of: dict[int, tuple[int, list[_Spot]]] = {}
        for indices in members.values():
            varying = self._varying([drafts[i] for i in indices])
            self.programs.append(self._program(drafts[indices[0]], varying))
            program_of.update((i, (len(self.programs) - 1, varying)) for i in indices)
        return [self._unit(i, draft, *program_of[i]) for i, draft in enumerate(drafts)]

    def _draft(self, groups: Sequence[Sequence[Step]]) -> list[_Draft]:
        made_by = {var: unit for unit, steps in enumerate(groups) for step in steps for var in step.eqn.outvars}
        wanted = set(self._linear.results)
        for unit, steps in enumerate(groups):
            wanted.update(var for step in steps for var in step.values if made_by.get(var, unit) != unit)
        return [self._draft_one(steps, wanted) for steps in groups]

    def _draft_one(self, steps: Sequence[Step], wanted: set[Any]) -> _Draft:
        eqns: dict[int, Eqn] = {}
        for step in steps:
            for eqn in (*step.helpers, step.eqn):
                eqns.setdefault(id(eqn), eqn)
        draft = _Draft(list(eqns.values()), [], [], [], {}, [])
        made = {var for eqn in draft.eqns for var in eqn.outvars}
        seen: set[Var] = set()
        for row, eqn in enumerate(draft.eqns):
            for column, atom in enumerate(eqn.invars):
                if _jaxpr.is_literal(atom):
                    draft.literals[row, column] = atom
                elif atom not in made and atom not in seen:
                    seen.add(atom)
                    self._kind_of(draft, atom).append(atom)
        draft.outputs = [var for step in steps for var in step.eqn.outvars if var in wanted]
        return draft

    def _kind_of(self, draft: _Draft, var: Var) -> list[Var]:
        if var in self._piece_of:
            return draft.pieces
        return draft.consts if var in self._linear.consts else draft.inputs

    def _mark(self, drafts: Sequence[_Draft]) -> None:
        """Fills in where cotangents flow: forwards from trainable pieces, then backwards from the loss."""
        active: set[Var] = set()
        if self._loss is not None:
            active = {var for var, piece in self._piece_of.items() if self._is_trainable(piece)}
            active = active_variables(self._linear.eqns, active, self._differentials)
        receiving = {self._loss} & active
        for draft in reversed(drafts):
            wanted = {var for var in draft.outputs if var in receiving}
            reached = reached_from(draft.eqns, wanted, active, self._differentials) if wanted else set()
            draft.diff_pieces = tuple(var in reached for var in draft.pieces)
            draft.diff_inputs = tuple(var in reached for var in draft.inputs)
            draft.diff_outputs = tuple(var in wanted for var in draft.outputs)
            receiving.update(var for var in draft.inputs if var in reached)

    def _is_trainable(self, piece: Piece) -> bool:
        return self._leaves[piece.leaf].kind is LeafKind.TRAINABLE

    def _signature(self, draft: _Draft) -> Any:
        """Equal for units that one program serves."""
        arguments = (*draft.pieces, *draft.inputs, *draft.consts)
        numbers: dict[Any, int] = {var: number for number, var in enumerate(arguments)}
        rows = []
        for eqn in draft.eqns:
            reads = tuple(-1 if _jaxpr.is_literal(atom) else numbers[atom] for atom in eqn.invars)
            rows.append((self._keys.equation(eqn), reads))
            for var in eqn.outvars:
                numbers[var] = len(numbers)
        kinds = (len(draft.pieces), len(draft.inputs), tuple(self._keys.type(var) for var in arguments))
        masks = (draft.diff_pieces, draft.diff_inputs, draft.diff_outputs)
        return self._keys.intern((tuple(rows), kinds, masks, tuple(numbers[var] for var in draft.outputs)))

    def _varying(self, drafts: Sequence[_Draft]) -> list[_Spot]:
        """The literals in which the units differ."""
        spots = []
        for spot in drafts[0].literals:
            if len({self._keys.array(draft.literals[spot].val) for draft in drafts}) > 1:
                spots.append(spot)
        return spots

    def _program(self, draft: _Draft, varying: list[_Spot]) -> Program:
        spots = [draft.literals[spot] for spot in varying]
        code = _Code(draft, varying)
        differentiable = any(draft.diff_pieces) or any(draft.diff_inputs)
        return Program(
            index=len(self.programs),
            piece_avals=tuple(_jaxpr.struct_of(var) for var in draft.pieces),
            input_avals=tuple(_jaxpr.struct_of(var) for var in draft.inputs),
            operand_avals=tuple(_jaxpr.struct_of(atom) for atom in (*draft.consts, *spots)),
            output_avals=tuple(_jaxpr.struct_of(var) for var in draft.outputs),
            diff_pieces=draft.diff_pieces,
            diff_inputs=draft.diff_inputs,
            diff_outputs=draft.diff_outputs,
            forward=code.forward,
            vjp=code.vjp if differentiable else None,
            forward_vjp=code.forward_vjp if differentiable else None,
        )

    def _unit(self, index: int, draft: _Draft, program: int, varying: list[_Spot]) -> Unit:
        consts = [self._operand(self._linear.consts[var], var) for var in draft.consts]
        literals = [self._operand(draft.literals[spot].val, draft.literals[spot]) for spot in varying]
        pieces = tuple(self._piece_of[var] for var in draft.pieces)
        flops = sum(flops_of(eqn) for eqn in draft.eqns)
        return Unit(
            index=index,
            name=unit_name(self._leaves, pieces, index),
            program=program,
            pieces=pieces,
            inputs=tuple(self.value_id(var) for var in draft.inputs),
            operands=(*consts, *literals),
            outputs=tuple(self.value_id(var) for var in draft.outputs),
            flops=flops,
            backward_flops=3 * flops if any(draft.diff_outputs) else 0,  # the forward again, and two products for each
        )

    def _operand(self, value: Any, atom: Atom) -> int:
        """One operand for equal arrays, whoever closed over them."""
        key = (self._keys.array(value), self._keys.type(atom))
        if key not in self._operand_ids:
            self._operand_ids[key] = len(self.operands)
            plain = not jax.dtypes.issubdtype(atom.aval.dtype, jax.dtypes.extended)
            self.operands.append(np.asarray(value, atom.aval.dtype) if plain else value)
        return self._operand_ids[key]


class _Code:
    """The functions of a program, over the equations of the first unit that has it."""

    def __init__(self, draft: _Draft, varying: Sequence[_Spot]) -> None:
        self._draft = draft
        self._eqns = _with_operands(draft.eqns, varying)
        self._operands: list[Var] = [*draft.consts, *(self._eqns[row].invars[column] for row, column in varying)]
        wanted = {var for var, diff in zip(draft.outputs, draft.diff_outputs, strict=True) if diff}
        self._wanted = [var for var in draft.outputs if var in wanted]
        by_piece = [var for var, diff in zip(draft.pieces, draft.diff_pieces, strict=True) if diff]
        by_input = [var for var, diff in zip(draft.inputs, draft.diff_inputs, strict=True) if diff]
        self._by = (*by_piece, *by_input)
        self._diff_eqns = _jaxpr.needed(self._eqns, wanted)
        differentiated = set(map(id, self._diff_eqns))
        self._rest = [eqn for eqn in self._eqns if id(eqn) not in differentiated]  # side effects are here
        read = {atom for eqn in self._rest for atom in eqn.invars if not _jaxpr.is_literal(atom)}.union(draft.outputs)
        made = [var for eqn in self._diff_eqns for var in eqn.outvars]
        self._shared = [var for var in made if var in read and var not in wanted]

    def forward(self, pieces: Sequence[Any], inputs: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
        env = self._bound(pieces, inputs, operands)
        _jaxpr.run(self._eqns, env)
        return [env[var] for var in self._draft.outputs]

    def forward_vjp(
        self,
        pieces: Sequence[Any],
        inputs: Sequence[Any],
        operands: Sequence[Any],
        policy: Callable[..., Any] | None = None,
    ) -> tuple[list[Any], Callable[..., Any]]:
        """What is differentiated is traced once, for outputs and derivatives: XLA does not see that two are equal."""
        env = self._bound(pieces, inputs, operands)
        pull = self._differentiate(env, policy)
        _jaxpr.run(self._rest, env)
        return [env[var] for var in self._draft.outputs], pull

    def _differentiate(self, env: dict[Var, Any], policy: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Runs the differentiated equations; `env` gets what others need of them."""
        given = dict(env)

        def run(*chosen: Any) -> tuple[list[Any], list[Any]]:
            inner = {**given, **dict(zip(self._by, chosen, strict=True))}
            _jaxpr.run(self._diff_eqns, inner)
            return [inner[var] for var in self._wanted], [inner[var] for var in self._shared]

        if policy is not None:  # forward and backward are programs of their own: nothing to keep apart
            run = jax.checkpoint(run, policy=policy, prevent_cse=False)
        wanted, pull, shared = jax.vjp(run, *(env[var] for var in self._by), has_aux=True)
        env.update(zip((*self._wanted, *self._shared), (*wanted, *shared), strict=True))
        return pull

    def vjp(
        self, pieces: Sequence[Any], inputs: Sequence[Any], operands: Sequence[Any], saved: Sequence[Any]
    ) -> Callable[..., Any]:
        assert not saved, "everything is computed again"
        return self._differentiate(self._bound(pieces, inputs, operands))

    def _bound(self, pieces: Sequence[Any], inputs: Sequence[Any], operands: Sequence[Any]) -> dict[Var, Any]:
        arguments = (*self._draft.pieces, *self._draft.inputs, *self._operands)
        return dict(zip(arguments, (*pieces, *inputs, *operands), strict=True))


def _with_operands(eqns: Sequence[Eqn], varying: Sequence[_Spot]) -> list[Eqn]:
    """The equations with variables where the varying literals stood."""
    changed = list(eqns)
    for row, column in varying:
        invars = list(changed[row].invars)
        invars[column] = _jaxpr.fresh_like(invars[column])
        changed[row] = _jaxpr.with_atoms(changed[row], invars, changed[row].outvars)
    return changed
