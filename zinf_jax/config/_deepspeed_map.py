"""Sets native keys from checked DeepSpeed values, where it takes more than looking up a table.

Element counts become bytes through the precision and the optimizer; offload devices become tiers. DeepSpeed's sizes are
upper limits, often far above what is useful: one that does not bind leaves the native key at `auto`, with a note.
"""

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

from zinf_jax.config._deepspeed_keys import OPTIMIZER as _O
from zinf_jax.config._deepspeed_keys import PARAM as _P
from zinf_jax.config._deepspeed_keys import ZERO as _Z
from zinf_jax.config._errors import problem
from zinf_jax.config._files import set_path
from zinf_jax.config._optimizer import normalise_optimizer, num_states, record_bytes_per_param
from zinf_jax.config._types import AUTO
from zinf_jax.errors import ConfigError
from zinf_jax.units import format_bytes

_TIERS = {"none": "device", "cpu": "host", "nvme": "nvme", AUTO: AUTO}
_MAX_CHUNK_BYTES, _MAX_PAGE_BYTES = 64 << 20, 256 << 20
_STATES = {4: "parameter, gradient, m, v", 3: "parameter, gradient, momentum", 2: "parameter, gradient"}
_SIMPLE = (
    ("steps_per_print", "train.log_every"),
    ("data_types.grad_accum_dtype", "gradient_dtype"),
    ("aio.intra_op_parallelism", "aio.thread_count"),
    (_O + "ratio", "placement.optimizer_fraction"),
    (_Z + "stage", "partitioning.stage"),
)


