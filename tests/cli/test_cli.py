"""The commands, called as a user calls them."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from zinf_jax.cli import _bench, _run, app
from zinf_jax.config import Config, entries, load


def zinf(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text("optimizer: {type: adamw, params: {lr: 1e-4}}\ntrain: {steps: 5}\n")
    return path


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, tuple[Any, ...], dict[str, Any]]]:
    """What the commands ask of the training program, which has tests of its own."""
    recorded: list[tuple[str, str, tuple[Any, ...], dict[str, Any]]] = []
    monkeypatch.setattr(
        _run, "call", lambda module, name, *args, **kwargs: recorded.append((module, name, args, kwargs))
    )
    return recorded


def test_help_lists_the_commands_that_exist_and_their_examples() -> None:
    result = zinf("--help")
    assert result.exit_code == 0
    commands = ("train", "plan", "generate", "timeline", "report", "bench-io", "verify", "clean", "config")
    for command in (*commands, "config-reference"):
        assert command in result.output
        shown = zinf(command, "--help")
        assert shown.exit_code == 0
        assert f"zinf {command}" in shown.output  # an example to copy
    for reserved in ("estimate", "export"):
        assert reserved not in result.output


def test_the_console_script_shows_help_quickly_enough_to_be_used() -> None:
    done = subprocess.run([sys.executable, "-m", "zinf_jax.cli", "-h"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert "bench-io" in done.stdout


@pytest.mark.parametrize("command", ["train", "plan", "config"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"zero_optimization": {"stage": 3}, "offload_optimizer": {}}', "zero_optimization.offload_optimizer?"),
        ('{"streaming": {"lookahead": -1}}', "streaming.lookahead = -1"),
        ("{", "line 1"),
    ],
)  # fmt: skip
def test_config_errors_are_one_message(tmp_path: Path, command: str, text: str, message: str) -> None:
    (tmp_path / "bad.json").write_text(text)
    result = zinf(command, tmp_path / "bad.json")
    assert result.exit_code == 2
    assert "error:" in result.stderr
    assert message in result.stderr
    assert "Traceback" not in result.output
    shown = zinf("--traceback", command, tmp_path / "bad.json")
    assert shown.exit_code == 1
    assert message in str(shown.exception)


def test_a_missing_file_and_a_wrong_override_are_named(config_file: Path) -> None:
    assert "nope.yaml" in zinf("config", "nope.yaml").stderr
    result = zinf("config", config_file, "-s", "optimizer.params.lrr=1")
    assert result.exit_code == 2
    assert "did you mean 'lr'" in result.stderr


def test_config_prints_what_was_understood(tmp_path: Path) -> None:
    source = tmp_path / "ds.json"
    source.write_text('{"zero_optimization": {"stage": 3, "overlap_comm": true, "cpu_offload": true}} // all')
    result = zinf("config", source, "--set", "streaming.lookahead=3")
    assert result.exit_code == 0
    assert "# zero_optimization.overlap_comm has no meaning here: " in result.stdout
    assert yaml.safe_load(result.stdout)["placement"]["optimizer"] == "host"
    (tmp_path / "again.yaml").write_text(result.stdout)
    assert load(tmp_path / "again.yaml").to_dict() == load(source, ["streaming.lookahead=3"]).to_dict()


def test_train_hands_over_config_directory_and_start(
    config_file: Path, tmp_path: Path, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert zinf("train", config_file, "--steps", 7, "-s", "seed=3").exit_code == 0
    assert zinf("train", config_file, "-d", "elsewhere", "--resume", "auto").exit_code == 0
    assert zinf("train", config_file, "-r", "saved", "--overwrite").exit_code == 0
    (module, name, (config,), first), (_, _, _, second), (_, _, _, third) = calls
    assert (module, name) == ("zinf_jax.train.loop", "run")
    assert isinstance(config, Config)
    assert (config.seed, config.train.steps) == (3, 7)
    assert first == {"run_dir": Path("runs/small"), "resume": None, "steps": 7, "overwrite": False}
    assert second == {"run_dir": Path("elsewhere"), "resume": "auto", "steps": None, "overwrite": False}
    assert third == {"run_dir": Path("runs/small"), "resume": "saved", "steps": None, "overwrite": True}


def test_train_hands_over_what_to_trace(config_file: Path, calls: list[Any]) -> None:
    assert zinf("train", config_file, "--trace", "t.json.gz").exit_code == 0
    assert zinf("train", config_file, "--trace", "t.json", "--trace-steps", 1, "--trace-start", 9).exit_code == 0
    found = [{name: value for name, value in call[3].items() if name.startswith("trace")} for call in calls]
    assert found == [
        {"trace": Path("t.json.gz"), "trace_steps": 3, "trace_start": 2},
        {"trace": Path("t.json"), "trace_steps": 1, "trace_start": 9},
    ]
    assert zinf("train", config_file, "--trace", "t.json", "--trace-steps", 0).exit_code == 2


def test_train_checks_paths_before_anything_else(config_file: Path, calls: list[Any]) -> None:
    """FS08."""
    result = zinf("train", config_file, "-s", "nvme_path=/no/such/drive")
    assert result.exit_code == 2
    assert "nvme_path = '/no/such/drive'" in result.stderr
    assert calls == []


def test_plan_and_generate_hand_over(config_file: Path, calls: list[Any]) -> None:
    assert zinf("plan", config_file).exit_code == 0
    assert zinf("generate", "runs/a", "def", "-n", 5, "--temperature", 0, "--top-k", 0, "--seed", 9).exit_code == 0
    assert [call[1] for call in calls] == ["plan", "generate"]
    assert calls[1][2] == (Path("runs/a"), "def")
    assert calls[1][3] == {"num_tokens": 5, "temperature": 0, "top_k": None, "seed": 9}


def test_a_small_run_from_plan_to_text(tmp_path: Path) -> None:
    """The real thing, from a DeepSpeed file with a model in it."""
    (tmp_path / "text").mkdir()
    for i in range(4):
        (tmp_path / "text" / f"{i}.txt").write_text(f"the {i}th file says: abcabcabc, over and over again.\n" * 8)
    text = {
        "tokenizer": "bytes",
        "pattern": "*.txt",
        "valid_every": 2,
        "valid_rows": 4,
        "source": str(tmp_path / "text"),
    }
    config, run_dir = tmp_path / "tiny.json", tmp_path / "run"
    tree = {
        "train_batch_size": 4, "bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}},
        "model": {"factory": "tests.train.tiny:model"}, "data": {"kwargs": text}, "train": {"sample_tokens": 2},
    }  # fmt: skip
    config.write_text("// a DeepSpeed file with a model\n" + json.dumps(tree))

    def call(*args: object) -> str:
        result = zinf("--traceback", *args)
        assert result.exit_code == 0, (result.exception, result.output[-2000:])
        return result.stdout

    planned = call("plan", config)
    assert "2 versions" in planned and "4 versions" in call("plan", config, "-s", "train.save_every=1")
    assert "NVMe per step" in planned
    assert "no max_in_cpu" in planned  # a note
    call("train", config, "-d", run_dir, "--steps", 2)
    refused = zinf("train", config, "-d", run_dir, "--steps", 3)  # a run lies there
    assert refused.exit_code == 1
    assert "resume" in refused.stderr
    call("train", run_dir / "config.yaml", "-d", run_dir, "--steps", 3, "--resume", "auto")
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if record.get("kind") == "step"] == [1, 2, 3]
    assert call("generate", run_dir, "abc", "-n", 4).startswith("abc")


def test_report_says_what_is_there_and_what_is_not(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    result = zinf("report", tmp_path, missing, "--json")
    assert result.exit_code == 0
    facts = {(fact["section"], fact["name"]): fact for fact in json.loads(result.stdout)["facts"]}
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", facts["software", "jax"]["value"])
    assert facts["compute", "device 0"]["value"]
    assert any(name in facts["compute", "optimizer kernel"]["value"] for name in ("portable", "avx2", "avx512"))
    for name in ("cgroup limit", "memlock soft / hard", "huge pages", "available"):
        assert facts["memory", name]["value"]
    assert facts["I/O", "kernel AIO events"]["value"]
    section = f"I/O in {tmp_path}"
    engine = facts[section, "engine"]
    assert engine["value"] == "libaio" or engine["advice"]  # a lesser engine says how to get the better one
    assert facts[section, "O_DIRECT"]["value"].startswith(("yes", "no"))
    assert facts[section, "free"]["value"]
    assert facts[f"I/O in {missing}", "usable"]["value"] == "no"
    assert list(tmp_path.iterdir()) == []  # the probe left nothing


def test_report_for_people_with_a_config(tmp_path: Path) -> None:
    (tmp_path / "drive").mkdir()
    source = tmp_path / "ds.json"
    offload = {"device": "nvme", "nvme_path": str(tmp_path / "drive"), "fast_init": True}
    source.write_text(json.dumps({"zero_optimization": {"stage": 3, "offload_optimizer": offload}}))
    result = zinf("report", "--config", source)
    assert result.exit_code == 0
    unwrapped = re.sub(r"\s+", "", result.stdout)
    assert str(tmp_path / "drive") in unwrapped
    assert "offload_optimizer.fast_inithasnomeaninghere" in unwrapped


def test_bench_io_prints_a_section_that_loads(tmp_path: Path) -> None:
    result = zinf("bench-io", tmp_path, "--quick", "--size", "2MiB")
    assert result.exit_code == 0
    section = yaml.safe_load(result.stdout[result.stdout.index("aio:") :])
    assert load(section).aio.block_size == 1 << 20
    assert list(tmp_path.iterdir()) == []
    found = json.loads(zinf("bench-io", tmp_path, "--quick", "--size", "2MiB", "--repeats", 2, "--json").stdout)
    assert [point["queue_depth"] for point in found["points"]] == [8, 32]
    assert all(point["read_gbps"] > 0 for point in found["points"])
    assert load({"aio": found["aio"]}).aio.queue_depth in (8, 32)


@pytest.mark.parametrize(
    ("args", "message"),
    [(["/no/such/dir"], "No such file"),
     (["/", "--size", "many"], "not a number of bytes"), (["/", "--size", "1k"], "1 MiB")],
)  # fmt: skip
def test_bench_io_refuses_what_cannot_be_measured(args: list[str], message: str) -> None:
    result = zinf("bench-io", *args)
    assert result.exit_code == 2
    assert message in re.sub(r"[\s│]+", " ", result.stderr)


def point(depth: int, read: float, write: float, **changes: Any) -> _bench.Point:
    values = {"block_size": 1 << 20, "queue_depth": depth, "thread_count": 1, "read_gbps": read, "write_gbps": write,
              "mixed_gbps": read, "engine": "libaio", "direct": True}  # fmt: skip
    return _bench.Point(**{**values, **changes})


def test_the_best_setting_is_the_smallest_among_equals() -> None:
    points = (point(4, 1.0, 1.0), point(8, 2.0, 1.97), point(32, 2.0, 2.0), point(128, 2.01, 2.01))
    assert _bench.best(points).queue_depth == 8
    assert _bench.best((point(8, 1.0, 9.0), point(32, 2.0, 2.0))).queue_depth == 32  # both directions count
    assert any("faster than 4" in line for line in _bench.advice(points, ""))


def test_advice_follows_from_what_was_found() -> None:
    assert not _bench.advice((point(8, 2.0, 2.0),), "")
    lines = _bench.advice((point(8, 2.0, 0.5, engine="threads_buffered", direct=False),), "install libaio-dev")
    assert any("install libaio-dev" in line for line in lines)
    assert any("page cache" in line for line in lines)
    assert any("Writes are much slower" in line for line in lines)
    assert any("memory, not a drive" in line for line in _bench.advice((point(8, 40.0, 30.0),), ""))


def test_the_reference_lists_every_key_once_and_finds_by_word() -> None:
    everything = zinf("config-reference", "--markdown").stdout
    for entry in entries():
        assert everything.count(f"| `{entry.path}` |") == 1
    found = zinf("config-reference", "max_in_cpu", "lookahead").stdout
    assert "streaming.lookahead" in found
    assert "zero_optimization.offload_param.max_in_cpu" in found
    assert "gradient_clipping" not in found
    assert zinf("config-reference", "xyzzy").exit_code == 2
