"""The training program, with the real trainer: what it leaves behind, stopping, and going on."""

import io
import json
import shlex
import signal

import numpy as np
import pytest
from rich.console import Console

from zinf_jax import config as config_module
from zinf_jax.errors import ConfigError, ResumeError
from zinf_jax.train import loop, recipe
from zinf_jax.train.metrics import read_metrics
from zinf_jax.train.shutdown import Shutdown

TEXT = {"tokenizer": "bytes", "pattern": "*.txt", "valid_every": 4, "valid_rows": 4}


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    for i in range(8):
        (folder / f"{i}.txt").write_text(f"the {i}th file says: abcabcabc, over and over again.\n" * 8)
    return folder


@pytest.fixture
def make_config(source):
    def make(*, data=None, factory=None, durability="step", **train):
        extra = train.pop("extra", {})
        return config_module.load(
            {
                "train_batch_size": 4,
                "gradient_accumulation_steps": 2,
                "bf16": {"enabled": True},
                "gradient_clipping": 1.0,
                "streaming": {"durability": durability},
                "optimizer": {"type": "adamw", "params": {"lr": 1e-2}},
                "placement": {"weights": "nvme", "optimizer": "nvme", "gradients": "nvme", "residuals": "host"},
                "model": {"factory": "tests.train.tiny:model"},
                "data": {
                    "factory": factory or recipe.TEXT_FACTORY,
                    "kwargs": TEXT | {"source": str(source)} | (data or {}),
                },
                "train": {"steps": 6, "log_every": 2, "sample_tokens": 4, **train, "extra": extra},
            }
        )

    return make


def _run(config, run_dir, **kwargs):
    output = io.StringIO()
    summary = loop.run(config, run_dir=run_dir, console=Console(file=output, width=120), **kwargs)
    return summary, output.getvalue()


def _steps(run_dir):
    """What must be the same in equal runs."""
    return [(r["step"], r["loss"], r["grad_norm"]) for r in read_metrics(run_dir, "step")]


def test_a_run_leaves_what_people_want_to_see(make_config, tmp_path):
    summary, output = _run(make_config(tensorboard=True, extra={"valid_every": 4}), tmp_path / "run")
    assert (summary.status, summary.step, summary.num_steps, summary.num_skipped) == ("finished", 6, 6, 0)
    assert summary.loss_last < summary.loss_first and summary.valid_last < summary.valid_first
    assert summary.traffic.nvme_read > 0 and summary.traffic.nvme_written > 0 and summary.tokens_per_s > 0
    assert [r["step"] for r in read_metrics(tmp_path / "run", "step")] == [1, 2, 3, 4, 5, 6]
    assert [r["step"] for r in read_metrics(tmp_path / "run", "valid")] == [0, 4, 6]
    assert read_metrics(tmp_path / "run", "sample")[0]["text"] == summary.sample
    assert (tmp_path / "run" / "loss.png").read_bytes()[:4] == b"\x89PNG"
    assert list((tmp_path / "run" / "tensorboard").iterdir())
    figures = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert loop.report.from_figures(figures) == summary
    for text in (
        "step 6/6",
        "validation loss",
        "tokens per second",
        "bytes per parameter",
        "stalls",
        "planned",
        "tok/s",
    ):
        assert text in output
    assert summary.resume_command in output
    again = config_module.load(tmp_path / "run" / "config.yaml")
    assert again.to_dict() == make_config(tensorboard=True, extra={"valid_every": 4}).to_dict()


def test_a_resumed_run_equals_the_undisturbed_one(make_config, tmp_path):
    _run(make_config(), tmp_path / "whole")
    first, _ = _run(make_config(), tmp_path / "parts", steps=2)
    assert (first.status, first.step) == ("finished", 2)
    second, output = _run(make_config(), tmp_path / "parts", resume="auto")
    assert "resumed at step 2" in output and (second.step, second.num_steps) == (6, 4)
    assert _steps(tmp_path / "parts") == _steps(tmp_path / "whole")
    samples = [read_metrics(tmp_path / name, "sample")[-1]["text"] for name in ("whole", "parts")]
    assert samples[0] == samples[1]


def test_a_signal_ends_the_run_after_its_step_and_it_goes_on(make_config, tmp_path):
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    stopping = make_config(factory="tests.train.tiny:stopping_text", data={"signals": {"3": ["SIGTERM"]}})
    summary, output = _run(stopping, tmp_path / "run")
    assert (summary.status, summary.step, summary.sample) == ("stopped", 3, None)
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert f"go on with: {summary.resume_command}" in output
    command = shlex.split(summary.resume_command)
    assert command[-4:] == ["--run-dir", str(tmp_path / "run"), "--resume", "auto"]
    config = config_module.load(command[command.index("train") + 1])
    config = config_module.load(config, {"data": {"factory": recipe.TEXT_FACTORY, "kwargs": make_config().data.kwargs}})
    _run(config, tmp_path / "run", resume="auto")
    _run(make_config(), tmp_path / "whole")
    assert _steps(tmp_path / "run") == _steps(tmp_path / "whole")


def test_a_signal_during_set_up_ends_the_run_before_its_first_step(make_config, tmp_path):
    stopping = {"factory": "tests.train.tiny:stopping_model", "kwargs": {"signal_name": "SIGINT"}}
    config = config_module.load(make_config(), {"model": stopping})
    summary, _ = _run(config, tmp_path / "run")
    assert (summary.status, summary.step, summary.num_steps) == ("stopped", 0, 0)
    assert read_metrics(tmp_path / "run") == []
    _run(make_config(), tmp_path / "run", resume="auto", steps=1)
    assert [step for step, *_ in _steps(tmp_path / "run")] == [1]


