"""Saving and resuming: everything a run needs, bit for bit."""

import json
import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zinf_jax as zinf
from tests.train import blocks
from tests.train.blocks import config, placed, run

FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}}


def trainer(*parts, rng=None, **kwargs):
    optimizer = zinf.optim.adamw(1e-2, weight_decay=0.1)
    params = zinf.lazy(blocks.init, jax.random.key(0))
    return zinf.Trainer(blocks.loss, params, optimizer, config(*parts), rng=rng, **kwargs)


def advance(made, steps, first=None):
    return run(trainer=made, steps=steps)


@pytest.mark.parametrize("tier", blocks.TIERS)
@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}, FP16], ids=["fp32", "bf16", "fp16"])
def test_a_resumed_run_equals_the_undisturbed_one(tmp_path, tier, precision):
    parts = (placed(tier), precision)
    straight = run(*parts, steps=5)
    with trainer(*parts, run_dir=tmp_path / "a") as made:
        made.user_state = {"data": 3}
        advance(made, 3)
        made.save(tmp_path / "saved")
        advance(made, 1)
    with trainer(*parts, run_dir=tmp_path / "b", resume=tmp_path / "saved") as made:
        made.prepare(blocks.batch())
        assert (made.global_step, made.user_state) == (3, {"data": 3})
        resumed = advance(made, 2)
    assert resumed.bits[1:] == straight.bits[1:]
    assert resumed.losses == straight.losses[3:]


def test_a_closed_trainer_says_so():
    made = trainer(placed("nvme"))
    advance(made, 1)
    made.close()
    for use in (lambda: made.step(blocks.batch()), lambda: made.save("x"), lambda: made.plan, made.stats):
        with pytest.raises(zinf.ZinfError, match="this trainer is closed: make another one"):
            use()
    made.close()


def test_a_checkpoint_moves_between_tiers(tmp_path):
    straight = run(placed("host"), steps=4)
    with trainer(placed("nvme"), run_dir=tmp_path / "a") as made:
        advance(made, 2)
        made.save(tmp_path / "saved")
    with trainer(placed("host"), run_dir=tmp_path / "b", resume=tmp_path / "saved") as made:
        made.prepare(blocks.batch())
        assert advance(made, 2).bits[1:] == straight.bits[1:]


def test_a_resume_with_other_sizes_keeps_the_stored_layout(tmp_path):
    straight = run(placed("nvme"), steps=4)
    with trainer(placed("nvme"), run_dir=tmp_path / "a") as made:
        advance(made, 2)
        made.save(tmp_path / "saved")
    other = {"streaming": {"chunk_bytes": 1 << 20, "page_bytes": 10_000, "max_unit_bytes": 1 << 20, "lookahead": 0}}
    with trainer(placed("nvme"), other, run_dir=tmp_path / "b", resume=tmp_path / "saved") as made:
        made.prepare(blocks.batch())
        resumed = advance(made, 2)
    assert resumed.moments.keys() == straight.moments.keys()
    np.testing.assert_allclose(resumed.losses, straight.losses[2:], rtol=1e-6)


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_auto_continues_a_closed_run_in_place(tmp_path, tier):
    straight = run(placed(tier), steps=4)
    with trainer(placed(tier), run_dir=tmp_path, resume="auto") as made:
        advance(made, 2)
    before = sorted(p.name for p in (tmp_path / "pages").iterdir())
    with trainer(placed(tier), run_dir=tmp_path, resume="auto") as made:
        made.prepare(blocks.batch())
        assert made.global_step == 2
        resumed = advance(made, 2)
    assert resumed.bits[1:] == straight.bits[1:]
    assert sorted(p.name for p in (tmp_path / "pages").iterdir()) == before  # no new files per run (NV11)


def test_a_committed_run_is_never_overwritten_by_accident(tmp_path):
    with trainer(placed("nvme"), run_dir=tmp_path) as made:
        advance(made, 1)
    with pytest.raises(zinf.ResumeError, match="overwrite=True"):
        trainer(placed("nvme"), run_dir=tmp_path)
    with trainer(placed("nvme"), run_dir=tmp_path, overwrite=True) as made:
        assert advance(made, 1).bits == run(placed("nvme"), steps=1).bits


def test_an_interrupted_run_without_a_checkpoint_is_refused_and_with_one_goes_back_to_it(tmp_path):
    """durability is off: pages that were in use when a run died are never trained on."""
    script = f"""
        import os, sys
        sys.path.insert(0, {os.getcwd()!r})
        from tests.train.test_checkpoint import advance, placed, trainer
        made = trainer(placed("nvme"), {{"streaming": {{"durability": "off"}}}}, run_dir={str(tmp_path)!r})
        advance(made, 2)
        if sys.argv[1] == "save":
            made.save({str(tmp_path / "checkpoints" / "step_2")!r})
        advance(made, 1)
        os.kill(os.getpid(), 9)
    """
    for argument in ("bare", "save"):
        done = subprocess.run([sys.executable, "-c", textwrap.dedent(script), argument], capture_output=True, text=True)
        assert done.returncode == -9, done.stderr
        if argument == "bare":
            with pytest.raises(zinf.ResumeError, match="interrupted"):
                trainer(placed("nvme"), run_dir=tmp_path, resume="auto")
            for path in tmp_path.glob("*.json"):
                path.unlink()
    with trainer(placed("nvme"), run_dir=tmp_path, resume="auto") as made:
        made.prepare(blocks.batch())
        assert made.global_step == 2
        assert advance(made, 1).bits[1:] == run(placed("nvme"), steps=3).bits[1:]


