"""The commands of `zinf`. Each is thin: options in, one call, a printed result.

A mistake of the user's prints one message and exits with 2, a failed run with 1; `zinf --traceback COMMAND ...` shows
where it came from.
"""

import contextlib
import dataclasses
import importlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

import aio_ffi
from zinf_jax.cli import _bench, _machine
from zinf_jax.config import Config, check_paths, deepspeed_rows, entries, load, markdown
from zinf_jax.errors import ZinfError
from zinf_jax.units import format_bytes, parse_bytes

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
def _user_errors(ctx: typer.Context) -> Iterator[None]:
    """One clear message instead of a traceback: 2 for what the user can change in the call, 1 for the rest."""
    try:
        yield
    except (ZinfError, OSError) as error:
        if ctx.obj:
            raise
        err.print("[bold red]error:[/] ", end="")
        err.print(str(error), markup=False, soft_wrap=True)
        raise typer.Exit(2 if isinstance(error, _USERS) else 1) from None


def _load(path: Path, overrides: list[str] | None) -> Config:
    return load(path, overrides or ())


def _print_notes(config: Config) -> None:
    for note in config.notes:
        out.print("[dim]note:[/] ", end="")
        out.print(note, markup=False, style="dim", soft_wrap=True)


def _call(module: str, function: str, *args: Any, **kwargs: Any) -> Any:
    """Calls `module.function`, imported only now: tracing and model libraries take seconds, `--help` should not."""
    return getattr(importlib.import_module(module), function)(*args, **kwargs)


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
        bool, typer.Option("--resume", "-r", help="Continue the run in --run-dir from its last save.")
    ] = False,
    resume_from: Annotated[
        Path | None,
        typer.Option(help="Start from this save. With [cyan]-s restore=weights[/]: a fresh optimizer."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run that is in --run-dir.")] = False,
    set_: SetOption = None,
) -> None:
    """Train a model.

    [bold]Examples[/]

      zinf train configs/quickstart.yaml

      zinf train configs/quickstart.yaml --resume

      zinf train ds_config.json -s model.kwargs.size=125m -s train.steps=100 --run-dir runs/try
    """
    with _user_errors(ctx):
        if resume and resume_from is not None:
            raise typer.BadParameter("--resume and --resume-from exclude each other")
        loaded = _load(config, [*(set_ or ()), *([] if steps is None else [f"train.steps={steps}"])])
        _print_notes(loaded)
        where = run_dir or Path("runs") / config.stem
        start = "auto" if resume else None if resume_from is None else str(resume_from)
        check_paths(loaded, where)
        _call("zinf_jax.train.loop", "run", loaded, run_dir=where, resume=start, steps=steps, overwrite=overwrite)


@app.command()
def plan(ctx: typer.Context, config: ConfigArg, set_: SetOption = None) -> None:
    """Print what a run would do, without weights: pages and tiers, schedule, peak memory, predicted step time.

    [bold]Examples[/]

      zinf plan configs/quickstart.yaml

      zinf plan configs/quickstart.yaml -s host_memory=2GiB -s placement.optimizer=nvme
    """
    with _user_errors(ctx):
        loaded = _load(config, set_)
        _print_notes(loaded)
        result = _call("zinf_jax.train.loop", "plan", loaded)
        if result is not None:
            out.print(str(result), markup=False)


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
    with _user_errors(ctx):
        sampling = {"num_tokens": tokens, "temperature": temperature, "top_k": top_k or None, "seed": seed}
        text = _call("zinf_jax.train.loop", "generate", run_dir, prompt, **sampling)
        if text is not None:
            out.print(text, markup=False, soft_wrap=True)


@app.command()
def report(
    ctx: typer.Context,
    paths: Annotated[
        list[Path] | None,
        typer.Argument(help="Directories for pages, to try out. Default: this one.", show_default=False),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="Try the nvme_path of this config, and print its notes.")
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Print what this machine has, and what would make it faster: devices, kernels, memory limits, I/O engine.

    [bold]Examples[/]

      zinf report

      zinf report /mnt/nvme0 /mnt/nvme1
    """
    with _user_errors(ctx):
        loaded = None if config is None else load(config)
        chosen = list(paths or ()) + [Path(path) for path in (loaded.nvme_path or () if loaded else ())]
        facts = [
            *_machine.software(), *_machine.compute(), *_machine.memory(), *_machine.kernel_aio(),
            *_machine.directories(chosen or [Path.cwd()]),
        ]  # fmt: skip
        if json_:
            notes = list(loaded.notes) if loaded else []
            out.print_json(json.dumps({"facts": [dataclasses.asdict(fact) for fact in facts], "notes": notes}))
            return
        _print_facts(facts)
        if loaded is not None:
            _print_notes(loaded)


def _print_facts(facts: list[_machine.Fact]) -> None:
    for section, group in itertools.groupby(facts, key=lambda fact: fact.section):
        out.print(section, style="bold", markup=False, soft_wrap=True)
        table = Table(box=None, show_header=False)
        table.add_column(min_width=20)
        for fact in group:
            table.add_row(fact.name, escape(fact.value))
            if fact.advice:
                table.add_row("", f"[yellow]{escape(fact.advice)}[/]")
        out.print(table)


@app.command("bench-io")
def bench_io(
    ctx: typer.Context,
    directory: Annotated[Path, typer.Argument(help="On the drive that pages will use.", show_default=False)],
    size: Annotated[str, typer.Option(help="Bytes of the test file, such as 1GiB; larger is steadier.")] = "256MiB",
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; the median counts.")] = 1,
    quick: Annotated[bool, typer.Option(help="Two settings only.")] = False,
    json_: JsonOption = False,
) -> None:
    """Measure a drive and print the [cyan]aio[/] section to paste into a config.

    Each setting moves five times the size (written, read, both at once); the file is removed afterwards.

    [bold]Examples[/]

      zinf bench-io /mnt/nvme0

      zinf bench-io /mnt/nvme0 --size 4GiB --repeats 3
    """
    with _user_errors(ctx):
        num_bytes = _size(size)
        grid = _bench.QUICK_GRID if quick else _bench.GRID
        probe = aio_ffi.probe(directory)
        with Progress(console=err, transient=True, disable=json_) as progress:
            task = progress.add_task("measuring", total=len(grid) * repeats)
            points = _bench.measure(
                directory, num_bytes=num_bytes, grid=grid, repeats=repeats, progress=lambda: progress.advance(task)
            )
        section, advice = _bench.section(_bench.best(points)), _bench.advice(points, probe.reason)
        if json_:
            rows = [dataclasses.asdict(point) for point in points]
            out.print_json(json.dumps({"points": rows, "aio": section, "advice": advice}))
            return
        _print_points(points, directory, num_bytes)
        for line in advice:
            out.print(line, style="yellow", markup=False, soft_wrap=True)
        out.print("\nFor a config (the same keys in DeepSpeed's JSON):\n")
        out.print(yaml.safe_dump({"aio": section}, sort_keys=False), markup=False)


def _size(text: str) -> int:
    try:
        num_bytes = parse_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(f"--size: {error}") from None
    if num_bytes < 1 << 20:
        raise typer.BadParameter(f"--size is {format_bytes(num_bytes)}: at least 1 MiB is needed to measure anything")
    return num_bytes


def _print_points(points: tuple[_bench.Point, ...], directory: Path, num_bytes: int) -> None:
    best = _bench.best(points)
    title = f"{directory}: {format_bytes(num_bytes)}, {best.engine}, {'O_DIRECT' if best.direct else 'page cache'}"
    table = Table(
        title=title, title_justify="left", caption="GB/s (1e9 bytes); mixed: half reads, half writes, their sum"
    )
    for name in ("block", "depth", "threads", "read", "write", "mixed"):
        table.add_column(name, justify="right")
    for p in points:
        cells = [format_bytes(p.block_size), str(p.queue_depth), str(p.thread_count)]
        cells += [f"{rate:.2f}" for rate in (p.read_gbps, p.write_gbps, p.mixed_gbps)]
        table.add_row(*cells, style="bold green" if p is best else None)
    out.print(table)


@app.command("config")
def show_config(ctx: typer.Context, config: ConfigArg, set_: SetOption = None) -> None:
    """Print a config as it is understood: every key resolved, as YAML, with notes. Works on DeepSpeed files.

    [bold]Example[/]

      zinf config ds_config.json > mine.yaml
    """
    with _user_errors(ctx):
        out.print(_load(config, set_).to_yaml(), markup=False, soft_wrap=True, end="")


@app.command("config-reference")
def config_reference(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[WORD]...", help="Only keys that contain a word.")
    ] = None,
    markdown_: Annotated[bool, typer.Option("--markdown", help="The whole reference as a page.")] = False,
) -> None:
    """List every key of a config: values, default, meaning; and what becomes of each DeepSpeed key.

    [bold]Examples[/]

      zinf config-reference streaming

      zinf config-reference buffer_count max_in_cpu
    """
    if markdown_:
        out.print(markdown(), markup=False, soft_wrap=True, end="")
        return
    shown = 0
    for entry in entries():
        if not words or any(word in entry.path for word in words):
            shown += 1
            out.print(f"[bold]{entry.path}[/]  [dim]{escape(entry.values)}; default {escape(entry.default)}[/]")
            out.print(f"    {entry.text}", markup=False)
    for name, fate, how in deepspeed_rows():
        if words and any(word in name for word in words):
            shown += 1
            out.print(f"[bold]{name}[/]  [dim]DeepSpeed: {fate}[/]")
            out.print(f"    {how}", markup=False)
    if not shown:
        err.print(f"no key contains {' or '.join(words or ())}")
        raise typer.Exit(2)
