"""Cases of the stage `hazards`: no memory left on the device, phase by phase. An error says what is short, nothing is
half done, and what was asked for can be done again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from common import CUDA, DEVICE, Results
from engines import ALL, PARAM, batch, config, early, engine_of, masters, net, train, unlike

from tessera.zero import GatheredParameters


@contextmanager
def nothing_left(really: bool = True, least: int = 512) -> Iterator[None]:
    """torch's allocator gives nothing more than what is left of its gaps without blocks of `least` bytes."""
    if not CUDA or not really:
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    gaps = taken_gaps(least)
    try:
        yield
        torch.cuda.synchronize()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        gaps.clear()


def taken_gaps(least: int) -> list[torch.Tensor]:
    """What the allocator has and nobody uses, in blocks."""
    found, size = [], 1 << 30
    while size >= least:
        try:
            found.append(torch.empty(size, dtype=torch.uint8, device=DEVICE))
        except torch.OutOfMemoryError:
            size //= 2
    return found


def words(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"


def named(said: str) -> bool:
    """An error, if there was one, says what is short."""
    return not said or "memory" in said.lower()


def step_of(engine: Any, short_in: str = "") -> torch.Tensor:
    with nothing_left(short_in == "forward"):
        loss = engine(*batch(2))
    with nothing_left(short_in == "backward"):
        engine.backward(loss)
    with nothing_left(short_in == "step"):
        engine.step()
    return loss.detach().reshape(1).cpu()


def once_more(engine: Any, phase: str) -> None:
    """After an error: a step whose gradients are there, else all of it."""
    if phase == "step":
        try:
            engine.step()
            return
        except RuntimeError:
            pass
    engine.zero_grad()
    step_of(engine)


def out_of_memory(phase: str, cfg: dict[str, Any], whole: bool) -> dict[str, Any]:
    """An error that says so, or none; no weight has changed by it, and what was asked for can be done again. `whole`:
    not where units are updated in the backward."""
    want = train(cfg, steps=4)
    engine = train(cfg, steps=2, keep=True)["engine"]
    before, said = masters(engine), ""
    try:
        step_of(engine, phase)
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        said = words(error)
    changed = [n for n, m in masters(engine).items() if not torch.equal(m, before[n])] if said else []
    if said:
        once_more(engine, phase)
    found = train(cfg, steps=1, first=3, engine=engine)
    off = unlike(found, want, losses=False)
    fine = bool(found["losses"].isfinite().all()) and (not whole or not (off or changed))
    asks = bool(said) or phase == "step" or not CUDA  # a step of states that are at home needs none
    return {"ok": named(said) and asks and fine, "said": said, "half updated": changed, "differ": off}


def in_construction(cfg: dict[str, Any]) -> dict[str, Any]:
    """The model stays whole and plain, and can be given to an engine again."""
    want = train(cfg)
    model = net().to(DEVICE)
    said, usable = "", True
    try:
        with nothing_left(least=1 << 14):
            engine_of(cfg, model).destroy()
            model = net().to(DEVICE)
    except RuntimeError as error:
        said = words(error)
        usable = bool(model(*batch(0)).isfinite())
    off = unlike(train(cfg, engine=engine_of(cfg, model)), want)
    return {"ok": (bool(said) or not CUDA) and named(said) and usable and not off, "said": said, "differ": off}


def in_a_region() -> dict[str, Any]:
    """A gather by hand that finds no memory; the parameters can be gathered afterwards."""
    cfg = config(3, "bf16 14", zero=PARAM)
    engine = train(cfg, steps=2, keep=True)["engine"]
    params = list(engine.module.parameters())
    said = ""
    try:
        with nothing_left(), GatheredParameters(params):
            pass
    except RuntimeError as error:
        said = words(error)
    with GatheredParameters(params):
        whole = all(p.float().isfinite().all() for p in params)
    off = unlike(train(cfg, steps=2, first=2, engine=engine), train(cfg, steps=4), losses=False)
    return {"ok": named(said) and (bool(said) or not CUDA) and whole and not off, "said": said, "differ": off}


def in_the_model() -> dict[str, Any]:
    """The model itself asks for too much, amid gathers."""
    cfg = config(3, "bf16 14", zero=ALL)
    engine = engine_of(cfg)

    def greedy(*_: Any) -> None:
        if CUDA:
            torch.empty(1 << 40, dtype=torch.uint8, device=DEVICE)
        raise torch.OutOfMemoryError("as the device would")

    handle = engine.module.blocks[1].register_forward_pre_hook(greedy)
    try:
        engine(*batch(0))
        raised = False
    except torch.OutOfMemoryError:
        raised = True
    handle.remove()
    off = unlike(train(cfg, steps=3, engine=engine), train(cfg, steps=3))
    return {"ok": raised and not off, "differ": off}


def cases(r: Results) -> None:
    modes = {
        "stage 2": config(2, "bf16 14"),
        "stage 3": config(3, "bf16 8"),
        "all in host memory": config(3, "bf16 14", zero=ALL),
        "update in the backward": config(3, "bf16 14", **early("bf16 14")),
    }
    for what, cfg in modes.items():
        for phase in ("forward", "backward", "step"):
            whole = what != "update in the backward"
            r.case(f"no memory left in the {phase}: {what}", out_of_memory, phase, cfg, whole)
        r.case(f"no memory left in the construction: {what}", in_construction, cfg)
    r.case("no memory left in a gather by hand", in_a_region)
    r.case("no memory left in the model", in_the_model)
