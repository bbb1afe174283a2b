"""A module that an engine had, or never got, is its owner's again: nothing of ours stays on it or its parameters."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from support import assert_close, batch, config, make, run_ranks
from torch import nn

import tessera
from tessera import zero

STAGES = [0, 1, 2, 3]


def belongings(model: nn.Module) -> dict[str, Any]:
    """What is on the modules and parameters of a model; values go by identity."""
    seen: dict[str, Any] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            inside = [(key, id(item)) for key, item in value.items()] if isinstance(value, dict) else []
            seen[f"{path}: {name}"] = (type(value), id(value), inside)
    for name, param in model.named_parameters():
        told = (type(param), param.shape, param.stride(), param.requires_grad, param.grad_fn, param._backward_hooks)
        seen[name] = (*told, dict(vars(param)), param.untyped_storage().nbytes() == param.nbytes)
    return seen


def plain(model: nn.Module) -> None:
    """Copies, pickles and trains without a word of us."""
    for data in (pickle.dumps(model), _saved(model)):
        assert b"tessera." not in data
    for other in (copy.deepcopy(model), torch.load(io.BytesIO(_saved(model)), weights_only=False), model):
        other.zero_grad()
        loss = other(batch(0)[0].to(other.gain.dtype)).float().sum()
        loss.backward()
        assert all(p.grad is not None for p in other.parameters() if p.requires_grad)
    model.zero_grad()


def _saved(model: nn.Module) -> bytes:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    return buffer.getvalue()


def marked(model: nn.Module) -> None:
    """A user's own marks and hooks, which stay."""
    zero.set_z3_leaf_module(model.blocks[0], True)
    model.head.weight.comm_dtype = torch.float32
    model.head.bias.requires_grad_(False)
    zero.register_external_parameter(model.head, model.gain)
    model.head.register_forward_hook(_hook)


def _hook(_module: nn.Module, _args: Any, _output: Any) -> None:
    pass


CONFIGS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "leaves": {"leaf": True},
}


def of(kind: str, stage: int, **more: Any) -> dict[str, Any]:
    section = dict(CONFIGS[kind])
    leaf = section.pop("leaf", False)
    cfg = config(stage, **section, **more)
    if leaf and stage == 3:
        cfg["zero_optimization"] |= {"leaf_module": {"names": ["head"]}, "stage3_module_granularity_threshold": 10**6}
    return cfg


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("own_marks", [False, True])
def test_destroy_leaves_nothing(stage: int, kind: str, own_marks: bool) -> None:
    models = [make() for _ in range(2)]
    for model in models:
        if own_marks:
            marked(model)
    before = [belongings(model) for model in models]

    def body(rank: int, group: tessera.Group) -> None:
        model = models[rank]
        engine = tessera.Engine(model, of(kind, stage), group=group)
        engine(*batch(rank)).backward()
        engine.step()
        with zero.GatheredParameters(model.parameters()):  # stage 3: what is whole stays so
            values = {name: p.detach().clone() for name, p in model.named_parameters()}
            engine.destroy()
        assert_close(dict(model.named_parameters()), values)
        model.zero_grad()
        assert belongings(model) == before[rank]

    run_ranks(2, body)
    plain(models[0])
