"""One training loop behind one face: Tessera, and the engines and hand-written loops it is measured against.

A trainer owns a model. A step is forward(*batch), backward(loss), step(): three calls, so that each can be timed. A
cycle is several micro-steps and one update.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import reference
import torch
import torch.distributed as dist
from models import blocks_of
from torch import nn

WEIGHT_DECAY, CLIP = 0.01, 1.0
LOW_PRECISION = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
# Kinds of trainers, and the bytes a parameter (weight, gradient, master, moments) that may be asked for instead of
# those that bf16 has by default.
STATES: dict[str, tuple[int, ...]] = {
    "autograd": (),
    "bare": (),
    "ddp": (),
    "tessera": (16, 14, 10, 8),
    "fsdp2": (8,),
    "deepspeed": (10,),
}
STAGES = {"tessera": (0, 1, 2, 3), "fsdp2": (2, 3), "deepspeed": (0, 1, 2, 3)}
FLAGS = {"tessera": ("nearest", "shared", "gloo", "early", "units"), "bare": ("up",), "ddp": ("up",)}
LIBRARIES = {"fsdp2": "torch.distributed.fsdp", "tessera": "tessera", "deepspeed": "deepspeed"}


@dataclass(frozen=True)
class Recipe:
    """How all trainers of a run train. So small a rate that the first steps of a large model do not magnify
    differences in rounding."""

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.95)
    rows: int = 1  # sequences of a rank and step
    seed: int = 0  # of stochastic rounding
    written_out: bool = False  # plain loops: AdamW and clipping of reference.py, whose bits are defined


@dataclass(frozen=True)
class Spec:
    """What a trainer's name says: KIND[:STAGE][+STATES][+FLAG]."""

    kind: str
    stage: int = 0
    states: int | None = None  # None: what the precision has by default
    shared: bool = False  # one copy of the parameters for all ranks of the host
    early: bool = False  # updates units within the backward and clips nothing
    units: bool = False  # every block is a unit, however small
    gloo: bool = False  # ranks talk over Gloo as those of the others do, not through shared memory
    nearest: bool = False  # low-precision states are rounded to nearest, not stochastically
    up: bool = False  # bf16 weights of the plain loop round ties away from zero, as those of 14 bytes must

    @property
    def suffix(self) -> str:
        states = "" if self.states is None else f", {self.states} bytes"
        words = {
            ", nearest": self.nearest,
            ", shared": self.shared,
            ", early": self.early,
            ", units": self.units,
            ", over Gloo": self.gloo,
            ", ties up": self.up,
        }
        return states + "".join(word for word, said in words.items() if said)

    @property
    def label(self) -> str:
        """In reports."""
        front = {
            "autograd": "autograd alone",
            "bare": "bare loop",
            "ddp": "DDP",
            "tessera": f"Tessera {self.stage}",
            "fsdp2": f"FSDP2 as ZeRO-{self.stage}",
            "deepspeed": f"DeepSpeed {self.stage}",
        }
        return front[self.kind] + self.suffix


def parse(name: str) -> Spec:
    """`tessera:1+10` is stage 1 with 10 bytes of states a parameter, `tessera:3+shared` has parameters that all ranks
    share, `+early` updates within the backward, `+units` makes every block a unit, `fsdp2:3` is FSDP2 as ZeRO-3,
    `bare` is `bare`."""
    front, *more = name.split("+")
    kind, _, stage = front.partition(":")
    if kind not in STATES or (kind in STAGES) != bool(stage):
        raise SystemExit(f"no trainer is called '{name}'; {', '.join(STATES)}, with a stage: {', '.join(STAGES)}")
    if stage and stage not in map(str, STAGES[kind]):
        raise SystemExit(f"trainer '{name}': the stages of {kind} are {', '.join(map(str, STAGES[kind]))}")
    flags = [word for word in more if word in FLAGS.get(kind, ())]
    states = [word for word in more if word not in flags]
    if len(states) > 1 or any(word not in map(str, STATES[kind]) for word in states):
        known = ", ".join(f"+{n}" for n in (*STATES[kind], *FLAGS.get(kind, ()))) or "nothing"
        raise SystemExit(f"trainer '{name}': {kind} takes {known} after its name")
    return Spec(kind, int(stage or 0), int(states[0]) if states else None, **dict.fromkeys(flags, True))


