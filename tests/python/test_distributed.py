"""Real processes: a slice of what the other tests do with threads."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import socket
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from support import (
    PROCESSES,
    assert_close,
    batch,
    config,
    engines,
    free_port,
    make,
    run,
    run_processes,
    shard_group,
    weights,
)
from torch.distributed.device_mesh import init_device_mesh

import tessera

CASES = [(stage, bf16, accumulation) for stage in (0, 1, 2, 3) for bf16 in (False, True) for accumulation in (1, 3)]


def train(engine: tessera.Engine, rank: int, accumulation: int) -> dict[str, Any]:
    for k in range(2 * accumulation):
        engine(*batch(10 * rank + k)).backward()
        engine.step()
    return weights(engine.module)


def adam(stage: int, accumulation: int, bf16: bool) -> dict[str, Any]:
    result = config(stage, accumulation, bf16, optimizer={"type": "AdamW", "params": {"lr": 0.01}})
    result["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    return result


def enter(rank: int, world: int, port: int, transport: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    os.environ["TESSERA_TRANSPORT"] = transport


TWO_BATCHES = ("sp", "tp", "argument", "configuration", "groups")  # of four ranks, told in several ways


def two_batches(way: str, model: torch.nn.Module, cfg: dict[str, Any]) -> tessera.Engine:
    if way in ("sp", "tp"):
        return tessera.Engine(model, cfg, group=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", way)))
    if way == "argument":
        return tessera.initialize(model=model, config=cfg, sequence_parallel=2)[0]
    if way == "configuration":
        return tessera.initialize(model=model, config=cfg | {"sequence_parallel_size": 2})[0]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    both = mesh._flatten("both").get_group()
    groups = tessera.sequence.SequenceParallelGroups(mesh.get_group("sequence"), mesh.get_group("data"), both)
    return tessera.initialize(model=model, config=cfg, group=groups)[0]


def worker(rank: int, world: int, port: int, transport: str, folder: str) -> None:
    enter(rank, world, port, transport)
    results: dict[Any, Any] = {}
    for case in CASES:
        stage, bf16, accumulation = case
        engine = tessera.initialize(model=make(seed=rank), config=adam(stage, accumulation, bf16))[0]
        assert (engine.world_size, engine.global_rank, engine.local_rank) == (world, rank, rank)
        results[case] = train(engine, rank, accumulation)
        engine.save_16bit_model(os.path.join(folder, str(stage)))
        engine.destroy()
    for device in ("cpu", "nvme"):
        options = adam(2, 3, True)
        options["zero_optimization"]["offload_optimizer"] = {"device": device, "nvme_path": folder}
        engine = tessera.initialize(model=make(seed=rank), config=options)[0]
        results[device] = train(engine, rank, 3)
        engine.destroy()
    options = adam(3, 3, True)
    options["zero_optimization"]["offload_param"] = {"device": "nvme", "nvme_path": folder, "max_in_cpu": 0}
    engine = tessera.initialize(model=make(seed=rank), config=options)[0]
    results["parameters"] = train(engine, rank, 3)
    engine.destroy()
    if world == 4:  # hybrid sharding from the configuration and from a DeviceMesh: alike, and as sharding over all
        options = adam(3, 1, False)
        options["zero_optimization"]["mics_shard_size"] = 2
        with tessera.zero.Init(config=options):
            model = make(seed=rank)
        engine = tessera.initialize(model=model, config=options)[0]
        assert engine.world_size == 4 and engine.global_rank == rank
        results["hybrid"] = train(engine, rank, 1)
        engine.destroy()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        engine = tessera.Engine(make(seed=rank), adam(2, 1, False), group=mesh)
        results["mesh"] = train(engine, rank, 1)
        engine.destroy()
        for way in TWO_BATCHES:
            engine = two_batches(way, make(seed=rank), adam(2, 1, False))
            assert (engine.dp_world_size, engine.world_size) == (2, 4)
            assert (engine.sp_world_size, engine.tp_world_size) == ((1, 2) if way == "tp" else (2, 1))
            assert engine.seq_dp_world_size == (2 if way == "tp" else 4)
            assert engine.tp_rank + engine.sp_rank == rank % 2
            results[way] = train(engine, rank // 2, 1)
            engine.destroy()
        for asked, key in (({}, {"sequence_parallel_size": 3}), ({"sequence_parallel": 3}, {})):
            with pytest.raises(ValueError, match=r"sequence_parallel_size 3 x .* does not divide the 4 ranks"):
                tessera.initialize(model=make(), config=adam(2, 1, False) | key, **asked)
        with pytest.raises(ValueError, match="name them, in this order"):
            tessera.Engine(
                make(), adam(2, 1, False), group=init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "sp"))
            )
    half = torch.distributed.new_group(list(range(world // 2)))
    rest = torch.distributed.new_group(list(range(world // 2, world)))
    mine = half if rank < world // 2 else rest
    engine = tessera.Engine(make(), adam(1, 1, False), group=mine)
    assert engine.world_size == world and engine.dp_world_size == world // 2
    train(engine, rank, 1)
    engine.destroy()
    torch.save(results, os.path.join(folder, f"{rank}.pt"))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("world", "transport"), [(2, "auto"), (4, "auto"), (2, "gloo")])
def test_processes_equal_threads(world: int, transport: str, tmp_path: Path) -> None:
    """The same bits as ranks that are threads, so everything tested with threads holds for processes."""
    run_processes(world, worker, world, free_port(), transport, str(tmp_path))
    for case in CASES:
        stage, bf16, accumulation = case
        want = engines(
            make(seed=0), world, adam(stage, accumulation, bf16), lambda e, r, a=accumulation: train(e, r, a)
        )
        for rank in range(world):
            got = torch.load(tmp_path / f"{rank}.pt")[case]
            assert all(torch.equal(got[name], want[rank][name]) for name in got), case
            assert_close(got, want[0])
    for rank in range(world):  # states in host memory and on a disk
        found = torch.load(tmp_path / f"{rank}.pt")
        for where, stage in (("cpu", 2), ("nvme", 2), ("parameters", 3)):
            assert all(torch.equal(found[where][name], value) for name, value in found[stage, True, 3].items())
    if world == 4:
        two = engines(make(seed=0), 2, adam(2, 1, False), lambda e, r: train(e, r, 1))[0]
        for way in TWO_BATCHES:
            assert_close(torch.load(tmp_path / "3.pt")[way], two)
        want = torch.load(tmp_path / "0.pt")[3, False, 1]
        for rank in range(world):
            got = torch.load(tmp_path / f"{rank}.pt")
            assert_close(got["hybrid"], want)
            assert all(torch.equal(got["hybrid"][name], got["mesh"][name]) for name in want)


def dying(rank: int, port: int, moment: str, stage: int, transport: str, over: Any) -> None:
    enter(rank, 3, port, transport)
    engine = tessera.initialize(model=make(), config=config(stage))[0]
    engine(*batch(rank)).backward()
    engine.step()

    def die(*_: Any) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    if moment == "forward":
        engine.module.register_forward_hook(die)
    elif moment == "backward":
        next(engine.module.parameters()).register_hook(die)
    with pytest.raises(RuntimeError) as caught:
        engine(*batch(rank)).backward()
        if moment == "step":
            die()
        engine.step()
    message = str(caught.value)
    assert f"rank {rank} of 3" in message and re.search(r"lost rank 1|rank\(s\) 1", message), message
    assert (re.search("reduce_scatter|all_gather", message) and "unit" in message) or "norm" in message, message
    with pytest.raises(RuntimeError):  # finished for good, and it says so at once
        engine.step()
    engine.destroy()
    over.wait(60)  # rank 0 hosts the store that the other survivor asks; a minute is far below the group's timeout
    os._exit(0)


KILLED = [(moment, stage, "auto") for moment in ("forward", "backward", "step") for stage in (2, 3)]


@pytest.mark.parametrize(("moment", "stage", "transport"), [*KILLED, ("backward", 2, "gloo"), ("step", 3, "gloo")])
def test_a_killed_rank_ends_the_others_with_an_error_that_names_it(moment: str, stage: int, transport: str) -> None:
    port = free_port()
    over = PROCESSES.Barrier(2)
    ranks = [PROCESSES.Process(target=dying, args=(rank, port, moment, stage, transport, over)) for rank in range(3)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [0, -signal.SIGKILL, 0]


def one_backward_more(engine: tessera.Engine, rank: int) -> None:
    run(engine, rank, 2)
    for _ in range(2 - rank):
        engine(*batch(rank)).backward()
    engine.step()


def first_save(engine: tessera.Engine, rank: int) -> None:
    """Rank 0 alone, as programs save that know only whole models."""
    if rank == 0:
        engine.save_checkpoint("/nowhere")
    run(engine, rank, 2)


def uneven(rank: int, port: int, transport: str, stage: int, what: Any) -> None:
    enter(rank, 2, port, transport)
    engine = tessera.initialize(model=make(), config=config(stage))[0]
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=UNEVEN):
        what(engine, rank)
    assert time.monotonic() - begin < 60  # far below the timeout
    os._exit(0)


UNEVEN = r"the ranks disagree: rank 0 (called|is in) \w+ \(.*, rank 1 (called|in) \w+ \("


@pytest.mark.parametrize("transport", ["threads", "auto", "gloo"])
@pytest.mark.parametrize(("what", "stage"), [(one_backward_more, 3), (first_save, 1), (first_save, 3)])
def test_ranks_whose_calls_are_not_those_of_others_are_named(what: Any, stage: int, transport: str) -> None:
    """Gathers, reductions and saves are ordered apart, so the ranks call nothing different in any."""
    if transport != "threads":
        run_processes(2, uneven, free_port(), transport, stage, what)
        return
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=UNEVEN):
        engines(make(), 2, config(stage), what)
    assert time.monotonic() - begin < 30


def threads_of_gloo() -> list[str]:
    names = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            names.append(path.read_text().strip())
    return [name for name in names if "gloo" in name]


def ended(rank: int, ranks: int, port: int, transport: str, stage: int) -> None:
    enter(rank, ranks, port, transport)
    tessera.init_distributed("gloo")
    engine = tessera.initialize(model=make(), config=adam(stage, 1, False))[0]
    train(engine, rank, 1)
    assert threads_of_gloo()
    engine.destroy()
    assert (engine.world_size, engine.global_rank) == (ranks, rank)
    torch.distributed.destroy_process_group()
    limit = time.monotonic() + 10  # the system lists a thread a moment longer than it can be waited for
    while threads_of_gloo() and time.monotonic() < limit:
        time.sleep(0.01)
    assert not threads_of_gloo(), "they would run into Python's end with what they hold"


@pytest.mark.parametrize(("ranks", "transport", "stage"), [(1, "auto", 2), (2, "gloo", 0), (2, "gloo", 3)])
def test_destroying_the_process_group_ends_its_threads(ranks: int, transport: str, stage: int) -> None:
    run_processes(ranks, ended, ranks, free_port(), transport, stage)


class Numbers(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        return batch(k)


def forking(rank: int, world: int, port: int, backend: str, transport: str, shards: int) -> None:
    """The parent trains on after children that had copies of its engine: os.fork and workers of a DataLoader."""
    enter(rank, world, port, transport)
    tessera.init_distributed(backend, timeout=timedelta(seconds=60))
    options = adam(3, 1, False)
    options["zero_optimization"]["mics_shard_size"] = shards
    engine = tessera.initialize(model=make(), config=options)[0]
    train(engine, rank, 1)
    for way in ("destroy", "use", "exit"):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                if way == "use":
                    with pytest.raises(RuntimeError, match=r"rank . of .*forked copy of the rank"):
                        engine(*batch(rank)).backward()
                        engine.step()
                    shard_group(engine).abort("the child is in trouble")
                engine.destroy()
                del engine
                gc.collect()
                code = 0
            except BaseException:
                traceback.print_exc()
            if way == "exit" and backend == "tessera":
                sys.exit(code)  # torch's own back ends have threads that no child can end
            os._exit(code)
        assert os.waitpid(child, 0)[1] == 0, way
        train(engine, rank, 1)
    for x, y in torch.utils.data.DataLoader(Numbers(), batch_size=None, num_workers=2, multiprocessing_context="fork"):
        engine(x, y).backward()
        engine.step()
    engine.destroy()
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("backend", "transport", "shards"),
    [("gloo", "auto", -1), ("gloo", "gloo", -1), ("gloo", "auto", 1), ("tessera", "auto", -1)],
)
def test_a_forked_copy_of_an_engine_does_not_end_it(backend: str, transport: str, shards: int) -> None:
    method = "spawn" if backend == "tessera" else "forkserver"  # a child of it comes to Python's end
    mp.start_processes(forking, (2, free_port(), backend, transport, shards), nprocs=2, start_method=method)


def lost_early(rank: int, port: int, transport: str, lost: int, before: int, over: Any) -> None:
    """Killed when all have met, before anybody builds an engine, or the next one."""
    enter(rank, 3, port, transport)
    tessera.init_distributed("gloo")
    for _ in range(before):
        engine = tessera.initialize(model=make(), config=config(2))[0]
        run(engine, rank, 1)
        engine.destroy()
    over.wait(120)
    if rank == lost:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    hosting = r"|the process that hosts it \(usually rank 0\) may have ended" if lost == 0 else ""
    with pytest.raises(RuntimeError, match=f"lost rank {lost}: its process .* has ended{hosting}"):
        tessera.initialize(model=make(), config=config(2))
    assert time.monotonic() - begin < 60  # far below the timeout
    os._exit(0)


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize(("transport", "lost"), [("auto", 1), ("gloo", 1), ("auto", 0)])
def test_a_rank_that_is_lost_before_an_engine_is_named(transport: str, lost: int, before: int) -> None:
    port, over = free_port(), PROCESSES.Barrier(3)
    args = (port, transport, lost, before, over)
    ranks = [PROCESSES.Process(target=lost_early, args=(rank, *args)) for rank in range(3)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(200)
    assert [process.exitcode for process in ranks] == [-signal.SIGKILL if r == lost else 0 for r in range(3)]


IMPOSSIBLE: list[tuple[dict[str, str], str]] = [
    ({"WORLD_SIZE": "2"}, "RANK is not set"),
    ({"RANK": "1"}, "WORLD_SIZE is not set"),
    ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK is 2, but WORLD_SIZE is 2"),
    ({"WORLD_SIZE": "2", "RANK": "-1"}, "RANK is -1, but WORLD_SIZE is 2"),
    ({"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "-1"}, "LOCAL_RANK is -1; it numbers the ranks of a host, from 0"),
    ({"WORLD_SIZE": "1", "RANK": "1"}, "RANK is 1, but WORLD_SIZE is 1"),
    ({"WORLD_SIZE": "0", "RANK": "0"}, "WORLD_SIZE is 0"),
    ({"WORLD_SIZE": "two", "RANK": "0"}, "WORLD_SIZE must be an integer, got 'two'"),
    ({"WORLD_SIZE": "2", "RANK": "x"}, "RANK must be an integer, got 'x'"),
    ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": ""}, "MASTER_ADDR.*is not set"),
    ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_PORT": "http"}, "MASTER_PORT is 'http'"),
    ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_PORT": "65536"}, "MASTER_PORT is '65536'"),
    ({"RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, "RANK is 1, but WORLD_SIZE is not set; OMPI_COMM_WORLD_SIZE is 2"),
    (
        {"PMI_RANK": "0", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "2", "MASTER_ADDR": ""},
        "MASTER_ADDR.*is not set; set it for all ranks",
    ),
    ({"SLURM_PROCID": "2", "SLURM_NTASKS": "2"}, "SLURM_PROCID is 2, but SLURM_NTASKS is 2"),
]


@pytest.mark.parametrize(("environment", "message"), IMPOSSIBLE)
def test_an_impossible_environment_is_refused_at_once(
    environment: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ({"MASTER_ADDR": "127.0.0.1"} | environment).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(tessera.ConfigError, match=message):
        tessera.init_distributed("gloo")
    with pytest.raises(tessera.ConfigError, match=message):
        tessera.initialize(model=make(), config=config())


# What the launchers of one host set beside rank and number of ranks, and under which names they set these.
STARTED_BY: list[tuple[list[str], dict[str, str]]] = [
    (
        ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"],
        {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
    ),
    (["PMI_RANK", "MPI_LOCALRANKID"], {"PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}),
    (
        ["SLURM_PROCID", "SLURM_LOCALID"],
        {"SLURM_NTASKS": "2", "SLURM_STEP_ID": "3", "SLURM_STEP_NODELIST": "node[07]", "SLURM_JOB_ID": "17"},
    ),
    # A container that has passed on some.
    (["SLURM_PROCID", "SLURM_LOCALID"], {"SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "node[07]"}),
]


def started(rank: int, port: int, names: list[str], environment: dict[str, str]) -> None:
    os.environ.update(environment, MASTER_PORT=str(port), **dict.fromkeys(names, str(rank)))
    engine = tessera.initialize(model=make(), config=config(2))[0]
    assert (engine.world_size, engine.global_rank, engine.local_rank) == (2, rank, rank)
    run(engine, rank, 1)
    engine.destroy()
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("names", "environment"), STARTED_BY)
def test_ranks_of_another_launcher_are_one_world(names: list[str], environment: dict[str, str]) -> None:
    run_processes(2, started, free_port(), names, environment)


SRUN = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "node[01-03,7],gpu-a"}


@pytest.mark.parametrize("way", ["Engine", "groups"])
def test_a_task_of_srun_is_no_world_of_its_own(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What makes no process group itself asks for one."""
    for name, value in SRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(tessera.UsageError, match="this is rank 0 of 2, but there is no process group"):
        if way == "Engine":
            tessera.Engine(make(), config())
        else:
            tessera.sequence.SequenceParallelGroups(None, None, None)


