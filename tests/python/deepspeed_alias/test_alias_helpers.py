"""Activation checkpointing, the accelerator, communication, arguments, timers and other helpers."""

from __future__ import annotations

import argparse
import collections
import importlib
import logging
import os
import subprocess
import sys
import time
import types
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from support import batch, config, free_port, make, run_processes
from torch import nn


@pytest.fixture
def unconfigured() -> Any:
    yield
    deepspeed.checkpointing.configure()


@pytest.mark.parametrize("in_cpu", [False, True])
def test_checkpoint_has_the_gradients_and_the_random_numbers(in_cpu: bool, unconfigured: Any) -> None:
    deepspeed.checkpointing.configure(
        mpu_=None, partition_activations=False, contiguous_checkpointing=False, checkpoint_in_cpu=in_cpu, profile=False
    )
    assert deepspeed.checkpointing.is_configured()
    deepspeed.checkpointing.model_parallel_cuda_manual_seed(5)
    tracker = deepspeed.checkpointing.get_cuda_rng_tracker()
    layer = nn.Linear(4, 4)
    drawn: list[torch.Tensor] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        with tracker.fork():
            drawn.append(torch.rand(4))
        return torch.tanh(layer(x)) * drawn[-1] * (torch.rand(4) > 0.5)

    x = torch.ones(2, 4, requires_grad=True)
    deepspeed.checkpointing.checkpoint(block, x).sum().backward()
    after = tracker.get_states()
    assert len(drawn) == 2 and torch.equal(drawn[0], drawn[1])
    with tracker.fork():
        assert not torch.equal(torch.rand(4), drawn[0])
    assert after.keys() == tracker.get_states().keys()
    expected = torch.autograd.grad((torch.tanh(layer(x)) * drawn[0]).sum(), layer.bias)[0]
    kept = layer.bias.grad != 0
    torch.testing.assert_close(layer.bias.grad[kept], expected[kept])
    with pytest.raises(Exception, match="already exists"):
        tracker.add("again", 5 + 2718)


def test_accelerator() -> None:
    device = get_accelerator()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    assert device.device_name(None) == kind and device.is_available()
    assert torch.tensor(1.0, device=device.current_device_name()).device.type == kind
    assert device.device_count() >= 1 and torch.bfloat16 in device.supported_dtypes()
    assert device.communication_backend_name() == ("nccl" if kind == "cuda" else "gloo")
    assert device.max_memory_allocated() >= 0 and device.total_memory() > 0 and device.memory_allocated() >= 0
    assert device.FloatTensor([1.0]).dtype is torch.float32 and device.ByteTensor([1]).dtype is torch.uint8
    assert device.memory_reserved() >= 0 and device.available_memory() > 0 and device.memory_stats()
    assert device.max_memory_cached() == device.max_memory_reserved() and device.get_compile_backend() == "inductor"
    assert device.create_op_builder("CPUAdamBuilder").NAME == "cpu_adam" and device.lazy_call(lambda: 3) in (3, None)
    assert all(hasattr(device, name) for name in ("Stream", "Event", "stream", "current_stream"))
    device.range_push("a")
    device.range_pop()
    device.synchronize()
    device.manual_seed(3)
    assert device.initial_seed() == 3
    first = torch.rand(2)
    device.manual_seed(3)
    assert torch.equal(first, torch.rand(2)) or kind != "cpu"
    assert device.on_accelerator(torch.ones(1, device=device.current_device_name()))


def test_communication_is_torchs() -> None:
    from deepspeed import comm

    with pytest.raises(RuntimeError, match="dist_init_required"):
        deepspeed.init_distributed("gloo", dist_init_required=False)
    deepspeed.init_distributed("gloo")
    comm.init_distributed("nccl")  # a second call with any name does nothing
    assert comm.is_initialized() and comm.get_rank() == comm.get_local_rank() == 0
    value = torch.ones(2)
    comm.inference_all_reduce(value)
    comm.all_reduce_coalesced([value])
    gathered = torch.empty(2)
    comm.allgather_fn(gathered, value)
    assert torch.equal(gathered, value) and comm.get_all_ranks_from_group() == [0]
    engine, *_ = deepspeed.initialize(model=make(), config=config(2))
    engine.backward(engine(*batch(0)))
    found = comm.log_summary(show_straggler=True, return_dict=True)
    assert found["summary"] == found["straggler_analysis"] == {} and found["metadata"]["world_size"] == 1
    assert set(found["counts"]) >= {"all_gather", "reduce_scatter"}
    assert not comm.has_comm_data() and comm.get_comm_operation_count() == 0 and comm.get_logged_comm_ops() == []
    for asked in ({"enabled": True}, {"prof_all": True}, {"prof_ops": ["all_reduce"]}):
        with pytest.raises(NotImplementedError, match="comms_logger"):
            comm.configure(**asked)
    with pytest.raises(AttributeError):
        comm.nothing_such  # noqa: B018


