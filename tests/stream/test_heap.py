"""What the C library does with what a thread frees: the kernel has pages to give again, or it has not."""

import subprocess
import sys

import pytest

# 100 buffers of 1 MiB, more than one heap of a thread holds, taken and given back as values of a pass are.
SCRIPT = """
import resource, sys, threading
import numpy as np
from zinf_jax.stream import heap

assert heap.keep_freed() if sys.argv[1] == "keep" else heap.return_freed(int(sys.argv[1]))

def step():
    buffers = [np.empty(1 << 20, np.uint8) for _ in range(100)]
    for buffer in buffers:
        buffer[::4096] = 1

def steps():
    for count in (2, 4):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(count):
            step()
    print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / count)

thread = threading.Thread(target=steps)
thread.start()
thread.join()
"""


def faults_per_step(rule):
    run = subprocess.run([sys.executable, "-c", SCRIPT, rule], capture_output=True, text=True, check=False)
    if "AssertionError" in run.stderr:
        pytest.skip("this C library has no such switches")
    assert run.returncode == 0, run.stderr
    return float(run.stdout)


def test_freed_buffers_stay_for_the_next_step_or_go_back():
    assert faults_per_step("keep") < 100
    assert faults_per_step(str(512 << 10)) > 10_000
