"""Schedules against DeepSpeed's own formulas, optimizers against optax on the same gradients."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from zinf_jax.config import build_optimizer, build_schedule, decay_mask, load
from zinf_jax.errors import ConfigError

STEPS = (0, 1, 2, 3, 9, 10, 11, 12, 50, 99, 100, 101, 150)


def ramp(i: int, n: int, kind: str) -> float:
    n = max(2, n)
    if i >= n:
        return 1.0
    return math.log(i + 1) / math.log(n) if kind == "log" else i / n


def reference(kind: str, p: dict[str, Any], lr: float, i: int) -> float:
    """DeepSpeed's rate at its iteration i (-1: before the first update)."""
    if kind == "WarmupLR":
        gamma = ramp(max(i, 0), p["warmup_num_steps"], p["warmup_type"])
    elif kind == "WarmupDecayLR":
        n, total = max(2, p["warmup_num_steps"]), p["total_num_steps"]
        falling = max(0.0, (total - i) / max(1.0, total - n))
        gamma = ramp(max(i, 0), n, p["warmup_type"]) if i < n else falling
    elif kind == "WarmupCosineLR":
        n, total, low, end = (
            max(2, p["warmup_num_steps"]),
            p["total_num_steps"],
            p["warmup_min_ratio"],
            p["cos_min_ratio"],
        )
        if i < 0:
            return 0.0
        if i < n:
            return lr * (low + (1 - low) * ramp(i, n, p["warmup_type"]))
        progress = min(1.0, (i - n + 1) / max(1, total - n))
        return lr * (end + (1 - end) * (1 + math.cos(math.pi * progress)) / 2)
    else:
        raise AssertionError(kind)
    return p["warmup_min_lr"] + (p["warmup_max_lr"] - p["warmup_min_lr"]) * gamma


@pytest.mark.parametrize("warmup_type", ["log", "linear"])
@pytest.mark.parametrize("warmup", [1, 2, 10])
@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
def test_warmup_schedules_are_deepspeeds(kind: str, warmup: int, warmup_type: str) -> None:
    p: dict[str, Any] = {"warmup_num_steps": warmup, "warmup_type": warmup_type}
    p |= {"WarmupLR": {"warmup_min_lr": 1e-5, "warmup_max_lr": 1e-3},
          "WarmupDecayLR": {"warmup_min_lr": 1e-5, "warmup_max_lr": 1e-3, "total_num_steps": 100},
          "WarmupCosineLR": {"warmup_min_ratio": 0.1, "cos_min_ratio": 0.01, "total_num_steps": 100}}[kind]  # fmt: skip
    schedule = build_schedule(load({"optimizer": {"type": "adam", "params": {"lr": 2e-3}},
                                    "scheduler": {"type": kind, "params": p}}))  # fmt: skip
    assert callable(schedule)
    for step in STEPS:
        expected = reference(kind, p, 2e-3, step - 1)
        np.testing.assert_allclose(schedule(step), expected, rtol=2e-5, atol=1e-9, err_msg=str(step))
        np.testing.assert_allclose(jax.jit(schedule)(jnp.int32(step)), schedule(np.int32(step)), rtol=3e-7, atol=1e-10)


def test_no_warmup_starts_at_the_peak() -> None:
    tree = {"optimizer": {"type": "adam", "params": {"lr": 2e-3}}, "train": {"steps": 10}}
    for kind in ("WarmupLR", "WarmupDecayLR"):
        schedule = build_schedule(load({**tree, "scheduler": {"type": kind, "params": {"warmup_num_steps": 0}}}))
        assert callable(schedule)
        np.testing.assert_allclose(schedule(0), 2e-3, rtol=1e-6)


def test_one_cycle_and_range_test() -> None:
    p = {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 4, "cycle_second_step_size": 6,
         "cycle_momentum": False, "decay_step_size": 5, "decay_lr_rate": 1.0}  # fmt: skip
    schedule = build_schedule(load({"scheduler": {"type": "OneCycle", "params": p}}))
    assert callable(schedule)
    rates = [float(schedule(step)) for step in (0, 2, 4, 7, 10, 15, 20)]
    np.testing.assert_allclose(rates, [0.1, 0.55, 1.0, 0.55, 0.1, 0.1 / 2, 0.1 / 3], rtol=1e-5)
    p = {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 4, "lr_range_test_step_rate": 2.0}
    smooth = build_schedule(load({"scheduler": {"type": "LRRangeTest", "params": p}}))
    stairs = build_schedule(
        load({"scheduler": {"type": "LRRangeTest", "params": {**p, "lr_range_test_staircase": True}}})
    )
    assert callable(smooth)
    assert callable(stairs)
    np.testing.assert_allclose([smooth(s) for s in (0, 2, 4)], [0.1, 0.2, 0.3], rtol=1e-6)
    np.testing.assert_allclose([stairs(s) for s in (0, 3, 4)], [0.1, 0.1, 0.3], rtol=1e-6)


