"""The order of a step, and from it: when each page is fetched and dropped, and where in the arena it lies.

The order in which a step touches its state is known before it starts, so residency is offline: fetches are issued
`lookahead` positions ahead, a page whose next use is near stays (Belady's rule on a known sequence, "A study of
replacement algorithms", 1966; gaps are filled shortest first, as in interval caching), and every frame's place is
computed like a compiler's buffer assignment. The executor decides nothing, and planned bytes are the real ones.

Time is counted in positions: one per unit and pass. Something that is in use at position t is in use until the programs
of position `t + max_in_flight` are dispatched, since only then is t known to be done.
"""

import dataclasses
import enum
from collections.abc import Iterable, Mapping, Sequence

from zinf_jax.plan.shape import StepShape, StreamOptions
from zinf_jax.units import ceil_to

FRAME_ALIGN = 4096


class Phase(enum.StrEnum):
    FORWARD = "forward"
    TURN = "turn"  # the last unit: forward and backward in one program
    BACKWARD = "backward"


@dataclasses.dataclass(frozen=True)
class Position:
    """One unit's pass, for the micro-batches of one group."""

    index: int
    phase: Phase
    unit: int
    group: int


@dataclasses.dataclass(frozen=True)
class Residency:
    """A time during which something occupies a frame: from position `start` until position `end` begins.

    Attributes:
      key: What it is: ("weights", page), ("gradients", page) or ("residual", value, micro_batch).
      num_bytes: Frame bytes.
      first_use, last_use: Positions between which programs read it.
    """

    key: tuple[str | int, ...]
    num_bytes: int
    start: int
    end: int
    first_use: int
    last_use: int


def positions_of(shape: StepShape) -> tuple[Position, ...]:
    """The order of units: per group all forward, then backward."""
    result: list[Position] = []
    for group in range(len(shape.group_sizes)):
        forward = range(len(shape.units) - (1 if shape.turn else 0))
        steps = [(Phase.FORWARD, unit) for unit in forward]
        steps += [
            (Phase.TURN if shape.turn and i == 0 else Phase.BACKWARD, unit) for i, unit in enumerate(shape.backward)
        ]
        result += [Position(len(result) + i, phase, unit, group) for i, (phase, unit) in enumerate(steps)]
    return tuple(result)


def weight_residencies(
    shape: StepShape,
    positions: Sequence[Position],
    options: StreamOptions,
    *,
    pages: Iterable[int],
    capacity: int | None = None,
) -> tuple[Residency, ...]:
    """When each streamed page is in a frame.

    Args:
      shape, positions: The step.
      options: lookahead, max_in_flight.
      pages: The pages that are fetched from NVMe (the others are always there).
      capacity: Bytes that frames may take at any time; None for no limit. What the uses themselves need is taken
        whether or not it fits (the caller checks); the limit decides which pages stay between uses.

    Returns:
      Residencies, by start. Each is one fetch.
    """
    uses: dict[int, list[int]] = {page: [] for page in pages}
    for position in positions:
        for page in shape.units[position.unit].pages:
            if page in uses:
                uses[page].append(position.index)
    runs: list[list[int]] = []  # [page, first use, last use]
    gaps: list[tuple[int, int]] = []  # (length, index of the run before it)
    hold = options.max_in_flight + options.update_hold
    for page, at in sorted(uses.items()):
        for number, use in enumerate(at):
            if number and use - options.lookahead <= at[number - 1] + hold:
                runs[-1][2] = use
                continue
            if number:
                gaps.append((use - at[number - 1], len(runs) - 1))
            runs.append([page, use, use])
    load = [0] * (len(positions) + hold + 1)
    for page, first, last in runs:
        _add(load, max(0, first - options.lookahead), last + hold, shape.pages[page].weights_bytes)
    kept = _keep_gaps(shape, runs, gaps, load, options, capacity)
    merged: list[list[int]] = []
    for index, run in enumerate(runs):
        if index - 1 in kept:
            merged[-1][2] = run[2]
        else:
            merged.append(list(run))
    return tuple(
        sorted(
            (
                Residency(
                    ("weights", page), shape.pages[page].weights_bytes,
                    max(0, first - options.lookahead), last + hold, first, last,
                )
                for page, first, last in merged
            ),
            key=lambda r: (r.start, r.first_use),
        )
    )  # fmt: skip


def _add(load: list[int], start: int, end: int, num_bytes: int) -> None:
    for t in range(start, min(end, len(load))):
        load[t] += num_bytes


