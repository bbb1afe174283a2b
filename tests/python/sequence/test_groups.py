"""Sequence-parallel groups of processes, from the loader to the weights, as a user's program has them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from readme_text import BATCH, llama, plain_loss, text_batch
from support import assert_close, config, free_port, full_grads, run_processes
from tessera.sequence import (
    SequenceLoader,
    SequenceParallelGroups,
    TransformersAttention,
    make_groups,
    mean_over_sequence,
)

import tessera

WORLD, SP = 4, 2
PACKED = (9, 23)


def batches(rank: int) -> list[dict[str, torch.Tensor]]:
    """Every rank's own; those of the second have half of the length."""
    whole = [text_batch(2 * rank + number, PACKED) for number in range(2)]
    return [{k: v[:, :16].contiguous() for k, v in b.items()} for b in whole] if rank == 1 else whole


def broken_data() -> Iterator[Any]:
    raise KeyError("a file that cannot be decoded")
    yield


def worker(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORLD), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    groups = TransformersAttention.register_with_transformers(
        folder, "sdpa", SP, BATCH
    )  # by name: for models made later
    assert isinstance(groups, SequenceParallelGroups)
    assert (groups.rank(), groups.rank("data")) == (rank % SP, rank // SP)
    assert groups.size("both") == WORLD == 2 * groups.size("data")
    assert groups.rank("both") == rank
    model = llama()
    cfg = config(2, train_micro_batch_size_per_gpu=BATCH)
    engine = tessera.initialize(model=model, config=cfg, group=groups)[0]
    assert (engine.dp_world_size, engine.sp_world_size) == (2, SP)
    assert engine.communication_data_type == torch.float32
    group = groups.sequence
    adapter = SequenceLoader(batches(rank), groups.rank(), group, SP, "cpu")
    assert len(adapter) == 4
    results: list[Any] = []
    for batch in adapter:
        labels = batch.pop("shift_labels")
        logits = engine(**batch).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss = mean_over_sequence(loss, labels, group)
        loss.backward()
        results.append((loss.item(), full_grads(engine)))
        engine.zero_grad()
    assert len(results) == 4
    # A rank whose batch is wrong stops all of its sequence, and a next epoch begins after the end of the shortest.
    wrong = {k: v for k, v in text_batch(0).items() if k != "position_ids" or rank % SP == 0}
    with pytest.raises(ValueError, match="the batch has no position_ids"):
        next(SequenceLoader([wrong], rank % SP, group, SP, "cpu"))
    # So does what cannot be sent, and any other error of its data.
    with pytest.raises(ValueError, match="the batch holds a function"):
        data = [{**text_batch(0), "f": lambda: 0}] if rank % SP else batches(rank)
        next(SequenceLoader(data, rank % SP, group, SP, "cpu"))
    data = broken_data() if rank % SP else batches(rank)
    kind, match = (KeyError, "") if rank % SP else (RuntimeError, "rank 1 of the sequence")
    with pytest.raises(kind, match=match):
        next(SequenceLoader(data, rank % SP, group, SP, "cpu"))
    uneven = SequenceLoader(batches(rank)[: 1 + rank % SP], rank % SP, group, SP, "cpu")
    assert [len(list(uneven)) for _ in range(2)] == [2, 2]
    engine.destroy()
    results.append(beside_tensor_parallelism(rank))
    with pytest.raises(ValueError, match="sequence_parallel_size must be 1 at least, got 0"):
        make_groups(0)
    with pytest.raises(ValueError, match=r"sequence_parallel_size 3 x .* does not divide the 4 ranks"):
        make_groups(3)
    torch.save(results, os.path.join(folder, f"{rank}.pt"))
    torch.distributed.destroy_process_group()


def beside_tensor_parallelism(rank: int) -> Any:
    """The program of the documentation: ranks 0 and 1 hold one model's slices, 0 and 2 share sequences."""
    model = llama()
    groups = TransformersAttention.register_with_transformers(model, "sdpa", SP, BATCH, tensor_parallel_size=2)
    assert groups is not None
    assert (groups.rank(), groups.rank("tensor")) == (rank // 2, rank % 2)
    assert groups.size("tensor") == groups.size("both") == 2
    cfg = config(2) | {"sequence_parallel_size": SP, "tensor_parallel": {"autotp_size": 2}}
    engine = tessera.initialize(model=model, config=cfg, group=groups)[0]
    assert (engine.dp_world_size, engine.sp_world_size, engine.tp_world_size) == (1, SP, 2)
    group = groups.sequence
    loader = [text_batch(groups.rank("both"), PACKED)]
    found: Any = None
    for batch in SequenceLoader(loader, groups.rank(), group, SP, "cpu"):
        labels = batch.pop("shift_labels")
        loss = torch.nn.functional.cross_entropy(engine(**batch).logits.flatten(0, 1), labels.flatten())
        loss = mean_over_sequence(loss, labels, group)
        loss.backward()
        found = found or (loss.item(), full_grads(engine))
        engine.zero_grad()
    engine.destroy()
    alone = TransformersAttention.register_with_transformers(llama(), "sdpa", SP, BATCH)
    with pytest.raises(
        ValueError, match=r"autotp_size is 2, and the groups have no tensor-parallel .* tensor_parallel_size=2"
    ):
        tessera.initialize(model=llama(), config=cfg, group=alone)
    return found


def test_a_program_of_four_processes(tmp_path: Path) -> None:
    llama().config.save_pretrained(tmp_path)
    run_processes(WORLD, worker, free_port(), str(tmp_path))
    results = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(WORLD)]
    for micro in range(4):  # of each sequence's first rank, then of its second; then their next
        owners = [row * SP + micro % SP for row in range(WORLD // SP)]
        model = llama()
        losses = [plain_loss(model, batches(owner)[micro // SP]) for owner in owners]
        (sum(losses) / len(losses)).backward()
        expected = {name: p.grad for name, p in model.named_parameters()}
        for rank in range(WORLD):
            loss, found = results[rank][micro]
            assert loss == pytest.approx(losses[rank // SP].item(), rel=1e-4)
            assert_close(found, expected)
    model = llama()
    plain = plain_loss(model, text_batch(0, PACKED))
    plain.backward()
    for rank in range(WORLD):  # beside tensor parallelism
        loss, found = results[rank][4]
        assert loss == pytest.approx(plain.item(), rel=1e-4)
        assert_close(found, {name: p.grad for name, p in model.named_parameters()})


def test_groups_that_do_not_fit() -> None:
    two, three = (tessera.thread_groups(size)[0] for size in (2, 3))
    with pytest.raises(ValueError, match="2 sequence-parallel x 2 data-parallel ranks are not the 3 ranks of both"):
        SequenceParallelGroups(two, two, three)


def test_without_processes() -> None:
    """A lone process is a world of one; the default group that the call makes is ended again."""
    groups = make_groups(1)
    try:
        assert groups.size() == groups.size("data") == 1
    finally:
        torch.distributed.destroy_process_group()
