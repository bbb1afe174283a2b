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
_AUTOTP = "tensor parallelism (section `tensor_parallel`)"
_UNIVERSAL = "universal checkpoints (`checkpoint.load_universal`); Tessera's own load into any world and stage"
_OFFLOAD = "offload (zero_optimization.offload_optimizer, offload_param)"
_KERNELS = "kernels that are compiled at run time; Tessera's are built with it"

_DEEPCOMPILE = "DeepCompile (section `compile`); engine.compile() is torch.compile"
_REDUCED = "norms and checks of one's own; the core has them, engine.get_global_grad_norm() is the norm"

_ZERO = {
    **_same("._zero", "Init GatheredParameters ZeroParamType DeepSpeedZeRoOffload unwrap_model_for_generation"),
    **_same("tessera.zero", "register_external_parameter unregister_external_parameter"),
    "ZeroParamStatus": "tessera.zero:ParamStatus",
    **_refused("TiledLinear TiledLinearReturnBias", "tiled linear layers; stage 3 gathers one unit at a time"),
    **_same("._zero", "MiCS_Init"),
    **_refused("DeepSpeedTensorOverride", "tensor overrides; zero.Init(tensor_overrides=...)"),
}

_BWC = (
    "bwc_tensor_model_parallel_rank bwc_tensor_model_parallel_world_size bwc_tensor_model_parallel_group "
    "bwc_pipeline_parallel_world_size bwc_pipeline_parallel_group"
)
_PIPE = _same("._pipe", "PipelineModule LayerSpec TiedLayerSpec")
_TOPOLOGIES = _same(
    "._topology",
    "ProcessTopology PipeDataParallelTopology PipeModelDataParallelTopology PipelineParallelGrid",
)

_LEAF = {
    **{f"{verb}_z3_leaf_modules": f"tessera.zero:{verb}_leaf_modules" for verb in ("set", "unset", "get")},
    **{f"set_z3_leaf_modules_by_{what}": f"tessera.zero:set_leaf_modules_by_{what}" for what in ("name", "suffix")},
    "set_z3_leaf_module": "tessera.zero:set_leaf_module",
    "z3_leaf_module": "tessera.zero:is_leaf_module",
    "z3_leaf_parameter": "tessera.zero:is_leaf_parameter",
}
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
    **_same("._schedules", "WarmupLR WarmupDecayLR WarmupCosineLR OneCycle LRRangeTest"),
    "VALID_LR_SCHEDULES": "tessera.lr_schedules:VALID_LR_SCHEDULES",
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
    **_same("._elasticity", "compute_elastic_config elasticity_enabled"),
    **_refused("DSElasticAgent", "an elastic agent of its own; `tessera launch` and torchrun have torch's"),
    **_refused("ensure_immutable_elastic_config", "a scheduler's copy of the section in the environment"),
}
# Types of the configuration by their constants.
_TYPES = {f"{name.upper()}_OPTIMIZER": f"={name}" for name in ("adam", "adamw", "adagrad", "lion", "lamb", "muon")}
_SCALER = {
    "INITIAL_LOSS_SCALE": "=init_scale",
    "MIN_LOSS_SCALE": "=min_scale",
    **_texts("SCALE_WINDOW DELAYED_SHIFT CONSECUTIVE_HYSTERESIS"),
}
_TIMERS = (
    "SynchronizedWallClockTimer ThroughputTimer FORWARD_MICRO_TIMER FORWARD_GLOBAL_TIMER BACKWARD_MICRO_TIMER "
    "BACKWARD_GLOBAL_TIMER BACKWARD_INNER_MICRO_TIMER BACKWARD_INNER_GLOBAL_TIMER BACKWARD_REDUCE_MICRO_TIMER "
    "BACKWARD_REDUCE_GLOBAL_TIMER STEP_MICRO_TIMER STEP_GLOBAL_TIMER"
)
_ZERO2, _ZERO3 = (
    f"estimate_{stage}_model_states_mem_needs estimate_{stage}_model_states_mem_needs_all_live "
    f"estimate_{stage}_model_states_mem_needs_all_cold"
    for stage in ("zero2", "zero3")
)
_TP_CONFIG = "AUTOTP_MODE TPConfig TPTrainingConfig get_tensor_parallel_config"
_MUON = (
    "Muon MuonWithAuxAdam SingleDeviceMuon SingleDeviceMuonWithAuxAdam zeropower_via_newtonschulz5 "
    "zeropower_via_gram_newtonschulz"
)
_PROFILER = {**_same("._watching", "FlopsProfiler"), **_same("tessera.flops", "get_model_profile")}
_BUILD = {  # what an installation says of itself
    "version": "deepspeed:__version__",
    **dict.fromkeys(("compatible_ops", "installed_ops"), "._ops:compatible_ops"),
    **dict.fromkeys(("git_hash", "git_branch"), "deepspeed:__git_hash__"),
    **_same("._ops", "torch_info accelerator_name"),
}
_ULYSSES_SP = {
    **_same("._sequence", "UlyssesSPAttentionHF"),
    "UlyssesSPDataLoaderAdapter": "tessera.sequence:SequenceLoader",
    **_same("._sequence", "TiledMLP TiledFusedLogitsLoss SequenceTiledCompute sequence_tiled_compute"),
}

