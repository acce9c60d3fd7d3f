"""Budgets hold, memory grows with nothing, and errors of the disk leave a state that the message is right about."""

import contextlib
import errno
import gc
import json
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest

import zinf_jax as zinf
from aio_ffi import _testing
from tests.train import blocks
from tests.train.blocks import config, placed
from tests.train.exact import everything
from zinf_jax.stream.stats import rss_bytes

MIB = 1 << 20
NVME = placed("nvme", residuals="nvme")


def trainer(*parts, num_blocks=6, **kwargs):
    params = zinf.lazy(blocks.init, jax.random.key(0), num_blocks)
    return zinf.Trainer(blocks.loss, params, zinf.optim.adamw(1e-2, weight_decay=0.1), config(*parts), **kwargs)


# --- memory --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_memory_does_not_grow_with_the_number_of_steps(steps):
    batch = blocks.batch()
    with trainer(NVME, {"gradient_accumulation_steps": 2}) as made:
        for _ in range(20):  # allocators and caches settle
            made.step(batch)
        before = rss_bytes()
        for _ in range(steps):
            made.step(batch)
        grown = rss_bytes() - before
    assert grown < 4 * MIB, f"{grown / MIB:.1f} MiB in {steps} steps"


def test_a_step_leaves_no_objects_behind(tmp_path):
    """Caches of JAX's own that are asked something new each step grow unseen: 45 objects a step, once."""
    with trainer(NVME, run_dir=tmp_path) as made:
        counts = []
        for step in range(60):
            made.step(blocks.batch(seed=step % 4))
            if step in (19, 59):
                gc.collect()
                counts.append(len(gc.get_objects()))
    assert counts[1] - counts[0] < 400, counts


@pytest.mark.slow
def test_a_thousand_steps_are_flat(tmp_path):
    """Memory, open files, the log's size and the pace, once it has settled: every step committed, all on NVMe."""
    import os
    import statistics
    import time

    batch = blocks.batch()
    with trainer(NVME, run_dir=tmp_path) as made:
        times, seen = [], {}
        for step in range(1, 1501):
            start = time.perf_counter()
            made.step(batch)
            times.append(time.perf_counter() - start)
            if step in (500, 1500):  # Python makes its table of interned strings anew now and then: 3 MB
                log = sum(file.stat().st_size for file in (tmp_path / "commits").iterdir())
                seen[step] = (rss_bytes(), len(os.listdir("/proc/self/fd")), log)
    (rss, files, _), (rss_end, files_end, log_end) = seen[500], seen[1500]
    assert rss_end - rss < 4 * MIB and files_end == files, seen
    assert log_end < 16 * MIB, seen
    first, last = statistics.median(times[:100]), statistics.median(times[-100:])
    assert last < 1.05 * first, (first, last)


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_planned_memory_is_what_is_used(tier):
    with trainer(placed(tier, residuals=tier)) as made:
        made.step(blocks.batch())
        stats, plan, arena = made.stats(), made.plan, made._engine.arena
        assert arena.num_bytes == plan.arena_bytes
        assert arena.peak_leased_bytes <= plan.arena_bytes
        assert tier == "host" or arena.peak_leased_bytes > 0
        assert stats.peak_host_bytes <= plan.host_bytes
        assert stats.peak_device_bytes <= plan.device_bytes


PROGRAM = """
    import json, sys
    import jax, jax.numpy as jnp, numpy as np
    import zinf_jax as zinf
    from zinf_jax.stream.stats import peak_rss_bytes, reset_peak_rss

    num_layers, dim = int(sys.argv[1]), 256

    def init(key):
        keys = [jax.random.fold_in(key, i) for i in range(num_layers)]  # one program makes all layers
        return {f"layer_{i}": {"up": jax.random.normal(k, (dim, 4 * dim)), "down": jax.random.normal(k, (4 * dim, dim))}
                for i, k in enumerate(keys)}

    def loss(params, batch):
        x = batch["x"]
        for i in range(num_layers):
            p = params[f"layer_{i}"]
            x = x + jnp.tanh(x @ p["up"]) @ p["down"] / dim
        return jnp.mean(x**2)

    config = {"placement": dict.fromkeys(["weights", "optimizer", "gradients", "residuals"], "nvme"),
              "streaming": {"max_unit_bytes": 3 << 20, "chunk_bytes": 1 << 20}, "host_memory": 28 << 20}
    batch = {"x": np.ones((64, dim), np.float32)}
    with zinf.Trainer(loss, zinf.lazy(init, jax.random.key(0)), zinf.optim.adamw(1e-3), config) as trainer:
        trainer.prepare(batch)
        reset_peak_rss()
        for _ in range(3):
            trainer.step(batch)
        print(json.dumps({"peak": peak_rss_bytes(), "planned": trainer.plan.peak_rss_bytes,
                          "host": trainer.plan.host_bytes, "device": trainer.plan.device_bytes,
                          "base": trainer.plan.base_rss_bytes}))
"""


