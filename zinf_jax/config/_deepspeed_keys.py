"""DeepSpeed's configuration keys, all spellings of its documentation: what each one becomes here.

One table drives translation, checks, suggestions and the printed reference. Three fates:

    to=...        mapped: the native key (or keys) that it sets
    note=...      accepted, with a note: why it has no meaning here (it changes neither the numbers nor can be obeyed)
    refuse=...    refused unless the value is one of `harmless`: it would change what is trained

Source: DeepSpeed's "Configuration JSON" page and the field docs of its zero, offload, aio and precision configs (0.19).
"""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Key:
    """One DeepSpeed key.

    Attributes:
      path: Dotted path in the file.
      kind: count | bool | number | text | paths | dtype | any: how the value is checked.
      default: What DeepSpeed takes without it, and what `"auto"` means. None: not set.
      to, note, refuse: Its fate here; exactly one is given.
      harmless: With `refuse`: values that are accepted with a note.
      old: Other spellings of the last part.
    """

    path: str
    kind: str
    default: Any = None
    to: str | None = None
    note: str | None = None
    refuse: str | None = None
    harmless: tuple[Any, ...] = ()
    old: tuple[str, ...] = ()

    @property
    def reason(self) -> str:
        return self.note or self.refuse or f"sets {self.to}"


_COMM = "XLA plans and overlaps collectives itself: one all-gather and one reduce-scatter per page"
_EVICT = (
    "the order of use is known, so pages are dropped by schedule; memory is bounded by device_memory and host_memory"
)
_LAZY = "belongs to DeepSpeed's wrapping of torch modules; a loss function is traced here"
_SPARSE = "gradients are dense and each page moves once; nothing to choose"
_PIPELINE = "reads, updates and writes always overlap (streaming.num_chunk_frames)"
_AXES = "give `mesh` a second axis and the parameters shardings over it"
_DATA = "it changes what is trained on; do it in the data factory"
_STATS = "times and bytes of every step are always in trainer.stats() and the metrics file"
_LOSSY = "it quantises what is communicated or stored, which changes the numbers"
_MEAN = "gradients are averaged over devices in gradient_dtype; choose fp32 there if a sum could overflow"
_CHUNK = "streaming.chunk_bytes = elements x bytes of master and state per parameter, below 64 MiB (an upper limit)"
_OFF = (False, None)

ZERO = _Z = "zero_optimization."
PARAM = _P = _Z + "offload_param."
OPTIMIZER = _O = _Z + "offload_optimizer."

