"""Commands about what lies on the disk: verify, clean."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from zinf_jax.cli._app import JsonOption, app, call, err, out, user_errors
from zinf_jax.errors import OwnerError, ResumeError, ZinfError
from zinf_jax.units import format_bytes

_SHOWN = 20  # problems of one step; --json has all


@app.command()
def verify(
    ctx: typer.Context,
    path: Annotated[
        Path,
        typer.Argument(help="A run's directory, a step it retains (retained/step_*.json), or a checkpoint.",
                       show_default=False),
    ],
    json_: JsonOption = False,
) -> None:  # fmt: skip
    """Read every chunk of a stored run and compare its checksum with the one that was written.

    Checks manifest, commit logs and page files, the committed step and each retained step. Changes nothing, needs no
    device and little memory. A run that is being trained is refused; its retained steps and checkpoints are not.

    Exits with 0 if all is whole, 1 if something is damaged (with what, where, and what can be done), 2 if PATH is no
    run or is in use.

    [bold]Examples[/]

      zinf verify runs/1.3b

      zinf verify runs/1.3b/retained/step_00000100.json

      zinf verify saved/step_100 --json
    """
    with user_errors(ctx):
        try:
            report = _with_progress(path, quiet=json_)
        except (ResumeError, OwnerError) as error:
            _fail(ctx, error)
        if json_:
            out.print_json(json.dumps(_plain(report) | {"whole": report.whole}))
        else:
            _print_report(report)
        if not report.whole:
            raise typer.Exit(1)


def _fail(ctx: typer.Context, error: ZinfError) -> Any:
    """1 says that something is damaged: what cannot be looked at is 2."""
    if ctx.obj:
        raise error
    err.print("[bold red]error:[/] ", end="")
    err.print(str(error), markup=False, soft_wrap=True)
    raise typer.Exit(2) from None


def _with_progress(path: Path, *, quiet: bool) -> Any:
    columns = (TextColumn("verifying"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=quiet) as progress:
        task = progress.add_task("verifying", total=None)
        return call(
            "zinf_jax.train.verify", "verify", path,
            lambda done, total: progress.update(task, completed=done, total=total),
        )  # fmt: skip


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _print_report(report: Any) -> None:
    table = Table(title=f"{report.what} {report.path}", title_justify="left")
    for name, justify in (("step", "right"), ("", "left"), ("chunks", "right"), ("bytes", "right"), ("", "left")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for step in report.steps:
        verdict = "[green]whole[/]" if not step.problems else f"[red]{len(step.problems)} problems[/]"
        table.add_row(str(step.step), step.where, str(step.num_chunks), format_bytes(step.num_bytes), verdict)
    out.print(table)
    for step in report.steps:
        if step.problems:
            _print_problems(f"step {step.step}, {step.where}", step.problems)
    if report.problems:
        _print_problems("the run", report.problems)
    for note in report.notes:
        out.print(f"note: {note}", markup=False, soft_wrap=True)
    if not report.whole:
        out.print("\nWhat can be done", style="bold")
        for line in report.advice:
            out.print(f"- {line}", markup=False, soft_wrap=True)


def _print_problems(title: str, problems: Sequence[Any]) -> None:
    out.print(f"\n{title}", style="bold red", markup=False, soft_wrap=True)
    for problem in problems[:_SHOWN]:
        where = f"{problem.kind} of page {problem.page}: " if problem.page else ""
        out.print(f"- {where}{problem.what}", markup=False, soft_wrap=True)
        parts = [problem.file] if problem.file else []
        parts += [f"offset {problem.offset}"] if problem.offset is not None else []
        parts += [f"{problem.num_bytes} bytes"] if problem.num_bytes is not None else []
        parts += [f"written in step {problem.step}"] if problem.step is not None else []
        parts += [f"expected {problem.expected}"] if problem.expected else []
        parts += [f"found {problem.found}"] if problem.found else []
        if parts:
            out.print(f"    {', '.join(parts)}", markup=False, style="dim", soft_wrap=True)
    if len(problems) > _SHOWN:
        out.print(f"- and {len(problems) - _SHOWN} more (--json lists all)", markup=False)


@app.command()
def clean(
    ctx: typer.Context,
    paths: Annotated[
        list[Path],
        typer.Argument(help="An nvme_path, a run's directory, or a folder of runs or checkpoints.", show_default=False),
    ],
    delete: Annotated[bool, typer.Option("--delete", help="Remove them, after asking.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="With --delete: do not ask.")] = False,
    json_: JsonOption = False,
) -> None:
    """List what killed processes left behind, and with [cyan]--delete[/] remove it.

    Page directories under an nvme_path whose run is gone or was replaced, runs without a run_dir whose process died,
    unfinished and abandoned checkpoints, half-written logs, probe files. Never what a live process owns, what a run
    refers to, or a name that zinf does not make. A run cleans its own directory when it resumes.

    [bold]Examples[/]

      zinf clean /mnt/nvme

      zinf clean /mnt/nvme runs --delete
    """
    with user_errors(ctx):
        found = call("zinf_jax.train.leftovers", "find", paths)
        if json_ and delete and not yes:
            raise typer.BadParameter("--json with --delete needs --yes: there is nobody to ask")
        if not json_:
            _print_leftovers(found)
        removed = []
        if found and delete and (yes or typer.confirm(f"Remove {len(found)}?")):
            removed = [leftover for leftover in found if call("zinf_jax.train.leftovers", "delete", leftover)]
            if not json_:
                kept = len(found) - len(removed)
                text = f"removed {len(removed)}, {format_bytes(sum(leftover.num_bytes for leftover in removed))}"
                out.print(text + (f"; {kept} left: in use by now, or something else is in them" if kept else ""))
        if json_:
            total = sum(leftover.num_bytes for leftover in found)
            document = {
                "leftovers": _plain(found),
                "num_bytes": total,
                "removed": [str(leftover.path) for leftover in removed],
            }
            out.print_json(json.dumps(document))


def _print_leftovers(found: Sequence[Any]) -> None:
    if not found:
        out.print("nothing to clean")
        return
    for leftover in found:
        out.print(f"{format_bytes(leftover.num_bytes):>11}  ", end="")
        out.print(f"[bold]{escape(str(leftover.path))}[/]", soft_wrap=True)
        out.print(f"{'':13}{leftover.what}: {leftover.why}", markup=False, style="dim", soft_wrap=True)
    out.print(f"{format_bytes(sum(leftover.num_bytes for leftover in found)):>11}  in all, {len(found)}")
