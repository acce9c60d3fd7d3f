"""Random parameter tables."""

import itertools
from collections.abc import Sequence

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from zinf_jax.leaves import Leaf, LeafKind

AXES = {"fsdp": 1, "tp": 2, "sp": 3}
DTYPES = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.int32))
NAMES = ("embedding", "head", "block_0/up", "block_0/down", "block_1/up", "block_1/down", "block_10/up", "norm/scale",
         "norm/a1", "norm/a01", "stack/up", "stack/down", "stack/inner/kernel")  # fmt: skip


def leaf(index: int, name: str, shape: Sequence[int], dtype: object = np.float32, **other: object) -> Leaf:
    dtype = np.dtype(dtype)
    default = LeafKind.CARRIED if dtype.kind == "i" else LeafKind.TRAINABLE
    kind = other.pop("kind", default)
    return Leaf(index, name, tuple(shape), dtype, kind, **other)  # type: ignore[arg-type]


@st.composite
def tables(draw: st.DrawFn) -> tuple[Leaf, ...]:
    """Leaves of odd sizes, several dtypes and kinds, some stacked, some split by the user."""
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=8, unique=True))
    leaves = []
    for index, name in enumerate(names):
        dtype = draw(st.sampled_from(DTYPES))
        shape = draw(st.lists(st.integers(0, 40), max_size=3))
        stack_ndim = 0
        spec: tuple[object, ...] = ()
        if name.startswith("stack"):
            stack_ndim, shape = 1, [3, *shape]
        elif shape and draw(st.booleans()):
            dim, axis = draw(st.integers(0, len(shape) - 1)), draw(st.sampled_from(["tp", "sp", ("tp", "sp")]))
            ways = AXES[axis] if isinstance(axis, str) else 6
            shape[dim] = max(1, shape[dim]) * ways
            spec = tuple(axis if d == dim else None for d in range(dim + 1))
        kind = draw(st.sampled_from([LeafKind.TRAINABLE, LeafKind.FROZEN])) if dtype.kind != "i" else LeafKind.CARRIED
        if 0 in shape:
            kind = LeafKind.CARRIED
        leaves.append(Leaf(index, name, tuple(shape), dtype, kind, stack_ndim, spec=spec))
    if draw(st.booleans()):
        leaves.append(Leaf(len(leaves), "function", (), np.dtype(object), LeafKind.STATIC))
    return tuple(leaves)


def permuted(leaves: Sequence[Leaf], order: Sequence[int]) -> tuple[Leaf, ...]:
    """The same leaves as a tree that is flattened in another order."""
    import dataclasses

    return tuple(dataclasses.replace(leaves[old], index=new) for new, old in enumerate(order))


def counting(shape: Sequence[int], dtype: np.dtype, start: int) -> np.ndarray:
    """Different values everywhere (up to what a dtype of 16 bits can tell)."""
    size = int(np.prod(shape, dtype=np.int64))
    words = (np.arange(size, dtype=np.int64) + start) % 65521 + 1
    unsigned = np.dtype(f"u{dtype.itemsize}")
    return words.astype(unsigned).view(dtype).reshape(shape)


def all_pairs(items: Sequence[object]) -> itertools.combinations:
    return itertools.combinations(items, 2)
