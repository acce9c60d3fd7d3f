"""When the update runs never changes a bit: every mode, with or without commits, with clips and skips on some steps."""

import collections
import concurrent.futures
import errno
import functools

import pytest

import zinf_jax as zinf
from aio_ffi import _testing
from tests.train import blocks
from tests.train.blocks import placed, run
from zinf_jax.stream.overlap import OverlapChooser

MODES = ("none", "backward", "next_forward", "auto")
DURABILITIES = ("off", "step", "every_3")
STEPS = 8


def mode(update_overlap, durability="off", **other):
    return {"streaming": {"update_overlap": update_overlap, "durability": durability, **other}}


@functools.cache
def some_clip():
    """A bound that the norm of some steps exceeds and that of others does not."""
    norms = sorted(run(placed("host"), {"gradient_clipping": 1e9}, mode("none"), steps=STEPS).norms)
    return norms[STEPS // 2] * 0.999


@functools.cache
def reference(clipping, precision="fp32"):
    return run(placed("host"), parts(clipping, precision), mode("none"), steps=STEPS)


def parts(clipping, precision="fp32"):
    # 2**22 overflows in this model: the first steps are skipped, later ones are not.
    section = {} if precision == "fp32" else {"fp16": {"enabled": True, "initial_scale_power": 22, "hysteresis": 1}}
    return {"gradient_clipping": clipping, **section}


def test_the_bound_clips_some_steps_only():
    norms = reference(some_clip()).norms
    assert 2 <= sum(n > some_clip() for n in norms) <= STEPS - 2


@pytest.mark.parametrize("durability", DURABILITIES)
@pytest.mark.parametrize("name", MODES)
def test_every_mode_gives_the_same_bits(name, durability, tmp_path):
    got = run(
        placed("nvme"), parts(some_clip()), mode(name, durability), steps=STEPS,
        run_dir=tmp_path / "run" if durability != "off" else None,
    )  # fmt: skip
    assert got.bits == reference(some_clip()).bits
    assert got.stats.fetch_misses == 0


@pytest.mark.parametrize("name", MODES)
def test_fp16_overflows_on_some_steps(name, tmp_path):
    expected = reference(some_clip(), "fp16")
    assert any(expected.skipped) and not all(expected.skipped)
    got = run(placed("nvme"), parts(some_clip(), "fp16"), mode(name, "step"), steps=STEPS, run_dir=tmp_path)
    assert got.bits == expected.bits


@pytest.mark.parametrize("tiers", ["nvme-host-host", "host-nvme-nvme", "device-nvme-device", "host-host-host"])
@pytest.mark.parametrize("name", ["backward", "next_forward"])
def test_tiers_that_cannot_be_undone(name, tiers, tmp_path):
    weights, optimizer, gradients = tiers.split("-")
    placement = {"placement": {"weights": weights, "optimizer": optimizer, "gradients": gradients}}
    got = run(placement, parts(some_clip()), mode(name, "step"), steps=STEPS, run_dir=tmp_path)
    assert got.bits == reference(some_clip()).bits


@pytest.mark.parametrize("name", ["backward", "next_forward"])
@pytest.mark.parametrize(
    "streaming", [{"lookahead": 0}, {"num_chunk_frames": 1}, {"max_in_flight": 1}, {"chunk_bytes": 1}], ids=str
)
def test_whatever_runs_ahead(name, streaming, tmp_path):
    residuals = placed("nvme", residuals="nvme")
    got = run(residuals, parts(some_clip()), mode(name, "step", **streaming), steps=STEPS, run_dir=tmp_path)
    assert got.bits == reference(some_clip()).bits


@pytest.mark.parametrize("name", ["backward", "next_forward"])
def test_micro_batches(name, tmp_path):
    micro = {"gradient_accumulation_steps": 4, **parts(some_clip())}
    expected = run(placed("host"), micro, mode("none"), steps=4)
    assert run(placed("nvme"), micro, mode(name, "step"), steps=4, run_dir=tmp_path).bits == expected.bits


def test_state_is_whole_whenever_it_is_looked_at():
    """The update of the last step is done before parameters, moments or an evaluation are given."""
    looked, plain = [], []
    for name, seen in (("next_forward", looked), ("none", plain)):
        with zinf.Trainer(
            blocks.loss, zinf.lazy(blocks.init, blocks.jax.random.key(0)), zinf.optim.adamw(1e-2),
            blocks.config(placed("nvme"), mode(name)),
        ) as trainer:  # fmt: skip
            for i in range(3):
                trainer.step(blocks.batch(seed=i))
                seen.append(float(trainer.evaluate(blocks.loss, blocks.batch(seed=7))))
                seen.append({k: v.tobytes() for k, v in trainer.iter_params()})
                seen.append(trainer.opt_state()["mu"]["embedding"].tobytes())
    assert looked == plain


def test_an_update_meets_the_weights_in_their_frame():
    """26 bytes per parameter where 28 move otherwise: the weights are not read again for the update."""
    sixteen = {"bf16": {"enabled": True}}
    none = run(placed("nvme", gradients="host"), sixteen, mode("none"), steps=6).stats
    ahead = run(placed("nvme", gradients="host"), sixteen, mode("next_forward"), steps=6).stats
    weights = sum(p.weights_bytes for p in run(placed("nvme"), sixteen, steps=1).plan.shape.pages)
    # Six updates, of which the last one was asked for by looking: it reads as the other does.
    assert none.total_nvme_bytes_read - ahead.total_nvme_bytes_read >= 5 * weights


@pytest.mark.parametrize("streaming", [{}, {"max_in_flight": 1}], ids=str)
def test_an_update_beside_backward_meets_weights_and_gradient_in_their_frames(tmp_path, monkeypatch, streaming):
    """Neither is read again, but for what is complete with the norm. Not even by an update that is late: it is waited
    for, the gradient's frame first where few programs are in flight."""
    with zinf.Trainer(
        blocks.loss, zinf.lazy(blocks.init, blocks.jax.random.key(0)), zinf.optim.adamw(1e-2),
        blocks.config(placed("nvme"), parts(1e9), mode("backward", "step", **streaming)), run_dir=tmp_path,
    ) as trainer:  # fmt: skip
        trainer.prepare(blocks.batch())
        store, read = trainer._engine.store, collections.Counter()
        read_chunk = store.read_chunk

        def seen(kind, page, *rest):
            read[kind, page] += 1
            return read_chunk(kind, page, *rest)

        monkeypatch.setattr(store, "read_chunk", seen)
        monkeypatch.setattr(trainer._engine.updates, "advance", lambda: False)  # moves only where it is waited for
        trainer.step(blocks.batch())  # no commit before it is under way: old versions can stay
        assert trainer.stats().pages_ahead >= 3
        last = trainer.plan.shape.units[trainer.plan.positions[-1].unit].pages
        assert {page for kind, page in read if kind != "optimizer"} <= set(last)


def durable(trainer):
    """The commit under way is done, which nobody has noticed yet."""
    if (future := trainer._engine.committer._future) is not None:
        concurrent.futures.wait([future])


@pytest.mark.parametrize(("clipping", "undone"), [(1e9, 0), (1e-3, 4)])
def test_running_ahead_is_counted_and_undone_where_the_norm_says_so(tmp_path, clipping, undone):
    with zinf.Trainer(
        blocks.loss, zinf.lazy(blocks.init, blocks.jax.random.key(0)), zinf.optim.adamw(1e-2),
        blocks.config(placed("nvme"), {"gradient_clipping": clipping}, mode("backward", "step")), run_dir=tmp_path,
    ) as trainer:  # fmt: skip
        for step in range(4):
            trainer.prepare(blocks.batch())
            trainer.params()  # all of the step before is written
            durable(trainer)  # old versions can stay
            trainer.step(blocks.batch(seed=step))
            assert trainer.stats().pages_ahead >= 3
        assert trainer.stats().updates_undone == undone


def test_auto_runs_ahead_once_steps_are_not_clipped(tmp_path):
    with zinf.Trainer(
        blocks.loss, zinf.lazy(blocks.init, blocks.jax.random.key(0)), zinf.optim.adamw(1e-2),
        blocks.config(placed("nvme"), {"gradient_clipping": 1e9}, mode("auto", "step")), run_dir=tmp_path,
    ) as trainer:  # fmt: skip
        ahead = []
        for step in range(4):
            trainer.prepare(blocks.batch()).params()
            durable(trainer)
            trainer.step(blocks.batch(seed=step))
            ahead.append(trainer.stats().pages_ahead > 0)
    assert ahead == [False, False, True, True]


@pytest.mark.parametrize(("ahead_s", "other_s"), [(1.0, 2.0), (2.0, 1.0)])
def test_auto_keeps_to_what_is_faster(ahead_s, other_s):
    chooser = OverlapChooser("auto", clips=True)
    took = []
    for _ in range(chooser.PATIENCE + 2 * chooser.PERIOD):
        took.append(ahead_s if chooser.runs_ahead else other_s)
        chooser.saw(as_assumed=True, undone=False)
        chooser.took(took[-1])
    fast = min(ahead_s, other_s)
    first = chooser.PATIENCE + 2 * chooser.TRIAL  # steps until both ways are known
    assert took[first : chooser.PATIENCE + chooser.PERIOD] == [fast] * (chooser.PERIOD - 2 * chooser.TRIAL)
    second = took[chooser.PATIENCE + chooser.PERIOD :]
    assert second.count(max(ahead_s, other_s)) == chooser.TRIAL  # it looked again, and no more than that
    chooser.saw(as_assumed=False, undone=True)
    chooser.took(fast)
    assert not chooser.runs_ahead


def test_auto_counts_no_step_in_which_the_other_way_still_has_work():
    chooser = OverlapChooser("auto", clips=False)
    times = iter([9.0, 1.0, 1.0, 1.0, 9.0, 2.0, 2.0, 2.0])  # the first after each change is slow
    for time_s in times:
        chooser.saw(as_assumed=True, undone=False)
        chooser.took(time_s)
    assert chooser.runs_ahead


def test_what_completes_last_is_not_run_ahead(tmp_path, monkeypatch):
    """Its norm is known next: it meets the next step's weights in their frames, and is written beside the forward."""
    with zinf.Trainer(
        blocks.loss, zinf.lazy(blocks.init, blocks.jax.random.key(0)), zinf.optim.adamw(1e-2),
        blocks.config(placed("nvme"), mode("backward", "step")), run_dir=tmp_path,
    ) as trainer:  # fmt: skip
        trainer.prepare(blocks.batch()).params()
        durable(trainer)
        updates, plan, ahead = trainer._engine.updates, trainer.plan, []
        run_ahead = updates.run_ahead
        monkeypatch.setattr(updates, "run_ahead", lambda pages: (ahead.extend(pages), run_ahead(pages)))
        trainer.step(blocks.batch())
        last = {page for page in plan.chunks_of if plan.last_uses[page] == len(plan.positions) - 1}
        assert last
        assert len(ahead) == trainer.stats().pages_ahead >= 3
        assert not last & set(ahead)


def test_a_write_that_fails_while_another_error_is_handled_is_not_forgotten(tmp_path):
    """The chunk's old version would be taken for the new one: the run must not go on."""
    with zinf.Trainer(
        blocks.loss, zinf.lazy(blocks.init, blocks.jax.random.key(0)), zinf.optim.adamw(1e-2),
        blocks.config(placed("nvme"), mode("next_forward", "step")), run_dir=tmp_path,
    ) as trainer:  # fmt: skip
        trainer.step(blocks.batch())
        engine = trainer._engine
        due = [page for page in engine.plan.chunks_of if engine.updates.is_due(page)]
        *others, last = sorted(due, key=engine.plan.first_uses.__getitem__)
        for page in others:
            engine.updates.ensure(page)
            engine.updates.release(page)
        with _testing.inject(engine.store.files.engines[0], "write", value=-errno.EIO):
            engine.updates.ensure(last)  # computed; its write is under way
            engine.executor._abort()  # as an error in the passes does
        with pytest.raises(zinf.ZinfError, match="Input/output error"):
            trainer.step(blocks.batch())
        with pytest.raises(zinf.ZinfError, match="mix of two steps"):
            trainer.step(blocks.batch())


def test_gradients_that_stay_on_the_device_do_not_wait_there_for_the_next_step(tmp_path):
    got = run(placed("nvme", gradients="device"), mode("auto", "step"), steps=2, run_dir=tmp_path)
    assert not got.plan.overlaps
    assert run(placed("nvme", gradients="host"), mode("auto", "step"), steps=2, run_dir=tmp_path / "b").plan.overlaps
