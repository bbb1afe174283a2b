"""deepspeed.pipe: a program written for it trains."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "pipeline"))  # stages.py

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
    ProcessTopology,
)
from stages import batch, config, data, in_processes, layers, loss_fn
from torch import nn

import tessera


def program(rank: int) -> None:
    torch.manual_seed(0)
    model = PipelineModule(
        layers=[LayerSpec(nn.Embedding, 11, 6), nn.ReLU(), LayerSpec(nn.Linear, 6, 11)],
        topology=PipeDataParallelTopology(num_pp=2, num_dp=1),
        loss_fn=loss_fn,
        partition_method="uniform",
    )
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model, model_parameters=[p for p in model.parameters() if p.requires_grad], config=config(1)
    )
    assert isinstance(engine, deepspeed.PipelineEngine) and isinstance(engine, deepspeed.DeepSpeedEngine)
    assert optimizer is engine.optimizer and engine.is_first_stage() == (rank == 0)
    source = itertools.repeat(next(data(0)))
    losses = [float(engine.train_batch(data_iter=source)) for _ in range(3)]
    assert losses[-1] < losses[0] and engine.global_steps == 3
    assert engine.eval_batch(source).shape == ()
    with pytest.raises(tessera.UsageError, match="train_batch"):
        engine(torch.ones(1))


def test_a_program_of_two_stages() -> None:
    in_processes(2, program)


def calls(rank: int) -> None:
    """Data from setters and training_data, and where a rank is."""
    rows = [{"x": inputs, "y": labels} for inputs, labels in (batch(number) for number in range(8))]

    def pair(row: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return row["x"], row["y"]

    def built(**more: Any) -> Any:
        model = PipelineModule(layers(), num_stages=2, loss_fn=loss_fn, seed_layers=True)
        return deepspeed.initialize(model=model, config=config(1), **more)[0]

    plain = built()
    source = map(pair, rows)
    expected = [float(plain.train_batch(source)) for _ in range(2)]
    samples = [{name: value[row] for name, value in one.items()} for one in rows for row in range(3)]
    for how in ("iterator", "loader", "argument", "training data"):
        engine = built(training_data=samples if how == "training data" else None)
        assert engine.agg_train_loss is None and engine.data_iterator is None
        engine.set_batch_fn(pair)
        engine.set_has_attention_mask(True)
        if how == "iterator":
            engine.set_dataiterator(iter(rows))
        if how == "loader":
            engine.set_dataloader(rows)
        losses = []
        for step in range(2):
            engine.reset_activation_shape()
            given = [iter(rows)] if how == "argument" and step == 0 else []
            losses.append(float(engine.train_batch(*given)))
            assert float(engine.agg_train_loss) == losses[-1]
        if how == "training data":  # drawn in an order of its own
            assert all(loss > 0 for loss in losses)
        else:
            assert losses == expected
        assert float(engine.eval_batch(iter(rows))) > 0
        engine.destroy()
    place = plain.grid
    assert plain.mpu is place and (place.get_stage_id(), place.pp_group) == (rank // 2, [rank % 2, rank % 2 + 2])
    assert (plain.is_pipe_parallel, plain.is_data_parallel, plain.is_model_parallel) == (True, True, False)
    assert dist.get_process_group_ranks(place.get_pipe_parallel_group()) == place.pp_group
    assert (
        dist.get_process_group_ranks(place.get_data_parallel_group())
        == place.dp_group
        == [rank // 2 * 2, rank // 2 * 2 + 1]
    )
    assert place.get_model_parallel_group() is place.get_pipe_parallel_group()
    model = plain.module
    assert (model.topology().get_dim("data"), model.mpu().get_global_rank(), model.num_pipeline_stages()) == (
        2,
        rank,
        2,
    )
    assert model.parts == model.partitions() and model.stage_owner(0) == 0 and model.stage_owner(8) == 1
    assert len(model.forward_funcs) == model.parts[rank // 2 + 1] - model.parts[rank // 2]
    with pytest.raises(AttributeError, match="neither 'PipelineEngine' nor its module 'PipelineModule' has"):
        plain.inference_batch(iter(rows))
    with pytest.raises(NotImplementedError, match=r"pipeline\.schedule"):
        deepspeed.runtime.pipe.schedule.TrainSchedule(4, 2, 0)


def test_calls_of_programs_for_it() -> None:
    in_processes(4, calls)


def evaluation(rank: int) -> None:
    """Of a model without a loss: outputs, and their mean over micro-batches and data-parallel ranks."""
    model = PipelineModule(layers(), num_stages=2, seed_layers=True)
    engine = deepspeed.initialize(model=model, config=config(1))[0]
    rows = [batch(10 * (rank % 2) + number) for number in range(4)]
    every = engine.eval_batch(iter(rows), reduce_output=None)
    mean, last = engine.eval_batch(iter(rows), return_logits=True)
    assert (every is None) == (mean is None) == (last is None) == (rank < 2)
    if every is not None:
        assert len(every) == 4 and torch.equal(last, every[3])
        means = [torch.empty_like(last) for _ in range(2)]
        dist.all_gather(means, sum(every) / 4, engine.data_parallel_group)
        torch.testing.assert_close(mean, sum(means) / 2)
    engine.destroy()


def test_evaluation_without_a_loss() -> None:
    in_processes(4, evaluation)


def test_names_are_those_of_the_package() -> None:
    assert issubclass(PipelineModule, tessera.pipeline.PipelineModule) and PipelineModule is deepspeed.PipelineModule
    assert issubclass(TiedLayerSpec, tessera.pipeline.TiedLayerSpec)
    assert issubclass(LayerSpec, tessera.pipeline.LayerSpec) and issubclass(TiedLayerSpec, LayerSpec)
    tied = TiedLayerSpec("key", torch.nn.Embedding, 3, 2, tied_weight_attr=["weight"])
    assert tied.build(log=True).weight.shape == (3, 2)  # type: ignore[operator]
    assert PipelineModule(layers(), num_stages=1, partition_method="best").parts == [0, len(layers())]
    for made in (PipelineModule, tessera.pipeline.PipelineModule):
        engine: Any = deepspeed.initialize(model=made(layers(), num_stages=1, loss_fn=loss_fn), config=config())[0]
        assert type(engine) is deepspeed.runtime.pipe.engine.PipelineEngine and engine.grid.pipe_parallel_size == 1
        assert float(engine.train_batch(data(0))) > 0
        engine.destroy()
    with pytest.raises(ValueError, match="num_stages or a topology"):
        PipelineModule(layers())
    with pytest.raises(ValueError, match="num_stages is 1, the topology has 2"):
        PipelineModule(layers(), num_stages=1, topology=PipeDataParallelTopology(2, 1))


def test_topologies(monkeypatch: pytest.MonkeyPatch) -> None:
    deepspeed.init_distributed("gloo")
    grid = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=3)
    assert grid.world_size() == 12 and grid.get_dim("pipe") == 2 and grid.get_dim("none") == 0
    assert grid.get_rank(pipe=1, data=2, model=1) == 11
    assert (grid.get_coord(7).pipe, grid.get_coord(7).data, grid.get_coord(7).model) == (1, 0, 1)
    assert grid.get_axis_comm_lists("pipe")[0] == [0, 6]
    assert grid.get_rank_repr(7) == "model_01" and grid.get_rank_repr(7, [], "", "/") == "pipe01/data00/model01"
    place = PipelineParallelGrid(grid, 7)
    assert (place.pp_group, place.dp_group, place.get_slice_parallel_rank()) == ([1, 7], [7, 9, 11], 1)
    assert place.stage_to_global(0, data=2) == 5 and place.get_model_parallel_rank() == 3
    with pytest.raises(tessera.UsageError, match="pipe-parallel group is the engine's"):
        place.get_pipe_parallel_group()
    with pytest.raises(ValueError, match="12 ranks, but there are 1"):
        PipelineParallelGrid(grid)
    alone = PipelineParallelGrid()
    assert torch.distributed.get_world_size(alone.get_pipe_parallel_group()) == alone.pipe_parallel_size == 1
    assert torch.distributed.get_rank(alone.get_slice_parallel_group()) == alone.get_stage_id() == 0
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 12)
    assert [PipelineParallelGrid(rank=3).topology().get_dim(axis) for axis in ("pipe", "data")] == [6, 2]
    assert grid.get_axis_list("model", 1) == [1, 3, 5, 7, 9, 11]
    assert ProcessTopology(["a"], [2]).get_axis_comm_lists("b") == []
