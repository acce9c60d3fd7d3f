"""Placements within a kind of state: a share of the optimizer's, a cache of weights. They never change the result."""

import functools
import itertools

import jax
import numpy as np
import pytest

import zinf_jax as zinf
from tests.train import blocks, exact
from zinf_jax.plan import Tier

GRID = list(itertools.product((0, 0.5, 1), (1, 50_000, 1 << 30)))  # chunks smaller and larger than any page


@pytest.fixture(scope="module")
def plain():
    return blocks.run(blocks.placed("host"))


@pytest.mark.parametrize("tier", ["host", "nvme"])
@pytest.mark.parametrize("fraction", [0.25, 0.5, 0.75])
def test_a_share_of_the_optimizer_state_elsewhere(plain, tier, fraction):
    found = blocks.run(blocks.placed("nvme", optimizer=tier, optimizer_fraction=fraction))
    placed = {tiers.optimizer for tiers in found.plan.tiers}
    assert placed == {Tier(tier), Tier.DEVICE}
    assert found.bits == plain.bits


@pytest.mark.parametrize("cache", [0, 100_000, 1 << 30])
def test_a_cache_of_weights_saves_reads(plain, cache):
    found = blocks.run(blocks.placed("nvme", weights_host_cache=cache))
    on_host = [tiers.weights is Tier.HOST for tiers in found.plan.tiers]
    assert (any(on_host), all(on_host)) == {0: (False, False), 100_000: (True, False), 1 << 30: (True, True)}[cache]
    assert found.bits == plain.bits
    assert (found.stats.fetches == 0) == (cache == 1 << 30)


def three_leaves():
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=size).astype(np.float32) for name, size in (("a", 7), ("b", 5000), ("c", 9000))}


@functools.cache
def everything(fraction=1.0, chunk=1, tier="host"):
    part = {"placement": {"optimizer_fraction": fraction, "weights_host_cache": 30_000},
            "streaming": {"chunk_bytes": chunk, "page_bytes": 4096}}  # fmt: skip
    made = exact.trainer(exact.quadratic, three_leaves(), zinf.optim.adamw(1e-2), exact.on(tier), part)
    with made as trainer:
        losses = [trainer.step(exact.ones(0.5 + i)).loss for i in range(3)]
        return losses, exact.everything(trainer), trainer.plan


@pytest.mark.parametrize(("fraction", "chunk"), GRID)
def test_every_share_is_valid_with_every_chunk_size(fraction, chunk):
    """CF08: some pairs of a share and a sub-group size were refused elsewhere."""
    losses, state, found = everything(fraction, chunk, "nvme")
    assert (losses, state) == everything()[:2]
    # Pages of 1, 2 and 3 x 4096 elements: the first two are half of it.
    assert sum(tiers.optimizer is Tier.NVME for tiers in found.tiers) == {0: 0, 0.5: 2, 1: 3}[fraction]
    assert [tiers.weights for tiers in found.tiers] == [Tier.HOST, Tier.NVME, Tier.NVME]


def test_a_share_survives_a_resume_in_place(tmp_path):
    config = blocks.config(blocks.placed("nvme", optimizer_fraction=0.5, weights_host_cache=100_000))
    whole = blocks.run(blocks.placed("host"), steps=4)
    for steps in (2, 2):
        params = zinf.lazy(blocks.init, jax.random.key(0))
        optimizer = zinf.optim.adamw(1e-2, weight_decay=0.1)
        with zinf.Trainer(blocks.loss, params, optimizer, config, run_dir=tmp_path, resume="auto") as trainer:
            trainer.prepare(blocks.batch())
            found = blocks.run(trainer=trainer, steps=steps)
    assert (found.params, found.moments, found.losses) == (whole.params, whole.moments, whole.losses[2:])
