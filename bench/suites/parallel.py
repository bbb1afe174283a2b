"""A Llama whose weights are cut over the ranks (tensor parallel), or whose sequence is (Ulysses): forward and backward,
and the bytes that a rank sends."""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from llama import SIZES, LlamaSizes, attend, llama
from measure import gate, interleaved, median, ratio, summary
from report import Goal, Result, cell, table
from torch import nn
from trainers import Trainer

from suites.common import close

LR = 1e-2
WANTED = 0.9  # of the time of the fastest other
# Operation of the transport -> what a rank sends of the bytes that the profiler shows, for n ranks.
SENT: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
}


class Plain(Trainer):
    """SGD of what this rank holds."""

    def __init__(self, name: str, model: nn.Module) -> None:
        self.name, self.model = name, model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=LR)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def sent(self) -> int | None:
        """Bytes since the last call, where it counts them itself."""
        return None


def bytes_of(group: Any) -> int:
    stats = group.stats()
    group.reset_stats()
    kinds = (stats.all_gather, stats.reduce_scatter, stats.all_reduce, stats.all_to_all, stats.broadcast)
    return sum(int(kind.bytes) for kind in kinds)


# ---------------------------------------------------------------- tensor parallel


class Engine(Plain):
    """Of Tessera or DeepSpeed."""

    def __init__(self, name: str, engine: Any) -> None:
        self.name, self.model, self.engine = name, engine, engine

    def backward(self, loss: torch.Tensor) -> None:
        self.engine.backward(loss)

    def step(self) -> None:
        self.engine.step()

    def close(self) -> None:
        self.engine.destroy()


class Tessera(Engine):
    def sent(self) -> int:
        import tessera

        return bytes_of(self.engine.core.mesh().group(tessera._core.Axis.Tp))


def config_of(sizes: LlamaSizes, ranks: int, bf16: bool) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": sizes.batch,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 0},
        "bf16": {"enabled": bf16},
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "tensor_parallel": {"autotp_size": ranks, "preset_model": "llama"},
    }


def tessera_cut(sizes: LlamaSizes, ranks: int, bf16: bool, flags: list[str]) -> Plain:
    import tessera

    config = config_of(sizes, ranks, bf16)
    if "norms" in flags:
        config["tessera"] = {"sequence_parallel_norms": True}
    with mock.patch.dict(os.environ, {"TESSERA_TRANSPORT": "gloo"} if "gloo" in flags else {}):
        engine, *_ = tessera.initialize(model=llama(sizes), config=config)
    return Tessera("Tessera AutoTP" + named(flags), engine)


def deepspeed_cut(sizes: LlamaSizes, ranks: int, bf16: bool, flags: list[str]) -> Plain:
    import deepspeed

    model = llama(sizes)
    engine, *_ = deepspeed.initialize(model=model, config=config_of(sizes, ranks, bf16))
    return Engine("DeepSpeed AutoTP", engine)