def _keep_gaps(
    shape: StepShape,
    runs: Sequence[Sequence[int]],
    gaps: Sequence[tuple[int, int]],
    load: list[int],
    options: StreamOptions,
    capacity: int | None,
) -> set[int]:
    """Which gaps between two uses of a page are bridged: the shortest first, as long as all fits."""
    kept: set[int] = set()
    for _, before in sorted(gaps):
        page, _, last = runs[before]
        start = last + options.max_in_flight + options.update_hold
        end = runs[before + 1][1] - options.lookahead
        num_bytes = shape.pages[page].weights_bytes
        if capacity is None or max(load[start:end], default=0) + num_bytes <= capacity:
            kept.add(before)
            _add(load, start, end, num_bytes)
    return kept


def gradient_residencies(
    shape: StepShape, positions: Sequence[Position], options: StreamOptions, *, pages: Iterable[int]
) -> tuple[Residency, ...]:
    """Frames in which spilled gradients are collected: from the first contribution until written.

    A gradient is written after its last contribution was retired, and has `max_in_flight` positions for it.
    """
    wanted = set(pages)
    spans: dict[int, tuple[int, int]] = {}
    for position in positions:
        if position.phase is Phase.FORWARD:
            continue
        for page in shape.units[position.unit].gradient_pages:
            if page in wanted:
                first, _ = spans.get(page, (position.index, 0))
                spans[page] = (first, position.index)
    hold = 2 * options.max_in_flight
    return tuple(
        Residency(("gradients", page), shape.pages[page].gradient_bytes, first, last + hold, first, last)
        for page, (first, last) in sorted(spans.items(), key=lambda item: item[1])
    )


@dataclasses.dataclass(frozen=True)
class ValueLife:
    """Positions at which a value is made and read; -1 where there is none."""

    value: int
    group: int
    made: int
    last_forward: int
    first_backward: int
    last_backward: int

    @property
    def is_residual(self) -> bool:
        return self.first_backward >= 0


def value_lives(shape: StepShape, positions: Sequence[Position]) -> tuple[ValueLife, ...]:
    """The life of every value that a unit makes, per group."""
    lives: dict[tuple[int, int], list[int]] = {}
    for position in positions:
        unit = shape.units[position.unit]
        if position.phase is not Phase.BACKWARD:
            for value in unit.outputs:
                lives[(value, position.group)] = [position.index, position.index, -1, -1]
        for value in unit.inputs if position.phase is Phase.FORWARD else (*unit.inputs, *unit.saved):
            life = lives.get((value, position.group))
            if life is None:
                continue  # an outer input
            if position.phase is Phase.FORWARD:
                life[1] = position.index
            else:
                life[2] = position.index if life[2] < 0 else life[2]
                life[3] = position.index
    return tuple(ValueLife(value, group, *life) for (value, group), life in lives.items())


def residual_residencies(
    shape: StepShape, lives: Sequence[ValueLife], options: StreamOptions, *, spilled: frozenset[int]
) -> tuple[Residency, ...]:
    """Frames of the residuals that do not stay on the device: on the way out, and on the way in."""
    out: list[Residency] = []
    hold = options.max_in_flight
    first_micro = [sum(shape.group_sizes[:g]) for g in range(len(shape.group_sizes))]
    for life in lives:
        if life.value not in spilled or not life.is_residual:
            continue
        num_bytes = ceil_to(shape.value_bytes[life.value], FRAME_ALIGN)
        for micro in range(shape.group_sizes[life.group]):
            key = (life.value, first_micro[life.group] + micro)
            leave, back = life.last_forward, life.first_backward
            start_in = max(leave + 2 * hold, back - options.lookahead)
            out.append(Residency(("residual_out", *key), num_bytes, leave, leave + 2 * hold, leave, leave))
            out.append(
                Residency(
                    ("residual_in", *key), num_bytes, min(start_in, back), life.last_backward + hold,
                    back, life.last_backward,
                )
            )  # fmt: skip
    return tuple(out)


def pack(residencies: Sequence[Residency]) -> tuple[dict[int, int], int]:
    """Offline buffer assignment: offsets such that what lives at the same time does not overlap.

    Largest first, then earliest; each at the lowest free place. Within a few percent of the load's maximum for
    the nearly equal pages of a stack of layers.

    Returns:
      Offset per index into `residencies`, and the total bytes.
    """
    order = sorted(range(len(residencies)), key=lambda i: (-residencies[i].num_bytes, residencies[i].start))
    placed: list[int] = []
    offsets: dict[int, int] = {}
    total = 0
    for index in order:
        item = residencies[index]
        busy = sorted(
            (offsets[j], offsets[j] + ceil_to(residencies[j].num_bytes, FRAME_ALIGN))
            for j in placed
            if residencies[j].start < item.end and item.start < residencies[j].end
        )
        offset = 0
        for begin, finish in busy:
            if offset + item.num_bytes <= begin:
                break
            offset = max(offset, finish)
        offsets[index] = offset
        placed.append(index)
        total = max(total, offset + ceil_to(item.num_bytes, FRAME_ALIGN))
    return offsets, total


