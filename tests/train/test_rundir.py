"""Who owns a run directory: one live process, whatever became of the others."""

import errno
import fcntl
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import textwrap

import pytest

import zinf_jax as zinf
from tests.train import blocks
from tests.train.blocks import placed, run
from tests.train.test_checkpoint import advance, trainer
from zinf_jax.tier import commits, journal
from zinf_jax.train import checkpoint, rundir
from zinf_jax.train.rundir import LOCK, RunDir, held_by
from zinf_jax.train.source import find_latest

STEP = {"streaming": {"durability": "step"}}


@pytest.fixture(params=["locks", errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK])
def locks(request, monkeypatch):
    """A file system with locks, and some without."""
    if request.param != "locks":

        def refuse(fd, operation):
            raise OSError(request.param, os.strerror(request.param))

        monkeypatch.setattr(fcntl, "flock", refuse)
    return request.param


def identity(pid, **other):
    ticks = rundir._start_ticks(pid)
    return {"pid": pid, "start_ticks": ticks, "boot_id": rundir._boot_id(), "host": socket.gethostname(), "since": 1.0,
            **other}  # fmt: skip


def write_lock(path, holder):
    path.mkdir(exist_ok=True)
    (path / LOCK).write_text(holder if isinstance(holder, str) else json.dumps(holder))


def test_a_second_owner_is_refused_and_told_who_the_first_is(tmp_path, locks):
    first = RunDir(tmp_path)
    assert str(os.getpid()) in held_by(tmp_path)
    with pytest.raises(zinf.OwnerError, match=f"process {os.getpid()} on {socket.gethostname()}"):
        RunDir(tmp_path)
    first.release()
    first.release()
    assert held_by(tmp_path) is None
    RunDir(tmp_path).release()


@pytest.mark.parametrize("other", [{"start_ticks": "1"}, {"boot_id": "another"}], ids=["pid was reused", "rebooted"])
def test_a_dead_owner_is_taken_over(tmp_path, locks, other):
    """The PID of the dead owner is that of a live process: this one."""
    write_lock(tmp_path, identity(os.getpid(), **other))
    assert held_by(tmp_path) is None
    RunDir(tmp_path).release()


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"pid": "x"}', '{"host": 3}'])
def test_a_lock_file_that_cannot_be_read_owns_nothing(tmp_path, locks, text):
    write_lock(tmp_path, text)
    RunDir(tmp_path).release()


def test_a_killed_owner_that_nobody_waited_for_is_dead(tmp_path, locks):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    write_lock(tmp_path, identity(child.pid))
    if locks != "locks":
        assert str(child.pid) in held_by(tmp_path)
    child.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie from here on
    assert held_by(tmp_path) is None
    RunDir(tmp_path).release()
    child.wait()


def test_an_owner_on_another_host_is_believed_where_there_are_no_locks(tmp_path, monkeypatch):
    def refuse(fd, operation):
        raise OSError(errno.ENOSYS, "no")

    monkeypatch.setattr(fcntl, "flock", refuse)
    write_lock(tmp_path, identity(1, host="elsewhere"))
    with pytest.raises(zinf.OwnerError, match="elsewhere"):
        RunDir(tmp_path)


