"""What the planner knows of a training step: sizes and order of use, no arrays, no devices."""

import dataclasses
import enum

from zinf_jax.errors import ConfigError


class Tier(enum.StrEnum):
    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"


@dataclasses.dataclass(frozen=True)
class PageShape:
    """Bytes of one page in each kind of state, over all rows that this process holds.

    Attributes:
      name: For people.
      weights_bytes: What the programs read.
      record_bytes: Master remainder or copy, and optimizer slots: moved together. 0 for pages that are not trained.
      gradient_bytes: In the gradient's dtype. 0 for pages that are not trained.
      num_elements: Including padding.
    """

    name: str
    weights_bytes: int
    record_bytes: int
    gradient_bytes: int
    num_elements: int


@dataclasses.dataclass(frozen=True)
class UnitShape:
    """One unit.

    Attributes:
      pages: What it reads.
      gradient_pages: Pages to whose gradient it contributes.
      inputs, outputs: Value ids.
      saved: Those of `outputs` that its backward reads, instead of computing them again.
      forward_bytes, backward_bytes: Device bytes of the program's outputs, without those in `saved`.
      flops, backward_flops: Of the two programs, one micro-batch.
      forward_temp_bytes, backward_temp_bytes: What it needs while it runs. Programs run one after the other, so only
        one program's temporaries are there at a time, whatever is in flight.
      gradient_temp_bytes: Likewise, where the gradients of its weights are made by a program that runs beside others.
      crossing_bytes: Of `backward_bytes`, what that program is given.
      cast_bytes: Its weights in a wider dtype, where they are cast apart: while the unit before runs.
    """

    name: str
    pages: tuple[int, ...]
    gradient_pages: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    saved: tuple[int, ...]
    forward_bytes: int
    backward_bytes: int
    flops: int
    backward_flops: int
    forward_temp_bytes: int = 0
    backward_temp_bytes: int = 0
    gradient_temp_bytes: int = 0
    crossing_bytes: int = 0
    cast_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class StepShape:
    """A whole step.

    Attributes:
      pages, units: See there.
      backward: Unit indices in the order in which their backward runs. Empty for evaluation.
      value_bytes: Device bytes of each value, one micro-batch.
      outer_values: Values that are there from the start and stay (batch, state, rng).
      kept_values: Values that must be there at the end, or cannot leave the device (typed PRNG keys).
      group_sizes: Micro-batches per group, in order; one group in the usual layer-major step.
      turn: The last unit's forward and backward run as one program.
    """

    pages: tuple[PageShape, ...]
    units: tuple[UnitShape, ...]
    backward: tuple[int, ...]
    value_bytes: tuple[int, ...]
    outer_values: frozenset[int]
    kept_values: frozenset[int]
    group_sizes: tuple[int, ...]
    turn: bool

    @property
    def num_micro_batches(self) -> int:
        return sum(self.group_sizes)


class Freed(enum.StrEnum):
    """What becomes of memory that the process frees; on the CPU backend the device's buffers are such memory.

    RETURNED: The system has it at once. KEPT: it stays in the heap of the thread that took it, for the next step.
    SHARED: it stays in the one heap of all threads, which then needs less.
    """

    RETURNED = "returned"
    KEPT = "kept"
    SHARED = "shared"


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Figures of the machine; bandwidths in GB/s (1e9 bytes), None where not measured.

    Attributes:
      device_memory, host_memory: Budgets in bytes for everything that this run keeps there.
      cache_pages: Use what `host_memory` leaves to keep streamed pages between uses. False where nobody gave a budget:
        memory then does not grow with the number of layers.
      aliases: Device arrays share host memory (the CPU backend): a fetch copies nothing.
      freed: What becomes of memory that the process frees.
      read_gbps, write_gbps, mixed_gbps: NVMe; `mixed` is reads plus writes when both run.
      flops: Rate of the device in FLOP/s.
      update_gbps: Bytes per second that the host update moves in memory.
    """

    device_memory: int
    host_memory: int
    aliases: bool
    cache_pages: bool = True
    freed: Freed = Freed.RETURNED
    read_gbps: float | None = None
    write_gbps: float | None = None
    mixed_gbps: float | None = None
    flops: float | None = None
    update_gbps: float | None = None


UPDATE_OVERLAPS = ("none", "backward", "next_forward", "auto")


@dataclasses.dataclass(frozen=True)
class StreamOptions:
    """How far ahead transfers run.

    Attributes:
      lookahead: Schedule steps by which a fetch is issued before its use. 0 is legal and synchronous.
      max_in_flight: Programs dispatched before the oldest output must be ready.
      chunk_bytes: Optimizer record bytes that are read, updated and written as one.
      num_chunk_frames: Chunks that have a frame at the same time (reading, updating, writing). 1 is synchronous.
      read_ahead: More frames than those, where there is room, for records that are read before their update is due.
      micro_batches_per_group: 0 for all in one group (layer-major).
      update_overlap: When the update runs: "none" (after backward), "backward" (a page's chunks as soon as its gradient
        is complete, where that can be undone), "next_forward" (just before the page is next needed), or "auto" (the
        latter two by how often the norm undoes the former). Without "none" the update's frames have a place of their
        own.
      num_versions: Extents per chunk on NVMe. With more than one a commit is possible.
      write_through: State that lives on the device or host is written to NVMe too when it changes, so that a commit
        holds it.
      update_hold: Positions by which a page's frame is kept after its last use, for the update that works in it.
      chunk_elements: Elements per chunk instead of `chunk_bytes`: a stored run's records are in chunks of a given size.
    """

    lookahead: int = 2
    max_in_flight: int = 2
    chunk_bytes: int = 16 << 20
    num_chunk_frames: int = 4
    micro_batches_per_group: int = 0
    update_overlap: str = "none"
    num_versions: int = 1
    write_through: bool = False
    update_hold: int = 0
    chunk_elements: int | None = None
    read_ahead: bool = False

    def __post_init__(self) -> None:
        if self.lookahead < 0:
            raise ConfigError(f"lookahead must be 0 (synchronous) or more, got {self.lookahead}")
        if self.max_in_flight < 1:
            raise ConfigError(f"max_in_flight must be at least 1, got {self.max_in_flight}")
        if self.chunk_bytes < 1:
            raise ConfigError(f"chunk_bytes must be positive, got {self.chunk_bytes}")
        if self.num_chunk_frames < 1:
            raise ConfigError(f"num_chunk_frames must be at least 1, got {self.num_chunk_frames}")
        if self.update_overlap not in UPDATE_OVERLAPS:
            raise ConfigError(
                f"update_overlap must be one of {', '.join(UPDATE_OVERLAPS)}, got {self.update_overlap!r}"
            )
        if self.micro_batches_per_group < 0:
            raise ConfigError(f"micro_batches_per_group must be 0 (all) or more, got {self.micro_batches_per_group}")