ZERO_KEYS = (
    Key(_Z + "stage", "count", 0, to="partitioning.stage"),
    Key(_Z + "cpu_offload", "bool", False, to="offload_optimizer.device: cpu (deprecated spelling)"),
    Key(_Z + "cpu_offload_param", "bool", False, to="offload_param.device: cpu (deprecated spelling)",
        old=("cpu_offload_params",)),
    Key(_Z + "cpu_offload_use_pin_memory", "bool", None, to="pin_memory: false if false (deprecated spelling)"),
    Key(_Z + "sub_group_size", "count", 10**9, to=_CHUNK),
    Key(_Z + "stage3_prefetch_bucket_size", "count", 5 * 10**7, to="streaming.lookahead: 0 if 0, else by the plan",
        old=("prefetch_bucket_size", "stage3_prefetch_size")),
    Key(_Z + "stage3_max_live_parameters", "count", 10**9, note=_EVICT,
        old=("max_live_parameters", "stage3_max_live_params")),
    Key(_Z + "stage3_max_reuse_distance", "count", 10**9, note=_EVICT,
        old=("max_reuse_distance", "stage3_max_unused_params")),
    Key(_Z + "stage3_param_persistence_threshold", "count", 10**5, old=("param_persistence_threshold",),
        note="small leaves share a page and travel together, so none has to stay on the device"),
    Key(_Z + "stage3_model_persistence_threshold", "count", None, old=("model_persistence_threshold",),
        note="small leaves share a page and travel together, so none has to stay on the device"),
    Key(_Z + "stage3_gather_16bit_weights_on_model_save", "bool", False,
        old=("gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"),
        note="a save always holds whole weights, readable leaf by leaf without gathering"),
    Key(_Z + "stage3_module_granularity_threshold", "count", 0, old=("module_granularity_threshold",), note=_LAZY),
    Key(_Z + "stage3_use_all_reduce_for_fetch_params", "bool", False, note=_COMM,
        old=("use_all_reduce_for_fetch_params",)),
    Key(_Z + "stage3_allgather_sequential", "bool", False, old=("allgather_sequential",), note=_COMM),
    Key(_Z + "stage3_partition_stream_chunk_size", "count", 0, old=("partition_stream_chunk_size",),
        note="parameters are always initialised page by page"),
    Key(_Z + "allgather_partitions", "bool", True, note=_COMM),
    Key(_Z + "allgather_bucket_size", "count", 5 * 10**8, note=_COMM),
    Key(_Z + "reduce_scatter", "bool", True, note=_COMM),
    Key(_Z + "reduce_bucket_size", "count", 5 * 10**8, note=_COMM),
    Key(_Z + "use_multi_rank_bucket_allreduce", "bool", True, note=_COMM),
    Key(_Z + "overlap_comm", "bool", False, note=_COMM),
    Key(_Z + "contiguous_gradients", "bool", True, note="gradients go into preallocated frames; nothing fragments"),
    Key(_Z + "round_robin_gradients", "bool", False, note=_COMM),
    Key(_Z + "parameter_alignment", "bool", False, note="leaves are always aligned in their page"),
    Key(_Z + "compute_grad_norm", "bool", True, note="the norm is always computed; it is in the returned metrics"),
    Key(_Z + "load_from_fp32_weights", "bool", True, note="a resume always restores the exact fp32 master"),
    Key(_Z + "elastic_checkpoint", "bool", False, note="every save can be resumed on another number of devices"),
    Key(_Z + "ignore_unused_parameters", "bool", True,
        note="a leaf that the loss does not use gets a zero gradient, as from jax.grad"),
    Key(_Z + "legacy_stage1", "bool", False, note="there is one implementation"),
    Key(_Z + "pipeline_loading_checkpoint", "bool", False, note="a resume reads page by page"),
    Key(_Z + "memory_efficient_linear", "bool", True, note=_LAZY),
    Key(_Z + "override_module_apply", "bool", True, note=_LAZY),
    Key(_Z + "leaf_module", "any", None, note=_LAZY),
    Key(_Z + "log_trace_cache_warnings", "bool", False, note="the schedule is planned, not recorded; it has no cache"),
    Key(_Z + "enable_sanity_checks", "bool", False, note="checks are always on"),
    Key(_Z + "save_muon_momentum_buffer_in_memory", "bool", False, note="Muon is not among the fused optimizers"),
    Key(_Z + "zero_hpz_partition_size", "count", 1,
        note="a second copy of the weights per node saves traffic between nodes only; results are the same"),
    Key(_Z + "mics_shard_size", "any", -1, note="shard over a smaller axis by giving `mesh` two axes"),
    Key(_Z + "mics_hierarchical_params_gather", "bool", False, note=_COMM),
    Key(_Z + "zero_quantized_weights", "bool", False, refuse=_LOSSY, harmless=_OFF),
    Key(_Z + "zero_quantized_nontrainable_weights", "bool", False, refuse=_LOSSY, harmless=_OFF),
    Key(_Z + "zero_quantized_gradients", "bool", False, refuse=_LOSSY, harmless=_OFF),
    Key(_Z + "zeropp_loco_param", "any", None, refuse=_LOSSY, harmless=(None,)),
    Key(_Z + "zenflow", "any", None, refuse="it updates with stale gradients: other numbers", harmless=(None,)),
)  # fmt: skip

