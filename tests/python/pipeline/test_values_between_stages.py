"""What goes from stage to stage: any nesting of tensors, of shapes and dtypes that change."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from stages import config, in_processes, pipeline
from tessera.pipeline._wire import Peer, Wire, fold, unfold
from torch import nn

import tessera
from tessera.pipeline import LayerSpec, PipelineModule


class Pair(NamedTuple):
    left: Any
    right: Any


VALUES = [
    torch.arange(6.0).view(2, 3),
    (
        torch.ones(2, dtype=torch.int64),
        [torch.zeros(0, 4), {"mask": torch.tensor([True, False]), "n": 3}],
        None,
        "text",
    ),
    Pair(torch.tensor(2.5, dtype=torch.bfloat16), torch.ones(3, 2).t()),
    {"half": torch.randn(3, dtype=torch.float16), "complex": torch.tensor([1 + 2j])},
]


def equal(a: Any, b: Any) -> bool:
    one: list[torch.Tensor] = []
    two: list[torch.Tensor] = []
    if fold(a, one) != fold(b, two):
        return False
    return all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(one, two, strict=True))


@pytest.mark.parametrize("value", VALUES)
def test_a_value_is_taken_apart_and_put_together(value: Any) -> None:
    tensors: list[torch.Tensor] = []
    form = fold(value, tensors)
    again = unfold(form, iter(tensors))
    assert type(again) is type(value) and equal(again, value)


def test_other_objects_are_refused() -> None:
    with pytest.raises(tessera.UsageError, match="a layer returned a set"):
        fold((torch.ones(1), {1, 2}), [])


def messages(rank: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    wire = Wire(group, Peer(1 - rank, 1 - rank), torch.device("cpu"), "activations")
    sequence = [VALUES[0], VALUES[0] + 1, *VALUES[1:], VALUES[1], VALUES[1]]
    for number, value in enumerate(sequence):
        if rank == 0:
            wire.send(value, number)
        else:
            assert equal(wire.receive(number), value)
    assert wire.forms == 5, "a form is sent when it is another than before"
    if rank == 0:
        wire.send(VALUES[0], 3)
    else:
        with pytest.raises(tessera.UsageError, match="sent activations number 3 where this stage expects number 4"):
            wire.receive(4)
    dist.barrier()


def test_messages_say_what_they_are() -> None:
    in_processes(2, messages)


class Split(nn.Module):
    """A tensor to a tuple with what needs no gradient, some of it passed on as it came."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            x = {"x": x, "kept": (x * 2, [torch.arange(x.shape[0])]), "unused": x * 0.5, "n": x.shape[1]}
        return x | {"x": torch.tanh(self.linear(x["x"])) * x["n"]}


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x: Any) -> torch.Tensor:
        kept, (rows,) = x["kept"]
        return self.linear(x["x"] + kept) * rows.view(-1, 1, 1)


def mean(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (outputs - labels).square().mean()


def ragged(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(2 + number % 2, 3 + number // 2, 4, generator=generator), torch.ones(())


def nested(rank: int) -> None:
    specs = [LayerSpec(nn.Linear, 4, 4), *[LayerSpec(Split) for _ in range(3)], LayerSpec(Join)]
    cfg = config(1, 6, optimizer={"type": "SGD", "params": {"lr": 0.1}})
    for interval in (0, 1, 2):
        model, whole = (
            PipelineModule(
                specs,
                stages,
                loss_fn=mean,
                seed_layers=True,
                partition_method="uniform",
                activation_checkpoint_interval=interval,
            )
            for stages in (3, 1)
        )
        plain = dict(whole.named_parameters())
        losses = [mean(whole(ragged(number)[0]), ragged(number)[1]) for number in range(6)]
        for loss in losses:
            (loss / 6).backward()
        with torch.no_grad():
            for param in plain.values():
                param -= 0.1 * param.grad
        engine = pipeline(model, cfg)
        loss = engine.train_batch(ragged(number) for number in range(6))
        assert float(loss) == pytest.approx(float(sum(losses)) / 6, rel=1e-5)
        for name, param in engine.module.named_parameters():
            torch.testing.assert_close(param.detach(), plain[name].detach(), rtol=1e-4, atol=1e-6)
        engine.destroy()


def test_nested_values_of_changing_shapes_and_checkpointed_layers() -> None:
    in_processes(3, nested)
