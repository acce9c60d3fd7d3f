"""zinf.optim.* against optax: equal signatures, plain loops, and one update within 4 ulp from equal state."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.optim import reference
from tests.optim.reference import DTYPES, HostOptimizer
from zinf_jax import optim
from zinf_jax.errors import ConfigError

SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 3, 20)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("adamw", {"learning_rate": 1e-3}),
    "adamw_decay": ("adamw", {"learning_rate": 1e-2, "weight_decay": 0.3, "b1": 0.8, "b2": 0.95, "eps": 1e-6}),
    "adamw_schedules": ("adamw", {"learning_rate": SCHEDULE, "weight_decay": optax.linear_schedule(0.1, 0.0, 5)}),
    "adamw_no_decay": ("adamw", {"learning_rate": 1e-3, "weight_decay": 0.0}),
    "adamw_nesterov": ("adamw", {"learning_rate": 1e-3, "nesterov": True}),
    "adamw_arrays": ("adamw", {"learning_rate": jnp.float32(1e-3), "b1": np.float32(0.9), "b2": jnp.float32(0.99)}),
    "adam": ("adam", {"learning_rate": 1e-3}),
    "adam_eps_root": ("adam", {"learning_rate": SCHEDULE, "eps_root": 1e-9, "eps": 1e-3}),
    "adam_nesterov": ("adam", {"learning_rate": 1e-3, "nesterov": True}),
    "adam_no_rate": ("adam", {"learning_rate": None}),
    "lion": ("lion", {"learning_rate": 1e-4}),
    "lion_decay": ("lion", {"learning_rate": SCHEDULE, "weight_decay": 0.1, "b1": 0.95, "b2": 0.98}),
    "lion_no_decay": ("lion", {"learning_rate": 1e-4, "weight_decay": 0.0}),
    "sgd": ("sgd", {"learning_rate": 0.1}),
    "sgd_momentum": ("sgd", {"learning_rate": 0.1, "momentum": 0.9}),
    "sgd_zero_momentum": ("sgd", {"learning_rate": 0.1, "momentum": 0.0}),
    "sgd_nesterov": ("sgd", {"learning_rate": SCHEDULE, "momentum": 0.9, "nesterov": True}),
    "adagrad": ("adagrad", {"learning_rate": 0.1}),
    "adagrad_zero": ("adagrad", {"learning_rate": SCHEDULE, "initial_accumulator_value": 0.0, "eps": 1e-8}),
}
# The kernels round where XLA does, so all is equal bit for bit, except with adagrad: XLA refines the CPU's own estimate
# of 1 / sqrt(x), which has other bits on every make of CPU. There the new parameter is within 4 ulp of the larger of
# the old parameter and the new one (their difference can cancel all digits but the last).
BITWISE = [case for case in CASES if not case.startswith("adagrad")]


def _slots(state: Any, names: tuple[str, ...]) -> list[list[np.ndarray]]:
    """The leaves of each named field of an optax state."""
    found = []
    for name in names:
        fields = [
            getattr(part, name)
            for part in jax.tree.leaves(state, is_leaf=lambda x: hasattr(x, "_fields"))
            if hasattr(part, name)
        ]
        found.append([np.asarray(x) for x in jax.tree.leaves(fields[0])])
    return found


@pytest.mark.parametrize("name", ["adamw", "adam", "lion", "sgd", "adagrad", "partition"])
def test_signatures_are_optax_s(name: str) -> None:
    ours, theirs = (inspect.signature(getattr(module, name)).parameters for module in (optim, optax))
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [
        (p.name, p.kind, p.default) for p in theirs.values()
    ]


@pytest.mark.parametrize("case", CASES)
def test_follows_optax_step_by_step(case: str) -> None:
    """From optax's own state at each step, over magnitudes from 1e-12 to 1e12, denormals and zeros."""
    name, arguments = CASES[case]
    rng = np.random.default_rng(0)
    params = {"a": reference.wide_floats(rng, 5000), "b": reference.wide_floats(rng, 7), "c": np.float32(3.0)}
    tx = getattr(optim, name)(**arguments)
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    host = HostOptimizer(tx, params)
    step = reference.jitted_step(getattr(optax, name)(**arguments))
    state = getattr(optax, name)(**arguments).init(params)
    worst = 0
    for _ in range(6):
        gradients = jax.tree.map(lambda x: reference.wide_floats(rng, x.size).reshape(x.shape), params)
        host.masters[:] = [np.array(x).reshape(-1) for x in jax.tree.leaves(params)]
        host.weights = host.masters
        host.slots = [
            tuple(np.array(field[i]).reshape(-1) for field in _slots(state, host.bound.slots)) for i in range(3)
        ]
        host.step(jax.tree.leaves(gradients))
        before = jax.tree.leaves(params)
        params, state = step(params, state, gradients)
        params = jax.tree.map(np.asarray, params)
        new_slots = _slots(state, host.bound.slots)
        for i, expected in enumerate(jax.tree.leaves(params)):
            scale = None if case in BITWISE else before[i].reshape(-1)
            worst = max(worst, reference.ulps(host.masters[i], np.reshape(expected, -1), scale).max())
            for k, field in enumerate(new_slots):
                worst = max(worst, reference.ulps(host.slots[i][k], field[i].reshape(-1)).max())
    assert worst <= (0 if case in BITWISE else 4), worst


