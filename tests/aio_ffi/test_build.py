"""The build: without the kernel's header, without a compiled module, and without warnings."""

import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig

import pytest

from tests.aio_ffi.conftest import ROOT, run_python

SOURCES = sorted((ROOT / "aio_ffi").glob("*.c"))


def test_no_compiler_warnings():
    for source in SOURCES:
        if source.name.startswith("_"):
            continue
        flags = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
        done = subprocess.run(["gcc", *flags, str(source)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.fixture
def copy(tmp_path: pathlib.Path) -> pathlib.Path:
    shutil.copytree(
        ROOT / "aio_ffi", tmp_path / "aio_ffi", ignore=shutil.ignore_patterns("*.so", "_aio.c", "__pycache__")
    )
    return tmp_path


def run_in(folder: pathlib.Path, *command: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), **environment},
    )  # fmt: skip


WITHOUT = """
import sys, aio_ffi, numpy as np
assert aio_ffi.__file__.startswith(sys.argv[1]), aio_ffi.__file__
found = aio_ffi.probe(sys.argv[1])
assert found.engine.startswith("threads"), found
assert "no such header here" in found.reason, found.reason
data, back = np.arange(100_000, dtype=np.uint8), np.zeros(100_000, np.uint8)
with aio_ffi.Engine() as engine, engine.open(sys.argv[1] + "/file") as file:
    engine.write(file, 3, data).wait()
    engine.read(file, 3, back).wait()
assert (data == back).all()
try:
    aio_ffi.Engine(aio_ffi.EngineOptions(engine="libaio"))
except aio_ffi.AioError as error:
    assert "linux-libc-dev" in str(error), error
"""


def test_without_the_kernel_header(copy):
    """FS09: the build succeeds, the engine falls back, and says which header failed and how to get it."""
    shadow = copy / "include" / "linux"
    shadow.mkdir(parents=True)
    (shadow / "aio_abi.h").write_text("#error no such header here\n")
    built = run_in(copy, "aio_ffi/_build.py", CPATH=str(shadow.parent))
    assert built.returncode == 0, built.stderr
    assert "built without kernel AIO" in built.stdout
    used = run_in(copy, "-c", WITHOUT, str(copy))
    assert used.returncode == 0, used.stderr


def test_without_a_build(copy):
    """The message says what to run."""
    # Without `site`: an editable install's import hook would find the extension of the installed checkout.
    done = run_in(copy, "-S", "-c", "import aio_ffi", PYTHONPATH=sysconfig.get_paths()["purelib"])
    assert "python aio_ffi/_build.py" in done.stderr


def test_imports_nothing_of_ours():
    code = "import sys, aio_ffi; print([m for m in sys.modules if m.split('.')[0] in ('zinf_jax', 'jax')])"
    assert run_python(code).stdout.strip() == "[]"
