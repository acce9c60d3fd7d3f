"""The reference itself, against optax written out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.reference import InMemoryTrainer, LossScale, round_bf16_ties_up
from zinf_jax.train.weighted import Weighted


def _params():
    return {"w": jnp.linspace(-1, 1, 12, dtype=jnp.float32).reshape(4, 3), "b": jnp.zeros(3), "n": jnp.arange(3)}


def _loss(params, batch):
    x, y = batch
    return jnp.mean((x.astype(params["w"].dtype) @ params["w"] + params["b"] - y) ** 2)


def _batch(rows=8):
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, 4)).astype(np.float32), rng.normal(size=(rows, 3)).astype(np.float32)


@pytest.mark.parametrize("num_micro_batches", [1, 2, 4])
def test_equals_optax_by_hand(num_micro_batches):
    tx = optax.adamw(1e-2)
    trainer = InMemoryTrainer(_loss, _params(), tx, num_micro_batches=num_micro_batches, gradient_clipping=0.1)
    params = {k: v for k, v in _params().items() if k != "n"}
    chain = optax.chain(optax.clip_by_global_norm(0.1), tx)
    opt_state = chain.init(params)
    for _ in range(5):
        out = trainer.step(_batch())
        loss, grads = jax.value_and_grad(_loss)(params, _batch())
        updates, opt_state = chain.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(out.loss, loss, rtol=1e-6)
        np.testing.assert_allclose(out.grad_norm, optax.tree.norm(grads), rtol=1e-6)
    for name, value in params.items():
        np.testing.assert_allclose(trainer.params()[name], value, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(trainer.params()["n"], np.arange(3))
    assert (out.step, out.skipped) == (5, False)


def test_weighted_micro_batches_are_averaged_by_weight():
    def loss(params, batch):
        x, y, mask = batch
        per_row = jnp.mean((x @ params["w"] + params["b"] - y) ** 2, axis=-1)
        return Weighted(jnp.sum(per_row * mask) / jnp.sum(mask), jnp.sum(mask))

    mask = np.array([1, 0, 0, 0, 1, 1, 1, 1], np.float32)
    outs = [
        InMemoryTrainer(loss, _params(), optax.sgd(1.0), num_micro_batches=m).step((*_batch(), mask)) for m in (1, 2)
    ]
    np.testing.assert_allclose(outs[0].loss, outs[1].loss, rtol=1e-6)
    np.testing.assert_allclose(outs[0].grad_norm, outs[1].grad_norm, rtol=1e-6)


def test_aux_state_and_rng_per_micro_batch():
    def loss(params, state, batch, rng):
        noise = jax.random.normal(rng, ())
        return jnp.sum(params["w"]) * 0 + noise, ({"count": state["count"] + 1}, {"noise": noise})

    key = jax.random.key(3)
    trainer = InMemoryTrainer(
        loss, _params(), optax.sgd(1.0), has_aux=True, rng=key, state={"count": 0}, num_micro_batches=2
    )
    for step in range(2):
        out = trainer.step(_batch())
        wanted = [jax.random.normal(jax.random.fold_in(jax.random.fold_in(key, step), i), ()) for i in range(2)]
        np.testing.assert_array_equal(out.aux["noise"], np.stack(wanted))
    assert trainer.state["count"] == 4


def test_a_skipped_step_changes_nothing():
    def loss(params, batch):
        return _loss(params, batch[:2]) * batch[2][0]

    trainer = InMemoryTrainer(loss, _params(), optax.adam(1e-2))
    ones, bad = np.ones(8, np.float32), np.full(8, np.nan, np.float32)
    trainer.step((*_batch(), ones))
    before = jax.tree.map(np.asarray, (trainer.params(), trainer.opt_state()))
    out = trainer.step((*_batch(), bad))
    assert (out.step, out.skipped, trainer.num_skipped) == (1, True, 1)
    jax.tree.map(np.testing.assert_array_equal, before, (trainer.params(), trainer.opt_state()))


def test_fp16_overflow_halves_the_scale_and_skips():
    scale = LossScale(scale=2.0**30, hysteresis=1, window=2)
    trainer = InMemoryTrainer(_loss, _params(), optax.sgd(1e-2), precision="fp16", loss_scale=scale)
    outs = [trainer.step(_batch()) for _ in range(40)]
    assert outs[0].skipped and not all(o.skipped for o in outs)
    assert trainer.global_step == sum(not o.skipped for o in outs)
    assert trainer.params()["w"].dtype == jnp.float16
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(trainer.master_params()) if leaf.ndim == 2)


def test_bf16_rounds_ties_up_and_keeps_a_master():
    ties = np.array([0x3F808000, 0xBF808000, 0x3F818000, 0x7FFFFFFF, 0x7F800000, 0x80000001], np.uint32)
    rounded = np.asarray(jax.lax.bitcast_convert_type(round_bf16_ties_up(ties.view(np.float32)), jnp.uint16))
    np.testing.assert_array_equal(rounded, np.array([0x3F81, 0xBF81, 0x3F82, 0x7FC0, 0x7F80, 0x8000], np.uint16))
    trainer = InMemoryTrainer(_loss, _params(), optax.sgd(1e-6), precision="bf16")
    first = np.asarray(trainer.master_params()["w"])
    trainer.step(_batch())
    assert trainer.params()["w"].dtype == jnp.bfloat16
    assert np.any(np.asarray(trainer.master_params()["w"]) != first)


def test_frozen_leaves_keep_their_bits():
    trainable = {"w": False, "b": True, "n": False}
    trainer = InMemoryTrainer(_loss, _params(), optax.adamw(1e-2), trainable=trainable)
    trainer.step(_batch())
    np.testing.assert_array_equal(trainer.params()["w"], _params()["w"])
    assert np.any(np.asarray(trainer.params()["b"]) != 0)
