"""Which page of which kind of state lives on which tier."""

import dataclasses
from collections.abc import Sequence

from zinf_jax.errors import ConfigError
from zinf_jax.plan.shape import PageShape, Tier
from zinf_jax.units import format_bytes


@dataclasses.dataclass(frozen=True)
class PlacementOptions:
    """Tier per kind of state; None lets the planner choose within the budgets.

    Attributes:
      weights, optimizer, gradients, residuals: Their tiers.
      optimizer_fraction: Share of the optimizer state that `optimizer` (or the planner's choice) is about: whole pages
        in their order until it is reached. The rest is on the device tier.
      weights_host_cache: Bytes of the weights on NVMe that are kept on the host instead: pages in their order, each
        that still fits.
    """

    weights: Tier | None = None
    optimizer: Tier | None = None
    gradients: Tier | None = None
    residuals: Tier | None = None
    optimizer_fraction: float = 1.0
    weights_host_cache: int = 0

    def __post_init__(self) -> None:
        for kind in ("weights", "optimizer", "gradients", "residuals"):
            value = getattr(self, kind)
            if value is not None:
                try:
                    object.__setattr__(self, kind, Tier(value))
                except ValueError:
                    raise ConfigError(
                        f"placement of {kind} must be device, host, nvme or auto, got {value!r}"
                    ) from None
        if not 0 <= self.optimizer_fraction <= 1:
            raise ConfigError(f"optimizer_fraction must be from 0 to 1, got {self.optimizer_fraction}")
        if self.weights_host_cache < 0:
            raise ConfigError(f"weights_host_cache must not be negative, got {self.weights_host_cache}")

    def advice(self, kind: str) -> str:
        """How to need less host memory for a kind of state."""
        if kind == "weights" and self.weights is not Tier.HOST and self.weights_host_cache:
            return f"lower weights_host_cache ({format_bytes(self.weights_host_cache)})"
        if kind == "optimizer" and self.optimizer is not Tier.DEVICE and self.optimizer_fraction < 1:
            return f"raise optimizer_fraction ({self.optimizer_fraction:g}), with optimizer on nvme"
        return f"put {kind} on nvme"


@dataclasses.dataclass(frozen=True)
class PageTiers:
    """Where one page's kinds of state live."""

    weights: Tier
    optimizer: Tier
    gradients: Tier


# What a byte of host memory saves in NVMe traffic per step: weights are read twice and read and written once more by
# the update (4 transfers), a gradient and a record are written and read once (2).
_PROMOTION_ORDER = ("weights", "gradients", "optimizer")

BYTES_OF = {"weights": "weights_bytes", "optimizer": "record_bytes", "gradients": "gradient_bytes"}
"""Kind of state -> the `PageShape` field that holds its bytes."""


def floor_tiers(pages: Sequence[PageShape], options: PlacementOptions) -> tuple[PageTiers, ...]:
    """The lowest tier that the options allow: explicit ones as given, NVMe where the planner may choose."""
    weights, optimizer = options.weights or Tier.NVME, options.optimizer or Tier.NVME
    wanted = round(options.optimizer_fraction * sum(page.record_bytes for page in pages))
    room = options.weights_host_cache if weights is Tier.NVME else 0
    tiers, placed = [], 0
    for page in pages:
        cached = page.weights_bytes <= room
        room -= page.weights_bytes if cached else 0
        tiers.append(
            PageTiers(
                Tier.HOST if cached and weights is Tier.NVME else weights,
                optimizer if placed < wanted or not page.record_bytes else Tier.DEVICE,
                options.gradients or Tier.NVME,
            )
        )
        placed += page.record_bytes
    return tuple(tiers)


def promote(
    pages: Sequence[PageShape], tiers: Sequence[PageTiers], options: PlacementOptions, room_bytes: int
) -> tuple[PageTiers, ...]:
    """Moves what the planner may choose from NVMe to the host while `room_bytes` lasts, the most useful first."""
    result = list(tiers)
    for kind in _PROMOTION_ORDER:
        if getattr(options, kind) is not None:
            continue
        for index, page in enumerate(pages):
            num_bytes = getattr(page, BYTES_OF[kind])
            if num_bytes <= room_bytes and getattr(result[index], kind) is Tier.NVME:
                result[index] = dataclasses.replace(result[index], **{kind: Tier.HOST})
                room_bytes -= num_bytes
    return tuple(result)
