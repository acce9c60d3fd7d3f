"""Host kernels: fused updates, exact split masters, norms, accumulation, copies. A facade over the C module.

Guarantees:
  - All functions work in place on 1-D contiguous numpy vectors, such as views into page frames; they copy nothing.
  - The same bits for every variant of the C code (portable, AVX2, AVX-512), every `num_threads`, and every way of
    splitting a leaf into ranges or calls (but see `squared_norm`: its blocks are those of the vector given).
  - Denormals count as zero, as in XLA:CPU. Only `split_master`, `join_master`, `copy` and `zero` keep them.
  - The GIL is released while C runs. Calls from several threads are serialised where they use more than one thread.

bf16 vectors have dtype `ml_dtypes.bfloat16`.
"""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any, Protocol

import ml_dtypes
import numpy as np

try:
    from zinf_jax.optim import _host  # type: ignore[attr-defined]
except ImportError as error:  # the one thing a fresh checkout lacks
    raise ImportError(
        f"the host kernels are not built ({error}): run `python zinf_jax/optim/_build.py`, or `pip install -e .`"
    ) from error

_ffi, _lib = _host.ffi, _host.lib

BF16 = np.dtype(ml_dtypes.bfloat16)
F16 = np.dtype(np.float16)
F32 = np.dtype(np.float32)
_I16 = np.dtype(np.int16)
_CODES = {F32: 1, BF16: 2, F16: 3}

NORM_BLOCK = 65536
"""Elements per fp64 sum of `squared_norm`: part of the numbers."""

NUM_COEFFICIENTS = 12
MAX_SLOTS = 2
VARIANTS = ("portable", "avx2", "avx512")


class FusedRule(Protocol):
    """What `update` needs to know of an optimizer: which kernel, and how many slots."""

    @property
    def kernel(self) -> int: ...

    @property
    def slots(self) -> tuple[str, ...]: ...


@dataclasses.dataclass(frozen=True)
class Range:
    """One leaf's part of a chunk, updated in place. All vectors have the same length.

    Attributes:
      weights: f32, bf16 or f16 [n].
      master: int16 remainder beside bf16 weights, the f32 master beside f16, None beside f32.
      gradient: f32, bf16 or f16 [n]; None for a gradient of zeros.
      slots: f32 [n] each, in the order of the rule's `slots`.
      coefficients: f32 [NUM_COEFFICIENTS] from `BoundRule.coefficients`.
    """

    weights: np.ndarray
    master: np.ndarray | None
    gradient: np.ndarray | None
    slots: tuple[np.ndarray, ...]
    coefficients: np.ndarray


def supported_variants() -> tuple[str, ...]:
    """The variants that this CPU can run, slowest first."""
    return tuple(name for i, name in enumerate(VARIANTS) if _lib.zinf_variant_supported(i))


def variant() -> str:
    """The variant in use."""
    return VARIANTS[_lib.zinf_variant_get()]


def set_variant(name: str) -> None:
    """Chooses the variant, for the whole process. The results do not depend on it.

    Raises:
      ValueError: this CPU cannot run it.
    """
    if name not in supported_variants():
        raise ValueError(f"kernel variant {name!r} cannot run here; this CPU supports {supported_variants()}")
    _lib.zinf_variant_set(VARIANTS.index(name))


set_variant(os.environ.get("ZINF_KERNELS") or supported_variants()[-1])


def _threads(num_threads: int | None) -> int:
    if num_threads is None:
        return os.cpu_count() or 1
    if num_threads < 1:
        raise ValueError(f"num_threads must be at least 1, got {num_threads}")
    return num_threads


def _address(array: np.ndarray, what: str, length: int, *dtypes: np.dtype, write: bool = False) -> int:
    """The address of a vector that C may use as `length` elements of one of `dtypes`."""
    if array.shape != (length,) or array.dtype not in dtypes:
        wanted = " or ".join(dtype.name for dtype in dtypes)
        raise ValueError(f"{what} must be {wanted} [{length}], got {array.dtype.name} {list(array.shape)}")
    if length > 1 and array.strides[0] != array.itemsize:
        raise ValueError(f"{what} must be contiguous, got a stride of {array.strides[0]} bytes")
    address, read_only = array.__array_interface__["data"]
    if write and read_only:
        raise ValueError(f"{what} is updated in place but its memory is read-only")
    return address


