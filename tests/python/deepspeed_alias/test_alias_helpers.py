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