def test_a_forked_child_does_not_keep_the_lock_of_its_dead_parent(tmp_path):
    """A data loader's worker that outlives its trainer."""
    script = f"""
        import os, pathlib, signal, sys, time
        from zinf_jax.train.rundir import RunDir
        owned = RunDir(pathlib.Path({str(tmp_path)!r}))
        child = os.fork()
        if not child:
            time.sleep(60)
        print(child, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    child = int(_run_until_killed(script))
    try:
        RunDir(tmp_path).release()
    finally:
        os.kill(child, signal.SIGKILL)


def _run_until_killed(script):
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)
    line = process.stdout.readline()
    process.wait()
    process.stdout.close()
    return line


def test_looking_for_a_moment_does_not_refuse_a_trainer(tmp_path, monkeypatch):
    """`held_by` takes the lock to see whether it is free."""
    write_lock(tmp_path, "")
    fd = os.open(tmp_path / LOCK, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    monkeypatch.setattr(rundir.time, "sleep", lambda s: os.close(fd))
    RunDir(tmp_path).release()


# --- pages -------------------------------------------------------------------------------------------------------


def test_pages_are_signed_and_private(tmp_path):
    config = {"nvme_path": str(tmp_path / "nvme"), **STEP}
    (tmp_path / "nvme").mkdir()
    with trainer(placed("nvme"), config, run_dir=tmp_path / "run") as made:
        advance(made, 1)
    (pages,) = (tmp_path / "nvme").iterdir()
    assert pages.name.startswith("zinf-")
    assert pages.stat().st_mode & 0o777 == 0o700
    assert (pages / "run_dir").read_text() == f"{tmp_path / 'run'}\n"
    for path in [*pages.iterdir(), *(tmp_path / "run").rglob("*.*")]:
        if path.is_file():
            assert path.stat().st_mode & 0o777 == 0o600, path


def test_a_run_that_was_moved_goes_on_and_a_copy_of_it_is_independent(tmp_path):
    """Pages inside a run directory are found beside the manifest, not where they once were."""
    straight = run(placed("nvme"), STEP, steps=4)
    with trainer(placed("nvme"), STEP, run_dir=tmp_path / "a") as made:
        advance(made, 2)
        made.save()
    subprocess.run(["cp", "-r", tmp_path / "a", tmp_path / "copy"], check=True)
    os.rename(tmp_path / "a", tmp_path / "moved")
    for name in ("moved", "copy"):
        with trainer(placed("nvme"), STEP, run_dir=tmp_path / name, resume="auto") as made:
            made.prepare(blocks.batch())
            assert made.global_step == 2
            assert advance(made, 2).bits[1:] == straight.bits[1:]
    assert not (tmp_path / "a").exists()


def test_a_copy_never_changes_the_pages_of_the_original(tmp_path):
    (tmp_path / "nvme").mkdir()
    config = {"nvme_path": str(tmp_path / "nvme"), **STEP}
    with trainer(placed("nvme"), config, run_dir=tmp_path / "a") as made:
        advance(made, 2)
    subprocess.run(["cp", "-r", tmp_path / "a", tmp_path / "copy"], check=True)
    with (
        pytest.raises(zinf.ResumeError, match="is a copy of"),
        trainer(placed("nvme"), config, run_dir=tmp_path / "copy", resume="auto") as made,
    ):
        made.prepare(blocks.batch())
    with trainer(placed("nvme"), config, run_dir=tmp_path / "copy", overwrite=True) as made:
        advance(made, 1)
    with trainer(placed("nvme"), config, run_dir=tmp_path / "a", resume="auto") as made:
        made.prepare(blocks.batch())
        assert advance(made, 1).bits[1:] == run(placed("nvme"), STEP, steps=3).bits[1:]


def test_looking_for_the_latest_step_does_not_touch_a_log_that_another_process_writes(tmp_path):
    """`zinf train --resume auto`, started twice, looks before it owns."""
    with trainer(placed("nvme"), STEP, run_dir=tmp_path / "a") as made:
        advance(made, 2)
        log = tmp_path / "a" / "commits" / "prepare-0.log"
        with open(log, "ab") as file:  # the record of a step that is being committed
            file.write(b"zinfjrnl")
        before = {p: (p.read_bytes(), p.stat().st_ino) for p in log.parent.iterdir()}
        assert find_latest(tmp_path / "a").manifest["step"] == 2
        assert {p: (p.read_bytes(), p.stat().st_ino) for p in log.parent.iterdir()} == before


def test_pages_that_are_gone_are_an_error(tmp_path):
    with trainer(placed("nvme"), STEP, run_dir=tmp_path) as made:
        advance(made, 1)
    (tmp_path / "pages" / "weights.pages").unlink()
    with (
        pytest.raises(zinf.StoreError, match="are gone"),
        trainer(placed("nvme"), STEP, run_dir=tmp_path, resume="auto") as made,
    ):
        made.prepare(blocks.batch())


# --- what is durable ---------------------------------------------------------------------------------------------


def test_turning_durability_off_leaves_retained_steps_as_they_are(tmp_path):
    with trainer(placed("nvme"), STEP, run_dir=tmp_path / "a") as made:
        advance(made, 2)
        kept = made.save()
    with trainer(placed("nvme"), {"streaming": {"durability": "off"}}, run_dir=tmp_path / "a", resume="auto") as made:
        made.prepare(blocks.batch())
        advance(made, 3)
    with trainer(placed("nvme"), STEP, run_dir=tmp_path / "b", resume=kept) as made:
        made.prepare(blocks.batch())
        assert made.global_step == 2
        assert advance(made, 2).bits[1:] == run(placed("nvme"), STEP, steps=4).bits[1:]


def test_a_kept_step_that_is_named_does_not_need_the_commits(tmp_path):
    """A log that is damaged before its end is refused; what the message advises then works."""
    with trainer(placed("nvme"), STEP, run_dir=tmp_path) as made:
        advance(made, 2)
        kept = made.save()
        advance(made, 3)
    log = tmp_path / "commits" / "commits.log"
    data = bytearray(log.read_bytes())
    data[len(data) // 3] ^= 1
    log.write_bytes(data)
    with pytest.raises(zinf.StoreError, match="resume from a retained step"):
        trainer(placed("nvme"), STEP, run_dir=tmp_path, resume="auto")
    with pytest.warns(UserWarning, match=r"Set aside as .*commits\.damaged-1"):
        made = trainer(placed("nvme"), STEP, run_dir=tmp_path, resume=kept)
    with made:
        made.prepare(blocks.batch())
        assert made.global_step == 2
        assert advance(made, 1).bits[1:] == run(placed("nvme"), STEP, steps=3).bits[1:]
    assert (tmp_path / "commits.damaged-1" / "commits.log").read_bytes() == bytes(data)
    with trainer(placed("nvme"), STEP, run_dir=tmp_path, resume="auto") as made:
        made.prepare(blocks.batch())
        assert made.global_step == 3


def test_what_a_user_notes_after_the_last_step_is_kept(tmp_path):
    with trainer(placed("nvme"), STEP, run_dir=tmp_path) as made:
        made.user_state = "before"
        advance(made, 2)
        made.user_state = "after"
    with trainer(placed("nvme"), STEP, run_dir=tmp_path, resume="auto") as made:
        made.prepare(blocks.batch())
        assert (made.global_step, made.user_state) == (2, "after")


@pytest.mark.parametrize("durability", ["step", "off"])
def test_restoring_weights_in_place_from_a_retained_step_goes_back_durably(tmp_path, durability):
    with trainer(placed("nvme"), STEP, run_dir=tmp_path) as made:
        advance(made, 1)
        kept = made.save()
        advance(made, 2)
    parts = (placed("nvme"), {"restore": "weights", "streaming": {"durability": durability}})
    with trainer(*parts, run_dir=tmp_path, resume=kept) as made:
        made.prepare(blocks.batch())
        assert made.global_step == 0
        advance(made, 1)


def test_an_overwritten_run_never_stands_without_its_pages(tmp_path, monkeypatch):
    """Killed in the middle of giving the old run up: what is left is no run, not a broken one."""
    with trainer(placed("nvme"), STEP, run_dir=tmp_path) as made:
        advance(made, 1)

    def die(directory):
        assert not (tmp_path / "run.json").exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "delete_pages", die)
    with pytest.raises(KeyboardInterrupt):
        trainer(placed("nvme"), STEP, run_dir=tmp_path, overwrite=True)
    monkeypatch.undo()
    with trainer(placed("nvme"), STEP, run_dir=tmp_path, resume="auto") as made:
        assert advance(made, 1).bits == run(placed("nvme"), STEP, steps=1).bits


def test_a_forked_child_that_ends_leaves_its_parents_run_alone(tmp_path):
    """Its exit runs the parent's finalizers."""
    script = f"""
        import os, sys
        sys.path.insert(0, {os.getcwd()!r})
        from tests.train.test_checkpoint import advance, placed, trainer
        made = trainer(placed("nvme"), {{"nvme_path": {str(tmp_path)!r}}})
        advance(made, 1)
        child = os.fork()
        if not child:
            made._finalizer()  # as at exit (JAX's own may hang in a forked child)
            os._exit(0)
        os.waitpid(child, 0)
        print(sum(p.name.endswith(".pages") for p in made._run._paths[0].iterdir()), flush=True)
        advance(made, 1)
        made.close()
        print("done", os.listdir({str(tmp_path)!r}))
    """
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == ["3", "done []"], done.stderr


