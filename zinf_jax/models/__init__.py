"""Models as plain functions: the interface that a config's `model.factory` fulfils, and one decoder.

A config names a factory, `model: {factory: "zinf_jax.models:decoder", kwargs: {size: 25m}}`; any importable
`module:function` that returns a `ModelSpec` works the same way.
"""

from zinf_jax.models._decoder import SIZES, Decoder, DecoderConfig, decoder, next_token_loss, spec_of
from zinf_jax.models._spec import ModelSpec, build, call, resolve

__all__ = [
    "SIZES",
    "Decoder",
    "DecoderConfig",
    "ModelSpec",
    "build",
    "call",
    "decoder",
    "next_token_loss",
    "resolve",
    "spec_of",
]
