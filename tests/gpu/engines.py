"""Small engines for the stages that compare bits: a net with awkward parameters, every precision mode, a plain loop."""

from __future__ import annotations

import copy
from typing import Any

import torch
from common import DEVICE, SMALL
from tessera.state import get_full_fp32_param
from torch import nn

import tessera

STEPS = 3 if SMALL else 5
WIDTH = 32 if SMALL else 384
ROWS = 4 if SMALL else 32
LR = 0.01

HOST = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
PARAM = {"offload_param": {"device": "cpu", "pin_memory": True}}
ALL = HOST | PARAM
EARLY = {"gradient_clipping": 0, "tessera": {"update_in_backward": True}}
LOW = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
# hysteresis 1: stage 0 has it by default, the others 2.
MODES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16 14": {"bf16": {"enabled": True}},
    "bf16 16": {"bf16": {"enabled": True}, "tessera": {"state_bytes": 16}},
    "bf16 12": {"bf16": {"enabled": True}, "tessera": {"state_bytes": 12}},
    "bf16 10": {"bf16": LOW},
    "bf16 8": {"bf16": LOW, "tessera": {"state_bytes": 8}},
    "bf16 8 nearest": {"bf16": LOW, "tessera": {"state_bytes": 8, "rounding": "nearest"}},
    "fp16 16": {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}},
    "fp16 overflow": {"fp16": {"enabled": True, "initial_scale_power": 40, "hysteresis": 1}},
    "fp32 autocast bf16": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "fp32 autocast fp16": {"torch_autocast": {"enabled": True, "dtype": "float16"}},
    "bf16 10 autocast": {"bf16": LOW, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "bf16 8 autocast": {
        "bf16": LOW,
        "tessera": {"state_bytes": 8},
        "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
    },
}


