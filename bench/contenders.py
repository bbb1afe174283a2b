"""One training loop behind one face: Tessera, and the engines and hand-written loops it is measured against.

A contender owns a model. A step is forward(*batch), backward(loss), step(): three calls, so that each can be timed.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from models import blocks_of
from torch import nn

LR, BETAS, WEIGHT_DECAY, CLIP = 1e-3, (0.9, 0.95), 0.01, 1.0


class Contender:
    name = ""
    trains = True  # False: the loss does not change
    model: Any

    def forward(self, *batch: Any) -> torch.Tensor:
        return self.model(*batch)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        """Everything between the backward and updated weights, gradients dropped."""
        raise NotImplementedError

    def train(self, *batch: Any) -> float:
        loss = self.forward(*batch)
        self.backward(loss)
        self.step()
        return loss.item()

    def close(self) -> None:
        pass


def _adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)


class Autograd(Contender):
    """Forward and backward of plain PyTorch; the gradients are dropped. What no engine can go below."""

    name, trains = "autograd alone", False

    def __init__(self, model: nn.Module, bf16: bool) -> None:
        self.model = model.bfloat16() if bf16 else model
        self.params = list(model.parameters())

    def step(self) -> None:
        for param in self.params:
            param.grad = None


class Bare(Contender):
    """Plain PyTorch: clip_grad_norm_ and fused AdamW; in bf16 with fp32 master weights kept by hand."""

    def __init__(self, model: nn.Module, bf16: bool, ddp: bool = False) -> None:
        self.name = "DDP" if ddp else "bare loop"
        self.bf16 = bf16
        masters = [p.detach().clone().requires_grad_() for p in model.parameters()] if bf16 else []
        if bf16:
            model = model.bfloat16()
        self.params = list(model.parameters())
        self.masters = masters or self.params
        self.model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True) if ddp else model
        self.optimizer = _adamw(self.masters)

    def step(self) -> None:
        if self.bf16:
            for master, param in zip(self.masters, self.params, strict=True):
                assert param.grad is not None
                master.grad = param.grad.float()
                param.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters, CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.bf16:
            with torch.no_grad():
                torch._foreach_copy_(self.params, self.masters)


class Fsdp2(Contender):
    """fully_shard of every block and the root; fp32 parameters, bf16 compute where asked."""

    def __init__(self, model: nn.Module, bf16: bool, reshard: bool) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        self.name = f"FSDP2 as ZeRO-{3 if reshard else 2}"
        options: dict[str, Any] = {"reshard_after_forward": reshard}
        if bf16:
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        for block in blocks_of(model):
            fully_shard(block, **options)
        self.model = fully_shard(model, **options)
        self.optimizer = _adamw(model.parameters())

    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()


def _json(stage: int, bf16: bool, zero: dict[str, Any]) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage} | (zero if stage == 3 else {}),
        "bf16": {"enabled": bf16},
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "betas": list(BETAS), "weight_decay": WEIGHT_DECAY}},
    }


class Tessera(Contender):
    def __init__(self, model: nn.Module, bf16: bool, stage: int, zero: dict[str, Any]) -> None:
        import tessera

        self.name = f"Tessera {stage}"
        self.engine, *_ = tessera.initialize(model=model, config=_json(stage, bf16, zero))
        self.model = self.engine

    def step(self) -> None:
        self.engine.step()

    def close(self) -> None:
        self.engine.destroy()


class DeepSpeed(Contender):
    """DeepSpeed with the settings that were best here: no overflow check, buckets of the model's size."""

    def __init__(self, model: nn.Module, bf16: bool, stage: int, zero: dict[str, Any]) -> None:
        import deepspeed

        self.name = f"DeepSpeed {stage}"
        config = _json(stage, bf16, zero)
        size = sum(p.numel() for p in model.parameters())
        config["zero_optimization"].update(reduce_bucket_size=size, allgather_bucket_size=size + size % 2)
        if stage in (1, 2):
            config["zero_optimization"]["use_multi_rank_bucket_allreduce"] = False
        if bf16:
            config["bf16"]["check_grad_overflow"] = False
        self.engine, *_ = deepspeed.initialize(model=model, config=config)
        self.model = self.engine

    def backward(self, loss: torch.Tensor) -> None:
        self.engine.backward(loss)

    def step(self) -> None:
        self.engine.step()

    def close(self) -> None:
        self.engine.destroy()


def available(name: str) -> bool:
    """Whether the contender can be built: peers that are not installed are left out."""
    kind = name.partition(":")[0]
    if kind == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        return False
    return kind not in ("ddp", "fsdp2", "deepspeed") or dist.is_initialized()


def build(name: str, model: nn.Module, bf16: bool, zero: dict[str, Any] | None = None) -> Contender:
    """`name`: autograd, bare, ddp, tessera:STAGE, fsdp2:2, fsdp2:3, deepspeed:STAGE. Takes over `model`. `zero`: more
    of the section zero_optimization in stage 3."""
    kind, _, stage = name.partition(":")
    if kind == "autograd":
        return Autograd(model, bf16)
    if kind in ("bare", "ddp"):
        return Bare(model, bf16, ddp=kind == "ddp")
    if kind == "fsdp2":
        return Fsdp2(model, bf16, reshard=stage == "3")
    if kind in ("tessera", "deepspeed"):
        return (Tessera if kind == "tessera" else DeepSpeed)(model, bf16, int(stage), zero or {})
    raise SystemExit(f"no contender is called '{name}'")


def contenders(
    names: list[str], make: Callable[[], nn.Module], bf16: bool, zero: dict[str, Any] | None = None
) -> list[Contender]:
    """The named contenders, as far as they are available, on copies of one model."""
    original = make()
    return [build(name, copy.deepcopy(original), bf16, zero) for name in names if available(name)]
