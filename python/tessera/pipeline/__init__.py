"""Pipelines over engines: a model as a list of layers, stages that are engines, schedules that are tables.

model = tessera.pipeline.PipelineModule(layers, num_stages=2, loss_fn=loss_fn)
engine, *_ = tessera.initialize(model=model, config=config)
loss = engine.train_batch(data_iter)
"""

from __future__ import annotations

from tessera.errors import StageFailed
from tessera.pipeline._engine import PipelineEngine
from tessera.pipeline._module import LayerSpec, PipelineModule, TiedLayerSpec

__all__ = ["LayerSpec", "PipelineEngine", "PipelineModule", "StageFailed", "TiedLayerSpec"]
