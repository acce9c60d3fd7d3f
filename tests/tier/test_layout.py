"""The page layout: every element of every leaf has one place, whatever the shapes, ranks and shardings."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zinf_jax as zinf
from tests.tier.tables import AXES, all_pairs, counting, leaf, permuted, tables
from zinf_jax.leaves import LeafKind, Piece
from zinf_jax.tier import Layout, LayoutOptions, build_layout, from_rows, to_rows
from zinf_jax.tier.layout import ALIGN_ELEMENTS, ROW_ELEMENTS, natural_key, tp_axes

RANKS = st.sampled_from([1, 2, 3, 4, 8])
OPTIONS = st.builds(
    LayoutOptions, page_bytes=st.sampled_from([1, 2_000, 1 << 28]), min_io_bytes=st.sampled_from([1, 4096, 1 << 20])
)
PROPERTY = settings(max_examples=60, deadline=None)


def axes_of(ranks):
    return AXES | {"fsdp": ranks}


@PROPERTY
@given(tables(), RANKS, OPTIONS, st.data())
def test_every_piece_has_one_place(leaves, ranks, options, data):
    floating = [x.index for x in leaves if x.kind is not LeafKind.STATIC]
    shared = data.draw(st.sets(st.sampled_from(floating)) if floating else st.just(set()))
    layout = build_layout(leaves, options, num_ranks=ranks, axis_sizes=axes_of(ranks), shared=shared)
    expected = sorted(p for x in leaves if x.kind is not LeafKind.STATIC for p in x.pieces)
    assert sorted(s.piece for page in layout.pages for s in page.segments) == expected
    for number, page in enumerate(layout.pages):
        assert page.index == number and page.name
        assert page.row_size % ROW_ELEMENTS == 0 and page.row_size > 0
        assert (page.row_size * page.dtype.itemsize) % 4096 == 0
        assert page.num_ranks == ranks
        end = 0
        for segment in page.segments:
            mine = leaves[segment.piece.leaf]
            assert (mine.dtype, mine.kind) == (page.dtype, page.kind)
            assert segment.offset % ALIGN_ELEMENTS == 0 and segment.offset >= end
            end = segment.offset + segment.shard_size
            assert end <= page.row_size
            assert segment.size * page.num_tp == mine.piece_size <= ranks * segment.shard_size * page.num_tp
            assert layout.segment(segment.piece) == (page, segment)
        if shared & {s.piece.leaf for s in page.segments}:
            assert len(page.segments) == 1, "a leaf that several units read has pages of its own"


@PROPERTY
@given(tables(), RANKS, OPTIONS, st.randoms())
def test_the_layout_does_not_depend_on_the_order_of_leaves(leaves, ranks, options, random):
    order = list(range(len(leaves)))
    random.shuffle(order)
    one = build_layout(leaves, options, num_ranks=ranks, axis_sizes=axes_of(ranks))
    other = build_layout(permuted(leaves, order), options, num_ranks=ranks, axis_sizes=axes_of(ranks))
    assert one.to_json() == other.to_json()


@PROPERTY
@given(tables(), RANKS, OPTIONS)
def test_packed_pages_give_every_value_back(leaves, ranks, options):
    """All pieces of all pages at once, so that a wrong place of one would show in another; padding stays zero."""
    sizes = axes_of(ranks)
    layout = build_layout(leaves, options, num_ranks=ranks, axis_sizes=sizes)
    for page in layout.pages:
        rows = np.zeros(page.shape, page.dtype)
        values, used = {}, np.zeros(page.shape, int)
        for number, segment in enumerate(page.segments):
            mine = leaves[segment.piece.leaf]
            values[segment.piece] = counting(mine.piece_shape, mine.dtype, 1000 * number)
            part = to_rows(values[segment.piece], mine, page, segment, sizes)
            place = (slice(None), slice(None), slice(segment.offset, segment.offset + segment.shard_size))
            rows[place] = part
            used[place] += 1
        assert used.max(initial=0) <= 1
        raw = rows.view(f"u{page.dtype.itemsize}")
        assert np.count_nonzero(raw) == sum(v.size for v in values.values()), "padding is zero, nothing is lost"
        for segment in page.segments:
            part = rows[:, :, segment.offset : segment.offset + segment.shard_size]
            found = from_rows(part, leaves[segment.piece.leaf], page, segment, sizes)
            assert found.shape == leaves[segment.piece.leaf].piece_shape
            assert found.tobytes() == values[segment.piece].tobytes()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(
    ("shape", "spec"),
    [((7,), ()), ((), ()), ((5, 6), (None, "tp")), ((4, 9), ("tp",)), ((6, 4), (("tp", "sp"),)),
     ((3, 2, 2), ("sp", "tp"))],
    ids=str,
)  # fmt: skip
def test_traced_packing_is_that_of_numpy_and_rows_are_the_users_shards(ranks, shape, spec):
    sizes = axes_of(ranks)
    leaves = (leaf(0, "w", shape, spec=spec),)
    (page,) = build_layout(leaves, LayoutOptions(), num_ranks=ranks, axis_sizes=sizes).pages
    segment = page.segments[0]
    value = counting(shape, page.dtype, 0)
    rows = to_rows(value, leaves[0], page, segment, sizes)
    np.testing.assert_array_equal(to_rows(jnp.asarray(value), leaves[0], page, segment, sizes, jnp), rows)
    np.testing.assert_array_equal(from_rows(jnp.asarray(rows), leaves[0], page, segment, sizes, jnp), value)
    shards = [value]
    for dim, entry in enumerate(spec):
        for axis in (entry,) if isinstance(entry, str) else tuple(entry or ()):
            shards = [part for shard in shards for part in np.split(shard, sizes[axis], axis=dim)]
    assert page.num_tp == len(shards)
    for row, shard in zip(rows, shards, strict=True):
        np.testing.assert_array_equal(row.reshape(-1)[: shard.size], shard.reshape(-1))


def test_repeated_blocks_get_a_page_each_and_small_neighbours_share_one():
    leaves = [leaf(0, "embedding/table", (100, 64))]
    for block in range(11):
        leaves += [leaf(len(leaves) + i, f"block_{block}/{n}", (40, 40)) for i, n in enumerate(("up", "down"))]
    leaves += [leaf(len(leaves), "final/scale", (3,)), leaf(len(leaves) + 1, "final/shift", (3,))]
    layout = build_layout(leaves, LayoutOptions(min_io_bytes=4096))
    found = {page.name: [leaves[s.piece.leaf].name for s in page.segments] for page in layout.pages}
    for block in range(11):
        assert found[f"block_{block}"] == [f"block_{block}/down", f"block_{block}/up"]
    assert found["final"] == ["final/scale", "final/shift"]
    names = [page.name for page in layout.pages]
    assert names == sorted(names, key=natural_key) and names.index("block_9") + 1 == names.index("block_10")
    merged = build_layout(leaves, LayoutOptions(min_io_bytes=1 << 20))
    assert len(merged.pages) == 1, "everything is below min_io_bytes"


def test_names_that_read_alike_keep_their_order():
    leaves = (leaf(0, "m/a1", (5,)), leaf(1, "m/a01", (6,)), leaf(2, "m/a001", (7,)))
    one = build_layout(leaves, LayoutOptions()).to_json()
    assert build_layout(permuted(leaves, (2, 0, 1)), LayoutOptions()).to_json() == one


def test_stacked_leaves_are_pages_slice_by_slice():
    leaves = (
        leaf(0, "layers/attention/kernel", (4, 40, 40), stack_ndim=1),
        leaf(1, "layers/mlp/kernel", (4, 40, 80), stack_ndim=1),
        leaf(2, "head", (40, 10)),
    )
    layout = build_layout(leaves, LayoutOptions(min_io_bytes=1))
    for index in range(4):
        page, _ = layout.segment(Piece(0, index))
        assert [s.piece for s in page.segments] == [Piece(0, index), Piece(1, index)]
        assert page.name == f"layers/{index}"
    assert len({layout.where[Piece(0, i)][0] for i in range(4)}) == 4
    shared = build_layout(leaves, LayoutOptions(min_io_bytes=1), shared={0})
    assert [p.name for p in shared.pages if p.name.startswith("layers/attention")] == [
        f"layers/attention/kernel[{i}]" for i in range(4)
    ]


def test_a_large_subtree_is_split_between_leaves_and_a_large_leaf_is_one_page():
    leaves = (leaf(0, "m/a", (5000,)), leaf(1, "m/b", (5000,)), leaf(2, "m/c", (100,)))
    layout = build_layout(leaves, LayoutOptions(page_bytes=10_000, min_io_bytes=1))
    assert [p.name for p in layout.pages] == ["m/a", "m/b", "m/c"]
    assert layout.pages[0].num_bytes >= 20_000


def test_pages_never_mix_dtypes_kinds_or_shardings():
    leaves = (
        leaf(0, "m/a", (8,)),
        leaf(1, "m/b", (8,), kind=LeafKind.FROZEN),
        leaf(2, "m/c", (8,), np.int32),
        leaf(3, "m/d", (8,), spec=("tp",)),
        leaf(4, "m/e", (9,), spec=("sp",)),
    )
    layout = build_layout(leaves, LayoutOptions(), axis_sizes=AXES)
    assert len(layout.pages) == 5
    for a, b in all_pairs(layout.pages):
        assert (a.dtype, a.kind, a.num_tp) != (b.dtype, b.kind, b.num_tp)


def test_a_spec_on_a_stacked_dim_does_not_split_its_slices():
    stacked = leaf(0, "w", (4, 3), stack_ndim=1, spec=("tp", None))
    assert tp_axes(stacked) == ()
    layout = build_layout((stacked,), LayoutOptions(), axis_sizes=AXES)
    page, segment = layout.segment(Piece(0, 2))
    value = counting((3,), page.dtype, 5)
    rows = to_rows(value, stacked, page, segment, AXES)
    np.testing.assert_array_equal(from_rows(rows, stacked, page, segment, AXES), value)


def test_an_indivisible_sharding_is_refused_with_the_numbers():
    with pytest.raises(zinf.ConfigError, match=r"'w' of shape \(4, 5\): dim 1 is not divisible by the 2 shards"):
        build_layout((leaf(0, "w", (4, 5), spec=(None, "tp")),), LayoutOptions(), axis_sizes=AXES)


@pytest.mark.parametrize("wrong", [{"page_bytes": 0}, {"min_io_bytes": -1}])
def test_options_are_checked(wrong):
    with pytest.raises(zinf.ConfigError, match="page_bytes"):
        LayoutOptions(**wrong)


# --- stored layouts ------------------------------------------------------------------------------------------------


@PROPERTY
@given(tables(), RANKS, OPTIONS, st.randoms())
def test_a_stored_layout_comes_back_whatever_the_order_of_leaves(leaves, ranks, options, random):
    layout = build_layout(leaves, options, num_ranks=ranks, axis_sizes=axes_of(ranks))
    stored = json.loads(json.dumps(layout.to_json()))
    assert Layout.from_json(leaves, stored) == layout
    order = list(range(len(leaves)))
    random.shuffle(order)
    other = Layout.from_json(permuted(leaves, order), stored)
    assert other.to_json() == stored


BASE = (leaf(0, "a", (3, 5)), leaf(1, "b", (7,)), leaf(2, "layers", (4, 6), stack_ndim=1), leaf(3, "n", (2,), np.int32))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (BASE[:3], "has a parameter 'n' that this model lacks"),
        ((*BASE, leaf(4, "new", (1,))), "lacks parameters that this model has: new"),
        ((leaf(0, "a", (3, 6)), *BASE[1:]), r"another shape for parameter 'a' than \(3, 6\)"),
        ((*BASE[:2], leaf(2, "layers", (3, 6), stack_ndim=1), BASE[3]), "another shape for parameter 'layers'"),
        ((*BASE[:2], leaf(2, "layers", (5, 6), stack_ndim=1), BASE[3]), "another shape for parameter 'layers'"),
        ((leaf(0, "a", (3, 5), kind=LeafKind.FROZEN), *BASE[1:]), "'a' is trainable in the stored run and frozen"),
        ((*BASE[:3], leaf(3, "n", (2,), np.int8)), "'n' is int32 in the stored run and int8"),
    ],
)
def test_a_layout_of_another_model_is_refused(changed, message):
    stored = build_layout(BASE, LayoutOptions()).to_json()
    with pytest.raises(zinf.ConfigError, match=message):
        Layout.from_json(changed, stored)
