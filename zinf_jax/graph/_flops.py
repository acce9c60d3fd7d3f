"""FLOPs of an equation, counted as the roofline people do: 2 per multiply-add of matmuls and convolutions, no more."""

import math

from zinf_jax.graph import _jaxpr
from zinf_jax.graph._jaxpr import Block, Eqn


def flops_of(eqn: Eqn) -> int:
    """Estimated FLOPs of one run of an equation; of a `while` loop, of one turn."""
    name = eqn.primitive.name
    if name == "dot_general":
        (contract, _), _ = eqn.params["dimension_numbers"]
        left = eqn.invars[0].aval.shape
        return 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(left[dim] for dim in contract)
    if name == "conv_general_dilated":
        kernel = eqn.invars[1].aval.shape
        out_features = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
        return 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(kernel) // max(out_features, 1)
    if (scan := _jaxpr.scan_of(eqn)) is not None:
        return scan.length * _block_flops(scan.body)
    if (branches := _jaxpr.branches_of(eqn)) is not None:
        return max(map(_block_flops, branches))
    return sum(_block_flops(_jaxpr.open_block(inner)) for inner in _jaxpr.inner_jaxprs(eqn.params))


def _block_flops(block: Block) -> int:
    return sum(flops_of(eqn) for eqn in block.eqns)
