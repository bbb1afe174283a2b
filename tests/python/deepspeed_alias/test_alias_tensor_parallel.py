"""Layers that programs cut themselves, whole values of slices, groups without and with an engine, sizes of slices."""

from __future__ import annotations

import copy
import types
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.module_inject.layers import GatherReplacedLayerParams, LinearAllreduce, LinearLayer
from deepspeed.module_inject.tp_shard import AutoTPMeta, get_shard_size, get_shard_size_list, set_num_kv_heads
from support import free_port, run_processes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

WORLD, WIDTH = 4, 12


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.linears:
            x = layer(x)
        return (x - y).square().mean()


def settings(size: int, stage: int = 0) -> dict[str, Any]:
    skip = {"use_default_specs": False, "layer_specs": [{"patterns": [".*\\.weight$"], "partition_type": "skip"}]}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        "tensor_parallel": {"autotp_size": size, "partition_config": skip},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }


def by_hand(size: int, stage: int, rank: int) -> None:
    """An engine's groups, layers over them, and another engine with them that trains as the whole model."""
    from deepspeed.utils import groups

    torch.manual_seed(3)
    first = deepspeed.initialize(model=Stack(), config=settings(size))[0]
    group = groups.get_tensor_model_parallel_group()
    assert groups.get_tensor_model_parallel_src_rank() == rank // size * size
    model, x, y = Stack(), torch.randn(3, WIDTH), torch.randn(3, WIDTH)
    plain = copy.deepcopy(model)
    for number, cls in ((1, LinearLayer), (2, LinearAllreduce), (4, LinearLayer), (5, LinearAllreduce)):
        model.linears[number] = cls(model.linears[number], group)
        assert isinstance(model.linears[number], cls) and not isinstance(plain.linears[number], cls)
    own = torch.chunk(plain.linears[1].weight, size, 0)[groups.get_tensor_model_parallel_rank()]
    assert torch.equal(model.linears[1].weight, own)
    engine = deepspeed.initialize(model=model, config=settings(size, stage))[0]
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0)
    for _ in range(2):
        loss, want = engine(x, y), plain(x, y)
        engine.backward(loss)
        engine.step()
        optimizer.zero_grad()
        want.backward()
        optimizer.step()
        torch.testing.assert_close(loss, want)
    whole = engine._consolidated_16bit_state_dict()
    assert (whole is None) == (rank != 0)
    for name, value in plain.state_dict().items() if rank == 0 else ():
        torch.testing.assert_close(whole[name], value, rtol=1e-3, atol=2e-4)
    weight = engine.module.linears[1].weight
    with GatherReplacedLayerParams([weight], engine.module):
        torch.testing.assert_close(weight.detach(), plain.linears[1].weight.detach(), rtol=1e-3, atol=2e-4)
    with GatherReplacedLayerParams(engine.module.linears[0].weight, engine, enabled=True):
        pass
    assert engine.module.linears[1].ds_is_replaced_module and engine.module.ds_autotp_parsed
    engine.destroy()
    first.destroy()


