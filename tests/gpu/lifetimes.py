"""Cases of the stage `hazards`: engines that end, fail, move, are compiled or read from amid what is on its way."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from common import CUDA, DEVICE, DRY, SMALL, Results, allocated, no_differences, sync
from engines import ALL, HOST, LR, PARAM, apart, batch, config, early, engine_of, masters, net, train, unlike
from tessera.state import get_full_fp32_param, set_full_fp32_param
from torch import nn

from tessera.zero import GatheredParameters


class Asked(Exception):
    pass


def raises(*_: Any) -> None:
    raise Asked


def busy() -> None:
    """The device has work for a few milliseconds, and so have its copies."""
    if CUDA:
        torch.cuda._sleep(10_000_000)


def in_forward(engine: Any) -> None:
    with torch.no_grad():
        engine(*batch(3))  # the next units are on their way


def after_forward(engine: Any) -> None:
    engine(*batch(3))


def in_backward(engine: Any) -> None:
    hook = engine.module.blocks[1].up.weight.register_hook(raises)
    try:
        engine.backward(engine(*batch(3)))
    except Asked:
        hook.remove()


def after_backward(engine: Any) -> None:
    engine.backward(engine(*batch(3)))


def after_step(engine: Any) -> None:
    engine.backward(engine(*batch(3)))
    engine.step()


def destroyed(cfg: dict[str, Any], until: Callable[[Any], None]) -> dict[str, Any]:
    """What is on a side stream when an engine ends must not be written into memory that others have by then."""
    bad = 0
    for _ in range(1 if SMALL else 4):
        engine = engine_of(cfg)
        train(cfg, steps=2, engine=engine, keep=True)
        busy()
        until(engine)
        engine.destroy()
        del engine
        probes = [torch.full((1 << 16,), 7.0, device=DEVICE) for _ in range(64)]
        sync()
        bad += sum(int((p != 7).any()) for p in probes)
    return {"ok": bad == 0, "overwritten": bad}


def interrupted(stage: int, zero: Any) -> dict[str, Any]:
    """A forward and a backward that raise amid gathers and copies; the run then goes on as without them."""

    def go(raising: bool) -> dict[str, torch.Tensor]:
        model = net().to(DEVICE)
        engine = engine_of(config(stage, "fp32", zero=zero), model)
        for k in range(4):
            if raising and k in (1, 2):
                busy()
                handle = model.blocks[1].register_forward_hook(raises)
                try:
                    engine(*batch(k))
                except Asked:
                    handle.remove()
                in_backward(engine)
                engine.zero_grad()
            engine.backward(engine(*batch(k)))
            engine.step()
        found = masters(engine)
        engine.destroy()
        return found

    want, found = go(False), go(True)
    return no_differences([name for name in want if not torch.equal(want[name], found[name])])


def given_back() -> dict[str, Any]:
    gc.collect()
    sync()
    before = allocated()
    for cfg in (config(0, "bf16 14"), config(3, "bf16 8"), config(3, "bf16 14", zero=ALL)):
        train(cfg, steps=2)
    gc.collect()
    sync()
    return {"ok": allocated() - before < 1 << 20, "left": allocated() - before}


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(16, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x))).float().square().mean()


def channels_last() -> dict[str, Any]:
    """Gradients whose strides are not those of the parameter."""
    torch.backends.cudnn.deterministic = True
    torch.manual_seed(3)
    x = torch.randn(4, 8, 12, 12).to(DEVICE).contiguous(memory_format=torch.channels_last)
    found = []
    for form in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(4)
        model: Any = Convolutions().to(DEVICE)
        model.to(memory_format=form)
        other: Any = Convolutions().to(DEVICE)
        other.load_state_dict(model.state_dict())
        other.to(memory_format=form)
        engine = engine_of(config(2, "fp32", gradient_clipping=0), model)
        optimizer = torch.optim.AdamW(other.parameters(), lr=LR, weight_decay=0.1, foreach=False)
        for _ in range(3):
            engine.backward(engine(x))
            engine.step()
            optimizer.zero_grad()
            other(x).backward()
            optimizer.step()
        pairs = zip(model.parameters(), other.parameters(), strict=True)
        found.append(max(float((a - b).detach().abs().max()) for a, b in pairs))
        engine.destroy()
    return {"ok": max(found) < 1e-4, "worst": found}


def recomputed() -> dict[str, Any]:
    def go(how: bool | None, stage: int, zero: Any) -> dict[str, Any]:
        model = net().to(DEVICE)
        for block in model.blocks if how is not None else ():
            whole = block.forward
            block.forward = lambda x, whole=whole: torch.utils.checkpoint.checkpoint(whole, x, use_reentrant=how)
        cfg = config(stage, "bf16 14", zero=zero)
        return train(cfg, engine=engine_of(cfg, model))

    want = go(None, 2, None)
    tried = [(how, stage, zero) for how in (False, True) for stage, zero in ((2, None), (3, ALL))]
    off = {f"reentrant {how}, stage {stage}": unlike(go(how, stage, zero), want) for how, stage, zero in tried}
    return no_differences({k: v for k, v in off.items() if v})


def regions() -> dict[str, Any]:
    engine = engine_of(config(3, "bf16 14", zero=ALL))
    train(config(3, "bf16 14"), steps=2, engine=engine, keep=True)
    weight = engine.module.blocks[0].up.weight
    with GatheredParameters(weight, modifier_rank=0), torch.no_grad():
        weight.fill_(0.5)
    read = get_full_fp32_param(engine, weight)
    assert read is not None
    ok = bool(read.eq(0.5).all())
    set_full_fp32_param(engine, weight, torch.full_like(read, 0.25))
    with GatheredParameters(weight):
        ok = ok and bool(weight.float().eq(0.25).all()) and weight.device == DEVICE
    where = {str(v.device) for v in engine.module_state_dict().values()}
    engine.destroy()
    return {"ok": ok, "devices": sorted(where)}


def compiled() -> dict[str, Any]:
    want = train(config(3, "fp32"), steps=3)
    cfg = config(3, "fp32", zero=PARAM if CUDA else None)
    engine = engine_of(cfg)
    engine.compile(backend="inductor" if CUDA else "eager")
    worst = apart(train(cfg, steps=3, engine=engine), want)
    return {"ok": worst < 0.5, "worst_in_lr": worst}


def away_for_a_while(stage: int) -> dict[str, Any]:
    cfg = config(stage, "bf16 14")
    want = train(cfg, steps=4)
    engine = train(cfg, steps=2, keep=True)["engine"]
    sync()
    before = allocated()
    engine.offload_states()
    gc.collect()
    sync()
    left = allocated()
    moved = engine.core.memory().host
    engine.reload_states()
    found = train(cfg, steps=2, first=2, engine=engine)
    off = [n for n, m in want["masters"].items() if not torch.equal(m, found["masters"][n])]
    freed = not CUDA or before - left >= 0.9 * moved
    return {"ok": not off and freed, "differ": off, "before": before, "away": left, "moved": moved}


def cases(r: Results) -> None:
    ends = [in_forward, after_forward, in_backward, after_backward, after_step]
    modes = {
        "parameters in host memory": config(3, "bf16 14", zero=PARAM),
        "all in host memory": config(3, "bf16 14", zero=ALL),
        "states in host memory": config(2, "bf16 14", zero=HOST),
        "update in the backward, all in host memory": config(3, "bf16 14", zero=ALL, **early("bf16 14")),
    }
    for what, cfg in modes.items():
        for until in ends[::2] if DRY else ends:
            at = until.__name__.replace("_", " ")
            r.case(f"memory after destroy() {at}: {what}", destroyed, cfg, until)
    for stage, zero in ((3, ALL), (3, PARAM), (3, None), (2, HOST)):
        where = " and ".join(zero or ()) or "no offload"
        r.case(f"forward and backward that raise: stage {stage}, {where}", interrupted, stage, zero)
    r.case("memory of the device is given back", given_back)
    r.case("convolutions, channels_last", channels_last)
    r.case("activation checkpointing", recomputed)
    r.case("regions and state", regions)
    for stage in (2, 3):
        r.case(f"states away and back, stage {stage}", away_for_a_while, stage)
    r.case("torch.compile", compiled, need=25)