def collectives(rank: int, port: int) -> None:
    """As DeepSpeed's callers write them, on two ranks whose values are 1 and 2."""
    import deepspeed
    from deepspeed import comm
    from deepspeed.runtime.zero.utils import assert_ints_same_as_other_ranks, get_lst_from_rank0

    deepspeed.init_distributed("gloo", verbose=False, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    own, other = float(rank + 1), float(2 - rank)

    def value(of: float = own, size: int = 2) -> torch.Tensor:
        return torch.full((size,), of)

    def into(call: Any, *args: Any, size: int = 2, **more: Any) -> list[float]:
        """What `call` leaves in its first argument."""
        out = torch.zeros(size)
        work = call(out, *args, **more)
        if hasattr(work, "wait"):
            work.wait()
        return out.tolist()

    def reduced(call: Any, *args: Any, **more: Any) -> list[float]:
        tensor = value()
        work = call([tensor] if "coalesced" in call.__name__ else tensor, *args, **more)
        if hasattr(work, "wait"):
            work.wait()
            assert work.is_completed()
        return tensor.tolist()

    maximum, logged = comm.ReduceOp.MAX, {"prof": True, "log_name": "mine", "debug": "caller"}
    assert reduced(comm.all_reduce, **logged) == reduced(comm.inference_all_reduce, **logged) == [3, 3]
    assert reduced(comm.all_reduce, maximum, None, True) == reduced(comm.inference_all_reduce, maximum) == [2, 2]
    assert reduced(comm.all_reduce_coalesced, async_op=True) == [3, 3]
    assert reduced(comm.all_reduce_coalesced, maximum) == reduced(comm.all_reduce, op=maximum) == [2, 2]
    assert reduced(comm.reduce, 0, comm.ReduceOp.SUM, **logged)[0] == (3 if rank == 0 else own)
    assert reduced(comm.broadcast, 1, None, True, **logged) == reduced(comm.broadcast, src=1) == [2, 2]
    scattered = value(size=4)
    for call in (comm.reduce_scatter_fn, comm.reduce_scatter_tensor):
        assert into(call, scattered) == into(call, tensor=scattered, async_op=True, prof=True) == [3, 3]
        assert into(call, scattered, maximum) == into(call, scattered, maximum, None, async_op=True) == [2, 2]
    assert into(comm.reduce_scatter, [value(), value()], maximum) == [2, 2]
    for call, name in ((comm.all_gather_into_tensor, "tensor"), (comm.allgather_fn, "input_tensor")):
        assert into(call, value(size=1)) == into(call, **{name: value(size=1)}, async_op=True) == [1, 2]
    parts = [torch.zeros(1), torch.zeros(1)]
    comm.all_gather(parts, value(size=1), None, False, **logged)
    assert [part.item() for part in parts] == [1, 2]
    several = [torch.zeros(2), torch.zeros(4)]
    comm.all_gather_coalesced(several, [value(size=1), value(size=2)])
    assert [each.tolist() for each in several] == [[1, 2], [1, 1, 2, 2]]
    assert into(comm.all_to_all_single, tensor=torch.tensor([own, own + 10]), **logged) == [
        1 + 10 * rank,
        2 + 10 * rank,
    ]
    objects: list[Any] = [None, None]
    comm.all_gather_object(objects, rank, **logged)
    assert objects == [0, 1]
    comm.broadcast_object_list(objects, src=1)
    comm.gather(value(size=1), gather_list=parts if rank == 0 else None, **logged)
    assert into(comm.scatter, scatter_list=[value(5.0), value(6.0)] if rank == 0 else None, **logged) == [5 + rank] * 2
    taken = torch.zeros(2)
    for send, receive in ((comm.send, comm.recv), (comm.isend, comm.irecv)):
        first, second = (send, receive) if rank == 0 else (receive, send)
        for call in (first, second):
            work = call(value() if call is send else taken, 1 - rank, **logged)
            if call in (comm.isend, comm.irecv):
                work.wait()
        assert taken.tolist() == [other, other]
    assert get_lst_from_rank0([7] * (rank + 1)) == [7]
    with pytest.raises(RuntimeError, match=r"rank 1 has \[1, 2\], the first rank \[1\]") if rank else nullcontext():
        assert_ints_same_as_other_ranks([1, 2][: rank + 1])
    comm.barrier(**logged)
    comm.monitored_barrier(wait_all_ranks=True, **logged)
    assert comm.get_global_rank(None, 1) == comm.get_global_rank(group_rank=1) == 1
    assert comm.has_all_gather_into_tensor() and comm.get_all_ranks_from_group() == [0, 1]
    the_log()
    comm.destroy_process_group()


def the_log() -> None:
    """Of an engine's collectives, on two ranks."""
    from deepspeed import comm

    engine, *_ = deepspeed.initialize(model=make(), config=config(2, comms_logger={"enabled": True}))
    engine.backward(engine(*batch(0)).square().mean())
    engine.step()
    found = comm.log_summary(show_straggler=True, return_dict=True)
    assert found["summary"].keys() == found["straggler_analysis"].keys() == set(comm.get_logged_comm_ops()) != set()
    for op, sizes in found["summary"].items():
        for size, row in sizes.items():
            waited = found["straggler_analysis"][op][size]
            assert row["msg_size_bytes"] == size and row["count"] == waited["count"] > 0
            assert row["total_latency_ms"] >= row["avg_latency_ms"] > 0 and waited["total_straggler_ms"] >= 0
    assert comm.has_comm_data() and comm.get_comm_operation_count() > 0
    comm.reset_log()
    assert not comm.has_comm_data()
    engine.destroy()


def test_collectives_of_two_processes() -> None:
    run_processes(2, collectives, free_port())


def test_arguments() -> None:
    parser = deepspeed.add_tuning_arguments(deepspeed.add_config_arguments(argparse.ArgumentParser()))
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", "a.json", "--warmup_num_steps", "3"])
    assert args.deepspeed and args.deepspeed_config == "a.json" and args.warmup_num_steps == 3
    assert args.deepscale_config is None


def test_timers(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Milliseconds, of a clock that says 0, 1, 10 and 14 seconds."""
    monkeypatch.setattr(time, "perf_counter", iter((0.0, 1.0, 10.0, 14.0)).__next__)
    timers = deepspeed.utils.timer.SynchronizedWallClockTimer()
    for _ in range(2):
        timers("a").start()
        timers("a").stop(record=True)
    monkeypatch.undo()
    assert timers.has_timer("a") and not timers.has_timer("b")
    assert timers("a").elapsed(reset=False) == 5000
    with caplog.at_level(logging.INFO, logger="tessera"):
        timers.log(["a", "b"], normalizer=2)
    assert "time (ms) | a: 2500.00" in caplog.text and timers("a").elapsed() == 0
    assert timers.get_mean(["a", "b"], normalizer=0.5) == {"a": 5000} and timers.get_mean(["a"]) == {"a": 0}


def test_small_helpers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
    from deepspeed.runtime.utils import get_global_norm, move_to_device, see_memory_usage

    whole = torch.zeros(1000)
    torch.save(clone_tensors_for_torch_save({"a": [whole[:2]]}), tmp_path / "x.pt")
    assert (tmp_path / "x.pt").stat().st_size < 3000
    assert move_to_device({"a": (whole, 3)}, "meta")["a"][0].is_meta and get_global_norm([3.0, 4.0]) == 5.0
    with deepspeed.OnDevice(dtype=torch.bfloat16, device="meta"):
        weight = nn.Linear(3, 3).weight
    assert weight.is_meta and weight.dtype is torch.bfloat16 and torch.get_default_dtype() is torch.float32
    with caplog.at_level(logging.INFO, logger="tessera"):
        see_memory_usage("here", force=True)
        deepspeed.log_dist("hello", ranks=[0])
        deepspeed.initialize(model=make(), config=config())
    text = caplog.text
    assert "here" in text and "hello" in text and "DeepSpeed info" in text
    with pytest.raises(ValueError, match="log level"):
        deepspeed.utils.set_log_level_from_string("loud")


Both = collections.namedtuple("Both", "a b")


@pytest.mark.parametrize(
    "hold",
    [
        lambda x: [x, 3],
        lambda x: (x, None),
        lambda x: Both(x, "text"),
        lambda x: {"a": [x]},
        lambda x: collections.OrderedDict(a=x),
        lambda x: collections.defaultdict(list, a=x),
        lambda x: collections.UserDict(a=(x,)),
        lambda x: types.MappingProxyType({"a": x}),
        lambda x: nn.Linear(2, 2),
        lambda x: nn.utils.rnn.pack_sequence([x]),
    ],
)
def test_containers_are_moved_and_keep_their_class(hold: Any) -> None:
    from deepspeed.runtime.utils import move_to_device
    from torch.utils._pytree import tree_leaves

    held = hold(torch.zeros(2))
    moved = move_to_device(held, "cpu")
    assert type(moved) is (dict if isinstance(held, types.MappingProxyType) else type(held))
    if isinstance(held, (list, tuple, dict)) and not isinstance(held, nn.utils.rnn.PackedSequence):
        there = move_to_device(held, "meta")
        assert [x.is_meta for x in tree_leaves(there) if isinstance(x, torch.Tensor)] == [True]
        kept = move_to_device(held, "cpu", criterion_func=lambda x: x.numel() > 5)
        assert all(a is b for a, b in zip(tree_leaves(kept), tree_leaves(held), strict=True))


def test_memory_estimators(capsys: pytest.CaptureFixture[str]) -> None:
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    n, layer = 1e9, 1e8
    assert stage_1_and_2.estimate_zero2_model_states_mem_needs(n, 8, cpu_offload=False) == (48e9, (2 + 12 / 8) * n)
    assert stage_1_and_2.estimate_zero2_model_states_mem_needs(n, 8) == (48e9, 2 * n)
    assert stage_1_and_2.estimate_zero2_model_states_mem_needs(n, 1, 8) == (6e9, 2 * n)
    assert stage3.estimate_zero3_model_states_mem_needs(n, layer, 8) == (14e9 * 1.5, 4 * layer, 4 * layer)
    needs = stage3.estimate_zero3_model_states_mem_needs(
        n, layer, 8, cpu_offload=False, cpu_offload_params=False, additional_buffer_factor=1
    )
    assert needs == (32 * layer, 4 * layer + 14 * n / 8, 4 * layer)
    model = make()
    stage_1_and_2.estimate_zero2_model_states_mem_needs_all_live(model, num_gpus_per_node=8, num_nodes=1)
    stage3.estimate_zero3_model_states_mem_needs_all_live(model, 8, 2)
    stage3.estimate_zero3_model_states_mem_needs_all_cold(total_params=n, largest_layer_params=layer)
    text = capsys.readouterr().out
    assert text.count("GB") == 2 * (2 + 6 + 6) and "offload_param=none, offload_optimizer=cpu , zero_init=0" in text


def test_compiled_parts_say_what_they_are() -> None:
    from deepspeed.ops.aio import AsyncIOBuilder
    from deepspeed.ops.op_builder import FusedAdamBuilder

    assert deepspeed.ops.__compatible_ops__[AsyncIOBuilder.NAME] is False
    assert FusedAdamBuilder().is_compatible()
    with pytest.raises(NotImplementedError, match="compiles nothing"):
        FusedAdamBuilder().load()


def test_schedules_have_the_attributes_that_programs_read() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.5)
    schedule = deepspeed.runtime.lr_schedules.WarmupLR(optimizer, 0.1, 0.5, warmup_num_steps=7)
    assert (schedule.min_lrs, schedule.max_lrs, schedule.warmup_num_steps) == ([0.1], [0.5], 7)
    optimizer.param_groups[0]["lr"] = 0.5
    cosine = deepspeed.runtime.lr_schedules.WarmupCosineLR(optimizer, 10, warmup_num_steps=2)
    cosine.step(5)
    assert cosine.get_lr_ratio() == pytest.approx(cosine.get_lr()[0] / 0.5) and cosine.total_num_steps == 10


def test_values_and_lists() -> None:
    from deepspeed.runtime import utils
    from deepspeed.runtime.zero import utils as zero_utils

    assert utils.partition_uniform(7, 3) == [0, 3, 5, 7] and utils.partition_uniform(2, 4) == [0, 1, 2, 2, 2]
    assert utils.partition_balanced([1, 1, 4, 1], 2) == [0, 2, 4] and utils.prefix_sum_inc([3, 4, 5]) == [3, 7, 12]
    assert utils.get_only_unique_item([2, 2]) == 2
    with pytest.raises(RuntimeError, match="one value"):
        utils.get_only_unique_item([1, 2])
    bad = torch.tensor([1.0, float("nan")])
    assert utils.has_inf_or_nan(bad) and not utils.has_inf_or_nan(torch.ones(2))
    assert utils.is_invalid_grad_norm(-1.0) and utils.is_invalid_grad_norm(bad) and not utils.is_invalid_grad_norm(0.5)
    tensors = [torch.full((2,), 3.0), torch.full((2,), 4.0)]
    assert utils.get_tensor_bytes({"a": [tensors, 3]}) == 16
    norm = utils.clip_tensors_by_global_norm(tensors, max_norm=1.0)
    assert norm == pytest.approx(50**0.5) and utils.get_global_norm_of_tensors(tensors) == pytest.approx(1.0)
    assert utils.DummyOptim([1]).param_groups == [{"params": [1]}]
    doubled = zero_utils.apply_to_tensors_only(lambda t: t * 2, Both([torch.ones(1)], {"x": torch.ones(1)}))
    assert type(doubled) is Both and doubled.a[0].item() == doubled.b["x"].item() == 2
    assert zero_utils.is_builtin_type(3) and not zero_utils.is_builtin_type(Both(1, 2))
    moved = utils.copy_to_device([torch.ones(1), (torch.ones(3),)], "meta", lambda t: t.numel() > 1)
    assert not moved[0].is_meta and moved[1][0].is_meta


def test_names_logs_and_versions(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    from deepspeed import git_version_info
    from deepspeed.accelerator import is_current_accelerator_supported
    from deepspeed.utils import bwc, module_utils, numa, timer
    from deepspeed.utils import logging as logs
    from deepspeed.utils.torch import is_functorch_transforming, register_grad_hook

    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    module_utils.recursive_setattr(model, "0.0", nn.Identity())
    assert isinstance(module_utils.recursive_getattr(model, "0.0"), nn.Identity)
    assert numa.parse_range_list("0,2-4") == [0, 2, 3, 4] and is_current_accelerator_supported()
    with pytest.raises(ValueError, match="do not grow"):
        numa.parse_range_list("3,1")
    assert git_version_info.torch_info["version"] == ".".join(torch.__version__.split(".")[:2])
    mpu = types.SimpleNamespace(get_model_parallel_rank=lambda: 3, get_tensor_model_parallel_rank=lambda: 5)
    assert bwc.bwc_tensor_model_parallel_rank(mpu) == 5 and bwc.bwc_tensor_model_parallel_rank(None) == 0
    assert bwc.bwc_pipeline_parallel_world_size(mpu) == 1 and bwc.bwc_tensor_model_parallel_group(mpu) is None
    assert not is_functorch_transforming() and torch.func.vmap(lambda x: x * is_functorch_transforming())(torch.ones(1))
    seen: list[Any] = []
    weight = nn.Parameter(torch.ones(1))
    register_grad_hook(weight, seen.append)
    (weight * 2).sum().backward()
    assert seen[0] is weight and timer.trim_mean([1.0, 2.0, 9.0], 0.4) == 2.0
    assert timer.NoopTimer()("a").elapsed() == 0.0 and timer.NoopTimer().get_timers() == {}
    with caplog.at_level(logging.INFO, logger="tessera"):
        logs.log_dist_once("only once", ranks=[0])
        logs.log_dist_once("only once", ranks=[0])
        logs.print_configuration(types.SimpleNamespace(width=7), "settings")
        logs.logger.warning_once("from the logger")
    assert caplog.text.count("only once") == 1 and "width" in caplog.text and "from the logger" in caplog.text
    logs.print_dist("shown", [0])
    assert "shown" in capsys.readouterr().out and logs.get_log_level_from_string("ERROR") == logging.ERROR


def test_groups_of_a_dense_model() -> None:
    from deepspeed.moe import utils

    weights = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    groups = utils.split_params_into_different_moe_groups_for_optimizer({"params": iter(weights), "name": "all"})
    assert groups == [{"params": weights, "name": "all"}] and utils.has_moe_layers(make()) == (False, 0)
    assert utils.split_params_into_different_moe_groups_for_optimizer(tuple(groups)) == groups
    weights[1].allreduce = False
    assert utils.split_params_into_shared_and_expert_params(weights) == ([weights[0]], [weights[1]])
    with pytest.raises(NotImplementedError, match="leaf_module"):
        utils.split_params_into_different_moe_groups_for_optimizer(groups)
    with pytest.raises(ValueError, match="param groups must be"):
        utils.split_params_into_different_moe_groups_for_optimizer(3)


class _Saved:
    """Pickles as an object of DeepSpeed's, built without its __init__."""

    def __init__(self, module: str, name: str, **state: Any) -> None:
        self._made = (_without_init, (getattr(importlib.import_module(module), name),), state)

    def __reduce__(self) -> Any:
        return self._made


def _without_init(cls: type) -> Any:
    return cls.__new__(cls)


def test_classes_that_lie_in_checkpoints(tmp_path: Path) -> None:
    """torch.load() of a program's own finds them, with or without weights_only."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler, LossScalerBase
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    scalers = "deepspeed.runtime.fp16.loss_scaler"
    saved = {
        "stage": ZeroStageEnum.gradients,
        "place": _Saved("deepspeed.utils.tensor_fragment", "fragment_address", numel=7, start=2),
        "fixed": _Saved(scalers, "LossScaler", cur_scale=8.0, dynamic=False),
        "moving": _Saved(scalers, "DynamicLossScaler", cur_scale=4.0, dynamic=True, min_scale=1, cur_hysteresis=2),
        "part": _Saved("deepspeed.checkpoint.universal_checkpoint", "SubparamShape", patterns=["a"], partition_dim=0),
    }
    torch.save(saved, tmp_path / "x.pt")
    found = torch.load(tmp_path / "x.pt", weights_only=False)
    assert found["place"] == fragment_address(numel=7, start=2) and found["stage"] == 2
    assert isinstance(found["fixed"], LossScaler) and found["fixed"].loss_scale == 8.0
    assert isinstance(found["moving"], DynamicLossScaler) and found["moving"].cur_scale == 4.0
    assert found["part"].patterns == ["a"]
    places = {
        "place": fragment_address(7, 2),
        "fixed": LossScaler(8),
        "moving": DynamicLossScaler(4, 1000, 1, 2, False),
    }
    torch.save(places, tmp_path / "y.pt")
    with torch.serialization.safe_globals([fragment_address, LossScaler, DynamicLossScaler]):
        assert torch.load(tmp_path / "y.pt")["place"].start == 2
    engine, *_ = deepspeed.initialize(model=make(), config=config(2))
    own = engine.optimizer.loss_scaler
    assert isinstance(own, LossScaler) and isinstance(own, LossScalerBase) and not isinstance(own, DynamicLossScaler)
    assert not isinstance(3, LossScaler) and LossScaler(2).scale_loss(torch.ones(1)) == 2


def test_leaf_modules_and_the_init_of_shards() -> None:
    from deepspeed.runtime.zero.leaf_module_config import DEFAULT_LEAF_MODULE_CLASSES

    assert isinstance(DEFAULT_LEAF_MODULE_CLASSES, list) and DEFAULT_LEAF_MODULE_CLASSES
    cfg = config(3, zero={"mics_shard_size": 1})
    with deepspeed.zero.MiCS_Init(config_dict_or_path=cfg):
        model = make()
    first = next(model.children())
    first._z3_leaf = True  # as programs mark a leaf
    assert deepspeed.utils.z3_leaf_module(first)
    deepspeed.utils.set_z3_leaf_module(first, False)
    assert first._z3_leaf is False
    deepspeed.utils.set_z3_leaf_modules(model, [type(first)])
    assert first._z3_leaf is True
    deepspeed.utils.unset_z3_leaf_modules(model, [type(first)])
    first._z3_leaf = True
    engine, *_ = deepspeed.initialize(model=model, config=cfg)
    assert deepspeed.utils.get_z3_leaf_modules(model) == [first]
    assert deepspeed.utils.z3_leaf_parameter(next(first.parameters()))
    engine.backward(engine(*batch(0)))
    engine.allreduce_gradients()
    engine.step()
    assert engine.mics_shard_size() == 1 and engine.global_steps == 1


# Of each schedule: its arguments, and attributes that DeepSpeed's has with them (read off 0.19.8).
SCHEDULES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "WarmupLR": (
        {"warmup_min_lr": 0.1, "warmup_max_lr": 0.5, "warmup_num_steps": 7},
        {"delta_lrs": [0.4], "warmup_type": "log", "inverse_log_warm_up": 0.5138983423697507, "warmup_num_steps": 7},
    ),
    "WarmupDecayLR": (
        {"total_num_steps": 20, "warmup_num_steps": 5, "warmup_type": "linear", "warmup_max_lr": 0.01},
        {"delta_lrs": [0.01], "warmup_type": "linear", "total_num_steps": 20},
    ),
    "WarmupCosineLR": (
        {"total_num_steps": 9, "warmup_num_steps": 2, "cos_min_ratio": 0.25},
        {"org_lrs": [0.5], "cos_min_ratio": 0.25, "warmup_min_ratio": 0.0, "warmup_type": "log"},
    ),
    "LRRangeTest": (
        {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 3, "lr_range_test_staircase": True},
        {"min_lr": [0.01], "step_size": 3, "step_rate": 1.0, "staircase": True},
    ),
    "OneCycle": (
        {"cycle_min_lr": 0.1, "cycle_max_lr": 0.4, "cycle_first_step_size": 3, "cycle_second_step_size": 5},
        {
            "min_lrs": [0.1],
            "max_lrs": [0.4],
            "min_moms": [(0.8, 0.99)],
            "max_moms": [(0.9, 0.99)],
            "total_size": 8,
            "step_ratio": 0.375,
            "first_step_size": 3,
            "second_step_size": 5,
            "first_stair_count": 0,
            "second_stair_count": 0,
            "decay_step_size": 0,
            "skip_lr_decay": True,
            "skip_mom_decay": True,
            "cycle_momentum": True,
        },
    ),
}


@pytest.mark.parametrize(("staircase", "interval"), [(True, 1), (False, 4 / 3)])
def test_the_interval_of_a_range_test(staircase: bool, interval: float) -> None:
    alone = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.5)
    options = {"lr_range_test_step_size": 3, "lr_range_test_staircase": staircase}
    schedule = deepspeed.runtime.lr_schedules.LRRangeTest(alone, **options)
    for _ in range(4):
        schedule.step()
    assert schedule.interval_fn() == interval and schedule.get_lr() == pytest.approx([1e-3 * (1 + interval)])


@pytest.mark.parametrize("kind", SCHEDULES)
def test_schedules_by_hand_and_by_configuration(kind: str) -> None:
    arguments, expected = SCHEDULES[kind]
    cls = getattr(deepspeed.runtime.lr_schedules, kind)
    optimizer = {"type": "AdamW", "params": {"lr": 0.5, "betas": [0.7, 0.95]}}
    cfg = config(1) | {"optimizer": optimizer, "scheduler": {"type": kind, "params": arguments}}
    engine, client, _, configured = deepspeed.initialize(model=make(), config=cfg)
    alone = torch.optim.AdamW(nn.Linear(1, 1).parameters(), lr=0.5, betas=(0.7, 0.95))
    for schedule, owner in ((cls(alone, **arguments), alone), (configured, client)):
        assert type(schedule) is cls
        for name, value in expected.items():
            got = getattr(schedule, name)
            assert got == value or got == pytest.approx(value), name
        assert not hasattr(schedule, "no_such_thing")
        cycles = kind == "OneCycle"
        assert owner.param_groups[0]["betas"][1] == (0.99 if cycles else 0.95)
        schedule.step()
        assert owner.param_groups[0]["betas"][1] == (0.99 if cycles else 0.95)
    if cycles:
        engine.backward(engine(*batch(0)))
        engine.step()
        assert engine.get_mom()[0][1] == configured.get_mom()[0][1] == 0.99


@pytest.mark.parametrize(("minutes", "seconds"), [("0.5", 30), ("20", 1200), ("soon", 600), ("nan", 600), ("-1", 600)])
def test_minutes_of_the_environment(minutes: str, seconds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An import fails for none of them; who starts a process group is told."""
    program = "import deepspeed; print(deepspeed.constants.default_pg_timeout.total_seconds())"
    environment = os.environ | {"DEEPSPEED_TIMEOUT": minutes, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert float(done.stdout) == seconds
    if seconds == 600:
        monkeypatch.setenv("DEEPSPEED_TIMEOUT", minutes)
        with pytest.raises(ValueError, match=f"DEEPSPEED_TIMEOUT must be a number of minutes.*'{minutes}'"):
            deepspeed.init_distributed(dist_backend="gloo")
