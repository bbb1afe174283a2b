"""The benchmark's Llama, from a configuration without weights, and what trains it: one contender by its name.

KIND:STATES[+WORD...]: STATES are bytes a parameter, of weights and of what the optimizer keeps (fp32 and bf16: plain
PyTorch's); words say what else is on: autocast, early (the update in the backward), previous (the same, clipped by the
norm of the step before), host (optimizer states there), on (their update runs on into the next forward), share (the
device updates as many of them as is fastest), params (they too), graphs (layers compiled, as CUDA graphs)."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from common import CUDA, DEVICE, ROOT, module_of
from engines import LOW
from install import for_compilers
from torch import nn

LR, CLIP, WEIGHT_DECAY = 1e-4, 1.0, 0.01
Step = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Sizes:
    hidden: int
    layers: int
    heads: int
    inner: int
    vocabulary: int
    rows: int
    length: int
    recompute: bool = False


SIZES = {
    "tiny": Sizes(64, 2, 4, 128, 256, 2, 32),
    "1.3B": Sizes(2048, 24, 16, 5632, 32000, 8, 1024),
    "3B": Sizes(2560, 32, 20, 6912, 32000, 4, 1024),
    "7B": Sizes(4096, 32, 32, 11008, 32000, 2, 1024, recompute=True),
}
AUTO = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
HOST = {"device": "cpu", "pin_memory": True}


@dataclass(frozen=True)
class Contender:
    kind: str  # torch, fsdp2, tessera, deepspeed
    states: str
    words: tuple[str, ...]

    @property
    def autocast(self) -> bool:
        return "autocast" in self.words

    @property
    def early(self) -> bool:
        return "early" in self.words or "previous" in self.words

    @property
    def dtype(self) -> torch.dtype:
        """Of the model that is given to it."""
        whole = self.states == "fp32" or (self.kind == "fsdp2" and self.states == "16")
        return torch.float32 if whole else torch.bfloat16


def parse(name: str) -> Contender:
    front, *words = name.split("+")
    kind, _, states = front.partition(":")
    return Contender(kind, states, tuple(words))


def installed(name: str) -> bool:
    return parse(name).kind != "deepspeed" or importlib.util.find_spec("deepspeed") is not None


def build_model(size: Sizes, dtype: torch.dtype) -> nn.Module:
    """Made where it will be, in its dtype: Transformers' Llama where that is installed, else the one of bench/."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with DEVICE:
            model: nn.Module = (transformers_llama if importlib.util.find_spec("transformers") else plain_llama)(size)
    finally:
        torch.set_default_dtype(before)
    return model.to(DEVICE).train()


def transformers_llama(size: Sizes) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        intermediate_size=size.inner,
        vocab_size=size.vocabulary,
        max_position_embeddings=size.length,
        attn_implementation="sdpa",
        tie_word_embeddings=False,
        use_cache=False,
    )
    model: Any = LlamaForCausalLM(config)
    if size.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def plain_llama(size: Sizes) -> nn.Module:
    assert not size.recompute, "needs transformers"
    bench = module_of(ROOT / "bench" / "llama.py", "llama_of_the_benchmarks")
    sizes = bench.LlamaSizes(
        size.hidden, size.heads, size.heads, size.inner, size.layers, size.vocabulary, size.rows, size.length
    )
    model: nn.Module = bench.Llama(sizes)
    return model


def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    inner: Any = getattr(model, "module", model)
    if hasattr(inner, "generate"):  # Transformers shifts the labels itself
        return model(input_ids=ids, labels=ids).loss
    return model(ids, ids.roll(-1, 1))


# ---- contenders: what makes a step, the engine where there is one, and step() alone
@dataclass(frozen=True)
class Built:
    model: Any
    backward: Callable[[torch.Tensor], Any]
    update: Callable[[], None]
    autocast: Callable[[], Any] = contextlib.nullcontext
    engine: Any = None

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        with self.autocast():
            return loss_of(self.model, ids)

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        loss = self.loss(ids)
        self.backward(loss)
        self.update()
        return loss


