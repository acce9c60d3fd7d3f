"""What this machine has, read from the kernel and tried on the drives: the facts behind `zinf report`.

Each fact carries the advice that goes with it, if it could be better.
"""

import dataclasses
import importlib.metadata
import os
import platform
import resource
import shutil
from collections.abc import Iterable
from pathlib import Path

import jax

import aio_ffi
from zinf_jax.machine import cgroup_memory_limit
from zinf_jax.optim import kernels
from zinf_jax.units import format_bytes

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")
_HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_FEW_AIO_EVENTS = 1024  # a ring of the default depth takes 32; other processes share the rest
_SMALL_MEMLOCK = 1 << 30


@dataclasses.dataclass(frozen=True)
class Fact:
    """One line of the report. `advice` is empty where nothing has to change."""

    section: str
    name: str
    value: str
    advice: str = ""


def software() -> list[Fact]:
    found = [Fact("software", "python", f"{platform.python_version()} on {platform.system()} {platform.release()}")]
    for package in _PACKAGES:
        try:
            found.append(Fact("software", package, importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            found.append(Fact("software", package, "not installed", f"pip install {package}"))
    return found


def compute() -> list[Fact]:
    """Devices as JAX sees them, cores, and the host optimizer's kernel."""
    found = []
    for device in jax.devices():
        stats = device.memory_stats() or {}
        limit = stats.get("bytes_limit")
        memory = f", {format_bytes(limit)}" if limit else ""
        found.append(Fact("compute", f"device {device.id}", f"{device.device_kind} ({device.platform}){memory}"))
    cores, all_cores = len(os.sched_getaffinity(0)), os.cpu_count()
    found.append(Fact("compute", "CPU", _cpu_model()))
    found.append(Fact("compute", "cores", f"{cores} usable of {all_cores}"))
    advice = "" if kernels.variant() != "portable" else "no AVX2: the host update runs its portable version"
    variants = ", ".join(kernels.supported_variants())
    found.append(Fact("compute", "optimizer kernel", f"{kernels.variant()} (this CPU can: {variants})", advice))
    return found


def _cpu_model() -> str:
    for line in _lines(Path("/proc/cpuinfo")):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def memory() -> list[Fact]:
    found = []
    info = {line.partition(":")[0]: line.partition(":")[2] for line in _lines(Path("/proc/meminfo"))}
    for name, key in (("total", "MemTotal"), ("available", "MemAvailable"), ("swap free", "SwapFree")):
        if key in info:
            found.append(Fact("memory", name, format_bytes(int(info[key].split()[0]) * 1024)))
    limit = cgroup_memory_limit()
    found.append(Fact("memory", "cgroup limit", "none" if limit is None else format_bytes(limit)))
    found.append(_memlock())
    setting = next(iter(_lines(_HUGE)), "")
    chosen = setting.partition("[")[2].partition("]")[0] or "unknown"
    advice = (
        f"echo madvise > {_HUGE} (as root): frames on 2 MiB pages read up to 3x faster" if chosen == "never" else ""
    )
    found.append(Fact("memory", "huge pages", chosen, advice))
    return found


def _memlock() -> Fact:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shown = " / ".join(
        "unlimited" if value == resource.RLIM_INFINITY else format_bytes(value) for value in (soft, hard)
    )
    small = hard != resource.RLIM_INFINITY and hard < _SMALL_MEMLOCK
    advice = "an arena above this is not locked (it works, but can be paged out): raise `ulimit -l`" if small else ""
    return Fact("memory", "memlock soft / hard", shown, advice)


def kernel_aio() -> list[Fact]:
    used, most = (next(iter(_lines(Path("/proc/sys/fs") / name)), "") for name in ("aio-nr", "aio-max-nr"))
    if not used or not most:
        return [Fact("I/O", "kernel AIO events", "unknown")]
    left = int(most) - int(used)
    advice = "nearly used up: sysctl -w fs.aio-max-nr=1048576 (as root)" if left < _FEW_AIO_EVENTS else ""
    return [Fact("I/O", "kernel AIO events", f"{used} used of {most} (aio-nr, aio-max-nr)", advice)]


def directories(paths: Iterable[Path]) -> list[Fact]:
    """Engine, O_DIRECT, file system and space of each directory, by a real write in it."""
    found = []
    for path in paths:
        section = f"I/O in {path}"
        try:
            probe = aio_ffi.probe(path)
            free = shutil.disk_usage(path).free
        except OSError as error:
            found.append(
                Fact(section, "usable", "no", f"{error.strerror or error}: name a directory that can be written")
            )
            continue
        found.append(Fact(section, "engine", probe.engine, probe.reason))
        direct = "" if probe.direct else "the page cache is in the way: use a directory on a local ext4 or xfs drive"
        found.append(Fact(section, "O_DIRECT", f"yes, aligned to {probe.alignment}" if probe.direct else "no", direct))
        memory = probe.fs_type in ("tmpfs", "ramfs")
        found.append(
            Fact(
                section,
                "file system",
                probe.fs_type,
                "this is memory, not a drive: pages here use DRAM" if memory else "",
            )
        )
        found.append(Fact(section, "free", format_bytes(free)))
    return found


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
