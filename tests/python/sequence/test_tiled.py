"""Tiled compute: the same values and gradients as without tiles, one gradient a parameter, a tile's memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import assert_close, config, engines, full_grads
from tessera.sequence import tiled as compute_tiled
from tessera.sequence import tiled_loss, tiled_mlp
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import tessera

WIDTH, VOCABULARY, LENGTH = 8, 11, 13


class Mlp(nn.Module):
    def __init__(self, way: str, tiles: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 24)
        self.down = nn.Linear(24, WIDTH)
        self.way, self.tiles = way, tiles
        self.dropout = nn.Dropout(dropout)

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.dropout(torch.tanh(self.up(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "plain":
            return self.plain(x)
        if self.way == "mlp":
            return tiled_mlp(self.plain, x, self.tiles)
        return compute_tiled(Mlp.plain, {"x": x}, {"self": self}, tiles=self.tiles, reduction=None)


class Model(nn.Module):
    """Two layers, so that the gradient of the second one's input matters, and logits with their loss."""

    def __init__(self, way: str = "plain", tiles: int = 4, reduction: str = "mean") -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.first, self.second = Mlp(way, tiles), Mlp(way, tiles)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.way, self.tiles, self.reduction = way, tiles, reduction
        self.repeats = False  # each layer under checkpointing

    def loss(self, x: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        logits = self.head(x).float().view(-1, VOCABULARY)
        if mask is not None:
            losses = F.cross_entropy(logits, labels.view(-1), reduction="none")
            return (losses * mask.view(-1)).sum() / ((labels.view(-1) != -100) * mask.view(-1)).sum()
        return F.cross_entropy(logits, labels.view(-1), reduction=self.reduction)

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in (self.first, self.second):
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.repeats else layer(x))
        return x

    def forward(
        self, tokens: torch.Tensor, labels: torch.Tensor | None, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = self.features(tokens)
        return x if labels is None else self.end(x, labels, mask)

    def end(self, x: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        if self.way == "plain":
            return self.loss(x, labels, mask)
        if self.way == "function":
            return compute_tiled(
                lambda me, hidden, labels: Model.loss(me, hidden, labels),
                {"hidden": x, "labels": labels},
                {"me": self},
                tiles=self.tiles,
                join_dim=0,
                reduction=self.reduction,
            )
        return tiled_loss(self.loss, x, labels, mask, tiles=self.tiles, reduction=self.reduction)


def data(seed: int, batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels; most labels of the first tiles do not count, and none of the last four tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (batch, LENGTH), generator=generator)
    labels = torch.randint(0, VOCABULARY, (batch, LENGTH), generator=generator)
    labels[:, :5].masked_fill_(torch.rand(batch, 5, generator=generator) < 0.6, -100)
    labels[:, -4:] = -100
    return tokens, labels


def pair(way: str, tiles: int, **more: Any) -> tuple[Model, Model]:
    torch.manual_seed(1)
    plain, tiled = Model(**more), Model(way, tiles, **more)
    tiled.load_state_dict(plain.state_dict())
    return plain, tiled


def grads(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("tiles", [1, 3, 4, 20])
@pytest.mark.parametrize("way", ["mlp", "function"])
def test_values_and_gradients_are_those_without_tiles(way: str, tiles: int, batch: int, reduction: str) -> None:
    plain, tiled = pair(way, tiles, reduction=reduction)
    arrived: dict[str, int] = {}
    for name, p in tiled.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: arrived.update({name: arrived.get(name, 0) + 1}))
    tokens, labels = data(3, batch)
    expected, loss = plain(tokens, labels), tiled(tokens, labels)
    torch.testing.assert_close(loss, expected)
    (expected * 7).backward()
    (loss * 7).backward()
    assert_close(grads(tiled), grads(plain))
    assert arrived == {name: 1 for name, _ in tiled.named_parameters()}
    with torch.no_grad():
        torch.testing.assert_close(tiled(tokens, labels), expected.detach())


def test_a_mask_counts_in_the_mean() -> None:
    plain, tiled = pair("mlp", 4)
    tokens, labels = data(4)
    mask = (torch.arange(LENGTH) % 3 != 1).expand(2, LENGTH).float()
    expected, loss = plain(tokens, labels, mask), tiled(tokens, labels, mask)
    torch.testing.assert_close(loss, expected)
    expected.backward()
    loss.backward()
    assert_close(grads(tiled), grads(plain))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("case", ["fp32", "bf16", "checkpointing", "autocast", "fp16", "loss outside"])
def test_engines_see_the_gradients_of_the_model_without_tiles(stage: int, case: str) -> None:
    plain, tiled = pair("mlp", 4)
    plain.repeats = tiled.repeats = case == "checkpointing"
    more: dict[str, Any] = {"gradient_accumulation_steps": 2}
    if case == "autocast":
        more["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    if case == "fp16":
        more["fp16"] = {"enabled": True, "initial_scale_power": 8}
    cfg = config(stage, bf16=case == "bf16", **more)

    def body(engine: tessera.Engine, rank: int) -> Any:
        losses = []
        for step in range(2):
            tokens, labels = data(2 * rank + step)
            outside = case == "loss outside"
            loss = engine.module.end(engine(tokens, None), labels) if outside else engine(tokens, labels)
            engine.backward(loss)
            losses.append(loss.item())
            if step == 0:
                engine.step()
        found = full_grads(engine)
        engine.step()
        return losses, found, engine.global_grad_norm()

    expected, got = engines(plain, 2, cfg, body), engines(tiled, 2, cfg, body)
    coarse = case in ("bf16", "autocast", "fp16")
    for (losses, found, norm), (losses_tiled, found_tiled, norm_tiled) in zip(expected, got, strict=True):
        torch.testing.assert_close(
            torch.tensor(losses_tiled), torch.tensor(losses), rtol=2e-2 if coarse else 1e-5, atol=0
        )
        assert_close(found_tiled, found, bf16=coarse)
        assert norm_tiled == pytest.approx(norm, rel=2e-2 if coarse else 1e-5)


def test_dropout_draws_the_same_numbers_again() -> None:
    torch.manual_seed(2)
    layer = Mlp("mlp", 4, dropout=0.5)
    x = torch.randn(2, LENGTH, WIDTH, requires_grad=True)
    torch.manual_seed(3)
    out = layer(x)
    torch.manual_seed(3)
    expected = torch.cat([layer.plain(piece) for piece in x.detach().split(4, 1)], 1)
    assert torch.equal(out, expected)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    copied = copy.deepcopy(layer)
    y = x.detach().requires_grad_(True)
    torch.cat([copied.plain(piece) for piece in y.split(4, 1)], 1).pow(2).sum().backward()
    torch.set_rng_state(after)
    out.pow(2).sum().backward()
    assert torch.equal(torch.get_rng_state(), after)
    torch.testing.assert_close(x.grad, y.grad)
    assert_close(grads(layer), grads(copied))


def test_other_tensors_and_frozen_parameters() -> None:
    """Every tensor that requires gradients gets them, cut or not; what is frozen gets none."""

    def fn(x: torch.Tensor, gate: torch.Tensor, scale: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
        return layer(x) * gate * scale

    layer = nn.Linear(WIDTH, WIDTH)
    layer.bias.requires_grad_(False)
    x, gate = torch.randn(1, LENGTH, WIDTH), torch.randn(1, LENGTH, WIDTH)
    scale = torch.randn(WIDTH)
    found = []
    for tiled in (False, True):
        layer.zero_grad()
        leaves = [t.clone().requires_grad_(True) for t in (gate, scale)]
        out = (
            compute_tiled(fn, {"x": x, "gate": leaves[0]}, {"scale": leaves[1], "layer": layer}, tiles=3)
            if tiled
            else fn(x, *leaves, layer)
        )
        out.square().mean().backward()
        found.append([out.detach(), *(t.grad for t in leaves), layer.weight.grad])
        assert layer.bias.grad is None
    torch.testing.assert_close(found[1], found[0])


def test_a_second_backward_of_a_kept_graph() -> None:
    plain, tiled = pair("mlp", 4)
    for model in (plain, tiled):
        loss = model(*data(5))
        loss.backward(retain_graph=True)
        (3 * loss).backward()
    assert_close(grads(tiled), grads(plain))


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "length": (
        lambda: compute_tiled(lambda x, y: x, {"x": torch.ones(1, 4, 2), "y": torch.ones(1, 5)}, tiles=2),
        r"y has the sizes \[1, 5\], x \[1, 4, 2\]: dim 1 of all that is cut must be the sequence",
    ),
    "no sequence": (lambda: compute_tiled(lambda x: x, {"x": torch.ones(4)}, tiles=2), r"x has the sizes \[4\]"),
    "nothing": (lambda: compute_tiled(lambda x: x, {}, tiles=2), "no tensor to cut"),
    "tiles": (lambda: tiled_mlp(lambda x: x, torch.ones(4, 2), 0), "1 tile at least, got 0"),
    "output": (lambda: tiled_mlp(lambda x: (x, x), torch.ones(4, 2), 2), "must return one tensor, got tuple"),  # type: ignore[arg-type,return-value]
    "reduction": (
        lambda: tiled_loss(lambda x, y: x, torch.ones(1, 4, 2), torch.ones(1, 4), tiles=2, reduction="max"),
        "must be 'mean' or 'sum', got 'max'",
    ),
    "sizes": (
        lambda: tiled_loss(lambda x, y: x, torch.ones(1, 4, 2), torch.ones(1, 3), tiles=2),
        r"labels has the sizes \[1, 3\], x \[1, 4, 2\]",
    ),
    "no reduction": (
        lambda: compute_tiled(lambda x: x.sum(), {"x": torch.ones(1, 4, 2)}, tiles=2, reduction=None),
        r"\[tiled\] the function returns a scalar: say how",
    ),
    "not a scalar": (
        lambda: tiled_loss(lambda x, y: x, torch.ones(1, 4, 2), torch.ones(1, 4), tiles=2),
        "must return a scalar",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_use(case: str) -> None:
    call, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        call()


def test_a_tensor_from_outside_is_an_error() -> None:
    x = torch.randn(1, 4, 2, requires_grad=True)
    outside = x * 2
    with pytest.raises(ValueError, match=r"computed outside of it and requires gradients.*pass it as an argument"):
        tiled_mlp(lambda piece: piece + outside[:, :2], x, 2)
