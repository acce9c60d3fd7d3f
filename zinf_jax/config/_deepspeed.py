"""Maps a DeepSpeed configuration onto the config's own keys.

The table of `_deepspeed_keys` says what becomes of each key; this module checks the values, records the notes, and
does the few mappings that need more than one key (element counts become bytes through the precision and the optimizer).
Keys that both vocabularies have (`optimizer`, `fp16`, `train_batch_size` ...) pass through untouched.
"""

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from zinf_jax.config import _deepspeed_keys as table
from zinf_jax.config._errors import combined, problem, unknown
from zinf_jax.config._files import set_path
from zinf_jax.config._optimizer import normalise_optimizer, num_states, state_bytes_per_param
from zinf_jax.config._types import AUTO, Count, Dtype, NonNegative
from zinf_jax.errors import ConfigError

_KINDS: dict[str, TypeAdapter[Any]] = {
    "count": TypeAdapter(Count),
    "bool": TypeAdapter(bool),
    "number": TypeAdapter(NonNegative),
    "text": TypeAdapter(str),
    "paths": TypeAdapter(str | list[str]),
    "dtype": TypeAdapter(Dtype | None),
    "any": TypeAdapter(Any),
}
_TIERS = {"none": "device", "cpu": "host", "nvme": "nvme"}
_Z, _P, _O = table._Z, table._P, table._O


def translate(raw: Mapping[str, Any], known: Iterable[str], notes: list[str]) -> dict[str, Any]:
    """The tree with DeepSpeed's keys replaced by native ones; `notes` grows.

    Raises:
      ConfigError: an unknown key inside a DeepSpeed section, a value of the wrong kind, a key that would change what is
        trained, a key under two names, or a DeepSpeed key beside the native one that it sets.
    """
    native, problems = dict(raw), list[str]()
    for old, new in table.RENAMED_TOP.items():
        if old in native:
            _move(native, old, new, notes)
    if isinstance(zero := native.get("zero_optimization"), bool):
        native["zero_optimization"] = {"stage": int(zero)}
        notes.append(f"zero_optimization: {str(zero).lower()} is a deprecated spelling of stage {int(zero)}")
    found = _collect(native, set(known), notes, problems)
    if problems:
        raise combined(problems)
    _map(native, found, "zero_optimization" in raw, notes)
    return native


def _move(tree: dict[str, Any], old: str, new: str, notes: list[str]) -> None:
    if new in tree:
        raise ConfigError(f"{old} and {new} are two spellings of one key: keep {new}")
    tree[new] = tree.pop(old)
    notes.append(f"{old} is an old spelling of {new}")


def _collect(native: dict[str, Any], known: set[str], notes: list[str], problems: list[str]) -> dict[str, Any]:
    """Takes DeepSpeed's keys out of `native`: path -> checked value. Notes and refusals are dealt with here."""
    found: dict[str, Any] = {}

    def take(path: str, value: Any) -> None:
        path = _canonical(path, found, notes, problems)
        if path in found:
            return
        found[path] = None
        try:
            found[path] = _checked(table.KEYS[path], value, notes)
        except ConfigError as error:
            problems.append(str(error))

    def walk(section: str, tree: Any) -> None:
        if tree is None or tree is False or tree == {}:
            return
        if not isinstance(tree, Mapping):
            problems.append(problem(section, tree, "is a section: keys and values"))
            return
        for key, value in tree.items():
            path = f"{section}.{key}"
            if path in table.SECTIONS:
                walk(path, value)
            elif path in table.KEYS or path in table.OLD_SPELLINGS:
                take(path, value)
            else:
                problems.append(unknown(path, known))

    for section in ("zero_optimization", "data_types"):
        if section in native:
            walk(section, native.pop(section))
    for key in [key for key in native if key in table.KEYS]:
        take(key, native.pop(key))
    for section in {path.partition(".")[0] for path in (key.path for key in table.SHARED_KEYS)}:
        if isinstance(native.get(section), Mapping):
            native[section] = dict(native[section])
            for key in [key for key in native[section] if f"{section}.{key}" in table.KEYS]:
                take(f"{section}.{key}", native[section].pop(key))
    return found


def _canonical(path: str, found: Mapping[str, Any], notes: list[str], problems: list[str]) -> str:
    new = table.OLD_SPELLINGS.get(path, path)
    if new != path:
        notes.append(f"{path} is another spelling of {new}")
    if new in found:
        problems.append(f"{path} and {new} are two spellings of one key: keep {new}")
    return new