def depth(num_layers):
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(num_layers)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("deep", [16, pytest.param(64, marks=pytest.mark.slow)])
def test_memory_does_not_grow_with_depth(deep):
    """4 layers to many (2 MiB of weights and 8 MiB of state each), same budget."""
    shallow, many = depth(4), depth(deep)
    assert many["host"] <= 28 * MIB
    for found in (shallow, many):
        # The plan knows what the process held, its frames, and the device's values.
        assert found["peak"] <= found["planned"] + 32 * MIB, found
    grown = (many["peak"] - many["planned"]) - (shallow["peak"] - shallow["planned"])  # a budget may be used better
    assert grown < 16 * MIB, (shallow, many)


# --- errors --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def failing(made, site, code, after):
    with _testing.inject(made._engine.store.files.engines[0], site, value=-code, after=after, times=1):
        yield


def calls_of_passes(made, site):
    """How many reads or writes the passes over the units make; one of them can be made to fail."""
    plan = made.plan
    kinds = {"read": ("weights", "residual_in"), "write": ("gradients", "residual_out")}[site]
    return sum(span.residency.key[0] in kinds for span in plan.spans)


@pytest.mark.parametrize("site", ["read", "write"])
@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_io01_an_error_in_the_passes_changes_nothing_and_the_step_can_be_repeated(site, where):
    code = errno.EIO if site == "read" else errno.ENOSPC
    none = {"streaming": {"update_overlap": "none"}}  # nothing but the passes reads and writes in them
    with trainer(NVME, none) as made:
        wanted = [made.step(blocks.batch(seed=s)) for s in range(3)]
        end = everything(made)
    with trainer(NVME, none) as made:
        outs = [made.step(blocks.batch(seed=0))]
        before, count = everything(made), calls_of_passes(made, site)
        assert count > 4
        after = {"first": 0, "middle": count // 2, "last": count - 1}[where]
        with failing(made, site, code, after), pytest.raises(zinf.StoreError) as caught:
            made.step(blocks.batch(seed=1))
        assert caught.value.errno == code
        for part in (site, "of page", "offset", "bytes"):
            assert part in str(caught.value), str(caught.value)
        assert everything(made) == before
        outs += [made.step(blocks.batch(seed=s)) for s in (1, 2)]
        assert outs == wanted
        assert everything(made) == end


@pytest.mark.parametrize("site", ["read", "write"])
@pytest.mark.parametrize("fused", [True, False])
def test_nv05_an_error_in_the_update_stops_the_trainer(tmp_path, site, fused):
    import optax

    optimizer = zinf.optim.adamw(1e-2) if fused else optax.adamw(1e-2)
    params = zinf.lazy(blocks.init, jax.random.key(0), 6)
    none = {"streaming": {"update_overlap": "none"}}  # the update is then part of its own step
    with zinf.Trainer(blocks.loss, params, optimizer, config(NVME, none), run_dir=tmp_path) as made:
        made.step(blocks.batch())
        saved = made.save(tmp_path / "checkpoints" / "one")
        kept = everything(made)
        after = calls_of_passes(made, site) + 3
        with failing(made, site, errno.ENOSPC, after), pytest.raises(zinf.StoreError) as caught:
            made.step(blocks.batch(seed=1))
        assert caught.value.errno == errno.ENOSPC and "of page" in str(caught.value)
        with pytest.raises(zinf.ZinfError, match="mix of two steps"):
            made.step(blocks.batch(seed=1))
        with pytest.raises(zinf.ZinfError, match="mix of two steps"):
            made.save(tmp_path / "two")
    assert saved.exists()
    with zinf.Trainer(blocks.loss, zinf.lazy(blocks.init, jax.random.key(0), 6), optimizer, config(NVME),
                      run_dir=tmp_path, resume="auto") as made:  # fmt: skip
        made.prepare(blocks.batch())
        assert everything(made) == kept, "back to the checkpoint, not to the mix"


def test_an_error_while_saving_leaves_the_run_alone(tmp_path):
    with trainer(NVME, run_dir=tmp_path / "run") as made:
        made.step(blocks.batch())
        before = everything(made)
        with failing(made, "read", errno.EIO, 3), pytest.raises(zinf.StoreError):
            made.save(tmp_path / "saved")
        assert not (tmp_path / "saved").exists() and len(list(tmp_path.iterdir())) == 1
        assert everything(made) == before
        made.step(blocks.batch(seed=1))
        made.save(tmp_path / "saved")


DYING = """
    import faulthandler
    faulthandler.dump_traceback_later(60, exit=True)
    import errno, sys
    import jax
    import zinf_jax as zinf
    from aio_ffi import _testing
    from tests.train import blocks
    from tests.train.test_memory import NVME, trainer

    made = trainer(NVME)
    made.step(blocks.batch())
    engine = made._engine.store.files.engines[0]
    if sys.argv[1] == "interrupt":
        def interrupted(*args):
            raise KeyboardInterrupt("from the keyboard")
        made._engine.gradients._finish_piece = interrupted
        made.step(blocks.batch())
    with _testing.inject(engine, "write", value=-errno.EIO):
        made.step(blocks.batch())
"""


@pytest.mark.parametrize(("how", "message"), [("interrupt", "from the keyboard"), ("io", "StoreError")])
def test_io05_an_error_in_flight_ends_the_process_with_that_error(how, message):
    """Transfers are in flight when the exception leaves the script: it is what the user sees, and nothing aborts."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(DYING), how], capture_output=True, text=True, timeout=120
    )
    # An interrupt ends with 130 or by SIGINT itself, an error with 1; SIGABRT would be -6.
    assert done.returncode in ((130, -2, 1) if how == "interrupt" else (1,)), (done.returncode, done.stderr[-2000:])
    assert message in done.stderr.splitlines()[-1], done.stderr[-2000:]  # nothing comes after it


def test_me02_a_budget_that_is_too_small_is_refused_before_anything_is_allocated(tmp_path):
    """256 MB of frames asked for by large chunks: the message has the largest item, both numbers and the remedy."""
    parts = (placed("nvme"), {"host_memory": 200_000, "streaming": {"chunk_bytes": 1 << 20}})
    with trainer(*parts, run_dir=tmp_path) as made, pytest.raises(zinf.PlanError) as caught:
        made.prepare(blocks.batch())
    text = str(caught.value)
    for part in (
        "host_memory is 195.31 KiB",
        "largest: frames of the update",
        "streaming.chunk_bytes (1.00 MiB)",
    ):
        assert part in text, text
    assert not (tmp_path / "pages").exists()


def test_a_planned_run_in_its_exact_budget_runs():
    """The number that the refusal names is enough."""
    mode = {"streaming": {"update_overlap": "next_forward", "num_chunk_frames": 4}}
    with trainer(placed("nvme"), {"host_memory": 1}) as made, pytest.raises(zinf.PlanError, match="raise host_memory"):
        made.prepare(blocks.batch())
    with trainer(placed("nvme"), mode) as made:
        needed = made.prepare(blocks.batch()).plan.host_bytes
        wanted = made.step(blocks.batch())
    with trainer(placed("nvme"), mode, {"host_memory": needed}) as made:
        assert made.step(blocks.batch()) == wanted
        assert made.plan.host_bytes <= needed
    with trainer(placed("nvme"), mode, {"host_memory": needed - 4096}) as made, pytest.raises(zinf.PlanError):
        made.prepare(blocks.batch())


def test_overlap_that_nobody_asked_for_gives_way_to_the_budget():
    """The update's own frames are for speed: where there is no room for them, a run that fits without them starts."""
    free = {"streaming": {"lookahead": 2}}
    with trainer(placed("nvme"), {"streaming": {"update_overlap": "none", "lookahead": 2}}) as made:
        needed = made.prepare(blocks.batch()).plan.host_bytes
        wanted = made.step(blocks.batch())
    with trainer(placed("nvme"), free) as made:
        roomy = made.prepare(blocks.batch()).plan
    assert roomy.overlaps and roomy.host_bytes > needed
    with trainer(placed("nvme"), free, {"host_memory": needed}) as made:
        assert made.step(blocks.batch()) == wanted
        assert not made.plan.overlaps and made.plan.host_bytes <= needed
    between = (needed + roomy.host_bytes) // 2
    with trainer(placed("nvme"), free, {"host_memory": between}) as made:
        assert made.prepare(blocks.batch()).plan.host_bytes <= between
    with trainer(placed("nvme"), {"host_memory": needed}) as made:  # fetching later, it has room for both
        assert made.step(blocks.batch()) == wanted
        assert made.plan.overlaps and made.plan.options.lookahead == 1
    asked = {"host_memory": needed, "streaming": {"update_overlap": "next_forward", "lookahead": 2}}
    with trainer(placed("nvme"), asked) as made, pytest.raises(zinf.PlanError, match="raise host_memory"):
        made.prepare(blocks.batch())


def test_np_arrays_given_as_parameters_are_not_kept_alive():
    """After `prepare` the pages are the only copy."""
    import weakref

    value = np.ones((1000, 100), np.float32)
    died = weakref.ref(value)
    with zinf.Trainer(
        lambda p, b: (p["w"] ** 2).mean() * b["g"].mean(), {"w": value}, zinf.optim.sgd(0.1), NVME
    ) as made:
        del value
        made.step({"g": np.ones(1, np.float32)})
        assert died() is None
