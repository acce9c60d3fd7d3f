"""DeepSpeed files run as they are: every key is mapped, noted with its reason, or refused with the right one."""

import json
from pathlib import Path
from typing import Any

import pytest

from zinf_jax.config import Config, deepspeed_rows, entries, load
from zinf_jax.config._deepspeed_keys import KEYS, OLD_SPELLINGS, RENAMED_TOP
from zinf_jax.errors import ConfigError

# As published guides have them, comments included.
ALL_ON_NVME = """{
  // as published guides to ZeRO-Infinity show it: everything on NVMe
  "zero_optimization": {
    "stage": 3,
    "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": true, "buffer_count": 5,
                          "fast_init": false},
    "offload_param": {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": true, "buffer_count": 5,
                      "buffer_size": 1e8, "max_in_cpu": 1e9},
    "overlap_comm": true, "contiguous_gradients": true, "sub_group_size": 1e9, "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9
  },
  "fp16": {"enabled": true},
  "aio": {"block_size": 1048576, "queue_depth": 8, "thread_count": 1, "single_submit": false, "overlap_events": true}
}"""
ON_HOST = """{
  "train_batch_size": "auto", "gradient_accumulation_steps": 1,
  "optimizer": {"type": "Adam", "params": {"lr": 1e-5}},
  "fp16": {"enabled": true, "initial_scale_power": 15},
  "zero_optimization": {
    "stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": true}, "contiguous_gradients": true,
    "sub_group_size": 1e9, "reduce_bucket_size": 50000000, "stage3_prefetch_size": 5,
    "stage3_param_persistence_threshold": 100000, "stage3_max_live_params": 1000000000,
    "stage3_max_unused_params": 1000000000
  }
}"""
HF_ALL_AUTO = """{
  "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1},
  "bf16": {"enabled": "auto"},
  "optimizer": {"type": "AdamW", "params": {"lr": 2e-5, "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
  "scheduler": {"type": "WarmupLR",
                "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
  "zero_optimization": {"stage": 2, "cpu_offload": true, "allgather_partitions": true, "allgather_bucket_size": 2e8,
                        "reduce_scatter": true, "reduce_bucket_size": "auto"},
  "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 2000,
  "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": false
}"""


def from_text(tmp_path: Path, text: str) -> Config:
    (tmp_path / "ds.json").write_text(text)
    return load(tmp_path / "ds.json")


def at(path: str, value: Any) -> dict[str, Any]:
    """The smallest tree that holds `value` at `path`."""
    for part in reversed(path.split(".")):
        value = {part: value}
    return value


def has_auto(tree: Any) -> bool:
    if isinstance(tree, dict):
        return any(map(has_auto, tree.values()))
    return any(map(has_auto, tree)) if isinstance(tree, list | tuple) else tree == "auto"


def test_everything_on_nvme(tmp_path: Path) -> None:
    config = from_text(tmp_path, ALL_ON_NVME)
    placement = config.placement
    assert (placement.weights, placement.optimizer, placement.gradients) == ("nvme", "nvme", None)
    assert placement.weights_host_cache == 2 * 10**9  # max_in_cpu elements of fp16
    assert (config.nvme_path, config.pin_memory, config.partitioning.stage) == (("/local_nvme",), None, 3)
    assert config.streaming.page_bytes == 2 * 10**8  # buffer_size elements of fp16
    assert (config.precision, config.aio.queue_depth) == ("fp16", 8)
    assert any("sub_group_size" in note and "upper limit" in note for note in config.notes)


def test_old_spellings_on_host(tmp_path: Path) -> None:
    config = from_text(tmp_path, ON_HOST)
    placement = config.placement
    assert (placement.weights, placement.optimizer, placement.gradients) == ("device", "host", "host")
    assert (config.train_batch_size, config.fp16.initial_scale_power) == (None, 15)
    assert any("stage3_prefetch_size is another spelling" in note for note in config.notes)


def test_a_file_full_of_auto(tmp_path: Path) -> None:
    config = from_text(tmp_path, HF_ALL_AUTO)
    assert config.precision == "fp32"
    assert config.optimizer is not None
    assert config.scheduler is not None
    assert config.optimizer.params["betas"] == (0.9, 0.999)
    assert config.scheduler.params["warmup_max_lr"] == 2e-5
    assert (config.gradient_clipping, config.train.log_every, config.placement.optimizer) == (1.0, 2000, "host")
    assert not has_auto(config.to_dict())


def test_misplaced_sections_are_errors() -> None:
    """CF03, NV13."""
    with pytest.raises(ConfigError, match=r"did you mean zero_optimization\.offload_optimizer"):
        load({"zero_optimization": {"stage": 3}, "offload_optimizer": {"device": "cpu"}})
    with pytest.raises(
        ConfigError, match=r"zero_optimization\.aio: unknown key; did you mean aio \(at the top level\)"
    ):
        load({"zero_optimization": {"stage": 3, "aio": {"block_size": 4096}}})
    with pytest.raises(ConfigError, match=r"did you mean zero_optimization\.stage3_max_live_parameters"):
        load({"zero_optimization": {"stage3_max_live_parameter": 1}})


