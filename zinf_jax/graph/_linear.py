"""A function as one flat list of equations over whole pieces.

Traced, calls inlined, scans over stacked parameters unrolled, stacked leaves tiled, dead code removed. A `Linear` is
what every later step reads; it holds no nesting but that of control flow.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zinf_jax.graph import _jaxpr
from zinf_jax.graph._expand import Expander
from zinf_jax.graph._jaxpr import Atom, Eqn, Var
from zinf_jax.graph._pieces import assemble, in_order, indexed_leaves, used_depths, whole_uses
from zinf_jax.graph._slices import Tape
from zinf_jax.graph._tile import Tiler
from zinf_jax.leaves import Leaf, LeafKind, Piece, with_stacks
from zinf_jax.units import format_bytes


@dataclasses.dataclass
class Linear:
    """A flat program.

    Attributes:
      leaves: With `stack_ndim` filled in.
      pieces: Which piece a variable is.
      outer: Variables of the flattened non-parameter arguments.
      consts: Concrete arrays by variable.
      eqns: In an order in which they can run.
      results: Flattened results: variables made by equations, or outer ones.
      out_tree: Their tree.
      warnings: What could not be sliced.
    """

    leaves: tuple[Leaf, ...]
    pieces: dict[Var, Piece]
    outer: tuple[Var, ...]
    consts: dict[Var, Any]
    eqns: list[Eqn]
    results: tuple[Var, ...]
    out_tree: Any
    warnings: list[str]


def linearize(
    fn: Callable[..., Any],
    params: Any,
    leaves: Sequence[Leaf],
    args: Sequence[Any],
    *,
    keep_custom: bool,
    stacks: Mapping[int, int] | None,
) -> Linear:
    """Traces `fn(params, *args)` and flattens it.

    Args:
      keep_custom: Leave custom_jvp/custom_vjp equations whole (their rules matter).
      stacks: `stack_ndim` by leaf, where it is settled; None to find it.

    Raises:
      CutError: a side effect that cannot be repeated or reordered.
    """
    traced, arrays = _trace(fn, params, leaves, args)
    tape = Tape()
    leading = traced.block.invars[: len(arrays)]
    invars = [tape.add_piece((leaf.index, ()), var.aval) for leaf, var in zip(arrays, leading, strict=True)]
    outer = [_jaxpr.fresh_like(var) for var in traced.block.invars[len(arrays) :]]
    for var in outer:
        tape.add_outer(var)
    expander = Expander(tape, keep_custom=keep_custom)
    results = expander.run(traced.block, [*invars, *outer])
    results = _copied(tape, results, outer)
    tape.eqns = _live(tape, tape.eqns, results)
    depths = dict(stacks) if stacks is not None else {**indexed_leaves(tape), **used_depths(tape)}
    env = Tiler(tape, depths).run()
    results = _copied(tape, [_jaxpr.lookup(env, atom) for atom in results], outer)
    tape.eqns = _live(tape, tape.eqns, results)
    warnings = [*dict.fromkeys(expander.warnings), *_whole_warnings(tape, depths, leaves)]
    made, env = assemble(tape, depths)
    eqns = in_order(tape, [*made, *(_replaced(eqn, env) for eqn in tape.eqns)])
    eqns = _live(tape, eqns, results)
    stacked = with_stacks(leaves, depths)
    pieces = {
        var: Piece(leaf, _flat_index(stacked[leaf], prefix))
        for var, (leaf, prefix) in tape.pieces.items()
        if len(prefix) == depths.get(leaf, 0)
    }
    return Linear(stacked, pieces, tuple(outer), tape.consts, eqns, tuple(results), traced.out_tree, warnings)


def _trace(
    fn: Callable[..., Any], params: Any, leaves: Sequence[Leaf], args: Sequence[Any]
) -> tuple[_jaxpr.Traced, list[Leaf]]:
    """The function over the data of its array leaves, and those leaves."""
    flat_params, treedef = jax.tree.flatten(params)
    assert len(flat_params) == len(leaves), "leaves and params differ"
    arrays = [leaf for leaf in leaves if leaf.kind is not LeafKind.STATIC]

    def on_data(data: Sequence[Any], rest: Sequence[Any]) -> Any:
        full = list(flat_params)
        for leaf, value in zip(arrays, data, strict=True):
            full[leaf.index] = value if leaf.key_impl is None else jax.random.wrap_key_data(value, impl=leaf.key_impl)
        return fn(jax.tree.unflatten(treedef, full), *rest)

    structs = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=leaf.weak_type) for leaf in arrays]
    return _jaxpr.trace(on_data, structs, list(args)), arrays


def _copied(tape: Tape, results: Sequence[Atom], outer: Sequence[Var]) -> list[Var]:
    """Each result that no equation makes (a literal, a constant, a parameter) gets an equation that copies it."""
    copied = []
    for atom in results:
        made = not _jaxpr.is_literal(atom) and (atom in outer or tape.maker(atom) is not None)
        copied.append(atom if made else tape.apply("copy", jnp.copy, [atom]))
    return copied


def _live(tape: Tape, eqns: Sequence[Eqn], results: Iterable[Any]) -> list[Eqn]:
    """The equations that a result or a side effect needs."""
    made = {var for eqn in eqns for var in eqn.outvars}
    unmade = [atom for atom in dict.fromkeys(results) if atom not in made]
    elements = [maker for atom in unmade if (maker := tape.maker(atom)) is not None]
    return _jaxpr.needed(in_order(tape, [*eqns, *elements]), results, effects=True)


def _replaced(eqn: Eqn, env: Mapping[Var, Atom]) -> Eqn:
    if not any(atom in env for atom in variables(eqn.invars)):
        return eqn
    return _jaxpr.with_atoms(eqn, [_jaxpr.lookup(env, atom) for atom in eqn.invars], eqn.outvars)


def _whole_warnings(tape: Tape, depths: Mapping[int, int], leaves: Sequence[Leaf]) -> list[str]:
    warnings = []
    for index, eqn in sorted(whole_uses(tape, dict(depths)).items()):
        leaf = leaves[index]
        num_bytes = leaf.size * leaf.dtype.itemsize
        warnings.append(
            f"stacked leaf {leaf.name} ({format_bytes(num_bytes)}) is used outside its scan by {_jaxpr.name_of(eqn)}, "
            f"which cannot be done slice by slice: the unit that does it reads all of the leaf"
        )
    return warnings


def _flat_index(leaf: Leaf, prefix: Sequence[int]) -> int:
    index = 0
    for position, length in zip(prefix, leaf.shape[: leaf.stack_ndim], strict=True):
        index = index * length + position
    assert index < max(1, math.prod(leaf.shape[: leaf.stack_ndim]))
    return index


def variables(atoms: Iterable[Atom]) -> list[Var]:
    return [atom for atom in atoms if not _jaxpr.is_literal(atom)]
