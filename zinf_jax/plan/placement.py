"""Which page of which kind of state lives on which tier."""

import dataclasses
from collections.abc import Sequence

from zinf_jax.errors import ConfigError
from zinf_jax.plan.shape import PageShape, Tier


@dataclasses.dataclass(frozen=True)
class PlacementOptions:
    """Tier per kind of state; None lets the planner choose within the budgets."""

    weights: Tier | None = None
    optimizer: Tier | None = None
    gradients: Tier | None = None
    residuals: Tier | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                try:
                    object.__setattr__(self, field.name, Tier(value))
                except ValueError:
                    raise ConfigError(
                        f"placement of {field.name} must be device, host, nvme or auto, got {value!r}"
                    ) from None


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
    tiers = PageTiers(
        options.weights or Tier.NVME, options.optimizer or Tier.NVME, options.gradients or Tier.NVME
    )  # fmt: skip
    return (tiers,) * len(pages)


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
            if num_bytes <= room_bytes:
                result[index] = dataclasses.replace(result[index], **{kind: Tier.HOST})
                room_bytes -= num_bytes
    return tuple(result)
