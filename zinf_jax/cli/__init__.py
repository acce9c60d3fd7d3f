"""The command `zinf`. `_run`, `_care`, `_timeline` and `_tools` register their commands when they are imported."""

from zinf_jax.cli import _care, _run, _timeline, _tools
from zinf_jax.cli._app import app


def main() -> None:
    """Entry point of the console script."""
    app()


__all__ = ["_care", "_run", "_timeline", "_tools", "app", "main"]
