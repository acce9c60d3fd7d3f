"""From a config, a loss function and a batch to a streamed step: everything that happens before the first one."""

import dataclasses
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import aio_ffi
from zinf_jax.config import Config
from zinf_jax.errors import ConfigError
from zinf_jax.graph import cut_function
from zinf_jax.graph.types import UnitGraph, ValueId
from zinf_jax.leaves import Leaf, LeafKind, classify, path_name
from zinf_jax.optim.generic import as_rule
from zinf_jax.plan import PlacementOptions, StreamOptions, Tier
from zinf_jax.stream.contents import InitSlots
from zinf_jax.stream.engine import EngineOptions, StepSetup, make_layout, step_program
from zinf_jax.stream.generic_updates import whole_bytes
from zinf_jax.stream.records import RecordFormat
from zinf_jax.tier import Layout, LayoutOptions, Partitioning, Topology
from zinf_jax.train.signature import LossSignature, Parts


@dataclasses.dataclass(frozen=True)
class Durability:
    """Which steps survive a crash without being saved: every `every`-th, 0 for none."""

    every: int

    @classmethod
    def of(cls, config: Config, *, has_run_dir: bool) -> "Durability":
        """Without a run directory nothing could be resumed, so nothing is committed."""
        text = config.streaming.durability or "step"
        if not has_run_dir or text == "off":
            return cls(0)
        return cls(1 if text == "step" else int(text.removeprefix("every_")))

    def due(self, step: int) -> bool:
        return self.every > 0 and step % self.every == 0


SHARE_BYTES = 128 << 20
LOWERED = ("update_overlap", "num_chunk_frames", "lookahead", "chunk_bytes")


def engine_options(config: Config, durability: Durability = Durability(0)) -> EngineOptions:
    """The parts' own options from the config."""
    streaming, placement = config.streaming, config.placement

    def tier(name: str) -> Tier | None:
        value = getattr(placement, name)
        return None if value is None else Tier(value)

    stream = {
        "lookahead": streaming.lookahead,
        "max_in_flight": streaming.max_in_flight,
        "chunk_bytes": streaming.chunk_bytes,
        "num_chunk_frames": streaming.num_chunk_frames,
        "read_ahead": streaming.num_chunk_frames is None,  # who says how many frames there are gets as many
        "micro_batches_per_group": streaming.micro_batches_per_group,
        "update_overlap": streaming.update_overlap or "auto",
        "num_versions": 2 + streaming.num_retained if durability.every else 1,
        "write_through": durability.every > 0,
        "update_hold": 2 if durability.every and streaming.update_overlap in (None, "backward") else 0,
    }
    layout = {"page_bytes": streaming.page_bytes, "min_io_bytes": streaming.min_io_bytes}
    aio = config.aio.model_dump()
    if aio.get("engine") is None:
        aio["engine"] = "auto"
    defaults = EngineOptions()
    return EngineOptions(
        placement=PlacementOptions(
            tier("weights"), tier("optimizer"), tier("gradients"), tier("residuals"),
            placement.optimizer_fraction, placement.weights_host_cache or 0,
        ),
        stream=StreamOptions(**_given(stream)),
        layout=LayoutOptions(**_given(layout)),
        aio=aio_ffi.EngineOptions(**aio),
        max_unit_bytes=streaming.max_unit_bytes or defaults.max_unit_bytes,
        device_memory=config.device_memory,
        host_memory=config.host_memory,
        lock="auto" if config.pin_memory is None else config.pin_memory,
        num_threads=config.host_threads,
        lowered=frozenset(name for name in LOWERED if getattr(streaming, name) is None),
    )  # fmt: skip


def slot_initialiser(rule: Any) -> InitSlots:
    """Initial values of an optimizer's slots: constants where it has a kernel, else what optax's init gives."""
    if not rule.fused:
        return rule.init_slots
    values = [rule.slot_init(slot) for slot in rule.slots]
    return lambda leaf_index, master: values


def measure_shares(paths: Sequence[pathlib.Path], options: aio_ffi.EngineOptions) -> tuple[float, ...]:
    """Bandwidth of each path relative to the fastest, reads and writes together, measured with a file on each.

    Raises:
      ConfigError: a path cannot be written.
    """
    if len(paths) == 1:
        return (1.0,)
    rates = []
    for path in paths:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            found = aio_ffi.measure(path, num_bytes=SHARE_BYTES, options=options)
        except OSError as error:
            raise ConfigError(f"nvme_path {path} cannot be measured: {error}") from error
        rates.append(2 / (1 / found.read_gbps + 1 / found.write_gbps))
    return tuple(round(rate / max(rates), 3) for rate in rates)


