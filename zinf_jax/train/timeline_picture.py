"""The picture of one step: a row per lane, how busy it was, and stalls with their causes.

As an HTML page (self-contained: an SVG with tooltips, nothing from the network) or as anything that matplotlib writes.
"""

import html
import pathlib
from collections.abc import Iterator

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from zinf_jax.errors import ConfigError
from zinf_jax.stream.trace import Event, Lane, StepMark, Trace
from zinf_jax.stream.trace_file import rows_of
from zinf_jax.train.timeline import DEVICE_CAUSE, LaneUse, StepSummary, clipped, summarise

_COLORS = {
    Lane.DEVICE_COMPUTE: "#2ca25f",
    Lane.HOST_TO_DEVICE: "#3182bd",
    Lane.DEVICE_TO_HOST: "#6baed6",
    Lane.NVME_READ: "#756bb1",
    Lane.NVME_WRITE: "#9e9ac8",
    Lane.UPDATE: "#e6a817",
    Lane.COLLECTIVES: "#636363",
    Lane.COMMIT: "#8c6d31",
}
_STALL_COLORS = ("#d7301f", "#fc8d59", "#c51b8a", "#7a0177", "#67001f")
_DEVICE_STALL = "#bdbdbd"
_MAX_ROWS = 6  # of spans drawn side by side in a lane; more share the rows
_LANE_HEIGHT, _LANE_GAP, _LEFT, _WIDTH, _RIGHT = 42, 10, 150, 1080, 90  # pixels


def write(trace: Trace, step: StepMark, path: str | pathlib.Path) -> pathlib.Path:
    """Draws a step into a file; its suffix says how: .html, .png, .svg, .pdf.

    Raises:
      ConfigError: an unknown suffix.
    """
    path = pathlib.Path(path)
    if path.suffix in (".html", ".htm"):
        path.write_text(page(trace, step), encoding="utf-8")
        return path
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"cannot draw into {path.name!r}: name a file that ends in .html, .png, .svg or .pdf")
    _figure(trace, step).savefig(path)
    return path


def _lanes(trace: Trace, step: StepMark) -> Iterator[tuple[LaneUse, list[Event], list[int], int]]:
    """Per lane: its use, its events in the step, their rows, and how many rows there are."""
    inside = clipped(trace.events, step)
    for use in summarise(inside, step).lanes:
        mine = [event for event in inside if event.lane is use.lane]
        rows = [row % _MAX_ROWS for row in rows_of(mine)]
        yield use, mine, rows, max(rows, default=0) + 1


def _stall_colors(summary: StepSummary) -> dict[str, str]:
    late = [cause for cause in summary.stalls if cause != DEVICE_CAUSE]
    colors = {cause: _STALL_COLORS[i % len(_STALL_COLORS)] for i, cause in enumerate(late)}
    return {**colors, DEVICE_CAUSE: _DEVICE_STALL}


def _color(event: Event, stalls: dict[str, str]) -> str:
    return stalls[str(event.args.get("cause", event.name))] if event.lane is Lane.STALL else _COLORS[event.lane]


def _is_late(event: Event) -> bool:
    """A stall that is to be marked: nothing but a transfer, an update or a commit was waited for."""
    return event.lane is Lane.STALL and event.args.get("cause") != DEVICE_CAUSE


def _title(summary: StepSummary, trace: Trace) -> str:
    dropped = f"; {trace.num_dropped} events found no room" if trace.num_dropped else ""
    return "\n".join(summary.lines()) + dropped


def _share(use: LaneUse, trace: Trace) -> str:
    if use.lane is Lane.COLLECTIVES and not use.num_spans:
        return ""
    return f"{100 * use.share:.1f}%"


# --- matplotlib -----------------------------------------------------------------------------------------------------


