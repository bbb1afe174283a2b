"""The same training in plain PyTorch: DistributedDataParallel, bf16 weights with fp32 masters, fused AdamW."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class PlainTrainer:
    def __init__(self, model: nn.Module, config: dict, dtype: torch.dtype) -> None:
        self.model = DistributedDataParallel(model.to(dtype))
        self.params = list(model.parameters())
        self.masters = [p.detach().float() for p in self.params] if dtype != torch.float32 else self.params
        options = config["optimizer"]["params"]
        self.optimizer = torch.optim.AdamW(self.masters, **options, fused=True)
        self.base_lr = options["lr"]
        self.schedule = config["scheduler"]["params"]
        self.clip = config["gradient_clipping"]
        self.steps = 0

    def train_step(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.model(x, y)
        loss.backward()
        if self.masters is not self.params:
            for master, param in zip(self.masters, self.params, strict=True):
                master.grad = param.grad.float()
                param.grad = None
        nn.utils.clip_grad_norm_(self.masters, self.clip)
        self._set_lr()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.masters is not self.params:
            with torch.no_grad():
                torch._foreach_copy_(self.params, self.masters)
        self.steps += 1
        return loss

    def _set_lr(self) -> None:
        """WarmupCosineLR of the configuration: linear warm-up, then a cosine down to 1e-4 of the rate."""
        warmup, total = self.schedule["warmup_num_steps"], self.schedule["total_num_steps"]
        last = self.steps - 1  # the schedule's first iteration counts as the one before the first step
        if last < warmup:
            ratio = max(last, 0) / warmup
        else:
            cosine = (1 + math.cos(math.pi * min(1.0, (last - warmup + 1) / (total - warmup)))) / 2
            ratio = 1e-4 + (1 - 1e-4) * cosine
        for group in self.optimizer.param_groups:
            group["lr"] = self.base_lr * ratio
