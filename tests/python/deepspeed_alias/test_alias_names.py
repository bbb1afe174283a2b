"""The table of names: all resolve, what is refused says why, and programs find them the ways they look for them."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch

import tessera

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))
import audit_deepspeed_names as audit

LISTED = {*audit.listed()}


def walk(module: ModuleType) -> Iterator[tuple[str, str]]:
    """(module, name) of all names that the package has."""
    for name in dir(module):
        if name.startswith("__"):
            continue
        yield module.__name__, name
        inner = f"{module.__name__}.{name}"
        if isinstance(found := getattr(module, name), ModuleType) and found.__name__ == inner:
            yield from walk(found)


def test_every_name_is_served_or_refused_by_name() -> None:
    """Those that DeepSpeed has, and all others of the package: refused when they are used."""
    served = 0
    everything = LISTED | {*walk(deepspeed)}
    for module, name in everything:
        state = audit.state_of(module, name)
        assert state != "missing", (module, name)
        served += state == "served" and (module, name) in LISTED
        if state == "served":
            continue
        found = getattr(importlib.import_module(module), name)
        assert isinstance(found, type(Exception)) and not isinstance(3, found)
        assert not hasattr(found, "something") and not isinstance(torch.nn.Linear(1, 1), found)
        with pytest.raises(NotImplementedError, match=r"\[deepspeed\] deepspeed\.[\w.]+ is not served by Tessera: .+"):
            found("anything", at="all")
        with pytest.raises(NotImplementedError):
            found.something  # noqa: B018
    assert 4000 < served < len(LISTED) and len(LISTED) > 9000


def needed_by_tests() -> list[str]:
    """The rows of docs/deepspeed_tests.md."""
    text = (Path(__file__).parents[3] / "docs" / "deepspeed_tests.md").read_text()
    return re.findall(r"`(deepspeed\.[\w.]+)`", text.split("refused by the tests: begin -->")[1].split("<!--")[0])


def test_what_deepspeeds_tests_need_and_is_not_served_is_refused() -> None:
    names = [name for name in needed_by_tests() if not name.endswith("unwrap_model_for_generation")]
    assert len(names) > 20
    for name in names:
        assert audit.state_of(*name.rsplit(".", 1)).startswith("refused: "), name


@pytest.mark.parametrize("use", [len, bool, list, int, lambda x: x[0], lambda x: 3 in x, lambda x: x + 1])
def test_what_stands_for_a_value_is_refused_when_it_is_used(use: Any) -> None:
    from deepspeed.runtime.engine import CASTABLE_DTYPES

    with pytest.raises(NotImplementedError, match="CASTABLE_DTYPES"):
        use(CASTABLE_DTYPES)


def test_what_the_list_knows_besides_names() -> None:
    """Constants have their values, names of modules are the modules, and a name is one thing wherever it is found."""
    from deepspeed.autotuning import constants
    from deepspeed.runtime import engine
    from deepspeed.utils.exceptions import DeprecatedException

    assert constants.AUTOTUNING_END_PROFILE_STEP_DEFAULT == 5 and constants.AUTOTUNING == "autotuning"
    assert engine.dist is deepspeed.comm and engine.lr_schedules is deepspeed.runtime.lr_schedules
    assert deepspeed.ops.op_builder.cpu.cpu_adam.CPUAdamBuilder is deepspeed.ops.op_builder.CPUAdamBuilder
    assert deepspeed.runtime.zero.stage3.GatheredParameters is deepspeed.zero.GatheredParameters
    with pytest.raises(ValueError):
        try:
            raise ValueError
        except DeprecatedException:
            raise AssertionError from None


@pytest.mark.parametrize(("module", "name"), audit.names(audit.SERVED))
def test_is_served(module: str, name: str) -> None:
    assert audit.state_of(module, name) == "served"


@pytest.mark.parametrize(("module", "name"), audit.names(audit.REFUSED))
def test_is_refused(module: str, name: str) -> None:
    assert audit.state_of(module, name).startswith("refused: ")


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_members_are_served(stage: int) -> None:
    refused = audit.ENGINE_REFUSED.split()
    for line in audit.member_lines(stage):
        name = line.split()[1].removeprefix("engine.")
        assert line.startswith("refused" if name in refused else "served"), line


def test_what_an_installation_says_of_itself() -> None:
    from deepspeed import git_version_info, git_version_info_installed

    for name in ("version", "git_hash", "git_branch", "installed_ops", "accelerator_name", "torch_info"):
        assert getattr(git_version_info_installed, name) == getattr(git_version_info, name), name


def test_a_name_that_is_not_there_is_missing() -> None:
    assert audit.state_of("deepspeed", "nothing_of_the_kind") == "missing"


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
    assert issubclass(deepspeed.runtime.lr_schedules.WarmupLR, tessera.lr_schedules.WarmupLR)


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
    "comm.broadcast": "tensor src group async_op prof log_name debug",
    "comm.broadcast_object_list": "object_list src group device",
    "comm.all_gather": "tensor_list tensor group async_op prof log_name debug",
    "comm.all_gather_object": "object_list obj group prof log_name debug",
    "comm.all_gather_into_tensor": "output_tensor tensor group async_op prof log_name debug",
    "comm.reduce_scatter_tensor": "output_tensor tensor op group async_op prof log_name debug",
    "comm.reduce_scatter_fn": "output_tensor tensor op group async_op prof debug",
    "comm.reduce_scatter": "output input_list op group async_op prof log_name debug",
    "comm.reduce": "tensor dst op group async_op prof log_name debug",
    "comm.all_reduce": "tensor op group async_op prof log_name debug",
    "comm.inference_all_reduce": "tensor op group async_op prof log_name debug",
    "comm.all_reduce_coalesced": "tensors op group async_op prof log_name debug",
    "comm.all_gather_coalesced": "output_tensors input_tensors group async_op",
    "comm.allgather_fn": "output_tensor input_tensor group async_op debug",
    "comm.all_to_all_single": "output tensor output_split_sizes input_split_sizes group async_op prof log_name debug",
    "comm.all_to_all": "output_tensor_list input_tensor_list group async_op",
    "comm.send": "tensor dst group tag prof log_name debug",
    "comm.recv": "tensor src group tag prof log_name debug",
    "comm.isend": "tensor dst group tag prof log_name debug",
    "comm.irecv": "tensor src group tag prof log_name debug",
    "comm.gather": "tensor gather_list dst group async_op prof log_name debug",
    "comm.scatter": "tensor scatter_list src group async_op prof log_name debug",
    "comm.barrier": "group async_op device_ids prof log_name debug",
    "comm.monitored_barrier": "group timeout wait_all_ranks prof log_name debug",
    "comm.configure": "deepspeed_config enabled prof_all prof_ops verbose debug",
    "comm.log_summary": "show_straggler return_dict",
    "comm.get_global_rank": "group group_rank",
    "comm.initialize_mesh_device": "mesh_shape mesh_dim_names",
    "comm.enable_symm_mem_for_group": "group_name",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_begin_as_callers_know_them(name: str) -> None:
    parameters = list(inspect.signature(pkgutil.resolve_name(f"deepspeed.{name}")).parameters)
    expected = SIGNATURES[name].split()
    assert parameters[: len(expected)] == expected
    assert not name.startswith("comm.") or parameters == expected


@pytest.mark.parametrize(
    "module", ["launcher.runner", "env_report", "utils.zero_to_fp32", "checkpoint.ds_to_universal"]
)
def test_modules_that_are_commands(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """python -m deepspeed.launcher.runner"""
    monkeypatch.setattr("sys.argv", ["deepspeed", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"deepspeed.{module}", run_name="__main__")
    assert ended.value.code in (0, None)
    with pytest.raises(ImportError):
        runpy.run_module("deepspeed.comm", run_name="__main__")


def test_a_name_that_deepspeed_has_not_either() -> None:
    with pytest.raises(AttributeError, match=r"docs/migrate_from_deepspeed\.md"):
        deepspeed.runtime.nothing_of_the_kind  # noqa: B018
    with pytest.raises(ImportError):
        importlib.import_module("deepspeed.nothing_of_the_kind")
    assert "runtime" in dir(deepspeed) and "lr_schedules" in dir(deepspeed.runtime)


def test_constants_are_their_keys() -> None:
    from deepspeed.runtime import lr_schedules

    assert (lr_schedules.WARMUP_MIN_LR, lr_schedules.CYCLE_MAX_MOM) == ("warmup_min_lr", "cycle_max_mom")
