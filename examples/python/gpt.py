"""A byte-level GPT: pre-norm blocks, causal attention, GELU MLP, no dropout. examples/cpp/gpt.h is its twin."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GptOptions:
    layers: int = 6
    width: int = 384
    heads: int = 6
    context: int = 256
    vocabulary: int = 256


def has_bf16_instructions() -> bool:
    try:
        return "bf16" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return True


class WideLinear(torch.autograd.Function):
    """Linear for bf16 on processors without bf16 instructions: the products in fp32, inputs and results in bf16.

    The arithmetic is that of torch's own bf16 linear (exact products, fp32 sums, one rounding), 2 to 3 times faster.
    """

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return F.linear(x.float(), weight.float(), bias.float()).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        wide = grad.reshape(-1, grad.shape[-1]).float()
        grad_x = (wide @ weight.float()).reshape(x.shape).to(x.dtype)
        grad_weight = (wide.t() @ x.reshape(-1, x.shape[-1]).float()).to(weight.dtype)
        return grad_x, grad_weight, wide.sum(0).to(weight.dtype)


class Linear(nn.Linear):
    wide = not has_bf16_instructions()

    def forward(self, x: Tensor) -> Tensor:
        if self.wide and x.is_cpu and x.dtype == torch.bfloat16:
            return WideLinear.apply(x, self.weight, self.bias)
        return super().forward(x)


class Block(nn.Module):
    def __init__(self, options: GptOptions) -> None:
        super().__init__()
        width = options.width
        self.heads = options.heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = Linear(width, 3 * width)
        self.out = Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = Linear(width, 4 * width)
        self.down = Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        if Linear.wide and x.is_cpu:  # as in WideLinear
            q, k, v = q.float(), k.float(), v.float()
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).to(x.dtype)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, options: GptOptions) -> None:
        super().__init__()
        self.options = options
        self.token = nn.Embedding(options.vocabulary, options.width)
        self.position = nn.Embedding(options.context, options.width)
        self.blocks = nn.Sequential(*(Block(options) for _ in range(options.layers)))
        self.norm = nn.LayerNorm(options.width)
        self.head = Linear(options.width, options.vocabulary)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                last = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * self.options.layers) if last else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def logits(self, x: Tensor) -> Tensor:
        """x: (batch, length) of int64 bytes -> (batch, length, vocabulary)."""
        positions = torch.arange(x.shape[1], device=x.device)
        return self.head(self.norm(self.blocks(self.token(x) + self.position(positions))))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean cross entropy of the next bytes `y`, both (batch, length); a scalar in fp32."""
        return F.cross_entropy(self.logits(x).float().flatten(0, 1), y.flatten())

    @torch.no_grad()
    def generate(self, prompt: bytes, count: int, temperature: float = 0.7, seed: int = 0) -> bytes:
        """Continues `prompt` by `count` bytes."""
        generator = torch.Generator().manual_seed(seed)
        text, device = torch.tensor([list(prompt)]), self.token.weight.device
        for _ in range(count):
            last = self.logits(text[:, -self.options.context :].to(device))[:, -1].float().cpu()
            chances = torch.softmax(last / temperature, dim=-1)
            text = torch.cat([text, torch.multinomial(chances, 1, generator=generator)], dim=1)
        return bytes(text[0, len(prompt) :].tolist())
