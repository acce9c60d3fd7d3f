"""Invariants 1 and 2: placement never changes the result, and the result is that of training in memory."""

import functools

import jax
import numpy as np
import optax
import pytest

import zinf_jax as zinf
from tests.reference import InMemoryTrainer
from tests.train import blocks
from tests.train.blocks import config, placed, run

HOST = placed("host")


@functools.cache
def reference(precision="fp32", micro=1):
    return run(HOST, section(precision), {"gradient_accumulation_steps": micro})


def section(precision):
    if precision == "fp32":
        return {}
    # A low initial scale: with the default 2**16 this model overflows twice and nothing would be compared.
    return {precision: {"enabled": True, **({"initial_scale_power": 8} if precision == "fp16" else {})}}


TIER_GRID = [
    (w, o, g, r)
    for w in blocks.TIERS
    for o in blocks.TIERS
    for g in blocks.TIERS
    for r in ("device", "host", "nvme")
    if len({w, o, g, r}) > 1 or w == "nvme"
]


@pytest.mark.parametrize("tiers", [*TIER_GRID[::4], ("nvme",) * 4], ids="-".join)
def test_every_tier_gives_the_same_bits(tiers):
    weights, optimizer, gradients, residuals = tiers
    placement = {"weights": weights, "optimizer": optimizer, "gradients": gradients, "residuals": residuals}
    assert run({"placement": placement}).bits == reference().bits


@pytest.mark.slow
@pytest.mark.parametrize("tiers", TIER_GRID, ids="-".join)
def test_every_tier_gives_the_same_bits_whole_grid(tiers):
    test_every_tier_gives_the_same_bits(tiers)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("tier", ["device", "nvme"])
def test_16_bit_weights(precision, tier):
    got = run(placed(tier), section(precision))
    assert got.bits == reference(precision).bits
    assert not any(got.skipped)


@pytest.mark.parametrize("lookahead", [0, 1, 3])
@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_lookahead(lookahead, max_in_flight):
    streaming = {"lookahead": lookahead, "max_in_flight": max_in_flight}
    got = run(placed("nvme", residuals="nvme"), {"streaming": streaming})
    assert got.bits == reference().bits
    assert got.stats.fetch_misses == 0


@pytest.mark.parametrize(
    "streaming",
    [
        {"chunk_bytes": 1},  # the smallest chunk: 4096 elements
        {"chunk_bytes": 1 << 30},
        {"num_chunk_frames": 1},
        {"num_chunk_frames": 2},
        {"num_chunk_frames": 7},
        {"page_bytes": 10_000},  # every leaf a page
        {"min_io_bytes": 1 << 20},  # everything one page
    ],
    ids=str,
)
def test_page_and_chunk_sizes(streaming):
    assert run(placed("nvme"), {"streaming": streaming}).bits == reference().bits


@pytest.mark.parametrize("engine", ["libaio", "threads_direct", "threads_buffered"])
@pytest.mark.parametrize("block_size", [4096, 1 << 20])
def test_io_engines(engine, block_size):
    aio = {"engine": engine, "block_size": block_size, "thread_count": 2 if block_size > 4096 else 1}
    assert run(placed("nvme"), {"aio": aio}).bits == reference().bits


@pytest.mark.parametrize("tier", ["device", "nvme"])
def test_micro_batches(tier):
    """Layer-major accumulation, residuals of all micro-batches spilled."""
    micro = {"gradient_accumulation_steps": 4}
    got = run(placed(tier, residuals="nvme" if tier == "nvme" else "device"), micro)
    assert got.bits == reference(micro=4).bits


def test_groups_of_micro_batches_are_placement_independent():
    micro = {"gradient_accumulation_steps": 4, "streaming": {"micro_batches_per_group": 2}}
    assert run(placed("nvme", residuals="nvme"), micro).bits == run(placed("host"), micro).bits


def test_residuals_are_really_spilled():
    plan = run(placed("nvme", residuals="nvme"), steps=1).plan
    assert plan.spilled, "the model is too short for its residuals to have the time to leave"


