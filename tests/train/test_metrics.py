"""The metrics file: whole lines, one record per step, also after a resume; and the same numbers for TensorBoard."""

import math
import struct

import pytest
from tensorboardX.proto.event_pb2 import Event

from zinf_jax.train.metrics import METRICS_FILE, TENSORBOARD_DIR, MetricsWriter, read_metrics


def _events(run_dir):
    """All events, in the order in which their files were begun."""
    for path in sorted((run_dir / TENSORBOARD_DIR).iterdir(), key=lambda p: p.stat().st_ctime_ns):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            yield Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]


def test_records_come_back_as_written(tmp_path):
    with MetricsWriter(tmp_path) as metrics:
        metrics.write("step", 1, {"loss": 0.1 + 0.2, "skipped": False, "lr": None})
        metrics.write("valid", 1, {"loss": 3})
        metrics.write("step", 2, {"loss": math.nan, "grad_norm": math.inf})
    assert read_metrics(tmp_path, "step") == [
        {"kind": "step", "step": 1, "loss": 0.1 + 0.2, "skipped": False, "lr": None},
        {"kind": "step", "step": 2, "loss": None, "grad_norm": None},
    ]
    assert read_metrics(tmp_path, "valid") == [{"kind": "valid", "step": 1, "loss": 3}]
    assert (tmp_path / METRICS_FILE).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(("start_step", "kept"), [(0, []), (2, [1, 2]), (9, [1, 2, 3])])
def test_a_resume_keeps_what_was_committed(tmp_path, start_step, kept):
    with MetricsWriter(tmp_path, tensorboard=False) as metrics:
        for step in (1, 2, 3):
            metrics.write("step", step, {"loss": step / 3})
    with MetricsWriter(tmp_path, start_step=start_step, tensorboard=False) as metrics:
        assert [record["step"] for record in read_metrics(tmp_path)] == kept
        metrics.write("step", start_step + 1, {"loss": 0.5})
    assert [record["step"] for record in read_metrics(tmp_path)] == [*kept, start_step + 1]


def test_a_line_is_there_at_once_and_a_cut_one_is_skipped(tmp_path):
    metrics = MetricsWriter(tmp_path, tensorboard=False)
    metrics.write("step", 1, {"loss": 1.0})
    assert len(read_metrics(tmp_path)) == 1
    metrics.close()
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"kind": "step", "st')
    assert [record["step"] for record in read_metrics(tmp_path)] == [1]
    with MetricsWriter(tmp_path, start_step=1, tensorboard=False) as metrics:
        metrics.write("step", 2, {"loss": 1.0})
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2]


def test_no_file_has_no_records(tmp_path):
    assert read_metrics(tmp_path) == []


def test_tensorboard_has_the_numbers_and_forgets_what_is_run_again(tmp_path):
    with MetricsWriter(tmp_path) as metrics:
        metrics.write("step", 1, {"loss": 2.5, "skipped": False, "text": "hello"})
        metrics.write("step", 2, {"loss": 2.0})
    with MetricsWriter(tmp_path, start_step=1) as metrics:
        metrics.write("step", 2, {"loss": 1.5})
    scalars = [
        (e.step, v.tag, v.simple_value) for e in _events(tmp_path) for v in e.summary.value if not v.HasField("tensor")
    ]
    assert scalars == [(1, "step/loss", 2.5), (2, "step/loss", 2.0), (2, "step/loss", 1.5)]
    restarts = [e.step for e in _events(tmp_path) if e.session_log.status == 1]
    assert restarts == [1, 2]
