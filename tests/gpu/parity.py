"""Engines on the device beside plain PyTorch on it and beside each other: stages, precision modes, autocast, states and
parameters in host memory and on a disk, accumulation, the early update, checkpoints, optimizers.

The same bits: stages, offload and repetition of one mode (matrix products are the same calls there). Close: the plain
loop, and the same engine on the CPU."""

from __future__ import annotations

import functools
import itertools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import CUDA, DRY, WORK, Results, no_differences
from engines import (
    ALL,
    HOST,
    LR,
    MODES,
    PARAM,
    STEPS,
    apart,
    config,
    early,
    engine_of,
    exact,
    masters,
    plain_loop,
    stages_of,
    train,
    unlike,
)

PAGEABLE = {"device": "cpu", "pin_memory": False}
# A dry run has one mode of each kind.
TRIED = ["fp32", "bf16 14", "bf16 8", "fp16 16", "fp32 autocast bf16"] if DRY else list(MODES)
MAIN = ["fp32", "bf16 14"] if DRY else ["fp32", "bf16 14", "bf16 10", "bf16 8"]
SAVED = ["bf16 14", "fp16 16"] if DRY else ["bf16 14", "fp32", "bf16 16", "bf16 12", "bf16 10", "bf16 8", "fp16 16"]
OPTIMIZERS = {
    "SGD": {"lr": 0.05, "momentum": 0.9},
    "Lion": {"lr": 1e-3},
    "Adagrad": {"lr": 0.01},
    "Adam": {"lr": 0.01},
    "Lamb": {"lr": 0.01},
    "Muon": {"lr": 0.01},
}


@functools.cache
def scratch() -> Path:
    """For checkpoints and states on a disk; empty when the stage begins and gone when it ends."""
    folder = WORK / "parity-files"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


@functools.cache
def reference(mode: str) -> dict[str, Any]:
    return train(config(2, mode))


def beside_plain(mode: str) -> dict[str, Any]:
    mine = reference(mode)
    if mode == "fp16 overflow":
        return {"ok": mine["skipped"] > 0, "skipped": mine["skipped"]}
    theirs = plain_loop(mode)
    loss = float(((mine["losses"].float() - theirs["losses"]) / theirs["losses"]).abs().max())
    # An Adam step is of lr's size whatever the gradient's, so tiny gradients of either sign may be two steps apart.
    off = [(m - theirs["masters"][n]).square().mean().sqrt() / LR for n, m in mine["masters"].items()]
    rms = max(map(float, off))
    low = any(f"bf16 {n}" in mode for n in (8, 10, 12))
    limit = 0.05 if mode == "fp32" else 2.5 if low else 0.6
    close = rms < limit and loss < (1e-4 if mode == "fp32" else 0.03)
    return {"ok": close, "rms_in_lr": rms, "worst_in_lr": apart(mine, theirs), "loss_rel": loss}


def has_the_bits(mode: str, cfg: dict[str, Any]) -> dict[str, Any]:
    return no_differences(unlike(train(cfg), reference(mode)))


def places(folder: str) -> dict[str, tuple[int, dict[str, Any]]]:
    """Where states may be: (stage, more of zero_optimization)."""
    disk = {"device": "nvme", "nvme_path": folder}
    return {
        "states in host memory, pinned": (2, HOST),
        "states in host memory, pageable": (1, {"offload_optimizer": PAGEABLE}),
        "all in host memory": (3, ALL),
        "parameters in host memory": (3, PARAM),
        "parameters in host memory, pageable": (3, {"offload_param": PAGEABLE}),
        "all on a disk": (
            3,
            {"offload_optimizer": disk | {"pin_memory": True}, "offload_param": disk | {"max_in_cpu": 0}},
        ),
    }


def accumulated(mode: str) -> dict[str, Any]:
    base = train(config(2, mode, accumulation=3), steps=2)
    off: dict[Any, Any] = {}
    for stage in stages_of(mode):
        off[stage] = unlike(train(config(stage, mode, accumulation=3), steps=2), base)
    off["host"] = unlike(train(config(2, mode, accumulation=3, zero=HOST), steps=2), base)
    off["all host"] = unlike(train(config(3, mode, accumulation=3, zero=ALL), steps=2), base)
    return no_differences({k: v for k, v in off.items() if v})


def updated_early(mode: str) -> dict[str, Any]:
    usual = early(mode) | {"tessera": {}}
    base = train(config(3, mode, **usual))
    off: dict[Any, Any] = {s: unlike(train(config(s, mode, **early(mode))), base) for s in (1, 2, 3)}
    off["all host"] = unlike(train(config(3, mode, zero=ALL, **early(mode))), base)
    return no_differences({k: v for k, v in off.items() if v})


@functools.cache
def saved(mode: str, stage: int) -> tuple[str, dict[str, torch.Tensor]]:
    """A checkpoint after two steps, and the masters after four. The save goes on while the engine trains."""
    folder = tempfile.mkdtemp(dir=scratch())
    cfg = config(stage, mode)
    first = train(cfg, steps=2, keep=True)["engine"]
    first.save_checkpoint(folder, asynchronous=True)
    train(cfg, steps=2, first=2, engine=first, keep=True)
    first.wait_for_checkpoint()
    found = masters(first)
    first.destroy()
    return folder, found


