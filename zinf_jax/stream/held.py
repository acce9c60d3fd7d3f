"""Arrays that wait on the devices for later programs, and how many bytes they take.

Their bytes are counted as they come and go: what is looked at after every program must not grow with the model's depth.
"""

import math
from collections.abc import Hashable
from typing import Any

import jax


def device_bytes(array: Any) -> int:
    """Over this process's devices."""
    if not isinstance(array, jax.Array):
        return 0
    shard = array.sharding.shard_shape(array.shape)
    return math.prod(shard) * array.dtype.itemsize * len(array.sharding.addressable_devices)


class Held:
    """An array, or a list of them, per key.

    Attributes:
      num_bytes: Of all that is held.
    """

    def __init__(self) -> None:
        self._arrays: dict[Hashable, Any] = {}
        self._sizes: dict[Hashable, int] = {}
        self.num_bytes = 0

    def __setitem__(self, key: Hashable, arrays: Any) -> None:
        self.pop(key)
        self._arrays[key] = arrays
        self._sizes[key] = sum(map(device_bytes, arrays if isinstance(arrays, list) else [arrays]))
        self.num_bytes += self._sizes[key]

    def __getitem__(self, key: Hashable) -> Any:
        return self._arrays[key]

    def __contains__(self, key: Hashable) -> bool:
        return key in self._arrays

    def get(self, key: Hashable) -> Any:
        """None where it is not held."""
        return self._arrays.get(key)

    def values(self) -> list[Any]:
        """All that is held."""
        return list(self._arrays.values())

    def pop(self, key: Hashable) -> Any:
        """Gives it up. None where it is not held."""
        self.num_bytes -= self._sizes.pop(key, 0)
        return self._arrays.pop(key, None)
