"""Answers of an engine about its configuration: methods by DeepSpeed's names, and those that are refused."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from tessera.autocast import get_default_autocast_lower_precision_modules

import tessera

# Methods -> what they return of the configuration.
_KEYS: dict[str, Callable[[tessera.Config], Any]] = {
    "bf16_master_weights_and_gradients": lambda c: c.bf16.bf16_master_weights_and_grads,
    "bf16_optimizer_states": lambda c: c.bf16.bf16_optimizer_states,
    "bfloat16_enabled": lambda c: c.bf16.enabled,
    "dataloader_drop_last": lambda c: c.dataloader_drop_last,
    "dump_state": lambda c: c.dump_state,
    "elasticity_enabled": lambda c: c.elasticity.enabled,
    "flops_profiler_detailed": lambda c: c.flops_profiler.detailed,
    "flops_profiler_enabled": lambda c: c.flops_profiler.enabled,
    "flops_profiler_module_depth": lambda c: c.flops_profiler.module_depth,
    "flops_profiler_output_file": lambda c: c.flops_profiler.output_file,
    "flops_profiler_profile_step": lambda c: c.flops_profiler.profile_step,
    "flops_profiler_recompute_fwd_factor": lambda c: c.flops_profiler.recompute_fwd_factor,
    "flops_profiler_top_modules": lambda c: c.flops_profiler.top_modules,
    "fp16_auto_cast": lambda c: c.fp16.auto_cast,
    "fp16_enabled": lambda c: c.fp16.enabled,
    "fp16_master_weights_and_gradients": lambda c: c.fp16.fp16_master_weights_and_grads,
    "gradient_clipping": lambda c: c.gradient_clipping,
    "graph_harvesting": lambda c: c.graph_harvesting,
    "is_deepcompile_enabled": lambda c: c.compile.deepcompile,
    "load_universal_checkpoint": lambda c: c.checkpoint.load_universal,
    "log_level": lambda c: c.log_level,
    "loss_scale": lambda c: c.fp16.loss_scale,
    "managed_gradient_accumulation": lambda c: c.managed_gradient_accumulation,
    "memory_breakdown": lambda c: c.memory_breakdown,
    "mics_shard_size": lambda c: c.zero_optimization.mics_shard_size,
    "optimizer_params": lambda c: c.optimizer.params,
    "scheduler_params": lambda c: c.scheduler.params,
    "steps_per_print": lambda c: c.steps_per_print,
    "super_offload": lambda c: c.zero_optimization.offload_optimizer.super_offload,
    "torch_autocast_enabled": lambda c: c.torch_autocast.enabled,
    "wall_clock_breakdown": lambda c: c.wall_clock_breakdown,
    "zero_allow_untested_optimizer": lambda c: c.zero_allow_untested_optimizer,
    "zero_force_ds_cpu_optimizer": lambda c: c.zero_force_ds_cpu_optimizer,
    "zero_gather_16bit_weights_on_model_save": lambda c: c.zero_optimization.stage3_gather_16bit_weights_on_model_save,
    "zero_hpz_partition_size": lambda c: c.zero_optimization.zero_hpz_partition_size,
    "zero_ignore_unused_parameters": lambda c: c.zero_optimization.ignore_unused_parameters,
    "zero_legacy_stage1": lambda c: c.zero_optimization.legacy_stage1,
    "zero_load_from_fp32_weights": lambda c: c.zero_optimization.load_from_fp32_weights,
    "zero_max_live_parameters": lambda c: c.zero_optimization.stage3_max_live_parameters,
    "zero_max_reuse_distance": lambda c: c.zero_optimization.stage3_max_reuse_distance,
    "zero_model_persistence_threshold": lambda c: c.zero_optimization.stage3_model_persistence_threshold,
    "zero_module_granularity_threshold": lambda c: c.zero_optimization.stage3_module_granularity_threshold,
    "zero_optimization_stage": lambda c: c.zero_optimization.stage,
    "zero_param_persistence_threshold": lambda c: c.zero_optimization.stage3_param_persistence_threshold,
    "zero_partial_offload": lambda c: c.zero_optimization.offload_optimizer.ratio,
    "zero_prefetch_bucket_size": lambda c: c.zero_optimization.stage3_prefetch_bucket_size,
    "zero_quantized_gradients": lambda c: c.zero_optimization.zero_quantized_gradients,
    "zero_quantized_nontrainable_weights": lambda c: c.zero_optimization.zero_quantized_nontrainable_weights,
    "zero_quantized_weights": lambda c: c.zero_optimization.zero_quantized_weights,
    "zero_reduce_bucket_size": lambda c: c.zero_optimization.reduce_bucket_size,
    "zero_reduce_scatter": lambda c: c.zero_optimization.reduce_scatter,
}

# Getters of keys that have no effect, which only the whole tree has.
_WITHOUT_EFFECT: dict[str, Callable[[Any], Any]] = {
    "checkpoint_serialization_enabled": lambda tree: tree.checkpoint.checkpoint_serialization,
    "cpuadam_cores_perc": lambda tree: tree.zero_optimization.offload_optimizer.cpuadam_cores_perc,
    "gradient_predivide_factor": lambda tree: tree.gradient_predivide_factor,
    "is_sanity_checks_enabled": lambda tree: tree.zero_optimization.enable_sanity_checks,
    "optimizer_legacy_fusion": lambda tree: tree.optimizer.legacy_fusion,
    "sparse_gradients_enabled": lambda tree: tree.sparse_gradients,
    "use_node_local_storage": lambda tree: tree.checkpoint.use_node_local_storage,
    "zero_allgather_bucket_size": lambda tree: tree.zero_optimization.allgather_bucket_size,
    "zero_allgather_partitions": lambda tree: tree.zero_optimization.allgather_partitions,
    "zero_allgather_sequential": lambda tree: tree.zero_optimization.stage3_allgather_sequential,
    "zero_contiguous_gradients": lambda tree: tree.zero_optimization.contiguous_gradients,
    "zero_elastic_checkpoint": lambda tree: tree.zero_optimization.elastic_checkpoint,
    "zero_log_trace_cache_warnings": lambda tree: tree.zero_optimization.log_trace_cache_warnings,
    "zero_multi_rank_bucket_allreduce": lambda tree: tree.zero_optimization.use_multi_rank_bucket_allreduce,
    "zero_round_robin_gradients": lambda tree: tree.zero_optimization.round_robin_gradients,
    "zero_save_muon_momentum_buffer_in_memory": lambda tree: tree.zero_optimization.save_muon_momentum_buffer_in_memory,
    "zero_sub_group_size": lambda tree: tree.zero_optimization.sub_group_size,
}

# Methods that say whether something is on, or return its settings, which an engine with it on is not built for.
_OFF = (
    "amp_enabled autotuning_enabled autotuning_profile_model_info compile_autosp compile_autotp "
    "compile_zero_optimization_stage curriculum_enabled_legacy curriculum_learning_enabled data_efficiency_enabled "
    "data_sampling_enabled eigenvalue_enabled is_deepcompile_active pld_enabled random_ltd_enabled "
    "uses_parallelization_pass_only"
)
_FIXED = dict.fromkeys(_OFF.split(), False) | dict.fromkeys(("get_pld_theta", "zenflow_config", "zeropp_loco_param"))

# Members that are not served, by what is said of them.
_REFUSED = {
    "section `amp`; bf16, fp16 or torch_autocast": "amp_params",
    "autotuning (section `autotuning`); tessera estimate": "autotuning_end_profile_step autotuning_metric "
    "autotuning_metric_path autotuning_model_info autotuning_model_info_path autotuning_start_profile_step",
    "section `eigenvalue`": "eigenvalue_gas_boundary_resolution eigenvalue_layer_name eigenvalue_layer_num "
    "eigenvalue_max_iter eigenvalue_stability eigenvalue_tol eigenvalue_verbose",
    "sections `curriculum_learning` and `data_efficiency`; a sampler and a collate_fn of your own": "random_ltd_config "
    "curriculum_learning_config curriculum_params_legacy data_efficiency_config data_sampling_config "
    "random_ltd_initialize set_custom_curriculum_learning_schedule set_data_post_process_func",
    "section `progressive_layer_drop`": "pld_gamma pld_params pld_theta",
    "DeepCompile (section `compile`); engine.compile() is torch.compile": "get_autosp_backend get_autotp_backend "
    "get_compile_time get_deepcompile_backend get_deepspeed_compile_backend register_compile_pass",
    "reductions of one's own; the core reduces gradients in the backward, engine.no_sync() delays them": ""
    "all_gather_scalar allreduce_and_copy allreduce_bucket allreduce_no_retain sparse_all_gather "
    "buffered_allreduce_fallback sparse_allreduce sparse_allreduce_bucket sparse_allreduce_no_retain",
    "clipping apart from the step; gradient_clipping, or engine.clip_grad_norm_()": "clip_fp32_gradients",
    "a choice of a class; engine.basic_optimizer is what was chosen": "get_optimizer_configuration",
    "expert parallelism (section `expert_parallel`)": "load_moe_state_dict print_forward_breakdown",
    "section `quantize_training`": "quantize_training",
    "section `aio`; offload needs no settings of its own": "aio_config swap_tensor_config",
}
_WHY = {name: feature for feature, names in _REFUSED.items() for name in names.split()}


def refusal(name: str) -> str | None:
    """The text on a member of DeepSpeed's engine that is not served."""
    feature = _WHY.get(name)
    return feature and f"[deepspeed] engine.{name} is not served by Tessera: {feature}"


