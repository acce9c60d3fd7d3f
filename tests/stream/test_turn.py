"""The last unit's forward and backward in one program: nothing in it is computed twice."""

import jax
import numpy as np
import pytest

import zinf_jax as zinf
from tests.train.blocks import placed
from zinf_jax.models import decoder


@pytest.mark.parametrize("has_aux", [False, True])
def test_the_forward_is_computed_once(has_aux):
    """XLA does not see that a forward and the one inside a derivative are equal: behind a norm it once computed the
    logits twice, a third more work for the largest product of a small model."""
    model = decoder(None, num_layers=2, dim=64, num_heads=2, seq_len=32, vocab_size=4096, remat=False)

    def loss(params, batch):
        return (model.loss_fn(params, batch), {}) if has_aux else model.loss_fn(params, batch)

    settings = placed("host") | {"bf16": {"enabled": True}}
    params = zinf.lazy(model.init_fn, jax.random.key(0))
    with zinf.Trainer(loss, params, zinf.optim.sgd(1e-2), settings, has_aux=has_aux) as trainer:
        trainer.prepare({"tokens": np.ones((1, 33), np.int32)})
        program = trainer._engine.program
        unit, parts = program.graph.units[-1], program.executables[-1]
        assert parts.turn is not None and unit.flops >= 2 * 32 * 64 * 4096
        flops = [part.call.cost_analysis()["flops"] for part in (parts.turn, parts.gradients) if part is not None]
        products = sum(flops) / unit.flops
    assert 2.8 < products < 3.6, products