OFFLOAD_KEYS = (
    Key(_P + "device", "text", "none", to="placement.weights (none: device, cpu: host, nvme: nvme)"),
    Key(_P + "nvme_path", "paths", None, to="nvme_path"),
    Key(_P + "pin_memory", "bool", None, to="pin_memory: false if false, else auto"),
    Key(_P + "buffer_size", "count", None, to="streaming.page_bytes = elements x 2 (bf16, fp16) or x 4 (fp32), "
        "below 256 MiB (it is an upper limit)"),
    Key(_P + "buffer_count", "count", 5,
        note="frames come from one arena of host_memory bytes; how many are in use follows from streaming.lookahead"),
    Key(_P + "max_in_cpu", "count", None, to="placement.weights_host_cache = elements x 2 (bf16, fp16) or x 4 (fp32); "
        "without it 0, so that weights configured for nvme are on nvme (DeepSpeed: 1e9)"),
    Key(_O + "device", "text", "none",
        to="placement.optimizer; and placement.gradients: device for none, host for cpu, by the plan for nvme"),
    Key(_O + "nvme_path", "paths", None, to="nvme_path"),
    Key(_O + "pin_memory", "bool", None, to="pin_memory: false if false, else auto"),
    Key(_O + "ratio", "number", 1.0, to="placement.optimizer_fraction"),
    Key(_O + "buffer_count", "count", None, note="checked against the optimizer's minimum (Adam: parameter, "
        "gradient, m, v = 4); a chunk is one frame here, their number is streaming.num_chunk_frames"),
    Key(_O + "buffer_size", "count", None, to=_CHUNK),
    Key(_O + "pipeline_read", "bool", False, note=_PIPELINE),
    Key(_O + "pipeline_write", "bool", False, note=_PIPELINE),
    Key(_O + "pipeline", "bool", False, note=_PIPELINE),
    Key(_O + "fast_init", "bool", False, note="state is always initialised page by page, never whole"),
    Key(_O + "super_offload", "bool", False, note="there is one update path; its threads are host_threads"),
    Key(_O + "convert_grad_on_cpu", "bool", True, note="the update kernel reads gradients in gradient_dtype directly"),
    Key(_O + "cpuadam_cores_perc", "number", 0.8, note="set host_threads"),
)  # fmt: skip

SHARED_KEYS = (  # within sections that both schemas have
    Key("bf16.immediate_grad_update", "bool", False, note="a gradient accumulates on the device and leaves once"),
    Key("bf16.check_grad_overflow", "bool", False, note="non-finite gradients always skip the step"),
    Key("bf16.bf16_master_weights_and_grads", "bool", False, harmless=_OFF,
        refuse="a bf16 master stops moving (1.0 - 6e-4 is 1.0 in bf16)"),
    Key("bf16.bf16_optimizer_states", "bool", False, harmless=_OFF, refuse="a bf16 Adam state stops moving"),
    Key("fp16.auto_cast", "bool", False, harmless=_OFF,
        refuse="batch leaves reach the loss as they are given; cast them in the loss function"),
    Key("fp16.fp16_master_weights_and_grads", "bool", False, harmless=_OFF, refuse="an fp16 master stops moving"),
    Key("fp16.fused_mode", "bool", True, note="there is one fused update"),
    Key("fp16.opt_level", "text", None, note="belonged to Apex"),
    Key("aio.use_gds", "bool", False, harmless=_OFF, refuse="GPUDirect storage is not available in this version"),
    Key("aio.intra_op_parallelism", "count", 1, to="aio.thread_count"),
    Key("optimizer.legacy_fusion", "bool", False, note="there is one fused update"),
)  # fmt: skip

