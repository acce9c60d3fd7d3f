"""What a run writes down while it trains: `metrics.jsonl`, one JSON object a line, and TensorBoard scalars.

Guarantees:
  * A line is written whole and handed to the system at once: a killed process loses none, and at most its last line is
    cut short, which the reader skips.
  * After a resume at step n, what an earlier process wrote about steps after n is taken out (those steps never
    committed and are run again), so a step stands once, whatever happened.
  * Numbers that are not finite are written as null: the file is JSON, and stays readable everywhere.

Main thread only.
"""

import json
import math
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_DIR = "tensorboard"


class MetricsWriter:
    """Appends records to a run's metrics.

    Args:
      run_dir: The run's directory.
      start_step: The step that the run stands at: 0 for a new run, which starts a new file.
      tensorboard: Also write scalars for TensorBoard.
    """

    def __init__(self, run_dir: Path, *, start_step: int = 0, tensorboard: bool = True) -> None:
        path = run_dir / METRICS_FILE
        _keep_until(path, start_step)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed by close)
        self._board = None
        if tensorboard:
            # TensorBoard forgets its steps from purge_step on. The suffix: file names hold only whole seconds,
            # so a run that is resumed within the second would replace the file of the one before it.
            suffix = f".{secrets.token_hex(4)}"
            self._board = SummaryWriter(
                str(run_dir / TENSORBOARD_DIR), purge_step=start_step + 1, flush_secs=30, filename_suffix=suffix
            )

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Writes {"kind": kind, "step": step, **values}; numbers among the values also go to TensorBoard."""
        clean = {name: _json_value(value) for name, value in values.items()}
        self._file.write(json.dumps({"kind": kind, "step": step, **clean}, allow_nan=False) + "\n")
        self._file.flush()
        if self._board is None:
            return
        for name, value in values.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                self._board.add_scalar(f"{kind}/{name}", value, step)
            elif isinstance(value, str):
                self._board.add_text(f"{kind}/{name}", value, step)

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def read_metrics(run_dir: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The records of a run, all or of one kind, in order. No file: no records."""
    return [record for record in _records(run_dir / METRICS_FILE) if kind in (None, record["kind"])]


def _records(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):  # Otherwise cut short by a kill.
                yield json.loads(line)


def _keep_until(path: Path, step: int) -> None:
    """Drops records of later steps, by replacing the file whole."""
    kept = [record for record in _records(path) if step > 0 and record["step"] <= step]
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        for record in kept:
            file.write(json.dumps(record) + "\n")
    os.chmod(temporary, 0o600)
    os.replace(temporary, path)


def _json_value(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
