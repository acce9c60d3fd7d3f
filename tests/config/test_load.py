"""One schema from every format: the same tree in, the same config out; what is wrong is named."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import zinf_jax.config
from zinf_jax.config import Config, entries, load, markdown
from zinf_jax.config._files import parse_gin, parse_json
from zinf_jax.errors import ConfigError

TREE = {
    "train_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "bf16": {"enabled": True},
    "optimizer": {"type": "adamw", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "placement": {"weights": "nvme", "optimizer": "host"},
    "host_memory": "2GiB",
    "nvme_path": ["/a", "/b"],
    "streaming": {"lookahead": 3},
    "model": {"kwargs": {"width": 64, "names": ["x", "y"]}},
}
GIN = """
# the same, in gin
Config.train_batch_size = 16
Config.gradient_accumulation_steps = 2
bf16.enabled = True
Config.optimizer.type = "adamw"
optimizer.params = {"lr": %peak, "betas": (0.9, 0.95), "weight_decay": 0.1}
peak = 1e-4
placement.weights = "nvme"
placement.optimizer = "host"
Config.host_memory = "2GiB"
Config.nvme_path = ["/a", "/b"]
streaming.lookahead = 3
model.kwargs = {"width": 64, "names": ["x", "y"]}
"""


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_all_formats_give_the_same_config(tmp_path: Path) -> None:
    expected = load(TREE)
    assert load(write(tmp_path / "c.yaml", yaml.safe_dump(TREE))) == expected
    assert load(str(write(tmp_path / "c.json", json.dumps(TREE)))) == expected
    assert load(write(tmp_path / "c.gin", GIN)) == expected
    assert load(expected) is expected
    assert (expected.host_memory, expected.nvme_path, expected.precision) == (2 << 30, ("/a", "/b"), "bf16")


def test_the_source_dict_is_left_alone() -> None:
    tree = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}, "placement": {"optimizer": "host"}}
    before = json.dumps(tree)
    load(tree, overrides=["placement.optimizer=nvme", "zero_optimization.stage=2"])
    assert json.dumps(tree) == before


@pytest.mark.parametrize("tree", [{}, TREE, {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False,
                         "weight_decay": 0.1}}, "scheduler": {"type": "warmuplr"}, "train": {"steps": 7}}])  # fmt: skip
def test_the_dump_gives_the_same_config_back(tmp_path: Path, tree: dict[str, object]) -> None:
    config = load(tree)
    again = load(write(tmp_path / "c.yaml", config.to_yaml()))
    assert again.to_dict() == config.to_dict()


def test_json_comments_and_trailing_commas_keep_strings_and_positions() -> None:
    text = '{\n // one\n "a": "http://x/*y*/,}", # two\n /* three\n */ "b": [1, 2,],\n}'
    assert parse_json(text) == {"a": "http://x/*y*/,}", "b": [1, 2]}
    with pytest.raises(ConfigError, match="line 3, column 7"):
        parse_json('{\n // comment\n "a": oops}')


def test_gin_includes_macros_and_refusals(tmp_path: Path) -> None:
    write(tmp_path / "base.gin", "Config.seed = %n\nn = 1\nConfig.gradient_clipping = 0.5\n")
    path = write(tmp_path / "top.gin", "include 'base.gin'\nn = 7\nConfig.gradient_clipping = 1.0\n")
    config = load(path)
    assert (config.seed, config.gradient_clipping) == (7, 1.0)
    for text, message in (
        ("Config.seed = %missing", "not defined"),
        ("a = %b\nb = %a\nConfig.seed = %a", "defined by itself"),
        ("Config.seed = @foo()", "@foo"),
        ("scope/Config.seed = 1", "scope"),
        ("import os", "import"),
        ("Config.seed = (1", "line"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_gin(text, tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.yaml", "seed: 1\nseed: 2", "seed: given twice"),
        ("c.yaml", "streaming:\n  lookahead: 1\n  lookahead: 2", "line 2: lookahead: given twice"),
        ("c.json", '{"seed": 1, "seed": 2}', "seed: given twice"),
        ("c.yaml", "seed: [1", "line"),
        ("c.yaml", "- 1", "holds list at the top"),
        ("c.toml", "seed = 1", "must end in .yaml, .yml, .json, .gin"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load(write(tmp_path / name, text))
    assert name in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nope\.yaml.*No such file"):
        load(tmp_path / "nope.yaml")


@pytest.mark.parametrize("value", [10**9, 1e9, 1e9 + 0.0, "1e9", "1000000000", "1000000000.0"])
def test_integral_values_are_integers(value: object) -> None:
    """CF01."""
    config = load({"train_batch_size": value, "zero_optimization": {"stage3_max_live_parameters": value}})
    assert config.train_batch_size == 1_000_000_000
    assert type(config.train_batch_size) is int


@pytest.mark.parametrize("value", [0.5, 0.9 * 4096 * 4096, "0.5", "many", True, float("inf"), -1, None.__class__, [1]])
@pytest.mark.parametrize("path", ["train_batch_size", "streaming.lookahead", "zero_optimization.sub_group_size",
                                  "zero_optimization.stage3_prefetch_bucket_size", "aio.queue_depth"])  # fmt: skip
def test_fractions_and_other_things_are_refused_with_the_key_path(path: str, value: object) -> None:
    """CF01."""
    with pytest.raises(ConfigError) as caught:
        load({}, overrides={path: value})
    assert path in str(caught.value)
    if isinstance(value, str | float):
        assert repr(value) in str(caught.value)


@given(st.integers(0, 2**62))
def test_large_integers_keep_every_digit(value: int) -> None:
    assert load({"seed": str(value)}).seed == value


def test_floats_as_yaml_reads_them(tmp_path: Path) -> None:
    """YAML 1.1 reads 1e-5 as text and a bare off as false."""
    text = "optimizer: {type: adamw, params: {lr: 1e-5}}\nstreaming: {durability: off}\ngradient_clipping: 1"
    config = load(write(tmp_path / "c.yaml", text))
    assert config.optimizer is not None
    assert config.optimizer.params["lr"] == 1e-5
    assert config.streaming.durability == "off"


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"streamin": {}}, "streamin: unknown key; did you mean streaming"),
        ({"lookahead": 1}, "did you mean streaming.lookahead"),
        ({"streaming": {"lookahed": 1}}, "streaming.lookahed: unknown key; did you mean streaming.lookahead"),
        ({"streaming": {"train_batch_size": 1}}, r"did you mean train_batch_size \(at the top level\)"),
        ({"lr": 1}, "did you mean optimizer.params.lr"),
        ({"optimizer": {"type": "adam", "lr": 1}}, "did you mean optimizer.params.lr"),
        ({"xyzzy": 1}, "zinf config-reference"),
        ({"optimizer": {"type": "adam", "params": {"weight_decy": 1}}}, "did you mean 'weight_decay'"),
        ({"notes": ["x"]}, "notes"),
    ],
)
def test_unknown_keys_suggest_the_right_one(tree: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tree)


def test_every_problem_is_listed_with_value_and_remedy() -> None:
    with pytest.raises(ConfigError) as caught:
        load({"streaming": {"lookahead": -1, "max_in_flight": 0}, "host_memory": "2 Gips"})
    text = str(caught.value)
    assert text.startswith("3 problems")
    assert "streaming.lookahead = -1" in text
    assert "Schedule steps by which a fetch precedes its use" in text  # the key's reference entry
    assert "host_memory = '2 Gips'" in text
    assert "4GiB" in text


def test_overrides_win_and_are_checked() -> None:
    config = load(TREE, overrides=["streaming.lookahead=0", "optimizer.params.lr=3e-4", "nvme_path=[/c]"])
    assert config.streaming.lookahead == 0
    assert config.optimizer is not None
    assert config.optimizer.params["lr"] == 3e-4
    assert config.nvme_path == ("/c",)
    again = load(config, overrides={"streaming.lookahead": 5})
    assert (again.streaming.lookahead, config.streaming.lookahead) == (5, 0)
    for bad, message in (("lookahead", "KEY=VALUE"), ("train_batch_size.x=1", "is a value, not a section"),
                         ("streaming.lookahead=[1", "line")):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            load(TREE, overrides=[bad])


@pytest.mark.parametrize("value", ["step", "every_10", "off"])
def test_durability(value: str) -> None:
    assert load({"streaming": {"durability": value}}).streaming.durability == value


def test_yaml_reads_a_bare_off_as_false() -> None:
    assert load({"streaming": {"durability": False}}).streaming.durability == "off"


@pytest.mark.parametrize("value", ["every_0", "every", "steps", True])
def test_durability_that_is_not_one(value: Any) -> None:
    with pytest.raises(ConfigError, match="must be step, off or every_N"):
        load({"streaming": {"durability": value}})


def test_auto_durability_and_overlap_are_decided_when_the_run_is_set_up() -> None:
    found = load({"streaming": {"update_overlap": "auto", "durability": "auto"}}).streaming
    assert (found.update_overlap, found.durability) == (None, None)


def test_both_16_bit_formats_at_once_are_refused() -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        load({"bf16": {"enabled": True}, "fp16": {"enabled": True}})


def test_a_section_without_enabled_is_off_and_says_so() -> None:
    config = load({"fp16": {"loss_scale": 128}})
    assert config.precision == "fp32"
    assert any("fp16 is off" in note for note in config.notes)


def test_leaf_patterns() -> None:
    config = load({"trainable_patterns": ["lora", "head"], "frozen_patterns": "bias$"})
    names = ["a/lora_a", "head/kernel", "head/bias", "block/kernel"]
    assert [config.is_trainable(name) for name in names] == [True, True, False, False]
    with pytest.raises(ConfigError, match="regular expression"):
        load({"frozen_patterns": "("})


def test_gradient_dtype_follows_the_number_of_micro_batches() -> None:
    config = load({"bf16": {"enabled": True}})
    assert (str(config.resolve_gradient_dtype(1)), str(config.resolve_gradient_dtype(2))) == ("bfloat16", "float32")
    assert str(load({"bf16": {"enabled": True}, "gradient_dtype": "float16"}).resolve_gradient_dtype(4)) == "float16"


def test_the_config_cannot_be_changed() -> None:
    config = load({})
    with pytest.raises(Exception, match="frozen"):
        config.seed = 3
    assert Config().to_dict() == config.to_dict()


def test_every_key_is_documented() -> None:
    """CF06: meaning, values and default of every key; formulas where a size is chosen."""
    by_path = {entry.path: entry for entry in entries()}
    assert not [path for path, entry in by_path.items() if len(entry.text) < 15]
    for path in ("streaming.lookahead", "streaming.num_chunk_frames", "aio.queue_depth", "placement.optimizer"):
        assert " x " in by_path[path].text or "Bytes per parameter" in by_path[path].text
    assert dataclasses.asdict(by_path["aio.block_size"])["default"] == "1.00 MiB"


def test_the_reference_page_is_current() -> None:
    """Rewrite it with `zinf config-reference --markdown > zinf_jax/config/REFERENCE.md`."""
    assert (Path(zinf_jax.config.__file__).parent / "REFERENCE.md").read_text() == markdown()


@pytest.mark.parametrize("mesh", [{"data": -1}, {"fsdp": 0}, {"fsdp": -1, "tp": -1}, {"fsdp": 1.5}])
def test_meshes_that_cannot_be_made_are_refused(mesh: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="mesh"):
        load({"mesh": mesh})


@pytest.mark.parametrize("fraction", [0, 0.5, 1, 1.0])
def test_every_fraction_is_valid(fraction: float) -> None:
    """CF08."""
    config = load({"placement": {"optimizer": "nvme", "optimizer_fraction": fraction}, "streaming": {"chunk_bytes": 1}})
    assert config.placement.optimizer == ("nvme" if fraction else "device")
    for wrong in (-0.1, 1.1, "half", True):
        with pytest.raises(ConfigError, match=r"placement\.optimizer_fraction"):
            load({}, overrides={"placement.optimizer_fraction": wrong})