MODULES: dict[str, Rows] = {
    "deepspeed": {
        **_same("._initialize", "initialize"),
        **_same("._engine", "DeepSpeedEngine"),
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
        **{name: _TYPES[name] for name in ("ADAM_OPTIMIZER", "LAMB_OPTIMIZER")},
        "PipelineModule": "._pipe:PipelineModule",
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
        **_same("._config", "get_monitor_config"),
        **_TYPES,
    },
    "deepspeed.runtime.precision_config": _same("._config", "DeepSpeedFP16Config DeepSpeedBF16Config"),
    "deepspeed.runtime.config_utils": {
        **_same("._config_model", "DeepSpeedConfigModel"),
        **_same("._config", "get_scalar_param dict_raise_error_on_duplicate_keys"),
    },
    "deepspeed.runtime.constants": {f"ROUTE_{name.upper()}": f"={name}" for name in ("train", "eval", "predict")}
    | _texts(
        "TRAIN_BATCH_SIZE TRAIN_MICRO_BATCH_SIZE_PER_GPU GRADIENT_ACCUMULATION_STEPS OPTIMIZER SCHEDULER "
        "GRADIENT_CLIPPING STEPS_PER_PRINT ZERO_OPTIMIZATION ZERO_ALLOW_UNTESTED_OPTIMIZER COMMUNICATION_DATA_TYPE"
    ),
    "deepspeed.runtime.lr_schedules": {
        **_SCHEDULES,
        **_refused(
            "get_config_from_args get_lr_from_config override_params parse_arguments update_lr get_torch_optimizer",
            "schedules from a program's arguments; section `scheduler`, or a schedule built from its class",
        ),
    },
    "deepspeed.runtime.utils": {
        **_same("._small", "move_to_device see_memory_usage is_model_parallel_parameter get_global_norm"),
        **_same("._small", "clip_grad_norm_ ensure_directory_exists set_random_seed required_torch_version"),
        **_same("._small", "call_to_str noop_decorator copy_to_device empty_cache"),
        **_same("._helpers", "DummyOptim noop_context prefix_sum_inc partition_uniform partition_balanced"),
        **_same("._helpers", "get_only_unique_item has_inf_or_nan is_invalid_grad_norm get_tensor_bytes"),
        **_same("._helpers", "get_global_norm_of_tensors clip_tensors_by_global_norm"),
        **_refused("CheckOverflow get_grad_norm get_weight_norm", _REDUCED),
    },
    "deepspeed.runtime.base_optimizer": _same("._optimizers", "DeepSpeedOptimizer ZeROOptimizer"),
    "deepspeed.runtime.bf16_optimizer": _same("._optimizers", "BF16_Optimizer"),
    "deepspeed.runtime.fp16": {},
    "deepspeed.runtime.fp16.fused_optimizer": _same("._optimizers", "FP16_Optimizer"),
    "deepspeed.runtime.fp16.unfused_optimizer": _same("._optimizers", "FP16_UnfusedOptimizer"),
    "deepspeed.runtime.fp16.loss_scaler": {
        **_SCALER,
        **_refused("CreateLossScaler", "scalers of one's own; section `fp16`, engine.loss_scaler"),
        **_same("._loss_scaler", "DynamicLossScaler LossScaler LossScalerBase"),
    },
    "deepspeed.runtime.fp16.onebit": _refused("OnebitAdam OnebitLamb ZeroOneAdam", "1-bit optimizers"),
    "deepspeed.runtime.torch_autocast": {"*": "tessera.autocast"},
    "deepspeed.runtime.dataloader": {
        "RepeatingLoader": "tessera.data:RepeatingLoader",
        "DeepSpeedDataLoader": "tessera.data:Loader",
    },
    "deepspeed.runtime.activation_checkpointing": {},
    "deepspeed.runtime.activation_checkpointing.checkpointing": {
        **_CHECKPOINTING,
        "CudaRNGStatesTracker": "._checkpointing:RngTracker",
        **_refused("partition_activations_in_checkpoint", "a switch; configure(partition_activations=...)"),
    },
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
    "deepspeed.runtime.compiler": {
        **_same("._small", "is_compile_supported"),
        **_same("torch.compiler", "disable is_compiling"),
    },
    "deepspeed.compile": _refused("backend init_z1 init_z3 passes", _DEEPCOMPILE),
    "deepspeed.runtime.sparse_tensor": _refused("SparseTensor", "sparse tensors of one's own; `sparse_gradients`"),
    "deepspeed.runtime.progressive_layer_drop": _refused("ProgressiveLayerDrop", "section `progressive_layer_drop`"),
    "deepspeed.runtime.checkpoint_engine": {},
    "deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine": _refused(
        "TorchCheckpointEngine", "writers of checkpoints; engine.save_checkpoint(), section `checkpoint`"
    ),
    "deepspeed.runtime.sequence_parallel": {},
    "deepspeed.runtime.sequence_parallel.ulysses_sp": _ULYSSES_SP,
    "deepspeed.runtime.sequence_parallel.parallel_state_sp": {"=": "deepspeed._sequence_state"},
    "deepspeed.runtime.tensor_parallel": _same("._tensor_parallel", "tp_model_init set_autotp_mode"),
    "deepspeed.runtime.tensor_parallel.config": _same("._tp_config", _TP_CONFIG),
    "deepspeed.runtime.tensor_parallel.init_utils": _same("._tp_config", "load_ds_config infer_config_dtype"),
    "deepspeed.runtime.zero": _ZERO,
    "deepspeed.runtime.zero.partition_parameters": {
        **_ZERO,
        **_same(
            "._zero", "zero_wrapper_for_fp_tensor_constructor _orig_torch_arange _orig_torch_empty _orig_torch_zeros"
        ),
        **_same("._zero", "_orig_torch_ones _orig_torch_full _orig_torch_tensor _orig_torch_eye _orig_torch_randn"),
        **_same("._zero", "_orig_torch_linspace _orig_torch_rand is_zero_param shutdown_init_context"),
        **_same("._zero", "restore_init_context InsertPostInitMethodToModuleSubClasses"),
        **_refused("free_param", "freeing by hand; leave zero.GatheredParameters"),
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
        **_same("._zero", "DEFAULT_LEAF_MODULE_CLASSES DEFAULT_LEAF_MODULE_NAMES DEFAULT_LEAF_MODULE_NAME_SUFFIXES"),
        "DeepSpeedZeroLeafModuleConfig": "._config:DeepSpeedZeroLeafModuleConfig",
    },
    "deepspeed.runtime.zero.muon": {},
    "deepspeed.runtime.zero.muon.original_muon": {
        **_same("._ops", _MUON),
        **_refused("muon_update adam_update", "a step as a function; tessera.optim.Muon is the optimizer"),
    },
    "deepspeed.runtime.zero.muon.muon_optimizer": _same("._ops", "MuonWithAuxAdam"),
    "deepspeed.runtime.zero.utils": {
        **_same("._zero", "ZeRORuntimeException is_zero_supported_optimizer is_zero_param"),
        **_same("._helpers", "apply_to_tensors_only is_builtin_type isinstance_namedtuple get_lst_from_rank0"),
        **_same("._helpers", "assert_ints_same_as_other_ranks assert_lst_len_same_as_other_ranks"),
    },
    "deepspeed.runtime.zero.stage_1_and_2": {
        **_same("._optimizers", "DeepSpeedZeroOptimizer"),
        **_same("._estimators", _ZERO2),
    },
    "deepspeed.runtime.zero.stage3": {
        **_same("._optimizers", "DeepSpeedZeroOptimizer_Stage3"),
        **_same("._estimators", _ZERO3),
    },
    "deepspeed.runtime.zero.tiling": _refused("TiledLinear TiledLinearReturnBias", "tiled linear layers"),
    "deepspeed.runtime.zero.mics": {
        **_same("._zero", "MiCS_Init"),
        **_refused("MiCS_Optimizer", "an optimizer of its own; zero_optimization.mics_shard_size"),
    },
    "deepspeed.comm": {
        **_refused(
            "mpi_discovery", "a search of its own; init_distributed() reads the variables of mpirun, mpiexec and srun"
        ),
        "*": "._comm",
    },
    "deepspeed.comm.comm": {"=": "deepspeed.comm"},
    "deepspeed.comm.reduce_op": {"ReduceOp": "torch.distributed:ReduceOp"},
    "deepspeed.comm.utils": _same(
        "._comm", "get_local_rank_from_launcher get_world_rank_from_launcher get_world_size_from_launcher"
    ),
    "deepspeed.comm.torch": _refused("TorchBackend", "back ends as objects; torch.distributed has them"),
    "deepspeed.accelerator": {
        **_same("._accelerator", "get_accelerator set_accelerator is_current_accelerator_supported"),
        "DeepSpeedAccelerator": "._accelerator:Accelerator",
    },
    "deepspeed.accelerator.abstract_accelerator": {"DeepSpeedAccelerator": "._accelerator:Accelerator"},
    "deepspeed.accelerator.real_accelerator": _same(
        "._accelerator",
        "get_accelerator set_accelerator is_current_accelerator_supported SUPPORTED_ACCELERATOR_LIST",
    ),
    "deepspeed.utils": {
        **_same("._fragments", _SAFE),
        **_LEAF,
        **_same("._logging", "logger log_dist set_log_level_from_string LoggerFactory"),
        "RepeatingLoader": "tessera.data:RepeatingLoader",
        "OnDevice": "._small:OnDevice",
        "instrument_w_nvtx": "._small:instrument_w_nvtx",
        **_same("._timers", "SynchronizedWallClockTimer ThroughputTimer"),
        **_refused("get_caller_func", "names of callers; torch.profiler has them"),
        **_refused("link_hp_params", "links between weights and masters; the safe_* functions read and write them"),
    },
    "deepspeed.utils.logging": _same(
        "._logging",
        "logger log_dist print_rank_0 set_log_level_from_string LoggerFactory log_levels should_log_le "
        "print_json_dist warning_once log_dist_once get_dist_msg print_dist print_configuration "
        "get_log_level_from_string get_current_level",
    ),
    "deepspeed.utils.torch": {
        **_same("._small", "required_torch_version"),
        **_same("._helpers", "is_functorch_transforming jit_script_compat register_grad_hook"),
    },
    "deepspeed.utils.bwc": _same("._helpers", _BWC),
    "deepspeed.utils.exceptions": _same("._helpers", "DeprecatedException"),
    "deepspeed.utils.module_utils": _same("._helpers", "recursive_getattr recursive_setattr"),
    "deepspeed.utils.numa": _same("._helpers", "parse_range parse_range_list"),
    "deepspeed.utils.debug": _refused(
        "debug_extract_module_and_param_names debug_clear_module_and_param_names debug_module2name debug_param2name "
        "debug_param2name_id debug_param2name_id_shape printflock log_rank_file",
        "names for debugging; engine.param_names",
    ),
    "deepspeed.utils.tensor_fragment": {
        **_same("._fragments", _SAFE),
        **_same("._helpers", "fragment_address"),
    },
    "deepspeed.utils.z3_leaf_module": _LEAF,
    "deepspeed.utils.nvtx": _same("._small", "instrument_w_nvtx"),
    "deepspeed.utils.timer": {
        **_same("._timers", f"{_TIMERS} NoopTimer"),
        **_same("._helpers", "trim_mean"),
    },
    "deepspeed.utils.init_on_device": _same("._small", "OnDevice"),
    "deepspeed.utils.groups": {
        "*": "._groups",
        **_refused(
            "_get_expert_parallel_group _get_expert_parallel_rank _get_expert_parallel_world_size "
            "_get_expert_data_parallel_group _get_expert_data_parallel_rank _get_expert_data_parallel_world_size",
            _MOE,
        ),
        **_refused("_get_broadcast_src_rank", "a rank that sends first values; it is the group's first"),
        **_same("._sequence_state", "initialize_sequence_parallel"),
    },
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
    "deepspeed.ops.adagrad.cpu_adagrad": _same("._ops", "DeepSpeedCPUAdagrad"),
    "deepspeed.ops.lion": _same("._ops", "FusedLion DeepSpeedCPULion"),
    "deepspeed.ops.lion.fused_lion": _same("._ops", "FusedLion"),
    "deepspeed.ops.lion.cpu_lion": _same("._ops", "DeepSpeedCPULion"),
    "deepspeed.ops.lamb": _same("._ops", "FusedLamb"),
    "deepspeed.ops.lamb.fused_lamb": _same("._ops", "FusedLamb"),
    "deepspeed.ops.aio": {"AsyncIOBuilder": "._ops:AsyncIOBuilder", **_refused("aio_handle", _OFFLOAD)},
    "deepspeed.ops.op_builder": {"*": "._ops"},
    "deepspeed.ops.op_builder.builder": _same("._ops", "OpBuilder"),
    "deepspeed.ops.op_builder.cpu": {"*": "._ops"},
    "deepspeed.ops.transformer": _refused("DeepSpeedTransformerLayer DeepSpeedTransformerConfig", _KERNELS),
    "deepspeed.ops.sparse_attention": _refused("SparseSelfAttention SparsityConfig", _KERNELS),
    "deepspeed.git_version_info": _BUILD,
    "deepspeed.git_version_info_installed": _BUILD,
    "deepspeed.checkpoint": {
        **_same("._checkpoint_utils", "clone_tensors_for_torch_save"),
        **_refused("DeepSpeedCheckpoint", _UNIVERSAL),
    },
    "deepspeed.checkpoint.universal_checkpoint": _same("._checkpoint_utils", "SubparamShape"),
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
    "deepspeed.constants": {
        **_same("._small", "TORCH_DISTRIBUTED_DEFAULT_PORT default_pg_timeout"),
        **{name: f"={name}" for name in ("LOCAL_RANK", "CROSS_RANK", "CROSS_SIZE")},
    },
    "deepspeed.launcher": {},
    "deepspeed.launcher.runner": _same(
        "._launch",
        "parse_resource_filter fetch_hostfile parse_inclusion_exclusion encode_world_info DEEPSPEED_ENVIRONMENT_NAME",
    )
    | _refused("parse_args", "arguments as an object; main(args) takes them as a list")
    | {"main": "._commands:launch"},
    "deepspeed.monitor": {},
    "deepspeed.monitor.monitor": {"MonitorMaster": "._watching:MonitorMaster", "Monitor": "tessera.monitor:Writer"},
    "deepspeed.monitor.config": _same(
        "._config",
        "DeepSpeedMonitorConfig get_monitor_config TensorBoardConfig CSVConfig WandbConfig CometConfig",
    ),
    "deepspeed.monitor.csv_monitor": _same("._watching", "csvMonitor"),
    "deepspeed.monitor.tensorboard": _same("._watching", "TensorBoardMonitor"),
    "deepspeed.monitor.wandb": _same("._watching", "WandbMonitor"),
    "deepspeed.monitor.comet": _same("._watching", "CometMonitor"),
    "deepspeed.profiling": {},
    "deepspeed.profiling.flops_profiler": _PROFILER,
    "deepspeed.profiling.flops_profiler.profiler": _PROFILER,
    "deepspeed.elasticity": {**_ELASTIC, **_texts("ELASTICITY ENABLED")},
    "deepspeed.elasticity.elasticity": _ELASTIC,
    "deepspeed.elasticity.constants": _texts("ELASTICITY ENABLED"),
    "deepspeed.elasticity.config": {
        **_same("._elasticity", "ElasticityError ElasticityConfigError ElasticityIncompatibleWorldSize"),
        **_refused("ElasticityConfig", "the section as an object; compute_elastic_config() takes the configuration"),
    },
    "deepspeed.module_inject": {
        **_refused("replace_transformer_layer revert_transformer_layer replace_module", _KERNELS)
    },
    "deepspeed.module_inject.layers": {
        **_same("._tensor_parallel", "LinearLayer LinearAllreduce GatherReplacedLayerParams"),
        **_same("._tensor_parallel", "set_autotp_mode is_autotp_training_mode"),
    },
    "deepspeed.module_inject.auto_tp": _refused("AutoTP", f"its planner; {_AUTOTP}, tessera.parallel.plan_for"),
    "deepspeed.module_inject.tp_shard": _same(
        "._tensor_parallel",
        "AutoTPMeta get_shard_size get_shard_size_list set_num_kv_heads get_num_kv_heads set_tp_grain_size",
    ),
    "deepspeed.sequence": {},
    "deepspeed.sequence.layer": {
        **_same("._sequence", "DistributedAttention _SeqAllToAll"),
    },
    "deepspeed.sequence.cross_entropy": {
        "vocab_sequence_parallel_cross_entropy": "tessera.sequence:sequence_cross_entropy"
    },
    "deepspeed.pipe": _PIPE,
    "deepspeed.moe": {},
    "deepspeed.moe.layer": _refused("MoE", _MOE),
    "deepspeed.moe.utils": {
        **_same("._small", "is_moe_param"),
        **_same("._helpers", "has_moe_layers is_moe_param_group split_params_into_shared_and_expert_params"),
        **_same("._helpers", "split_params_grads_into_shared_and_expert_params"),
        **_same("._helpers", "split_params_into_different_moe_groups_for_optimizer"),
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
