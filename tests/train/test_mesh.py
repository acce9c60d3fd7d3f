"""The same path over a mesh: ZeRO stages 0 to 3 over 1, 2, 4 and 8 (simulated) devices in one process."""

import functools
import json
import subprocess
import sys

import numpy as np
import pytest

from tests.train.blocks import placed, run


@functools.cache
def worker():
    done = subprocess.run([sys.executable, "-m", "tests.train.mesh_worker"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("num", [1, 2, 4, 8])
def test_tiers_give_the_same_bits_on_the_same_mesh(num):
    assert worker()[f"fsdp{num}-nvme"]["bits"] == worker()[f"fsdp{num}-host"]["bits"]


@pytest.mark.parametrize("num", [2, 4, 8])
def test_a_mesh_trains_as_one_device_does(num):
    alone = run(placed("host"))
    np.testing.assert_allclose(worker()[f"fsdp{num}-nvme"]["losses"], alone.losses, rtol=1e-5)
    np.testing.assert_allclose(worker()[f"fsdp{num}-nvme"]["norms"], alone.norms, rtol=1e-5)


def test_what_is_kept_for_backward_is_sharded_too():
    assert worker()["dots-nvme"]["bits"] == worker()["dots-host"]["bits"]
    np.testing.assert_allclose(worker()["dots-nvme"]["losses"], worker()["fsdp4-nvme"]["losses"], rtol=1e-5)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_stages(stage):
    """What is sharded changes memory and collectives, not the tier invariance; the numbers stay those of stage 3."""
    assert worker()[f"stage{stage}-nvme"]["bits"] == worker()[f"stage{stage}-host"]["bits"]
    np.testing.assert_allclose(worker()[f"stage{stage}-nvme"]["losses"], worker()["stage3-nvme"]["losses"], rtol=2e-2)


def test_collectives_are_in_the_programs():
    found = worker()["collectives"]
    assert "all-gather" in found["3"]["forward"] and "all-gather" in found["3"]["backward"]
    assert "all-gather" not in found["2"]["forward"], "weights are replicated below stage 3"
    for stage in ("0", "2", "3"):
        assert {"reduce-scatter", "all-reduce"} & set(found[stage]["backward"]), "gradients are reduced"


def test_tensor_parallel_shardings_are_kept():
    found = worker()["tensor_parallel"]
    assert found["equal"]
    assert [2, 4] in found["page_rows"], "a leaf split over tp has a leading tp dim in its page"
    np.testing.assert_allclose(found["losses"], run(placed("host")).losses, rtol=1e-5)
