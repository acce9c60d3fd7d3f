"""The C kernels: exact splitting, fixed-order norms, equal bits from every variant, thread count and cut."""

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.optim import reference
from tests.optim.reference import BF16, DTYPES
from zinf_jax import optim
from zinf_jax.optim import kernels

LENGTHS = (0, 1, 7, 8, 15, 16, 17, 1000, 65535, 65536, 65537, 200_003)
RULES = {
    "adamw": optim.adamw(1e-3, weight_decay=0.1),
    "adam": optim.adam(1e-3, eps_root=1e-9),
    "nadamw": optim.adamw(1e-3, nesterov=True),
    "nadam": optim.adam(1e-3, nesterov=True),
    "lion": optim.lion(1e-3),
    "lion_plain": optim.lion(1e-3, weight_decay=0.0),
    "sgd": optim.sgd(0.1),
    "momentum": optim.sgd(0.1, 0.9),
    "nesterov": optim.sgd(0.1, 0.9, nesterov=True),
    "adagrad": optim.adagrad(0.1),
}


@pytest.fixture(autouse=True)
def _restore_variant() -> Iterator[None]:
    chosen = kernels.variant()
    yield
    kernels.set_variant(chosen)


def _bits(array: np.ndarray | None) -> bytes:
    """The bytes, with one pattern for all NaNs: their payload is not defined."""
    if array is None:
        return b""
    if array.dtype == np.int16:
        return array.tobytes()
    return np.where(np.isnan(array), array.dtype.type(7), array).tobytes()


def _hostile(rng: np.random.Generator, size: int) -> np.ndarray:
    with np.errstate(over="ignore"):
        values = (rng.standard_normal(size) * 10.0 ** rng.integers(-45, 39, size)).astype(np.float32)
    for start, value in ((0, 0.0), (5, -0.0), (7, np.inf), (9, -np.inf), (11, np.nan), (13, 1e-45), (17, 3.4e38)):
        values[start::97] = value
    return values


# --- split masters ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", kernels.supported_variants())
def test_split_is_exact_for_all_patterns_around_ties(variant: str) -> None:
    """Every upper half with the lower halves where rounding changes: zeros, denormals, infinities, NaNs included."""
    kernels.set_variant(variant)
    high = np.arange(1 << 16, dtype=np.uint32) << 16
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    master = (high[:, None] | low).reshape(-1).view(np.float32)
    weights, remainder = kernels.split_master(master)
    expected_weights, expected_remainder = reference.split_master(master)
    np.testing.assert_array_equal(weights.view(np.uint16), expected_weights.view(np.uint16))
    np.testing.assert_array_equal(remainder, expected_remainder)
    joined = kernels.join_master(weights, remainder).view(np.uint32)
    nan = np.isnan(master)
    np.testing.assert_array_equal(joined[~nan], master.view(np.uint32)[~nan])
    assert (joined[nan] == 0x7FC00000).all()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40))
def test_split_round_trips_any_bits(patterns: list[int]) -> None:
    master = np.array(patterns, np.uint32).view(np.float32)
    weights, remainder = kernels.split_master(master)
    np.testing.assert_array_equal(kernels.join_master(weights, remainder), reference.join_master(weights, remainder))
    np.testing.assert_array_equal(_bits(kernels.join_master(weights, remainder)), _bits(master))


# --- updates --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", DTYPES)
@pytest.mark.parametrize("name", RULES)
def test_same_bits_from_every_variant_and_thread_count(name: str, weights: str) -> None:
    """Infinities, NaNs and denormals included; the vectors end in a partial vector; 2 tasks."""
    rule, rng = RULES[name].rule, np.random.default_rng(0)  # type: ignore[attr-defined]
    size = (1 << 17) + 1003
    master, slots = _hostile(rng, size), [_hostile(rng, size) for _ in rule.slots]
    bound = rule.bind(reference.table({"w": master}), {"w": jax.ShapeDtypeStruct((size,), np.float32)})
    for dtype in (*DTYPES.values(), None):
        gradient = None
        if dtype is not None:
            with np.errstate(over="ignore"):
                gradient = _hostile(rng, size).astype(dtype)
        outcomes = set()
        for variant, threads in [(v, t) for v in kernels.supported_variants() for t in (1, 3)]:
            kernels.set_variant(variant)
            part = _range(master, weights, gradient, slots, bound.coefficients(0, 6))
            kernels.update(rule, [part], gradient_scale=0.3, num_threads=threads)
            outcomes.add((_bits(part.weights), _bits(part.master), *(_bits(s) for s in part.slots)))
        assert len(outcomes) == 1, (name, weights, dtype)