def with_chunk_elements(options: EngineOptions, chunk_elements: int) -> EngineOptions:
    """Options whose records are in chunks of a stored run's size."""
    return dataclasses.replace(options, stream=dataclasses.replace(options.stream, chunk_elements=chunk_elements))


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def make_topology(config: Config, mesh: jax.sharding.Mesh | None) -> Topology:
    """The user's mesh, or the config's over this process's devices."""
    partitioning = Partitioning.of_stage(config.partitioning.stage)
    if mesh is None and config.mesh != {"fsdp": -1}:
        devices = np.array(jax.devices())
        sizes = list(config.mesh.values())
        fixed = int(np.prod([s for s in sizes if s != -1]))
        sizes = [devices.size // fixed if s == -1 else s for s in sizes]
        if int(np.prod(sizes)) > devices.size or 0 in sizes:
            raise ConfigError(
                f"mesh {config.mesh} needs {int(np.prod(sizes)) or fixed} devices, there are {devices.size}"
            )
        chosen = devices[: int(np.prod(sizes))].reshape(sizes)
        mesh = jax.sharding.Mesh(chosen, tuple(config.mesh))
    return Topology.create(mesh, partitioning)


def without_values(params: Any) -> Any:
    """The parameter tree with abstract values (and the user's shardings) for arrays, so that nothing keeps them."""

    def abstract(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array | np.ndarray):
            return leaf
        sharding = getattr(leaf, "sharding", None)
        named = sharding if isinstance(sharding, jax.sharding.NamedSharding) else None
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=named)

    return jax.tree.map(abstract, params)


def classify_params(abstract: Any, config: Config) -> tuple[Leaf, ...]:
    """The leaf table, with the user's shardings where the arrays carry them, and the config's frozen patterns."""
    flat, treedef = jax.tree_util.tree_flatten_with_path(abstract)
    trainable = (
        jax.tree.unflatten(treedef, [None if config.is_trainable(path_name(path)) else False for path, _ in flat])
        if not _trains_all(config)
        else None
    )
    specs = [_spec(leaf) for _, leaf in flat]
    leaves = classify(abstract, compute_dtype=config.compute_dtype, trainable=trainable, specs=specs)
    _check_patterns(leaves, config)
    return leaves


def _check_patterns(leaves: tuple[Leaf, ...], config: Config) -> None:
    """Raises ConfigError: a pattern that names nothing (a typo would train what is to be frozen), or asks to train
    integers."""
    for key in ("trainable_patterns", "frozen_patterns"):
        for pattern in getattr(config, key):
            found = [leaf for leaf in leaves if re.search(pattern, leaf.name)]
            if not found:
                names = ", ".join(leaf.name for leaf in leaves[:5])
                raise ConfigError(f"{key}: {pattern!r} matches no parameter; their names are like {names}")
            if key == "trainable_patterns" and not any(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in found):
                raise ConfigError(
                    f"{key}: {pattern!r} matches only {found[0].name!r} of {found[0].dtype}: "
                    "only floating leaves can be trained"
                )


def _trains_all(config: Config) -> bool:
    return config.trainable_patterns == (".*",) and not config.frozen_patterns


