"""The stages of `gpu_check.py` that are no program of their own: `python scripts/_gpu_stages.py STAGE [--allow-cpu]`.

  machine  what is there: devices, versions, memory; fails without an accelerator
  bits     a few steps from every tier: the same losses and parameters, bit for bit; device memory within the plan
  copies   host-to-device rates from arena frames, plain and registered for DMA, and how much hides behind compute
  tests    functions `test_*` without arguments of the given modules, where pytest is missing; lists what it left out

Each prints a JSON object as its last line.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import json
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

TIERS = ("device", "host", "nvme")


def machine(allow_cpu: bool) -> dict[str, Any]:
    if shutil.which("nvidia-smi"):
        print(subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=False).stdout)
    devices = jax.devices()
    found = {
        "platform": devices[0].platform,
        "devices": [d.device_kind for d in devices],
        "memory_kinds": [m.kind for m in devices[0].addressable_memories()],
        "memory_stats": devices[0].memory_stats(),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "disk_free_bytes": shutil.disk_usage(".").free,
        "versions": {name: __import__(name).__version__ for name in ("jax", "jaxlib", "numpy", "flax", "optax")},
    }
    if devices[0].platform == "cpu" and not allow_cpu:
        print(json.dumps(found))
        raise SystemExit("JAX sees no accelerator: install JAX for CUDA, or pass --allow-cpu")
    return found


def bits(allow_cpu: bool) -> dict[str, Any]:
    """Everything on each tier in turn, and weights and gradients apart; bf16 weights, two micro-batches, clipping."""
    import zinf_jax as zinf
    from zinf_jax.models import decoder

    model = decoder("tiny" if allow_cpu else "25m")
    assert model.vocab_size is not None and model.seq_len is not None
    rng = np.random.default_rng(0)
    shape = (2, model.seq_len + 1)
    feed = [{"tokens": rng.integers(0, model.vocab_size, shape, dtype=np.int32)} for _ in range(3)]
    placements = {tier: dict.fromkeys(("weights", "optimizer", "gradients"), tier) for tier in TIERS}
    placements["mixed"] = {"weights": "host", "optimizer": "nvme", "gradients": "device", "residuals": "nvme"}
    outcomes, peaks = {}, {}
    for name, placement in placements.items():
        config = {"bf16": {"enabled": True}, "gradient_clipping": 1.0, "gradient_accumulation_steps": 2}
        with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
            config |= {"placement": placement, "nvme_path": folder}
            params = zinf.lazy(model.init_fn, jax.random.key(0))
            with zinf.Trainer(model.loss_fn, params, zinf.optim.adamw(1e-3), config) as trainer:
                losses = [float(trainer.step(batch).loss) for batch in feed]
                leaves = [np.asarray(leaf) for _, leaf in trainer.iter_params()]
                peaks[name] = {"planned": trainer.plan.device_bytes, "measured": trainer.stats().peak_device_bytes}
        outcomes[name] = losses, leaves
        print(f"{name}: losses {losses}, device bytes {peaks[name]}", flush=True)
    first_losses, first_leaves = outcomes["device"]
    different = [
        name
        for name, (losses, leaves) in outcomes.items()
        if losses != first_losses
        or not all(a.tobytes() == b.tobytes() for a, b in zip(leaves, first_leaves, strict=True))
    ]
    over = [name for name, peak in peaks.items() if peak["measured"] > peak["planned"]]
    if different or over:
        raise SystemExit(f"other bits than on the device: {different}; more device memory than planned: {over}")
    return {"losses": first_losses, "device_bytes": peaks}


def _seconds(action: Callable[[], Any], count: int = 5) -> float:
    jax.block_until_ready(action())
    times = []
    for _ in range(count):
        start = time.perf_counter()
        jax.block_until_ready(action())
        times.append(time.perf_counter() - start)
    return sorted(times)[count // 2]


def copies(allow_cpu: bool) -> dict[str, Any]:
    import aio_ffi

    device, num_bytes = jax.devices()[0], 1 << (24 if allow_cpu else 28)
    arena = aio_ffi.Arena(num_bytes)
    arena.touch()
    frame = arena.array(0, num_bytes)
    size = 512 if allow_cpu else 8192
    x = jnp.ones((size, size), jnp.bfloat16)

    @functools.partial(jax.jit, static_argnums=1)
    def work(x: jax.Array, rounds: int) -> jax.Array:
        return jax.lax.fori_loop(0, rounds, lambda _, y: (x @ y) * (1.0 / size), x)

    def put() -> jax.Array:
        return jax.device_put(frame, device)

    found: dict[str, Any] = {"num_bytes": num_bytes, "plain_gbps": num_bytes / _seconds(put) / 1e9}
    client = device.client
    address = frame.ctypes.data
    if hasattr(client, "dma_map") and device.platform != "cpu":
        client.dma_map(address, num_bytes)
        found["registered_gbps"] = num_bytes / _seconds(put) / 1e9
    copy_s = _seconds(put)
    rounds = max(1, round(copy_s / _seconds(lambda: work(x, 1))))
    work_s = _seconds(lambda: work(x, rounds))
    both_s = _seconds(lambda: (work(x, rounds), put()))
    found |= {"copy_s": copy_s, "work_s": work_s, "both_s": both_s}
    if device.platform != "cpu":  # there, nothing is copied
        found["hidden"] = (copy_s + work_s - both_s) / min(copy_s, work_s)  # 1: the shorter one costs nothing
    on_device = put()
    found["back_gbps"] = num_bytes / _seconds(lambda: np.asarray(on_device + np.uint8(0))) / 1e9
    if "registered_gbps" in found:
        client.dma_unmap(address)
    return found


def tests(paths: list[str]) -> dict[str, Any]:
    """A runner for machines without pytest: what needs fixtures or parameters is counted as left out."""
    passed, left_out, failed = 0, [], []
    files = [
        f for path in paths for f in (sorted(Path(path).rglob("test_*.py")) if Path(path).is_dir() else [Path(path)])
    ]
    for file in files:
        try:
            spec = importlib.util.spec_from_file_location(file.stem, file)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        except ImportError as error:
            left_out.append(f"{file}: {error}")
            continue
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if not name.startswith("test_"):
                continue
            if inspect.signature(function).parameters:
                left_out.append(f"{file}::{name}")
                continue
            try:
                function()
                passed += 1
            except Exception:
                traceback.print_exc()
                failed.append(f"{file}::{name}")
    print(f"passed {passed}, failed {failed}, left out {left_out}")
    if failed or not passed:
        raise SystemExit(f"{len(failed)} failed, {passed} passed, {len(left_out)} left out for want of pytest")
    return {"passed": passed, "left_out": left_out}


def main() -> None:
    name, *rest = sys.argv[1:]
    if name == "tests":
        found = tests(rest)
    else:
        found = {"machine": machine, "bits": bits, "copies": copies}[name]("--allow-cpu" in rest)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
