"""The only reader of equation parameters and maker of jaxprs.

Everything here works on both ends of the supported JAX range (0.10 to 0.12). What differs between them, and is hidden
here: scan's `num_consts`/`num_carry` became `ft_in`; parameters hold a `Jaxpr` where a `ClosedJaxpr` was; a jaxpr
without debug info warns; variables take other constructor arguments.

A `Block` is a jaxpr in our own words: equations over JAX's variables, constants beside their variables, nothing hidden.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.extend import core as jex_core
from jax.extend.core import Literal
from jax.interpreters import partial_eval

if TYPE_CHECKING:
    Var = Any  # JAX's annotations know nothing of shapes
else:
    from jax.extend.core import Var

Atom = Any  # Var | Literal
Eqn = Any  # jex_core.JaxprEqn

# Primitives that only name or bracket a computation: cutting looks through them. `remat` is here because a unit is
# recomputed in backward anyway.
_INLINED = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "core_closed_call": "call_jaxpr",
    "call": "call_jaxpr",
    "named_call": "call_jaxpr",
    "remat_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
}
_CUSTOM = {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr", "custom_vjp_call_jaxpr": "fun_jaxpr"}


@dataclasses.dataclass(frozen=True)
class Block:
    """Equations with their arguments, results and constants (array by variable)."""

    invars: tuple[Var, ...]
    outvars: tuple[Atom, ...]
    eqns: tuple[Eqn, ...]
    consts: tuple[tuple[Var, Any], ...] = ()


@dataclasses.dataclass(frozen=True)
class Scan:
    """What a scan equation says, the same for every JAX version. Arguments are (consts, carry, xs)."""

    body: Block
    length: int
    reverse: bool
    num_consts: int
    num_carry: int


@dataclasses.dataclass(frozen=True)
class Traced:
    """A traced function: `block` over the flattened arguments, and the tree of the result."""

    block: Block
    out_tree: Any


def trace(fn: Callable[..., Any], *args: Any) -> Traced:
    """Traces `fn` on (pytrees of) abstract values."""
    closed, out_shape = jax.make_jaxpr(fn, return_shape=True)(*args)
    return Traced(open_block(closed), jax.tree.structure(out_shape))


def open_block(jaxpr: Any) -> Block:
    """A `Jaxpr` or `ClosedJaxpr`, with or without constants inside, as a `Block`."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    consts = tuple(getattr(jaxpr, "consts", ()) or ())
    constvars = tuple(inner.constvars)
    assert len(constvars) == len(consts), "a jaxpr with unbound constants"
    bound = tuple(zip(constvars, consts, strict=True))
    return Block(tuple(inner.invars), tuple(inner.outvars), tuple(inner.eqns), bound)


def close_block(block: Block) -> Any:
    """A `ClosedJaxpr` of a block, for those who need JAX's own (dce, jaxpr_as_fun)."""
    constvars = [var for var, _ in block.consts]
    return jex_core.ClosedJaxpr(
        _make_jaxpr(constvars, block.invars, block.outvars, block.eqns), [value for _, value in block.consts]
    )


def _make_jaxpr(constvars: Sequence[Var], invars: Sequence[Var], outvars: Sequence[Atom], eqns: Sequence[Eqn]) -> Any:
    effects: frozenset[Any] = frozenset().union(*(eqn.effects for eqn in eqns))
    info = jex_core.DebugInfo("zinf", "unit", ("",) * (len(constvars) + len(invars)), ("",) * len(outvars))
    return jex_core.Jaxpr(list(constvars), list(invars), list(outvars), list(eqns), effects, info)


def restrict(block: Block, wanted: Sequence[bool]) -> tuple[Block, tuple[bool, ...]]:
    """The block with only the wanted outputs, dead code and dead arguments removed, inside scans as well.

    Returns:
      The block (its outputs are the wanted ones) and which of the arguments it still takes. Constants that are no
      longer read are dropped.
    """
    constvars = [var for var, _ in block.consts]
    jaxpr = _make_jaxpr([], [*constvars, *block.invars], block.outvars, block.eqns)
    smaller, used = partial_eval.dce_jaxpr(jaxpr, list(wanted), instantiate=False)
    num_consts = len(constvars)
    kept = [pair for pair, keep in zip(block.consts, used[:num_consts], strict=True) if keep]
    invars = tuple(smaller.invars)
    consts = tuple((var, value) for var, (_, value) in zip(invars[: len(kept)], kept, strict=True))
    opened = Block(invars[len(kept) :], tuple(smaller.outvars), tuple(smaller.eqns), consts)
    return opened, tuple(used[num_consts:])