@pytest.mark.parametrize("gradient", ["bf16", "f16"])
@pytest.mark.parametrize("weights", ["bf16", "f16"])
@pytest.mark.parametrize("case", ["adamw", "lion", "sgd_nesterov", "adagrad"])
def test_low_precision_weights_follow_an_fp32_master(case: str, weights: str, gradient: str) -> None:
    name, arguments = CASES[case]
    rng = np.random.default_rng(1)
    params = {"a": rng.standard_normal(3001).astype(np.float32), "b": np.ones(3, np.float32)}
    host = HostOptimizer(getattr(optim, name)(**arguments), params, weights=weights)
    tx = getattr(optax, name)(**arguments)
    step, state, master = reference.jitted_step(tx), tx.init(params), params
    for _ in range(4):
        low = rng.standard_normal(3001).astype(DTYPES[gradient])
        host.step([low, low[:3]], gradient_scale=0.25, num_threads=2)
        scaled = low.astype(np.float32) * np.float32(0.25)
        master, state = step(master, state, {"a": scaled, "b": scaled[:3]})
    expected = np.asarray(master["a"])
    if case != "adagrad":
        np.testing.assert_array_equal(host.master(0), expected)
    else:
        np.testing.assert_allclose(host.master(0), expected, rtol=1e-5, atol=1e-7)
    rounded = reference.split_master(host.master(0))[0] if weights == "bf16" else host.master(0).astype(np.float16)
    np.testing.assert_array_equal(host.weights[0].view(np.uint16), rounded.view(np.uint16))


def test_plain_optax_loop_works() -> None:
    tx, params = optim.adamw(1e-3), {"w": jnp.arange(3.0)}
    chained = optax.chain(optax.clip(1.0), tx)
    for ours, theirs in ((tx, optax.adamw(1e-3)), (chained, optax.chain(optax.clip(1.0), optax.adamw(1e-3)))):
        got = ours.update(params, ours.init(params), params, unused_extra_argument=1)
        want = theirs.update(params, theirs.init(params), params)
        assert jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.all(a == b)), got, want))
    injected = optax.inject_hyperparams(optim.adamw)(learning_rate=SCHEDULE)
    injected.update(params, injected.init(params), params)


