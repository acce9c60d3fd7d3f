"""Programs beside those of the passes.

XLA's CPU client (of JAX 0.10; not always of 0.12) runs the programs that one thread dispatches one after the other,
ready or not: those that may run beside others have to come from another thread.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class SideLane:
    """Dispatches programs from a thread of its own, which there is from the first one on and while this object lives.

    What depends on what is known to the runtime by the arrays; only among the programs of one lane is there an order.
    """

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"zinf-{name}")

    def run(self, program: Callable[..., Any], *arguments: Any) -> Any:
        """Dispatches a program and gives its results, which need not be ready."""
        return self._thread.submit(program, *arguments).result()
