"""How the optimizer's state of a page lies on its tier: records, one per chunk.

A record of n elements is the master (bf16 weights: n signed 16-bit remainders; fp16 weights: n fp32 copies; fp32
weights: nothing, they are the master) followed by n fp32 per slot. So one read and one write move all that an update
needs beside the weights. The chunk size is part of the format: a resume keeps the stored one.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from zinf_jax.leaves import Leaf
from zinf_jax.optim import kernels
from zinf_jax.tier import Page, Segment

_MASTERS: dict[np.dtype, np.dtype | None] = {
    kernels.F32: None,
    kernels.BF16: np.dtype(np.int16),
    kernels.F16: kernels.F32,
}


@dataclasses.dataclass(frozen=True)
class RecordFormat:
    """Of trainable pages.

    Attributes:
      weights: Dtype of the weights.
      master: Dtype of what is stored beside them, or None.
      num_slots: fp32 vectors per element.
    """

    weights: np.dtype
    master: np.dtype | None
    num_slots: int

    @classmethod
    def of(cls, weights: np.dtype, num_slots: int) -> "RecordFormat":
        return cls(np.dtype(weights), _MASTERS[np.dtype(weights)], num_slots)

    @property
    def itemsize(self) -> int:
        return (self.master.itemsize if self.master else 0) + 4 * self.num_slots

    def store_master(self, master: np.ndarray, weights: np.ndarray, stored: np.ndarray | None, here: slice) -> None:
        """Writes an fp32 master to its weights and, at `here`, to what is stored beside them.

        The only roundings of weights: `split_master` for bf16, to nearest even (inf beyond the range) for fp16.
        """
        if stored is None:
            weights[:] = master
        elif weights.dtype == kernels.BF16:
            kernels.split_master(master, weights, stored[here])
        else:
            stored[here] = master
            with np.errstate(over="ignore"):
                weights[:] = master.astype(weights.dtype)

    def split(self, record: np.ndarray) -> tuple[np.ndarray | None, tuple[np.ndarray, ...]]:
        """Views into a record's bytes (uint8[n * itemsize]): master [n] or None, slots [n]."""
        if self.itemsize == 0:
            return None, ()
        n = record.nbytes // self.itemsize
        offset = n * self.master.itemsize if self.master else 0
        master = record[:offset].view(self.master) if self.master else None
        slots = tuple(
            record[offset + 4 * n * i : offset + 4 * n * (i + 1)].view(np.float32) for i in range(self.num_slots)
        )
        return master, slots


@dataclasses.dataclass(frozen=True)
class RangeOf:
    """Part of a segment that lies in a chunk: elements `[start, stop)` of the chunk, from `shard_start` of the row's
    shard of the piece."""

    segment: Segment
    leaf: Leaf
    row: tuple[int, int]
    start: int
    stop: int
    shard_start: int

    @property
    def here(self) -> slice:
        """In the chunk."""
        return slice(self.start, self.stop)

    @property
    def in_shard(self) -> slice:
        """In the row's shard of the piece."""
        return slice(self.shard_start, self.shard_start + self.stop - self.start)


def ranges_of(page: Page, leaves: tuple[Leaf, ...], start: int, stop: int) -> Iterator[RangeOf]:
    """The parts of segments in elements `[start, stop)` of a page, rows one after the other; no padding between."""
    for row in range(start // page.row_size, (stop - 1) // page.row_size + 1):
        base = row * page.row_size
        for segment in page.segments:
            first = max(start, base + segment.offset)
            last = min(stop, base + segment.offset + segment.shard_size)
            if first < last:
                yield RangeOf(
                    segment, leaves[segment.piece.leaf], divmod(row, page.num_ranks),
                    first - start, last - start, first - base - segment.offset,
                )  # fmt: skip