def test_weights_traffic_does_not_grow_with_micro_batches():
    """Layer-major: one fetch per page and pass, whatever the number of micro-batches."""
    tiers = {**placed("nvme", gradients="host"), "streaming": {"update_overlap": "none"}}
    one = run(tiers, {"gradient_dtype": "fp32"}).stats
    four = run(tiers, {"gradient_accumulation_steps": 4, "gradient_dtype": "fp32"}).stats
    assert four.nvme_bytes_read == one.nvme_bytes_read
    assert four.nvme_bytes_written == one.nvme_bytes_written


def test_bytes_moved_are_the_planned_ones():
    got = run(placed("nvme", residuals="nvme"), {"streaming": {"update_overlap": "none"}})
    assert got.stats.nvme_bytes_read == pytest.approx(got.plan.prediction.read_bytes, rel=0.03)
    assert got.stats.nvme_bytes_written == pytest.approx(got.plan.prediction.write_bytes, rel=0.03)


def test_a_budget_keeps_pages_between_uses_and_changes_no_bit():
    small = run(placed("nvme"))
    large = run(placed("nvme"), {"host_memory": 1 << 30})
    assert large.bits == small.bits == reference().bits
    assert large.stats.fetches < small.stats.fetches


# --- Invariant 2: it is the same training as plain JAX + optax in memory -------------------------------------------


def in_memory(precision, optimizer, steps=20, micro=1):
    params = jax.jit(blocks.init)(jax.random.key(0))
    trainer = InMemoryTrainer(
        blocks.loss, params, optimizer, precision=precision, gradient_clipping=0.5, num_micro_batches=micro
    )
    return [trainer.step(blocks.batch(seed=i)) for i in range(steps)], trainer


OPTIMIZERS = {
    "adamw": (zinf.optim.adamw(1e-2, weight_decay=0.1), optax.adamw(1e-2, weight_decay=0.1)),
    "lion": (zinf.optim.lion(1e-3), optax.lion(1e-3)),
    "adagrad": (zinf.optim.adagrad(1e-2), optax.adagrad(1e-2)),
    "sgd": (zinf.optim.sgd(0.1, momentum=0.9, nesterov=True), optax.sgd(0.1, momentum=0.9, nesterov=True)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_losses_over_20_steps_are_those_of_optax(name):
    ours, theirs = OPTIMIZERS[name]
    outs, trainer = in_memory("fp32", theirs)
    got = run(placed("nvme"), steps=20, optimizer=ours)
    # Lion takes signs: a gradient element that is zero up to rounding flips a whole step.
    tolerance = 1e-6 if name != "lion" else 1e-4
    np.testing.assert_allclose(got.losses, [o.loss for o in outs], rtol=tolerance)
    np.testing.assert_allclose(got.norms, [o.grad_norm for o in outs], rtol=10 * tolerance)
    if name == "sgd":
        for (path, value), ours_bytes in zip(
            jax.tree_util.tree_flatten_with_path(trainer.params())[0], got.params.values(), strict=True
        ):
            mine = np.frombuffer(ours_bytes, np.float32).reshape(value.shape)
            assert np.max(np.abs(mine - value)) <= 1e-6 * np.linalg.norm(value), path


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("micro", [1, 4])
def test_16_bit_losses_are_those_of_an_fp32_master(precision, micro):
    scale = {"loss_scale": 256.0} if precision == "fp16" else {}
    params = jax.jit(blocks.init)(jax.random.key(0))
    other = InMemoryTrainer(
        blocks.loss, params, optax.adamw(1e-2, weight_decay=0.1),
        precision=precision, gradient_clipping=0.5, num_micro_batches=micro, **scale,
    )  # fmt: skip
    losses = [other.step(blocks.batch(seed=i)).loss for i in range(10)]
    parts = {precision: {"enabled": True, **scale}, "gradient_accumulation_steps": micro}
    got = run(placed("nvme"), parts, steps=10)
    np.testing.assert_allclose(got.losses, losses, rtol=2e-2)


def test_config_helper_merges():
    assert config({"streaming": {"lookahead": 0}})["streaming"]["chunk_bytes"] == 100_000
