"""Operations, parameters and times of modules."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import Net, make
from tessera.flops import FlopsProfiler, get_model_profile, number_text
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

LINEAR = 2 * 4 * (5 * 7 + 2 * 7 * 7 + 7 * 3)


def profiled(model: nn.Module, **options: Any) -> FlopsProfiler:
    profiler = FlopsProfiler(model, **options)
    profiler.start_profile()
    model(torch.ones(4, 5))
    profiler.stop_profile()
    return profiler


def test_modules_add_up() -> None:
    model = make()
    profiler = profiled(model)
    found = {m.name: m for m in profiler.modules()}
    assert found[""].flops == LINEAR == sum(m.flops for m in found.values() if m.kind == "Linear")
    assert found["blocks.0"].flops == found["blocks.0.linear"].flops == 2 * 4 * 7 * 7
    assert found["head"].params == 7 * 3 + 3 and found["blocks.0.linear"].depth == 3
    assert found[""].seconds >= found["embed"].seconds > 0
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_several_forwards_and_recomputation() -> None:
    model = make()
    profiler = FlopsProfiler(model, recompute_fwd_factor=0.5)
    profiler.start_profile()
    profiler.start_profile()
    for _ in range(2):
        model(torch.ones(4, 5))
    profiler.end_profile()
    assert profiler.get_total_flops() == 3 * LINEAR
    profiler.reset_profile()
    assert profiler.get_total_flops() == 0


def test_the_report() -> None:
    text = profiled(make()).report(profile_step=7, top_modules=1, module_depth=2, detailed=True)
    assert "flops profile of step 7: Net" in text
    assert "depth 1: blocks (ModuleList)" in text or "depth 1: embed" in text
    assert "blocks.0 (Block)" in text and "blocks.0.linear" not in text
    assert "modules:" not in profiled(make()).report(detailed=False)


def test_a_model_without_an_engine(capsys: pytest.CaptureFixture[str]) -> None:
    flops, macs, params = get_model_profile(make(Net), input_shape=(4, 5), as_string=False)
    assert (flops, macs, params) == (LINEAR, LINEAR // 2, sum(p.numel() for p in make(Net).parameters()))
    assert "flops profile" in capsys.readouterr().out
    texts = get_model_profile(make(Net), args=[torch.ones(4, 5)], print_profile=False)
    assert texts == ("1.23 KFLOPs", "616 MACs", str(params)) and capsys.readouterr().out == ""
    ignored = FlopsProfiler(make(Net))
    ignored.start_profile([nn.ModuleList])
    ignored.stop_profile()
    assert "blocks.0.linear" not in {m.name for m in ignored.modules()}


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="mode must be"):
        get_model_profile(make(Net), input_shape=(4, 5), mode="backward")
    with pytest.raises(ValueError, match="give input_shape"):
        get_model_profile(make(Net))


def test_numbers() -> None:
    assert [number_text(v, "F") for v in (0, 999, 1e3, 2.5e9, 3e12)] == [
        "0 F",
        "999 F",
        "1.00 KF",
        "2.50 GF",
        "3.00 TF",
    ]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = Attention()
        self.mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.attend(x)
        return y + self.mlp(y)


class Head(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = Head(self.tokens.weight)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_the_table_is_that_of_cpp() -> None:
    """tests/nn/flops_profiler_test.cpp has the same of the same model."""
    model = Gpt()
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(torch.arange(15).remainder(11).view(3, 5))
    profiler.stop_profile()
    text = re.sub(", [0-9.]+ ms", "", profiler.report(module_depth=2, top_modules=2))
    assert (
        text
        == """flops profile of step 1: Gpt
  parameters 1.77 K, forward 26.76 KMACs, 53.52 KFLOPs
  with backward 160.56 KFLOPs
  depth 1: blocks (ModuleList): 1.68 Kparams, 50.88 KFLOPs (95%), head (Head): 88 params, 2.64 KFLOPs (5%)
  depth 2: blocks.0 (Block): 840 params, 25.44 KFLOPs (48%), blocks.1 (Block): 840 params, 25.44 KFLOPs (48%)
  modules:
    model (Gpt): 1.77 Kparams, 53.52 KFLOPs (100%)
      tokens (Embedding): 88 params, 0 FLOPs (0%)
      blocks (ModuleList): 1.68 Kparams, 50.88 KFLOPs (95%)
        blocks.0 (Block): 840 params, 25.44 KFLOPs (48%)
        blocks.1 (Block): 840 params, 25.44 KFLOPs (48%)
      head (Head): 88 params, 2.64 KFLOPs (5%)"""
    )
    assert [m.name for m in profiler.modules() if not m.timed] == ["blocks"]


class Several(nn.Module):
    """Its parts in turn."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, *x: torch.Tensor) -> torch.Tensor:
        return torch.stack([part(*x).float().sum() for part in self.parts]).sum()


class Call(nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor], *shape: int) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(shape))

    def forward(self, *x: torch.Tensor) -> torch.Tensor:
        return self.function(*x, self.weight)


class First(nn.Module):
    """Of the results of a part that takes the input several times."""

    def __init__(self, part: nn.Module, times: int) -> None:
        super().__init__()
        self.part, self.times = part, times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(*[x] * self.times)[0]


class Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, depth: int = 3) -> torch.Tensor:
        return self.linear(x) if depth == 0 else self(self.linear(x), depth - 1)


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[1].weight = model[0].weight
    return nn.Sequential(model, model[0])


