"""Initial parameters made page by page: `zinf.lazy(init_fn, *args)` traces the init function and makes nothing.

An `Initializer` makes the values of just the pieces that are asked for, bit for bit what `jax.jit(init_fn)(*args)`
would give. From an init function: its jaxpr restricted to those pieces (`_restrict`). From a tree of real arrays:
slices of them. Structurally equal pieces share one compiled program.

Known gap: what the compiled programs hold while they run is theirs (`peak_bytes` says how much).
"""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from zinf_jax.errors import InitError
from zinf_jax.graph import _jaxpr
from zinf_jax.graph._restrict import Shared, Writer, compile_program
from zinf_jax.graph._values import Known, Missing, Ref, Sel, Value, flatten, num_bytes, sel_shape
from zinf_jax.leaves import Leaf, LeafKind, Piece, is_array, is_key, path_name
from zinf_jax.units import format_bytes

_BLOCK_BYTES = 16 << 20  # results larger than this are made block by block where they can be


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
        return _LazyInitializer(params, leaves, flat)
    return _ArrayInitializer(leaves, flat)


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


def _slice_sel(leaf: Leaf, index: int) -> Sel:
    if not leaf.stack_ndim:
        return ()
    where = np.unravel_index(index, leaf.shape[: leaf.stack_ndim])
    return tuple((dim, int(start), None) for dim, start in enumerate(where))


def _check_piece(leaf: Leaf, piece: Piece) -> None:
    if leaf.kind is LeafKind.STATIC:
        raise InitError(f"{leaf.name}: not an array, has no pieces")
    if not 0 <= piece.index < leaf.num_pieces:
        raise InitError(f"{leaf.name}: has {leaf.num_pieces} pieces, asked for piece {piece.index}")


class _Program(NamedTuple):
    compiled: Any
    run: Any  # held: the keys of the cache may refer to objects by id
    held_bytes: int


