"""Activation checkpointing, the accelerator, communication, arguments, timers and other helpers."""

from __future__ import annotations

import argparse
import collections
import logging
import types
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from support import batch, config, make
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
    assert set(comm.log_summary(return_dict=True)) >= {"all_gather", "reduce_scatter"}
    with pytest.raises(NotImplementedError, match="comms_logger"):
        comm.configure(enabled=True)
    with pytest.raises(AttributeError):
        comm.nothing_such  # noqa: B018


def test_arguments() -> None:
    parser = deepspeed.add_tuning_arguments(deepspeed.add_config_arguments(argparse.ArgumentParser()))
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", "a.json", "--warmup_num_steps", "3"])
    assert args.deepspeed and args.deepspeed_config == "a.json" and args.warmup_num_steps == 3
    assert args.deepscale_config is None


def test_timers() -> None:
    timers = deepspeed.utils.timer.SynchronizedWallClockTimer()
    timers("a").start()
    timers("a").stop(record=True)
    assert timers.has_timer("a") and timers("a").elapsed(reset=False) >= 0
    assert timers.get_mean(["a", "b"]).keys() == {"a"}
    timers.log(["a"])


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