# --- a disk that is full -----------------------------------------------------------------------------------------


def test_a_save_that_does_not_fit_leaves_nothing_and_training_goes_on(tmp_path):
    straight = run(placed("nvme"), STEP, steps=3)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with trainer(placed("nvme"), STEP, run_dir=tmp_path / "run") as made:
        advance(made, 2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
        try:
            with pytest.raises(zinf.StoreError, match="reserve"):
                made.save(tmp_path / "saved")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert [p.name for p in tmp_path.iterdir()] == ["run"]
        assert advance(made, 1).bits[1:] == straight.bits[1:]
        made.save(tmp_path / "saved")
        assert not (tmp_path / "saved" / LOCK).exists()


@pytest.mark.parametrize("call", ["write", "sync", "replace"])
def test_a_commit_that_fails_is_said_and_the_run_goes_on_from_the_one_before(tmp_path, monkeypatch, call):
    straight = run(placed("nvme"), STEP, steps=6)
    monkeypatch.setitem(commits.CommitLog.__init__.__kwdefaults__, "compact_bytes", 2000)
    real, count = getattr(journal.Disk, call), 0

    def fail(self, *args):
        nonlocal count
        count += 1
        if count >= (2 if call == "replace" else 7):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, *args)

    monkeypatch.setattr(journal.Disk, call, fail)
    with (
        pytest.raises(zinf.StoreError, match="No space left"),
        trainer(placed("nvme"), STEP, run_dir=tmp_path) as made,
    ):
        for _ in range(60):
            advance(made, 1)
    monkeypatch.undo()
    with trainer(placed("nvme"), STEP, run_dir=tmp_path, resume="auto") as made:
        made.prepare(blocks.batch())
        first = made.global_step
        assert first >= 1
        if first < 6:
            assert advance(made, 6 - first).bits[1:] == straight.bits[1:]


