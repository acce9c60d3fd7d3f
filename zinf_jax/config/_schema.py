"""The config as a whole: one frozen value, whether it came from YAML, JSON, gin, a DeepSpeed file or a dict."""

import dataclasses
import re
from typing import Annotated, Any, Literal

import ml_dtypes
import numpy as np
import yaml
from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from zinf_jax.config._optimizer import normalise_optimizer, normalise_scheduler
from zinf_jax.config._sections import (
    Aio,
    Bf16,
    Data,
    Fp16,
    Integrity,
    Model,
    Optimizer,
    Partitioning,
    Patterns,
    Placement,
    Scheduler,
    Section,
    Streaming,
    Train,
    checked_patterns,
)
from zinf_jax.config._types import AUTO, Count, Dtype, NonNegative, Positive, PositiveBytes
from zinf_jax.errors import ConfigError


def _as_paths(value: Any) -> Any:
    return (str(value),) if isinstance(value, str) or hasattr(value, "__fspath__") else value


Paths = Annotated[tuple[str, ...], BeforeValidator(_as_paths)]


@dataclasses.dataclass(frozen=True)
class BatchSizes:
    """Samples per step (`train`), per device and micro-batch (`micro`), and micro-batches per step.

    `train` and `micro` are None where the config leaves them to the batches that the trainer is given.
    """

    train: int | None
    micro: int | None
    accumulation: int
    world: int


