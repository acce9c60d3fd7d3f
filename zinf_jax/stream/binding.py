"""Where a unit's programs find its parameter pieces in the pages that exist. Pure."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from zinf_jax.graph.types import Unit
from zinf_jax.leaves import Leaf
from zinf_jax.tier import Layout, Page, Segment


@dataclasses.dataclass(frozen=True)
class Place:
    """A stored piece: in which of a program's page arguments, and where there."""

    argument: int
    page: Page
    segment: Segment


@dataclasses.dataclass(frozen=True)
class Slot:
    """Where a program finds one of its pieces.

    Attributes:
      places: One, unless the layout stores slice by slice a leaf that this program reads whole.
      leaf: As the layout stores it.
      shape: Of the piece as the program reads it.
      index: Slice of a leaf that is stored whole but read slice by slice; None otherwise.
    """

    places: tuple[Place, ...]
    leaf: Leaf
    shape: tuple[int, ...]
    index: int | None

    @property
    def signature(self) -> tuple[Any, ...]:
        """Equal for slots that the same executable can serve."""
        places = tuple(
            (p.argument, p.page.shape, str(p.page.dtype), p.segment.offset, p.segment.shard_size, p.segment.size)
            for p in self.places
        )
        return (places, self.leaf.piece_shape, self.leaf.spec, self.leaf.stack_ndim, self.shape, self.index)


@dataclasses.dataclass(frozen=True)
class Binding:
    """A unit mapped onto pages: `pages` are its page arguments, in order of first use."""

    pages: tuple[int, ...]
    slots: tuple[Slot, ...]


def bind(unit: Unit, leaves: Sequence[Leaf], layout: Layout) -> Binding:
    """Maps a unit onto pages. The layout may be older than the cut: stacked leaves are then put together or sliced.

    Args:
      unit: Whose pieces are those of `leaves`.
      leaves: The graph's table.
      layout: The pages that exist.
    """
    pages: list[int] = []
    slots = []
    for piece in unit.pieces:
        leaf, stored = leaves[piece.leaf], layout.leaves[piece.leaf]
        if leaf.stack_ndim == stored.stack_ndim:
            wanted, index = [piece], None
        else:
            wanted, index = list(stored.pieces), piece.index if leaf.stack_ndim else None
        places = []
        for part in wanted:
            page, segment = layout.segment(part)
            if page.index not in pages:
                pages.append(page.index)
            places.append(Place(pages.index(page.index), page, segment))
        slots.append(Slot(tuple(places), stored, leaf.piece_shape, index))
    return Binding(tuple(pages), tuple(slots))