def new_var(aval: Any) -> Var:
    return Var(aval)


def fresh_like(var: Any) -> Var:
    """A new variable of the same type, also for a result that nobody reads."""
    return Var(var.aval)


def is_literal(atom: Atom) -> bool:
    return isinstance(atom, Literal)


def literal(value: Any, aval: Any) -> Literal:
    return Literal(value, aval)


def aval_of(array: Any) -> Any:
    """The abstract value that JAX gives an array or a Python scalar."""
    return jax.core.get_aval(array) if hasattr(jax.core, "get_aval") else jax.typeof(array)


def shaped(shape: Sequence[int], dtype: Any, weak_type: bool = False) -> Any:
    """The abstract value of an array."""
    return jax.core.ShapedArray(tuple(shape), dtype, weak_type=weak_type)


def struct_of(atom: Atom) -> jax.ShapeDtypeStruct:
    aval = atom.aval
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def bytes_of(atom: Atom) -> int:
    """Bytes of the value; a typed PRNG key counts as 16."""
    aval = atom.aval
    itemsize = 16 if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended) else np.dtype(aval.dtype).itemsize
    return math.prod(aval.shape) * itemsize


def is_floating(atom: Atom) -> bool:
    return jax.dtypes.issubdtype(atom.aval.dtype, np.floating) or jax.dtypes.issubdtype(
        atom.aval.dtype, np.complexfloating
    )


def name_of(eqn: Eqn) -> str:
    """The primitive's name, with the user's function name where the equation holds one."""
    primitive = eqn.primitive.name
    given = eqn.params.get("name")
    if given is None and primitive in _CUSTOM:
        info = getattr(open_jaxpr(eqn.params[_CUSTOM[primitive]]), "debug_info", None)
        given = getattr(info, "func_name", None) or getattr(info, "func_src_info", None)
    return f"{primitive}[{given}]" if given else primitive


