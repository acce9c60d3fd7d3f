"""Optimizer and schedule parameters: both vocabularies (PyTorch's and optax's) in, one canonical form out.

Each parameter is checked as strictly as the rest of the config. What would train something else than asked for
(amsgrad, compressed gradients, cycled momentum) is refused with the reason, not dropped.
"""

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from zinf_jax.config._errors import from_validation
from zinf_jax.config._types import REFUSE, Count, Fraction, NonNegative, Number, Positive, Section

# Optimizer names as people write them -> ours.
_OPTIMIZERS = {
    "adam": "adam", "adamw": "adamw", "fusedadam": "adam", "deepspeedcpuadam": "adam", "cpuadam": "adam",
    "lion": "lion", "fusedlion": "lion", "sgd": "sgd", "adagrad": "adagrad", "lamb": "lamb", "fusedlamb": "lamb",
}  # fmt: skip
_REFUSED = {
    "onebitadam": "it compresses gradients between ranks, which changes the numbers; use AdamW",
    "zerooneadam": "it compresses gradients between ranks, which changes the numbers; use AdamW",
    "onebitlamb": "it compresses gradients between ranks, which changes the numbers; use Lamb",
    "muon": "it needs whole matrices; pass optax.contrib.muon(...) as the trainer's `optimizer` argument",
}
_ALIASES = {"learning_rate": "lr", "epsilon": "eps"}


def _only(*allowed: Any, why: str) -> AfterValidator:
    def check(value: Any) -> Any:
        if value not in allowed:
            raise ValueError(why)
        return value

    return AfterValidator(check)


