"""The pager where the device does not share host memory: copies are dropped when nothing needs them any more."""

import dataclasses

import jax
import pytest

import zinf_jax as zinf
from tests.train import blocks
from tests.train.blocks import config, placed, run
from zinf_jax.tier import Topology


@pytest.fixture
def separate_memory(monkeypatch):
    """Runs as on an accelerator: nothing is taken to alias."""
    monkeypatch.setattr(Topology, "aliases", property(lambda self: False))


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_device_copies_are_bounded_by_the_plan(separate_memory, tier, monkeypatch):
    expected = run(placed(tier)).bits
    with zinf.Trainer(
        blocks.loss, zinf.lazy(blocks.init, jax.random.key(0)), zinf.optim.adamw(1e-2, weight_decay=0.1),
        config(placed(tier)),
    ) as trainer:  # fmt: skip
        trainer.prepare(blocks.batch())
        pager, seen = trainer._engine.pager, []
        issue = pager.issue

        def watch(position):
            issue(position)
            seen.append(sum(handle.nbytes for handle in pager._handles.values()))

        monkeypatch.setattr(pager, "issue", watch)
        assert run(trainer=trainer).bits == expected
        all_weights = sum(page.weights_bytes for page in trainer.plan.shape.pages)
        assert max(seen) < all_weights, "every page has a copy on the device at once"
        assert trainer.plan.device_bytes >= max(seen)
        assert trainer.stats().h2d_bytes >= 2 * all_weights * 0.5


def test_device_tier_pages_are_copied_once(separate_memory):
    with zinf.Trainer(
        blocks.loss, zinf.lazy(blocks.init, jax.random.key(0)), zinf.optim.adamw(1e-2), config(placed("device"))
    ) as trainer:
        trainer.step(blocks.batch())
        pages = sum(page.weights_bytes for page in trainer.plan.shape.pages)
        assert trainer.stats().h2d_bytes == pages


def test_an_arena_that_cannot_be_registered_says_so():
    class Client:
        def dma_map(self, address, size):
            raise RuntimeError("not supported")

    from zinf_jax.tier import FrameArena

    arena = FrameArena(4096)
    assert "not supported" in arena.register(Client())
    arena.close()


def test_plan_is_a_value():
    plan = run(placed("nvme"), steps=1).plan
    assert dataclasses.is_dataclass(plan) and "nvme" in str(plan) and "forward" in plan.timeline()
