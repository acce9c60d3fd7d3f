"""What is removed, and above all what is not."""

import json
import os
import pathlib
import subprocess
import sys
import textwrap

import pytest
from typer.testing import CliRunner

from tests.train.blocks import placed
from tests.train.test_checkpoint import advance, trainer
from zinf_jax.cli import app
from zinf_jax.train import leftovers
from zinf_jax.train.leftovers import find
from zinf_jax.train.rundir import RunDir, sign_pages

STEP = {"streaming": {"durability": "step"}}
OLD = 1_000_000_000


def names(*paths):
    return [leftover.path.name for leftover in find(paths)]


def pages(nvme, run_id, run_dir, size=5000):
    folder = nvme / f"zinf-{run_id}"
    sign_pages(folder, run_dir)
    (folder / "weights.pages").write_bytes(b"x" * size)
    return folder


def age(*paths):
    for path in paths:
        for entry in (path, *path.rglob("*")):
            os.utime(entry, (OLD, OLD))


def run_dir(path, run_id, **manifest):
    path.mkdir(parents=True)
    (path / "owner.lock").touch()
    (path / "run.json").write_text(json.dumps({"run_id": run_id, "paths": [], **manifest}))
    return path


def test_pages_of_runs_that_are_gone(tmp_path):
    nvme = tmp_path / "nvme"
    lives = run_dir(tmp_path / "lives", "a" * 12)
    pages(nvme, "a" * 12, lives)
    replaced = pages(nvme, "b" * 12, lives)
    gone = pages(nvme, "c" * 12, tmp_path / "gone")
    assert names(nvme) == [replaced.name], "one that was touched just now may have its run directory made"
    age(gone)
    assert names(nvme) == [replaced.name, gone.name]


def test_pages_that_a_manifest_or_a_retained_step_refers_to_stay(tmp_path):
    nvme = tmp_path / "nvme"
    moved = run_dir(tmp_path / "run", "a" * 12, paths=[str(nvme / f"zinf-{'b' * 12}")])
    (moved / "retained").mkdir()
    kept = {"run_id": "c" * 12, "paths": [str(nvme / f"zinf-{'c' * 12}")]}
    (moved / "retained" / "step_00000001.json").write_text(json.dumps(kept))
    for letter in "abc":
        pages(nvme, letter * 12, moved)
    assert names(nvme) == []


def test_pages_stay_where_nobody_can_know(tmp_path):
    nvme = tmp_path / "nvme"
    unmounted = pages(nvme, "a" * 12, tmp_path / "not" / "mounted" / "run")
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "run.json").write_text("{")
    pages(nvme, "b" * 12, damaged)
    strange = pages(nvme, "c" * 12, tmp_path / "gone")
    (strange / "thesis.txt").write_text("mine")
    unsigned = nvme / f"zinf-{'d' * 12}"
    unsigned.mkdir()
    (unsigned / "weights.pages").write_text("x")
    owned = RunDir(tmp_path / "owned")
    pages(nvme, "e" * 12, tmp_path / "owned")
    (nvme / f"zinf-{'f' * 12}").symlink_to(strange)
    age(unmounted, strange, unsigned)
    assert names(nvme, tmp_path) == []
    owned.release()
    assert names(nvme) == ["zinf-" + "e" * 12]


def test_names_that_are_not_ours_stay(tmp_path):
    for name in ("zinf-run", "zinf-run-short", "zinf-xyz", ".x.tmp", ".a.12345678.tmp.bak", ".step_1.zzzzzzzz.tmp",
                 "zinf-run-ABCDEFGH", ".aio_probe_x"):  # fmt: skip
        (tmp_path / name).mkdir()
        (tmp_path / f"{name}-file").touch()
    theirs = tmp_path / ".document.12345678.tmp"  # our name, but another's content
    theirs.mkdir()
    (theirs / "page.txt").touch()
    age(tmp_path)
    assert names(tmp_path) == []