def _pointer(address: int, kind: str = "void *") -> Any:
    return _ffi.cast(kind, address)


def update(
    rule: FusedRule, ranges: Sequence[Range], *, gradient_scale: float = 1.0, num_threads: int | None = None
) -> None:
    """Applies one optimizer step to each range, in place.

    Args:
      rule: A fused rule of `zinf_jax.optim.transforms`.
      ranges: Parts of leaves; may be empty.
      gradient_scale: Multiplies each gradient in f32 before use (1 / loss scale, 1 / weight, clip factor, combined).
      num_threads: Default: all CPUs. Does not change the result.

    Raises:
      ValueError: a vector has the wrong length or dtype, is not contiguous or not writable.
    """
    count = len(ranges)
    table = _ffi.new("zinf_range[]", count)
    for row, part in zip(table, ranges, strict=True):
        _fill(row, rule, part)
    _lib.zinf_update(rule.kernel, table, count, np.float32(gradient_scale), _threads(num_threads))


_MASTERS: dict[np.dtype, np.dtype | None] = {F32: None, BF16: _I16, F16: F32}


def _fill(row: Any, rule: FusedRule, part: Range) -> None:
    length = part.weights.size
    row.length = length
    row.weights = _pointer(_address(part.weights, "weights", length, F32, BF16, F16, write=True))
    row.weights_dtype = _CODES[part.weights.dtype]
    master = _MASTERS[part.weights.dtype]
    if (part.master is None) != (master is None):
        raise ValueError(f"{part.weights.dtype.name} weights take {master} as master, got {part.master!r}")
    if master is not None and part.master is not None:
        row.master = _pointer(_address(part.master, "master", length, master, write=True))
    if part.gradient is not None:
        row.gradient = _pointer(_address(part.gradient, "gradient", length, F32, BF16, F16))
        row.gradient_dtype = _CODES[part.gradient.dtype]
    if len(part.slots) != len(rule.slots):
        raise ValueError(f"the rule has slots {rule.slots}, the range has {len(part.slots)}")
    for i, slot in enumerate(part.slots):
        row.slots[i] = _pointer(_address(slot, rule.slots[i], length, F32, write=True), "float *")
    row.coefficients = _pointer(_address(part.coefficients, "coefficients", NUM_COEFFICIENTS, F32), "float *")


def squared_norm(gradient: np.ndarray, *, num_threads: int | None = None) -> float:
    """The sum of squares of a bf16, f16 or f32 vector, in fp64.

    Each block of `NORM_BLOCK` elements is summed in 16 lanes (element i in lane i % 16, in order; lanes added as a
    tree), then the blocks' sums are added in order: independent of threads and variant. The vector is one rank's whole
    shard of a leaf; where it is seen in parts, cut at multiples of `NORM_BLOCK` and use `block_norms`. A non-finite
    element makes the result non-finite, and nothing else does (no square of a finite f32 overflows fp64).
    """
    return _norms(gradient, num_threads)[0]


def block_norms(gradient: np.ndarray, *, num_threads: int | None = None) -> np.ndarray:
    """The fp64 sums of `squared_norm`'s blocks, in order; the norm is their sum, added in order from 0.0."""
    return _norms(gradient, num_threads)[1]


