"""A Llama trained by every contender, each in a process of its own: usage llama.py SIZE.

Memory: what torch's allocator has given out (allocated) after the construction, after a step and at most, and what it
holds (reserved). Time: medians of steps by events, the first ones not counted."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import llama_models as models
import torch
from common import (
    CUDA,
    DEVICE,
    DRY,
    SMALL,
    WORK,
    Results,
    allocated,
    gb,
    median,
    peak,
    plain,
    reset_peak,
    seconds_left,
    sync,
)

ORDER = [
    "tessera:8",
    "torch:bf16",
    "tessera:14",
    "tessera:14+host+params",
    "fsdp2:16",
    "torch:bf16+fp32",
    "tessera:8+early",
    "tessera:8+host+early",
    "tessera:8+host",
    "tessera:14+host",
    "tessera:14+host+on",
    "tessera:14+host+share",
    "tessera:14+host+early+share",
    "tessera:14+host+early+on",
    "tessera:8+host+previous",
    "tessera:14+host+previous",
    "torch:fp32+autocast",
    "tessera:fp32+autocast",
    "deepspeed:16",
    "tessera:10",
    "tessera:10+host",
    "tessera:16",
    "tessera:8+graphs",
    "torch:bf16+graphs",
    "fsdp2:8",
    "tessera:8+autocast",
    "deepspeed:8+autocast",
    "deepspeed:16+host",
    "deepspeed:16+host+params",
    "tessera:16+autocast",
    "tessera:10+autocast",
    "deepspeed:8",
    "deepspeed:16+autocast",
]
LARGE = ["tessera:8", "torch:bf16", "tessera:8+autocast", "deepspeed:8+autocast", "tessera:8+early"]
QUICK = [
    "torch:fp32+autocast",
    "tessera:16+autocast",
    "tessera:8",
    "fsdp2:16",
    "deepspeed:16",
    "tessera:14+host",
    "tessera:8+graphs",
]


def timed_steps(one: models.Built, data: list[torch.Tensor], losses: list[torch.Tensor]) -> dict[str, Any]:
    """After some that are not counted."""
    warm, steps = (1, 2) if SMALL else (3, 10)
    began = time.perf_counter()
    for k in range(warm):
        losses.append(one.step(data[k]).detach())
    sync()
    warm_s = time.perf_counter() - began
    reset_peak()
    marks: list[Any] = []
    walls = [time.perf_counter()]
    for k in range(steps):
        if seconds_left() < 2 and len(walls) > 1:
            break
        if CUDA:
            marks.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
            marks[-1][0].record()
        losses.append(one.step(data[(warm + k) % len(data)]).detach())
        if CUDA:
            marks[-1][1].record()
        walls.append(time.perf_counter())
    sync()
    wall = (time.perf_counter() - walls[0]) / (len(walls) - 1) * 1e3
    host = [(b - a) * 1e3 for a, b in itertools.pairwise(walls)]
    ms = [begin.elapsed_time(end) for begin, end in marks] or host
    return {"warm_s": warm_s, "wall_ms": wall, "step_ms": median(ms), "step_ms_range": [min(ms), max(ms)]}


def step_alone(one: models.Built, ids: torch.Tensor) -> float:
    """Milliseconds of the update: gradients are there, nothing else runs."""
    found = []
    for _ in range(1 if SMALL else 4):
        one.backward(one.loss(ids))
        sync()
        began = time.perf_counter()
        one.update()
        sync()
        found.append((time.perf_counter() - began) * 1e3)
    return median(found)


def of_engine(engine: Any) -> dict[str, Any]:
    memory = engine.core.memory()
    parts = ("params", "grads", "master", "states", "buckets", "peak_buckets", "host")
    phases = {k: v[0] / max(v[1], 1) * 1e3 for k, v in engine.core.phases().items()}
    plan = engine.core.offload_plan().text()
    return {"memory": {k: getattr(memory, k) for k in parts}, "phases_ms": phases, "plan": plan}


def contender(name: str, size: models.Sizes) -> dict[str, Any]:
    one = models.parse(name)
    models.prepare(one)
    sync()
    began = time.perf_counter()
    model = models.build_model(size, one.dtype)
    n = sum(p.numel() for p in model.parameters())
    found: dict[str, Any] = {"parameters": n, "model_s": time.perf_counter() - began, "model_gb": gb(allocated())}
    reset_peak()
    began = time.perf_counter()
    training = models.built(one, model, size.rows)
    sync()
    found |= {"construction_s": time.perf_counter() - began, "construction_peak_gb": gb(peak())}
    gc.collect()
    found["allocated_after_construction_gb"] = gb(allocated())
    text = torch.randint(0, size.vocabulary, (64, size.length), generator=torch.Generator().manual_seed(1))
    rows = [torch.arange(k * size.rows, (k + 1) * size.rows) % 64 for k in range(16)]
    data, losses = [text[some].to(DEVICE) for some in rows], []  # type: tuple[list[torch.Tensor], list[torch.Tensor]]
    found |= timed_steps(training, data, losses)
    gc.collect()
    tokens = size.rows * size.length
    found |= {
        "allocated_gb": gb(allocated()),
        "peak_gb": gb(peak()),
        "reserved_gb": gb(torch.cuda.max_memory_reserved()) if CUDA else 0,
        "bytes_a_parameter": allocated() / n,
        "peak_bytes_a_parameter": peak() / n,
        "tokens_s": tokens / found["step_ms"] * 1e3,
        "tflops": 6 * n * tokens / found["step_ms"] / 1e9,
        "losses": [round(float(x), 4) for x in losses],
    }
    if one.kind == "tessera":
        found |= of_engine(training.engine)
    if not one.early and seconds_left() > 5:
        found["step_alone_ms"] = step_alone(training, data[0])
    return found


def forked(name: str, size: models.Sizes, box: float) -> dict[str, Any]:
    """contender() in a child, which has what was imported and is stopped after `box` seconds."""
    said = WORK / "contender.txt"
    said.unlink(missing_ok=True)
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        run_child(name, size, said)
    end = time.monotonic() + box
    while (done := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise TimeoutError(f"more than {box:.0f} s")
        time.sleep(0.05)
    if done[1] != 0:
        raise RuntimeError(said.read_text()[-1500:] if said.exists() else f"status {done[1]}")
    found: dict[str, Any] = json.loads(said.read_text())
    return found


def run_child(name: str, size: models.Sizes, said: Path) -> None:
    try:
        said.write_text(json.dumps(plain(contender(name, size))))
        os._exit(0)
    except BaseException:
        said.write_text(traceback.format_exc())
        os._exit(1)


def row(name: str, c: dict[str, Any]) -> str:
    return (
        f"{name:24} step {c['step_ms']:9.1f} ms  step() {c.get('step_alone_ms', float('nan')):7.1f} ms  allocated "
        f"{c['allocated_gb']:6.2f} GB ({c['bytes_a_parameter']:.2f} B)  peak {c['peak_gb']:6.2f} GB "
        f"({c['peak_bytes_a_parameter']:.2f} B)  loss {c['losses'][0]} -> {c['losses'][-1]}"
    )


def main(size: str) -> None:
    r = Results("llama" if size == "1.3B" else f"llama_{size}", starts_cuda=False)
    # Once, for all children. DeepSpeed is imported after the fork: it may start CUDA.
    for library in ("tessera", "torch._dynamo", "torch.distributed.fsdp"):
        importlib.import_module(library)
    if importlib.util.find_spec("transformers"):
        from transformers import LlamaForCausalLM  # noqa: F401
    names = QUICK if DRY else ORDER if size == "1.3B" else LARGE
    for name in names:
        if models.installed(name):
            box = 240.0 if SMALL else 60.0
            sizes = models.SIZES["tiny" if SMALL else size]
            r.case(name, forked, name, sizes, min(box, seconds_left() - 1), need=8)
        else:
            r.left_out(name, "not installed")
    table = [row(name, c) for name, c in r.data["cases"].items() if c["ok"]]
    r.note(table=table, size="tiny" if SMALL else size)
    print("\n".join(table))
    r.end()


if __name__ == "__main__":
    main(sys.argv[1])
