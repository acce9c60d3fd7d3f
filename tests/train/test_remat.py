"""`streaming.remat_policy`: a choice of what is computed, after which placement changes nothing either."""

import functools

import jax
import numpy as np
import optax
import pytest

import zinf_jax as zinf
from tests.reference import InMemoryTrainer
from tests.train import blocks
from tests.train.blocks import config, placed, run
from zinf_jax.config import Config
from zinf_jax.graph import POLICIES

DOTS = {"streaming": {"remat_policy": "dots_saveable"}}


@functools.cache
def reference(policy="dots_saveable", micro=1):
    parts = {"streaming": {"remat_policy": policy}, "gradient_accumulation_steps": micro}
    return run(placed("host"), parts)


@pytest.mark.parametrize("policy", POLICIES[1:])
@pytest.mark.parametrize("residuals", ["device", "host", "nvme"])
def test_every_tier_gives_the_same_bits(policy, residuals):
    got = run(placed("nvme", residuals=residuals), {"streaming": {"remat_policy": policy}})
    assert got.bits == reference(policy).bits
    kept = {v for unit in got.plan.shape.units for v in unit.saved}
    assert kept, "nothing is kept"
    assert bool(kept & set(got.plan.spilled)) == (residuals != "device")
    assert got.stats.fetch_misses == 0


@pytest.mark.parametrize("lookahead", [0, 1, 3])
@pytest.mark.parametrize("overlap", ["none", "next_forward", "backward"])
def test_lookahead_and_overlap(tmp_path, lookahead, overlap):
    streaming = {"lookahead": lookahead, "update_overlap": overlap, "max_in_flight": 1 + lookahead % 2}
    got = run(placed("nvme", residuals="nvme"), DOTS, {"streaming": streaming}, run_dir=tmp_path)
    assert got.bits == reference().bits


@pytest.mark.parametrize("residuals", ["device", "nvme"])
def test_micro_batches(residuals):
    got = run(placed("nvme", residuals=residuals), DOTS, {"gradient_accumulation_steps": 4})
    assert got.bits == reference(micro=4).bits


def test_losses_over_20_steps_are_those_of_optax():
    params = jax.jit(blocks.init)(jax.random.key(0))
    other = InMemoryTrainer(blocks.loss, params, optax.adamw(1e-2, weight_decay=0.1), gradient_clipping=0.5)
    outs = [other.step(blocks.batch(seed=i)) for i in range(20)]
    got = run(placed("nvme"), DOTS, steps=20)
    np.testing.assert_allclose(got.losses, [o.loss for o in outs], rtol=1e-6)
    np.testing.assert_allclose(got.norms, [o.grad_norm for o in outs], rtol=1e-5)


@pytest.mark.parametrize("residuals", ["device", "host", "nvme"])
def test_what_is_kept_is_planned(residuals):
    with zinf.Trainer(
        blocks.loss, zinf.lazy(blocks.init, jax.random.key(0)), zinf.optim.adamw(1e-2),
        config(placed("nvme", residuals=residuals), DOTS),
    ) as made:  # fmt: skip
        made.step(blocks.batch(1024))
        stats, plan = made.stats(), made.plan
    # Kept values have no cotangent: a plan that gave them one would be far above.
    assert stats.peak_device_bytes <= plan.device_bytes < 1.05 * stats.peak_device_bytes
    assert stats.peak_host_bytes <= plan.host_bytes
    kept = sum(plan.shape.value_bytes[v] for unit in plan.shape.units for v in unit.saved)
    # Of a block's two products, backward needs the first: 1024 rows of 3 x DIM floats.
    assert kept == 6 * 1024 * 3 * blocks.DIM * 4
    if residuals == "device":
        assert stats.peak_device_bytes >= kept


def test_fewer_flops_are_predicted():
    def flops(policy):
        return run(placed("host"), {"streaming": {"remat_policy": policy}}, steps=1).plan.prediction.flops

    again, kept = flops("nothing_saveable"), flops("dots_saveable")
    products = 2 * 16 * blocks.DIM * 3 * blocks.DIM * 2  # of one block's forward
    assert again - kept == pytest.approx(6 * products, rel=0.2)


@pytest.mark.parametrize("value", ["dots", 3, "auto_saveable"])
def test_another_value_is_refused_with_those_that_there_are(value):
    with pytest.raises(ValueError, match="remat_policy") as caught:
        zinf.Trainer(
            blocks.loss, zinf.lazy(blocks.init, jax.random.key(0)), zinf.optim.adamw(1e-2),
            config({"streaming": {"remat_policy": value}}),
        )  # fmt: skip
    assert "dots_saveable" in str(caught.value)


def test_the_config_knows_the_policies():
    for policy in POLICIES:
        assert Config(streaming={"remat_policy": policy}).streaming.remat_policy == policy
    assert Config(streaming={"remat_policy": ["a", "b"]}).streaming.remat_policy == ("a", "b")
