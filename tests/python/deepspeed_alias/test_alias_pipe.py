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
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology
from stages import config, data, in_processes, layers, loss_fn
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


def test_names_are_those_of_the_package() -> None:
    assert PipelineModule is tessera.pipeline.PipelineModule is deepspeed.PipelineModule
    assert TiedLayerSpec is tessera.pipeline.TiedLayerSpec
    model = PipelineModule(layers(), num_stages=1, loss_fn=loss_fn)
    engine: Any = deepspeed.initialize(model=model, config=config())[0]
    assert type(engine) is deepspeed.runtime.pipe.engine.PipelineEngine
    assert float(engine.train_batch(data(0))) > 0


def test_topologies() -> None:
    grid = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=3)
    assert grid.world_size() == 12 and grid.get_dim("pipe") == 2 and grid.get_dim("none") == 0
    assert grid.get_rank(pipe=1, data=2, model=1) == 11
    assert (grid.get_coord(7).pipe, grid.get_coord(7).data, grid.get_coord(7).model) == (1, 0, 1)
    assert grid.get_axis_comm_lists("pipe")[0] == [0, 6]
    assert grid.get_axis_list("model", 1) == [1, 3, 5, 7, 9, 11]
    assert ProcessTopology(["a"], [2]).get_axis_comm_lists("b") == []
