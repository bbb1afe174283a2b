"""What `deepspeed` has, by module: name -> where it is. How a row is written: resolve() in _lazy.py.

Row "*": a module that answers for all names that have no row. Row "=": the module is another name of that one.
"""

from __future__ import annotations

Rows = dict[str, str]


def _same(path: str, names: str, feature: str = "") -> Rows:
    """Rows for names that are called the same in `path`; with a feature, refused where it has no such name yet."""
    return {name: f"{path}:{name}" + (f"!{feature}" if feature else "") for name in names.split()}


def _texts(names: str, prefix: str = "") -> Rows:
    """Constants whose value is their name in lower case."""
    return {name: "=" + name.removeprefix(prefix).lower() for name in names.split()}


def _refused(names: str, feature: str) -> Rows:
    return dict.fromkeys(names.split(), f"!{feature}")


_INFERENCE = "inference engines; call the model itself, inside zero.GatheredParameters where it is partitioned"
_MOE = "expert parallelism (section `expert_parallel`); leaf modules (zero_optimization.leaf_module) train MoE models"
_ULYSSES = "sequence parallelism (`sequence_parallel_size`)"
_AUTOTP = "tensor parallelism (section `tensor_parallel`)"
_UNIVERSAL = "universal checkpoints (`checkpoint.load_universal`); Tessera's own load into any world and stage"
_OFFLOAD = "offload (zero_optimization.offload_optimizer, offload_param)"
_KERNELS = "kernels that are compiled at run time; Tessera's are built with it"
_QUANTIZED = "quantized communication (zero_quantized_weights, zero_quantized_gradients)"

_ZERO = {
    **_same("._zero", "Init GatheredParameters ZeroParamType DeepSpeedZeRoOffload unwrap_model_for_generation"),
    **_same("tessera.zero", "register_external_parameter unregister_external_parameter"),
    "ZeroParamStatus": "tessera.zero:ParamStatus",
    **_refused("TiledLinear TiledLinearReturnBias", "tiled linear layers; stage 3 gathers one unit at a time"),
    **_refused("MiCS_Init", "MiCS_Init; zero_optimization.mics_shard_size needs no context of its own"),
    **_refused("DeepSpeedTensorOverride", "tensor overrides; zero.Init(tensor_overrides=...)"),
}

_PIPE = _same("tessera.pipeline", "PipelineModule LayerSpec TiedLayerSpec")
_TOPOLOGIES = _same(
    "tessera.pipeline._topology",
    "ProcessTopology PipeDataParallelTopology PipeModelDataParallelTopology PipelineParallelGrid",
)

