"""The tracer: what it keeps, what it costs, its files; and that a real step is accounted for."""

import gzip
import itertools
import json
import threading
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import zinf_jax as zinf
from tests.train import blocks
from zinf_jax.errors import ConfigError
from zinf_jax.stream.stats import Counters
from zinf_jax.stream.trace import Event, Lane, StepMark, Trace, Tracer
from zinf_jax.stream.trace_file import read_chrome, rows_of, write_chrome
from zinf_jax.tier import KindExtents, PageStore, Topology
from zinf_jax.train.timeline import summarise


def recording(**kwargs):
    tracer = Tracer(**kwargs)
    tracer.start()
    return tracer


def event(lane, start, end, name="x", **args):
    return Event(lane, name, start, end, args)


def test_nothing_is_recorded_unless_asked():
    tracer = Tracer()
    with tracer.span(Lane.UPDATE, "one", page="p"):
        pass
    tracer.add(Lane.UPDATE, "two", 0.0, 1.0)
    tracer.until_ready(Lane.DEVICE_COMPUTE, "three", 0.0, [jax.numpy.ones(3)])
    tracer.step(1, 0.0, 1.0)
    assert tracer.trace == Trace((), ())


def test_it_costs_next_to_nothing_while_nothing_is_recorded():
    tracer, number = Tracer(), 20_000

    def each(run):
        return min(run() for _ in range(5)) / number

    def adds():
        start = time.perf_counter()
        for _ in range(number):
            tracer.add(Lane.UPDATE, "x", 0.0, 1.0)
        return time.perf_counter() - start

    def spans():
        start = time.perf_counter()
        for _ in range(number):
            with tracer.span(Lane.UPDATE, "x"):
                pass
        return time.perf_counter() - start

    assert each(adds) < 5e-6 and each(spans) < 5e-6  # 0.5 and 1.1 us were seen on a busy machine


def test_spans_are_kept_by_start_and_forgotten_by_the_next_start():
    tracer = recording()
    with tracer.span(Lane.UPDATE, "outer", page="p"), tracer.span(Lane.STALL, "inner"):
        pass
    with pytest.raises(ZeroDivisionError), tracer.span(Lane.COMMIT, "fails"):
        _ = 1 / 0
    tracer.stop()
    tracer.add(Lane.UPDATE, "late", 0.0, 1.0)
    assert [e.name for e in tracer.events] == ["outer", "inner", "fails"]
    assert tracer.events[0].args == {"page": "p"} and tracer.events[0].end_s >= tracer.events[1].end_s
    tracer.start()
    assert tracer.events == ()


def test_memory_is_bounded_and_what_was_dropped_is_counted():
    tracer = recording(max_events=10)
    for i in range(25):
        tracer.add(Lane.UPDATE, str(i), i, i + 1)
    tracer.stop()
    assert len(tracer.events) == 10 and tracer.trace.num_dropped == 15


