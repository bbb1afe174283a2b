"""Classes of errors, and where the core's arrive."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import batch, config, engines, make, with_blob
from tessera.errors import IoError
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

import tessera


def test_classes() -> None:
    assert issubclass(tessera.ConfigError, ValueError) and issubclass(tessera.ConfigError, AssertionError)
    assert issubclass(tessera.UsageError, RuntimeError) and issubclass(tessera.UsageError, AssertionError)


def test_errors_of_the_core_are_those_of_the_package() -> None:
    engine = tessera.Engine(make(), config())
    with pytest.raises(tessera.ConfigError, match=r"\[engine.*shape"):
        tessera.state.set_full_grad(engine, engine.module.gain, torch.ones(3))
    with pytest.raises(IndexError), engine.no_sync():
        raise IndexError
    engine(*batch(0)).backward()  # no_sync was left
    engine.step()
    engine.destroy()
    with pytest.raises(tessera.UsageError, match="destroyed"):
        engine.step()


@pytest.mark.parametrize("stage", [0, 3])
def test_misuse_found_by_the_core_is_a_usage_error(stage: int) -> None:
    engine = tessera.Engine(make(), config(stage))
    with engine.no_sync(), pytest.raises(tessera.UsageError):
        engine.step()
    with engine.coalesce_grad_reduction(), pytest.raises(tessera.UsageError):
        engine.step()
    engine.destroy()


# What a program calls of engine.core with the number of a parameter, module or group -> its other arguments.
NUMBERED: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("enter_module", "use_elsewhere", "is_gathered", "partition_of"), ()),
    **dict.fromkeys(("param_step", "local_range"), ()),
    "leave_module": ([],),
    "register_external": (0,),
    "set_param_step": (1,),
    "gather_full": (torch.ones(2),),
    "local_part": (torch.ones(2),),
}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("number", [-1, 10**6, 2**40])
def test_a_number_that_the_core_has_not_given_is_refused(stage: int, number: int) -> None:
    """Of values by their Quantity: tests/zero/state_access_test.cpp."""
    engine = tessera.Engine(make(), config(stage))
    numbered = NUMBERED | {"set_group": (engine.core.groups()[0],)}
    for name, others in numbered.items():
        with pytest.raises((ValueError, TypeError, IndexError)):
            getattr(engine.core, name)(number, *others)
    for call in (engine.core.add_module, engine.core.gather):
        with pytest.raises((ValueError, TypeError, IndexError)):
            call([number])
    engine(*batch(0)).backward()
    engine.step()
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_parameters_with_operators_of_their_own_are_refused_by_name(stage: int) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        model = make()
        plain = model.gain
        model.gain = torch.nn.Parameter(distribute_tensor(plain.detach(), mesh, [Replicate()]))
        with pytest.raises(ValueError, match=r"'gain' is a tensor subclass.*DTensor"):
            tessera.Engine(model, config(stage, bf16=True))
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert not any(vars(p) for name, p in model.named_parameters() if name != "gain")
        model.gain = plain
        tessera.Engine(model, config(stage)).destroy()  # nothing was left behind
    finally:
        dist.destroy_process_group()


class Unused(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = torch.nn.Linear(5, 3), torch.nn.Linear(5, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.used(x) - y).square().mean()


def step_with_an_unused_parameter(engine: Any, folder: Path) -> None:
    engine(*batch(0)).backward()
    engine.step()


def save_what_cannot_be_pickled(engine: Any, folder: Path) -> None:
    engine.save_checkpoint(folder, client_state={"it": lambda: 1})


def load_a_damaged_generator(engine: Any, folder: Path) -> None:
    engine.save_checkpoint(folder, tag="t")
    with_blob(folder / "t", "random-0", {"torch": torch.zeros(3, dtype=torch.uint8)})
    engine.load_checkpoint(folder, tag="t")


def load_a_damaged_blob(engine: Any, folder: Path) -> None:
    engine.save_checkpoint(folder, tag="t")
    with_blob(folder / "t", "client_state", b"PK\x03\x04 and no more")
    engine.load_checkpoint(folder, tag="t")


@pytest.mark.parametrize(
    "call",
    [step_with_an_unused_parameter, save_what_cannot_be_pickled, load_a_damaged_generator, load_a_damaged_blob],
)
def test_an_error_of_ours_has_no_other_of_ours_above_it(call: Callable[[Any, Path], None], tmp_path: Path) -> None:
    offload = {"offload_optimizer": {"device": "cpu"}, "ignore_unused_parameters": False}

    def body(engine: Any, rank: int) -> str:
        with pytest.raises((tessera.UsageError, tessera.ConfigError, IoError)) as caught:
            call(engine, tmp_path)
        return "".join(traceback.format_exception(caught.value))

    ranks = 2 if call in (step_with_an_unused_parameter, save_what_cannot_be_pickled) else 1
    for text in engines(make(Unused), ranks, config(2, zero=offload), body):
        assert text.count("Traceback (most recent call last)") == 1, text


def test_a_wrong_argument_of_an_optimizer_is_one_error() -> None:
    section = {"type": "ASGD", "params": {"lr": 0.1, "lambda": 1}}
    with pytest.raises(tessera.ConfigError, match=r"optimizer\.params\.lambda: unknown parameter") as caught:
        tessera.initialize(model=torch.nn.Linear(2, 2), config=config(0, optimizer=section))
    assert "".join(traceback.format_exception(caught.value)).count("Traceback (most recent call last)") == 1
