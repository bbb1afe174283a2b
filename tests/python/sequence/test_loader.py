"""Batches cut along the sequence. test_groups.py has the adapter in a program."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import free_port, run_processes
from tessera.errors import ConfigError
from tessera.sequence import SequenceLoader


def make(length: int, **more: Any) -> dict[str, Any]:
    tokens = torch.arange(2 * length).view(2, length)
    position_ids = torch.arange(length).expand(2, length)
    return {"input_ids": tokens, "labels": tokens.clone(), "position_ids": position_ids, "name": "text"} | more


def without(key: str) -> dict[str, Any]:
    batch = make(8)
    del batch[key]
    return batch


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "position_ids": (without("position_ids"), "the batch has no position_ids, only input_ids, labels, name"),
    "input_ids": (without("input_ids"), "the batch has no input_ids"),
    "length": (make(9), "9 tokens a sequence is not divisible by the 2 ranks of sequence_parallel_size; pad it to 10"),
    "padding": (make(8, attention_mask=torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1]])), "padding must be at the end"),
}


def worker(rank: int, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)

    def parts(batch: dict[str, Any]) -> list[dict[str, Any]]:
        """This rank's of both ranks' batches, which are alike."""
        return list(SequenceLoader([batch], rank, dist.group.WORLD, 2, "cpu"))

    batch = make(6, weight=torch.ones(2), attention_mask=torch.tensor([[1] * 6, [1] * 4 + [0] * 2]))
    found = parts(batch)
    assert len(found) == 2
    for part in found:
        assert set(part) == {"input_ids", "shift_labels", "position_ids", "name", "weight"}
        assert part["input_ids"].tolist() == [[[0, 1, 2], [6, 7, 8]], [[3, 4, 5], [9, 10, 11]]][rank]
        assert part["position_ids"].tolist() == [[[0, 1, 2]] * 2, [[3, 4, 5]] * 2][rank]
        # The next rank's first token, too.
        assert part["shift_labels"].tolist() == [[[1, 2, 3], [7, 8, 9]], [[4, 5, -100], [10, 11, -100]]][rank]
        assert part["name"] == "text" and torch.equal(part["weight"], batch["weight"])
    assert "labels" in batch  # the caller's batch is as it was
    for wrong, message in WRONG.values():
        with pytest.raises(ValueError, match=message):
            parts(wrong)
    dist.destroy_process_group()


def test_parts_of_a_batch_and_wrong_ones() -> None:
    run_processes(2, worker, free_port())


class Damaged:
    """A dataset whose second sample nobody can read."""

    def __iter__(self) -> Any:
        yield make(6)
        raise OSError("a damaged sample")


def one_dataset_raises(rank: int, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    loader = SequenceLoader(Damaged() if rank else [make(6), make(6)], rank, dist.group.WORLD, 2, "cpu")
    assert [next(loader)["input_ids"].size(1) for _ in range(2)] == [3, 3]
    begun = time.monotonic()
    if rank:
        with pytest.raises(OSError, match=r"^a damaged sample$"):
            next(loader)
    else:
        with pytest.raises(RuntimeError, match=r"batch of rank 1 of the sequence .*: OSError: a damaged sample"):
            next(loader)
    assert time.monotonic() - begun < 10
    dist.barrier()  # nobody's end is what the other one has seen
    dist.destroy_process_group()


def test_a_dataset_that_raises_on_one_rank_is_an_error_on_all() -> None:
    run_processes(2, one_dataset_raises, free_port())


def test_one_rank() -> None:
    adapter = SequenceLoader([make(3), make(5)], 0, None, 1, "cpu")
    for _ in range(2):  # epochs
        assert [batch["shift_labels"].size(1) for batch in adapter] == [3, 5]
    assert len(adapter) == 2


class Ran:
    def __reduce__(self) -> Any:
        return pytest.fail, ("a batch was run where it is read",)


def test_what_travels_beside_tensors() -> None:
    """Plain values as they are, and nothing that code makes."""
    more = {"names": ["a", ("b", 1.5)], "more": {"mask": torch.ones(2, 3), "none": None}}
    (batch,) = SequenceLoader([make(3, **more)], 0, None, 1, "cpu")
    assert batch["names"] == more["names"] and batch["more"]["none"] is None
    assert torch.equal(batch["more"]["mask"], torch.ones(2, 3))
    with pytest.raises(ConfigError, match="the batch holds a Ran; between ranks go tensors"):
        next(SequenceLoader([make(3, thing=Ran())], 0, None, 1, "cpu"))
