"""Commands about the machine and the config: report, bench-io, config, config-reference."""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

import aio_ffi
from zinf_jax.cli import _bench, _machine
from zinf_jax.cli._app import ConfigArg, JsonOption, SetOption, app, err, load_config, out, print_notes, user_errors
from zinf_jax.config import deepspeed_rows, entries, load, markdown
from zinf_jax.units import format_bytes, parse_bytes


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
    with user_errors(ctx):
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
            print_notes(loaded)


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
    with user_errors(ctx):
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
    with user_errors(ctx):
        out.print(load_config(config, set_).to_yaml(), markup=False, soft_wrap=True, end="")


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
