"""Checkpoints and resuming in place: the bytes of all pages, and one manifest that says what they are.

    CHECKPOINT/run.json        written last: a directory without it is not a checkpoint
    CHECKPOINT/weights.pages   the pages' weights, as on the NVMe tier
    CHECKPOINT/optimizer.pages their records

Guarantees: a checkpoint appears whole or not at all (built beside, synced, renamed); it holds weights, masters,
optimizer slots, step, rng, loss scale, `state` and `user_state`, all of one step; no pickle. Saving and loading stream
through the chunk frames.
"""

import base64
import contextlib
import dataclasses
import os
import pathlib
import platform
import secrets
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from zinf_jax.errors import ConfigError, ResumeError
from zinf_jax.optim import kernels
from zinf_jax.plan import Chunk
from zinf_jax.stream.chunks import OPTIMIZER, ChunkFrame
from zinf_jax.stream.engine import SECTOR, StreamEngine
from zinf_jax.stream.pager import WEIGHTS
from zinf_jax.stream.records import RecordFormat
from zinf_jax.tier import Page, PageStore, Topology
from zinf_jax.train.rundir import read_manifest, sync_directory, write_json
from zinf_jax.units import ceil_to

FORMAT = 1
CHECKPOINTS = "checkpoints"


def fingerprint() -> dict[str, Any]:
    """What the bits of a run depend on beside its inputs."""
    return {
        "jax": jax.__version__,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "backend": jax.default_backend(),
        "num_devices": jax.device_count(),
        "machine": platform.machine(),
        "num_cores": len(os.sched_getaffinity(0)),
        "kernels": kernels.variant(),
    }


def manifest(
    engine: StreamEngine,
    *,
    status: str,
    run_id: str,
    step: int,
    num_skipped: int,
    rng: Any,
    state: Any,
    user_state: Any,
    slots: tuple[str, ...],
    small: Mapping[str, np.ndarray],
    scale: Any,
    directory: str,
) -> dict[str, Any]:
    """All that a resume needs beside the pages' bytes, as JSON values."""
    return {
        "format": FORMAT,
        "status": status,
        "run_id": run_id,
        "step": step,
        "num_skipped": num_skipped,
        "rng": encode_rng(rng),
        "state": None if state is None else encode_state(state),
        "user_state": user_state,
        "loss_scale": scale,
        "slots": list(slots),
        "optimizer_state": {name: encode_array(value) for name, value in small.items()},
        "weights_dtype": str(engine.record.weights),
        "chunk_elements": engine.plan.chunk_elements,
        "files": {kind: engine.store.sizes[kind] for kind in (WEIGHTS, OPTIMIZER)},
        "directory": directory,
        "layout": engine.layout.to_json(),
        "fingerprint": fingerprint(),
    }


@dataclasses.dataclass(frozen=True)
class Source:
    """Something to resume from.

    Attributes:
      path: The checkpoint, or the run directory itself.
      manifest: Its manifest.
      in_place: The run directory's own pages go on to be used.
    """

    path: pathlib.Path
    manifest: dict[str, Any]
    in_place: bool

    @property
    def directory(self) -> pathlib.Path:
        return pathlib.Path(self.manifest["directory"]) if self.in_place else self.path

    def check(self, weights_dtype: Any, slots: Sequence[str], topology: Topology, *, weights_only: bool) -> None:
        """Can this run go on from here? Warns where the environment differs in what bits depend on.

        Args:
          weights_dtype, slots, topology: This run's.
          weights_only: Only weights and masters are taken, so the optimizer may be another.

        Raises:
          ResumeError: another precision, other optimizer state, or pages split for another mesh.
        """
        if self.manifest["weights_dtype"] != str(weights_dtype):
            raise ResumeError(
                f"{self.path} holds {self.manifest['weights_dtype']} weights, this config trains in {weights_dtype}: "
                "use the same bf16/fp16 section"
            )
        if self.manifest["slots"] != list(slots) and (self.in_place or not weights_only):
            advice = "restore into another run_dir" if weights_only else "use the same optimizer, or restore: weights"
            raise ResumeError(
                f"{self.path} holds optimizer state {self.manifest['slots']}, this optimizer keeps {list(slots)}: "
                + advice
            )
        layout = self.manifest["layout"]
        ranks = {page["shape"][1] for page in layout["pages"]}
        if ranks != {topology.num_ranks}:
            raise ResumeError(
                f"{self.path} was saved on {ranks.pop()} fsdp ranks, this mesh has {topology.num_ranks}: "
                "resume on a mesh of the same size"
            )
        found, stored = fingerprint(), self.manifest["fingerprint"]
        changed = [f"{k}: {stored[k]!r} -> {found[k]!r}" for k in found if stored.get(k) != found[k]]
        if changed:
            warnings.warn("resuming in another environment, bits may differ: " + "; ".join(changed), stacklevel=4)


