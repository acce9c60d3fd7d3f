"""What the C library does with freed memory. On the CPU backend XLA's buffers come from there.

Its own rule fits neither aim. It raises its mmap threshold to 32 MiB as buffers of such sizes are freed and keeps what
it gets back (110 MiB more than was in use at 125M parameters); and it gives back the heaps of threads whenever they are
empty, which is after every step: the kernel then zeroes their pages and they are faulted in again.
"""

import ctypes

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h
_LARGE = 8 << 20
_HEAP = 64 << 20  # as large as a thread's heap can be: so much room is to be left at its end


def return_freed(min_bytes: int) -> bool:
    """Gives freed buffers of at least `min_bytes` back at once, for the whole process: a plan can bound it closely.

    Returns:
      False where the C library has no such switches.
    """
    return _set({_M_MMAP_THRESHOLD: min_bytes, _M_TRIM_THRESHOLD: 16 << 20, _M_TOP_PAD: 128 << 10})


def keep_freed() -> bool:
    """Keeps freed buffers of less than 8 MiB for the next step, for the whole process. The plan counts what that holds.

    Returns:
      False where the C library has no such switches.
    """
    return _set({_M_MMAP_THRESHOLD: _LARGE, _M_TRIM_THRESHOLD: 1 << 30, _M_TOP_PAD: _HEAP})


def _set(options: dict[int, int]) -> bool:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return all([mallopt(option, value) for option, value in options.items()])
