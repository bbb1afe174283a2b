"""Batches cut along the sequence. test_groups.py has the adapter over processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tessera.errors import ConfigError
from tessera.sequence import UlyssesSPDataLoaderAdapter
from tessera.sequence._loader import cut_batch


def make(length: int, **more: Any) -> dict[str, Any]:
    tokens = torch.arange(2 * length).view(2, length)
    position_ids = torch.arange(length).expand(2, length)
    return {"input_ids": tokens, "labels": tokens.clone(), "position_ids": position_ids, "name": "text"} | more


def test_parts_of_a_batch() -> None:
    batch = make(6, weight=torch.ones(2), attention_mask=torch.tensor([[1] * 6, [1] * 4 + [0] * 2]))
    first, second = cut_batch(batch, 2)
    assert set(first) == {"input_ids", "shift_labels", "position_ids", "name", "weight"}
    assert second["input_ids"].tolist() == [[3, 4, 5], [9, 10, 11]]
    assert second["position_ids"].tolist() == [[3, 4, 5]] * 2
    assert first["shift_labels"].tolist() == [[1, 2, 3], [7, 8, 9]]  # the next rank's first token, too
    assert second["shift_labels"].tolist() == [[4, 5, -100], [10, 11, -100]]
    assert first["name"] == "text" and torch.equal(second["weight"], batch["weight"])
    assert "labels" in batch  # the caller's batch is as it was


def without(key: str) -> dict[str, Any]:
    batch = make(8)
    del batch[key]
    return batch


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "position_ids": (without("position_ids"), "the batch has no position_ids, only input_ids, labels, name"),
    "input_ids": (without("input_ids"), "the batch has no input_ids"),
    "length": (
        make(10),
        "10 tokens a sequence is not divisible by the 4 ranks of sequence_parallel_size; pad it to 12",
    ),
    "padding": (make(8, attention_mask=torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1]])), "padding must be at the end"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_batches(case: str) -> None:
    batch, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        list(cut_batch(batch, 4))


def test_one_rank() -> None:
    adapter = UlyssesSPDataLoaderAdapter([make(3), make(5)], 0, None, 1, "cpu")
    for _ in range(2):  # epochs
        assert [batch["shift_labels"].size(1) for batch in adapter] == [3, 5]
    assert len(adapter) == 2


class Ran:
    def __reduce__(self) -> Any:
        return pytest.fail, ("a batch was run where it is read",)


def test_what_travels_beside_tensors() -> None:
    """Plain values as they are, and nothing that code makes."""
    more = {"names": ["a", ("b", 1.5)], "more": {"mask": torch.ones(2, 3), "none": None}}
    (batch,) = UlyssesSPDataLoaderAdapter([make(3, **more)], 0, None, 1, "cpu")
    assert batch["names"] == more["names"] and batch["more"]["none"] is None
    assert torch.equal(batch["more"]["mask"], torch.ones(2, 3))
    with pytest.raises(ConfigError, match="the batch holds a Ran; between ranks go tensors"):
        next(UlyssesSPDataLoaderAdapter([make(3, thing=Ran())], 0, None, 1, "cpu"))
