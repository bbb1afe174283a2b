"""tests/python/device_program.py with this device in place of the stand-in. What has the CPU's bits there is close to
the CPU here: matrix products differ."""

from __future__ import annotations

import sys
import types
from typing import Any
from unittest import mock

import torch
from common import CUDA, DEVICE, DRY, ROOT, Results, allocated, module_of
from torch import nn

# Several devices, back ends of the stand-in's type, bits of losses, faults that only the stand-in makes when told to
# (no_memory.py fills a real device; graphs.py captures its streams).
SKIPPED = {
    "test_a_model_goes_to_the_device_of_its_ranks",
    "test_a_partitioned_model_is_built_on_the_device_of_its_ranks",
    "test_the_device_of_a_local_rank",
    "test_states_away_for_a_while",
    "test_backward_as_pytorch_does_it",
    "test_no_memory_in_the_construction",
    "test_no_memory_in_a_step",
    "test_no_memory_to_look_at_parameters",
    "test_no_memory_at_the_end_of_a_region",
    "test_no_memory_in_a_load",
    "test_destroy_comes_to_its_end",
    "test_nothing_that_trains_is_captured",
}
# About a device beside the CPU.
NOT_DRY = {
    "test_states_in_host_memory_and_on_a_disk",
    "test_checkpointing_and_hooks",
    "test_errors",
    "test_host_and_device_share_an_update",
}


def close(a: Any, b: Any) -> bool:
    a, b = torch.as_tensor(a).double().cpu(), torch.as_tensor(b).double().cpu()
    return bool(torch.allclose(a, b, rtol=2e-2, atol=2e-2, equal_nan=True))


def all_close(mine: list[Any], other: list[Any]) -> bool:
    return len(mine) == len(other) and all(map(close, mine, other))


def drawn_on_the_cpu(t: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """In place of torch's initialisations: every device has a generator of its own, and models must start alike."""
    with torch.no_grad():
        return t.copy_((torch.rand(t.shape, device="cpu") - 0.5) / 2)


def program() -> Any:
    stand_in: Any = types.ModuleType("stand_in")
    counts = {"tessera_stand_in_launches": lambda: 0, "tessera_stand_in_bytes": allocated}
    stand_in.load = lambda path: types.SimpleNamespace(**counts)
    sys.modules["stand_in"] = stand_in
    folder = ROOT / "tests" / "python"
    sys.path.insert(0, str(folder))
    sys.argv[1:] = ["none"]
    module = module_of(folder / "device_program.py", "program_of_the_tests")

    def train_alike(engines: list[Any], what: Any = None) -> None:
        losses = [module.train(engine) for engine in engines]
        assert close(*losses), (what, losses)
        assert all_close(*map(module.masters, engines)), what

    module.DEVICE, module.equal, module.train_alike = DEVICE.type, all_close, train_alike
    return module


def passed(test: Any) -> dict[str, Any]:
    with (
        mock.patch.object(nn.init, "kaiming_uniform_", drawn_on_the_cpu),
        mock.patch.object(nn.init, "uniform_", drawn_on_the_cpu),
    ):
        test()
    return {}


def main() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    r = Results("device_program")
    module = program()
    skipped = SKIPPED | (NOT_DRY if DRY or not CUDA else set())
    for name, test in list(vars(module).items()):
        if name.startswith("test_") and name not in skipped:
            r.case(name, passed, test)
    r.end()


if __name__ == "__main__":
    main()
