"""Human-readable quantities, and their parsing: the only place where bytes become text."""

import re

_SUFFIXES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_FACTORS = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9, "t": 10**12, "tb": 10**12,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
}  # fmt: skip
_QUANTITY = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def format_bytes(num_bytes: float) -> str:
    """`1536` -> `1.50 KiB`."""
    value = float(num_bytes)
    for suffix in _SUFFIXES:
        if abs(value) < 1024 or suffix == _SUFFIXES[-1]:
            return f"{value:.0f} B" if suffix == "B" else f"{value:.2f} {suffix}"
        value /= 1024
    raise AssertionError


def format_count(count: float) -> str:
    """`124439808` -> `124.4M`."""
    for factor, suffix in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if abs(count) >= factor:
            return f"{count / factor:.4g}{suffix}"
    return f"{count:.4g}"


def parse_bytes(value: int | float | str) -> int:
    """`"1.5GiB"`, `"4e9"`, `4e9` and `4000000000` -> bytes.

    Raises:
      ValueError: not a quantity of bytes, or a fraction of a byte.
    """
    if isinstance(value, str):
        match = _QUANTITY.fullmatch(value)
        if match is None or match[2].lower() not in _FACTORS:
            raise ValueError(f"{value!r} is not a number of bytes: write 4e9, '4GB' or '4GiB'")
        value = float(match[1]) * _FACTORS[match[2].lower()]
    if value != int(value) or value < 0:
        raise ValueError(f"{value!r} is not a whole, non-negative number of bytes")
    return int(value)


def ceil_to(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple
