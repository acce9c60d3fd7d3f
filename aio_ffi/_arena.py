"""Host memory for pages: one exact-size, huge-page, fork-safe mapping.

Guarantees:
  * The mapping takes the bytes asked for, rounded up to 4096, and no more: no rounding to a power of two.
  * Its base lies on a 2 MiB boundary: any offset that is a multiple of the I/O alignment is transferred in place.
  * A view keeps the memory alive; `close` refuses while one exists, whoever holds it.
  * A forked child does not inherit it (touching it there is a segmentation fault, never a wrong byte): a fork
    would make the pages copy-on-write under transfers that are in flight.
"""

import errno
import os
import pathlib
import resource
import weakref
from typing import Any

import numpy as np

from aio_ffi._native import ffi, lib

PAGE_BYTES = 4096
HUGE_PAGE_FILE = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")


class Arena:
    """One anonymous mapping. Not thread-safe in `close`; `array` may be called from any thread.

    Args:
      num_bytes: Size; rounded up to a multiple of 4096.
      huge_pages: Ask for 2 MiB pages (`madvise`). They triple the read rate of some disks: a request then covers few
        pieces of memory.
      lock: Keep the pages from being swapped out. "auto": if RLIMIT_MEMLOCK (or CAP_IPC_LOCK) allows, else not, and
        `lock_reason` says why. True: or raise.

    Attributes:
      num_bytes, address: Size and base address.
      locked, huge_pages: What was granted.
      lock_reason: Why it is not locked, and what to do about it; "" if it is, or was not asked for.

    Raises:
      ValueError: `num_bytes` is not positive.
      MemoryError: No address space.
      OSError: lock=True and the kernel refuses.
    """

    def __init__(self, num_bytes: int, *, huge_pages: bool = True, lock: bool | str = "auto"):
        if num_bytes < 1:
            raise ValueError(f"an arena needs at least 1 byte, got {num_bytes}")
        if lock not in ("auto", True, False):
            raise ValueError(f'lock must be "auto", True or False, got {lock!r}')
        self.num_bytes = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        base, granted = ffi.new("char **"), ffi.new("int *")
        rc = lib.zaio_arena_map(self.num_bytes, bool(huge_pages), base, granted)
        if rc < 0:
            raise MemoryError(f"cannot map an arena of {self.num_bytes} bytes: {os.strerror(-rc)}")
        self.address = int(ffi.cast("uintptr_t", base[0]))
        self.huge_pages = bool(granted[0] & lib.ZAIO_ARENA_HUGE) and _huge_pages_enabled()
        self.fork_safe = bool(granted[0] & lib.ZAIO_ARENA_DONTFORK)
        self._views: dict[int, weakref.ref[np.ndarray]] = {}
        self._memory = _Mapping(base[0], self.num_bytes)
        try:
            self.locked, self.lock_reason = _lock(base[0], self.num_bytes, lock)
        except OSError:
            self._memory.unmap()
            raise

    def array(self, offset: int, num_bytes: int) -> np.ndarray:
        """A uint8 view of `num_bytes` from `offset` on. It keeps the mapping alive."""
        self._check_open()
        if offset < 0 or num_bytes < 0 or offset + num_bytes > self.num_bytes:
            raise ValueError(f"bytes {offset} to {offset + num_bytes} lie outside the arena's {self.num_bytes} bytes")
        if num_bytes == 0:
            return np.empty(0, np.uint8)
        view = np.frombuffer(self._memory.buffer(offset, num_bytes), np.uint8)
        key = id(view)
        views = self._views
        views[key] = weakref.ref(view, lambda _: views.pop(key, None))
        return view

    def touch(self) -> None:
        """Faults every page in now, so that no later access has to. Blocks; content is kept.

        Raises:
          OSError: Not enough memory.
        """
        self._check_open()
        rc = lib.zaio_arena_touch(self._memory.base, self.num_bytes)
        if rc < 0:
            raise OSError(-rc, f"cannot fault in an arena of {self.num_bytes} bytes: {os.strerror(-rc)}")

    def report(self) -> dict[str, Any]:
        """What was granted and what is resident, for reports: reads /proc/self/smaps."""
        self._check_open()
        resident, huge = _resident(self.address, self.num_bytes)
        return {
            "num_bytes": self.num_bytes,
            "address": self.address,
            "huge_pages": self.huge_pages,
            "huge_bytes": huge,
            "resident_bytes": resident,
            "locked": self.locked,
            "lock_reason": self.lock_reason,
            "fork_safe": self.fork_safe,
        }

    @property
    def num_views(self) -> int:
        """Views that are still alive, slices and jax arrays that alias them included."""
        return sum(ref() is not None for ref in list(self._views.values()))

    @property
    def closed(self) -> bool:
        return self._memory.unmapped

    def close(self) -> None:
        """Gives the memory back. Idempotent.

        Raises:
          BufferError: A view of it is still alive: in a variable, in a transfer in flight, or aliased by a jax array.
        """
        if self.closed:
            return
        if alive := self.num_views:
            raise BufferError(f"the arena has {alive} live views; drop them (and what aliases them) before close")
        self._memory.unmap()

    def __enter__(self) -> "Arena":
        return self

    def __exit__(self, *exc: object) -> None:
        # An exception's traceback holds frames, and those hold views: never hide it behind a BufferError.
        if exc[0] is None or not self.num_views:
            self.close()

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError("the arena is closed")


