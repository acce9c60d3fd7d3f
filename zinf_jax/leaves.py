"""The one table that classifies every leaf of the parameter tree.

Real parameter trees hold more than trainable floats: integers, booleans, PRNG keys, zero-size and scalar leaves,
Python scalars, functions (Equinox modules), frozen leaves, leaves that no loss touches. Everything downstream
(cutting, paging, optimizers, checkpoints) asks this table and nothing else.

A *piece* is what is paged: a whole leaf, or one slice of a leaf whose leading dims are stacked layers.
"""

import dataclasses
import enum
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zinf_jax.errors import ConfigError


class LeafKind(enum.Enum):
    TRAINABLE = "trainable"  # floating, gets a gradient and optimizer state
    FROZEN = "frozen"  # floating, weights only
    CARRIED = "carried"  # integer, bool, PRNG key data or zero-size: carried along, never changed
    STATIC = "static"  # not an array (a function, a string): part of the program, not of the state


class Piece(NamedTuple):
    """What is paged: slice `index` of leaf `leaf` (0 for a leaf that is not stacked)."""

    leaf: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody calls


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf of the parameter tree.

    Attributes:
      index: Position in the flattened tree.
      name: Path in the tree, joined by `/`. Unique.
      shape: Shape of the whole leaf. For a PRNG key array: of its key data.
      dtype: Dtype in which it is stored as a weight and reaches the loss function (uint32 for key data).
      kind: What is done with it.
      stack_ndim: Number of leading dims over which it is stacked (0: not); it is paged slice by slice.
      key_impl: Name of the PRNG implementation if the user's leaf is a typed key array.
      weak_type: The user gave a Python scalar.
      spec: The user's own partition spec (entries are axis names, tuples of them or None), without the fsdp axis.
    """

    index: int
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    kind: LeafKind
    stack_ndim: int = 0
    key_impl: str | None = None
    weak_type: bool = False
    spec: tuple[Any, ...] = ()

    @property
    def num_pieces(self) -> int:
        return math.prod(self.shape[: self.stack_ndim])

    @property
    def piece_shape(self) -> tuple[int, ...]:
        return self.shape[self.stack_ndim :]

    @property
    def piece_size(self) -> int:
        return math.prod(self.piece_shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return tuple(Piece(self.index, i) for i in range(self.num_pieces))

    @property
    def user_aval(self) -> jax.ShapeDtypeStruct:
        """What the loss function sees: a key array where the user has one."""
        if self.key_impl is None:
            return jax.ShapeDtypeStruct(self.shape, self.dtype, weak_type=self.weak_type)
        data = jax.ShapeDtypeStruct(self.shape, self.dtype)
        return jax.eval_shape(lambda x: jax.random.wrap_key_data(x, impl=self.key_impl), data)


def path_name(path: Sequence[Any]) -> str:
    """The name of a leaf from its tree path: `params/block_0/kernel`."""
    parts = []
    for entry in path:
        for attribute in ("key", "name", "idx"):
            if hasattr(entry, attribute):
                parts.append(str(getattr(entry, attribute)))
                break
        else:
            parts.append(str(entry))
    return "/".join(part.lstrip(".") for part in parts if part not in ("", ".value"))


def is_array(leaf: Any) -> bool:
    """True for what can be a parameter: arrays, their abstract values, and Python or numpy scalars."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct | bool | int | float | complex)


def is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def classify(
    params: Any,
    *,
    compute_dtype: Any = np.float32,
    trainable: Any = None,
    specs: Sequence[Sequence[Any]] | None = None,
) -> tuple[Leaf, ...]:
    """Classifies every leaf of a parameter tree.

    Args:
      params: Pytree of arrays or `ShapeDtypeStruct`s.
      compute_dtype: What floating leaves reach the loss function in.
      trainable: Pytree prefix of bools (None in it: trainable if floating), or None for "every floating leaf".
      specs: The user's own partition spec of each leaf, in flattening order, or None.

    Returns:
      One `Leaf` per leaf, in flattening order; `stack_ndim` is 0 until the graph says otherwise.

    Raises:
      ConfigError: complex leaves; a leaf that is marked trainable but is not floating; equal names.
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(params)
    if trainable is None:
        wanted: list[bool | None] = [None] * len(flat)
    else:
        wanted = _spread(trainable, params)
    flat_specs = [()] * len(flat) if specs is None else [tuple(spec) for spec in specs]
    leaves, seen = [], set()
    for index, ((path, value), want, spec) in enumerate(zip(flat, wanted, flat_specs, strict=True)):
        name = path_name(path) or f"leaf_{index}"
        if name in seen:
            raise ConfigError(f"two parameter leaves have the name {name!r}; rename one")
        seen.add(name)
        leaves.append(_classify_one(index, name, value, np.dtype(compute_dtype), want, spec))
    return tuple(leaves)


def _spread(prefix: Any, tree: Any) -> list[bool | None]:
    """The values of a pytree prefix, one per leaf of the tree; None is a value."""
    repeated = jax.tree.map(
        lambda value, below: [value] * len(jax.tree.leaves(below)), prefix, tree, is_leaf=lambda x: x is None
    )
    return jax.tree.leaves(repeated, is_leaf=lambda x: x is None)


def _classify_one(
    index: int, name: str, value: Any, compute_dtype: np.dtype, want: bool | None, spec: tuple[Any, ...]
) -> Leaf:
    if not is_array(value):
        return Leaf(index, name, (), np.dtype(object), LeafKind.STATIC)
    if is_key(value):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(value.shape, value.dtype))
        impl = value.dtype._impl.name
        return Leaf(index, name, data.shape, np.dtype(data.dtype), LeafKind.CARRIED, key_impl=impl)
    scalar = isinstance(value, bool | int | float | complex)
    dtype = np.dtype(jnp.result_type(value)) if scalar else np.dtype(value.dtype)
    shape = () if scalar else tuple(value.shape)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise ConfigError(f"parameter {name!r} is {dtype}: complex parameters are not supported; store two real leaves")
    floating = jnp.issubdtype(dtype, jnp.floating)
    if want and not floating:
        raise ConfigError(f"parameter {name!r} is marked trainable but is {dtype}; only floating leaves can be trained")
    if not floating or math.prod(shape) == 0:
        kept = compute_dtype if floating else dtype
        return Leaf(index, name, shape, kept, LeafKind.CARRIED, weak_type=scalar)
    kind = LeafKind.FROZEN if want is False else LeafKind.TRAINABLE
    return Leaf(index, name, shape, compute_dtype, kind, weak_type=scalar, spec=spec)


def with_stacks(leaves: Sequence[Leaf], stack_ndims: dict[int, int]) -> tuple[Leaf, ...]:
    """The table with what the graph found: which leaves are stacked over how many leading dims."""
    return tuple(dataclasses.replace(leaf, stack_ndim=stack_ndims.get(leaf.index, 0)) for leaf in leaves)
