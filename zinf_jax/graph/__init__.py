"""From a traced function to a linear sequence of units. Pure: no device, no weights.

`cut_function` traces and cuts; `keep_residuals` changes what backward computes again; `interpret` runs the result in
memory, for tests. `lazy` makes initial parameters page by page.
"""

from zinf_jax.graph.cut import cut_function
from zinf_jax.graph.keep import POLICIES, RematPolicy, keep_residuals
from zinf_jax.graph.types import Program, Unit, UnitGraph, ValueId

__all__ = [
    "POLICIES", "Program", "RematPolicy", "Unit", "UnitGraph", "ValueId", "cut_function", "keep_residuals",
]  # fmt: skip