_LEAF = (
    "set_z3_leaf_modules unset_z3_leaf_modules get_z3_leaf_modules z3_leaf_module z3_leaf_parameter set_z3_leaf_module "
    "set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix"
)
_SAFE = (
    "safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state safe_get_local_fp32_param "
    "safe_get_local_grad safe_get_local_optimizer_state safe_set_full_fp32_param safe_set_full_grad "
    "safe_set_full_optimizer_state safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state "
    "safe_update_full_grad_vectorized"
)
_TO_FP32 = (
    "get_fp32_state_dict_from_zero_checkpoint convert_zero_checkpoint_to_fp32_state_dict "
    "load_state_dict_from_zero_checkpoint"
)
_SCHEDULES = {
    **_same("tessera.lr_schedules", "WarmupLR WarmupDecayLR WarmupCosineLR OneCycle LRRangeTest VALID_LR_SCHEDULES"),
    **_same("tessera.lr_schedules", "WARMUP_LR WARMUP_DECAY_LR WARMUP_COSINE_LR ONE_CYCLE LR_RANGE_TEST"),
    **_same("tessera.lr_schedules", "WARMUP_LOG_RATE WARMUP_LINEAR_RATE"),
    **_texts(
        "LR_SCHEDULE LR_RANGE_TEST_MIN_LR LR_RANGE_TEST_STEP_RATE LR_RANGE_TEST_STEP_SIZE LR_RANGE_TEST_STAIRCASE "
        "EDGE_VALUE MID_VALUE CYCLE_FIRST_STEP_SIZE CYCLE_FIRST_STAIR_COUNT CYCLE_SECOND_STEP_SIZE "
        "CYCLE_SECOND_STAIR_COUNT DECAY_STEP_SIZE CYCLE_MIN_LR CYCLE_MAX_LR DECAY_LR_RATE CYCLE_MIN_MOM CYCLE_MAX_MOM "
        "DECAY_MOM_RATE WARMUP_MIN_LR WARMUP_MAX_LR WARMUP_NUM_STEPS WARMUP_TYPE WARMUP_MIN_RATIO COS_MIN_RATIO "
        "TOTAL_NUM_STEPS"
    ),
    **_same("._arguments", "add_tuning_arguments"),
}
_CHECKPOINTING = _same(
    "._checkpointing",
    "configure checkpoint is_configured non_reentrant_checkpoint get_cuda_rng_tracker model_parallel_cuda_manual_seed "
    "model_parallel_reconfigure_tp_seed reset set_num_layers CheckpointFunction",
)
_ELASTIC = {
    **_same("tessera.elasticity", "compute_elastic_config elasticity_enabled"),
    **_refused("DSElasticAgent", "an elastic agent of its own; `tessera launch` and torchrun have torch's"),
    **_refused("ensure_immutable_elastic_config", "a scheduler's copy of the section in the environment"),
}
_PROFILER = _same("tessera.flops", "FlopsProfiler get_model_profile")
_ULYSSES_SP = (
    "UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter TiledMLP TiledFusedLogitsLoss SequenceTiledCompute "
    "sequence_tiled_compute"
)