def open_jaxpr(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


def inlined_body(eqn: Eqn, *, custom: bool = False) -> Block | None:
    """The body of an equation that only calls: jit, closed_call, remat. With `custom`, of custom_jvp/vjp as well."""
    key = _INLINED.get(eqn.primitive.name) or (_CUSTOM.get(eqn.primitive.name) if custom else None)
    if key is None or key not in eqn.params:
        return None
    return open_block(eqn.params[key])


def is_custom(eqn: Eqn) -> bool:
    return eqn.primitive.name in _CUSTOM


def is_custom_vjp(eqn: Eqn) -> bool:
    return eqn.primitive.name.startswith("custom_vjp_call")


def scan_of(eqn: Eqn) -> Scan | None:
    """The parts of a scan equation; None for any other."""
    if eqn.primitive.name != "scan":
        return None
    params = eqn.params
    if "ft_in" in params:
        num_consts, num_carry, _ = (len(part) for part in params["ft_in"].unpack())
    else:
        num_consts, num_carry = params["num_consts"], params["num_carry"]
    return Scan(open_block(params["jaxpr"]), params["length"], params["reverse"], num_consts, num_carry)


def while_of(eqn: Eqn) -> tuple[Block, Block, int, int] | None:
    """(cond, body, number of cond's consts, number of body's consts) of a while equation."""
    if eqn.primitive.name != "while":
        return None
    params = eqn.params
    return (
        open_block(params["cond_jaxpr"]),
        open_block(params["body_jaxpr"]),
        params["cond_nconsts"],
        params["body_nconsts"],
    )


def branches_of(eqn: Eqn) -> tuple[Block, ...] | None:
    """The branches of a cond/switch equation, whose arguments are all but the first of the equation's."""
    return tuple(open_block(branch) for branch in eqn.params["branches"]) if eqn.primitive.name == "cond" else None


def inner_jaxprs(params: Mapping[str, Any]) -> Iterator[Any]:
    """Every jaxpr that stands in an equation's parameters, directly or in tuples."""
    stack = list(params.values())
    while stack:
        value = stack.pop()
        if hasattr(value, "eqns"):
            yield value
        elif isinstance(value, tuple | list):
            stack.extend(value)


def with_atoms(eqn: Eqn, invars: Iterable[Atom], outvars: Iterable[Var]) -> Eqn:
    return eqn.replace(invars=list(invars), outvars=list(outvars))


def instantiate(block: Block, args: Sequence[Atom], emit: Callable[[Eqn], None]) -> list[Atom]:
    """Copies a block's equations with fresh variables onto `args`; returns the atoms of its results.

    The constants of the block are not handled here: their variables are copied as they are (they are free).
    """
    env: dict[Var, Atom] = dict(zip(block.invars, args, strict=True))
    for eqn in block.eqns:
        outs = [fresh_like(var) for var in eqn.outvars]
        emit(with_atoms(eqn, [lookup(env, atom) for atom in eqn.invars], outs))
        env.update(zip(eqn.outvars, outs, strict=True))
    return [lookup(env, atom) for atom in block.outvars]


def append(eqns: list[Eqn], fn: Callable[..., Any], atoms: Sequence[Atom]) -> Atom:
    """Appends the equations of a function with one result, which must not call or close over anything."""
    return instantiate(trace(fn, *(struct_of(atom) for atom in atoms)).block, atoms, eqns.append)[0]


def lookup(env: Mapping[Var, Atom], atom: Atom) -> Atom:
    return atom if isinstance(atom, Literal) else env.get(atom, atom)


def bind(eqn: Eqn, values: Sequence[Any], **changes: Any) -> list[Any]:
    """Runs (or traces) one equation on values, with some of its parameters changed."""
    params = eqn.primitive.get_bind_params({**eqn.params, **changes})
    with eqn.ctx.manager if getattr(eqn, "ctx", None) is not None else contextlib.nullcontext():
        result = eqn.primitive.bind(*values, **params)
    return list(result) if eqn.primitive.multiple_results else [result]


def value_of(env: Mapping[Var, Any], atom: Atom) -> Any:
    return atom.val if isinstance(atom, Literal) else env[atom]


def run(eqns: Sequence[Eqn], env: dict[Var, Any]) -> None:
    """Runs (or traces) equations: `env` holds what they read, and gets what they make."""
    for eqn in eqns:
        env.update(zip(eqn.outvars, bind(eqn, [value_of(env, atom) for atom in eqn.invars]), strict=True))


def flat(block: Block) -> Block:
    """The block with everything that only calls (`inlined_body`) replaced by what it calls."""
    eqns: list[Eqn] = []
    consts = dict(block.consts)

    def emit(block: Block, args: Sequence[Atom]) -> list[Atom]:
        env: dict[Var, Atom] = dict(zip(block.invars, args, strict=True))
        consts.update(block.consts)
        for eqn in block.eqns:
            atoms = [lookup(env, atom) for atom in eqn.invars]
            body = inlined_body(eqn)
            if body is not None:
                outs = emit(body, atoms)
            else:
                outs = [fresh_like(var) for var in eqn.outvars]
                eqns.append(with_atoms(eqn, atoms, outs))
            env.update(zip(eqn.outvars, outs, strict=True))
        return [lookup(env, atom) for atom in block.outvars]

    results = emit(block, block.invars)
    return Block(block.invars, tuple(results), tuple(eqns), tuple(consts.items()))


def evaluate(block: Block, *args: Any) -> list[Any]:
    """Evaluates a block on arrays or tracers."""
    env: dict[Var, Any] = dict(block.consts)
    env.update(zip(block.invars, args, strict=True))
    run(block.eqns, env)
    return [value_of(env, atom) for atom in block.outvars]


def needed(eqns: Sequence[Eqn], wanted: Iterable[Atom], *, effects: bool = False) -> list[Eqn]:
    """The equations that the wanted variables need, and with `effects` those that have any."""
    found, kept = {atom for atom in wanted if not is_literal(atom)}, []
    for eqn in reversed(eqns):
        if any(var in found for var in eqn.outvars) or (effects and eqn.effects):
            found.update(atom for atom in eqn.invars if not is_literal(atom))
            kept.append(eqn)
    return kept[::-1]
