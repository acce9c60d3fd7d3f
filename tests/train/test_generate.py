"""Sampling, and that padding and the sliding window are what they claim."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zinf_jax.errors import ConfigError
from zinf_jax.models import decoder
from zinf_jax.train.generate import generate, sample

VOCAB = 11


def _next_is_sum(params, tokens):
    """The token after position i is the sum of tokens up to i, modulo VOCAB: sees everything before, nothing after."""
    return 50.0 * jax.nn.one_hot(jnp.cumsum(tokens, axis=1) % VOCAB, VOCAB)


def _evaluate(fn, batch):
    return fn(None, batch)


def _wanted(prompt, num_tokens, window):
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(sum(tokens[-window:]) % VOCAB)
    return tokens[len(prompt) :]


@pytest.mark.parametrize("window", [1, 3, 16])
@pytest.mark.parametrize("prompt", [[3], [1, 2, 3, 4, 5]])
def test_each_token_follows_from_the_window_before_it(window, prompt):
    got = list(generate(_evaluate, _next_is_sum, prompt, num_tokens=9, window=window, temperature=0))
    assert got == _wanted(prompt, 9, window)


def test_tokens_come_one_by_one_and_programs_are_shared():
    calls = []

    def evaluate(fn, batch):
        calls.append((fn, batch["tokens"].shape))
        return fn(None, batch)

    stream = generate(evaluate, _next_is_sum, [1], num_tokens=5, window=4)
    assert calls == []
    next(stream)
    assert len(calls) == 1
    list(stream)
    assert len(calls) == 5 and len(set(calls)) == 1


def test_the_same_seed_gives_the_same_text():
    spec = decoder(dim=16, num_layers=1, num_heads=2, vocab_size=VOCAB, seq_len=8)
    params = jax.jit(spec.init_fn)(jax.random.key(0))
    compiled = {}

    def evaluate(fn, batch):
        return compiled.setdefault(fn, jax.jit(fn))(params, batch)

    texts = [
        tuple(generate(evaluate, spec.logits_fn, [1], num_tokens=12, window=8, temperature=1.0, seed=seed))
        for seed in (0, 0, 1)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_sampling_follows_the_distribution():
    logits = np.log(np.array([0.1, 0.2, 0.0001, 0.6999]))
    rng = np.random.default_rng(0)
    counts = np.bincount([sample(logits, rng, temperature=1.0, top_k=None) for _ in range(20000)], minlength=4)
    np.testing.assert_allclose(counts / 20000, np.exp(logits), atol=0.015)
    counts = np.bincount([sample(logits, rng, temperature=1.0, top_k=2) for _ in range(20000)], minlength=4)
    np.testing.assert_allclose(counts / 20000, [0, 2 / 9, 0, 7 / 9], atol=0.015)
    cold = np.bincount([sample(logits, rng, temperature=0.5, top_k=None) for _ in range(20000)], minlength=4)
    np.testing.assert_allclose(cold / 20000, np.exp(2 * logits) / np.exp(2 * logits).sum(), atol=0.015)


def test_a_banned_token_is_never_sampled():
    logits = np.array([0.0, -np.inf, 1.0])
    rng = np.random.default_rng(0)
    assert 1 not in {sample(logits, rng, temperature=2.0, top_k=None) for _ in range(2000)}


@pytest.mark.parametrize(
    "wrong", [{"prompt": []}, {"window": 0}, {"temperature": -0.1}, {"top_k": 0}, {"num_tokens": -1}]
)
def test_wrong_values_are_refused_before_anything_runs(wrong):
    kwargs = {"prompt": [1], "num_tokens": 1, "window": 4} | wrong
    with pytest.raises(ConfigError):
        generate(_evaluate, _next_is_sum, kwargs.pop("prompt"), **kwargs)
