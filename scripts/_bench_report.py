"""The tables of the step benchmark: rows in, `rich` tables out. A limit that was missed is red."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table

Row = Mapping[str, Any]
MIB, GIB = 1 << 20, 1 << 30
PLAN_TOLERANCE = 0.03  # measured bytes may differ from the plan's by this


def limited(value: float, limit: float | None, form: str = "{:.2f}") -> str:
    """`value (max limit)`, coloured by whether it holds."""
    if limit is None:
        return form.format(value)
    colour = "green" if value <= limit else "red"
    return f"[{colour}]{form.format(value)}[/] (max {form.format(limit)})"


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < 2 else "right", no_wrap=index < 2)
    for row in rows:
        table.add_row(*row)
    return table


def _name(row: Row) -> tuple[str, str]:
    clips = f", clips {row['clips']}" if "plan" in row else ""
    return f"{row['size']} x{row['micro_batches']}", row["variant"] + clips


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def steps_table(rows: Sequence[Row]) -> Table:
    """Medians, ratios and floors; beside the NVMe variant, how many times as long DeepSpeed took."""

    def cells(row: Row) -> list[str]:
        floors = row.get("floors", {})
        streamed = "plan" in row
        host = floors.get("host_work_s") if streamed else None
        times = [row["step_s"], row["memory_step_s"]]
        floor = [floors.get("compute_s"), host, floors.get("io_s")]
        for name in ("schedule_s", "at_once_s"):
            floor += [floors.get(name), row["step_s"] / floors[name] if floors.get(name) else None]
        ratio = limited(row["ratio"], row.get("max_ratio"))
        like = [r for r in rows if (r["size"], r["micro_batches"]) == (row["size"], row["micro_batches"])]
        peer = next((r for r in like if r["variant"] == "deepspeed"), None)
        versus = f"{peer['step_s'] / row['step_s']:.2f}x" if peer and row["variant"] == "nvme" else "-"
        return [*_name(row), *map(_seconds, times), ratio, versus, *map(_seconds, floor)]

    columns = ["model", "variant", "step s", "in memory s", "ratio", "DeepSpeed takes"]
    columns += ["compute s", "host work s", "I/O s", "schedule s", "over it", "at once s", "over it"]
    return _table("Step time (medians of one run) and floors", columns, map(cells, rows))


def bytes_table(rows: Sequence[Row]) -> Table:
    """Bytes moved and peak memory, planned and measured."""

    def cells(row: Row) -> list[str]:
        last, plan, count = row["last"], row.get("plan"), row["num_params"]
        moved = last["read_bytes"] + last["write_bytes"]
        per_param = limited(moved / count, row.get("max_bytes"), "{:.1f}")
        planned = rss = "-"
        if plan is not None:
            wanted = plan["read_bytes"] + plan["write_bytes"]
            off = (moved - wanted) / wanted if wanted else 0.0
            colour = "green" if abs(off) <= PLAN_TOLERANCE else "red"
            planned = f"{wanted / count:.1f} ([{colour}]{off:+.1%}[/])" if wanted else "0"
            rss = limited(last["peak_rss_bytes"] / GIB, plan["peak_rss_bytes"] / GIB)
        else:
            rss = f"{last['peak_rss_bytes'] / GIB:.2f}"
        host = row.get("host_memory")
        budget = "-" if host is None else f"{host / MIB:.0f} ({host / 12 / count:.0%})"
        read, written = (f"{last[key] / MIB:.0f}" for key in ("read_bytes", "write_bytes"))
        return [*_name(row), read, written, per_param, planned, budget, rss]

    columns = ["model", "variant", "read MiB", "written MiB", "bytes/param", "planned"]
    columns += ["host_memory MiB", "peak RSS GiB"]
    return _table("Per step: bytes moved (/proc/self/io) and peak RSS (max: the plan's)", columns, map(cells, rows))


def time_table(rows: Sequence[Row]) -> Table:
    """Where a streamed step's time went, from the trainer's own clocks (means of the last turn)."""
    causes = ("device_wait_s", "host_work_s", "read_stall_s", "write_stall_s", "commit_stall_s")

    def cells(row: Row) -> list[str]:
        stats = row["last"]["stats"]
        parts = [stats[cause] for cause in causes]
        rest = stats["step_time_s"] - sum(parts)
        passes = [stats[name] for name in ("step_time_s", "pass_time_s", "update_time_s")]
        peak = stats["peak_device_bytes"], row["plan"]["device_bytes"]
        device = limited(peak[0] / MIB, peak[1] / MIB, "{:.0f}")
        return [*_name(row), *map(_seconds, [*passes, *parts, rest]), f"{stats['fetch_misses']:.0f}", device]

    columns = ["model", "variant", "step s", "passes s", "update s", "device wait s", "host work s"]
    columns += ["read stall s", "write stall s", "commit stall s", "rest s", "misses", "device MiB"]
    streamed = [row for row in rows if "plan" in row]
    return _table("Where the time went (means of the last turn)", columns, map(cells, streamed))


def rates_lines(rows: Sequence[Row]) -> list[str]:
    """The rates that the floors come from, one line per setting."""
    lines = []
    for row in rows:
        floors = row.get("floors")
        if floors is None or "plan" not in row:
            continue
        host, disk = floors["host"], floors["disk"]
        lines.append(
            f"{row['size']} x{row['micro_batches']}: disk ({disk['engine']}, O_DIRECT {disk['direct']}) reads "
            f"{disk['read_gbps']:.2f}, writes {disk['write_gbps']:.2f}, both {disk['mixed_read_gbps']:.2f} + "
            f"{disk['mixed_write_gbps']:.2f} GB/s; fused update {host['update_gbps']:.1f} GB/s at "
            f"{host['bytes_per_param']:.0f} bytes per parameter, triad {host['triad_gbps']:.1f} GB/s"
        )
    return list(dict.fromkeys(lines))