def find_latest(run_dir: pathlib.Path) -> Source | None:
    """What `resume="auto"` takes: the run directory at rest, else its newest checkpoint, else nothing (a new run).

    Raises:
      ResumeError: the run was interrupted and has no checkpoint.
    """
    own = read_manifest(run_dir)
    if own is not None and own["status"] == "closed":
        return Source(run_dir, own, in_place=True)
    saved = [
        (m["step"], path)
        for path in (run_dir / CHECKPOINTS).glob("*")
        if not path.name.startswith(".")
        and (m := read_manifest(path)) is not None
        and (own is None or m["run_id"] == own["run_id"])
    ]
    if saved:
        return open_source(max(saved)[1], run_dir)
    if own is not None:
        raise ResumeError(
            f"{run_dir} was interrupted while its pages were in use (durability is off) and has no checkpoint under "
            f"{CHECKPOINTS}/: start anew with overwrite=True, and save from time to time (train.save_every)"
        )
    return None


def open_source(path: pathlib.Path, run_dir: pathlib.Path) -> Source:
    """A named checkpoint or run directory.

    Raises:
      ResumeError: there is none at `path`, or its pages are not at rest.
    """
    found = read_manifest(path)
    if found is None:
        raise ResumeError(f"{path} is not a checkpoint or run directory: it has no run.json")
    if found["format"] != FORMAT:
        raise ResumeError(f"{path} has format {found['format']}, this version reads {FORMAT}")
    if found["status"] == "open":
        raise ResumeError(f"{path} was interrupted while its pages were in use: resume from one of its checkpoints")
    in_place = path.resolve() == run_dir.resolve()
    if not in_place and found["status"] == "closed":
        # A closed run's pages may be elsewhere; reading them from there leaves that run as it is.
        return Source(pathlib.Path(found["directory"]), found, in_place=False)
    return Source(path, found, in_place)


