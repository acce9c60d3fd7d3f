"""What a step needs from each resource alone, measured between the turns of those whose steps are compared with it."""

from __future__ import annotations

import statistics
from typing import Any

from _bench import Reply, Worker

RECOMPUTED = "nothing_saveable"  # the policy of jax.checkpoint_policies by which backward computes all again


class Floors:
    """Samples of the rates, taken when told to: those of a shared machine drift within minutes.

    Args:
      memory: Has the model's state in memory, and computes.
      host: Does the update's work on the host.
      drive: Moves bytes.
      io_bytes: File size for the disk's rates.
      timeout_s: Of one measurement.
    """

    STEPS = 2  # per sample

    def __init__(self, memory: Worker, host: Worker, drive: Worker, *, io_bytes: int, timeout_s: float) -> None:
        self._memory, self._host, self._drive = memory, host, drive
        self._io_bytes = io_bytes
        self._timeout_s = timeout_s
        self._samples: list[dict[str, Any]] = []

    def measure(self) -> None:
        """Takes a sample.

        Raises:
          WorkerError: a worker failed.
        """
        compute = self._memory.call("compute_floor", count=self.STEPS, timeout_s=self._timeout_s)
        self._samples.append(
            {
                "compute_s": statistics.median(compute["times_s"]),
                "host": self._host.call("floors", timeout_s=self._timeout_s),
                "disk": self._drive.call("floors", num_bytes=self._io_bytes, timeout_s=self._timeout_s),
            }
        )

    def take(self, num_params: int) -> dict[str, Any]:
        """The medians of all samples since the last call."""
        samples, self._samples = self._samples, []
        found: dict[str, Any] = medians(samples)
        host = found["host"]
        found["host_work_s"] = (host["update_s_per_param"] + host["norm_s_per_param"]) * num_params
        return found


def medians(samples: list[Any]) -> Any:
    """Of numbers in equal trees of dicts; what is not a number is the last one's."""
    last = samples[-1]
    if isinstance(last, dict):
        return {key: medians([sample[key] for sample in samples]) for key in last}
    return statistics.median(samples) if isinstance(last, float) else last


def io_floor(plan: Reply, floors: dict[str, Any]) -> dict[str, float]:
    """Seconds that the plan's bytes need from the disk alone."""
    disk = floors["disk"]
    both = min(plan["read_bytes"], plan["write_bytes"])
    mixed_gbps = disk["mixed_read_gbps"] + disk["mixed_write_gbps"]
    alone_s = (plan["read_bytes"] - both) / disk["read_gbps"] + (plan["write_bytes"] - both) / disk["write_gbps"]
    return {"io_s": (2 * both / mixed_gbps + alone_s) / 1e9}


def forward_share(remat_policy: str) -> float:
    """Of the compute: backward has two products for each of the forward's, and computes the forward again or not."""
    return 1 / 4 if remat_policy == RECOMPUTED else 1 / 3


def schedule_floor(
    plan: Reply, clips: str, num_params: int, floors: dict[str, Any], forward: float
) -> dict[str, float]:
    """Seconds of the schedule itself: per phase, the longer of compute with the host work on the same cores, and I/O.

    The update runs beside backward where nothing is clipped, else beside the next forward, whose share of the compute
    is `forward`.
    """
    disk = floors["disk"]
    passes = {
        "read": plan["read_bytes"] - plan["update_read_bytes"],
        "write": plan["write_bytes"] - plan["update_write_bytes"],
    }
    update = {"read": plan["update_read_bytes"], "write": plan["update_write_bytes"]}
    phases = {
        "forward": {"read": passes["read"] / 2, "write": 0.0},
        "backward": {"read": passes["read"] / 2, "write": passes["write"]},
    }
    beside = "backward" if clips == "never" else "forward"
    phases[beside] = {kind: phases[beside][kind] + update[kind] for kind in update}
    compute_s = {"forward": forward * floors["compute_s"], "backward": (1 - forward) * floors["compute_s"]}
    update_s = floors["host"]["update_s_per_param"] * num_params
    compute_s[beside] += update_s
    compute_s["backward"] += floors["host_work_s"] - update_s

    def io_s(moved: dict[str, float]) -> float:
        both = min(moved["read"], moved["write"])
        mixed = 2 * both / (disk["mixed_read_gbps"] + disk["mixed_write_gbps"])
        return (mixed + (moved["read"] - both) / disk["read_gbps"] + (moved["write"] - both) / disk["write_gbps"]) / 1e9

    return {"schedule_s": sum(max(compute_s[name], io_s(moved)) for name, moved in phases.items())}
