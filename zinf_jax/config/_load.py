"""Loading: read, apply overrides, translate DeepSpeed's keys, validate. One path for every format."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from zinf_jax.config import _deepspeed, _files, _reference
from zinf_jax.config._deepspeed_keys import KEYS, OLD_SPELLINGS, RENAMED_TOP, SECTIONS
from zinf_jax.config._errors import from_validation
from zinf_jax.config._schema import Config
from zinf_jax.errors import ConfigError

_DEEPSPEED_TOP = {path.partition(".")[0] for path in (*KEYS, *OLD_SPELLINGS, *SECTIONS)} | set(RENAMED_TOP)
_NATIVE_TOP = set(Config.model_fields)


def load(source: str | Path | Mapping[str, Any] | Config, overrides: Sequence[str] | Mapping[str, Any] = ()) -> Config:
    """The config from a file, a dict or a config.

    Args:
      source: Path (.yaml, .yml, .json, .gin), nested dict, or a `Config`.
      overrides: `KEY=VALUE` texts, or a dict of dotted paths; they win over the source.

    Raises:
      ConfigError: unreadable, unknown or misplaced keys (with the right one), wrong values (with key path, value and
        remedy), values that contradict each other.
    """
    changes = dict(overrides) if isinstance(overrides, Mapping) else dict(map(_files.parse_override, overrides))
    if isinstance(source, Config):
        if not changes:
            return source
        return load(_without_none(source.to_dict()), changes).model_copy(update={"notes": source.notes})
    if isinstance(source, Mapping):
        raw, where = _copy(source), ""
    elif isinstance(source, str | Path):
        raw, where = _files.read(Path(source)), f"config {str(source)!r}: "
    else:
        raise ConfigError(f"config is a path, a dict or a zinf.Config, not {type(source).__name__}")
    try:
        return _build(raw, changes)
    except ConfigError as error:
        raise ConfigError(f"{where}{error}") from None


def _build(raw: dict[str, Any], changes: Mapping[str, Any]) -> Config:
    if not all(isinstance(key, str) for key in raw):
        raise ConfigError(f"keys are text, got {[key for key in raw if not isinstance(key, str)]}")
    late = {}
    for path, value in changes.items():
        if path.partition(".")[0] in _NATIVE_TOP - _DEEPSPEED_TOP:
            late[path] = value  # over what DeepSpeed's keys are translated to
        else:
            _files.set_path(raw, path, value)
    notes: list[str] = []
    known = _known_paths()
    raw = {key: value for key, value in raw.items() if value is not None}
    if "notes" in raw:
        raise ConfigError("notes: not a key; it is made by loading")
    native, sources = _deepspeed.translate(raw, known, notes)
    for path, value in late.items():
        _files.set_path(native, path, value)
    try:
        config = Config.model_validate(native, context={"notes": notes})
    except ValidationError as error:
        raise from_validation(error, _help_texts(), known=known, sources=sources) from None
    notes += _section_notes(raw)
    notes += _version_notes(config)
    if config.placement.optimizer_fraction == 0:
        placement = config.placement.model_copy(update={"optimizer": "device", "optimizer_fraction": 1.0})
        config = config.model_copy(update={"placement": placement})
    return config.model_copy(update={"notes": tuple(dict.fromkeys(notes))})


def _version_notes(config: Config) -> list[str]:
    """What this version does less well than asked; none of it changes a result."""
    notes = []
    weights = config.placement.weights
    if config.placement.weights_host_cache and weights not in ("nvme", None):
        notes.append(f"placement.weights_host_cache is not used: placement.weights is {weights}, not nvme")
    return notes


def _section_notes(raw: Mapping[str, Any]) -> list[str]:
    return [
        f"{name}.enabled is not given, so {name} is off"
        for name in ("bf16", "fp16")
        if isinstance(raw.get(name), Mapping) and "enabled" not in raw[name]
    ]


_known_paths = functools.cache(_reference.known_paths)
_help_texts = functools.cache(_reference.help_texts)


def _copy(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {key: _copy(value) for key, value in tree.items()}
    return [_copy(value) for value in tree] if isinstance(tree, list) else tree


def _without_none(tree: Any) -> Any:
    return (
        {key: _without_none(value) for key, value in tree.items() if value is not None}
        if isinstance(tree, dict)
        else tree
    )
