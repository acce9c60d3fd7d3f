"""Leases of frames: two never overlap, peaks are counted, memory outlives whoever still looks at it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zinf_jax.tier import FrameArena, FrameSpan

PAGE = 4096


@pytest.fixture
def arena():
    made = FrameArena(16 * PAGE, lock=False)
    yield made
    made.close()


def test_a_lease_is_its_bytes(arena):
    one = arena.lease(FrameSpan(0, PAGE), "one")
    two = arena.lease(FrameSpan(PAGE, 2 * PAGE), "two")  # neighbours touch
    one[:], two[:] = 1, 2
    assert one.dtype == np.uint8 and one.nbytes == PAGE
    np.testing.assert_array_equal(arena.view(FrameSpan(0, 3 * PAGE)), np.repeat([1, 2], [PAGE, 2 * PAGE]))
    assert all(x.ctypes.data % PAGE == 0 for x in (one, two)), "O_DIRECT, and device_put aliases"


@pytest.mark.parametrize("span", [(0, 1), (PAGE, PAGE), (2 * PAGE - 1, 5), (0, 16 * PAGE), (PAGE // 2, PAGE)], ids=str)
def test_an_overlap_names_both(arena, span):
    arena.lease(FrameSpan(0, 2 * PAGE), "weights of block_3")
    with pytest.raises(AssertionError, match=r"gradients of head wants .* but weights of block_3 still holds"):
        arena.lease(FrameSpan(*span), "gradients of head")
    assert arena.leased_bytes == 2 * PAGE
    arena.release(FrameSpan(0, 2 * PAGE))
    arena.lease(FrameSpan(*span), "gradients of head")


def test_only_what_was_leased_is_released(arena):
    arena.lease(FrameSpan(0, PAGE), "one")
    with pytest.raises(KeyError):
        arena.release(FrameSpan(PAGE, PAGE))
    with pytest.raises(AssertionError):
        arena.release(FrameSpan(0, 2 * PAGE))


def test_nothing_lies_outside(arena):
    with pytest.raises(AssertionError, match=r"outside the arena of 64\.00 KiB"):
        arena.lease(FrameSpan(15 * PAGE, 2 * PAGE), "one")
    with pytest.raises(AssertionError):
        FrameSpan(0, PAGE).part(1, PAGE)
    assert FrameSpan(PAGE, PAGE).part(8, 16) == FrameSpan(PAGE + 8, 16)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 15), st.integers(1, 6)), max_size=40))
def test_counts_are_those_of_a_model(events):
    """Any sequence of leases and releases against a plain list of who holds which page."""
    arena = FrameArena(16 * PAGE, lock=False)
    held: dict[int, FrameSpan] = {}
    peak = 0
    for take, start, pages in events:
        span = FrameSpan(start * PAGE, min(pages, 16 - start) * PAGE)
        if take:
            taken = {p for s in held.values() for p in range(s.offset, s.offset + s.num_bytes, PAGE)}
            wanted = set(range(span.offset, span.offset + span.num_bytes, PAGE))
            if taken & wanted:
                with pytest.raises(AssertionError, match="still holds"):
                    arena.lease(span, "x")
            else:
                arena.lease(span, "x")
                held[span.offset] = span
        elif span.offset in held:
            arena.release(held.pop(span.offset))
        used = sum(s.num_bytes for s in held.values())
        peak = max(peak, used)
        assert (arena.leased_bytes, arena.peak_leased_bytes) == (used, peak)
    arena.close()


def test_memory_outlives_the_arena_for_whoever_looks_at_it():
    arena = FrameArena(PAGE, lock=False)
    view = arena.lease(FrameSpan(0, PAGE), "one")
    view[:] = 7
    arena.close()
    np.testing.assert_array_equal(view, 7)
