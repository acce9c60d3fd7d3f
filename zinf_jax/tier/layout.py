"""The page layout: which piece of which leaf lies where in which page.

A pure function of leaf paths, shapes, dtypes and stacks, never of the cut, so that a stored run can be resumed
under another unit limit, JAX version or loss function: units are mapped onto the pages that exist.

A page is one array `[num_tp, num_ranks, row_size]` of one dtype. Each piece is flattened per tensor-parallel shard
(`num_tp` of them), padded to `num_ranks x shard_size` and split evenly: rank r's share stands at
`[:, r, offset : offset + shard_size]`. So one I/O, one host-to-device copy and one all-gather move a page, each
rank's links carry 1/num_ranks of it, and odd sizes need no special case (ZeRO-Infinity, section 6.1:
bandwidth-centric partitioning).
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from zinf_jax.errors import ConfigError
from zinf_jax.leaves import Leaf, LeafKind, Piece
from zinf_jax.units import ceil_to

ALIGN_ELEMENTS = 64  # of a segment in a row: at least a cache line, whatever the dtype
ROW_ELEMENTS = 4096  # rows are multiples of it, so that every vector over a row is a multiple of a 4 KiB sector


@dataclasses.dataclass(frozen=True)
class LayoutOptions:
    """How leaves are grouped into pages.

    Attributes:
      page_bytes: A page larger than this is split between leaves; a single larger leaf is one page.
      min_io_bytes: Neighbouring pages smaller than this are merged.
    """

    page_bytes: int = 1 << 28
    min_io_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        if self.page_bytes <= 0 or self.min_io_bytes < 0:
            raise ConfigError(f"page_bytes must be positive and min_io_bytes not negative, got {self}")


@dataclasses.dataclass(frozen=True)
class Segment:
    """Where a piece lies in each row of its page; all counts are elements.

    Attributes:
      piece: The leaf and its slice.
      offset: From the start of the row.
      shard_size: The piece's share of a row, padding included.
      size: Elements of the piece per tensor-parallel shard, without padding.
    """

    piece: Piece
    offset: int
    shard_size: int
    size: int


@dataclasses.dataclass(frozen=True)
class Page:
    """The unit of residency and I/O. Array of `shape` and `dtype`."""

    index: int
    name: str
    dtype: np.dtype
    kind: LeafKind
    num_tp: int
    num_ranks: int
    row_size: int
    segments: tuple[Segment, ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.num_tp, self.num_ranks, self.row_size)

    @property
    def num_rows(self) -> int:
        return self.num_tp * self.num_ranks

    @property
    def num_elements(self) -> int:
        return self.num_rows * self.row_size

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def trainable(self) -> bool:
        return self.kind is LeafKind.TRAINABLE


@dataclasses.dataclass(frozen=True)
class Layout:
    """All pages, and where each piece is."""

    leaves: tuple[Leaf, ...]
    pages: tuple[Page, ...]
    where: Mapping[Piece, tuple[int, int]] = dataclasses.field(repr=False)  # piece -> (page, segment index)

    @classmethod
    def of(cls, leaves: Sequence[Leaf], pages: Sequence[Page]) -> "Layout":
        where = {s.piece: (page.index, i) for page in pages for i, s in enumerate(page.segments)}
        return cls(tuple(leaves), tuple(pages), where)

    def segment(self, piece: Piece) -> tuple[Page, Segment]:
        page, index = self.where[piece]
        return self.pages[page], self.pages[page].segments[index]

    @property
    def num_trainable(self) -> int:
        return sum(leaf.size for leaf in self.leaves if leaf.kind is LeafKind.TRAINABLE)

    def to_json(self) -> dict[str, Any]:
        return {
            "pages": [
                {
                    "name": p.name,
                    "dtype": str(p.dtype),
                    "kind": p.kind.value,
                    "shape": list(p.shape),
                    "segments": [
                        [self.leaves[s.piece.leaf].name, s.piece.index, s.offset, s.shard_size, s.size]
                        for s in p.segments
                    ],
                }
                for p in self.pages
            ]
        }

    @classmethod
    def from_json(cls, leaves: Sequence[Leaf], data: Mapping[str, Any]) -> "Layout":
        """Rebuilds a stored layout for the leaves at hand.

        Raises:
          ConfigError: the stored layout lacks a leaf, has one too many, or one of another shape, dtype or kind.
        """
        by_name = {leaf.name: leaf for leaf in leaves if leaf.kind is not LeafKind.STATIC}
        pages, found = [], set()
        for index, stored in enumerate(data["pages"]):
            segments = []
            for name, piece_index, offset, shard_size, size in stored["segments"]:
                if name not in by_name:
                    raise ConfigError(f"the stored run has a parameter {name!r} that this model lacks")
                leaf = by_name[name]
                found.add(name)
                check_like(leaf, stored)
                segments.append(Segment(Piece(leaf.index, piece_index), offset, shard_size, size))
            num_tp, num_ranks, row_size = stored["shape"]
            pages.append(
                Page(
                    index, stored["name"], np.dtype(stored["dtype"]), LeafKind(stored["kind"]),
                    num_tp, num_ranks, row_size, tuple(segments),
                )
            )  # fmt: skip
        layout = cls.of(leaves, pages)
        missing = sorted(set(by_name) - found)
        if missing:
            raise ConfigError(f"the stored run lacks parameters that this model has: {', '.join(missing[:5])}")
        sizes: dict[int, list[int]] = {}
        for page in pages:
            for segment in page.segments:
                sizes.setdefault(segment.piece.leaf, []).append(segment.size * page.num_tp)
        for leaf in by_name.values():
            if sizes[leaf.index] != [leaf.piece_size] * leaf.num_pieces:
                raise ConfigError(f"the stored run has another shape for parameter {leaf.name!r} than {leaf.shape}")
        return layout


def build_layout(
    leaves: Sequence[Leaf],
    options: LayoutOptions,
    *,
    num_ranks: int = 1,
    axis_sizes: Mapping[str, int] | None = None,
    shared: Iterable[int] = (),
) -> Layout:
    """Groups pieces into pages.

    Repeated blocks (siblings whose names differ in a number only and whose leaves look alike, or slices of stacked
    leaves) get a page each, other subtrees are pages as long as they stay under `page_bytes`, and neighbours under
    `min_io_bytes` are merged.

    Args:
      leaves: The parameter table, stacks filled in.
      options: Sizes.
      num_ranks: Ranks of the `fsdp` axis that a page is split over.
      axis_sizes: Mesh axis sizes, for leaves with a user's own partition spec.
      shared: Indices of leaves that several units read: each of their pieces has a page of its own.

    Returns:
      A layout that holds each piece of each leaf that is not static, once.

    Raises:
      ConfigError: a leaf's dim is not divisible by the mesh axes that its own spec names.
    """
    shared = frozenset(shared)
    grouped: list[tuple[str, list[Piece]]] = []
    for bucket in _buckets(leaves, shared, axis_sizes or {}).values():
        tree = _Tree.build(_paths(leaves, [leaves[i] for i in bucket]))
        grouped += _merge_small(_split(tree, leaves, options), leaves, options.min_io_bytes)
    for index in sorted(shared):
        leaf = leaves[index]
        suffix = [f"[{p.index}]" if leaf.stack_ndim else "" for p in leaf.pieces]
        grouped += [(leaf.name + s, [piece]) for s, piece in zip(suffix, leaf.pieces, strict=True)]
    pages = [
        _page(index, name, pieces, leaves, num_ranks, axis_sizes or {})
        for index, (name, pieces) in enumerate(
            sorted(grouped, key=lambda g: (natural_key(g[0]), _alike(leaves[g[1][0].leaf])))
        )
    ]
    return Layout.of(leaves, pages)


def tp_axes(leaf: Leaf) -> tuple[str, ...]:
    """The mesh axes over which the user's own spec splits a piece of the leaf, in dim order."""
    axes: list[str] = []
    for entry in leaf.spec[leaf.stack_ndim :]:
        axes += [entry] if isinstance(entry, str) else list(entry or ())
    return tuple(axes)