class Trainer:
    name = ""
    trains = True  # False: the loss does not change
    model: Any
    optimizer: Any
    micro_steps = 1
    construction = 0.0  # seconds
    first_step: float | None = None

    def forward(self, *batch: Any) -> torch.Tensor:
        return self.model(*batch)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        """Everything between the backward and updated weights, gradients dropped."""
        raise NotImplementedError

    def micro_step(self, last: bool, *batch: Any) -> torch.Tensor:
        """One of `micro_steps` forwards and backwards; the update after the last."""
        loss = self.forward(*batch)
        self.backward(loss if self.micro_steps == 1 else loss / self.micro_steps)
        if last:
            self.step()
        return loss

    def cycle(self, batches: Sequence[tuple[Any, ...]]) -> float:
        """One update, from as many batches as there are micro-steps; their mean loss."""
        start = time.perf_counter()
        losses = [self.micro_step(number + 1 == len(batches), *batch) for number, batch in enumerate(batches)]
        loss = sum(loss.item() for loss in losses) / len(losses)
        if self.first_step is None:
            self.first_step = time.perf_counter() - start
        return loss

    def train(self, *batch: Any) -> float:
        return self.cycle([batch])

    def set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def masters(self) -> list[torch.Tensor] | None:
        """The fp32 values that the optimizer updates, in the model's order; None where there are none to read."""
        return None

    def close(self) -> None:
        pass


def _adamw(params: Any, recipe: Recipe) -> Any:
    options: dict[str, Any] = {"lr": recipe.lr, "betas": recipe.betas, "weight_decay": WEIGHT_DECAY}
    if recipe.written_out:
        return reference.AdamW(params, eps=1e-8, **options)
    return torch.optim.AdamW(params, fused=True, **options)


class Autograd(Trainer):
    """Forward and backward of plain PyTorch; the gradients are dropped. What no engine can go below."""

    trains = False

    def __init__(self, model: nn.Module, bf16: bool) -> None:
        self.model = model.bfloat16() if bf16 else model
        self.params = list(model.parameters())

    def step(self) -> None:
        for param in self.params:
            param.grad = None


class Bare(Trainer):
    """Plain PyTorch: clip_grad_norm_ and AdamW; in bf16 with fp32 master weights kept beside."""

    def __init__(self, model: nn.Module, bf16: bool, spec: Spec, recipe: Recipe) -> None:
        self.bf16, self.up, self.written_out = bf16, spec.up, recipe.written_out
        if bf16:
            model = model.bfloat16()
        self.params = list(model.parameters())
        # From the cast weights, as the engines do.
        self.leaves = [p.detach().float().requires_grad_() for p in self.params] if bf16 else self.params
        self._write_weights()
        several = spec.kind == "ddp"
        self.model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True) if several else model
        self.optimizer = _adamw(self.leaves, recipe)

    def micro_step(self, last: bool, *batch: Any) -> torch.Tensor:
        several = isinstance(self.model, nn.parallel.DistributedDataParallel) and not last
        with self.model.no_sync() if several else contextlib.nullcontext():
            return super().micro_step(last, *batch)

    def step(self) -> None:
        if self.bf16:
            for leaf, param in zip(self.leaves, self.params, strict=True):
                assert param.grad is not None
                leaf.grad = param.grad.float()
                param.grad = None
        (reference.clip_by_norm if self.written_out else nn.utils.clip_grad_norm_)(self.leaves, CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._write_weights()

    @torch.no_grad()
    def _write_weights(self) -> None:
        if self.bf16 and self.up:
            for param, leaf in zip(self.params, self.leaves, strict=True):
                reference.round_ties_up(param.detach(), leaf)
        elif self.bf16:
            torch._foreach_copy_(self.params, self.leaves)

    def masters(self) -> list[torch.Tensor] | None:
        return [leaf.detach() for leaf in self.leaves]


class Fsdp2(Trainer):
    """fully_shard of every block and the root; fp32 parameters, bf16 compute where asked; with 8 bytes a parameter all
    in bf16, rounded to nearest."""

    def __init__(self, model: nn.Module, bf16: bool, spec: Spec, recipe: Recipe) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        options: dict[str, Any] = {"reshard_after_forward": spec.stage == 3}
        if spec.states is not None:
            model.bfloat16()
        elif bf16:
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        for block in blocks_of(model):
            fully_shard(block, **options)
        self.model = fully_shard(model, **options)
        self.optimizer = _adamw(model.parameters(), recipe)

    def micro_step(self, last: bool, *batch: Any) -> torch.Tensor:
        if self.micro_steps > 1:
            self.model.set_requires_gradient_sync(last)
        return super().micro_step(last, *batch)

    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()


def _json(spec: Spec, bf16: bool, micro_steps: int, zero: dict[str, Any], recipe: Recipe) -> dict[str, Any]:
    low = spec.states in (8, 10)
    params = {"lr": recipe.lr, "betas": list(recipe.betas), "weight_decay": WEIGHT_DECAY}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": recipe.rows,
        "gradient_accumulation_steps": micro_steps,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": spec.stage} | (zero if spec.stage == 3 else {}),
        "bf16": dict(LOW_PRECISION) if low else {"enabled": bf16 or spec.states is not None},
        "optimizer": {"type": "AdamW", "params": params},
    }
    own: dict[str, Any] = {} if spec.states is None else {"state_bytes": spec.states}
    if low and not spec.nearest:
        own["seed"] = recipe.seed
    if spec.nearest:
        own["rounding"] = "nearest"
    if spec.shared:
        own["shared_parameters"] = True
    if spec.units:
        own["min_unit_elements"] = 1
    if spec.early:
        own["update_in_backward"] = True
        config["gradient_clipping"] = 0
        config["bf16"]["check_grad_overflow"] = False
    return config | ({"tessera": own} if own and spec.kind == "tessera" else {})


