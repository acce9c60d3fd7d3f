"""Programs beside those of the passes: casts once per pass whatever the number of micro-batches, gradients beside the
next unit."""

import collections
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zinf_jax as zinf
from tests.train.blocks import config, placed
from zinf_jax.models import decoder
from zinf_jax.stream.side_lane import SideLane

LAYERS, MICRO_BATCHES = 3, 4


def make_trainer(**settings):
    model = decoder(None, num_layers=LAYERS, dim=64, num_heads=2, seq_len=32, vocab_size=256, remat=False)
    given = {"bf16": {"enabled": True}, "gradient_accumulation_steps": MICRO_BATCHES}
    settings = config(placed("host"), given, settings)
    return zinf.Trainer(model.loss_fn, zinf.lazy(model.init_fn, jax.random.key(0)), zinf.optim.adamw(1e-2), settings)


def batch():
    return {"tokens": np.random.default_rng(0).integers(0, 256, (MICRO_BATCHES, 33), dtype=np.int32)}


def test_a_lane_runs_beside_the_main_thread():
    """With JAX 0.10, of one thread's programs one that waits for nothing mostly comes after the one before it."""

    @jax.jit
    def long(x):
        for _ in range(120):  # of a second and more; XLA runs programs of a few cheap equations at once
            x = x @ x
        return x

    short = jax.jit(lambda x: x @ x)
    large, small, lane = jnp.zeros((1024, 1024)), jnp.zeros((64, 64)), SideLane("test")
    jax.block_until_ready((long(large), short(small), lane.run(short, small)))
    under_way = long(large)
    jax.block_until_ready(lane.run(short, small))
    assert not under_way.is_ready()


def test_an_error_reaches_who_asked():
    def fail(x):
        raise ValueError(f"no {x}")

    with pytest.raises(ValueError, match="no 3"):
        SideLane("test").run(fail, 3)


@pytest.mark.parametrize("call", [0, 3, 20])
def test_a_step_whose_side_program_fails_can_be_repeated(call, monkeypatch):
    run = SideLane.run
    with make_trainer() as trainer:
        expected = [trainer.step(batch()).loss for _ in range(3)]
    with make_trainer() as trainer:
        losses = [trainer.step(batch()).loss]
        calls = itertools.count()

        def fails_once(self, program, *arguments):
            if next(calls) == call:
                raise MemoryError("no room for it")
            return run(self, program, *arguments)

        monkeypatch.setattr(SideLane, "run", fails_once)
        with pytest.raises(MemoryError, match="no room"):
            trainer.step(batch())
        losses += [trainer.step(batch()).loss for _ in range(2)]
    assert losses == expected


@pytest.mark.parametrize("policy", ["nothing_saveable", "dots_saveable"])
def test_casts_are_made_once_per_pass_and_gradients_once_per_micro_batch(policy, monkeypatch):
    calls = collections.Counter()
    run = SideLane.run
    with make_trainer(streaming={"remat_policy": policy}) as trainer:
        trainer.step(batch())
        kinds = {}
        for unit, exe in zip(trainer._engine.program.graph.units, trainer._engine.program.executables, strict=True):
            for kind in ("casts", "recasts", "gradients"):
                if (program := getattr(exe, kind)) is not None:
                    kinds[id(program.call)] = kind, unit.name.rstrip("_0123456789")

        def counted(self, program, *arguments):
            calls[kinds.get(id(program), ("sum", ""))] += 1
            return run(self, program, *arguments)

        monkeypatch.setattr(SideLane, "run", counted)
        trainer.step(batch())
    made = collections.Counter()
    for (kind, name), count in calls.items():
        made["casts" if kind == "recasts" else kind, name] += count
    assert made["casts", "block"] == 2 * LAYERS
    assert made["gradients", "block"] == LAYERS * MICRO_BATCHES
    assert calls["recasts", "block"] >= 2 * LAYERS - 4, "in the memory of those before, but after other units"


def test_a_cast_takes_the_memory_of_an_older_one_and_no_program_casts_again():
    with make_trainer() as trainer:
        trainer.prepare(batch())
        program = trainer._engine.program
        (block,) = [e for u, e in zip(program.graph.units, program.executables, strict=True) if u.name == "block_1"]
        memory = block.recasts.call.memory_analysis()
        num_bytes = 4 * 12 * 64 * 64
        assert memory.alias_size_in_bytes == num_bytes
        index = next(i for i, unit in enumerate(program.graph.units) if unit.name == "block_1")
        sizes = program.shape.units[index]
        assert num_bytes <= sizes.cast_bytes < num_bytes + 256
        assert sizes.crossing_bytes > 0 and block.gradients is not None
        matrix = f"f32[{64},{4 * 64}]"  # of the MLP
        for part in (block.forward, block.backward):
            assert not [line for line in part.text().splitlines() if f"= {matrix}" in line and "convert" in line]
