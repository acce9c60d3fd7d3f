"""Where the elements of a leaf lie in pages that another layout made: for other ranks, or for other stacks.

Pure. In every layout the pieces of a leaf follow each other and each is flattened before it is split, so an element has
one number whatever the ranks and stacks: its place in the flattened leaf (per tensor-parallel shard). Both layouts map
ranges of these numbers to ranges of page elements.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zinf_jax.errors import ConfigError
from zinf_jax.leaves import Leaf, LeafKind
from zinf_jax.tier.layout import Segment, check_like


@dataclasses.dataclass(frozen=True)
class StoredPage:
    """A page of a stored layout: see `Page`."""

    index: int
    name: str
    num_tp: int
    num_ranks: int
    row_size: int
    trainable: bool
    itemsize: int

    @property
    def num_elements(self) -> int:
        return self.num_tp * self.num_ranks * self.row_size


@dataclasses.dataclass(frozen=True)
class Run:
    """Elements of a page that follow each other: `[start, start + count)`, rows one after the other."""

    page: StoredPage
    start: int
    count: int


@dataclasses.dataclass(frozen=True)
class _StoredPiece:
    page: StoredPage
    offset: int
    shard_size: int
    size: int


class StoredLayout:
    """A layout as `Layout.to_json` wrote it, for leaves whose ranks or stacks may be others by now.

    Raises:
      ConfigError: it lacks a leaf, has one too many, or one of another size, dtype, kind or tensor-parallel split.
    """

    def __init__(self, leaves: Sequence[Leaf], data: Mapping[str, Any]) -> None:
        by_name = {leaf.name: leaf for leaf in leaves if leaf.kind is not LeafKind.STATIC}
        self.pages: list[StoredPage] = []
        pieces: dict[int, dict[int, _StoredPiece]] = {leaf.index: {} for leaf in by_name.values()}
        for index, stored in enumerate(data["pages"]):
            num_tp, num_ranks, row_size = stored["shape"]
            trainable = LeafKind(stored["kind"]) is LeafKind.TRAINABLE
            page = None
            for name, piece_index, offset, shard_size, size in stored["segments"]:
                if name not in by_name:
                    raise ConfigError(f"the stored run has a parameter {name!r} that this model lacks")
                leaf = by_name[name]
                check_like(leaf, stored)
                if page is None:
                    page = StoredPage(
                        index, stored["name"], num_tp, num_ranks, row_size, trainable, leaf.dtype.itemsize
                    )
                    self.pages.append(page)
                pieces[leaf.index][piece_index] = _StoredPiece(page, offset, shard_size, size)
        self._pieces = {leaf: [found[i] for i in sorted(found)] for leaf, found in pieces.items()}
        missing = sorted(leaf.name for leaf in by_name.values() if leaf.num_pieces and not self._pieces[leaf.index])
        if missing:
            raise ConfigError(f"the stored run lacks parameters that this model has: {', '.join(missing[:5])}")
        for leaf in by_name.values():
            stored_size = sum(piece.size * piece.page.num_tp for piece in self._pieces[leaf.index])
            if stored_size != leaf.size:
                raise ConfigError(f"the stored run has another shape for parameter {leaf.name!r} than {leaf.shape}")

    def fits(self, leaf: Leaf, num_tp: int, num_ranks: int) -> bool:
        """Can the leaf's pages be used as they are?

        Args:
          leaf: Which.
          num_tp, num_ranks: Of its pages in a layout of today.

        Raises:
          ConfigError: it is split over another number of tensor-parallel shards, which changes the order of elements.
        """
        pieces = self._pieces[leaf.index]
        same_stack = len(pieces) == leaf.num_pieces
        if not pieces:
            return same_stack
        stored_tp = pieces[0].page.num_tp
        if stored_tp != num_tp or (num_tp > 1 and not same_stack):
            raise ConfigError(
                f"{leaf.name!r} is stored in {stored_tp} tensor-parallel shards of {len(pieces)} slices, here it "
                f"has {num_tp} of {leaf.num_pieces}: resume with the same tensor-parallel axes"
            )
        return same_stack and all(piece.page.num_ranks == num_ranks for piece in pieces)

    def runs(self, segment: Segment, tp: int, first: int, count: int) -> Iterator[Run]:
        """Where elements of a piece of today's layout lie, in order.

        Args:
          segment: The piece.
          tp: Tensor-parallel shard.
          first: The first element, counted in that shard of the piece.
          count: How many; none of them padding.
        """
        pieces = self._pieces[segment.piece.leaf]
        at = segment.piece.index * segment.size + first
        while count > 0:
            piece = pieces[at // pieces[0].size]  # the pieces of a leaf are of one size
            inside = at % pieces[0].size
            rank, in_shard = divmod(inside, piece.shard_size)
            length = min(count, piece.shard_size - in_shard, piece.size - inside)
            page = piece.page
            yield Run(page, (tp * page.num_ranks + rank) * page.row_size + piece.offset + in_shard, length)
            at, count = at + length, count - length
