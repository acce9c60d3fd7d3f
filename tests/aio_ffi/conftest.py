"""Fixtures: a directory on a real disk, an arena, and an engine of each kind."""

import contextlib
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import aio_ffi

ROOT = pathlib.Path(__file__).resolve().parents[2]
KINDS = ("libaio", "threads_direct", "threads_buffered")


@pytest.fixture(scope="session")
def disk() -> Iterator[pathlib.Path]:
    """A folder where O_DIRECT means something: the temporary folder unless that is memory, else the checkout."""
    candidates = [tempfile.gettempdir(), str(ROOT)]
    chosen = next((c for c in candidates if aio_ffi.fs_type(c) not in ("tmpfs", "ramfs", "overlay")), candidates[0])
    with tempfile.TemporaryDirectory(dir=chosen, prefix="aio_test_") as folder:
        yield pathlib.Path(folder)


@pytest.fixture
def path(disk: pathlib.Path) -> Iterator[pathlib.Path]:
    name = disk / f"file_{os.urandom(4).hex()}"
    yield name
    name.unlink(missing_ok=True)


@pytest.fixture(scope="session")
def arena() -> aio_ffi.Arena:
    return aio_ffi.Arena(64 << 20, lock=False)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def make_engine() -> Iterator[Callable[..., aio_ffi.Engine]]:
    """Makes engines that are closed at the end, whatever the test left unseen."""
    made = []

    def make(engine: str = "libaio", **options) -> aio_ffi.Engine:
        options.setdefault("block_size", 1 << 16)
        options.setdefault("queue_depth", 8)
        made.append(aio_ffi.Engine(aio_ffi.EngineOptions(engine=engine, **options)))
        return made[-1]

    yield make
    for engine in made:
        with contextlib.suppress(aio_ffi.AioError):
            engine.close()


@pytest.fixture
def engine(kind: str, make_engine: Callable[..., aio_ffi.Engine]) -> aio_ffi.Engine:
    return make_engine(kind)


def fill(array: np.ndarray, seed: int = 0) -> np.ndarray:
    array[:] = np.random.default_rng(seed).integers(0, 256, array.size, np.uint8)
    return array


def run_python(code: str, *args: str, prefix: tuple[str, ...] = (), timeout: float = 60) -> subprocess.CompletedProcess:
    """Runs `code` in a fresh interpreter that can import the checkout."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*prefix, sys.executable, "-c", code, *args],
        capture_output=True, text=True, timeout=timeout, env=environment, check=False,
    )  # fmt: skip