def natural_key(name: str) -> list[Any]:
    """Sort key under which `block_10` comes after `block_9`; different names have different keys (`a1`, `a01`)."""
    parts = [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in re.split(r"(\d+)", name)]
    return [*parts, (2, 0, name)]


def _buckets(leaves: Sequence[Leaf], shared: frozenset[int], axis_sizes: Mapping[str, int]) -> dict[Any, list[int]]:
    """Leaves that may share a page: same dtype, kind and tensor-parallel axes."""
    buckets: dict[Any, list[int]] = {}
    for leaf in leaves:
        if leaf.kind is LeafKind.STATIC or leaf.index in shared:
            continue
        buckets.setdefault(_alike(leaf), []).append(leaf.index)
    return buckets


def _alike(leaf: Leaf) -> tuple[Any, ...]:
    """Leaves of which this is equal may share a page."""
    return (str(leaf.dtype), leaf.kind.value, tp_axes(leaf))


def _paths(leaves: Sequence[Leaf], chosen: Sequence[Leaf]) -> dict[tuple[str, ...], Piece]:
    """Path of each piece. The slice number of stacked leaves stands where their common subtree begins."""
    counts: dict[tuple[str, ...], set[int]] = {}
    for leaf in leaves:
        parts = tuple(leaf.name.split("/"))
        for depth in range(len(parts) + 1):
            counts.setdefault(parts[:depth], set()).add(leaf.num_pieces if leaf.stack_ndim else 0)
    paths: dict[tuple[str, ...], Piece] = {}
    for leaf in chosen:
        parts = tuple(leaf.name.split("/"))
        if not leaf.stack_ndim:
            paths[parts] = Piece(leaf.index, 0)
            continue
        depth = next(d for d in range(len(parts) + 1) if len(counts[parts[:d]]) == 1)
        for piece in leaf.pieces:
            paths[(*parts[:depth], str(piece.index), *parts[depth:])] = piece
    return paths


