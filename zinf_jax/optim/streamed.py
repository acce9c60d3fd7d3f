"""`streamed(tx)`: an optax transformation whose per-parameter state rests in host memory or in a file on NVMe.

For a user's own loop, without the Trainer: parameters and gradients stay where they are, the state of `tx` never is on
the device. `update` runs on the host, chunk by chunk: read, update in place, write from the same frame; with a file,
the next chunk is read while one is computed and the one before is written.

Guarantees:
  - The state is updated in place. A state that was already used is refused, not silently wrong.
  - At most `_NUM_FRAMES` chunks of state are in memory with `nvme_path` (a transformation that needs whole leaves makes
    a chunk of each).
  - After an exception within `update` the state is a mix of old and new; every later use raises.

Not for use under `jit` (the state lives outside JAX), by one thread at a time. Updates are new - old parameters in f32:
`optax.apply_updates` gives what the fused update gave, or its neighbour. Parameters in bf16 lose small updates as they
do with plain optax: keep f32 parameters in such a loop. No crash safety: save with `StreamedState.items`.
"""

import dataclasses
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import aio_ffi
from zinf_jax.errors import ConfigError
from zinf_jax.leaves import Leaf, LeafKind, classify
from zinf_jax.optim import kernels
from zinf_jax.optim.generic import GenericBoundRule, as_rule
from zinf_jax.optim.transforms import FusedBoundRule, PartitionBoundRule
from zinf_jax.units import ceil_to

_NUM_FRAMES = 3  # read ahead, computed, written
_ALIGNMENT = 4096

Slots = list[list[np.ndarray]]  # per part of a chunk, per slot


class _Part(NamedTuple):
    """Elements [start, stop) of one leaf, and how many slots it has."""

    leaf: int
    start: int
    stop: int
    num_slots: int


@dataclasses.dataclass(frozen=True)
class _Chunk:
    """What is updated in one go.

    Attributes:
      group: Index of the generic rule's group; 0 for a fused rule.
      offset, num_bytes: Where its slots lie in the file, one after the other, each padded to `_ALIGNMENT`.
    """

    group: int
    parts: tuple[_Part, ...]
    offset: int
    num_bytes: int

    def views(self, frame: np.ndarray) -> Slots:
        """The slots within a frame of bytes."""
        views, at = [], 0
        for part in self.parts:
            slots = []
            for _ in range(part.num_slots):
                num_bytes = 4 * (part.stop - part.start)
                slots.append(frame[at : at + num_bytes].view(np.float32))
                at += ceil_to(num_bytes, _ALIGNMENT)
            views.append(slots)
        return views


class _HostStore:
    """Slots in host memory."""

    def __init__(self, chunks: Sequence[_Chunk]) -> None:
        self._frames = {chunk.offset: np.zeros(chunk.num_bytes, np.uint8) for chunk in chunks}

    def stream(
        self, chunks: Sequence[_Chunk], *, read: bool = True, write: bool = True
    ) -> Iterator[tuple[_Chunk, Slots]]:
        del read, write
        for chunk in chunks:
            yield chunk, chunk.views(self._frames[chunk.offset])

    def close(self) -> None:
        self._frames = {}


class _FileStore:
    """Slots in a private temporary file, which is gone when the store is closed (or the process ends)."""

    def __init__(self, chunks: Sequence[_Chunk], directory: os.PathLike[str] | str) -> None:
        size = sum(chunk.num_bytes for chunk in chunks)
        frame_bytes = max((chunk.num_bytes for chunk in chunks), default=0) or _ALIGNMENT
        self._arena = aio_ffi.Arena(_NUM_FRAMES * frame_bytes)
        self._frames = [self._arena.array(i * frame_bytes, frame_bytes) for i in range(_NUM_FRAMES)]
        self._engine = aio_ffi.Engine()
        try:
            descriptor, name = tempfile.mkstemp(prefix="optimizer-", suffix=".state", dir=Path(directory))
            os.close(descriptor)
            try:
                self._file = self._engine.open(name, num_bytes=max(size, _ALIGNMENT))
            finally:
                os.unlink(name)
        except BaseException:
            self._engine.close()
            raise

    def stream(
        self, chunks: Sequence[_Chunk], *, read: bool = True, write: bool = True
    ) -> Iterator[tuple[_Chunk, Slots]]:
        """Yields each chunk's slots; what the caller changed is written when it asks for the next one."""
        reads: dict[int, Any] = {}
        writes: list[Any] = [None] * _NUM_FRAMES

        def start(number: int) -> None:
            slot = number % _NUM_FRAMES
            if writes[slot] is not None:
                writes[slot].wait()
                writes[slot] = None
            if read:
                chunk = chunks[number]
                frame = self._frames[slot][: chunk.num_bytes]
                reads[number] = self._engine.read(self._file, chunk.offset, frame)

        try:
            for number, chunk in enumerate(chunks):
                if number == 0:
                    start(0)
                if number + 1 < len(chunks):
                    start(number + 1)
                if read:
                    reads.pop(number).wait()
                frame = self._frames[number % _NUM_FRAMES][: chunk.num_bytes]
                yield chunk, chunk.views(frame)
                if write:
                    writes[number % _NUM_FRAMES] = self._engine.write(self._file, chunk.offset, frame)
        finally:
            for handle in (*reads.values(), *writes):
                if handle is not None:
                    handle.wait()

    def close(self) -> None:
        self._engine.close()
        self._frames = []


