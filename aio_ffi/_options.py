"""The options of an engine: the keys of DeepSpeed's `aio` section, and which engine."""

import dataclasses

ENGINES = ("auto", "libaio", "threads_direct", "threads_buffered")
MAX_BLOCK_BYTES = 1 << 30  # one kernel request moves at most 0x7ffff000 bytes
MAX_THREADS = 64


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """How an engine talks to the kernel.

    Attributes:
      block_size: Most bytes of one kernel request, a multiple of 4096.
      queue_depth: Requests in flight per ring.
      thread_count: Number of rings, each with a completion thread.
      single_submit: Submit requests one by one instead of in batches.
      overlap_events: Refill the queue as requests complete; False: a whole batch completes before the next one.
      engine: "libaio" (kernel AIO, O_DIRECT), "threads_direct", "threads_buffered", or "auto": the first that works.
    """

    block_size: int = 1 << 20
    queue_depth: int = 32
    thread_count: int = 1
    single_submit: bool = False
    overlap_events: bool = True
    engine: str = "auto"

    def __post_init__(self) -> None:
        for name in ("block_size", "queue_depth", "thread_count"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if self.block_size % 4096 or self.block_size > MAX_BLOCK_BYTES:
            raise ValueError(
                f"block_size must be a multiple of 4096 and at most {MAX_BLOCK_BYTES} (1 GiB), got {self.block_size}"
            )
        if self.queue_depth > 4096:
            raise ValueError(f"queue_depth must be at most 4096, got {self.queue_depth}")
        if self.thread_count > MAX_THREADS:
            raise ValueError(f"thread_count must be at most {MAX_THREADS}, got {self.thread_count}")
        for name in ("single_submit", "overlap_events"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.engine not in ENGINES:
            raise ValueError(f"engine must be one of {', '.join(ENGINES)}, got {self.engine!r}")

    @property
    def num_workers(self) -> int:
        """Threads of the fallback lane: each makes one blocking transfer at a time, so depth needs threads."""
        return min(self.queue_depth * self.thread_count, MAX_THREADS)
