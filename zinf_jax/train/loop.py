"""The whole of `zinf train`: from a config to a trained model, and what people want to see of it.

    RUN_DIR/config.yaml         the config as it was resolved; what the resume command names
    RUN_DIR/metrics.jsonl       one line a step; RUN_DIR/tensorboard/ the same
    RUN_DIR/data/               tokenizer and tokens, made once
    RUN_DIR/retained/           every `train.save_every` steps, in place; RUN_DIR/checkpoints/ with durability off
    RUN_DIR/loss.png, summary.json, sample.txt    (samples of all steps are in the metrics)

Guarantees:
  * SIGINT and SIGTERM: the step, validation batch or token in work is finished, the run is brought to rest, and the
    process ends normally; at any time from the first line of `run` on, set-up and compilation included (which end
    first). A second signal interrupts at once.
  * A resumed run takes the batches that would have come next, and its metrics hold each step once.
"""

import contextlib
import json
import secrets
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from zinf_jax.config import Config, check_paths, load
from zinf_jax.errors import ConfigError
from zinf_jax.models import ModelSpec
from zinf_jax.stream import heap
from zinf_jax.stream.stats import Stats, reset_peak_rss
from zinf_jax.train import report, wear
from zinf_jax.train.data import Data
from zinf_jax.train.metrics import MetricsWriter, read_metrics
from zinf_jax.train.offline import generate, plan
from zinf_jax.train.progress import Display, StepView
from zinf_jax.train.recipe import (
    CONFIG_FILE,
    LoopOptions,
    batch_size_of,
    build_data,
    build_model,
    first_batch,
    make_trainer,
    sample_tokens,
    with_saves,
)
from zinf_jax.train.report import Peak, Summary, Traffic
from zinf_jax.train.shutdown import Shutdown
from zinf_jax.train.source import CHECKPOINTS, find_latest
from zinf_jax.train.tracing import TraceWish, check_request
from zinf_jax.train.trainer import StepOutput, Trainer

SUMMARY_FILE = "summary.json"
SAMPLE_FILE = "sample.txt"


def run(
    config: Config,
    *,
    run_dir: str | Path,
    resume: str | None = None,
    overwrite: bool = False,
    steps: int | None = None,
    trace: str | Path | None = None,
    trace_steps: int = 3,
    trace_start: int = 2,
    console: Console | None = None,
    shutdown: Shutdown | None = None,
) -> Summary:
    """Trains, from the config's model, data and optimizer, until its last step or a signal.

    Args:
      config: A loaded config.
      run_dir: The run's directory.
      resume: None: a new run; "auto": go on if there is a run, else a new one; or a path of a checkpoint.
      overwrite: Start anew where a run lies.
      steps: Where the run ends, in steps since its beginning; None: `config.train.steps`.
      trace: File for a trace of some steps, or None; see `Trainer.trace`.
      trace_steps: How many.
      trace_start: The first of them, counted from 1 over the steps of this process.
      console: Where progress and tables go.
      shutdown: For callers that stop the run themselves.

    Returns:
      How it went.

    Raises:
      ConfigError, PlanError, OwnerError, ResumeError: it cannot start.
      StoreError, NonFiniteError: it broke off.
    """
    run_dir = Path(run_dir).absolute()
    console = console or Console()
    if steps is not None:
        config = load(config, {"train.steps": steps})
    num_steps = config.train.steps
    if num_steps is None:
        raise ConfigError("no number of steps: set train.steps, or pass --steps")
    options = LoopOptions.of(config.train.extra)
    check_paths(config, run_dir)
    wish = None if trace is None else TraceWish(check_request(trace, trace_steps), trace_steps, trace_start)
    done = _already_done(run_dir, num_steps) if resume == "auto" else None
    if done is not None:
        _show(console, done)
        _say_what_was_not_traced(console, wish, 0)
        return done
    config = with_saves(config)
    with shutdown or Shutdown() as flag, Display(console, num_steps, config.train.log_every) as display:
        spec = build_model(config)
        batch_size = batch_size_of(config)
        with make_trainer(config, spec, run_dir, resume=resume, overwrite=overwrite, progress=display.stage) as trainer:
            display.stage("data", 0, 1)
            data = build_data(config, spec, run_dir, batch_size)
            display.note(f"data: {data.description}")
            reset_peak_rss()  # What tokenising took is no part of the plan.
            trainer.prepare(first_batch(data))
            if trainer.user_state is not None:
                data.train.set_state(trainer.user_state["data"])
            _retire_checkpoints(run_dir / CHECKPOINTS, trainer.global_step, remove=overwrite)
            (run_dir / CONFIG_FILE).write_text(config.to_yaml())
            for line in (*config.notes, *_about(trainer, spec, run_dir)):
                display.note(line)
            written_before = 0 if resume is None or overwrite else wear.written_before(run_dir)
            with MetricsWriter(
                run_dir, start_step=trainer.global_step, tensorboard=config.train.tensorboard
            ) as metrics:
                loop = _Loop(config, options, spec, data, trainer, metrics, display, flag, run_dir, num_steps)
                loop.trace, loop.written_before = wish, written_before
                summary = loop.run()
    report.plot_losses(run_dir)
    (run_dir / SUMMARY_FILE).write_text(json.dumps(report.figures(summary), indent=2) + "\n")
    _show(console, summary)
    if summary.trace is None:
        _say_what_was_not_traced(console, wish, summary.num_steps)
    return summary