def peak_load(residencies: Iterable[Residency]) -> int:
    """The most bytes that live at once: a lower bound of what any packing takes."""
    events: dict[int, int] = {}
    for item in residencies:
        events[item.start] = events.get(item.start, 0) + item.num_bytes
        events[item.end] = events.get(item.end, 0) - item.num_bytes
    load = peak = 0
    for _, change in sorted(events.items()):
        load += change
        peak = max(peak, load)
    return peak


def device_peak(
    shape: StepShape,
    positions: Sequence[Position],
    lives: Sequence[ValueLife],
    options: StreamOptions,
    *,
    spilled: frozenset[int],
    kept_gradients: Mapping[int, int],
) -> int:
    """Most device bytes at once: values, cotangents and what the programs in flight need; no pages.

    Args:
      shape, positions, lives, options: The step.
      spilled: Residual values that leave the device.
      kept_gradients: Bytes of gradients per page that stay on the device until the update.
    """
    hold = options.max_in_flight
    load = [sum(shape.value_bytes[v] for v in shape.outer_values) * shape.num_micro_batches] * (len(positions) + hold)
    inputs = {value for unit in shape.units for value in unit.inputs}
    for life in lives:
        micros = shape.group_sizes[life.group]
        num_bytes = shape.value_bytes[life.value] * micros
        if life.value in shape.kept_values:
            _add(load, life.made, len(load), num_bytes)
        elif not life.is_residual:
            _add(load, life.made, life.last_forward + hold, num_bytes)
        elif life.value in spilled:
            _add(load, life.made, life.last_forward + hold, num_bytes)
            _add(load, life.first_backward, life.last_backward + hold, num_bytes)
        else:
            _add(load, life.made, life.last_backward + hold, num_bytes)
        if life.is_residual and life.value in inputs:  # a cotangent, from its first reader's backward to its maker's
            made_back = [
                p.index for p in positions
                if p.group == life.group and p.phase is not Phase.FORWARD
                and life.value in shape.units[p.unit].outputs
            ]  # fmt: skip
            _add(load, life.first_backward, (made_back or [life.last_backward])[-1] + hold, num_bytes)
    done: set[int] = set()
    for position in positions:
        unit = shape.units[position.unit]
        backward = position.phase is not Phase.FORWARD
        num_bytes = unit.backward_bytes if backward else unit.forward_bytes
        _add(load, position.index, position.index + hold, num_bytes)
        micros = shape.group_sizes[position.group]
        if backward and micros > 1:  # the sum so far, beside the gradients of each program in flight
            _add(load, position.index, position.index + 1, (num_bytes - unit.crossing_bytes) * min(micros, hold))
        if backward:
            new = [p for p in unit.gradient_pages if p in kept_gradients and p not in done]
            done.update(new)
            _add(load, position.index, len(load), sum(kept_gradients[p] for p in new))
    temporary, beside = [0] * len(load), [0] * len(load)
    for position in positions:
        unit = shape.units[position.unit]
        backward = position.phase is not Phase.FORWARD
        num_bytes = unit.backward_temp_bytes if backward else unit.forward_temp_bytes
        for t in range(position.index, min(position.index + hold, len(load))):
            temporary[t] = max(temporary[t], num_bytes)
            beside[t] = max(beside[t], unit.gradient_temp_bytes if backward else 0)
    casts = _casts_at(shape, positions, max(2, hold), len(load))
    return max(map(sum, zip(load, temporary, beside, casts, strict=True)), default=0)


def _casts_at(shape: StepShape, positions: Sequence[Position], alive: int, length: int) -> list[int]:
    """Bytes of casts at each position: its own and those before, and then, once the first is done, the next one's."""
    sizes = [shape.units[position.unit].cast_bytes for position in positions] + [0] * (length - len(positions) + 1)
    sums = [sum(sizes[max(0, last - alive + 1) : last + 1]) for last in range(length + 1)]
    return [max(sums[t], sums[t + 1]) for t in range(length)]
