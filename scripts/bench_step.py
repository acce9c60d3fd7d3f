"""Step time of streamed training against plain JAX in memory, on the project's decoder (50M to 1.3B parameters).

    python scripts/bench_step.py                       # 125M and 350M; device, host, NVMe; 1 and 4 micro-batches
    python scripts/bench_step.py --sizes 50m --peer-python ~/peer/bin/python --json step.json

The in-memory side is one jitted step with donated state: one remat per block, bf16 weights, fp32 master, optax AdamW,
clipping by the global norm. Streamed units compute all of themselves again in backward as well, unless
`--remat-policy` says what to keep; `--memory-remat-policy` says it for the other side. Each variant runs in a process
of its own and takes turns with the in-memory one (and with DeepSpeed); a ratio is that of the medians of one run.
Beside each step time stand its floors, measured after each round of turns (medians):

  compute    forward and backward alone, everything resident (the in-memory program without its update)
  host work  the fused update of as many parameters in DRAM alone, and the norm of their gradients
  I/O        the plan's bytes at the disk's rates: what pairs up at the rate of reads and writes at once, the rest alone
  schedule   per phase, the longer of compute with the host work, and I/O
  at once    forward and backward while the plan's bytes are moved (and made durable) beside them by bare transfers, and
             the host work: what moving as many bytes as plainly as can be costs the compute on this machine

Bytes moved are the worker's own `/proc/self/io`. Peak memory is VmHWM, reset after initialisation, beside the plan's.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _bench import (
    HUGE_PAGES,
    MALLOC,
    SCRIPTS,
    SIZES,
    ModelSize,
    Series,
    Worker,
    WorkerError,
    alternate,
    end_on_sigterm,
    temporary_folder,
    worker_argv,
    worker_env,
    write_json,
)
from _bench_floors import RECOMPUTED, Floors, forward_share, io_floor, schedule_floor
from _bench_report import bytes_table, rates_lines, steps_table, time_table
from rich.console import Console

STATE_BYTES_PER_PARAM = 12  # bf16 weight, 16-bit remainder of the master, two fp32 moments
BUDGETED_FROM = 300_000_000  # parameters; the embedding and the head of smaller models are a fifth of them already
SETTLING_STEPS = 11  # of a run that is never clipped, until update_overlap "auto" has tried both ways
PEER_BESIDE = "nvme"  # DeepSpeed keeps gradients in DRAM, so this is the variant like it
console = Console(width=None if sys.stdout.isatty() else 150, highlight=False)


@dataclasses.dataclass(frozen=True)
class Variant:
    """Where a streamed run keeps its state.

    Attributes:
      budgeted: Runs with a limited `host_memory`.
      max_ratio: By clipping and number of micro-batches, what its step may take of the in-memory one's.
      max_bytes: By number of micro-batches, what it may move per parameter and step.
    """

    name: str
    placement: dict[str, str]
    budgeted: bool = False
    max_ratio: dict[tuple[str, int], float] = dataclasses.field(default_factory=dict)
    max_bytes: dict[int, float] = dataclasses.field(default_factory=dict)


def everywhere(tier: str) -> dict[str, str]:
    return dict.fromkeys(("weights", "optimizer", "gradients"), tier)


NVME_RATIOS = {("always", 1): 1.0, ("never", 1): 0.9, ("always", 4): 1.0, ("never", 4): 1.0}
CLIPPING = {"always": 1.0, "never": 1e9}  # random weights have norms above 1.0 for long
VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("device", everywhere("device")),
        Variant("host", everywhere("host")),
        Variant("nvme", everywhere("nvme") | {"gradients": "host"}, True, NVME_RATIOS, {1: 26.5, 4: 26.5}),
        Variant("nvme-spilled", everywhere("nvme"), True, NVME_RATIOS, {1: 30.5, 4: 34.5}),
    )
}


def trainer_config(
    size: ModelSize, variant: Variant, num_micro_batches: int, clipping: str, args: argparse.Namespace
) -> dict[str, Any]:
    """The config of a streamed run. From 350M up, an NVMe run has a fifth of its state's bytes as host memory."""
    config: dict[str, Any] = {
        "bf16": {"enabled": True},
        "gradient_clipping": CLIPPING[clipping],
        "gradient_accumulation_steps": num_micro_batches,
        "placement": variant.placement,
        "streaming": {
            "durability": args.durability,
            "update_overlap": args.update_overlap,
            "remat_policy": args.remat_policy,
        },
    }
    host_fraction = args.host_fraction
    if host_fraction is None and size.num_params > BUDGETED_FROM:
        host_fraction = 0.2
    if variant.budgeted and host_fraction is not None:
        config["host_memory"] = int(host_fraction * STATE_BYTES_PER_PARAM * size.num_params)
    return config