def test_one_owner_per_run_directory(tmp_path):
    first = trainer(placed("nvme"), run_dir=tmp_path)
    with pytest.raises(zinf.OwnerError, match=str(os.getpid())):
        trainer(placed("nvme"), run_dir=tmp_path, overwrite=True)
    first.close()
    trainer(placed("nvme"), run_dir=tmp_path).close()


def test_two_trainers_share_an_nvme_path(tmp_path):
    """NV04: same shapes, other values, one path: each returns its own."""
    path = {"nvme_path": str(tmp_path)}
    other = zinf.lazy(blocks.init, jax.random.key(1))
    alone = [run(placed("host"), steps=2), run(placed("host"), steps=2, params=other)]
    with (
        trainer(placed("nvme"), path) as a,
        zinf.Trainer(blocks.loss, other, zinf.optim.adamw(1e-2, weight_decay=0.1), config(placed("nvme"), path)) as b,
    ):
        for seed in range(2):
            for made in (a, b):
                made.step(blocks.batch(seed=seed))
        for made, expected in zip((a, b), alone, strict=True):
            assert {name: value.tobytes() for name, value in made.iter_params()} == expected.params
    assert list(tmp_path.iterdir()) == [], "a temporary run leaves nothing behind"


def test_files_are_private_and_hold_no_pickle(tmp_path):
    with trainer(placed("nvme"), run_dir=tmp_path / "run") as made:
        advance(made, 1)
        saved = made.save(tmp_path / "saved")
    for path in [*(tmp_path / "run").rglob("*"), *saved.rglob("*")]:
        if path.is_file():
            assert path.stat().st_mode & 0o077 == 0, path
            assert not path.read_bytes().startswith(b"\x80"), path
    json.loads((saved / "run.json").read_text())


def test_a_failed_save_leaves_nothing(tmp_path):
    with trainer(placed("nvme"), run_dir=tmp_path / "run") as made:
        advance(made, 1)
        made.save(tmp_path / "saved")
        with pytest.raises(zinf.ConfigError, match="exists already"):
            made.save(tmp_path / "saved")
        before = run(trainer=made, steps=0).bits
        made.user_state = {"cannot": object()}  # the manifest is written last, and fails
        with pytest.raises(TypeError):
            made.save(tmp_path / "other")
        assert sorted(p.name for p in tmp_path.iterdir()) == ["run", "saved"]
        made.user_state = None
        assert run(trainer=made, steps=0).bits == before


def test_resume_from_what_is_not_a_checkpoint(tmp_path):
    with pytest.raises(zinf.ResumeError, match=r"run\.json"):
        trainer(placed("nvme"), run_dir=tmp_path / "a", resume=tmp_path)
    with trainer(placed("nvme"), run_dir=tmp_path / "a") as made:
        advance(made, 1)
        saved = made.save(tmp_path / "saved")
    with (
        pytest.raises(zinf.ResumeError, match="bf16"),
        trainer(placed("nvme"), {"bf16": {"enabled": True}}, run_dir=tmp_path / "b", resume=saved) as made,
    ):
        made.prepare(blocks.batch())
    with pytest.raises(zinf.ResumeError, match="keeps"), zinf.Trainer(
        blocks.loss, blocks.init(jax.random.key(0)), zinf.optim.sgd(0.1), config(placed("nvme")),
        run_dir=tmp_path / "d", resume=saved,
    ) as made:  # fmt: skip
        made.prepare(blocks.batch())
    (saved / "optimizer.pages").write_bytes(b"")
    with (
        pytest.raises(zinf.StoreError, match="cut short"),
        trainer(placed("nvme"), run_dir=tmp_path / "c", resume=saved) as made,
    ):
        made.prepare(blocks.batch())


def noisy_loss(params, state, batch, rng):
    scale = 1 + 0.1 * jax.random.normal(rng, ())
    value = blocks.loss(params, batch) * scale
    return value, {"seen": state["seen"] + batch["x"].shape[0], "mean": 0.9 * state["mean"] + 0.1 * value}


@pytest.mark.parametrize("micro", [1, 2])
def test_rng_state_and_data_position_are_resumed(tmp_path, micro):
    def make(**kwargs):
        return zinf.Trainer(
            noisy_loss, zinf.lazy(blocks.init, jax.random.key(0)), zinf.optim.sgd(0.1),
            config(placed("nvme"), {"gradient_accumulation_steps": micro}),
            state={"seen": jnp.int32(0), "mean": jnp.float32(0)}, rng=jax.random.key(7), **kwargs,
        )  # fmt: skip

    with make() as made:
        straight = [made.step(blocks.batch(seed=i)).loss for i in range(4)]
        assert int(made.state["seen"]) == 4 * 16
        mean = float(made.state["mean"])
    with make(run_dir=tmp_path / "a") as made:
        for i in range(2):
            made.user_state = {"next": i + 1}
            made.step(blocks.batch(seed=i))
        made.save(tmp_path / "saved")
    with make(run_dir=tmp_path / "b", resume=tmp_path / "saved") as made:
        made.prepare(blocks.batch())
        first = made.user_state["next"]
        assert [made.step(blocks.batch(seed=i)).loss for i in range(first, 4)] == straight[2:]
        assert (int(made.state["seen"]), float(made.state["mean"])) == (64, mean)