def _checked(key: table.Key, value: Any, notes: list[str]) -> Any:
    """The value in its type, `"auto"` resolved.

    Raises:
      ConfigError: wrong kind, or refused.
    """
    if value == AUTO:
        value = AUTO if key.path.endswith(".device") else key.default
        if value not in (None, AUTO):
            notes.append(f"{key.path}: 'auto' is {value}")
    elif value is not None or key.kind not in ("any", "dtype"):
        try:
            value = _KINDS[key.kind].validate_python(value)
        except ValidationError as error:
            what = error.errors()[0]["msg"].removeprefix("Value error, ").replace("Input should be", "should be")
            raise ConfigError(problem(key.path, value, what, f"It {key.reason}" if key.to else "")) from None
    if key.refuse is not None and _active(value) not in key.harmless:
        raise ConfigError(problem(key.path, value, f"is not supported: {key.refuse}"))
    if key.to is None:
        notes.append(f"{key.path} has no meaning here: {key.reason if key.note else 'it is off'}")
    return value


def _active(value: Any) -> Any:
    """What a section asks for: its `enabled`, or whether it asks for anything at all."""
    if not isinstance(value, Mapping):
        return value
    if "enabled" in value:
        return bool(value["enabled"])
    if set(value) & {"autotp_size", "tp_size"}:
        return any(value.get(key, 1) not in (0, 1) for key in ("autotp_size", "tp_size"))
    return bool(value)


def _map(native: dict[str, Any], found: Mapping[str, Any], zero: bool, notes: list[str]) -> None:
    def put(path: str, value: Any, source: str) -> None:
        *parents, last = path.split(".")
        tree: Any = native
        for part in parents:
            tree = (tree.get(part) if isinstance(tree, Mapping) else None) or {}
        if isinstance(tree, Mapping) and tree.get(last, value) != value:
            raise ConfigError(f"{source} sets {path}, which is given too ({tree[last]!r}): keep one")
        set_path(native, path, value)

    for section in ("placement", "streaming", "partitioning", "train"):
        if isinstance(native.get(section), Mapping):
            native[section] = dict(native[section])
    for source, target in (
        ("steps_per_print", "train.log_every"),
        ("data_types.grad_accum_dtype", "gradient_dtype"),
        ("aio.intra_op_parallelism", "aio.thread_count"),
        (_O + "ratio", "placement.optimizer_fraction"),
    ):
        if found.get(source) is not None:
            put(target, found[source], source)
    _map_sections(native, found, put, notes)
    _legacy_clipping(native, put, notes)
    if zero:
        _map_placement(native, dict(found), put, notes)
        _map_sizes(native, found, put, notes)


def _map_sections(native: dict[str, Any], found: Mapping[str, Any], put: Any, notes: list[str]) -> None:
    board = found.get("tensorboard")
    if isinstance(board, Mapping):
        put("train.tensorboard", bool(board.get("enabled", False)), "tensorboard.enabled")
        for key in sorted(set(board) - {"enabled"}):
            notes.append(f"tensorboard.{key} has no meaning here: files go to the run directory")
    checkpointing = found.get("activation_checkpointing")
    if isinstance(checkpointing, Mapping):
        if checkpointing.get("cpu_checkpointing") is True:
            put("placement.residuals", "host", "activation_checkpointing.cpu_checkpointing")
        for key in sorted(set(checkpointing) - {"cpu_checkpointing"}):
            notes.append(f"activation_checkpointing.{key} has no meaning here: a unit is always recomputed in backward")


def _legacy_clipping(native: dict[str, Any], put: Any, notes: list[str]) -> None:
    optimizer = native.get("optimizer")
    params = optimizer.get("params") if isinstance(optimizer, Mapping) else None
    if isinstance(params, Mapping) and "max_grad_norm" in params:
        params = dict(params)
        put("gradient_clipping", params.pop("max_grad_norm"), "optimizer.params.max_grad_norm")
        native["optimizer"] = {**native["optimizer"], "params": params}
        notes.append("optimizer.params.max_grad_norm is a deprecated spelling of gradient_clipping")


def _map_placement(native: dict[str, Any], found: dict[str, Any], put: Any, notes: list[str]) -> None:
    for old, section in ((_Z + "cpu_offload", _O), (_Z + "cpu_offload_param", _P)):
        if found.get(old):
            if section + "device" in found:
                raise ConfigError(f"{old} is a deprecated spelling of {section}device: cpu; both are given, keep the latter")
            found[section + "device"] = "cpu"
            notes.append(f"{old} is deprecated; it is read as {section}device: cpu")
    devices = {section: _device(section, found.get(section + "device", "none")) for section in (_P, _O)}
    for section, target in ((_P, "placement.weights"), (_O, "placement.optimizer")):
        if section + "device" in found:
            put(target, devices[section], section + "device")
        else:
            _default(native, target, "device")
    gradients = {"device": "device", "host": "host"}.get(devices[_O])
    if gradients is not None:
        _default(native, "placement.gradients", gradients)
    else:
        notes.append("placement.gradients: on host where host_memory allows, else on nvme, by the plan")
    if devices[_P] != "device" and found.get(_Z + "stage", 0) < 3:
        notes.append("offload_param below stage 3 is accepted: placement does not depend on the stage here")
    if _Z + "stage" in found:
        put("partitioning.stage", found[_Z + "stage"], _Z + "stage")
    else:
        _default(native, "partitioning.stage", 0)
    _map_paths(native, found, devices, put, notes)


