"""Where to cut: numbers only, no JAX.

A sequence of steps, each with a structural hash and the parameter pieces that it reads, and between them gaps with the
bytes alive across. First the repeated blocks are found (a run of steps whose hashes repeat with some period) and cut at
equal places, one block per unit, so that the units are equal; then dynamic programming cuts what lies between them,
and blocks that are larger than the limit, where the fewest bytes cross.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Hashable, Sequence

# What a cut costs beside the bytes that cross it: a dispatch and a fetch, as bytes that could have been moved instead.
_CUT_BYTES = 1 << 16
_NUM_OCCURRENCES = 8  # how far a step looks for its like
_MAX_BLOCKS = 8  # of a kind in one unit: more saves little, and takes long to compile
_NUM_PERIODS = 24  # candidates that are tried


@dataclasses.dataclass(frozen=True)
class Steps:
    """What cutting looks at.

    Attributes:
      hashes: One per step; equal for steps that may stand at the same place of a repeated block.
      reads: Per step, the pieces that it reads and their bytes.
      live: `live[i]` are the bytes that cross a cut before step i; one longer than the steps.
    """

    hashes: Sequence[int]
    reads: Sequence[Sequence[tuple[Hashable, int]]]
    live: Sequence[int]

    def piece_bytes(self, start: int, stop: int) -> int:
        seen = dict(read for step in range(start, stop) for read in self.reads[step])
        return sum(seen.values())

    def first_reads(self, start: int, stop: int) -> int:
        """Bytes that the steps read, each step's own counted by itself (a weight, not a size)."""
        return sum(num_bytes for step in range(start, stop) for _, num_bytes in self.reads[step])


def choose_cuts(steps: Steps, max_bytes: int, min_bytes: int) -> list[int]:
    """The steps before which to cut, ascending, without 0 and the end.

    Args:
      max_bytes: Parameter bytes per unit; a single step may read more.
      min_bytes: Repeated blocks that are smaller are taken several at a time.
    """
    num_steps = len(steps.hashes)
    cuts = {cut for cut in _cut_range(steps, 0, num_steps, max_bytes, min_bytes) if 0 < cut < num_steps}
    cuts.update(_cut_oversized(steps, sorted(cuts), max_bytes))
    return _join_bare(steps, sorted(cuts))


def _cut_range(steps: Steps, start: int, stop: int, max_bytes: int, min_bytes: int) -> list[int]:
    """Cuts inside a range, its own borders not included."""
    if not any(steps.reads[step] for step in range(start, stop)):
        return []
    period = _best_period(steps, start, stop)
    if period is None:
        return _cut_freely(steps, start, stop, max_bytes)
    cuts: list[int] = []
    position = start
    for run_start, run_stop in _runs(steps.hashes, start, stop, period):
        borders = _place_blocks(steps, max(run_start, position), run_stop, period)
        if len(borders) < 3 or not steps.first_reads(borders[0], borders[-1]):
            continue
        if borders[0] > position:
            cuts += _cut_range(steps, position, borders[0], max_bytes, min_bytes)
        cuts += _cut_blocks(steps, borders, max_bytes, min_bytes)
        position = borders[-1]
    if position == start:
        return _cut_freely(steps, start, stop, max_bytes)
    if position < stop:
        cuts += _cut_range(steps, position, stop, max_bytes, min_bytes)
    return cuts


def _best_period(steps: Steps, start: int, stop: int) -> int | None:
    """The period whose runs cover the most parameter bytes; the smallest of those that cover about as many."""
    last_seen: dict[int, list[int]] = {}
    votes: Counter[int] = Counter()
    for step in range(start, stop):
        if steps.reads[step]:
            earlier = last_seen.setdefault(steps.hashes[step], [])
            weight = 1 + sum(num_bytes for _, num_bytes in steps.reads[step])
            for other in earlier[-_NUM_OCCURRENCES:]:
                votes[step - other] += weight
            earlier.append(step)
    best, best_covered = None, 0.0
    for period in sorted(period for period, _ in votes.most_common(_NUM_PERIODS)):
        covered = 0
        for run_start, run_stop in _runs(steps.hashes, start, stop, period):
            whole = (run_stop - run_start) // period * period
            covered += steps.first_reads(run_start, run_start + whole)
        if covered > best_covered * 1.02:
            best, best_covered = period, covered
    return best


def _runs(hashes: Sequence[int], start: int, stop: int, period: int) -> list[tuple[int, int]]:
    """Maximal ranges in which steps repeat with this period at least twice."""
    runs = []
    run_start = start
    for step in range(start, stop - period + 1):
        if step == stop - period or hashes[step] != hashes[step + period]:
            if step - run_start >= period:
                runs.append((run_start, step + period))
            run_start = step + 1
    return runs


def _place_blocks(steps: Steps, start: int, stop: int, period: int) -> list[int]:
    """Borders of the blocks in a run, where the fewest bytes cross; of equal phases the first with the most blocks."""
    best: tuple[float, int, int] | None = None
    for phase in range(min(period, stop - start)):
        borders = range(start + phase, stop + 1, period)
        if len(borders) < 3:
            continue
        inner = [steps.live[border] for border in borders[1:-1]]
        # A piece that both sides of a border read is fetched twice.
        read = steps.piece_bytes(borders[1], borders[2])
        rank = (sum(inner) / len(inner) + read, -len(borders), phase)
        if best is None or rank < best:
            best = rank
    return [] if best is None else list(range(start + best[2], stop + 1, period))


