"""`zinf timeline` and `zinf train --trace`, from a run to its picture."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from zinf_jax.cli import app
from zinf_jax.stream.trace import Event, Lane, StepMark, Trace
from zinf_jax.stream.trace_file import read_chrome, write_chrome


def zinf(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    events = (
        Event(Lane.DEVICE_COMPUTE, "forward block_0", 1.0, 1.5, {}),
        Event(Lane.NVME_READ, "weights of block_1", 2.0, 2.9, {}),
        Event(Lane.STALL, "read not complete", 2.5, 2.9, {"cause": "read not complete"}),
    )
    trace = Trace(events, (StepMark(4, 1.0, 2.0), StepMark(5, 2.0, 3.0)), {Lane.COLLECTIVES: "none: one device"}, 2)
    return write_chrome(trace, tmp_path / "t.json.gz")


def test_the_last_step_or_the_one_that_is_named(trace_file: Path) -> None:
    last, named = zinf("timeline", trace_file), zinf("timeline", trace_file, "--step", 4)
    assert last.exit_code == named.exit_code == 0
    assert "step 5, 1.000 s, is bound by: nvme read, busy 90% of it" in last.stdout
    assert "stalls: read not complete 0.400 s" in last.stdout
    assert "2 events found no room" in last.stdout
    assert "step 4, 1.000 s, is bound by: device compute, busy 50% of it" in named.stdout
    for lane in Lane:
        assert lane in last.stdout


@pytest.mark.parametrize("suffix", ["html", "png"])
def test_pictures(trace_file: Path, tmp_path: Path, suffix: str) -> None:
    result = zinf("timeline", trace_file, "-o", tmp_path / f"step.{suffix}")
    assert result.exit_code == 0
    assert "picture: " in result.stdout
    assert (tmp_path / f"step.{suffix}").stat().st_size > 1000


def test_mistakes_are_one_message(trace_file: Path, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    for args, message in (
        ((trace_file, "--step", 9), "holds no step 9: it holds 4, 5"),
        ((tmp_path / "missing.json",), "missing.json"),
        ((tmp_path / "other.json",), "is no trace"),
        ((trace_file, "-o", "step.doc"), "step.doc"),
    ):
        result = zinf("timeline", *args)
        assert result.exit_code == 2, result.output
        assert message in result.stderr and "Traceback" not in result.output


def test_from_a_run_to_its_timeline(tmp_path: Path) -> None:
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
    config, run_dir, path = tmp_path / "tiny.json", tmp_path / "run", tmp_path / "t.json.gz"
    tree = {
        "train_batch_size": 4, "optimizer": {"type": "adamw", "params": {"lr": 1e-2}}, "nvme_tbw": 600,
        "placement": {"weights": "nvme", "optimizer": "nvme", "gradients": "nvme"},
        "model": {"factory": "tests.train.tiny:model"}, "data": {"kwargs": text}, "train": {"sample_tokens": 0},
    }  # fmt: skip
    config.write_text(json.dumps(tree))

    def call(*args: object) -> str:
        result = zinf("--traceback", *args)
        assert result.exit_code == 0, (result.exception, result.output[-2000:])
        return result.stdout

    shown = call("train", config, "-d", run_dir, "--steps", 4, "--trace", path, "--trace-steps", 2)
    assert f"zinf timeline {path}" in shown
    assert "% of the 600 TB that the drive is rated for; at this rate that lasts" in shown
    assert [step.number for step in read_chrome(path).steps] == [2, 3]
    assert "step 3, " in call("timeline", path)
    call("train", config, "-d", run_dir, "--steps", 6, "--resume", "auto")
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    totals = [r["run_nvme_bytes_written"] for r in records if r["kind"] == "step"]
    written = [r["nvme_bytes_written"] for r in records if r["kind"] == "step"]
    assert len(totals) == 6 and all(n > 0 for n in written)
    for i in range(1, 6):  # also where a resumed process goes on
        assert totals[i] - totals[i - 1] >= written[i]
    assert json.loads((run_dir / "summary.json").read_text())["run_nvme_bytes_written"] >= totals[-1]
    refused = zinf("train", config, "-d", tmp_path / "other", "--steps", 4, "--trace", tmp_path)
    assert refused.exit_code == 2 and "is a directory" in refused.stderr
