"""L1: bytes on tiers, without training concepts: pages, frames, stores, transfers."""

from zinf_jax.tier.frames import FRAME_ALIGN, FrameArena, FrameSpan
from zinf_jax.tier.layout import Layout, LayoutOptions, Page, Segment, build_layout
from zinf_jax.tier.packing import from_rows, to_rows
from zinf_jax.tier.store import PageStore, PendingIO
from zinf_jax.tier.transfer import FSDP_AXIS, Partitioning, Topology, put_rows, row_views

__all__ = [
    "FRAME_ALIGN",
    "FSDP_AXIS",
    "FrameArena",
    "FrameSpan",
    "Layout",
    "LayoutOptions",
    "Page",
    "PageStore",
    "Partitioning",
    "PendingIO",
    "Segment",
    "Topology",
    "build_layout",
    "from_rows",
    "put_rows",
    "row_views",
    "to_rows",
]
