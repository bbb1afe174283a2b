"""Loss curves on real text over meshes, stages and precisions: one rank's, within what the dtype gives."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import assert_close, config, engines, full_grads
from torch import nn

import tessera

sys.path.insert(0, str(Path(__file__).parents[1] / "sequence"))
from readme_text import BATCH, llama, plain_loss, text_batch
from test_transformers import register, shared_loss

STEPS = 8
# Of fp32 the order of sums; of bf16 a rounding of 2^-8 in activations that other cuts add up in another order.
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
REGIONS = {"tessera": {"sequence_parallel_norms": True}}


def settings(tp: int, sp: int, stage: int, precision: str, **more: Any) -> dict[str, Any]:
    cfg = config(
        stage, bf16=precision == "bf16", train_micro_batch_size_per_gpu=BATCH, sequence_parallel_size=sp, **more
    )
    cfg["optimizer"] = {"type": "AdamW", "params": {"lr": 3e-3}}
    cfg["gradient_clipping"] = 1.0
    cfg["tensor_parallel"] = {"autotp_size": tp}
    return cfg


def curve(
    model: nn.Module, tp: int, sp: int, dp: int, cfg: dict[str, Any], batches: list[list[Any]], replicas: int = 1
) -> list[float]:
    def body(engine: tessera.Engine, rank: int) -> list[float]:
        groups = register(engine.module, engine.core.mesh()) if sp > 1 else None
        data = rank // (tp * sp)
        losses = []
        for parts in batches:
            loss = plain_loss(engine, parts[data]) if groups is None else shared_loss(engine, parts[data], groups)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses

    ranks = engines(model, {"dp": dp, "sp": sp, "tp": tp, "replicas": replicas}, cfg, body)
    return [sum(step) / len(step) for step in zip(*ranks, strict=True)]


def one_rank(model: nn.Module, dp: int, batches: list[list[Any]]) -> list[float]:
    """Plain PyTorch in fp32, the ranks' batches one after the other."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for parts in batches:
        optimizer.zero_grad()
        loss = torch.stack([plain_loss(model, part) for part in parts]).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


# Each mesh in every stage, each stage and each mesh in both precisions, tp beside sp with and without regions.
GRID = [
    (tp, sp, dp, stage, ("fp32", "bf16")[(stage + number) % 2])
    for number, (tp, sp, dp) in enumerate([(2, 1, 1), (1, 2, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2)])
    for stage in range(4)
]


@pytest.mark.parametrize(("tp", "sp", "dp", "stage", "precision"), GRID)
def test_curves_are_those_of_one_rank(tp: int, sp: int, dp: int, stage: int, precision: str) -> None:
    model = llama(4, 4)
    batches = [[text_batch(step * dp + rank) for rank in range(dp)] for step in range(STEPS)]
    want = one_rank(copy.deepcopy(model), dp, batches)
    assert want[-1] < want[0] - 0.5
    more = REGIONS if tp > 1 and stage in (1, 3) else {}
    got = curve(model, tp, sp, dp, settings(tp, sp, stage, precision, **more), batches)
    torch.testing.assert_close(got, want, rtol=TOLERANCE[precision], atol=0)


def meshes_of(world: int) -> list[tuple[int, int, int, int]]:
    """Sizes of tp, sp, dp and of the replicas among dp, all that there are."""
    return [
        (tp, sp, world // (tp * sp), replicas)
        for tp in range(1, world + 1)
        for sp in range(1, world // tp + 1)
        if world % (tp * sp) == 0
        for replicas in range(1, world // (tp * sp) + 1)
        if world // (tp * sp) % replicas == 0
    ]


@pytest.mark.parametrize(
    ("number", "mesh"), [*enumerate([*meshes_of(4), *meshes_of(8)])], ids=lambda value: str(value).replace(" ", "")
)
def test_every_mesh_of_4_and_8_ranks(number: int, mesh: tuple[int, int, int, int]) -> None:
    """The stage changes from one to the next. Gradients are clipped, so that norms count as well."""
    tp, sp, dp, replicas = mesh
    model = llama(8, 8)
    batches = [[text_batch(step * dp + rank) for rank in range(dp)] for step in range(3)]
    want = one_rank(copy.deepcopy(model), dp, batches)
    got = curve(model, tp, sp, dp, settings(tp, sp, number % 4, "fp32"), batches, replicas)
    torch.testing.assert_close(got, want, rtol=TOLERANCE["fp32"], atol=0)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("more", [{}, REGIONS])
def test_gradients_of_tp_2_beside_sp_2(more: dict[str, Any], stage: int) -> None:
    model, batch = llama(4, 4), text_batch(0)
    whole = copy.deepcopy(model)
    plain_loss(whole, batch).backward()
    want = {name: param.grad for name, param in whole.named_parameters()}

    def body(engine: tessera.Engine, rank: int) -> None:
        engine.backward(shared_loss(engine, batch, register(engine.module, engine.core.mesh())))
        assert_close(full_grads(engine), want)

    engines(model, {"sp": 2, "tp": 2}, settings(2, 2, stage, "fp32", **more), body)
