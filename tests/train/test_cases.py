"""Faults that people met in systems like this one, each with its smallest input and the value that is right.

A test is named by the case in which the fault was described.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zinf_jax as zinf
from tests.reference import round_bf16_ties_up
from tests.train import blocks
from tests.train.blocks import placed, run
from tests.train.exact import everything, linear, micro, on, ones, quadratic, trainer

TIERS = pytest.mark.parametrize("tier", ["device", "host", "nvme"])
STREAMED = pytest.mark.parametrize("tier", ["host", "nvme"])
BF16 = {"bf16": {"enabled": True}}
SKIPPED = pytest.mark.filterwarnings("ignore:step .* skipped")


def after(steps, params, optimizer, *parts, loss_fn=quadratic, **kwargs):
    """All state after training on batches 1, 2, ..."""
    with trainer(loss_fn, params, optimizer, *parts, **kwargs) as made:
        for i in range(steps):
            made.step(ones(0.1 * (i + 1)))
        return everything(made)


# --- sizes ---------------------------------------------------------------------------------------------------------


def odd_sizes(chunk=4096):
    rng = np.random.default_rng(0)
    sizes = {"one": 1, "seven": 7, "thousand": 1000, "chunks": 7 * chunk // 2, "big": 513_000}
    return {name: rng.normal(size=size).astype(np.float32) for name, size in sizes.items()}


@pytest.mark.parametrize("precision", [{}, BF16], ids=["fp32", "bf16"])
def test_nv01_nv02_nv12_nu01_odd_sizes(precision):
    """Lengths off the sector, a leaf that is itself the maximum, a leaf of 3.5 buffers: equal on all tiers."""
    results = [after(3, odd_sizes(), zinf.optim.adamw(1e-2), on(t), precision) for t in ("device", "host", "nvme")]
    assert results[0] == results[1] == results[2]


def test_nv02_buffers_are_sized_after_padding():
    apart = {"streaming": {"page_bytes": 1 << 16}}
    with trainer(quadratic, odd_sizes(), zinf.optim.adamw(1e-2), on("nvme"), apart) as made:
        made.prepare(ones())
        big = next(p for p in made._engine.layout.pages if p.name == "big")
        assert big.num_elements == 126 * 4096 >= 513_000
        assert made.plan.chunk_frame_bytes == 4096 * (4 + 8 + 4)


def test_nv12_planned_bytes_are_the_measured_ones():
    none = {"streaming": {"update_overlap": "none"}}  # an update counts where it runs
    with trainer(quadratic, odd_sizes(), zinf.optim.adamw(1e-2), on("nvme"), none) as made:
        made.step(ones())
        made.step(ones())
        stats, prediction = made.stats(), made.plan.prediction
    assert (stats.nvme_bytes_read, stats.nvme_bytes_written) == (prediction.read_bytes, prediction.write_bytes)


def test_nv13_every_combination_of_tiers_trains():
    tiers = blocks.TIERS
    expected = None
    for weights in tiers:
        for optimizer in tiers:
            for gradients in tiers:
                placement = {"weights": weights, "optimizer": optimizer, "gradients": gradients}
                found = after(2, {"w": np.ones(5, np.float32)}, zinf.optim.adam(0.1), {"placement": placement})
                expected = expected or found
                assert found == expected, placement


OPTIMIZERS = {
    "adamw": lambda: zinf.optim.adamw(1e-2),
    "adam": lambda: zinf.optim.adam(1e-2, nesterov=True),
    "lion": lambda: zinf.optim.lion(1e-3),
    "sgd": lambda: zinf.optim.sgd(0.1),
    "momentum": lambda: zinf.optim.sgd(0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda: zinf.optim.adagrad(1e-2),
    "optax": lambda: optax.rmsprop(1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("precision", [{}, BF16], ids=["fp32", "bf16"])
def test_nv15_every_optimizer_on_every_tier(name, precision):
    params = {"a": np.linspace(-1, 1, 5000, dtype=np.float32), "b": {"c": np.ones((3, 7), np.float32)}}
    results = [after(3, params, OPTIMIZERS[name](), on(t), precision) for t in blocks.TIERS]
    assert results[0] == results[1] == results[2]
    assert results[0][0]["a"] != params["a"].tobytes()


# --- gradients -----------------------------------------------------------------------------------------------------


@TIERS
@pytest.mark.parametrize("per_group", ["auto", 1, 3])
def test_nu02_every_window_of_accumulation_is_the_mean(tier, per_group):
    parts = {"gradient_accumulation_steps": 4, "streaming": {"micro_batches_per_group": per_group}}
    with trainer(linear, {"w": np.zeros(3, np.float32)}, zinf.optim.sgd(1.0), on(tier), parts) as made:
        for window in (1, 2, 3):
            made.step(micro(1, 2, 3, 4))
            np.testing.assert_array_equal(made.params()["w"], [-2.5 * window] * 3)


def vdot(params, batch):
    return jnp.sum(params["w"] * jnp.mean(batch["v"], 0))


@TIERS
def test_nu03_the_norm_is_that_of_all_micro_batches(tier):
    """(3, 0) and (0, 4) sum to norm 5; their mean has half of it. Dropping one gives 1.5 or 2."""
    batch = {"v": np.array([[3, 0], [0, 4]], np.float32)}
    parts = {"gradient_accumulation_steps": 2}
    with trainer(vdot, {"w": np.zeros(2, np.float32)}, zinf.optim.sgd(1.0), on(tier), parts) as made:
        assert made.step(batch).grad_norm == 2.5


@TIERS
def test_nu06_clipping_applies_to_what_the_norm_was_taken_of(tier):
    batch = {"v": np.array([[3, 4]], np.float32)}
    parts = {"gradient_clipping": 1.0}
    with trainer(vdot, {"w": np.zeros(2, np.float32)}, zinf.optim.sgd(1.0), on(tier), parts) as made:
        out = made.step(batch)
        assert out.grad_norm == 5.0
        np.testing.assert_allclose(made.params()["w"], [-0.6, -0.8], rtol=1e-6)


def test_pr03_norm_does_not_overflow_in_half_precision():
    """fp16 gradients of 300 and 400: their squares overflow, their norm is 500."""
    batch = {"v": np.array([[300, 400]], np.float16)}
    parts = {"fp16": {"enabled": True, "loss_scale": 1.0}}
    with trainer(vdot, {"w": np.zeros(2, np.float32)}, zinf.optim.sgd(1.0), parts) as made:
        assert made.step(batch).grad_norm == 500.0


PRECISIONS = {"fp32": {}, "bf16": BF16, "fp16": {"fp16": {"enabled": True, "loss_scale": 8.0}}}


@SKIPPED
@TIERS
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_nu07_a_step_that_is_not_finite_changes_no_byte(tmp_path, tier, precision, bad):
    """One inf among the gradients: 0 x inf poisons everything unless the step is skipped."""

    def loss_fn(params, state, batch):
        return quadratic(params, batch), {"n": state["n"] + 1}

    def make(path):
        params = {"a": np.linspace(0, 1, 5000, dtype=np.float32), "b": np.ones(1, np.float32)}
        state = {"n": jnp.int32(0)}
        return trainer(loss_fn, params, zinf.optim.adamw(0.1), on(tier), PRECISIONS[precision],
                       {"gradient_clipping": 1.0}, state=state, run_dir=path)  # fmt: skip

    def files(made):
        return {p.name: p.read_bytes() for p in (made.run_dir / "pages").iterdir() if not p.name.startswith("grad")}

    with make(tmp_path / "a") as made:
        made.step(ones(0.5))
        before, stored = everything(made), files(made)
        out = made.step(ones(bad))
        assert out.skipped and out.step == 1 and not np.isfinite(out.grad_norm)
        assert everything(made) == (*before[:3], 1)
        assert files(made) == stored
        assert int(made.state["n"]) == 1
        made.step(ones(0.25))
        disturbed = everything(made)
    with make(tmp_path / "b") as made:
        made.step(ones(0.5))
        made.step(ones(0.25))
        assert everything(made)[:3] == disturbed[:3]


@TIERS
@pytest.mark.parametrize("precision", [{}, BF16], ids=["fp32", "bf16"])
def test_nu12_every_element_of_every_leaf_moves(tier, precision):
    rng = np.random.default_rng(0)
    shapes = {"a": (1,), "b": (3, 5), "c": (70, 130), "d": (), "e": (4096,)}
    params = {k: rng.uniform(1, 2, s).astype(np.float32) for k, s in shapes.items()}
    with trainer(linear, params, zinf.optim.adam(0.25), on(tier), precision) as made:
        made.step(ones())
        masters, weights = made.params(), made.params(master=False)
    for name, start in params.items():
        assert np.all(masters[name] < start - 0.2), name
        if precision:
            assert weights[name].dtype == jnp.bfloat16
            np.testing.assert_array_equal(weights[name], round_bf16_ties_up(masters[name]))


@TIERS
def test_leaves_that_no_loss_touches_have_a_zero_gradient(tier):
    """As in optax: weight decay still applies, moments stay 0."""
    params = {"used": np.ones(3, np.float32), "unused": np.full(5000, 2.0, np.float32)}
    optimizer = zinf.optim.adamw(0.1, weight_decay=0.5)
    with trainer(lambda p, b: linear(p["used"], b), params, optimizer, on(tier)) as made:
        out = made.step(ones())
        made.step(ones())
        found, moments = made.params(), made.opt_state()
    np.testing.assert_allclose(out.grad_norm, 3**0.5, rtol=1e-7)
    np.testing.assert_allclose(found["unused"], 2.0 * 0.95**2, rtol=1e-6)
    assert not moments["mu"]["unused"].any() and not moments["nu"]["unused"].any()


# --- precision -----------------------------------------------------------------------------------------------------


@STREAMED
def test_pr02_small_updates_of_bf16_weights_do_not_vanish(tier):
    with trainer(linear, {"w": np.ones(3, np.float32)}, zinf.optim.adam(6e-4), on(tier), BF16) as made:
        for _ in range(100):
            made.step(ones())
        master, weights = made.params()["w"], made.params(master=False)["w"]
    np.testing.assert_allclose(master, 0.94000196, rtol=1e-6)
    np.testing.assert_array_equal(weights, round_bf16_ties_up(master))


@pytest.mark.parametrize("tier", ["nvme"])
def test_pr03_1024_micro_batches_are_added_in_fp32(tier):
    """A bf16 sum of ones stops at 256, a quarter of it."""
    parts = {"gradient_accumulation_steps": 1024}
    with trainer(linear, {"w": np.zeros(3, np.float32)}, zinf.optim.sgd(1.0), on(tier), BF16, parts) as made:
        made.step(micro(*[1] * 1024))
        np.testing.assert_array_equal(made.params()["w"], [-1.0] * 3)


# --- kinds of parameters -------------------------------------------------------------------------------------------


@TIERS
def test_pk01_zero_size_leaves(tmp_path, tier):
    params = {
        "a_first": np.zeros((0,), np.float32),
        "b": np.ones(3, np.float32),
        "c_middle": np.zeros((0, 8), np.float32),
        "d": np.ones((2, 2), np.float32),
        "e_last": np.zeros((8, 0), np.float32),
        "f_int": np.zeros((0, 3), np.int32),
    }

    def loss_fn(p, batch):
        return quadratic(p, batch) + sum(jnp.sum(p[k].astype(jnp.float32)) for k in ("a_first", "c_middle", "e_last"))

    shapes = jax.tree.map(np.shape, params)
    with trainer(loss_fn, params, zinf.optim.adamw(0.1), on(tier), run_dir=tmp_path / "a") as made:
        made.step(ones(0.1))
        made.step(ones(0.2))
        saved, expected = made.save(tmp_path / "saved"), everything(made)
        assert jax.tree.map(np.shape, made.params()) == shapes
    with trainer(loss_fn, params, zinf.optim.adamw(0.1), on(tier), run_dir=tmp_path / "b", resume=saved) as made:
        made.prepare(ones())
        assert everything(made) == expected
        assert jax.tree.map(np.shape, made.params()) == shapes
        made.step(ones(0.3))


@TIERS
def test_pk05_leaves_that_are_not_floating_are_carried(tier):
    params = {
        "w": np.ones(3, np.float32),
        "count": np.array(100, np.int32),
        "mask": np.array([True, False, True]),
        "raw_key": jax.random.PRNGKey(3),
        "key": jax.random.key(4),
    }

    def loss_fn(p, batch):
        noise = jax.random.normal(p["key"], (3,)) + jax.random.normal(p["raw_key"], (3,))
        return jnp.sum(jnp.where(p["mask"], p["w"] + noise, 0) * p["count"]) * jnp.mean(batch["g"])

    with trainer(loss_fn, params, zinf.optim.adam(0.1), on(tier)) as made:
        for _ in range(5):
            made.step(ones())
        found, moments = made.params(), made.opt_state()
        pages = made.plan.shape.pages
    for name in ("count", "mask", "raw_key"):
        np.testing.assert_array_equal(found[name], params[name])
        assert found[name].dtype == params[name].dtype
    np.testing.assert_array_equal(jax.random.key_data(found["key"]), jax.random.key_data(params["key"]))
    assert set(moments["mu"]) == {"w"}
    assert sum(p.record_bytes > 0 for p in pages) == 1 and sum(p.weights_bytes > 0 for p in pages) == 5 - 1
    np.testing.assert_allclose(found["w"], [0.5, 1.0, 0.5], rtol=1e-5)


def test_pk06_an_integer_leaf_cannot_be_trained():
    """Adam moves an int 100 by whole units to 90; here it stays, and asking for it is an error."""
    params = {"w": np.ones(3, np.float32), "para": np.array(100, np.int32)}
    with pytest.raises(zinf.ConfigError, match="'para' of int32"):
        trainer(linear, params, zinf.optim.adam(0.1), {"trainable_patterns": ["para"]})
    with pytest.raises(zinf.ConfigError, match="'paar' matches no parameter"):
        trainer(linear, params, zinf.optim.adam(0.1), {"frozen_patterns": ["paar"]})


@TIERS
def test_pk07_pk09_frozen_leaves(tier):
    """Bitwise unchanged, without optimizer state, not in the norm, and the plan counts weights alone for them."""
    params = {"d": np.ones(2, np.float32), "b": np.full(8192, 1.5, np.float32)}
    parts = {"frozen_patterns": ["^b$"]}
    with trainer(linear, params, zinf.optim.adamw(0.1), on(tier), BF16, parts) as made:
        outs = [made.step(ones()) for _ in range(3)]
        found, moments = made.params(), made.opt_state()
        b, d = sorted(made.plan.shape.pages, key=lambda p: p.name)
    assert found["b"].astype(np.float32).tobytes() == params["b"].tobytes()
    assert outs[0].grad_norm == pytest.approx(2**0.5)
    assert set(moments["mu"]) == {"d"} and np.all(found["d"] < 0.8)
    assert (b.weights_bytes, b.record_bytes, b.gradient_bytes) == (2 * 8192, 0, 0)
    assert (d.weights_bytes, d.record_bytes) == (2 * d.num_elements, (2 + 4 + 4) * d.num_elements)


@STREAMED
@pytest.mark.parametrize("num_micro", [1, 2])
def test_pk12_a_tied_leaf_gets_the_sum_of_both_uses(tier, num_micro):
    """The embedding of `blocks` is also its head."""
    params = jax.jit(blocks.init)(jax.random.key(0))
    batch = blocks.batch()
    halves = [
        {k: v[i * 16 // num_micro : (i + 1) * 16 // num_micro] for k, v in batch.items()} for i in range(num_micro)
    ]
    wanted = sum(np.asarray(jax.grad(blocks.loss)(params, h)["embedding"], np.float64) for h in halves) / num_micro
    got = run(placed(tier), {"gradient_clipping": 0.0, "gradient_accumulation_steps": num_micro}, steps=1,
              optimizer=zinf.optim.sgd(1.0), params=params)  # fmt: skip
    moved = np.asarray(params["embedding"]) - np.frombuffer(got.params["embedding"], np.float32).reshape(97, 40)
    np.testing.assert_allclose(moved, wanted, atol=1e-7)


def test_pk13_one_array_under_two_names_is_two_parameters_as_in_optax():
    shared = np.ones(3, np.float32)
    params = {"embedding": shared, "head": shared}

    def loss_fn(p, batch):
        return jnp.sum(p["embedding"] + 2 * p["head"]) * jnp.mean(batch["g"])

    with trainer(loss_fn, params, zinf.optim.sgd(0.25), on("nvme")) as made:
        made.step(ones())
        found = made.params()
    np.testing.assert_array_equal(found["embedding"], [0.75] * 3)
    np.testing.assert_array_equal(found["head"], [0.5] * 3)
    np.testing.assert_array_equal(shared, [1.0] * 3)


@TIERS
def test_python_scalars_and_functions_in_the_tree(tier):
    params = {"w": np.ones(3, np.float32), "scale": 2.0, "power": 3, "act": jnp.tanh}

    def loss_fn(p, batch):
        return jnp.sum(p["act"](p["w"]) * p["scale"] ** p["power"]) * jnp.mean(batch["g"])

    with trainer(loss_fn, params, zinf.optim.sgd(0.1), on(tier)) as made:
        out = made.step(ones())
        found = made.params()
    assert out.loss == pytest.approx(3 * np.tanh(1.0) * 8)
    assert found["act"] is jnp.tanh and found["power"] == 3
    assert found["scale"] == pytest.approx(2 - 0.1 * 3 * np.tanh(1.0) * 12)


# --- skips, schedules, groups --------------------------------------------------------------------------------------


def test_ov01_skips_are_counted_logged_and_do_not_advance_the_schedule():
    schedule = optax.linear_schedule(1.0, 0.0, 10)
    batches = [ones(), ones(np.inf), ones(), ones()]
    with trainer(linear, {"w": np.zeros(3, np.float32)}, zinf.optim.sgd(schedule), BF16) as made:
        outs = [made.step(batches[0])]
        with pytest.warns(UserWarning, match="step 2 skipped"):
            outs.append(made.step(batches[1]))
        outs += [made.step(b) for b in batches[2:]]
        assert (made.num_skipped, made.global_step) == (1, 3)
    assert [o.skipped for o in outs] == [False, True, False, False]
    applied = [0, 1, 1, 2]
    np.testing.assert_allclose([o.learning_rate for o in outs], [schedule(n) for n in applied], rtol=1e-6)


@SKIPPED
def test_ov01_many_skips_in_a_row_stop_the_run():
    with trainer(linear, {"w": np.zeros(3, np.float32)}, zinf.optim.sgd(1.0), {"max_consecutive_skips": 2}) as made:
        made.step(ones(np.nan))
        made.step(ones())
        made.step(ones(np.nan))
        with pytest.raises(zinf.NonFiniteError, match="2 steps in a row"):
            made.step(ones(np.nan))
        assert (made.num_skipped, made.global_step) == (3, 1)


@TIERS
def test_ov03_groups_keep_their_rates(tier):
    transforms = {"fast": zinf.optim.sgd(2.0**-4), "slow": zinf.optim.sgd(2.0**-10)}
    labels = {"a": "fast", "b": "slow", "c": "fast"}
    params = {name: np.ones(2, np.float32) for name in labels}
    with trainer(linear, params, zinf.optim.partition(transforms, labels), on(tier)) as made:
        made.step(ones())
        found = made.params()
    for name, rate in (("a", 2.0**-4), ("b", 2.0**-10), ("c", 2.0**-4)):
        np.testing.assert_array_equal(found[name], np.float32(1 - rate))


@TIERS
def test_ov03_weight_decay_spares_what_the_mask_says(tier):
    params = {"kernel": np.ones((2, 2), np.float32), "bias": np.ones(2, np.float32)}
    optimizer = zinf.optim.adamw(0.5, weight_decay=0.25, mask={"kernel": True, "bias": False})
    with trainer(linear, params, optimizer, on(tier)) as made:
        made.step(ones(0.0))
        found = made.params()
    np.testing.assert_array_equal(found["bias"], 1.0)
    np.testing.assert_array_equal(found["kernel"], np.float32(1 - 0.5 * 0.25))


# --- restoring ----------------------------------------------------------------------------------------------------


@STREAMED
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("other", ["adamw", "momentum", "adagrad", "optax"])
def test_ov05_restore_weights_starts_all_else_anew(tmp_path, tier, precision, other):
    """Step 0, moments as after init, schedule(0), loss scale and rng of the config; also under another optimizer."""
    params = {"a": np.linspace(-1, 1, 9000, dtype=np.float32), "b": np.ones(3, np.float32)}
    parts = (on(tier), PRECISIONS[precision])
    with trainer(quadratic, params, zinf.optim.adamw(0.1), *parts, run_dir=tmp_path / "a") as made:
        for i in range(2):
            made.step(ones(0.1 * i))
        saved, weights = made.save(tmp_path / "saved"), made.params()
    make = (lambda: zinf.optim.adamw(optax.linear_schedule(0.2, 0, 5))) if other == "adamw" else OPTIMIZERS[other]
    again = {"restore": "weights"}
    with trainer(quadratic, params, make(), *parts, again, run_dir=tmp_path / "b", resume=saved) as made:
        made.prepare(ones())
        assert (made.global_step, made.num_skipped, made.user_state) == (0, 0, None)
        restored = everything(made)
        out = made.step(ones(0.3))
        found = everything(made)
        if other == "adamw":
            assert out.learning_rate == pytest.approx(0.2)
    with trainer(quadratic, weights, make(), *parts, run_dir=tmp_path / "c") as made:
        made.prepare(ones())
        assert everything(made) == restored
        made.step(ones(0.3))
        assert everything(made) == found


def test_ov05_restore_weights_in_place(tmp_path):
    params = {"a": np.linspace(-1, 1, 9000, dtype=np.float32)}

    def again(optimizer, resume):
        parts = (on("nvme"), BF16, {"restore": "weights"})
        return trainer(quadratic, params, optimizer, *parts, run_dir=tmp_path, resume=resume).prepare(ones())

    with trainer(quadratic, params, zinf.optim.adamw(0.1), on("nvme"), BF16, run_dir=tmp_path) as made:
        made.step(ones(0.1))
        before = everything(made)
    with again(zinf.optim.adamw(0.1), "auto") as made:  # goes on with its own run
        assert everything(made) == before
    with again(zinf.optim.adamw(0.1), tmp_path) as made:
        anew = everything(made)
    assert anew[0] == before[0] and anew[2] == 0
    assert not any(np.frombuffer(v, np.float32).any() for d in anew[1].values() for v in d.values())
    with pytest.raises(zinf.ResumeError, match="another run_dir"):
        again(zinf.optim.sgd(0.1), tmp_path)


def test_another_run_is_never_destroyed_by_a_resume(tmp_path):
    """A checkpoint of run A is resumed into the folder of run B: B's pages are its only state."""
    params = {"a": np.ones(3, np.float32)}

    def make(**kwargs):
        return trainer(quadratic, params, zinf.optim.adamw(0.1), on("nvme"), **kwargs)

    with make(run_dir=tmp_path / "a") as made:
        made.step(ones(0.1))
        saved = made.save(tmp_path / "saved")
    with make(run_dir=tmp_path / "b") as made:
        made.step(ones(0.1))
        made.step(ones(0.2))
        kept = everything(made)
    with pytest.raises(zinf.ResumeError, match="another run at step 2"):
        make(run_dir=tmp_path / "b", resume=saved)
    with make(run_dir=tmp_path / "b", resume="auto") as made:
        made.prepare(ones())
        assert everything(made) == kept
    with make(run_dir=tmp_path / "b", resume=saved, overwrite=True) as made:
        made.prepare(ones())
        assert made.global_step == 1


# --- memory -------------------------------------------------------------------------------------------------------


def test_me09_initialising_needs_no_more_than_training():
    with trainer(quadratic, odd_sizes(), zinf.optim.adamw(1e-2), on("nvme")) as made:
        made.prepare(ones())
        arena = made._engine.arena
        assert arena.peak_leased_bytes <= arena.num_bytes == made.plan.arena_bytes
        made.step(ones())
        assert made.stats().peak_host_bytes <= made.plan.host_bytes


@pytest.mark.parametrize("num_micro", [2, 8])
def test_me10_one_accumulator_whatever_the_number_of_micro_batches(num_micro):
    parts = {"gradient_accumulation_steps": num_micro, "placement": {"gradients": "host"}}
    with trainer(quadratic, odd_sizes(), zinf.optim.adamw(1e-2), BF16, parts) as made:
        made.prepare(micro(*range(num_micro)))
        items = {(i.tier.value, i.kind): i.num_bytes for i in made.plan.items}
        assert items["host", "gradients"] == sum(4 * p.num_elements for p in made.plan.shape.pages)
