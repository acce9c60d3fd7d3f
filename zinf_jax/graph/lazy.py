"""Initial parameters made page by page: `zinf.lazy(init_fn, *args)` traces the init function and makes nothing.

An `Initializer` makes the values of just the pieces that are asked for, bit for bit what `jax.jit(init_fn)(*args)`
would give. From an init function: its jaxpr restricted to those pieces (`_restrict`). From a tree of real arrays:
slices of them. Structurally equal pieces share one compiled program.

Known gap: what the compiled programs hold while they run is theirs (`peak_bytes` says how much).
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from zinf_jax.errors import InitError
from zinf_jax.graph import _jaxpr
from zinf_jax.graph._init_arrays import ArrayInitializer
from zinf_jax.graph._init_lazy import LazyInitializer
from zinf_jax.graph._values import Known, Missing, Ref, flatten
from zinf_jax.leaves import Leaf, LeafKind, Piece, is_array, is_key, path_name


class Initializer(Protocol):
    """Makes initial values of pieces.

    Attributes:
      warnings: Leaves that cannot be sliced and are made whole, with their bytes.
      whole_leaves: Their indices. All pieces of such a leaf should be asked for in one call: it is made once per call.
    """

    warnings: tuple[str, ...]
    whole_leaves: frozenset[int]

    def make(self, pieces: Sequence[Piece]) -> list[np.ndarray]:
        """The values of these pieces, in the user's own dtype, of `Leaf.piece_shape`; key leaves as uint32 key data.

        The arrays are read-only, and may share memory with the user's arrays or with each other.

        Raises:
          InitError: a value cannot be made; names the leaf.
        """

    def peak_bytes(self, pieces: Sequence[Piece]) -> int:
        """Bytes alive at most while `make` makes these pieces: the results and what their programs hold."""


class Lazy:
    """A parameter tree that is abstract until used.

    Attributes:
      abstract: The tree of `init_fn`'s result with `ShapeDtypeStruct`s for its arrays (typed keys stay keys); leaves
        that are not arrays (functions, Python scalars) as they are.
    """

    def __init__(self, init_fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]):
        flat, tree = jax.tree_util.tree_flatten_with_path((args, kwargs))
        traced = [isinstance(value, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct) for _, value in flat]
        found: dict[str, Any] = {}

        def flat_init(*arrays: Any) -> list[Any]:
            given = iter(arrays)
            values = [next(given) if is_traced else value for (_, value), is_traced in zip(flat, traced, strict=True)]
            own_args, own_kwargs = jax.tree.unflatten(tree, values)
            found["leaves"], found["tree"] = jax.tree.flatten(init_fn(*own_args, **own_kwargs))
            return [leaf for leaf in found["leaves"] if _is_made(leaf)]

        inputs = [(path, value) for (path, value), is_traced in zip(flat, traced, strict=True) if is_traced]
        closed = jax.make_jaxpr(flat_init)(*(jax.typeof(v) if not _is_abstract(v) else v for _, v in inputs))
        refs = [_argument(path, value, var) for (path, value), var in zip(inputs, closed.jaxpr.invars, strict=True)]
        outputs = iter(zip(flatten(_jaxpr.open_block(closed), refs), closed.out_avals, strict=True))
        self.leaves: list[Ref | None] = []  # per leaf: what makes it, None if it exists already
        abstract = []
        for leaf in found["leaves"]:
            ref, aval = next(outputs) if _is_made(leaf) else (None, None)
            self.leaves.append(ref)
            abstract.append(leaf if aval is None else jax.ShapeDtypeStruct(aval.shape, aval.dtype))
        self.abstract = jax.tree.unflatten(found["tree"], abstract)

    def __repr__(self) -> str:
        return f"Lazy({len(self.leaves)} leaves)"


def lazy(init_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Lazy:
    """Parameters that are made page by page when training starts, and never whole.

    Args:
      init_fn: Any traceable function that returns a parameter tree, such as `model.init`.
      *args, **kwargs: Its arguments. Arrays are traced; a `ShapeDtypeStruct` will do where no parameter depends on the
        value, as for the batch of a Flax module. Everything else (Python scalars, strings) is passed as it is.

    Returns:
      A `Lazy`, to be given to `Trainer` in place of parameters.
    """
    return Lazy(init_fn, args, kwargs)


def initializer(params: Any, leaves: tuple[Leaf, ...]) -> Initializer:
    """The initializer of a parameter table from a `Lazy` or a tree of arrays.

    Args:
      params: `Lazy`, or pytree of numpy or jax arrays, possibly sharded.
      leaves: The table of that tree, `stack_ndim` filled in.

    Raises:
      InitError: the table is not of this tree; a leaf is abstract; a leaf's init cannot be restricted.
    """
    tree = params.abstract if isinstance(params, Lazy) else params
    flat = jax.tree.leaves(tree)
    if len(flat) != len(leaves):
        raise InitError(f"the parameter tree has {len(flat)} leaves, its table {len(leaves)}")
    for value, leaf in zip(flat, leaves, strict=True):
        _check_leaf(value, leaf)
    if isinstance(params, Lazy):
        return LazyInitializer(params.leaves, leaves, flat)
    return ArrayInitializer(leaves, flat)


def _is_made(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def _is_abstract(value: Any) -> bool:
    return isinstance(value, jax.ShapeDtypeStruct)


def _argument(path: Any, value: Any, var: Any) -> Ref:
    aval = var.aval
    if _is_abstract(value):
        return Missing(f"argument {path_name(path)}", tuple(aval.shape), aval.dtype)
    # jit would convert, too: float64 to float32 where x64 is off.
    return Known(value if value.dtype == aval.dtype else np.asarray(value).astype(aval.dtype))


def _check_leaf(value: Any, leaf: Leaf) -> None:
    if not is_array(value):
        if leaf.kind is not LeafKind.STATIC:
            raise InitError(f"{leaf.name}: the table says {leaf.kind.value}, but it is {type(value).__name__}")
        return
    shape = tuple(np.shape(value))
    if is_key(value):
        shape += tuple(leaf.shape[len(shape) :])
    if shape != leaf.shape:
        raise InitError(f"{leaf.name}: its shape is {shape}, its table says {leaf.shape}")
