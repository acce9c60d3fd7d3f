"""Config files -> plain dicts: YAML, JSON with comments, gin. Nothing is interpreted here.

gin: a file sets the same keys, `Config.` in front of the path; macros (`width = 512`, `%width`) and `include` work;
references (`@name`) and imports do not. It is parsed without touching gin's global registry.

    Config.train_batch_size = 8
    Config.optimizer.type = "adamw"
    Config.optimizer.params = {"lr": %lr}
    lr = 1e-4
"""

import json
import re
import tokenize
from pathlib import Path
from typing import Any

import yaml
from gin import config_parser as gin_parser

from zinf_jax.errors import ConfigError

_FORMATS = (".yaml", ".yml", ".json", ".gin")
# A string, or what is to be blanked: comments, and a comma before a closing bracket.
_JSON_EXTRAS = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|#[^\n]*|/\*.*?\*/', re.DOTALL)
_TRAILING_COMMA = re.compile(r'"(?:\\.|[^"\\])*"|,(?=\s*[}\]])')


def read(path: Path) -> dict[str, Any]:
    """The file's tree.

    Raises:
      ConfigError: no such file, an unknown format, a syntax error (with its line), a key given twice.
    """
    if path.suffix.lower() not in _FORMATS:
        raise ConfigError(
            f"config {str(path)!r}: the format follows from the name, which must end in {', '.join(_FORMATS)}"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"config {str(path)!r} cannot be read: {error.strerror}") from None
    parse = {".json": parse_json, ".gin": parse_gin}.get(path.suffix.lower(), parse_yaml)
    try:
        tree = parse(text) if parse is not parse_gin else parse_gin(text, path.parent)
    except ConfigError as error:
        raise ConfigError(f"config {str(path)!r}: {error}") from None
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise ConfigError(f"config {str(path)!r} holds {type(tree).__name__} at the top, not keys and values")
    return tree


def parse_json(text: str) -> Any:
    """JSON as DeepSpeed files have it: with //, # and /* */ comments and trailing commas. Positions are kept."""
    text = _JSON_EXTRAS.sub(lambda m: m[0] if m[0][0] == '"' else re.sub(r"[^\n]", " ", m[0]), text)
    text = _TRAILING_COMMA.sub(lambda m: m[0] if m[0][0] == '"' else " ", text)
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise ConfigError(f"line {error.lineno}, column {error.colno}: {error.msg}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        twice = sorted({key for key, _ in pairs if [k for k, _ in pairs].count(key) > 1})
        raise ConfigError(f"{', '.join(twice)}: given twice in one section; keep one")
    return out


class _Loader(yaml.SafeLoader):
    """Refuses keys given twice, of which YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        twice = sorted({str(key) for key in keys if keys.count(key) > 1})
        if twice:
            raise ConfigError(
                f"line {node.start_mark.line + 1}: {', '.join(twice)}: given twice in one section; keep one"
            )
        return super().construct_mapping(node, deep)


def parse_yaml(text: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        raise ConfigError(f"line {line}: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ConfigError(str(error)) from None


class _Macro:
    def __init__(self, name: str):
        self.name = name


class _Delegate(gin_parser.ParserDelegate):
    def configurable_reference(self, scoped_name: str, evaluate: bool) -> Any:
        raise ConfigError(
            f"@{scoped_name}: a config holds values only; name functions as text, such as 'module:function'"
        )

    def macro(self, name: str) -> _Macro:
        return _Macro(name)


def parse_gin(text: str, folder: Path = Path(".")) -> dict[str, Any]:
    bindings: dict[str, Any] = {}
    macros: dict[str, Any] = {}
    _read_gin(text, folder, bindings, macros, ())
    tree: dict[str, Any] = {}
    for path, value in bindings.items():
        set_path(tree, path, _resolve(value, macros, ()))
    return tree


def _read_gin(
    text: str, folder: Path, bindings: dict[str, Any], macros: dict[str, Any], including: tuple[Path, ...]
) -> None:
    try:
        for statement in gin_parser.ConfigParser(text, _Delegate()):
            if isinstance(statement, gin_parser.ImportStatement):
                raise ConfigError(f"line {statement.location.line_num}: import is not supported in a config")
            if isinstance(statement, gin_parser.IncludeStatement):
                path = (folder / statement.filename).resolve()
                if path in including:
                    raise ConfigError(f"{path} includes itself")
                try:
                    included = path.read_text(encoding="utf-8")
                except OSError as error:
                    raise ConfigError(f"include {statement.filename!r}: {error.strerror}") from None
                _read_gin(included, path.parent, bindings, macros, (*including, path))
            elif isinstance(statement, gin_parser.BindingStatement):
                if statement.scope:
                    raise ConfigError(f"scope {statement.scope!r}: scopes have no meaning in a config")
                if not statement.arg_name:
                    macros[statement.selector] = statement.value
                else:
                    selector = (
                        "" if statement.selector == "Config" else statement.selector.removeprefix("Config.") + "."
                    )
                    bindings[selector + statement.arg_name] = statement.value
    except SyntaxError as error:
        raise ConfigError(f"line {error.lineno}: {error.msg}") from None
    except tokenize.TokenError as error:
        raise ConfigError(f"line {error.args[1][0]}: {error.args[0]}") from None


def _resolve(value: Any, macros: dict[str, Any], resolving: tuple[str, ...]) -> Any:
    if isinstance(value, _Macro):
        if value.name not in macros or value.name in resolving:
            raise ConfigError(f"%{value.name}: " + ("defined by itself" if value.name in resolving else "not defined"))
        return _resolve(macros[value.name], macros, (*resolving, value.name))
    if isinstance(value, dict):
        return {key: _resolve(item, macros, resolving) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_resolve(item, macros, resolving) for item in value]
    return value


def set_path(tree: dict[str, Any], path: str, value: Any) -> None:
    """Sets `a.b.c` in nested dicts.

    Raises:
      ConfigError: a part of the path is there and is not a section.
    """
    *parents, last = path.split(".")
    for depth, part in enumerate(parents):
        if tree.get(part) is None:
            tree[part] = {}
        tree = tree[part]
        if not isinstance(tree, dict):
            raise ConfigError(f"{path}: {'.'.join(parents[: depth + 1])} is a value, not a section")
    tree[last] = value


def parse_override(text: str) -> tuple[str, Any]:
    """`optimizer.params.lr=1e-4` -> ("optimizer.params.lr", "1e-4"); the value is YAML.

    Raises:
      ConfigError: not of the form KEY=VALUE.
    """
    path, equals, value = text.partition("=")
    if not equals or not path.strip():
        raise ConfigError(f"override {text!r}: write KEY=VALUE, such as optimizer.params.lr=1e-4")
    return path.strip(), parse_yaml(value)
