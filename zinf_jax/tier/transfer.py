"""Between frames and devices: how a page stands on a mesh, and the handles that programs read it through.

Guarantees:
  * `put` never changes or copies host bytes that it need not: on the CPU backend the arrays alias the frame, so the
    frame is in use until the consumers' outputs are ready; elsewhere until the returned array is ready.
  * A handle is made anew after its bytes changed: nothing here caches one.
Only the main thread calls this module.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from zinf_jax.errors import ConfigError
from zinf_jax.leaves import Leaf
from zinf_jax.tier.layout import Page, tp_axes

FSDP_AXIS = "fsdp"
BATCH_AXES = ("data", "dp", FSDP_AXIS)  # mesh axes that a batch's leading dim is split over, where present


@dataclasses.dataclass(frozen=True)
class Partitioning:
    """Which states are sharded over the `fsdp` axis. ZeRO's stages are values of it.

    Attributes:
      optimizer: Stage 1 and up.
      gradients: Stage 2 and up.
      weights: Stage 3.
    """

    optimizer: bool = True
    gradients: bool = True
    weights: bool = True

    @classmethod
    def of_stage(cls, stage: int) -> "Partitioning":
        if stage not in (0, 1, 2, 3):
            raise ConfigError(f"ZeRO stage must be 0, 1, 2 or 3, got {stage!r}")
        return cls(stage >= 1, stage >= 2, stage >= 3)


@dataclasses.dataclass(frozen=True)
class Topology:
    """A mesh and how pages, gradients and batches lie on it."""

    mesh: Mesh
    partitioning: Partitioning

    @classmethod
    def create(cls, mesh: Mesh | None, partitioning: Partitioning) -> "Topology":
        """Takes the user's mesh with its axes made Auto (propagation through a user's model needs it), or makes one.

        Without a mesh, all devices of the process stand on one `fsdp` axis.
        """
        if mesh is None:
            devices = np.array(jax.devices())
            mesh = Mesh(devices, (FSDP_AXIS,), axis_types=(AxisType.Auto,))
        elif any(kind != AxisType.Auto for kind in mesh.axis_types):
            mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
        return cls(mesh, partitioning)

    @property
    def axis_sizes(self) -> Mapping[str, int]:
        return dict(self.mesh.shape)

    @property
    def num_ranks(self) -> int:
        return self.mesh.shape.get(FSDP_AXIS, 1)

    @property
    def batch_ways(self) -> int:
        return int(np.prod([self.mesh.shape.get(axis, 1) for axis in BATCH_AXES]))

    @property
    def aliases(self) -> bool:
        """True where device arrays share the frame's memory (the CPU backend)."""
        return self.mesh.devices.flat[0].platform == "cpu"

    def sharding(self, *spec: Any) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    @property
    def replicated(self) -> NamedSharding:
        return self.sharding()

    def weights_sharding(self, page: Page, leaves: Sequence[Leaf]) -> NamedSharding:
        return self._rows(page, leaves, sharded=self.partitioning.weights)

    def gradient_sharding(self, page: Page, leaves: Sequence[Leaf]) -> NamedSharding:
        return self._rows(page, leaves, sharded=self.partitioning.gradients)

    def gathered_sharding(self, page: Page, leaves: Sequence[Leaf]) -> NamedSharding:
        """What an all-gather over `fsdp` gives: tensor-parallel dims stay split."""
        return self._rows(page, leaves, sharded=False)

    def _rows(self, page: Page, leaves: Sequence[Leaf], *, sharded: bool) -> NamedSharding:
        axes = tuple(a for a in tp_axes(leaves[page.segments[0].piece.leaf]) if a in self.mesh.shape)
        fsdp = FSDP_AXIS if sharded and FSDP_AXIS in self.mesh.shape else None
        return self.sharding(axes or None, fsdp, None)

    def leaf_sharding(self, leaf: Leaf) -> NamedSharding:
        """The user's own sharding of a piece (replicated where there is none)."""
        return self.sharding(*leaf.spec[leaf.stack_ndim :])

    def batch_sharding(self, shape: Sequence[int]) -> NamedSharding:
        axes = tuple(axis for axis in BATCH_AXES if axis in self.mesh.shape)
        return self.sharding(axes or None) if shape and axes else self.replicated


def put_rows(rows: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """A global array over host bytes: each device's part is put from a view of `rows`, which is not copied first.

    Args:
      rows: `[num_tp, num_ranks, row_size]`, C-contiguous.
      sharding: Splits at most the first two dims.
    """
    if len(sharding.mesh.devices.flat) == 1:
        return jax.device_put(rows, sharding)
    index_map = sharding.addressable_devices_indices_map(rows.shape)
    parts = [jax.device_put(rows[index], device) for device, index in index_map.items()]
    return jax.make_array_from_single_device_arrays(rows.shape, sharding, parts)


def row_views(array: jax.Array) -> dict[tuple[int, int], np.ndarray]:
    """Host views of the addressable rows of `[num_tp, num_ranks, n]`: (tp, rank) -> `[n]`. Blocks until ready."""
    views: dict[tuple[int, int], np.ndarray] = {}
    for shard in array.addressable_shards:
        tp_slice, rank_slice = shard.index[0], shard.index[1]
        tp_range = range(*tp_slice.indices(array.shape[0]))
        rank_range = range(*rank_slice.indices(array.shape[1]))
        if all((t, r) in views for t in tp_range for r in rank_range):
            continue
        data = np.asarray(shard.data)
        for i, t in enumerate(tp_range):
            for j, r in enumerate(rank_range):
                # Replicas are equal; row r is taken from the first device that holds it.
                views.setdefault((t, r), data[i, j])
    return views
