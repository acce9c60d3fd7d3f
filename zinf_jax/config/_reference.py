"""The list of all keys, made from the schema itself: for help texts, error remedies, suggestions and the docs."""

import dataclasses
import enum
import types
import typing
from typing import Any

from zinf_jax.config import _deepspeed_keys as table
from zinf_jax.config._optimizer import OPTIMIZERS, SCHEDULERS
from zinf_jax.config._schema import Config
from zinf_jax.config._types import AUTO, REFUSE, Section
from zinf_jax.units import format_bytes


class Fate(enum.Enum):
    """What becomes of a DeepSpeed key."""

    MAPPED = "mapped"
    NOTED = "no meaning here"
    REFUSED = "refused if on"


@dataclasses.dataclass(frozen=True)
class Entry:
    """One key: dotted path, values, default, meaning, and what `"auto"` becomes ("refused" if it cannot be)."""

    path: str
    values: str
    default: str
    auto: str
    text: str


def section_of(annotation: Any) -> type[Section] | None:
    """The section class of a key that is one, optional or not."""
    options = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    found = [option for option in options if isinstance(option, type) and issubclass(option, Section)]
    return found[0] if found else None


def entries() -> tuple[Entry, ...]:
    """All native keys, in the schema's order."""
    return tuple(_walk(Config, ""))


def _walk(section: type[Section], prefix: str) -> list[Entry]:
    out = []
    for name, field in section.model_fields.items():
        if field.exclude:
            continue
        path = prefix + name
        nested = section_of(field.annotation)
        if nested is not None:
            out += _walk(nested, path + ".")
            continue
        default = "required" if field.is_required() else _show(path, field.get_default(call_default_factory=True))
        meaning = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        target = meaning.get("auto", REFUSE if field.is_required() else field.get_default(call_default_factory=True))
        auto = (
            "refused" if target == REFUSE else "by the plan or the batches" if target is None else _show(path, target)
        )
        text = " ".join((field.description or "").split())
        out.append(Entry(path, _values(path, field.annotation), default, auto, text))
    return out


def _show(path: str, value: Any) -> str:
    if value is None:
        return "none" if path == "train.steps" else AUTO
    if isinstance(value, bool):
        return str(value).lower()
    if path.endswith("_bytes") or path == "aio.block_size":
        return format_bytes(value)
    return (
        "[]" if value == () else str(list(value)) if isinstance(value, tuple) else str(value) if value != "" else "''"
    )


def _values(path: str, annotation: Any) -> str:
    if typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        parts = [_values(path, part) for part in typing.get_args(annotation) if part is not type(None)]
        return " | ".join([*parts, AUTO])
    if typing.get_origin(annotation) is typing.Literal:
        return " | ".join(str(value) for value in typing.get_args(annotation))
    if typing.get_origin(annotation) is tuple:
        return "list of names" if path.endswith("_policy") else "text or list"
    if annotation is int and (path.endswith(("_bytes", "_memory", "_cache")) or path == "aio.block_size"):
        return "bytes"
    if typing.get_origin(annotation) is dict:
        return "section"
    return {int: "integer", float: "number", bool: "true | false", str: "text"}.get(annotation, str(annotation))


def help_texts() -> dict[str, str]:
    """Key path -> one line, for errors."""
    out = {}
    for entry in entries():
        out[entry.path] = f"It is: {entry.text} Default: {entry.default}"
    return out


def known_paths() -> frozenset[str]:
    """Every key path and section that a file may hold, native and DeepSpeed's."""
    paths = {entry.path for entry in entries()}
    paths |= {path.rpartition(".")[0] for path in paths if "." in path}
    paths |= set(table.KEYS) | set(table.OLD_SPELLINGS) | set(table.SECTIONS) | set(table.RENAMED_TOP)
    for names, where in ((OPTIMIZERS, "optimizer.params"), (SCHEDULERS, "scheduler.params")):
        paths |= {f"{where}.{name}" for section in names.values() for name in section.model_fields}
    return frozenset(paths)


def fate(key: table.Key) -> Fate:
    return Fate.MAPPED if key.to else Fate.NOTED if key.note else Fate.REFUSED


def deepspeed_rows() -> tuple[tuple[str, str, str], ...]:
    """(key and its other spellings, fate, what it becomes or why it has no meaning) of every DeepSpeed key."""
    rows = []
    for key in table.KEYS.values():
        name = key.path + "".join(f" ({old})" for old in key.old)
        rows.append((name, fate(key).value, key.to or key.reason))
    return tuple(rows)


def markdown() -> str:
    """The reference page."""
    lines = [
        "# Config reference", "",
        "Made by `zinf config-reference --markdown`. `auto` is resolved when the file is loaded, or by the plan.", "",
        "| key | values | default | `auto` is | meaning |", "| --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for entry in entries():
        cells = (f"`{entry.path}`", entry.values, entry.default, entry.auto, entry.text)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    lines += ["", "## Optimizers and schedules", ""]
    for names, where in ((OPTIMIZERS, "optimizer"), (SCHEDULERS, "scheduler")):
        for name, section in names.items():
            lines.append(f"* `{where}.type: {name}`: {', '.join(f'`{field}`' for field in section.model_fields)}")
    lines += ["", "## DeepSpeed's keys", "", "| key (other spellings) | here | how or why |", "| --- | --- | --- |"]
    for name, what, why in deepspeed_rows():
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in (f"`{name}`", what, why)) + " |")
    return "\n".join(lines) + "\n"