MODULES: dict[str, Rows] = {
    "deepspeed": {
        **_same("._engine", "initialize DeepSpeedEngine"),
        **_same("._config", "DeepSpeedConfig DeepSpeedConfigError"),
        **_same("._comm", "init_distributed"),
        **_same("._arguments", "add_config_arguments add_tuning_arguments"),
        **_same("._logging", "logger log_dist"),
        **_same("._small", "OnDevice"),
        **_same("._optimizers", "DeepSpeedOptimizer ZeROOptimizer"),
        **_same("._tensor_parallel", "tp_model_init set_autotp_mode"),
        "zero": "deepspeed.runtime.zero",
        "checkpointing": "deepspeed.runtime.activation_checkpointing.checkpointing",
        "comm": "deepspeed.comm",
        "dist": "deepspeed.comm",
        "get_accelerator": "._accelerator:get_accelerator",
        "PipelineModule": "tessera.pipeline:PipelineModule",
        "PipelineEngine": "._pipe:PipelineEngine",
        **_refused("init_inference InferenceEngine DeepSpeedInferenceConfig default_inference_config", _INFERENCE),
        **_refused("DeepSpeedHybridEngine", "the hybrid engine (section `hybrid_engine`)"),
        **_refused("DeepSpeedTransformerLayer DeepSpeedTransformerConfig replace_transformer_layer", _KERNELS),
        **_refused("revert_transformer_layer", _KERNELS),
    },
    "deepspeed.zero": {"=": "deepspeed.runtime.zero"},
    "deepspeed.checkpointing": {"=": "deepspeed.runtime.activation_checkpointing.checkpointing"},
    "deepspeed.runtime": {},
    "deepspeed.runtime.engine": {
        **_same("._engine", "DeepSpeedEngine"),
        **_same("._comm", "init_distributed"),
        **_same("._optimizers", "MEMORY_OPT_ALLREDUCE_SIZE DeepSpeedOptimizerCallable DeepSpeedSchedulerCallable"),
    },
    "deepspeed.runtime.config": {
        **_same("._config", "DeepSpeedConfig DeepSpeedConfigError DeepSpeedFP16Config DeepSpeedBF16Config"),
        **_texts("ADAM_OPTIMIZER ADAMW_OPTIMIZER ADAGRAD_OPTIMIZER LION_OPTIMIZER LAMB_OPTIMIZER", ""),
    },
    "deepspeed.runtime.precision_config": _same("._config", "DeepSpeedFP16Config DeepSpeedBF16Config"),
    "deepspeed.runtime.config_utils": _same("._config", "DeepSpeedConfigModel"),
    "deepspeed.runtime.constants": _texts(
        "TRAIN_BATCH_SIZE TRAIN_MICRO_BATCH_SIZE_PER_GPU GRADIENT_ACCUMULATION_STEPS OPTIMIZER SCHEDULER "
        "GRADIENT_CLIPPING STEPS_PER_PRINT ZERO_OPTIMIZATION ZERO_ALLOW_UNTESTED_OPTIMIZER COMMUNICATION_DATA_TYPE"
    ),
    "deepspeed.runtime.lr_schedules": _SCHEDULES,
    "deepspeed.runtime.utils": _same(
        "._small",
        "move_to_device see_memory_usage is_model_parallel_parameter get_global_norm clip_grad_norm_ "
        "ensure_directory_exists set_random_seed required_torch_version",
    ),
    "deepspeed.runtime.base_optimizer": _same("._optimizers", "DeepSpeedOptimizer ZeROOptimizer"),
    "deepspeed.runtime.bf16_optimizer": _same("._optimizers", "BF16_Optimizer"),
    "deepspeed.runtime.fp16": {},
    "deepspeed.runtime.fp16.fused_optimizer": _same("._optimizers", "FP16_Optimizer"),
    "deepspeed.runtime.fp16.unfused_optimizer": _same("._optimizers", "FP16_UnfusedOptimizer"),
    "deepspeed.runtime.fp16.loss_scaler": {
        "DynamicLossScaler": "tessera.loss_scale:LossScaler",
        "LossScaler": "tessera.loss_scale:LossScaler",
        "LossScalerBase": "tessera.loss_scale:LossScaler",
    },
    "deepspeed.runtime.fp16.onebit": _refused("OnebitAdam OnebitLamb ZeroOneAdam", "1-bit optimizers"),
    "deepspeed.runtime.torch_autocast": {"*": "tessera.autocast"},
    "deepspeed.runtime.dataloader": {
        "RepeatingLoader": "tessera.data:RepeatingLoader",
        "DeepSpeedDataLoader": "tessera.data:Loader",
    },
    "deepspeed.runtime.activation_checkpointing": {},
    "deepspeed.runtime.activation_checkpointing.checkpointing": _CHECKPOINTING,
    "deepspeed.runtime.pipe": {**_PIPE, **_TOPOLOGIES},
    "deepspeed.runtime.pipe.module": _PIPE,
    "deepspeed.runtime.pipe.topology": _TOPOLOGIES,
    "deepspeed.runtime.pipe.engine": _same("._pipe", "PipelineEngine"),
    "deepspeed.runtime.pipe.schedule": _refused(
        "PipeSchedule TrainSchedule InferenceSchedule DataParallelSchedule PipeInstruction BufferOpInstruction "
        "OptimizerStep ReduceGrads ReduceTiedGrads LoadMicroBatch ForwardPass BackwardPass SendActivation "
        "RecvActivation SendGrad RecvGrad",
        "schedules of instructions; `pipeline.schedule` chooses one, engine.train_batch() runs it",
    ),
    "deepspeed.runtime.hybrid_engine": _refused("DeepSpeedHybridEngine", "the hybrid engine (section `hybrid_engine`)"),
    "deepspeed.runtime.compiler": _same("._small", "is_compile_supported"),
    "deepspeed.runtime.sequence_parallel": {},
    "deepspeed.runtime.sequence_parallel.ulysses_sp": _same("tessera.sequence", _ULYSSES_SP, _ULYSSES),
    "deepspeed.runtime.sequence_parallel.parallel_state_sp": {
        "initialize_sequence_parallel": f"tessera.sequence:initialize_sequence_parallel!{_ULYSSES}",
        "*": "deepspeed.utils.groups",
    },
    "deepspeed.runtime.tensor_parallel": _same("._tensor_parallel", "tp_model_init set_autotp_mode"),
    "deepspeed.runtime.zero": _ZERO,
    "deepspeed.runtime.zero.partition_parameters": {
        **_ZERO,
        **_same(
            "._zero", "zero_wrapper_for_fp_tensor_constructor _orig_torch_arange _orig_torch_empty _orig_torch_zeros"
        ),
        **_same("._zero", "_orig_torch_ones _orig_torch_full _orig_torch_tensor _orig_torch_eye _orig_torch_randn"),
        **_same("._zero", "_orig_torch_linspace _orig_torch_rand is_zero_param shutdown_init_context"),
        **_same("._zero", "restore_init_context InsertPostInitMethodToModuleSubClasses"),
        "get_accelerator": "._accelerator:get_accelerator",
        "print_rank_0": "._logging:print_rank_0",
    },
    "deepspeed.runtime.zero.parameter_offload": _same("._zero", "DeepSpeedZeRoOffload"),
    "deepspeed.runtime.zero.partitioned_param_coordinator": _refused(
        "PartitionedParameterCoordinator", "a coordinator of gathers in Python; the core orders them"
    ),
    "deepspeed.runtime.zero.config": _same(
        "._config", "DeepSpeedZeroConfig ZeroStageEnum get_zero_config ZERO_OPTIMIZATION"
    ),
    "deepspeed.runtime.zero.offload_config": _same(
        "._config",
        "DeepSpeedZeroOffloadOptimizerConfig DeepSpeedZeroOffloadParamConfig OffloadDeviceEnum OffloadStateTypeEnum",
    ),
    "deepspeed.runtime.zero.leaf_module_config": {
        "DEFAULT_LEAF_MODULE_CLASSES": "tessera.zero:DEFAULT_LEAF_MODULE_CLASSES"
    },
    "deepspeed.runtime.zero.utils": _same("._zero", "ZeRORuntimeException is_zero_supported_optimizer is_zero_param"),
    "deepspeed.runtime.zero.stage_1_and_2": _same("._optimizers", "DeepSpeedZeroOptimizer"),
    "deepspeed.runtime.zero.stage3": _same("._optimizers", "DeepSpeedZeroOptimizer_Stage3"),
    "deepspeed.runtime.zero.tiling": _refused("TiledLinear TiledLinearReturnBias", "tiled linear layers"),
    "deepspeed.runtime.zero.mics": _refused(
        "MiCS_Init MiCS_Optimizer", "MiCS classes; zero_optimization.mics_shard_size"
    ),
    "deepspeed.comm": {
        **_refused("mpi_discovery", "a search of its own; init_distributed() reads the variables of Open MPI"),
        "*": "._comm",
    },
    "deepspeed.comm.comm": {"=": "deepspeed.comm"},
    "deepspeed.comm.reduce_op": {"ReduceOp": "torch.distributed:ReduceOp"},
    "deepspeed.comm.utils": _same(
        "._comm", "get_local_rank_from_launcher get_world_rank_from_launcher get_world_size_from_launcher"
    ),
    "deepspeed.accelerator": {
        **_same("._accelerator", "get_accelerator set_accelerator"),
        "DeepSpeedAccelerator": "._accelerator:Accelerator",
    },
    "deepspeed.accelerator.abstract_accelerator": {"DeepSpeedAccelerator": "._accelerator:Accelerator"},
    "deepspeed.accelerator.real_accelerator": _same("._accelerator", "get_accelerator set_accelerator"),
    "deepspeed.utils": {
        **_same("tessera.utils", f"{_SAFE} {_LEAF}"),
        **_same("._logging", "logger log_dist set_log_level_from_string LoggerFactory"),
        "RepeatingLoader": "tessera.data:RepeatingLoader",
        "OnDevice": "._small:OnDevice",
        "instrument_w_nvtx": "._small:instrument_w_nvtx",
        **_same("._timers", "SynchronizedWallClockTimer ThroughputTimer"),
    },
    "deepspeed.utils.logging": _same(
        "._logging", "logger log_dist print_rank_0 set_log_level_from_string LoggerFactory log_levels should_log_le"
    ),
    "deepspeed.utils.tensor_fragment": _same("tessera.utils", _SAFE),
    "deepspeed.utils.z3_leaf_module": _same("tessera.utils", _LEAF),
    "deepspeed.utils.nvtx": _same("._small", "instrument_w_nvtx"),
    "deepspeed.utils.timer": _same("._timers", "SynchronizedWallClockTimer ThroughputTimer"),
    "deepspeed.utils.init_on_device": _same("._small", "OnDevice"),
    "deepspeed.utils.groups": {"*": "._groups"},
    "deepspeed.utils.zero_to_fp32": {
        **_same("._to_fp32", _TO_FP32),
        **_same("._to_fp32", "get_model_state_file get_optim_files"),
        "main": "._commands:zero_to_fp32",
    },
    "deepspeed.ops": {"__compatible_ops__": "._ops:compatible_ops", "op_builder": "deepspeed.ops.op_builder"},
    "deepspeed.ops.adam": _same("._ops", "FusedAdam DeepSpeedCPUAdam"),
    "deepspeed.ops.adam.fused_adam": _same("._ops", "FusedAdam"),
    "deepspeed.ops.adam.cpu_adam": _same("._ops", "DeepSpeedCPUAdam"),
    "deepspeed.ops.adagrad": _same("._ops", "DeepSpeedCPUAdagrad"),
    "deepspeed.ops.lion": _same("._ops", "FusedLion DeepSpeedCPULion"),
    "deepspeed.ops.lamb": _same("._ops", "FusedLamb"),
    "deepspeed.ops.aio": {"AsyncIOBuilder": "._ops:AsyncIOBuilder", **_refused("aio_handle", _OFFLOAD)},
    "deepspeed.ops.op_builder": {"*": "._ops"},
    "deepspeed.ops.transformer": _refused("DeepSpeedTransformerLayer DeepSpeedTransformerConfig", _KERNELS),
    "deepspeed.ops.sparse_attention": _refused("SparseSelfAttention SparsityConfig", _KERNELS),
    "deepspeed.git_version_info": {"version": "deepspeed:__version__", "compatible_ops": "._ops:compatible_ops"},
    "deepspeed.checkpoint": {
        **_same("._checkpoint_utils", "clone_tensors_for_torch_save"),
        **_refused("DeepSpeedCheckpoint", _UNIVERSAL),
    },
    "deepspeed.checkpoint.utils": _same(
        "._checkpoint_utils",
        "clone_tensors_for_torch_save get_model_ckpt_name_for_rank get_zero_ckpt_name_for_rank "
        "get_layer_ckpt_name_for_rank",
    ),
    "deepspeed.checkpoint.constants": _texts(
        "OPTIMIZER_STATE_DICT FP32_GROUPS FP32_FLAT_GROUPS BASE_OPTIMIZER_STATE SINGLE_PARTITION_OF_FP32_GROUPS "
        "PARAM_GROUPS GROUP_PADDINGS PARTITION_COUNT ZERO_STAGE CLIP_GRAD FP32_WEIGHT_KEY PARAM_SHAPES BUFFER_NAMES "
        "FROZEN_PARAM_SHAPES FROZEN_PARAM_FRAGMENTS DS_VERSION UNIVERSAL_CHECKPOINT_INFO"
    )
    | {"FP32_WEIGHT_KEY": "=fp32"},
    "deepspeed.checkpoint.ds_to_universal": {"main": "._commands:universal"},
    "deepspeed.launcher": {},
    "deepspeed.launcher.runner": _same(
        "tessera.launch", "parse_resource_filter fetch_hostfile parse_inclusion_exclusion encode_world_info"
    )
    | {"main": "._commands:launch", "DEEPSPEED_ENVIRONMENT_NAME": "._commands:DEEPSPEED_ENVIRONMENT_NAME"},
    "deepspeed.monitor": {},
    "deepspeed.monitor.monitor": {"MonitorMaster": "._watching:MonitorMaster", "Monitor": "tessera.monitor:Writer"},
    "deepspeed.monitor.config": {"DeepSpeedMonitorConfig": "._config:DeepSpeedMonitorConfig"},
    "deepspeed.profiling": {},
    "deepspeed.profiling.flops_profiler": _PROFILER,
    "deepspeed.profiling.flops_profiler.profiler": _PROFILER,
    "deepspeed.elasticity": {**_ELASTIC, **_texts("ELASTICITY ENABLED")},
    "deepspeed.elasticity.elasticity": _ELASTIC,
    "deepspeed.elasticity.constants": _texts("ELASTICITY ENABLED"),
    "deepspeed.elasticity.config": _same(
        "tessera.elasticity", "ElasticityError ElasticityConfigError ElasticityIncompatibleWorldSize"
    ),
    "deepspeed.module_inject": {
        **_refused("replace_transformer_layer revert_transformer_layer replace_module", _KERNELS)
    },
    "deepspeed.module_inject.layers": {
        "LinearLayer": f"tessera.parallel:ColumnLinear!{_AUTOTP}",
        "LinearAllreduce": f"tessera.parallel:RowLinear!{_AUTOTP}",
        **_refused(
            "GatherReplacedLayerParams", "a context that gathers slices; engine.module_state_dict() has whole values"
        ),
        **_same("._tensor_parallel", "set_autotp_mode is_autotp_training_mode"),
    },
    "deepspeed.module_inject.tp_shard": _refused(
        "get_shard_size get_shard_size_list", "sizes of slices; tessera.parallel.plan_for says how a model is cut"
    ),
    "deepspeed.sequence": {},
    "deepspeed.sequence.layer": {
        **_same("tessera.sequence", "DistributedAttention", _ULYSSES),
        **_same("._sequence", "_SeqAllToAll"),
    },
    "deepspeed.sequence.cross_entropy": _same("tessera.sequence", "vocab_sequence_parallel_cross_entropy", _ULYSSES),
    "deepspeed.pipe": _PIPE,
    "deepspeed.moe": {},
    "deepspeed.moe.layer": _refused("MoE", _MOE),
    "deepspeed.moe.utils": {
        **_same("._small", "is_moe_param"),
        **_refused("split_params_into_different_moe_groups_for_optimizer", _MOE),
    },
    "deepspeed.inference": {},
    "deepspeed.inference.engine": _refused("InferenceEngine", _INFERENCE),
    "deepspeed.inference.config": _refused("DeepSpeedInferenceConfig", _INFERENCE),
    "deepspeed.compression": _refused("init_compression redundancy_clean", "compression (`compression_training`)"),
    "deepspeed.autotuning": _refused("Autotuner", "autotuning (section `autotuning`)"),
    "deepspeed.linear": _refused("OptimizedLinear LoRAConfig QuantizationConfig", "OptimizedLinear; use PEFT's LoRA"),
    "deepspeed.env_report": {"main": "._commands:report", "cli_main": "._commands:report"},
    "deepspeed.nvme": _refused("parse_nvme_config", _OFFLOAD),
}
