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
    zero.set_leaf_module(model.blocks[0], True)
    model.embed.weight.comm_dtype = torch.float32
    model.embed.bias.requires_grad_(False)
    zero.register_external_parameter(model.embed, model.blocks[1].linear.bias)
    model.embed.register_forward_hook(_hook)


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


def _fails(of: Any) -> Any:
    if isinstance(of, torch.optim.Optimizer):
        torch.optim.lr_scheduler.LambdaLR(of, lambda _: 0.5)
    raise KeyboardInterrupt


class Unhooked(nn.Linear):
    def register_forward_hook(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("no hooks here")


def _script(model: nn.Module) -> None:
    model.head = torch.jit.script(model.head)


def _unhooked(model: nn.Module) -> None:
    model.head.__class__ = Unhooked


def _meta(model: nn.Module) -> None:
    model.gain = nn.Parameter(torch.empty(1, device="meta"))


# What is done to the model before; keys of the configuration; arguments; what is raised. The last two fail when the
# core is there already.
SCHEDULE = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_stepz": 5}}}
MODULES = {"torch_autocast": {"enabled": True, "lower_precision_safe_modules": ["no.such"]}}
FAILURES: dict[str, tuple[Any, dict[str, Any], dict[str, Any], type[BaseException], str]] = {
    "schedule": (None, SCHEDULE, {}, ValueError, "warmup_num_stepz"),
    "interrupted schedule": (None, {}, {"lr_scheduler": _fails}, KeyboardInterrupt, ""),
    "unit policy": (None, {}, {"unit_policy": _fails}, KeyboardInterrupt, ""),
    "autocast": (None, MODULES, {}, ValueError, "no.such"),
    "data": (None, {}, {"training_data": 3}, ValueError, "Dataset"),
    "core": (_meta, {}, {}, ValueError, "gain.*meta device"),
    "script": (_script, {}, {}, NotImplementedError, r"head.*torch\.jit"),
    "hook": (_unhooked, {}, {}, RuntimeError, "no hooks"),
    "states": (None, {}, {}, Exception, ""),
}


PARTITIONING = ("script", "hook")  # fail where parameters are partitioned only


@pytest.mark.parametrize(
    ("stage", "failure"), [(s, f) for s in STAGES for f in FAILURES if s == 3 or f not in PARTITIONING]
)
def test_a_construction_that_fails_leaves_everything_as_it_was(stage: int, failure: str) -> None:
    prepare, more, kwargs, kind, text = FAILURES[failure]
    late = failure in ("hook", "states")
    models = [make() for _ in range(2)]
    clients = [torch.optim.Adam(model.parameters(), lr=0.1) for model in models]
    for model, client in zip(models, clients, strict=True):
        if prepare is not None:
            prepare(model)
        if failure == "states":
            client.state[model.gain] = {
                "step": torch.tensor(1.0),
                "exp_avg": torch.ones(5),
                "exp_avg_sq": torch.ones(2),
            }
        client.add_param_group(
            {"params": [p for p in model.parameters() if p not in set(client.param_groups[0]["params"])]}
        )
        marked(model)

    def body(rank: int, group: tessera.Group) -> None:
        model, client = models[rank], clients[rank]
        before, optimizer = belongings(model), of_optimizer(client)
        values = {name: None if p.is_meta else p.detach().clone() for name, p in model.named_parameters()}
        cfg = of("leaves", stage, **({} if late else {"bf16": {"enabled": True}}), **more)
        if "torch_autocast" in more:
            del cfg["bf16"]
        with pytest.raises(kind, match=text or None):
            tessera.Engine(model, cfg, optimizer=client, group=group, **kwargs)
        assert belongings(model) == before and of_optimizer(client) == optimizer
        for name, param in model.named_parameters():
            assert values[name] is None or (param.dtype == torch.float32 and torch.equal(param, values[name]))
        if prepare is None and failure != "states":
            engine = tessera.Engine(model, config(stage), optimizer=client, group=group)
            engine(*batch(rank)).backward()
            engine.step()
            assert engine.was_step_applied()
            engine.destroy()

    run_ranks(2, body)


def of_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    groups = [{**group, "params": [id(p) for p in group["params"]]} for group in optimizer.param_groups]
    states = {id(p): {name: id(value) for name, value in state.items()} for p, state in optimizer.state.items()}
    return {
        "attributes": {name: id(value) for name, value in vars(optimizer).items()},
        "groups": groups,
        "states": states,
    }