def _default(native: dict[str, Any], path: str, value: Any) -> None:
    section, _, key = path.partition(".")
    if not isinstance(native.get(section) or {}, Mapping) or key in (native.get(section) or {}):
        return
    set_path(native, path, value)


def _device(section: str, name: str) -> str | None:
    if name == AUTO:
        return AUTO
    if name not in _TIERS:
        raise ConfigError(problem(section + "device", name, "should be 'cpu', 'nvme' or 'none'"))
    return _TIERS[name]


def _map_paths(
    native: dict[str, Any], found: Mapping[str, Any], devices: Mapping[str, Any], put: Any, notes: list[str]
) -> None:
    paths: list[str] = []
    for section in (_O, _P):
        value = found.get(section + "nvme_path")
        if value is None:
            continue
        if devices[section] not in ("nvme", AUTO):
            notes.append(f"{section}nvme_path is not used: {section}device is not nvme")
            continue
        paths += [path for path in ([value] if isinstance(value, str) else value) if path not in paths]
    if paths:
        put("nvme_path", paths, _O + "nvme_path")
        if len(paths) > 1:
            notes.append("nvme_path has several directories: every page is striped over all of them")
    elif "nvme" in devices.values() and native.get("nvme_path") is None:
        notes.append("no nvme_path: pages on nvme go to the run directory")
    pins = {found[key] for key in (_P + "pin_memory", _O + "pin_memory", _Z + "cpu_offload_use_pin_memory") if
            found.get(key) is not None}  # fmt: skip
    if pins:
        put("pin_memory", any(pins), "pin_memory")
        if len(pins) > 1:
            notes.append("pin_memory is true: one arena serves weights and optimizer state")


def _map_sizes(native: dict[str, Any], found: Mapping[str, Any], put: Any, notes: list[str]) -> None:
    """Element counts -> bytes."""
    optimizer, precision = native.get("optimizer"), _precision(native)
    kind, params = None, {}
    if isinstance(optimizer, Mapping) and isinstance(optimizer.get("type"), str):
        with contextlib.suppress(ValueError):  # what is wrong with it is reported with the rest of the config
            normal = normalise_optimizer(optimizer["type"], optimizer.get("params") or {}, [])
            kind, params = normal["type"], normal["params"]
    _check_buffer_count(kind, params, found.get(_O + "buffer_count"))
    itemsize = 4 if precision == "fp32" else 2
    elements = [n for n in (found.get(_Z + "sub_group_size"), found.get(_O + "buffer_size")) if n]
    if elements:
        put("streaming.chunk_bytes", min(elements) * state_bytes_per_param(kind, params, precision), _Z + "sub_group_size")
    if size := found.get(_P + "buffer_size"):
        put("streaming.page_bytes", size * itemsize, _P + "buffer_size")
    if found.get(_P + "device") == "nvme":
        cached = found.get(_P + "max_in_cpu")
        put("placement.weights_host_cache", (cached or 0) * itemsize, _P + "max_in_cpu")
        if cached is None:
            notes.append("no max_in_cpu: weights configured for nvme are on nvme (DeepSpeed keeps 1e9 elements in memory)")
    elif _P + "max_in_cpu" in found:
        notes.append(f"{_P}max_in_cpu is not used: {_P}device is not nvme")
    prefetch = found.get(_Z + "stage3_prefetch_bucket_size")
    if prefetch == 0:
        put("streaming.lookahead", 0, _Z + "stage3_prefetch_bucket_size")
    elif prefetch is not None:
        notes.append(f"{_Z}stage3_prefetch_bucket_size: how far ahead to fetch is planned; streaming.lookahead sets it")


def _precision(native: Mapping[str, Any]) -> str:
    for name in ("bf16", "fp16"):
        section = native.get(name)
        if isinstance(section, Mapping) and section.get("enabled") is True:
            return name
    return "fp32"


def _check_buffer_count(kind: str | None, params: Mapping[str, Any], count: int | None) -> None:
    if count is None:
        return
    minimum = (num_states(kind, params) if kind else None) or 1
    names = {4: "parameter, gradient, m, v", 3: "parameter, gradient, momentum", 2: "parameter, gradient"}
    if count < minimum:
        raise ConfigError(
            problem(_O + "buffer_count", count, f"the minimum for {kind} is {minimum} ({names.get(minimum, 'one chunk')}): "
                    f"set it to {minimum} or leave it out")  # fmt: skip
        )
