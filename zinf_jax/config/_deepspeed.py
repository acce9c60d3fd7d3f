"""Maps a DeepSpeed configuration onto the config's own keys.

The table of `_deepspeed_keys` says what becomes of each key; this module finds the keys, checks their values and
records the notes; `_deepspeed_map` sets the native ones.
Keys that both vocabularies have (`optimizer`, `fp16`, `train_batch_size` ...) pass through untouched.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from zinf_jax.config import _deepspeed_keys as table
from zinf_jax.config._deepspeed_map import Translation
from zinf_jax.config._errors import combined, problem, unknown
from zinf_jax.config._types import AUTO, Count, Dtype, NonNegative
from zinf_jax.errors import ConfigError

_KINDS: dict[str, TypeAdapter[Any]] = {
    "count": TypeAdapter(Count),
    "bool": TypeAdapter(bool),
    "number": TypeAdapter(NonNegative),
    "text": TypeAdapter(str),
    "paths": TypeAdapter(str | list[str]),
    "dtype": TypeAdapter(Dtype | None),
    "any": TypeAdapter(Any),
}


def translate(raw: Mapping[str, Any], known: Iterable[str], notes: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The tree with DeepSpeed's keys replaced by native ones; `notes` grows.

    Returns:
      The tree, and for each native path that was set: the DeepSpeed key it came from.

    Raises:
      ConfigError: an unknown key inside a DeepSpeed section, a value of the wrong kind, a key that would change what is
        trained, a key under two names, or a DeepSpeed key beside the native one that it sets.
    """
    native, problems = dict(raw), list[str]()
    for old, new in table.RENAMED_TOP.items():
        if old in native:
            _move(native, old, new, notes)
    if isinstance(zero := native.get("zero_optimization"), bool):
        native["zero_optimization"] = {"stage": int(zero)}
        notes.append(f"zero_optimization: {str(zero).lower()} is a deprecated spelling of stage {int(zero)}")
    found = _collect(native, set(known), notes, problems)
    if problems:
        raise combined(problems)
    translation = Translation(native, found, notes)
    translation.apply("zero_optimization" in raw)
    return native, translation.sources


def _move(tree: dict[str, Any], old: str, new: str, notes: list[str]) -> None:
    if new in tree:
        raise ConfigError(f"{old} and {new} are two spellings of one key: keep {new}")
    tree[new] = tree.pop(old)
    notes.append(f"{old} is an old spelling of {new}")


def _collect(native: dict[str, Any], known: set[str], notes: list[str], problems: list[str]) -> dict[str, Any]:
    """Takes DeepSpeed's keys out of `native`: path -> checked value. Notes and refusals are dealt with here."""
    found: dict[str, Any] = {}

    def take(path: str, value: Any) -> None:
        path = _canonical(path, found, notes, problems)
        if path in found:
            return
        found[path] = None
        try:
            found[path] = _checked(table.KEYS[path], value, notes)
        except ConfigError as error:
            problems.append(str(error))

    def walk(section: str, tree: Any) -> None:
        if tree is None or tree is False or tree == {}:
            return
        if not isinstance(tree, Mapping):
            problems.append(problem(section, tree, "is a section: keys and values"))
            return
        for key, value in tree.items():
            path = f"{section}.{key}"
            if path in table.SECTIONS:
                walk(path, value)
            elif path in table.KEYS or path in table.OLD_SPELLINGS:
                take(path, value)
            else:
                problems.append(unknown(path, known))

    for section in ("zero_optimization", "data_types"):
        if section in native:
            walk(section, native.pop(section))
    for key in [key for key in native if key in table.KEYS]:
        take(key, native.pop(key))
    for section in {path.partition(".")[0] for path in (key.path for key in table.SHARED_KEYS)}:
        if isinstance(native.get(section), Mapping):
            native[section] = dict(native[section])
            for key in [key for key in native[section] if f"{section}.{key}" in table.KEYS]:
                take(f"{section}.{key}", native[section].pop(key))
    return found


def _canonical(path: str, found: Mapping[str, Any], notes: list[str], problems: list[str]) -> str:
    new = table.OLD_SPELLINGS.get(path, path)
    if new != path:
        notes.append(f"{path} is another spelling of {new}")
    if new in found:
        problems.append(f"{path} and {new} are two spellings of one key: keep {new}")
    return new


def _checked(key: table.Key, value: Any, notes: list[str]) -> Any:
    """The value in its type, `"auto"` resolved.

    Raises:
      ConfigError: wrong kind, or refused.
    """
    if value == AUTO:
        value = AUTO if key.path.endswith(".device") else key.default
        if value not in (None, AUTO):
            notes.append(f"{key.path}: 'auto' is {value}")
    elif value is not None or key.kind not in ("any", "dtype"):
        try:
            value = _KINDS[key.kind].validate_python(value)
        except ValidationError as error:
            what = error.errors()[0]["msg"].removeprefix("Value error, ").replace("Input should be", "should be")
            raise ConfigError(problem(key.path, value, what, f"It {key.reason}" if key.to else "")) from None
    if key.refuse is not None and _active(value) not in key.harmless:
        raise ConfigError(problem(key.path, value, f"is not supported: {key.refuse}"))
    if key.to is None:
        notes.append(f"{key.path} has no meaning here: {key.reason if key.note else 'it is off'}")
    return value


def _active(value: Any) -> Any:
    """What a section asks for: its `enabled`, or whether it asks for anything at all."""
    if not isinstance(value, Mapping):
        return value
    if "enabled" in value:
        return bool(value["enabled"])
    if set(value) & {"autotp_size", "tp_size"}:
        return any(value.get(key, 1) not in (0, 1) for key in ("autotp_size", "tp_size"))
    return bool(value)
