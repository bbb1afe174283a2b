"""The rows of the tables: how each holds its model states, and how it trains. Every row is a Contender of the
benchmarks (bench/contenders.py) whose learning rate the training loop sets."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from contenders import Contender
from torch import Tensor, nn

from tables.reference import AdamW, clip_by_norm, round_ties_up

CLIP, WEIGHT_DECAY, EPS = 1.0, 0.01, 1e-8
BASELINE = "plain"

LOW_PRECISION: dict[str, Any] = {
    "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
}


@dataclass(frozen=True)
class Mode:
    label: str
    kind: str  # "plain", "tessera" or "deepspeed"
    config: dict[str, Any] = field(default_factory=dict)  # what the JSON says about precision
    parts: tuple[int, int, int, int] = (2, 2, 4, 8)  # bytes a parameter: weight, gradient, master beside it, moments


MODES: dict[str, Mode] = {
    "fp32": Mode("PyTorch, fp32", "plain", parts=(4, 4, 0, 8)),
    "plain": Mode("PyTorch, fp32 master", "plain"),
    "plain-ties-up": Mode("PyTorch, fp32 master, ties up", "plain"),
    "tessera-16": Mode("Tessera, fp32 master", "tessera", {"bf16": {"enabled": True}, "tessera": {"state_bytes": 16}}),
    "tessera-14": Mode("Tessera, exact", "tessera", {"bf16": {"enabled": True}}, (2, 2, 2, 8)),
    "tessera-10": Mode("Tessera, 10 bytes", "tessera", LOW_PRECISION, (2, 2, 2, 4)),
    "tessera-8": Mode("Tessera, 8 bytes", "tessera", LOW_PRECISION | {"tessera": {"state_bytes": 8}}, (2, 2, 0, 4)),
    "tessera-8-nearest": Mode(
        "Tessera, 8 bytes, nearest",
        "tessera",
        LOW_PRECISION | {"tessera": {"state_bytes": 8, "rounding": "nearest"}},
        (2, 2, 0, 4),
    ),
    "deepspeed": Mode("DeepSpeed, fp32 master", "deepspeed", {"bf16": {"enabled": True}}),
    "deepspeed-low": Mode("DeepSpeed, low precision", "deepspeed", LOW_PRECISION, (2, 2, 2, 4)),
}
# A mode of Tessera -> the loop in plain PyTorch that has its bits.
PARTNERS = {"tessera-16": "plain", "tessera-14": "plain-ties-up"}


def formula(mode: Mode, stage: int, ranks: int) -> float:
    """Bytes a parameter and rank: weight, gradient, master and moments, as the stage divides them. Plain loops: all of
    them on every rank."""
    weight, grad, master, moments = mode.parts
    divided = [1 if mode.kind == "plain" or stage < first else ranks for first in (3, 2, 1)]
    return weight / divided[0] + grad / divided[1] + (master + moments) / divided[2]


@dataclass(frozen=True)
class Recipe:
    lr: float
    betas: tuple[float, float]
    rows: int
    stage: int
    seed: int
    reference: bool = False
    """Plain loops: written out (reference.py), with the bits of Tessera's kernels. Otherwise clip_grad_norm_ and fused
    AdamW, as users write it."""


class Row(Contender):
    """`groups`: the optimizer's param_groups."""

    groups: list[dict[str, Any]]

    def set_lr(self, lr: float) -> None:
        for group in self.groups:
            group["lr"] = lr

    def masters(self) -> list[Tensor] | None:
        """The fp32 values that the optimizer updates, in the model's order; None where there are none to read."""
        raise NotImplementedError