def test_another_launcher_is_not_asked_where_torchruns_names_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    tessera.init_distributed("gloo", other_launchers=False)
    assert torch.distributed.get_world_size() == 1
    torch.distributed.destroy_process_group()


def twice(number: int, port: int) -> None:
    """Two processes are rank 1, so rank 2 is missing."""
    enter(min(number, 1), 3, port, "auto")
    with pytest.raises((RuntimeError, ValueError), match="of one host both have RANK 1"):
        tessera.init_distributed("gloo")
    os._exit(0)


def test_two_processes_of_one_rank_are_named() -> None:
    begin = time.monotonic()
    run_processes(3, twice, free_port())
    assert time.monotonic() - begin < 100  # far below the timeout


@pytest.mark.long
def test_a_mute_port_ends_what_comes_by_a_method() -> None:
    with socket.socket() as mute, pytest.raises(dist.DistBackendError, match="does not answer as a store"):
        mute.bind(("127.0.0.1", 0))
        mute.listen(8)
        method = f"tcp://127.0.0.1:{mute.getsockname()[1]}?rank=1&world_size=2"
        tessera.init_distributed("gloo", init_method=method)


def test_process_group_arguments() -> None:
    assert not torch.distributed.is_initialized()
    engine = tessera.initialize(model=make(), config=config())[0]
    assert not torch.distributed.is_initialized(), "a lone process gets no process group it did not ask for"
    engine.destroy()
    with pytest.raises(tessera.ConfigError, match="rank is 3, but world_size is 2"):
        tessera.init_distributed("gloo", rank=3, world_size=2)
    tessera.init_distributed("gloo")
    try:
        tessera.init_distributed("nccl")  # a second call does nothing, whatever it names
        assert torch.distributed.get_world_size() == 1
        engine = tessera.initialize(model=make(), config=config())[0]
        assert (engine.world_size, engine.global_rank, engine.local_rank) == (1, 0, 0)
        engine.destroy()
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_free_port_is_given_to_nobody_else_at_any_address(address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    if family == socket.AF_INET6 and not socket.has_dualstack_ipv6():
        pytest.skip("this host has no IPv6")
    port = free_port()
    with socket.socket(family) as other, pytest.raises(OSError, match="in use"):
        other.bind((address, port))
    dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
