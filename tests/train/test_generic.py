"""Any optax transformation streams: correct on every tier, slower, and says so."""

import jax
import numpy as np
import optax
import pytest

import zinf_jax as zinf
from tests.reference import InMemoryTrainer
from tests.train import blocks
from tests.train.blocks import config, placed, run

TRANSFORMATIONS = {
    "adamw": lambda: optax.adamw(1e-2, weight_decay=0.1),
    "chain": lambda: optax.chain(optax.trace(0.9), optax.scale_by_schedule(lambda n: -0.1 / (1 + n))),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8),  # factored rows: whole leaves
    "lamb": lambda: optax.lamb(1e-2),  # a trust ratio per leaf
    "clip": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),  # couples all leaves
    "masked": lambda: optax.masked(optax.adam(1e-2), lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_is_the_same_training_as_in_memory(name):
    params = jax.jit(blocks.init)(jax.random.key(0))
    other = InMemoryTrainer(blocks.loss, params, TRANSFORMATIONS[name](), gradient_clipping=0.5)
    losses = [other.step(blocks.batch(seed=i)).loss for i in range(5)]
    got = run(placed("nvme"), steps=5, optimizer=TRANSFORMATIONS[name]())
    np.testing.assert_allclose(got.losses, losses, rtol=1e-5)


@pytest.mark.parametrize("name", ["adamw", "adafactor", "clip"])
@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
def test_tiers_and_chunks_give_the_same_bits(name, precision):
    host = run(placed("host"), precision, optimizer=TRANSFORMATIONS[name]())
    nvme = run(placed("nvme"), precision, {"streaming": {"chunk_bytes": 1}}, optimizer=TRANSFORMATIONS[name]())
    assert nvme.bits == host.bits


@pytest.mark.parametrize("name", ["chain", "adafactor"])
def test_resume(tmp_path, name):
    straight = run(placed("nvme"), steps=4, optimizer=TRANSFORMATIONS[name]())

    def make(**kwargs):
        params = zinf.lazy(blocks.init, jax.random.key(0))
        return zinf.Trainer(blocks.loss, params, TRANSFORMATIONS[name](), config(placed("nvme")), **kwargs)

    with make(run_dir=tmp_path / "a") as made:
        run(trainer=made, steps=2)
        made.save(tmp_path / "saved")
    with make(run_dir=tmp_path / "b", resume=tmp_path / "saved") as made:
        made.prepare(blocks.batch())
        assert run(trainer=made, steps=2).bits[1:] == straight.bits[1:]


def test_coupled_leaves_are_counted_in_the_plan():
    plan = run(placed("nvme"), steps=1, optimizer=TRANSFORMATIONS["clip"]()).plan
    assert any(item.kind == "leaves updated whole" for item in plan.items)
    with pytest.raises(zinf.PlanError, match="leaves updated whole"):
        run(placed("nvme"), {"host_memory": 2_000_000}, steps=1, optimizer=TRANSFORMATIONS["clip"]())


@pytest.mark.parametrize("name", ["adamw", "chain"])
def test_a_scalar_parameter_has_slots_too(name):
    """Its shard is padded to a whole row; the optimizer's init knows one element only."""

    def loss(params, batch):
        return blocks.loss({k: v for k, v in params.items() if k != "scale"}, batch) * params["scale"]

    params = jax.jit(blocks.init)(jax.random.key(0)) | {"scale": np.float32(1.5)}
    other = InMemoryTrainer(loss, params, TRANSFORMATIONS[name](), gradient_clipping=0.5)
    losses = [other.step(blocks.batch(seed=i)).loss for i in range(3)]
    for tier in ("host", "nvme"):
        got = run(placed(tier), optimizer=TRANSFORMATIONS[name](), params=params, loss_fn=loss)
        np.testing.assert_allclose(got.losses, losses, rtol=1e-5)
