"""Commits in the background: syncing takes as long as the drive takes, and nothing but the next update waits for it.

Guarantees:
  * Commits are made in order, one at a time. Pages may be written again only when the one before is durable
    (`may_write`, `wait`).
  * `on_durable` is told of a commit before pages may be written again.
  * An error surfaces at the next call, again at every later one, and at `close`.
Everything but the commit itself runs on the main thread.
"""

import concurrent.futures
import time
from collections.abc import Callable, Sequence
from typing import Any

from zinf_jax.stream.stats import Counters
from zinf_jax.tier import CommitLog, PageStore, Tables

SYNC_BYTES = 32 << 20  # written between syncs ahead of a commit: reads wait for as long as one takes


class Committer:
    """Makes steps durable.

    Args:
      log: Holds the records.
      store: Holds the pages.
      kinds: Of state that belongs to a step.
      counters: Told about waits.
    """

    def __init__(self, log: CommitLog, store: PageStore, kinds: Sequence[str], counters: Counters) -> None:
        self._log = log
        self._store = store
        self._kinds = tuple(kinds)
        self._counters = counters
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="zinf-commit")
        self._future: concurrent.futures.Future[None] | None = None
        self._early: concurrent.futures.Future[None] | None = None
        self._unsynced = 0
        self._tables: Tables | None = None
        self._meta: dict[str, Any] = {}
        self._error: BaseException | None = None
        self.observer: Callable[[float, float], None] | None = None
        self.on_durable: Callable[[dict[str, Any]], None] | None = None

    def launch(self, meta: dict[str, Any]) -> None:
        """Starts committing what the store holds now, whose writes are complete.

        Raises:
          StoreError: an earlier commit failed.
        """
        self.wait()
        if self._early is not None and self._early.done():
            self._finish_early()
        self._unsynced = 0
        tables = self._store.versions.snapshot(self._kinds)
        self._tables, self._meta = tables, meta
        self._future = self._thread.submit(self._run, meta, tables)

    def sync_ahead(self, num_bytes: int) -> None:
        """Chunks of a step to come are written: syncs from time to time, so that its commit finds little left to do.

        A flush of everything at once holds up the reads of the next step for as long as it takes.

        Raises:
          StoreError: an earlier sync or commit failed.
        """
        self._unsynced += num_bytes
        if self._unsynced < SYNC_BYTES or (self._early is not None and not self._early.done()):
            return
        self._finish_early()
        self._unsynced = 0
        self._early = self._thread.submit(self._store.sync, self._kinds)

    def _finish_early(self) -> None:
        """Raises StoreError: a sync ahead failed. It is never tried again."""
        early, self._early = self._early, None
        if early is not None:
            try:
                early.result()
            except BaseException as error:
                self._error = error
                raise

    def _run(self, meta: dict[str, Any], tables: Tables) -> None:
        start = time.perf_counter()
        self._store.sync(self._kinds)
        self._log.commit(meta, tables)
        if self.observer is not None:
            self.observer(start, time.perf_counter())

    def may_write(self) -> bool:
        """Is the last commit durable?"""
        if self._future is not None and self._future.done():
            self._collect()
        return self._future is None

    def wait(self) -> None:
        """Blocks until the last commit is durable.

        Raises:
          StoreError: it, or an earlier one, failed.
        """
        if self._error is not None:
            raise self._error
        if self._future is not None:
            if not self._future.done():
                with self._counters.timed("commit_stall_s"):
                    concurrent.futures.wait([self._future])
            self._collect()

    def _collect(self) -> None:
        assert self._future is not None and self._tables is not None
        future, tables = self._future, self._tables
        self._future = self._tables = None
        try:
            future.result()
            self._store.versions.commit(tables)
            if self.on_durable is not None:
                self.on_durable(self._meta)
        except BaseException as error:
            self._error = error
            raise

    def close(self) -> None:
        """Waits for the last commit and ends the thread.

        Raises:
          StoreError: a commit failed.
        """
        try:
            self.wait()
            self._finish_early()
        finally:
            self._thread.shutdown(wait=True)
            self._log.close()
