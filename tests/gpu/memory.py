"""Cases of the stage `hazards`: waits of the host, page-locked memory, gathers ahead, huge units."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import no_memory
import torch
from common import CUDA, DEVICE, SMALL, Results, gb, peak, reset_peak, sync
from engines import ALL, HOST, LOW, PARAM, batch, config, early, engine_of, net
from torch import nn
from torch.profiler import record_function
from tracing import profiled, waits_within

UNITS = 5  # that Dense has
PHASES = ("phase forward", "phase backward", "phase step")


class Dense(nn.Module):
    """The net without the parameter that gets no gradient: ranks have nothing to agree on."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        del self.net.unused

    def forward(self, ids: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(ids, y)
        return out


# ---- waits
def phases_of(forward: Callable[..., Any], backward: Callable[[Any], Any], step: Callable[[], Any]) -> dict[str, Any]:
    data = [batch(k) for k in range(4)]

    def once(k: int) -> None:
        with record_function(PHASES[0]):
            loss = forward(*data[k])
        with record_function(PHASES[1]):
            backward(loss)
        with record_function(PHASES[2]):
            step()

    once(0)
    once(1)
    return waits_within(profiled(lambda: once(2)), PHASES)


def waits_of_the_plain_loop() -> dict[str, Any]:
    """What the model itself waits for: nothing."""
    model = Dense().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), fused=CUDA)
    counts = phases_of(model, lambda loss: loss.backward(), optimizer.step)
    return {"counts": counts, "ok": not any(counts.values())}


def a_wait_is_seen() -> dict[str, Any]:
    """The counting itself: one read of a value in each phase."""

    def read(*_: Any) -> torch.Tensor:
        out = torch.ones(3, device=DEVICE).sum()
        out.item()
        return out

    counts = phases_of(read, read, read)
    return {"counts": counts, "ok": not CUDA or all(sum(c.values()) == 1 for c in counts.values())}


def waits(cfg: dict[str, Any], backward: int, step: int) -> dict[str, Any]:
    """Not once in the forward; so often at most in the others."""
    engine = engine_of(cfg, Dense())
    counts = phases_of(engine, engine.backward, engine.step)
    engine.destroy()
    total = [sum(counts[phase].values()) for phase in PHASES]
    return {"counts": counts, "ok": total[0] == 0 and total[1] <= backward and total[2] <= step}


def cases_of_waits(r: Results) -> None:
    r.case("waits of the host: one that is asked for is counted", a_wait_is_seen)
    r.case("waits of the host: the plain loop", waits_of_the_plain_loop)
    quiet = early("bf16 14")
    # An update in the backward reads the norm of each unit; what is away is waited for on each way.
    for name, cfg, backward, step in (
        ("stage 0", config(0, "bf16 14"), 0, 1),
        ("stage 2", config(2, "bf16 14"), 0, 1),
        ("stage 3", config(3, "bf16 14"), 0, 1),
        ("stage 2, 8 bytes", config(2, "bf16 8"), 0, 1),
        ("fp16", config(2, "fp16 16"), 0, 1),
        ("autocast", config(2, "fp32 autocast bf16"), 0, 1),
        ("update in the backward", config(3, "bf16 14", **quiet), UNITS, 1),
        ("states in host memory", config(2, "bf16 14", zero=HOST), 0, 3 * UNITS + 1),
        ("all in host memory", config(3, "bf16 14", zero=ALL), 0, 4 * UNITS + 1),
    ):
        r.case(f"waits of the host in a step: {name}", waits, cfg, backward, step)


# ---- page-locked memory
def locked() -> dict[str, int]:
    """Bytes, as torch's allocator of page-locked memory and as the system count them."""
    if CUDA:  # what was given back counts as used until the allocator is asked again
        gc.collect()
        sync()
        torch.empty(1, pin_memory=True)
    stats: Any = torch.cuda.host_memory_stats() if CUDA and hasattr(torch.cuda, "host_memory_stats") else {}
    kept = ("allocated_bytes.current", "active_bytes.current", "reserved_bytes.current")
    found = {key: int(stats.get(key, 0)) for key in kept}
    for line in Path("/proc/self/status").read_text().splitlines() + Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("VmLck", "VmPin", "VmRSS", "MemAvailable"):
            found[name] = int(value.split()[0]) << 10
    return found


