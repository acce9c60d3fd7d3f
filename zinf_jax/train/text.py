"""Text that every machine has, and the tokens made of it.

The texts are the Python standard library's sources of the running interpreter, or files of the user's own. They are
tokenised once, into a folder of the run: byte-level BPE trained on the spot, or plain bytes. A resumed run reads that
folder, so its data stays the same even if the interpreter, the sources or `tokenizers` change in between.

    cache_dir/KEY/meta.json       what was asked for; KEY is its hash, so other options never replace what a run reads
    cache_dir/KEY/tokenizer.json  BPE only
    cache_dir/KEY/train.npy       uint16 or uint32 tokens, documents ended by `end_token`, in the order of their paths
    cache_dir/KEY/valid.npy       likewise: every `valid_every`-th document
"""

import dataclasses
import hashlib
import json
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from zinf_jax.errors import ConfigError

END_OF_TEXT = "<|endoftext|>"
STDLIB = "stdlib"
# Not code that a person wrote to be read: tests, tables of characters, documentation in one string, what pip put there.
_STDLIB_LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "encodings", "pydoc_data", "lib2to3", "ensurepip"}


@dataclasses.dataclass(frozen=True)
class TextOptions:
    """What text, and how it becomes tokens.

    Attributes:
      source: "stdlib", or a file or folder.
      pattern: For a folder: which files, as in `Path.rglob`.
      tokenizer: "bpe", trained on the training documents, or "bytes".
      vocab_size: Upper limit of BPE's vocabulary.
      valid_every: Every this-many-th document is held out.
    """

    source: str = STDLIB
    pattern: str = "*.py"
    tokenizer: str = "bpe"
    vocab_size: int = 8192
    valid_every: int = 20

    def __post_init__(self) -> None:
        if self.tokenizer not in ("bpe", "bytes"):
            raise ConfigError(f"data: tokenizer is {self.tokenizer!r}: 'bpe' or 'bytes'")
        if self.vocab_size < 257:
            raise ConfigError(
                f"data: vocab_size must be at least 257 (256 bytes and end of text), got {self.vocab_size}"
            )
        if self.valid_every < 2:
            raise ConfigError(f"data: valid_every must be at least 2, got {self.valid_every}")


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Tokenised text of one run.

    Attributes:
      train, valid: 1-D arrays of token ids, mapped from their files.
      vocab_size: Ids are below this.
      end_token: Ends each document.
      num_documents, num_bytes: Of the text, both splits together.
      encode: text -> ids.
      decode: ids -> text. What is no valid UTF-8 comes as U+FFFD.
    """

    train: np.ndarray
    valid: np.ndarray
    vocab_size: int
    end_token: int
    num_documents: int
    num_bytes: int
    encode: Callable[[str], list[int]] = dataclasses.field(repr=False)
    decode: Callable[[Sequence[int]], str] = dataclasses.field(repr=False)


def documents(options: TextOptions) -> list[bytes]:
    """The texts, sorted by path.

    Raises:
      ConfigError: there are not at least two, one for each split.
    """
    if options.source == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        paths = [p for p in root.rglob("*.py") if not _STDLIB_LEFT_OUT & set(p.relative_to(root).parts)]
    else:
        root = Path(options.source)
        paths = [root] if root.is_file() else [p for p in root.rglob(options.pattern) if p.is_file()]
    texts = [p.read_bytes() for p in sorted(paths)]
    texts = [text for text in texts if text.strip()]
    if len(texts) == 1:  # One long file: cut into pieces, so that some can be held out.
        (text,) = texts
        size = max(1, -(-len(text) // (4 * options.valid_every)))
        texts = [text[start : start + size] for start in range(0, len(text), size)]
    if len(texts) < options.valid_every:
        raise ConfigError(
            f"data: {str(root)!r} has {len(texts)} non-empty files that match {options.pattern!r}, fewer than "
            f"valid_every ({options.valid_every}): name another source or pattern"
        )
    return texts


def load_tokens(options: TextOptions, cache_dir: Path) -> Tokens:
    """The tokens under `cache_dir`, made first if they are not there.

    Raises:
      ConfigError: see `documents`.
    """
    asked = json.dumps(dataclasses.asdict(options), sort_keys=True)
    folder = cache_dir / f"{options.tokenizer}-{hashlib.sha256(asked.encode()).hexdigest()[:12]}"
    if not folder.exists():
        _make(options, folder)
    meta = json.loads((folder / "meta.json").read_text())
    codec: _Codec = _Bytes() if options.tokenizer == "bytes" else _Bpe.loaded(folder)
    return Tokens(
        train=np.load(folder / "train.npy", mmap_mode="r", allow_pickle=False),
        valid=np.load(folder / "valid.npy", mmap_mode="r", allow_pickle=False),
        vocab_size=codec.vocab_size,
        end_token=codec.end_token,
        num_documents=meta["num_documents"],
        num_bytes=meta["num_bytes"],
        encode=codec.encode,
        decode=codec.decode,
    )


def _make(options: TextOptions, folder: Path) -> None:
    """Fills a new folder beside `folder` and renames it: a run that dies here leaves nothing half done."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _fill(options, building)
        try:
            os.rename(building, folder)
        except OSError:
            if not folder.exists():  # Else another process was faster; what it made is the same.
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _fill(options: TextOptions, folder: Path) -> None:
    texts = documents(options)
    held_out = [i % options.valid_every == options.valid_every - 1 for i in range(len(texts))]
    splits = {
        "train": [text for text, out in zip(texts, held_out, strict=True) if not out],
        "valid": [text for text, out in zip(texts, held_out, strict=True) if out],
    }
    codec: _Codec = _Bytes() if options.tokenizer == "bytes" else _Bpe.trained(splits["train"], options.vocab_size)
    codec.save(folder)
    dtype = np.uint16 if codec.vocab_size <= 1 << 16 else np.uint32
    for name, docs in splits.items():
        pieces = [np.asarray([*ids, codec.end_token], dtype) for ids in codec.encode_all(docs)]
        np.save(folder / f"{name}.npy", np.concatenate(pieces), allow_pickle=False)
    meta = {
        "options": dataclasses.asdict(options),
        "num_documents": len(texts),
        "num_bytes": sum(map(len, texts)),
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")


class _Codec(Protocol):
    vocab_size: int
    end_token: int

    def encode(self, text: str) -> list[int]: ...
    def encode_all(self, documents: Sequence[bytes]) -> Iterator[Sequence[int]]: ...
    def decode(self, ids: Sequence[int]) -> str: ...
    def save(self, folder: Path) -> None: ...


class _Bytes:
    vocab_size = 257
    end_token = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_all(self, documents: Sequence[bytes]) -> Iterator[Sequence[int]]:
        return map(list, documents)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def save(self, folder: Path) -> None:
        pass


class _Bpe:
    """Byte-level BPE: every text can be encoded, and decodes to itself."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = tokenizer.get_vocab_size()
        self.end_token = tokenizer.token_to_id(END_OF_TEXT)

    @classmethod
    def trained(cls, texts: Sequence[bytes], vocab_size: int) -> "_Bpe":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(map(_text, texts), trainer)
        return cls(tokenizer)

    @classmethod
    def loaded(cls, folder: Path) -> "_Bpe":
        return cls(Tokenizer.from_file(str(folder / "tokenizer.json")))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def encode_all(self, documents: Sequence[bytes]) -> Iterator[Sequence[int]]:
        # A few at a time: the encodings of all documents at once take about 100 bytes per byte of text.
        for start in range(0, len(documents), 64):
            for encoding in self._tokenizer.encode_batch_fast([_text(doc) for doc in documents[start : start + 64]]):
                yield encoding.ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids))
        return text

    def save(self, folder: Path) -> None:
        self._tokenizer.save(str(folder / "tokenizer.json"))


def _text(document: bytes) -> str:
    return document.decode("utf-8", errors="replace")
