"""Imports go downward only, and nothing is imported inside a function to dodge a cycle."""

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Lowest first. A package may import itself and what stands in earlier rows; packages of one row do not see each other.
LAYERS = (
    ("aio_ffi",),
    ("zinf_jax.errors", "zinf_jax.units", "zinf_jax.machine"),
    ("zinf_jax.leaves",),
    ("zinf_jax.tier", "zinf_jax.graph"),
    ("zinf_jax.plan",),
    ("zinf_jax.optim",),
    ("zinf_jax.stream",),
    ("zinf_jax.models", "zinf_jax.config"),
    ("zinf_jax.train",),
    ("zinf_jax",),  # the facade
    ("zinf_jax.cli",),
)
# The only reader of JAX's equations, and their structural equality: private to the project rather than to graph, since
# an optimizer's update is analysed with the same means as a loss.
SHARED_PRIVATE = {"zinf_jax.graph._jaxpr", "zinf_jax.graph._equal"}
RANK = {name: rank for rank, row in enumerate(LAYERS) for name in row}
FILES = sorted(p for package in ("aio_ffi", "zinf_jax") for p in (ROOT / package).rglob("*.py"))


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _package(module: str) -> str:
    """The row entry that a module belongs to."""
    if module.partition(".")[0] == "aio_ffi":
        return "aio_ffi"
    return ".".join(module.split(".")[:2])


def _imports(tree: ast.AST) -> list[tuple[int, str]]:
    """(line, module) of every import of ours; `from package import name` counts as package.name if that is a module."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            base = node.module or ""
            for alias in node.names:
                name = f"{base}.{alias.name}"
                path = ROOT / Path(*name.split("."))
                found.append((node.lineno, name if path.is_dir() or path.with_suffix(".py").exists() else base))
    return [(line, name) for line, name in found if name.partition(".")[0] in ("aio_ffi", "zinf_jax")]


def _all_imports() -> list[tuple[str, str, str]]:
    """(place, importing module, imported module) over all files."""
    return [
        (f"{path.relative_to(ROOT)}:{line}", _module(path), name)
        for path in FILES
        for line, name in _imports(_tree(path))
    ]


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def test_every_package_has_a_layer():
    assert {_package(_module(path)) for path in FILES} == set(RANK)


def test_imports_go_downward():
    wrong = [
        f"{place}: {module} imports {name}"
        for place, module, name in _all_imports()
        if _package(name) != _package(module) and RANK[_package(name)] >= RANK[_package(module)]
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_of_ours_is_imported_inside_a_function():
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in FILES
        for function in ast.walk(_tree(path))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for line, name in _imports(function)
    ]
    assert not wrong, "\n".join(wrong)


def test_a_private_module_is_imported_only_by_its_own_package():
    wrong = [
        f"{place}: {module} imports {name}"
        for place, module, name in _all_imports()
        if any(part.startswith("_") for part in name.split(".")[1:])
        and _package(name) != _package(module)
        and name not in SHARED_PRIVATE
    ]
    assert not wrong, "\n".join(wrong)
