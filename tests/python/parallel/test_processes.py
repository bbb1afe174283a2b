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
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

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
    names = ("dp_shard", "tp")
    meshes = {"mesh": DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=names)}
    meshes["mesh across"] = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=names)
    for way in ("configuration", "argument", *meshes):
        mine = [parts[rank % 2 if way == "mesh across" else rank // 2] for parts in batches]
        part = copy.deepcopy(model).train()
        cfg = settings(2, {"preset_model": "llama"}, stage=2)
        size = 2 if way == "argument" else None
        if size is not None:
            del cfg["tensor_parallel"]["autotp_size"]
        engine = tessera.initialize(model=part, config=cfg, group=meshes.get(way), tensor_parallel=size)[0]
        assert (engine.tp_world_size, engine.dp_world_size) == (2, 2)
        assert engine.dp_rank == (rank % 2 if way == "mesh across" else rank // 2)
        got = train(engine, mine)
        engine.destroy()
        if rank == 0:
            assert_same(got, want)
    engine = tessera.initialize(model=of("OPT", OPT)().train(), config=settings(2, {}) | {"gradient_clipping": 0.0})[0]
    found = [dropping(engine, seed) for seed in (1, 1, 2)]
    engine.destroy()
    unnamed = [drawing(case) for case in DRAWS]
    torch.save([found, dropping_parts(), unnamed], Path(folder) / f"{rank}.pt")
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
        with set_checkpoint_early_stop(False):  # a replay comes to the hook
            results.append(dropping(engine, 1) | {"masks": list(masks)})
    engine.destroy()
    return results


class DrawingBlock(nn.Module):
    """Draws without a module that is set to; `mine`: what was dropped between its column and its row layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.settings = {"rate": 0.3, "noise": 0.1}
        self.replays_a_part = False  # which ends amid what is cut
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, width), nn.Linear(width, 6)
        self.mine: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.settings["noise"]:
            x = x + self.settings["noise"] * torch.randn_like(x)
        y = checkpoint(self.first, x, use_reentrant=False) if self.replays_a_part else self.first(x)
        return x + F.dropout(self.down(y), self.settings["rate"], self.training)

    def first(self, x: torch.Tensor) -> torch.Tensor:
        y = F.dropout(self.up(self.norm(x)).exp(), self.settings["rate"], self.training)
        self.mine.append(y.detach()[:, :4] == 0)
        return y


class Drawing(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DrawingBlock(width) for _ in range(2))
        self.replays = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.replays else layer(x)
        return x.square().mean()


LATE = ("late", "late, checkpointed")  # with slices of one size
PART = "replayed in part"
DRAWS = ("plain", "checkpointed", PART, "compiled", *LATE, "late, uneven", "none", "jitter")


def drawing(case: str) -> dict[str, Any]:
    """Three steps with other generators on each rank: losses, gradients of what is whole, masks, and the generator."""
    torch.manual_seed(3)
    model = of("Mixtral", LLAMA, num_local_experts=4, router_jitter_noise=0.3)() if case == "jitter" else None
    model = model or Drawing(8 if case in ("none", *LATE) else 9)
    specs = [{"patterns": [r".*\.up"]}, {"patterns": [r".*\.down"], "partition_type": "row"}]
    rules = {} if case == "jitter" else {"partition_config": {"layer_specs": specs}}
    engine = tessera.initialize(model=model.train(), config=settings(2, rules, stage=1))[0]
    torch.manual_seed(10 + dist.get_rank())
    found: dict[str, Any] = {"losses": [], "grads": [], "masks": []}
    for step in range(3):
        for layer in model.layers if case != "jitter" else ():
            quiet = case == "none" or ("late" in case and step == 0)
            layer.settings.update({"rate": 0.0, "noise": 0.0} if quiet else {"rate": 0.3, "noise": 0.1})
            layer.replays_a_part = case == PART
            if case == "compiled" and step == 0:
                layer.compile(backend="eager")
        if case == "jitter":
            loss = engine(**text(step)).loss
        else:
            model.replays = "checkpointed" in case
            loss = engine(torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(step)))
        engine.backward(loss)
        whole = [p for p in model.parameters() if not tessera.parallel.is_model_parallel_parameter(p)]
        found["grads"].append([tessera.state.get_full_grad(engine, p).clone() for p in whole])
        found["losses"].append(loss.item())
        engine.step()
    if case != "jitter":
        found["masks"] = [torch.stack(layer.mine) for layer in model.layers]
    found["next"] = torch.rand(3)
    engine.destroy()
    return found


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
    ranks, parts, unnamed = zip(*(torch.load(tmp_path / f"{rank}.pt") for rank in range(WORLD)), strict=True)
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
    for case, first, second, other in zip(DRAWS, *unnamed[:3], strict=True):
        assert first["losses"] == second["losses"], case
        assert case == "none" or first["losses"] != other["losses"], case
        for step, (mine, its) in enumerate(zip(first["grads"], second["grads"], strict=True)):
            assert all(a.equal(b) for a, b in zip(mine, its, strict=True)), (case, step)
        for mine, its in zip(first["masks"], second["masks"], strict=True):
            if "checkpointed" in case:
                assert all(a[0::2].equal(a[1::2]) for a in (mine, its))  # forward, replay
            for step in range(len(mine)) if case in ("plain", "checkpointed", PART, "compiled") else ():
                assert not mine[step].equal(its[step]), (case, step)
            assert case not in LATE or not mine[-1].equal(its[-1]), case
        if case == PART:
            assert first["losses"] == unnamed[0][DRAWS.index("plain")]["losses"]
            torch.testing.assert_close(first["grads"], unnamed[0][DRAWS.index("plain")]["grads"])
        torch.manual_seed(10)
        assert first["next"].equal(torch.rand(3)) == (
            case in ("none", *LATE)
        )  # what draws nothing at first leaves the generator alone
