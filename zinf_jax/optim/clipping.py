"""Exact clipping by the global norm, and the decision to skip. Pure functions of the leaves' fp64 sums of squares.

The kernels sum squares in fp64 (`kernels.squared_norm`); here they are added in leaf order, so the norm does not depend
on tiers, chunks or threads. A non-finite norm never becomes a factor (0 * inf is NaN, and poisons every parameter): it
says that the step must be skipped.
"""

import dataclasses
import math
from collections.abc import Iterable

import numpy as np


@dataclasses.dataclass(frozen=True)
class Clip:
    """What to do with the gradients of one step.

    Attributes:
      norm: Global norm of the averaged, unscaled gradient, before clipping. Not finite where `skip` is set.
      gradient_scale: What multiplies each stored gradient in f32: divides by the divisor and clips. 0 where `skip`.
      clipped: The norm was above the limit.
      skip: The gradients are not finite: change nothing.
    """

    norm: float
    gradient_scale: float
    clipped: bool
    skip: bool


def clip(squares: Iterable[float], divisor: float = 1.0, max_norm: float | None = None) -> Clip:
    """The global norm, and the factor that clips it.

    Args:
      squares: Sums of squares of the stored gradients, in leaf order (on a mesh: of the ranks' shards, in order of
        leaf, then rank).
      divisor: By what the stored gradients are too large: loss scale x sum of the micro-batches' weights. Zero (all
        weights are zero) gives a skip.
      max_norm: Limit of the norm, or None. A norm equal to the limit is not clipped.

    Raises:
      ValueError: `max_norm` is not positive.
    """
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f"max_norm must be positive, got {max_norm}; None turns clipping off")
    total = 0.0
    for square in squares:
        total += float(square)
    norm = math.sqrt(total) / divisor if divisor and total >= 0 else math.nan
    if not math.isfinite(norm):
        return Clip(norm, 0.0, clipped=False, skip=True)
    clipped = max_norm is not None and norm > max_norm
    factor = max_norm / norm if clipped and max_norm is not None else 1.0
    return Clip(norm, float(np.float32(factor / divisor)), clipped=clipped, skip=False)
