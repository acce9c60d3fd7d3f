"""From a wish for a trace to its file: which steps are recorded, and when the file is written. Main thread only."""

import dataclasses
import os
import pathlib

from zinf_jax.errors import ConfigError
from zinf_jax.stream.trace import Tracer
from zinf_jax.stream.trace_file import write_chrome


@dataclasses.dataclass(frozen=True)
class TraceWish:
    """`steps` steps from a process's step `start` (counted from 1) on, into `path`."""

    path: pathlib.Path
    steps: int
    start: int


def check_request(path: str | os.PathLike[str], steps: int) -> pathlib.Path:
    """The absolute path of a trace that can be written.

    Raises:
      ConfigError: `steps` is not positive, or there can be no such file.
    """
    if steps < 1:
        raise ConfigError(f"a trace holds at least one step, got steps={steps}")
    path = pathlib.Path(path).absolute()
    if path.is_dir():
        raise ConfigError(f"{path} is a directory: name a file for the trace, such as trace.json.gz")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)  # now, and not after the steps were recorded for nothing
    except OSError as error:
        raise ConfigError(f"{path.parent} cannot be made for the trace: {error.strerror or error}") from error
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{path.parent} cannot be written: name another file for the trace")
    return path


class StepRecorder:
    """Records the next steps of a trainer into a file, one wish at a time."""

    def __init__(self) -> None:
        self._path: pathlib.Path | None = None
        self._left = 0
        self._tracer: Tracer | None = None
        self.written: pathlib.Path | None = None

    def request(self, path: str | os.PathLike[str], steps: int) -> None:
        """Asks for the next `steps` steps.

        Raises:
          ConfigError: `steps` is not positive, there can be no such file, or a trace is being recorded.
        """
        if self._path is not None:
            raise ConfigError(f"the trace {self._path} is not written yet ({self._left} steps to go): wait for it")
        self._path, self._left, self.written = check_request(path, steps), steps, None

    def begin(self, tracer: Tracer) -> None:
        """A step begins."""
        if self._path is not None and self._tracer is None:
            self._tracer = tracer
            tracer.start()

    def end(self, number: int, start_s: float, end_s: float) -> None:
        """A step has ended; after the last one that was asked for, the file is written."""
        if self._tracer is None:
            return
        self._tracer.step(number, start_s, end_s)
        self._left -= 1
        if not self._left:
            self.close()

    def close(self) -> None:
        """Writes what there is."""
        path, tracer = self._path, self._tracer
        self._path = self._tracer = None
        if path is not None and tracer is not None:
            tracer.stop()
            self.written = write_chrome(tracer.trace, path)