def test_deprecated_booleans_map_to_the_same_config() -> None:
    """CF03."""
    new = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    for spelling in ("cpu_offload_param", "cpu_offload_params"):
        old = load({"zero_optimization": {"stage": 3, "cpu_offload": True, spelling: True}})
        assert old.to_dict() == load({"zero_optimization": new}).to_dict()
        assert sum("deprecated" in note for note in old.notes) == 2
    for both in ({"cpu_offload": True, "offload_optimizer": {"device": "cpu"}},
                 {"cpu_offload_params": True, "offload_param": {"device": "nvme"}}):  # fmt: skip
        with pytest.raises(ConfigError, match="both are given"):
            load({"zero_optimization": {"stage": 3, **both}})


def test_two_spellings_of_one_key_are_refused() -> None:
    with pytest.raises(ConfigError, match="two spellings"):
        load({"zero_optimization": {"stage3_prefetch_size": 1, "stage3_prefetch_bucket_size": 1}})
    with pytest.raises(ConfigError, match="two spellings"):
        load({"bf16": {"enabled": True}, "bfloat16": {"enabled": True}})
    assert load({"bfloat16": {"enabled": True}}).precision == "bf16"


@pytest.mark.parametrize(
    ("optimizer", "minimum"),
    [({"type": "Adam"}, 4), ({"type": "Lion"}, 3), ({"type": "Adagrad"}, 3), ({"type": "SGD"}, 2),
     ({"type": "SGD", "params": {"momentum": 0.9}}, 3)],
)  # fmt: skip
def test_too_few_buffers_for_the_optimizer(optimizer: dict[str, Any], minimum: int) -> None:
    """CF06."""

    def config(count: int) -> Config:
        offload = {"device": "nvme", "nvme_path": "/x", "buffer_count": count}
        return load({"optimizer": optimizer, "zero_optimization": {"stage": 3, "offload_optimizer": offload}})

    config(minimum)
    with pytest.raises(
        ConfigError, match=rf"buffer_count = {minimum - 1}: the minimum for .* is {minimum} \(parameter"
    ):
        config(minimum - 1)


@pytest.mark.parametrize("path", [*KEYS, *OLD_SPELLINGS, *RENAMED_TOP, *(entry.path for entry in entries())])
def test_auto_is_resolved_or_refused(path: str) -> None:
    """CF02: for every key."""
    extra = {"optimizer": {"type": "adam"}} if path.startswith("optimizer.") and path != "optimizer.type" else {}
    extra |= {"scheduler": {"type": "WarmupLR"}} if path.startswith("scheduler.") and path != "scheduler.type" else {}
    if path.endswith((".params", ".kwargs", ".extra", "mesh")) or path in RENAMED_TOP:
        return  # sections
    try:
        config = load(extra, overrides={path: "auto"})
    except ConfigError as error:
        assert path in str(error) or path.rpartition(".")[2] in str(error)
        assert path in ("optimizer.type", "scheduler.type", "train.steps")
    else:
        assert not has_auto(config.to_dict())


@pytest.mark.parametrize("params", ["lr", "learning_rate", "momentum", "betas", "eps", "weight_decay"])
def test_auto_in_optimizer_params(params: str) -> None:
    """CF02: the learning rate is nobody's to guess."""
    tree = {"optimizer": {"type": "SGD" if params == "momentum" else "AdamW", "params": {params: "auto"}}}
    if params in ("lr", "learning_rate"):
        with pytest.raises(ConfigError, match=r"lr cannot be 'auto'"):
            load(tree)
    else:
        assert not has_auto(load(tree).to_dict())


@pytest.mark.parametrize("key", KEYS.values(), ids=lambda key: key.path)
def test_no_key_is_silently_ignored(key: Any) -> None:
    """Each documented key changes the config, leaves a note, or is refused."""
    values: dict[str, Any] = {"count": 7, "bool": True, "number": 0.5, "text": "cpu", "paths": "/x", "dtype": "fp32"}
    value = values.get(key.kind, {"enabled": True, "cpu_checkpointing": True})
    value = {"stage": 2, "thread_count": 3}.get(key.path.rpartition(".")[2], value)
    context: dict[str, Any] = {"zero_optimization": {"stage": 3}} if key.path.startswith("zero_") else {}
    section = key.path.rpartition(".")[0]
    context |= {"optimizer": {"type": "adam"}} if section == "optimizer" else {}
    if section.endswith(("offload_param", "offload_optimizer")) and not key.path.endswith("device"):
        context["zero_optimization"][section.rpartition(".")[2]] = {"device": "nvme"}
    base = load(context)
    try:
        config = load(context, overrides={key.path: value})
    except ConfigError as error:
        assert key.path in str(error)
        assert key.refuse is not None
    else:
        assert config.to_dict() != base.to_dict() or set(config.notes) - set(base.notes)
        if key.note:
            assert any(key.note in note for note in config.notes)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"zero_optimization": {"zero_quantized_weights": True}}, "quantises"),
        ({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, "stale"),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "stops moving"),
        ({"optimizer": {"type": "OneBitAdam"}}, "compresses gradients"),
        ({"optimizer": {"type": "Adam", "params": {"amsgrad": True}}}, "amsgrad is not supported"),
        ({"optimizer": {"type": "Adam", "params": {"bias_correction": False}}}, "bias correction"),
        ({"gradient_allreduce_op": "sum"}, "averaged"),
        ({"tensor_parallel": {"autotp_size": 4}}, "mesh"),
        ({"torch_autocast": {"enabled": True}}, "bf16 or fp16"),
        ({"data_efficiency": {"enabled": True}}, "data factory"),
        ({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0, "cycle_max_lr": 1}}}, "cycle_momentum"),
        ({"scheduler": {"type": "WarmupDecayLR"}}, "total_num_steps"),
        ({"zero_optimization": {"stage": 4}}, r"zero_optimization\.stage"),
        ({"zero_optimization": {"offload_optimizer": {"device": "gpu"}}}, "'cpu', 'nvme' or 'none'"),
        ({"zero_optimization": {"offload_optimizer": "cpu"}}, "is a section"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}, "placement": {"weights": "nvme"}},
         "sets placement.weights, which is given too"),
        ({"steps_per_print": 5, "train": {"log_every": 6}}, "keep one"),
    ],
)  # fmt: skip
def test_what_would_change_the_training_is_refused(tree: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tree)


