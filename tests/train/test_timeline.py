"""What a trace says of a step, on events made by hand; its picture; and what a run says of its drive."""

import re
import xml.etree.ElementTree
from pathlib import Path

import pytest

from zinf_jax.errors import ConfigError
from zinf_jax.stream.trace import Event, Lane, StepMark, Trace
from zinf_jax.train import timeline_picture, wear
from zinf_jax.train.metrics import MetricsWriter
from zinf_jax.train.timeline import find_step, summarise, table, union_s

STEP = StepMark(3, 10.0, 20.0)


def event(lane, start, end, cause=None, name="x"):
    return Event(lane, name, start, end, {} if cause is None else {"cause": cause})


def use(summary, lane):
    return next(use for use in summary.lanes if use.lane is lane)


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], 0),
        ([(0, 1)], 1),
        ([(0, 1), (2, 3)], 2),  # a gap
        ([(0, 2), (1, 3)], 3),  # an overlap
        ([(0, 10), (1, 2), (3, 4)], 10),  # nested
        ([(5, 6), (0, 1), (0.5, 5.5)], 6),  # not in order
        ([(1, 1), (1, 1)], 0),
    ],
)
def test_overlaps_count_once(spans, expected):
    assert union_s(event(Lane.NVME_READ, *span) for span in spans) == pytest.approx(expected)


def test_a_step_is_cut_out():
    events = [
        event(Lane.DEVICE_COMPUTE, 8, 12),  # begins before
        event(Lane.DEVICE_COMPUTE, 19, 25),  # ends after
        event(Lane.DEVICE_COMPUTE, 2, 10),  # touches
        event(Lane.DEVICE_COMPUTE, 20, 30),
        event(Lane.NVME_READ, 0, 40),  # around all of it
        event(Lane.UPDATE, 14, 16),
        event(Lane.UPDATE, 15, 17),
    ]
    summary = summarise(events, STEP)
    assert (summary.number, summary.time_s) == (3, 10)
    assert [u.lane for u in summary.lanes] == list(Lane)
    compute = use(summary, Lane.DEVICE_COMPUTE)
    assert (compute.busy_s, compute.share, compute.num_spans) == (pytest.approx(3), pytest.approx(0.3), 2)
    assert use(summary, Lane.NVME_READ).share == pytest.approx(1)
    assert use(summary, Lane.UPDATE).busy_s == pytest.approx(3)
    assert use(summary, Lane.COMMIT).busy_s == 0
    assert summary.accounted == pytest.approx(0.6)  # reads go on in the background
    assert summary.bound_by == use(summary, Lane.NVME_READ)
    assert summary.lines() == ("step 3, 10.000 s, is bound by: nvme read, busy 100% of it", "stalls: none")


def test_stalls_are_summed_by_cause_and_bind_nothing():
    events = [
        event(Lane.DEVICE_COMPUTE, 10, 13),
        event(Lane.STALL, 10, 12, "device"),
        event(Lane.STALL, 13, 17, "read not complete"),
        event(Lane.STALL, 19, 23, "read not complete"),
        event(Lane.STALL, 17, 18, "write before reuse"),
        event(Lane.STALL, 18, 18.5, None, "without a cause"),
    ]
    summary = summarise(events, STEP)
    assert list(summary.stalls) == ["read not complete", "device", "write before reuse", "without a cause"]
    assert list(summary.stalls.values()) == pytest.approx([5, 2, 1, 0.5])
    assert summary.bound_by is not None and summary.bound_by.lane is Lane.DEVICE_COMPUTE
    assert summary.accounted == pytest.approx(0.95)
    assert summary.lines()[1].startswith("stalls: read not complete 5.000 s, device 2.000 s, ")


@pytest.mark.parametrize("step", [STEP, StepMark(3, 10.0, 10.0)])
def test_nothing_recorded_is_nothing(step):
    summary = summarise([], step)
    assert summary.bound_by is None and summary.stalls == {} and summary.accounted == 0
    assert summary.lines() == (f"step 3, {step.end_s - step.start_s:.3f} s: nothing was recorded in it",)


def test_a_step_is_found_by_number_and_its_last_attempt_counts():
    steps = (StepMark(1, 0, 1), StepMark(2, 1, 2), StepMark(2, 2, 3), StepMark(3, 3, 4))
    assert find_step(steps, 2) == steps[2] and find_step(steps, None) == steps[3]
    with pytest.raises(ConfigError, match="no step 9: it holds 1, 2, 3"):
        find_step(steps, 9)
    with pytest.raises(ConfigError, match="no whole step"):
        find_step((), None)