def test_other_threads_may_add():
    tracer = recording()

    def add(lane):
        for i in range(2000):
            tracer.add(lane, "x", i, i + 1)

    threads = [threading.Thread(target=add, args=(lane,)) for lane in (Lane.NVME_READ, Lane.NVME_WRITE, Lane.UPDATE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tracer.events) == 6000


def test_work_on_the_device_starts_at_dispatch_or_after_what_was_before():
    tracer = recording()
    double = jax.jit(lambda x: x @ x)
    x = jax.numpy.ones((600, 600))
    double(x).block_until_ready()
    for name in ("a", "b", "c"):
        start = time.perf_counter()
        x = double(x)
        tracer.until_ready(Lane.DEVICE_COMPUTE, name, start, [x], micro=0)
    tracer.stop()  # waits for the ends
    assert [e.name for e in tracer.events] == ["a", "b", "c"]
    for before, after in itertools.pairwise(tracer.events):
        assert before.end_s <= after.start_s <= after.end_s
    assert not [t for t in threading.enumerate() if t.name.startswith("zinf trace")]


def test_results_that_are_gone_stop_nothing():
    tracer = recording()
    gone = jax.numpy.ones(3)
    gone.delete()
    tracer.until_ready(Lane.DEVICE_COMPUTE, "x", 0.0, [gone])
    tracer.until_ready(Lane.DEVICE_COMPUTE, "y", 0.0, [])
    tracer.stop()
    assert tracer.events == ()


def test_waits_are_stalls_with_a_cause():
    counters = Counters()
    counters.tracer.start()
    read = SimpleNamespace(page="block_3", kind="weights", times=lambda: (0.0, 0.0, True))
    for name, of, args in (
        ("read_stall_s", read, {}),
        ("write_stall_s", read, {}),
        ("device_wait_s", None, {"program": "forward block_2"}),
        ("commit_stall_s", None, {}),
        ("barrier_wait_s", None, {}),
        ("host_work_s", None, {}),
    ):
        with counters.timed(name, of, **args):
            time.sleep(0.0005)
    with counters.timed("read_stall_s"):  # nothing was late: not a stall
        pass
    counters.tracer.stop()
    found = {e.args["cause"]: e for e in counters.tracer.events}
    assert list(found) == ["read not complete", "write before reuse", "device", "commit", "barrier"]
    late = found["read not complete"]
    assert late.name == "read not complete: weights of block_3" and late.lane is Lane.STALL
    assert (late.args["page"], late.args["kind"]) == ("block_3", "weights") and late.args["under_way_s"] > 0
    assert found["device"].name == "device: forward block_2"
    assert set(counters.values) == {
        "read_stall_s", "write_stall_s", "device_wait_s", "commit_stall_s", "barrier_wait_s", "host_work_s",
    }  # fmt: skip


def test_transfers_are_seen_once_with_the_engines_times(tmp_path):
    import aio_ffi

    extents = {"weights": KindExtents.deal([[8192]], [1.0])}
    store = PageStore([tmp_path], extents, {"weights": 1}, aio_ffi.EngineOptions())
    tracer = recording()
    store.observer = tracer.transfer
    arena = aio_ffi.Arena(8192, lock=False)
    array = arena.array(0, 8192)
    array[:] = np.arange(8192, dtype=np.int64).astype(np.uint8)
    before = time.perf_counter()
    for start in (store.write_page, store.read_page):
        transfer = start("weights", 0, array, "a")
        transfer.wait()
        transfer.wait()
    after = time.perf_counter()
    tracer.stop()
    store.close()
    assert [(e.lane, e.name) for e in sorted(tracer.events, key=lambda e: e.lane)] == [
        (Lane.NVME_READ, "weights of a"), (Lane.NVME_WRITE, "weights of a"),
    ]  # fmt: skip
    for found in tracer.events:
        assert found.args["bytes"] == 8192 and "end" not in found.args
        assert before <= found.start_s < found.end_s <= after


@pytest.mark.parametrize(
    ("spans", "rows"),
    [
        ([], []),
        ([(0, 1), (1, 2)], [0, 0]),
        ([(0, 1), (1 - 1e-9, 2)], [0, 0]),  # as the same time is read back
        ([(0, 3), (1, 2), (2, 4), (3, 5)], [0, 1, 1, 0]),
        ([(2, 3), (0, 3), (1, 3)], [2, 0, 1]),
    ],
)
def test_overlapping_spans_stand_in_rows(spans, rows):
    assert rows_of([event(Lane.NVME_READ, *span) for span in spans]) == rows


def made_trace():
    origin = 123456.789
    events = (
        event(Lane.NVME_READ, origin + 1e-3, origin + 5e-3, "weights of block_0", page="block_0", bytes=4096),
        event(Lane.NVME_READ, origin + 2e-3, origin + 3e-3, "weights of block_1"),
        event(Lane.DEVICE_COMPUTE, origin + 3e-3, origin + 4e-3, "forward block_0"),
        event(Lane.DEVICE_COMPUTE, origin + 4e-3, origin + 4.5e-3, "forward block_1"),
        event(Lane.STALL, origin + 4.5e-3, origin + 5e-3, "read not complete", cause="read not complete"),
    )
    steps = (StepMark(7, origin, origin + 6e-3), StepMark(8, origin + 6e-3, origin + 9e-3))
    return Trace(events, steps, {Lane.COLLECTIVES: "inside the unit programs"}, 3)


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_file_gives_the_trace_back(tmp_path, name):
    trace = made_trace()
    assert write_chrome(trace, tmp_path / name) == tmp_path / name
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert ((tmp_path / name).read_bytes()[:2] == b"\x1f\x8b") == name.endswith(".gz")
    found = read_chrome(tmp_path / name)
    assert (found.notes, found.num_dropped) == (trace.notes, 3)
    assert [(e.lane, e.name, e.args) for e in found.events] == [(e.lane, e.name, e.args) for e in trace.events]
    times = [(e.start_s, e.end_s) for e in found.events] + [(s.start_s, s.end_s) for s in found.steps]
    expected = [(e.start_s, e.end_s) for e in trace.events] + [(s.start_s, s.end_s) for s in trace.steps]
    np.testing.assert_allclose(times, expected, rtol=0, atol=2e-9)
    assert [s.number for s in found.steps] == [7, 8]


def test_the_file_is_what_the_viewers_want(tmp_path):
    content = json.loads(write_chrome(made_trace(), tmp_path / "t.json").read_text())
    entries = content["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in entries if e["name"] == "thread_name"}
    order = {e["tid"]: e["args"]["sort_index"] for e in entries if e["name"] == "thread_sort_index"}
    shown = [names[tid] for tid in sorted(order, key=order.__getitem__)]
    assert shown == [
        "steps", "device compute", "host to device", "device to host", "nvme read", "nvme read 2", "nvme write",
        "update", "collectives (inside the unit programs)", "stall", "commit",
    ]  # fmt: skip
    spans = [e for e in entries if e["ph"] == "X"]
    assert {e["tid"] for e in spans} <= set(names)
    read = next(e for e in spans if e["name"] == "weights of block_0")
    assert (read["ts"], read["dur"]) == pytest.approx((1000, 4000), abs=0.01)
    assert [(e["name"], e["s"]) for e in entries if e["ph"] == "i"] == [("step 7", "g"), ("step 8", "g")]
    for tid in names:  # no two spans of a row overlap, to the digit
        mine = sorted((round(1000 * e["ts"]), round(1000 * e["dur"])) for e in spans if e["tid"] == tid)
        assert all(start + length <= later for (start, length), (later, _) in itertools.pairwise(mine))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"traceEvents": []}', b"\x1f\x8bnot gzip", b"\xff\xfe"])
def test_other_files_are_refused(tmp_path, content):
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"t\.json is no trace"):
        read_chrome(tmp_path / "t.json")
    with pytest.raises(FileNotFoundError):
        read_chrome(tmp_path / "other.json")


