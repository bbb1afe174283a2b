"""Checkpoints that DeepSpeed itself wrote, read here; those written here, read by DeepSpeed itself and its tools.

Run by `make test-peers`, which makes the environment that DeepSpeed is in; TESSERA_PEERS is its interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import model as m
import pytest
import torch
from programs import PEERS, run_peer
from support import run_ranks

import tessera
from tessera import checkpoints

WORLDS = (1, 2)
# Gradients are reduced in the parameters' dtype and the same bits do not come out of two programs.
TOLERANCE = {"fp32": 2e-5, "bf16": 3e-2, "fp16": 5e-3}
ALL = [(world, stage, precision) for world in WORLDS for stage in m.STAGES for precision in m.PRECISIONS]
UNIVERSAL = {"checkpoint": {"load_universal": True}}
# More kinds of files: stage, and what the configuration has. On 2 ranks, in bf16.
FURTHER: dict[str, tuple[int, dict[str, Any]]] = {
    "elastic": (2, {"zero_optimization": {"stage": 2, "elastic_checkpoint": True}}),
    "round robin": (2, {"zero_optimization": {"stage": 2, "round_robin_gradients": True}}),
    "sub-groups": (3, {"zero_optimization": {"stage": 3, "sub_group_size": 40}}),
    "fp32 gradients": (1, {"data_types": {"grad_accum_dtype": "fp32"}}),
}

pytestmark = pytest.mark.skipif(not PEERS, reason="make test-peers")


def name_of(world: int, stage: int, precision: str) -> str:
    return f"{world}-{stage}-{precision}"


def deepspeed(folder: Path, world: int, jobs: list[dict[str, Any]]) -> None:
    """Does the jobs in one run of DeepSpeed's program on `world` ranks."""
    listing = folder / f"jobs-{world}.json"
    listing.write_text(json.dumps(jobs))
    run_peer(folder, "deepspeed_program.py", world, str(listing))


def tessera_engines(world: int, stage: int, precision: str, body: Any, **more: Any) -> list[Any]:
    def run(rank: int, group: Any) -> Any:
        net = m.make()
        engine = tessera.Engine(net, m.config(stage, precision, **more), model_parameters=m.groups(net), group=group)
        try:
            return body(engine, rank)
        finally:
            engine.destroy()

    return run_ranks(world, run)


def steps(engine: Any, rank: int, first: int) -> list[float]:
    losses = []
    for step in range(first, first + m.STEPS):
        loss = engine(*m.batch(step, rank))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def values(engine: Any) -> dict[str, dict[str, torch.Tensor]]:
    found = {}
    for name, param in engine.module.named_parameters():
        if param.requires_grad:
            found[name] = {
                "master": tessera.state.get_full_fp32_param(engine, param),
                **{
                    k: tessera.state.get_full_optimizer_state(engine, param, k)
                    for k in ("exp_avg", "exp_avg_sq", "step")
                },
            }
    return found


def facts(engine: Any) -> dict[str, Any]:
    with tessera.zero.GatheredParameters(engine.module.parameters()):
        frozen = {n: p.detach().clone() for n, p in engine.module.named_parameters() if not p.requires_grad}
    state = engine.core.scaler().state()
    return {
        "values": values(engine),
        "frozen": frozen,
        "buffers": {name: buffer.clone() for name, buffer in engine.module.named_buffers()},
        "counters": [engine.global_steps, engine.skipped_steps, engine.global_samples],
        "scale": [state.scale, state.steps, state.good_steps],
        "schedule": engine.lr_scheduler.state_dict(),
        "lr": engine.get_lr(),
    }


def scale_of(scaler: dict[str, Any]) -> list[float]:
    iterations = scaler.get("cur_iter", 0)
    return [scaler["cur_scale"], iterations, iterations - scaler.get("last_overflow_iter", -1) - 1]


def assert_same(ours: dict[str, Any], theirs: dict[str, Any], precision: str, counters: bool = True) -> None:
    assert ours["values"].keys() == theirs["values"].keys()
    for name, kinds in theirs["values"].items():
        for kind, value in kinds.items():
            assert torch.equal(ours["values"][name][kind].float(), value.float()), f"{name} {kind}"
    for kind in ("frozen", "buffers"):
        for name, value in theirs[kind].items():
            assert torch.equal(ours[kind][name], value), f"{kind} {name}"
    if counters:
        assert ours["counters"] == theirs["counters"]
        assert ours["schedule"]["last_batch_iteration"] == theirs["schedule"]["last_batch_iteration"]
        assert ours["lr"] == theirs["lr"]
    if precision == "fp16":
        assert ours["scale"] == scale_of(theirs["scaler"])


def assert_goes_on(ours: list[float], theirs: list[float], stage: int, precision: str) -> None:
    # DeepSpeed's fp16 at stage 0 divides by the loss scale what it has not multiplied by it: only its first loss is
    # comparable, before such an update.
    count = 1 if (stage, precision) == (0, "fp16") else len(theirs)
    assert ours[:count] == pytest.approx(theirs[:count], rel=TOLERANCE[precision])


