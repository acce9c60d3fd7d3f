"""Turns validation failures into `ConfigError`s that name the key path, the value, and what to write instead."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from zinf_jax.errors import ConfigError


def suggest(path: str, known: Iterable[str]) -> str:
    """`did you mean ...?` for an unknown key: the same name elsewhere (misplaced), else a similar one; or nothing."""
    known = sorted(set(known))
    parent, _, name = path.rpartition(".")
    elsewhere = [key for key in known if key.rpartition(".")[2] == name and key != path]
    siblings = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == parent}
    if elsewhere:
        found = elsewhere
    elif close := difflib.get_close_matches(name, siblings, n=1, cutoff=0.6):
        found = [siblings[close[0]]]
    else:
        names: dict[str, list[str]] = {}
        for key in known:
            names.setdefault(key.rpartition(".")[2], []).append(key)
        found = [key for match in difflib.get_close_matches(name, names, n=1, cutoff=0.75) for key in names[match]]
    if not found:
        return ""
    places = " or ".join(key + (" (at the top level)" if "." not in key and parent else "") for key in found[:4])
    return f"did you mean {places}?"


def unknown(path: str, known: Iterable[str]) -> str:
    hint = suggest(path, known)
    return f"{path}: unknown key{'; ' + hint if hint else '; `zinf config-reference` lists all keys'}"


def problem(path: str, value: Any, what: str, remedy: str = "") -> str:
    """One line: `streaming.lookahead = -1: must be at least 0. Units fetched ahead of use. Default: auto.`"""
    shown = "" if isinstance(value, Mapping) or value is ... else f" = {_short(value)}"
    return f"{path}{shown}: {what}" + (f". {remedy}" if remedy else "")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def from_validation(
    error: ValidationError,
    help_: Mapping[str, str],
    prefix: str = "",
    known: Iterable[str] = (),
    sources: Mapping[str, str] | None = None,
) -> ConfigError:
    """All failures of one validation as one `ConfigError`.

    Args:
      error: What pydantic raised.
      help_: Key path -> its reference entry, shown as the remedy.
      prefix: Path of the validated value.
      known: All key paths, for suggestions.
      sources: Path -> the key in the user's file from which its value came, where that is another one.
    """
    lines = []
    for item in error.errors(include_url=False):
        path = ".".join([prefix] * bool(prefix) + [str(part) for part in item["loc"]])
        if item["type"] == "extra_forbidden":
            lines.append(unknown(path, known))
            continue
        if item["type"] == "missing":
            lines.append(problem(path, ..., "is required", help_.get(path, "")))
            continue
        if item["type"] in ("model_type", "model_attributes_type", "dict_type"):
            item["msg"] = "is a section: keys and values"
        what = item["msg"].removeprefix("Value error, ")
        what = what.replace("Input should be", "should be").rstrip(".")
        value = ... if not item["loc"] else item["input"]
        origin = (sources or {}).get(path)
        shown = f"{origin} (sets {path})" if origin else path
        lines.append(problem(shown, value, what, help_.get(path, "")).removeprefix(": "))
    return combined(lines)


def combined(lines: list[str]) -> ConfigError:
    if len(lines) == 1:
        return ConfigError(lines[0])
    return ConfigError(f"{len(lines)} problems in the config:\n" + "\n".join(f"  {line}" for line in lines))
