"""What each actor does: its engine, its end of the link, and one step of micro-batches."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from model import Tower, configuration, language_of, whole_loss, whole_model
from pictures import Batch, batch
from tessera.hybrid import Layout, Link, Place
from tessera.sequence import make_groups

import tessera


@dataclass(frozen=True)
class Job:
    """What the whole program agrees on; plain data for the actors."""

    vision_ranks: int = 2
    text_ranks: int = 2
    micro_batches: int = 4
    pictures: int = 2  # of a micro-batch
    size: int = 112  # pixels of a picture's side
    ahead: int = 2  # micro-batches that the vision tower may be ahead of its gradients
    precision: str = "low"  # "low": bf16 states of the tower, bf16 text; "fp32"
    sizes: tuple[tuple[str, int], ...] = ()  # of configuration()
    timeout: float = 300.0

    def link(self) -> Link:
        return Link(
            "pictures",
            source=Layout(sequence=self.vision_ranks),
            target=Layout(replicas=self.text_ranks),
            batch_dim=0,
            sequence_dim=0,
            sides=("vision", "text"),
            timeout=self.timeout,
        )

    def model(self) -> Any:
        return whole_model(configuration(**dict(self.sizes)))

    def batch(self, step: int, micro: int) -> Batch:
        return batch(1000 * step + micro, self.pictures, self.size)

    def config(self) -> dict[str, Any]:
        """Of both engines."""
        return {
            "train_micro_batch_size_per_gpu": self.pictures,
            "gradient_accumulation_steps": self.micro_batches,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": OPTIMIZER},
            "zero_optimization": {"stage": 1},
        }


OPTIMIZER = {"lr": 3e-3, "weight_decay": 0.01}
LOW_STATES = {
    "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
    "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
}


def turns(micro_batches: int, ahead: int) -> list[tuple[str, int]]:
    """The order of the tower's work: forwards until it is `ahead` of its gradients, then a backward and a forward in
    turn. While it computes one micro-batch the language model is at another."""
    order = [("forward", number) for number in range(min(ahead, micro_batches))]
    for number in range(micro_batches):
        order.append(("backward", number))
        if number + ahead < micro_batches:
            order.append(("forward", number + ahead))
    return order


class VisionRank:
    """The vision tower over ranks that share its tokens, states sharded over them (ZeRO-1)."""

    def __init__(self, place: Place, job: Job) -> None:
        self.job = job
        groups = make_groups(job.vision_ranks)
        tower = Tower(job.model(), groups.sequence, place.rank, place.ranks)
        config = job.config() | (LOW_STATES if job.precision == "low" else {})
        self.engine, *_ = tessera.initialize(model=tower, config=config, group=groups)
        self.link = job.link().sender(place.store(), place.rank, self.engine)

    def train(self, step: int) -> dict[str, float]:
        job, busy = self.job, 0.0
        for what, micro in turns(job.micro_batches, job.ahead):
            if what == "forward":
                begin = time.perf_counter()
                data = job.batch(step, micro)
                tokens = self.engine(data.patches, data.grid)
                busy += time.perf_counter() - begin
                self.link.send(tokens, (step, micro))
            else:
                self.link.backward((step, micro))
                if micro < job.micro_batches - 1:
                    self.engine.step()  # the last one is the program's
        self.link.step()
        return {"forward": busy}


class TextRank:
    """The language model, cut over ranks (AutoTP)."""

    def __init__(self, place: Place, job: Job) -> None:
        self.job = job
        config = job.config() | {"tensor_parallel": {"autotp_size": job.text_ranks}}
        if job.precision == "low":
            config["bf16"] = {"enabled": True}
        self.engine, *_ = tessera.initialize(model=language_of(job.model()), config=config)
        self.link = job.link().receiver(place.store(), place.rank, self.engine)

    def train(self, step: int) -> dict[str, float]:
        job, total = self.job, 0.0
        for micro in range(job.micro_batches):
            data = job.batch(step, micro)
            images = self.link.receive((step, micro))
            loss = self.engine(images, data.ids, data.grid, data.labels)
            loss.backward()
            self.link.give_back((step, micro))
            total += float(loss.detach()) / job.micro_batches
            if micro < job.micro_batches - 1:
                self.engine.step()
        self.link.step()
        return {"loss": total}


def losses_of_one_process(job: Job, steps: int) -> list[float]:
    """The same training with the model in one piece, in plain PyTorch and fp32."""
    model = job.model()
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)
    losses = []
    for step in range(steps):
        total = 0.0
        for micro in range(job.micro_batches):
            loss = whole_loss(model, job.batch(step, micro)) / job.micro_batches
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses
