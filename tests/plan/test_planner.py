"""The planner: budgets hold or the run is refused with the numbers; what can be chosen is chosen to save traffic."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zinf_jax as zinf
from tests.plan.shapes import GIB, MIB, OPTIONS, PAGE, hardware, page, plan, stack, steps
from zinf_jax.plan import BYTES_OF, Freed, PlacementOptions, StreamOptions, Tier, plan_evaluation, planner
from zinf_jax.plan.placement import floor_tiers, promote
from zinf_jax.plan.plan import HOLES_BYTES, KEPT_BYTES, PROCESS_SLACK_BYTES
from zinf_jax.units import format_bytes

PROPERTY = settings(max_examples=100, deadline=None)
CHOICES = st.sampled_from([None, *Tier])
TIERS = st.fixed_dictionaries({kind: CHOICES for kind in ("weights", "optimizer", "gradients", "residuals")})
NVME = dict.fromkeys(("weights", "optimizer", "gradients", "residuals"), Tier.NVME)


def check_places(found):
    """Everything in the arena has its own place for as long as it is there."""
    fixed = [(offset, getattr(found.shape.pages[i], BYTES_OF[kind])) for (kind, i), offset in found.resident.items()]
    fixed += [(offset, found.shape.value_bytes[value]) for (value, _), offset in found.host_residuals.items()]
    fixed.sort()
    for (a, size), (b, _) in itertools.pairwise(fixed):
        assert a + size <= b
    assert all(offset % PAGE == 0 and offset + size <= found.stream_offset for offset, size in fixed)
    end = found.update_offset if found.overlaps else found.arena_bytes
    assert found.overlaps or found.update_offset == found.stream_offset
    for number, span in enumerate(found.spans):
        r = span.residency
        assert found.stream_offset <= span.offset and span.offset + r.num_bytes <= end
        for other in found.spans[:number]:
            if other.residency.start < r.end and r.start < other.residency.end:
                apart = (
                    span.offset + r.num_bytes <= other.offset or other.offset + other.residency.num_bytes <= span.offset
                )
                assert apart, (span, other)
    assert found.update_offset + found.num_chunk_frames * found.chunk_frame_bytes <= found.arena_bytes


def check_chunks(found):
    """The update sees every element of every trained page once, and a frame holds any chunk."""
    seen = {}
    for chunk in found.chunks:
        assert chunk.start == seen.get(chunk.page, 0) < chunk.stop
        assert chunk.stop - chunk.start <= found.chunk_elements
        seen[chunk.page] = chunk.stop
        tiers = found.tiers[chunk.page]
        per_element = 2 * (tiers.weights is Tier.NVME) + 10 * (tiers.optimizer is Tier.NVME)
        per_element += 2 * (tiers.gradients is Tier.NVME)
        assert per_element * (chunk.stop - chunk.start) <= found.chunk_frame_bytes
    assert seen == {i: p.num_elements for i, p in enumerate(found.shape.pages) if p.gradient_bytes}


@PROPERTY
@given(steps(), OPTIONS, TIERS, st.booleans(), st.integers(0, 200).map(lambda n: n * 4 * PAGE))
def test_a_plan_fits_its_budget_or_is_refused(shape, options, tiers, cache, host):
    machine = hardware(host, cache_pages=cache)
    try:
        found = plan(shape, machine, options, **tiers)
    except zinf.PlanError as error:
        assert f"host_memory is {format_bytes(host)}" in str(error)
        return
    assert found.host_bytes <= host
    check_places(found)
    check_chunks(found)
    for kind in ("weights", "optimizer", "gradients"):
        if tiers[kind] is not None:
            assert {getattr(t, kind) for t in found.tiers} == {tiers[kind]}
    assert all(item.num_bytes > 0 for item in found.items)
    assert plan(shape, machine, options, **tiers) == found, "pure"


@PROPERTY
@given(steps(), OPTIONS, TIERS, st.booleans(), st.integers(0, 100).map(lambda n: n * PAGE))
def test_the_least_memory_is_enough_and_so_is_more(shape, options, tiers, cache, more):
    """What a plan without any cache needs is what the refusal names; with it, or with more, the run is accepted."""
    tiers |= {kind: Tier.NVME for kind, tier in tiers.items() if tier is None and kind != "residuals"}
    least = dataclasses.replace(options, read_ahead=False)
    needed = plan(shape, hardware(1 << 60), least, **tiers).host_bytes
    assert plan(shape, hardware(needed + more, cache_pages=cache), options, **tiers).host_bytes <= needed + more
    if needed:
        with pytest.raises(zinf.PlanError) as caught:
            plan(shape, hardware(needed - 1), options, **tiers)
        assert f"raise host_memory to {format_bytes(needed)}" in str(caught.value)


# --- refusals ------------------------------------------------------------------------------------------------------


def test_me02_the_largest_item_is_named():
    """buffer_count 4 x 1e9 elements was 8 GB in one go, killed before any file existed."""
    options = StreamOptions(chunk_bytes=4 * GIB, num_chunk_frames=4)
    with pytest.raises(zinf.PlanError) as caught:
        plan(stack(4, elements=1 << 28), hardware(256 * MIB), options, **NVME)
    text = str(caught.value)
    for part in (
        "host_memory is 256.00 MiB",
        "largest: frames of the update",
        "streaming.chunk_bytes (4.00 GiB)",
    ):
        assert part in text, text
    assert "tier     what" in text, "the table is there"


def test_me05_host_memory_below_what_is_placed_there():
    """80 GB of state for 64 GB: both numbers, the kind, and where else it can go."""
    shape = stack(30, elements=1 << 28)  # 32 pages: 16 GiB of weights, 80 GiB of records
    with pytest.raises(zinf.PlanError) as caught:
        plan(shape, hardware(64 * GIB), **NVME | {"optimizer": Tier.HOST})
    text = str(caught.value)
    for part in (
        "host_memory is 64.00 GiB",
        "largest: optimizer, 80.00 GiB",
        "put optimizer on nvme",
        "raise host_memory",
    ):
        assert part in text, text


def test_me06_host_bytes_are_not_device_bytes():
    """State of 56 GiB beside a device of 1 GiB: subtracted from each other they gave an unlimited budget."""
    shape = stack(30, elements=1 << 27, value_bytes=MIB)
    machine = hardware(64 * GIB, GIB, aliases=False)
    found = plan(shape, machine, weights=Tier.HOST, optimizer=Tier.HOST, gradients=Tier.HOST)
    assert 0 < found.device_bytes <= GIB < 56 * GIB <= found.host_bytes <= 64 * GIB
    with pytest.raises(zinf.PlanError, match=r"device_memory is 512\.00 MiB"):
        plan(shape, dataclasses.replace(machine, device_memory=512 * MIB), weights=Tier.HOST, optimizer=Tier.HOST,
             gradients=Tier.HOST)  # fmt: skip


def test_a_device_that_is_too_small_for_activations_gets_advice():
    shape = stack(30, elements=1 << 12, value_bytes=64 * MIB)
    with pytest.raises(zinf.PlanError) as caught:
        plan(shape, hardware(device=GIB), **NVME | {"residuals": Tier.DEVICE})
    for part in ("device_memory is 1.00 GiB", "smaller micro-batches", "put residuals on host or nvme"):
        assert part in str(caught.value)
    assert plan(shape, hardware(device=GIB), **NVME).device_bytes <= GIB
    chosen = plan(shape, hardware(device=GIB), **NVME | {"residuals": None})
    assert set(chosen.spilled.values()) == {Tier.HOST} and chosen.host_residuals


def test_leaves_that_are_updated_whole_count_against_the_budget():
    shape = stack(4)
    needed = plan(shape, **NVME).host_bytes
    assert plan(shape, update_bytes=GIB, **NVME).host_bytes == needed + GIB
    with pytest.raises(zinf.PlanError, match="largest: leaves updated whole"):
        plan(shape, hardware(needed), update_bytes=GIB, **NVME)


@pytest.mark.parametrize("kind", ["weights", "optimizer", "gradients", "residuals"])
def test_an_unknown_tier_is_refused(kind):
    with pytest.raises(zinf.ConfigError, match=f"placement of {kind} must be device, host, nvme or auto, got 'cpu'"):
        PlacementOptions(**{kind: "cpu"})


# --- choices -------------------------------------------------------------------------------------------------------


@PROPERTY
@given(
    st.lists(st.integers(1, 9).map(lambda n: n * PAGE), min_size=1, max_size=6), st.integers(0, 900), TIERS
)  # fmt: skip
def test_promotion_uses_the_room_the_most_useful_first(sizes, room, tiers):
    room *= PAGE
    tiers.pop("residuals")
    pages = [page(str(i), n) for i, n in enumerate(sizes)]
    options = PlacementOptions(**tiers)
    floor = floor_tiers(pages, options)
    found = promote(pages, floor, options, room)
    used, left = 0, []
    for kind in ("weights", "gradients", "optimizer"):
        for p, before, after in zip(pages, floor, found, strict=True):
            old, new = getattr(before, kind), getattr(after, kind)
            if tiers[kind] is not None:
                assert old == new == tiers[kind], "what was asked for stays"
            elif new is Tier.HOST:
                used += getattr(p, BYTES_OF[kind])
            else:
                left.append((kind, getattr(p, BYTES_OF[kind])))
    assert used <= room
    assert all(num_bytes > room - used for _, num_bytes in left), "what still fits is taken"
    if any(kind == "weights" for kind, _ in left):
        first = min(n for kind, n in left if kind == "weights")
        assert first > room - sum(p.weights_bytes for p, t in zip(pages, found, strict=True) if t.weights is Tier.HOST)


def test_auto_fills_the_budget_weights_first():
    shape = stack(10, elements=1 << 20)  # 12 pages: 24 MiB of weights, 120 of records, 24 of gradients
    least = plan(shape, hardware(1 << 60), **NVME | {"residuals": None}).host_bytes

    def on_host(extra, **other):
        found = plan(shape, hardware(least + extra, **other), residuals=Tier.DEVICE)
        return {k: sum(getattr(t, k) is Tier.HOST for t in found.tiers) for k in ("weights", "gradients", "optimizer")}

    for cache in (False, True):
        few = on_host(12 * MIB, cache_pages=cache)
        assert 6 <= few["weights"] < 12 and few["gradients"] == few["optimizer"] == 0
        some = on_host(60 * MIB, cache_pages=cache)
        assert some["weights"] == some["gradients"] == 12 and 0 < some["optimizer"] < 12
        assert on_host(200 * MIB, cache_pages=cache) == {"weights": 12, "gradients": 12, "optimizer": 12}


def test_frames_for_records_that_are_read_ahead(monkeypatch):
    """Half of what a budget leaves; without one up to half of the records, and a limit; never more than chunks."""
    shape = stack(20)  # 22 pages
    options = StreamOptions(chunk_bytes=100_000, update_overlap="next_forward")
    ahead = dataclasses.replace(options, read_ahead=True)
    least = plan(shape, hardware(1 << 60), options, **NVME)
    size, count = least.chunk_frame_bytes, least.num_chunk_frames
    records = sum(p.record_bytes for p in shape.pages)

    def more(**machine):
        found = plan(shape, hardware(**machine), ahead, **NVME)
        if "cache_pages" not in machine:  # what is left then goes to weights
            assert found.host_bytes - least.host_bytes == (found.num_chunk_frames - count) * size
        return found.num_chunk_frames - count

    assert more() == records // 2 // size < len(least.chunks) - count
    assert more(host=least.host_bytes + 3 * size) == 3
    assert more(cache_pages=True) == len(least.chunks) - count
    assert more(host=least.host_bytes + 10 * size, cache_pages=True) == 5
    assert more(host=least.host_bytes) == 0
    assert plan(shape, options=dataclasses.replace(ahead, update_overlap="none"), **NVME).num_chunk_frames == count
    monkeypatch.setattr(planner, "AHEAD_BYTES", 7 * size)
    assert more() == 7


def test_a_budget_saves_fetches_and_the_prediction_says_so():
    shape, options = stack(20), StreamOptions(chunk_bytes=100_000)
    needed = plan(shape, options=options, **NVME).host_bytes
    reads = []
    for extra in (0, 8, 64):
        found = plan(shape, hardware(needed + extra * MIB, cache_pages=True), options, **NVME)
        reads.append(found.prediction.read_bytes)
        weights = [s for s in found.spans if s.residency.key[0] == "weights"]
        assert sum(s.residency.num_bytes for s in weights) == sum(
            s.residency.num_bytes for spans in found.fetches.values() for s in spans
        )
    assert reads[0] > reads[1] > reads[2]


def test_predicted_traffic_per_parameter_is_what_the_design_says():
    """28 bytes with gradients on the host, 32 where they are spilled in bf16; pages at the turn are read once."""
    shape = stack(60)
    parameters = sum(p.num_elements for p in shape.pages)
    for tier, wanted in ((Tier.HOST, 28), (Tier.NVME, 32)):
        found = plan(shape, weights=Tier.NVME, optimizer=Tier.NVME, gradients=tier, residuals=Tier.DEVICE)
        moved = (found.prediction.read_bytes + found.prediction.write_bytes) / parameters
        assert wanted - 0.5 <= moved <= wanted


@pytest.mark.parametrize("gradients", [Tier.HOST, Tier.NVME])
@pytest.mark.parametrize("hold", [0, 2])
def test_an_update_beside_backward_meets_what_is_in_frames(gradients, hold):
    """Weights and spilled gradients too, but for pages whose gradient is complete with the norm."""
    shape = stack(20)
    tiers = {"weights": Tier.NVME, "optimizer": Tier.NVME, "gradients": gradients, "residuals": Tier.DEVICE}

    def predicted(mode):
        return plan(shape, options=StreamOptions(update_overlap=mode, update_hold=hold), **tiers).prediction

    forward, backward, auto = (predicted(mode) for mode in ("next_forward", "backward", "auto"))
    weights = sum(p.weights_bytes for p in shape.pages)
    with_norm = shape.units[shape.backward[-1]].pages
    met = sum(p.gradient_bytes for i, p in enumerate(shape.pages) if i not in with_norm)
    more = weights * (not hold) - met * (hold > 0 and gradients is Tier.NVME)
    assert backward.read_bytes == forward.read_bytes + more
    assert (auto.read_bytes, auto.ahead_read_bytes) == (forward.read_bytes, more)
    assert forward.ahead_read_bytes == backward.ahead_read_bytes == 0


def test_frames_do_not_grow_with_depth():
    found = {plan(stack(n), **NVME).arena_bytes for n in (16, 32, 64)}
    assert len(found) == 1


def test_a_tied_page_is_one_page():
    found = plan(stack(10, tied=True), **NVME)
    assert len(found.shape.pages) == 11
    (gradient,) = [s for s in found.spans if s.residency.key == ("gradients", 0)]
    assert gradient.residency.first_use < gradient.residency.last_use == len(found.positions) - 1


# --- evaluation, printing ------------------------------------------------------------------------------------------


def test_evaluation_stays_in_the_arena_of_training():
    training = plan(stack(40), **NVME)
    forward = dataclasses.replace(stack(40, value_bytes=8 * MIB), backward=(), turn=False)
    found = plan_evaluation(forward, training)
    assert found.arena_bytes == training.arena_bytes and not found.chunks
    check_places(found)
    assert all(s.residency.key[0] == "weights" for s in found.spans)
    large = dataclasses.replace(
        forward, units=tuple(dataclasses.replace(u, pages=tuple(range(42))) for u in forward.units)
    )
    with pytest.raises(zinf.PlanError, match=r"evaluating needs 84\.00 MiB of frames, training left"):
        plan_evaluation(large, training)


def test_a_plan_prints_as_a_table_and_a_timeline():
    found = plan(stack(6), hardware(GIB, flops=1e12, update_gbps=10.0, read_gbps=2.0, mixed_gbps=2.5), **NVME)
    text = str(found)
    for part in ("weights", "optimizer", "gradients", "frames of the passes", "frames of the update", "1.00 GiB",
                 "bytes per parameter", "predicted: compute", "turn     unit_7", "block_3"):  # fmt: skip
        assert part in text, text
    assert len(found.timeline().splitlines()) == 1 + 15
    assert "more ..." in plan(stack(100), **NVME).timeline()
    assert found.prediction.step_s is not None
    assert plan(stack(6), **NVME).prediction.step_s is None, "no rate was measured, so no time is made up"


def test_peak_rss_is_everything_together():
    found = plan(stack(4), hardware(cache_pages=True), **NVME)
    assert found.peak_rss_bytes == PROCESS_SLACK_BYTES + found.arena_bytes + found.device_bytes
    for freed, more in ((Freed.KEPT, KEPT_BYTES), (Freed.SHARED, HOLES_BYTES)):  # stays for the next step
        holds = plan(stack(4), hardware(cache_pages=True, freed=freed), **NVME)
        assert holds.peak_rss_bytes == found.peak_rss_bytes + more + found.device_bytes // 10
    beside = plan(stack(4), hardware(aliases=False), **NVME)
    assert beside.peak_rss_bytes == PROCESS_SLACK_BYTES + beside.arena_bytes, "a device has its own memory"
    assert beside.device_bytes > found.device_bytes
