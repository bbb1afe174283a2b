"""torch.profiler around steps of the Llama: kernels of Tessera, copies beside kernels, how busy the link is, waits,
gaps. The traces lie beside the results."""

from __future__ import annotations

import gc
import gzip
import os
import shutil
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import llama_models as models
import torch
from common import CUDA, DEVICE, OUT, SMALL, WORK, Results
from tracing import profiled, summary

TRACED = ("tessera:8+autocast", "tessera:14+host", "tessera:8+host+early")
LARGEST = 15 << 20


def packed(file: Path) -> str:
    """Compressed into the folder of results, where it is not too large to be carried."""
    there = OUT / (file.name + ".gz")
    with open(file, "rb") as source, gzip.open(there, "wb", 5) as target:
        shutil.copyfileobj(source, target)
    file.unlink()
    if there.stat().st_size > LARGEST:
        there.unlink()
        return "too large to be kept"
    return there.name


def traced(name: str) -> dict[str, Any]:
    one, size = models.parse(name), models.SIZES["tiny" if SMALL else "1.3B"]
    models.prepare(one)
    training = models.built(one, models.build_model(size, one.dtype), size.rows)
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(0, size.vocabulary, (size.rows, size.length), generator=g).to(DEVICE)
    for _ in range(2):
        training.step(ids)

    def steps() -> None:
        for _ in range(2):
            training.step(ids)

    file = WORK / f"trace-{name.replace(':', '-').replace('+', '-')}.json"
    found = summary(profiled(steps, file)) | {"file": packed(file)}
    training.engine.destroy()
    return found


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    r = Results("trace")
    for name in TRACED:
        r.case(name, traced, name, need=10)
        gc.collect()
        if CUDA:
            torch.cuda.empty_cache()
    r.end()


if __name__ == "__main__":
    main()
