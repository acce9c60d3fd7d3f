"""The JAX sides of the step benchmark, each run as a worker: `python scripts/_bench_workers.py '{"kind": ...}'`.

  in_memory   plain JAX + optax: one jitted step with donated state, one remat per block, fp32 master, clipping.
  streamed    `zinf.Trainer` with a placement.
  host_work   the fused update over the same number of parameters, in DRAM alone.
  io          what the disk gives for reads and writes at once, through the same engine.

Both training sides use the same model, loss, batches, learning rate and precision: bf16 weights with an fp32 master,
gradients in the weight's dtype with one micro-batch and summed in fp32 with more, the norm of all gradients in fp32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _bench import SIZES, ModelSize, Reply, serve, timed_steps

from zinf_jax.models import decoder

LEARNING_RATE, WEIGHT_DECAY, MAX_NORM = 1e-4, 0.01, 1.0


def batches(size: ModelSize, num_micro_batches: int, count: int = 8) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    shape = (num_micro_batches, size.seq_len + 1)
    return [{"tokens": rng.integers(0, size.vocab_size, shape, dtype=np.int32)} for _ in range(count)]


# --- plain JAX in memory ----------------------------------------------------------------------------------------------


def mean_gradients(loss_fn: Callable[[Any, Any], jax.Array], weights: Any, batch: Any) -> tuple[jax.Array, Any]:
    """Mean loss and gradients over the micro-batches (rows of the batch), summed in fp32 if there are several."""
    grad_fn = jax.value_and_grad(loss_fn)
    num_micro_batches = batch["tokens"].shape[0]
    if num_micro_batches == 1:
        return grad_fn(weights, batch)

    def body(total: tuple[jax.Array, Any], row: Any) -> tuple[tuple[jax.Array, Any], None]:
        loss, grads = grad_fn(weights, jax.tree.map(lambda x: x[None], row))
        return (total[0] + loss, jax.tree.map(lambda t, g: t + g.astype(jnp.float32), total[1], grads)), None

    zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), weights)
    (loss, grads), _ = jax.lax.scan(body, (jnp.float32(0), zeros), batch)
    return loss / num_micro_batches, jax.tree.map(lambda g: g / num_micro_batches, grads)


def in_memory(spec: dict[str, Any]) -> dict[str, Callable[..., Reply]]:
    size = SIZES[spec["size"]]
    model = decoder(size.name, remat=True)
    tx = optax.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY)

    @jax.jit
    def start(key: Any) -> Any:
        master = jax.tree.map(lambda p: p.astype(jnp.float32), model.init_fn(key))
        return master, tx.init(master)

    def cast(master: Any) -> Any:
        return jax.tree.map(lambda m: m.astype(jnp.bfloat16), master)

    @functools.partial(jax.jit, donate_argnums=0)
    def train(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        master, opt_state = state
        loss, grads = mean_gradients(model.loss_fn, cast(master), batch)
        # optax.global_norm would sum bf16 squares in bf16: everything in fp32 first.
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        norm = optax.global_norm(grads)
        scale = jnp.where(norm > MAX_NORM, MAX_NORM / norm, 1.0)
        updates, opt_state = tx.update(jax.tree.map(lambda g: g * scale, grads), opt_state, master)
        return (optax.apply_updates(master, updates), opt_state), loss

    state = start(jax.random.key(0))
    num_params = sum(leaf.size for leaf in jax.tree.leaves(state[0]))
    feed = batches(size, spec["num_micro_batches"])
    losses: list[float] = []

    def step() -> None:
        nonlocal state
        state, loss = jax.block_until_ready(train(state, feed[len(losses) % len(feed)]))
        losses.append(float(loss))

    def steps(count: int) -> Reply:
        return {**timed_steps(step, count), "loss": losses[-1], "num_params": num_params}

    def compute_floor(count: int) -> Reply:
        """Forward and backward alone, weights resident: no units, no transfers, no update."""
        weights = jax.jit(cast)(state[0])
        grads = jax.jit(functools.partial(mean_gradients, model.loss_fn))
        batch = feed[0]
        jax.block_until_ready(grads(weights, batch))
        return timed_steps(lambda: jax.block_until_ready(grads(weights, batch)), count)

    return {"steps": steps, "compute_floor": compute_floor}


# --- ours -------------------------------------------------------------------------------------------------------------


def streamed(spec: dict[str, Any]) -> dict[str, Callable[..., Reply]]:
    try:
        import zinf_jax as zinf

        trainer_class = zinf.Trainer
    except (ImportError, AttributeError) as error:
        raise RuntimeError(f"zinf_jax.Trainer cannot be imported, so nothing can be streamed: {error}") from error
    size = SIZES[spec["size"]]
    model = decoder(size.name, remat=False)
    trainer = trainer_class(
        model.loss_fn,
        zinf.lazy(model.init_fn, jax.random.key(0)),
        zinf.optim.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY),
        spec["config"],
        run_dir=spec["folder"],
    )
    feed = batches(size, spec["num_micro_batches"])
    losses: list[float] = []

    def step() -> None:
        losses.append(float(trainer.step(feed[len(losses) % len(feed)]).loss))

    def steps(count: int) -> Reply:
        return {**timed_steps(step, count), "loss": losses[-1]}

    return {"steps": steps}


KINDS = {"in_memory": in_memory, "streamed": streamed}

if __name__ == "__main__":
    serve(lambda spec: KINDS[spec["kind"]](spec))
