"""Text and batches: nothing lost, held-out text held out, and a place in the data that can be returned to."""

import json

import numpy as np
import pytest

from zinf_jax.errors import ConfigError
from zinf_jax.train import data, text
from zinf_jax.train.data import DataRequest, Windows, shuffled_batches
from zinf_jax.train.text import STDLIB, TextOptions, load_tokens


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    for i in range(12):
        (folder / f"doc_{i:02}.txt").write_text(f"document {i}: naïve café {i * i}\n" * (20 + i))
    return folder


def _options(source, **kwargs):
    return TextOptions(str(source), "*.txt", valid_every=4, **{"tokenizer": "bytes", **kwargs})


def _request(tmp_path, **kwargs):
    return DataRequest(
        **{"batch_size": 4, "seq_len": 16, "vocab_size": 512, "seed": 0, "cache_dir": tmp_path / "data"} | kwargs
    )


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_every_document_stands_in_one_split_unchanged(source, tmp_path, tokenizer):
    tokens = load_tokens(_options(source, tokenizer=tokenizer, vocab_size=300), tmp_path / "data")
    found = []
    for split in (tokens.train, tokens.valid):
        ends = np.flatnonzero(split == tokens.end_token)
        assert ends[-1] == len(split) - 1
        found.append(
            [tokens.decode(part[part != tokens.end_token].tolist()) for part in np.split(split, ends[:-1] + 1)]
        )
    paths = sorted(source.iterdir())
    assert found[0] == [p.read_text() for i, p in enumerate(paths) if i % 4 != 3]
    assert found[1] == [p.read_text() for i, p in enumerate(paths) if i % 4 == 3]
    assert int(max(tokens.train.max(), tokens.valid.max())) < tokens.vocab_size
    assert tokens.decode(tokens.encode("naïve ☃ text")) == "naïve ☃ text"


def test_a_run_keeps_its_text_when_the_sources_change(source, tmp_path):
    first = np.array(load_tokens(_options(source), tmp_path / "data").train)
    (source / "doc_00.txt").write_text("something else entirely\n")
    np.testing.assert_array_equal(load_tokens(_options(source), tmp_path / "data").train, first)
    other = load_tokens(_options(source, tokenizer="bpe", vocab_size=300), tmp_path / "data")
    assert other.vocab_size != 257 and not np.array_equal(other.train, first)
    np.testing.assert_array_equal(load_tokens(_options(source), tmp_path / "data").train, first)


def test_a_failure_leaves_nothing_half_done(source, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(text.np, "save", full)
    with pytest.raises(OSError, match="No space left"):
        load_tokens(_options(source), tmp_path / "data")
    assert list((tmp_path / "data").iterdir()) == []


def test_windows_cover_the_tokens_once():
    tokens = np.arange(100, dtype=np.uint16)
    windows = Windows(tokens, 7)
    rows = np.stack([windows[i]["tokens"] for i in range(len(windows))])
    assert rows.shape == (14, 8) and rows.dtype == np.int32
    np.testing.assert_array_equal(rows[:, :-1].ravel(), np.arange(98))
    np.testing.assert_array_equal(rows[:, 1:], rows[:, :-1] + 1)
    with pytest.raises(ConfigError, match="has 7 tokens, fewer than one row of 8"):
        Windows(tokens[:7], 7)


def test_each_epoch_has_every_row_once_in_another_order():
    windows = Windows(np.arange(81, dtype=np.uint16), 4)
    batches = shuffled_batches(windows, batch_size=5, seed=1)
    epochs = [np.concatenate([next(batches)["tokens"][:, 0] for _ in range(4)]) for _ in range(2)]
    for epoch in epochs:
        np.testing.assert_array_equal(np.sort(epoch), np.arange(0, 80, 4))
    assert not np.array_equal(*epochs)
    again = next(shuffled_batches(windows, batch_size=5, seed=1))["tokens"]
    np.testing.assert_array_equal(again[:, 0], epochs[0][:5])
    assert not np.array_equal(next(shuffled_batches(windows, batch_size=5, seed=2))["tokens"], again)


@pytest.mark.parametrize("num_before", [0, 1, 7])
def test_a_saved_place_continues_with_the_next_batch(num_before):
    windows = Windows(np.arange(81, dtype=np.uint16), 4)
    batches = shuffled_batches(windows, batch_size=3, seed=5)
    for _ in range(num_before):
        next(batches)
    place = json.loads(json.dumps(batches.get_state()))
    wanted = [next(batches)["tokens"] for _ in range(9)]
    resumed = shuffled_batches(windows, batch_size=3, seed=5)
    resumed.set_state(place)
    np.testing.assert_array_equal([next(resumed)["tokens"] for _ in range(9)], wanted)


def test_text_makes_batches_that_fit_the_model(source, tmp_path):
    made = data.text(
        _request(tmp_path), source=str(source), pattern="*.txt", tokenizer="bpe", valid_every=4, valid_rows=10
    )
    batch = next(made.train)["tokens"]
    assert batch.shape == (4, 17) and batch.dtype == np.int32 and batch.max() < 512
    assert [b["tokens"].shape for b in made.valid] == [(4, 17), (4, 17)]
    assert made.tokens_per_batch == 64 and "12 files" in made.description


def test_less_held_out_text_than_a_batch_makes_one_smaller_batch(source, tmp_path):
    made = data.text(
        _request(tmp_path), source=str(source), pattern="*.txt", tokenizer="bytes", valid_every=4, valid_rows=3
    )
    assert [b["tokens"].shape for b in made.valid] == [(3, 17)]


def test_one_long_file_is_split_too(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("call me ishmael. " * 5000)
    tokens = load_tokens(TextOptions(str(path), tokenizer="bytes"), tmp_path / "data")
    assert 0.03 < len(tokens.valid) / len(tokens.train) < 0.08


@pytest.mark.parametrize(
    ("kwargs", "request_kwargs", "message"),
    [
        ({"tokenizer": "words"}, {}, "'words': 'bpe' or 'bytes'"),
        ({"tokenizer": "bytes"}, {"vocab_size": 256}, "257 ids, the model only 256"),
        ({"vocab_size": 100}, {}, "at least 257"),
        ({"valid_every": 1}, {}, "got 1"),
        ({"pattern": "*.rs"}, {}, r"0 non-empty files that match '\*.rs'"),
        ({"tokenizer": "bytes"}, {"seq_len": 10**6}, "fewer than one row"),
        ({"tokenizer": "bytes"}, {"batch_size": 10**4}, "do not fill one batch of 10000"),
        ({}, {"seq_len": None}, "seq_len"),
    ],
)
def test_what_cannot_work_is_named(source, tmp_path, kwargs, request_kwargs, message):
    with pytest.raises(ConfigError, match=message):
        data.text(
            _request(tmp_path, **request_kwargs),
            **{"source": str(source), "pattern": "*.txt", "valid_every": 4} | kwargs,
        )


def test_the_standard_library_is_there():
    texts = text.documents(TextOptions(STDLIB))
    assert len(texts) > 300 and sum(map(len, texts)) > 5e6
