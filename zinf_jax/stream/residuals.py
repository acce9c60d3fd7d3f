"""Residuals that leave the device between forward and backward: to host memory, or on to NVMe.

Guarantees: a value that was taken is the same bits when it comes back; its device array is dropped when its bytes are
in a frame; a frame is free when its write is complete. Places and times are the plan's. Main thread only.
"""

import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from zinf_jax.graph.types import UnitGraph
from zinf_jax.optim import kernels
from zinf_jax.plan import Plan, Span, Tier
from zinf_jax.stream.stats import Counters
from zinf_jax.stream.trace import Lane
from zinf_jax.tier import FrameArena, FrameSpan, PageStore, PendingIO
from zinf_jax.units import ceil_to

RESIDUALS = "residuals"
SECTOR = 4096


class ResidualStore:
    """Spilled residuals of one run. Values are keyed by (value id, micro-batch)."""

    def __init__(
        self,
        graph: UnitGraph,
        plan: Plan,
        arena: FrameArena,
        store: PageStore | None,
        shardings: Mapping[int, Any],
        counters: Counters,
    ) -> None:
        self._graph = graph
        self._plan = plan
        self._arena = arena
        self._store = store
        self._shardings = shardings
        self._counters = counters
        sizes = plan.shape.group_sizes
        self._first_micro = [sum(sizes[:g]) for g in range(len(sizes))]
        self._group_of = [g for g, n in enumerate(sizes) for _ in range(n)]
        self._out: dict[tuple[int, int], Span] = {}
        self._in: dict[tuple[int, int], Span] = {}
        for span in plan.spans:
            kind, *key = span.residency.key
            if kind == "residual_out":
                self._out[(int(key[0]), int(key[1]))] = span
            elif kind == "residual_in":
                self._in[(int(key[0]), int(key[1]))] = span
        self._slots = residual_slots(plan)
        self._reset()

    def _reset(self) -> None:
        self._writes: dict[tuple[int, int], PendingIO] = {}
        self._reads: dict[tuple[int, int], tuple[PendingIO, np.ndarray]] = {}
        self._leased: dict[tuple[str, int, int], FrameSpan] = {}

    def spills(self, value: int) -> bool:
        return value in self._plan.spilled

    def put(self, value: int, micro: int, array: jax.Array) -> None:
        """Takes a ready value off the device."""
        num_bytes = ceil_to(self._num_bytes(value), SECTOR)
        if self._plan.spilled[value] is Tier.HOST:
            frame = self._host_frame(value, micro)
        else:
            frame = self._lease("out", value, micro, self._out[(value, micro)].offset, num_bytes)
        with self._counters.tracer.span(Lane.DEVICE_TO_HOST, "residual", value=value, micro=micro, bytes=num_bytes):
            data = np.ascontiguousarray(np.asarray(array)).reshape(-1).view(np.uint8)
            kernels.copy(frame[: data.nbytes], data)
        self._counters.add("d2h_bytes", data.nbytes)
        if self._plan.spilled[value] is Tier.NVME:
            assert self._store is not None
            slot = self._slots[(value, micro)]
            self._writes[(value, micro)] = self._store.write_page(RESIDUALS, slot, frame, f"residual {value}/{micro}")

    def release(self, position: int) -> None:
        """Frees frames whose time is over, waiting for their writes."""
        for (value, micro), span in self._out.items():
            if span.residency.end == position:
                self._finish_write(value, micro)
        for (value, micro), span in self._in.items():
            if span.residency.end == position:
                self._release("in", value, micro)

    def issue(self, position: int) -> None:
        """Issues the reads that start at `position`."""
        for (value, micro), span in self._in.items():
            if span.residency.start == position:
                self._finish_write(value, micro)
                num_bytes = ceil_to(self._num_bytes(value), SECTOR)
                frame = self._lease("in", value, micro, span.offset, num_bytes)
                assert self._store is not None
                slot = self._slots[(value, micro)]
                read = self._store.read_page(RESIDUALS, slot, frame, f"residual {value}/{micro}")
                self._reads[(value, micro)] = (read, frame)

    def get(self, value: int, micro: int) -> jax.Array:
        """Brings a value back to where it was on the device."""
        if self._plan.spilled[value] is Tier.HOST:
            frame = self._host_frame(value, micro)
        else:
            read, frame = self._reads.pop((value, micro))
            with self._counters.timed("read_stall_s", read):
                read.wait()
        aval = self._graph.values[value]
        data = frame[: self._num_bytes(value)].view(aval.dtype).reshape(aval.shape)
        start = time.perf_counter()
        handle = jax.device_put(data, self._shardings[value])
        self._counters.tracer.until_ready(Lane.HOST_TO_DEVICE, "residual", start, handle, value=value, micro=micro)
        return handle

    def finish(self) -> None:
        for value, micro in list(self._writes):
            self._finish_write(value, micro)
        for kind, value, micro in list(self._leased):
            self._release(kind, value, micro)
        self._reset()

    def abort(self) -> None:
        for pending in [*self._writes.values(), *(read for read, _ in self._reads.values())]:
            try:
                pending.wait()
            except OSError:  # the step's first error is what the caller sees
                continue
        self._writes.clear()
        self.finish()

    def _num_bytes(self, value: int) -> int:
        aval = self._graph.values[value]
        return int(np.prod(aval.shape, dtype=np.int64)) * aval.dtype.itemsize

    def _host_frame(self, value: int, micro: int) -> np.ndarray:
        local = micro - self._first_micro[self._group_of[micro]]
        offset = self._plan.host_residuals[(value, local)]
        return self._arena.view(FrameSpan(offset, ceil_to(self._num_bytes(value), SECTOR)))

    def _lease(self, kind: str, value: int, micro: int, offset: int, num_bytes: int) -> np.ndarray:
        span = FrameSpan(offset, num_bytes)
        self._leased[(kind, value, micro)] = span
        return self._arena.lease(span, f"residual {value}/{micro} {kind}")

    def _finish_write(self, value: int, micro: int) -> None:
        write = self._writes.pop((value, micro), None)
        if write is not None:
            with self._counters.timed("write_stall_s", write):
                write.wait()
            self._release("out", value, micro)

    def _release(self, kind: str, value: int, micro: int) -> None:
        span = self._leased.pop((kind, value, micro), None)
        if span is not None:
            self._arena.release(span)


def residual_slots(plan: Plan) -> dict[tuple[int, int], int]:
    """Number of each spilled (value, micro-batch): its page in the store."""
    spans = [span for span in plan.spans if span.residency.key[0] == "residual_out"]
    return {(int(s.residency.key[1]), int(s.residency.key[2])): number for number, s in enumerate(spans)}
