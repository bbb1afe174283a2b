"""A model as a list of layers, of which each stage builds its own."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tessera import _core
from tessera._former import renamed, takes_former, warn
from tessera.errors import ConfigError

LayerFunction = Callable[[Any], Any]


class LayerSpec:
    """A layer that is not built yet: `typename(*module_args, **module_kwargs)`, on the stage that has it."""

    def __init__(self, typename: Callable[..., nn.Module], *module_args: object, **module_kwargs: object) -> None:
        if not callable(typename):
            raise ConfigError(f"[LayerSpec] takes a class of modules and its arguments, got {typename!r}")
        self.typename = typename
        self.module_args = module_args
        self.module_kwargs = module_kwargs

    @property
    def name(self) -> str:
        """The name of its class or function."""
        return getattr(self.typename, "__name__", type(self.typename).__name__)

    @takes_former(renamed("LayerSpec.build", log=None))
    def build(self) -> nn.Module:
        """Makes the layer."""
        return self.typename(*self.module_args, **self.module_kwargs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name})"


class TiedLayerSpec(LayerSpec):
    """A layer in several places of the list, which `key` names: one module with one set of weights.

    `forward_fn(module, x)` is what it does in this place (default: module(x)). Stages that have it hold a copy each;
    their gradients are summed before a step, so that the copies stay equal. All parameters of the module are tied.
    """

    def __init__(
        self,
        key: str,
        typename: Callable[..., nn.Module],
        *module_args: object,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        **module_kwargs: object,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key = key
        self.forward_fn = forward_fn


Layer = LayerSpec | nn.Module | LayerFunction


class PipelineModule(nn.Module):
    """The layers of one stage; tessera.initialize() makes a PipelineEngine of it.

    `layers`: of the whole model, in their order: LayerSpec, TiedLayerSpec, modules, and functions without parameters.
    Each takes what the one before it returned, as one argument: a tensor, or tuples, lists and dicts of tensors.
    `num_stages`: ranks are `num_stages` runs of neighbours, one run a stage. `num_chunks`: parts of the model on each
    stage, for the interleaved schedule.
    `loss_fn(outputs, labels)`: the loss on the last stage; without it the last layer returns the loss.
    `partition_method`: "uniform", "parameters" or "type:REGEX" of class names.
    `activation_checkpoint_interval`: layers between two saved activations; layers between are computed again in the
    backward; 0 saves all. `checkpointable_layers`: class names that may be; default: those with trained parameters.
    `seed_layers`: layer i is built after torch.manual_seed(base_seed + i) (`seed_fn` for another generator): the same
    weights for any number of stages.

    Parameters have the names that they have in the list: "layers.3.weight" is of layer 3 on whatever stage it is, a
    tied module's are "tied_modules.KEY.weight". Called, it runs the layers of one chunk of this stage.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        num_stages: int,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], object] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] | None = None,
        checkpointable_layers: Sequence[str] | None = None,
        *,
        num_chunks: int = 1,
    ) -> None:
        super().__init__()
        if num_stages > 1 and not (dist.is_available() and dist.is_initialized()):
            raise ConfigError(
                f"[PipelineModule] {num_stages} stages need the ranks, which have no process group yet: start them and "
                "call tessera.init_distributed() before"
            )
        _core.check_stages(_world(), num_stages)
        self.num_stages = num_stages
        self.num_chunks = num_chunks
        self.stage_id = _rank() // (_world() // self.num_stages)
        self.loss_fn = loss_fn
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.checkpointable_layers = checkpointable_layers
        self._checkpoint = activation_checkpoint_func or _checkpoint
        self._seed_layers, self._base_seed = seed_layers, base_seed
        self._seed_fn = seed_fn or torch.manual_seed
        self._list = list(layers)
        _core.check_chunks(num_chunks, num_stages)
        self._check()
        self.bounds = self._bounds(partition_method)
        self.layers = nn.ModuleDict()
        self.tied_modules = nn.ModuleDict()
        for chunk in range(num_chunks):
            for number in self.layers_of(chunk):
                self._build(number)

    # ---------------------------------------------------------------- what is where

    def layers_of(self, chunk: int, stage: int | None = None) -> range:
        """The numbers of the layers of a chunk, of this stage or another."""
        part = chunk * self.num_stages + (self.stage_id if stage is None else stage)
        return range(self.bounds[part], self.bounds[part + 1])

    def tied_stages(self) -> dict[str, list[int]]:
        """The stages that have a copy of a tied module, in ascending order, by key."""
        found: dict[str, set[int]] = {}
        for stage in range(self.num_stages):
            for chunk in range(self.num_chunks):
                for number in self.layers_of(chunk, stage):
                    layer = self._list[number]
                    if isinstance(layer, TiedLayerSpec):
                        found.setdefault(layer.key, set()).add(stage)
        return {key: sorted(stages) for key, stages in sorted(found.items())}

    def describe(self) -> str:
        """Which stage has which layers, a line each."""
        lines = []
        for chunk in range(self.num_chunks):
            for stage in range(self.num_stages):
                names = [f"{number}: {_class_name(self._list[number])}" for number in self.layers_of(chunk, stage)]
                lines.append(f"stage {stage}{f' chunk {chunk}' if self.num_chunks > 1 else ''}: {', '.join(names)}")
        return "\n".join(lines)

    # ---------------------------------------------------------------- forward

    def forward(self, inputs: Any, chunk: int = 0) -> Any:
        numbers = self.layers_of(chunk)
        interval = self.activation_checkpoint_interval
        if interval <= 0 or not torch.is_grad_enabled():
            return self._run(numbers, inputs)
        for begin in range(numbers.start, numbers.stop, interval):
            some = range(begin, min(begin + interval, numbers.stop))
            if self._saves_only_inputs(some):
                inputs = self._checkpoint(functools.partial(self._run, some), inputs)
            else:
                inputs = self._run(some, inputs)
        return inputs

    def _run(self, numbers: range, inputs: Any) -> Any:
        for number in numbers:
            inputs = self.function_of(number)(inputs)
        return inputs

    def function_of(self, number: int) -> LayerFunction:
        """The function of a layer of this stage; modules as they are now, whoever has put others in their place."""
        layer = self._list[number]
        if isinstance(layer, TiedLayerSpec):
            module = self.tied_modules[layer.key]
            return module if layer.forward_fn is None else functools.partial(layer.forward_fn, module)
        return self.layers[str(number)] if isinstance(layer, (LayerSpec, nn.Module)) else layer

    def _saves_only_inputs(self, numbers: range) -> bool:
        if self.checkpointable_layers is not None:
            return all(_class_name(self._list[number]) in self.checkpointable_layers for number in numbers)
        modules = [self.layers[str(number)] for number in numbers if str(number) in self.layers]
        return any(param.requires_grad for module in modules for param in module.parameters())

    # ---------------------------------------------------------------- construction

    def _build(self, number: int) -> None:
        layer = self._list[number]
        if isinstance(layer, TiedLayerSpec):
            if layer.key not in self.tied_modules:
                self._seed(number)
                self.tied_modules[layer.key] = layer.build()
        elif isinstance(layer, LayerSpec):
            self._seed(number)
            self.layers[str(number)] = layer.build()
        elif isinstance(layer, nn.Module):
            self.layers[str(number)] = layer

    def _seed(self, number: int) -> None:
        """A tied layer has the seed of its first place, so that it is the same on all stages."""
        key = _key(self._list[number])
        if key is not None:
            number = next(place for place, other in enumerate(self._list) if _key(other) == key)
        if self._seed_layers:
            self._seed_fn(self._base_seed + number)

    def _check(self) -> None:
        for number, layer in enumerate(self._list):
            if not (isinstance(layer, (LayerSpec, nn.Module)) or callable(layer)):
                raise ConfigError(
                    f"[PipelineModule] layer {number} is {layer!r}; take LayerSpec, TiedLayerSpec, modules or functions"
                )
        _core.check_listed_once(
            [layer if isinstance(layer, nn.Module) else None for layer in self._list],
            lambda number: _class_name(self._list[number]),
            "use TiedLayerSpec with one key in each place",
        )

    def _bounds(self, method: str) -> list[int]:
        layers = self._list
        if method.lower() == "best":
            warn("partition_method='best'", "'parameters'", level=3)
            method = "parameters"
        return _core.partition_bounds(
            method,
            self.num_stages * self.num_chunks,
            len(layers),
            lambda number: _count(layers[number]),
            lambda number: _class_name(layers[number]),
            _matcher,
        )


def units_of_layers(model: nn.Module) -> dict[str, str]:
    """A unit for each layer and each tied module (tessera.units)."""
    return {name: ".".join(name.split(".")[:2]) for name, _ in model.named_parameters(remove_duplicate=False)}


def _key(layer: Layer) -> str | None:
    return layer.key if isinstance(layer, TiedLayerSpec) else None


def _class_name(layer: Layer) -> str:
    if isinstance(layer, LayerSpec):
        return layer.name
    return getattr(layer, "__name__", type(layer).__name__)


def _count(layer: Layer) -> int:
    """Trained elements; of a layer that is not built without allocating any."""
    if isinstance(layer, LayerSpec):
        state = torch.get_rng_state()
        with torch.device("meta"):
            layer = layer.build()
        torch.set_rng_state(state)
    if not isinstance(layer, nn.Module):
        return 0
    return sum(param.numel() for param in layer.parameters() if param.requires_grad)


def _matcher(pattern: str) -> Callable[[str], bool]:
    expression = re.compile(pattern, re.IGNORECASE)
    return lambda name: expression.search(name) is not None


def _checkpoint(function: LayerFunction, inputs: Any) -> Any:
    return checkpoint(function, inputs, use_reentrant=False)


def _world() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
