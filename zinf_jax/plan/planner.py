"""From shapes, budgets and hardware figures to a plan: a pure function, no devices, no files.

Host memory of a run is one arena: resident pages, then one region that the passes over the units and the update use
in turn. What does not fit is refused with a table that says what needs how much and what to change.
"""

import dataclasses
from collections.abc import Sequence

from zinf_jax.errors import PlanError
from zinf_jax.plan import schedule
from zinf_jax.plan.placement import BYTES_OF, PageTiers, PlacementOptions, floor_tiers, promote
from zinf_jax.plan.plan import BudgetItem, Chunk, Plan, Prediction, Span
from zinf_jax.plan.schedule import FRAME_ALIGN, Phase, Residency
from zinf_jax.plan.shape import Hardware, StepShape, StreamOptions, Tier, UnitShape
from zinf_jax.units import ceil_to, format_bytes

AHEAD_BYTES = 512 << 20  # of records read ahead, at most, where nobody gave a budget
CHUNK_ELEMENTS = 4096  # chunks hold a multiple of it, so that each vector in a record is sector-aligned


def make_plan(
    shape: StepShape,
    hardware: Hardware,
    placement: PlacementOptions,
    options: StreamOptions,
    *,
    weights_itemsize: int,
    record_itemsize: int,
    gradient_itemsize: int,
    base_rss_bytes: int = 0,
    update_bytes: int = 0,
) -> Plan:
    """Plans a training step.

    Args:
      shape: Sizes and order of use.
      hardware: Budgets and rates.
      placement: Tiers asked for; None where the planner chooses.
      options: Lookahead, chunk sizes.
      weights_itemsize, record_itemsize, gradient_itemsize: Bytes per element of a trainable page.
      base_rss_bytes: What the process holds before anything of the plan is allocated.
      update_bytes: Host memory that the update needs beside its frames (leaves that are updated whole).

    Raises:
      PlanError: the budgets are too small; the message has the table.
    """
    positions = schedule.positions_of(shape)
    lives = schedule.value_lives(shape, positions)
    per_chunk = options.chunk_bytes // max(record_itemsize, 1)
    chunk_elements = options.chunk_elements or max(CHUNK_ELEMENTS, per_chunk // CHUNK_ELEMENTS * CHUNK_ELEMENTS)
    itemsizes = (weights_itemsize, record_itemsize, gradient_itemsize)
    build = _Builder(
        shape, hardware, options, positions, lives, chunk_elements, itemsizes, base_rss_bytes, update_bytes
    )
    spilled = build.spilled(placement.residuals)
    floor = floor_tiers(shape.pages, placement)
    least = build.plan(floor, spilled, 0)
    # A resident page saves more traffic than one that is kept between uses: only what is left then goes to those.
    tiers = promote(shape.pages, floor, placement, max(0, hardware.host_memory - least.host_bytes))
    plan = build.plan(tiers, spilled, hardware.host_memory)
    if plan.host_bytes > hardware.host_memory:  # packing fewer frames can take more room
        plan = build.plan(floor, spilled, hardware.host_memory)
    _check(plan, hardware, options, placement)
    return plan


def plan_evaluation(shape: StepShape, training: Plan) -> Plan:
    """Plans forward passes beside a training plan: same tiers and resident places, frames in the passes' region.

    Raises:
      PlanError: the frames do not fit in the training plan's arena.
    """
    positions = schedule.positions_of(shape)
    lives = schedule.value_lives(shape, positions)
    streamed = [i for i, t in enumerate(training.tiers) if t.weights is Tier.NVME]
    base = training.stream_offset
    room = training.stream_bytes if training.overlaps else training.arena_bytes - base
    residencies: tuple[Residency, ...] = ()
    for lookahead in range(training.options.lookahead, -1, -1):
        options = dataclasses.replace(training.options, lookahead=lookahead, update_hold=0)
        residencies = schedule.weight_residencies(shape, positions, options, pages=streamed, capacity=0)
        offsets, needed = schedule.pack(residencies)
        if needed <= room:
            break
    else:
        raise PlanError(
            f"evaluating needs {format_bytes(needed)} of frames, training left {format_bytes(room)}: "
            "raise host_memory or lower max_unit_bytes"
        )
    spans = tuple(Span(r, base + offsets[i]) for i, r in enumerate(residencies))
    return dataclasses.replace(
        training, shape=shape, options=options, positions=positions, lives=lives, spans=spans, spilled={}, chunks=()
    )


@dataclasses.dataclass(frozen=True)
class _Builder:
    shape: StepShape
    hardware: Hardware
    options: StreamOptions
    positions: tuple[schedule.Position, ...]
    lives: tuple[schedule.ValueLife, ...]
    chunk_elements: int
    itemsizes: tuple[int, int, int]
    base_rss_bytes: int
    update_bytes: int

    def spilled(self, tier: Tier | None) -> dict[int, Tier]:
        """Residual values that leave the device: all that have the time to, or none."""
        if tier is None and self.device_peak(frozenset(), {}) > self.hardware.device_memory:
            tier = Tier.HOST
        if tier is None or tier is Tier.DEVICE:
            return {}
        needed = 2 * 2 * self.options.max_in_flight
        return {
            life.value: tier
            for life in self.lives
            if life.is_residual
            and life.first_backward - life.last_forward > needed
            and life.value not in self.shape.kept_values
        }

    def device_peak(self, spilled: frozenset[int], kept: dict[int, int]) -> int:
        return schedule.device_peak(
            self.shape, self.positions, self.lives, self.options, spilled=spilled, kept_gradients=kept
        )

    def plan(self, tiers: tuple[PageTiers, ...], spilled: dict[int, Tier], host_budget: int) -> Plan:
        shape = self.shape
        resident, resident_spans = self._resident(tiers)
        streamed = [i for i, t in enumerate(tiers) if t.weights is Tier.NVME]
        others = schedule.gradient_residencies(
            shape, self.positions, self.options,
            pages=[i for i, t in enumerate(tiers) if t.gradients is Tier.NVME and shape.pages[i].gradient_bytes],
        ) + schedule.residual_residencies(
            shape, self.lives, self.options, spilled=frozenset(v for v, t in spilled.items() if t is Tier.NVME)
        )  # fmt: skip
        chunks, frame_bytes = self._chunks(tiers)
        host_residuals, residual_offsets = self._host_residuals(spilled, resident)
        overlaps = self.options.update_overlap != "none"
        weights = schedule.weight_residencies(shape, self.positions, self.options, pages=streamed, capacity=0)
        num_frames = min(self.options.num_chunk_frames, max(len(chunks), 1))
        least = resident + host_residuals + frame_bytes * num_frames + schedule.pack((*weights, *others))[1]
        num_frames += self._num_ahead_frames(tiers, chunks, frame_bytes, num_frames, host_budget - least)
        update_bytes = frame_bytes * num_frames
        fixed = resident + host_residuals + (update_bytes if overlaps else 0)
        room = host_budget - fixed - schedule.peak_load(others)
        if self.hardware.cache_pages and room > schedule.peak_load(weights):
            weights = self._with_cache(streamed, others, room, host_budget - fixed)
        residencies = (*weights, *others)
        offsets, stream_bytes = schedule.pack(residencies)
        base = resident + host_residuals
        spans = tuple(Span(r, base + offsets[i]) for i, r in enumerate(residencies))
        update_offset = base + stream_bytes if overlaps else base
        arena = max(base + stream_bytes, update_offset + update_bytes)
        kept = {i: p.gradient_bytes for i, p in enumerate(shape.pages) if tiers[i].gradients is Tier.DEVICE}
        device = self.device_peak(frozenset(spilled), kept) + self._device_pages(tiers)
        return Plan(
            shape=shape, options=self.options, hardware=self.hardware, tiers=tiers, spilled=dict(spilled),
            positions=self.positions, lives=self.lives, spans=spans, resident=resident_spans,
            host_residuals=residual_offsets, chunks=chunks, chunk_elements=self.chunk_elements,
            stream_offset=base, stream_bytes=stream_bytes,
            chunk_frame_bytes=frame_bytes, num_chunk_frames=num_frames, update_offset=update_offset, arena_bytes=arena,
            device_bytes=device, base_rss_bytes=self.base_rss_bytes,
            scratch_bytes=self.update_bytes,
            items=self._items(
                tiers, host_residuals, stream_bytes, (num_frames, update_bytes), device, weights, others
            ),
            prediction=self._predict(tiers, weights, spilled),
        )  # fmt: skip

    def _num_ahead_frames(
        self, tiers: Sequence[PageTiers], chunks: Sequence[Chunk], frame_bytes: int, num_frames: int, room: int
    ) -> int:
        """More frames for the update, so that records are read before it is asked for.

        With a budget half of what is left: the rest saves reads of weights. Without one, at most half of the records,
        and `AHEAD_BYTES`.
        """
        records = sum(
            p.record_bytes for p, t in zip(self.shape.pages, tiers, strict=True) if t.optimizer is Tier.NVME
        )  # fmt: skip
        if not self.options.read_ahead or self.options.update_overlap == "none" or not records:
            return 0
        limit = room // 2 if self.hardware.cache_pages else min(room, records // 2, AHEAD_BYTES)
        return max(0, min(limit // frame_bytes, len(chunks) - num_frames))

    def _with_cache(
        self, streamed: Sequence[int], others: Sequence[Residency], room: int, limit: int
    ) -> tuple[Residency, ...]:
        """Keeps pages between uses as memory allows; packing can cost a little more than the load, so retry lower."""
        for share in (1.0, 0.9, 0.75, 0.5, 0.0):
            weights = schedule.weight_residencies(
                self.shape, self.positions, self.options, pages=streamed, capacity=int(room * share)
            )
            if schedule.pack((*weights, *others))[1] <= limit:
                return weights
        return weights

    def _resident(self, tiers: Sequence[PageTiers]) -> tuple[int, dict[tuple[str, int], int]]:
        """Offsets of what stays in the arena. Device-tier weights have a mirror there: the update works on it."""
        offset, spans = 0, {}
        for kind, attribute in BYTES_OF.items():
            for index, page in enumerate(self.shape.pages):
                num_bytes = getattr(page, attribute)
                tier = getattr(tiers[index], kind)
                keeps = tier is Tier.HOST or (tier is Tier.DEVICE and kind != "gradients")
                if keeps and num_bytes:
                    spans[(kind, index)] = offset
                    offset += ceil_to(num_bytes, FRAME_ALIGN)
        return offset, spans

    def _host_residuals(self, spilled: dict[int, Tier], base: int) -> tuple[int, dict[tuple[int, int], int]]:
        """Places of the residuals that wait in host memory: per value and micro-batch of a group."""
        offset, offsets = 0, {}
        for value, tier in spilled.items():
            for micro in range(max(self.shape.group_sizes) if tier is Tier.HOST else 0):
                offsets[(value, micro)] = base + offset
                offset += ceil_to(self.shape.value_bytes[value], FRAME_ALIGN)
        return offset, offsets

    def _chunks(self, tiers: Sequence[PageTiers]) -> tuple[tuple[Chunk, ...], int]:
        """The update's chunks in page order, and the bytes of a frame that holds any of them."""
        weights_itemsize, record_itemsize, gradient_itemsize = self.itemsizes
        chunks, frame = [], 0
        for index, page in enumerate(self.shape.pages):
            if not page.gradient_bytes:  # not trained: passes through frames at the start and in checkpoints only
                if tiers[index].weights is Tier.NVME:
                    per_element = page.weights_bytes // page.num_elements
                    frame = max(frame, per_element * min(page.num_elements, self.chunk_elements))
                continue
            per_element = (
                weights_itemsize * (tiers[index].weights is Tier.NVME)
                + record_itemsize * (tiers[index].optimizer is Tier.NVME)
                + gradient_itemsize * (tiers[index].gradients is Tier.NVME)
            )
            for start in range(0, page.num_elements, self.chunk_elements):
                stop = min(start + self.chunk_elements, page.num_elements)
                chunks.append(Chunk(index, start, stop))
                frame = max(frame, per_element * (stop - start))
        return tuple(chunks), ceil_to(frame, FRAME_ALIGN)

    def _device_pages(self, tiers: Sequence[PageTiers]) -> int:
        """Device bytes of pages: none where the device aliases the arena."""
        if self.hardware.aliases:
            return 0
        pages = self.shape.pages
        kept = sum(p.weights_bytes for p, t in zip(pages, tiers, strict=True) if t.weights is Tier.DEVICE)
        units = self.shape.units
        needs = [sum(pages[p].weights_bytes for p in u.pages if tiers[p].weights is not Tier.DEVICE) for u in units]
        width = self.options.max_in_flight + 1
        return kept + max((sum(needs[i : i + width]) for i in range(len(needs))), default=0)

    def _items(
        self, tiers: Sequence[PageTiers], host_residuals: int, stream_bytes: int, frames: tuple[int, int], device: int,
        weights: Sequence[Residency], others: Sequence[Residency],
    ) -> tuple[BudgetItem, ...]:  # fmt: skip
        pages = self.shape.pages
        items = []
        for kind, attribute in BYTES_OF.items():
            for tier in Tier:
                total = sum(
                    getattr(p, attribute) for p, t in zip(pages, tiers, strict=True) if getattr(t, kind) == tier
                )
                if total:
                    note, versions = "resident", self.options.num_versions
                    if tier is Tier.NVME and kind != "gradients" and versions > 1:
                        note = f"{versions} versions: {format_bytes(versions * total)}"
                    elif tier is not Tier.NVME and kind != "gradients" and self.options.write_through:
                        note = f"resident; written through to {versions} versions on nvme"
                    items.append(BudgetItem(tier, kind, total, note))
                if total and tier is Tier.DEVICE and kind != "gradients":
                    items.append(BudgetItem(Tier.HOST, f"mirror of {kind}", total, "the update works on it"))
        items.append(BudgetItem(Tier.HOST, "leaves updated whole", self.update_bytes, "no fused kernel"))
        items.append(BudgetItem(Tier.HOST, "residuals", host_residuals, "resident"))
        loads = (format_bytes(schedule.peak_load(weights)), format_bytes(schedule.peak_load(others)))
        streams = f"weights {loads[0]}, other {loads[1]}"
        items.append(BudgetItem(Tier.HOST, "frames of the passes", stream_bytes, streams))
        num_frames, update_bytes = frames
        chunk_note = f"{num_frames} chunks"
        if self.options.update_overlap == "none":
            chunk_note += "; shares the passes' place"
        items.append(BudgetItem(Tier.HOST, "frames of the update", update_bytes, chunk_note))
        items.append(BudgetItem(Tier.DEVICE, "values and programs", device, "activations, temporaries, outputs"))
        return tuple(item for item in items if item.num_bytes)

    def _predict(
        self, tiers: Sequence[PageTiers], weights: Sequence[Residency], spilled: dict[int, Tier]
    ) -> Prediction:
        pages = self.shape.pages
        read = sum(r.num_bytes for r in weights)
        write = 0
        residuals = sum(
            2 * self.shape.value_bytes[v] * self.shape.num_micro_batches for v, t in spilled.items() if t is Tier.NVME
        )
        update_read = update_write = ahead_read = touched = 0
        overlap = self.options.update_overlap
        last = self.shape.units[self.positions[-1].unit].pages  # the norm is known next: none of these is run ahead
        for index, (page, tier) in enumerate(zip(pages, tiers, strict=True)):
            if not page.gradient_bytes:
                continue
            if tier.gradients is Tier.NVME:
                write += page.gradient_bytes
                update_read += page.gradient_bytes
            moved = (tier.weights is Tier.NVME) * page.weights_bytes + (tier.optimizer is Tier.NVME) * page.record_bytes
            update_write += page.weights_bytes + page.record_bytes if self.options.write_through else moved
            read_again = (tier.weights is Tier.NVME) * page.weights_bytes
            held = self.options.update_hold > 0  # an update beside backward meets weights and gradient in their frames
            less = page.gradient_bytes * (held and tier.gradients is Tier.NVME and index not in last)
            if overlap in ("next_forward", "auto") or (overlap == "backward" and held):
                moved -= read_again
            if overlap == "backward":
                moved -= less
            if overlap == "auto":
                ahead_read += read_again * (not held) - less
            update_read += moved
            touched += 2 * page.weights_bytes + 2 * page.record_bytes + page.gradient_bytes
        flops = sum(_flops(self.shape.units[p.unit], p.phase) * self.shape.group_sizes[p.group] for p in self.positions)
        hardware = self.hardware
        return Prediction(
            read_bytes=read + update_read + residuals // 2,
            write_bytes=write + update_write + residuals // 2,
            compute_s=flops / hardware.flops if hardware.flops else None,
            pass_io_s=_seconds(read + write + residuals, hardware.mixed_gbps or hardware.read_gbps),
            update_io_s=_seconds(update_read + update_write, hardware.mixed_gbps or hardware.read_gbps),
            update_host_s=_seconds(touched, hardware.update_gbps),
            flops=flops,
            overlaps=self.options.update_overlap != "none",
            update_read_bytes=update_read,
            update_write_bytes=update_write,
            ahead_read_bytes=ahead_read,
        )


def _flops(unit: UnitShape, phase: Phase) -> int:
    """The turn has what backward would compute again from its own forward."""
    return {Phase.FORWARD: unit.flops, Phase.BACKWARD: unit.backward_flops, Phase.TURN: 3 * unit.flops}[phase]


def _seconds(num_bytes: int, gbps: float | None) -> float | None:
    return num_bytes / gbps / 1e9 if gbps else None


def _check(plan: Plan, hardware: Hardware, options: StreamOptions, placement: PlacementOptions) -> None:
    problems = []
    if plan.host_bytes > hardware.host_memory:
        biggest = max((i for i in plan.items if i.tier is Tier.HOST), key=lambda i: i.num_bytes)
        advice = [f"raise host_memory to {format_bytes(plan.host_bytes)}"]
        if options.lookahead > 0:
            advice.append(f"lower streaming.lookahead ({options.lookahead})")
        if biggest.kind == "frames of the update":
            advice.append(
                f"lower streaming.chunk_bytes ({format_bytes(options.chunk_bytes)}) or streaming.num_chunk_frames"
            )
        kind = biggest.kind.removeprefix("mirror of ")
        if kind in ("weights", "optimizer", "gradients", "residuals"):
            advice.append(placement.advice(kind))
        problems.append(
            f"needs {format_bytes(plan.host_bytes)} of host frames, host_memory is "
            f"{format_bytes(hardware.host_memory)} (largest: {biggest.kind}, {format_bytes(biggest.num_bytes)}): "
            + ", or ".join(advice)
        )
    if plan.device_bytes > hardware.device_memory:
        advice_text = "use smaller micro-batches, a smaller max_unit_bytes"
        if placement.residuals is not Tier.NVME:
            advice_text += ", or put residuals on host or nvme"
        if any(unit.saved for unit in plan.shape.units):
            advice_text += ", or keep less for backward (remat_policy)"
        problems.append(
            f"needs {format_bytes(plan.device_bytes)} of device memory, device_memory is "
            f"{format_bytes(hardware.device_memory)}: {advice_text}"
        )
    if problems:
        raise PlanError("this run cannot fit.\n  " + "\n  ".join(problems) + "\n" + plan.table())
