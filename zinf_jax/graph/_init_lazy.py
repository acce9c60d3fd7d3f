"""Pieces of parameters that an init function would make, each by its own compiled program.

Not thread-safe: programs and evaluated keys are cached as they are met.
"""

import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from zinf_jax.errors import InitError
from zinf_jax.graph._init_arrays import check_piece, piece_sel
from zinf_jax.graph._restrict import Shared, Writer, compile_program
from zinf_jax.graph._values import Ref, Sel, Value, num_bytes, sel_shape
from zinf_jax.leaves import Leaf, Piece, is_key
from zinf_jax.units import format_bytes

_BLOCK_BYTES = 16 << 20  # results larger than this are made block by block where they can be


class _Program(NamedTuple):
    compiled: Any
    run: Any  # held: the keys of the cache may refer to objects by id
    held_bytes: int


class LazyInitializer:
    """Makes pieces from the restricted jaxpr of an init function."""

    def __init__(self, refs: Sequence[Ref | None], leaves: tuple[Leaf, ...], flat: Sequence[Any]):
        self._leaves = leaves
        self._refs = refs
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
            check_piece(leaf, piece)
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
                writer = self._write(leaf, piece_sel(leaf, leaf.num_pieces - 1))[0]
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
        return () if leaf.index in self.whole_leaves else piece_sel(leaf, piece.index)

    def _make(self, piece: Piece, whole: dict[int, np.ndarray]) -> np.ndarray:
        leaf = self._leaves[piece.leaf]
        check_piece(leaf, piece)
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
            assert size is not None
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
