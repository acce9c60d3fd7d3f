"""Text from a model whose weights are streamed: every token is one forward pass over all units.

The window has a fixed length, so that one set of programs serves all tokens: the text stands at its left end, what
follows is padding, which a causal model cannot see. When the window is full it moves along with the text.

Known gap: there is no key-value cache, so a token costs a pass over the whole window. When weights come from NVMe,
reading them costs the same with a cache, which is why the plain way is here first.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from zinf_jax.errors import ConfigError

Evaluate = Callable[[Callable[[Any, Any], Any], Any], Any]


def generate(
    evaluate: Evaluate,
    logits_fn: Callable[[Any, Any], Any],
    prompt: Sequence[int],
    *,
    num_tokens: int,
    window: int,
    temperature: float = 0.8,
    top_k: int | None = 40,
    seed: int = 0,
) -> Iterator[int]:
    """Continues `prompt`, token by token. The same arguments give the same tokens.

    Args:
      evaluate: (fn, batch) -> fn(params, batch): `trainer.evaluate`.
      logits_fn: (params, int32 tokens[B, T]) -> logits[B, T, V], causal.
      prompt: At least one token id; what exceeds the window is cut off at its start.
      num_tokens: How many to yield.
      window: Tokens that the model sees, at most its `seq_len`.
      temperature: 0 takes the likeliest token; 1 samples from the model's own distribution.
      top_k: Sample only among the likeliest `top_k` tokens; None: among all.
      seed: Of the sampling.

    Yields:
      Token ids, each as soon as it is known.

    Raises:
      ConfigError: an empty prompt, or values out of range.
    """
    if not prompt:
        raise ConfigError("generate: the prompt has no tokens; start with the end-of-text token, or give a prompt")
    if num_tokens < 0 or window < 1 or temperature < 0 or (top_k is not None and top_k < 1):
        raise ConfigError(
            f"generate: needs num_tokens >= 0, window >= 1, temperature >= 0 and top_k >= 1 (or none), got "
            f"{num_tokens}, {window}, {temperature} and {top_k}"
        )
    return _generate(evaluate, last_logits(logits_fn), list(prompt), num_tokens, window, temperature, top_k, seed)


@functools.cache  # The same object again: what was compiled for it is found again.
def last_logits(logits_fn: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """(params, {"tokens": int32[1, T], "last": int32[1]}) -> logits[1, V] that follow token `last`."""

    def fn(params: Any, batch: Any) -> Any:
        logits = logits_fn(params, batch["tokens"])
        return logits[:, batch["last"][0], :]

    return fn


def _generate(
    evaluate: Evaluate,
    fn: Callable[[Any, Any], Any],
    tokens: list[int],
    num_tokens: int,
    window: int,
    temperature: float,
    top_k: int | None,
    seed: int,
) -> Iterator[int]:
    rng = np.random.default_rng(seed)
    for _ in range(num_tokens):
        seen = tokens[-window:]
        row = np.zeros((1, window), np.int32)
        row[0, : len(seen)] = seen
        logits = evaluate(fn, {"tokens": row, "last": np.array([len(seen) - 1], np.int32)})
        token = sample(np.asarray(logits, np.float64)[0], rng, temperature=temperature, top_k=top_k)
        tokens.append(token)
        yield token


def sample(logits: np.ndarray, rng: np.random.Generator, *, temperature: float, top_k: int | None) -> int:
    """One token id from float64 logits[V]. Draws one number from `rng` unless `temperature` is 0."""
    if temperature == 0:
        return int(np.argmax(logits))
    if top_k is not None and top_k < len(logits):
        smallest = np.partition(logits, -top_k)[-top_k]
        logits = np.where(logits >= smallest, logits, -np.inf)
    weights = np.exp((logits - np.max(logits)) / temperature)
    bounds = np.cumsum(weights)
    return int(np.searchsorted(bounds, rng.random() * bounds[-1], side="right"))
