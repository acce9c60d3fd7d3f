"""The step benchmark's machinery: workers that die, hang or refuse are reported; figures are what they are called."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from zinf_jax import models
from zinf_jax.stream.overlap import OverlapChooser

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import _bench  # noqa: E402
import _bench_floors  # noqa: E402
import _bench_report  # noqa: E402
import bench_large  # noqa: E402
import bench_step  # noqa: E402

WORKER = """
import os, sys, time
sys.path.insert(0, {scripts!r})
from _bench import serve, timed_steps

def build(spec):
    if spec.get("refuse"):
        raise ValueError("no such size")
    print("libraries print here")

    def die(code):
        os._exit(code)

    return {{
        "steps": lambda count: timed_steps(lambda: None, count),
        "fail": lambda: 1 / 0,
        "die": die,
        "hang": lambda: time.sleep(3600),
        "echo": lambda text: {{"text": text}},
    }}

serve(build)
"""


@pytest.fixture
def make(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(textwrap.dedent(WORKER).format(scripts=str(SCRIPTS)))

    def start(**spec):
        return _bench.Worker("w", [sys.executable, str(script)], spec, log_dir=tmp_path, start_timeout_s=30)

    return start


def test_sizes_are_the_models():
    for name, size in _bench.SIZES.items():
        found = models.decoder(name)
        assert (size.num_params, size.vocab_size, size.seq_len) == (found.num_params(), found.vocab_size, found.seq_len)


def test_worker_answers_and_keeps_prints_out_of_the_protocol(make):
    with make() as worker:
        assert worker.call("echo", text="a\nb", timeout_s=10) == {"text": "a\nb"}
        reply = worker.call("steps", count=3, timeout_s=10)
    assert len(reply["times_s"]) == 3
    assert reply["peak_rss_bytes"] > 1 << 20


def test_worker_that_refuses(make):
    with pytest.raises(_bench.WorkerError, match="no such size"):
        make(refuse=True)


def test_worker_error_shows_the_log_and_goes_on(make):
    with make() as worker:
        with pytest.raises(
            _bench.WorkerError,
            match=r"ZeroDivisionError(.|\n)*\| .*ZeroDivisionError",
        ):
            worker.call("fail", timeout_s=10)
        assert worker.call("echo", text=1, timeout_s=10) == {"text": 1}


def test_worker_that_dies(make):
    with make() as worker:
        with pytest.raises(_bench.WorkerError, match="ended with status 3"):
            worker.call("die", code=3, timeout_s=10)
        with pytest.raises(_bench.WorkerError):
            worker.call("echo", text=1, timeout_s=10)


def test_worker_that_hangs_is_ended(make):
    worker = make()
    with pytest.raises(_bench.WorkerError, match=r"no answer in 0 s"):
        worker.call("hang", timeout_s=0.2)
    worker.close(grace_s=0.1)
    assert worker._process.returncode == -9


def test_alternate_takes_turns(make):
    order = []
    with make() as first, make() as second:
        series = _bench.alternate(
            [first, second],
            num_rounds=2,
            num_steps=3,
            timeout_s=10,
            progress=order.append,
            after_round=lambda: order.append("after"),
        )
    assert [len(s.times_s) for s in series] == [6, 6]
    assert order.pop(2) == order.pop() == "after"
    assert len(order) == 4 and order[0].startswith("round 1/2") and order[2].startswith("round 2/2")


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("fail", [False, True])
def test_temporary_folder_goes_away(tmp_path, fail, there):
    """And the parent with it, if it was made for it."""
    if there:
        (tmp_path / "a").mkdir()
    try:
        with _bench.temporary_folder(tmp_path / "a", "x") as folder:
            (folder / "pages").write_bytes(b"1")
            assert folder.is_absolute()
            if fail:
                raise KeyError
    except KeyError:
        pass
    assert [*tmp_path.rglob("*")] == ([tmp_path / "a"] if there else [])


def test_peak_rss_follows_reset():
    block = bytearray(64 << 20)
    high = _bench.peak_rss_bytes()
    assert high > len(block)
    del block
    _bench.reset_peak_rss()
    assert _bench.peak_rss_bytes() < high - (32 << 20)


def test_io_floor_pairs_reads_with_writes():
    plan = {"read_bytes": 14e9, "write_bytes": 12e9}
    rates = {"read_gbps": 2.0, "write_gbps": 1.5, "mixed_read_gbps": 1.0, "mixed_write_gbps": 1.0}
    assert _bench_floors.io_floor(plan, {"disk": rates}) == {"io_s": pytest.approx(24 / 2 + 2 / 2)}


def test_the_schedules_floor_pairs_compute_with_io_per_phase():
    plan = {"read_bytes": 14e9, "write_bytes": 12e9, "update_read_bytes": 10e9, "update_write_bytes": 12e9}
    disk = {"read_gbps": 2.0, "write_gbps": 2.0, "mixed_read_gbps": 1.0, "mixed_write_gbps": 1.0}
    floors = {"compute_s": 40.0, "host_work_s": 3.0, "host": {"update_s_per_param": 2.0}, "disk": disk}

    def schedule_s(clips, forward):
        return _bench_floors.schedule_floor(plan, clips, 1, floors, forward)["schedule_s"]

    # forward: 10 + 2 of compute, or 12 read and 12 written; backward: 30 + 1 of compute, or 2 read.
    assert schedule_s("always", 0.25) == pytest.approx(12 + 31)
    # With another share of the forward.
    assert schedule_s("always", 0.5) == pytest.approx(22 + 21)
    # never clips: the update is beside backward.
    assert schedule_s("never", 0.25) == pytest.approx(10 + 33)


class Replies:
    """A worker that gives one prepared reply per call."""

    def __init__(self, *replies):
        self._replies = iter(replies)

    def call(self, command, **_):
        return next(self._replies)


def test_floors_are_medians_of_what_was_measured_since():
    host = {"update_s_per_param": 2.0, "norm_s_per_param": 1.0, "bytes_per_param": 26}
    disk = [{"read_gbps": rate, "engine": "libaio"} for rate in (1.0, 4.0, 2.0, 7.0)]
    floors = _bench_floors.Floors(
        Replies(*({"times_s": [s, s]} for s in (5.0, 9.0, 6.0, 1.0))), Replies(*[host] * 4), Replies(*disk),
        io_bytes=1, timeout_s=1,
    )  # fmt: skip
    for _ in range(3):
        floors.measure()
    found = floors.take(10)
    assert (found["compute_s"], found["disk"]) == (6.0, {"read_gbps": 2.0, "engine": "libaio"})
    assert found["host_work_s"] == 30.0
    floors.measure()
    assert floors.take(10)["disk"]["read_gbps"] == 7.0


def test_a_run_that_is_never_clipped_has_tried_both_ways_before_it_is_timed():
    chooser = OverlapChooser("auto", clips=True)
    ways = []
    for _ in range(bench_step.SETTLING_STEPS + 20):
        ways.append(chooser.runs_ahead)
        chooser.saw(as_assumed=True, undone=False)
        chooser.took(1.0 if ways[-1] else 2.0)
    assert False in ways[chooser.PATIENCE : bench_step.SETTLING_STEPS] and True in ways[: bench_step.SETTLING_STEPS]
    assert all(ways[bench_step.SETTLING_STEPS :])


def test_host_memory_is_a_fifth_from_350m_up():
    args = bench_step.parse_arguments([])

    def memory(size, variant):
        config = bench_step.trainer_config(_bench.SIZES[size], bench_step.VARIANTS[variant], 1, "always", args)
        return config.get("host_memory")

    params = _bench.SIZES["350m"].num_params
    assert memory("350m", "nvme") == int(0.2 * 12 * params)
    assert memory("350m", "host") is None
    assert memory("125m", "nvme") is None


def test_missed_limits_are_red():
    assert "[red]" in _bench_report.limited(1.36, 1.35) and "[green]" in _bench_report.limited(1.35, 1.35)
    assert _bench_report.limited(1.0, None) == "1.00"


@pytest.mark.parametrize(
    "measured, planned, complaint",
    [(2.0, 2.1, None), (2.2, 2.1, "planned only"), (1.5, 2.1, "more than 10% off"), (2.6, 2.7, "over 2.5")],
)
def test_large_verdicts(measured, planned, complaint):
    gib = 1 << 30
    step = {"peak_rss_bytes": measured * gib, "stats": {"peak_device_bytes": 0.99 * gib}}
    row = {
        "plan": {"peak_rss_bytes": planned * gib, "device_bytes": gib},
        "init_peak_rss_bytes": gib,
        "steps": [step],
        "max_rss_gib": 2.5,
    }
    found = bench_large.verdicts(row)
    assert (not found) if complaint is None else (len(found) == 1 and complaint in found[0])


def test_results_are_json(tmp_path):
    _bench.write_json(tmp_path / "r.json", {"rows": [1.5]})
    assert json.loads((tmp_path / "r.json").read_text()) == {"rows": [1.5]}


def test_what_crash_safety_costs_is_measured(tmp_path):
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "bench_durability.py"), "--size", "tiny", "--steps", "3", "--json", "found.json",
         "--nvme-path", "pages"],
        cwd=tmp_path, env={**os.environ, **_bench.worker_env()}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert set(found["shares"]) == {"checksums", "commit", "kept step"}
    assert found["bytes_per_step"] > 0 and len(found["saves_s"]) == 3 and len(found["commits_s"]) >= 3
    assert not (tmp_path / "pages").exists()
