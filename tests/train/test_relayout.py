"""Checkpoints on a mesh of another size, or where the loss stacks its leaves otherwise (CK03)."""

import functools
import json
import subprocess
import sys

import numpy as np
import pytest


@functools.cache
def worker():
    done = subprocess.run([sys.executable, "-m", "tests.train.relayout_worker"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("tier", ["nvme", "host"])
@pytest.mark.parametrize(("saved", "resumed"), [(2, 1), (1, 3), (2, 4)])
def test_ck03_another_number_of_ranks(saved, resumed, tier):
    """Leaves of 7, 513 and more elements, fp32 and bf16 with its master: bitwise equal, slots and counters too."""
    found = worker()[f"{saved}-{resumed}-{tier}"]
    assert found["equal"] and found["in_place"]
    assert found["ranks"] == [resumed]
    assert found["chunks"][0] > found["chunks"][1], "records are in other chunks too"
    gone_on, resumed_losses = found["losses"]
    np.testing.assert_allclose(resumed_losses, gone_on, rtol=1e-2 if tier == "host" else 1e-5)


@pytest.mark.parametrize("name", ["optax", "tp", "stack-whole", "whole-stack"])
def test_other_optimizers_axes_and_stacks(name):
    assert worker()[name]["equal"] and worker()[name]["in_place"]


def test_weights_alone_on_another_mesh():
    found = worker()["weights"]
    assert found["leaves_equal"] and found["moments_zero"] and not found["equal"]


def test_pages_in_use_are_not_changed():
    found = worker()["refusals"]
    for name in ("auto", "path"):
        assert "2 fsdp ranks" in found[name] and "mesh has 4" in found[name]
        assert "into another run_dir" in found[name]
    assert found["unharmed"]


def test_other_tensor_parallel_axes_are_refused():
    assert "same tensor-parallel axes" in worker()["refusals"]["tp"]


def test_a_file_that_is_cut_short_is_named():
    assert "optimizer pages are cut short: 4096 bytes" in worker()["refusals"]["short"]
