"""The C core under ASan, UBSan and TSan."""

import shutil
import subprocess

import pytest

from tests.aio_ffi.conftest import ROOT


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("2",), ("--python", "1")])
def test_sanitizers(arguments):
    if not shutil.which("gcc") or not shutil.which("setarch"):
        pytest.skip("needs gcc and setarch")
    done = subprocess.run(["bash", "scripts/sanitize.sh", *arguments], cwd=ROOT, capture_output=True, text=True)
    if "cannot find -l" in done.stderr:
        pytest.skip("the compiler has no sanitizer runtime")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert done.stdout.count("all equal") == 2
