"""Static and dynamic loss scale for fp16, with DeepSpeed's semantics. State in, state out.

The dynamic scale halves at an overflow, once `hysteresis` overflows have been tolerated (the last tolerated one halves
it), and doubles after `window` steps in a row without one. Source: DeepSpeed 0.19, `runtime/fp16/loss_scaler.py`;
unlike there, an overflow at the minimal scale raises nothing here: the trainer stops after too many skips in a row.
"""

import dataclasses
from typing import Any, Protocol


class Options(Protocol):
    """The `fp16` section of the config."""

    @property
    def loss_scale(self) -> float: ...
    @property
    def initial_scale_power(self) -> int: ...
    @property
    def loss_scale_window(self) -> int: ...
    @property
    def hysteresis(self) -> int: ...
    @property
    def consecutive_hysteresis(self) -> bool: ...
    @property
    def min_loss_scale(self) -> float: ...


@dataclasses.dataclass(frozen=True)
class LossScale:
    """A loss scale and what its next value depends on.

    Attributes:
      scale: What the loss of the next step is multiplied by.
      dynamic: False: `scale` stays.
      window: Steps without overflow after which it doubles.
      hysteresis: Overflows up to the one that halves it.
      consecutive_hysteresis: Steps without overflow refill the hysteresis at once, not only when the scale doubles.
      min_scale: It never falls below.
      hysteresis_left: Overflows left, the next halving one included.
      iteration: Steps seen, skipped ones included.
      last_overflow: Iteration of the last overflow; -1: none.
    """

    scale: float = 2.0**16
    dynamic: bool = True
    window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_scale: float = 1.0
    hysteresis_left: int = 2
    iteration: int = 0
    last_overflow: int = -1

    def __post_init__(self) -> None:
        if not self.scale > 0:
            raise ValueError(f"the loss scale must be positive, got {self.scale}")
        if self.window < 1 or self.hysteresis < 1:
            raise ValueError(f"window and hysteresis must be at least 1, got {self.window} and {self.hysteresis}")


def static(scale: float) -> LossScale:
    """A scale that never changes."""
    return LossScale(float(scale), dynamic=False)


def dynamic(
    initial_scale_power: int = 16,
    *,
    window: int = 1000,
    hysteresis: int = 2,
    consecutive_hysteresis: bool = False,
    min_scale: float = 1.0,
) -> LossScale:
    """A scale that starts at `2 ** initial_scale_power`."""
    return LossScale(
        2.0**initial_scale_power,
        window=window,
        hysteresis=hysteresis,
        consecutive_hysteresis=consecutive_hysteresis,
        min_scale=float(min_scale),
        hysteresis_left=hysteresis,
    )


def create(options: Options) -> LossScale:
    """From the config: static where `loss_scale` is not 0."""
    if options.loss_scale:
        return static(options.loss_scale)
    return dynamic(
        options.initial_scale_power,
        window=options.loss_scale_window,
        hysteresis=options.hysteresis,
        consecutive_hysteresis=options.consecutive_hysteresis,
        min_scale=options.min_loss_scale,
    )


def update(state: LossScale, *, overflow: bool) -> LossScale:
    """The state after a step; `overflow`: it was skipped."""
    if not state.dynamic:
        return state
    scale, left, last = state.scale, state.hysteresis_left, state.last_overflow
    if overflow:
        if left == 1:
            scale = max(scale / 2, state.min_scale)
        else:
            left -= 1
        last = state.iteration
    else:
        grows = (state.iteration - last) % state.window == 0
        if state.consecutive_hysteresis or grows:
            left = state.hysteresis
        if grows:
            scale *= 2
    return dataclasses.replace(
        state, scale=scale, hysteresis_left=left, last_overflow=last, iteration=state.iteration + 1
    )


def to_json(state: LossScale) -> dict[str, Any]:
    """JSON-able values, for the commit record."""
    return dataclasses.asdict(state)


def from_json(values: dict[str, Any]) -> LossScale:
    """The inverse of `to_json`.

    Raises:
      ValueError: unknown or missing keys.
    """
    known = {field.name for field in dataclasses.fields(LossScale)}
    if set(values) != known:
        raise ValueError(f"a stored loss scale has keys {sorted(values)}, expected {sorted(known)}")
    return LossScale(**values)