class _LazyInitializer:
    """Makes pieces from the restricted jaxpr of an init function."""

    def __init__(self, params: Lazy, leaves: tuple[Leaf, ...], flat: Sequence[Any]):
        self._leaves = leaves
        self._refs = params.leaves
        self._flat = flat
        self._shared = Shared()
        self._programs: dict[Hashable, _Program] = {}
        self._blockwise: dict[tuple[int, int], bool] = {}  # by leaf and number of selected dims
        self.warnings, self.whole_leaves = self._find_whole()

    def make(self, pieces: Sequence[Piece]) -> list[np.ndarray]:
        whole: dict[int, np.ndarray] = {}
        return [self._make(piece, whole) for piece in pieces]

    def peak_bytes(self, pieces: Sequence[Piece]) -> int:
        held, peak, whole = 0, 0, set()
        for piece in pieces:
            leaf = self._leaves[piece.leaf]
            _check_piece(leaf, piece)
            if piece.leaf in whole:
                continue
            if self._refs[piece.leaf] is None:
                held += np.asarray(self._flat[piece.leaf]).nbytes
                continue
            if piece.leaf in self.whole_leaves:
                whole.add(piece.leaf)
            peak = max(peak, held + self._held(leaf, self._sel(leaf, piece)))
            held += self._bytes(leaf) if piece.leaf in whole else self._bytes(leaf) // leaf.num_pieces
        return max(peak, held)

    def _find_whole(self) -> tuple[tuple[str, ...], frozenset[int]]:
        warnings, whole = [], set()
        for leaf in self._leaves:
            if leaf.stack_ndim and leaf.num_pieces > 1 and self._refs[leaf.index] is not None:
                writer = self._write(leaf, _slice_sel(leaf, leaf.num_pieces - 1))[0]
                if writer.largest_indexed * leaf.num_pieces > self._bytes(leaf):
                    whole.add(leaf.index)
                    warnings.append(
                        f"{leaf.name}: its init cannot be sliced; it is made whole ({format_bytes(self._bytes(leaf))})"
                    )
        return tuple(warnings), frozenset(whole)

    def _bytes(self, leaf: Leaf) -> int:
        value = self._flat[leaf.index]
        dtype = leaf.dtype if is_key(value) else value.dtype
        return math.prod(leaf.shape) * np.dtype(dtype).itemsize

    def _sel(self, leaf: Leaf, piece: Piece) -> Sel:
        return () if leaf.index in self.whole_leaves else _slice_sel(leaf, piece.index)

    def _make(self, piece: Piece, whole: dict[int, np.ndarray]) -> np.ndarray:
        leaf = self._leaves[piece.leaf]
        _check_piece(leaf, piece)
        if self._refs[piece.leaf] is None:
            value = self._flat[piece.leaf]
            return np.asarray(value, jnp.result_type(value))
        if piece.leaf not in self.whole_leaves:
            return self._run(leaf, self._sel(leaf, piece))
        if piece.leaf not in whole:
            whole[piece.leaf] = self._run(leaf, ())
        return whole[piece.leaf].reshape(leaf.num_pieces, *leaf.piece_shape)[piece.index]

    def _run(self, leaf: Leaf, sel: Sel) -> np.ndarray:
        writer, value = self._write(leaf, sel)
        constant = writer.constant(value)
        if constant is not None:
            return constant
        blocks = self._blocks(leaf, sel)
        if not blocks:
            program, operands = self._program(leaf, writer, value)
            return np.asarray(program.compiled(*operands))
        result = np.empty(value.shape, value.dtype)
        for block in blocks:
            _, start, size = block[-1]
            program, operands = self._program(leaf, *self._write(leaf, block))
            result[start : start + size] = program.compiled(*operands)
        return result

    def _held(self, leaf: Leaf, sel: Sel) -> int:
        """Bytes alive while `_run` runs, its result included."""
        writer, value = self._write(leaf, sel)
        if writer.constant(value) is not None:
            return num_bytes(value)
        blocks = self._blocks(leaf, sel)
        if not blocks:
            return self._program(leaf, writer, value)[0].held_bytes
        return num_bytes(value) + max(
            self._program(leaf, *self._write(leaf, block))[0].held_bytes for block in (blocks[0], blocks[-1])
        )

    def _blocks(self, leaf: Leaf, sel: Sel) -> list[Sel]:
        """The selections in which a large result is made block by block; none where it is made at once.

        Random bits take three times the result beside it: an embedding of 1 GiB would need 4.
        """
        shape = sel_shape(leaf.shape, sel)
        row_bytes = self._bytes(leaf) // max(1, math.prod(leaf.shape[: len(sel) + 1]))
        rows = _BLOCK_BYTES // max(1, row_bytes)
        if not shape or leaf.key_impl is not None or not 0 < rows < shape[0]:
            return []
        dim = len(sel)
        blocks = [(*sel, (dim, start, min(rows, shape[0] - start))) for start in range(0, shape[0], rows)]
        key = (leaf.index, dim)
        if key not in self._blockwise:
            self._blockwise[key] = self._write(leaf, blocks[0])[0].largest_indexed <= _BLOCK_BYTES
        return blocks if self._blockwise[key] else []

    def _write(self, leaf: Leaf, sel: Sel) -> tuple[Writer, Value]:
        ref = self._refs[leaf.index]
        assert ref is not None
        writer = Writer(self._shared)
        try:
            value = writer.pull(ref, sel)
            if leaf.key_impl is not None:
                value = writer.key_data(value, leaf.piece_shape if sel else leaf.shape)
        except InitError as error:
            raise InitError(f"{leaf.name}: {error}") from error
        return writer, value

    def _program(self, leaf: Leaf, writer: Writer, value: Value) -> tuple[_Program, list[Any]]:
        key, operands, run = writer.finish(value)
        if key not in self._programs:
            try:
                compiled = compile_program(run, operands)
            except Exception as error:
                raise InitError(f"{leaf.name}: its restricted init function does not compile: {error}") from error
            self._programs[key] = _Program(compiled, run, _held_bytes(compiled))
        return self._programs[key], operands


def _held_bytes(compiled: Any) -> int:
    memory = compiled.memory_analysis()
    return memory.temp_size_in_bytes + memory.output_size_in_bytes + memory.argument_size_in_bytes


class _ArrayInitializer:
    """Slices of arrays that exist."""

    warnings: tuple[str, ...] = ()
    whole_leaves: frozenset[int] = frozenset()

    def __init__(self, leaves: tuple[Leaf, ...], flat: Sequence[Any]):
        for leaf, value in zip(leaves, flat, strict=True):
            if _is_abstract(value):
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
            _check_piece(leaf, piece)
            value = self._flat[piece.leaf]
            dtype = leaf.dtype if is_key(value) else jnp.result_type(value)
            total += leaf.piece_size * np.dtype(dtype).itemsize
        return total

    def _make(self, piece: Piece) -> np.ndarray:
        leaf = self._leaves[piece.leaf]
        _check_piece(leaf, piece)
        value = self._flat[piece.leaf]
        if not isinstance(value, jax.Array):
            host = np.asarray(value, None if isinstance(value, np.ndarray) else jnp.result_type(value))
            return host.reshape(leaf.num_pieces, *leaf.piece_shape)[piece.index] if leaf.stack_ndim else host
        if value.is_deleted():
            raise InitError(f"{leaf.name}: the array was donated or deleted before training started")
        data = jax.random.key_data(value) if is_key(value) else value
        where = tuple(start for _, start, _ in _slice_sel(leaf, piece.index))
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
