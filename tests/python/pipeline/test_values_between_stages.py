"""What goes from stage to stage: any nesting of tensors, of shapes and dtypes that change."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest
import torch
from stages import config, in_processes, pipeline
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import tessera
from tessera.pipeline import LayerSpec, PipelineModule, StageFailed


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
    {
        "half": torch.randn(3, dtype=torch.float16),
        (1, None): torch.Size([2]),
        True: {2.5: float("inf")},
        "complex": torch.tensor([1 + 2j]),
    },
]


SEQUENCE = [VALUES[0], VALUES[0] + 1, *VALUES[1:], VALUES[1], VALUES[1]]


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


class Gives:
    """Another value for every micro-batch."""

    def __init__(self, values: list[Any]) -> None:
        self.values = iter(values)

    def __call__(self, x: torch.Tensor) -> Any:
        return next(self.values)


class Compares:
    def __init__(self, values: list[Any]) -> None:
        self.values = iter(values)

    def __call__(self, x: Any) -> torch.Tensor:
        assert equal(x, next(self.values)), x
        return torch.zeros(())


def passed_on(x: Any) -> Any:
    return x


def any_values(rank: int) -> None:
    """From the first of three stages to the last."""
    model = PipelineModule([Gives(SEQUENCE), passed_on, Compares(SEQUENCE)], num_stages=3, partition_method="uniform")
    engine = pipeline(model, {"train_micro_batch_size_per_gpu": 1})
    ones = itertools.repeat((torch.ones(1), torch.ones(1)))
    assert float(engine.eval_batch(ones, num_micro_batches=len(SEQUENCE))) == 0
    engine.destroy()


def test_values_arrive_as_they_were() -> None:
    in_processes(3, any_values)


def odd_values(rank: int) -> None:
    local = type("Elsewhere", (list,), {"__module__": "elsewhere"})([torch.ones(1)])
    for value, said in (
        ((torch.ones(1), {1, 2}), "a layer returned a set"),
        ({b"x": torch.ones(1)}, "a dict with the key b'x'"),
        (local, "another stage sent a elsewhere.Elsewhere; import it on all stages"),
    ):
        model = PipelineModule([Gives([value]), Compares([value])], num_stages=2, partition_method="uniform")
        engine = pipeline(model, {"train_micro_batch_size_per_gpu": 1})
        with pytest.raises((tessera.UsageError, StageFailed), match=said):
            engine.eval_batch(itertools.repeat((torch.ones(1), torch.ones(1))), num_micro_batches=1)
        engine.destroy()


def test_other_objects_are_refused() -> None:
    in_processes(2, odd_values)


class Counts:
    """How many of the tensors that it made are alive."""

    def __init__(self) -> None:
        self.made: list[StorageWeakRef] = []
        self.most = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 1.0
        self.made.append(StorageWeakRef(y.untyped_storage()))
        self.most = max(self.most, sum(not made.expired() for made in self.made))
        return y


def live_messages(rank: int) -> None:
    """Over Gloo, which does not say by itself what has been taken."""
    micro, counts = 12, Counts()
    for schedule, chunks in (("1f1b", 1), ("interleaved", 2)):
        specs = [LayerSpec(nn.Linear, 4, 4), counts] * (3 * chunks)  # two layers a part
        model = PipelineModule(specs, num_stages=3, num_chunks=chunks, loss_fn=mean, partition_method="uniform")
        engine = pipeline(model, config(1, micro, pipeline={"schedule": schedule}))
        samples = itertools.repeat((torch.ones(2, 3, 4), torch.ones(())))
        counts.most = 0
        engine.train_batch(samples)
        assert counts.most <= engine.max_live_activations + 1, (rank, schedule, counts.most)
        counts.most = 0
        engine.eval_batch(samples, num_micro_batches=3 * micro)
        assert counts.most <= 3 * chunks, (rank, schedule, counts.most)
        engine.destroy()


def test_what_is_under_way_is_bounded_by_the_schedule() -> None:
    in_processes(3, live_messages)


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