def gathered(rank: int) -> None:
    """param.gather_params() and _tp_partition(), without an engine."""
    from deepspeed.runtime.utils import is_model_parallel_parameter
    from deepspeed.utils import groups

    data, tensor = groups._init_tp_mesh_device(tensor_model_parallel_size=2)
    assert groups._init_tp_mesh_device(2) == (data, tensor)
    assert (groups.get_tensor_model_parallel_group(), groups.get_data_parallel_group()) == (tensor, data)
    assert groups.get_tensor_model_parallel_world_size() == groups.get_data_parallel_world_size() == 2
    assert groups.get_tensor_model_parallel_rank() == rank % 2 and groups.get_data_parallel_rank() == rank // 2
    torch.manual_seed(5)
    for cls, expected in ((LinearLayer, WIDTH * (WIDTH + 1) // 2), (LinearAllreduce, WIDTH * WIDTH // 2 + WIDTH)):
        plain = nn.Linear(WIDTH, WIDTH)
        layer = cls(copy.deepcopy(plain), tensor)
        sliced = [p for p in layer.parameters() if is_model_parallel_parameter(p)]
        assert sum(p.numel() for p in layer.parameters()) == expected and sliced
        for param in sliced:
            param.gather_params([param])
        for got, want in zip(layer.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0)
        with torch.no_grad():
            layer.weight.mul_(2)
        for param in sliced:
            param._tp_partition([param])
        assert sum(p.numel() for p in layer.parameters()) == expected
        with GatherReplacedLayerParams(layer.weight, layer):
            assert torch.equal(layer.weight, 2 * plain.weight)
        assert copy.deepcopy(layer)(torch.ones(1, layer.weight.size(1))).isfinite().all()
    assert LinearLayer.from_weights(weight=plain.weight.detach(), bias=plain.bias.detach())(torch.ones(WIDTH)).shape


def other_groups(rank: int) -> None:
    """tp_model_init over ranks that do not follow one another; the engine after the next is not cut."""
    from deepspeed.utils import groups

    pairs = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])[0]
    model = Stack()
    deepspeed.tp_model_init(model, 2, torch.float32, tp_group=pairs)
    config = settings(2)
    del config["tensor_parallel"]["autotp_size"]
    config["tensor_parallel"]["tp"] = {"tp_group": pairs, "tp_size": 2}
    engine = deepspeed.initialize(model=model, config=config)[0]
    assert engine.mp_world_size == 2 and config["tensor_parallel"]["tp"]["tp_group"] is pairs
    assert dist.get_process_group_ranks(groups.get_tensor_model_parallel_group()) == [rank % 2, rank % 2 + 2]
    assert groups.get_tensor_model_parallel_src_rank() == rank % 2 == groups.get_data_parallel_rank()
    engine.destroy()
    del config["tensor_parallel"]
    again = deepspeed.initialize(model=Stack(), config=config)[0]
    assert again.mp_world_size == 1
    again.destroy()


