"""Slices of keys and random bits.

With threefry, a batch of keys gives the bits of each key, and (`jax_threefry_partitionable`, JAX's default) the bits
of an element are the hash of its index in the whole array: any part can be made alone.
"""

import functools
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p

from zinf_jax.graph._values import Known, Node, Pull, Sel, sel_shape

if TYPE_CHECKING:
    from zinf_jax.graph._restrict import Writer


def _is_threefry(dtype: Any) -> bool:
    # Other generators make bits of a batch of keys that differ from the bits of each key.
    return str(dtype) == "key<fry>"


def leading_keys(writer: "Writer", node: Node, position: int, sel: Sel) -> Pull:
    """random_split, random_wrap, random_unwrap: dims of the keys come first."""
    keys = min(len(node.inputs[0].shape), len(node.outs[0].shape))
    impl = node.outs[0].dtype if node.name == "random_wrap" else node.inputs[0].dtype
    if any(dim >= keys for dim, _, _ in sel) or not _is_threefry(impl):
        return None
    value = yield node.inputs[0], sel
    return writer.node(node, position, sel, [value])


def random_bits(writer: "Writer", node: Node, position: int, sel: Sel) -> Pull:
    """Of a batch of keys: one key's bits. Of one key: the counters that the part has in the whole."""
    keys = node.inputs[0]
    batch = len(keys.shape)
    if not _is_threefry(keys.dtype):
        return None
    inner, own = tuple(e for e in sel if e[0] < batch), tuple((d - batch, s, n) for d, s, n in sel if d >= batch)
    shape = tuple(node.eqn.params["shape"])
    if own and (sel_shape(keys.shape, inner) or not node.eqn.ctx.threefry_partitionable or math.prod(shape) > 1 << 32):
        return None
    key = yield keys, inner
    if not own:
        return writer.node(node, position, sel, [key])
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = sum(start * strides[dim] for dim, start, _ in own)
    dropped = {dim for dim, _, size in own if size is None}
    kept = tuple(stride for dim, stride in enumerate(strides) if dim not in dropped)
    out_shape, width = sel_shape(shape, own), node.eqn.params["bit_width"]
    data = writer.key_data(key, (2,))
    bits = functools.partial(_threefry_part, shape=out_shape, strides=kept, width=width)
    return writer.lax(node, sel, [data, Known(np.uint32(first))], bits, (out_shape, kept, width))


def _threefry_part(
    key: jax.Array, first: jax.Array, *, shape: tuple[int, ...], strides: tuple[int, ...], width: int
) -> jax.Array:
    """Some of the bits of `random_bits` with partitionable threefry: hashes of an element's index in the whole."""
    index = jnp.broadcast_to(first, shape)
    for dim, stride in enumerate(strides):
        index = index + jax.lax.broadcasted_iota(np.uint32, shape, dim) * np.uint32(stride)
    bits_high, bits_low = threefry2x32_p.bind(key[0], key[1], jnp.zeros_like(index), index)
    if width == 64:
        return (bits_high.astype(np.uint64) << np.uint64(32)) | bits_low.astype(np.uint64)
    return (bits_high ^ bits_low).astype(f"uint{width}")
