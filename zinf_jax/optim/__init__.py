"""Optimizers: fused host kernels behind optax's interface, clipping, loss scale."""

from zinf_jax.optim import clipping, loss_scale
from zinf_jax.optim.generic import GenericBoundRule, GenericRule, as_rule
from zinf_jax.optim.kernels import Range, join_master, split_master, squared_norm, update
from zinf_jax.optim.rules import BoundRule, Rule
from zinf_jax.optim.streamed import StreamedState, streamed
from zinf_jax.optim.transforms import FusedTransformation, adagrad, adam, adamw, lion, partition, sgd

__all__ = [
    "BoundRule",
    "FusedTransformation",
    "GenericBoundRule",
    "GenericRule",
    "Range",
    "Rule",
    "StreamedState",
    "adagrad",
    "adam",
    "adamw",
    "as_rule",
    "clipping",
    "join_master",
    "lion",
    "loss_scale",
    "partition",
    "sgd",
    "split_master",
    "squared_norm",
    "streamed",
    "update",
]
