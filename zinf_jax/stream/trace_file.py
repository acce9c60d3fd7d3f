"""Traces as files: the JSON that Perfetto (https://ui.perfetto.dev) and chrome://tracing read.

One process; per lane as many threads (rows) as it had spans at once, since the viewers want spans of a row disjoint or
nested. Times are microseconds since the trace's first event, on a monotonic clock whose origin is in `otherData`.
"""

import gzip
import heapq
import json
import os
import pathlib
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from zinf_jax.errors import ConfigError
from zinf_jax.stream.trace import Event, Lane, StepMark, Trace

_PID = 1
_STEPS_TID = 1
_ROWS_PER_LANE = 1000  # tids of a lane begin at 1000 x its place
_STEP_CATEGORY = "step"
_ROUNDING_S = 2e-9  # times are kept to a nanosecond


def rows_of(events: Sequence[Event]) -> list[int]:
    """The row of each event, such that no two of one row overlap: the fewest rows, the first free one each time."""
    rows = [0] * len(events)
    free: list[int] = []
    busy: list[tuple[float, int]] = []  # (end, row)
    num_rows = 0
    for index in sorted(range(len(events)), key=lambda i: (events[i].start_s, events[i].end_s)):
        event = events[index]
        while busy and busy[0][0] <= event.start_s + _ROUNDING_S:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            row = heapq.heappop(free)
        else:
            row, num_rows = num_rows, num_rows + 1
        rows[index] = row
        heapq.heappush(busy, (event.end_s, row))
    return rows


def write_chrome(trace: Trace, path: str | os.PathLike[str]) -> pathlib.Path:
    """Writes a trace, gzipped if the name ends in `.gz`; the file appears whole or not at all.

    Raises:
      OSError: it cannot be written.
    """
    path = pathlib.Path(path)
    times = [*(e.start_s for e in trace.events), *(s.start_s for s in trace.steps)]
    origin = min(times, default=0.0)
    content = {
        "traceEvents": [*_steps(trace.steps, origin), *_lanes(trace, origin)],
        "displayTimeUnit": "ms",
        "otherData": {
            "producer": "zinf_jax",
            "clock": "CLOCK_MONOTONIC",
            "origin_s": origin,
            "dropped_events": trace.num_dropped,
            "notes": {str(lane): note for lane, note in trace.notes.items()},
        },
    }
    data = json.dumps(content, separators=(",", ":")).encode()
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.write_bytes(gzip.compress(data, 6) if path.suffix == ".gz" else data)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return path


def _steps(steps: Iterable[StepMark], origin: float) -> Iterable[dict[str, Any]]:
    yield from _thread(_STEPS_TID, "steps")
    for step in steps:
        name, args = f"step {step.number}", {"step": step.number}
        start = _us(step.start_s - origin)
        base = {"name": name, "cat": _STEP_CATEGORY, "ts": start, "pid": _PID, "tid": _STEPS_TID, "args": args}
        yield {**base, "ph": "i", "s": "g"}
        yield {**base, "ph": "X", "dur": round(_us(step.end_s - origin) - start, 3)}


def _lanes(trace: Trace, origin: float) -> Iterable[dict[str, Any]]:
    by_lane: dict[Lane, list[Event]] = {lane: [] for lane in Lane}
    for event in trace.events:
        by_lane[event.lane].append(event)
    for place, (lane, events) in enumerate(by_lane.items(), 1):
        rows = [min(row, _ROWS_PER_LANE - 1) for row in rows_of(events)]
        note = f" ({trace.notes[lane]})" if lane in trace.notes else ""
        for row in range(max(rows, default=0) + 1):
            yield from _thread(place * _ROWS_PER_LANE + row, f"{lane}{note}" if row == 0 else f"{lane} {row + 1}")
        for event, row in zip(events, rows, strict=True):
            start, end = _us(event.start_s - origin), _us(event.end_s - origin)
            yield {
                "name": event.name,
                "cat": str(lane),
                "ph": "X",
                "ts": start,
                "dur": round(end - start, 3),  # so that what follows at once does not overlap by a nanosecond
                "pid": _PID,
                "tid": place * _ROWS_PER_LANE + row,
                "args": event.args,
            }


def _thread(tid: int, name: str) -> Iterable[dict[str, Any]]:
    base = {"ph": "M", "pid": _PID, "tid": tid}
    yield {**base, "name": "thread_name", "args": {"name": name}}
    yield {**base, "name": "thread_sort_index", "args": {"sort_index": tid}}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def read_chrome(path: str | os.PathLike[str]) -> Trace:
    """Reads what `write_chrome` wrote; times are exact to a nanosecond.

    Raises:
      FileNotFoundError: there is no such file.
      ConfigError: it is not a trace of this program.
    """
    path = pathlib.Path(path)
    data = path.read_bytes()
    try:
        content = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
        other = content["otherData"]
        if other["producer"] != "zinf_jax":
            raise KeyError("producer")
        origin = other["origin_s"]
        notes = {Lane(lane): note for lane, note in other["notes"].items()}
        spans = [entry for entry in content["traceEvents"] if entry["ph"] == "X"]
        steps = [
            StepMark(entry["args"]["step"], *_interval(entry, origin))
            for entry in spans
            if entry["cat"] == _STEP_CATEGORY
        ]
        events = [
            Event(Lane(entry["cat"]), entry["name"], *_interval(entry, origin), entry["args"])
            for entry in spans
            if entry["cat"] != _STEP_CATEGORY
        ]
    except (ValueError, KeyError, TypeError, EOFError, gzip.BadGzipFile) as error:
        raise ConfigError(
            f"{path} is no trace that `zinf train --trace` or `trainer.trace` wrote: {error!r}"
        ) from error
    return Trace(tuple(sorted(events, key=lambda event: event.start_s)), tuple(steps), notes, other["dropped_events"])


def _interval(entry: dict[str, Any], origin: float) -> tuple[float, float]:
    start = origin + entry["ts"] * 1e-6
    return start, start + entry["dur"] * 1e-6
