"""Slices of parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support import config, run_ranks
from torch import nn

import tessera
from tessera.parallel import WholeSlices

RULES = {"layer_specs": [{"patterns": [r"0\.weight"], "shape": [[6, 4], -1]}], "use_default_specs": False}


def test_slices_join_to_the_whole() -> None:
    """Two sub-parameters of 6 and 4 rows, cut unevenly over three ranks."""
    model = nn.Sequential(nn.Linear(3, 10))
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    copies = [copy.deepcopy(model) for _ in range(3)]
    cfg = config() | {"tensor_parallel": {"autotp_size": 3, "partition_config": RULES}}

    def body(rank: int, group: tessera.Group) -> None:
        tessera.parallel.shard_model(copies[rank], cfg, group=group)
        own = torch.cat([torch.arange(6).split(2)[rank], torch.arange(6, 10).tensor_split(3)[rank]])
        for name, mine in copies[rank].named_parameters():
            assert mine.equal(whole[name][own]) and mine.is_contiguous()
            assert mine.untyped_storage().nbytes() == 4 * mine.numel()
        with WholeSlices(list(copies[rank].parameters()), copies[rank]):
            assert all(param.equal(whole[name]) for name, param in copies[rank].named_parameters())

    run_ranks(3, body)


@pytest.mark.parametrize("given", [{"max_norm": 1.0}, {"scale_grad_by_freq": True, "sparse": True}])
def test_an_embedding_that_does_more_than_look_up_is_refused(given: dict[str, Any]) -> None:
    """In the words of the C++ front end: tests/nn/cut_model_test.cpp."""
    rules = {"use_default_specs": False, "layer_specs": [{"patterns": [r"0\.weight"]}]}
    cfg = config() | {"tensor_parallel": {"autotp_size": 2, "partition_config": rules}}
    model = nn.Sequential(nn.Embedding(8, 4, **given))
    says = rf"^\[tensor_parallel\] 0: an embedding with {', '.join(given)} cannot be cut \("
    with pytest.raises(tessera.ConfigError, match=says):
        tessera.parallel.shard_model(model, cfg, group=tessera.thread_groups(2)[0])
    assert model[0].weight.shape == (8, 4)