def dtensor_cut(sizes: LlamaSizes, ranks: int, bf16: bool, flags: list[str]) -> Plain:
    """The plans of PyTorch's tutorial of Llama; with `norms` those with SequenceParallel."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh, model = init_device_mesh("cpu", (ranks,)), llama(sizes)
    if bf16:
        model.bfloat16()
    parts = "norms" in flags
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    rows = ("self_attn.o_proj", "mlp.down_proj")
    out: dict[str, Any] = {"output_layouts": Shard(1)} if parts else {}
    plan: dict[str, Any] = {name: ColwiseParallel() for name in columns} | {n: RowwiseParallel(**out) for n in rows}
    if parts:
        plan |= dict.fromkeys(("input_layernorm", "post_attention_layernorm"), SequenceParallel())
        whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        plan |= dict.fromkeys(("self_attn", "mlp"), whole)
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    if parts:
        split = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        join = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
        parallelize_module(
            model, mesh, {"model.embed_tokens": split, "model.norm": SequenceParallel(), "lm_head": join}
        )
    return Plain("DTensor plans" + named(flags), model)


def named(flags: list[str]) -> str:
    words = {"norms": ", sequence-parallel norms", "gloo": ", over Gloo", "parts": ", in two parts"}
    return "".join(words[flag] for flag in flags)


# ---------------------------------------------------------------- sequence parallel


class Ulysses(Plain):
    """Each rank has a part of the sequence and the whole model; gradients stay its own."""

    group: Any = None

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        part = slice(None), slice(*own_range(tokens.size(1)))
        out: torch.Tensor = self.model(tokens[part], labels[part])
        return out

    def sent(self) -> int | None:
        return None if self.group is None else bytes_of(self.group)


def own_range(length: int) -> tuple[int, int]:
    part = length // dist.get_world_size()
    return dist.get_rank() * part, (dist.get_rank() + 1) * part


def tessera_shared(sizes: LlamaSizes, ranks: int, bf16: bool, flags: list[str]) -> Plain:
    from tessera.sequence import SequenceAttention

    import tessera

    with mock.patch.dict(os.environ, {"TESSERA_TRANSPORT": "gloo"} if "gloo" in flags else {}):
        group = tessera.c10d_group(dist.new_group().group_name)
    attention = SequenceAttention(attend, group, parts=2 if "parts" in flags else 1)
    entry = Ulysses("Tessera Ulysses" + named(flags), shared_model(sizes, attention, bf16))
    entry.group = group
    return entry


def deepspeed_shared(sizes: LlamaSizes, ranks: int, bf16: bool, flags: list[str]) -> Plain:
    import deepspeed
    from deepspeed.sequence.layer import DistributedAttention

    deepspeed.init_distributed("gloo", verbose=False)
    attention = DistributedAttention(attend, dist.group.WORLD, scatter_idx=2, gather_idx=1)
    return Ulysses("DeepSpeed Ulysses", shared_model(sizes, lambda q, k, v: attention(q, k, v, 0), bf16))


def shared_model(sizes: LlamaSizes, attention: Any, bf16: bool) -> nn.Module:
    model = llama(sizes, attention)
    return model.bfloat16() if bf16 else model


# ---------------------------------------------------------------- the report

Make = Callable[[LlamaSizes, int, bool, list[str]], Plain]
WAYS: dict[str, dict[str, Make]] = {
    "tensor parallel": {"tessera": tessera_cut, "dtensor": dtensor_cut, "deepspeed": deepspeed_cut},
    "sequence parallel": {"tessera": tessera_shared, "deepspeed": deepspeed_shared},
}
FLAGS = {
    "tensor parallel": {"tessera": ("norms", "gloo"), "dtensor": ("norms",), "deepspeed": ()},
    "sequence parallel": {"tessera": ("gloo", "parts"), "deepspeed": ()},
}


def entries_of(args: argparse.Namespace, way: str, sizes: LlamaSizes, bf16: bool) -> list[Plain]:
    entries = []
    for peer in args.peers:
        kind, *flags = peer.split("+")
        if kind not in WAYS["tensor parallel"]:
            raise SystemExit(f"no trainer is called '{peer}'; {', '.join(WAYS['tensor parallel'])}")
        missing = kind == "deepspeed" and importlib.util.find_spec("deepspeed") is None
        if missing or kind not in WAYS[way] or not set(flags) <= set(FLAGS[way][kind]):
            continue
        entries.append(WAYS[way][kind](sizes, args.ranks, bf16, flags))
    return entries


def counted(entry: Plain, batch: tuple[Any, ...], ranks: int, width: int) -> float:
    """Bytes that this rank sends in one forward and backward: as its groups count, or by the shapes that the profiler
    shows, with elements of `width` bytes."""
    entry.sent()
    with torch.profiler.profile(record_shapes=True) as profile:
        entry.backward(entry.forward(*batch))
    own = entry.sent()
    if own is not None:
        return own
    total = 0.0
    for event in profile.events():
        operation = next((name for name in SENT if event.name == f"gloo:{name}"), None)
        if operation is not None:
            # Flat ones are gradients, of a group of one rank.
            elements = sum(torch.Size(shape).numel() for shape in event.input_shapes if len(shape) > 1)
            total += SENT[operation](ranks) * elements * width
    return total


def least(way: str, sizes: LlamaSizes, ranks: int, bf16: bool) -> int:
    """What a rank must send: of tensor parallelism the sums at the borders of blocks, of Ulysses the exchanges."""
    import tessera

    options: dict[str, Any] = {"tp": ranks} if way == "tensor parallel" else {"sp": ranks}
    dtype = torch.bfloat16 if bf16 else torch.float32
    cost = tessera.parallel.cost(sizes.config, length=sizes.length, batch=sizes.batch, dtype=dtype, **options)
    return cost.bytes("tp" if way == "tensor parallel" else "sp")


def bench_parallel(args: argparse.Namespace) -> Result:
    if args.ranks == 1:
        raise SystemExit("parallel: nothing is cut over one rank; add --ranks 2")
    size = "small" if args.quick else "10M"
    sizes, text, goals = SIZES[size], [], []
    data: dict[str, Any] = {}
    headline = []
    generator = torch.Generator().manual_seed(1)  # all ranks have the same batch
    tokens = torch.randint(0, sizes.vocabulary, (sizes.batch, sizes.length + 1), generator=generator)
    batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    for way in WAYS:
        for precision in args.precisions or ["fp32"]:
            bf16 = precision == "bf16"
            entries = entries_of(args, way, sizes, bf16)
            gate(entries, batch, 0.05 if bf16 else 1e-3)
            sent = {entry.name: counted(entry, batch, args.ranks, 2 if bf16 else 4) for entry in entries}
            for entry in entries:
                entry.step()
            times = interleaved(entries, batch, args.rounds)
            close(list(entries))
            seconds = {n: [f + b for f, b in zip(t.forward, t.backward, strict=True)] for n, t in times.items()}
            title, minimum = f"{way}, {precision}", least(way, sizes, args.ranks, bf16)
            text += [f"## {title}", table(HEADER, rows_of(seconds, sent, minimum))]
            found = goals_of(title, seconds, sent, minimum)
            goals += found
            headline += [f"{title}: time over the best other {goal.value:.2f}" for goal in found[:1]]
            data[title] = {
                name: {"ms": summary(values), "sent": sent[name], "least": minimum} for name, values in seconds.items()
            }
    return Result([intro(args, sizes), *text], {"parallel": data}, goals, headline=headline)


HEADER = ["engine", "forward and backward, ms", "time over the fastest", "MB sent a rank", "of the least"]


def intro(args: argparse.Namespace, sizes: LlamaSizes) -> str:
    return (
        f"A Llama of {sizes.layers} layers, width {sizes.hidden}, {sizes.heads} heads ({sizes.keys} of keys and "
        f"values), inner width {sizes.inner}, {sizes.batch} sequences of {sizes.length} tokens over {args.ranks} "
        "ranks: its weights cut, then its sequence. Losses of five steps are compared first. Tessera's ranks talk "
        "through shared memory where it does not say 'over Gloo', those of the others over Gloo. The least that a "
        "rank must send: two sums of the activations a block in either direction; query, key, value and result of "
        "each attention, once each way. Bytes of Tessera are those its groups count; of the others by the shapes of "
        "activations that the profiler shows of Gloo's calls."
    )


def rows_of(seconds: dict[str, list[float]], sent: dict[str, float], minimum: int) -> list[list[str]]:
    fastest = min(seconds, key=lambda name: median(seconds[name]))
    return [
        [
            name,
            cell(summary(values)),
            cell(ratio(values, seconds[fastest]), 3),
            f"{sent[name] / 1e6:.3f}" if sent[name] else "-",
            f"{sent[name] / minimum:.3f}" if sent[name] else "-",
        ]
        for name, values in seconds.items()
    ]


def goals_of(title: str, seconds: dict[str, list[float]], sent: dict[str, float], minimum: int) -> list[Goal]:
    own = next((name for name in seconds if name.startswith("Tessera")), None)
    others = [name for name in seconds if not name.startswith("Tessera")]
    if own is None:
        return []
    goals = []
    if others:
        best = min(others, key=lambda name: median(seconds[name]))
        goals.append(Goal(f"{title}: time of {own} over {best}", ratio(seconds[own], seconds[best])["median"], WANTED))
    goals.append(Goal(f"{title}: bytes {own} sends over the least", sent[own] / minimum, 1.0))
    return goals