def test_harmless_values_of_refused_keys_are_noted() -> None:
    config = load({"tensor_parallel": {"autotp_size": 1}, "zero_optimization": {"zero_quantized_weights": False},
                   "gradient_allreduce_op": "mean", "amp": {"enabled": False}})  # fmt: skip
    assert sum("has no meaning here: it is off" in note for note in config.notes) == 4


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_element_counts_become_bytes(precision: str) -> None:
    weight, record = {"fp32": (4, 8), "bf16": (2, 10), "fp16": (2, 12)}[precision]
    offload = {"device": "nvme", "nvme_path": "/x"}
    zero = {"stage": 3, "sub_group_size": 10**6, "stage3_prefetch_bucket_size": 0,
            "offload_optimizer": offload | {"buffer_size": 5 * 10**5},
            "offload_param": offload | {"buffer_size": 10**6, "max_in_cpu": 10**7}}  # fmt: skip
    tree = {"zero_optimization": zero, "optimizer": {"type": "Adam"}}
    config = load(tree if precision == "fp32" else tree | {precision: {"enabled": True}})
    streaming = config.streaming
    assert (streaming.chunk_bytes, streaming.page_bytes, streaming.lookahead) == (record * 5 * 10**5, weight * 10**6, 0)
    assert config.placement.weights_host_cache == weight * 10**7


def test_weights_for_nvme_are_on_nvme_by_default() -> None:
    config = load({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}})
    assert config.placement.weights_host_cache == 0
    assert any("1e9 elements" in note for note in config.notes)
    assert any("run directory" in note for note in config.notes)


def test_two_drives_and_a_fraction() -> None:
    offload = {"device": "nvme", "nvme_path": "/a", "ratio": 0.5}
    config = load({"zero_optimization": {"stage": 3, "offload_optimizer": offload,
                                         "offload_param": {"device": "nvme", "nvme_path": "/b"}}})  # fmt: skip
    assert (config.nvme_path, config.placement.optimizer_fraction) == (("/a", "/b"), 0.5)


@pytest.mark.parametrize(("pins", "expected"), [((True, True), None), ((True, False), None), ((False, False), False)])
def test_pinning_is_never_an_error_in_deepspeed_files(pins: tuple[bool, bool], expected: bool | None) -> None:
    """Published files ask for it on machines whose RLIMIT_MEMLOCK is 8 MiB."""
    param, optimizer = ({"device": "cpu", "pin_memory": pin} for pin in pins)
    config = load({"zero_optimization": {"stage": 3, "offload_param": param, "offload_optimizer": optimizer}})
    assert config.pin_memory is expected
    assert config.notes or expected is False


def test_stage_defaults_to_deepspeeds_only_in_its_files() -> None:
    assert load({"zero_optimization": {}}).partitioning.stage == 0
    assert load({"zero_optimization": True}).partitioning.stage == 1
    assert load({}).partitioning.stage == 3


def test_max_grad_norm_is_clipping() -> None:
    config = load({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 0.3}}})
    assert config.gradient_clipping == 0.3


def test_the_reference_names_a_fate_for_every_key() -> None:
    assert len(deepspeed_rows()) == len(KEYS)
    assert all(how and fate for _, fate, how in deepspeed_rows())


def test_a_resolved_file_is_native_and_round_trips(tmp_path: Path) -> None:
    for text in (ALL_ON_NVME, ON_HOST, HF_ALL_AUTO):
        config = from_text(tmp_path, text)
        assert load(json.loads(json.dumps(config.to_dict()))).to_dict() == config.to_dict()
        (tmp_path / "c.yaml").write_text(config.to_yaml())
        assert load(tmp_path / "c.yaml").to_dict() == config.to_dict()