TOP_KEYS = (
    Key("zero_allow_untested_optimizer", "bool", False, note="any optax transformation is accepted"),
    Key("zero_force_ds_cpu_optimizer", "bool", True, note="the update runs where placement.optimizer says"),
    Key("steps_per_print", "count", 10, to="train.log_every"),
    Key("wall_clock_breakdown", "bool", False, note=_STATS),
    Key("memory_breakdown", "bool", False, note=_STATS),
    Key("dump_state", "bool", False, note="`zinf plan CONFIG` prints what a run will do"),
    Key("data_types.grad_accum_dtype", "dtype", None, to="gradient_dtype"),
    Key("communication_data_type", "dtype", None, note="gradients are reduced in gradient_dtype"),
    Key("seq_parallel_communication_data_type", "dtype", None, note="shardings come from the model"),
    Key("gradient_allreduce_op", "text", "mean", harmless=("mean",),
        refuse="gradients are averaged; scale the loss to get a sum"),
    Key("prescale_gradients", "bool", False, note=_MEAN),
    Key("gradient_predivide_factor", "number", 1.0, note=_MEAN),
    Key("sparse_gradients", "bool", False, note=_SPARSE),
    Key("managed_gradient_accumulation", "bool", True, harmless=(True, None),
        refuse="a step always takes all its micro-batches; the step call is the boundary"),
    Key("disable_allgather", "bool", False, note=_COMM),
    Key("allgather_size", "count", 5 * 10**8, note=_COMM),
    Key("fp32_allreduce", "bool", False, note="set gradient_dtype"),
    Key("dataloader_drop_last", "bool", False, note="`zinf train` takes whole batches only"),
    Key("disable_python_gc", "bool", False, note="Python's garbage collector is left alone"),
    Key("graph_harvesting", "bool", False, note="every unit is one compiled program already"),
    Key("vocabulary_size", "count", None, note="belongs to the model"),
    Key("use_data_before_expert_parallelism", "bool", False, note="set the order of axes in `mesh`"),
    Key("tensorboard", "any", None, to="train.tensorboard (from `enabled`); files go to the run directory"),
    Key("activation_checkpointing", "any", None, to="placement.residuals: host, if cpu_checkpointing; what is "
        "recomputed is streaming.remat_policy, the rest has no meaning here"),
    Key("flops_profiler", "any", None, note="a step's FLOPs are trainer.plan.prediction.flops"),
    Key("comms_logger", "any", None, note=_STATS),
    Key("csv_monitor", "any", None, note="metrics are in metrics.jsonl and TensorBoard files in the run directory"),
    Key("wandb", "any", None, note="metrics are in metrics.jsonl and TensorBoard files in the run directory"),
    Key("comet", "any", None, note="metrics are in metrics.jsonl and TensorBoard files in the run directory"),
    Key("checkpoint", "any", None, note="saves are whole and can be resumed at another size; there are no tags"),
    Key("nebula", "any", None, note="saves go to the directory that is given"),
    Key("autotuning", "any", None, note="the plan chooses; `zinf bench-io` measures the drive"),
    Key("compile", "any", None, note="everything is compiled by XLA"),
    Key("pipeline", "any", None, note="pipeline stages belong to torch modules; units are streamed instead"),
    Key("amp", "any", None, harmless=_OFF, refuse="use a bf16 or fp16 section"),
    Key("torch_autocast", "any", None, harmless=_OFF, refuse="use a bf16 or fp16 section"),
    Key("tensor_parallel", "any", None, harmless=_OFF, refuse=_AXES),
    Key("expert_parallel", "any", None, harmless=_OFF, refuse=_AXES),
    Key("sequence_parallel_size", "count", 1, harmless=(1,), refuse=_AXES),
    Key("hybrid_engine", "any", None, harmless=_OFF, refuse="there are no inference kernels to switch to"),
    Key("data_efficiency", "any", None, harmless=_OFF, refuse=_DATA),
    Key("curriculum_learning", "any", None, harmless=_OFF, refuse=_DATA),
    Key("progressive_layer_drop", "any", None, harmless=_OFF, refuse="it changes the model; change the loss"),
    Key("eigenvalue", "any", None, harmless=_OFF, refuse="not available"),
    Key("quantize_training", "any", None, harmless=_OFF, refuse="it changes the numbers"),
    Key("compression_training", "any", None, harmless=_OFF, refuse="it changes the model"),
    Key("weight_quantization", "any", None, harmless=_OFF, refuse="it changes the numbers"),
    Key("sparse_attention", "any", None, harmless=_OFF, refuse="attention belongs to the model"),
    Key("elasticity", "any", None, harmless=_OFF, refuse="it chooses batch sizes by itself; give train_batch_size"),
)  # fmt: skip

KEYS: dict[str, Key] = {key.path: key for key in (*ZERO_KEYS, *OFFLOAD_KEYS, *SHARED_KEYS, *TOP_KEYS)}
SECTIONS = ("zero_optimization", "zero_optimization.offload_param", "zero_optimization.offload_optimizer", "data_types")
RENAMED_TOP = {"bfloat16": "bf16"}
OLD_SPELLINGS: dict[str, str] = {
    f"{key.path.rsplit('.', 1)[0]}.{old}": key.path for key in KEYS.values() for old in key.old
}