def test_mask_prefix_and_callable_turn_decay_off_by_leaf() -> None:
    params = {
        "dense": {"kernel": np.ones((2, 2), np.float32), "bias": np.ones(2, np.float32)},
        "scale": np.ones(3, np.float32),
    }
    by_ndim = lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)  # noqa: E731
    for mask, decayed in ((by_ndim, [False, True, False]), ({"dense": True, "scale": False}, [True, True, False])):
        host = HostOptimizer(optim.adamw(0.5, weight_decay=0.5, mask=mask), params)
        host.step([None, None, None])
        assert [bool((m != 1).all()) for m in host.masters] == decayed
        np.testing.assert_array_equal(host.masters[1], np.full(4, 0.75, np.float32) if decayed[1] else 1)
    with pytest.raises(ConfigError, match="weight decay mask"):
        HostOptimizer(optim.adamw(0.5, mask={"dense": True, "other": False}), params)


def test_groups_keep_their_learning_rate_and_decay() -> None:
    """OV03: SGD with gradient 1 moves by exactly 1e-3 and 1e-5; a bias without decay and gradient stays."""
    params = {"bias": np.zeros(3, np.float32), "kernel": np.zeros(5, np.float32)}
    labels = {"bias": "small", "kernel": "large"}
    host = HostOptimizer(optim.partition({"large": optim.sgd(1e-3), "small": optim.sgd(1e-5)}, labels), params)
    assert host.bound.hyperparameters(0) == {
        "learning_rate/large": float(np.float32(1e-3)), "learning_rate/small": float(np.float32(1e-5))
    }  # fmt: skip
    host.step([np.ones(3, np.float32), np.ones(5, np.float32)])
    np.testing.assert_array_equal(host.masters[0], np.full(3, -1e-5, np.float32))
    np.testing.assert_array_equal(host.masters[1], np.full(5, -1e-3, np.float32))
    ones = jax.tree.map(np.ones_like, params)
    tx = optim.partition({"large": optim.adamw(0.1, weight_decay=0.5), "small": optim.adam(0.1)}, lambda p: labels)
    host = HostOptimizer(tx, ones)
    host.step([None, None])
    np.testing.assert_array_equal(host.masters[0], 1)
    np.testing.assert_array_equal(host.masters[1], np.float32(1) - np.float32(0.1) * np.float32(0.5))


