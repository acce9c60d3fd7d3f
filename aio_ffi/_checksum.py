"""CRC32C, as transfers compute it on the way, for bytes that are already here."""

import operator
from typing import Any

from aio_ffi._native import ffi, lib

MAX_SEED = 2**32 - 1


def crc32c(data: Any, seed: int = 0) -> int:
    """CRC32C (Castagnoli; RFC 3720 appendix B.4) of a buffer's bytes. Releases the GIL.

    `crc32c(b, crc32c(a)) == crc32c(a + b)`, and `crc32c(b"123456789") == 0xE3069283`.

    Args:
      data: Anything with C-contiguous memory: bytes, a numpy array of any dtype.
      seed: What to go on from, a uint32.

    Raises:
      ValueError: `data` has no such memory, or `seed` is no uint32.
    """
    try:
        buffer = ffi.from_buffer("char[]", data)
    except (BufferError, TypeError, ValueError) as error:
        raise ValueError(f"a checksum needs a C-contiguous buffer: {error}") from error
    return lib.zaio_crc32c(check_seed(seed), buffer, len(buffer))


def crc32c_variant() -> str:
    """How this process computes it: what was fastest at first use, of those that the processor has.

    Returns:
      "portable" (tables), "sse42" or "armv8" (the processor's CRC32C instruction), "pclmul" or "vpclmul" (folding by
      carry-less multiplication, in lanes of 16 or 32 bytes). All give equal checksums.
    """
    return ffi.string(lib.zaio_crc32c_variant()).decode()


def check_seed(seed: int) -> int:
    """Returns it as an int, or raises ValueError."""
    try:
        value = operator.index(seed)
    except TypeError:
        value = -1
    if not 0 <= value <= MAX_SEED:
        raise ValueError(f"a checksum's seed must be an integer from 0 to {MAX_SEED}, got {seed!r}")
    return value
