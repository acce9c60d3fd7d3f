"""The JAX sides of the step benchmark, each run as a worker: `python scripts/_bench_workers.py '{"kind": ...}'`.

  in_memory   plain JAX + optax: one jitted step with donated state, one remat per block, fp32 master, clipping.
  streamed    `zinf.Trainer` with a placement.
  configured  `zinf.Trainer` with the model and optimizer of a config file, as `zinf train` would make it.
  host_work   the fused update and the norm over as many parameters, in DRAM alone, and a triad.
  io          what the disk gives, through the same engine.

Both training sides use the same model, loss, batches, learning rate and precision: bf16 weights with an fp32 master,
gradients in the weight's dtype with one micro-batch and summed in fp32 with more, the norm of all gradients in fp32.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from _bench import Reply, serve, timed_steps

from zinf_jax.models import ModelSpec, decoder

LEARNING_RATE, WEIGHT_DECAY, MAX_NORM = 1e-4, 0.01, 1.0
Commands = dict[str, Callable[..., Reply]]


def model_of(spec: dict[str, Any], *, remat: bool) -> ModelSpec:
    return decoder(spec["size"], remat=remat, matmul_dtype=spec["matmul_dtype"])


def batches(model: ModelSpec, num_micro_batches: int, count: int = 8) -> list[dict[str, np.ndarray]]:
    assert model.vocab_size is not None and model.seq_len is not None
    rng = np.random.default_rng(0)
    shape = (num_micro_batches, model.seq_len + 1)
    return [{"tokens": rng.integers(0, model.vocab_size, shape, dtype=np.int32)} for _ in range(count)]


# --- plain JAX in memory ----------------------------------------------------------------------------------------------


def mean_gradients(loss_fn: Callable[..., Any], weights: Any, batch: Any) -> tuple[jax.Array, Any]:
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


def loss_of(spec: dict[str, Any], policy: str) -> Any:
    """The loss as plain JAX differentiates it: one remat per block, or what the policy keeps of all of it."""
    if policy == "nothing_saveable":
        return model_of(spec, remat=True).loss_fn
    return jax.checkpoint(model_of(spec, remat=False).loss_fn, policy=getattr(jax.checkpoint_policies, policy))


def in_memory(spec: dict[str, Any]) -> Commands:
    model = model_of(spec, remat=True)
    loss_fn, loss_of_ours = loss_of(spec, spec["memory_remat_policy"]), loss_of(spec, spec["remat_policy"])
    tx = optax.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY)

    @jax.jit
    def start(key: jax.Array) -> Any:
        master = jax.tree.map(lambda p: p.astype(jnp.float32), model.init_fn(key))
        return master, tx.init(master)

    def cast(master: Any) -> Any:
        return jax.tree.map(lambda m: m.astype(jnp.bfloat16), master)

    @functools.partial(jax.jit, donate_argnums=0)
    def train(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        master, opt_state = state
        loss, grads = mean_gradients(loss_fn, cast(master), batch)
        # optax.global_norm would sum bf16 squares in bf16: everything in fp32 first.
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        norm = optax.global_norm(grads)
        scale = jnp.where(norm > MAX_NORM, MAX_NORM / norm, 1.0)
        updates, opt_state = tx.update(jax.tree.map(lambda g: g * scale, grads), opt_state, master)
        return (optax.apply_updates(master, updates), opt_state), loss

    state = start(jax.random.key(0))
    weights = jax.jit(cast)(state[0])  # of the floors
    num_params = sum(leaf.size for leaf in jax.tree.leaves(state[0]))
    feed = batches(model, spec["num_micro_batches"])
    losses: list[float] = []

    def step() -> None:
        nonlocal state
        state, loss = jax.block_until_ready(train(state, feed[len(losses) % len(feed)]))
        losses.append(float(loss))

    def steps(count: int) -> Reply:
        return {**timed_steps(step, count), "loss": losses[-1], "num_params": num_params}

    gradients = jax.jit(functools.partial(mean_gradients, loss_of_ours))

    def compute() -> None:
        jax.block_until_ready(gradients(weights, feed[0]))

    def compute_floor(count: int) -> Reply:
        """Forward and backward alone, as the streamed side computes them, weights resident: no units, no transfers."""
        compute()
        return timed_steps(compute, count)

    def compute_beside_io(count: int, folder: str, read_bytes: int, write_bytes: int, flush: bool) -> Reply:
        """The same, while a step's bytes are moved by the barest of means.

        A drive's transfers take memory bandwidth, and in a virtual machine time of its own CPUs, from the compute.
        """
        with PlainTransfers(folder) as transfers, ThreadPoolExecutor(1) as thread:

            def both() -> None:
                moved = thread.submit(transfers.move, read_bytes, write_bytes, flush=flush)
                compute()
                moved.result()

            both()
            return timed_steps(both, count)

    return {"steps": steps, "compute_floor": compute_floor, "compute_beside_io": compute_beside_io}


class PlainTransfers:
    """Moves bytes to and from one file: no pages, no checksums, no order to keep, every frame always under way."""

    FRAME_BYTES, NUM_FRAMES, FILE_BYTES = 16 << 20, 8, 1 << 29

    def __init__(self, folder: str) -> None:
        import aio_ffi

        self._arena = aio_ffi.Arena(self.FRAME_BYTES * self.NUM_FRAMES, lock=False)
        self._arena.touch()
        self._frames = [self._arena.array(i * self.FRAME_BYTES, self.FRAME_BYTES) for i in range(self.NUM_FRAMES)]
        self._engine = aio_ffi.Engine(None)
        self._file = self._engine.open(f"{folder}/plain", num_bytes=self.FILE_BYTES)
        self.move(0, self.FILE_BYTES, flush=True)

    def move(self, read_bytes: int, write_bytes: int, *, flush: bool) -> None:
        """Reads and writes in proportion, then makes the file durable."""
        left = {"read": read_bytes, "write": write_bytes}
        total = dict(left)
        under_way: list[Any] = [None] * self.NUM_FRAMES
        number = 0
        while any(left.values()):
            kind = max(left, key=lambda kind: left[kind] / max(total[kind], 1))
            slot, place = number % self.NUM_FRAMES, number * self.FRAME_BYTES % self.FILE_BYTES
            if under_way[slot] is not None:
                under_way[slot].wait()
            frame = self._frames[slot][: min(self.FRAME_BYTES, left[kind])]
            under_way[slot] = getattr(self._engine, kind)(self._file, place, frame)
            left[kind] -= frame.size
            number += 1
        for handle in under_way:
            if handle is not None:
                handle.wait()
        if flush:
            self._file.sync()

    def __enter__(self) -> PlainTransfers:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._engine.close()
        self._frames.clear()
        self._arena.close()


# --- ours -------------------------------------------------------------------------------------------------------------

STATS = (
    "step_time_s", "pass_time_s", "update_time_s", "read_stall_s", "write_stall_s", "device_wait_s", "host_work_s",
    "update_stall_s", "commit_stall_s",
    "fetches", "fetch_misses", "nvme_bytes_read", "nvme_bytes_written", "h2d_bytes", "d2h_bytes",
)  # fmt: skip


def streamed(spec: dict[str, Any]) -> Commands:
    import zinf_jax as zinf

    model = model_of(spec, remat=False)
    params = zinf.lazy(model.init_fn, jax.random.key(0))
    tx = zinf.optim.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    trainer = zinf.Trainer(model.loss_fn, params, tx, spec["config"], run_dir=spec["run_dir"])
    return _commands(trainer, model, spec["num_micro_batches"])


def configured(spec: dict[str, Any]) -> Commands:
    from zinf_jax import config
    from zinf_jax.train import recipe

    settings = config.load(spec["config"])
    model = recipe.build_model(settings)
    trainer = recipe.make_trainer(settings, model, spec["folder"])
    num_params = model.num_params()
    commands = _commands(trainer, model, recipe.batch_size_of(settings))
    return {**commands, "model": lambda: {"name": model.name, "num_params": num_params}}


def _commands(trainer: Any, model: ModelSpec, num_rows: int) -> Commands:
    """Sets the trainer up for batches of `num_rows` sequences, and steps it when told to."""
    feed = batches(model, num_rows)
    start = time.perf_counter()
    trainer.prepare(feed[0])
    prepare_s = time.perf_counter() - start
    losses: list[float] = []
    records: list[dict[str, float]] = []

    def step() -> None:
        losses.append(float(trainer.step(feed[len(losses) % len(feed)]).loss))
        stats = trainer.stats()
        records.append({name: getattr(stats, name) for name in STATS})

    def steps(count: int) -> Reply:
        records.clear()
        reply = timed_steps(step, count)
        means = {name: statistics.fmean(record[name] for record in records) for name in STATS}
        stats = trainer.stats()
        peaks = {name: getattr(stats, name) for name in ("peak_host_bytes", "peak_device_bytes")}
        return {**reply, "loss": losses[-1], "stats": means | peaks}

    def plan() -> Reply:
        found = trainer.plan
        names = ("arena_bytes", "device_bytes", "peak_rss_bytes", "base_rss_bytes")
        kinds = ("read_bytes", "write_bytes", "update_read_bytes", "update_write_bytes", "ahead_read_bytes")
        moved = {name: getattr(found.prediction, name) for name in kinds}
        memory = {name: getattr(found, name) for name in names}
        return {**moved, **memory, "prepare_s": prepare_s, "table": found.table()}

    def close() -> Reply:
        trainer.close()
        return {}

    return {"steps": steps, "plan": plan, "close": close}


# --- floors -----------------------------------------------------------------------------------------------------------

SAMPLE = 1 << 23  # parameters per turn: far larger than the caches, small beside the models


def host_work(spec: dict[str, Any]) -> Commands:
    """Seconds per parameter of the fused update, of the norm, and bytes per second of a triad."""
    from zinf_jax import leaves, optim
    from zinf_jax.optim import kernels

    gradient_dtype = np.dtype(ml_dtypes.bfloat16 if spec["num_micro_batches"] == 1 else np.float32)
    tree = {"w": jax.ShapeDtypeStruct((SAMPLE,), np.float32)}
    rule = optim.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY).rule.bind(  # type: ignore[attr-defined]
        leaves.classify(tree, compute_dtype=ml_dtypes.bfloat16), tree
    )
    rng = np.random.default_rng(0)
    weights, master = kernels.split_master(rng.standard_normal(SAMPLE, dtype=np.float32))
    gradient = rng.standard_normal(SAMPLE, dtype=np.float32).astype(gradient_dtype)
    slots = tuple(np.zeros(SAMPLE, np.float32) for _ in rule.rule.slots)
    part = kernels.Range(weights, master, gradient, slots, rule.coefficients(0, 10))
    bytes_per_param = 2 * (weights.itemsize + master.itemsize + 4 * len(slots)) + gradient.itemsize

    def best(action: Callable[[], Any], count: int = 7) -> float:
        action()
        return statistics.median(_timed(action) for _ in range(count))

    def floors() -> Reply:
        update_s = best(lambda: kernels.update(rule.rule, [part]))
        norm_s = best(lambda: kernels.squared_norm(gradient))
        triad_s = best(lambda: kernels.triad(slots[0], slots[1], slots[1], 0.5))
        return {
            "update_s_per_param": update_s / SAMPLE,
            "norm_s_per_param": norm_s / SAMPLE,
            "update_gbps": bytes_per_param * SAMPLE / update_s / 1e9,
            "triad_gbps": 12 * SAMPLE / triad_s / 1e9,
            "bytes_per_param": bytes_per_param,
        }

    return {"floors": floors}


def _timed(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def io(spec: dict[str, Any]) -> Commands:
    import aio_ffi

    def floors(num_bytes: int) -> Reply:
        rates = aio_ffi.measure(spec["folder"], num_bytes=num_bytes)
        names = ("read_gbps", "write_gbps", "mixed_read_gbps", "mixed_write_gbps", "engine", "direct")
        return {name: getattr(rates, name) for name in names}

    return {"floors": floors}


KINDS: dict[str, Callable[[dict[str, Any]], Commands]] = {
    "in_memory": in_memory, "streamed": streamed, "configured": configured, "host_work": host_work, "io": io,
}  # fmt: skip

if __name__ == "__main__":
    serve(lambda spec: KINDS[spec["kind"]](spec))
