"""Is what lies on the disk what was written? Every kind of damage is found and named, and nothing is changed."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import zinf_jax as zinf
from tests.train.blocks import placed
from tests.train.test_checkpoint import advance, trainer
from zinf_jax.cli import app
from zinf_jax.train.source import extents_of, open_source
from zinf_jax.train.verify import verify

STEP = {"streaming": {"durability": "step"}, "bf16": {"enabled": True}}


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A run at step 3 that retains step 2, and a checkpoint of step 1."""
    folder = tmp_path_factory.mktemp("original")
    with trainer(placed("nvme"), STEP, run_dir=folder / "run") as made:
        advance(made, 1)
        made.save(folder / "run" / "checkpoints" / "step_00000001")
        advance(made, 1)
        made.save()
        advance(made, 1)
    return folder / "run"


@pytest.fixture
def run_dir(original, tmp_path):
    shutil.copytree(original, tmp_path / "run")
    return tmp_path / "run"


def all_bytes(folder):
    return {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file() and p.suffix != ".lock"}


def place(path, kind, index):
    """File, offset and bytes of a chunk."""
    source = open_source(path, path if path.is_dir() else path.parent.parent)
    extents = extents_of(source.manifest)[kind]
    found = extents.places[index]
    offset = int(source.tables[kind].bank[index]) * extents.bank_bytes[found.path] + found.offset
    return source.paths[found.path] / f"{kind}.pages", offset, found.num_bytes


def flip(path, offset):
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 16]))


def test_a_whole_run_and_its_parts(run_dir):
    before = all_bytes(run_dir)
    seen = []
    report = verify(run_dir, lambda done, total: seen.append((done, total)))
    assert report.whole and not report.notes and not report.advice
    assert [(s.step, s.where) for s in report.steps] == [(3, "committed"), (2, "retained")]
    assert seen[-1][0] == seen[-1][1] == sum(s.num_bytes for s in report.steps)
    for path, where in (
        (run_dir / "retained" / "step_00000002.json", (2, "retained")),
        (run_dir / "checkpoints" / "step_00000001", (1, "checkpoint")),
    ):
        report = verify(path)
        assert report.whole and [(s.step, s.where) for s in report.steps] == [where]
    assert all_bytes(run_dir) == before


@pytest.mark.parametrize("kind", ["weights", "optimizer"])
@pytest.mark.parametrize("part", ["run", "retained", "checkpoint"])
def test_one_wrong_bit_is_named(run_dir, kind, part):
    path = {
        "run": run_dir,
        "retained": run_dir / "retained" / "step_00000002.json",
        "checkpoint": run_dir / "checkpoints" / "step_00000001",
    }[part]
    file, offset, num_bytes = place(path, kind, 2)
    flip(file, offset + num_bytes - 1)
    report = verify(path)
    assert not report.whole
    (problem,) = [p for step in report.steps if step.where != "the commit before" for p in step.problems]
    assert (problem.kind, problem.file, problem.offset, problem.num_bytes) == (kind, str(file), offset, num_bytes)
    assert problem.step == report.steps[0].step and problem.page
    assert problem.expected != problem.found and len(problem.found) == 8
    assert report.advice


def test_only_what_a_step_needs_is_read(run_dir):
    """The extents of a step that is gone hold anything."""
    for kind in ("weights", "optimizer"):
        used = {place(p, kind, 0)[1] for p in (run_dir, run_dir / "retained" / "step_00000002.json")}
        size = (run_dir / "pages" / f"{kind}.pages").stat().st_size
        bank = size // 3
        free = next(b * bank for b in range(3) if b * bank not in used)
        flip(run_dir / "pages" / f"{kind}.pages", free)
    assert verify(run_dir).whole


def test_advice_names_the_step_to_go_back_to_and_that_works(run_dir):
    file, offset, _ = place(run_dir, "weights", 0)
    flip(file, offset)
    report = verify(run_dir)
    assert "integrity.fallback" in report.advice[0] and "checkpoints" in " ".join(report.advice)
    step = next(s for s in report.steps if not s.problems).step
    with pytest.warns(UserWarning, match="damaged"), trainer(
        placed("nvme"), STEP, {"integrity": {"fallback": True}}, run_dir=run_dir, resume="auto"
    ) as made:  # fmt: skip
        advance(made, 1)
        assert made.global_step == step + 1


