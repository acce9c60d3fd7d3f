"""`zinf bench-io`: measures a directory over block sizes and depths, and says which `aio` section to use."""

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import aio_ffi

# (block_size, queue_depth, thread_count): one axis at a time around the usual best point.
GRID = (
    (1 << 20, 4, 1), (1 << 20, 8, 1), (1 << 20, 32, 1), (1 << 20, 128, 1),
    (1 << 18, 32, 1), (4 << 20, 32, 1), (1 << 20, 32, 2),
)  # fmt: skip
QUICK_GRID = ((1 << 20, 8, 1), (1 << 20, 32, 1))
_TOLERANCE = 0.03  # rates closer than this are equal: then the setting with fewer bytes in flight wins


@dataclasses.dataclass(frozen=True)
class Point:
    """One setting and its median rates in GB/s (1e9 bytes per second)."""

    block_size: int
    queue_depth: int
    thread_count: int
    read_gbps: float
    write_gbps: float
    mixed_gbps: float
    engine: str
    direct: bool

    @property
    def seconds_per_gb(self) -> float:
        """Time to read and write 1 GB, as an update does: what is minimised."""
        return 1 / self.read_gbps + 1 / self.write_gbps

    @property
    def in_flight_bytes(self) -> int:
        return self.block_size * self.queue_depth * self.thread_count


def measure(
    directory: Path,
    *,
    num_bytes: int,
    grid: Sequence[tuple[int, int, int]] = GRID,
    repeats: int = 1,
    progress: Callable[[], None] = lambda: None,
) -> tuple[Point, ...]:
    """Measures every setting of the grid, round by round so that drift meets all of them, and takes medians.

    Raises:
      OSError: the directory cannot be written, or is full.
    """
    rounds: list[list[aio_ffi.Bandwidth]] = [[] for _ in grid]
    for _ in range(repeats):
        for results, (block_size, depth, threads) in zip(rounds, grid, strict=True):
            options = aio_ffi.EngineOptions(block_size=block_size, queue_depth=depth, thread_count=threads)
            results.append(aio_ffi.measure(directory, num_bytes=num_bytes, options=options))
            progress()
    return tuple(_median(setting, results) for setting, results in zip(grid, rounds, strict=True))


def _median(setting: tuple[int, int, int], results: list[aio_ffi.Bandwidth]) -> Point:
    read = statistics.median(result.read_gbps for result in results)
    write = statistics.median(result.write_gbps for result in results)
    mixed = statistics.median(result.mixed_read_gbps + result.mixed_write_gbps for result in results)
    return Point(*setting, read, write, mixed, results[-1].engine, results[-1].direct)


def best(points: Sequence[Point]) -> Point:
    """The fastest for reading plus writing; among those as good as equal, the one with the fewest bytes in flight."""
    fastest = min(point.seconds_per_gb for point in points)
    equal = [point for point in points if point.seconds_per_gb <= fastest * (1 + _TOLERANCE)]
    return min(equal, key=lambda point: (point.in_flight_bytes, point.seconds_per_gb))


def advice(points: Sequence[Point], reason: str) -> list[str]:
    """What to do beyond pasting the section. `reason`: why the engine is not a better one, from the probe."""
    chosen = best(points)
    lines = []
    if reason:
        lines.append(f"The engine is {chosen.engine}: {reason}")
    if not chosen.direct:
        lines.append("Without O_DIRECT these rates include the page cache, and pages take memory twice.")
    if max(chosen.read_gbps, chosen.write_gbps) > 20:
        lines.append("Above 20 GB/s this is memory, not a drive.")
    shallow = [p for p in points if p.queue_depth < chosen.queue_depth and p.block_size == chosen.block_size]
    if shallow:
        slowest = max(shallow, key=lambda point: point.seconds_per_gb)
        gain = slowest.seconds_per_gb / chosen.seconds_per_gb - 1
        lines.append(f"queue_depth {chosen.queue_depth} is {gain:.0%} faster than {slowest.queue_depth}.")
    if chosen.write_gbps < 0.5 * chosen.read_gbps:
        lines.append(
            "Writes are much slower than reads: keep gradients and the optimizer state of what fits on host "
            "(placement.optimizer: auto does)."
        )
    return lines


def section(point: Point) -> dict[str, object]:
    """The `aio` section to paste."""
    return {
        "block_size": point.block_size,
        "queue_depth": point.queue_depth,
        "thread_count": point.thread_count,
        "single_submit": False,
        "overlap_events": True,
    }
