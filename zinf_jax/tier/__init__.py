"""L1: bytes on tiers, without training concepts: pages, frames, stores, transfers."""

from zinf_jax.tier.commits import Commit, CommitLog, read_commits
from zinf_jax.tier.extents import KindExtents, Place
from zinf_jax.tier.frames import FRAME_ALIGN, FrameArena, FrameSpan
from zinf_jax.tier.layout import Layout, LayoutOptions, Page, Segment, build_layout
from zinf_jax.tier.packing import from_rows, to_rows
from zinf_jax.tier.store import PageStore, PendingIO
from zinf_jax.tier.stored import Run, StoredLayout, StoredPage
from zinf_jax.tier.transfer import FSDP_AXIS, Partitioning, Topology, put_rows, row_views
from zinf_jax.tier.versions import Table, Tables, Versions

__all__ = [
    "FRAME_ALIGN",
    "FSDP_AXIS",
    "Commit",
    "CommitLog",
    "FrameArena",
    "FrameSpan",
    "KindExtents",
    "Layout",
    "LayoutOptions",
    "Page",
    "PageStore",
    "Partitioning",
    "PendingIO",
    "Place",
    "Run",
    "Segment",
    "StoredLayout",
    "StoredPage",
    "Table",
    "Tables",
    "Topology",
    "Versions",
    "build_layout",
    "from_rows",
    "put_rows",
    "read_commits",
    "row_views",
    "to_rows",
]
