"""The model, data and configuration that DeepSpeed and Tessera train alike. Needs torch alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

STAGES = (0, 1, 2, 3)
PRECISIONS = ("fp32", "bf16", "fp16")
STEPS = 3  # before a checkpoint, and after it


class Net(nn.Module):
    """Odd sizes, a tied and a frozen parameter, buffers (one is not saved), a parameter that is not contiguous and one
    of a single element."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.frozen = nn.Linear(6, 5)
        self.up = nn.Linear(5, 6)
        self.norm = nn.LayerNorm(6)
        self.turned = nn.Parameter(torch.randn(6, 3).t())
        self.back = nn.Linear(3, 6, bias=False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.tensor([1.5]))
        self.register_buffer("calls", torch.zeros(2, 3))
        self.register_buffer("temporary", torch.ones(2), persistent=False)
        for param in self.frozen.parameters():
            param.requires_grad_(False)

    def forward(self, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls[0] += 1
        x = self.norm(self.up(torch.tanh(self.frozen(self.embed(tokens)))))
        x = x + self.back(torch.nn.functional.linear(x, self.turned))
        out = self.head(x) * self.gain
        return nn.functional.cross_entropy(out.float().flatten(0, -2), target.flatten())


def make() -> Net:
    torch.manual_seed(3)
    return Net()


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two, the second one in another order than the module's."""
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    matrices = [param for name, param in named if param.dim() > 1]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": [param for name, param in named[::-1] if param.dim() == 1], "weight_decay": 0.0},
    ]


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(11, (4, 7), generator=generator), torch.randint(11, (4, 7), generator=generator)


def config(stage: int, precision: str, **more: Any) -> dict[str, Any]:
    result: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.9, 0.98], "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 5}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 10},
    }
    if precision == "bf16":
        result["bf16"] = {"enabled": True}
    if precision == "fp16":
        result["fp16"] = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}
    return {**result, **more}
