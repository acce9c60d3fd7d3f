"""Extents: where each chunk of each page lies in the page files. Pure.

A chunk (the piece of a page that the update reads, changes and writes as one) has one extent per *bank*; a bank is a
copy of the whole kind's space, so a chunk's extent in bank b stands at `b * bank_bytes + offset` of its file. Extents
are dealt out to the paths in proportion to their bandwidth, in order, so that chunks that are used one after the other
come from different drives, and a page's chunks on one drive stand side by side.
"""

import dataclasses
from collections.abc import Sequence

from zinf_jax.units import ceil_to

SECTOR = 4096


@dataclasses.dataclass(frozen=True)
class Place:
    """An extent in bank 0: `num_bytes` at `offset` of the kind's file on path number `path`."""

    path: int
    offset: int
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class KindExtents:
    """The extents of one kind of state.

    Attributes:
      places: Of all chunks, page by page.
      first: Per page, the index of its first chunk in `places`; one more at the end.
      bank_bytes: Per path, the space of one bank.
    """

    places: tuple[Place, ...]
    first: tuple[int, ...]
    bank_bytes: tuple[int, ...]

    @classmethod
    def deal(cls, pages: Sequence[Sequence[int]], shares: Sequence[float]) -> "KindExtents":
        """Deals chunks out to paths.

        Args:
          pages: Per page, the bytes of its chunks.
          shares: Per path, its relative bandwidth (> 0).
        """
        assert shares and min(shares) > 0, shares
        used = [0] * len(shares)
        places: list[Place] = []
        first = [0]
        for chunks in pages:
            for num_bytes in chunks:
                path = min(range(len(shares)), key=lambda p: ((used[p] + num_bytes) / shares[p], p))
                places.append(Place(path, used[path], num_bytes))
                used[path] += ceil_to(num_bytes, SECTOR)
            first.append(len(places))
        return cls(tuple(places), tuple(first), tuple(used))

    @property
    def num_bytes(self) -> int:
        """Of one bank, over all paths."""
        return sum(self.bank_bytes)

    def chunks_of(self, page: int) -> range:
        """Indices of a page's chunks."""
        return range(self.first[page], self.first[page + 1])