def exact() -> None:
    """The same call gives the same bits."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.use_deterministic_algorithms(True, warn_only=True)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return out


class Net(nn.Module):
    """Blocks, an embedding, parameters of one element, transposed, and without a gradient."""

    def __init__(self, width: int = WIDTH, blocks: int = 3) -> None:
        super().__init__()
        self.table = nn.Embedding(19, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.transposed = nn.Parameter((torch.randn(width, 7) / width**0.5).t().contiguous().t())
        self.gain = nn.Parameter(torch.tensor([1.5]))
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, ids: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        out = (x @ self.transposed) * self.gain
        return ((out.float() - y) ** 2).mean()


def net() -> Net:
    """The same on every device: drawn on the CPU."""
    torch.manual_seed(0)
    return Net()


def batch(k: int, device: torch.device = DEVICE) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(100 + k)
    rows = [torch.randperm(19, generator=g)[:3] for _ in range(ROWS)]
    ids = torch.stack(rows).flatten()  # rows of the embedding's gradient add up
    return ids.to(device), torch.randn(ids.numel(), 7, generator=g).to(device)


def has_low_states(mode: str) -> bool:
    """Which stage 0 refuses."""
    return bool(MODES[mode].get("bf16", {}).get("bf16_optimizer_states", False))


def stages_of(mode: str) -> tuple[int, ...]:
    return (1, 2, 3) if has_low_states(mode) else (0, 1, 2, 3)


def config(
    stage: int, mode: str, accumulation: int = 1, zero: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    """`zero`: more of zero_optimization. Sections in `more` are laid over those of the mode."""
    section = {"stage": stage} | ({"stage3_param_persistence_threshold": 0} if stage == 3 else {}) | (zero or {})
    cfg: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.5,
        "zero_optimization": section,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.1}},
        "tessera": {"min_unit_elements": 1},  # every block is a unit
    }
    for key, value in [*copy.deepcopy(MODES[mode]).items(), *more.items()]:
        cfg[key] = cfg.get(key, {}) | value if isinstance(value, dict) else value
    return cfg


def early(mode: str) -> dict[str, Any]:
    """For config(): the update in the backward."""
    return EARLY | ({"bf16": {"check_grad_overflow": False}} if mode != "fp32" else {})


def engine_of(cfg: dict[str, Any], model: nn.Module | None = None, device: torch.device = DEVICE) -> Any:
    return tessera.initialize(model=(net() if model is None else model).to(device), config=cfg)[0]


def masters(engine: Any) -> dict[str, torch.Tensor]:
    values = {name: get_full_fp32_param(engine, p) for name, p in engine.module.named_parameters()}
    return {name: value.float().cpu().clone() for name, value in values.items() if value is not None}


def train(
    cfg: dict[str, Any], steps: int = STEPS, first: int = 0, engine: Any = None, keep: bool = False, **more: Any
) -> dict[str, Any]:
    """Steps of `engine`, or of a new one with more of engine_of(). `keep`: it lives on, as "engine"."""
    if engine is None:
        engine = engine_of(cfg, **more)
    losses = []
    accumulation = cfg["gradient_accumulation_steps"]
    for k in range(first, first + steps * accumulation):
        loss = engine(*batch(k, engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    found = {
        "losses": torch.stack(losses).cpu(),
        "masters": masters(engine),
        "skipped": engine.skipped_steps,
        "norm": engine.global_grad_norm(),
    }
    if keep:
        return found | {"engine": engine}
    engine.destroy()
    return found


def plain_loop(mode: str, steps: int = STEPS) -> dict[str, Any]:
    """fp32 masters, clip_grad_norm_, torch's AdamW; the model in the mode's dtype or under autocast."""
    own = MODES[mode]
    dtype = torch.bfloat16 if "bf16" in own else torch.float16 if "fp16" in own else torch.float32
    auto = getattr(torch, own["torch_autocast"]["dtype"]) if "torch_autocast" in own else None
    scale = 65536.0 if auto == torch.float16 else 256.0 if dtype == torch.float16 else 1.0
    model = net().to(DEVICE).to(dtype)
    leaves = [p.detach().float().clone().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(leaves, lr=LR, weight_decay=0.1, foreach=False)
    losses = []
    for k in range(steps):
        with torch.autocast(DEVICE.type, dtype=auto, enabled=auto is not None, cache_enabled=False):
            loss = model(*batch(k))
        (loss * scale).backward()
        for m, p in zip(leaves, model.parameters(), strict=True):
            m.grad = None if p.grad is None else p.grad.float() / scale
            p.grad = None
        if all(bool(m.grad.isfinite().all()) for m in leaves if m.grad is not None):
            nn.utils.clip_grad_norm_(leaves, 0.5)
            optimizer.step()
        else:  # as a loss scale does whose patience is 1
            scale /= 2
        with torch.no_grad():
            for m, p in zip(leaves, model.parameters(), strict=True):
                p.copy_(m)
        losses.append(loss.detach())
    named = zip((n for n, _ in model.named_parameters()), leaves, strict=True)
    return {"losses": torch.stack(losses).float().cpu(), "masters": {n: m.detach().cpu() for n, m in named}}


def unlike(a: dict[str, Any], b: dict[str, Any], losses: bool = True) -> dict[str, Any]:
    """What differs in bits: parameter -> [elements, largest difference]."""
    off: dict[str, Any] = {}
    for name, mine in a["masters"].items():
        other = b["masters"][name]
        if not torch.equal(mine, other):
            off[name] = [int((mine != other).sum()), float((mine - other).abs().max())]
    if losses and not torch.equal(a["losses"], b["losses"]):
        off["losses"] = [a["losses"].tolist(), b["losses"].tolist()]
    return off


def apart(a: dict[str, Any], b: dict[str, Any]) -> float:
    """The largest difference of masters, in steps of lr; NaN is infinite."""
    found = [float((mine - b["masters"][name]).abs().max()) / LR for name, mine in a["masters"].items()]
    return max(d if d == d else float("inf") for d in found)