@dataclasses.dataclass
class _Tree:
    """A node of the path tree: a piece, or named children."""

    name: str
    piece: Piece | None
    children: list["_Tree"]

    @classmethod
    def build(cls, paths: Mapping[tuple[str, ...], Piece], name: str = "") -> "_Tree":
        if len(paths) == 1 and () in paths:
            return cls(name, paths[()], [])
        below: dict[str, dict[tuple[str, ...], Piece]] = {}
        for path, piece in paths.items():
            below.setdefault(path[0] if path else "", {})[path[1:]] = piece
        names = sorted(below, key=natural_key)
        return cls(name, None, [cls.build(below[n], f"{name}/{n}" if name else n) for n in names])

    def pieces(self) -> list[Piece]:
        return [self.piece] if self.piece is not None else [p for child in self.children for p in child.pieces()]


def _num_bytes(pieces: Sequence[Piece], leaves: Sequence[Leaf]) -> int:
    return sum(leaves[p.leaf].piece_size * leaves[p.leaf].dtype.itemsize for p in pieces)


def _repeated(tree: _Tree, leaves: Sequence[Leaf]) -> bool:
    """Do children that differ only in a number (layers of a stack) make up most of this node?"""
    alike: dict[Any, int] = {}
    for child in tree.children:
        last = child.name.rsplit("/", 1)[-1]
        if any(c.isdigit() for c in last):
            looks = tuple((leaves[p.leaf].piece_shape, str(leaves[p.leaf].dtype)) for p in child.pieces())
            key = (re.sub(r"\d+", "#", last), looks)
            alike[key] = alike.get(key, 0) + 1
    repeated = sum(n for n in alike.values() if n > 1)
    return repeated > 1