# ---------------------------------------------------------------- theirs, read here


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of each kind, with what DeepSpeed says of it, and universal ones."""
    root = tmp_path_factory.mktemp("theirs")
    for world in WORLDS:
        jobs: list[dict[str, Any]] = []
        for _, stage, precision in [variant for variant in ALL if variant[0] == world]:
            out = str(root / name_of(world, stage, precision))
            jobs.append({"do": "train", "stage": stage, "precision": precision, "out": out})
            if stage > 0 and precision != "fp32":
                tags = {"tag": "global_step3", "to": "universal"}
                jobs.append({"do": "convert", "from": out, "inject": True, **tags})
        for name, (stage, more) in FURTHER.items() if world == 2 else ():
            jobs.append({"do": "train", "stage": stage, "precision": "bf16", "out": str(root / name), "more": more})
        deepspeed(root, world, jobs)
    return root


def says(folder: Path, rank: int = 0) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(folder / f"state-{rank}.pt", weights_only=False)
    return state


@pytest.mark.parametrize(("world", "stage", "precision"), ALL)
def test_reads_and_goes_on(theirs: Path, world: int, stage: int, precision: str) -> None:
    folder = theirs / name_of(world, stage, precision)

    def body(engine: Any, rank: int) -> Any:
        path, client = engine.load_checkpoint(folder)
        assert path == str(folder / "global_step3")
        assert client["epoch"] == 4 and torch.equal(client["scores"][1], torch.arange(3))
        assert client.keys() == {"epoch", "scores"}
        return facts(engine), steps(engine, rank, m.STEPS)

    for rank, (ours, after) in enumerate(tessera_engines(world, stage, precision, body)):
        state = says(folder, rank)
        assert_same(ours, state, precision)
        assert_goes_on(after, state["after"], stage, precision)
    # As another number of ranks in another stage.
    other_world, other_stage = 3 - world, (stage + 2) % 4
    for ours, _ in tessera_engines(other_world, other_stage, precision, body):
        assert_same(ours, says(folder), precision)


@pytest.mark.parametrize(("world", "stage", "precision"), [v for v in ALL if v[1] > 0 and v[2] != "fp32"])
def test_reads_universal_ones(theirs: Path, world: int, stage: int, precision: str) -> None:
    folder = theirs / name_of(world, stage, precision)

    def body(engine: Any, rank: int) -> Any:
        path, _ = engine.load_checkpoint(folder)
        assert path == str(folder / "universal")
        return facts(engine)

    for ours in tessera_engines(3 - world, (stage + 1) % 4, precision, body, **UNIVERSAL):
        assert_same(ours, says(folder), precision)


@pytest.mark.parametrize("name", FURTHER)
def test_reads_further_kinds(theirs: Path, name: str) -> None:
    def body(engine: Any, rank: int) -> Any:
        engine.load_checkpoint(theirs / name)
        return facts(engine)

    (ours,) = tessera_engines(1, 1, "bf16", body)
    assert_same(ours, says(theirs / name), "bf16")


@pytest.mark.parametrize(("world", "stage"), [(w, s) for w in WORLDS for s in m.STAGES])
def test_weights_of_theirs_without_an_engine(theirs: Path, world: int, stage: int) -> None:
    folder = theirs / name_of(world, stage, "bf16")
    state = checkpoints.state_dict(folder)
    expected = says(folder)
    one_group = stage > 0  # files of stage 0 do not say whose masters they have
    for name, kinds in expected["values"].items():
        value = kinds["master"] if one_group else kinds["master"].bfloat16().float()
        assert state[name].dtype == torch.float32 and torch.equal(state[name], value)
    for name, value in expected["frozen"].items():
        assert torch.equal(state[name], value.float())
    assert state["head.weight"] is state["embed.weight"]
    m.make().load_state_dict(state)
    assert checkpoints.main(["inspect", str(folder), "--verify"]) == 0


# ---------------------------------------------------------------- ours, read by them


@pytest.fixture(scope="module")
def ours(theirs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Any]]]:
    """Checkpoints in their layout and what was in them here; DeepSpeed has loaded each, its tools have run on it."""
    root = tmp_path_factory.mktemp("ours")
    known: dict[str, list[Any]] = {}
    jobs: dict[int, list[dict[str, Any]]] = {world: [] for world in WORLDS}

    def saved(folder: Path, world: int, stage: int, precision: str, **more: Any) -> list[Any]:
        def body(engine: Any, rank: int) -> Any:
            steps(engine, rank, 0)
            engine.save_checkpoint(folder, client_state={"epoch": 4, "scores": [1.5, torch.arange(3)]})
            return facts(engine), steps(engine, rank, m.STEPS)

        return tessera_engines(world, stage, precision, body, checkpoint={"format": "deepspeed"}, **more)

    stage, more = FURTHER["sub-groups"]
    known["sub-groups"] = saved(root / "sub-groups", 2, stage, "bf16", **more)
    job = {"stage": stage, "precision": "bf16", "more": more}
    jobs[2].append({"do": "load", **job, "from": str(root / "sub-groups"), "out": str(root / "sub-groups-loaded")})
    for world, stage, precision in ALL:
        name = name_of(world, stage, precision)
        folder = root / name
        known[name] = saved(folder, world, stage, precision)
        job = {"stage": stage, "precision": precision, "from": str(folder)}
        jobs[world].append({"do": "load", **job, "out": str(root / f"{name}-loaded")})
        if stage == 0:
            continue
        jobs[world].append({"do": "fp32", "from": str(folder), "out": str(root / f"{name}-fp32")})
        if precision == "bf16":
            tags = {"tag": "global_step3", "to": "global_step3_universal"}
            jobs[world].append({"do": "convert", "from": str(folder), **tags})
            checkpoints.to_universal(folder, root / f"{name}-universal")
            # Theirs of this stage converted by us, for the next number of ranks and another stage.
            other = {"stage": stage % 3 + 1, "precision": precision, "more": UNIVERSAL}
            for kind, source in (("own", folder), ("universal", root / f"{name}-universal")):
                if (kind == "own" and stage == 3) or (kind == "own" and other["stage"] == 3):
                    continue  # DeepSpeed's own conversion does not move between stages 2 and 3
                target = str(root / f"{name}-from-{kind}")
                jobs[3 - world].append({"do": "load", **other, "from": str(source), "out": target})
    for world in WORLDS:
        # Conversions come first: the other number of ranks loads what they give.
        deepspeed(root, world, [job for job in jobs[world] if job["do"] == "convert"])
    for world in WORLDS:
        deepspeed(root, world, [job for job in jobs[world] if job["do"] != "convert"])
    return root, known


@pytest.mark.parametrize(("world", "stage", "precision"), ALL)
def test_deepspeed_loads_and_goes_on(ours: Any, world: int, stage: int, precision: str) -> None:
    root, known = ours
    name = name_of(world, stage, precision)
    for rank, (saved, after) in enumerate(known[name]):
        loaded = says(root / f"{name}-loaded", rank)
        assert_same(saved, loaded, precision)
        assert loaded["client"]["epoch"] == 4 and torch.equal(loaded["client"]["scores"][1], torch.arange(3))
        assert_goes_on(loaded["after"], after, stage, precision)


def test_deepspeed_loads_sub_groups(ours: Any) -> None:
    root, known = ours
    assert_same(known["sub-groups"][0][0], says(root / "sub-groups-loaded"), "bf16")


@pytest.mark.parametrize(("world", "stage", "precision"), [v for v in ALL if v[1] > 0])
def test_deepspeeds_tools_run(ours: Any, world: int, stage: int, precision: str) -> None:
    root, known = ours
    name = name_of(world, stage, precision)
    saved = known[name][0][0]
    state = torch.load(root / f"{name}-fp32" / "fp32.pt")
    for param, kinds in saved["values"].items():
        assert torch.equal(state[param], kinds["master"]), param
    assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
    script = root / name / "zero_to_fp32.py"
    assert os.access(script, os.X_OK)
    subprocess.run([sys.executable, str(script), str(root / name), str(root / f"{name}-script")], check=True)
    own = torch.load(root / f"{name}-script" / "pytorch_model.bin")
    for param, value in state.items():
        assert torch.equal(own[param], value.float()), param
    if precision != "bf16":
        return
    for kind in ("own", "universal"):
        folder = root / f"{name}-from-{kind}"
        if (folder / "state-0.pt").exists():
            assert_same(saved, {**says(folder), "frozen": {}, "buffers": {}}, precision)


def test_ours_is_in_one_piece_and_read_here(ours: Any, tmp_path: Path) -> None:
    root, known = ours
    for world, stage, precision in ALL:
        name = name_of(world, stage, precision)
        listed = sorted(path.name for path in (root / name).iterdir())
        assert ".tessera-saving" not in listed and "latest" in listed

        def body(engine: Any, rank: int, name: str = name) -> Any:
            engine.load_checkpoint(root / name)
            return facts(engine)

        (loaded,) = tessera_engines(1, 1, precision, body)
        saved = known[name][0][0]
        assert_same(loaded, {**saved, "scaler": {}}, "fp32")


def test_the_list_of_its_names_is_that_of_this_version() -> None:
    """What the alias package answers for (python/deepspeed_alias/deepspeed/names.txt)."""
    root = Path(__file__).parents[2]
    command = [sys.executable, str(root / "tools" / "index_deepspeed_names.py")]
    find = (
        "from importlib import metadata, util; print(util.find_spec('deepspeed').origin, metadata.version('deepspeed'))"
    )
    found = subprocess.run([PEERS, "-c", find], capture_output=True, text=True, check=True).stdout.split()
    done = subprocess.run([*command, str(Path(found[0]).parent), found[1]], capture_output=True, text=True, check=True)
    assert done.stdout == (root / "python" / "deepspeed_alias" / "deepspeed" / "names.txt").read_text()
