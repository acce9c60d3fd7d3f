"""Run in a process of its own with 8 CPU devices; prints one JSON object that test_relayout.py looks at."""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import json
import pathlib
import sys
import tempfile
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import tests.conftest  # noqa: F401  the shared compilation cache
import zinf_jax as zinf
from tests.train import exact

BF16 = {"bf16": {"enabled": True}}
WEIGHTS = {"restore": "weights"}


def mesh(num, names=("fsdp",), shape=None):
    devices = np.array(jax.devices()[:num]).reshape(shape or (num,))
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))


def odd():
    """CK03's sizes, a leaf of several chunks, a scalar, a carried integer and one without elements."""
    rng = np.random.default_rng(1)
    sizes = {"a": (7,), "b": (513,), "c": (33, 45), "d": (9001,), "e": ()}
    made = {name: rng.normal(size=size).astype(np.float32) for name, size in sizes.items()}
    return {**made, "count": np.arange(5, dtype=np.int32), "none": np.zeros((0, 3), np.float32)}


def stack():
    return {"w": np.random.default_rng(2).normal(size=(4, 7, 9)).astype(np.float32), "b": np.zeros(513, np.float32)}


def scanned(params, batch):
    """Reads the stack slice by slice."""
    body = lambda x, w: (jnp.tanh(x + w), None)  # noqa: E731
    x, _ = jax.lax.scan(body, jnp.zeros((7, 9)) + jnp.mean(batch["g"]), params["w"])
    return jnp.sum(x**2) + jnp.sum((params["b"] - jnp.mean(batch["g"])) ** 2)


def whole(params, batch):
    """Reads it at once."""
    return jnp.sum((params["w"] - jnp.mean(batch["g"])) ** 2) + jnp.sum(params["b"] ** 2)


def split(tp):
    """A leaf that the user splits over `tp`."""
    rng = np.random.default_rng(3)
    return {"w": jax.device_put(rng.normal(size=(6, 11)).astype(np.float32),
                                NamedSharding(tp, PartitionSpec("tp", None)))}  # fmt: skip


def trainer(loss, params, topology, *parts, optimizer=None, **kwargs):
    made = optimizer or zinf.optim.adamw(1e-2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        new = exact.trainer(loss, params, made, *parts, mesh=topology, **kwargs)
        return new.prepare(exact.ones(0.5, size=24))


def steps(made, num=2):
    return [made.step(exact.ones(0.5 + i, size=24)).loss for i in range(num)]


def pair(saved, resumed, loss, params, other_loss=None, other_params=None, config=(), later=(), **kwargs):
    """Trains and saves on one mesh, resumes on another: are all leaves, slots and counters the same bits?"""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "saved"
        small = {"streaming": {"chunk_bytes": 100_000, "page_bytes": 4096}}  # other chunks and pages than later
        with trainer(loss, params, saved, *config, small, run_dir=path.with_name("first"), **kwargs) as first:
            steps(first)
            before = exact.everything(first)
            first.save(path)
            chunks = first.plan.chunk_elements
            go_on = steps(first)
        results = {}
        for source in (path, path.with_name("first")):  # a checkpoint; a closed run
            with trainer(other_loss or loss, other_params or params, resumed, *config, *later,
                         run_dir=path.with_name(f"of-{source.name}"), resume=source, **kwargs) as second:  # fmt: skip
                found = exact.everything(second)
                if source == path:
                    results["equal"] = found == before
                    results["leaves_equal"] = found[0] == before[0]
                    results["moments_zero"] = not any(any(v) for d in found[1].values() for v in d.values())
                    results["losses"] = (go_on, steps(second))
                results["chunks"] = [chunks, second.plan.chunk_elements]
                results["ranks"] = sorted({page.num_ranks for page in second._engine.layout.pages})
                final = exact.everything(second)
            # What was resumed and closed goes on in place, on its own mesh.
            with trainer(other_loss or loss, other_params or params, resumed, *config,
                         run_dir=path.with_name(f"of-{source.name}"), resume="auto", **kwargs) as third:  # fmt: skip
                results["in_place"] = results.get("in_place", True) and exact.everything(third) == final
        return results


def refusals():
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "run"
        with trainer(exact.quadratic, odd(), mesh(2), run_dir=path) as first:
            steps(first)
            state = exact.everything(first)
        for name, resume in (("auto", "auto"), ("path", path)):
            try:
                trainer(exact.quadratic, odd(), mesh(4), run_dir=path, resume=resume)
            except zinf.ResumeError as error:
                found[name] = str(error)
        with trainer(exact.quadratic, odd(), mesh(2), run_dir=path, resume="auto") as again:
            found["unharmed"] = exact.everything(again) == state
        tp = mesh(4, ("fsdp", "tp"), (2, 2))
        with trainer(exact.quadratic, split(tp), tp, run_dir=path.with_name("tp")) as first:
            steps(first)
        try:
            plain = {"w": np.zeros((6, 11), np.float32)}
            trainer(exact.quadratic, plain, mesh(4), run_dir=path.with_name("no-tp"), resume=path.with_name("tp"))
        except zinf.ResumeError as error:
            found["tp"] = str(error)
        short = path.with_name("saved")
        with trainer(exact.quadratic, odd(), mesh(2)) as first:
            first.save(short)
        with open(short / "optimizer.pages", "r+b") as file:
            file.truncate(4096)
        try:
            trainer(exact.quadratic, odd(), mesh(4), run_dir=path.with_name("cut"), resume=short)
        except zinf.StoreError as error:
            found["short"] = str(error)
    return found


def main():
    out = {}
    for saved, resumed in ((2, 1), (1, 3), (2, 4)):
        for tier, precision in (("nvme", ()), ("host", (BF16,))):
            config = (exact.on(tier), *precision)
            out[f"{saved}-{resumed}-{tier}"] = pair(mesh(saved), mesh(resumed), exact.quadratic, odd(), config=config)
    on = (exact.on("nvme"), BF16)
    out["weights"] = pair(mesh(2), mesh(4), exact.quadratic, odd(), config=on, later=(WEIGHTS,))
    out["optax"] = pair(mesh(2), mesh(4), exact.quadratic, odd(), config=on, optimizer=optax.adam(1e-2))
    tp = [mesh(2 * n, ("fsdp", "tp"), (n, 2)) for n in (1, 2)]
    out["tp"] = pair(tp[0], tp[1], exact.quadratic, split(tp[0]), other_params=split(tp[1]), config=on)
    out["stack-whole"] = pair(mesh(2), mesh(2), scanned, stack(), other_loss=whole, config=on)
    out["whole-stack"] = pair(mesh(1), mesh(4), whole, stack(), other_loss=scanned, config=on)
    out["refusals"] = refusals()
    json.dump(out, sys.stdout)


if __name__ == "__main__":
    main()
