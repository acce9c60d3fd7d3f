"""The script beside it, with weights, gradients and optimizer state on NVMe. The model, loss and data are untouched."""

import flax.linen as nn
import jax
import numpy as np
import optax

import zinf_jax as zinf


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm()(x)
        return x + nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(4 * x.shape[-1])(y)))


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(4):
            x = Block(name=f"block_{i}")(x)
        return nn.Dense(1)(x)


def loss_fn(params, batch):
    return optax.squared_error(net.apply(params, batch["x"])[:, 0], batch["y"]).mean()


def batches(num):
    rng = np.random.default_rng(0)
    for _ in range(num):
        x = rng.standard_normal((32, 64), np.float32)
        yield {"x": x, "y": x.sum(axis=1)}


net = Net()
optimizer = zinf.optim.adamw(1e-3)
params = zinf.lazy(net.init, jax.random.key(0), np.zeros((1, 64), np.float32))
config = {"placement": {"weights": "nvme", "gradients": "nvme", "optimizer": "nvme"}}
trainer = zinf.Trainer(loss_fn, params, optimizer, config)
for step, batch in enumerate(batches(20)):
    print(step, trainer.step(batch).loss)
trainer.close()