@dataclasses.dataclass
class Translation:
    """One run of the mapping.

    Attributes:
      native: The tree that is completed.
      found: DeepSpeed path -> checked value.
      notes: Grows.
      sources: Native path -> the DeepSpeed key that set it.
    """

    native: dict[str, Any]
    found: dict[str, Any]
    notes: list[str]
    sources: dict[str, str] = dataclasses.field(default_factory=dict)

    def apply(self, zero: bool) -> None:
        """Does everything. `zero`: the file has a `zero_optimization` section, whose defaults are then DeepSpeed's."""
        for section, tree in self.native.items():
            self.native[section] = dict(tree) if isinstance(tree, Mapping) else tree  # the caller's is left alone
        for source, target in _SIMPLE:
            if self.found.get(source) is not None:
                self.put(target, self.found[source], source)
        self._sections()
        self._legacy_clipping()
        if zero:
            self._placement()
            self._paths()
            self._pinning()
            self._sizes()

    def put(self, path: str, value: Any, source: str) -> None:
        """Sets a native key.

        Raises:
          ConfigError: it has another value already.
        """
        given = self._get(path)
        if given is not None and given != value:
            raise ConfigError(f"{source} sets {path}, which is given too ({given!r}): keep one")
        if not isinstance(self.native.get(path.partition(".")[0]) or {}, Mapping) and "." in path:
            return  # not a section: reported by validation
        set_path(self.native, path, value)
        self.sources[path] = source

    def default(self, path: str, value: Any, source: str) -> None:
        """What DeepSpeed takes when the key is not there: gives way to a native key."""
        if self._get(path) is None:
            self.put(path, value, source)

    def _get(self, path: str) -> Any:
        tree: Any = self.native
        for part in path.split("."):
            tree = tree.get(part) if isinstance(tree, Mapping) else None
        return tree

    def _sections(self) -> None:
        board = self.found.get("tensorboard")
        if isinstance(board, Mapping):
            self.put("train.tensorboard", board.get("enabled", False), "tensorboard.enabled")
            for key in sorted(set(board) - {"enabled"}):
                self.notes.append(f"tensorboard.{key} has no meaning here: files go to the run directory")
        checkpointing = self.found.get("activation_checkpointing")
        if isinstance(checkpointing, Mapping):
            if checkpointing.get("cpu_checkpointing") is True:
                self.put("placement.residuals", "host", "activation_checkpointing.cpu_checkpointing")
            for key in sorted(set(checkpointing) - {"cpu_checkpointing"}):
                self.notes.append(
                    f"activation_checkpointing.{key} has no meaning here: backward computes each unit again, "
                    "but for what streaming.remat_policy keeps"
                )

    def _legacy_clipping(self) -> None:
        params = self._get("optimizer.params")
        if isinstance(params, Mapping) and "max_grad_norm" in params:
            params = dict(params)
            self.put("gradient_clipping", params.pop("max_grad_norm"), "optimizer.params.max_grad_norm")
            self.native["optimizer"]["params"] = params
            self.notes.append("optimizer.params.max_grad_norm is a deprecated spelling of gradient_clipping")

    def _placement(self) -> None:
        for old, section in ((_Z + "cpu_offload", _O), (_Z + "cpu_offload_param", _P)):
            if self.found.get(old):
                if section + "device" in self.found:
                    raise ConfigError(
                        f"{old} is a deprecated spelling of {section}device: cpu; both are given, drop it"
                    )
                self.found[section + "device"] = "cpu"
                self.notes.append(f"{old} is deprecated; it is read as {section}device: cpu")
        for section, target in ((_P, "placement.weights"), (_O, "placement.optimizer")):
            if section + "device" in self.found:
                self.put(target, self._tier(section), section + "device")
            else:
                self.default(target, "device", section + "device")
        if self._tier(_O) in ("device", "host"):
            self.default("placement.gradients", self._tier(_O), _O + "device")
        else:
            self.notes.append("placement.gradients: on host where host_memory allows, else on nvme, by the plan")
        if self._tier(_P) != "device" and self.found.get(_Z + "stage", 0) < 3:
            self.notes.append("offload_param below stage 3 is accepted: placement does not depend on the stage here")
        self.default("partitioning.stage", 0, _Z + "stage")

    def _tier(self, section: str) -> str:
        name = self.found.get(section + "device", "none")
        if name not in _TIERS:
            raise ConfigError(problem(section + "device", name, "should be 'cpu', 'nvme' or 'none'"))
        return _TIERS[name]

    def _paths(self) -> None:
        paths: list[str] = []
        for section in (_O, _P):
            value = self.found.get(section + "nvme_path")
            if value is not None and self._tier(section) not in ("nvme", AUTO):
                self.notes.append(f"{section}nvme_path is not used: {section}device is not nvme")
            elif value is not None:
                paths += [path for path in ([value] if isinstance(value, str) else value) if path not in paths]
        if paths:
            self.put("nvme_path", paths, _O + "nvme_path")
        elif "nvme" in (self._tier(_O), self._tier(_P)) and self._get("nvme_path") is None:
            self.notes.append("no nvme_path: pages on nvme go to the run directory")

    def _pinning(self) -> None:
        keys = (_P + "pin_memory", _O + "pin_memory", _Z + "cpu_offload_use_pin_memory")
        pins = [self.found[key] for key in keys if self.found.get(key) is not None]
        if any(pins):
            self.notes.append("pin_memory: the arena is pinned as far as RLIMIT_MEMLOCK allows (pin_memory: auto)")
        elif pins:
            self.default("pin_memory", False, _O + "pin_memory")

    def _sizes(self) -> None:
        precision = self._precision()
        kind, params = self._optimizer()
        self._check_buffer_count(kind, params)
        itemsize = 4 if precision == "fp32" else 2
        sizes = {key: self.found.get(key) for key in (_Z + "sub_group_size", _O + "buffer_size")}
        known = {key: size for key, size in sizes.items() if size}
        if known:
            source = min(known, key=lambda key: known[key])
            chunk = known[source] * record_bytes_per_param(kind, params, precision)
            self._limit("streaming.chunk_bytes", chunk, _MAX_CHUNK_BYTES, source)
        if size := self.found.get(_P + "buffer_size"):
            self._limit("streaming.page_bytes", size * itemsize, _MAX_PAGE_BYTES, _P + "buffer_size")
        for key in (*sizes, _P + "buffer_size"):
            if self.found.get(key) == 0:
                self.notes.append(f"{key} = 0: by the plan")
        self._cache(itemsize)
        prefetch = self.found.get(_Z + "stage3_prefetch_bucket_size")
        if prefetch == 0:
            self.put("streaming.lookahead", 0, _Z + "stage3_prefetch_bucket_size")
        elif prefetch is not None:
            self.notes.append(f"{_Z}stage3_prefetch_bucket_size: lookahead is planned; streaming.lookahead sets it")

    def _cache(self, itemsize: int) -> None:
        source = _P + "max_in_cpu"
        if self._tier(_P) != "nvme":
            if source in self.found:
                self.notes.append(f"{source} is not used: {_P}device is not nvme")
        elif self.found.get(source) is not None:
            self.put("placement.weights_host_cache", self.found[source] * itemsize, source)
        else:
            self.default("placement.weights_host_cache", 0, source)
            self.notes.append(
                "no max_in_cpu: weights configured for nvme are on nvme (DeepSpeed keeps 1e9 elements in DRAM)"
            )

    def _limit(self, path: str, value: int, ceiling: int, source: str) -> None:
        if value < ceiling:
            self.put(path, value, source)
        else:
            self.notes.append(f"{source}: {format_bytes(value)} is an upper limit; {path} stays below it by itself")

    def _precision(self) -> str:
        return next((name for name in ("bf16", "fp16") if self._get(name + ".enabled") is True), "fp32")

    def _optimizer(self) -> tuple[str | None, dict[str, Any]]:
        kind, params = self._get("optimizer.type"), self._get("optimizer.params")
        if isinstance(kind, str):
            with contextlib.suppress(ValueError):  # what is wrong with it is reported with the rest of the config
                normal = normalise_optimizer(kind, params or {}, [])
                return normal["type"], normal["params"]
        return None, {}

    def _check_buffer_count(self, kind: str | None, params: Mapping[str, Any]) -> None:
        count = self.found.get(_O + "buffer_count")
        minimum = (num_states(kind, params) if kind else None) or 1
        if count is not None and count < minimum:
            what = f"the minimum for {kind or 'any optimizer'} is {minimum} ({_STATES.get(minimum, 'one chunk')})"
            raise ConfigError(problem(_O + "buffer_count", count, what + f": set it to {minimum} or leave it out"))
