"""Operations, parameters and times of modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import Net, make
from tessera.flops import FlopsProfiler, get_model_profile, number_text
from torch import nn

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
