"""A usual Flax training script, everything in device memory. Beside it: the same script, streamed."""

import flax.linen as nn
import jax
import numpy as np
import optax


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


@jax.jit
def train_step(params, opt_state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


net = Net()
optimizer = optax.adamw(1e-3)
params = net.init(jax.random.key(0), np.zeros((1, 64), np.float32))
opt_state = optimizer.init(params)
for step, batch in enumerate(batches(20)):
    params, opt_state, loss = train_step(params, opt_state, batch)
    print(step, float(loss))