def test_a_second_signal_interrupts():
    with Shutdown() as shutdown:
        signal.raise_signal(signal.SIGTERM)
        assert shutdown.requested
        with pytest.raises(KeyboardInterrupt, match="second SIGINT"):
            signal.raise_signal(signal.SIGINT)


def test_a_time_limit_ends_the_run_with_its_sample(make_config, tmp_path):
    summary, output = _run(make_config(extra={"max_minutes": 1e-9}), tmp_path / "run")
    assert (summary.status, summary.step) == ("stopped", 0)
    assert output.count("stopped after 1e-09 minutes of training") == 1
    assert "--resume auto" in summary.resume_command and "--steps" not in summary.resume_command


def test_checkpoints_are_kept_as_asked_and_can_be_gone_back_to(make_config, tmp_path):
    config = make_config(save_every=1, sample_tokens=0, extra={"keep_last": 2}, durability="off")
    _run(config, tmp_path / "run", steps=5)
    folder = tmp_path / "run" / "checkpoints"
    assert sorted(p.name for p in folder.iterdir()) == ["step_00000003", "step_00000004"]
    before = _steps(tmp_path / "run")
    summary, _ = _run(config, tmp_path / "run", resume=str(folder / "step_00000003"), steps=5)
    assert summary.num_steps == 2 and _steps(tmp_path / "run") == before
    names = sorted(p.name for p in folder.iterdir())
    assert names[1:] == ["step_00000003", "step_00000004"] and names[0].startswith(".abandoned-step_00000004")


def test_steps_are_kept_in_place_as_asked_and_can_be_gone_back_to(make_config, tmp_path):
    config = make_config(save_every=1, sample_tokens=0, extra={"keep_last": 2, "keep_every": 2})
    _run(config, tmp_path / "run", steps=6)
    folder = tmp_path / "run" / "retained"
    assert sorted(p.name for p in folder.iterdir()) == [f"step_0000000{n}.json" for n in (2, 4, 5)]
    before = _steps(tmp_path / "run")
    summary, _ = _run(config, tmp_path / "run", resume=str(folder / "step_00000004.json"), steps=6)
    assert summary.num_steps == 2 and _steps(tmp_path / "run") == before


def test_a_run_without_a_step_left_says_how_it_went(make_config, tmp_path, monkeypatch):
    wish = tmp_path / "t.json"
    summary, output = _run(make_config(), tmp_path / "run", steps=1, trace=wish)
    missed = f"no trace in {wish}: it was to begin with step 2 of this process, which took "
    assert missed + "1" in output and not wish.exists()

    def refuse(*args, **kwargs):
        raise AssertionError("set up for nothing")

    monkeypatch.setattr(loop, "make_trainer", refuse)
    again, output = _run(make_config(), tmp_path / "run", steps=1, resume="auto", trace=wish)
    assert again == summary and "finished at step 1" in output and missed + "0" in output


def test_a_run_is_not_overwritten_unless_asked(make_config, tmp_path):
    config = make_config(sample_tokens=0)
    _run(config, tmp_path / "run", steps=1)
    before = _steps(tmp_path / "run")
    with pytest.raises(ResumeError, match="holds a run at step 1"):
        _run(config, tmp_path / "run", steps=2)
    assert _steps(tmp_path / "run") == before
    _run(config, tmp_path / "run", steps=2, overwrite=True)
    assert [step for step, *_ in _steps(tmp_path / "run")] == [1, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": None}, "set train.steps, or pass --steps"),
        ({"extra": {"valid_evry": 3}}, "train.extra.valid_evry: unknown option; there are keep_every"),
        ({"extra": {"top_k": "many"}}, "train.extra.top_k: .* got 'many'"),
        ({"extra": {"keep_last": 0}}, "keep_last >= 1"),
    ],
)
def test_what_cannot_work_is_named_before_anything_is_made(make_config, tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        _run(make_config(**change), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_batch_size_is_needed(make_config, tmp_path):
    config = make_config().model_copy(update={"train_batch_size": None})
    with pytest.raises(ConfigError, match="set train_batch_size"):
        _run(config, tmp_path / "run")


def test_a_plan_is_that_of_the_run(make_config, tmp_path):
    planned = loop.plan(make_config())
    _, output = _run(make_config(), tmp_path / "run", steps=1)
    assert planned.summary() in output


@pytest.mark.parametrize(
    ("durability", "saved"), [("off", "checkpoints/step_00000001"), ("step", "retained/step_00000001.json")]
)
def test_text_is_generated_from_a_run_and_from_what_it_saved(make_config, tmp_path, capsys, durability, saved):
    _run(make_config(save_every=1, sample_tokens=0, durability=durability), tmp_path / "run", steps=2)
    files = sorted(tmp_path.rglob("*"))
    texts = []
    for path in (tmp_path / "run", tmp_path / "run", tmp_path / "run" / saved):
        loop.generate(path, "the ", num_tokens=8, seed=3)
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and all(text.startswith("the ") and text.endswith("\n") for text in texts)
    assert sorted(tmp_path.rglob("*")) == files
    with pytest.raises(ResumeError, match=r"no config\.yaml"):
        loop.generate(tmp_path, "the ")


def test_losses_are_drawn_and_averaged(tmp_path):
    assert loop.report.plot_losses(tmp_path) is None
    assert loop.report.mean_last([]) is None
    assert loop.report.mean_last(list(np.arange(20.0))) == 14.5