def sequence_groups(rank: int) -> None:
    """The module of sequence-parallel groups, as an object with getters and as an mpu."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp as state

    with pytest.raises(AssertionError, match="initialize_sequence_parallel"):
        state.get_sequence_parallel_group()
    state.initialize_sequence_parallel(2)
    assert state.get_sequence_parallel_world_size() == state.get_model_parallel_world_size() == 2
    assert state.get_sequence_parallel_rank() == state.get_model_parallel_rank() == rank % 2
    assert state.get_sequence_data_parallel_world_size() == 4 and state.get_sequence_data_parallel_rank() == rank
    assert dist.get_world_size(state.get_sequence_data_parallel_group()) == 4
    assert dist.get_process_group_ranks(state.get_model_parallel_group()) == [rank // 2 * 2, rank // 2 * 2 + 1]
    config = settings(1)
    del config["tensor_parallel"]
    engine = deepspeed.initialize(model=Stack(), config=config, mpu=state)[0]
    assert (engine.sequence_parallel_size, engine.dp_world_size, engine.mp_world_size) == (2, 2, 1)
    engine.destroy()


def shapes_of_sequences(rank: int) -> None:
    """Attention, exchanges, losses and tiles in DeepSpeed's shapes."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import SequenceTiledCompute, TiledFusedLogitsLoss, TiledMLP
    from deepspeed.sequence.cross_entropy import vocab_sequence_parallel_cross_entropy
    from deepspeed.sequence.layer import DistributedAttention

    group = dist.group.WORLD
    whole = torch.arange(2.0 * 8 * 4 * 3).view(2, 8, 4, 3)  # batch, sequence, heads
    mine = whole[:, 2 * rank : 2 * rank + 2].clone()
    for batch_dim in (0, 1):
        x = mine if batch_dim == 0 else mine.transpose(0, 1).contiguous()
        attention = DistributedAttention(lambda q, k, v, factor: q + factor * k + v, group, 2, 1 - batch_dim)
        assert torch.equal(attention(x, x, x, batch_dim, None, 2.0), 4 * x)
        with pytest.raises(ValueError, match="heads are dim 2"):
            DistributedAttention(torch.add, group, 1, 0)
    losses = vocab_sequence_parallel_cross_entropy(mine[:, :, 0], torch.zeros(2, 2, dtype=torch.long), group)
    assert losses.shape == (8, 2)

    def plus(self: float, x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        return self + (x.mean() if more else x)

    assert torch.equal(TiledMLP.apply(plus, 1.0, mine, 2, []), 1 + mine)
    out = SequenceTiledCompute.apply(plus, 2, 2, ["x"], ["self"], "x", [], 1, None, mine, 1.0)
    assert torch.equal(out, 1 + mine)
    with pytest.raises(ValueError, match="must be the sequence of 3 tokens"):
        SequenceTiledCompute.apply(plus, 3, 2, ["x"], ["self"], "x", [], 1, None, mine, 1.0)
    loss = TiledFusedLogitsLoss.apply(plus, 1.0, mine, mine[..., 0, 0], None, 2, [], "mean")
    torch.testing.assert_close(loss, 1 + mine.mean())


def meshes(rank: int) -> None:
    """Two ranks a sequence, as mesh_param and as an mpu of the caller's own say it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    both = mesh._flatten("both").get_group()
    mpu = types.SimpleNamespace(
        get_data_parallel_group=lambda: mesh.get_group("data"),
        get_sequence_parallel_group=lambda: mesh.get_group("sequence"),
        get_sequence_parallel_world_size=lambda: 2,
        get_sequence_data_parallel_group=lambda: both,
    )
    config = settings(1)
    del config["tensor_parallel"]
    for given in ({"mesh_param": (2, 2)}, {"mpu": mpu}):
        engine = deepspeed.initialize(model=Stack(), config=config, **given)[0]
        assert (engine.sequence_parallel_size, engine.dp_world_size, engine.seq_dp_world_size) == (2, 2, 4)
        assert (engine.get_sequence_parallel_rank(), engine.get_data_parallel_rank()) == (rank % 2, rank // 2)
        engine.destroy()
    with pytest.raises(ValueError, match=r"asks for 3 data-parallel x 1 sequence-parallel ranks.*there are 4"):
        deepspeed.initialize(model=Stack(), config=config, mesh_param=(3, 1))
    cut = config | {"tensor_parallel": {"autotp_size": 2}}
    with pytest.raises(ValueError, match=r"autotp_size is 2, and mpu has sequence-parallel .* tensor_parallel_size=2"):
        deepspeed.initialize(model=Stack(), config=cut, mpu=mpu)


def registered(rank: int) -> None:
    """The groups of a registered model of Transformers are an mpu."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=8)
    model = LlamaForCausalLM(config)
    mpu = UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", 2, 1)
    assert dist.get_process_group_ranks(mpu.get_sequence_parallel_group()) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert (mpu.get_sequence_parallel_rank(), mpu.get_data_parallel_rank()) == (rank % 2, rank // 2)
    assert mpu.get_sequence_data_parallel_world_size() == 4 and mpu.get_tensor_model_parallel_world_size() == 1
    engine = deepspeed.initialize(model=model, config=settings(1) | {"tensor_parallel": {}}, mpu=mpu)[0]
    assert engine.sequence_parallel_size == 2 and engine.seq_parallel_group is mpu.get_sequence_parallel_group()
    engine.destroy()
    assert UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", 1, 1) is None


def worker(rank: int, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    meshes(rank)
    registered(rank)
    sequence_groups(rank)
    shapes_of_sequences(rank)
    gathered(rank)
    other_groups(rank)
    for size, stage in ((2, 0), (2, 1), (2, 3), (4, 2)):
        by_hand(size, stage, rank)
    dist.destroy_process_group()


@pytest.mark.long
def test_four_processes() -> None:
    run_processes(WORLD, worker, free_port())


def test_sizes_of_slices() -> None:
    meta = AutoTPMeta(num_kv_heads=3)
    assert get_shard_size_list(12, 2, meta) == [8, 4] and get_shard_size_list(12, 2, meta, "mlp.up") == [6, 6]
    assert get_shard_size_list(12, 2, meta, "lm_head") == [6, 6] and get_shard_size_list(10, 2, meta) == [5, 5]
    assert get_shard_size(12, 2, meta, rank=1) == 4 and get_shard_size(7, 2, AutoTPMeta(), "x", 0) == 4
    assert get_shard_size_list(7, 2, AutoTPMeta(tp_grain_size=2)) == [4, 3]
    config = type("Config", (), {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64})()
    assert (
        AutoTPMeta.from_model_config(config) == AutoTPMeta(2, 8, 64)
        and AutoTPMeta.from_model_config(None) == AutoTPMeta()
    )
    set_num_kv_heads(3)
    try:
        assert get_shard_size_list(12, 2) == [8, 4] and get_shard_size(12, 2, "attn.q", 1) == 4
    finally:
        set_num_kv_heads(None)
    assert get_shard_size_list(12, 2) == [6, 6]