def test_temporaries(tmp_path):
    live = pathlib.Path(f"/proc/{os.getpid()}")
    assert live.exists()
    (tmp_path / f".aio_probe_{os.getpid()}_00000000").touch()
    (tmp_path / ".aio_probe_999999999_00000000").touch()
    run = run_dir(tmp_path / "run", "a" * 12)
    for folder in ("commits", "checkpoints", "retained"):
        (run / folder).mkdir()
    (run / "commits" / "prepare-0.log.tmp").touch()
    (run / ".run.json.12345678.tmp").touch()
    (run / "checkpoints" / ".step_00000003.12345678.tmp").mkdir()
    (run / "checkpoints" / ".step_00000003.12345678.tmp" / "weights.pages").touch()
    (run / "checkpoints" / ".abandoned-step_00000009-123456").mkdir()
    (run / "checkpoints" / "step_00000001").mkdir()
    (run / ".generate-abcd1234").mkdir()
    (run / "commits.damaged-1").mkdir()
    (tmp_path / "commits.damaged-1").mkdir()  # not a run's
    saved = tmp_path / ".saved.12345678.tmp"
    saving = RunDir(saved)
    (saved / ".run.json.12345678.tmp").touch()  # it died in its last write
    age(run / ".generate-abcd1234", saved, tmp_path / "commits.damaged-1")
    ours = [".run.json.12345678.tmp", ".step_00000003.12345678.tmp", ".abandoned-step_00000009-123456",
            ".generate-abcd1234", "commits.damaged-1", "prepare-0.log.tmp"]  # fmt: skip
    assert sorted(names(tmp_path)) == sorted([".aio_probe_999999999_00000000", *ours])
    owner = RunDir(run)
    assert names(tmp_path) == [".aio_probe_999999999_00000000", ".generate-abcd1234"]
    owner.release()
    saving.release()
    there = names(tmp_path)
    assert saved.name in there and there.count(".run.json.12345678.tmp") == 1, "found with its directory"
    assert all(leftovers.delete(leftover) for leftover in find([tmp_path]))
    assert not names(tmp_path) and not saved.exists()


def test_what_comes_to_life_between_looking_and_removing_stays(tmp_path):
    temporary = tmp_path / "zinf-run-abcdefgh"
    RunDir(temporary).release()
    (found,) = find([tmp_path])
    owner = RunDir(temporary)
    assert not leftovers.delete(found)
    assert temporary.exists()
    owner.release()
    assert leftovers.delete(found)
    assert not temporary.exists()


def test_a_killed_run_without_a_run_dir(tmp_path):
    """Its directory and its pages, and not those of one that lives."""
    script = f"""
        import os, sys
        sys.path.insert(0, {os.getcwd()!r})
        from tests.train.test_checkpoint import advance, placed, trainer
        made = trainer(placed("nvme"), {{"nvme_path": {str(tmp_path)!r}}})
        advance(made, 1)
        os.kill(os.getpid(), 9)
    """
    with trainer(placed("nvme"), {"nvme_path": str(tmp_path)}) as made:
        advance(made, 1)
        mine = {p.name for p in tmp_path.iterdir()}
        done = subprocess.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)])
        assert done.returncode == -9
        theirs = {p.name for p in tmp_path.iterdir()} - mine
        shown = CliRunner().invoke(app, ["clean", str(tmp_path)])
        assert shown.exit_code == 0
        assert set(names(tmp_path)) == theirs and len(theirs) == 2
        assert all(name in shown.output for name in theirs) and not any(name in shown.output for name in mine)
        assert CliRunner().invoke(app, ["clean", str(tmp_path), "--delete"], input="n\n").exit_code == 0
        assert set(names(tmp_path)) == theirs
        shown = CliRunner().invoke(app, ["clean", str(tmp_path), "--delete", "--yes"])
        assert "removed 2" in shown.output
        assert {p.name for p in tmp_path.iterdir()} == mine
        advance(made, 1)
    assert list(tmp_path.iterdir()) == []


def test_a_run_removes_its_own(tmp_path):
    nvme, folder = tmp_path / "nvme", tmp_path / "run"
    nvme.mkdir()
    parts = (placed("nvme"), STEP, {"nvme_path": str(nvme)})
    with trainer(*parts, run_dir=folder) as made:
        advance(made, 1)
    before = {p.relative_to(tmp_path) for p in tmp_path.rglob("*")}
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / ".step_00000003.12345678.tmp").mkdir()
    (folder / "commits" / "commits.log.tmp").touch()
    (folder / ".run.json.12345678.tmp").touch()
    pages(nvme, "b" * 12, folder)
    other = pages(nvme, "c" * 12, tmp_path / "other")
    with trainer(*parts, run_dir=folder, resume="auto") as made:
        advance(made, 1)
    after = {p.relative_to(tmp_path) for p in tmp_path.rglob("*") if other not in (p, p.parent)}
    assert after - {pathlib.Path("run/checkpoints")} == before


def test_bytes_and_json(tmp_path):
    gone = pages(tmp_path, "c" * 12, tmp_path / "gone", size=100_000)
    age(gone)
    document = json.loads(CliRunner().invoke(app, ["clean", str(tmp_path), "--json"]).stdout)
    assert document["leftovers"][0]["path"] == str(gone)
    assert document["num_bytes"] >= 100_000
    assert CliRunner().invoke(app, ["clean", str(tmp_path / "nothing")]).exit_code == 2
    with pytest.raises(NotADirectoryError):
        find([gone / "weights.pages"])
