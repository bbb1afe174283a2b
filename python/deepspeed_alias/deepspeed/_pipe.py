"""deepspeed.pipe: tessera.pipeline with DeepSpeed's names and its engine."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from tessera.data import RepeatingLoader
from tessera.errors import ConfigError
from torch import nn

from deepspeed import _groups
from deepspeed._engine import DeepSpeedEngine
from deepspeed._topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
    ProcessTopology,
)
from tessera import _core, pipeline


def _place() -> tuple[int, int]:
    """This process's number, and how many processes there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


class LayerSpec(pipeline.LayerSpec):
    """tessera.pipeline.LayerSpec; `log` of build() is not read."""

    def build(self, log: bool = False) -> nn.Module:
        return super().build()


class TiedLayerSpec(pipeline.TiedLayerSpec, LayerSpec):
    """tessera.pipeline.TiedLayerSpec: all parameters of the module are tied, whatever `tied_weight_attr` says."""

    def __init__(self, *args: Any, tied_weight_attr: str | Sequence[str] = "weight", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tied_weight_attr = tied_weight_attr


class PipelineModule(pipeline.PipelineModule):
    """tessera.pipeline.PipelineModule; `topology`, in place of `num_stages`, is an object whose get_dim("pipe") says
    them, and a `partition_method` "best" is "parameters"."""

    def __init__(
        self,
        layers: Sequence[Any],
        num_stages: int | None = None,
        topology: Any = None,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], object] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        *args: Any,
        dynamic_shape: bool = False,
        **kwargs: Any,
    ) -> None:
        if topology is not None:
            pipe = int(topology.get_dim("pipe"))
            if num_stages not in (None, pipe):
                raise ConfigError(f"[PipelineModule] num_stages is {num_stages}, the topology has {pipe}")
            num_stages = pipe
        if num_stages is None:
            raise ConfigError("[PipelineModule] pass num_stages or a topology")
        method = "parameters" if partition_method.lower() == "best" else partition_method
        super().__init__(layers, num_stages, loss_fn, seed_layers, seed_fn, base_seed, method, *args, **kwargs)
        self._rank, ranks = _place()
        self._topology = topology or PipeDataParallelTopology(num_stages, ranks // num_stages)

    def topology(self) -> ProcessTopology:
        """The one that it was made with, else of `num_stages` stages."""
        return self._topology

    def mpu(self) -> PipelineParallelGrid:
        """This rank's place; the groups are those of engine.grid."""
        return PipelineParallelGrid(self._topology, self._rank)

    def num_pipeline_stages(self) -> int:
        return self.num_stages

    @property
    def parts(self) -> list[int]:
        """First layers of the parts of the model, and the number of layers."""
        return self.bounds

    def partitions(self) -> list[int]:
        return self.bounds

    def stage_owner(self, layer_idx: int) -> int:
        if not 0 <= layer_idx < self.bounds[-1]:
            raise ConfigError(f"[PipelineModule] there is no layer {layer_idx}; the list has {self.bounds[-1]}")
        return (bisect.bisect_right(self.bounds, layer_idx) - 1) % self.num_stages

    @property
    def forward_funcs(self) -> list[Callable[[Any], Any]]:
        """The layers of this stage as they are called."""
        return [self.function_of(number) for chunk in range(self.num_chunks) for number in self.layers_of(chunk)]

    def set_checkpoint_interval(self, interval: int) -> None:
        if interval < 0:
            raise ConfigError(f"[PipelineModule] activation_checkpoint_interval must be >= 0, got {interval}")
        self.activation_checkpoint_interval = interval


class PipelineEngine(DeepSpeedEngine):
    """The engine that deepspeed.initialize makes of a PipelineModule."""

    _made_of = pipeline.PipelineEngine
    _engine: pipeline.PipelineEngine

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.data_iterator: Iterator[Any] | None = None
        self.batch_fn: Callable[[Any], Any] | None = None
        self.agg_train_loss: torch.Tensor | None = None
        self.has_attention_mask = False
        self.grid = self._grid_of_ranks()

    def _grid_of_ranks(self) -> PipelineParallelGrid:
        """The grid with the sizes that the engine has, whatever the topology of its module says."""
        pipe, model = self.num_stages, self.mp_world_size
        rank, ranks = _place()
        data = ranks // pipe // model
        module = self.module
        topology = module.topology() if isinstance(module, PipelineModule) else PipeDataParallelTopology(pipe, data)
        if [max(1, topology.get_dim(axis)) for axis in ("pipe", "data", "model")] != [pipe, data, model]:
            topology = PipeDataParallelTopology(pipe, data)
            if model > 1:
                topology = PipeModelDataParallelTopology(pipe, model, data)
        grid = PipelineParallelGrid(topology, rank)
        grid.groups = {
            "pipe": lambda: self._engine.pipe_group() or _groups._alone(),
            "data": lambda: self.data_parallel_group,
            "model": lambda: _groups.group_of(self, _core.Axis.Tp, "get_tensor_model_parallel_group", None),
        }
        return grid

    @property
    def mpu(self) -> PipelineParallelGrid:
        return self.grid

    @property
    def is_pipe_parallel(self) -> bool:
        return self.grid.pipe_parallel_size > 1

    @property
    def is_data_parallel(self) -> bool:
        return self.grid.data_parallel_size > 1

    @property
    def is_model_parallel(self) -> bool:
        return self.grid.model_parallel_size > 1

    def get_pipeline_parallel_rank(self) -> int:
        return self.stage_id

    # ---- data

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """Sets the loader that train_batch() reads without an iterator, to its end."""
        if self.is_first_stage() or self.is_last_stage():
            self.training_dataloader: Any = loader
            self.data_iterator = iter(loader)

    def set_dataiterator(self, iterator: Iterator[Any] | None) -> None:
        if self.is_first_stage() or self.is_last_stage():
            self.data_iterator = iterator

    def set_batch_fn(self, fn: Callable[[Any], Any] | None) -> None:
        """Sets the function that makes a pair (inputs, labels) of what the iterator yields."""
        self.batch_fn = fn

    def _batches(self, iterator: Iterator[Any] | None) -> Iterator[Any] | None:
        return iterator if iterator is None or self.batch_fn is None else map(self.batch_fn, iterator)

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """Trains as tessera's engine does; an iterator is kept for the next calls without one."""
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        if self.data_iterator is None and self.batch_fn is not None and self.training_dataloader is not None:
            self.set_dataiterator(iter(RepeatingLoader(self.training_dataloader)))
        self.agg_train_loss = self._engine.train_batch(self._batches(self.data_iterator))
        return self.agg_train_loss

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Returns the mean loss of what set_batch_fn()'s function makes of the micro-batches; where none is computed
        (`compute_loss`, or no loss_fn and no loss from the last layer) the mean of the outputs, on the last stage, and
        with `reduce_output` None all of them. `return_logits`: the last micro-batch's logits, too. The loss is on all
        ranks, whatever `bcast_loss` says."""
        evaluate: Callable[..., Any] = self._engine.eval_batch
        found = evaluate(
            self._batches(data_iter),
            compute_loss,
            compute_loss,
            reduce_output,
            num_micro_batches,
        )
        loss, outputs = found if compute_loss else (None, found)
        if loss is None and outputs is not None:
            loss = outputs if reduce_output is None else self._mean_of(outputs)
        return (loss, outputs[-1] if outputs is not None else None) if return_logits else loss

    def _mean_of(self, outputs: list[Any]) -> Any:
        """The mean over micro-batches and data-parallel ranks; of several tensors one by one."""
        if not isinstance(outputs[0], torch.Tensor):
            return [self._mean_of(list(each)) for each in zip(*outputs, strict=True)]
        mean = torch.stack(outputs).mean(0)
        if self.is_data_parallel:
            dist.all_reduce(mean, group=self.data_parallel_group)
            mean /= self.grid.data_parallel_size
        return mean

    # ---- what needs nothing done

    def reset_activation_shape(self) -> None:
        """Shapes may change with every micro-batch."""

    def set_has_attention_mask(self, value: bool) -> None:
        """Masks go from stage to stage as any tensors do."""
        if not isinstance(value, bool):
            raise ConfigError(f"[engine.set_has_attention_mask] takes a bool, got {value!r}")
        self.has_attention_mask = value