def prepare(one: Contender) -> None:
    """What a process does before it makes the model: imports, a group."""
    if one.kind == "tessera":
        importlib.import_module("tessera")
    if one.kind not in ("fsdp2", "deepspeed"):
        return
    port = str(29000 + os.getpid() % 1000)
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    back_end = "nccl" if CUDA else "gloo"
    if one.kind == "deepspeed":
        for_compilers()
        importlib.import_module("deepspeed").init_distributed(back_end)
    else:
        torch.distributed.init_process_group(back_end)


def precision(one: Contender) -> dict[str, Any]:
    """Sections of the configuration of an engine."""
    own: dict[str, Any] = dict(AUTO) if one.autocast else {}
    if one.states in ("8", "10"):
        own["bf16"] = dict(LOW)
    elif one.states != "fp32":
        own["bf16"] = {"enabled": True}
    if one.kind == "tessera" and one.states in ("8", "16"):
        own["tessera"] = {"state_bytes": int(one.states)}
    if one.early:
        own["tessera"] = own.get("tessera", {}) | {"update_in_backward": True}
        own["bf16"]["check_grad_overflow"] = False
    if "previous" in one.words:
        own["tessera"]["clip"] = "previous"
    if "on" in one.words:
        own["tessera"] = own.get("tessera", {}) | {"update_runs_on": True}
    if "share" in one.words:
        own.setdefault("tessera", {})["device_share"] = "auto"
    return own


def json_of(one: Contender, rows: int) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": 2 if "graphs" in one.words else 3}
    if "host" in one.words:
        zero["offload_optimizer"] = HOST
    if "params" in one.words:
        zero["offload_param"] = HOST
    return {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_clipping": 0 if "early" in one.words else CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": WEIGHT_DECAY}},
        "zero_optimization": zero,
        **precision(one),
    }


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=LR, weight_decay=WEIGHT_DECAY, fused=CUDA)


def of_engine(one: Contender, model: nn.Module, rows: int) -> Built:
    config = json_of(one, rows)
    if one.kind == "tessera":
        import tessera

        engine = tessera.initialize(model=model, config=config)[0]
        return Built(engine, engine.backward, engine.step, engine=engine)
    deepspeed = importlib.import_module("deepspeed")
    # Its own optimizer, compiled at first use, only where states are in host memory; else torch's, which is faster.
    if "host" in one.words:
        config["train_batch_size"] = rows
        engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    else:
        del config["optimizer"]
        engine = deepspeed.initialize(model=model, optimizer=adamw(model.parameters()), config=config)[0]
    return Built(engine, engine.backward, engine.step, engine=engine)


def of_torch(one: Contender, model: Any) -> Built:
    if one.kind == "fsdp2":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        more: dict[str, Any] = {} if one.states == "8" else {"mp_policy": policy}
        for layer in model.model.layers:
            fully_shard(layer, **more)
        fully_shard(model, **more)
    params = list(model.parameters())
    by_hand = "fp32" in one.words  # masters beside bf16 weights
    leaves = [p.detach().float().requires_grad_() for p in params] if by_hand else params
    optimizer = adamw(leaves)

    def update() -> None:
        for leaf, p in zip(leaves, params, strict=True) if by_hand else ():
            leaf.grad, p.grad = p.grad.float(), None
        nn.utils.clip_grad_norm_(leaves, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        if by_hand:
            with torch.no_grad():
                torch._foreach_copy_(params, leaves)

    def autocast() -> Any:
        return torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=one.autocast)

    return Built(model, torch.Tensor.backward, update, autocast)


def compile_layers(model: Any) -> None:
    """docs/compile.md. On the CPU, where there are no graphs, without a compiler."""
    for layer in model.model.layers:
        layer.compile(**({"mode": "reduce-overhead"} if CUDA else {"backend": "aot_eager"}))


def built(one: Contender, model: nn.Module, rows: int) -> Built:
    if "graphs" in one.words:
        compile_layers(model)
    return of_engine(one, model, rows) if one.kind in ("tessera", "deepspeed") else of_torch(one, model)
