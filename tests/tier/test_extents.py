"""Where chunks lie: dealt over drives in proportion, side by side on each, the same every time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zinf_jax.tier.extents import SECTOR, KindExtents, Place
from zinf_jax.units import ceil_to

PAGES = st.lists(st.lists(st.integers(1, 3 * SECTOR), max_size=6), max_size=8)
SHARES = st.lists(st.floats(0.1, 10), min_size=1, max_size=4)


@given(PAGES, SHARES)
def test_each_drive_is_filled_without_gaps_or_overlaps(pages, shares):
    extents = KindExtents.deal(pages, shares)
    assert [place.num_bytes for place in extents.places] == [n for chunks in pages for n in chunks]
    for path, used in enumerate(extents.bank_bytes):
        end = 0
        for place in (p for p in extents.places if p.path == path):
            assert place.offset == end, "in order, so that a page's chunks on a drive stand side by side"
            end = place.offset + ceil_to(place.num_bytes, SECTOR)
        assert end == used and used % SECTOR == 0, "the next bank begins on a sector of its own"
    assert extents.num_bytes == sum(extents.bank_bytes)


@given(PAGES, SHARES)
def test_a_page_finds_its_chunks(pages, shares):
    extents = KindExtents.deal(pages, shares)
    indices = [list(extents.chunks_of(page)) for page in range(len(pages))]
    assert [len(found) for found in indices] == [len(chunks) for chunks in pages]
    assert [i for found in indices for i in found] == list(range(len(extents.places)))


@given(PAGES, SHARES)
def test_the_same_every_time(pages, shares):
    assert KindExtents.deal(pages, shares) == KindExtents.deal(pages, list(shares))


@pytest.mark.parametrize("shares", [(1.0,), (1.0, 1.0), (3.0, 1.0), (2.0, 2.0, 1.0), (7.0, 2.0, 1.0)])
def test_drives_get_bytes_in_proportion(shares):
    extents = KindExtents.deal([[SECTOR] * 20] * 30, shares)
    for path, used in enumerate(extents.bank_bytes):
        expected = extents.num_bytes * shares[path] / sum(shares)
        assert abs(used - expected) <= SECTOR * len(shares)
    if shares == (1.0, 1.0):
        assert [p.path for p in extents.places[:4]] == [0, 1, 0, 1], "neighbours come from different drives"


def test_small_cases():
    assert KindExtents.deal([], [1.0]) == KindExtents((), (0,), (0,))
    assert KindExtents.deal([[]], [1.0, 2.0]) == KindExtents((), (0, 0), (0, 0))
    assert KindExtents.deal([[1], [SECTOR + 1]], [1.0]) == KindExtents(
        (Place(0, 0, 1), Place(0, SECTOR, SECTOR + 1)), (0, 1, 2), (3 * SECTOR,)
    )
    for shares in ([], [1.0, 0.0], [-1.0]):
        with pytest.raises(AssertionError):
            KindExtents.deal([[1]], shares)
