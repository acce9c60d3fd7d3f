"""Parts of a kind of state on another tier: a share of the optimizer's, a cache of weights."""

import pytest

import zinf_jax as zinf
from tests.plan.shapes import MIB, hardware, page, plan, stack
from zinf_jax.plan import PlacementOptions, Tier
from zinf_jax.plan.placement import floor_tiers, promote

PAGES = [page(str(i), n) for i, n in enumerate((4096, 8192, 4096, 16384))]  # 8, 16, 8, 32 KiB of weights
KIB = 1 << 10


def tiers_of(kind, options, pages=PAGES):
    return [getattr(tiers, kind) for tiers in floor_tiers(pages, options)]


@pytest.mark.parametrize("tier", ["host", "nvme"])
@pytest.mark.parametrize(
    ("fraction", "offloaded"), [(0, 0), (1e-9, 0), (0.01, 1), (0.125, 1), (0.25, 2), (0.375, 2), (0.5, 3), (1, 4)]
)
def test_a_share_of_the_optimizer_state_is_whole_pages_in_order(tier, fraction, offloaded):
    """8 of 64 KiB are an eighth: the first page. Pages are taken until the share is reached."""
    found = tiers_of("optimizer", PlacementOptions(optimizer=tier, optimizer_fraction=fraction))
    assert found == [Tier(tier)] * offloaded + [Tier.DEVICE] * (4 - offloaded)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 10, 64])
def test_a_share_of_equal_pages_is_exact(count):
    pages = [page(str(i), 4096) for i in range(count)]
    for wanted in range(count + 1):
        options = PlacementOptions(optimizer="nvme", optimizer_fraction=wanted / count)
        assert tiers_of("optimizer", options, pages).count(Tier.NVME) == wanted


def test_pages_without_optimizer_state_do_not_count():
    pages = [page("frozen", 1 << 20, trained=False), *PAGES]
    found = tiers_of("optimizer", PlacementOptions(optimizer="nvme", optimizer_fraction=0.125), pages)
    assert found[1:] == [Tier.NVME, Tier.DEVICE, Tier.DEVICE, Tier.DEVICE]


@pytest.mark.parametrize(
    ("cache", "cached"),
    [(0, []), (8 * KIB - 1, []), (8 * KIB, [0]), (16 * KIB, [0, 2]), (31 * KIB, [0, 1]), (32 * KIB, [0, 1, 2]),
     (48 * KIB, [0, 1, 2]), (64 * KIB, [0, 1, 2, 3]), (1 << 60, [0, 1, 2, 3])],
)  # fmt: skip
@pytest.mark.parametrize("weights", [None, "nvme"])
def test_a_cache_holds_whole_pages_while_they_fit(weights, cache, cached):
    found = tiers_of("weights", PlacementOptions(weights=weights, weights_host_cache=cache))
    assert found == [Tier.HOST if i in cached else Tier.NVME for i in range(4)]


@pytest.mark.parametrize("weights", ["device", "host"])
def test_a_cache_is_for_weights_on_nvme(weights):
    assert tiers_of("weights", PlacementOptions(weights=weights, weights_host_cache=1 << 60)) == [Tier(weights)] * 4


def test_the_planner_chooses_for_its_share_only():
    options = PlacementOptions(optimizer_fraction=0.5)
    found = promote(PAGES, floor_tiers(PAGES, options), options, 1 << 40)
    assert [tiers.optimizer for tiers in found] == [Tier.HOST] * 3 + [Tier.DEVICE]


def test_what_is_cached_uses_no_room_twice():
    options = PlacementOptions(optimizer="nvme", gradients="nvme", weights_host_cache=16 * KIB)
    found = promote(PAGES, floor_tiers(PAGES, options), options, 16 * KIB)
    assert [tiers.weights for tiers in found] == [Tier.HOST, Tier.HOST, Tier.HOST, Tier.NVME]


def test_the_table_shows_both_and_a_refusal_says_what_to_lower():
    kinds = dict.fromkeys(("weights", "optimizer", "gradients"), Tier.NVME) | {"residuals": Tier.DEVICE}
    shape = stack(6, elements=1 << 20)  # 8 pages: 2 MiB of weights and 10 of records each
    found = plan(shape, **kinds, optimizer_fraction=0.5, weights_host_cache=5 * MIB)
    sizes = {(item.tier, item.kind): item.num_bytes for item in found.items}
    assert sizes[Tier.NVME, "optimizer"] == sizes[Tier.DEVICE, "optimizer"] == 40 * MIB
    assert (sizes[Tier.HOST, "weights"], sizes[Tier.NVME, "weights"]) == (4 * MIB, 12 * MIB)
    whole = plan(shape, **kinds)
    assert found.prediction.read_bytes < whole.prediction.read_bytes
    with pytest.raises(zinf.PlanError, match=r"largest: weights, .*lower weights_host_cache \(64\.00 MiB\)"):
        plan(stack(30), hardware(whole.host_bytes), **kinds, weights_host_cache=64 * MIB)
    with pytest.raises(zinf.PlanError, match=r"largest: mirror of optimizer, .*raise optimizer_fraction \(0\.5\)"):
        plan(stack(30), hardware(whole.host_bytes), **kinds, optimizer_fraction=0.5)


@pytest.mark.parametrize("options", [{"optimizer_fraction": 1.5}, {"optimizer_fraction": -0.1},
                                     {"weights_host_cache": -1}])  # fmt: skip
def test_shares_and_caches_outside_their_range_are_refused(options):
    with pytest.raises(zinf.ConfigError, match=next(iter(options))):
        PlacementOptions(**options)
