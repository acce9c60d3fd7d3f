"""What the kernel lets a process have: cgroups of both versions, along the whole path."""

from pathlib import Path

import pytest

from zinf_jax import machine


def test_the_cgroup_limit_is_the_least_along_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {"/proc/self/cgroup": ["0::/a/b"], "/sys/fs/cgroup/a/b/memory.max": ["max"],
            "/sys/fs/cgroup/a/memory.max": ["1048576"], "/sys/fs/cgroup/memory.max": ["4194304"]}  # fmt: skip
    monkeypatch.setattr(machine, "_lines", lambda path: tree.get(str(path), []))
    assert machine.cgroup_memory_limit() == 1 << 20
    tree["/proc/self/cgroup"] = ["7:cpu,memory:/x", "3:pids:/x"]
    tree["/sys/fs/cgroup/memory/x/memory.limit_in_bytes"] = ["9223372036854771712"]  # version 1's way to say none
    assert machine.cgroup_memory_limit() is None
    tree["/sys/fs/cgroup/memory/x/memory.limit_in_bytes"] = ["2097152"]
    assert machine.cgroup_memory_limit() == 2 << 20


def test_available_memory_is_what_every_group_of_the_path_still_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit on a group below the root bound nobody who looked at the root only."""
    tree = {"/proc/self/cgroup": ["0::/a/b"], "/proc/meminfo": ["MemTotal: 64 kB", "MemAvailable:    48 kB"],
            "/sys/fs/cgroup/a/memory.max": ["32768"], "/sys/fs/cgroup/a/memory.current": ["24576"]}  # fmt: skip
    monkeypatch.setattr(machine, "_lines", lambda path: tree.get(str(path), []))
    assert machine.available_host_bytes() == 8 << 10
    tree["/sys/fs/cgroup/a/memory.stat"] = ["anon 1", "inactive_file 16384", "active_file 9"]
    assert machine.available_host_bytes() == 24 << 10, "file pages that can be dropped are no use of memory"
    tree["/sys/fs/cgroup/a/b/memory.max"], tree["/sys/fs/cgroup/a/b/memory.current"] = ["4096"], ["8192"]
    assert machine.available_host_bytes() == 0
    tree["/proc/self/cgroup"] = ["7:cpu,memory:/x", "0::/"]
    assert machine.available_host_bytes() == 48 << 10
    tree["/sys/fs/cgroup/memory/x/memory.limit_in_bytes"] = ["40960"]
    tree["/sys/fs/cgroup/memory/x/memory.usage_in_bytes"] = ["8192"]
    tree["/sys/fs/cgroup/memory/x/memory.stat"] = ["inactive_file 1", "total_inactive_file 4096"]
    assert machine.available_host_bytes() == 36 << 10
    tree.clear()
    assert machine.available_host_bytes() == 1 << 40, "nothing is known: no bound"


def test_this_machine_has_some() -> None:
    assert 0 < machine.available_host_bytes() < 1 << 60
