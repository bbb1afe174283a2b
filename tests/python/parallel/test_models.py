"""Models that are cut over ranks compute what the whole ones do: outputs, gradients, norms and weights after steps."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from support import config, run_mesh
from tessera.errors import ConfigError
from tiny_models import MODELS, Batch
from torch import nn

import tessera

STEPS = 3
CLIP = 0.5
LR = 0.05


def settings(tp: int, tensor_parallel: dict[str, Any], **more: Any) -> dict[str, Any]:
    cfg = config(**more)
    cfg["tensor_parallel"] = {"autotp_size": tp, **tensor_parallel}
    cfg["gradient_clipping"] = CLIP
    cfg["optimizer"] = {"type": "SGD", "params": {"lr": LR}}
    return cfg


def train_plain(model: nn.Module, batches: list[list[Batch]]) -> dict[str, Any]:
    """`batches[step][data-parallel rank]`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    found: dict[str, Any] = {"losses": [], "norms": []}
    for step, parts in enumerate(batches):
        optimizer.zero_grad()
        outputs = [model(**part) for part in parts]
        loss = sum(output.loss for output in outputs) / len(parts)
        loss.backward()
        if step == 0:
            found["logits"] = outputs[0].logits.detach()
            found["grads"] = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        found["losses"].append(loss.item())
        found["norms"].append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
    found["weights"] = {n: p.detach().clone() for n, p in model.named_parameters()}
    return found


def train_and_end(engine: tessera.Engine, batches: list[Batch]) -> dict[str, Any]:
    try:
        return train(engine, batches)
    finally:
        engine.destroy()


def train(engine: tessera.Engine, batches: list[Batch]) -> dict[str, Any]:
    found: dict[str, Any] = {"losses": [], "norms": []}
    for step, batch in enumerate(batches):
        output = engine(**batch)
        engine.scale(output.loss).backward()
        if step == 0:
            found["logits"] = output.logits.detach()
            found["grads"] = {
                n: _full(tessera.state.get_full_grad(engine, p)) for n, p in named(engine) if p.requires_grad
            }
        engine.step()
        found["losses"].append(output.loss.item())
        found["norms"].append(engine.global_grad_norm())
    found["weights"] = {
        n: _full(tessera.state.get_full_fp32_param(engine, p)) for n, p in named(engine) if p.requires_grad
    }
    return found


def _full(value: torch.Tensor | None) -> Any:
    return None if value is None else value.clone()


def named(engine: tessera.Engine) -> list[tuple[str, nn.Parameter]]:
    return list(engine.module.named_parameters())


def assert_same(got: dict[str, Any], want: dict[str, Any], tolerance: float = 1e-5, logits: bool = True) -> None:
    torch.testing.assert_close(torch.tensor(got["norms"]), torch.tensor(want["norms"]), rtol=10 * tolerance, atol=1e-7)
    if logits:
        assert_near("logits", got["logits"], want["logits"], tolerance)
    for name, value in want["grads"].items():
        assert_near(f"gradient of {name}", got["grads"][name], value, tolerance, 1e-2)
    for name, value in want["weights"].items():
        if name in got["weights"]:
            assert_near(name, got["weights"][name], value, tolerance)


def assert_near(name: str, got: torch.Tensor, want: torch.Tensor, tolerance: float, floor: float = 1e-1) -> None:
    """Relative to the largest element; `floor`: below it errors count as of that."""
    error = (got - want).abs().max().item() / max(want.abs().max().item(), floor)
    assert got.shape == want.shape and error < tolerance, f"{name}: {error:.1e}"


