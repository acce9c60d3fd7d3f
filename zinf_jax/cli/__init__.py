"""The command `zinf`."""

from zinf_jax.cli._app import app


def main() -> None:
    """Entry point of the console script."""
    app()


__all__ = ["app", "main"]
