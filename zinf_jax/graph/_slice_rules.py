"""How a selection of an equation's output is made from selections of its operands, primitive by primitive.

A rule is a generator: it yields (value, selection) pairs, gets each one's written value sent back, and returns the
written output, or None where the selection cannot be pushed through (the value is then made whole). Scans and
conditionals are in `_slice_control`, random bits in `_slice_random`.
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from zinf_jax.graph import _slice_control
from zinf_jax.graph._slice_random import leading_keys, random_bits
from zinf_jax.graph._values import Known, Node, Out, Pull, Sel, is_exact, sel_shape

if TYPE_CHECKING:
    from zinf_jax.graph._restrict import Writer

Rule = Callable[["Writer", Node, int, Sel], Pull]

# fmt: off
_ELEMENTWISE = frozenset([
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e",
    "bessel_i1e", "bitcast_convert_type", "cbrt", "ceil", "clamp", "clz", "conj", "convert_element_type", "copy",
    "copy_p", "cos", "cosh", "digamma", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor",
    "ge", "gt", "igamma", "igamma_grad_a", "igammac", "imag", "integer_pow", "is_finite", "le", "lgamma", "log",
    "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "nextafter", "not", "or", "polygamma",
    "population_count", "pow", "random_clone", "random_fold_in", "random_gamma_grad", "random_seed", "real",
    "reduce_precision", "regularized_incomplete_beta", "rem", "round", "rsqrt", "select_n", "shift_left",
    "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "stop_gradient",
    "sub", "tan", "tanh", "xor",
])
# fmt: on
_IDENTITY = frozenset({"sharding_constraint", "optimization_barrier"})
_SINGLE = frozenset({"scan", "cond"})  # what only the other outputs need is dropped


def whole_rule(writer: "Writer", ref: Out) -> Pull:
    """Writes the equation that makes `ref`, whole."""
    node, position = ref.node, ref.position
    branch = _slice_control.chosen_branch(node)
    if branch is not None:
        return (yield branch[position], ())
    if isinstance(node, _slice_control.Carry):
        return (yield from _slice_control.carry_rule(writer, node, position))
    if node.name == "slice":
        # A part of its operand, not an equation of its own: layers that differ in the place only share a program then,
        # and nothing is made to be thrown away.
        indexed = writer.largest_indexed
        part = yield from _slice(writer, node, position, ())
        writer.largest_indexed = indexed  # what the init function itself makes whole is no failure to slice
        if part is not None:
            return part
    alone = node.name in _SINGLE and len(node.outs) > 1
    if alone:
        node, position = node.single(position)
    inputs = []
    for operand in node.inputs:
        inputs.append((yield operand, ()))
    outputs = writer.equation(node.eqn, inputs, [out.shape for out in node.outs])
    if not alone:
        for out, value in zip(node.outs, outputs, strict=True):
            writer.remember(out, value)
    return outputs[position]


def slice_rule(writer: "Writer", ref: Out, sel: Sel) -> Pull:
    """Writes a selection of `ref`, or returns None."""
    node = ref.node
    if isinstance(node, _slice_control.Carry):
        return None
    branch = _slice_control.chosen_branch(node)
    if branch is not None:
        return (yield branch[ref.position], sel)
    rule = _RULES.get(node.name)
    return None if rule is None else (yield from rule(writer, node, ref.position, sel))


def _renumber(dim: int, sel: Sel) -> int:
    """Where a kept dim stands after a selection."""
    return dim - sum(1 for other, _, size in sel if size is None and other < dim)


# ---------------------------------------------------------------------------------------------------------------------


def _operand_sel(shape: Sequence[int], out_shape: Sequence[int], sel: Sel) -> Sel:
    """For an operand of an elementwise equation: a scalar is taken whole, a dim of size 1 stands for all."""
    if not shape:
        return ()
    return tuple(
        entry if shape[entry[0]] == out_shape[entry[0]] else (entry[0], 0, None if entry[2] is None else 1)
        for entry in sel
    )


def _elementwise(writer: "Writer", node: Node, position: int, sel: Sel) -> Pull:
    shape = node.outs[position].shape
    if any(operand.shape and len(operand.shape) != len(shape) for operand in node.inputs):
        return None  # a bitcast to another width
    inputs = []
    for operand in node.inputs:
        inputs.append((yield operand, _operand_sel(operand.shape, shape, sel)))
    return writer.node(node, position, sel, inputs)


def _identity(writer: "Writer", node: Node, position: int, sel: Sel) -> Pull:
    return (yield node.inputs[position], sel)


def _broadcast_in_dim(writer: "Writer", node: Node, position: int, sel: Sel) -> Pull:
    if len(node.inputs) != 1:
        return None
    dims = tuple(int(d) for d in node.eqn.params["broadcast_dimensions"])
    operand = node.inputs[0]
    by_dim = {dim: (start, size) for dim, start, size in sel}
    inner = tuple(
        (k, *((by_dim[d]) if operand.shape[k] != 1 else (0, None if by_dim[d][1] is None else 1)))
        for k, d in enumerate(dims)
        if d in by_dim
    )
    value = yield operand, inner
    shape = sel_shape(node.outs[0].shape, sel)
    kept = tuple(_renumber(d, sel) for d in dims if d not in by_dim or by_dim[d][1] is not None)
    result = writer.lax(node, sel, [value], lambda x: jax.lax.broadcast_in_dim(x, shape, kept), (shape, kept))
    writer.note_fill(result, [value])
    return result


def _reshape(writer: "Writer", node: Node, position: int, sel: Sel) -> Pull:
    """Leading dims that a reshape leaves alone, or merges or splits among themselves, can be cut."""
    shape, operand = node.outs[0].shape, node.inputs[0]
    if len(node.inputs) != 1 or node.eqn.params.get("dimensions") is not None:
        return None
    inner = _reshape_sel(operand.shape, shape, sel)
    if inner is None:
        return None
    value = yield operand, inner
    new_shape = sel_shape(shape, sel)
    return writer.lax(node, sel, [value], lambda x: jax.lax.reshape(x, new_shape), new_shape)


def _reshape_sel(shape: Sequence[int], out_shape: Sequence[int], sel: Sel) -> Sel | None:
    if [dim for dim, _, _ in sel] != list(range(len(sel))) or any(size is not None for _, _, size in sel[:-1]):
        return None
    lead = len(sel)
    if tuple(shape[:lead]) == tuple(out_shape[:lead]):
        return sel
    if sel[-1][2] is not None:
        return None
    count = math.prod(out_shape[:lead])
    matching = [k for k in range(len(shape) + 1) if math.prod(shape[:k]) == count]
    if not matching or count == 0:
        return None
    flat = int(np.ravel_multi_index([start for _, start, _ in sel], tuple(out_shape[:lead])))
    where = np.unravel_index(flat, tuple(shape[: matching[0]])) if matching[0] else ()
    return tuple((dim, int(start), None) for dim, start in enumerate(where))


def _squeeze(writer: "Writer", node: Node, position: int, sel: Sel) -> Pull:
    operand = node.inputs[0]
    gone = {d % len(operand.shape) for d in node.eqn.params["dimensions"]}
    kept = [d for d in range(len(operand.shape)) if d not in gone]
    value = yield operand, tuple((kept[dim], start, size) for dim, start, size in sel)
    shape = sel_shape(node.outs[0].shape, sel)
    return writer.lax(node, sel, [value], lambda x: jax.lax.reshape(x, shape), shape)


def _transpose(writer: "Writer", node: Node, position: int, sel: Sel) -> Pull:
    permutation = node.eqn.params["permutation"]
    inner = tuple(sorted((permutation[dim], start, size) for dim, start, size in sel))
    value = yield node.inputs[0], inner
    dropped = {dim for dim, _, size in sel if size is None}
    kept = tuple(_renumber(d, inner) for dim, d in enumerate(permutation) if dim not in dropped)
    return writer.lax(node, sel, [value], lambda x: jax.lax.transpose(x, kept), kept)


def _concatenate(writer: "Writer", node: Node, position: int, sel: Sel) -> Pull:
    axis = node.eqn.params["dimension"]
    along = next((entry for entry in sel if entry[0] == axis), None)
    if along is None:
        inputs = []
        for operand in node.inputs:
            inputs.append((yield operand, sel))
        new_axis = _renumber(axis, sel)
        return writer.lax(node, sel, inputs, lambda *xs: jax.lax.concatenate(xs, new_axis), new_axis)
    start, offset = along[1], 0
    stop = start + (1 if along[2] is None else along[2])
    for operand in node.inputs:
        end = offset + operand.shape[axis]
        if offset <= start and stop <= end:
            return (yield operand, tuple((d, s - offset if d == axis else s, n) for d, s, n in sel))
        offset = end
    return None  # a range over more than one operand


def _stack(writer: "Writer", node: Node, position: int, sel: Sel) -> Pull:
    axis = node.eqn.params["axis"]
    along = next((entry for entry in sel if entry[0] == axis), None)
    inner = tuple((dim - (dim > axis), start, size) for dim, start, size in sel if dim != axis)
    if along is None:
        inputs = []
        for operand in node.inputs:
            inputs.append((yield operand, inner))
        shape, new_axis = sel_shape(node.outs[0].shape, sel), _renumber(axis, sel)
        return writer.lax(node, sel, inputs, lambda *xs: jnp.stack(xs, new_axis), (shape, new_axis))
    if along[2] is not None:
        return None
    return (yield node.inputs[along[1]], inner)


def _slice(writer: "Writer", node: Node, position: int, sel: Sel) -> Pull:
    params = node.eqn.params
    strides = params["strides"] or (1,) * len(params["start_indices"])
    if any(size is not None and strides[dim] != 1 for dim, _, size in sel):
        return None
    shape = node.outs[0].shape
    by_dim = {dim: (start, size) for dim, start, size in sel}
    if any(strides[dim] != 1 and dim not in by_dim for dim in range(len(shape))):
        return None
    inner = tuple(
        (dim, begin + start * stride, size)
        for dim, (begin, stride) in enumerate(zip(params["start_indices"], strides, strict=True))
        for start, size in [by_dim.get(dim, (0, shape[dim]))]
    )
    return (yield node.inputs[0], inner)


def _rev(writer: "Writer", node: Node, position: int, sel: Sel) -> Pull:
    dims, shape = node.eqn.params["dimensions"], node.outs[0].shape
    inner = tuple(
        (d, shape[d] - start - (1 if size is None else size) if d in dims else start, size) for d, start, size in sel
    )
    value = yield node.inputs[0], inner
    dropped = {dim for dim, _, size in sel if size is None}
    kept = tuple(_renumber(d, sel) for d in dims if d not in dropped)
    return writer.lax(node, sel, [value], lambda x: jax.lax.rev(x, kept), kept)


def _iota(writer: "Writer", node: Node, position: int, sel: Sel) -> Pull:
    if node.inputs:
        return None
    dim, dtype = node.eqn.params["dimension"], node.outs[0].dtype
    shape = sel_shape(node.outs[0].shape, sel)
    along = next((entry for entry in sel if entry[0] == dim), (dim, 0, node.outs[0].shape[dim]))
    start = Known(np.asarray(along[1], dtype))
    if along[2] is None:
        return writer.lax(node, sel, [start], lambda first: jax.lax.broadcast(first, shape), (shape, "const"))
    if not is_exact(dtype):
        return None
    axis = _renumber(dim, sel)

    def count(first: Any) -> Any:
        return jax.lax.broadcasted_iota(dtype, shape, axis) + first

    return writer.lax(node, sel, [start], count, (shape, axis))
    yield  # a generator like the other rules


def _reduction(writer: "Writer", node: Node, position: int, sel: Sel) -> Pull:
    if len(node.inputs) != 1 or set(node.eqn.params) - {"axes", "out_sharding"}:
        return None
    axes = tuple(node.eqn.params["axes"])
    kept = [d for d in range(len(node.inputs[0].shape)) if d not in axes]
    inner = tuple((kept[dim], start, size) for dim, start, size in sel)
    value = yield node.inputs[0], inner
    new_axes = tuple(_renumber(axis, inner) for axis in axes)
    primitive, params = node.eqn.primitive, {**node.eqn.params, "axes": new_axes}
    return writer.lax(node, sel, [value], lambda x: primitive.bind(x, **params), new_axes)


def _matrices(writer: "Writer", node: Node, position: int, sel: Sel) -> Pull:
    """Linear algebra on stacks of matrices: all dims but the last two of the first operand are a batch."""
    batch = len(node.inputs[0].shape) - 2
    if any(dim >= batch for dim, _, _ in sel) or any(len(operand.shape) < batch for operand in node.inputs):
        return None
    inputs = []
    for operand in node.inputs:
        inputs.append((yield operand, sel))
    return writer.node(node, position, sel, inputs)


_RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys(_IDENTITY, _identity),
    **dict.fromkeys(("random_split", "random_wrap", "random_unwrap"), leading_keys),
    **dict.fromkeys(("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"), _reduction),
    **dict.fromkeys(("qr", "geqrf", "householder_product", "cholesky", "eigh", "lu"), _matrices),
    "broadcast_in_dim": _broadcast_in_dim,
    "concatenate": _concatenate,
    "iota": _iota,
    "random_bits": random_bits,
    "reshape": _reshape,
    "rev": _rev,
    "scan": _slice_control.scan_rule,
    "slice": _slice,
    "squeeze": _squeeze,
    "stack": _stack,
    "transpose": _transpose,
}
