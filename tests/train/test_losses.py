"""What a loss function may take and return, and what batches may be: as in memory, or an error that says what to do."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import aio_ffi
import zinf_jax as zinf
from tests.reference import InMemoryTrainer
from tests.train import blocks
from tests.train.blocks import config, placed
from tests.train.exact import everything, linear, ones, quadratic, trainer

FP16 = {"fp16": {"enabled": True, "loss_scale": 1024.0}}
TIER = pytest.mark.parametrize("tier", ["device", "nvme"])


def streamed(loss_fn, tier, *parts, optimizer=None, **kwargs):
    params = zinf.lazy(blocks.init, jax.random.key(0), 2)
    return zinf.Trainer(loss_fn, params, optimizer or zinf.optim.sgd(0.1), config(placed(tier), *parts), **kwargs)


def in_memory(loss_fn, **kwargs):
    params = jax.jit(blocks.init, static_argnums=1)(jax.random.key(0), 2)
    return InMemoryTrainer(loss_fn, params, optax.sgd(0.1), gradient_clipping=0.5, **kwargs)


def compare(made, other, batches, rtol=1e-6):
    for batch in batches:
        ours, theirs = made.step(batch), other.step(batch)
        np.testing.assert_allclose(ours.loss, theirs.loss, rtol=rtol)
        np.testing.assert_allclose(ours.grad_norm, theirs.grad_norm, rtol=10 * rtol)
        assert (ours.skipped, ours.step) == (theirs.skipped, theirs.step)
        yield ours, theirs


def token_loss(params, batch):
    """Mean over the tokens that count, and their number."""
    x = params["embedding"][batch["x"]]
    for name in sorted(n for n in params if n.startswith("block")):
        block = params[name]
        x = x + jnp.tanh(x @ block["up"] + block["bias"]) @ block["down"]
    logits = (x @ params["embedding"].T).astype(jnp.float32)
    picked = jax.nn.log_softmax(logits)[jnp.arange(x.shape[0]), batch["y"]]
    return zinf.Weighted(-jnp.sum(picked * batch["mask"]) / jnp.maximum(jnp.sum(batch["mask"]), 1), jnp.sum(batch["n"]))


def uneven(seed, weights):
    """Micro-batches of 4 samples; `n` carries the weight of each."""
    size = 4 * len(weights)
    mask = np.random.default_rng(seed).integers(0, 2, size).astype(np.float32)
    return blocks.batch(size, seed) | {"mask": mask, "n": np.repeat(np.asarray(weights, np.float32) / 4, 4)}


@TIER
@pytest.mark.parametrize("weights", [(1, 2, 3, 10), (0, 5, 0, 1), (1e5, 3e5, 2e5, 7e4)], ids=str)
@pytest.mark.parametrize("per_group", ["auto", 2])
def test_uneven_weights(tier, weights, per_group):
    parts = {"gradient_accumulation_steps": 4, "streaming": {"micro_batches_per_group": per_group}}
    other = in_memory(token_loss, num_micro_batches=4)
    with streamed(token_loss, tier, parts) as made:
        for _ in compare(made, other, [uneven(s, weights) for s in range(3)]):
            pass


@TIER
def test_weights_that_are_token_counts_do_not_overflow_fp16(tier):
    """300,000 tokens x a loss scale of 1024 are beyond fp16 (65,504)."""
    parts = {"gradient_accumulation_steps": 4}
    batches = [uneven(s, (1e5, 3e5, 2e5, 7e4)) for s in range(3)]
    with streamed(token_loss, tier, parts, FP16) as made:
        outs = [made.step(b) for b in batches]
    with streamed(token_loss, "host", parts) as made:
        wanted = [made.step(b) for b in batches]
    assert not any(o.skipped for o in outs)
    np.testing.assert_allclose([o.loss for o in outs], [o.loss for o in wanted], rtol=1e-2)
    np.testing.assert_allclose([o.grad_norm for o in outs], [o.grad_norm for o in wanted], rtol=2e-2)


@pytest.mark.filterwarnings("ignore:step .* skipped")
def test_a_step_without_any_weight_is_skipped():
    """No token counts anywhere: the mean over nothing is not a number, and changes nothing."""
    with streamed(token_loss, "nvme", {"gradient_accumulation_steps": 2}) as made:
        made.prepare(uneven(0, (0, 0)))
        before = everything(made)
        assert made.step(uneven(0, (0, 0))).skipped
        assert everything(made)[:3] == before[:3]


@TIER
@pytest.mark.parametrize("num_micro", [1, 4])
def test_aux_is_stacked_over_micro_batches(tier, num_micro):
    def loss_fn(params, batch):
        value = blocks.loss(params, batch)
        return value, {"loss": value, "first": batch["x"][0], "pair": (jnp.sum(batch["y"]), jnp.zeros((2, 3)))}

    other = in_memory(loss_fn, num_micro_batches=num_micro, has_aux=True)
    parts = {"gradient_accumulation_steps": num_micro}
    with streamed(loss_fn, tier, parts, has_aux=True) as made:
        for ours, theirs in compare(made, other, [blocks.batch(seed=s) for s in range(2)]):
            assert ours.aux["loss"].shape == (num_micro,) and ours.aux["pair"][1].shape == (num_micro, 2, 3)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), ours.aux, theirs.aux)


@TIER
@pytest.mark.parametrize("num_micro", [1, 2])
def test_dropout_draws_the_same_numbers(tier, num_micro):
    def loss_fn(params, batch, rng):
        keep = jax.random.bernoulli(rng, 0.8, (97, 40))
        return blocks.loss(params | {"embedding": jnp.where(keep, params["embedding"] / 0.8, 0)}, batch)

    rng = jax.random.key(5)
    other = in_memory(loss_fn, rng=rng, num_micro_batches=num_micro)
    with streamed(loss_fn, tier, {"gradient_accumulation_steps": num_micro}, rng=rng) as made:
        losses = [o.loss for o, _ in compare(made, other, [blocks.batch(seed=0) for _ in range(3)])]
    assert len(set(losses)) == 3


def batch_norm_loss(params, state, batch):
    """Statistics of the batch normalise, running ones are carried; each micro-batch sees what the last one left."""
    x = params["embedding"][batch["x"]]
    new = {}
    for name in sorted(n for n in params if n.startswith("block")):
        block = params[name]
        hidden = x @ block["up"] + block["bias"]
        mean = jnp.mean(hidden, 0)
        new[name] = 0.9 * state[name] + 0.1 * mean
        x = x + jnp.tanh(hidden - mean - 0.01 * new[name]) @ block["down"]
    logits = x @ params["embedding"].T
    picked = jax.nn.log_softmax(logits)[jnp.arange(x.shape[0]), batch["y"]]
    return -jnp.mean(picked), new


def late_loss(params, state, batch):
    """The state that the first unit reads is made by the last one."""
    x = params["embedding"][batch["x"]] * (1 + state["mean"])
    for name in sorted(n for n in params if n.startswith("block")):
        block = params[name]
        x = x + jnp.tanh(x @ block["up"] + block["bias"]) @ block["down"]
    value = jnp.mean((x @ params["embedding"].T) ** 2)
    return value, {"mean": 0.5 * state["mean"] + jax.lax.stop_gradient(value)}


@TIER
@pytest.mark.parametrize("num_micro", [1, 4])
def test_state_passes_from_micro_batch_to_micro_batch(tier, num_micro):
    state = {f"block_{i}": jnp.zeros(120) for i in range(2)}
    other = in_memory(batch_norm_loss, state=state, num_micro_batches=num_micro)
    parts = {"gradient_accumulation_steps": num_micro}
    with streamed(batch_norm_loss, tier, parts, state=state) as made:
        for _ in compare(made, other, [blocks.batch(seed=s) for s in range(3)]):
            for name in state:
                np.testing.assert_allclose(made.state[name], other.state[name], rtol=1e-5, atol=1e-7)


@TIER
def test_state_that_is_read_before_it_is_made(tier):
    """Layer-major order would read it too early: micro-batches then run one by one."""
    state = {"mean": jnp.float32(0.1)}
    other = in_memory(late_loss, state=state, num_micro_batches=3)
    parts = {"gradient_accumulation_steps": 3, "streaming": {"max_unit_bytes": 50_000}}
    with streamed(late_loss, tier, parts, state=state) as made:
        for _ in compare(made, other, [blocks.batch(12, seed=s) for s in range(3)]):
            np.testing.assert_allclose(made.state["mean"], other.state["mean"], rtol=1e-6)
        assert made.plan.shape.group_sizes == (1, 1, 1)


def test_state_of_another_structure_is_refused():
    def loss_fn(params, state, batch):
        return blocks.loss(params, batch), {"other": state["mean"]}

    with (
        streamed(loss_fn, "nvme", state={"mean": jnp.float32(0)}) as made,
        pytest.raises(zinf.ConfigError, match="state of structure"),
    ):
        made.prepare(blocks.batch())


@pytest.mark.parametrize("weight", [3, 2.5, jnp.float32(2), np.int32(7)], ids=repr)
def test_a_constant_weight_counts_nothing(weight):
    """Equal weights are no weights, whatever a constant looks like in the program."""

    def loss_fn(params, batch):
        return zinf.Weighted(blocks.loss(params, batch), weight)

    parts = {"gradient_accumulation_steps": 2}
    with streamed(loss_fn, "nvme", parts) as made, streamed(blocks.loss, "nvme", parts) as plain:
        for seed in range(2):
            ours, theirs = made.step(blocks.batch(seed=seed)), plain.step(blocks.batch(seed=seed))
            np.testing.assert_allclose([ours.loss, ours.grad_norm], [theirs.loss, theirs.grad_norm], rtol=1e-6)


def test_a_weight_of_one_micro_batch_does_not_matter():
    with streamed(token_loss, "nvme") as made, streamed(lambda p, b: token_loss(p, b).loss, "nvme") as plain:
        batch = uneven(0, (5,))
        ours, theirs = made.step(batch), plain.step(batch)
        np.testing.assert_allclose([ours.loss, ours.grad_norm], [theirs.loss, theirs.grad_norm], rtol=1e-6)


def test_aux_may_hold_constants_nothing_and_the_batch():
    def loss_fn(params, batch):
        return blocks.loss(params, batch), {"three": 3, "none": None, "x": batch["x"], "p": params["block_0"]["bias"]}

    with streamed(loss_fn, "nvme", {"gradient_accumulation_steps": 2}, has_aux=True) as made:
        aux = made.step(blocks.batch()).aux
    np.testing.assert_array_equal(aux["three"], [3, 3])
    assert aux["none"] is None and aux["p"].shape == (2, 120)
    np.testing.assert_array_equal(aux["x"].reshape(-1), blocks.batch()["x"])


@pytest.mark.parametrize(
    "shape_of",
    [
        lambda w: w,
        lambda w: [w],
        lambda w: (None, {"x": [w]}),
        lambda w: {"a": None, "b": (w, None)},
    ],
    ids=["array", "list", "nested", "nones"],
)
@pytest.mark.parametrize("frozen", [False, True])
def test_parameters_are_any_tree(shape_of, frozen):
    params = shape_of(np.ones((3, 2), np.float32)), np.ones(4, np.float32)
    parts = {"frozen_patterns": ["^1$"]} if frozen else {}
    with trainer(quadratic, params, zinf.optim.sgd(0.1), placed("nvme"), parts) as made:
        made.step(ones())
        found = made.params()
    assert jax.tree.structure(found) == jax.tree.structure(params)
    assert not np.array_equal(jax.tree.leaves(found)[0], np.ones((3, 2)))
    assert np.array_equal(found[1], np.ones(4)) == frozen


@pytest.mark.parametrize("dtype", [np.float64, jnp.bfloat16, np.float16], ids=str)
def test_without_a_16_bit_section_training_is_fp32(dtype):
    seen = []

    def loss_fn(params, batch):
        seen.append(params["w"].dtype)
        return linear(params, batch)

    with trainer(loss_fn, {"w": np.ones(3, dtype)}, zinf.optim.sgd(2.0**-12), placed("nvme")) as made:
        made.step(ones())
        found = made.params()["w"]
    assert set(map(np.dtype, seen)) == {np.dtype(np.float32)} == {found.dtype}
    np.testing.assert_array_equal(found, np.float32(1 - 2.0**-12))


def test_ck10_shapes_are_whole_whenever_one_looks():
    """After set-up, after a step, after an evaluation: no leaf of size zero because it was released."""
    shapes = jax.tree.map(np.shape, jax.eval_shape(lambda k: blocks.init(k, 2), jax.random.key(0)))
    with streamed(blocks.loss, "nvme") as made:
        made.prepare(blocks.batch())
        for act in (
            lambda: None,
            lambda: made.step(blocks.batch()),
            lambda: made.evaluate(blocks.loss, blocks.batch()),
        ):
            act()
            assert jax.tree.map(np.shape, made.params()) == shapes


# --- batches -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": np.zeros(15, np.int32), "y": np.zeros(15, np.int32)}, "15 samples"),
        ({"x": np.zeros(16, np.int32), "y": np.zeros(8, np.int32)}, "different leading dims"),
        ({"x": np.zeros(16, np.int32), "y": np.int32(3)}, "leading batch dim"),
        ({}, "leading batch dim"),
    ],
    ids=["indivisible", "unequal", "scalar", "empty"],
)
def test_a_batch_that_does_not_fit(batch, message):
    with streamed(blocks.loss, "nvme", {"gradient_accumulation_steps": 2}) as made:
        with pytest.raises(zinf.ConfigError, match=message):
            made.prepare(batch)
        made.step(blocks.batch())
        with pytest.raises(zinf.ConfigError, match=message):
            made.step(batch)


@pytest.mark.parametrize(
    "batch",
    [
        blocks.batch(8),
        blocks.batch(16) | {"z": np.zeros(16, np.int32)},
        {"x": np.zeros((16, 2), np.int32), "y": np.zeros(16, np.int32)},
        {"x": np.zeros(16, np.float32), "y": np.zeros(16, np.int32)},
    ],
    ids=["smaller", "another leaf", "another shape", "another dtype"],
)
def test_a_batch_unlike_the_first_one(batch):
    with streamed(blocks.loss, "nvme") as made:
        made.step(blocks.batch())
        before = everything(made)
        with pytest.raises(zinf.ConfigError, match="planned for"):
            made.step(batch)
        assert everything(made) == before
        made.step(blocks.batch())


def test_host_values_of_64_bits_are_batches_too():
    with streamed(blocks.loss, "nvme") as made:
        wide = {k: v.astype(np.int64) for k, v in blocks.batch().items()}
        assert made.step(wide).loss > 0
        assert made.step({k: jnp.asarray(v) for k, v in blocks.batch().items()}).loss > 0


# --- looking -------------------------------------------------------------------------------------------------------


@TIER
def test_evaluate_is_as_in_memory_and_leaves_training_alone(tier):
    def logits(params, batch):
        return blocks.loss(params, batch), params["embedding"][batch["x"]]

    batches = [blocks.batch(seed=s) for s in range(3)]
    with streamed(blocks.loss, tier) as made:
        straight = [made.step(b) for b in batches]
        end = everything(made)
    with streamed(blocks.loss, tier) as made:
        made.prepare(batches[0])
        outs = []
        for batch in batches:
            found = made.evaluate(logits, blocks.batch(5, seed=9))
            wanted = jax.jit(logits)(made.params(), blocks.batch(5, seed=9))
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, wanted)
            outs.append(made.step(batch))
        assert outs == straight
        assert everything(made) == end


def test_ev03_an_error_in_evaluation_leaves_training_alone():
    def bad(params, batch):
        raise RuntimeError("in the user's function")

    with streamed(blocks.loss, "nvme") as made:
        wanted = [made.step(blocks.batch(seed=s)) for s in range(2)]
    with streamed(blocks.loss, "nvme") as made:
        outs = [made.step(blocks.batch(seed=0))]
        with pytest.raises(RuntimeError, match="in the user's function"):
            made.evaluate(bad, blocks.batch())
        outs.append(made.step(blocks.batch(seed=1)))
    assert outs == wanted


@pytest.mark.parametrize("tier", ["device", "host", "nvme"])
def test_al02_what_was_handed_out_never_changes(tier):
    """Arrays given to the caller do not alias frames: a page-aligned frame is shared, not copied, by device_put."""
    params = {"page": np.arange(4096, dtype=np.float32).reshape(1, 1, 4096), "other": np.ones(3, np.float32)}
    with trainer(quadratic, params, zinf.optim.sgd(0.1), placed(tier)) as made:
        made.prepare(ones())
        handed = [
            made.params()["page"],
            dict(made.iter_params())["page"],
            made.evaluate(lambda p, b: p["page"], ones()),
            made.evaluate(lambda p, b: {"n": jnp.sum(b["g"]), "p": p}, ones())["p"]["page"],
        ]
        made.step(ones())
        assert not np.array_equal(made.params()["page"], params["page"])
        for array in handed:
            np.testing.assert_array_equal(array, params["page"])
        handed_late = made.evaluate(lambda p, b: p["page"], ones())
        kept = np.array(handed_late)
        made.step(ones())
    np.testing.assert_array_equal(handed_late, kept)  # the arena is closed by now
    np.testing.assert_array_equal(params["page"].reshape(-1), np.arange(4096, dtype=np.float32))


def test_the_user_s_batch_is_not_kept():
    """A data loader reuses its buffer: a result must not change with it."""
    page = aio_ffi.Arena(4 * 4096, lock=False).array(0, 4 * 4096).view(np.float32)  # aligned: device_put aliases it
    page[:] = 1
    buffer = {"g": page}

    def loss_fn(params, batch):
        return linear(params, batch), batch["g"]

    with trainer(loss_fn, {"w": np.ones(3, np.float32)}, zinf.optim.sgd(0.1), has_aux=True) as made:
        out = made.step(buffer)
        seen = made.evaluate(lambda p, b: b["g"], buffer)
        buffer["g"][:] = -1
        np.testing.assert_array_equal(out.aux[0], 1.0)
        np.testing.assert_array_equal(seen, 1.0)