def _split(tree: _Tree, leaves: Sequence[Leaf], options: LayoutOptions) -> list[tuple[str, list[Piece]]]:
    pieces = tree.pieces()
    small = _num_bytes(pieces, leaves) <= options.page_bytes
    if tree.piece is not None or (small and not _contains_repeated(tree, leaves)):
        return [(tree.name or _span_name(pieces, leaves), pieces)] if pieces else []
    return [group for child in tree.children for group in _split(child, leaves, options)]


def _span_name(pieces: Sequence[Piece], leaves: Sequence[Leaf]) -> str:
    """What people call pieces that have no subtree of their own."""
    first, last = leaves[pieces[0].leaf].name, leaves[pieces[-1].leaf].name
    return first if first == last else f"{first}..{last}"


def _contains_repeated(tree: _Tree, leaves: Sequence[Leaf]) -> bool:
    return _repeated(tree, leaves) or any(_contains_repeated(child, leaves) for child in tree.children)


def _merge_small(
    groups: list[tuple[str, list[Piece]]], leaves: Sequence[Leaf], min_io_bytes: int
) -> list[tuple[str, list[Piece]]]:
    merged: list[tuple[str, list[Piece]]] = []
    for name, pieces in groups:
        if merged and max(_num_bytes(merged[-1][1], leaves), _num_bytes(pieces, leaves)) < min_io_bytes:
            merged[-1] = (merged[-1][0], merged[-1][1] + pieces)
        else:
            merged.append((name, list(pieces)))
    return merged


def _page(
    index: int,
    name: str,
    pieces: Sequence[Piece],
    leaves: Sequence[Leaf],
    num_ranks: int,
    axis_sizes: Mapping[str, int],
) -> Page:
    first = leaves[pieces[0].leaf]
    num_tp = math.prod(axis_sizes.get(axis, 1) for axis in tp_axes(first))
    segments, offset = [], 0
    for piece in pieces:
        leaf = leaves[piece.leaf]
        _check_divisible(leaf, axis_sizes)
        size = leaf.piece_size // num_tp
        shard_size = ceil_to(-(-size // num_ranks), ALIGN_ELEMENTS)
        segments.append(Segment(piece, offset, shard_size, size))
        offset += shard_size
    row_size = ceil_to(max(offset, 1), ROW_ELEMENTS)  # a page of zero-size leaves is a page like any other
    return Page(index, name, first.dtype, first.kind, num_tp, num_ranks, row_size, tuple(segments))


def check_like(leaf: Leaf, stored: Mapping[str, Any]) -> None:
    """Raises ConfigError: the leaf is not what a stored page holds."""
    if stored["kind"] != leaf.kind.value:
        raise ConfigError(
            f"parameter {leaf.name!r} is {stored['kind']} in the stored run and {leaf.kind.value} in this one: keep "
            "trainable_patterns and frozen_patterns as they were"
        )
    if stored["dtype"] != str(leaf.dtype):
        raise ConfigError(
            f"parameter {leaf.name!r} is {stored['dtype']} in the stored run and {leaf.dtype} in this one"
        )


def _check_divisible(leaf: Leaf, axis_sizes: Mapping[str, int]) -> None:
    for dim, entry in list(enumerate(leaf.spec))[leaf.stack_ndim :]:
        axes = (entry,) if isinstance(entry, str) else tuple(entry or ())
        ways = math.prod(axis_sizes.get(axis, 1) for axis in axes)
        if leaf.shape[dim] % ways:
            raise ConfigError(
                f"parameter {leaf.name!r} of shape {leaf.shape}: dim {dim} is not divisible by the {ways} shards "
                f"of mesh axes {axes}"
            )
