"""Layers that a program cuts itself, one by one, and whole values of cut parameters for a while."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from tessera import _core, _mesh
from tessera.errors import ConfigError, UsageError
from tessera.parallel import _modules
from tessera.parallel._apply import cuts_of, is_uneven, ranks_of
from tessera.parallel._cuts import ParamCut
from tessera.parallel._draws import Draws, has_draws
from tessera.parallel._modules import CUT, ModuleCut, Ranks, class_for, cut_of, takes_linear_forward, widths_of

_HAND = "by hand"  # ModuleCut.rule of modules that are cut by hand


def column_linear(
    module: nn.Module, group: _mesh.OneGroup | None, *, gather: bool = False, kv_heads: int = 0, name: str = ""
) -> nn.Module:
    """Makes `module`, a linear layer, a ColumnLinear that keeps this rank's outputs; with `gather` its forward
    returns all of them. `group`: the ranks that share it, as in tessera.parallel.shard_model(). Outputs are dealt
    out evenly, by whole heads where `kv_heads` and the layer's `name` say so. Collective: the first rank's values."""
    cut = _cut(module, group, 0, kv_heads, name)
    cut.kind, cut.gather = "column", gather
    bias = module._parameters.get("bias")
    if bias is not None:
        cut.params["bias"] = ParamCut((bias.numel(),), 0, cut.params["weight"].ranges)
    return _become(module, _modules._Column, cut)


def row_linear(module: nn.Module, group: _mesh.OneGroup | None, *, kv_heads: int = 0, name: str = "") -> nn.Module:
    """Makes `module` a RowLinear that keeps this rank's inputs; arguments are those of column_linear(). Its forward
    returns the sum over the ranks, to which the bias is added once."""
    cut = _cut(module, group, 1, kv_heads, name)
    cut.kind = "row"
    return _become(module, _modules._Row, cut)


def _cut(module: nn.Module, group: Any, dim: int, kv_heads: int, name: str) -> ModuleCut:
    if isinstance(module, nn.Module) and cut_of(module) is not None:
        raise ConfigError("[parallel] the layer is cut already")
    if not isinstance(module, nn.Module) or not takes_linear_forward(module):
        raise ConfigError(f"[parallel] {type(module).__name__}: only linear layers are cut by hand")
    transposed = type(module).__name__ == "Conv1D"
    weight, dim = module._parameters["weight"], 1 - dim if transposed else dim
    assert weight is not None
    ranks = _mesh.core_group(group)
    total = weight.size(dim)
    sizes = _core.part_sizes(total, ranks.size, _core.heads_for(name, total, kv_heads) if kv_heads > 0 else 0)
    ends = [sum(sizes[: rank + 1]) for rank in range(ranks.size)]
    ranges = tuple(((end - size, end),) for size, end in zip(sizes, ends, strict=True))
    own = Ranks(ranks, ranks.rank, ranks.size, True, Draws())
    own.draws.on = False  # draws need an engine's forwards: Note [Random draws]
    cut = ModuleCut(name, "", own, {"weight": ParamCut(tuple(weight.shape), dim, ranges)}, _HAND)
    cut.transposed = transposed
    return cut


def _become(module: nn.Module, mixin: type[_modules._CutModule], cut: ModuleCut) -> nn.Module:
    ranks = cut.ranks
    for name, of in cut.params.items():
        param = module._parameters[name]
        assert param is not None
        with torch.no_grad():
            whole = param.detach().contiguous()
            if not whole.is_meta:
                ranks.group.broadcast(whole, 0, f"value of '{cut.path}.{name}' before it is cut")
            param.data = of.take(whole, ranks.rank)
        param.grad = None
        vars(param)["tensor_model_parallel"] = True
    module.__class__ = class_for(mixin, type(module), {})
    vars(module)[CUT] = cut
    for name, dim in widths_of(module).items():
        if dim == cut.params["weight"].dim:
            setattr(module, name, cut.params["weight"].length(ranks.rank))
    return module


def bind_hand(model: nn.Module, group: _core.Group) -> Ranks | None:
    """The ranks that all layers share which were cut by hand; None where there are none. Out of a pickle they get
    `group`, copies of their parameters the mark. ConfigError where they do not fit."""
    found = None
    for path, cut in _cut_by_hand(model):
        if (cut.ranks.rank, cut.ranks.size) != (group.rank, group.size):
            raise ConfigError(
                f"[tensor_parallel] {path} was cut by hand, as rank {cut.ranks.rank} of {cut.ranks.size}; the engine "
                f"has rank {group.rank} of {group.size} along 'tp': set tensor_parallel.autotp_size, or pass the mesh "
                "that it was cut for"
            )
        for name in cut.params:
            vars(model.get_submodule(path)._parameters[name])["tensor_model_parallel"] = True
        found = found or cut.ranks
    if found is not None:
        if found.is_free:
            found.bind(group)
        share(model, found)
    return found


def share(model: nn.Module, ranks: Ranks) -> None:
    """Gives all layers that were cut by hand these ranks; the layers draw as an engine's do."""
    for _, cut in _cut_by_hand(model):
        cut.ranks = ranks
    ranks.draws = Draws(has_draws(model))
    ranks.draws.uneven = is_uneven(model)


def _cut_by_hand(model: nn.Module) -> list[tuple[str, ModuleCut]]:
    found = [(path, cut) for path, module in model.named_modules() if (cut := cut_of(module)) is not None]
    return [(path, cut) for path, cut in found if cut.rule == _HAND]


def has_rules(config: _core.Config) -> bool:
    """The configuration says what else is cut of a model with such layers; beside them nothing is guessed."""
    section = config.tensor_parallel
    return section.partition_config is not None or section.preset_model is not None


class WholeSlices:
    """Makes parameters of `model` that are slices of a tensor-parallel group whole on every rank of it, inside; others
    are left as they are. Values written to these there are this rank's slice afterwards. Collective over that group.
    Parameters that stage 3 partitions are gathered by zero.GatheredParameters around this."""

    def __init__(self, params: torch.Tensor | Iterable[torch.Tensor], model: nn.Module) -> None:
        given = [params] if isinstance(params, torch.Tensor) else list(params)
        cuts = cuts_of(model)
        self._cuts = [(param, cuts[id(param)]) for param in given if id(param) in cuts]
        self._ranks = ranks_of(model) if self._cuts else None
        self._slices: list[torch.Tensor] = []  # while parameters are whole

    def __enter__(self) -> None:
        if self._slices:
            raise UsageError("[WholeSlices] entered twice")
        if self._ranks is None:
            return
        group = self._ranks.group
        with torch.no_grad():
            wholes = [cut.gather(param.detach(), group, "whole value of a cut parameter") for param, cut in self._cuts]
            self._slices = [param.data for param, _ in self._cuts]
            for (param, _), whole in zip(self._cuts, wholes, strict=True):
                param.data = whole

    def __exit__(self, *error: Any) -> None:
        slices, self._slices = self._slices, []
        with torch.no_grad():
            for (param, cut), mine in zip(self._cuts, slices, strict=True):
                assert self._ranks is not None
                written = cut.take(param.detach(), self._ranks.rank)
                param.data = mine
                if not torch.equal(written, mine):
                    param.copy_(written)
