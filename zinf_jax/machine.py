"""What the kernel lets this process have. Read anew at each call: another process may have taken some."""

from collections.abc import Iterator
from pathlib import Path

_UNLIMITED = 1 << 60  # version 1 of cgroups says a number close to 1 << 63 for none


def cgroup_memory_limit() -> int | None:
    """Bytes that the cgroup of this process allows, the least along its path; None without a limit."""
    return min((limit for limit, _ in _cgroup_memory()), default=None)


def available_host_bytes() -> int:
    """Bytes that this process can still take: MemAvailable, or what a cgroup along its path still allows if less."""
    found = [int(line.split()[1]) * 1024 for line in _lines(Path("/proc/meminfo")) if line.startswith("MemAvailable:")]
    found += [max(0, limit - used) for limit, used in _cgroup_memory()]
    return min(found, default=1 << 40)


def _cgroup_memory() -> Iterator[tuple[int, int]]:
    """(limit, used) of each cgroup along this process's path that has a limit, all bytes.

    File pages that nobody used of late are not counted as used: the kernel drops them before it refuses memory.
    """
    for line in _lines(Path("/proc/self/cgroup")):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, limit_file, used_file, idle = Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, idle = Path("/sys/fs/cgroup/memory"), "total_inactive_file"
            limit_file, used_file = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            limit = _number(_lines(folder / limit_file))
            if limit is not None and limit < _UNLIMITED:
                idle_lines = [text.split()[1:] for text in _lines(folder / "memory.stat") if text.split()[0] == idle]
                idle_bytes = _number(idle_lines[0]) if idle_lines else 0
                yield limit, max(0, (_number(_lines(folder / used_file)) or 0) - (idle_bytes or 0))
            if folder == root:
                break


def _number(lines: list[str]) -> int | None:
    return int(lines[0]) if lines and lines[0].strip().isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
