"""Frames: aligned host buffers that pages occupy for a while, all cut from one arena.

Guarantees:
  * The arena is the host budget: nothing else on the host scales with the model.
  * Which frame lies where is decided by the plan. A lease only *checks* it: two live leases never overlap, or the
    plan is wrong and an assertion says which two.
  * A frame's bytes are the caller's from `lease` until `release`. On the CPU backend a frame is aliased, not copied,
    by the arrays made from it: release it only when the consumers' outputs are ready.
Only the main thread leases and releases.
"""

import contextlib
import dataclasses
from typing import Any

import numpy as np

import aio_ffi
from zinf_jax.units import ceil_to, format_bytes

FRAME_ALIGN = 4096  # O_DIRECT's, and far above the 64 bytes that make device_put alias on the CPU backend


@dataclasses.dataclass(frozen=True)
class FrameSpan:
    """A place in the arena: `[offset, offset + num_bytes)`."""

    offset: int
    num_bytes: int

    def part(self, offset: int, num_bytes: int) -> "FrameSpan":
        assert offset >= 0 and offset + num_bytes <= self.num_bytes, (self, offset, num_bytes)
        return FrameSpan(self.offset + offset, num_bytes)


class FrameArena:
    """The host memory of a run."""

    def __init__(self, num_bytes: int, *, lock: str | bool = "auto") -> None:
        self.num_bytes = ceil_to(max(num_bytes, FRAME_ALIGN), FRAME_ALIGN)
        self._arena = aio_ffi.Arena(self.num_bytes, lock=lock)
        self._client: Any = None
        self._leases: dict[int, tuple[FrameSpan, str]] = {}
        self.leased_bytes = 0
        self.peak_leased_bytes = 0

    @property
    def locked(self) -> bool:
        return self._arena.locked

    def register(self, client: Any) -> str | None:
        """Registers the arena for DMA with an accelerator's client, so that copies run without staging.

        On CUDA the runtime has a pool of pinned memory of its own, capped at 64 GB (XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB).
        State never lives there, so no plan has to know the cap: registered memory is read in place, and what is not
        registered (the arena where this fails, numpy's memory that gradients and residuals come back to) is staged
        through the pool one transfer at a time, of less than 1 GiB; larger ones go without.

        Returns:
          None, or why it could not be done: copies then go through the runtime's own staging buffers.
        """
        try:
            client.dma_map(self._arena.address, self.num_bytes)
        except (RuntimeError, AttributeError) as error:  # not every backend has it
            return f"the arena is not registered for DMA: {error}"
        self._client = client
        return None

    def lease(self, span: FrameSpan, owner: str) -> np.ndarray:
        """Takes `span` for `owner`; returns its bytes as uint8[num_bytes].

        Raises:
          AssertionError: the span overlaps a live lease: the plan is wrong.
        """
        for other, name in self._leases.values():
            overlaps = span.offset < other.offset + other.num_bytes and other.offset < span.offset + span.num_bytes
            assert not overlaps, f"{owner} wants {span}, but {name} still holds {other}"
        self._leases[span.offset] = (span, owner)
        self.leased_bytes += span.num_bytes
        self.peak_leased_bytes = max(self.peak_leased_bytes, self.leased_bytes)
        return self.view(span)

    def release(self, span: FrameSpan) -> None:
        held, _ = self._leases.pop(span.offset)
        assert held == span, (held, span)
        self.leased_bytes -= span.num_bytes

    def view(self, span: FrameSpan) -> np.ndarray:
        """The bytes of a span, without a lease (for the span's owner)."""
        assert span.offset + span.num_bytes <= self.num_bytes, (
            f"{span} is outside the arena of {format_bytes(self.num_bytes)}"
        )
        if span.num_bytes == 0:
            return np.empty(0, np.uint8)
        return self._arena.array(span.offset, span.num_bytes)

    def close(self) -> None:
        """Gives the memory back: at once, or with the last array that still aliases a frame."""
        self._leases.clear()
        if self._client is not None:
            self._client.dma_unmap(self._arena.address)
            self._client = None
        with contextlib.suppress(BufferError):
            self._arena.close()