class Engine(Trainer):
    """Divides by the number of micro-steps itself, and is told of each."""

    engine: Any

    def micro_step(self, last: bool, *batch: Any) -> torch.Tensor:
        loss = self.forward(*batch)
        self.backward(loss)
        self.step()
        return loss

    def step(self) -> None:
        self.engine.step()

    def close(self) -> None:
        self.engine.destroy()


class Tessera(Engine):
    def __init__(self, model: nn.Module, config: dict[str, Any], spec: Spec) -> None:
        import tessera

        with mock.patch.dict(os.environ, {"TESSERA_TRANSPORT": "gloo"} if spec.gloo else {}):  # read once, here
            self.engine, *_ = tessera.initialize(model=model, config=config)
        self.model, self.optimizer = self.engine, self.engine.optimizer

    def masters(self) -> list[torch.Tensor] | None:
        from tessera.state import get_full_fp32_param

        found = [get_full_fp32_param(self.engine, param) for param in self.model.module.parameters()]
        return [master for master in found if master is not None]


class DeepSpeed(Engine):
    """DeepSpeed with the settings that were best here: no overflow check, buckets of the model's size."""

    def __init__(self, model: nn.Module, config: dict[str, Any], spec: Spec) -> None:
        import deepspeed

        size = sum(p.numel() for p in model.parameters())
        config["zero_optimization"].update(reduce_bucket_size=size, allgather_bucket_size=size + size % 2)
        if spec.stage in (1, 2):
            config["zero_optimization"]["use_multi_rank_bucket_allreduce"] = False
        if config["bf16"]["enabled"]:
            config["bf16"]["check_grad_overflow"] = False
        self.engine, *_ = deepspeed.initialize(model=model, config=config)
        self.model, self.optimizer = self.engine, self.engine.optimizer

    def backward(self, loss: torch.Tensor) -> None:
        self.engine.backward(loss)


def installed(name: str) -> bool:
    return parse(name).kind != "deepspeed" or importlib.util.find_spec("deepspeed") is not None


def available(name: str) -> bool:
    """Whether the trainer can be built: peers that are not installed are left out."""
    return installed(name) and (parse(name).kind not in ("ddp", "fsdp2", "deepspeed") or dist.is_initialized())


def _build(spec: Spec, model: nn.Module, bf16: bool, zero: dict[str, Any], micro_steps: int, recipe: Recipe) -> Trainer:
    if spec.kind == "autograd":
        return Autograd(model, bf16)
    if spec.kind in ("bare", "ddp"):
        return Bare(model, bf16, spec, recipe)
    if spec.kind == "fsdp2":
        return Fsdp2(model, bf16, spec, recipe)
    config = _json(spec, bf16, micro_steps, zero, recipe)
    return (Tessera if spec.kind == "tessera" else DeepSpeed)(model, config, spec)


def build(
    name: str,
    model: nn.Module,
    bf16: bool,
    zero: dict[str, Any] | None = None,
    micro_steps: int = 1,
    recipe: Recipe = Recipe(),
) -> Trainer:
    """`name`: see parse. Takes over `model`. `zero`: more of the section zero_optimization in stage 3. The time of the
    construction is without that of importing the library."""
    spec = parse(name)
    if spec.kind in LIBRARIES:
        importlib.import_module(LIBRARIES[spec.kind])
    _adamw([nn.Parameter(torch.zeros(1))], Recipe())  # the first optimizer of a process loads much of torch
    start = time.perf_counter()
    entry = _build(spec, model, bf16, zero or {}, micro_steps, recipe)
    entry.construction = time.perf_counter() - start
    entry.name, entry.micro_steps = spec.label, micro_steps
    return entry


def trainers(
    names: list[str],
    make: Callable[[], nn.Module],
    bf16: bool,
    zero: dict[str, Any] | None = None,
    micro_steps: int = 1,
) -> list[Trainer]:
    """The named trainers, as far as they are available, on copies of one model."""
    original = make()
    return [build(name, copy.deepcopy(original), bf16, zero, micro_steps) for name in names if available(name)]
