"""Ranks as processes: groups from torch.distributed, torch's generators, several ways to ask for tensor parallelism."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support import free_port, run_processes
from test_models import assert_same, settings, train, train_plain
from tiny_models import LLAMA, NEOX, of, text
from torch.distributed.device_mesh import init_device_mesh

import tessera

WORLD = 4


def dropping(engine: tessera.Engine, seed: int) -> dict[str, Any]:
    """One step with dropout everywhere."""
    torch.manual_seed(seed + 10 * dist.get_rank())  # rank 0's holds
    output = engine(**text(0))
    output.loss.backward()
    grads = {n: tessera.state.get_full_grad(engine, p).clone() for n, p in engine.module.named_parameters()}
    engine.zero_grad()
    return {"logits": output.logits.detach().clone(), "grads": grads}


def worker(rank: int, port: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    model = of("Llama", LLAMA)()
    batches = [[text(step, 0), text(step, 1)] for step in range(2)]
    want = train_plain(copy.deepcopy(model).train(), batches)
    mine = [parts[rank // 2] for parts in batches]
    for way in ("configuration", "tp_model_init", "tp_group", "mesh"):
        part = copy.deepcopy(model).train()
        cfg = settings(2, {"preset_model": "llama"}, stage=2)
        group = None
        if way in ("tp_model_init", "tp_group"):
            del cfg["tensor_parallel"]["autotp_size"]
            pairs = dist.new_subgroups(2)[0]
            options = {"tp_group": pairs} if way == "tp_group" else {}
            tessera.parallel.tp_model_init(part, 2, torch.float32, **options)
        if way == "mesh":
            group = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
        engine = tessera.Engine(part, cfg, group=group) if group else tessera.initialize(model=part, config=cfg)[0]
        assert (engine.mp_world_size, engine.dp_world_size, engine.autotp_size()) == (2, 2, 2)
        got = train(engine, mine)
        engine.destroy()
        if rank == 0:
            assert_same(got, want)
    engine = tessera.initialize(model=of("OPT", OPT)().train(), config=settings(2, {}) | {"gradient_clipping": 0.0})[0]
    found = [dropping(engine, seed) for seed in (1, 1, 2)]
    engine.destroy()
    torch.save([found, dropping_parts()], Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def dropping_parts() -> list[dict[str, Any]]:
    """Steps with dropout of what lies between blocks, cut along the sequence; the last one with checkpointed blocks."""
    cfg = settings(2, {}, tessera={"sequence_parallel_norms": True}) | {"gradient_clipping": 0.0}
    engine = tessera.initialize(model=of("GPTNeoX", NEOX, hidden_dropout=0.5)().train(), config=cfg)[0]
    masks: list[torch.Tensor] = []
    drop = engine.module.gpt_neox.layers[1].post_mlp_dropout
    drop.register_forward_hook(lambda _m, _a, out: masks.append(out.detach() == 0))
    results = []
    for replays in (False, True):
        if replays:
            engine.module.gradient_checkpointing_enable()
        masks.clear()
        results.append(dropping(engine, 1) | {"masks": list(masks)})
    engine.destroy()
    return results


OPT = {
    "vocab_size": 32,
    "hidden_size": 32,
    "ffn_dim": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "word_embed_proj_dim": 32,
    "max_position_embeddings": 32,
    "dropout": 0.3,
    "attention_dropout": 0.3,
    "pad_token_id": 0,
}


def test_ranks_as_processes(tmp_path: Path) -> None:
    run_processes(WORLD, worker, free_port(), str(tmp_path))
    ranks, parts = zip(*(torch.load(tmp_path / f"{rank}.pt") for rank in range(WORLD)), strict=True)
    for rank in (0, 2):  # what both slices of a model hold is dropped alike
        for first, second in zip(ranks[rank], ranks[rank + 1], strict=True):
            assert first["logits"].equal(second["logits"])
            name = "model.decoder.layers.0.final_layer_norm.weight"
            assert first["grads"][name].equal(second["grads"][name])
    once, again, other = (run["logits"] for run in ranks[0])
    assert once.equal(again) and not once.equal(other)
    assert not ranks[0][0]["logits"].equal(ranks[2][0]["logits"])
    for (plain, replayed), (other, _) in ((parts[0], parts[1]), (parts[2], parts[3])):
        (mask,), (first, again) = plain["masks"], replayed["masks"]
        assert mask.equal(first) and mask.equal(again) and not mask.equal(other["masks"][0])
        assert plain["logits"].equal(other["logits"])
        for name, grad in plain["grads"].items():
            assert grad.equal(other["grads"][name]), name
            torch.testing.assert_close(grad, replayed["grads"][name])
