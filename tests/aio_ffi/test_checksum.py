"""CRC32C: the function by itself, and as part of a transfer."""
# ruff: noqa: SIM117 - nested `with`s show what is injected around what

import errno
import functools
import platform
import shutil
import subprocess
import threading

import numpy as np
import pytest

import aio_ffi
from aio_ffi import _testing
from tests.aio_ffi.conftest import ROOT, fill

BLOCK = 1 << 16
POLYNOMIAL = 0x82F63B78


@functools.cache  # the variants are tried with equal bytes
def naive(data: bytes, seed: int = 0) -> int:
    """Bit by bit, as it is defined."""
    crc = seed ^ 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ POLYNOMIAL if crc & 1 else crc >> 1
    return crc ^ 0xFFFFFFFF


@pytest.fixture(params=["portable", "sse42", "armv8", "pclmul", "vpclmul"])
def variant(request):
    if request.param not in _testing.crc32c_variants():
        pytest.skip("not on this processor")
    with _testing.forced_crc32c(request.param):
        assert aio_ffi.crc32c_variant() == request.param
        yield request.param


def test_known_values(variant):
    """RFC 3720, appendix B.4."""
    assert aio_ffi.crc32c(b"123456789") == 0xE3069283
    assert aio_ffi.crc32c(bytes(32)) == 0x8A9136AA
    assert aio_ffi.crc32c(b"\xff" * 32) == 0x62A8AB43
    assert aio_ffi.crc32c(np.arange(32, dtype=np.uint8)) == 0x46DD794E
    assert aio_ffi.crc32c(b"") == 0
    assert aio_ffi.crc32c(b"", 77) == 77


def test_variants_are_told_apart():
    chosen, found = aio_ffi.crc32c_variant(), _testing.crc32c_variants()
    assert chosen in found and found[0] == "portable"
    if platform.machine() in ("x86_64", "AMD64"):
        with open("/proc/cpuinfo") as file:
            flags = file.read().split()
        assert ("sse42" in found) == ("sse4_2" in flags)
        assert ("pclmul" in found) == ("sse4_2" in flags and "pclmulqdq" in flags)
        assert "vpclmul" not in found or "vpclmulqdq" in flags
    for name in found:
        with _testing.forced_crc32c(name):
            assert aio_ffi.crc32c_variant() == name
    assert aio_ffi.crc32c_variant() == chosen


def test_like_the_definition(variant):
    """Every length up to 600, from every alignment, with any seed."""
    random = np.random.default_rng(0)
    memory = fill(np.empty(800, np.uint8))
    for length in range(601):
        start, seed = int(random.integers(0, 200)), int(random.integers(0, 2**32))
        part = memory[start : start + length]
        assert aio_ffi.crc32c(part, seed) == naive(part.tobytes(), seed), (length, start, seed)


@pytest.mark.parametrize("near", [3 * 256, 6 * 256, 3 * 4096, 3 * 4096 + 3 * 256])
def test_where_the_streams_join(variant, near):
    memory = fill(np.empty(near + 32, np.uint8))
    for start in range(9):
        for length in range(near - 1, near + 18):
            if (start + length) % 3 == 0:
                part = memory[start : start + length]
                assert aio_ffi.crc32c(part, length) == naive(part.tobytes(), length)


WIDE = r"""
#include <immintrin.h>
#undef _mm256_clmulepi64_epi128
#define _mm256_clmulepi64_epi128(a, b, halves) _mm256_set_m128i( \
    _mm_clmulepi64_si128(_mm256_extracti128_si256(a, 1), _mm256_extracti128_si256(b, 1), halves), \
    _mm_clmulepi64_si128(_mm256_castsi256_si128(a), _mm256_castsi256_si128(b), halves))
#include "checksum.c"
#include <stdio.h>
int64_t now_ns(void) { return 0; }
int main(void) {
    static unsigned char memory[5100];
    for (int i = 0; i < 5100; i++) memory[i] = (unsigned char)(i * i >> 3);
    setup();
    if (!have_pclmul() || !__builtin_cpu_supports("avx2")) return 2;
    for (size_t length = 0; length < 5000; length += length < 700 ? 1 : 97)
        for (size_t start = 0; start < 33; start++) {
            uint32_t seed = (uint32_t)(length * 2654435761u + start);
            if (update_vpclmul(seed, memory + start, length) == update_portable(seed, memory + start, length)) continue;
            printf("%zu bytes at %zu differ\n", length, start);
            return 1;
        }
    return 0;
}
"""


