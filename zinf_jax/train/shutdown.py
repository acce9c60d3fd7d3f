"""Signals that ask a run to end, as a flag."""

import signal
import threading
from types import FrameType
from typing import Any


class Shutdown:
    """Turns SIGINT and SIGTERM into a flag that the loop polls; the second one interrupts as usual.

    Outside the main thread, where handlers cannot be set, the flag can only be set by `request`.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, Any] = {}

    def request(self) -> None:
        self.requested = True

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt(f"second {signal.Signals(signum).name}")
        self.requested = True

    def __enter__(self) -> "Shutdown":
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):
                self._previous[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
