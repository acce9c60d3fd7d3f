"""`adamw`, `adam`, `lion`, `sgd`, `adagrad`: optax's signatures and results, fused on the host.

Each function returns optax's own transformation (its `init` and `update` are optax's, so plain optax loops work
unchanged) that also carries a `rule`: what the streaming executor runs in the host kernels instead. The kernels follow
optax's expressions and the way XLA:CPU rounds them when `update` and `optax.apply_updates` are jitted together, with
f32 state and an f32 master:

    adam     m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2;  u = m^ / (sqrt(v^ + eps_root) + eps)
             (Kingma and Ba 2015; nesterov: Dozat 2016);  m^, v^ with bias correction 1 - b^t
    lion     u = sign((1-b1) g + b1 m);  m = b2 m + (1-b2) g    (Chen et al. 2023)
    sgd      t = g + momentum t;  u = t, or g + momentum t with nesterov
    adagrad  s = s + g^2;  u = g / sqrt(s + eps)                (Duchi et al. 2011)
    p = p - learning_rate (u + weight_decay p)

Bias corrections come from the step count by XLA's own f32 power, never from a running product.

What cannot be fused (state in another dtype than f32) gives optax's plain transformation, which streams through the
generic path; a warning says so.
"""

import dataclasses
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import numpy as np
import optax

from zinf_jax.leaves import Leaf
from zinf_jax.optim import kernels
from zinf_jax.optim.rules import BoundRule, Rule, Scheduled, spread, trained_part

_LOG = logging.getLogger(__name__)

ScalarOrSchedule = Any  # float | array | Callable[[count], float]
Mask = Any  # pytree prefix of bools | Callable[[params], pytree] | None

# Positions in the coefficients of every kernel, and flags: as in kernels.inc.h.
_FLAGS, _NEGATIVE_RATE, _DECAY_RATE = 0, 1, 2
_DECAY, _NESTEROV, _MOMENTUM = 1, 2, 4
_ADAM, _LION, _SGD, _ADAGRAD = 0, 1, 2, 3


class FusedTransformation(optax.GradientTransformationExtraArgs):
    """An optax transformation that also says how the host kernels compute it."""

    rule: Rule

    @classmethod
    def of(cls, transformation: optax.GradientTransformation, rule: Rule) -> "FusedTransformation":
        extended = optax.with_extra_args_support(transformation)
        self = cls(extended.init, extended.update)
        self.rule = rule
        return self


@dataclasses.dataclass(frozen=True)
class FusedRule(Rule):
    """Base of the fused rules: `constants` and `scheduled` fill the kernel's coefficients."""

    learning_rate: ScalarOrSchedule
    weight_decay: ScalarOrSchedule = 0.0
    mask: Mask = None

    fused: ClassVar[bool] = True
    kernel: ClassVar[int]
    name: ClassVar[str]
    slots: ClassVar[tuple[str, ...]]

    def slot_init(self, slot: str) -> float:
        del slot
        return 0.0

    def flags(self) -> int:
        return 0

    def constants(self) -> dict[int, Any]:
        """Coefficients that do not depend on the count, besides learning rate and decay, by position."""
        return {}

    def scheduled(self) -> dict[int, Callable[[jax.Array], Any]]:
        """Those that do, as functions of the count."""
        return {}

    @property
    def decays(self) -> bool:
        """optax leaves the term out where the decay is a Python zero."""
        return not (isinstance(self.weight_decay, int | float) and self.weight_decay == 0.0)

    def bind(self, leaves: Sequence[Leaf], params_tree: Any) -> "FusedBoundRule":
        trained, params_tree = trained_part(leaves, params_tree)
        mask = True if self.mask is None else self.mask
        wanted = spread(mask, params_tree, "the weight decay mask")
        decayed = {leaf.index: self.decays and bool(want) for leaf, want in zip(trained, wanted, strict=True)}
        return FusedBoundRule(self, decayed)