class Config(Section):
    """Everything that a run can be told. Frozen; `notes` says what was understood in a particular way."""

    train_batch_size: Positive | None = None
    """Samples per optimizer step over all devices.
    = train_micro_batch_size_per_gpu x gradient_accumulation_steps x data-parallel devices. `auto`: from the others."""
    train_micro_batch_size_per_gpu: Positive | None = None
    """Samples per device in one forward and backward. `auto`: from the other two, else from the batches given."""
    gradient_accumulation_steps: Positive | None = None
    """Micro-batches per optimizer step. `auto`: from the other two, else 1."""
    bf16: Bf16 = Bf16()
    fp16: Fp16 = Fp16()
    gradient_dtype: Dtype | None = None
    """fp32, bf16 or fp16: dtype in which gradients are summed, reduced and stored on every tier. `auto`: the weights'
    with one micro-batch (what `jax.grad` gives), fp32 with more."""
    gradient_clipping: NonNegative = Field(default=0.0, json_schema_extra={"auto": 1.0})
    """Upper limit of the global gradient norm; 0: no clipping."""
    optimizer: Optimizer | None = None
    scheduler: Scheduler | None = None
    placement: Placement = Placement()
    device_memory: PositiveBytes | None = None
    """Bytes of each device that the run may use, such as 20GiB. `auto`: what the device reports as free."""
    host_memory: PositiveBytes | None = None
    """Bytes of host memory for the arena, per process: frames and everything placed on host. `auto`: what the plan
    needs, at most 80% of what is available (and of the cgroup limit)."""
    nvme_path: Paths | None = None
    """Directory, or list of them, for pages on nvme, absolute, on local drives. `auto`: the run directory. Over a list,
    chunks are dealt out in proportion to each drive's measured bandwidth."""
    nvme_tbw: Annotated[NonNegative, Field(gt=0)] | None = None
    """Terabytes written (1e12 bytes) that the drives of nvme_path are rated for together, from their data sheets: the
    report then says which share of that a run used. `auto`: what a drive tells itself, where it can be asked without
    root."""
    pin_memory: bool | None = None
    """Keep the arena from being paged out (mlock). `auto`: if RLIMIT_MEMLOCK allows, and the report says why not;
    true: or an error; false: not."""
    partitioning: Partitioning = Partitioning()
    mesh: dict[str, int] = Field(default={"fsdp": -1})
    """Axis names and sizes, in order; one size may be -1: all remaining devices. State is sharded and the batch split
    over `fsdp`; other axes are for the model's own shardings. A mesh that is passed to the Trainer wins."""
    streaming: Streaming = Streaming()
    integrity: Integrity = Integrity()
    aio: Aio = Aio()
    host_threads: Positive | None = None
    """Threads of the host optimizer kernels. `auto`: the cores this process may use."""
    max_consecutive_skips: Positive = 50
    """Steps with non-finite gradients in a row after which training stops with an error."""
    seed: Count = 0
    """Seed of initialisation, dropout and data order."""
    trainable_patterns: Patterns = (".*",)
    """Regular expressions, searched in leaf names such as `block_0/attention/kernel`; a leaf without a match is
    frozen."""
    frozen_patterns: Patterns = ()
    """Leaves that match one of these are frozen, whatever `trainable_patterns` says."""
    restore: Literal["all", "weights"] = "all"
    """What a resume takes from the saved run. all: everything, bit for bit; where optimizer, scheduler or scale
    settings differ from the saved run's, this config's win from then on. weights: only these; step 0, fresh optimizer
    state, schedule, loss scale and counters, from a checkpoint that is named (`auto` goes on with the run itself)."""
    model: Model = Model()
    data: Data = Data()
    train: Train = Train()
    notes: tuple[str, ...] = Field(default=(), exclude=True, repr=False)
    """Not a key: what loading understood in a particular way, or found to have no meaning here."""

    @field_validator("nvme_path")
    @classmethod
    def _no_empty_path(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if value is not None and (not value or any(not path.strip() for path in value)):
            raise ValueError("an empty path: name a directory on a local drive, or leave the key out")
        if value is not None and len(set(value)) != len(value):
            raise ValueError("the same path twice: name each drive once")
        return value

    @field_validator("trainable_patterns", "frozen_patterns")
    @classmethod
    def _valid_patterns(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return checked_patterns(value)

    @field_validator("mesh")
    @classmethod
    def _valid_mesh(cls, value: dict[str, int]) -> dict[str, int]:
        if any(size < 1 and size != -1 for size in value.values()) or list(value.values()).count(-1) > 1:
            raise ValueError("each axis size is positive, and at most one is -1 (all remaining devices)")
        if "fsdp" not in value:
            raise ValueError("one axis must be called fsdp: state is sharded and the batch split over it (1 is a size)")
        return value

    @field_validator("optimizer")
    @classmethod
    def _known_optimizer(cls, value: Optimizer | None, info: ValidationInfo) -> Optimizer | None:
        return value and value.model_copy(update=normalise_optimizer(value.type, value.params, _notes(info)))

    @model_validator(mode="after")
    def _consistent(self, info: ValidationInfo) -> "Config":
        if self.bf16.enabled and self.fp16.enabled:
            raise ValueError("bf16.enabled and fp16.enabled exclude each other: turn one off")
        self._check_batch()
        if self.scheduler is not None:
            lr = None if self.optimizer is None else self.optimizer.params.get("lr")
            update = normalise_scheduler(self.scheduler.type, self.scheduler.params, lr, self.train.steps, _notes(info))
            object.__setattr__(self, "scheduler", self.scheduler.model_copy(update=update))
        return self

    def _check_batch(self) -> None:
        """What can be checked before the number of devices is known."""
        train, micro, accumulation = (
            self.train_batch_size,
            self.train_micro_batch_size_per_gpu,
            self.gradient_accumulation_steps,
        )
        factor = (micro or 1) * (accumulation or 1)
        if train is not None and train % factor:
            raise ValueError(
                f"train_batch_size {train} is not a multiple of train_micro_batch_size_per_gpu {micro or 'auto'} x "
                f"gradient_accumulation_steps {accumulation or 'auto'} = {factor}: change one, or leave one out"
            )

    @property
    def precision(self) -> Literal["fp32", "bf16", "fp16"]:
        """What floating leaves reach the loss in."""
        return "bf16" if self.bf16.enabled else "fp16" if self.fp16.enabled else "fp32"

    @property
    def compute_dtype(self) -> np.dtype:
        return numpy_dtype(self.precision)

    def resolve_gradient_dtype(self, num_micro_batches: int) -> np.dtype:
        """The dtype of gradients on every tier for a step of this many micro-batches."""
        if self.gradient_dtype is not None:
            return numpy_dtype(self.gradient_dtype)
        return self.compute_dtype if num_micro_batches == 1 else numpy_dtype("fp32")

    def batch_sizes(self, world: int) -> BatchSizes:
        """Batch sizes for `world` data-parallel devices.

        Raises:
          ConfigError: they do not fit together; the message holds the numbers.
        """
        train, micro = self.train_batch_size, self.train_micro_batch_size_per_gpu
        accumulation = self.gradient_accumulation_steps
        if train is not None:
            known = world * (micro or 1) * (accumulation or 1)
            if train % known or (micro and accumulation and train != known):
                raise ConfigError(
                    f"train_batch_size is {train}, but train_micro_batch_size_per_gpu {micro or 'auto'} x "
                    f"gradient_accumulation_steps {accumulation or 'auto'} x {world} data-parallel devices = {known}: "
                    f"set train_batch_size to {max(1, round(train / known)) * known}, or leave one of the three out"
                )
            if micro is None:
                micro = train // (world * (accumulation or 1))
            accumulation = accumulation or train // (world * micro)
        accumulation = accumulation or 1
        if micro is not None:
            train = micro * accumulation * world
        return BatchSizes(train, micro, accumulation, world)

    def is_trainable(self, name: str) -> bool:
        """Whether the floating leaf `name` is trained."""
        frozen = any(re.search(pattern, name) for pattern in self.frozen_patterns)
        return not frozen and any(re.search(pattern, name) for pattern in self.trainable_patterns)

    def to_dict(self) -> dict[str, Any]:
        """The resolved config as plain values; None stands where the plan decides."""
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        """The resolved config, `auto` where the plan decides, notes as comments. `load` gives the same config back."""
        header = "".join(f"# {line}\n" for note in self.notes for line in note.splitlines())
        body = _with_auto(self.to_dict(), type(self))
        return header + yaml.safe_dump(body, sort_keys=False, width=100)


def _notes(info: ValidationInfo) -> list[str]:
    return info.context["notes"] if info.context else []


def _with_auto(values: dict[str, Any], section: type[Section]) -> dict[str, Any]:
    """Writes `auto` for None where the key accepts it; leaves out sections that are not there."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        field = section.model_fields[key]
        if isinstance(value, dict) and isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            out[key] = _with_auto(value, field.annotation)
        elif value is not None:
            out[key] = value
        elif key not in ("optimizer", "scheduler", "steps"):
            out[key] = AUTO
    return out


def numpy_dtype(name: str) -> np.dtype:
    return np.dtype({"fp32": np.float32, "bf16": ml_dtypes.bfloat16, "fp16": np.float16}[name])
