"""The schedule: whatever the order of uses, a page is in its frame when it is read, and two things never share one."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zinf_jax as zinf
from tests.plan.shapes import GIB, OPTIONS, PAGE, stack, steps
from zinf_jax.plan import Phase, Residency, StreamOptions
from zinf_jax.plan import schedule as sch

PROPERTY = settings(max_examples=150, deadline=None)


def load_at(residencies, t):
    return sum(r.num_bytes for r in residencies if r.start <= t < r.end)


def test_the_order_of_a_step():
    shape = stack(2, groups=(2, 1))
    found = [(p.phase.value, p.unit, p.group) for p in sch.positions_of(shape)]
    one = [
        ("forward", 0),
        ("forward", 1),
        ("forward", 2),
        ("turn", 3),
        ("backward", 2),
        ("backward", 1),
        ("backward", 0),
    ]
    assert found == [(*p, g) for g in (0, 1) for p in one]
    assert [p.index for p in sch.positions_of(shape)] == list(range(14))


@PROPERTY
@given(steps(), OPTIONS, st.one_of(st.none(), st.integers(0, 60).map(lambda n: n * PAGE)))
def test_every_use_is_covered_by_one_residency_that_was_issued_early(shape, options, capacity):
    positions = sch.positions_of(shape)
    pages = range(len(shape.pages))
    found = sch.weight_residencies(shape, positions, options, pages=pages, capacity=capacity)
    for position in positions:
        for page in shape.units[position.unit].pages:
            mine = [r for r in found if r.key[1] == page and r.first_use <= position.index <= r.last_use]
            assert len(mine) == 1, (position, page, found)
            # In use until `max_in_flight` further positions were dispatched.
            assert mine[0].end >= position.index + options.max_in_flight
    for r in found:
        assert r.first_use - r.start == min(options.lookahead, r.first_use)
        others = [x for x in found if x is not r and x.key == r.key]
        assert all(x.end <= r.start or r.end <= x.start for x in others), "a page is in two frames"
    assert list(found) == sorted(found, key=lambda r: (r.start, r.first_use))


@PROPERTY
@given(steps(), OPTIONS, st.integers(0, 60).map(lambda n: n * PAGE))
def test_pages_stay_between_uses_only_while_capacity_lasts(shape, options, capacity):
    positions = sch.positions_of(shape)
    pages = range(len(shape.pages))

    def residencies(limit):
        return sch.weight_residencies(shape, positions, options, pages=pages, capacity=limit)

    least, found, all_kept = residencies(0), residencies(capacity), residencies(None)
    for t in range(len(positions) + options.max_in_flight):
        assert load_at(found, t) <= max(capacity, load_at(least, t))
    used = {page for position in positions for page in shape.units[position.unit].pages}
    assert len(all_kept) == len(used), "without a limit every page is fetched once"
    assert len(all_kept) <= len(found) <= len(least)


def test_the_shortest_gaps_are_bridged_first():
    """Belady on a known order: the pages of the last layers are needed again soonest."""
    shape = stack(8)
    options = StreamOptions(lookahead=1, max_in_flight=1)
    positions = sch.positions_of(shape)
    size = shape.pages[0].weights_bytes
    capacities = [n * size for n in (3, 5, 20)]
    kept = []
    for capacity in capacities:
        found = sch.weight_residencies(shape, positions, options, pages=range(10), capacity=capacity)
        fetched = [r.key[1] for r in found]
        kept.append({p for p in range(10) if fetched.count(p) == 1})
    assert kept[0] < kept[1] < kept[2] == set(range(10))
    for some in kept[:-1]:
        assert some == set(range(min(some), 10)), "the pages nearest to the turn"


def test_without_lookahead_a_fetch_is_issued_where_it_is_used():
    shape = stack(4)
    found = sch.weight_residencies(
        shape, sch.positions_of(shape), StreamOptions(lookahead=0), pages=range(6), capacity=0
    )
    assert all(r.start == r.first_use for r in found)


@PROPERTY
@given(steps(), OPTIONS)
def test_a_gradient_has_a_frame_from_its_first_contribution_until_it_is_written(shape, options):
    positions = sch.positions_of(shape)
    found = {r.key[1]: r for r in sch.gradient_residencies(shape, positions, options, pages=range(len(shape.pages)))}
    for position in positions:
        if position.phase is not Phase.FORWARD:
            for page in shape.units[position.unit].gradient_pages:
                assert found[page].start <= position.index
                assert found[page].end >= position.index + 2 * options.max_in_flight
    assert set(found) == {p for u in shape.backward for p in shape.units[u].gradient_pages}


@PROPERTY
@given(steps())
def test_lives_of_values(shape):
    positions = sch.positions_of(shape)
    lives = sch.value_lives(shape, positions)
    made = sum(len(unit.outputs) for unit in shape.units)
    assert len(lives) == len({(x.value, x.group) for x in lives}) == made * len(shape.group_sizes)
    for life in lives:
        group = [(p, shape.units[p.unit]) for p in positions if p.group == life.group]
        forward = [p.index for p, unit in group if p.phase is Phase.FORWARD and life.value in unit.inputs]
        backward = [p.index for p, u in group if p.phase is not Phase.FORWARD and life.value in (*u.inputs, *u.saved)]
        assert life.last_forward == max([life.made, *forward])
        assert (life.first_backward, life.last_backward) == ((min(backward), max(backward)) if backward else (-1, -1))
        assert life.is_residual == bool(backward)


@PROPERTY
@given(steps(), OPTIONS)
def test_spilled_residuals_leave_and_come_back_once_per_micro_batch(shape, options):
    positions = sch.positions_of(shape)
    lives = sch.value_lives(shape, positions)
    spilled = frozenset(x.value for x in lives if x.is_residual)
    found = sch.residual_residencies(shape, lives, options, spilled=spilled)
    keys = [r.key for r in found]
    assert len(keys) == len(set(keys)) == 2 * len(spilled) * shape.num_micro_batches
    by_key = {r.key: r for r in found}
    for life in lives:
        if life.value in spilled:
            first = sum(shape.group_sizes[: life.group])
            for micro in range(first, first + shape.group_sizes[life.group]):
                out = by_key["residual_out", life.value, micro]
                back = by_key["residual_in", life.value, micro]
                assert out.start == life.last_forward
                assert back.start <= life.first_backward and back.end >= life.last_backward + options.max_in_flight
    long = frozenset(
        spilled - {x.value for x in lives if x.first_backward - x.last_forward <= 4 * options.max_in_flight}
    )
    plain = sch.device_peak(shape, positions, lives, options, spilled=frozenset(), kept_gradients={})
    assert sch.device_peak(shape, positions, lives, options, spilled=long, kept_gradients={}) <= plain


@pytest.mark.parametrize(("max_in_flight", "alive"), [(1, 2), (2, 2), (3, 3)])
def test_casts_of_the_next_unit_are_made_while_one_runs(max_in_flight, alive):
    assert device_peak(max_in_flight, cast_bytes=GIB) == device_peak(max_in_flight) + alive * GIB


def test_casts_of_the_unit_before_are_there_until_it_is_done():
    """Those of the head, the largest, while the backward after it begins."""
    shape = stack(6)
    units = [dataclasses.replace(unit, cast_bytes=GIB) for unit in shape.units]
    units[-2] = dataclasses.replace(units[-2], backward_temp_bytes=100 * GIB)  # the peak is at its backward
    units[-1] = dataclasses.replace(units[-1], cast_bytes=3 * GIB)
    without = [dataclasses.replace(unit, cast_bytes=0) for unit in units]
    peaks = [peak_of(dataclasses.replace(shape, units=tuple(some))) for some in (units, without)]
    assert peaks[0] - peaks[1] == 4 * GIB


def test_gradients_are_made_beside_the_next_backward():
    """Each kind of program runs one after the other, and the one beside the other."""
    plain = device_peak()
    assert device_peak(gradient_temp_bytes=GIB) == plain + GIB
    assert device_peak(backward_temp_bytes=GIB) == plain + GIB
    assert device_peak(backward_temp_bytes=GIB, gradient_temp_bytes=GIB) == plain + 2 * GIB


def test_a_sum_over_micro_batches_is_of_gradients_alone():
    """What crosses to the program that makes them is given up with it."""
    outputs = {"backward_bytes": 3 * GIB}
    assert device_peak(groups=(2,), **outputs, crossing_bytes=GIB) == device_peak(groups=(2,), **outputs) - 2 * GIB
    assert device_peak(**outputs, crossing_bytes=GIB) == device_peak(**outputs)


def device_peak(max_in_flight=2, groups=(1,), **sizes):
    """Of six equal layers with these sizes."""
    shape = stack(6, groups=groups)
    return peak_of(
        dataclasses.replace(shape, units=tuple(dataclasses.replace(unit, **sizes) for unit in shape.units)),
        max_in_flight,
    )


def peak_of(shape, max_in_flight=2):
    positions, options = sch.positions_of(shape), StreamOptions(max_in_flight=max_in_flight)
    lives = sch.value_lives(shape, positions)
    return sch.device_peak(shape, positions, lives, options, spilled=frozenset(), kept_gradients={})


RESIDENCIES = st.lists(
    st.tuples(st.integers(1, 5 * PAGE), st.integers(0, 20), st.integers(1, 8)).map(
        lambda x: Residency(("weights", 0), x[0], x[1], x[1] + x[2], x[1], x[1])
    ),
    max_size=25,
)


@PROPERTY
@given(RESIDENCIES)
def test_packing_never_overlaps_what_lives_at_the_same_time(residencies):
    offsets, total = sch.pack(residencies)
    assert set(offsets) == set(range(len(residencies)))
    for i, a in enumerate(residencies):
        assert offsets[i] % PAGE == 0 and offsets[i] >= 0 and offsets[i] + a.num_bytes <= total
        for j, b in enumerate(residencies[:i]):
            together = a.start < b.end and b.start < a.end
            apart = offsets[i] + a.num_bytes <= offsets[j] or offsets[j] + b.num_bytes <= offsets[i]
            assert apart or not together, (a, b, offsets[i], offsets[j])
    assert sch.peak_load(residencies) <= total
    assert sch.peak_load(residencies) == max((load_at(residencies, t) for t in range(30)), default=0)


@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_a_stack_of_equal_layers_is_packed_without_loss(lookahead):
    shape = stack(30)
    options = StreamOptions(lookahead=lookahead)
    found = sch.weight_residencies(shape, sch.positions_of(shape), options, pages=range(32), capacity=0)
    assert sch.pack(found)[1] <= 1.1 * sch.peak_load(found)


def test_frames_do_not_grow_with_depth():
    sizes = set()
    for depth in (8, 16, 64):
        shape = stack(depth)
        positions = sch.positions_of(shape)
        weights = sch.weight_residencies(shape, positions, StreamOptions(), pages=range(depth + 2), capacity=0)
        gradients = sch.gradient_residencies(shape, positions, StreamOptions(), pages=range(depth + 2))
        sizes.add(sch.pack((*weights, *gradients))[1])
    assert len(sizes) == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"lookahead": -1}, "lookahead must be 0"),
        ({"max_in_flight": 0}, "max_in_flight must be at least 1"),
        ({"chunk_bytes": 0}, "chunk_bytes must be positive"),
        ({"num_chunk_frames": 0}, "num_chunk_frames must be at least 1"),
        ({"micro_batches_per_group": -1}, "micro_batches_per_group"),
    ],
)
def test_cf06_options_say_what_they_take(wrong, message):
    with pytest.raises(zinf.ConfigError, match=message):
        StreamOptions(**wrong)
