"""What a config says to train, made: model, data, trainer. Shared by training, planning and generation."""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from pydantic import TypeAdapter, ValidationError

from zinf_jax import models
from zinf_jax.config import Config
from zinf_jax.errors import ConfigError
from zinf_jax.graph.lazy import lazy
from zinf_jax.models import ModelSpec
from zinf_jax.train.data import Data, DataRequest
from zinf_jax.train.generate import generate
from zinf_jax.train.setup import make_topology
from zinf_jax.train.trainer import Trainer

CONFIG_FILE = "config.yaml"  # in a run directory: the config as it was resolved
DATA_DIR = "data"
TEXT_FACTORY = "zinf_jax.train.data:text"


@dataclasses.dataclass(frozen=True)
class LoopOptions:
    """The loop's own options: the config's `train.extra`.

    Attributes:
      valid_every: Steps between validations; 0: only before the first step and after the last.
      max_minutes: Training stops, as after a signal but with its sample, once it took so long; None: no limit.
      keep_last: Saves that are kept; older ones are removed once a newer one is complete.
      keep_every: Saves of steps that are multiples of it are kept for ever; 0: none.
      temperature, top_k: Of samples; see `generate`.
      window: Tokens that a sample is generated from; None: what prompt and sample need, at most the model's `seq_len`.
    """

    valid_every: int = 0
    max_minutes: float | None = None
    keep_last: int = 2
    keep_every: int = 0
    temperature: float = 0.8
    top_k: int | None = 40
    window: int | None = None

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> "LoopOptions":
        """Raises ConfigError: an unknown option, or a value out of range."""
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(extra) - known)
        if unknown:
            raise ConfigError(f"train.extra.{unknown[0]}: unknown option; there are {', '.join(sorted(known))}")
        try:
            options = TypeAdapter(cls).validate_python(dict(extra))
        except ValidationError as error:
            first = error.errors()[0]
            raise ConfigError(f"train.extra.{first['loc'][0]}: {first['msg']}, got {first['input']!r}") from None
        if options.valid_every < 0 or options.keep_last < 1 or options.keep_every < 0:
            raise ConfigError(
                "train.extra: needs valid_every >= 0, keep_last >= 1 and keep_every >= 0, got "
                f"{options.valid_every}, {options.keep_last} and {options.keep_every}"
            )
        return options


def build_model(config: Config) -> ModelSpec:
    """Calls the model factory that the config names."""
    return models.build(config.model.factory, config.model.kwargs)


def build_data(config: Config, spec: ModelSpec, run_dir: Path, batch_size: int) -> Data:
    """Calls the data factory that the config names.

    Raises:
      ConfigError: see `models.resolve` and the factory; a result that is not `Data`.
    """
    request = DataRequest(batch_size, spec.seq_len, spec.vocab_size, config.seed, run_dir / DATA_DIR)
    factory = config.data.factory or TEXT_FACTORY
    data = models.call(factory, config.data.kwargs, request=request)
    if not isinstance(data, Data):
        raise ConfigError(f"data factory {factory!r} returned {type(data).__name__}: it must return a Data")
    return data


def batch_size_of(config: Config) -> int:
    """Rows of a step's batch.

    Raises:
      ConfigError: the config does not say.
    """
    size = config.batch_sizes(make_topology(config, None).batch_ways).train
    if size is None:
        raise ConfigError("no batch size: set train_batch_size, or train_micro_batch_size_per_gpu")
    return size


def with_saves(config: Config) -> Config:
    """With the space for the steps that the loop keeps in place, which is reserved at the start."""
    if not config.train.save_every or config.streaming.num_retained:
        return config
    kept = LoopOptions.of(config.train.extra).keep_last
    streaming = config.streaming.model_copy(update={"num_retained": kept})
    return config.model_copy(update={"streaming": streaming})


def make_trainer(config: Config, spec: ModelSpec, run_dir: Path | None, **kwargs: Any) -> Trainer:
    """A trainer for the config's model, which is initialised page by page."""
    params = lazy(spec.init_fn, jax.random.key(config.seed))
    return Trainer(spec.loss_fn, params, None, config, rng=jax.random.key(config.seed), run_dir=run_dir, **kwargs)


def first_batch(data: Data) -> Any:
    """The next batch, which stays the next."""
    place = data.train.get_state()
    batch = next(data.train)  # type: ignore[call-overload]
    data.train.set_state(place)
    return batch


def sample_tokens(
    trainer: Trainer, spec: ModelSpec, data: Data, options: LoopOptions, *, prompt: str, num_tokens: int, seed: int
) -> Iterator[int]:
    """Token ids that continue `prompt` (or begin a text), streamed.

    Raises:
      ConfigError: the model cannot generate, or the data is no text.
    """
    if spec.logits_fn is None or data.encode is None:
        raise ConfigError(f"{spec.name} cannot generate text: its spec needs logits_fn, its data encode and decode")
    start = data.encode(prompt) or ([] if data.end_token is None else [data.end_token])
    window = options.window or min(spec.seq_len or 1 << 30, len(start) + num_tokens)
    return generate(
        trainer.evaluate, spec.logits_fn, start,
        num_tokens=num_tokens, window=window, temperature=options.temperature, top_k=options.top_k, seed=seed,
    )  # fmt: skip