PARAMS = {"block": {"kernel": jnp.linspace(-1, 1, 6).reshape(2, 3), "bias": jnp.ones(3)}, "scale": jnp.full(4, 0.5)}


def run(tx: optax.GradientTransformation, steps: int = 3) -> Any:
    params, state = PARAMS, tx.init(PARAMS)
    for step in range(steps):
        grads = jax.tree.map(lambda p, step=step: jnp.sin(p * 3 + step), params)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params


def no_bias(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: "bias" not in str(path), params)


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.8, 0.9], "weight_decay": 0.1}},
         optax.adamw(1e-2, 0.8, 0.9, weight_decay=0.1)),
        ({"type": "AdamW", "params": {"learning_rate": 1e-2, "b1": 0.8, "weight_decay": 0.1},
          "no_decay_patterns": "bias"}, optax.adamw(1e-2, 0.8, weight_decay=0.1, mask=no_bias)),
        ({"type": "Adam", "params": {"lr": 1e-2, "weight_decay": 0.1}}, optax.adamw(1e-2, weight_decay=0.1)),
        ({"type": "Adam", "params": {"lr": 1e-2, "weight_decay": 0.1, "adam_w_mode": False}},
         optax.chain(optax.add_decayed_weights(0.1), optax.adam(1e-2))),
        ({"type": "adam", "params": {"lr": 1e-2, "nesterov": True, "eps_root": 1e-6}},
         optax.adam(1e-2, eps_root=1e-6, nesterov=True)),
        ({"type": "Lion", "params": {"lr": 1e-2}}, optax.lion(1e-2, weight_decay=0.0)),
        ({"type": "SGD", "params": {"lr": 1e-2}}, optax.sgd(1e-2)),
        ({"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}},
         optax.chain(optax.add_decayed_weights(0.1), optax.sgd(1e-2, 0.9, True))),
        ({"type": "Adagrad", "params": {"lr": 1e-2}},
         optax.adagrad(1e-2, initial_accumulator_value=0.0, eps=1e-10)),
        ({"type": "Lamb", "params": {"lr": 1e-2}}, optax.lamb(1e-2)),
        ({"type": "optax.adafactor", "params": {"lr": 1e-2, "min_dim_size_to_factor": 2}},
         optax.adafactor(1e-2, min_dim_size_to_factor=2)),
        ({"type": "optax:rmsprop", "params": {"lr": 1e-2}}, optax.rmsprop(1e-2)),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else "",
)  # fmt: skip
def test_optimizers_are_optaxs(section: dict[str, Any], expected: optax.GradientTransformation) -> None:
    got = run(build_optimizer(load({"optimizer": section})))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-7), got, run(expected))


def test_the_scheduler_drives_the_optimizer() -> None:
    tree = {"optimizer": {"type": "sgd", "params": {"lr": 5.0}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 4}}}  # fmt: skip
    config = load(tree)
    schedule = build_schedule(config)
    assert callable(schedule)
    got, expected = run(build_optimizer(config)), run(optax.sgd(schedule))
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_no_decay_patterns_make_a_mask() -> None:
    mask = decay_mask(load({"optimizer": {"type": "adamw", "no_decay_patterns": ["bias$", "^scale"]}}))
    assert mask is not None
    assert mask(PARAMS) == {"block": {"kernel": True, "bias": False}, "scale": False}
    assert decay_mask(load({"optimizer": {"type": "adamw"}})) is None


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({}, "no optimizer"),
        ({"optimizer": {"type": "optax.nothing"}}, "cannot be imported"),
        ({"optimizer": {"type": "no_such_module:f"}}, "cannot be imported"),
        ({"optimizer": {"type": "optax.rmsprop", "params": {"lr": 1e-2, "speed": 3}}}, "speed"),
        ({"optimizer": {"type": "optax.rmsprop"}}, "no learning rate"),
    ],
)
def test_what_cannot_be_built_is_named(tree: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_optimizer(load(tree))