def page_locked(stage: int, zero: dict[str, Any]) -> dict[str, Any]:
    """What an engine asks for is what it takes. Layers have no power of two of elements, and torch's allocator of
    page-locked memory rounds to powers of two. Two witnesses: torch's own count of what is in use (it also keeps blocks
    that are not), and what the process has resident or locked."""
    width, layers = (64, 2) if SMALL else (2112, 24)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).to(DEVICE)
    train_once(engine_of(config(3, "bf16 14", zero=ALL)), batch(0))  # what CUDA itself takes at first use
    before = locked()
    engine = engine_of(config(stage, "bf16 14", zero=zero), model)
    x = torch.randn(8, width, device=DEVICE).bfloat16()
    for _ in range(2):
        engine.backward(engine(x).float().square().mean())
        engine.step()
    sync()
    grown = {key: value - before[key] for key, value in locked().items()}
    asked = engine.core.memory().host
    engine.destroy()
    taken = max(grown[key] for key in ("active_bytes.current", "VmRSS", "VmLck", "VmPin"))
    ok = not CUDA or 0.9 * asked < taken < 1.15 * asked + (256 << 20)
    return {"ok": ok, "asked": asked, "grown": grown, "times": taken / asked if asked else None}


def train_once(engine: Any, data: Any) -> None:
    engine.backward(engine(*data))
    engine.step()
    engine.destroy()


# ---- gathers ahead
class Tower(nn.Module):
    """Of blocks of one large matrix, each a unit."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        matrices = (nn.Linear(width, width, bias=False) for _ in range(layers))
        self.layers = nn.ModuleList(nn.Sequential(matrix, nn.Tanh()) for matrix in matrices)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


def prefetched(zero: dict[str, Any]) -> dict[str, Any]:
    """Of layers larger than stage3_prefetch_bucket_size (50 M by default) the next one comes while one computes, and no
    more than that: buckets of two layers at the peak."""
    width, layers = (64, 4) if SMALL else (7168, 4)
    limit = {"stage3_prefetch_bucket_size": width} if SMALL else {}
    with torch.device(DEVICE):
        model = Tower(width, layers)
    engine = engine_of(config(3, "bf16 14", zero=zero | limit), model)
    x = torch.randn(2, width, device=DEVICE).bfloat16()
    with torch.no_grad():
        for _ in range(3):  # the order of units is known after the first
            engine(x)
    found = engine.core.memory().peak_buckets / (2 * width * width)
    engine.destroy()
    return {"ok": not CUDA or 1.9 < found < 3.1, "layers at the peak": found}  # the CPU gathers nothing at one rank


# ---- huge
class Huge(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(n, dtype=torch.bfloat16, device=DEVICE))

    def forward(self, at: torch.Tensor) -> torch.Tensor:
        return self.w[at].float().sum()


def huge_unit() -> dict[str, Any]:
    """The update, the norm and the cast index with 64 bits."""
    n = (1 << 12) if SMALL else (1 << 31) + 4096
    reset_peak()
    cfg = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "bf16": LOW,
        "tessera": {"state_bytes": 8},
    }
    engine = engine_of(cfg, Huge(n))
    at = torch.tensor([0, n // 2, n - 1], device=DEVICE)
    engine.backward(engine(at))
    engine.step()
    w = engine.module.w.detach()
    values = w[at].float().tolist()
    rest = float(w[1:1000].float().mean()), float(w[n - 1000 : n - 1].float().mean())
    norm = engine.global_grad_norm()
    engine.destroy()
    ok = values == [0.5] * 3 and rest == (1.0, 1.0) and abs(norm - 3**0.5) < 1e-6
    return {"ok": ok, "values": values, "rest": rest, "norm": norm, "peak_gb": gb(peak())}


def cases(r: Results) -> None:
    cases_of_waits(r)
    r.case("page-locked memory: states", page_locked, 2, HOST)
    r.case("page-locked memory: states and parameters", page_locked, 3, ALL)
    r.case("gathers ahead of layers above the limit: parameters in host memory", prefetched, PARAM)
    r.case("gathers ahead of layers above the limit: all in host memory", prefetched, ALL)
    no_memory.cases(r)
    r.case("a unit of more than 2^31 elements", huge_unit, need=10)
