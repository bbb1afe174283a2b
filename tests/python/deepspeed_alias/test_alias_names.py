"""The table of names: all resolve, what is refused says why, and programs find them the ways they look for them."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import deepspeed
import pytest
import torch
from deepspeed import _lazy
from deepspeed._table import MODULES

import tessera

ROWS = [(module, name) for module, rows in MODULES.items() for name in rows if name not in ("*", "=")]

# What clients and programs use, and Tessera serves.
SERVED = """
deepspeed: initialize init_distributed add_config_arguments add_tuning_arguments tp_model_init set_autotp_mode
  DeepSpeedEngine DeepSpeedConfig DeepSpeedConfigError zero comm ops utils checkpointing OnDevice log_dist logger
  __version__ version dist accelerator runtime
deepspeed.zero: Init GatheredParameters register_external_parameter unregister_external_parameter ZeroParamStatus
  ZeroParamType unwrap_model_for_generation DeepSpeedZeRoOffload
deepspeed.utils: logger log_dist RepeatingLoader groups instrument_w_nvtx set_log_level_from_string zero_to_fp32
  set_z3_leaf_modules unset_z3_leaf_modules get_z3_leaf_modules z3_leaf_module z3_leaf_parameter set_z3_leaf_module
  set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix safe_get_full_fp32_param safe_get_full_grad
  safe_get_full_optimizer_state safe_set_full_fp32_param safe_set_full_grad safe_set_full_optimizer_state
  safe_get_local_fp32_param safe_get_local_grad safe_get_local_optimizer_state safe_set_local_fp32_param
  safe_set_local_grad safe_set_local_optimizer_state safe_update_full_grad_vectorized
deepspeed.comm: init_distributed is_initialized is_available get_rank get_local_rank get_world_size get_world_group
  new_group get_global_rank get_all_ranks_from_group barrier monitored_barrier broadcast broadcast_object_list
  all_reduce all_reduce_coalesced inference_all_reduce reduce reduce_scatter reduce_scatter_fn reduce_scatter_tensor
  all_gather all_gather_object all_gather_into_tensor allgather_fn all_to_all_single all_to_all gather scatter send
  recv isend irecv destroy_process_group initialize_mesh_device log_summary configure ReduceOp ProcessGroup
deepspeed.runtime.lr_schedules: VALID_LR_SCHEDULES WarmupLR WarmupDecayLR WarmupCosineLR OneCycle LRRangeTest
deepspeed.ops.adam: DeepSpeedCPUAdam FusedAdam
deepspeed.ops.adagrad: DeepSpeedCPUAdagrad
deepspeed.ops.lion: DeepSpeedCPULion FusedLion
deepspeed.utils.zero_to_fp32: get_fp32_state_dict_from_zero_checkpoint convert_zero_checkpoint_to_fp32_state_dict
  load_state_dict_from_zero_checkpoint
deepspeed.checkpoint.ds_to_universal: main
deepspeed.sequence.layer: DistributedAttention _SeqAllToAll
deepspeed.sequence.cross_entropy: vocab_sequence_parallel_cross_entropy
deepspeed.runtime.sequence_parallel.ulysses_sp: UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter TiledMLP
  sequence_tiled_compute SequenceTiledCompute TiledFusedLogitsLoss
deepspeed.runtime.sequence_parallel.parallel_state_sp: initialize_sequence_parallel
deepspeed.checkpoint.utils: clone_tensors_for_torch_save
deepspeed.checkpointing: configure checkpoint is_configured get_cuda_rng_tracker model_parallel_cuda_manual_seed
deepspeed.runtime.engine: DeepSpeedEngine
deepspeed.runtime.base_optimizer: DeepSpeedOptimizer
deepspeed.runtime.zero.stage_1_and_2: DeepSpeedZeroOptimizer
deepspeed.runtime.zero.partition_parameters: ZeroParamStatus zero_wrapper_for_fp_tensor_constructor _orig_torch_arange
  get_accelerator
