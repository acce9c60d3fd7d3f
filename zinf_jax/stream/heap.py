"""What the C library does with freed memory. On the CPU backend XLA's buffers come from there.

Its own rule fits no aim. It raises its mmap threshold to 32 MiB as buffers of such sizes are freed and keeps what it
gets back (110 MiB more than was in use at 125M parameters); and it gives back the heaps of threads whenever they are
empty, which is after every step: the kernel then zeroes their pages and they are faulted in again. Several threads take
buffers, and what one has freed is no use to the others. A process that began with `ONE_HEAP` in its environment has one
heap for all of them: kept, that is less than in several. Once there are threads it is too late to choose.
"""

import ctypes
import pathlib
import platform

from zinf_jax.plan import Freed

ONE_HEAP = "glibc.malloc.arena_max=1"  # in GLIBC_TUNABLES; see the C library's manual on tunables
TUNABLES = f"glibc.malloc.hugetlb=1:{ONE_HEAP}"
"""What is best for JAX's CPU backend: buffers on huge pages, and these."""
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h
_LARGE = 8 << 20
_LARGEST = 32 << 20  # as far as its own rule goes
_HEAP = 64 << 20  # as large as a thread's heap can be: so much room is to be left at its end
_ENVIRONMENT = pathlib.Path("/proc/self/environ")  # as it was when the process began, which is what counts


def choose(*, bounded: bool) -> Freed:
    """What becomes of freed memory in this process.

    Args:
      bounded: Somebody gave a budget for host memory, so what several heaps would keep is better given back.
    """
    if _has_one_heap():
        return Freed.SHARED
    return Freed.RETURNED if bounded else Freed.KEPT


def apply(freed: Freed, *, values_wait: bool) -> bool:
    """Makes it so, for the whole process.

    Args:
      freed: As chosen.
      values_wait: Buffers that wait for backward lie between temporaries of their size: what is given back at once is
        less, or it costs 4% of a step.

    Returns:
      False where the C library has no such switches.
    """
    if freed is Freed.RETURNED:
        return return_freed(_LARGE if values_wait else _LARGE // 2)
    return keep_freed(_LARGEST if freed is Freed.SHARED else _LARGE)


def advice(freed: Freed) -> str | None:
    """What would make steps on the CPU backend faster, in a line. None: nothing."""
    if freed is Freed.SHARED or platform.libc_ver()[0] != "glibc":
        return None
    return f"on the CPU backend steps can be faster if the process begins with GLIBC_TUNABLES={TUNABLES}"


def return_freed(min_bytes: int) -> bool:
    """Gives freed buffers of at least `min_bytes` back at once, for the whole process: a plan can bound it closely.

    Returns:
      False where the C library has no such switches.
    """
    return _set({_M_MMAP_THRESHOLD: min_bytes, _M_TRIM_THRESHOLD: 16 << 20, _M_TOP_PAD: 128 << 10})


def keep_freed(max_bytes: int = _LARGE) -> bool:
    """Keeps freed buffers of less than `max_bytes` for the next step, for the whole process. The plan counts what that
    holds.

    Returns:
      False where the C library has no such switches.
    """
    return _set({_M_MMAP_THRESHOLD: max_bytes, _M_TRIM_THRESHOLD: 1 << 30, _M_TOP_PAD: _HEAP})


def _has_one_heap() -> bool:
    try:
        words = _ENVIRONMENT.read_bytes().replace(b":", b"\0").split(b"\0")  # some versions cut the list up in place
    except OSError:
        return False
    one = ONE_HEAP.encode()
    return any(word in words for word in (one, b"GLIBC_TUNABLES=" + one, b"MALLOC_ARENA_MAX=1"))


def _set(options: dict[int, int]) -> bool:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return all([mallopt(option, value) for option, value in options.items()])
