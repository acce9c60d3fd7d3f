"""Pieces of parameters that exist: slices of numpy or jax arrays, from their shards, without a copy of the whole."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zinf_jax.errors import InitError
from zinf_jax.graph._values import Sel
from zinf_jax.leaves import Leaf, LeafKind, Piece, is_key


def piece_sel(leaf: Leaf, index: int) -> Sel:
    if not leaf.stack_ndim:
        return ()
    where = np.unravel_index(index, leaf.shape[: leaf.stack_ndim])
    return tuple((dim, int(start), None) for dim, start in enumerate(where))


def check_piece(leaf: Leaf, piece: Piece) -> None:
    if leaf.kind is LeafKind.STATIC:
        raise InitError(f"{leaf.name}: not an array, has no pieces")
    if not 0 <= piece.index < leaf.num_pieces:
        raise InitError(f"{leaf.name}: has {leaf.num_pieces} pieces, asked for piece {piece.index}")


class ArrayInitializer:
    """Slices of arrays that exist."""

    warnings: tuple[str, ...] = ()
    whole_leaves: frozenset[int] = frozenset()

    def __init__(self, leaves: tuple[Leaf, ...], flat: Sequence[Any]):
        for leaf, value in zip(leaves, flat, strict=True):
            if isinstance(value, jax.ShapeDtypeStruct):
                raise InitError(
                    f"{leaf.name}: is a ShapeDtypeStruct, not an array; give arrays or zinf.lazy(init_fn, ...)"
                )
        self._leaves = leaves
        self._flat = flat

    def make(self, pieces: Sequence[Piece]) -> list[np.ndarray]:
        return [self._make(piece) for piece in pieces]

    def peak_bytes(self, pieces: Sequence[Piece]) -> int:
        total = 0
        for piece in pieces:
            leaf = self._leaves[piece.leaf]
            check_piece(leaf, piece)
            value = self._flat[piece.leaf]
            dtype = leaf.dtype if is_key(value) else jnp.result_type(value)
            total += leaf.piece_size * np.dtype(dtype).itemsize
        return total

    def _make(self, piece: Piece) -> np.ndarray:
        leaf = self._leaves[piece.leaf]
        check_piece(leaf, piece)
        value = self._flat[piece.leaf]
        if not isinstance(value, jax.Array):
            host = np.asarray(value, None if isinstance(value, np.ndarray) else jnp.result_type(value))
            return host.reshape(leaf.num_pieces, *leaf.piece_shape)[piece.index] if leaf.stack_ndim else host
        if value.is_deleted():
            raise InitError(f"{leaf.name}: the array was donated or deleted before training started")
        data = jax.random.key_data(value) if is_key(value) else value
        where = tuple(start for _, start, _ in piece_sel(leaf, piece.index))
        return _read(leaf, data, where)


def _read(leaf: Leaf, data: jax.Array, where: tuple[int, ...]) -> np.ndarray:
    """One slice of an array, from its shards: the array is never gathered."""
    if len(data.addressable_shards) == 1 and data.is_fully_addressable:
        return _host(data, where)
    result = np.empty(leaf.piece_shape, data.dtype)
    missing = leaf.piece_size
    for shard in data.addressable_shards:
        spans = [range(*s.indices(n)) for s, n in zip(shard.index, data.shape, strict=True)]
        if shard.replica_id or any(i not in span for i, span in zip(where, spans, strict=False)):
            continue
        inner = tuple(i - span.start for i, span in zip(where, spans, strict=False))
        part = _host(shard.data, inner)
        result[tuple(slice(span.start, span.stop) for span in spans[len(where) :])] = part
        missing -= part.size
    if missing:
        raise InitError(
            f"{leaf.name}: {missing} of {leaf.piece_size} elements lie on other processes; give whole arrays"
        )
    return result


def _host(data: jax.Array, where: tuple[int, ...]) -> np.ndarray:
    on_host = all(device.platform == "cpu" for device in data.devices())
    # On the host a view of the array; from a device only the slice is copied.
    return np.asarray(data)[where] if on_host else np.asarray(data[where])
