"""Commands that run a model: train, plan, generate."""

from pathlib import Path
from typing import Annotated

import typer

from zinf_jax.cli._app import ConfigArg, SetOption, app, call, load_config, out, print_notes, user_errors
from zinf_jax.config import check_paths


@app.command()
def train(
    ctx: typer.Context,
    config: ConfigArg,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            "--run-dir", "-d", help="Where the run lives: pages, saves, metrics. Default: runs/NAME, after the config."
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps in all; overrides train.steps.")] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume",
            "-r",
            metavar="auto|SAVE",
            show_default=False,
            help="auto: continue the run in --run-dir if there is one, else begin it. Or a save's directory; "
            "with [cyan]-s restore=weights[/] its weights only: step 0, a fresh optimizer and schedule.",
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run that is in --run-dir.")] = False,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            show_default=False,
            help="Record some steps into this file, for [cyan]zinf timeline[/] and ui.perfetto.dev; "
            "gzipped if it ends in .gz.",
        ),
    ] = None,
    trace_steps: Annotated[int, typer.Option(min=1, help="How many steps to record.")] = 3,
    trace_start: Annotated[
        int, typer.Option(min=1, help="The first step to record; 1 is the first of this process, slower than the rest.")
    ] = 2,
    set_: SetOption = None,
) -> None:
    """Train a model.

    [bold]Examples[/]

      zinf train configs/quickstart.yaml

      zinf train configs/quickstart.yaml --resume auto

      zinf train configs/quickstart.yaml --trace trace.json.gz

      zinf train ds_config.json -s model.kwargs.size=125m -s train.steps=100 --run-dir runs/try
    """
    with user_errors(ctx):
        loaded = load_config(config, [*(set_ or ()), *([] if steps is None else [f"train.steps={steps}"])])
        where = run_dir or Path("runs") / config.stem
        check_paths(loaded, where)
        tracing = {} if trace is None else {"trace": trace, "trace_steps": trace_steps, "trace_start": trace_start}
        call(
            "zinf_jax.train.loop", "run", loaded,
            run_dir=where, resume=resume, steps=steps, overwrite=overwrite, **tracing,
        )  # fmt: skip


@app.command()
def plan(ctx: typer.Context, config: ConfigArg, set_: SetOption = None) -> None:
    """Print what a run would do, without weights: pages and tiers, schedule, peak memory, bytes per step.

    [bold]Examples[/]

      zinf plan configs/quickstart.yaml

      zinf plan configs/quickstart.yaml -s host_memory=2GiB -s placement.optimizer=nvme
    """
    with user_errors(ctx):
        loaded = load_config(config, set_)
        print_notes(loaded)
        result = call("zinf_jax.train.offline", "plan", loaded)
        out.print(str(result), markup=False, soft_wrap=True)


@app.command()
def generate(
    ctx: typer.Context,
    run_dir: Annotated[Path, typer.Argument(help="A run's directory, or one of its saves.", show_default=False)],
    prompt: Annotated[str, typer.Argument(help="Text to continue.")] = "",
    tokens: Annotated[int, typer.Option("--tokens", "-n", min=1, help="How many tokens to add.")] = 200,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token; 1 samples as trained.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Sample among the likeliest; 0: among all.")] = 40,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
) -> None:
    """Continue a text with a trained model, its weights streamed as in training.

    [bold]Example[/]

      zinf generate runs/quickstart "def main(" -n 100
    """
    with user_errors(ctx):
        sampling = {"num_tokens": tokens, "temperature": temperature, "top_k": top_k or None, "seed": seed}
        call("zinf_jax.train.offline", "generate", run_dir, prompt, **sampling)
