"""Optimizers and learning-rate schedules from a config.

Schedules are DeepSpeed's (its `lr_schedules` module), as functions of the number of updates done. DeepSpeed sets the
rate *after* each update, so its first two updates see the same rate: with `i` for DeepSpeed's iteration,

    rate(update n) = lr(i = n - 1),   lr(-1) = the initial rate

which is reproduced, so that a run can be compared with DeepSpeed's step by step. Rates are fp32.
"""

import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zinf_jax import optim
from zinf_jax.config._schema import Config
from zinf_jax.errors import ConfigError
from zinf_jax.leaves import path_name

Schedule = Callable[[Any], Any]


def _ramp(i: jax.Array, num_steps: int, kind: str) -> jax.Array:
    """Warm-up progress in [0, 1]; with 0 steps always 1."""
    if num_steps == 0:
        return jnp.ones_like(i)
    num_steps = max(2, num_steps)  # DeepSpeed's rule: log(1) could not be divided by
    rising = jnp.log(i + 1) / jnp.log(jnp.float32(num_steps)) if kind == "log" else i / num_steps
    return jnp.where(i < num_steps, rising, 1.0)


def _warmup_lr(p: dict[str, Any]) -> Schedule:
    low, high = p["warmup_min_lr"], p["warmup_max_lr"]

    def schedule(count: Any) -> Any:
        i = jnp.maximum(jnp.asarray(count, jnp.float32) - 1, 0)
        return low + (high - low) * _ramp(i, p["warmup_num_steps"], p["warmup_type"])

    return schedule


def _warmup_decay_lr(p: dict[str, Any]) -> Schedule:
    low, high, total, warmup = p["warmup_min_lr"], p["warmup_max_lr"], p["total_num_steps"], p["warmup_num_steps"]
    peak = max(2, warmup) if warmup else 0

    def schedule(count: Any) -> Any:
        i = jnp.maximum(jnp.asarray(count, jnp.float32) - 1, 0)
        falling = jnp.maximum(0.0, (total - i) / max(1.0, total - peak))
        gamma = jnp.where(i < peak, _ramp(i, warmup, p["warmup_type"]), falling)
        return low + (high - low) * gamma

    return schedule


def _warmup_cosine_lr(p: dict[str, Any], lr: float) -> Schedule:
    total, warmup = p["total_num_steps"], p["warmup_num_steps"]
    peak = max(2, warmup) if warmup else 0
    low, end = p["warmup_min_ratio"], p["cos_min_ratio"]

    def schedule(count: Any) -> Any:
        i = jnp.asarray(count, jnp.float32) - 1
        rising = low + (1 - low) * _ramp(jnp.maximum(i, 0), warmup, p["warmup_type"])
        progress = jnp.clip((i - peak + 1) / max(1, total - peak), 0.0, 1.0)
        falling = end + (1 - end) * (1 + jnp.cos(jnp.pi * progress)) / 2
        ratio = jnp.where(i < peak, rising, falling)
        return lr * (jnp.where(i < 0, 0.0, ratio) if peak else ratio)

    return schedule


def _one_cycle(p: dict[str, Any]) -> Schedule:
    first = p["cycle_first_step_size"]
    second = p.get("cycle_second_step_size") or first
    low, high, size = p["cycle_min_lr"], p["cycle_max_lr"], p["decay_step_size"]

    def schedule(count: Any) -> Any:
        at = jnp.asarray(count, jnp.float32)  # DeepSpeed's i + 1
        x = jnp.mod(at, first + second)
        cycle = low + (high - low) * jnp.where(x <= first, x / first, (first + second - x) / second)
        decay = low / (1 + p["decay_lr_rate"] * (at - first - second) / size) if size else jnp.full_like(at, low)
        rate = jnp.where(at - 1 < first + second, cycle, decay)
        return jnp.where(at < 1, low, rate)

    return schedule


def _lr_range_test(p: dict[str, Any]) -> Schedule:
    def schedule(count: Any) -> Any:
        at = jnp.asarray(count, jnp.float32)
        steps = at / p["lr_range_test_step_size"]
        steps = jnp.floor(steps) if p["lr_range_test_staircase"] else steps
        return p["lr_range_test_min_lr"] * (1 + p["lr_range_test_step_rate"] * jnp.where(at < 1, 0.0, steps))

    return schedule


