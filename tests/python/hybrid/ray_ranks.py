"""Objects of the tests' actors, in a module that they can import."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist
from link_ranks import split
from support import config, make
from tessera.hybrid import Link, Place
from test_linked_engines import MICRO, Text, Vision, data

import tessera


class Plain:
    """Answers what it was asked."""

    def __init__(self, place: Place, offset: int = 0) -> None:
        self.place = place
        self.offset = offset

    def add(self, number: int) -> int:
        return self.offset + self.place.rank + number

    def where(self) -> Any:
        return self.place.rendezvous

    def total(self) -> float:
        value = torch.tensor(float(self.place.rank + 1))
        dist.all_reduce(value)
        return float(value)

    def fail(self, rank: int) -> None:
        if rank == self.place.rank:
            raise ValueError(f"broken on {rank}")

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class VisionRank:
    def __init__(self, place: Place, link: Link, **more: Any) -> None:
        sizes = {"sequence_parallel_size": link.source.sequence}
        model = make(Vision, seed=1)
        self.engine, *_ = tessera.initialize(model=model, config=config(1, MICRO, **sizes, **more))
        self.link = link.sender(place.store(), place.rank, self.engine)

    def train(self, step: int, slow: float = 0.0) -> None:
        for micro in range(MICRO):
            x = split(data(step, micro)[0], self.link.link.source, self.link.rank, 0, 1)
            self.link.send(self.engine(x), (step, micro))
        for micro in range(MICRO):
            self.link.backward((step, micro))
            if micro < MICRO - 1:
                self.engine.step()
        self.link.step()

    def die_in_save(self, rank: int) -> None:
        if rank == self.link.rank:
            self.engine.save_checkpoint = lambda *_: os._exit(1)

    def weights(self) -> list[torch.Tensor]:
        return [value.clone() for value in self.engine.module_state_dict().values()]


class TextRank:
    def __init__(self, place: Place, link: Link, **more: Any) -> None:
        model = make(Text, seed=2)
        self.engine, *_ = tessera.initialize(model=model, config=config(1, MICRO, **more))
        self.link = link.receiver(place.store(), place.rank, self.engine)

    def train(self, step: int, slow: float = 0.0) -> float:
        total = 0.0
        for micro in range(MICRO):
            x = self.link.receive((step, micro))
            time.sleep(slow)
            loss = self.engine(x, split(data(step, micro)[1], self.link.link.target, self.link.rank, 0, 1))
            self.engine.backward(loss)
            total += float(loss.detach()) / MICRO
            self.link.give_back((step, micro))
            if micro < MICRO - 1:
                self.engine.step()
        self.link.step()
        return total

    def weights(self) -> list[torch.Tensor]:
        return [value.clone() for value in self.engine.module_state_dict().values()]