def _figure(trace: Trace, step: StepMark) -> Figure:
    summary = summarise(trace.events, step)
    stalls = _stall_colors(summary)
    figure = Figure(figsize=(14, 6.5), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    labels = []
    for place, (use, events, rows, num_rows) in enumerate(_lanes(trace, step)):
        height = 0.8 / num_rows
        for row in range(num_rows):
            mine = [event for event, r in zip(events, rows, strict=True) if r == row]
            spans = [(event.start_s - step.start_s, event.end_s - event.start_s) for event in mine]
            colors = [_color(event, stalls) for event in mine]
            axes.broken_barh(spans, (place - 0.4 + row * height, height * 0.92), facecolors=colors, linewidth=0)
        labels.append(str(use.lane))
        axes.text(summary.time_s * 1.01, place, _share(use, trace), va="center", fontsize=10)
        if use.lane in trace.notes and not use.num_spans:
            axes.text(summary.time_s * 0.01, place, trace.notes[use.lane], va="center", color="#777777", fontsize=9)
    for event in clipped(trace.events, step):
        if _is_late(event):
            start, end = event.start_s - step.start_s, event.end_s - step.start_s
            axes.axvspan(start, end, color=_color(event, stalls), alpha=0.12, linewidth=0, zorder=0)
    for cause, seconds in summary.stalls.items():
        axes.plot([], [], "s", color=stalls[cause], label=f"stall: {cause}, {seconds:.3f} s")
    axes.set(xlim=(0, summary.time_s * 1.08), xlabel="seconds since the step began", title=_title(summary, trace))
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.grid(axis="x", alpha=0.3)
    if summary.stalls:
        figure.legend(loc="outside lower center", ncols=min(3, len(summary.stalls)), frameon=False)
    return figure


# --- HTML -----------------------------------------------------------------------------------------------------------

_STYLE = """
body { font: 14px system-ui, sans-serif; margin: 24px; color: #222; background: #fff; }
h1 { font-size: 18px; } p { margin: 4px 0; } .dim { fill: #777; } text { font-size: 13px; fill: #222; }
rect.lane { fill: #f4f4f4; } rect.span:hover { stroke: #000; stroke-width: 1; }
table { border-collapse: collapse; margin-top: 12px; } td { padding: 2px 14px 2px 0; }
.key { display: inline-block; width: 12px; height: 12px; margin-right: 6px; }
"""


def page(trace: Trace, step: StepMark) -> str:
    """One self-contained HTML page."""
    summary = summarise(trace.events, step)
    stalls = _stall_colors(summary)
    rows = "".join(
        f'<tr><td><span class="key" style="background:{stalls[cause]}"></span>stall: {html.escape(cause)}</td>'
        f"<td>{seconds:.3f} s</td><td>{100 * seconds / summary.time_s:.1f}%</td></tr>"
        for cause, seconds in summary.stalls.items()
    )
    lines = "".join(f"<p>{html.escape(line)}</p>" for line in _title(summary, trace).split("\n"))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>step {summary.number}</title><style>{_STYLE}</style></head>\n<body><h1>Step {summary.number}</h1>"
        f"{lines}\n{_svg(trace, step, stalls)}\n<table>{rows}</table></body></html>\n"
    )


def _svg(trace: Trace, step: StepMark, stalls: dict[str, str]) -> str:
    time_s = max(step.end_s - step.start_s, 1e-12)

    def at(seconds: float) -> float:
        return _LEFT + (seconds - step.start_s) / time_s * _WIDTH

    height = len(Lane) * (_LANE_HEIGHT + _LANE_GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + _RIGHT}" height="{height + 34}" role="img">'
    ]
    for place, (use, events, rows, num_rows) in enumerate(_lanes(trace, step)):
        top = place * (_LANE_HEIGHT + _LANE_GAP)
        middle = top + _LANE_HEIGHT / 2 + 5
        parts.append(f'<rect class="lane" x="{_LEFT}" y="{top}" width="{_WIDTH}" height="{_LANE_HEIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{middle}" text-anchor="end">{use.lane}</text>')
        parts.append(f'<text x="{_LEFT + _WIDTH + 8}" y="{middle}">{_share(use, trace)}</text>')
        if use.lane in trace.notes and not use.num_spans:
            note = html.escape(trace.notes[use.lane])
            parts.append(f'<text class="dim" x="{_LEFT + 8}" y="{middle}">{note}</text>')
        each = _LANE_HEIGHT / num_rows
        for event, row in zip(events, rows, strict=True):
            width = max(at(event.end_s) - at(event.start_s), 0.4)
            parts.append(
                f'<rect class="span" x="{at(event.start_s):.2f}" y="{top + row * each:.2f}" width="{width:.2f}" '
                f'height="{each * 0.94:.2f}" fill="{_color(event, stalls)}">'
                f"<title>{_tooltip(event, step)}</title></rect>"
            )
    for event in clipped(trace.events, step):
        if _is_late(event):
            parts.append(
                f'<rect x="{at(event.start_s):.2f}" y="0" width="{at(event.end_s) - at(event.start_s):.2f}" '
                f'height="{height}" fill="{_color(event, stalls)}" opacity="0.1" pointer-events="none"/>'
            )
    for tick in range(11):
        x = _LEFT + tick / 10 * _WIDTH
        parts.append(f'<line x1="{x}" y1="0" x2="{x}" y2="{height}" stroke="#000" opacity="0.08"/>')
        label = f"{time_s * tick / 10:.3f}"
        parts.append(f'<text class="dim" x="{x}" y="{height + 16}" text-anchor="middle">{label}</text>')
    parts.append(f'<text class="dim" x="{_LEFT + _WIDTH + 30}" y="{height + 16}">seconds</text></svg>')
    return "".join(parts)


def _tooltip(event: Event, step: StepMark) -> str:
    start, length = event.start_s - step.start_s, event.end_s - event.start_s
    lines = [event.name, f"{event.lane}: {1e3 * length:.3f} ms, from {1e3 * start:.3f} ms"]
    lines += [f"{key}: {value}" for key, value in event.args.items()]
    return html.escape("\n".join(lines))