def _pair(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


Beta = Annotated[Number, Field(ge=0, lt=1)]
Betas = Annotated[tuple[Beta, Beta], BeforeValidator(_pair)]
_AUTO_REFUSED: Any = {"auto": REFUSE}


class _Common(Section):
    lr: NonNegative = Field(default=1e-3, json_schema_extra=_AUTO_REFUSED)
    weight_decay: NonNegative = 0.0
    # Hints for PyTorch's own implementations; nothing here depends on them.
    fused: bool | None = None
    foreach: bool | None = None
    torch_adam: bool = False
    set_grad_none: bool | None = None
    capturable: bool | None = None
    maximize: Annotated[bool, _only(False, why="maximize is not supported: negate the loss")] = False


class _Adam(_Common):
    betas: Betas = (0.9, 0.999)
    eps: NonNegative = 1e-8
    eps_root: NonNegative = 0.0
    nesterov: bool = False
    adam_w_mode: bool = True
    bias_correction: Annotated[
        bool, _only(True, why="Adam without bias correction is not supported: pass an optax chain as `optimizer`")
    ] = True
    amsgrad: Annotated[
        bool, _only(False, why="amsgrad is not supported: pass optax.amsgrad(...) as `optimizer`, or drop it")
    ] = False
    fp32_optimizer_states: Annotated[
        bool, _only(True, why="optimizer state is always fp32: a 16-bit Adam state stops moving")
    ] = True


class _Lion(_Common):
    lr: NonNegative = Field(default=1e-4, json_schema_extra=_AUTO_REFUSED)
    betas: Betas = (0.9, 0.99)


class _Sgd(_Common):
    momentum: Beta = 0.0
    nesterov: bool = False
    dampening: Annotated[Number, _only(0, why="dampening is not supported (optax has none): set it to 0")] = 0.0


class _Adagrad(_Common):
    lr: NonNegative = Field(default=1e-2, json_schema_extra=_AUTO_REFUSED)
    eps: NonNegative = 1e-10
    initial_accumulator_value: NonNegative = 0.0
    lr_decay: Annotated[Number, _only(0, why="lr_decay is not supported: use a scheduler section")] = 0.0


class _Lamb(_Common):
    betas: Betas = (0.9, 0.999)
    eps: NonNegative = 1e-6
    eps_root: NonNegative = 0.0
    bias_correction: Annotated[bool, _only(True, why="Lamb without bias correction is not supported")] = True
    max_coeff: NonNegative | None = Field(default=None, json_schema_extra=_AUTO_REFUSED)
    min_coeff: NonNegative | None = Field(default=None, json_schema_extra=_AUTO_REFUSED)


OPTIMIZERS: dict[str, type[_Common]] = {
    "adamw": _Adam, "adam": _Adam, "lion": _Lion, "sgd": _Sgd, "adagrad": _Adagrad, "lamb": _Lamb,
}  # fmt: skip
_HINTS = {"fused", "foreach", "torch_adam", "set_grad_none", "capturable"}
_NOT_STORED = {*_HINTS, "maximize", "bias_correction", "amsgrad", "adam_w_mode", "fp32_optimizer_states",
               "dampening", "lr_decay", "max_coeff", "min_coeff"}  # fmt: skip

# Tensors per parameter that the update holds at once: weight, gradient, state. DeepSpeed's `buffer_count` counts these.
NUM_STATES = {"adamw": 4, "adam": 4, "lamb": 4, "lion": 3, "adagrad": 3, "sgd": 2}


def num_states(type_: str, params: Mapping[str, Any]) -> int | None:
    """Weight, gradient and state tensors of an optimizer; None where only optax knows."""
    count = NUM_STATES.get(type_)
    return count + 1 if type_ == "sgd" and count and params.get("momentum") else count


def record_bytes_per_param(type_: str | None, params: Mapping[str, Any], precision: str) -> int:
    """Bytes per parameter that an update streams: master and fp32 state (bf16: the master is a 16-bit remainder)."""
    num_moments = (num_states(type_ or "adamw", params) or 4) - 2
    return {"bf16": 2, "fp16": 4, "fp32": 0}[precision] + 4 * num_moments


def normalise_optimizer(type_: str, params: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """Canonical `type` and `params` of an optimizer section; `notes` grows.

    Raises:
      ValueError: an unknown or refused type or parameter.
    """
    name = type_.lower().replace("_", "").replace("-", "")
    if type_.startswith("optax.") or ":" in type_:
        return {"type": type_, "params": dict(params)}
    if name in _REFUSED:
        raise ValueError(f"type {type_!r} is not available: {_REFUSED[name]}")
    if name not in _OPTIMIZERS:
        raise ValueError(
            f"type {type_!r} is not known{_close(name, list(_OPTIMIZERS))}; there are {', '.join(OPTIMIZERS)}; "
            f"any optax one as 'optax.NAME', or pass the transformation itself as the trainer's `optimizer` argument"
        )
    canonical = _OPTIMIZERS[name]
    values = _rename(params)
    checked = _checked(OPTIMIZERS[canonical], values, "optimizer.params", notes)
    out = {key: value for key, value in checked.items() if key not in _NOT_STORED}
    for key in sorted(_HINTS & set(values)):
        notes.append(f"optimizer.params.{key} has no meaning here: there is one implementation of {canonical}")
    if canonical in ("adam", "adamw"):
        # DeepSpeed's rule: Adam decays decoupled (as AdamW) unless adam_w_mode is false; AdamW always does.
        decoupled = canonical == "adamw" or checked["adam_w_mode"]
        canonical = "adamw" if decoupled and out["weight_decay"] else canonical
        if not decoupled:
            out["adam_w_mode"] = False
    if canonical == "lamb" and (checked["max_coeff"], checked["min_coeff"]) != (None, None):
        raise ValueError("max_coeff and min_coeff of Lamb are not supported: optax.lamb has no limits; drop them")
    return {"type": canonical, "params": out}


def _rename(params: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in params.items():
        key = _ALIASES.get(key, key)
        if key in values:
            raise ValueError(f"params has {key!r} under two names: keep one")
        values[key] = value
    beta1, beta2 = values.pop("b1", None), values.pop("b2", None)
    if beta1 is not None or beta2 is not None:
        if "betas" in values:
            raise ValueError("params has both betas and b1/b2: keep one")
        values["betas"] = (0.9 if beta1 is None else beta1, 0.999 if beta2 is None else beta2)
    return values


def _checked(section: type[Section], values: Mapping[str, Any], what: str, notes: list[str]) -> dict[str, Any]:
    for key in values:
        if key not in section.model_fields:
            raise ValueError(f"{what}.{key}: unknown parameter{_close(key, list(section.model_fields))}")
    try:
        return dict(section.model_validate(dict(values), context={"notes": notes, "section": what}))
    except ValidationError as error:
        raise ValueError(str(from_validation(error, {}, what))) from None


def _close(name: str, candidates: list[str]) -> str:
    found = difflib.get_close_matches(name, candidates, n=1)
    return f" (did you mean {found[0]!r}?)" if found else ""


class _WarmupBase(Section):
    warmup_num_steps: Count = Field(default=1000, json_schema_extra={"auto": 0})
    warmup_type: Literal["log", "linear"] = "log"


class _WarmupLr(_WarmupBase):
    warmup_min_lr: NonNegative = 0.0
    warmup_max_lr: NonNegative | None = None


class _WarmupDecayLr(_WarmupLr):
    total_num_steps: Positive | None = None


class _WarmupCosineLr(_WarmupBase):
    warmup_min_ratio: Fraction = 0.0
    cos_min_ratio: Fraction = 0.0001
    total_num_steps: Positive | None = None


class _OneCycle(Section):
    cycle_min_lr: NonNegative
    cycle_max_lr: NonNegative
    decay_lr_rate: NonNegative = 0.0
    cycle_first_step_size: Positive = 2000
    cycle_second_step_size: Positive | None = None
    cycle_first_stair_count: Annotated[Number, _only(0, why="stairs are not supported: set the stair counts to 0")] = 0
    cycle_second_stair_count: Annotated[
        Number | None, _only(0, None, why="stairs are not supported: set the stair counts to 0")
    ] = None
    decay_step_size: Count = 0
    cycle_momentum: Annotated[
        bool, _only(False, why="cycling the momentum is not supported: set cycle_momentum to false")
    ]
    cycle_min_mom: Number | None = None
    cycle_max_mom: Number | None = None
    decay_mom_rate: Number | None = None


class _LrRangeTest(Section):
    lr_range_test_min_lr: NonNegative = 1e-3
    lr_range_test_step_size: Positive = 2000
    lr_range_test_step_rate: NonNegative = 1.0
    lr_range_test_staircase: bool = False


SCHEDULERS: dict[str, type[Section]] = {
    "WarmupLR": _WarmupLr,
    "WarmupDecayLR": _WarmupDecayLr,
    "WarmupCosineLR": _WarmupCosineLr,
    "OneCycle": _OneCycle,
    "LRRangeTest": _LrRangeTest,
}


def normalise_scheduler(
    type_: str, params: Mapping[str, Any], lr: float | None, steps: int | None, notes: list[str]
) -> dict[str, Any]:
    """Canonical `type` and `params`: the peak rate and the number of steps are filled in from the rest of the config.

    Raises:
      ValueError: an unknown type or parameter, or a number of steps that nothing gives.
    """
    by_lower = {name.lower(): name for name in SCHEDULERS}
    if type_.lower() not in by_lower:
        raise ValueError(
            f"scheduler.type {type_!r} is not known{_close(type_, list(SCHEDULERS))}; "
            f"there are {', '.join(SCHEDULERS)}; for any other "
            f"schedule pass an optax optimizer that has it as the trainer's `optimizer` argument"
        )
    canonical = by_lower[type_.lower()]
    values = dict(params)
    if "last_batch_iteration" in values:
        values.pop("last_batch_iteration")
        notes.append("scheduler.params.last_batch_iteration has no meaning here: a resume restores the step")
    if canonical == "OneCycle":
        values.setdefault("cycle_momentum", True)
    out = _checked(SCHEDULERS[canonical], values, "scheduler.params", notes)
    if "warmup_max_lr" in out and out["warmup_max_lr"] is None:
        out["warmup_max_lr"] = 1e-3 if lr is None else lr
    if "total_num_steps" in out and out["total_num_steps"] is None:
        if steps is None:
            raise ValueError(
                f"{canonical} needs scheduler.params.total_num_steps (or train.steps): give the number of steps"
            )
        out["total_num_steps"] = steps
    unused = ("cycle_momentum", "cycle_min_mom", "cycle_max_mom", "decay_mom_rate") if canonical == "OneCycle" else ()
    keep_off = {"cycle_momentum": False} if canonical == "OneCycle" else {}
    return {"type": canonical, "params": {k: v for k, v in out.items() if k not in unused and v is not None} | keep_off}