def trainer_of(*parts, **kwargs):
    params = zinf.lazy(blocks.init, jax.random.key(0))
    return zinf.Trainer(
        blocks.loss, params, zinf.optim.adamw(1e-2, weight_decay=0.1), blocks.config(*parts), **kwargs
    )  # fmt: skip


def test_a_traced_run_computes_the_same_and_its_steps_are_in_the_file(tmp_path):
    path = tmp_path / "traces" / "t.json.gz"
    parts = (blocks.placed("nvme", residuals="nvme"), {"gradient_accumulation_steps": 2})
    expected = blocks.run(*parts)
    with trainer_of(*parts) as trainer:
        trainer.trace(path, steps=2)
        with pytest.raises(ConfigError, match="not written yet"):
            trainer.trace(path)
        assert blocks.run(trainer=trainer).bits == expected.bits
        with pytest.raises(ConfigError, match="at least one step"):
            trainer.trace(path, steps=0)
        with pytest.raises(ConfigError, match="is a directory"):
            trainer.trace(tmp_path)
        assert trainer.stats().process_nvme_bytes_written > trainer.stats().total_nvme_bytes_written
    trace = read_chrome(path)
    assert [step.number for step in trace.steps] == [1, 2]
    assert trace.notes[Lane.COLLECTIVES]
    assert gzip.decompress(path.read_bytes())
    second = [e for e in trace.events if e.start_s >= trace.steps[1].start_s]
    by_lane = {lane: {e.name for e in second if e.lane is lane} for lane in Lane}
    assert {"forward block_0", "turn embedding", "backward block_5"} <= by_lane[Lane.DEVICE_COMPUTE]
    read = {e.name for e in trace.events if e.lane is Lane.NVME_READ}  # records for an update a step ahead of it
    assert {"weights of block_0", "optimizer of block_3", "gradients of embedding"} <= read
    assert {"weights of block_0", "optimizer of block_3", "gradients of embedding"} <= by_lane[Lane.NVME_WRITE]
    assert {"block_0", "norm"} <= by_lane[Lane.UPDATE]
    assert {"block_0", "residual"} <= by_lane[Lane.DEVICE_TO_HOST] and "batch" in by_lane[Lane.HOST_TO_DEVICE]
    for found in second:  # ends on the device are seen by a thread, which may be told later than the main one
        late_s = 0.1 if found.lane in (Lane.DEVICE_COMPUTE, Lane.HOST_TO_DEVICE) else 1e-8
        assert trace.steps[1].start_s <= found.start_s <= found.end_s <= trace.steps[1].end_s + late_s
        assert found.lane is not Lane.STALL or found.args["cause"]


