"""The command `zinf`. `_run` and `_tools` register the commands with the application when they are imported."""

from zinf_jax.cli import _run, _tools
from zinf_jax.cli._app import app


def main() -> None:
    """Entry point of the console script."""
    app()


__all__ = ["_run", "_tools", "app", "main"]