@pytest.mark.skipif(platform.machine() != "x86_64" or not shutil.which("gcc"), reason="needs gcc for x86_64")
def test_wide_lanes_without_the_instruction(tmp_path):
    """Variant "vpclmul" where the processor lacks it: each wide multiplication is made by two narrow ones."""
    source, program = tmp_path / "wide.c", str(tmp_path / "wide")
    source.write_text(WIDE)
    subprocess.run(
        ["gcc", "-std=gnu11", "-O1", f"-I{ROOT / 'aio_ffi'}", str(source), "-o", program, "-pthread"], check=True
    )
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    if done.returncode == 2:
        pytest.skip("needs AVX2 and PCLMULQDQ")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("size", [100_003, 1 << 20, (8 << 20) + 5])
def test_large(variant, size):
    """All variants agree, and any cut in two gives the same."""
    memory = fill(np.empty(size + 3, np.uint8), size)[3:]
    with _testing.forced_crc32c("portable"):
        whole = aio_ffi.crc32c(memory, 123)
    assert aio_ffi.crc32c(memory, 123) == whole
    for cut in (0, 1, 7, 64, 4096, size // 3, size - 129, size):
        assert aio_ffi.crc32c(memory[cut:], aio_ffi.crc32c(memory[:cut], 123)) == whole
    memory[size // 2] ^= 1
    assert aio_ffi.crc32c(memory, 123) != whole


def test_what_it_takes():
    numbers = np.arange(100, dtype=np.float32).reshape(4, 25)
    assert aio_ffi.crc32c(numbers) == aio_ffi.crc32c(numbers.tobytes()) == aio_ffi.crc32c(memoryview(numbers))
    for wrong in (numbers[:, ::2], "text", 5):
        with pytest.raises(ValueError, match="C-contiguous"):
            aio_ffi.crc32c(wrong)
    for seed in (-1, 2**32, 1.5, None):
        with pytest.raises(ValueError, match="from 0 to 4294967295, got"):
            aio_ffi.crc32c(b"", seed)
    assert aio_ffi.crc32c(b"x", np.uint32(2**32 - 1)) == naive(b"x", 2**32 - 1)


def test_threads_may_share_it():
    memory = fill(np.empty(1 << 20, np.uint8))
    expected, found = aio_ffi.crc32c(memory), []
    threads = [threading.Thread(target=lambda: found.append(aio_ffi.crc32c(memory))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 4


SHAPES = [(0, 0, 16 * BLOCK), (0, 1, 16 * BLOCK), (37, 0, 5 * BLOCK + 100), (4096, 3, 100), (0, 0, 0), (512, 512, 4096)]


@pytest.mark.parametrize(("offset", "skew", "length"), SHAPES)
def test_of_a_transfer(engine, arena, path, variant, offset, skew, length):
    """Aligned and not, in place and bounced, one piece and many: of the bytes of the whole array."""
    written, found = fill(arena.array(skew, length), length), arena.array((4 << 20) + skew, length)
    found[:] = 0
    with engine.open(path, num_bytes=offset + length) as file:
        for seed in (0, 0xDEADBEEF):
            expected = aio_ffi.crc32c(written, seed)
            handle = engine.write(file, offset, written, seed=seed)
            handle.wait()
            assert handle.checksum == expected
            handle = engine.read(file, offset, found, seed=seed)
            handle.wait()
            assert handle.checksum == expected
            assert handle.start_s <= handle.done_s
            found[:] = 0


@pytest.mark.parametrize("cap", [512, 5000])
def test_of_short_transfers(engine, arena, path, cap):
    written, found = fill(arena.array(1, 4 * BLOCK)), arena.array(4 << 20, 4 * BLOCK)
    with engine.open(path) as file:
        with _testing.inject(engine, "write", value=cap), _testing.inject(engine, "read", value=cap):
            stored = engine.write(file, 100, written, seed=1)
            stored.wait()
            loaded = engine.read(file, 100, found, seed=1)
            loaded.wait()
    assert stored.checksum == loaded.checksum == aio_ffi.crc32c(written, 1)


@pytest.mark.parametrize("rings", [1, 3])
def test_of_many_in_flight(kind, make_engine, arena, path, rings):
    """Each its own; out of order; some with, some without. None is lost where the engine has nothing else to do."""
    engine = make_engine(kind, thread_count=rings, queue_depth=2)
    size = 2 * BLOCK + 1
    written = fill(arena.array(0, 20 * size))
    with engine.open(path) as file:
        with _testing.inject(engine, "reverse"):
            for start in (engine.write, engine.read):
                parts = [(i, written[i * size : (i + 1) * size]) for i in range(20)]
                handles = [start(file, i * size, part, seed=i if i % 3 else None) for i, part in parts]
                aio_ffi.wait_all(handles)
                for i, part in parts:
                    if i % 3:
                        assert handles[i].checksum == aio_ffi.crc32c(part, i)


def test_it_is_of_what_the_file_holds(engine, arena, path):
    """A byte that changed on the disk is seen, and nothing else is an error."""
    written = fill(arena.array(0, 4 * BLOCK))
    with engine.open(path) as file:
        stored = engine.write(file, 0, written, seed=9)
        stored.wait()
    with open(path, "r+b") as plain:
        plain.seek(BLOCK + 17)
        plain.write(bytes([written[BLOCK + 17] ^ 1]))
    with engine.open(path) as file:
        loaded = engine.read(file, 0, arena.array(4 << 20, 4 * BLOCK), seed=9)
        loaded.wait()
    assert loaded.checksum != stored.checksum


@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_failed_transfer_has_none(engine, arena, path, operation):
    data = fill(arena.array(0, 4 * BLOCK))
    with engine.open(path, num_bytes=data.size) as file:
        start = getattr(engine, operation)
        with _testing.inject(engine, operation, value=-errno.EIO, after=2, times=1):
            handle = start(file, 0, data, seed=0)
            with pytest.raises(aio_ffi.AioError):
                handle.wait()
        with pytest.raises(ValueError, match=r"failed and has no checksum.*EIO"):
            _ = handle.checksum
        past = engine.read(file, data.size, data, seed=0)
        with pytest.raises(aio_ffi.AioError, match="end of file"):
            past.wait()
        with pytest.raises(ValueError, match="failed and has no checksum"):
            _ = past.checksum


def test_when_there_is_none_to_have(engine, arena, path):
    data = arena.array(0, BLOCK)
    with engine.open(path, num_bytes=BLOCK) as file:
        handle = engine.write(file, 0, data)
        handle.wait()
        with pytest.raises(ValueError, match=r"no checksum: pass seed=0 to `Engine.write`"):
            _ = handle.checksum
        with _testing.closed_gate(engine, "submit"):
            handle = engine.read(file, 0, data, seed=0)
            with pytest.raises(ValueError, match="not complete"):
                _ = handle.checksum
        handle.wait()
        for seed in (-1, 2**32, 0.5):
            with pytest.raises(ValueError, match="seed must be an integer"):
                engine.read(file, 0, data, seed=seed)
    assert engine.statistics().in_flight == 0


def test_a_dropped_transfer_is_summed_before_the_file_closes(kind, path):
    """Nothing but the engine refers to buffer and handle: both must outlive the checksum."""
    engine = aio_ffi.Engine(aio_ffi.EngineOptions(engine=kind, block_size=1 << 16))
    with engine, engine.open(path) as file:
        for i in range(20):
            engine.write(file, i << 17, np.full(1 << 17, i, np.uint8), seed=i)
    assert path.stat().st_size == 20 << 17
