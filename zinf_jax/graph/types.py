"""What cutting produces: a linear sequence of units over named values. Pure data, no device, no weights.

A *value* is an array that crosses from one unit to another, or enters from outside (a batch leaf, a leaf of
`state`, the rng). Values are numbered; the numbers are the only link between units.

    program(pieces..., inputs..., operands...) -> outputs...

Several units share one `Program` when they compute the same thing from other pieces, inputs and operands.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from zinf_jax.leaves import Leaf, Piece

ValueId = int


@dataclasses.dataclass(frozen=True)
class Program:
    """A computation shared by structurally equal units.

    All functions take and return flat lists of arrays and can be traced. `None` never occurs in them.

    Attributes:
      index: Position in `UnitGraph.programs`.
      piece_avals: What each parameter piece looks like: `Leaf.piece_shape` and `Leaf.dtype` (key data, not keys).
      input_avals, operand_avals, output_avals: Likewise.
      diff_pieces: Which pieces get a gradient.
      diff_inputs: Which inputs get a cotangent.
      diff_outputs: Which outputs receive a cotangent. An output without one stays without: never a dense zero.
      forward: (pieces, inputs, operands) -> outputs.
      vjp: (pieces, inputs, operands, saved) -> vector-Jacobian product of the outputs in `diff_outputs`, as `jax.vjp`
        gives it. Computes again what of the unit's forward is not in `saved`. None where nothing is differentiated.
      forward_vjp: (pieces, inputs, operands, `jax.checkpoint` policy) -> (outputs, vector-Jacobian product): both in
        one. None where nothing is differentiated, or they are apart already.
    """

    index: int
    piece_avals: tuple[jax.ShapeDtypeStruct, ...]
    input_avals: tuple[jax.ShapeDtypeStruct, ...]
    operand_avals: tuple[jax.ShapeDtypeStruct, ...]
    output_avals: tuple[jax.ShapeDtypeStruct, ...]
    diff_pieces: tuple[bool, ...]
    diff_inputs: tuple[bool, ...]
    diff_outputs: tuple[bool, ...]
    forward: Callable[[Sequence[Any], Sequence[Any], Sequence[Any]], list[Any]] = dataclasses.field(repr=False)
    vjp: Callable[..., Callable[..., Any]] | None = dataclasses.field(repr=False)
    forward_vjp: Callable[..., tuple[list[Any], Callable[..., Any]]] | None = dataclasses.field(repr=False)

    @property
    def differentiable(self) -> bool:
        return self.vjp is not None

    def backward(
        self,
        pieces: Sequence[Any],
        inputs: Sequence[Any],
        operands: Sequence[Any],
        saved: Sequence[Any],
        cotangents: Sequence[Any],
    ) -> tuple[list[Any], list[Any]]:
        """What `gradients` gives, from what the forward read and saved."""
        assert self.vjp is not None
        return self.gradients(self.vjp(pieces, inputs, operands, saved), cotangents)

    def gradients(self, pull: Callable[..., Any], cotangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Gradients of the pieces in `diff_pieces` and cotangents of the inputs in `diff_inputs`.

        Args:
          pull: A vector-Jacobian product.
          cotangents: Of the outputs in `diff_outputs`.
        """
        found = pull(list(cotangents))
        num_pieces = sum(self.diff_pieces)
        return list(found[:num_pieces]), list(found[num_pieces:])


@dataclasses.dataclass(frozen=True)
class Unit:
    """One use of a program.

    Attributes:
      index: Position in the sequence.
      name: For people: derived from the leaves that it reads, such as `block_3`.
      program: Index into `UnitGraph.programs`.
      pieces: The parameter pieces that it reads, in the order of the program's arguments.
      inputs: Values that it reads.
      operands: Indices into `UnitGraph.operands`: constants, and literals in which equal units differ.
      outputs: Values that it makes.
      saved: Those of its outputs that its own backward reads: nobody else has to.
      flops, backward_flops: Estimated FLOPs of the two programs (matrix products and convolutions), what backward
        computes again included.
    """

    index: int
    name: str
    program: int
    pieces: tuple[Piece, ...]
    inputs: tuple[ValueId, ...]
    operands: tuple[int, ...]
    outputs: tuple[ValueId, ...]
    saved: tuple[ValueId, ...] = ()
    flops: int = 0
    backward_flops: int = 0


@dataclasses.dataclass(frozen=True)
class UnitGraph:
    """A function of (params, outer inputs), cut.

    Attributes:
      leaves: The parameter table with `stack_ndim` filled in.
      units, programs: See there. Units in execution order.
      values: Aval of each value, by id.
      outer_inputs: Value ids of the flattened non-parameter arguments (state, batch, rng ...), in order; an argument
        that nothing reads has an id too.
      operands: Arrays (concrete, small or closed-over by the user), referred to by index.
      results: Value ids of the flattened outputs of the function: the loss first. A result can be an outer input,
        or one value can stand twice.
      out_tree: Tree of the function's whole output (loss | (loss, aux) | Weighted ...), leaves in `results` order.
      trained_pieces: Pieces that get a gradient in at least one unit. A trainable piece not in it has a zero gradient.
      backward: Indices of the units that run in backward, in the order in which they run (descending).
      warnings: What a user should know: leaves that could not be sliced and their bytes.
    """

    leaves: tuple[Leaf, ...]
    units: tuple[Unit, ...]
    programs: tuple[Program, ...]
    values: tuple[jax.ShapeDtypeStruct, ...]
    outer_inputs: tuple[ValueId, ...]
    operands: tuple[Any, ...] = dataclasses.field(repr=False)
    results: tuple[ValueId, ...]
    out_tree: Any = dataclasses.field(repr=False)
    trained_pieces: frozenset[Piece]
    backward: tuple[int, ...]
    warnings: tuple[str, ...] = ()

    @property
    def loss(self) -> ValueId:
        return self.results[0]