def compare(
    name: str,
    tp: int,
    dp: int = 1,
    rules: dict[str, Any] | None = None,
    length: int = 0,
    replays: bool = False,
    **more: Any,
) -> None:
    """`length`: of the batches, where not their own; `replays`: blocks are checkpointed."""
    model, make_batch, own = MODELS[name]
    if length:
        make_batch = functools.partial(make_batch, length=length)
    cfg = settings(tp, own if rules is None else rules, **more)
    whole = model().train()
    if replays:
        whole.gradient_checkpointing_enable()
    batches = [[make_batch(step, rank) for rank in range(dp)] for step in range(STEPS)]
    want = train_plain(copy.deepcopy(whole), batches)
    copies = [copy.deepcopy(whole) for _ in range(dp * tp)]

    def body(rank: int, mesh: tessera.Mesh) -> dict[str, Any]:
        with torch.no_grad():
            for param in copies[rank].parameters():  # rank 0's values hold
                param.add_(rank)
        engine = tessera.Engine(copies[rank], cfg, group=mesh)
        try:
            assert engine.tp_world_size == tp
            return train(engine, [parts[rank // tp] for parts in batches])
        finally:
            engine.destroy()

    results = run_mesh(body, dp=dp, tp=tp)
    for result in results:
        assert_same(result, want, logits=result is results[0] and "vocabulary" not in name)
    for name, value in results[0]["weights"].items():  # bits: what all ranks hold does not drift apart
        assert all(result["weights"][name].equal(value) for result in results), name
    mean = [sum(losses) / len(results) for losses in zip(*(r["losses"] for r in results), strict=True)]
    torch.testing.assert_close(mean, want["losses"], rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks(name: str) -> None:
    compare(name, tp=2)


FOUR = (
    "llama",
    "llama, preset",
    "qwen2",
    "qwen3",
    "mistral",
    "mixtral",
    "qwen2_moe, preset",
    "deepseek_v2",
    "deepseek_v3",
    "phi3, four keys",
    "bloom",
    "chatglm",
    "packed experts",
    "falcon, all heads",
    "falcon, one key",
    "gpt_bigcode",
    "gpt_oss",
    "gpt_neox",
    "opt",
    "gptj",
    "t5",
    "whisper",
    "qwen2_5_vl",
)
THREE = (
    "llama",
    "mixtral",
    "qwen2_moe, preset",
    "deepseek_v3",
    "phi3, four keys",
    "bloom",
    "chatglm, with a configuration",
    "own",
    "own, four keys",
    "gpt_neox",
    "opt",
    "falcon, alibi",
    "falcon, one key",
    "gpt_bigcode",
    "mpt",
    "t5",
    "whisper",
)


# Of torch's attention; where it does not, ranks without a head are refused.
COMPUTES_WITHOUT_HEADS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)


@pytest.mark.parametrize(("name", "tp"), [(name, 4) for name in FOUR] + [(name, 3) for name in THREE])
def test_more_ranks_and_uneven_heads(name: str, tp: int) -> None:
    try:
        compare(name, tp)
    except ConfigError as error:
        if "ends the process where there is no head" not in str(error):
            raise
        assert not COMPUTES_WITHOUT_HEADS
        pytest.skip(str(error))


HEADLESS = ("bloom", "deepseek_v2", "falcon", "gpt2, rules", "opt", "t5", "whisper")


@pytest.mark.parametrize(
    ("name", "tp", "precision", "message"),
    [
        ("codegen", 4, {}, "8 heads are 4 blocks of 2, each of which needs a head for each of 4 ranks"),
        ("packed experts", 4, {"bf16": {"enabled": True}}, "24 cannot be dealt out to 4 ranks in multiples of 8"),
        *((name, 5, {}, r"has none of 4 heads, and the (code|attention) of ") for name in HEADLESS),
    ],
)
def test_what_cannot_be_dealt_out_is_refused_before_anything_is_cut(
    name: str, tp: int, precision: dict[str, Any], message: str
) -> None:
    model, _, own = MODELS[name]
    with pytest.raises(ConfigError, match=message):
        tessera.parallel.plan_for(model(), settings(tp, own, **precision))


def test_code_that_needs_a_head_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    make, *rest = MODELS["opt"]

    def unknown() -> nn.Module:
        """Its attention is of a class that nobody knows."""
        model: nn.Module = make()
        for module in model.modules():
            if type(module).__name__ == "OPTAttention":
                module.__class__ = type("OwnAttention", (type(module),), {})
        return model

    monkeypatch.setitem(MODELS, "opt", (unknown, *rest))
    fault = r"no outputs of \S+_proj, and the model's code cannot compute without a head"
    if not COMPUTES_WITHOUT_HEADS:
        fault = "has none of 4 heads, and the attention of torch .* ends the process"
    with pytest.raises(ConfigError, match=fault):
        compare("opt", 5)
