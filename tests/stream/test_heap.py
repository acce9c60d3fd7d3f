"""What the C library does with what threads free: the kernel has pages to give again or not, and who can use them."""

import os
import pathlib
import subprocess
import sys

import pytest

from zinf_jax.plan import Freed
from zinf_jax.stream import heap

START = """
import resource, sys, threading
import numpy as np
from zinf_jax.stream import heap

def step(count=100):  # buffers of 1 MiB, of 100 more than one heap of a thread holds, as values of a pass are
    buffers = [np.empty(1 << 20, np.uint8) for _ in range(count)]
    for buffer in buffers:
        buffer[::4096] = 1

def in_a_thread(action):
    thread = threading.Thread(target=action)
    thread.start()
    thread.join()
"""
FAULTS = """
assert heap.keep_freed() if sys.argv[1] == "keep" else heap.return_freed(int(sys.argv[1]))

def steps():
    for count in (2, 4):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(count):
            step()
    print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / count)

in_a_thread(steps)
"""
HELD = """
assert heap.keep_freed()

def held():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

before, done, end = held(), threading.Semaphore(0), threading.Event()

def once():
    step(40)
    done.release()
    end.wait()  # alive, so that no thread after it is given its heap

threads = [threading.Thread(target=once) for _ in range(4)]
for thread in threads:  # one after the other
    thread.start()
    done.acquire()
print((held() - before) / 2**20)
end.set()
"""


def run(script, *arguments, **environment):
    done = subprocess.run(
        [sys.executable, "-c", START + script, *arguments],
        capture_output=True, text=True, check=False, env={**without_tunables(), **environment},
    )  # fmt: skip
    if "AssertionError" in done.stderr:
        pytest.skip("this C library has no such switches")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def without_tunables():
    return {name: value for name, value in os.environ.items() if name not in ("GLIBC_TUNABLES", "MALLOC_ARENA_MAX")}


def test_freed_buffers_stay_for_the_next_step_or_go_back():
    assert float(run(FAULTS, "keep")) < 100
    assert float(run(FAULTS, str(512 << 10))) > 10_000


@pytest.mark.parametrize(
    "one", [{"GLIBC_TUNABLES": f"glibc.malloc.hugetlb=0:{heap.ONE_HEAP}"}, {"MALLOC_ARENA_MAX": "1"}]
)
def test_one_heap_for_all_threads_holds_what_one_of_them_needs(one):
    each, together = float(run(HELD)), float(run(HELD, **one))
    assert each > 140  # MiB, of four times 40
    assert 35 < together < 70


@pytest.mark.parametrize("bounded", [False, True])
def test_what_becomes_of_freed_memory_is_found_in_the_environment_that_the_process_began_with(bounded):
    script = f"import os; os.environ['MALLOC_ARENA_MAX'] = '1'; print(heap.choose(bounded={bounded}))"
    assert run(script) == (Freed.RETURNED if bounded else Freed.KEPT), "too late for this process"
    assert run(script, GLIBC_TUNABLES=f"{heap.ONE_HEAP}0") == (Freed.RETURNED if bounded else Freed.KEPT)
    assert run(script, GLIBC_TUNABLES=f"glibc.malloc.hugetlb=1:{heap.ONE_HEAP}") == Freed.SHARED
    assert run(script, MALLOC_ARENA_MAX="1") == Freed.SHARED


def test_what_is_best_is_said_where_it_can_be_chosen():
    assert heap.advice(Freed.SHARED) is None
    for freed in (Freed.KEPT, Freed.RETURNED):
        assert heap.TUNABLES in (heap.advice(freed) or "")
    root = pathlib.Path(heap.__file__).parents[2]
    for name in ("README.md", "scripts/quickstart.sh", "scripts/_bench.py"):
        assert heap.TUNABLES in (root / name).read_text(), name
