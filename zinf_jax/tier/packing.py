"""Between a piece in its own shape and its place in a page: one set of rules for numpy and for traced code.

`spec` puts the user's tensor-parallel dims first, so that a page's leading dim is sharded over those mesh axes:
a leaf `[a, b]` with spec `(None, "tp")` becomes `[tp, a, b / tp]`, flattened to `[tp, size]`, padded and split.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from zinf_jax.leaves import Leaf
from zinf_jax.tier.layout import Page, Segment


def to_rows(value: Any, leaf: Leaf, page: Page, segment: Segment, axis_sizes: Mapping[str, int], xp: Any = np) -> Any:
    """A piece `[*piece_shape]` as `[num_tp, num_ranks, shard_size]`, zero-padded."""
    split, order = _tp_split(leaf, axis_sizes)
    flat = xp.transpose(xp.reshape(value, split), order) if page.num_tp > 1 else value
    flat = xp.reshape(flat, (page.num_tp, segment.size))
    padding = page.num_ranks * segment.shard_size - segment.size
    if padding:
        flat = xp.pad(flat, ((0, 0), (0, padding)))
    return xp.reshape(flat, (page.num_tp, page.num_ranks, segment.shard_size))


def from_rows(rows: Any, leaf: Leaf, page: Page, segment: Segment, axis_sizes: Mapping[str, int], xp: Any = np) -> Any:
    """The inverse of `to_rows`."""
    flat = xp.reshape(rows, (page.num_tp, page.num_ranks * segment.shard_size))[:, : segment.size]
    if page.num_tp == 1:
        return xp.reshape(flat, leaf.piece_shape)
    split, order = _tp_split(leaf, axis_sizes)
    moved = xp.reshape(flat, tuple(split[d] for d in order))
    return xp.reshape(xp.transpose(moved, np.argsort(order)), leaf.piece_shape)


def _tp_split(leaf: Leaf, axis_sizes: Mapping[str, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape of the piece with each sharded dim split in (shards, rest), and the order that puts the shards first."""
    spec = tuple(leaf.spec[leaf.stack_ndim :]) + (None,) * (len(leaf.piece_shape) - len(leaf.spec[leaf.stack_ndim :]))
    split: list[int] = []
    first: list[int] = []
    rest: list[int] = []
    for size, entry in zip(leaf.piece_shape, spec, strict=True):
        axes = (entry,) if isinstance(entry, str) else tuple(entry or ())
        ways = math.prod(axis_sizes.get(axis, 1) for axis in axes)
        if ways > 1:
            first.append(len(split))
            split.append(ways)
        rest.append(len(split))
        split.append(size // ways)
    return tuple(split), tuple(first + rest)
