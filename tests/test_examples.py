"""The examples in the README run, and say what the README says."""

import difflib
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
EXAMPLES = ROOT / "scripts" / "examples"


def losses(name):
    done = subprocess.run([sys.executable, EXAMPLES / name], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return [float(line.split()[1]) for line in done.stdout.splitlines()]


def test_a_flax_script_before_and_after_trains_the_same():
    before, after = losses("flax_in_memory.py"), losses("flax_streamed.py")
    assert len(before) == 20 and before[-1] < before[0]
    assert after == pytest.approx(before, rel=1e-5)


def test_at_most_ten_lines_of_the_script_are_new():
    before, after = ((EXAMPLES / f"flax_{name}.py").read_text().splitlines() for name in ("in_memory", "streamed"))
    added = [line for line in difflib.ndiff(before, after) if line.startswith("+ ") and line[2:].strip()]
    assert len(added) <= 10, added
