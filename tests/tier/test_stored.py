"""Pages of one layout read through another: every element is found, whatever the ranks, stacks and pages."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zinf_jax as zinf
from tests.tier.tables import AXES, leaf, tables
from zinf_jax.leaves import LeafKind
from zinf_jax.tier import LayoutOptions, StoredLayout, build_layout, to_rows

RANKS = st.sampled_from([1, 2, 3, 4, 8])
OPTIONS = st.builds(
    LayoutOptions, page_bytes=st.sampled_from([1, 2_000, 1 << 28]), min_io_bytes=st.sampled_from([1, 4096, 1 << 20])
)


def layout_of(leaves, ranks, options):
    return build_layout(leaves, options, num_ranks=ranks, axis_sizes=AXES | {"fsdp": ranks})


def pages_of(layout, leaves, ranks):
    """Each page with the number of every element in its leaf (and the leaf's index above it); -1 in the padding."""
    pages = []
    for page in layout.pages:
        rows = np.full(page.shape, -1)
        for s in page.segments:
            mine = leaves[s.piece.leaf]
            size = mine.piece_size
            ids = (mine.index << 32) + s.piece.index * size + np.arange(size)
            # Numbered from 1, so that the zeros that pad a piece become -1.
            part = to_rows(ids.reshape(mine.piece_shape) + 1, mine, page, s, AXES | {"fsdp": ranks}) - 1
            rows[:, :, s.offset : s.offset + s.shard_size] = part
        pages.append(rows.reshape(-1))
    return pages


def check(old, new, old_ranks, new_ranks, old_options, new_options):
    """Fills the new pages from the old ones."""
    before, after = layout_of(old, old_ranks, old_options), layout_of(new, new_ranks, new_options)
    stored = StoredLayout(new, json.loads(json.dumps(before.to_json())))
    assert [(p.name, p.num_elements, p.trainable, p.itemsize) for p in stored.pages] == [
        (p.name, p.num_elements, p.trainable, p.dtype.itemsize) for p in before.pages
    ]
    source, wanted = pages_of(before, old, old_ranks), pages_of(after, new, new_ranks)
    for page, expected in zip(after.pages, wanted, strict=True):
        found = np.full(page.shape, -1)
        for s in page.segments:
            for tp in range(page.num_tp):
                for rank in range(page.num_ranks):
                    first = rank * s.shard_size
                    at = s.offset
                    for run in stored.runs(s, tp, first, min(first + s.shard_size, s.size) - first):
                        assert run.count > 0
                        found[tp, rank, at : at + run.count] = source[run.page.index][run.start : run.start + run.count]
                        at += run.count
        np.testing.assert_array_equal(found.reshape(-1), expected)
    return stored


@settings(max_examples=60, deadline=None)
@given(tables(), RANKS, RANKS, OPTIONS, OPTIONS)
def test_other_ranks_and_pages(leaves, old_ranks, new_ranks, old_options, new_options):
    stored = check(leaves, leaves, old_ranks, new_ranks, old_options, new_options)
    after = layout_of(leaves, new_ranks, new_options)
    for mine in leaves:
        if mine.kind is not LeafKind.STATIC and mine.num_pieces:
            num_tp = after.segment(mine.pieces[0])[0].num_tp
            assert stored.fits(mine, num_tp, new_ranks) == (old_ranks == new_ranks)
            with pytest.raises(zinf.ConfigError, match="tensor-parallel"):
                stored.fits(mine, num_tp + 1, new_ranks)


@pytest.mark.parametrize(("old_stack", "new_stack"), [(0, 1), (1, 0), (1, 2), (2, 1), (0, 2)])
@pytest.mark.parametrize(("old_ranks", "new_ranks"), [(1, 1), (2, 1), (1, 3), (2, 4)])
def test_other_stacks(old_stack, new_stack, old_ranks, new_ranks):
    """CK03's odd sizes, stacked over none, one or two dims."""
    old = (leaf(0, "a", (3, 2, 7), stack_ndim=old_stack), leaf(1, "b", (513,)), leaf(2, "c", ()))
    new = (dataclasses.replace(old[0], stack_ndim=new_stack), *old[1:])
    options = LayoutOptions(min_io_bytes=1)
    stored = check(old, new, old_ranks, new_ranks, options, options)
    assert not stored.fits(new[0], 1, old_ranks)
    assert stored.fits(new[1], 1, old_ranks)


def test_another_model_is_refused():
    leaves = (leaf(0, "a", (7,)), leaf(1, "b", (513,)))
    data = layout_of(leaves, 2, LayoutOptions()).to_json()
    for other, message in (
        (leaves[:1], "'b' that this model lacks"),
        ((*leaves, leaf(2, "c", (3,)), leaf(3, "d", (3,))), "lacks parameters that this model has: c, d"),
        ((leaves[0], leaf(1, "b", (512,))), "another shape for parameter 'b'"),
        ((leaves[0], leaf(1, "b", (513,), np.float16)), "'b' is float32 in the stored run"),
        ((leaves[0], leaf(1, "b", (513,), kind=LeafKind.FROZEN)), "'b' is trainable in the stored run"),
    ):
        with pytest.raises(zinf.ConfigError, match=message):
            StoredLayout(other, data)