class _Mapping:
    """Owns the mapping; a view holds `base` through the owner of its cffi buffer."""

    def __init__(self, base: Any, num_bytes: int):
        self._unmapper = _Unmapper(num_bytes)
        # Called when neither the arena nor any view is left. No reference leads back from it: no cycle to collect.
        self.base = ffi.gc(base, self._unmapper)

    @property
    def unmapped(self) -> bool:
        return self._unmapper.done

    def buffer(self, offset: int, num_bytes: int) -> Any:
        return ffi.buffer(ffi.gc(self.base + offset, _Keep(self.base)), num_bytes)

    def unmap(self) -> None:
        self._unmapper(self.base)


class _Unmapper:
    """Unmaps once, and only in the process that mapped: a child has something else at that address."""

    def __init__(self, num_bytes: int):
        # Its own references: at interpreter exit it can run when the modules are gone.
        self._getpid, self._unmap = os.getpid, lib.zaio_arena_unmap
        self._pid = os.getpid()
        self._num_bytes = num_bytes
        self.done = False

    def __call__(self, base: Any) -> None:
        if not self.done and self._getpid() == self._pid:
            self._unmap(base, self._num_bytes)
        self.done = True


class _Keep:
    """A destructor that does nothing but hold the mapping until then."""

    def __init__(self, kept: Any):
        self.kept = kept

    def __call__(self, _: object) -> None:
        self.kept = None


def _huge_pages_enabled() -> bool:
    try:
        return "[never]" not in HUGE_PAGE_FILE.read_text()
    except OSError:
        return False


def _lock(base: Any, num_bytes: int, wish: bool | str) -> tuple[bool, str]:
    if wish is False:
        return False, ""
    _raise_soft_limit()
    rc = lib.zaio_arena_lock(base, num_bytes)
    if rc == 0:
        return True, ""
    soft, hard = (str(v) if v >= 0 else "unlimited" for v in resource.getrlimit(resource.RLIMIT_MEMLOCK))
    reason = (
        f"mlock of {num_bytes} bytes: {errno.errorcode.get(-rc, -rc)}; RLIMIT_MEMLOCK is {soft} (hard {hard}): "
        "raise it (`ulimit -l`, LimitMEMLOCK= in systemd, --ulimit memlock=-1 in docker) or grant CAP_IPC_LOCK"
    )
    if wish is True:
        raise OSError(-rc, reason)
    return False, reason


def _raise_soft_limit() -> None:
    """What an unprivileged process may do by itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))


def _resident(address: int, num_bytes: int) -> tuple[int, int]:
    """(resident, of it on huge pages) bytes of the mappings inside the range."""
    resident = huge = 0
    inside = False
    for line in pathlib.Path("/proc/self/smaps").read_text().splitlines():
        head = line.split(" ", 1)[0]
        if "-" in head:
            start, end = (int(x, 16) for x in head.split("-"))
            inside = start >= address and end <= address + num_bytes
        elif inside and head == "Rss:":
            resident += int(line.split()[1]) * 1024
        elif inside and head == "AnonHugePages:":
            huge += int(line.split()[1]) * 1024
    return resident, huge
