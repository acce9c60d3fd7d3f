"""Casts of parameters, taken out of the programs that read them.

A model that keeps its weights in 16 bits and multiplies in 32 casts every matrix in every program that reads it: in
forward, in backward, and again for each micro-batch. Made by a program of their own, the casts are made once for all
micro-batches of a pass, and while the program before still runs.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from zinf_jax.graph import _jaxpr
from zinf_jax.graph._jaxpr import Eqn, Var
from zinf_jax.graph.types import Program

_PRODUCTS = ("dot_general", "conv_general_dilated")


@dataclasses.dataclass(frozen=True)
class Cast:
    """A parameter piece, by its place among a program's, in a wider dtype."""

    piece: int
    dtype: np.dtype


def parameter_casts(program: Program) -> tuple[Cast, ...]:
    """The casts to a wider dtype that a program's forward multiplies with.

    Those that something else reads are not among them: XLA makes a lookup of some rows of the lookup of their cast.
    """
    avals = (list(program.piece_avals), list(program.input_avals), list(program.operand_avals))
    block = _jaxpr.flat(_jaxpr.trace(program.forward, *avals).block)
    places = _places(block, len(program.piece_avals))
    read_otherwise = {atom for atom in block.outvars if not _jaxpr.is_literal(atom)}
    for eqn in block.eqns:
        if eqn.primitive.name not in _PRODUCTS:
            read_otherwise.update(atom for atom in eqn.invars if not _jaxpr.is_literal(atom))
    found = [_cast_of(eqn, places) for eqn in block.eqns if eqn.outvars[0] not in read_otherwise]
    return tuple(dict.fromkeys(cast for cast in found if cast is not None))


def given_casts(function: Callable[..., Any], casts: Sequence[Cast]) -> Callable[..., Any]:
    """A function of (pieces, ...) as one of (pieces, cast pieces, ...): it reads a cast instead of making it.

    Its results are the same. What has a gradient is still the piece, in the piece's dtype: derivatives are in the
    function, and the casts are taken out of them too.

    Args:
      function: Takes a list of pieces first, and can be traced.
      casts: What the second argument will hold.
    """

    def call(pieces: Sequence[Any], cast_pieces: Sequence[Any], *rest: Any) -> Any:
        if not casts:
            return function(pieces, *rest)
        traced = _jaxpr.trace(function, list(pieces), *rest)
        block = _jaxpr.flat(traced.block)
        places, made = _places(block, len(pieces)), dict(zip(casts, cast_pieces, strict=True))
        env: dict[Any, Any] = dict(block.consts)
        env.update(zip(block.invars, jax.tree.leaves((list(pieces), *rest)), strict=True))
        for eqn in block.eqns:
            cast = _cast_of(eqn, places)
            if cast in made:
                env[eqn.outvars[0]] = made[cast]
            else:
                _jaxpr.run([eqn], env)
        return jax.tree.unflatten(traced.out_tree, [_jaxpr.value_of(env, atom) for atom in block.outvars])

    return call


def _places(block: _jaxpr.Block, num_pieces: int) -> dict[Var, int]:
    return {var: index for index, var in enumerate(block.invars[:num_pieces])}


def _cast_of(eqn: Eqn, places: dict[Var, int]) -> Cast | None:
    """The cast of a piece that an equation is, if it is one."""
    if eqn.primitive.name != "convert_element_type" or _jaxpr.is_literal(eqn.invars[0]):
        return None
    piece, result = places.get(eqn.invars[0]), eqn.outvars[0].aval
    if piece is None or result.dtype.itemsize <= eqn.invars[0].aval.dtype.itemsize:
        return None
    return Cast(piece, np.dtype(result.dtype))