def damage_short(run_dir):
    os.truncate(run_dir / "pages" / "optimizer.pages", 4096)


def damage_missing(run_dir):
    (run_dir / "pages" / "weights.pages").unlink()


def damage_commits(run_dir):
    shutil.rmtree(run_dir / "commits")


def damage_prepare(run_dir):
    (run_dir / "commits" / "prepare-0.log").write_bytes(b"")


def damage_middle(run_dir):
    flip(run_dir / "commits" / "commits.log", 40)


def damage_manifest(run_dir):
    (run_dir / "run.json").write_text("{")


def damage_format(run_dir):
    manifest = json.loads((run_dir / "run.json").read_text())
    (run_dir / "run.json").write_text(json.dumps(manifest | {"format": 99}))


def damage_retained(run_dir):
    (run_dir / "retained" / "step_00000002.json").write_text("{}")


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (damage_short, "cut short"),
        (damage_missing, "missing"),
        (damage_commits, "no committed step"),
        (damage_prepare, "lacks the record"),
        (damage_middle, "damaged at offset"),
        (damage_manifest, "not a manifest"),
        (damage_format, "format 99"),
        (damage_retained, "retained step"),
    ],
)
def test_other_damage_is_found(run_dir, damage, text):
    damage(run_dir)
    report = verify(run_dir)
    assert not report.whole
    found = [p.what for p in (*report.problems, *(p for s in report.steps for p in s.problems))]
    assert any(text in what for what in found), found
    assert report.advice


def test_a_torn_tail_is_no_damage(run_dir):
    for name in ("commits.log", "prepare-0.log"):
        with open(run_dir / "commits" / name, "ab") as file:
            file.write(b"zinfjrnl and a part")
    report = verify(run_dir)
    assert report.whole
    assert len(report.notes) == 2


def test_a_run_that_is_being_trained_is_refused_but_not_what_cannot_change(tmp_path):
    with trainer(placed("nvme"), STEP, run_dir=tmp_path / "run") as made:
        advance(made, 1)
        kept, saved = made.save(), made.save(tmp_path / "saved")
        with pytest.raises(zinf.OwnerError, match=str(os.getpid())):
            verify(tmp_path / "run")
        advance(made, 2)
        assert verify(kept).whole and verify(saved).whole
        shown = CliRunner().invoke(app, ["verify", str(tmp_path / "run")])
        assert shown.exit_code == 2 and str(os.getpid()) in shown.stderr
    assert verify(tmp_path / "run").whole


def test_an_open_run_is_of_no_step(tmp_path):
    with trainer(placed("nvme"), {"streaming": {"durability": "off"}}, run_dir=tmp_path) as made:
        advance(made, 1)
        shutil.copytree(tmp_path, tmp_path.with_name("copy"))
    assert verify(tmp_path).whole
    report = verify(tmp_path.with_name("copy"))
    assert not report.whole and "of no step" in report.problems[0].what


@pytest.mark.parametrize("name", ["nothing", "retained", "config.yaml"])
def test_what_is_no_run(run_dir, name):
    (run_dir / "config.yaml").write_text("{}")
    with pytest.raises(zinf.ResumeError, match="not a"):
        verify(run_dir / name)


def test_the_command_needs_no_device(run_dir):
    command = [sys.executable, "-m", "zinf_jax.cli", "verify", str(run_dir)]
    environment = os.environ | {"JAX_PLATFORMS": "no_such_platform"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "whole" in done.stdout


def test_exit_codes_and_json(run_dir):
    def call(*args):
        return CliRunner().invoke(app, ["verify", *map(str, args)])

    assert call(run_dir).exit_code == 0
    assert call(run_dir / "pages").exit_code == 2
    file, offset, _ = place(run_dir, "optimizer", 1)
    flip(file, offset)
    shown = call(run_dir)
    assert shown.exit_code == 1
    assert f"offset {offset}" in shown.output and "What can be done" in shown.output
    shown = call(run_dir, "--json")
    document = json.loads(shown.stdout)
    assert shown.exit_code == 1 and document["whole"] is False
    assert document["steps"][0]["problems"][0]["offset"] == offset
