"""What an optax update depends on, read from its jaxpr: the ground of the generic path.

    scalars of the step        from small global state alone (counts, schedules, bias corrections): once per step
    groups of leaves           connected through what depends on what: usually one leaf each; all leaves where a global
                               norm stands inside
    elementwise                each element of a leaf depends on that element and on scalars only: any range will do

Pure: abstract values in, blocks of equations out.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp

from zinf_jax.graph import _jaxpr
from zinf_jax.graph._jaxpr import Atom, Block, Eqn, Var

# Primitives whose result's element depends on the same element of each operand (or on a scalar operand).
_ELEMENTWISE = frozenset((
    "abs", "acos", "acosh", "add", "and", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil", "clamp",
    "convert_element_type", "copy", "copy_p", "cos", "cosh", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2",
    "expm1", "floor", "ge", "gt", "integer_pow", "is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min",
    "mul", "ne", "neg", "nextafter", "not", "or", "pow", "reduce_precision", "rem", "round", "rsqrt", "select_n",
    "sign", "sin", "sinh", "sqrt", "square", "sub", "tan", "tanh", "xor",
))  # fmt: skip


def inline(block: Block) -> Block:
    """The block without calls: the bodies of jit, remat and custom rules in their place."""
    eqns: list[Eqn] = []
    consts = list(block.consts)
    alias: dict[Var, Atom] = {}

    def emit(eqn: Eqn) -> None:
        eqn = _jaxpr.with_atoms(eqn, [_jaxpr.lookup(alias, atom) for atom in eqn.invars], eqn.outvars)
        body = _jaxpr.inlined_body(eqn, custom=True)
        if body is None:
            eqns.append(eqn)
            return
        consts.extend(body.consts)
        results = _jaxpr.instantiate(body, eqn.invars, emit)
        alias.update((var, _jaxpr.lookup(alias, atom)) for var, atom in zip(eqn.outvars, results, strict=True))

    for eqn in block.eqns:
        emit(eqn)
    outvars = tuple(_jaxpr.lookup(alias, atom) for atom in block.outvars)
    return Block(block.invars, outvars, tuple(eqns), tuple(dict(consts).items()))


def dependencies(block: Block) -> list[frozenset[int]]:
    """For each output, the positions of the inputs that it depends on. Exact inside cond, coarse in loops."""
    found: dict[Var, frozenset[int]] = {var: frozenset([i]) for i, var in enumerate(block.invars)}

    def of(atom: Atom) -> frozenset[int]:
        return frozenset() if _jaxpr.is_literal(atom) else found.get(atom, frozenset())

    for eqn in block.eqns:
        inputs = [of(atom) for atom in eqn.invars]
        branches = _jaxpr.branches_of(eqn)
        if branches is None:
            everything = frozenset().union(*inputs)
            found.update((var, everything) for var in eqn.outvars)
            continue
        results = [inputs[0]] * len(eqn.outvars)
        for branch in branches:
            for k, positions in enumerate(dependencies(branch)):
                results[k] = results[k].union(*(inputs[1 + p] for p in positions))
        found.update(zip(eqn.outvars, results, strict=True))
    return [of(atom) for atom in block.outvars]


@dataclasses.dataclass(frozen=True)
class Early:
    """A block cut in two.

    Attributes:
      scalars: (early inputs) -> scalars that depend on them alone.
      rest: (inputs, scalars) -> outputs of the block.
    """

    scalars: Block
    rest: Block


def hoist_scalars(block: Block, early: Iterable[int]) -> Early:
    """Moves the scalar equations that depend only on inputs at positions `early` (and constants) to the front."""
    known = {block.invars[i] for i in early}
    first: list[Eqn] = []
    rest: list[Eqn] = []
    made: set[Var] = set()
    available = known | {var for var, _ in block.consts}
    for eqn in block.eqns:
        inputs_known = all(_jaxpr.is_literal(atom) or atom in available for atom in eqn.invars)
        scalar = all(math.prod(var.aval.shape) == 1 for var in eqn.outvars)
        if inputs_known and scalar and not eqn.effects:
            first.append(eqn)
            made.update(eqn.outvars)
            available.update(eqn.outvars)
        else:
            rest.append(eqn)
    read = {atom for eqn in rest for atom in eqn.invars if not _jaxpr.is_literal(atom)}
    read.update(atom for atom in block.outvars if not _jaxpr.is_literal(atom))
    crossing = tuple(var for eqn in first for var in eqn.outvars if var in read and var in made)
    scalars = Block(tuple(block.invars[i] for i in early), crossing, tuple(first), block.consts)
    return Early(scalars, Block((*block.invars, *crossing), block.outvars, tuple(rest), block.consts))


def is_elementwise(block: Block, shape: tuple[int, ...]) -> bool:
    """Whether each element of every output depends on that element of the inputs of `shape`, and on scalars.

    False for a scalar `shape`: its values could not be told from true scalars.
    """
    if not shape or any(value.shape != () for _, value in block.consts if hasattr(value, "shape")):
        return False
    if any(var.aval.shape not in (shape, ()) for var in block.invars):
        return False
    for eqn in block.eqns:
        if any(var.aval.shape != shape for var in eqn.outvars):
            return False
        shapes = [atom.aval.shape for atom in eqn.invars]
        if eqn.primitive.name == "broadcast_in_dim":
            if shapes != [()]:
                return False
        elif eqn.primitive.name not in _ELEMENTWISE or any(s not in (shape, ()) for s in shapes):
            return False
    return all(atom.aval.shape == shape for atom in block.outvars)


def at_size(block: Block, size: int) -> Callable[..., list[Any]]:
    """An elementwise block as a function of vectors of another length (and of the same scalars)."""

    def run(*args: Any) -> list[Any]:
        env: dict[Var, Any] = dict(block.consts)
        env.update(zip(block.invars, args, strict=True))

        def read(atom: Atom) -> Any:
            return atom.val if _jaxpr.is_literal(atom) else env[atom]

        for eqn in block.eqns:
            values = [read(atom) for atom in eqn.invars]
            if eqn.primitive.name == "broadcast_in_dim":
                env[eqn.outvars[0]] = jnp.broadcast_to(values[0], (size,))
            else:
                env.update(zip(eqn.outvars, _jaxpr.bind(eqn, values), strict=True))
        return [jnp.broadcast_to(read(atom), (size,)) for atom in block.outvars]

    return run


@dataclasses.dataclass(frozen=True)
class Structure:
    """How the leaves of an optimizer's state hang together with those of the parameters.

    Attributes:
      globals: Positions of state leaves that depend on no parameter and no gradient.
      groups: (parameter positions, state positions), ordered by the first parameter.
    """

    globals: tuple[int, ...]
    groups: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


def structure_of(
    depends: Sequence[frozenset[int]], param_shapes: Sequence[tuple[int, ...]], state_shapes: Sequence[tuple[int, ...]]
) -> Structure:
    """Groups from the dependencies of (new params, new state) on (params, gradients, state).

    A state leaf that only ever copies itself, has the shape of a parameter and is read by that one alone (an anchor, a
    copy of the first weights) belongs to the parameter.
    """
    num = len(param_shapes)
    shared = set(range(len(state_shapes)))
    while True:
        outside = {k for k in shared if any(p < 2 * num or p - 2 * num not in shared for p in depends[num + k])}
        if not outside:
            break
        shared -= outside
    for k in sorted(shared):
        readers = [i for i in range(num) if 2 * num + k in depends[i]]
        large = math.prod(state_shapes[k]) > 1
        if large and len(readers) == 1 and state_shapes[k] == param_shapes[readers[0]]:
            shared.discard(k)
    parent = list(range(num + len(state_shapes)))

    def root(node: int) -> int:
        while parent[node] != node:
            node = parent[node]
        return node

    for output, positions in enumerate(depends):
        if output >= num and output - num in shared:
            continue
        for p in positions:
            node = p % num if p < 2 * num else p - num
            if node < num or node - num not in shared:
                low, high = sorted((root(output), root(node)))
                parent[high] = low
    members: dict[int, tuple[list[int], list[int]]] = {}
    for i in range(num):
        members.setdefault(root(i), ([], []))[0].append(i)
    for k in range(len(state_shapes)):
        if k not in shared:
            members.setdefault(root(num + k), ([], []))[1].append(k)
    return Structure(tuple(sorted(shared)), tuple((tuple(ps), tuple(ks)) for ps, ks in members.values()))


def select(block: Block, positions: Sequence[int]) -> tuple[Block, tuple[int, ...]]:
    """The block with the outputs at `positions` only (ascending), and the positions of the inputs it still takes."""
    assert list(positions) == sorted(positions)
    wanted = [k in set(positions) for k in range(len(block.outvars))]
    smaller, used = _jaxpr.restrict(block, wanted)
    return smaller, tuple(i for i, keep in enumerate(used) if keep)


def key_of(block: Block, keys: Any) -> Any:
    """Equal for blocks that compute the same (see `graph/_equal.py`); constants and literals by content."""
    number: dict[Var, int] = {}
    for var in (*(var for var, _ in block.consts), *block.invars):
        number[var] = len(number)

    def atom_key(atom: Atom) -> Any:
        return ("literal", keys.array(atom.val)) if _jaxpr.is_literal(atom) else number[atom]

    lines = []
    for eqn in block.eqns:
        line = (keys.equation(eqn), tuple(atom_key(atom) for atom in eqn.invars))
        for var in eqn.outvars:
            number[var] = len(number)
        lines.append(line)
    consts = tuple(keys.array(value) for _, value in block.consts)
    return (
        consts,
        tuple(keys.type(var) for var in block.invars),
        tuple(lines),
        tuple(atom_key(atom) for atom in block.outvars),
    )