def _say_what_was_not_traced(console: Console, wish: TraceWish | None, num_steps: int) -> None:
    """So that nobody looks for a trace that was never begun."""
    if wish is not None:
        text = (
            f"no trace in {wish.path}: it was to begin with step {wish.start} of this process, which took {num_steps}"
        )
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def _about(trainer: Trainer, spec: ModelSpec, run_dir: Path) -> Iterator[str]:
    yield f"{spec.name}: {spec.num_params() / 1e6:.1f}M parameters; run directory {run_dir}"
    yield from trainer.plan.table().splitlines()
    yield from trainer.plan.summary().splitlines()
    hardware = trainer.plan.hardware
    if hardware.aliases and (advice := heap.advice(hardware.freed)):
        yield advice
    if trainer.global_step:
        yield f"resumed at step {trainer.global_step}"


def _already_done(run_dir: Path, num_steps: int) -> Summary | None:
    """How a run that needs no more steps went: saves setting everything up to do nothing."""
    path = run_dir / SUMMARY_FILE
    if not path.exists():
        return None
    source = find_latest(run_dir)
    if source is None or not source.in_place or source.manifest["step"] < num_steps:
        return None
    summary = report.from_figures(json.loads(path.read_text()))
    return summary if summary.step == source.manifest["step"] else None


def _retire_checkpoints(folder: Path, step: int, *, remove: bool) -> None:
    """Takes checkpoints of later steps out of the way: this run does not come from them, and "auto" must not find them.

    They are removed where the run was to be overwritten, else renamed: they may be the better ones.
    """
    for path in folder.glob("step_*"):
        if int(path.name.removeprefix("step_")) <= step:
            continue
        if remove:
            shutil.rmtree(path)
        else:
            path.rename(path.with_name(f".abandoned-{path.name}-{secrets.token_hex(3)}"))


