"""Processes that commit steps together, as children of one that can be forked from cheaply, and that can be killed."""

import contextlib
import multiprocessing
import os
import pathlib
import signal
from multiprocessing.connection import Connection, wait
from typing import Any

from zinf_jax.tier.commits import CommitLog
from zinf_jax.tier.journal import Disk
from zinf_jax.tier.versions import Table, Tables

SIZES = {"weights": 6, "optimizer": 3, "none": 0}


def tables_at(step: int, process: int = 0) -> Tables:
    """Of a run in which each step changes every third chunk; each process's own."""
    found = {kind: Table.empty(n) for kind, n in SIZES.items()}
    for done in range(step + 1):
        for kind, n in SIZES.items():
            for index in range(n):
                if done == 0 or index % 3 == done % 3:
                    table = found[kind]
                    table.bank[index], table.version[index] = done % 2, done
                    table.checksum[index] = 100_000 * process + 1000 * done + index
    return found


def same(one: Tables, other: Tables) -> bool:
    return list(one) == list(other) and all(len(one[kind].changed_since(other[kind])) == 0 for kind in other)


class DeadlyDisk(Disk):
    """Kills the process at its n-th call."""

    def __init__(self, kill_at: int | None) -> None:
        self._left = kill_at

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        if not name.startswith("_") and callable(found):
            self._tick()
        return found

    def _tick(self) -> None:
        if self._left is not None:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


class Hub:
    """`Peers` by way of the parent, which answers each once all have asked."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def gather(self, value: int) -> list[int]:
        self._connection.send(("gather", value))
        answer: list[int] | None = self._connection.recv()
        if answer is None:
            raise ConnectionError("a process of the run is gone")
        return answer


def live(connection: Connection, directory: str, process: int, steps: int, kill_at: int | None) -> None:
    """One process's life: opens the log, says what it found, commits up to `steps`."""
    log = CommitLog(
        pathlib.Path(directory), process=process, peers=Hub(connection), compact_bytes=700, disk=DeadlyDisk(kill_at)
    )
    last = -1 if log.last is None else log.last.meta["step"]
    before = None if log.previous is None else log.previous.meta["step"]
    whole = log.last is None or same(log.last.tables, tables_at(last, process))
    whole &= log.previous is None or same(log.previous.tables, tables_at(last - 1, process))
    connection.send(("opened", (last, before, whole)))
    for step in range(last + 1, steps):
        log.commit({"step": step}, tables_at(step, process))
        connection.send(("done", step))
    log.close()
    connection.send(("end", None))


def run_together(
    directory: pathlib.Path, num_processes: int, steps: int, kills: dict[int, int]
) -> list[list[tuple[str, Any]]]:
    """Lets processes live until all are done, or one is gone: then the others are told.

    Returns:
      What each said, without what it gathered.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.tier.group"])
    ends, children = [], []
    for process in range(num_processes):
        ours, theirs = context.Pipe()
        child = context.Process(target=live, args=(theirs, str(directory), process, steps, kills.get(process)))
        child.start()
        theirs.close()
        ends.append(ours)
        children.append(child)
    said: list[list[tuple[str, Any]]] = [[] for _ in ends]
    asked: dict[int, int] = {}
    alive, gone = set(range(num_processes)), False
    while alive:
        for end in wait([ends[process] for process in alive]):
            process = ends.index(end)  # type: ignore[arg-type]
            try:
                what, value = ends[process].recv()
            except (EOFError, ConnectionResetError):
                alive.discard(process)
                gone |= said[process][-1:] != [("end", None)]
                continue
            if what == "gather":
                asked[process] = value
            else:
                said[process].append((what, value))
        if gone or len(asked) == num_processes:
            answer = None if gone else [asked[process] for process in range(num_processes)]
            for process in asked.keys() & alive:
                with contextlib.suppress(BrokenPipeError):  # killed while it waited
                    ends[process].send(answer)
            asked.clear()
    for child in children:
        child.join(30)
        assert child.exitcode is not None, "a process outlives its peers"
    return said
