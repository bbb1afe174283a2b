"""Monitors, timers, the log of collectives, profiles, activation checkpoints and elastic batches by their old names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from support import config, free_port, losses_of, make, run_processes
from torch import nn


def built(cfg: dict[str, Any]) -> Any:
    return deepspeed.initialize(model=make(), config=cfg)[0]


def test_monitor_master(tmp_path: Path) -> None:
    from deepspeed.monitor.config import DeepSpeedMonitorConfig
    from deepspeed.monitor.monitor import MonitorMaster

    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    master = MonitorMaster(DeepSpeedMonitorConfig(csv_monitor=section))
    assert master.enabled and master.csv_monitor.enabled and not master.tb_monitor.enabled
    assert not master.wandb_monitor.enabled and not master.comet_monitor.enabled
    master.write_events([("a/b", 1.0, 3)])
    master.csv_monitor.write_events([("a/b", 2.0, 4)])
    master.tb_monitor.write_events([("a/b", 2.0, 4)])
    assert (tmp_path / "job" / "a_b.csv").read_text().split() == ["step,b", "3,1.0", "4,2.0"]
    assert master.csv_monitor.log_dir == tmp_path / "job"
    with pytest.raises(AttributeError):
        master.nothing  # noqa: B018


def test_a_monitor_by_itself(tmp_path: Path) -> None:
    from deepspeed.monitor.config import CSVConfig, TensorBoardConfig, get_monitor_config
    from deepspeed.monitor.csv_monitor import csvMonitor
    from deepspeed.monitor.tensorboard import TensorBoardMonitor

    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    monitor = csvMonitor(CSVConfig(**section))
    monitor.write_events([("a/b", 1.0, 3)])
    assert monitor.enabled and (monitor.log_dir / "a_b.csv").read_text().split() == ["step,b", "3,1.0"]
    assert csvMonitor(get_monitor_config({"csv_monitor": section}).csv_monitor).log_dir == monitor.log_dir
    off = TensorBoardMonitor(TensorBoardConfig())
    off.write_events([("a/b", 1.0, 3)])
    assert not off.enabled and not hasattr(off, "summary_writer")


def test_an_engine_has_a_monitor_and_timers(tmp_path: Path) -> None:
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    engine = built(config(1, csv_monitor=section, wall_clock_breakdown=True))
    losses_of(engine)
    assert engine.monitor.enabled and engine.wall_clock_breakdown()
    assert (tmp_path / "job" / "Train_Samples_lr.csv").exists()
    timers = engine.get_wall_clock_timers()
    for name in ("fwd", "bwd", "bwd_inner", "bwd_allreduce", "step"):
        assert timers.has_timer(name) and len(timers(name).records) == 2
    assert timers("fwd").elapsed(reset=False) > 0
    engine.destroy()


def test_the_log_of_collectives(caplog: pytest.LogCaptureFixture) -> None:
    engine = built(config(1, comms_logger={"enabled": True}))
    losses_of(engine)
    summary = deepspeed.comm.log_summary(return_dict=True)
    assert summary is not None  # one rank: nothing travels
    assert deepspeed.comm.log_summary() is None
    engine.destroy()
    with pytest.raises(NotImplementedError, match=r"comms_logger\.enabled"):
        deepspeed.comm.configure(enabled=True)


def test_the_profiler() -> None:
    from deepspeed.profiling.flops_profiler import FlopsProfiler, get_model_profile

    flops, macs, params = get_model_profile(make(), input_shape=(4, 5), print_profile=False, as_string=False)
    assert flops == 2 * macs > 0 and params > 0
    profiler = FlopsProfiler(make())
    profiler.start_profile()
    profiler.model(torch.ones(4, 5))
    profiler.stop_profile()
    assert profiler.get_total_flops() == flops and "ms" in profiler.get_total_duration(as_string=True)


def test_elastic_batches() -> None:
    from deepspeed.elasticity import compute_elastic_config, elasticity_enabled
    from deepspeed.elasticity.config import ElasticityConfigError, ElasticityError, ElasticityIncompatibleWorldSize

    cfg = {"elasticity": {"enabled": True, "max_train_batch_size": 100, "micro_batch_sizes": [2, 4], "version": 0.1}}
    batch_size, devices = compute_elastic_config(ds_config=cfg, target_deepspeed_version=deepspeed.__version__)
    assert elasticity_enabled(cfg) and batch_size <= 100 and 1 in devices
    with pytest.raises(ElasticityIncompatibleWorldSize):
        compute_elastic_config(cfg, deepspeed.__version__, world_size=max(devices) + 1)
    assert issubclass(ElasticityIncompatibleWorldSize, ElasticityError)
    elastic = {name: value for name, value in config(2).items() if "batch" not in name and "accumulation" not in name}
    engine = built({**elastic, **cfg})
    assert engine.elasticity_enabled()
    assert engine.train_batch_size() == engine._config.train_batch_size == batch_size
    engine.destroy()
    with pytest.raises(ElasticityConfigError, match="beside it"):
        built({**config(2), **cfg})
    with pytest.raises(ElasticityIncompatibleWorldSize):
        built({**elastic, "elasticity": {**cfg["elasticity"], "min_gpus": 2}})


def test_lamb_by_its_old_name() -> None:
    from deepspeed.ops.lamb import FusedLamb

    model = make()
    optimizer = FusedLamb(model.parameters(), lr=0.01)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config(2))[0]
    losses_of(engine)
    assert engine.was_step_applied()
    engine.destroy()
    with pytest.raises(NotImplementedError, match="max_grad_norm"):
        FusedLamb(make().parameters(), max_grad_norm=1.0)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_sparse_embeddings(stage: int) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.dense = nn.Embedding(8, 3, sparse=True), nn.Embedding(8, 3)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return (self.words(ids) * self.dense(ids)).sum()

    torch.manual_seed(0)
    plain, ids = Words(), torch.tensor([1, 3, 3])
    model = Words()
    model.load_state_dict(plain.state_dict())
    engine = deepspeed.initialize(model=model, config=config(stage, sparse_gradients=True))[0]
    assert engine.sparse_tensor_module_names == {"words.weight"}
    engine.backward(engine(ids))
    engine.step()
    plain(ids).backward()
    torch.testing.assert_close(model.words.weight, plain.words.weight - 0.1 * plain.words.weight.grad.to_dense())
    engine.destroy()


def _partitioned(rank: int, port: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(port)
    deepspeed.init_distributed("gloo")

    class Mpu:
        def get_model_parallel_group(self) -> Any:
            return torch.distributed.group.WORLD

    try:
        deepspeed.checkpointing.configure(Mpu(), partition_activations=True, checkpoint_in_cpu=rank < 0)
        layer = make(nn.Linear, 5, 5)
        x = torch.linspace(-1, 1, 15).view(3, 5).requires_grad_()
        deepspeed.checkpointing.checkpoint(lambda t: torch.tanh(layer(t)), x * 2).sum().backward()
        found = x.grad
        x.grad = None
        torch.tanh(layer(x * 2)).sum().backward()
        assert found is not None and x.grad is not None and torch.equal(found, x.grad)
    finally:
        torch.distributed.destroy_process_group()


def test_partitioned_activations_over_the_ranks_of_an_mpu() -> None:
    run_processes(2, _partitioned, free_port())


def _groups_of_a_mesh(rank: int, port: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="4", MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(port)
    ranks_of = torch.distributed.get_process_group_ranks
    built = [deepspeed.initialize(model=make(), config=config(1, sequence_parallel_size=sp))[0] for sp in (2, 1, 4)]
    try:
        for engine, sp in zip(built, (2, 1, 4), strict=True):
            start = rank - rank % sp
            assert ranks_of(engine.seq_parallel_group) == list(range(start, start + sp))
            assert ranks_of(engine.data_parallel_group) == list(range(rank % sp, 4, sp))
            total = torch.ones(1)
            torch.distributed.all_reduce(total, group=engine.get_sequence_parallel_group())
            assert total.item() == sp
        assert deepspeed.utils.groups._get_sequence_parallel_group() is built[-1].seq_parallel_group
    finally:
        torch.distributed.destroy_process_group()


def test_groups_are_those_of_the_engine_asked() -> None:
    run_processes(4, _groups_of_a_mesh, free_port())
