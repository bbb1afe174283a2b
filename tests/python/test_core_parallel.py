"""What python/src/parallel.cpp binds, once each on two ranks: the arithmetic has its tests in tests/parallel."""

from __future__ import annotations

import re

import pytest
import torch
from support import run_ranks
from torch.nn import functional as F

import tessera
from tessera import _core


def part(t: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
    return t.chunk(2, dim)[rank].clone()


def test_sizes() -> None:
    assert _core.part_sizes(10, 4) == [3, 3, 2, 2]
    assert _core.part_sizes(24, 2, heads=3) == [16, 8]
    assert _core.part_sizes(100, 3, grain=16) == [32, 32, 36]
    assert (_core.heads_for("q_proj", 64, 4), _core.heads_for("mlp.up_proj", 64, 4)) == (4, 0)
    subs = _core.resolve_shape(_core.PackedShape([(64, 16, 16), -1], 0, "rule"), [96, 32], "q")
    assert (subs.dim, subs.sizes, subs.unit, subs.view) == (0, [64, 16, 16], 1, [96, 32])
    assert _core.packed_ranges(subs.sizes, 2)[1] == [(32, 64), (72, 80), (88, 96)]
    assert _core.packed_ranges([24], 2, [(3, 1)]) == [[(0, 16)], [(16, 24)]]
    for shape, message in (([2.5, -1], "2.5"), ([True, -1], "True"), ([(1, 2), (3, 4)], "nested"), ([(), -1], "empty")):
        with pytest.raises(ValueError, match=message):
            _core.PackedShape(shape, 0, "rule")


def test_functions() -> None:
    x = torch.arange(8.0).view(4, 2)

    def body(rank: int, group: tessera.Group) -> None:
        leaf = x.clone().requires_grad_()
        calls = {
            "copy": (lambda: _core.copy_to_ranks(leaf, group), x, 2.0),
            "reduce": (lambda: _core.reduce_from_ranks(leaf, group, label="x"), 2 * x, 1.0),
            "gather": (lambda: _core.gather_from_ranks(leaf, group, 0), torch.cat([x, x]), 1.0),
            "split": (lambda: _core.split_to_ranks(leaf, group, 0, [3, 1]), x[:3] if rank == 0 else x[3:], 1.0),
            "use": (lambda: _core.gather_for_use(leaf, group, dim=1), torch.cat([x, x], 1), 2.0),
            "scatter": (lambda: _core.scatter_sum(leaf, group, -1), 2 * part(x, 1, rank), 1.0),
        }
        for name, (call, expected, factor) in calls.items():
            leaf.grad = None
            y = call()
            assert torch.equal(y, expected), name
            y.sum().backward()
            assert torch.equal(leaf.grad, torch.full_like(x, factor)), name
        with pytest.raises(ValueError, match=r"layers\.0"):
            _core.scatter_sum(leaf, group, 0, [1, 1], label="layers.0")

    run_ranks(2, body)


def test_exchange() -> None:
    whole = torch.randn(6, 1, 4, 3)

    def body(rank: int, group: tessera.Group) -> None:
        parts = [part(whole, 0, rank).requires_grad_() for _ in range(3)]
        heads = _core.exchange(parts, group, 2, 0, [[3, 1]] * 3, [3, 3], label="qkv")
        assert all(torch.equal(t, whole[:, :, :3] if rank == 0 else whole[:, :, 3:]) for t in heads)
        (back,) = _core.exchange(heads[:1], group, scatter_dim=0, gather_dim=2, gather_sizes=[3, 1])
        assert torch.equal(back, parts[0])
        back.sum().backward()
        assert torch.equal(parts[0].grad, torch.ones_like(back))

    run_ranks(2, body)


@pytest.mark.parametrize("sequence_dim", [-1, 0])
def test_layers(sequence_dim: int) -> None:
    x, up, down = torch.randn(6, 4), torch.randn(8, 4), torch.randn(4, 8)
    dense = [t.clone().requires_grad_() for t in (x, up, down)]
    expected = F.linear(F.linear(dense[0], dense[1], torch.ones(8)), dense[2], torch.ones(4))
    (expected.square().sum() / 24).backward()

    def body(rank: int, group: tessera.Group) -> None:
        def own(t: torch.Tensor) -> torch.Tensor:
            return t if sequence_dim < 0 else part(t, 0, rank)

        mine = [own(x).clone(), part(up, 0, rank), part(down, 1, rank)]
        for t in mine:
            t.requires_grad_()
        region = _core.Region(group, sequence_dim=sequence_dim, label="mlp", entrance=_core.Entrance(uses=1))
        y = _core.row_linear(
            _core.column_linear(mine[0], mine[1], torch.ones(4), region), mine[2], torch.ones(4), region
        )
        torch.testing.assert_close(y, own(expected))
        (y.square().sum() / 24).backward()
        torch.testing.assert_close(mine[0].grad, own(dense[0].grad))
        torch.testing.assert_close(mine[1].grad, part(dense[1].grad, 0, rank))
        torch.testing.assert_close(mine[2].grad, part(dense[2].grad, 1, rank))
        with pytest.raises(ValueError, match="mlp"):
            _core.row_linear(x, torch.ones(3, 3), None, region)

    run_ranks(2, body)


def test_vocabulary() -> None:
    weight, indices = torch.randn(10, 3), torch.tensor([[0, 9], [4, 5]])
    logits, target = torch.randn(2, 2, 10), torch.tensor([[1, -100], [8, 3]])
    losses = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(2, 2)

    def body(rank: int, group: tessera.Group) -> None:
        region = _core.Region(group, label="embed")
        rows = part(weight, 0, rank)
        assert torch.equal(_core.vocab_embedding(indices, rows, 5 * rank, 10, -1, region), weight[indices])
        with pytest.raises(IndexError, match="embed"):
            _core.vocab_embedding(indices + 1, rows, 5 * rank, 10, -1, region)
        own = part(logits, 2, rank)
        torch.testing.assert_close(_core.vocab_cross_entropy(own, target, 5 * rank, 10, group), losses)
        whole = _core.sequence_cross_entropy(part(logits, 0, rank), part(target, 0, rank), group)
        torch.testing.assert_close(whole, losses)

    run_ranks(2, body)


def test_attention() -> None:
    whole = torch.randn(6, 1, 4, 3)

    def body(rank: int, group: tessera.Group) -> None:
        q = part(whole, 0, rank).requires_grad_()
        cut = _core.SequenceCut(group, sequence_dim=0)
        query, key, value, heads = _core.to_heads(q, q, q, cut)
        assert torch.equal(query, part(whole, 2, rank)) and (heads.queries, heads.repeat) == ([2, 2], 1)
        out = _core.to_sequence(query + key + value, heads, cut)
        assert torch.equal(out, 3 * q)
        out.sum().backward()
        assert torch.equal(q.grad, torch.full_like(q, 3))

    run_ranks(2, body)
    assert _core.deal_heads(queries=12, keys=3, ranks=2).queries == [8, 4]
    with pytest.raises(tessera.ConfigError, match=r"^\[mine\] sequence parallel attention: 3 query heads are too few"):
        _core.deal_heads(3, 3, 4, label="mine")


def test_cost() -> None:
    model, training = _core.BlockStack(), _core.Training()
    model.layers, model.hidden, model.heads, model.kv_heads, model.head_dim, model.inner = 2, 16, 4, 2, 4, 32
    training.ranks, training.stage, training.length = {_core.Axis.Tp: 2, _core.Axis.DpShard: 4}, 3, 8
    cost = _core.parallel_cost(model, training)
    sums = cost.axes["tp"]["all_reduce"]
    assert (sums.calls, sums.bytes) == (8, 8 * 8 * 16 * 2) == (8, cost.bytes("tp"))
    assert "dp_shard x sp" in cost.axes and "all_gather" in cost.text()


def test_plan() -> None:
    kind = _core.ModuleKind
    attention, mlp = "layers.0.self_attn", "layers.0.mlp"
    modules = [
        _core.PlanModule("layers", "ModuleList", kind.List),
        _core.PlanModule("layers.0", "LlamaDecoderLayer", kind.Other),
        _core.PlanModule(attention, "LlamaAttention", kind.Other, attributes={"num_heads": 4}),
        _core.PlanModule(f"{attention}.qkv_proj", "Linear", kind.Linear, [32, 16], bias=32),
        _core.PlanModule(f"{attention}.o_proj", "Linear", kind.Linear, [16, 16]),
        _core.PlanModule(f"{mlp}.experts", "Experts", kind.Experts, [2, 48, 16], param="gate_up_proj"),
        _core.PlanModule(f"{mlp}.experts", "Experts", kind.Experts, [2, 16, 24], param="down_proj"),
    ]
    facts, options = _core.ModelFacts(), _core.PlanOptions()
    facts.model_type, facts.heads, facts.kv_heads, facts.hidden = "llama", 4, 2, 16
    options.size = 2

    def decisions(plan: _core.ParallelPlan) -> dict[str, list[list[tuple[int, int]]]]:
        return {f"{d.path.split('.')[-1]}.{d.param}": d.ranges for d in plan.decisions}

    plan = _core.make_plan(modules, facts, options)
    expected = {
        "qkv_proj.weight": [[(0, 8), (16, 20), (24, 28)], [(8, 16), (20, 24), (28, 32)]],
        "o_proj.weight": [[(0, 8)], [(8, 16)]],
        "experts.gate_up_proj": [[(0, 12), (24, 36)], [(12, 24), (36, 48)]],
        "experts.down_proj": [[(0, 12)], [(12, 24)]],
    }
    assert decisions(plan) == expected
    assert plan.widths == {attention: {"num_heads": [2, 2]}} and "qkv_proj" in plan.text()

    def matcher(pattern: str):  # type: ignore[no-untyped-def]
        return lambda name: re.match(pattern, name) is not None

    rule = _core.PartitionRule()
    rule.matches, rule.pattern, rule.source = matcher(r".*qkv_proj"), r".*qkv_proj", "layer_specs[0]"
    rule.shape = _core.PackedShape([(16, 8, 8), -1], 0, "layer_specs[0]")
    options.rules = [rule, *_core.preset_rules("Mixtral", facts, matcher)]
    assert decisions(_core.make_plan(modules, facts, options)) == expected
    options.rules = _core.llama_gqa_rules(4, 2, 4, matcher)
    assert decisions(_core.make_plan(modules, facts, options))["qkv_proj.weight"] == expected["qkv_proj.weight"]
    with pytest.raises(ValueError, match="mixtral"):
        _core.preset_rules("none", facts, matcher)
    assert "phi3" in _core.preset_names() and "num_heads" in _core.width_names()