@jax.tree_util.register_static
class _Handle:
    """The state itself: bound rule, slots, count. One owner, the state that holds the current count."""

    def __init__(self, tx: Any, params: Any, nvme_path: Any, chunk_elements: int, num_threads: int | None) -> None:
        self.leaves = classify(params)
        self.bound: Any = as_rule(tx).bind(self.leaves, params)
        assert isinstance(self.bound, FusedBoundRule | PartitionBoundRule | GenericBoundRule)
        self.chunks = self._cut(chunk_elements)
        self.store: Any = _HostStore(self.chunks) if nvme_path is None else _FileStore(self.chunks, nvme_path)
        self.num_threads = num_threads
        self.count = 0
        self.broken = False
        self._start(params)

    def _cut(self, chunk_elements: int) -> list[_Chunk]:
        chunks: list[_Chunk] = []
        offset = 0

        def add(group: int, parts: Sequence[_Part]) -> None:
            nonlocal offset
            num_bytes = sum(p.num_slots * ceil_to(4 * (p.stop - p.start), _ALIGNMENT) for p in parts)
            chunks.append(_Chunk(group, tuple(parts), offset, num_bytes))
            offset += num_bytes

        for number, (indices, elementwise) in enumerate(self._groups()):
            sizes = [self.leaves[i].size for i in indices]
            slots = [self._num_slots(i) for i in indices]
            if not elementwise:
                add(number, [_Part(i, 0, size, n) for i, size, n in zip(indices, sizes, slots, strict=True)])
                continue
            for start in range(0, sizes[0], chunk_elements):
                add(number, [_Part(indices[0], start, min(start + chunk_elements, sizes[0]), slots[0])])
        return chunks

    def _groups(self) -> list[tuple[tuple[int, ...], bool]]:
        if isinstance(self.bound, GenericBoundRule):
            return [(group.leaves, group.elementwise) for group in self.bound.groups]
        return [((leaf.index,), True) for leaf in self.leaves if leaf.kind is LeafKind.TRAINABLE]

    def _num_slots(self, leaf: int) -> int:
        return len(self.bound.slots_of(leaf) if isinstance(self.bound, GenericBoundRule) else self.bound.slots)

    def _start(self, params: Any) -> None:
        flat = jax.tree.leaves(params)
        for chunk, slots in self.store.stream(self.chunks, read=False):
            for part, views in zip(chunk.parts, slots, strict=True):
                if isinstance(self.bound, GenericBoundRule):
                    master = _vector(flat[part.leaf])[part.start : part.stop]
                    for view, value in zip(views, self.bound.init_slots(part.leaf, master), strict=True):
                        view[:] = value
                else:
                    for view, name in zip(views, self.bound.slots, strict=True):
                        view[:] = self.bound.slot_init(name)

    def update(self, gradients: Any, params: Any) -> Any:
        """One step: the updates, as a tree like `params`."""
        treedef: Any = jax.tree.structure(params)
        flat = jax.tree.leaves(params)
        grads = treedef.flatten_up_to(gradients)
        updates = [_zeros_like(value) for value in flat]
        for chunk, slots in self.store.stream(self.chunks):
            parts = chunk.parts
            old = [_vector(flat[p.leaf])[p.start : p.stop] for p in parts]
            given = [None if grads[p.leaf] is None else _raw(grads[p.leaf])[p.start : p.stop] for p in parts]
            for part, before, new in zip(parts, old, self._compute(chunk, old, given, slots), strict=True):
                updates[part.leaf].reshape(-1)[part.start : part.stop] = new - before
        if isinstance(self.bound, GenericBoundRule):
            self.bound.end_step()
        self.count += 1
        dtypes = [jnp.result_type(value) for value in flat]
        return treedef.unflatten([jnp.asarray(u, d) for u, d in zip(updates, dtypes, strict=True)])

    def _compute(
        self, chunk: _Chunk, old: list[np.ndarray], gradients: list[np.ndarray | None], slots: Slots
    ) -> list[np.ndarray]:
        if isinstance(self.bound, GenericBoundRule):
            new, new_slots = self.bound.update_group(chunk.group, old, gradients, slots)
            for views, values in zip(slots, new_slots, strict=True):
                for view, value in zip(views, values, strict=True):
                    view[:] = value
            return new
        masters = [np.array(value) for value in old]
        ranges = [
            kernels.Range(m, None, g, tuple(views), self.bound.coefficients(part.leaf, self.count))
            for part, m, g, views in zip(chunk.parts, masters, gradients, slots, strict=True)
        ]
        kernels.update(self.bound.rule, ranges, num_threads=self.num_threads)
        return masters

    def items(self) -> Iterator[tuple[str, np.ndarray]]:
        for leaf in self.leaves:
            mine = [chunk for chunk in self.chunks if any(p.leaf == leaf.index for p in chunk.parts)]
            names = self._slot_names(leaf) if mine else ()
            values = [np.empty(leaf.size, np.float32) for _ in names]
            for chunk, slots in self.store.stream(mine, write=False):
                for part, views in zip(chunk.parts, slots, strict=True):
                    if part.leaf == leaf.index:
                        for value, view in zip(values, views, strict=True):
                            value[part.start : part.stop] = view
            yield from ((f"{name}/{leaf.name}", v.reshape(leaf.shape)) for name, v in zip(names, values, strict=True))
        if isinstance(self.bound, GenericBoundRule):
            yield from self.bound.state_dict().items()

    def restore(self, values: Mapping[str, np.ndarray], count: int) -> None:
        for chunk, slots in self.store.stream(self.chunks):
            for part, views in zip(chunk.parts, slots, strict=True):
                leaf = self.leaves[part.leaf]
                for view, name in zip(views, self._slot_names(leaf), strict=True):
                    view[:] = _vector(values[f"{name}/{leaf.name}"])[part.start : part.stop]
        if isinstance(self.bound, GenericBoundRule):
            self.bound.load_state_dict({name: values[name] for name in self.bound.state_dict()})
        self.count = count

    def _slot_names(self, leaf: Leaf) -> tuple[str, ...]:
        return self.bound.slots_of(leaf.index) if isinstance(self.bound, GenericBoundRule) else self.bound.slots


