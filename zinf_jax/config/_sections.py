"""The sections of the config. The docstring under each key is its reference entry: meaning, unit, formula."""

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from zinf_jax.config._types import (
    REFUSE,
    Bytes,
    Count,
    Fraction,
    NonNegative,
    Positive,
    PositiveBytes,
    Section,
    Tier,
)
from zinf_jax.graph import RematPolicy


class Bf16(Section):
    """bf16 weights with an exact fp32 master (kept as bf16 plus a 16-bit remainder)."""

    place = "bf16"
    enabled: bool = False
    """Floating leaves reach the loss in bf16. Excludes `fp16`."""


class Fp16(Section):
    """fp16 weights with an fp32 master and loss scaling. A step with non-finite gradients changes nothing."""

    place = "fp16"
    enabled: bool = False
    """Floating leaves reach the loss in fp16. Excludes `bf16`."""
    loss_scale: NonNegative = 0.0
    """Fixed loss scale; 0 means dynamic."""
    initial_scale_power: Count = 16
    """The dynamic scale starts at 2 ** this."""
    loss_scale_window: Positive = 1000
    """Steps without overflow after which the dynamic scale doubles."""
    hysteresis: Positive = 2
    """Overflows that are tolerated before the dynamic scale halves."""
    consecutive_hysteresis: bool = False
    """Refill the hysteresis after each step without overflow, not only when the scale grows."""
    min_loss_scale: NonNegative = 1.0
    """The dynamic scale never falls below this."""


class Placement(Section):
    """Where each kind of state rests between uses. `auto`: the plan decides from budgets and measured bandwidths."""

    place = "placement"

    weights: Tier | None = None
    """Tier of the weights that the loss reads. Bytes: parameters x 2 (bf16, fp16) or x 4 (fp32)."""
    optimizer: Tier | None = None
    """Tier of the optimizer state and the master. Bytes per parameter with Adam: 10 (bf16: remainder, m, v),
    12 (fp16: master, m, v) or 8 (fp32: m, v)."""
    gradients: Tier | None = None
    """Tier of complete gradients until their update. Bytes: parameters x size of `gradient_dtype`."""
    residuals: Tier | None = None
    """Tier of the values that forward saves for backward. Bytes: bytes crossing each cut x micro-batches of a group."""
    optimizer_fraction: Fraction = 1.0
    """Share of the optimizer state that goes to `placement.optimizer`: whole pages in their order until it is reached;
    the rest is on the device tier. 0 is `placement.optimizer: device`."""
    weights_host_cache: Bytes | None = None
    """Of weights on nvme: bytes that stay in host memory instead, whole pages while they fit. 0: none. `auto`: none;
    `placement.weights: auto` keeps there what `host_memory` allows."""


class Partitioning(Section):
    """What is sharded over the mesh axis `fsdp`: ZeRO's stages as one value."""

    place = "partitioning"

    stage: Literal[0, 1, 2, 3] = 3
    """0: nothing; 1: optimizer state; 2: and gradients; 3: and weights."""

    @field_validator("stage", mode="before")
    @classmethod
    def _whole(cls, value: Any) -> Any:
        return int(value) if isinstance(value, float) and value == int(value) else value


class Streaming(Section):
    """How state moves. None of these changes a result; they trade memory for overlap."""

    place = "streaming"

    lookahead: Count | None = None
    """Schedule steps by which a fetch precedes its use. 0 is synchronous. Host bytes: (lookahead + 1) x largest unit.
    `auto`: by the plan (2)."""
    max_in_flight: Positive = 2
    """Unit programs dispatched before the oldest output must be ready. Device bytes: max_in_flight x largest unit."""
    max_unit_bytes: PositiveBytes | None = None
    """Parameter bytes per unit, unsharded. `auto`: 1 GiB. Part of the computation, as the cut is."""
    page_bytes: PositiveBytes | None = None
    """Upper limit of one page, where leaves are grouped; a single larger leaf is one page. `auto`: 256 MiB."""
    min_io_bytes: PositiveBytes = 1 << 20
    """Units smaller than this share a page, so that no read or write is smaller."""
    chunk_bytes: PositiveBytes | None = None
    """Bytes of master and optimizer state that are read, updated and written as one. `auto`: 16 MiB."""
    num_chunk_frames: Positive | None = None
    """Optimizer chunks in host memory at once (read, update, write). Host bytes: num_chunk_frames x chunk_bytes.
    1 is sequential. `auto`: 4, or 2 where host_memory has no room for more; and, for records that are read beside
    backward before their update is due, half of what host_memory leaves, or without one half of the records
    and at most 512 MiB."""
    micro_batches_per_group: Positive | None = None
    """Micro-batches that run together per pass over the units. `auto`: all of a step. Part of the computation: the
    order of gradient sums depends on it, so the plan never changes it to save memory."""
    remat_policy: RematPolicy = "nothing_saveable"
    """What backward does not compute again: a policy of `jax.checkpoint_policies` (dots_saveable keeps the results of
    matrix products), or a list of names given with `jax.ad_checkpoint.checkpoint_name`. What is kept is a residual, in
    device memory unless `placement.residuals` is host or nvme: bytes kept per unit x units x micro-batches of a group.
    Part of the computation: other programs round differently."""
    update_overlap: Literal["none", "backward", "next_forward"] | None = None
    """When the update runs. none: after backward. next_forward: a page's just before the next forward needs it, beside
    its compute. backward: as soon as a page's gradient is complete, and again where the norm then says to clip (needs
    durability, and both weights and optimizer on nvme; other pages are updated as with next_forward). `auto`:
    next_forward, or backward while steps are not clipped and a trial shows it to be faster; none where host_memory has
    no room for the frames of the others. The bits are the same."""
    durability: str | None = None
    """Which steps survive a crash. step: each, from soon after it is taken; every_N (every_10): each Nth; off: those
    that were saved. Bytes on nvme: two versions of weights and optimizer state, one with off. `auto`: step with a
    run_dir, else off."""

    num_retained: Count = 0
    """Steps kept in place (`trainer.save()` without a path) for which there is room from the start. Bytes on nvme: one
    version each. More can be kept while the drive has room. `zinf train` sets it to what `train.save_every` and
    `train.extra.keep_last` need."""

    @field_validator("durability", mode="before")
    @classmethod
    def _valid_durability(cls, value: Any) -> Any:
        if value is False:  # YAML 1.1 reads a bare `off` as false
            return "off"
        if value is not None and not (isinstance(value, str) and re.fullmatch(r"step|off|every_[1-9]\d*", value)):
            raise ValueError("must be step, off or every_N, such as every_10")
        return value


