"""What the training program needs to know of a model. Any user's module can provide one; see `resolve`."""

import dataclasses
import importlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax

from zinf_jax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """A model as plain functions. Nothing is materialised until `init_fn` is called.

    Attributes:
      name: For people.
      init_fn: rng -> params. Used with `zinf.lazy`, so it must be traceable.
      loss_fn: (params, batch) -> loss, or (params, batch, rng) -> loss where `takes_rng`; may return `Weighted`.
        The batch is what the data factory yields; for `decoder` it is {"tokens": int32[B, T + 1]}.
      eval_loss_fn: (params, batch) -> loss without dropout; None: `loss_fn`, which then must not take an rng.
      logits_fn: (params, int32 tokens[B, T]) -> logits[B, T, vocab_size], causal; None: the model cannot generate.
      batch_fn: batch size -> a batch of `ShapeDtypeStruct`s, to plan with before there is data, or None.
      takes_rng: Whether `loss_fn` takes a third argument.
      vocab_size, seq_len: Sizes that the data must fit; None where they mean nothing.
    """

    name: str
    init_fn: Callable[[jax.Array], Any]
    loss_fn: Callable[..., Any]
    eval_loss_fn: Callable[[Any, Any], Any] | None = None
    logits_fn: Callable[[Any, Any], Any] | None = None
    batch_fn: Callable[[int], Any] | None = None
    takes_rng: bool = False
    vocab_size: int | None = None
    seq_len: int | None = None

    def __post_init__(self) -> None:
        if self.eval_loss_fn is None and self.takes_rng:
            raise ConfigError(f"model {self.name!r} takes an rng in its loss: give eval_loss_fn, a loss without one")

    @property
    def validation_loss_fn(self) -> Callable[[Any, Any], Any]:
        return self.loss_fn if self.eval_loss_fn is None else self.eval_loss_fn

    def num_params(self) -> int:
        """Elements of all leaves, from shapes alone."""
        leaves = jax.tree.leaves(jax.eval_shape(self.init_fn, jax.random.key(0)))
        return sum(math.prod(leaf.shape) for leaf in leaves)


def resolve(factory: str) -> Callable[..., Any]:
    """The function that `"package.module:function"` names.

    Raises:
      ConfigError: the text has another form, the module cannot be imported, or has no such function.
    """
    module_name, _, attribute = factory.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"factory is {factory!r}: write 'package.module:function'")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"factory {factory!r}: cannot import {module_name!r} ({error}); install it, or start from its folder"
        ) from error
    found = module
    for part in attribute.split("."):
        found = getattr(found, part, None)  # type: ignore[assignment]
    if not callable(found):
        raise ConfigError(f"factory {factory!r}: {module_name!r} has no function {attribute!r}")
    return found


def build(factory: str, kwargs: Mapping[str, Any] | None = None) -> ModelSpec:
    """Calls the factory that the config names.

    Raises:
      ConfigError: see `resolve`; arguments that the factory does not take; a result that is not a `ModelSpec`.
    """
    spec = call(factory, kwargs or {})
    if not isinstance(spec, ModelSpec):
        raise ConfigError(f"model factory {factory!r} returned {type(spec).__name__}: it must return a ModelSpec")
    return spec


def call(factory: str, kwargs: Mapping[str, Any], **extra: Any) -> Any:
    """Calls the function that `factory` names; a wrong argument is the user's mistake and named as such."""
    function = resolve(factory)
    try:
        return function(**kwargs, **extra)
    except TypeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is None:  # The call itself, not its body.
            raise ConfigError(f"factory {factory!r} cannot be called with {sorted(kwargs)}: {error}") from error
        raise