def _objects(tree: dict[str, Any]) -> SimpleNamespace:
    """Sections as objects."""
    return SimpleNamespace(
        **{name: _objects(value) if isinstance(value, dict) else value for name, value in tree.items()}
    )


class Getters:
    """The getters of an engine with these settings."""

    def __init__(self, settings: tessera.Config) -> None:
        self._settings = settings

    def __getattr__(self, name: str) -> Callable[[], Any]:
        if name in _KEYS:
            return lambda: _KEYS[name](self._settings)
        if name in _WITHOUT_EFFECT:
            return lambda: _WITHOUT_EFFECT[name](_objects(self._settings.to_dict()))
        if name in _FIXED:
            return lambda: _FIXED[name]
        raise AttributeError(name)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *_KEYS, *_WITHOUT_EFFECT, *_FIXED]

    def postscale_gradients(self) -> bool:
        return not _objects(self._settings.to_dict()).prescale_gradients

    def checkpoint_tag_validation_enabled(self) -> bool:
        return self._settings.checkpoint.tag_validation.lower() != "ignore"

    def checkpoint_tag_validation_fail(self) -> bool:
        return self._settings.checkpoint.tag_validation.lower() == "fail"

    def checkpoint_writer_enabled(self) -> bool:
        return _objects(self._settings.to_dict()).checkpoint.writer is not None

    def dynamic_loss_scale(self) -> bool:
        return self._settings.fp16.enabled and self._settings.fp16.loss_scale == 0

    def initial_dynamic_scale(self) -> float:
        return 2.0**self._settings.fp16.initial_scale_power

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        fp16 = self._settings.fp16
        return {
            "init_scale": self.initial_dynamic_scale(),
            "scale_window": fp16.loss_scale_window,
            "delayed_shift": fp16.hysteresis,
            "consecutive_hysteresis": fp16.consecutive_hysteresis,
            "min_scale": fp16.min_loss_scale,
        }

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """dtype of the parameters, and that in which gradients are accumulated."""
        fp16, bf16 = self._settings.fp16.enabled, self._settings.bf16.enabled
        of_params = torch.float16 if fp16 else torch.bfloat16 if bf16 else torch.float32
        return of_params, self._settings.data_types.grad_accum_dtype or of_params

    def torch_autocast_dtype(self) -> torch.dtype | None:
        return self._settings.torch_autocast.dtype

    def torch_autocast_lower_precision_safe_modules(self) -> list[str]:
        given = self._settings.torch_autocast.lower_precision_safe_modules
        return get_default_autocast_lower_precision_modules() if given is None else given

    def is_elastic_model_parallel_supported(self) -> bool | None:
        """Whether a node's devices are a multiple of the model-parallel size; None without elasticity."""
        section = self._settings.elasticity
        return section.num_gpus_per_node % section.model_parallel_size == 0 if section.enabled else None

    @staticmethod
    def is_map_style_dataset(obj: object) -> bool:
        return hasattr(obj, "__getitem__") and hasattr(obj, "__len__")

    @staticmethod
    def is_iterable_style_dataset(obj: object) -> bool:
        return isinstance(obj, torch.utils.data.IterableDataset)

    # ---- placement

    def _away(self) -> str:
        return self._settings.zero_optimization.offload_optimizer.device

    def zero_use_cpu_optimizer(self) -> bool:
        return self._away() != "none"

    def zero_cpu_offload(self) -> bool:
        return self._away() == "cpu"

    def zero_nvme_offload_optimizer(self) -> bool:
        return self._away() == "nvme"

    def zero_optimization(self) -> bool:
        return self._settings.zero_optimization.stage > 0

    def zero_optimization_partition_weights(self) -> bool:
        return self._settings.zero_optimization.stage == 3

    def zero_optimization_partition_gradients(self) -> bool:
        return self._settings.zero_optimization.stage >= 2