class Bench:
    """One run: starts workers, lets them take turns, collects rows. A variant that fails is a row that says so."""

    def __init__(self, args: argparse.Namespace, logs: Path) -> None:
        self._args = args
        self._logs = logs
        self.rows: list[dict[str, Any]] = []
        self.failures: list[str] = []

    def worker(self, kind: str, name: str, **spec: Any) -> Worker:
        spec |= {"kind": kind, "matmul_dtype": self._args.matmul_dtype}
        timeout_s = self._args.start_timeout
        env = {**MALLOC, **worker_env()}
        return Worker(name, worker_argv(), spec, log_dir=self._logs, env=env, start_timeout_s=timeout_s)

    @contextmanager
    def peer(self, size: ModelSize, num_micro_batches: int) -> Iterator[list[Worker]]:
        """DeepSpeed's worker in a list, empty where none is wanted or it does not start."""
        python = self._args.peer_python
        if python is None or PEER_BESIDE not in self._args.variants:
            yield []
            return
        path = os.pathsep.join([str(python.parent), os.environ["PATH"]])  # its ninja is there
        with temporary_folder(self._args.nvme_path, "bench-peer") as folder:
            spec = {"size": size.name, "num_micro_batches": num_micro_batches, "folder": str(folder)}
            spec |= {"accumulate": self._args.peer_accumulate, "port": 29500 + os.getpid() % 1000}
            workers: list[Worker] = []
            with self.guard(f"{size.name} x{num_micro_batches} deepspeed"):
                argv = [str(python), str(SCRIPTS / "peer_deepspeed.py")]
                env = {**HUGE_PAGES, "DS_ACCELERATOR": "cpu", "PATH": path}
                workers = [Worker("deepspeed", argv, spec, log_dir=self._logs, env=env, start_timeout_s=1800)]
            try:
                yield workers
            finally:
                for worker in workers:
                    worker.close()

    @contextmanager
    def floors(self, memory: Worker, spec: dict[str, Any]) -> Iterator[Floors]:
        """Measures on demand what each resource alone needs."""
        with (
            temporary_folder(self._args.nvme_path, "bench-io") as folder,
            self.worker("host_work", "host work", **spec) as host,
            self.worker("io", "io", folder=str(folder), **spec) as drive,
        ):
            yield Floors(memory, host, drive, io_bytes=self._args.io_bytes, timeout_s=self._args.step_timeout)

    @contextmanager
    def guard(self, what: str) -> Iterator[None]:
        """Records a worker's failure and lets the others go on."""
        try:
            yield
        except WorkerError as error:
            self.failures.append(f"{what}: {error}")
            console.print(f"{what} failed: {error}", style="red", markup=False)

    def take_turns(self, workers: Sequence[Worker], floors: Floors, label: str, *, settling: int) -> list[Series]:
        """Warm-up for each, the first worker's of at least `settling` steps, then the timed rounds, the floors measured
        after each."""
        args = self._args
        with console.status(label) as line:
            for worker, least in itertools.zip_longest(workers, [settling], fillvalue=0):
                line.update(f"{label}: warming up {worker.name}")
                worker.call("steps", count=max(args.warmup, least), timeout_s=args.start_timeout)
            return alternate(
                workers,
                num_rounds=args.rounds,
                num_steps=args.steps,
                timeout_s=args.step_timeout,
                progress=lambda text: line.update(f"{label}: {text}"),
                after_round=floors.measure,
            )

    def one_setting(self, size: ModelSize, num_micro_batches: int) -> None:
        """All variants of one size and number of micro-batches, and the floors."""
        spec = {"size": size.name, "num_micro_batches": num_micro_batches}
        spec |= {"remat_policy": self._args.remat_policy, "memory_remat_policy": self._args.memory_remat_policy}
        rows: list[dict[str, Any]] = []
        with self.worker("in_memory", "in memory", **spec) as memory, self.floors(memory, spec) as floors:
            with self.peer(size, num_micro_batches) as peers:
                for name, clipping in itertools.product(self._args.variants, self._args.clipping):
                    label = f"{size.name} x{num_micro_batches} {name}, clips {clipping}"
                    with self.guard(label):
                        beside = peers if name == PEER_BESIDE and clipping == "always" else []
                        workers = [memory, *beside]
                        rows += self.one_variant(
                            VARIANTS[name], size, num_micro_batches, clipping, workers, floors, label
                        )
            with self.guard(f"{size.name} x{num_micro_batches} compute beside I/O"):
                self.beside_io(memory, rows)
        self.rows += rows
        if rows and len(self._args.sizes) * len(self._args.micro_batches) > 1:
            console.print(steps_table(rows))  # the whole comes at the end

    def beside_io(self, memory: Worker, rows: Sequence[dict[str, Any]]) -> None:
        """Measures compute beside the bytes of each plan that moves any."""
        args, found = self._args, dict[tuple[int, int], float]()
        with temporary_folder(args.nvme_path, "bench-plain") as folder:
            for row in rows:
                plan = row.get("plan")
                if plan is None or not plan["read_bytes"]:
                    continue
                moved = (plan["read_bytes"], plan["write_bytes"])
                if moved not in found:
                    reply = memory.call(
                        "compute_beside_io", count=args.steps + 2, folder=str(folder), read_bytes=moved[0],
                        write_bytes=moved[1], flush=args.durability == "step", timeout_s=args.start_timeout,
                    )  # fmt: skip
                    found[moved] = Series(reply["times_s"]).median_s
                row["floors"]["at_once_s"] = found[moved] + row["floors"]["host_work_s"]

    def one_variant(
        self,
        variant: Variant,
        size: ModelSize,
        num_micro: int,
        clipping: str,
        others: Sequence[Worker],
        floors: Floors,
        label: str,
    ) -> list[dict[str, Any]]:
        args, memory = self._args, others[0]
        with temporary_folder(args.nvme_path, "bench-step") as folder:
            config = trainer_config(size, variant, num_micro, clipping, args)
            spec = {"size": size.name, "num_micro_batches": num_micro, "config": config}
            spec["run_dir"] = str(folder / "run")
            with self.worker("streamed", variant.name, **spec) as ours:
                plan = ours.call("plan", timeout_s=60)
                if clipping == "never":
                    for kind in ("read_bytes", "update_read_bytes"):
                        plan[kind] += plan["ahead_read_bytes"]
                workers = [ours, *others]
                settling = SETTLING_STEPS if (clipping, args.update_overlap) == ("never", "auto") else 0
                found = self.take_turns(workers, floors, label, settling=settling)
        base = {"size": size.name, "num_params": size.num_params, "micro_batches": num_micro, "clips": clipping}
        alone, rows = floors.take(size.num_params), []
        for worker, series in zip(workers, found, strict=True):
            row = base | {"variant": worker.name, "step_s": series.median_s, "times_s": series.times_s}
            row |= {"memory_step_s": found[1].median_s, "ratio": series.median_s / found[1].median_s}
            row |= {"last": series.last, "floors": dict(alone)}
            if worker is ours:
                row |= {"plan": plan, "host_memory": config.get("host_memory")}
                row["floors"] |= io_floor(plan, alone)
                row["floors"] |= schedule_floor(
                    plan, clipping, size.num_params, alone, forward_share(args.remat_policy)
                )
                row |= {
                    "max_ratio": variant.max_ratio.get((clipping, num_micro)),
                    "max_bytes": variant.max_bytes.get(num_micro),
                }
            if worker is not memory:
                rows.append(row)
        return rows


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    summary, details = (__doc__ or "").split("\n", 1)
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def names(known: dict[str, Any]) -> Any:
        def parse(text: str) -> list[str]:
            unknown = [name for name in text.split(",") if name not in known]
            if unknown:
                raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(known)}")
            return text.split(",")

        return parse

    parser.add_argument("--sizes", type=names(SIZES), default=["125m", "350m"], help="default: 125m,350m")
    parser.add_argument("--micro-batches", type=lambda t: [int(n) for n in t.split(",")], default=[1, 4])
    parser.add_argument("--variants", type=names(VARIANTS), default=list(VARIANTS), help=f"of {','.join(VARIANTS)}")
    parser.add_argument(
        "--clipping", type=names(CLIPPING), default=list(CLIPPING), help="a bound that always, never clips"
    )
    parser.add_argument("--durability", default="step", help="step, every_N or off (step)")
    parser.add_argument("--update-overlap", default="auto", help="none, backward, next_forward or auto (auto)")
    policy = "of jax.checkpoint_policies: what backward does not compute again, "
    parser.add_argument("--remat-policy", default=RECOMPUTED, help=policy + "streamed")
    parser.add_argument("--memory-remat-policy", default=RECOMPUTED, help=policy + "in memory")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side (3)")
    parser.add_argument("--steps", type=int, default=3, help="steps per turn (3)")
    parser.add_argument(
        "--warmup", type=int, default=2, help="steps before the first turn (2; more where nothing clips)"
    )
    parser.add_argument("--matmul-dtype", default="float32", help="bfloat16 where the device has units for it")
    parser.add_argument("--host-fraction", type=float, help="host_memory over the state's bytes (0.2 from 350M up)")
    parser.add_argument("--nvme-path", type=Path, default=Path("bench-pages"), help="folder on the drive to be used")
    parser.add_argument("--io-bytes", type=int, default=1 << 29, help="file size for the disk's rates")
    parser.add_argument("--peer-python", type=Path, help="a Python with DeepSpeed: runs the same model there")
    parser.add_argument("--peer-accumulate", action="store_true", help="let DeepSpeed run micro-batches one by one")
    parser.add_argument("--start-timeout", type=float, default=900.0, help="seconds for set-up and warm-up")
    parser.add_argument("--step-timeout", type=float, default=900.0, help="seconds for one turn")
    parser.add_argument("--json", type=Path, help="write everything there")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    end_on_sigterm()
    with temporary_folder(args.nvme_path, "bench-logs") as logs:
        bench = Bench(args, logs)
        for name in args.sizes:
            for num_micro_batches in args.micro_batches:
                with bench.guard(f"{name} x{num_micro_batches}"):
                    bench.one_setting(SIZES[name], num_micro_batches)
                if args.json:
                    write_json(args.json, {"rows": bench.rows, "failures": bench.failures})
    for table in (steps_table, bytes_table, time_table):
        if bench.rows:
            console.print(table(bench.rows))
    for line in rates_lines(bench.rows):
        console.print(line, markup=False)
    for failure in bench.failures:
        console.print(f"FAILED {failure.splitlines()[0]}", style="red", markup=False)
    return 1 if bench.failures or not bench.rows else 0


if __name__ == "__main__":
    raise SystemExit(main())