deepspeed.runtime.zero.utils: ZeRORuntimeException
deepspeed.runtime.zero.offload_config: OffloadDeviceEnum OffloadStateTypeEnum
deepspeed.runtime.utils: move_to_device
deepspeed.runtime.torch_autocast: init_autocast_params has_autocast_dtype
deepspeed.ops.aio: AsyncIOBuilder
deepspeed.ops: __compatible_ops__
deepspeed.launcher.runner: DEEPSPEED_ENVIRONMENT_NAME main fetch_hostfile
deepspeed.accelerator: get_accelerator
"""


def served() -> list[tuple[str, str]]:
    found, module = [], ""
    for word in SERVED.split():
        if word.endswith(":"):
            module = word[:-1]
        else:
            found.append((module, word))
    return found


@pytest.mark.parametrize(("module", "name"), ROWS)
def test_every_row_resolves_or_refuses_by_name(module: str, name: str) -> None:
    found = getattr(importlib.import_module(module), name)
    if isinstance(found, _lazy._RefusingType):
        with pytest.raises(NotImplementedError, match=f"{module}.{name} is not served by Tessera: .+"):
            found("anything", at="all")
        with pytest.raises(NotImplementedError):
            found.something  # noqa: B018
        assert not hasattr(found, "something") and not isinstance(torch.nn.Linear(1, 1), found)


@pytest.mark.parametrize(("module", "name"), served())
def test_is_served(module: str, name: str) -> None:
    assert not isinstance(getattr(importlib.import_module(module), name), _lazy._RefusingType)


def test_names_are_found_without_importing_their_module() -> None:
    program = "import deepspeed; assert 'OneCycle' in deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES"
    path = Path(deepspeed.__file__).parents[1]
    run([sys.executable, "-W", "error", "-c", f"import sys; sys.path.insert(0, {str(path)!r}); {program}"])


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def test_one_object_under_all_its_names() -> None:
    import deepspeed.comm.comm
    import deepspeed.zero

    assert deepspeed.zero is deepspeed.runtime.zero
    assert deepspeed.checkpointing is deepspeed.runtime.activation_checkpointing.checkpointing
    assert deepspeed.comm.comm is deepspeed.comm is deepspeed.dist
    assert deepspeed.DeepSpeedEngine is deepspeed.runtime.engine.DeepSpeedEngine
    assert deepspeed.utils.logger is deepspeed.utils.logging.logger
    assert deepspeed.runtime.lr_schedules.WarmupLR is tessera.lr_schedules.WarmupLR


@pytest.mark.parametrize("name", ["initialize", "init_distributed", "zero.Init", "checkpointing.configure"])
def test_names_can_be_patched(name: str) -> None:
    original = pkgutil.resolve_name(f"deepspeed.{name}")
    with mock.patch(f"deepspeed.{name}", autospec=True) as patched:
        assert pkgutil.resolve_name(f"deepspeed.{name}") is patched
    assert pkgutil.resolve_name(f"deepspeed.{name}") is original


SIGNATURES = {
    "initialize": "args model optimizer model_parameters training_data lr_scheduler distributed_port mpu "
    "dist_init_required collate_fn config mesh_param config_params",
    "init_distributed": "dist_backend auto_mpi_discovery distributed_port verbose timeout init_method "
    "dist_init_required config rank world_size",
    "zero.Init": "module data_parallel_group mem_efficient_linear remote_device pin_memory config_dict_or_path config "
    "enabled dtype mpu",
    "zero.GatheredParameters": "params modifier_rank fwd_module enabled",
    "checkpointing.configure": "mpu_ deepspeed_config partition_activations contiguous_checkpointing num_checkpoints "
    "checkpoint_in_cpu synchronize profile",
    "DeepSpeedEngine.save_checkpoint": "self save_dir tag client_state save_latest exclude_frozen_parameters",
    "DeepSpeedEngine.load_checkpoint": "self load_dir tag load_module_strict load_optimizer_states "
    "load_lr_scheduler_states load_module_only custom_load_fn",
    "DeepSpeedEngine.backward": "self loss retain_graph scale_wrt_gas",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_begin_as_callers_know_them(name: str) -> None:
    parameters = list(inspect.signature(pkgutil.resolve_name(f"deepspeed.{name}")).parameters)
    expected = SIGNATURES[name].split()
    assert parameters[: len(expected)] == expected


def test_a_name_that_deepspeed_has_not_either() -> None:
    with pytest.raises(AttributeError, match=r"docs/deepspeed\.md"):
        deepspeed.runtime.nothing_of_the_kind  # noqa: B018
    with pytest.raises(ImportError):
        importlib.import_module("deepspeed.nothing_of_the_kind")
    assert "runtime" in dir(deepspeed) and "lr_schedules" in dir(deepspeed.runtime)


def test_constants_are_their_keys() -> None:
    from deepspeed.runtime import lr_schedules

    assert (lr_schedules.WARMUP_MIN_LR, lr_schedules.CYCLE_MAX_MOM) == ("warmup_min_lr", "cycle_max_mom")
