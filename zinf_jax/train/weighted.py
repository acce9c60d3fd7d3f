"""The loss of a micro-batch together with how much it counts."""

from typing import Any, NamedTuple


class Weighted(NamedTuple):
    """What a loss function returns when its micro-batches do not all count the same.

    The loss of a step is `sum(weight_i * loss_i) / sum(weight_i)` over its micro-batches, and so is its gradient:
    with `loss` a mean over tokens and `weight` the number of tokens, that is the mean over all tokens of the step
    (a plain average of means over-weights the tokens of short micro-batches).

    Attributes:
      loss: Scalar, floating; the only thing that is differentiated.
      weight: Scalar; a count or a floating value. Not differentiated.
    """

    loss: Any
    weight: Any
