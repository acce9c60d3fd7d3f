"""Trains a small model in processes that are killed, as a server that forks one process per attempt.

The server imports everything once and never starts a JAX backend, so a fork is cheap and safe. It reads one JSON
request a line and answers one a line. An attempt resumes with "auto" and goes on until the run has all its steps, or
until it dies at the n-th *event*: a call by which bytes or names in the run's directories change, counted from the
process's start. So every moment between two calls can be hit, the same one again and again.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import random
import select
import signal
import sys
import time
import traceback
import warnings
from typing import Any

import jax
import jax.numpy as jnp

import zinf_jax as zinf
from tests.train import blocks
from zinf_jax.tier import commits, files

NUM_BLOCKS = 3
RETAIN_EVERY = 3
SAVE_AT, SAVED = 4, "saved/checkpoint"  # one beside the run


@dataclasses.dataclass(frozen=True)
class Request:
    """An attempt.

    Attributes:
      run_dir: Of the run.
      side: Where what the test must know is written: losses, what was synced, the result.
      config: Beside `blocks.BASE_CONFIG`.
      steps: How many the run is to have.
      kill_at: Event at which it dies; None: it lives.
      among: Count only events whose name contains this.
      kill_after_s: When the server kills it, whatever it does.
      how: "kill", or what happens at the event instead: "raise" (an exception), "full" (the disk is), "term" (SIGTERM,
        whose handler ends the program).
    """

    run_dir: str
    side: str
    config: dict[str, Any]
    steps: int
    kill_at: int | None = None
    among: str = ""
    kill_after_s: float | None = None
    how: str = "kill"
    seed: int = 0


class Stopped(Exception):
    """What an attempt raises in the middle of its loop."""


# --- the training -----------------------------------------------------------------------------------------------------


def loss(params: Any, state: Any, batch: Any, rng: Any) -> Any:
    noise = 1 + 0.1 * jax.random.normal(rng, ())
    value = blocks.loss(params, batch) * noise
    return value, ({"mean": 0.9 * state["mean"] + 0.1 * value, "seen": state["seen"] + 1}, {"noise": noise})


def make_trainer(run_dir: pathlib.Path, config: dict[str, Any], **kwargs: Any) -> zinf.Trainer:
    params = zinf.lazy(lambda key: blocks.init(key, NUM_BLOCKS), jax.random.key(0))
    return zinf.Trainer(
        loss, params, zinf.optim.adamw(1e-2, weight_decay=0.1), blocks.config(blocks.placed("nvme"), config),
        has_aux=True, rng=jax.random.key(7), state={"mean": jnp.float32(0), "seen": jnp.int32(0)},
        run_dir=run_dir, **{"resume": "auto", **kwargs},
    )  # fmt: skip


def train(trainer: zinf.Trainer, steps: int, side: pathlib.Path) -> dict[str, Any]:
    """Goes on to step `steps`; keeps some steps in place and gives older ones up; saves one elsewhere."""
    trainer.prepare(blocks.batch())
    with open(side / "losses.txt", "a", buffering=1) as log:
        log.write(f"start {trainer.global_step}\n")
        while trainer.global_step < steps:
            if trainer.global_step == SAVE_AT and not (side / SAVED).exists():
                trainer.save(side / SAVED)
            place = 0 if trainer.user_state is None else trainer.user_state["next"]
            trainer.user_state = {"next": place + 1}
            out = trainer.step(blocks.batch(seed=place))
            log.write(f"{place} {out.step} {out.skipped} {out.loss.hex()} {float(out.aux['noise'][0]).hex()}\n")
            if out.step % RETAIN_EVERY == 0 and not out.skipped:
                trainer.save()
            for old in trainer.retained()[:-1]:  # each step: an attempt may have died before it came to it
                trainer.release(old)
    return everything(trainer)


def everything(trainer: zinf.Trainer) -> dict[str, Any]:
    """All state of a run, bit for bit, as digests."""

    def digest(value: Any) -> str:
        return hashlib.sha256(value.tobytes()).hexdigest()

    counters = trainer._counters()
    return {
        "params": {name: digest(value) for name, value in trainer.iter_params()},
        "weights": {name: digest(value) for name, value in trainer.iter_params(master=False)},
        "moments": {s: {k: digest(v) for k, v in d.items()} for s, d in trainer.opt_state().items() if s != "count"},
        "counters": counters,
    }


# --- dying ------------------------------------------------------------------------------------------------------------


class Events:
    """Counts the calls that change something under `roots`, and ends the process at one of them.

    Notes in `side` what a power cut would leave: how much of each log was synced, and the files that a rename replaced
    until the directory is synced.
    """

    def __init__(self, roots: list[str], side: pathlib.Path, request: Request) -> None:
        self._roots, self._side, self._request = tuple(roots), side, request
        self._random = random.Random(request.seed)
        self.count = self.total = 0
        self._unlink = os.unlink
        self._fired = False

    def at(self, what: str, torn: Any = None) -> None:
        """An event is about to happen."""
        self.total += 1
        self.count += self._request.among in what
        if self.count != self._request.kill_at or self._fired or self._request.among not in what:
            return
        self._fired = True
        (self._side / "killed_at.txt").write_text(what)
        if self._request.how == "raise":
            raise Stopped(what)
        if self._request.how == "full":
            raise OSError(28, "No space left on device")
        if self._request.how == "term":
            signal.raise_signal(signal.SIGTERM)
            return
        if torn is not None and self._random.random() < 0.5:
            torn()
        os.kill(os.getpid(), signal.SIGKILL)

    def _path(self, target: Any) -> str | None:
        """Where a call goes, if it is under the roots."""
        try:
            path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else os.path.abspath(target)
        except (OSError, TypeError):
            return None
        return path if path.startswith(self._roots) else None

    def install(self) -> None:
        for name in ("open", "mkdir", "ftruncate", "rmdir"):
            self._wrap(name)
        self._wrap("pwrite", torn=lambda pwrite, fd, data, at: pwrite(fd, bytes(data)[: len(data) // 2], at))
        self._wrap("fsync", after=self._synced)
        self._wrap("fdatasync", after=self._synced)
        self._wrap("replace", before=self._keep_old, after=self._replaced)
        self._wrap("unlink", before=self._keep_old)
        self._wrap("rename")
        self._wrap_method(files.PageFiles, "start", lambda operation, kind, *rest: f"{operation} {kind}", {"write"})
        self._wrap_method(files.PageFiles, "sync", lambda kinds: "sync pages", None)

    def _wrap(self, name: str, *, before: Any = None, after: Any = None, torn: Any = None) -> None:
        real = getattr(os, name)

        def call(target: Any, *args: Any, **kwargs: Any) -> Any:
            path = self._path(target)
            if path is None or (name == "open" and not args[0] & (os.O_CREAT | os.O_TRUNC)):
                return real(target, *args, **kwargs)
            if before is not None:
                before(path, *args[:1])
            partly = None if torn is None else lambda: torn(real, target, *args)
            self.at(f"{name} {os.path.basename(path)}", partly)
            result = real(target, *args, **kwargs)
            if after is not None:
                after(path, args[0] if args else target)
            return result

        setattr(os, name, call)

    def _wrap_method(self, owner: Any, name: str, describe: Any, only: set[str] | None) -> None:
        real = getattr(owner, name)
        events = self

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if only is None or args[0] in only:
                events.at(describe(*args))
            return real(self, *args, **kwargs)

        setattr(owner, name, call)

    def _synced(self, path: str, fd: int) -> None:
        if os.path.isdir(path):
            for kept in (self._side / "old").glob(path.replace("/", "%") + "%*"):
                if "%" not in kept.name.removeprefix(path.replace("/", "%") + "%"):
                    self._unlink(kept)
        elif ".log" in os.path.basename(path):
            (self._side / "synced" / path.replace("/", "%")).write_text(str(os.fstat(fd).st_size))

    def _keep_old(self, source: str, target: Any = None) -> None:
        target = source if target is None else os.path.abspath(target)
        kept = self._side / "old" / target.replace("/", "%")
        if os.path.exists(target) and not os.path.basename(target).startswith("."):
            if kept.exists():
                self._unlink(kept)
            os.link(target, kept)

    def _replaced(self, source: str, target: Any) -> None:
        synced = self._side / "synced"
        if (synced / source.replace("/", "%")).exists():
            os.rename(synced / source.replace("/", "%"), synced / os.path.abspath(target).replace("/", "%"))


def attempt(request: Request) -> dict[str, Any]:
    """One process's life, in that process."""
    side = pathlib.Path(request.side)
    roots = [request.run_dir, str(side / "saved"), *request.config.get("nvme_path", [])]
    for name in ("old", "synced"):
        (side / name).mkdir(exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    events = Events(roots, side, request)
    commits.CommitLog.__init__.__kwdefaults__["compact_bytes"] = 2000  # type: ignore[index]
    events.install()
    trainer = make_trainer(pathlib.Path(request.run_dir), request.config)
    with trainer:
        result = train(trainer, request.steps, side)
    return {"result": result, "events": events.total}


# --- the server -------------------------------------------------------------------------------------------------------


def serve() -> None:
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        request = Request(**json.loads(line))
        answer = fork_attempt(request)
        print(json.dumps(answer), flush=True)


def fork_attempt(request: Request) -> dict[str, Any]:
    side = pathlib.Path(request.side)
    read, write = os.pipe()
    start = time.perf_counter()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.close(read)
            os.dup2(os.open(side / "stderr.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
            answer = attempt(request)
            code = 0
        except BaseException as error:
            answer = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        with os.fdopen(write, "w") as pipe:
            json.dump(answer, pipe)
        os._exit(code)
    os.close(write)
    if request.kill_after_s is not None and not select.select([read], [], [], request.kill_after_s)[0]:
        os.kill(pid, signal.SIGKILL)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    killed = side / "killed_at.txt"
    answer = json.loads(text) if text else {}
    answer |= {"status": status, "wall_s": time.perf_counter() - start}
    if killed.exists():
        answer["killed_at"] = killed.read_text()
        killed.unlink()
    return answer


if __name__ == "__main__":
    jax.config.update("jax_compilation_cache_dir", os.environ["ZINF_TEST_CACHE"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    serve()