def _norms(gradient: np.ndarray, num_threads: int | None) -> tuple[float, np.ndarray]:
    source = _pointer(_address(gradient, "gradient", gradient.size, F32, BF16, F16))
    sums = np.empty(-(-gradient.size // NORM_BLOCK), np.float64)
    target = _pointer(sums.ctypes.data, "double *")
    code = _CODES[gradient.dtype]
    total = _lib.zinf_squared_norm(source, code, gradient.size, target, _threads(num_threads))
    return total, sums


def split_master(
    master: np.ndarray,
    weights: np.ndarray | None = None,
    remainder: np.ndarray | None = None,
    *,
    num_threads: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Splits an f32 master into a bf16 weight and a signed 16-bit remainder, exactly.

    weight = (bits + 0x8000) >> 16, ties up in magnitude; remainder = bits - (weight << 16), in [-0x8000, 0x7fff]. A NaN
    becomes 0x7fc00000 first. Every writer of weights uses this.

    Args:
      master: f32 [n].
      weights, remainder: bf16 [n] and int16 [n] to write to; allocated where None.

    Returns:
      (weights, remainder)
    """
    length = master.size
    weights = np.empty(length, BF16) if weights is None else weights
    remainder = np.empty(length, _I16) if remainder is None else remainder
    _lib.zinf_split(
        _pointer(_address(master, "master", length, F32)),
        _pointer(_address(weights, "weights", length, BF16, write=True)),
        _pointer(_address(remainder, "remainder", length, _I16, write=True)),
        length,
        _threads(num_threads),
    )
    return weights, remainder


def join_master(
    weights: np.ndarray, remainder: np.ndarray, master: np.ndarray | None = None, *, num_threads: int | None = None
) -> np.ndarray:
    """The inverse of `split_master`: bf16 [n] and int16 [n] -> f32 [n], allocated where `master` is None."""
    length = weights.size
    master = np.empty(length, F32) if master is None else master
    _lib.zinf_join(
        _pointer(_address(weights, "weights", length, BF16)),
        _pointer(_address(remainder, "remainder", length, _I16)),
        _pointer(_address(master, "master", length, F32, write=True)),
        length,
        _threads(num_threads),
    )
    return master


def accumulate(target: np.ndarray, source: np.ndarray, *, num_threads: int | None = None) -> None:
    """target += source, for equal dtypes (f32, bf16, f16) or a bf16 or f16 source into f32.

    16-bit sums are made in f32 and rounded to nearest even, as XLA's `add` does.
    """
    length = target.size
    to = _pointer(_address(target, "target", length, F32, BF16, F16, write=True))
    allowed = (F32, BF16, F16) if target.dtype == F32 else (target.dtype,)
    of = _pointer(_address(source, "source", length, *allowed))
    _lib.zinf_accumulate(to, _CODES[target.dtype], of, _CODES[source.dtype], length, _threads(num_threads))


def copy(target: np.ndarray, source: np.ndarray, *, num_threads: int | None = None) -> None:
    """target[:] = source for vectors of one dtype (any), which must not overlap."""
    to = _pointer(_address(target, "target", target.size, target.dtype, write=True))
    of = _pointer(_address(source, "source", target.size, target.dtype))
    _lib.zinf_copy(to, of, target.nbytes, _threads(num_threads))


def zero(target: np.ndarray, *, num_threads: int | None = None) -> None:
    """target[:] = 0 for a vector of any dtype."""
    to = _pointer(_address(target, "target", target.size, target.dtype, write=True))
    _lib.zinf_zero(to, target.nbytes, _threads(num_threads))


def triad(
    target: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    scale: float,
    *,
    nontemporal: bool = False,
    num_threads: int | None = None,
) -> None:
    """target = a + scale * b in f32: the memory bandwidth that the benchmark compares the kernels with.

    With `nontemporal` the stores go past the caches: `target` is 16-byte aligned and its length a multiple of 4.
    """
    pointers = [
        _pointer(_address(array, what, target.size, F32, write=what == "target"), "float *")
        for array, what in ((target, "target"), (a, "a"), (b, "b"))
    ]
    if nontemporal and (target.size % 4 or target.ctypes.data % 16):
        raise ValueError(f"nontemporal stores need 16-byte alignment and 4 | length, got length {target.size}")
    _lib.zinf_triad(*pointers, scale, target.size, nontemporal, _threads(num_threads))