class FusedBoundRule(BoundRule):
    """A fused rule for one tree. Coefficients are cached for the last few counts."""

    fused = True
    elementwise = True

    def __init__(self, rule: FusedRule, decayed: Mapping[int, bool]) -> None:
        self.rule, self.slots = rule, rule.slots
        self._decayed = dict(decayed)
        self._constants = np.zeros(kernels.NUM_COEFFICIENTS, np.float32)
        self._scheduled: dict[int, Scheduled] = {}
        self._cache: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._fill()

    def _fill(self) -> None:
        rate, decay = self.rule.learning_rate, self.rule.weight_decay
        values: dict[int, Any] = {_FLAGS: self.rule.flags(), **self.rule.constants()}
        functions = dict(self.rule.scheduled())
        if rate is None:
            values[_NEGATIVE_RATE] = 1.0  # optax: no scaling at all, not even of the sign
        elif callable(rate):
            functions[_NEGATIVE_RATE] = lambda count: -1 * rate(count)
        else:
            values[_NEGATIVE_RATE] = -1 * rate
        if callable(decay):
            functions[_DECAY_RATE] = decay
        else:
            values[_DECAY_RATE] = decay
        for position, value in values.items():
            self._constants[position] = np.float32(value)
        self._scheduled = {position: Scheduled(function) for position, function in functions.items()}

    def slot_init(self, slot: str) -> float:
        return self.rule.slot_init(slot)

    def coefficients(self, leaf_index: int, count: int) -> np.ndarray:
        """f32 [NUM_COEFFICIENTS], read-only, for `kernels.Range`.

        Args:
          leaf_index: `Leaf.index` of a trained leaf.
          count: Updates applied to it before this one.
        """
        return self._at(count)[self._decayed[leaf_index]]

    def _at(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        known = self._cache.get(count)
        if known is None:
            plain = self._constants.copy()
            for position, function in self._scheduled.items():
                plain[position] = function(count)
            with_decay = plain.copy()
            with_decay[_FLAGS] += _DECAY
            plain.flags.writeable = with_decay.flags.writeable = False
            while len(self._cache) >= 4:  # speculative and late updates use neighbouring counts
                del self._cache[next(iter(self._cache))]
            known = self._cache[count] = (plain, with_decay)
        return known

    def hyperparameters(self, count: int) -> dict[str, float]:
        if self.rule.learning_rate is None:
            return {}
        return {"learning_rate": -float(self._at(count)[0][_NEGATIVE_RATE])}


@dataclasses.dataclass(frozen=True)
class AdamRule(FusedRule):
    b1: Any = 0.9
    b2: Any = 0.999
    eps: Any = 1e-8
    eps_root: Any = 0.0
    nesterov: bool = False

    kernel: ClassVar[int] = _ADAM
    name: ClassVar[str] = "adam"
    slots: ClassVar[tuple[str, ...]] = ("mu", "nu")

    def flags(self) -> int:
        return _NESTEROV if self.nesterov else 0

    def constants(self) -> dict[int, Any]:
        return {3: self.b1, 4: 1 - self.b1, 5: self.b2, 6: 1 - self.b2, 9: self.eps_root, 10: self.eps}

    def scheduled(self) -> dict[int, Callable[[jax.Array], Any]]:
        # The gradient's correction (11) is for Nesterov, where optax corrects mu by one step more.
        later = 2 if self.nesterov else 1
        return {
            7: lambda count: 1 - self.b1 ** (count + later),
            8: lambda count: 1 - self.b2 ** (count + 1),
            11: lambda count: 1 - self.b1 ** (count + 1),
        }


@dataclasses.dataclass(frozen=True)
class LionRule(FusedRule):
    b1: Any = 0.9
    b2: Any = 0.99

    kernel: ClassVar[int] = _LION
    name: ClassVar[str] = "lion"
    slots: ClassVar[tuple[str, ...]] = ("mu",)

    def constants(self) -> dict[int, Any]:
        return {3: self.b1, 4: 1.0 - self.b1, 5: self.b2, 6: 1 - self.b2}


@dataclasses.dataclass(frozen=True)
class SgdRule(FusedRule):
    kernel: ClassVar[int] = _SGD
    name: ClassVar[str] = "sgd"
    slots: ClassVar[tuple[str, ...]] = ()


@dataclasses.dataclass(frozen=True)
class MomentumRule(FusedRule):
    momentum: Any = 0.9
    nesterov: bool = False

    kernel: ClassVar[int] = _SGD
    name: ClassVar[str] = "sgd with momentum"
    slots: ClassVar[tuple[str, ...]] = ("trace",)

    def flags(self) -> int:
        return _MOMENTUM | (_NESTEROV if self.nesterov else 0)

    def constants(self) -> dict[int, Any]:
        return {3: self.momentum}


@dataclasses.dataclass(frozen=True)
class AdagradRule(FusedRule):
    initial_accumulator_value: Any = 0.1
    eps: Any = 1e-7

    kernel: ClassVar[int] = _ADAGRAD
    name: ClassVar[str] = "adagrad"
    slots: ClassVar[tuple[str, ...]] = ("sum_of_squares",)

    def slot_init(self, slot: str) -> float:
        del slot
        return float(self.initial_accumulator_value)

    def constants(self) -> dict[int, Any]:
        return {3: self.eps}


def _fused_or_plain(
    transformation: optax.GradientTransformation, rule: Rule, state_dtype: Any
) -> optax.GradientTransformationExtraArgs:
    if state_dtype is not None and np.dtype(jax.dtypes.canonicalize_dtype(state_dtype)) != np.float32:
        _LOG.warning(
            "zinf.optim: %s with its state in %s is not fused and streams through the slower generic path; leave the "
            "dtype at None for the fused kernel with f32 state",
            rule.name,
            np.dtype(state_dtype).name,
        )
        return optax.with_extra_args_support(transformation)
    return FusedTransformation.of(transformation, rule)


def adamw(
    learning_rate: ScalarOrSchedule,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    eps_root: Any = 0.0,
    mu_dtype: Any = None,
    weight_decay: ScalarOrSchedule = 1e-4,
    mask: Mask = None,
    *,
    nesterov: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """`optax.adamw`, fused on the host: decoupled weight decay (Loshchilov and Hutter 2019)."""
    plain = optax.adamw(
        learning_rate, b1, b2, eps, eps_root, mu_dtype, weight_decay=weight_decay, mask=mask, nesterov=nesterov
    )
    rule = AdamRule(learning_rate, weight_decay, mask, b1, b2, eps, eps_root, nesterov)
    return _fused_or_plain(plain, rule, mu_dtype)


def adam(
    learning_rate: ScalarOrSchedule,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    eps_root: Any = 0.0,
    mu_dtype: Any = None,
    *,
    nesterov: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """`optax.adam`, fused on the host."""
    plain = optax.adam(learning_rate, b1, b2, eps, eps_root, mu_dtype, nesterov=nesterov)
    rule = AdamRule(learning_rate, b1=b1, b2=b2, eps=eps, eps_root=eps_root, nesterov=nesterov)
    return _fused_or_plain(plain, rule, mu_dtype)


def lion(
    learning_rate: ScalarOrSchedule,
    b1: Any = 0.9,
    b2: Any = 0.99,
    mu_dtype: Any = None,
    weight_decay: ScalarOrSchedule = 1e-3,
    mask: Mask = None,
) -> optax.GradientTransformationExtraArgs:
    """`optax.lion`, fused on the host."""
    plain = optax.lion(learning_rate, b1, b2, mu_dtype, weight_decay, mask)
    return _fused_or_plain(plain, LionRule(learning_rate, weight_decay, mask, b1, b2), mu_dtype)


def sgd(
    learning_rate: ScalarOrSchedule,
    momentum: Any = None,
    nesterov: bool = False,
    accumulator_dtype: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """`optax.sgd`, fused on the host. Without `momentum` it has no state."""
    plain = optax.sgd(learning_rate, momentum, nesterov, accumulator_dtype)
    if momentum is None:
        return _fused_or_plain(plain, SgdRule(learning_rate), None)
    rule = MomentumRule(learning_rate, momentum=momentum, nesterov=nesterov)
    return _fused_or_plain(plain, rule, accumulator_dtype)


def adagrad(
    learning_rate: ScalarOrSchedule,
    initial_accumulator_value: Any = 0.1,
    eps: Any = 1e-7,
) -> optax.GradientTransformationExtraArgs:
    """`optax.adagrad`, fused on the host."""
    plain = optax.adagrad(learning_rate, initial_accumulator_value, eps)
    rule = AdagradRule(learning_rate, initial_accumulator_value=initial_accumulator_value, eps=eps)
    return _fused_or_plain(plain, rule, None)


@dataclasses.dataclass(frozen=True)
class PartitionRule(Rule):
    """Several fused rules of one kernel, one per label: parameter groups."""

    members: Mapping[Hashable, FusedRule]
    labels: Any

    fused: ClassVar[bool] = True

    @property
    def _first(self) -> FusedRule:
        return next(iter(self.members.values()))

    @property
    def name(self) -> str:
        return f"partition of {self._first.name}"

    @property
    def kernel(self) -> int:
        return self._first.kernel

    @property
    def slots(self) -> tuple[str, ...]:
        return self._first.slots

    def bind(self, leaves: Sequence[Leaf], params_tree: Any) -> "PartitionBoundRule":
        trained, params_tree = trained_part(leaves, params_tree)
        labels = spread(self.labels, params_tree, "the tree of labels")
        unknown = {label for label in labels if label not in self.members}
        if unknown:
            raise ValueError(f"labels {sorted(map(str, unknown))} have no transformation; known: {list(self.members)}")
        treedef = jax.tree.structure(params_tree)
        avals = jax.tree.leaves(params_tree)
        bound: dict[int, FusedBoundRule] = {}
        by_label = {}
        for label, member in self.members.items():
            mine = [leaf for leaf, own in zip(trained, labels, strict=True) if own == label]
            # A member's mask sees what optax shows it: MaskedNode in place of the other groups.
            kept = [a if own == label else optax.MaskedNode() for a, own in zip(avals, labels, strict=True)]
            by_label[label] = member.bind(mine, jax.tree.unflatten(treedef, kept))
            bound.update((leaf.index, by_label[label]) for leaf in mine)
        return PartitionBoundRule(self, by_label, bound)


class PartitionBoundRule(BoundRule):
    """See `PartitionRule`. Metrics get one learning rate per label."""

    fused = True
    elementwise = True

    def __init__(
        self, rule: PartitionRule, by_label: Mapping[Hashable, FusedBoundRule], by_leaf: Mapping[int, FusedBoundRule]
    ) -> None:
        self.rule, self.slots = rule, rule.slots
        self._by_label, self._by_leaf = dict(by_label), dict(by_leaf)

    def slot_init(self, slot: str) -> float:
        return self.rule._first.slot_init(slot)

    def coefficients(self, leaf_index: int, count: int) -> np.ndarray:
        return self._by_leaf[leaf_index].coefficients(leaf_index, count)

    def hyperparameters(self, count: int) -> dict[str, float]:
        return {
            f"{key}/{label}": value
            for label, bound in self._by_label.items()
            for key, value in bound.hyperparameters(count).items()
        }


def partition(
    transforms: Mapping[Hashable, optax.GradientTransformation],
    param_labels: Any,
    *,
    mask_compatible_extra_args: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """`optax.partition` (formerly multi_transform): another transformation per parameter group.

    Fused where all members are transformations of this module that run in one kernel with the same slots, such as
    `adamw` and `adam` with their own learning rates; otherwise optax's, for the generic path, and a warning says so.
    """
    plain = optax.partition(transforms, param_labels, mask_compatible_extra_args=mask_compatible_extra_args)
    rules = {label: getattr(tx, "rule", None) for label, tx in transforms.items()}
    members = {label: rule for label, rule in rules.items() if isinstance(rule, FusedRule)}
    kinds = {(r.kernel, r.slots, tuple(r.slot_init(slot) for slot in r.slots)) for r in members.values()}
    if len(rules) != len(members) or len(kinds) != 1:
        _LOG.warning(
            "zinf.optim.partition: not fused, streams through the slower generic path; it is fused where every member "
            "is a zinf.optim transformation of the same kind and initial state, got %s",
            {label: rule.name if rule else "an optax transformation" for label, rule in rules.items()},
        )
        return plain
    return FusedTransformation.of(plain, PartitionRule(members, param_labels))