def build_schedule(config: Config) -> float | Schedule:
    """The learning rate: a number without a `scheduler` section, else a function of the number of updates done.

    Raises:
      ConfigError: neither an `optimizer` section nor a scheduler that says the rate.
    """
    lr = None if config.optimizer is None else _rate(config.optimizer.params)
    if config.scheduler is None:
        if lr is None:
            raise ConfigError("no learning rate: give optimizer.params.lr or a scheduler section")
        return lr
    params = config.scheduler.params
    if config.scheduler.type == "WarmupCosineLR":
        if lr is None:
            raise ConfigError("WarmupCosineLR scales optimizer.params.lr, which is not given")
        return _warmup_cosine_lr(params, lr)
    makers = {
        "WarmupLR": _warmup_lr,
        "WarmupDecayLR": _warmup_decay_lr,
        "OneCycle": _one_cycle,
        "LRRangeTest": _lr_range_test,
    }
    return makers[config.scheduler.type](params)


def _rate(params: dict[str, Any]) -> float | None:
    return params.get("lr", params.get("learning_rate"))


def build_optimizer(config: Config) -> optax.GradientTransformation:
    """The optimizer of the `optimizer` section; adamw, adam, lion, sgd and adagrad run fused on the host.

    Raises:
      ConfigError: there is no section, or `module:function` cannot be called.
    """
    if config.optimizer is None:
        raise ConfigError(
            "no optimizer: add a section such as `optimizer: {type: adamw, params: {lr: 1e-4}}`, or pass one"
        )
    kind, params = config.optimizer.type, config.optimizer.params
    if kind.startswith("optax.") or ":" in kind:
        return _other(config, kind, params)
    rate = build_schedule(config)
    decay, mask = params["weight_decay"], decay_mask(config)
    if kind in ("adam", "adamw"):
        moments = {"eps": params["eps"], "eps_root": params["eps_root"], "nesterov": params["nesterov"]}
        b1, b2 = params["betas"]
        if kind == "adamw":
            return optim.adamw(rate, b1, b2, **moments, weight_decay=decay, mask=mask)
        return _with_l2(optim.adam(rate, b1, b2, **moments), decay, mask)
    if kind == "lion":
        b1, b2 = params["betas"]
        return optim.lion(rate, b1, b2, weight_decay=decay, mask=mask)
    if kind == "lamb":
        b1, b2 = params["betas"]
        return optax.lamb(rate, b1, b2, params["eps"], params["eps_root"], weight_decay=decay, mask=mask)
    if kind == "sgd":
        return _with_l2(optim.sgd(rate, params["momentum"] or None, params["nesterov"]), decay, mask)
    adagrad = optim.adagrad(rate, initial_accumulator_value=params["initial_accumulator_value"], eps=params["eps"])
    return _with_l2(adagrad, decay, mask)


def _with_l2(inner: optax.GradientTransformation, decay: float, mask: Any) -> optax.GradientTransformation:
    """PyTorch's `weight_decay` of adam, sgd and adagrad: added to the gradient. Generic, so slower than fused."""
    return optax.chain(optax.add_decayed_weights(decay, mask), inner) if decay else inner


def decay_mask(config: Config) -> Callable[[Any], Any] | None:
    """params -> tree of bools: True where weight decay applies; None where it applies to all."""
    optimizer = config.optimizer
    if optimizer is None or not optimizer.no_decay_patterns:
        return None
    patterns = optimizer.compiled_no_decay()

    def mask(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: not any(pattern.search(path_name(path)) for pattern in patterns), params
        )

    return mask


def _other(config: Config, kind: str, params: dict[str, Any]) -> optax.GradientTransformation:
    module, _, name = ("optax", "", kind.removeprefix("optax.")) if kind.startswith("optax.") else kind.partition(":")
    try:
        factory: Any = importlib.import_module(module)
        for part in name.split("."):
            factory = getattr(factory, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"optimizer.type = {kind!r}: cannot be imported ({error})") from None
    rate = build_schedule(config)
    kwargs = {key: value for key, value in params.items() if key not in ("lr", "learning_rate")}
    try:
        return factory(learning_rate=rate, **kwargs)
    except TypeError as error:
        raise ConfigError(f"optimizer.type = {kind!r} with params {sorted(params)}: {error}") from None
