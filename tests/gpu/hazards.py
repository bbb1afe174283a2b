"""What can go wrong on a device only: streams here, lifetimes, memory and graphs in modules of their own. Every case
says in its name what it would show. The device is kept busy, so that what does not wait for it runs ahead."""

from __future__ import annotations

import functools
import threading
import warnings
from typing import Any

import graphs
import lifetimes
import memory
import torch
from common import CUDA, DEVICE, DRY, Results, no_differences, sync
from engines import (
    ALL,
    HOST,
    PARAM,
    batch,
    config,
    early,
    engine_of,
    exact,
    has_low_states,
    masters,
    net,
    train,
    unlike,
)
from torch import nn

MODES = ("bf16 14",) if DRY else ("fp32", "bf16 14", "bf16 8")


def lag(milliseconds: float = 2.0) -> None:
    """The current stream is busy for a while."""
    if CUDA:
        torch.cuda._sleep(int(milliseconds * 1.7e6))


class Slow(torch.autograd.Function):
    """Keeps the current stream busy in the forward and in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        lag()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        lag()
        return g


def slow_net() -> nn.Module:
    model = net()
    for block in model.blocks:
        block.register_forward_hook(lambda _m, _a, out: Slow.apply(out))
    return model


def run(cfg: dict[str, Any], slow: bool = True, side: bool = False, model: nn.Module | None = None) -> dict[str, Any]:
    """Four steps. `side`: all of the training on a stream of the user's own."""
    engine = engine_of(cfg, model or (slow_net() if slow else net()))
    stream = torch.cuda.Stream() if CUDA and side else None
    sync()
    with torch.cuda.stream(stream):
        found = train(cfg, steps=4, engine=engine)
    sync()
    return found


def grid(mode: str) -> dict[str, dict[str, Any]]:
    pageable = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
    found = {
        "stage 0": config(0, mode),
        "stage 1": config(1, mode),
        "stage 2": config(2, mode),
        "stage 3": config(3, mode),
        "states in host memory": config(2, mode, zero=HOST),
        "states in host memory, stage 1, pageable": config(1, mode, zero=pageable),
        "states in host memory, stage 3": config(3, mode, zero=HOST),
        "parameters in host memory": config(3, mode, zero=PARAM),
        "all in host memory": config(3, mode, zero=ALL),
        "accumulation": config(3, mode, accumulation=2),
        "accumulation, host": config(2, mode, accumulation=2, zero=HOST),
        "accumulation, all in host memory": config(3, mode, accumulation=2, zero=ALL),
        "update in the backward": config(3, mode, **early(mode)),
        "update in the backward, stage 1": config(1, mode, **early(mode)),
        "update in the backward, states in host memory": config(2, mode, zero=HOST, **early(mode)),
        "update in the backward, all in host memory": config(3, mode, zero=ALL, **early(mode)),
    }
    if has_low_states(mode):
        del found["stage 0"]
    return found


@functools.cache
def undisturbed(mode: str, what: str) -> dict[str, Any]:
    return run(grid(mode)[what], slow=False)


def same(mode: str, what: str, side: bool) -> dict[str, Any]:
    return no_differences(unlike(run(grid(mode)[what], side=side), undisturbed(mode, what)))


def changing_streams() -> dict[str, Any]:
    """Forward, backward and step of one engine on three streams that wait for each other, as a program may do it."""
    cfg = config(3, "bf16 14", zero=ALL)
    want = run(cfg, slow=False)
    engine = engine_of(cfg, slow_net())
    streams = [torch.cuda.Stream() for _ in range(3)] if CUDA else [None] * 3
    losses = []
    for k in range(4):
        last = None
        for number, stream in enumerate(streams):
            if stream is not None:
                stream.wait_stream(last or torch.cuda.current_stream())
                last = stream
            with torch.cuda.stream(stream):
                if number == 0:
                    loss = engine(*batch(k))
                elif number == 1:
                    engine.backward(loss)
                else:
                    engine.step()
        losses.append(loss.detach())
        if last is not None:
            torch.cuda.current_stream().wait_stream(last)
    found = {"losses": torch.stack(losses).cpu(), "masters": masters(engine)}
    engine.destroy()
    return no_differences(unlike(found, want))


def two_engines() -> dict[str, Any]:
    """In two threads, each on a stream of its own: the library, pools and side streams are shared."""
    cfgs = [config(3, "bf16 14", zero=ALL), config(2, "bf16 8")]
    want = [run(c, slow=False) for c in cfgs]
    found: list[Any] = [None, None]
    models = [slow_net().to(DEVICE) for _ in cfgs]  # not in the threads: they would draw from one generator

    def body(n: int) -> None:
        try:
            found[n] = run(cfgs[n], side=True, model=models[n])
        except BaseException as error:
            found[n] = error

    threads = [threading.Thread(target=body, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [str(f) for f in found if isinstance(f, BaseException)]
    off = {} if errors else {n: unlike(found[n], want[n]) for n in range(2)}
    return {"ok": not errors and not any(off.values()), "errors": errors, "differ": off}


def joint_loss() -> dict[str, Any]:
    def go(stages: tuple[int, int], zero: Any = None) -> list[torch.Tensor]:
        a, b = engine_of(config(stages[0], "fp32")), engine_of(config(stages[1], "fp32", zero=zero))
        for k in range(3):
            (a(*batch(k)) + 2 * b(*batch(k + 50))).backward()
            a.step()
            b.step()
        out = [m for e in (a, b) for m in masters(e).values()]
        a.destroy()
        b.destroy()
        return out

    want = go((0, 0))
    return {"ok": all(map(torch.equal, want, go((2, 3)))) and all(map(torch.equal, want, go((1, 3), ALL)))}


def main() -> None:
    exact()
    warnings.simplefilter("ignore")
    r = Results("hazards")
    for mode in MODES:
        for what in grid(mode):
            r.case(f"slow device, a stream of the user's: {mode}, {what}", same, mode, what, True, need=2)
            r.case(f"slow device, default stream: {mode}, {what}", same, mode, what, False, need=2)
    r.case("forward, backward and step on three streams", changing_streams)
    r.case("two engines in two threads on two streams", two_engines)
    r.case("a joint loss of two engines", joint_loss)
    lifetimes.cases(r)
    memory.cases(r)
    graphs.cases(r)
    r.end()


if __name__ == "__main__":
    main()
