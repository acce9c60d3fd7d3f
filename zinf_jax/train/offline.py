"""What can be done with a config or a run without training: print its plan, continue a text."""

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import jax

from zinf_jax import config as config_module
from zinf_jax.config import Config
from zinf_jax.errors import ConfigError, ResumeError
from zinf_jax.models import ModelSpec
from zinf_jax.plan import Plan
from zinf_jax.train import setup
from zinf_jax.train.data import Data
from zinf_jax.train.recipe import (
    CONFIG_FILE,
    LoopOptions,
    batch_size_of,
    build_data,
    build_model,
    first_batch,
    make_trainer,
    sample_tokens,
    with_saves,
)
from zinf_jax.train.shutdown import Shutdown
from zinf_jax.train.signature import LossSignature
from zinf_jax.train.source import find_latest


def plan(config: Config) -> Plan:
    """The plan of a training step, made as `run` makes it but for what needs memory and disk.

    Raises:
      ConfigError, CutError: the config cannot work.
      PlanError: it does not fit; the message holds the table.
    """
    config = with_saves(config)
    spec = build_model(config)
    topology = setup.make_topology(config, None)
    abstract = jax.eval_shape(spec.init_fn, jax.random.key(config.seed))
    signature = LossSignature.of(spec.loss_fn, has_state=False, has_aux=False)
    optimizer = config_module.build_optimizer(config)
    batch, rng = _abstract_batch(config, spec), jax.random.key(config.seed)
    return setup.build_step(
        spec.loss_fn, signature, abstract, config, topology, optimizer, batch, rng=rng,
        durability=setup.Durability.of(config, has_run_dir=True),
    ).setup.plan()  # fmt: skip


def _abstract_batch(config: Config, spec: ModelSpec) -> Any:
    batch_size = batch_size_of(config)
    if spec.batch_fn is not None:
        return setup.abstract_of(spec.batch_fn(batch_size))
    with tempfile.TemporaryDirectory(prefix="zinf-plan-") as folder:
        return setup.abstract_of(first_batch(build_data(config, spec, Path(folder), batch_size)))


def generate(
    path: str | Path,
    prompt: str = "",
    *,
    num_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = 40,
    seed: int = 0,
    out: TextIO | None = None,
) -> None:
    """Continues a text with a trained model and writes it as it comes; weights are streamed as in training.

    Args:
      path: A run's directory, or one of its checkpoints.
      prompt: Text to continue; empty: a new text.
      num_tokens, temperature, top_k, seed: See `zinf_jax.train.generate`.
      out: Where to; None: stdout. SIGINT ends the text.

    Raises:
      ResumeError: there is no run at `path`, or it has nothing to resume from.
      OwnerError: the run is being trained. One of its checkpoints can be used meanwhile.
      ConfigError: its model cannot generate, or its data is no text.
    """
    path, out = Path(path).absolute(), out or sys.stdout
    run_dir = next((p for p in (path, path.parent.parent) if (p / CONFIG_FILE).exists()), None)
    if run_dir is None:
        raise ResumeError(f"{path} is not a run directory or one of its checkpoints: there is no {CONFIG_FILE}")
    config = config_module.load(run_dir / CONFIG_FILE)
    spec = build_model(config)
    options = LoopOptions(temperature=temperature, top_k=top_k)
    with Shutdown() as shutdown, _resting_trainer(config, spec, run_dir, path) as trainer:
        data = build_data(config, spec, run_dir, batch_size_of(config))
        trainer.prepare(first_batch(data))
        tokens = sample_tokens(trainer, spec, data, options, prompt=prompt, num_tokens=num_tokens, seed=seed)
        out.write(prompt)
        for text in _texts(tokens, data):
            out.write(text)
            out.flush()
            if shutdown.requested:
                break
        out.write("\n")


@contextlib.contextmanager
def _resting_trainer(config: Config, spec: ModelSpec, run_dir: Path, path: Path) -> Iterator[Any]:
    """A trainer on the run itself, or on a copy of one of its checkpoints that goes away afterwards."""
    if path == run_dir:
        if find_latest(run_dir) is None:
            raise ResumeError(f"{run_dir} holds no trained model yet")
        with make_trainer(config, spec, run_dir, resume="auto") as trainer:
            yield trainer
        return
    with (
        tempfile.TemporaryDirectory(prefix=".generate-", dir=run_dir) as folder,
        make_trainer(config, spec, Path(folder), resume=str(path)) as trainer,
    ):
        yield trainer


def _texts(tokens: Iterator[int], data: Data) -> Iterator[str]:
    """Pieces of text as soon as they are whole: the bytes of a character can come in several tokens."""
    if data.decode is None:
        raise ConfigError("the data set has no decode: its tokens are no text")
    ids: list[int] = []
    shown = 0
    for token in tokens:
        ids.append(token)
        text = data.decode(ids)
        if not text.endswith("\ufffd"):
            yield text[shown:]
            shown = len(text)
    yield data.decode(ids)[shown:]


__all__ = ["generate", "plan"]