def _show(console: Console, summary: Summary) -> None:
    console.print(report.summary_table(summary))
    if summary.sample:
        console.rule("sample", align="left")
        console.print(summary.sample, markup=False, highlight=False)
        console.rule()
    if summary.wear is not None:
        console.print(summary.wear, markup=False, highlight=False, soft_wrap=True)
    if summary.trace is not None:
        text = f"trace: {summary.trace} (for https://ui.perfetto.dev, or: zinf timeline {summary.trace})"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    for what, name in (
        ("loss curve", report.LOSS_CURVE_FILE),
        ("metrics", "metrics.jsonl"),
        ("figures", SUMMARY_FILE),
    ):
        console.print(f"{what}: {summary.run_dir / name}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"go on with: {summary.resume_command}", markup=False, highlight=False, soft_wrap=True)


class _Loop:
    """One process's share of a run: the steps, and what happens between them."""

    def __init__(
        self,
        config: Config,
        options: LoopOptions,
        spec: ModelSpec,
        data: Data,
        trainer: Trainer,
        metrics: MetricsWriter,
        display: Display,
        shutdown: Shutdown,
        run_dir: Path,
        num_steps: int,
    ) -> None:
        self.config, self.options, self.spec, self.data = config, options, spec, data
        self.trainer, self.metrics, self.display, self.shutdown = trainer, metrics, display, shutdown
        self.run_dir, self.num_steps = run_dir, num_steps
        self.trace: TraceWish | None = None
        self.written_before = 0  # to NVMe, by earlier processes of the run
        self.traffic = Traffic()
        self.stats: Stats | None = None
        self.steps_done = 0
        self.start = time.monotonic()
        self.num_params = spec.num_params()

    def run(self) -> Summary:
        self.display.begin(self.trainer.global_step)
        if self.trainer.global_step == 0:
            self._validate()
        while self._go_on():
            if self.steps_done:
                self._between(self.trainer.global_step)
            if not self.shutdown.requested:
                self._step()
        sample = None
        if self.steps_done and not self.shutdown.requested:
            self._validate()
            sample = self._sample()
        return self._summary(sample)

    def _go_on(self) -> bool:
        if self.trainer.global_step >= self.num_steps or self.shutdown.requested:
            return False
        limit = self.options.max_minutes
        if limit is None or time.monotonic() - self.start < 60 * limit:
            return True
        self.display.note(f"stopped after {limit:g} minutes of training (train.extra.max_minutes)")
        return False

    def _step(self) -> None:
        if self.trace is not None and self.steps_done + 1 == self.trace.start:
            self.trainer.trace(self.trace.path, self.trace.steps)
        batch = next(self.data.train)  # type: ignore[call-overload]
        # The place after this batch: a run that resumes from this step must not see it again.
        self.trainer.user_state = {"data": self.data.train.get_state()}
        start = time.perf_counter()
        out = self.trainer.step(batch)
        time_s = time.perf_counter() - start
        self.steps_done += 1
        self.stats = stats = self.trainer.stats()
        self.traffic += Traffic(stats.nvme_bytes_read, stats.nvme_bytes_written, stats.h2d_bytes, stats.d2h_bytes)
        stall_s = stats.read_stall_s + stats.write_stall_s
        record = _record(out, stats, time_s, self.data.tokens_per_batch)
        record[wear.RUN_TOTAL] = self.written_before + stats.process_nvme_bytes_written
        self.metrics.write("step", out.step, record)
        self.display.step(
            StepView(
                step=out.step,
                loss=out.loss,
                grad_norm=out.grad_norm,
                skipped=out.skipped,
                num_tokens=self.data.tokens_per_batch,
                time_s=time_s,
                stall_s=stall_s,
                nvme_bytes_read=stats.nvme_bytes_read,
                nvme_bytes_written=stats.nvme_bytes_written,
            )
        )

    def _between(self, step: int) -> None:
        """What is due after a step that another one follows."""
        if _due(step, self.options.valid_every):
            self._validate()
        if _due(step, self.config.train.sample_every):
            self._sample()
        if _due(step, self.config.train.save_every):
            self._save(step)

    def _validate(self) -> None:
        """Mean loss over the held-out batches; given up where a signal asks for the end."""
        total, rows = 0.0, 0
        for index, batch in enumerate(self.data.valid):
            self.display.stage("validate", index, len(self.data.valid))
            if self.shutdown.requested:
                return
            num_rows = len(jax.tree.leaves(batch)[0])
            loss = self.trainer.evaluate(self.spec.validation_loss_fn, batch)
            loss = getattr(loss, "loss", loss)  # a `Weighted` counts by its rows here
            total, rows = total + float(loss) * num_rows, rows + num_rows
        if rows:
            step = self.trainer.global_step
            self.metrics.write("valid", step, {"loss": total / rows})
            self.display.note(f"step {step}  validation loss {total / rows:.4f}")
            self.display.begin(step)

    def _save(self, step: int) -> None:
        start = time.perf_counter()
        if self.trainer.durable:
            older = [old for old in self.trainer.retained() if old < step]
            older = older[: len(older) + 1 - self.options.keep_last]
            path = self.trainer.save(replaces=[old for old in older if not _due(old, self.options.keep_every)])
        else:
            folder = self.run_dir / CHECKPOINTS
            path = self.trainer.save(folder / f"step_{step:08}")
            for folder_of in sorted(folder.glob("step_*"))[: -self.options.keep_last]:
                if not _due(int(folder_of.name.removeprefix("step_")), self.options.keep_every):
                    shutil.rmtree(folder_of)
        self.display.note(f"step {step}  saved in {time.perf_counter() - start:.1f} s: {path}")

    def _sample(self) -> str | None:
        """Generates text; whatever is there when a signal asks for the end."""
        spec, data, train = self.spec, self.data, self.config.train
        if spec.logits_fn is None or data.encode is None or data.decode is None or not train.sample_tokens:
            return None
        tokens = sample_tokens(
            self.trainer, spec, data, self.options,
            prompt=train.sample_prompt, num_tokens=train.sample_tokens, seed=self.config.seed,
        )  # fmt: skip
        ids = []
        for token in tokens:
            ids.append(token)
            self.display.stage("sample", len(ids), train.sample_tokens)
            if self.shutdown.requested:
                break
        text = train.sample_prompt + data.decode(ids)
        step = self.trainer.global_step
        self.metrics.write("sample", step, {"text": text})
        (self.run_dir / SAMPLE_FILE).write_text(text + "\n", encoding="utf-8")
        self.display.begin(step)
        return text

    def _summary(self, sample: str | None) -> Summary:
        trainer, stats = self.trainer, self.stats or self.trainer.stats()
        train, valid = report.losses(self.run_dir, "step"), report.losses(self.run_dir, "valid")
        mine = read_metrics(self.run_dir, "step")[-self.steps_done :] if self.steps_done else []
        train_s = sum(record["time_s"] for record in mine)
        finished = trainer.global_step >= self.num_steps
        run_written = self.written_before + trainer.stats().process_nvme_bytes_written
        wish = self.trace if self.trace is not None and self.steps_done >= self.trace.start else None
        return Summary(
            run_dir=self.run_dir,
            status="finished" if finished else "stopped",
            step=trainer.global_step,
            num_steps=self.steps_done,
            num_skipped=trainer.num_skipped,
            num_params=self.num_params,
            loss_first=train[0][1] if train else None,
            loss_last=report.mean_last([loss for _, loss in train]),
            valid_first=valid[0][1] if valid else None,
            valid_last=valid[-1][1] if valid else None,
            train_s=train_s,
            tokens_per_s=self.steps_done * self.data.tokens_per_batch / train_s if train_s else 0.0,
            traffic=self.traffic,
            read_stall_s=stats.total_read_stall_s,
            write_stall_s=stats.total_write_stall_s,
            peaks=_peaks(trainer),
            sample=sample,
            resume_command=resume_command(self.run_dir, 2 * self.num_steps if finished else None),
            run_nvme_bytes_written=run_written,
            wear=self._wear(run_written, train_s),
            trace=None if wish is None else str(wish.path),
        )

    def _wear(self, run_written: int, train_s: float) -> str | None:
        if not run_written:
            return None
        rate, rated = (self.traffic.nvme_written / train_s if train_s else 0.0), self.config.nvme_tbw
        drive = Path(self.config.nvme_path[0]) if self.config.nvme_path else self.run_dir
        return wear.sentence(run_written, rate, rated, wear.percent_used(drive) if rated is None else None)


def resume_command(run_dir: Path, steps: int | None) -> str:
    """What to type, in the present directory, to go on with a run; `steps` where its goal must be moved."""
    program = [sys.argv[0]] if Path(sys.argv[0]).name == "zinf" else [sys.executable, "-m", "zinf_jax.cli"]
    with contextlib.suppress(ValueError):
        run_dir = run_dir.relative_to(Path.cwd())
    arguments = ["train", str(run_dir / CONFIG_FILE), "--run-dir", str(run_dir), "--resume", "auto"]
    return shlex.join([*program, *arguments, *([] if steps is None else ["--steps", str(steps)])])


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _record(out: StepOutput, stats: Stats, time_s: float, num_tokens: int) -> dict[str, Any]:
    """What the metrics say of a step."""
    return {
        "loss": float(out.loss),
        "grad_norm": float(out.grad_norm),
        "skipped": out.skipped,
        "learning_rate": out.learning_rate,
        "loss_scale": out.loss_scale,
        "time_s": time_s,
        "tokens_per_s": num_tokens / time_s,
        "pass_time_s": stats.pass_time_s,
        "update_time_s": stats.update_time_s,
        "read_stall_s": stats.read_stall_s,
        "write_stall_s": stats.write_stall_s,
        "fetch_hits": stats.fetch_hits,
        "fetch_misses": stats.fetch_misses,
        "nvme_bytes_read": stats.nvme_bytes_read,
        "nvme_bytes_written": stats.nvme_bytes_written,
        "h2d_bytes": stats.h2d_bytes,
        "d2h_bytes": stats.d2h_bytes,
        "peak_rss_bytes": stats.peak_rss_bytes,
    }


def _peaks(trainer: Trainer) -> dict[str, Peak]:
    plan, stats = trainer.plan, trainer.stats()
    return {
        "host memory for pages": Peak(plan.arena_bytes, stats.peak_host_bytes),
        "device memory": Peak(plan.device_bytes, stats.peak_device_bytes),
        "process memory": Peak(plan.peak_rss_bytes, stats.peak_rss_bytes),
    }


__all__ = ["Summary", "generate", "plan", "run"]
