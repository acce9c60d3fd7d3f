"""Durability: what a sync waits for, what it blocks, and what a failure of it means."""

import errno
import threading
from collections.abc import Callable

import numpy as np
import pytest

import aio_ffi
from aio_ffi import _testing
from tests.aio_ffi.conftest import fill

SIZE = 1 << 18


class Background(threading.Thread):
    """Runs a call; `result` waits for it, and raises what it raised."""

    def __init__(self, call: Callable[[], object]):
        super().__init__(daemon=True)
        self._call = call
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._call()
        except BaseException as error:
            self._error = error

    def result(self) -> None:
        self.join(30)
        assert not self.is_alive()
        if self._error is not None:
            raise self._error


def test_it_need_not_wait_for_transfers(engine, arena, path):
    with engine.open(path, num_bytes=2 * SIZE) as file:
        engine.write(file, 0, fill(arena.array(0, SIZE))).wait()
        with _testing.closed_gate(engine, "submit"):
            handle = engine.write(file, SIZE, arena.array(0, SIZE))
            file.sync(wait=False)
            assert not handle.done()
            waiting = Background(file.sync)
            waiting.join(0.2)
            assert waiting.is_alive()
            file.sync(wait=False)  # one that waits for transfers is no obstacle
        handle.wait()
        waiting.result()


@pytest.mark.parametrize("wait", [False, True])
def test_it_blocks_nobody_else(engine, arena, path, wait):
    """Submits, waits and `num_bytes` go on while fdatasync does; a close waits for it."""
    written, found = fill(arena.array(0, SIZE)), arena.array(4 << 20, SIZE)
    file = engine.open(path)
    engine.write(file, 0, written).wait()
    with _testing.closed_gate(engine, "sync"):
        syncing = Background(lambda: file.sync(wait=wait))
        _testing.wait_at_gate(engine, "sync")

        def others() -> None:
            for _ in range(5):
                engine.read(file, 0, found).wait()
                engine.write(file, SIZE, written).wait()
                assert file.num_bytes == 2 * SIZE

        Background(others).result()
        np.testing.assert_array_equal(found, written)
        closing = Background(file.close)
        closing.join(0.2)
        assert closing.is_alive()
        assert syncing.is_alive()
    syncing.result()
    closing.result()
    with pytest.raises(ValueError, match="closed"):
        file.sync(wait=False)


def test_syncs_while_reads_and_writes_go_on(engine, arena, path):
    parts = 8
    written, found = fill(arena.array(0, parts * SIZE)), arena.array(8 << 20, parts * SIZE)
    stop = threading.Event()
    with engine.open(path, num_bytes=parts * SIZE) as file:
        engine.write(file, 0, written).wait()

        def sync() -> None:
            while not stop.is_set():
                file.sync(wait=False)

        syncing = Background(sync)
        try:
            for _ in range(4):
                found[:] = 0
                cuts = [slice(i * SIZE, (i + 1) * SIZE) for i in range(parts)]
                handles = [engine.read(file, cut.start, found[cut], seed=0) for cut in cuts]
                handles += [engine.write(file, cut.start, written[cut]) for cut in cuts]
                aio_ffi.wait_all(handles)
                np.testing.assert_array_equal(found, written)
                assert [h.checksum for h in handles[:parts]] == [aio_ffi.crc32c(written[cut]) for cut in cuts]
        finally:
            stop.set()
            syncing.result()


@pytest.mark.parametrize("first", [False, True])
def test_a_failure_is_final_either_way(engine, arena, path, first):
    with engine.open(path) as file:
        engine.write(file, 0, arena.array(0, 4096)).wait()
        with _testing.inject(engine, "sync", value=-errno.EIO, times=1):
            for wait in (first, not first, first):
                with pytest.raises(aio_ffi.AioError, match="fdatasync") as caught:
                    file.sync(wait=wait)
                assert (caught.value.errno, caught.value.operation) == (errno.EIO, "sync")


def test_a_failure_reaches_every_sync_that_was_under_way(engine, arena, path):
    """The kernel tells it once; a second fdatasync at the same time would have been told that all is well."""
    with engine.open(path) as file:
        engine.write(file, 0, arena.array(0, 4096)).wait()
        with _testing.inject(engine, "sync", value=-errno.EIO, times=1):
            with _testing.closed_gate(engine, "sync"):
                syncs = [Background(lambda: file.sync(wait=False)) for _ in range(3)]
                _testing.wait_at_gate(engine, "sync")
                syncs[-1].join(0.1)
            for sync in syncs:
                with pytest.raises(aio_ffi.AioError, match="fdatasync"):
                    sync.result()


def test_a_close_beside_submits(engine, disk):
    """From another thread: each transfer is made whole or refused, and nothing is touched after it was freed."""
    data = np.ones(100, np.uint8)
    for number in range(10):
        file = engine.open(disk / "closed_beside")
        started = threading.Event()

        def submit(file: aio_ffi.File = file, started: threading.Event = started) -> None:
            with pytest.raises(ValueError, match="closed"):
                while True:
                    engine.write(file, 0, data)
                    started.set()

        submitting = Background(submit)
        started.wait(10)
        Background(file.close).result()
        submitting.result()
        assert file.closed, number
    (disk / "closed_beside").unlink()
