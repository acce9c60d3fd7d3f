"""The benchmark's model under DeepSpeed ZeRO-3 with everything on NVMe: a worker for `bench_step.py --peer-python`.

Runs in an environment of its own: Python 3.11, `pip install torch==2.13.0`, then `deepspeed ninja py-cpuinfo`, and the
headers of libaio. `bench_step.py` starts it. Its operators take minutes to compile, which must not fall into a timed
run: `DS_ACCELERATOR=cpu PATH=VENV/bin:$PATH python scripts/peer_deepspeed.py --build` compiles them once.

The settings are those that were found to be fast and honest: nothing stays in DRAM that is configured for NVMe, weights
are bf16 and every matrix product is fp32 (a CPU without bf16 units is 5 to 50 times slower in bf16), buffers lie on
huge pages.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
from _bench import SIZES, ModelSize, Reply, serve, timed_steps
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Linear(nn.Linear):
    """bf16 weight, fp32 product."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input.float(), self.weight.float())


class RMSNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), 1e-6)


class Block(nn.Module):
    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.num_heads = size.num_heads
        self.norm_attention, self.norm_mlp = RMSNorm(size.dim), RMSNorm(size.dim)
        self.qkv = Linear(size.dim, 3 * size.dim, bias=False)
        self.out = Linear(size.dim, size.dim, bias=False)
        self.up = Linear(size.dim, 4 * size.dim, bias=False)
        self.down = Linear(4 * size.dim, size.dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        qkv = self.qkv(self.norm_attention(x_BTD))
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in qkv.chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.out(attended.transpose(1, 2).flatten(2))
        return x_BTD + self.down(F.gelu(self.up(self.norm_mlp(x_BTD)), approximate="tanh"))


class Decoder(nn.Module):
    """The decoder of `zinf_jax.models`, with one recomputation per block."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocab_size, size.dim)
        self.positions = nn.Embedding(size.seq_len, size.dim)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.num_layers))
        self.norm = RMSNorm(size.dim)
        self.head = Linear(size.dim, size.vocab_size, bias=False)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        places = torch.arange(tokens_BT.shape[1])
        x_BTD = self.tokens(tokens_BT).float() + self.positions(places).float()
        for block in self.blocks:
            x_BTD = checkpoint(block, x_BTD, use_reentrant=False)
        logits_BTV = self.head(self.norm(x_BTD))
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


def config(size: ModelSize, folder: str, batch: int, num_micro_batches: int) -> dict[str, Any]:
    """Everything on NVMe. V is the largest parameter; other sizes crash or keep weights in DRAM."""
    largest = size.vocab_size * size.dim
    nvme = {"device": "nvme", "nvme_path": folder, "pin_memory": False}
    return {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": num_micro_batches,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
        "zero_force_ds_cpu_optimizer": True,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {**nvme, "buffer_count": 4},
            "offload_param": {**nvme, "buffer_count": 5, "buffer_size": 2 * largest, "max_in_cpu": 0},
            "sub_group_size": largest,
            "stage3_max_live_parameters": 2 * largest,
            "stage3_max_reuse_distance": 2 * largest,
            "stage3_prefetch_bucket_size": largest // 2,
            "stage3_param_persistence_threshold": 100_000,
        },
        "aio": {"block_size": 1 << 20, "queue_depth": 8, "overlap_events": True},
    }


def build(spec: dict[str, Any]) -> dict[str, Any]:
    """The worker's commands. One step is `num_micro_batches` sequences, as one batch or accumulated one by one."""
    size = SIZES[spec["size"]]
    torch.manual_seed(0)
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(world, MASTER_PORT=str(spec["port"]))
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    accumulate = spec["num_micro_batches"] if spec["accumulate"] else 1
    batch = spec["num_micro_batches"] // accumulate
    settings = config(size, spec["folder"], batch, accumulate)
    with deepspeed.zero.Init(config_dict_or_path=settings, dtype=torch.bfloat16):
        model = Decoder(size)
    num_params = sum(p.ds_numel for p in model.parameters())
    engine, *_ = deepspeed.initialize(model=model, config=settings, model_parameters=model.parameters())
    tokens = torch.randint(0, size.vocab_size, (accumulate, batch, size.seq_len + 1))
    losses = [0.0]

    def step() -> None:
        for micro in tokens:
            loss = engine(micro[:, :-1], micro[:, 1:])
            engine.backward(loss)
            engine.step()
        losses.append(float(loss))

    def steps(count: int) -> Reply:
        return {**timed_steps(step, count), "loss": losses[-1], "num_params": num_params}

    return {"steps": steps}


def build_operators() -> None:
    """Compiles DeepSpeed's CPU Adam and its I/O library (they are kept for later runs)."""
    from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder

    for builder in (CPUAdamBuilder, AsyncIOBuilder):
        builder().load()


if __name__ == "__main__":
    build_operators() if sys.argv[-1] == "--build" else serve(build)