def _cut_blocks(steps: Steps, borders: list[int], max_bytes: int, min_bytes: int) -> list[int]:
    """Cuts a run of equal blocks: at each border, every few if they are small, or inside as well if they are large."""
    # The second block: the first may share pieces with what was before.
    start, stop = borders[1], borders[2]
    block_bytes = steps.piece_bytes(start, stop)
    if block_bytes > max_bytes:
        inner = [cut - start for cut in _cut_range(steps, start, stop, max_bytes, min_bytes)]
        return [*borders, *(border + offset for border in borders[:-1] for offset in inner)]
    if block_bytes >= min_bytes:
        inner = [cut - start for cut in _inner_repeats(steps, start, stop, max_bytes, min_bytes)]
        return [*borders, *(border + offset for border in borders[:-1] for offset in inner)]
    num_blocks = max(1, min(-(-min_bytes // max(block_bytes, 1)), len(borders) - 1, _MAX_BLOCKS))
    # A few more at a time where that leaves no smaller group, and so no other program, at the end.
    even = [n for n in range(num_blocks, 2 * num_blocks) if (len(borders) - 1) % n == 0]
    num_blocks = even[0] if even else num_blocks
    while num_blocks > 1 and steps.piece_bytes(borders[0], borders[num_blocks]) > max_bytes:
        num_blocks -= 1
    return [*borders[:-1:num_blocks], borders[-1]]


def _inner_repeats(steps: Steps, start: int, stop: int, max_bytes: int, min_bytes: int) -> list[int]:
    """Cuts inside a block that is mostly repeats of a smaller one, where as few bytes cross as between blocks."""
    period = _best_period(steps, start, stop)
    if period is None:
        return []
    cuts: list[int] = []
    covered = 0
    for run_start, run_stop in _runs(steps.hashes, start, stop, period):
        borders = _place_blocks(steps, run_start, run_stop, period)
        if len(borders) < 3 or max(steps.live[border] for border in borders[1:-1]) > steps.live[start]:
            continue
        if steps.piece_bytes(borders[1], borders[2]) < min_bytes:
            continue
        covered += steps.first_reads(borders[0], borders[-1])
        cuts += [border for border in borders if start < border < stop]
    return cuts if 2 * covered >= steps.first_reads(start, stop) else []


def _cut_freely(steps: Steps, start: int, stop: int, max_bytes: int) -> list[int]:
    """Dynamic programming: each unit under the limit, the fewest bytes fetched and carried, the fewest cuts."""
    places = _candidates(steps, start, stop)
    cost = [0.0] * len(places)
    previous = [0] * len(places)
    for j in range(1, len(places)):
        best, seen, total, num_steps = float("inf"), set(), 0, 0
        for i in range(j - 1, -1, -1):
            for step in range(places[i], places[i + 1]):
                num_steps += bool(steps.reads[step])
                for piece, num_bytes in steps.reads[step]:
                    if piece not in seen:
                        seen.add(piece)
                        total += num_bytes
            if total > max_bytes and num_steps > 1:
                break
            crossing = steps.live[places[i]] + _CUT_BYTES if i else 0
            if cost[i] + crossing + total < best:
                best, previous[j] = cost[i] + crossing + total, i
        cost[j] = best
    cuts = []
    j = previous[-1]
    while j > 0:
        cuts.append(places[j])
        j = previous[j]
    return cuts[::-1]


def _cut_oversized(steps: Steps, cuts: list[int], max_bytes: int) -> list[int]:
    """Cuts in units over the limit: blocks that look equal may read more: not all share pieces."""
    more: list[int] = []
    for start, stop in itertools.pairwise([0, *cuts, len(steps.hashes)]):
        if steps.piece_bytes(start, stop) > max_bytes:
            more += _cut_freely(steps, start, stop, max_bytes)
    return more


def _candidates(steps: Steps, start: int, stop: int) -> list[int]:
    """Places worth cutting at: between two steps that read parameters, the one where the fewest bytes cross."""
    places = [start]
    best: int | None = None
    seen_reader = False
    for step in range(start, stop):
        if seen_reader and (best is None or steps.live[step] < steps.live[best]):
            best = step
        if steps.reads[step]:
            if best is not None:
                places.append(best)
            best, seen_reader = None, True
    places.append(stop)
    return places


def _join_bare(steps: Steps, cuts: list[int]) -> list[int]:
    """Units that read no parameters join the one before, the first one the one after."""
    borders = [0, *cuts, len(steps.hashes)]
    kept: list[int] = []
    for index, cut in enumerate(cuts, start=1):
        before_bare = not any(steps.reads[step] for step in range(kept[-1] if kept else 0, cut))
        after_bare = not any(steps.reads[step] for step in range(cut, borders[index + 1]))
        if not before_bare and not after_bare:
            kept.append(cut)
    return kept
