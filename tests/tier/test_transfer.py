"""Handles of pages: on the CPU backend they alias frames, which is what frames' lifetimes are for."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import zinf_jax as zinf
from tests.tier.tables import leaf
from zinf_jax.tier import (
    FrameArena,
    FrameSpan,
    LayoutOptions,
    Partitioning,
    Topology,
    build_layout,
    put_rows,
    row_views,
)


@pytest.fixture
def topology():
    return Topology.create(None, Partitioning())


def page_of(topology, size):
    return build_layout((leaf(0, "w", (size,)),), LayoutOptions(), num_ranks=topology.num_ranks).pages[0]


@pytest.mark.parametrize("kind", ["device", "pinned_host"])
@pytest.mark.parametrize("size", [1, 4, 100, 10_000, 1_000_000])
def test_al01_al08_a_handle_is_its_frame(topology, size, kind):
    """No copy, and the memory kind that was asked for. `may_alias=False` would not copy either; so frames are leased
    until the last reader is done, which tests/train/test_lifetimes.py poisons them for."""
    page = page_of(topology, size)
    arena = FrameArena(page.num_bytes, lock=False)
    rows = arena.lease(FrameSpan(0, page.num_bytes), "w").view(page.dtype).reshape(page.shape)
    rows[:] = 1
    sharding = topology.weights_sharding(page, (leaf(0, "w", (size,)),)).with_memory_kind(kind)
    handle = put_rows(rows, sharding)
    assert handle.sharding.memory_kind == kind and handle.shape == page.shape
    np.testing.assert_array_equal(handle, 1)
    assert topology.aliases == (handle.addressable_data(0).unsafe_buffer_pointer() == rows.ctypes.data)
    del handle
    arena.close()


def test_al04_copies_survive_the_deletion_of_their_source(topology):
    page = page_of(topology, 5000)
    arena = FrameArena(page.num_bytes, lock=False)
    rows = arena.lease(FrameSpan(0, page.num_bytes), "w").view(page.dtype).reshape(page.shape)
    rows[:] = 3
    handle = put_rows(rows, topology.weights_sharding(page, (leaf(0, "w", (5000,)),)))
    copy = jax.numpy.copy(handle)
    handle.delete()
    rows[:] = 4
    np.testing.assert_array_equal(copy, 3)


def test_row_views_show_every_row_without_a_copy(topology):
    array = jax.device_put(np.arange(24, dtype=np.float32).reshape(2, 3, 4), topology.replicated)
    views = row_views(array)
    assert sorted(views) == [(t, r) for t in range(2) for r in range(3)]
    for (t, r), view in views.items():
        np.testing.assert_array_equal(view, np.arange(4) + 4 * (3 * t + r))
        assert not view.flags.owndata


@pytest.mark.parametrize(("stage", "sharded"), [(0, ()), (1, ("optimizer",)), (2, ("optimizer", "gradients")),
                                                (3, ("optimizer", "gradients", "weights"))])  # fmt: skip
def test_stages_are_values_of_one_partitioning(stage, sharded):
    found = Partitioning.of_stage(stage)
    assert {name for name in ("optimizer", "gradients", "weights") if getattr(found, name)} == set(sharded)


@pytest.mark.parametrize("stage", [-1, 4, "3", 1.5])
def test_there_is_no_other_stage(stage):
    with pytest.raises(zinf.ConfigError, match="must be 0, 1, 2 or 3"):
        Partitioning.of_stage(stage)


def test_a_users_explicit_mesh_becomes_auto():
    """jax.make_mesh gives Explicit axes, under which a user's model would need shardings everywhere."""
    mesh = Mesh(np.array(jax.devices()[:1]), ("fsdp",), axis_types=(AxisType.Explicit,))
    made = Topology.create(mesh, Partitioning())
    assert made.mesh.axis_types == (AxisType.Auto,)
    assert (made.num_ranks, made.batch_ways) == (1, 1)