def test_retaining_without_room_changes_nothing(tmp_path, monkeypatch):
    straight = run(placed("nvme"), STEP, steps=3)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with trainer(placed("nvme"), STEP, run_dir=tmp_path) as made:
        advance(made, 2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
        try:
            with pytest.raises(zinf.StoreError, match="one more version"):
                made.save()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert made.retained() == []
        assert advance(made, 1).bits[1:] == straight.bits[1:]
        made.save()
        assert made.retained() == [3]


def test_an_exception_in_the_loop_is_what_the_user_sees_and_the_run_goes_on(tmp_path):
    with pytest.raises(ZeroDivisionError), trainer(placed("nvme"), STEP, run_dir=tmp_path) as made:
        advance(made, 2)
        raise ZeroDivisionError
    with trainer(placed("nvme"), STEP, run_dir=tmp_path, resume="auto") as made:
        made.prepare(blocks.batch())
        assert advance(made, 2).bits[1:] == run(placed("nvme"), STEP, steps=4).bits[1:]


@pytest.mark.parametrize("durability", ["step", "every_3"])
def test_a_batch_whose_step_failed_comes_again(tmp_path, durability):
    """`user_state` says where the data is after the batch; the state that is kept at the end is of the step before."""
    parts = (placed("nvme"), {"streaming": {"durability": durability}})

    def take(made, batch):
        made.user_state = {"next": made.global_step + 1}
        return made.step(batch)

    with pytest.raises(zinf.ConfigError), trainer(*parts, run_dir=tmp_path) as made:
        for i in range(2):
            take(made, blocks.batch(seed=i))
        take(made, blocks.batch(size=3))
    with trainer(*parts, run_dir=tmp_path, resume="auto") as made:
        made.prepare(blocks.batch())
        assert (made.global_step, made.user_state) == (2, {"next": 2})
