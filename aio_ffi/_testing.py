"""For tests alone: makes the real engine meet failures, and shows what it sent to the kernel.

::

    with inject(engine, "write", value=-errno.EIO, after=2):
        ...
"""

import contextlib
import dataclasses
import time
from collections.abc import Iterator

from aio_ffi._checksum import crc32c_variant
from aio_ffi._engine import Engine
from aio_ffi._native import ffi, lib

FOREVER = 1 << 62
SITES = {
    "submit": lib.ZAIO_FAULT_SUBMIT,  # io_submit returns value
    "accept": lib.ZAIO_FAULT_ACCEPT,  # io_submit takes at most value requests
    "read": lib.ZAIO_FAULT_READ,  # a read piece: negative errno, or at most value bytes
    "write": lib.ZAIO_FAULT_WRITE,
    "getevents": lib.ZAIO_FAULT_GETEVENTS,
    "sync": lib.ZAIO_FAULT_SYNC,
    "reverse": lib.ZAIO_FAULT_REVERSE,  # completions handled in reverse order
    "delay": lib.ZAIO_FAULT_DELAY,  # a piece that completed is held back value microseconds: a slow drive
    "flip": lib.ZAIO_FAULT_FLIP,  # bit number value (modulo its bits) of a completed read piece: a wrong drive
}
GATES = {"submit": lib.ZAIO_GATE_SUBMIT, "complete": lib.ZAIO_GATE_COMPLETE, "sync": lib.ZAIO_GATE_SYNC}


@dataclasses.dataclass(frozen=True)
class Piece:
    """A kernel request, in the order in which they were taken from the queue."""

    worker: int
    kind: str
    offset: int
    num_bytes: int


@contextlib.contextmanager
def inject(engine: Engine, site: str, *, value: int = 0, after: int = 0, times: int = FOREVER) -> Iterator[None]:
    """Calls number `after` to `after + times` of `site` give `value`, within the context."""
    native = engine._core.engine
    lib.zaio_testing_fault(native, SITES[site], after, times, value)
    try:
        yield
    finally:
        lib.zaio_testing_fault(native, SITES[site], 0, 0, 0)


@contextlib.contextmanager
def closed_gate(engine: Engine, gate: str) -> Iterator[None]:
    """Within the context nothing passes: "submit" (the queue is not touched), "complete" (no outcome), "sync"."""
    native = engine._core.engine
    lib.zaio_testing_gate(native, GATES[gate], 1)
    try:
        yield
    finally:
        lib.zaio_testing_gate(native, GATES[gate], 0)


def wait_at_gate(engine: Engine, gate: str, count: int = 1, timeout_s: float = 10.0) -> None:
    """Returns once `count` workers stand at the gate."""
    until = time.monotonic() + timeout_s
    while lib.zaio_testing_gate_waiters(engine._core.engine, GATES[gate]) < count:
        if time.monotonic() > until:
            raise TimeoutError(f"no {count} workers at gate {gate!r} after {timeout_s} s")
        time.sleep(0)


def start_trace(engine: Engine) -> None:
    """Allocates the trace; pieces taken from now on are recorded, up to 65536."""
    lib.zaio_testing_trace(engine._core.engine, ffi.NULL, 0)


def trace(engine: Engine) -> list[Piece]:
    """The pieces recorded so far."""
    out = ffi.new("zaio_trace[]", 65536)
    count = lib.zaio_testing_trace(engine._core.engine, out, 65536)
    kinds = {lib.ZAIO_READ: "read", lib.ZAIO_WRITE: "write"}
    return [Piece(p.worker, kinds[p.kind], p.offset, p.num_bytes) for p in out[0:count]]


def crc32c_variants() -> list[str]:
    """Those that this processor has, "portable" first."""
    found: list[str] = []
    while name := lib.zaio_testing_crc32c_name(len(found)):
        found.append(ffi.string(name).decode())
    return found


@contextlib.contextmanager
def forced_crc32c(variant: str) -> Iterator[None]:
    """Within the context this process computes checksums in that way."""
    names = crc32c_variants()
    before = names.index(crc32c_variant())
    lib.zaio_testing_crc32c_use(names.index(variant))
    try:
        yield
    finally:
        lib.zaio_testing_crc32c_use(before)


@contextlib.contextmanager
def failing_setup(code: int, times: int = 1 << 30) -> Iterator[None]:
    """The next `times` io_setup calls of this process fail with `code`."""
    lib.zaio_testing_setup_error(code, times)
    try:
        yield
    finally:
        lib.zaio_testing_setup_error(0, 0)
