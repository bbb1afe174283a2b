"""What one run of the tables does, as data that travels to the ranks."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from gpt import Gpt, GptOptions
from text import Text, load_text

SIZES = {
    "tiny": GptOptions(layers=1, width=32, heads=2, context=16),  # to try the program
    "1M": GptOptions(layers=2, width=192, heads=3, context=64),
    "3M": GptOptions(layers=4, width=256, heads=4, context=128),
    "10M": GptOptions(context=128),
    "30M": GptOptions(layers=6, width=640, heads=10, context=128),
    # The models of DeepSpeed's own tables: as many parameters, sequences of 512.
    "254M": GptOptions(layers=12, width=1024, heads=16, context=512, vocabulary=50257),
    "7B": GptOptions(layers=32, width=4096, heads=32, context=512, vocabulary=50257),
}
REFERENCE, LIBRARY = "the language reference of this Python", "the sources of this Python's library"


@dataclass(frozen=True)
class Experiment:
    """One training: text, steps and rates. The learning rate warms up linearly, then follows a cosine to a tenth."""

    name: str
    text: str
    steps: int
    lr: float
    betas: tuple[float, float]
    warmup: int
    from_start: bool  # begins with the start weights of its seed, not with random ones

    def rate(self, step: int) -> float:
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr * (0.55 + 0.45 * math.cos(math.pi * done))


@dataclass(frozen=True)
class Settings:
    experiments: tuple[Experiment, ...]
    start: Experiment  # makes the start weights, in fp32 by plain PyTorch
    keys: tuple[str, ...]
    seeds: tuple[int, ...]
    size: str
    state_sizes: tuple[str, ...]  # of the models whose memory and times are measured
    rows: int  # sequences of a rank and step
    eval_batches: int
    stage: int
    ranks: int
    rounds: int
    device: str

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def load(text: str) -> Settings:
        values: dict[str, Any] = json.loads(text)

        def experiment(data: dict[str, Any]) -> Experiment:
            return Experiment(**data | {"betas": tuple(data["betas"])})

        values["experiments"] = tuple(map(experiment, values["experiments"]))
        values["start"] = experiment(values["start"])
        lists = {name: tuple(values[name]) for name in ("keys", "seeds", "state_sizes")}
        return Settings(**values | lists)


def model_of(size: str, seed: int, device: str) -> Gpt:
    """Built where it is used: on the host a large one would take minutes, and four bytes a parameter."""
    torch.manual_seed(seed)
    with torch.device(device):
        return Gpt(SIZES[size])


def parameters_of(size: str) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in Gpt(SIZES[size]).parameters())


def read_text(source: str, context: int) -> Text:
    """`source`: REFERENCE, LIBRARY, a file, or a folder with train.txt and valid.txt."""
    if source == REFERENCE:
        return Text(load_text(), context)
    if source == LIBRARY:
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        return Text(b"\n\n".join(file.read_bytes() for file in files), context)
    path = Path(source)
    if not path.is_dir():
        return Text(path.read_bytes(), context)
    train, held_out = ((path / name).read_bytes() for name in ("train.txt", "valid.txt"))
    text = Text(train, context)
    text.train, text.held_out = (torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in (train, held_out))
    return text
