"""What a run leaves behind for people: a table, a picture of its losses."""

import dataclasses
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.table import Table

from zinf_jax.train.metrics import read_metrics
from zinf_jax.units import format_bytes, format_count

LOSS_CURVE_FILE = "loss.png"


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes moved, in all steps of this process.

    `h2d` and `d2h` are copies between host and device memory: on a CPU most of the former are none, since the device
    reads the frame where it is.
    """

    nvme_read: int = 0
    nvme_written: int = 0
    h2d: int = 0
    d2h: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))


@dataclasses.dataclass(frozen=True)
class Peak:
    """A peak of memory, planned and measured; None where nobody said."""

    planned: int | None
    measured: int | None


@dataclasses.dataclass(frozen=True)
class Summary:
    """How a run went.

    Attributes:
      run_dir: Where everything lies.
      status: "finished" (its last step is taken) or "stopped" (by a signal; it can be resumed).
      step: Steps taken in all.
      num_steps: Steps taken by this process, skipped ones included; the figures from `train_s` on are of these.
      num_skipped: Of all steps.
      num_params: Elements of the model.
      loss_first, loss_last: Training loss of the run's first step, and the mean of its last few.
      valid_first, valid_last: Validation loss likewise; None without.
      train_s: Time in steps.
      tokens_per_s: Over these.
      traffic: Bytes moved.
      read_stall_s, write_stall_s: Time that nothing but a read or a write was waited for.
      peaks: By kind of memory.
      sample: Generated text, or None.
      resume_command: Shell command that continues the run.
      run_nvme_bytes_written: By all processes of the run; see `wear`.
      wear: What that means for the drive, or None.
      trace: Path of the trace, if one was recorded.
    """

    run_dir: Path
    status: str
    step: int
    num_steps: int
    num_skipped: int
    num_params: int
    loss_first: float | None
    loss_last: float | None
    valid_first: float | None
    valid_last: float | None
    train_s: float
    tokens_per_s: float
    traffic: Traffic
    read_stall_s: float
    write_stall_s: float
    peaks: dict[str, Peak]
    sample: str | None
    resume_command: str
    run_nvme_bytes_written: int = 0
    wear: str | None = None
    trace: str | None = None


def mean_last(values: list[float], count: int = 10) -> float | None:
    """The mean of the last few values: one step's loss says little about a run."""
    last = values[-count:]
    return sum(last) / len(last) if last else None


def losses(run_dir: Path, kind: str) -> list[tuple[int, float]]:
    """(step, loss) of a run's records of one kind, skipped steps left out."""
    return [
        (record["step"], record["loss"])
        for record in read_metrics(run_dir, kind)
        if record["loss"] is not None and not record.get("skipped")
    ]


def summary_table(summary: Summary) -> Table:
    """The table that ends a run."""
    table = Table(title=f"{summary.status} at step {summary.step}", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    for row in _rows(summary):
        table.add_row(*row)
    return table


def _rows(s: Summary) -> list[tuple[str, str, str]]:
    rows = [
        ("parameters", format_count(s.num_params), ""),
        ("loss", f"{_number(s.loss_first)} -> {_number(s.loss_last)}", "first step -> mean of the last 10"),
    ]
    if s.valid_last is not None:
        rows.append(("validation loss", f"{_number(s.valid_first)} -> {_number(s.valid_last)}", "before -> after"))
    steps = max(s.num_steps, 1)
    rows += [
        ("steps by this process", f"{s.num_steps}", f"{s.num_skipped} skipped in all"),
        ("tokens per second", f"{s.tokens_per_s:,.0f}", f"{s.train_s / steps:.3f} s per step"),
    ]
    for name, what in (
        ("nvme_read", "read from NVMe"),
        ("nvme_written", "written to NVMe"),
        ("h2d", "host to device"),
        ("d2h", "device to host"),
    ):
        num_bytes = getattr(s.traffic, name) / steps
        each = num_bytes / max(s.num_params, 1)
        rows.append((what, f"{format_bytes(num_bytes)}", f"per step; {each:.2f} bytes per parameter"))
    stalls = s.read_stall_s + s.write_stall_s
    share = 100 * stalls / s.train_s if s.train_s else 0.0
    rows.append(
        (
            "stalls",
            f"{stalls:.2f} s",
            f"{share:.1f}% of the time; reads {s.read_stall_s:.2f}, writes {s.write_stall_s:.2f}",
        )
    )
    if s.run_nvme_bytes_written:
        rows.append(
            ("written to NVMe in all", format_bytes(s.run_nvme_bytes_written), "by the run since its beginning")
        )
    for name, peak in s.peaks.items():
        rows.append((f"peak {name}", _bytes(peak.measured), f"planned {_bytes(peak.planned)}"))
    return rows


def plot_losses(run_dir: Path) -> Path | None:
    """Draws training and validation loss over steps into the run's directory; None if there is nothing to draw."""
    train, valid = losses(run_dir, "step"), losses(run_dir, "valid")
    if not train:
        return None
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(*zip(*train, strict=True), color="#9ecae1", linewidth=1, label="training")
    axes.plot(*zip(*_smoothed(train), strict=True), color="#08519c", linewidth=1.8, label="training, smoothed")
    if valid:
        axes.plot(*zip(*valid, strict=True), "o-", color="#d94801", markersize=4, label="validation")
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=run_dir.name)
    axes.grid(alpha=0.3)
    axes.legend()
    path = run_dir / LOSS_CURVE_FILE
    figure.savefig(path)
    return path


def _smoothed(points: list[tuple[int, float]], weight: float = 0.9) -> list[tuple[int, float]]:
    """Exponential moving average, started at the first value."""
    out, mean = [], points[0][1]
    for step, loss in points:
        mean = weight * mean + (1 - weight) * loss
        out.append((step, mean))
    return out


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _bytes(value: int | None) -> str:
    return "-" if value is None else format_bytes(value)


def figures(summary: Summary) -> dict[str, Any]:
    """The summary as JSON values, for files and scripts."""
    return {**dataclasses.asdict(summary), "run_dir": str(summary.run_dir)}


def from_figures(values: dict[str, Any]) -> Summary:
    """The inverse of `figures`."""
    peaks = {name: Peak(**peak) for name, peak in values["peaks"].items()}
    nested = {"run_dir": Path(values["run_dir"]), "traffic": Traffic(**values["traffic"]), "peaks": peaks}
    return Summary(**{**values, **nested})
