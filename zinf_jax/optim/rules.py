"""What the streaming executor sees of an optimizer: a `Rule`, bound to a table of leaves.

A `Rule` is a value (hyperparameters); `bind` resolves masks and labels once for one parameter tree. A fused rule runs
in the host kernels on any range of any leaf; the generic rule (`generic.py`) runs optax's own update through XLA.

`count` everywhere is optax's: the number of updates applied to the leaf before this one.
"""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from zinf_jax.errors import ConfigError
from zinf_jax.leaves import Leaf, LeafKind


class Rule(abc.ABC):
    """An optimizer as a value. `fused` says whether `zinf_jax.optim.kernels.update` runs it."""

    fused: ClassVar[bool]

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """For people."""

    @property
    def note(self) -> str | None:
        """What a user should know, such as "slower, because ..."."""
        return None

    @abc.abstractmethod
    def bind(self, leaves: Sequence[Leaf], params_tree: Any) -> "BoundRule":
        """Resolves masks, labels and state for one parameter tree.

        Args:
          leaves: The parameter table. Only trainable leaves are bound.
          params_tree: The parameter tree (arrays or `ShapeDtypeStruct`s), whole or with None in place of what is not
            trained. Callable masks and labels see f32 leaves where trained and None elsewhere, as optax would.

        Raises:
          ConfigError: `params_tree` does not match the table; a mask or label that does not fit.
        """


class BoundRule(abc.ABC):
    """A rule for one parameter tree.

    Attributes:
      slots: Names of the f32 vectors kept per element, in record order.
      elementwise: Any range of any leaf can be updated on its own.
    """

    fused: ClassVar[bool]
    slots: tuple[str, ...]
    elementwise: bool

    @abc.abstractmethod
    def slot_init(self, slot: str) -> float:
        """The value with which every element of a slot starts."""

    @abc.abstractmethod
    def hyperparameters(self, count: int) -> dict[str, float]:
        """What step `count` uses, for the metrics: `learning_rate` where there is one."""


def trained_part(leaves: Sequence[Leaf], params_tree: Any) -> tuple[tuple[Leaf, ...], Any]:
    """The trained leaves, and the tree that optax sees: f32 masters, None in place of all other leaves.

    Args:
      leaves: The parameter table.
      params_tree: The whole parameter tree, or only its trained leaves with nothing in place of the others.

    Raises:
      ConfigError: another number of leaves, or other shapes.
    """
    trained = tuple(leaf for leaf in leaves if leaf.kind is LeafKind.TRAINABLE)
    values, treedef = jax.tree.flatten(params_tree)
    if len(values) == len(leaves):
        shown: list[Leaf | None] = [leaf if leaf.kind is LeafKind.TRAINABLE else None for leaf in leaves]
    elif len(values) == len(trained):
        shown = list(trained)
    else:
        raise ConfigError(f"the optimizer's tree has {len(values)} leaves, {len(trained)} leaves are trained")
    for leaf, value in zip(shown, values, strict=True):
        if leaf is not None and leaf.shape != _shape(value):
            raise ConfigError(f"{leaf.name!r} has shape {leaf.shape}, but {_shape(value)} in the optimizer's tree")
    avals = [None if leaf is None else jax.ShapeDtypeStruct(leaf.shape, np.float32) for leaf in shown]
    return trained, jax.tree.unflatten(treedef, avals)


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(value.shape) if hasattr(value, "shape") else np.shape(value)


def spread(prefix: Any, params_tree: Any, what: str) -> list[Any]:
    """The value of a tree prefix (or of a callable that returns one) at each leaf of `params_tree`.

    Raises:
      ConfigError: `prefix` is no prefix of the tree.
    """
    tree = prefix(params_tree) if callable(prefix) else prefix
    try:
        full = jax.tree.map(lambda value, part: jax.tree.map(lambda _: value, part), tree, params_tree)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{what} does not fit the parameter tree: {error}") from error
    return jax.tree.leaves(full)


@dataclasses.dataclass(frozen=True)
class Scheduled:
    """A scalar that depends on the count, as XLA:CPU computes it inside a jitted optax update.

    Evaluated on the CPU whatever the default device is: a coefficient's bits must not depend on the accelerator.
    """

    function: Callable[[jax.Array], Any]

    def __post_init__(self) -> None:
        compiled = jax.jit(lambda count: jnp.asarray(self.function(count)).astype(jnp.float32))
        object.__setattr__(self, "_compiled", compiled)

    def __call__(self, count: int) -> np.float32:
        number = np.int32(min(count, np.iinfo(np.int32).max))
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            try:
                return np.float32(self._compiled(number))  # type: ignore[attr-defined]
            except jax.errors.ConcretizationTypeError:  # a schedule with Python control flow on the count
                return np.float32(self.function(jnp.asarray(number)))
