"""Global-norm clipping and the loss scale: pure functions."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.reference import LossScale as ReferenceLossScale
from zinf_jax.optim import clipping, kernels, loss_scale


def test_clips_by_the_norm_of_what_is_applied() -> None:
    """NU06: gradients (3, 4), limit 1 -> (0.6, 0.8)."""
    gradient = np.array([3, 4], np.float32)
    clip = clipping.clip([kernels.squared_norm(gradient)], max_norm=1.0)
    assert clip.norm == 5.0 and clip.clipped and not clip.skip
    np.testing.assert_array_equal(gradient * np.float32(clip.gradient_scale), np.array([0.6, 0.8], np.float32))


def test_no_clipping_leaves_the_gradient_exactly() -> None:
    assert clipping.clip([9.0, 16.0], max_norm=5.0) == clipping.Clip(5.0, 1.0, clipped=False, skip=False)
    assert clipping.clip([9.0, 16.0]).gradient_scale == 1.0
    assert clipping.clip([]) == clipping.Clip(0.0, 1.0, clipped=False, skip=False)


def test_loss_scale_and_weights_are_divided_out() -> None:
    """NU03: micro gradients (3, 0) and (0, 4) at loss scale 1024, sum of weights 2: norm 2.5."""
    clip = clipping.clip([(3 * 1024.0) ** 2, (4 * 1024.0) ** 2], divisor=1024.0 * 2, max_norm=1.0)
    assert clip.norm == 2.5 and clip.gradient_scale == float(np.float32(1 / 2.5 / 2048))


@pytest.mark.parametrize("square", [math.inf, math.nan])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_non_finite_norm_is_a_skip(square: float, max_norm: float | None) -> None:
    """NU07: never 0 x inf."""
    clip = clipping.clip([1.0, square], max_norm=max_norm)
    assert clip.skip and not math.isfinite(clip.norm) and clip.gradient_scale == 0.0


def test_no_weight_at_all_is_a_skip() -> None:
    assert clipping.clip([4.0], divisor=0.0).skip


def test_limit_must_be_positive() -> None:
    with pytest.raises(ValueError, match="got 0"):
        clipping.clip([1.0], max_norm=0)


@given(
    st.lists(st.booleans(), max_size=60),
    st.integers(1, 5),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([0.25, 1.0, 2.0**15]),
)
def test_loss_scale_follows_the_reference(
    overflows: list[bool], window: int, hysteresis: int, consecutive: bool, min_scale: float
) -> None:
    options = SimpleNamespace(
        loss_scale=0.0,
        initial_scale_power=16,
        loss_scale_window=window,
        hysteresis=hysteresis,
        consecutive_hysteresis=consecutive,
        min_loss_scale=min_scale,
    )
    state = loss_scale.create(options)
    expected = ReferenceLossScale(2.0**16, window, hysteresis, min_scale, consecutive)
    for overflow in overflows:
        state = loss_scale.from_json(json.loads(json.dumps(loss_scale.to_json(state))))
        state = loss_scale.update(state, overflow=overflow)
        expected.update(overflow)
        assert state.scale == expected.scale


def test_loss_scale_by_hand() -> None:
    state = loss_scale.dynamic(4, window=2, hysteresis=2)
    scales = []
    for overflow in (True, True, True, False, False, False, False, True):
        state = loss_scale.update(state, overflow=overflow)
        scales.append(state.scale)
    # The first overflow is tolerated, the next two halve; two good steps double and refill the tolerance.
    assert scales == [16, 8, 4, 4, 8, 8, 16, 16]


def test_static_scale_stays() -> None:
    state = loss_scale.create(SimpleNamespace(loss_scale=128.0))  # type: ignore[arg-type]
    assert loss_scale.update(state, overflow=True) is state and state.scale == 128.0


def test_bad_values_are_refused() -> None:
    with pytest.raises(ValueError, match="positive"):
        loss_scale.static(0.0)
    with pytest.raises(ValueError, match="window"):
        loss_scale.dynamic(window=0)
    with pytest.raises(ValueError, match="keys"):
        loss_scale.from_json({"scale": 1.0})