def _range(
    master: np.ndarray, weights: str, gradient: np.ndarray | None, slots: list[np.ndarray], coefficients: np.ndarray
) -> kernels.Range:
    copies = tuple(slot.copy() for slot in slots)
    if weights == "bf16":
        return kernels.Range(*kernels.split_master(master), gradient, copies, coefficients)
    if weights == "f16":
        with np.errstate(over="ignore"):
            return kernels.Range(master.astype(np.float16), master.copy(), gradient, copies, coefficients)
    return kernels.Range(master.copy(), None, gradient, copies, coefficients)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 3000), max_size=6), st.integers(1, 4), st.integers(0, 3))
def test_same_bits_for_any_cut(cuts: list[int], threads: int, offset: int) -> None:
    """Ranges of any length (0 included) at any address, in one call or several."""
    rng = np.random.default_rng(1)
    rule = RULES["adamw"].rule  # type: ignore[attr-defined]
    bound = rule.bind(reference.table({"w": np.zeros(3000)}), {"w": jax.ShapeDtypeStruct((3000,), np.float32)})
    master, gradient = rng.standard_normal(3000).astype(np.float32), rng.standard_normal(3000).astype(BF16)
    moments = [np.abs(rng.standard_normal(3000)).astype(np.float32) for _ in range(2)]
    whole = _range(master, "bf16", gradient, moments, bound.coefficients(0, 3))
    kernels.update(rule, [whole])
    skewed = np.empty(3000 + offset, np.float32)[offset:]
    skewed[:] = moments[0]
    parts = _range(master, "bf16", gradient, moments, bound.coefficients(0, 3))
    edges = [0, *sorted(cuts), 3000]
    ranges = []
    for start, stop in itertools.pairwise(edges):
        here = slice(start, stop)
        slots = (skewed[here], parts.slots[1][here])
        assert parts.master is not None
        ranges.append(kernels.Range(parts.weights[here], parts.master[here], gradient[here], slots, parts.coefficients))
    kernels.update(rule, ranges[:2], num_threads=threads)
    kernels.update(rule, ranges[2:], num_threads=threads)
    assert _bits(parts.weights) == _bits(whole.weights) and _bits(parts.master) == _bits(whole.master)
    assert _bits(skewed) == _bits(whole.slots[0]) and _bits(parts.slots[1]) == _bits(whole.slots[1])


def test_wrong_arguments_are_named() -> None:
    rule = RULES["adamw"].rule  # type: ignore[attr-defined]
    coefficients = np.zeros(kernels.NUM_COEFFICIENTS, np.float32)
    w, slots = np.zeros(4, np.float32), (np.zeros(4, np.float32), np.zeros(4, np.float32))
    bad = {
        r"gradient must be .* \[4\], got float32 \[3\]": kernels.Range(w, None, w[:3], slots, coefficients),
        "gradient must be contiguous": kernels.Range(w, None, np.zeros(8, np.float32)[::2], slots, coefficients),
        "weights take None as master": kernels.Range(w, w, w, slots, coefficients),
        "weights take int16 as master": kernels.Range(w.astype(BF16), None, w, slots, coefficients),
        r"slots \('mu', 'nu'\), the range has 1": kernels.Range(w, None, w, slots[:1], coefficients),
        "weights must be float32 or bfloat16": kernels.Range(w.astype(np.float64), None, w, slots, coefficients),
    }
    for message, part in bad.items():
        with pytest.raises(ValueError, match=message):
            kernels.update(rule, [part])
    w.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        kernels.update(rule, [kernels.Range(w, None, slots[0], slots, coefficients)])
    with pytest.raises(ValueError, match="num_threads"):
        kernels.zero(slots[0], num_threads=0)
    with pytest.raises(ValueError, match="this CPU supports"):
        kernels.set_variant("sse9")


# --- norms ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_norm_is_the_fixed_order_sum(dtype: np.dtype) -> None:
    rng = np.random.default_rng(2)
    for length in LENGTHS:
        values = rng.standard_normal(length).astype(dtype)
        expected = reference.squared_norm(values)
        for variant in kernels.supported_variants():
            kernels.set_variant(variant)
            for threads in (1, 2, 5):
                assert kernels.squared_norm(values, num_threads=threads) == expected, (length, variant, threads)
        blocks, total = kernels.block_norms(values), 0.0
        assert blocks.size == -(-length // kernels.NORM_BLOCK)
        for block in blocks:
            total += float(block)
        assert total == expected


def test_norms_do_not_overflow_or_stop_growing() -> None:
    """PR03: f16 {300, 400} is 500, and 1,024 bf16 ones are 32, not inf and 16; f32 near its maximum stays finite."""
    assert kernels.squared_norm(np.array([300, 400], np.float16)) == 500.0**2
    assert kernels.squared_norm(np.ones(1024, BF16)) == 1024.0
    assert np.isfinite(kernels.squared_norm(np.full(100_000, 3e38, np.float32)))


@pytest.mark.parametrize("dtype", DTYPES.values())
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_non_finite_elements_show_in_the_norm(dtype: np.dtype, bad: float) -> None:
    for position in (0, 70_000, 99_999):
        values = np.ones(100_000, dtype)
        values[position] = bad
        assert not np.isfinite(kernels.squared_norm(values))


# --- accumulate, copy, zero -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target,source", [("f32", "f32"), ("f32", "bf16"), ("f32", "f16"), ("bf16",) * 2, ("f16",) * 2]
)
def test_accumulate_adds_as_xla_does(target: str, source: str) -> None:
    rng = np.random.default_rng(3)
    with np.errstate(over="ignore"):
        a, b = (_hostile(rng, 70_001).astype(DTYPES[name]) for name in (target, source))
    exact = jax.jit(lambda x, y: x + y.astype(x.dtype), compiler_options=reference.EXACT)
    expected = np.asarray(exact(jnp.asarray(a), jnp.asarray(b)))
    for variant in kernels.supported_variants():
        kernels.set_variant(variant)
        total = a.copy()
        kernels.accumulate(total, b, num_threads=2)
        assert _bits(total) == _bits(expected), variant