def resumed(mode: str, stage: int, into: int, zero: dict[str, Any] | None) -> dict[str, Any]:
    folder, want = saved(mode, stage)
    cfg = config(into, mode, zero=zero)
    engine = engine_of(cfg)
    engine.load_checkpoint(folder)
    found = train(cfg, steps=2, first=2, engine=engine)
    return no_differences([n for n in want if not torch.equal(want[n], found["masters"][n])])


def another_mode(mode: str, into: str) -> dict[str, Any]:
    """The masters are those that were saved, as far as the new mode can hold them; the run goes on."""
    folder, _ = saved(mode, 2)
    before = train(config(2, mode), steps=2)["masters"]
    engine = engine_of(config(3, into))
    engine.load_checkpoint(folder)
    after = masters(engine)
    whole = dict(before) if into in ("fp32", "bf16 14", "bf16 16", "fp16 16") else None
    want = whole or {n: m.bfloat16().float() for n, m in before.items()}
    off = {n: float((after[n] - m).abs().max()) for n, m in want.items() if not torch.allclose(after[n], m, rtol=2**-7)}
    if whole:
        off |= {n: "bits" for n, m in want.items() if not torch.equal(after[n], m)}
    losses = train(config(3, into), steps=1, first=2, engine=engine)["losses"]
    return {"ok": not off and bool(losses.isfinite().all()), "differ": off}


def a_failed_load(mode: str) -> dict[str, Any]:
    """A checkpoint with a missing file leaves the engine as it was."""
    folder, _ = saved(mode, 2)
    engine = engine_of(config(2, mode))
    before = masters(engine)
    data = max((f for f in Path(folder).rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    kept = data.read_bytes()
    data.unlink()
    try:
        engine.load_checkpoint(folder)
        said = ""
    except Exception as error:
        said = f"{type(error).__name__}: {str(error)[:200]}"
    finally:
        data.write_bytes(kept)
    off = [n for n, m in masters(engine).items() if not torch.equal(m, before[n])]
    engine.destroy()
    return {"ok": bool(said) and not off, "said": said, "changed": off}


def optimizer(kind: str, params: dict[str, Any]) -> dict[str, Any]:
    runs = []
    for stage in (0, 1) if kind == "Muon" else (0, 1, 3):
        cfg = config(stage, "bf16 14")
        cfg["optimizer"] = {"type": kind, "params": params}
        runs.append(train(cfg))
    return no_differences([off for off in (unlike(run, runs[0]) for run in runs[1:]) if off])


def close_to_the_cpu(mode: str) -> dict[str, Any]:
    worst = apart(train(config(2, mode), device=torch.device("cpu")), reference(mode))
    return {"ok": worst < 2 * STEPS, "worst_in_lr": worst}


def modes(r: Results) -> None:
    for mode in TRIED:
        r.case(f"{mode}: beside plain PyTorch", beside_plain, mode)
        for stage in stages_of(mode):
            if stage != 2:
                name = f"{mode}: stage {stage} has the bits of stage 2"
                r.case(name, has_the_bits, mode, config(stage, mode))
        r.case(f"{mode}: again", has_the_bits, mode, config(2, mode))


def checkpoints(r: Results) -> None:
    for mode in SAVED:
        others = [(3, 1, None), (1, 3, None), (2, 2, None), (2, 3, ALL), (3, 2, HOST)]
        for stage, into, zero in others[:2] if DRY else others:
            name = f"{mode}: a checkpoint of stage {stage} into stage {into}{', host' if zero else ''}"
            r.case(name, resumed, mode, stage, into, zero)
        r.case(f"{mode}: a load that fails changes nothing", a_failed_load, mode)
    for mode, other in itertools.permutations(["fp32", "bf16 14"] if DRY else SAVED, 2):
        if "fp16" not in mode + other or {mode, other} == {"fp32", "fp16 16"}:
            r.case(f"a checkpoint of {mode} into {other}", another_mode, mode, other)


def main() -> None:
    exact()
    r = Results("parity")
    modes(r)
    for mode in TRIED:
        for name, (stage, zero) in places(str(scratch())).items():
            r.case(f"{mode}: {name}", has_the_bits, mode, config(stage, mode, zero=zero), need=2)
    for mode in MAIN:
        r.case(f"{mode}: accumulation, stages and host memory alike", accumulated, mode)
        r.case(f"{mode}: the update in the backward", updated_early, mode)
    checkpoints(r)
    for mode in ("fp32", "bf16 14", "bf16 8") if CUDA else ():
        r.case(f"{mode}: close to the CPU", close_to_the_cpu, mode, need=3)
    for kind, params in OPTIMIZERS.items():
        r.case(f"optimizer {kind}: stages alike", optimizer, kind, params)
    shutil.rmtree(scratch())
    r.end()


if __name__ == "__main__":
    main()