class Integrity(Section):
    """Every chunk that is read is compared with its checksum; what differs is never trained on."""

    place = "integrity"

    fallback: bool = False
    """On resume, verify the whole state, and go back to the newest step that is whole (the commit before, then retained
    steps) where the last one is damaged. false: resume at once, and stop with an error when damage is met."""


class Aio(Section):
    """The NVMe I/O engine. `zinf bench-io DIR` measures this machine and prints this section."""

    place = "aio"

    block_size: Annotated[PositiveBytes, Field(le=1 << 30, multiple_of=4096)] = 1 << 20
    """Bytes of one request to the drive, a multiple of 4096; larger reads and writes are split into these."""
    queue_depth: Annotated[Positive, Field(le=4096)] = 32
    """Requests in flight per ring. Host bytes in flight: block_size x queue_depth x thread_count."""
    thread_count: Annotated[Positive, Field(le=64)] = 1
    """Rings, each with a completion thread."""
    single_submit: bool = False
    """Submit requests one by one instead of in batches."""
    overlap_events: bool = True
    """Submit further requests before earlier ones completed; false waits for each batch."""
    engine: Literal["libaio", "threads_direct", "threads_buffered"] | None = None
    """libaio and threads_direct use O_DIRECT, threads_buffered the page cache. `auto`: the first of these that a real
    probe write on each path shows to work."""


def _as_tuple(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def checked_patterns(value: tuple[str, ...]) -> tuple[str, ...]:
    for pattern in value:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
    return value


Patterns = Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]


class Optimizer(Section):
    """The optimizer. Both PyTorch's and optax's parameter names are accepted."""

    place = "optimizer"

    type: str = Field(json_schema_extra={"auto": REFUSE})
    """adamw, adam, lion, sgd, adagrad (fused on the host); lamb, `optax.NAME` or `module:function` (slower, generic).
    As in DeepSpeed, adam has decoupled weight decay unless `adam_w_mode: false`."""
    params: dict[str, Any] = Field(default={})
    """Its parameters: lr, betas, eps, weight_decay, momentum, nesterov ...; see `zinf config-reference`."""
    no_decay_patterns: Patterns = ()
    """Regular expressions (searched in leaf names such as `block_0/norm/scale`) of leaves without weight decay."""

    @field_validator("no_decay_patterns")
    @classmethod
    def _compiles(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return checked_patterns(value)

    def compiled_no_decay(self) -> tuple[re.Pattern[str], ...]:
        return tuple(map(re.compile, self.no_decay_patterns))


class Scheduler(Section):
    """Learning rate by step, with DeepSpeed's formulas."""

    place = "scheduler"

    type: str = Field(json_schema_extra={"auto": REFUSE})
    """WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest."""
    params: dict[str, Any] = Field(default={})
    """Its parameters: warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, total_num_steps ..."""


class Model(Section):
    """For `zinf train`: what to train."""

    place = "model"

    factory: str = "zinf_jax.models:decoder"
    """`module:function` that is called with `kwargs`."""
    kwargs: dict[str, Any] = Field(default={})
    """Keyword arguments of the factory."""


class Data(Section):
    """For `zinf train`: what to train on."""

    place = "data"

    factory: str = "zinf_jax.train.data:text"
    """`module:function` that is called with a `DataRequest` and `kwargs`."""
    kwargs: dict[str, Any] = Field(default={})
    """Keyword arguments of the factory."""


class Train(Section):
    """For `zinf train`: the loop."""

    place = "train"

    steps: Positive | None = Field(default=None, json_schema_extra={"auto": REFUSE})
    """Optimizer steps of the whole run. Required by `zinf train` unless given by `--steps`."""
    log_every: Positive = 10
    """Steps between lines in the log."""
    save_every: Count = 0
    """Steps between saves; 0: only at the end."""
    sample_every: Count = 0
    """Steps between samples of generated text; 0: only at the end."""
    sample_tokens: Count = 200
    """Tokens of a sample; 0: none."""
    sample_prompt: str = ""
    """Text that a sample continues."""
    tensorboard: bool = True
    """Write TensorBoard scalars beside the metrics file."""
    extra: dict[str, Any] = Field(default={})
    """Handed to the loop as it is."""