def test_copies_to_a_device_are_seen_where_there_are_any(tmp_path, monkeypatch):
    monkeypatch.setattr(Topology, "aliases", property(lambda self: False))
    with trainer_of(blocks.placed("nvme")) as trainer:
        trainer.trace(tmp_path / "t.json")
        trainer.step(blocks.batch())
    copies = [e for e in read_chrome(tmp_path / "t.json").events if e.lane is Lane.HOST_TO_DEVICE]
    assert {"block_0", "embedding"} <= {e.name for e in copies} and all(e.end_s >= e.start_s for e in copies)


def test_a_commit_is_on_its_lane(tmp_path):
    none = {"streaming": {"update_overlap": "none"}}  # a step's pages then wait for the commit of the one before
    with trainer_of(blocks.placed("nvme"), none, run_dir=tmp_path / "run") as trainer:
        trainer.trace(tmp_path / "t.json", steps=2)
        trainer.step(blocks.batch())
        trainer.step(blocks.batch())
    trace = read_chrome(tmp_path / "t.json")
    assert "commit" in [e.name for e in trace.events if e.lane is Lane.COMMIT]
    assert [step.number for step in trace.steps] == [1, 2]


def test_closing_writes_what_there_is(tmp_path):
    with trainer_of(blocks.placed("host")) as trainer:
        trainer.trace(tmp_path / "t.json", steps=5)
        trainer.step(blocks.batch())
    assert [step.number for step in read_chrome(tmp_path / "t.json").steps] == [1]
    with trainer_of(blocks.placed("host")) as trainer:
        trainer.trace(tmp_path / "never.json")
    assert not (tmp_path / "never.json").exists()


def test_a_step_is_accounted_for(tmp_path):
    """What the main thread did or waited for, and the device's work, cover the step: the rest is under 5%.

    Each step has some milliseconds of bookkeeping in Python whatever its size, so the batch is large; the best of a few
    steps counts, since other processes may take the core away at any moment.
    """
    with trainer_of(blocks.placed("nvme")) as trainer:
        trainer.step(blocks.batch(8192))
        trainer.trace(tmp_path / "t.json", steps=4)
        for i in range(4):
            trainer.step(blocks.batch(8192, seed=i))
        stats = trainer.stats()
    trace = read_chrome(tmp_path / "t.json")
    summaries = [summarise(trace.events, step) for step in trace.steps]
    assert max(summary.accounted for summary in summaries) > 0.95, [s.accounted for s in summaries]
    last = summaries[-1]
    assert last.time_s == pytest.approx(stats.step_time_s, rel=1e-3)
    # The counters and the trace tell the same story; waits too short to be stalls are only counted.
    for cause, counted in (
        ("read not complete", stats.read_stall_s),
        ("write before reuse", stats.write_stall_s),
        ("device", stats.device_wait_s),
    ):
        assert last.stalls.get(cause, 0.0) == pytest.approx(counted, abs=0.02 * last.time_s)