def test_sums_of_ones_keep_growing_in_fp32() -> None:
    """PR03: 1,024 ones are 1,024 in fp32; bf16 stops at 256, as XLA's bf16 addition does."""
    wide, narrow = np.zeros(9, np.float32), np.zeros(9, BF16)
    for _ in range(1024):
        kernels.accumulate(wide, np.ones(9, BF16))
        kernels.accumulate(narrow, np.ones(9, BF16))
    assert (wide == 1024).all() and (narrow == 256).all()
    with pytest.raises(ValueError, match="source must be bfloat16"):
        kernels.accumulate(narrow, wide)


@pytest.mark.parametrize("variant", kernels.supported_variants())
def test_f16_conversions_are_exact(variant: str) -> None:
    """All 65,536 patterns up; and down, every f16 and the neighbours of every midpoint."""
    kernels.set_variant(variant)
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    up = np.zeros(1 << 16, np.float32)
    kernels.accumulate(up, halves)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        assert _bits(up) == _bits(halves.astype(np.float32) + np.float32(0))
    finite = np.sort(halves[np.isfinite(halves)].astype(np.float32))
    middle = (finite[1:] + finite[:-1]) / 2
    values = np.concatenate([finite, middle, np.nextafter(middle, np.inf), np.nextafter(middle, -np.inf), [7e4, -7e4]])
    values = values.astype(np.float32)
    coefficients = np.zeros(kernels.NUM_COEFFICIENTS, np.float32)
    part = kernels.Range(np.zeros(values.size, np.float16), values, None, (), coefficients)
    kernels.update(RULES["sgd"].rule, [part])  # type: ignore[attr-defined]
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(part.weights.view(np.uint16), values.astype(np.float16).view(np.uint16))


@pytest.mark.parametrize("dtype", [BF16, np.int16, np.float32, np.uint8])
def test_copy_and_zero_move_raw_bytes(dtype: np.dtype) -> None:
    """PR05: NaN payloads, -0 and denormals arrive unchanged."""
    source = np.random.default_rng(4).integers(0, 256, 5_000_000, np.uint8).view(dtype)
    target = np.empty_like(source)
    kernels.copy(target, source, num_threads=2)
    assert target.tobytes() == source.tobytes()
    kernels.zero(target, num_threads=2)
    assert not target.view(np.uint8).any()
    kernels.copy(target[:0], source[:0])


# --- threads ----------------------------------------------------------------------------------------------------------


def test_calling_thread_keeps_its_float_mode() -> None:
    denormal = np.full(1000, 1e-40, np.float32)
    kernels.squared_norm(denormal)
    assert (denormal * np.float32(1) == denormal).all() and denormal[0] > 0
    assert kernels.squared_norm(denormal) == 0.0  # while the kernel itself has it as zero


def test_several_python_threads_at_once() -> None:
    values = np.random.default_rng(5).standard_normal(1_000_000).astype(np.float32)
    found: list[float] = []
    expected = kernels.squared_norm(values, num_threads=1)
    threads = [
        threading.Thread(target=lambda: found.extend(kernels.squared_norm(values, num_threads=4) for _ in range(20)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 80


FORKING = """
import os, sys, numpy as np
from zinf_jax.optim import kernels
values = np.ones(1_000_000, np.float32)
assert kernels.squared_norm(values, num_threads=4) == 1e6
child = os.fork()
if child == 0:
    os._exit(0 if kernels.squared_norm(values, num_threads=4) == 1e6 else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert kernels.squared_norm(values, num_threads=4) == 1e6
"""


def test_pool_survives_fork() -> None:
    """In a process of its own, where JAX has not started threads."""
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "PYTHONWARNINGS": "ignore"}
    subprocess.run([sys.executable, "-c", FORKING], check=True, timeout=120, env=environment)


def test_variant_from_the_environment() -> None:
    code = "from zinf_jax.optim import kernels; print(kernels.variant())"
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "ZINF_KERNELS": "portable"}
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=environment, capture_output=True)
    assert done.stdout.strip() == b"portable"