def made_trace(num_dropped=0):
    events = (
        event(Lane.DEVICE_COMPUTE, 9, 14, name="forward <block_0>"),
        event(Lane.NVME_READ, 10, 12, name="weights of block_1"),
        event(Lane.NVME_READ, 11, 13, name="weights of block_2"),
        event(Lane.STALL, 14, 16, "read not complete", 'read not complete: "weights" of block_2'),
        event(Lane.STALL, 16, 17, "device"),
        event(Lane.UPDATE, 17, 19),
    )
    return Trace(events, (STEP,), {Lane.COLLECTIVES: "inside the unit programs"}, num_dropped)


def test_the_table_says_what_cannot_be_seen():
    shown = table(summarise(made_trace().events, STEP), made_trace())
    rows = list(zip(*(column.cells for column in shown.columns), strict=True))
    assert ("collectives", "-", "-", "-", "inside the unit programs") in rows
    assert ("nvme read", "30.0%", "3.000", "2", "") in rows


def test_the_page_is_whole_and_needs_no_network(tmp_path):
    path = timeline_picture.write(made_trace(num_dropped=4), STEP, tmp_path / "step.html")
    text = path.read_text()
    assert not re.search(r"(src|href)=|url\(|@import|<script", text)
    svg = xml.etree.ElementTree.fromstring(re.search(r"<svg.*</svg>", text, re.DOTALL)[0])
    name = "{http://www.w3.org/2000/svg}"
    spans = [rect for rect in svg.iter(f"{name}rect") if rect.get("class") == "span"]
    tips = [rect.find(f"{name}title").text for rect in spans]
    assert len(spans) == 6 and tips[0] == "forward <block_0>\ndevice compute: 4000.000 ms, from 0.000 ms"
    assert "cause: read not complete" in next(tip for tip in tips if "block_2" in tip and "stall" in tip)
    for shown in ("is bound by: device compute", "40.0%", "inside the unit programs", "4 events found no room",
                  "stall: read not complete", "2.000 s"):  # fmt: skip
        assert shown in text
    reads = [(float(r.get("x")), float(r.get("y"))) for r, tip in zip(spans, tips, strict=True) if "nvme read" in tip]
    assert len({y for _, y in reads}) == 2  # both are to be seen


@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_pictures(tmp_path, suffix, magic):
    path = timeline_picture.write(made_trace(), STEP, tmp_path / f"step.{suffix}")
    assert path.read_bytes().startswith(magic)


def test_unknown_pictures_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"\.html, \.png"):
        timeline_picture.write(made_trace(), STEP, tmp_path / "step.doc")


def test_a_step_without_events_can_be_drawn(tmp_path):
    for suffix in ("png", "html"):
        timeline_picture.write(Trace((), (STEP,)), STEP, tmp_path / f"step.{suffix}")


# --- wear -----------------------------------------------------------------------------------------------------------


def test_wear_in_words():
    tb = 10**12
    assert wear.sentence(3 * tb, 1e9, 600, None) == (
        "this run wrote 3.00 TB, 0.5% of the 600 TB that the drive is rated for; at this rate that lasts 6.94 days"
    )
    assert wear.sentence(5 * 10**9, 0.0, 600, 7) == (
        "this run wrote 5.00 GB, 0.00083% of the 600 TB that the drive is rated for"
    )
    assert wear.sentence(5 * 10**9, 1e9, None, 7) == (
        "this run wrote 5.00 GB; the drive says that 7% of its endurance is used"
    )
    assert wear.sentence(5 * 10**9, 1e9, None, None) is None


def test_what_earlier_processes_wrote_is_in_the_metrics(tmp_path):
    assert wear.written_before(tmp_path) == 0
    with MetricsWriter(tmp_path, tensorboard=False) as metrics:
        metrics.write("step", 1, {"loss": 1.0})  # of an older version
        metrics.write("step", 2, {"loss": 1.0, wear.RUN_TOTAL: 100})
        metrics.write("step", 3, {"loss": 1.0, wear.RUN_TOTAL: 150})
    assert wear.written_before(tmp_path) == 150


@pytest.mark.parametrize(
    ("text", "expected"),
    [('{"percent_used": 7}', 7), ('{"percentage_used": "12"}', 12), ("{}", None), ("denied", None), ("[]", None)],
)
def test_the_drives_own_word(text, expected):
    assert wear.parse_smart_log(text) == expected


def test_other_drives_say_nothing(tmp_path, monkeypatch):
    assert wear.percent_used(tmp_path / "missing") is None
    monkeypatch.setattr(wear, "_controller", lambda directory: "nvme99")
    assert wear.percent_used(Path("/")) is None
