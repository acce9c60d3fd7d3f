"""`zinf timeline`: what bounds a step, from a trace file."""

import importlib
from pathlib import Path
from typing import Annotated

import typer

from zinf_jax.cli._app import app, out, user_errors


@app.command()
def timeline(
    ctx: typer.Context,
    trace: Annotated[
        Path, typer.Argument(help="What [cyan]zinf train --trace[/] or trainer.trace wrote.", show_default=False)
    ],
    step: Annotated[int | None, typer.Option(help="Which step. Default: the last.", show_default=False)] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Draw it: .html (with tooltips), .png, .svg or .pdf.", show_default=False),
    ] = None,
) -> None:
    """Show where the time of a step went: how busy each lane was, what was waited for, what bounds the step.

    [bold]Examples[/]

      zinf timeline trace.json.gz

      zinf timeline trace.json.gz --step 3 -o step_3.html
    """
    with user_errors(ctx):
        made = importlib.import_module("zinf_jax.train.timeline")
        read = importlib.import_module("zinf_jax.stream.trace_file").read_chrome(trace)
        mark = made.find_step(read.steps, step)
        summary = made.summarise(read.events, mark)
        out.print(made.table(summary, read))
        for line in summary.lines():
            out.print(line, markup=False, soft_wrap=True)
        if read.num_dropped:
            out.print(f"{read.num_dropped} events found no room in the trace: record fewer steps", style="yellow")
        if output is not None:
            written = importlib.import_module("zinf_jax.train.timeline_picture").write(read, mark, output)
            out.print(f"picture: {written}", markup=False, soft_wrap=True)
