"""What the client programs share: the ranks, small models and data, and the comparison with plain PyTorch."""

from __future__ import annotations

import copy
import functools
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

STEPS = 4
ROWS = 2  # of a rank and micro-batch
LENGTH = 12
VOCABULARY = 64
TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "eager",
}


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def world() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def llama(**more: Any) -> Any:
    """A tiny causal language model with tied or separate embeddings."""
    import transformers

    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(intermediate_size=48, **TINY, **more))


def mixture() -> Any:
    """The same with mixtures of experts, whose weights lie in one parameter each."""
    import transformers

    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(intermediate_size=16, num_local_experts=4, num_experts_per_tok=2, **TINY)
    )


def rows(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(seed))


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, count: int, seed: int = 0) -> None:
        self.tokens = rows(count, seed)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


@functools.cache
def shared_folder() -> str:
    """A folder that all ranks see; rank 0's name for it."""
    found = [tempfile.mkdtemp(prefix="tessera-clients-") if rank() == 0 else None]
    if world() > 1:
        dist.broadcast_object_list(found, 0)
    return str(found[0])


def whole(model: Any) -> dict[str, torch.Tensor]:
    """The weights of a module whose parameters may be partitioned. Collective."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return {name: param.detach().clone().float() for name, param in model.named_parameters()}


def assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 2e-5) -> None:
    assert actual.keys() == expected.keys(), actual.keys() ^ expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name].cpu(), value.cpu(), rtol=tolerance, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}"
        )


def assert_losses(actual: list[float], expected: list[float], tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(torch.tensor(actual), torch.tensor(expected), rtol=tolerance, atol=tolerance)


Path = Callable[[], None]


def run(paths: dict[str, Path]) -> None:
    """Runs each path; one line for each on rank 0, and status 1 when any failed."""
    wanted = sys.argv[1:]
    failed = 0
    for name, path in paths.items():
        if wanted and not any(word in name for word in wanted):
            continue
        try:
            path()
            said = "passed"
        except BaseException as error:
            failed += 1
            said = f"FAILED: {type(error).__name__}: {str(error)[:2000]}"
            traceback.print_exc()
        if rank() == 0 or said != "passed":
            print(f"[{rank()}] {name}: {said}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(1 if failed else 0)


def copied(model: Any) -> Any:
    return copy.deepcopy(model)