def save(engine: StreamEngine, path: pathlib.Path, content: dict[str, Any]) -> pathlib.Path:
    """Writes a checkpoint directory.

    Raises:
      ConfigError: the path is taken.
      StoreError: no room, or I/O failed; nothing is left behind.
    """
    path = path.absolute()
    if path.exists():
        raise ConfigError(f"{path} exists already: choose another path or remove it")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    temporary.mkdir(mode=0o700)
    try:
        store = PageStore(temporary, content["files"], engine.options.aio)
        try:
            _copy(engine, store, to_store=True)
            store.sync()
        finally:
            store.close()
        write_json(temporary / "run.json", content | {"directory": None})
        os.rename(temporary, path)
        sync_directory(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return path


def load(
    engine: StreamEngine,
    source: Source,
    progress: Callable[[int, int], None] | None = None,
    *,
    weights_only: bool = False,
) -> None:
    """Brings a checkpoint's bytes into the run's tiers.

    Args:
      engine: To fill.
      source: A checkpoint, or the run's own files.
      progress: Called with (pages done, pages).
      weights_only: Take weights and masters alone and make the optimizer's state anew.

    Raises:
      ResumeError: its files are of other sizes.
      StoreError: a file is cut short or unreadable.
    """
    content = source.manifest
    compared = (WEIGHTS,) if weights_only else (WEIGHTS, OPTIMIZER)
    if any(content["files"][kind] != engine.store.sizes[kind] for kind in compared):
        raise ResumeError(
            f"{source.path} holds pages of other sizes ({content['files']}) than this run: the model or mesh differs"
        )
    if source.in_place:
        store = engine.store
    else:
        store = PageStore(source.directory, content["files"], engine.options.aio, reuse=True)
    try:
        if weights_only:
            _load_weights(engine, store, len(content["slots"]), progress)
        else:
            _copy(engine, store, to_store=False, progress=progress)
    finally:
        if not source.in_place:
            store.close()


def _load_weights(
    engine: StreamEngine, store: PageStore, num_slots: int, progress: Callable[[int, int], None] | None
) -> None:
    """Weights and masters from a store whose records have `num_slots` slots. A master stands first in its record, so
    what else is in there is not even read."""
    record = engine.record
    stored = RecordFormat.of(record.weights, num_slots)
    offset, records = 0, []
    for page in engine.layout.pages:
        records.append(offset)
        offset += ceil_to(page.num_elements * stored.itemsize if page.trainable else 0, SECTOR)

    def see(page: Page, chunk: Chunk, frame: ChunkFrame) -> None:
        pending = [store.read(WEIGHTS, engine.offsets[WEIGHTS][page.index] + chunk.start * page.dtype.itemsize,
                              frame.weights, page.name)]  # fmt: skip
        if page.trainable and stored.master is not None:
            master = frame.record[: (chunk.stop - chunk.start) * stored.master.itemsize]
            at = records[page.index] + chunk.start * stored.itemsize
            pending.append(store.read(OPTIMIZER, at, master, page.name))
        for transfer in pending:
            transfer.wait()
        if page.trainable:
            engine.contents.reset_slots(page, chunk, frame)
        if progress is not None and chunk.stop == page.num_elements:
            progress(page.index + 1, len(engine.layout.pages))

    engine.contents.visit(engine.layout.pages, see, read=False, write=True)


def bring_to_rest(engine: StreamEngine) -> None:
    """Writes what lives in memory to the run's own files, and makes all of it durable."""
    _copy(engine, engine.store, to_store=True)
    engine.store.sync()


def _copy(
    engine: StreamEngine,
    store: PageStore,
    *,
    to_store: bool,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Moves all chunks between the run's tiers and a store's files; writes nothing to where it is already."""
    own = store is engine.store
    offsets, record = engine.offsets, engine.record

    def see(page: Page, chunk: Chunk, frame: ChunkFrame) -> None:
        tiers = engine.plan.tiers[page.index]
        for kind, tier, data, item in (
            (WEIGHTS, tiers.weights, frame.weights, page.dtype.itemsize),
            (OPTIMIZER, tiers.optimizer, frame.record, record.itemsize if page.trainable else 0),
        ):
            # A frame is written back to all tiers after loading, so then it must be filled whole.
            if not item or (own and to_store and tier.value == "nvme"):
                continue
            offset = offsets[kind][page.index] + chunk.start * item
            if to_store:
                frame.pending.append(store.write(kind, offset, data, page.name))
            else:
                store.read(kind, offset, data, page.name).wait()
        if progress is not None and chunk.stop == page.num_elements:
            progress(page.index + 1, len(engine.layout.pages))

    pages = [
        page
        for page, tiers in zip(engine.layout.pages, engine.plan.tiers, strict=True)
        if not own or tiers.weights != "nvme" or (page.trainable and tiers.optimizer != "nvme")
    ]
    engine.contents.visit(pages, see, read=to_store, write=not to_store)


def delete_pages(content: Mapping[str, Any]) -> None:
    """Removes the page files of a run that is being overwritten: only names that this package makes."""
    if content.get("directory"):
        directory = pathlib.Path(content["directory"])
        for kind in (WEIGHTS, OPTIMIZER, "gradients", "residuals"):
            with contextlib.suppress(FileNotFoundError):
                (directory / f"{kind}.pages").unlink()


def encode_array(array: Any) -> dict[str, Any]:
    array = np.asarray(array)
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {"dtype": str(array.dtype), "shape": list(array.shape), "data": data}


def decode_array(value: Mapping[str, Any]) -> np.ndarray:
    dtype = np.dtype(getattr(ml_dtypes, value["dtype"], None) or value["dtype"])
    return np.frombuffer(base64.b64decode(value["data"]), dtype).reshape(value["shape"]).copy()


def encode_rng(key: Any) -> dict[str, Any]:
    """A PRNG key, typed or raw, as JSON."""
    if hasattr(key, "dtype") and jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key):
        return {"impl": str(key.dtype._impl.name), **encode_array(jax.random.key_data(key))}
    return {"impl": None, **encode_array(key)}


def decode_rng(value: Mapping[str, Any]) -> Any:
    data = decode_array(value)
    return data if value["impl"] is None else jax.random.wrap_key_data(jnp.asarray(data), impl=value["impl"])


def encode_state(state: Any) -> list[Any]:
    """The leaves of the user's `state`."""
    return [encode_rng(leaf) for leaf in jax.tree.leaves(state)]


def decode_state(values: list[Any], like: Any) -> Any:
    """Raises ResumeError: the stored state has another number of leaves."""
    flat, tree = jax.tree.flatten(like)
    if len(flat) != len(values):
        raise ResumeError(f"the checkpoint's state has {len(values)} leaves, this one has {len(flat)}")
    return jax.tree.unflatten(tree, [decode_rng(v) for v in values])