class Plain(Row):
    """PyTorch by hand: weights in bf16, computed from fp32 masters after each step; or fp32 throughout. DDP if there
    are several ranks."""

    def __init__(self, key: str, model: nn.Module, recipe: Recipe) -> None:
        self.name, self.reference, self.ties_up = MODES[key].label, recipe.reference, key == "plain-ties-up"
        bf16 = key != "fp32"
        if bf16:
            model.bfloat16()
        # From the cast weights, as the engines do.
        masters = [p.detach().float() for p in model.parameters()] if bf16 else []
        self.params: list[Tensor] = list(model.parameters())
        self.leaves: list[Tensor] = masters or self.params
        self.bf16 = bf16
        self._write_weights()
        several = dist.is_initialized() and dist.get_world_size() > 1
        self.model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True) if several else model
        options: dict[str, Any] = {"lr": recipe.lr, "betas": recipe.betas, "eps": EPS, "weight_decay": WEIGHT_DECAY}
        self.optimizer: AdamW | torch.optim.AdamW = (
            AdamW(self.leaves, **options) if recipe.reference else torch.optim.AdamW(self.leaves, **options, fused=True)
        )
        self.groups = self.optimizer.param_groups

    def step(self) -> None:
        if self.bf16:
            for master, param in zip(self.leaves, self.params, strict=True):
                assert param.grad is not None
                master.grad = param.grad.float()
                param.grad = None
        if self.reference:
            clip_by_norm(self.leaves, CLIP)
        else:
            nn.utils.clip_grad_norm_(self.leaves, CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._write_weights()

    @torch.no_grad()
    def _write_weights(self) -> None:
        if not self.bf16:
            return
        if not self.ties_up:
            torch._foreach_copy_(self.params, self.leaves)
            return
        for param, master in zip(self.params, self.leaves, strict=True):
            round_ties_up(param.detach(), master)

    def masters(self) -> list[Tensor] | None:
        return [leaf.detach() for leaf in self.leaves]


class Engine(Row):
    """What Tessera and DeepSpeed share: one JSON, and calls of the same names."""

    def _config(self, key: str, recipe: Recipe) -> dict[str, Any]:
        params = {"lr": recipe.lr, "betas": list(recipe.betas), "eps": EPS, "weight_decay": WEIGHT_DECAY}
        return {
            "train_micro_batch_size_per_gpu": recipe.rows,
            "gradient_clipping": CLIP,
            "zero_optimization": {"stage": recipe.stage},
            "optimizer": {"type": "AdamW", "params": params},
        } | {section: dict(keys) for section, keys in MODES[key].config.items()}

    def step(self) -> None:
        self.model.step()

    def close(self) -> None:
        self.model.destroy()

    def masters(self) -> list[Tensor] | None:
        return None


class Tessera(Engine):
    def __init__(self, key: str, model: nn.Module, recipe: Recipe) -> None:
        import tessera

        self.name = MODES[key].label
        config = self._config(key, recipe)
        if "bf16_optimizer_states" in config["bf16"]:
            config.setdefault("tessera", {})["seed"] = recipe.seed
        self.model, *_ = tessera.initialize(model=model, config=config)
        self.groups = self.model.optimizer.param_groups

    def masters(self) -> list[Tensor] | None:
        from tessera.utils import safe_get_full_fp32_param

        found = [safe_get_full_fp32_param(param) for param in self.model.module.parameters()]
        return [master for master in found if master is not None]


class DeepSpeed(Engine):
    """With the settings that were best here: no overflow check, buckets of the model's size."""

    def __init__(self, key: str, model: nn.Module, recipe: Recipe) -> None:
        import deepspeed

        self.name = MODES[key].label
        size = sum(p.numel() for p in model.parameters())
        config = self._config(key, recipe)
        config["bf16"]["check_grad_overflow"] = False
        config["zero_optimization"].update(reduce_bucket_size=size, allgather_bucket_size=size + size % 2)
        if recipe.stage in (1, 2):
            config["zero_optimization"]["use_multi_rank_bucket_allreduce"] = False
        self.model, *_ = deepspeed.initialize(model=model, config=config)
        self.groups = self.model.optimizer.param_groups

    def backward(self, loss: Tensor) -> None:
        self.model.backward(loss)


def available(key: str) -> bool:
    return MODES[key].kind != "deepspeed" or importlib.util.find_spec("deepspeed") is not None


def build(key: str, model: nn.Module, recipe: Recipe) -> Row:
    """Takes over `model`, in fp32."""
    return {"plain": Plain, "tessera": Tessera, "deepspeed": DeepSpeed}[MODES[key].kind](key, model, recipe)