def attends(q: torch.Tensor, **options: Any) -> torch.Tensor:
    q = q.unflatten(-1, (2, 3)).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q[..., 1:, :], q[..., 1:, :2], **options)


LINE, IMAGE = (4, 5, 6), (2, 4, 9, 8)
GRID: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: Several(nn.Linear(6, 7), nn.Linear(6, 7, bias=False)), LINE),
    "vector": (lambda: Call(torch.matmul, 6), LINE),
    "convolution": (lambda: Several(nn.Conv2d(4, 6, 3, 2, 1, groups=2), nn.Conv2d(4, 8, (2, 1), dilation=2)), IMAGE),
    "depthwise": (lambda: Several(nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 4, 3, padding="same")), IMAGE),
    "transposed": (
        lambda: Several(nn.ConvTranspose2d(4, 6, 3, 2, 1, groups=2), nn.ConvTranspose2d(4, 2, 3, dilation=2)),
        IMAGE,
    ),
    "one dimension": (lambda: Several(nn.Conv1d(5, 4, 3), nn.ConvTranspose1d(5, 2, 3, 2)), LINE),
    "three dimensions": (lambda: Several(nn.Conv3d(4, 2, 2), nn.ConvTranspose3d(4, 2, 2)), (1, 4, 3, 4, 5)),
    "attention": (lambda: Several(*(Call(lambda x, _, o=o: attends(x, **o)) for o in ({}, {"scale": 2.0}))), LINE),
    "masked": (lambda: Call(lambda x, m: attends(x, attn_mask=m), 5, 4), LINE),
    "causal": (lambda: Call(lambda x, _: attends(x, is_causal=True)), LINE),
    "dropout": (lambda: Call(lambda x, _: attends(x, dropout_p=0.5)), LINE),
    "heads": (lambda: First(nn.MultiheadAttention(6, 2), 3), LINE),
    "encoder": (lambda: nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), LINE),
    "bmm": (lambda: Call(lambda x, w: torch.bmm(x, w.expand(4, 6, 3)), 6, 3), LINE),
    "baddbmm": (lambda: Call(lambda x, w: torch.baddbmm(w, x, x.mT), 5, 5), LINE),
    "addbmm": (lambda: Call(lambda x, w: torch.addbmm(w, x, x.mT), 5, 5), LINE),
    "addmv": (lambda: Call(lambda x, w: torch.addmv(w, x[0], x[0, 0]), 5), LINE),
    "einsum": (lambda: Call(lambda x, w: torch.einsum("abc,dc,ef->abde", x, w, w), 7, 6), LINE),
    "tensordot": (lambda: Call(lambda x, w: torch.tensordot(x, w, 1), 6, 3, 2), LINE),
    "broadcast": (lambda: Call(lambda x, w: x[:, None] @ w, 3, 6, 2), LINE),
    "recurrent": (lambda: First(nn.GRU(6, 4), 1), LINE),
    "tied": (tied, LINE),
    "recursion": (Recursive, LINE),
    "nothing": (lambda: nn.LayerNorm(6), LINE),
}


NOT_COUNTED = {"vector", "addbmm", "addmv", "nothing"}  # neither here nor by torch


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", GRID)
def test_operations_are_those_that_torch_counts(name: str, autocast: bool) -> None:
    model, sizes = make(GRID[name][0]), GRID[name][1]
    for grad in (True, False):
        with torch.autocast("cpu", torch.bfloat16, autocast), torch.set_grad_enabled(grad):
            profiler = FlopsProfiler(model)
            with FlopCounterMode(display=False) as counter:
                model(torch.randn(sizes))
            profiler.start_profile()
            model(torch.randn(sizes))
            profiler.stop_profile()
        assert profiler.get_total_flops() == counter.get_total_flops(), grad
        assert (profiler.get_total_flops() > 0) == (name not in NOT_COUNTED)


@pytest.mark.parametrize("heads", [1, 2])
def test_fused_attention_of_the_cpu_is_counted(heads: int) -> None:
    """Which torch's counter leaves out; of a GPU's it has the same formula, also where queries share keys."""

    def grouped(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        q = x.unflatten(-1, (2, 3)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q[:, :heads], q[:, :heads], enable_gqa=True)

    model = Call(grouped)
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(torch.randn(LINE))
    profiler.stop_profile()
    assert profiler.get_total_flops() == 2 * (4 * 2 * 5 * 5) * (3 + 3)


def test_a_mode_and_a_recursion_count_once() -> None:
    class Again(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    model = Recursive()
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    with Again():
        model(torch.ones(4, 6))
    profiler.stop_profile()
    assert [m.flops for m in profiler.modules()] == [4 * 2 * 4 * 36] * 2


def test_a_backward_is_no_forward() -> None:
    """Nor is what it computes again."""
    model = nn.Sequential(nn.Linear(6, 6))
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    x = torch.ones(4, 6, requires_grad=True)
    checkpoint(model, x, use_reentrant=False).sum().backward()
    profiler.stop_profile()
    assert [m.flops for m in profiler.modules()] == [2 * 4 * 36] * 2


def test_what_is_compiled_is_counted_as_it_stands() -> None:
    model = make()
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        compiled(torch.ones(4, 5))
        profiler = FlopsProfiler(model)
        profiler.start_profile()
        compiled(torch.ones(4, 5))
        profiler.stop_profile()
        found = {m.name: m.flops for m in profiler.modules()}
        assert found[""] == LINEAR and found["blocks.0"] == found["blocks.1"] == 2 * 4 * 7 * 7
        assert found["blocks"] == 2 * found["blocks.0"]
