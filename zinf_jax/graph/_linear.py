"""A function as one flat list of equations: traced, calls inlined, dead code removed.

A `Linear` is what every later step reads and rewrites (unrolled scans, tiled reductions); it holds no nesting but that
of control flow. Parameters enter as pieces: variables in `pieces`, before any slicing one per leaf.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zinf_jax.errors import CutError
from zinf_jax.graph import _jaxpr
from zinf_jax.graph._jaxpr import Atom, Block, Eqn, Var
from zinf_jax.leaves import Leaf, LeafKind

# What a piece stands for before stacks are known: leaf and the index so far into its leading dims.
Slot = tuple[int, tuple[int, ...]]


@dataclasses.dataclass
class Linear:
    """A flat program.

    Attributes:
      pieces: Which slot of which leaf a variable is.
      outer: Variables of the flattened non-parameter arguments.
      consts: Concrete arrays by variable.
      eqns: In an order in which they can run.
      results: Flattened results; variables only.
      out_tree: Their tree.
    """

    pieces: dict[Var, Slot]
    outer: tuple[Var, ...]
    consts: dict[Var, Any]
    eqns: list[Eqn]
    results: tuple[Atom, ...]
    out_tree: Any


def linearize(fn: Callable[..., Any], params: Any, leaves: Sequence[Leaf], args: Sequence[Any], keep_custom: bool) -> Linear:
    """Traces `fn(params, *args)`, inlines calls and removes dead code.

    Args:
      keep_custom: Leave custom_jvp/custom_vjp equations whole (their rules matter).

    Raises:
      CutError: a side effect that cannot be repeated or reordered.
    """
    flat_params, treedef = jax.tree.flatten(params)
    assert len(flat_params) == len(leaves), "leaves and params differ"
    arrays = [leaf for leaf in leaves if leaf.kind is not LeafKind.STATIC]

    def on_data(data: Sequence[Any], rest: Sequence[Any]) -> Any:
        full = list(flat_params)
        for leaf, value in zip(arrays, data, strict=True):
            full[leaf.index] = value if leaf.key_impl is None else jax.random.wrap_key_data(value, impl=leaf.key_impl)
        return fn(jax.tree.unflatten(treedef, full), *rest)

    structs = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=leaf.weak_type) for leaf in arrays]
    traced = _jaxpr.trace(on_data, structs, list(args))
    inliner = _Inliner(keep_custom)
    num = len(arrays)
    invars = [_jaxpr.fresh_like(var) for var in traced.block.invars]
    results = inliner.run(traced.block, invars)
    pieces: dict[Var, Slot] = {var: (leaf.index, ()) for leaf, var in zip(arrays, invars, strict=False)}
    linear = Linear(pieces, tuple(invars[num:]), inliner.consts, inliner.eqns, tuple(results), traced.out_tree)
    _name_results(linear)
    remove_dead(linear)
    return linear


class _Inliner:
    def __init__(self, keep_custom: bool) -> None:
        self._keep_custom = keep_custom
        self._const_vars: dict[int, Var] = {}
        self.consts: dict[Var, Any] = {}
        self.eqns: list[Eqn] = []

    def run(self, block: Block, args: Sequence[Atom]) -> list[Atom]:
        env: dict[Var, Atom] = dict(zip(block.invars, args, strict=True))
        env.update((var, self._const(value, var.aval)) for var, value in block.consts)
        for eqn in block.eqns:
            reads = [self._read(env, atom) for atom in eqn.invars]
            custom = not self._keep_custom or not any(_jaxpr.is_floating(atom) for atom in reads)
            body = _jaxpr.inlined_body(eqn, custom=custom)
            if body is not None:
                outs: Sequence[Atom] = self.run(body, reads)
            else:
                _check_effects(eqn)
                outs = [_jaxpr.fresh_like(var) for var in eqn.outvars]
                self.eqns.append(_jaxpr.with_atoms(eqn, reads, outs))
            env.update(zip(eqn.outvars, outs, strict=True))
        return [self._read(env, atom) for atom in block.outvars]

    def _read(self, env: dict[Var, Atom], atom: Atom) -> Atom:
        if _jaxpr.is_literal(atom):
            return self._const(atom.val, atom.aval) if atom.aval.shape else atom
        return env[atom]

    def _const(self, value: Any, aval: Any) -> Var:
        """One variable for one array object, however often it is closed over."""
        if id(value) not in self._const_vars:
            var = self._const_vars[id(value)] = _jaxpr.new_var(aval)
            self.consts[var] = value
        return self._const_vars[id(value)]


def _check_effects(eqn: Eqn) -> None:
    for effect in eqn.effects:
        if type(effect).__name__ != "DebugEffect":
            raise CutError(
                f"equation {_jaxpr.name_of(eqn)} has the side effect {effect}: units run more than once (backward "
                f"recomputes them), so it would happen twice; use unordered jax.debug.print/callback, or return the value"
            )


def _name_results(linear: Linear) -> None:
    """Gives each result that no equation makes (a literal, a constant, a parameter) an equation that copies it."""
    outer, made = set(linear.outer), {var for eqn in linear.eqns for var in eqn.outvars}
    results = []
    for atom in linear.results:
        if _jaxpr.is_literal(atom) or (atom not in outer and atom not in made):
            atom = emit(linear.eqns, jnp.copy, [atom])[0]
        results.append(atom)
    linear.results = tuple(results)


def emit(eqns: list[Eqn], fn: Callable[..., Any], atoms: Sequence[Atom]) -> list[Atom]:
    """Appends the equations of a JAX function on atoms; it must not close over arrays."""
    block = _jaxpr.trace(fn, *(_jaxpr.struct_of(atom) for atom in atoms)).block
    inliner = _Inliner(keep_custom=True)
    results = inliner.run(block, atoms)
    assert not inliner.consts
    eqns.extend(inliner.eqns)
    return results


def remove_dead(linear: Linear) -> None:
    """Drops the equations that neither a result nor a side effect needs."""
    needed: set[Any] = {atom for atom in linear.results if not _jaxpr.is_literal(atom)}
    kept = []
    for eqn in reversed(linear.eqns):
        if eqn.effects or any(var in needed for var in eqn.outvars):
            needed.update(variables(eqn.invars))
            kept.append(eqn)
    linear.eqns = kept[::-1]
    linear.consts = {var: value for var, value in linear.consts.items() if var in needed}


def variables(atoms: Iterable[Atom]) -> list[Var]:
    return [atom for atom in atoms if not _jaxpr.is_literal(atom)]
