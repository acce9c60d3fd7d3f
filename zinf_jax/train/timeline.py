"""What a trace says of one step: how busy each lane was, what was waited for, and what bounds the step.

Pure functions of a trace; `timeline_picture` draws them.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from rich.markup import escape
from rich.table import Table

from zinf_jax.errors import ConfigError
from zinf_jax.stream.trace import Event, Lane, StepMark, Trace

# Transfers of these run beside everything else: the step only loses time to them where it stalls.
_BACKGROUND = (Lane.NVME_READ, Lane.NVME_WRITE)
_WORK = tuple(lane for lane in Lane if lane is not Lane.STALL)
DEVICE_CAUSE = "device"  # waiting for compute is what a step that nothing holds up does


@dataclasses.dataclass(frozen=True)
class LaneUse:
    """One lane within one step.

    Attributes:
      lane: Which.
      busy_s: The union of its spans: overlaps count once.
      share: Of the step's time, 0 to 1.
      num_spans: That touch the step.
    """

    lane: Lane
    busy_s: float
    share: float
    num_spans: int


@dataclasses.dataclass(frozen=True)
class StepSummary:
    """One step.

    Attributes:
      number: The step's.
      time_s: How long it took.
      lanes: All, in display order.
      stalls: Cause -> seconds waited, the most first. "device" is waiting for compute.
      bound_by: The lane of work that was busy longest; None if nothing was recorded.
      accounted: Share of the step in which a span other than an NVMe transfer (which goes on in the background) was
        open: what is left is the program's own overhead.
    """

    number: int
    time_s: float
    lanes: tuple[LaneUse, ...]
    stalls: dict[str, float]
    bound_by: LaneUse | None
    accounted: float

    def lines(self) -> tuple[str, ...]:
        """What bounds the step, in words."""
        if self.bound_by is None:
            return (f"step {self.number}, {self.time_s:.3f} s: nothing was recorded in it",)
        bound = f"step {self.number}, {self.time_s:.3f} s, is bound by: {self.bound_by.lane}, "
        bound += f"busy {100 * self.bound_by.share:.0f}% of it"
        waits = ", ".join(f"{cause} {seconds:.3f} s" for cause, seconds in self.stalls.items())
        return bound, f"stalls: {waits or 'none'}"


def clipped(events: Iterable[Event], step: StepMark) -> list[Event]:
    """The parts of events that lie within a step."""
    return [
        event._replace(start_s=max(event.start_s, step.start_s), end_s=min(event.end_s, step.end_s))
        for event in events
        if event.start_s < step.end_s and event.end_s > step.start_s
    ]


def union_s(events: Iterable[Event]) -> float:
    """The time in which at least one of the events was going on."""
    total, until = 0.0, float("-inf")
    for event in sorted(events, key=lambda e: e.start_s):
        total += max(0.0, event.end_s - max(event.start_s, until))
        until = max(until, event.end_s)
    return total


def summarise(events: Iterable[Event], step: StepMark) -> StepSummary:
    """Sums up one step.

    Args:
      events: Of a trace, in any order; what lies outside of the step does not count.
      step: Its time.
    """
    time_s = step.end_s - step.start_s
    inside = clipped(events, step)
    lanes = []
    for lane in Lane:
        mine = [event for event in inside if event.lane is lane]
        busy = union_s(mine)
        lanes.append(LaneUse(lane, busy, busy / time_s if time_s > 0 else 0.0, len(mine)))
    causes: dict[str, list[Event]] = {}
    for event in inside:
        if event.lane is Lane.STALL:
            causes.setdefault(str(event.args.get("cause", event.name)), []).append(event)
    stalls = sorted(((cause, union_s(waits)) for cause, waits in causes.items()), key=lambda pair: -pair[1])
    busiest = max((use for use in lanes if use.lane in _WORK), key=lambda use: use.busy_s)
    accounted = union_s(event for event in inside if event.lane not in _BACKGROUND)
    return StepSummary(
        step.number, time_s, tuple(lanes), dict(stalls), busiest if busiest.busy_s else None,
        accounted / time_s if time_s > 0 else 0.0,
    )  # fmt: skip


def find_step(steps: Sequence[StepMark], number: int | None) -> StepMark:
    """The step of a trace with this number (its last attempt), or the last step.

    Raises:
      ConfigError: it is not there.
    """
    found = [step for step in steps if number is None or step.number == number]
    if found:
        return found[-1]
    if not steps:
        raise ConfigError("the trace holds no whole step: record at least one, `zinf train --trace PATH`")
    there = ", ".join(str(n) for n in dict.fromkeys(step.number for step in steps))
    raise ConfigError(f"the trace holds no step {number}: it holds {there}")


def table(summary: StepSummary, trace: Trace) -> Table:
    """Utilisation by lane."""
    result = Table(
        title=f"step {summary.number}: {summary.time_s:.3f} s", title_justify="left",
        caption="busy: share of the step in which the lane had something going on", caption_justify="left",
    )  # fmt: skip
    result.add_column("lane")
    for name in ("busy", "seconds", "spans"):
        result.add_column(name, justify="right")
    result.add_column("", style="dim")
    for use in summary.lanes:
        note = trace.notes.get(use.lane, "")
        style = "bold" if summary.bound_by is not None and use.lane is summary.bound_by.lane else None
        seen = use.num_spans or use.lane is not Lane.COLLECTIVES
        cells = (f"{100 * use.share:.1f}%", f"{use.busy_s:.3f}", f"{use.num_spans}") if seen else ("-", "-", "-")
        result.add_row(str(use.lane), *cells, escape(note), style=style)
    return result