def test_partition_follows_optax_and_says_when_it_is_not_fused(caplog: pytest.LogCaptureFixture) -> None:
    rng = np.random.default_rng(2)
    shapes = {"a": (100,), "b": (4, 5), "c": (7,), "d": (2, 2)}
    params = {key: rng.standard_normal(shape).astype(np.float32) for key, shape in shapes.items()}
    gradients = jax.tree.map(lambda x: rng.standard_normal(x.shape).astype(np.float32), params)

    def make(module: Any) -> Any:
        mask = lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)  # noqa: E731
        labels = {"a": 0, "b": 1, "c": 1, "d": 0}
        return module.partition({0: module.adamw(1e-2, mask=mask), 1: module.adam(SCHEDULE)}, labels)

    host, tx = HostOptimizer(make(optim), params), make(optax)
    state, step, expected = tx.init(params), reference.jitted_step(tx), params
    for _ in range(3):
        host.step(jax.tree.leaves(gradients))
        expected, state = step(expected, state, gradients)
    for master, want in zip(host.masters, jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(master, np.reshape(want, -1))
    mixed = optim.partition({0: optim.sgd(0.1), 1: optim.adam(0.1)}, {"a": 0, "b": 1})
    assert not hasattr(mixed, "rule") and "generic path" in caplog.text


def test_state_in_another_dtype_is_not_fused_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    tx = optim.adamw(1e-3, mu_dtype=jnp.bfloat16)
    assert not hasattr(tx, "rule") and "bfloat16" in caplog.text
    assert tx.init({"w": jnp.ones(2)})[0].mu["w"].dtype == jnp.bfloat16
    assert hasattr(optim.adamw(1e-3, mu_dtype=jnp.float32), "rule")
    assert not hasattr(optim.sgd(1e-3, 0.9, accumulator_dtype="bfloat16"), "rule")


def test_equal_counts_give_equal_corrections() -> None:
    """NU09: coefficients depend on the count alone, whatever was asked before, and follow pow(beta, t)."""
    params = {"w": np.zeros(2, np.float32)}
    bound = HostOptimizer(optim.adam(1e-3), params).bound
    correction = jax.jit(lambda t: [1 - 0.9**t, 1 - 0.999**t])
    for count in (0, 1, 1, 1, 2, 4, 0, 12345, 2**31 - 2):
        coefficients = bound.coefficients(0, count)
        np.testing.assert_array_equal(coefficients[7:9], np.array(correction(np.int32(count) + 1)))
        assert coefficients is bound.coefficients(0, count)


def test_counter_per_leaf() -> None:
    """NU10: leaf B has gradients in steps 1, 3, 5 only; each leaf equals an Adam of its own."""
    rng = np.random.default_rng(3)
    params = {"a": rng.standard_normal(10).astype(np.float32), "b": rng.standard_normal(10).astype(np.float32)}
    host = HostOptimizer(optim.adam(1e-2), params)
    counts = [0, 0]
    trees = {key: {"leaf": params[key], "other": np.zeros(3, np.float32)} for key in params}
    alone = {key: (trees[key], optax.adam(1e-2).init(trees[key])) for key in params}
    step = reference.jitted_step(optax.adam(1e-2))
    for number in range(1, 7):
        for i, key in enumerate("ab" if number % 2 else "a"):
            gradient = rng.standard_normal(10).astype(np.float32)
            part = optim.Range(host.masters[i], None, gradient, host.slots[i], host.bound.coefficients(i, counts[i]))
            optim.update(host.rule, [part])
            counts[i] += 1
            alone[key] = step(*alone[key], {"leaf": gradient, "other": gradient[:3]})
    assert counts == [6, 3]
    for i, key in enumerate("ab"):
        np.testing.assert_array_equal(host.masters[i], alone[key][0]["leaf"])


def test_bf16_weights_keep_moving() -> None:
    """PR02: bf16 ones under adam(6e-4) reach 0.94, not 1.0."""
    host = HostOptimizer(optim.adam(6e-4), {"w": np.ones(64, np.float32)}, weights="bf16")
    for _ in range(100):
        host.step([np.ones(64, reference.BF16)])
    assert host.master(0)[0] == np.float32(0.9400019645690918)
    np.testing.assert_array_equal(host.weights[0].astype(np.float32), 0.94140625)


def test_integer_and_frozen_leaves_are_not_bound() -> None:
    """PK05, PK06: what is not trained has no coefficients; a table that does not match is refused."""
    leaves = reference.table({"n": np.int32(5), "w": np.ones(3, np.float32)})
    bound = optim.adamw(0.1).rule.bind(leaves, {"n": None, "w": jax.ShapeDtypeStruct((3,), np.float32)})  # type: ignore[attr-defined]
    assert bound.coefficients(1, 0)[0] == 1
    with pytest.raises(KeyError):
        bound.coefficients(0, 0)
    with pytest.raises(ConfigError, match="1 leaves are trained"):
        optim.adamw(0.1).rule.bind(leaves, reference.avals({"a": 1.0, "v": 2.0, "w": 3.0}))  # type: ignore[attr-defined]


def test_learning_rate_for_the_metrics_is_the_schedule_s() -> None:
    """OV01: lr == schedule(updates applied)."""
    bound = HostOptimizer(optim.adamw(SCHEDULE), {"w": np.zeros(2, np.float32)}).bound
    for count in range(5):
        assert bound.hyperparameters(count)["learning_rate"] == pytest.approx(float(SCHEDULE(count)), rel=1e-6)


def test_schedule_with_python_control_flow() -> None:
    bound = HostOptimizer(optim.sgd(lambda count: 0.5 if count < 2 else 0.25), {"w": np.zeros(2, np.float32)}).bound
    assert [bound.hyperparameters(c)["learning_rate"] for c in range(4)] == [0.5, 0.5, 0.25, 0.25]
