"""Cases of the stage `hazards`: graphs of the device, as docs/compile.md has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from common import CUDA, DEVICE, Results, no_differences
from engines import ROWS, WIDTH, apart, batch, config, engine_of, train, unlike


def refused_in_a_capture(call: Callable[[], Any]) -> bool:
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            call()
    except RuntimeError as error:
        return "is being captured" in str(error)
    return False


def captured() -> dict[str, Any]:
    """Nothing of an engine is recorded, and it goes on."""
    cfg = config(2, "bf16 14")
    engine = engine_of(cfg)
    loss = engine(*batch(0))
    calls = {
        "forward": lambda: engine(*batch(0)),
        "backward": lambda: engine.backward(loss),
        "step": engine.step,
    }
    recorded = [name for name, call in calls.items() if not refused_in_a_capture(call)]
    found = no_differences(unlike(train(cfg, engine=engine), train(cfg)))
    return found | {"ok": found["ok"] and not recorded, "recorded": recorded}


def graphed(engine: Any) -> Any:
    """Blocks of the engine's model become graphs, forward and backward."""
    blocks = engine.module.blocks
    x = torch.randn(3 * ROWS, WIDTH, dtype=next(blocks.parameters()).dtype, device=DEVICE)
    samples = tuple((x.clone().requires_grad_(),) for _ in blocks)
    torch.cuda.make_graphed_callables(tuple(blocks), samples)
    return engine


def compiled(engine: Any) -> Any:
    for block in engine.module.blocks:
        block.compile(mode="reduce-overhead")
    return engine


def accumulated(with_graphs: Callable[[Any], Any]) -> dict[str, Any]:
    """Gradients in memory that the next replay writes to add up over micro-batches."""
    cfg = config(2, "fp32", accumulation=3)
    worst = apart(train(cfg, engine=with_graphs(engine_of(cfg))), train(cfg))
    return {"ok": worst < 0.5, "worst_in_lr": worst}


def cases(r: Results) -> None:
    if not CUDA:
        r.left_out("graphs of the device", "no CUDA")
        return
    r.case("calls inside of a capture", captured)
    r.case("accumulation behind make_graphed_callables", accumulated, graphed)
    r.case("accumulation behind torch.compile with graphs", accumulated, compiled, need=40)
