"""Run in a process of its own with 8 CPU devices; prints one JSON object that test_mesh.py looks at."""

import hashlib
import json
import os
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import tests.conftest  # noqa: F401  the shared compilation cache
import zinf_jax as zinf
from tests.train import blocks
from tests.train.blocks import placed, run


def mesh(num: int, names: tuple[str, ...] = ("fsdp",), shape: tuple[int, ...] | None = None) -> Mesh:
    devices = np.array(jax.devices()[:num]).reshape(shape or (num,))
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))


def digest(result: blocks.Result) -> str:
    return hashlib.sha256(repr(result.bits).encode()).hexdigest()


def main() -> None:
    out: dict[str, object] = {}
    for num in (1, 2, 4, 8):
        for tier in ("host", "nvme"):
            result = run(placed(tier), mesh=mesh(num))
            out[f"fsdp{num}-{tier}"] = {"bits": digest(result), "losses": result.losses, "norms": result.norms}
    dots = {"streaming": {"remat_policy": "dots_saveable"}}
    for name, placement in (("host", placed("host")), ("nvme", placed("nvme", residuals="nvme"))):
        result = run(placement, dots, mesh=mesh(4))
        out[f"dots-{name}"] = {"bits": digest(result), "losses": result.losses, "norms": result.norms}
    for stage in (0, 1, 2, 3):
        for tier in ("host", "nvme"):
            result = run(placed(tier), {"partitioning": {"stage": stage}, "bf16": {"enabled": True}}, mesh=mesh(4))
            out[f"stage{stage}-{tier}"] = {"bits": digest(result), "losses": result.losses, "norms": result.norms}
    out["collectives"] = collectives()
    out["tensor_parallel"] = tensor_parallel()
    json.dump(out, sys.stdout)


def collectives() -> dict[str, dict[str, list[str]]]:
    """Names of the collectives in each compiled unit, by stage."""
    found: dict[str, dict[str, list[str]]] = {}
    for stage in (0, 2, 3):
        config = blocks.config(placed("nvme"), {"partitioning": {"stage": stage}})
        params = zinf.lazy(blocks.init, jax.random.key(0))
        with zinf.Trainer(blocks.loss, params, zinf.optim.adamw(1e-2), config, mesh=mesh(4)) as trainer:
            trainer.prepare(blocks.batch())
            found[str(stage)] = {}
            # Programs with collectives that ran side by side could wait for each other.
            assert all(exe.casts is exe.gradients is None for exe in trainer._engine.program.executables)
            for phase in ("forward", "backward"):
                units = zip(trainer._engine.program.graph.units, trainer._engine.program.executables, strict=True)
                # Blocks only: XLA may gather or reduce small things around the embedding and the loss as it likes.
                programs = [getattr(exe, phase) for unit, exe in units if unit.name.startswith("block")]
                assert any(programs), "no unit is a block"
                text = "".join(p.text() for p in programs if p is not None)
                names = ("all-gather", "reduce-scatter", "all-reduce")
                found[str(stage)][phase] = [name for name in names if f" {name}(" in text or f" {name}-start(" in text]
    return found


def tensor_parallel() -> dict[str, object]:
    """The user's own shardings over a `tp` axis are kept: leaves arrive split, and so do their pages."""
    both = mesh(8, ("fsdp", "tp"), (4, 2))
    params = jax.jit(blocks.init)(jax.random.key(0))
    for name in [n for n in params if n.startswith("block")]:
        params[name]["up"] = jax.device_put(params[name]["up"], NamedSharding(both, PartitionSpec(None, "tp")))
        params[name]["down"] = jax.device_put(params[name]["down"], NamedSharding(both, PartitionSpec("tp", None)))
    results = {}
    for tier in ("host", "nvme"):
        with zinf.Trainer(
            blocks.loss, params, zinf.optim.adamw(1e-2, weight_decay=0.1), blocks.config(placed(tier)), mesh=both
        ) as trainer:
            results[tier] = run(trainer=trainer)
            shapes = sorted({page.shape[:2] for page in trainer._engine.layout.pages})
    return {
        "equal": results["host"].bits == results["nvme"].bits,
        "losses": results["nvme"].losses,
        "page_rows": shapes,
    }


if __name__ == "__main__":
    main()