class StreamedState(NamedTuple):
    """What `init` and `update` return: a count, and a handle on state that lives outside JAX."""

    count: Any
    handle: _Handle

    def items(self) -> Iterator[tuple[str, np.ndarray]]:
        """The state for a checkpoint, one vector at a time: (slot/leaf, array), and small state by its path."""
        _check(self)
        yield from self.handle.items()

    def restore(self, values: Mapping[str, np.ndarray], count: int) -> "StreamedState":
        """Puts back what `items` gave after `count` updates; the state to go on with."""
        _check(self)
        self.handle.restore(values, count)
        return StreamedState(np.int32(count), self.handle)

    def close(self) -> None:
        """Frees memory and file. The state cannot be used afterwards."""
        self.handle.broken = True
        self.handle.store.close()


def streamed(
    tx: optax.GradientTransformation,
    *,
    nvme_path: str | os.PathLike[str] | None = None,
    chunk_elements: int = 1 << 22,
    num_threads: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """`tx` with its per-parameter state in host memory, or in a file under `nvme_path`.

    Args:
      tx: A `zinf.optim` transformation (fused), or any of optax's (slower, see `generic.py`).
      nvme_path: Directory for the file; None: host memory.
      chunk_elements: Elements of a leaf that are updated in one go, rounded up to a multiple of 1024.
      num_threads: Of the fused kernels; default: all CPUs.

    Returns:
      A transformation for use outside `jit`. Its `init` allocates; its `update` needs `params`.

    Raises:
      ConfigError: `chunk_elements` is not positive, or `nvme_path` is not a directory.
    """
    if chunk_elements < 1:
        raise ConfigError(f"chunk_elements must be positive, got {chunk_elements}")
    if nvme_path is not None and not Path(nvme_path).is_dir():
        raise ConfigError(f"nvme_path must be an existing directory, got {os.fspath(nvme_path)!r}")
    size = ceil_to(chunk_elements, _ALIGNMENT // 4)

    def init(params: Any) -> StreamedState:
        return StreamedState(np.int32(0), _Handle(tx, params, nvme_path, size, num_threads))

    def update(gradients: Any, state: StreamedState, params: Any = None, **extra: Any) -> tuple[Any, StreamedState]:
        del extra
        if params is None:
            raise ValueError("a streamed transformation needs the parameters: update(gradients, state, params)")
        _check(state)
        handle = state.handle
        handle.broken = True
        updates = handle.update(gradients, params)
        handle.broken = False
        return updates, StreamedState(np.int32(handle.count), handle)

    return optax.GradientTransformationExtraArgs(init, update)


def _check(state: StreamedState) -> None:
    handle = state.handle
    if isinstance(state.count, jax.core.Tracer):
        raise TypeError("a streamed transformation works on the host: call it outside jit")
    if handle.broken:
        raise RuntimeError("this streamed state was closed, or an update failed halfway: make or restore a new one")
    if int(state.count) != handle.count:
        raise RuntimeError(
            f"this streamed state (step {int(state.count)}) was already used: it is updated in place and is at step "
            f"{handle.count}; go on with the state that update returned"
        )


def _raw(value: Any) -> np.ndarray:
    """A flat host array in the dtype that it has; f64 and the like as f32."""
    array = np.asarray(value).reshape(-1)
    return array if array.dtype in (kernels.F32, kernels.BF16, kernels.F16) else array.astype(np.float32)


def _vector(value: Any) -> np.ndarray:
    return np.asarray(value).reshape(-1).astype(np.float32, copy=False)


def _zeros_like(value: Any) -> np.ndarray:
    return np.zeros(np.shape(value), np.float32)
