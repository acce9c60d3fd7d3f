"""How a user's loss function is called and what it returns.

loss_fn(params[, state], batch[, rng])
    -> loss | Weighted | (loss, aux) | (loss, new_state) | (loss, (new_state, aux))
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from zinf_jax.errors import ConfigError
from zinf_jax.train.weighted import Weighted


class Parts(NamedTuple):
    """A loss function's output, taken apart. `weight`, `state` and `aux` are None where it has none."""

    loss: Any
    weight: Any
    state: Any
    aux: Any


@dataclasses.dataclass(frozen=True)
class LossSignature:
    """What a loss function takes and returns."""

    has_state: bool
    has_aux: bool
    wants_rng: bool

    @classmethod
    def of(cls, loss_fn: Callable[..., Any], *, has_state: bool, has_aux: bool) -> "LossSignature":
        """Finds out from the function's own signature whether it takes an rng.

        Raises:
          ConfigError: it takes too few or too many arguments.
        """
        base = 3 if has_state else 2
        names = "(params, state, batch[, rng])" if has_state else "(params, batch[, rng])"
        try:
            parameters = list(inspect.signature(loss_fn).parameters.values())
        except (TypeError, ValueError):
            return cls(has_state, has_aux, wants_rng=False)
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        positional = [p for p in parameters if p.kind in kinds]
        required = [p for p in positional if p.default is inspect.Parameter.empty]
        variadic = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)
        named_rng = len(positional) > base and positional[base].name in ("rng", "key", "rngs")
        if len(required) > base + 1 or (len(positional) < base and not variadic):
            raise ConfigError(f"loss_fn must take {names}, got {inspect.signature(loss_fn)}")
        return cls(has_state, has_aux, wants_rng=len(required) == base + 1 or named_rng)

    def arguments(self, state: Any, batch: Any, rng: Any) -> tuple[Any, ...]:
        """What follows `params`."""
        return (*((state,) if self.has_state else ()), batch, *((rng,) if self.wants_rng else ()))

    def split(self, output: Any) -> Parts:
        """Takes an output tree apart.

        Raises:
          ConfigError: it does not have the parts that were announced.
        """
        loss: Any = output
        rest: Any = None
        if self.has_state or self.has_aux:
            expected = (
                "(loss, (new_state, aux))"
                if self.has_state and self.has_aux
                else ("(loss, new_state)" if self.has_state else "(loss, aux)")
            )
            if isinstance(output, Weighted) or not isinstance(output, tuple) or len(output) != 2:
                raise ConfigError(f"loss_fn must return {expected}, got {type(output).__name__}")
            loss, rest = output
        state, aux = None, rest
        if self.has_state:
            state, aux = rest if self.has_aux and isinstance(rest, tuple) else (rest, None)
        weight = None
        if isinstance(loss, Weighted):
            loss, weight = loss
        return Parts(loss, weight, state, aux)
