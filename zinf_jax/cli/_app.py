"""The application `zinf`: what its commands share. A command is thin: options in, one call, a printed result.

A mistake of the user's prints one message and exits with 2, a failed run with 1; `zinf --traceback COMMAND ...` shows
where it came from.
"""

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from zinf_jax.config import Config, load
from zinf_jax.errors import ZinfError

app = typer.Typer(
    name="zinf",
    help="ZeRO-Infinity for JAX: train models larger than device and host memory.\n\n"
    "Start with [bold]zinf report[/] (what this machine has), then [bold]zinf plan CONFIG[/] (what a run would do), "
    "then [bold]zinf train CONFIG[/].",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

_USERS = (ValueError, FileNotFoundError, NotADirectoryError, PermissionError)  # what the user can change in the call

ConfigArg = Annotated[
    Path,
    typer.Argument(metavar="CONFIG", help="A .yaml, .json (DeepSpeed's files too) or .gin file.", show_default=False),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", "-s", metavar="KEY=VALUE", show_default=False,
        help="Overrides a key; may be repeated. Keys: [cyan]zinf config-reference[/].",
    ),
]  # fmt: skip
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


@app.callback()
def _options(
    ctx: typer.Context,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show the traceback of an error.")] = False,
) -> None:
    ctx.obj = traceback


@contextlib.contextmanager
def user_errors(ctx: typer.Context) -> Iterator[None]:
    """One clear message instead of a traceback: 2 for what the user can change in the call, 1 for the rest."""
    try:
        yield
    except (ZinfError, OSError) as error:
        if ctx.obj:
            raise
        err.print("[bold red]error:[/] ", end="")
        err.print(str(error), markup=False, soft_wrap=True)
        raise typer.Exit(2 if isinstance(error, _USERS) else 1) from None


def load_config(path: Path, overrides: list[str] | None) -> Config:
    return load(path, overrides or ())


def print_notes(config: Config) -> None:
    for note in config.notes:
        out.print("[dim]note:[/] ", end="")
        out.print(note, markup=False, style="dim", soft_wrap=True)


def call(module: str, function: str, *args: Any, **kwargs: Any) -> Any:
    """Calls `module.function`, imported only now: tracing and model libraries take seconds, `--help` should not."""
    return getattr(importlib.import_module(module), function)(*args, **kwargs)
