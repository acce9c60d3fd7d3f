"""Where the time of a step goes: spans on lanes, recorded only when somebody asked for them.

Guarantees:
  * While nothing is recorded, `span`, `add` and `until_ready` cost about a microsecond at most and keep nothing alive
    (0.5 to 1.1 us with Python 3.11 on a busy 2-core machine, 0.2 us of it to look up a member of `Lane`).
  * `start`, `stop`, `step` and `span` are the main thread's. `add` may be called from any thread.
  * Memory is bounded: past `max_events` events are counted, not kept, and the trace says how many.
  * A span's times are measured, never derived. What cannot be seen has a note in place of spans: collectives run
    inside XLA's programs, and their lane says so.

Times are seconds of `time.perf_counter()`, which is CLOCK_MONOTONIC on Linux: C code can give times on the same clock.

Ends on the device are seen by one waiting thread per lane, so that what the main thread does meanwhile does not
lengthen them. It is in Python only for the moment after each end.
"""

import dataclasses
import enum
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

import jax

MAX_EVENTS = 200_000  # about 60 MB; a step of a 4B-parameter model has some 20,000


class Lane(enum.StrEnum):
    """What can be busy, in display order."""

    DEVICE_COMPUTE = "device compute"
    HOST_TO_DEVICE = "host to device"
    DEVICE_TO_HOST = "device to host"
    NVME_READ = "nvme read"
    NVME_WRITE = "nvme write"
    UPDATE = "update"
    COLLECTIVES = "collectives"
    STALL = "stall"
    COMMIT = "commit"


class Event(NamedTuple):
    """Something that took time. A stall's `args` hold its `cause` and, where a transfer was late, `page` and `kind`."""

    lane: Lane
    name: str
    start_s: float
    end_s: float
    args: dict[str, Any]


class StepMark(NamedTuple):
    """The time of one step."""

    number: int
    start_s: float
    end_s: float


@dataclasses.dataclass(frozen=True)
class Trace:
    """What was recorded.

    Attributes:
      events: By start.
      steps: In order; a step that was repeated stands twice.
      notes: What is to be said of a lane, such as why it is empty.
      num_dropped: Events that found no room.
    """

    events: tuple[Event, ...]
    steps: tuple[StepMark, ...]
    notes: dict[Lane, str] = dataclasses.field(default_factory=dict)
    num_dropped: int = 0


class Transfer(Protocol):
    """What is asked of a transfer between host memory and NVMe; see `tier.PendingIO`."""

    @property
    def operation(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def page(self) -> str: ...
    @property
    def num_bytes(self) -> int: ...
    def times(self) -> tuple[float, float, bool]: ...


class _Nothing(AbstractContextManager[None]):
    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


_NOTHING = _Nothing()


class Tracer:
    """Records events between `start` and `stop`.

    Args:
      max_events: Kept at most; later ones are counted.
    """

    def __init__(self, max_events: int = MAX_EVENTS) -> None:
        self.recording = False
        self.notes: dict[Lane, str] = {}
        self._max_events = max_events
        self._events: list[Event] = []
        self._steps: list[StepMark] = []
        self._num_dropped = 0
        self._lock = threading.Lock()  # for the count of what is dropped
        self._watchers: dict[Lane, _Watcher] = {}

    def start(self) -> None:
        """Begins anew: earlier events are forgotten."""
        self.stop()
        self._events, self._steps, self._num_dropped = [], [], 0
        self.recording = True

    def stop(self) -> None:
        """Ends recording, once the ends of everything that was dispatched are seen. Safe to call twice."""
        for watcher in self._watchers.values():
            watcher.close()
        self._watchers = {}
        self.recording = False

    @property
    def events(self) -> tuple[Event, ...]:
        """What was recorded last, by start."""
        return tuple(sorted(self._events, key=lambda event: event.start_s))

    @property
    def trace(self) -> Trace:
        return Trace(self.events, tuple(self._steps), dict(self.notes), self._num_dropped)

    def add(self, lane: Lane, name: str, start_s: float, end_s: float, **args: Any) -> None:
        """Records an event. Any thread may call it."""
        if not self.recording:
            return
        if len(self._events) < self._max_events:
            self._events.append(Event(lane, name, start_s, end_s, args))
        else:
            with self._lock:
                self._num_dropped += 1

    def span(self, lane: Lane, name: str, **args: Any) -> AbstractContextManager[None]:
        """Records the time of a `with` block."""
        return self._span(lane, name, args) if self.recording else _NOTHING

    @contextmanager
    def _span(self, lane: Lane, name: str, args: dict[str, Any]) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(lane, name, start, time.perf_counter(), **args)

    def until_ready(self, lane: Lane, name: str, start_s: float, arrays: Any, **args: Any) -> None:
        """Records work on the device: from `start_s`, or the end of the lane's work before it, until it is ready.

        Args:
          lane, name, args: As for `add`.
          start_s: When it was dispatched.
          arrays: Its results; one that lives is waited for.
        """
        if not self.recording:
            return
        alive = next((x for x in jax.tree.leaves(arrays) if isinstance(x, jax.Array) and not x.is_deleted()), None)
        if alive is None:
            return
        if lane not in self._watchers:
            self._watchers[lane] = _Watcher(self, lane)
        self._watchers[lane].watch(name, start_s, alive, args)

    def transfer(self, transfer: Transfer) -> None:
        """Records a read or write of the NVMe tier, which is complete. The observer of a `PageStore`."""
        if self.recording:
            start, end, exact = transfer.times()
            lane = Lane.NVME_READ if transfer.operation == "read" else Lane.NVME_WRITE
            args = {"page": transfer.page, "kind": transfer.kind, "bytes": transfer.num_bytes}
            if not exact:
                args["end"] = "when it was waited for"
            self.add(lane, f"{transfer.kind} of {transfer.page}", start, end, **args)

    def step(self, number: int, start_s: float, end_s: float) -> None:
        """Marks the time of a step, so that it can be cut out."""
        if self.recording:
            self._steps.append(StepMark(number, start_s, end_s))


class _Watcher:
    """Waits for a lane's results in the order of their dispatch, in a thread of its own."""

    def __init__(self, tracer: Tracer, lane: Lane) -> None:
        self._tracer, self._lane = tracer, lane
        self._queue: queue.SimpleQueue[tuple[str, float, jax.Array, dict[str, Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"zinf trace: {lane}", daemon=True)
        self._thread.start()

    def watch(self, name: str, start_s: float, array: jax.Array, args: dict[str, Any]) -> None:
        self._queue.put((name, start_s, array, args))

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        before = 0.0
        while (item := self._queue.get()) is not None:
            name, start, array, args = item
            try:
                array.block_until_ready()
            except Exception as error:
                # Failed, or given to a later program while it was waited for. The main thread raises what is to be.
                args = {**args, "end": f"not seen ({type(error).__name__})"}
            end = time.perf_counter()
            self._tracer.add(self._lane, name, min(max(start, before), end), end, **args)
            before = end
            del array, item  # the thread keeps nothing alive while it waits for the next
