"""From tokens to batches: the interface that a config's `data.factory` fulfils, and the text data set.

A factory is called as `factory(request, **kwargs)` and returns a `Data`. Its training batches are an endless iterator
whose place in the data is a small JSON value; the loop keeps that value in `trainer.user_state`, so a resumed run
goes on with the batch that would have come next. Grain's iterators have this interface as they are.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import grain
import numpy as np

from zinf_jax.errors import ConfigError
from zinf_jax.train.text import TextOptions, Tokens, load_tokens


class Batches(Protocol):
    """Endless batches with a place that can be saved."""

    def __next__(self) -> Any: ...

    def get_state(self) -> dict[str, Any]:
        """JSON-able: where the next batch is."""

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues where `state` was taken."""


@dataclasses.dataclass(frozen=True)
class DataRequest:
    """What the training program asks of a data set.

    Attributes:
      batch_size: Rows of a batch: all micro-batches of a step.
      seq_len: Tokens that the model reads per row, or None if the model does not say.
      vocab_size: Ids must be below this, or None if the model does not say.
      seed: Of the order.
      cache_dir: A folder of the run's own, for what should be made once and stay the same in a resumed run.
    """

    batch_size: int
    seq_len: int | None
    vocab_size: int | None
    seed: int
    cache_dir: Path

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError(f"data: batch_size must be at least 1, got {self.batch_size}")


@dataclasses.dataclass(frozen=True)
class Data:
    """A data set, ready to train on.

    Attributes:
      train: The batches.
      valid: Held-out batches; may be empty.
      tokens_per_batch: For tokens per second.
      description: One line for people.
      encode, decode: Text to token ids and back; None where the data is no text.
      end_token: Starts a sample without a prompt.
    """

    train: Batches
    valid: Sequence[Any]
    tokens_per_batch: int
    description: str
    encode: Callable[[str], list[int]] | None = None
    decode: Callable[[Sequence[int]], str] | None = None
    end_token: int | None = None


class Windows:
    """Rows of `seq_len` + 1 tokens from one long array: the last token of a row is the first of the next.

    A random-access source for grain. Row i is int32[seq_len + 1]; what is left over at the end is not used.
    """

    def __init__(self, tokens: np.ndarray, seq_len: int) -> None:
        if len(tokens) < seq_len + 1:
            raise ConfigError(f"data: a split has {len(tokens)} tokens, fewer than one row of {seq_len + 1}")
        self._tokens, self._seq_len = tokens, seq_len

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._seq_len

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        start = index * self._seq_len
        return {"tokens": self._tokens[start : start + self._seq_len + 1].astype(np.int32)}


def shuffled_batches(source: Any, *, batch_size: int, seed: int) -> Batches:
    """Endless batches of a random-access source; every epoch is another permutation. A pure function of its arguments.

    Raises:
      ConfigError: the source has fewer rows than one batch.
    """
    if len(source) < batch_size:
        raise ConfigError(f"data: {len(source)} rows do not fill one batch of {batch_size}: use less or more text")
    dataset = grain.MapDataset.source(source).seed(seed).shuffle().repeat().batch(batch_size)
    # One batch ahead, in a thread; no processes: nothing may fork once JAX has started.
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)))


def text(
    request: DataRequest,
    *,
    source: str = TextOptions.source,
    pattern: str = TextOptions.pattern,
    tokenizer: str = TextOptions.tokenizer,
    vocab_size: int | None = None,
    valid_every: int = TextOptions.valid_every,
    valid_rows: int = 64,
) -> Data:
    """The data factory for text: the standard library's sources, or the user's files.

    Args:
      request: From the training program.
      source, pattern, tokenizer, valid_every: See `TextOptions`.
      vocab_size: Of a BPE tokenizer; None: as many as the model has.
      valid_rows: At most so many held-out rows.

    Returns:
      Batches {"tokens": int32[batch_size, seq_len + 1]}.

    Raises:
      ConfigError: the model has no sequence length, fewer ids than the tokenizer makes, or there is too little text.
    """
    if request.seq_len is None:
        raise ConfigError("data: text needs a model with a seq_len")
    size = vocab_size or request.vocab_size or TextOptions.vocab_size
    options = TextOptions(source, pattern, tokenizer, 257 if tokenizer == "bytes" else size, valid_every)
    tokens = load_tokens(options, request.cache_dir)
    if request.vocab_size is not None and tokens.vocab_size > request.vocab_size:
        raise ConfigError(
            f"data: the tokenizer has {tokens.vocab_size} ids, the model only {request.vocab_size}: lower the data's "
            f"vocab_size or raise the model's"
        )
    return Data(
        train=shuffled_batches(
            Windows(tokens.train, request.seq_len), batch_size=request.batch_size, seed=request.seed
        ),
        valid=_valid_batches(tokens, request, valid_rows),
        tokens_per_batch=request.batch_size * request.seq_len,
        description=_describe(tokens, options),
        encode=tokens.encode,
        decode=tokens.decode,
        end_token=tokens.end_token,
    )


def _valid_batches(tokens: Tokens, request: DataRequest, valid_rows: int) -> list[dict[str, np.ndarray]]:
    """Whole batches, evenly spread over the held-out text; one of another size if there is less than a batch."""
    assert request.seq_len is not None
    windows = Windows(tokens.valid, min(request.seq_len, len(tokens.valid) - 1))
    num_rows = min(valid_rows, len(windows))
    num_rows = max(num_rows - num_rows % request.batch_size, min(num_rows, request.batch_size))
    rows = [windows[i * len(windows) // num_rows]["tokens"] for i in range(num_rows)]
    return [
        {"tokens": np.stack(rows[start : start + request.batch_size])}
        for start in range(0, num_rows, request.batch_size)
    ]


def _describe(tokens: Tokens, options: TextOptions) -> str:
    what = "the Python standard library" if options.source == "stdlib" else options.source
    return (
        f"{what}: {tokens.num_documents} files, {tokens.num_bytes / 1e6:.1f} MB, vocabulary {tokens.vocab_size} "
        f"({options.tokenizer}), {len(tokens.train) / 1e6:.2f}M tokens to train on, "
        f"{len(tokens.valid) / 1e6:.2f}M held out"
    )