def _spec(leaf: Any) -> tuple[Any, ...]:
    """The partition spec that a leaf carries, without the fsdp axis (pages are split over it anyway)."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return ()
    entries: list[Any] = []
    for entry in sharding.spec:
        axes = (entry,) if isinstance(entry, str) else tuple(entry or ())
        kept = tuple(axis for axis in axes if axis != "fsdp")
        entries.append(kept[0] if len(kept) == 1 else kept or None)
    return tuple(entries) if any(entries) else ()


@dataclasses.dataclass(frozen=True)
class Batching:
    """How a batch is split: `num_micro` micro-batches of `micro_size` samples (this process's share); and what it is
    made of, for people."""

    num_micro: int
    micro_size: int
    described: str

    @classmethod
    def of(cls, batch: Any, config: Config, topology: Topology) -> "Batching":
        """Raises ConfigError: leading dims differ, or do not fit the config's batch sizes and the mesh."""
        flat = jax.tree_util.tree_flatten_with_path(batch)[0]
        sizes = {path_name(path): np.shape(leaf)[0] if np.ndim(leaf) else None for path, leaf in flat}
        if not sizes or None in sizes.values():
            raise ConfigError(f"every leaf of a batch needs a leading batch dim, got shapes {_shapes(batch)}")
        if len(set(sizes.values())) != 1:
            raise ConfigError(f"the leaves of a batch have different leading dims: {sizes}")
        size = next(iter(sizes.values()))
        assert size is not None
        ways = topology.batch_ways
        wanted = config.batch_sizes(ways)
        num_micro = wanted.accumulation
        if wanted.train is not None and size != wanted.train:
            raise ConfigError(
                f"the batch has {size} samples, the config's train_batch_size is {wanted.train} "
                f"({num_micro} micro-batches x {wanted.micro} samples x {ways} data-parallel devices)"
            )
        if size % (num_micro * ways):
            raise ConfigError(
                f"a batch of {size} samples cannot be split into {num_micro} micro-batches over {ways} data-parallel "
                f"devices: make it a multiple of {num_micro * ways}, or change gradient_accumulation_steps"
            )
        return cls(num_micro, size // num_micro, describe(batch))

    def split(self, batch: Any) -> list[Any]:
        """The micro-batches, views of the batch in order."""
        n = self.micro_size
        return [jax.tree.map(lambda x, i=i: x[i * n : (i + 1) * n], batch) for i in range(self.num_micro)]


def describe(batch: Any) -> str:
    """Names, dtypes and shapes of a batch's leaves, dtypes as JAX gives them to host values."""
    flat = jax.tree_util.tree_flatten_with_path(abstract_of(batch))[0]
    return ", ".join(f"{path_name(path) or 'array'}: {leaf.dtype}{list(leaf.shape)}" for path, leaf in flat)


def _shapes(tree: Any) -> list[tuple[int, ...]]:
    return [np.shape(leaf) for leaf in jax.tree.leaves(tree)]


def abstract_of(tree: Any) -> Any:
    """`ShapeDtypeStruct`s with the dtypes that JAX gives host values (int64 becomes int32 without x64)."""
    return jax.tree.map(_abstract_leaf, tree)


def _abstract_leaf(x: Any) -> jax.ShapeDtypeStruct:
    """Each step asks this of its batch, and each `eval_shape` leaves entries in JAX's caches: arrays do without."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return x
    if isinstance(x, jax.Array):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.aval.weak_type)
    if isinstance(x, np.ndarray) and x.dtype.kind in "biufc":
        return jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype))
    return jax.eval_shape(jnp.asarray, x)


@dataclasses.dataclass(frozen=True)
class Traced:
    """A loss function, cut, with the value ids of the parts of its output and of its arguments."""

    graph: UnitGraph
    parts: Parts
    state_inputs: tuple[ValueId, ...]
    state_results: tuple[ValueId, ...]
    outer_shardings: dict[ValueId, Any]
    num_state: int


def trace_loss(
    loss_fn: Callable[..., Any],
    signature: LossSignature,
    abstract: Any,
    leaves: tuple[Leaf, ...],
    state: Any,
    micro_batch: Any,
    rng: Any,
    topology: Topology,
    max_unit_bytes: int,
) -> Traced:
    """Traces and cuts the loss for one micro-batch.

    Raises:
      CutError: it cannot be cut, or its loss is not a floating scalar.
      ConfigError: its output does not have the announced parts, or `state` changes its structure.
    """
    arguments = signature.arguments(*(None if x is None else abstract_of(x) for x in (state, micro_batch, rng)))
    graph = cut_function(loss_fn, abstract, leaves, arguments, max_unit_bytes=max_unit_bytes)
    parts = signature.split(jax.tree.unflatten(graph.out_tree, graph.results))
    state_leaves = jax.tree.leaves(state) if signature.has_state else []
    outer = graph.outer_inputs
    results = tuple(jax.tree.leaves(parts.state)) if signature.has_state else ()
    if signature.has_state and str(jax.tree.structure(parts.state)) != str(jax.tree.structure(state)):
        raise ConfigError(
            f"loss_fn returned a state of structure {jax.tree.structure(parts.state)}, "
            f"but was given {jax.tree.structure(state)}"
        )
    num_batch = len(jax.tree.leaves(micro_batch))
    shardings = {}
    for index, value in enumerate(outer):
        is_batch = len(state_leaves) <= index < len(state_leaves) + num_batch
        shape = graph.values[value].shape
        shardings[value] = topology.batch_sharding(shape) if is_batch else topology.replicated
    return Traced(graph, parts, tuple(outer[: len(state_leaves)]), results, shardings, len(state_leaves))


def group_sizes(traced: Traced, num_micro: int, per_group: int) -> tuple[int, ...]:
    """Micro-batches per group. `state` that is read before it is made leaves no choice: one by one."""
    made = {v: unit.index for unit in traced.graph.units for v in unit.outputs}
    read: dict[ValueId, int] = {}
    for unit in traced.graph.units:
        for value in unit.inputs:
            read.setdefault(value, unit.index)
    for given, result in zip(traced.state_inputs, traced.state_results, strict=True):
        if given in read and made.get(result, -1) > read[given]:
            per_group = 1
    per_group = per_group or num_micro
    full, rest = divmod(num_micro, per_group)
    return (per_group,) * full + ((rest,) if rest else ())


@dataclasses.dataclass(frozen=True)
class BuiltStep:
    """A training step, ready to be given memory and disk."""

    batching: Batching
    traced: Traced
    rule: Any
    setup: StepSetup


def build_step(
    loss_fn: Callable[..., Any],
    signature: LossSignature,
    abstract: Any,
    config: Config,
    topology: Topology,
    optimizer: Any,
    batch: Any,
    *,
    state: Any = None,
    rng: Any = None,
    durability: Durability = Durability(0),
    check: Callable[[Any, tuple[Leaf, ...]], Mapping[str, Any] | None] = lambda rule, leaves: None,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> BuiltStep:
    """Traces, cuts, lays out and compiles a training step for batches like `batch`.

    Args:
      loss_fn, signature, abstract, config, topology, optimizer, state, rng, durability: The run.
      batch: Arrays or abstract values.
      check: Called with the bound optimizer and the leaves before anything is compiled; returns the manifest whose
        pages are used as they are, if any.
      progress: Called with (what, done, total).

    Raises:
      ConfigError, CutError: it cannot work.
    """
    options = engine_options(config, durability)
    batching = Batching.of(batch, config, topology)
    micro = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((batching.micro_size, *x.shape[1:]), x.dtype), abstract_of(batch)
    )
    progress("trace", 0, 1)
    leaves = classify_params(abstract, config)
    traced = trace_loss(
        loss_fn, signature, abstract, leaves, state, micro, rng, topology, options.max_unit_bytes
    )  # fmt: skip
    leaves = traced.graph.leaves
    if not any(leaf.kind is LeafKind.TRAINABLE for leaf in leaves):
        raise ConfigError("no parameter is trainable: check trainable_patterns and frozen_patterns")
    rule: Any = as_rule(optimizer).bind(leaves, abstract)
    stored = check(rule, leaves)
    if stored is None:
        layout = make_layout(traced.graph, topology, options.layout)
    else:
        layout = Layout.from_json(leaves, stored["layout"])
        options = with_chunk_elements(options, stored["chunk_elements"])
    # Leaves that are updated whole cannot be, one by one, beside the passes; and gradients on the device would have to
    # wait there for the next forward, beside its values.
    if not rule.fused or options.placement.gradients is Tier.DEVICE:
        options = dataclasses.replace(options, stream=dataclasses.replace(options.stream, update_overlap="none"))
    record = RecordFormat.of(config.compute_dtype, len(rule.slots))
    gradient_dtype = config.resolve_gradient_dtype(batching.num_micro)
    program = step_program(
        traced.graph, layout, topology, record,
        gradient_dtype=gradient_dtype, outer_shardings=traced.outer_shardings,
        group_sizes=group_sizes(traced, batching.num_micro, options.stream.micro_batches_per_group),
        weight_value=traced.parts.weight,
        state_values=tuple(zip(traced.state_inputs, traced.state_results, strict=True)),
        remat_policy=config.streaming.remat_policy,
        progress=lambda done, total: progress("compile", done, total),
    )  # fmt: skip
    update_bytes = 0 if rule.fused else whole_bytes(rule, leaves)
    setup = StepSetup(program, layout, topology, record, gradient_dtype, options, rule.fused, update_bytes)
    return BuiltStep(batching, traced, rule, setup)


def pages_directories(config: Config, run_dir: pathlib.Path, run_id: str) -> list[pathlib.Path]:
    """Where the NVMe tier's files go: names are unique per run, so runs that share a path never meet."""
    if config.nvme_path:
        return [pathlib.Path(path).absolute() / f"zinf-{run_id}" for path in config.nvme_path]
    return [run_dir.absolute() / "pages"]
