"""One training loop behind one face: Tessera, and the engines and hand-written loops it is measured against.

A contender owns a copy of the model. train(*batch) is one optimizer step (forward, backward, clip, update) and returns
the loss; compute(*batch) is forward and backward alone, gradients dropped.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

LR, BETAS, WEIGHT_DECAY, CLIP = 1e-3, (0.9, 0.95), 0.01, 1.0


class Contender:
    name = ""

    def train(self, *batch: Any) -> float:
        raise NotImplementedError

    def close(self) -> None:
        pass


def _adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)


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

    def train(self, *batch: Any) -> float:
        loss = self.model(*batch)
        loss.backward()
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
        return loss.item()


class Fsdp2(Contender):
    """fully_shard of every block and the root; fp32 parameters, bf16 compute where asked."""

    def __init__(self, model: nn.Module, bf16: bool, blocks: list[nn.Module], reshard: bool) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        self.name = f"FSDP2 as ZeRO-{3 if reshard else 2}"
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16) if bf16 else None
        options: dict[str, Any] = {"reshard_after_forward": reshard}
        if policy is not None:
            options["mp_policy"] = policy
        for block in blocks:
            fully_shard(block, **options)
        self.model = fully_shard(model, **options)
        self.optimizer = _adamw(model.parameters())

    def train(self, *batch: Any) -> float:
        loss = self.model(*batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def _json(stage: int, bf16: bool, rows: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": bf16},
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "betas": list(BETAS), "weight_decay": WEIGHT_DECAY}},
    }


class Tessera(Contender):
    def __init__(self, model: nn.Module, bf16: bool, stage: int, rows: int) -> None:
        import tessera

        self.name = f"Tessera {stage}"
        self.engine, *_ = tessera.initialize(model=model, config=_json(stage, bf16, rows))

    def train(self, *batch: Any) -> float:
        loss = self.engine(*batch)
        loss.backward()
        self.engine.step()
        return loss.item()

    def close(self) -> None:
        self.engine.destroy()


class DeepSpeed(Contender):
    """DeepSpeed with the settings that were best here: no overflow check, buckets of the model's size."""

    def __init__(self, model: nn.Module, bf16: bool, stage: int, rows: int) -> None:
        import deepspeed

        self.name = f"DeepSpeed {stage}"
        config = _json(stage, bf16, rows)
        size = sum(p.numel() for p in model.parameters())
        config["zero_optimization"].update(reduce_bucket_size=size, allgather_bucket_size=size + size % 2)
        if stage in (1, 2):
            config["zero_optimization"]["use_multi_rank_bucket_allreduce"] = False
        if bf16:
            config["bf16"]["check_grad_overflow"] = False
        self.engine, *_ = deepspeed.initialize(model=model, config=config)

    def train(self, *batch: Any) -> float:
        loss = self.engine(*batch)
        self.engine.backward(loss)
        self.engine.step()
        return loss.item()

    def close(self) -> None:
        self.engine.destroy()


def contenders(
    names: list[str], make: Callable[[], nn.Module], bf16: bool, rows: int, blocks: Callable[[nn.Module], list[Any]]
) -> list[Contender]:
    """Builds the named contenders on copies of one model. Peers that are not installed are left out."""
    original = make()
    result: list[Contender] = []
    for name in names:
        kind, _, stage = name.partition(":")
        if kind == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
            continue
        if kind in ("ddp", "fsdp2", "deepspeed") and not dist.is_initialized():
            continue
        model = copy.deepcopy(original)
        if kind == "bare":
            result.append(Bare(model, bf16))
        elif kind == "ddp":
            result.append(Bare(model, bf16, ddp=True))
        elif kind == "fsdp2":
            result.append(Fsdp2(model, bf16, blocks(model), reshard=stage == "3"))
        elif kind == "deepspeed":
            result.append(DeepSpeed(model, bf16, int(stage), rows))
        else:
            result.append(Tessera(model, bf16, int(stage), rows))
    return result
