"""What a person sees while a run trains: a rich progress bar on a terminal, a line now and then anywhere else.

Main thread only (rich refreshes its bar from a thread of its own, which touches nothing of ours).
"""

import dataclasses
import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from zinf_jax.units import format_count

_SMOOTHING_STEPS = 20  # over which rates are averaged for display


@dataclasses.dataclass(frozen=True)
class StepView:
    """What is shown of a step."""

    step: int
    loss: float
    grad_norm: float
    skipped: bool
    num_tokens: int
    time_s: float
    stall_s: float
    nvme_bytes_read: int
    nvme_bytes_written: int


class Display:
    """Shows one run, from set-up to its last step.

    Args:
      console: Where to; a bar only if it is a terminal.
      num_steps: Where the run ends.
      log_every: Steps between lines.
    """

    def __init__(self, console: Console, num_steps: int, log_every: int) -> None:
        self.console = console
        self._num_steps, self._log_every = num_steps, log_every
        self._recent: list[StepView] = []
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._stage: str | None = None
        self._stage_start = 0.0
        if console.is_terminal:
            self._progress = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                _Eta(),
                TextColumn("{task.fields[info]}"),
                console=console,
                expand=True,
            )

    def __enter__(self) -> "Display":
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end_stage()
        if self._progress is not None:
            self._progress.stop()

    def stage(self, what: str, done: int, total: int) -> None:
        """Something other than steps is `done` of `total` along. The `progress` argument of the trainer."""
        if what != self._stage:
            self._begin_stage(what, total)
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=done, total=total)

    def begin(self, step: int) -> None:
        """Steps come next; the run stands at `step`."""
        self._begin_stage("train", self._num_steps)
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=step)

    def step(self, view: StepView) -> None:
        self._recent = [*self._recent[-_SMOOTHING_STEPS + 1 :], view]
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=view.step, info=self._rates(), eta_s=self._eta_s())
        if view.skipped or view.step % self._log_every == 0 or view.step in (1, self._num_steps):
            self.note(self._line(view))

    def note(self, text: str) -> None:
        """A line above the bar."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _begin_stage(self, what: str, total: int) -> None:
        self._end_stage()
        self._stage, self._stage_start = what, time.perf_counter()
        if self._progress is not None:
            if self._task is not None:
                self._progress.remove_task(self._task)
            self._task = self._progress.add_task(what, total=total, info="", eta_s=None)

    def _end_stage(self) -> None:
        time_s = time.perf_counter() - self._stage_start
        if self._stage not in (None, "train") and time_s > 0.5:
            self.note(f"{self._stage}: {time_s:.1f} s")
        self._stage = None

    def _line(self, view: StepView) -> str:
        width = len(str(self._num_steps))
        outcome = "skipped: gradient not finite" if view.skipped else f"loss {view.loss:.4f}"
        line = f"step {view.step:>{width}}/{self._num_steps}  {outcome}  norm {view.grad_norm:.3g}  {self._rates()}"
        eta = self._eta_s()
        return line if eta is None or self._progress is not None else f"{line}  {_duration(eta)} left"

    def _rates(self) -> str:
        time_s = sum(v.time_s for v in self._recent) or 1e-9
        tokens = sum(v.num_tokens for v in self._recent) / time_s
        stall = sum(v.stall_s for v in self._recent) / time_s
        read, written = (
            sum(getattr(v, name) for v in self._recent) / time_s / 1e9
            for name in ("nvme_bytes_read", "nvme_bytes_written")
        )
        return (
            f"{format_count(round(tokens))} tok/s  stalls {100 * stall:.0f}%  "
            f"nvme read {read:.2f} written {written:.2f} GB/s"
        )

    def _eta_s(self) -> float | None:
        if not self._recent:
            return None
        each = sum(v.time_s for v in self._recent) / len(self._recent)
        return each * max(0, self._num_steps - self._recent[-1].step)


class _Eta(ProgressColumn):
    """Time left, from recent steps rather than from the whole run."""

    def render(self, task: Task) -> Text:
        eta_s = task.fields.get("eta_s")
        return Text("" if eta_s is None else f"{_duration(eta_s)} left", style="cyan")


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
