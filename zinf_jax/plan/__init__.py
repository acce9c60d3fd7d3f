"""L2: what lives where, and when it moves: pure functions of shapes and hardware figures."""

from zinf_jax.plan.placement import BYTES_OF, PageTiers, PlacementOptions
from zinf_jax.plan.plan import BudgetItem, Chunk, Plan, Prediction, Span
from zinf_jax.plan.planner import make_plan, plan_evaluation
from zinf_jax.plan.schedule import Phase, Position, Residency, ValueLife
from zinf_jax.plan.shape import Freed, Hardware, PageShape, StepShape, StreamOptions, Tier, UnitShape

__all__ = [
    "BYTES_OF",
    "BudgetItem",
    "Chunk",
    "Freed",
    "Hardware",
    "PageShape",
    "PageTiers",
    "Phase",
    "PlacementOptions",
    "Plan",
    "Position",
    "Prediction",
    "Residency",
    "Span",
    "StepShape",
    "StreamOptions",
    "Tier",
    "UnitShape",
    "ValueLife",
    "make_plan",
    "plan_evaluation",
]
