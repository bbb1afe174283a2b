"""What a resumed run begins with: where its accumulation is, its moments, each rank's buffers."""

from __future__ import annotations

import copy
import itertools
import json
import random
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support import (
    OPTIMIZERS,
    Net,
    batch,
    config,
    engines,
    losses_of,
    make,
    run,
    run_program,
    same_bits,
    weights,
    with_blob,
)
from tessera.data import Loader
from tessera.errors import ConfigError, IoError
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tessera

RANK_BUFFERS = "tessera_rank_buffers.pt"  # beside DeepSpeed's files


def engine_of(**more: Any) -> Any:
    return tessera.initialize(model=make(Net), config=config(1, **more))[0]


@pytest.mark.parametrize("form", ["tessera", "deepspeed"])
@pytest.mark.parametrize("stage", range(4))
def test_a_constant_batch_on_fewer_ranks_begins_at_a_boundary(stage: int, form: str, tmp_path: Path) -> None:
    """gradient_accumulation_steps becomes another number by itself."""
    cfg = {**config(stage, checkpoint={"format": form}), "train_batch_size": 16}
    del cfg["gradient_accumulation_steps"]

    def save(engine: Any, rank: int) -> None:
        run(engine, rank, 6)
        engine.save_checkpoint(tmp_path)

    def load(engine: Any, rank: int) -> None:
        run(engine, rank, 1)
        engine.load_checkpoint(tmp_path)
        assert engine.gradient_accumulation_steps() == 4 and engine.micro_steps == 12
        for k in range(1, 13):
            assert engine.is_gradient_accumulation_boundary() == (k % 4 == 0)
            run(engine, rank, 1)
            assert engine.global_steps == 3 + k // 4

    engines(make(Net), 2, cfg, save)
    engines(make(Net, seed=5), 1, cfg, load)


def test_deepspeeds_files_say_that_they_hold_no_gradients(tmp_path: Path) -> None:
    engine = engine_of(accumulation=2, checkpoint={"format": "deepspeed"})
    run(engine, 0, 3)
    with pytest.warns(UserWarning, match="hold no gradients"):
        engine.save_checkpoint(tmp_path)
    other = engine_of(accumulation=2)
    run(other, 0, 1)
    other.load_checkpoint(tmp_path)
    assert not other.core.has_gradients() and not other.is_gradient_accumulation_boundary()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(5, 3), nn.BatchNorm1d(3)
        self.register_buffer("same", torch.arange(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.norm(self.linear(x.to(self.linear.weight.dtype))) - y).square().mean()


def buffers_of(engine: Any) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in engine.module.named_buffers()}


@pytest.mark.parametrize("form", ["tessera", "deepspeed"])
@pytest.mark.parametrize("stage", range(4))
def test_buffers_of_every_rank_come_back(
    stage: int, form: str, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    cfg = config(stage, checkpoint={"format": form})

    def save(engine: Any, rank: int) -> Any:
        losses_of(engine, rank, 0, 2)
        engine.save_checkpoint(tmp_path)
        return buffers_of(engine)

    def load(engine: Any, rank: int) -> Any:
        engine.load_checkpoint(tmp_path)
        return buffers_of(engine)

    saved = engines(make(Normed), 2, cfg, save)
    assert not torch.equal(saved[0]["norm.running_mean"], saved[1]["norm.running_mean"])
    assert bool(list(tmp_path.rglob(RANK_BUFFERS))) == (form == "deepspeed" and stage < 3)
    for rank, buffers in enumerate(engines(make(Normed, seed=5), 2, cfg, load)):
        assert same_bits(buffers, saved[rank])
    others = engines(make(Normed, seed=5), 3, cfg, load)
    said = [str(each.message) for each in recwarn]
    assert any("each its own values of 'norm.running_mean', 'norm.running_var'" in text for text in said)
    assert all(same_bits(buffers, saved[0]) for buffers in others)


@pytest.mark.parametrize("form", ["tessera", "deepspeed"])
def test_equal_buffers_are_written_once(form: str, tmp_path: Path) -> None:
    cfg = config(1, checkpoint={"format": form})
    engines(make(Normed), 2, cfg, lambda engine, rank: engine.save_checkpoint(tmp_path))
    assert not list(tmp_path.rglob(RANK_BUFFERS))
    kinds = {kind for _, kind, *_ in tessera.checkpoints.open_checkpoint(tmp_path).tensors()}
    assert "buffer" in kinds and "rank_buffer" not in kinds


@pytest.mark.parametrize("form", ["tessera", "deepspeed"])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("name", ["adamw", "momentum", "adagrad", "amsgrad", "rmsprop", "adamax"])
def test_a_checkpoint_before_the_first_step_leaves_no_old_moments(
    name: str, stage: int, form: str, tmp_path: Path
) -> None:
    cfg = config(stage, zero_allow_untested_optimizer=True, checkpoint={"format": form})

    def body(engine: Any, rank: int) -> None:
        engine.save_checkpoint(tmp_path)
        fresh = losses_of(engine, rank, 0, 4)
        engine.load_checkpoint(tmp_path)
        assert losses_of(engine, rank, 0, 4) == fresh

    engines(make(Net), 2, cfg, body, client=OPTIMIZERS[name])


@pytest.mark.parametrize("value", [float("nan"), -1.0])
def test_a_norm_that_is_none_is_refused(value: float) -> None:
    engine = engine_of()
    engine(*batch(0)).backward()
    with pytest.raises(ConfigError, match="max_norm must be a number >= 0"):
        engine.clip_grad_norm_(value)
    engine.step()


PROGRAM = """
import json, multiprocessing, random, sys
import numpy, torch
import tessera
from torch import nn
from tessera.data import Loader, RepeatingLoader

kind, workers, folder, begin, seed = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
SIZE = 36


class Rows(torch.utils.data.Dataset):  # each is drawn by all generators
    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return torch.cat([torch.full((2,), index / SIZE), torch.rand(1) + random.random() + numpy.random.rand()])


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return (Rows()[index] for index in range(12))  # of each worker


class Drawing(Rows):  # by a generator of its own
    def __init__(self):
        self.random = numpy.random.default_rng(seed)

    def __getitem__(self, index):
        return super().__getitem__(index) + self.random.random()


class Collate:
    def __init__(self):
        self.random = random.Random(seed)

    def __call__(self, rows):
        return torch.stack(rows) + self.random.random()


class Nested(torch.utils.data.Sampler):
    def __init__(self, inner=None):
        self.inner = inner
        self.rng = torch.Generator().manual_seed(seed) if inner else numpy.random.RandomState(seed)

    def __iter__(self):
        if self.inner is None:
            return iter(self.rng.permutation(SIZE).tolist())
        order = list(self.inner)
        return (order[at] for at in torch.randperm(SIZE, generator=self.rng).tolist())

    def __len__(self):
        return SIZE


class Shuffled(torch.utils.data.Sampler):  # by Python's generator and numpy's
    def __iter__(self):
        order = random.sample(range(SIZE), SIZE)
        return iter(numpy.random.permutation(order).tolist())

    def __len__(self):
        return SIZE


def start():
    sampler = {"drawn order": torch.utils.data.RandomSampler(Rows()), "own sampler": Shuffled()}.get(kind)
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 1))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 2},
    }
    engine = tessera.initialize(model=model, config=config)[0]
    data = Stream() if kind == "stream" else Rows()
    loader = engine.data_loader(data, data_sampler=sampler, num_workers=workers)
    if kind == "own generator":
        own = torch.Generator().manual_seed(seed)
        loader = Loader(torch.utils.data.DataLoader(data, 2, shuffle=True, num_workers=workers, generator=own))
    if kind == "persistent workers":
        made = torch.utils.data.DataLoader(data, 2, shuffle=True, num_workers=workers, persistent_workers=True)
        loader = Loader(made)
    if kind == "generators":
        of_data = {"dataset": data} if workers else {"dataset": Drawing(), "collate_fn": Collate()}
        how = {"batch_size": 2, "sampler": Nested(Nested()), "num_workers": workers}
        loader = Loader(torch.utils.data.DataLoader(**of_data, **how))
    engine.training_dataloader = loader
    return engine, RepeatingLoader(loader)


def train(engine, batches, until):
    losses = []
    while engine.global_steps < until:
        loss = engine(next(batches)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


multiprocessing.set_start_method("fork", force=True)  # of workers: they need not import all again
tessera.init_distributed("gloo")
torch.set_num_threads(1)
seed += torch.distributed.get_rank()
for put in (torch.manual_seed, random.seed, numpy.random.seed):
    put(seed)
engine, batches = start()
if begin == 0:
    first = train(engine, batches, 23)
    engine.save_checkpoint(folder, random_state=True)
    straight = train(engine, batches, 31)
    engine.load_checkpoint(folder)  # a live iterator
    live = train(engine, batches, 31)
    engine.destroy()
    engine, batches = start()
engine.load_checkpoint(folder)
fresh = train(engine, batches, 31)
print(json.dumps([straight, live, fresh] if begin == 0 else [fresh]))
engine.destroy()
"""


@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        *itertools.product(["rows", "drawn order", "own sampler", "own generator", "generators", "stream"], [0, 1, 3]),
        ("persistent workers", 3),
    ],
)
def test_a_run_goes_on_amid_an_epoch_bit_for_bit(kind: str, workers: int, tmp_path: Path) -> None:
    """Dropout, orders that are drawn, and rows that draw, in this process and in a new one."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, program, kind, str(workers), tmp_path / "saved"]
    ran = [json.loads(text.splitlines()[-1]) for text in run_program([*command, "0", "7"], 2)]
    again = [json.loads(text.splitlines()[-1]) for text in run_program([*command, "23", "90"], 2)]
    for (straight, live, fresh), (new,) in zip(ran, again, strict=True):
        assert len(set(straight)) == 8  # no two alike
        assert live == straight and fresh == straight and new == straight


ORDER = """
import json, sys
import torch, tessera
from tessera.data import Loader

folder, seed, how = sys.argv[1], int(sys.argv[2]), sys.argv[3]
tessera.init_distributed("gloo")
torch.manual_seed(seed + torch.distributed.get_rank())
config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 2}}
engine = tessera.initialize(model=torch.nn.Linear(1, 1), config=config)[0]
rows = [torch.tensor([float(number)]) for number in range(24)]
own = torch.Generator().manual_seed(torch.initial_seed()) if "generator" in how else None
workers = {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": "fork"} if "workers" in how else {}
loader = Loader(torch.utils.data.DataLoader(rows, 2, shuffle=True, generator=own, **workers))
engine.training_dataloader = loader
if seed:
    engine.load_checkpoint(folder)
seen = []
for batch in loader:
    seen.append(batch.flatten().tolist())
    engine.backward(engine(batch + torch.rand(1)).sum())
    engine.step()
    if seed == 0 and engine.global_steps == 5:
        engine.save_checkpoint(folder)
        seen.clear()
print(json.dumps(seen))
engine.destroy()
"""


@pytest.mark.parametrize("how", ["shuffle", "generator", "workers"])
def test_a_drawn_order_goes_on_without_the_random_state(how: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(ORDER)
    seen = []
    for seed in ("0", "10"):
        printed = run_program([sys.executable, program, tmp_path / "saved", seed, how], 2)
        seen.append([json.loads(text.splitlines()[-1]) for text in printed])
    assert seen[0] == seen[1] and seen[0][0] != seen[0][1] and len(seen[0][0]) == 7


def test_a_checkpoint_of_before_the_loaders_own_blob_is_read(tmp_path: Path) -> None:
    """Where the pass began stood beside the process's random state, of torch's generator alone at first."""

    def loader_of(engine: Any, seed: int) -> Loader:
        torch.manual_seed(seed)
        engine.training_dataloader = Loader(DataLoader(range(24), 2, shuffle=True))  # type: ignore[arg-type]
        return engine.training_dataloader  # type: ignore[no-any-return]

    engine = engine_of()
    loader = loader_of(engine, 1)
    passes = iter(loader)
    next(passes)
    rests = []
    for begin in (loader.begin, loader.begin["torch"]):  # type: ignore[index]
        engine.save_checkpoint(tmp_path, tag="t")
        with_blob(tmp_path / "t", "loader-0", {})
        with_blob(tmp_path / "t", "random-0", RANDOM | {"pass": begin})
        other = loader_of(engine, 2)
        engine.load_checkpoint(tmp_path, tag="t")
        rests.append([batch.tolist() for batch in other])
        engine.training_dataloader = loader
    assert rests == [[batch.tolist() for batch in passes]] * 2
    engine.destroy()


EPOCH = """
import json, sys
import torch, tessera

folder, last = sys.argv[1], int(sys.argv[2])
tessera.init_distributed("gloo")
torch.manual_seed(3)
config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 2}}
rows = [torch.tensor([float(number)]) for number in range(48)]
engine, _, batches, _ = tessera.initialize(model=torch.nn.Linear(1, 1), config=config, training_data=rows)
engine.load_checkpoint(folder, missing_ok=True)
seen = []
for batch in batches:
    seen += batch.flatten().int().tolist()
    engine.backward(engine(batch).sum())
    engine.step()
    if engine.global_steps == last:
        break
if last:
    engine.save_checkpoint(folder)
print(json.dumps(seen))
engine.destroy()
"""


@pytest.mark.parametrize("ranks", [1, 4])
def test_other_ranks_train_what_is_left_of_an_epoch_once_each(ranks: int, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(EPOCH)
    seen = []
    for world, last in ((2, 5), (ranks, 0)):
        printed = run_program([sys.executable, program, tmp_path / "saved", str(last)], world)
        seen += [number for text in printed for number in json.loads(text.splitlines()[-1])]
        assert len(seen) == (20 if last else 48)
    assert sorted(seen) == list(range(48)) and seen != sorted(seen)


CUT = "tessera.cut"  # beside the states of a parameter: of which elements they are
RANDOM = {"torch": torch.get_rng_state(), "python": random.getstate()}

BAD_BLOBS: list[tuple[str, Any]] = [
    *((name, value) for name in ("python", "client_state", "extra", "random-0") for value in ([1], None, 2**64)),
    ("param_groups", {}),
    ("param_groups", [3]),
    *(
        ("param_groups", [{key: value}])
        for key, value in [
            *(("lr", value) for value in ("x", [1], None, {}, float("nan"), 2**70)),
            *(("betas", value) for value in (0.9, (0.9,), (0.9, "x"), (5.0, 7.0), (-1.0, 0.9))),
            ("eps", -1.0),
            ("weight_decay", -0.1),
            ("maximize", "no"),
            ("initial_lr", "x"),
        ]
    ),
    ("optimizer-0", [1]),
    ("optimizer-0", {"embed.weight": 3}),
    *(("optimizer-0", {"embed.weight": {"step": value}}) for value in ("x", -3, torch.tensor(-3.0), 2**53)),
    ("optimizer-0", {"embed.weight": {CUT: [0, 1, [2]]}}),
    ("optimizer-0", {"embed.weight": {CUT: [0, 2**64, [2], 0, 1]}}),
    ("python", {"group_names": [3]}),
    *(
        ("python", {"loader": {"epoch": 0, "samples": 0, key: 2**64}})
        for key in ("epoch", "samples", "size", "workers")
    ),
    ("python", {"loader": [0]}),
    ("random-0", {"torch": torch.zeros(3, dtype=torch.uint8)}),
    ("random-0", RANDOM | {"device": [1]}),
    *(("loader-0", value) for value in ([1], {"begin": [1]}, {"begin": {"torch": torch.zeros(3, dtype=torch.uint8)}})),
    ("extra", {"counted": "x"}),
    *(("schedule", value) for value in ([1], None, {}, "x")),
    *(("schedule", {"last_batch_iteration": value}) for value in ("x", None, [1], 2**70, 0.5)),
]


class Counted(nn.Module):
    """Has an extra state, a number."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def get_extra_state(self) -> int:
        return self.count

    def set_extra_state(self, state: int) -> None:
        self.count = state + 0


class Counting(Net):
    def __init__(self) -> None:
        super().__init__()
        self.counted = Counted()


WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 8}}


def of_the_run(engine: Any) -> Any:
    """What a load changes, beside tensors."""
    groups = [{**group, "params": None} for group in engine.basic_optimizer.param_groups]
    loader = engine.training_dataloader.state_dict()
    return copy.deepcopy(
        (engine.global_steps, groups, engine.lr_scheduler.state_dict(), engine.module.counted.count, loader)
    )


SCHEDULES: dict[str, Any] = {  # of torch, by what the client makes
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    "cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, 20),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
}


def check_refused(folder: Path, cfg: dict[str, Any], name: str, value: Any, match: str, **how: Any) -> None:
    """load_checkpoint() says IoError on all ranks, and the engine is as it was. `how`: of engines()."""

    meet = threading.Barrier(2)

    def body(engine: Any, rank: int) -> None:
        run(engine, rank, 1)
        engine.save_checkpoint(folder, tag="t", random_state=True)
        engine.load_checkpoint(folder)
        meet.wait(60)
        rank or with_blob(folder / "t", name, value)
        meet.wait(60)
        run(engine, rank, 2)
        before, of_run = weights(engine.module), of_the_run(engine)
        with pytest.raises(IoError, match=match):
            engine.load_checkpoint(folder)
        assert same_bits(weights(engine.module), before) and of_the_run(engine) == of_run
        run(engine, rank, 1)

    engines(make(Counting), 2, cfg, body, training_data=TensorDataset(torch.randn(8, 5)), **how)


@pytest.mark.parametrize(("name", "value"), BAD_BLOBS)
def test_a_blob_of_another_kind_is_named(name: str, value: Any, tmp_path: Path) -> None:
    cfg = config(1, zero_allow_untested_optimizer=True, scheduler=WARMUP)
    match = {"python": "python|loader", "optimizer-0": "optimizer-0|optimizer's state"}.get(name, name)
    check_refused(tmp_path, cfg, name, value, match, client=lambda p: torch.optim.Adamax(p, lr=0.01))


@pytest.mark.parametrize(
    ("more", "match"),
    [({}, "it has no 'mu_product'"), ({"mu_product": torch.ones(2)}, "'mu_product' is damaged")],
)
def test_a_state_of_another_form(more: dict[str, Any], match: str, tmp_path: Path) -> None:
    cfg = config(1, zero_allow_untested_optimizer=True, scheduler=WARMUP)
    values = {name: {"step": torch.tensor(3.0), **more} for name, _ in make(Counting).named_parameters()}
    check_refused(tmp_path, cfg, "optimizer-0", values, match, client=lambda p: torch.optim.NAdam(p))


def test_states_of_before_the_first_step_are_none(tmp_path: Path) -> None:
    """Saved by an optimizer of the core's, which has zeros then."""
    adamw = {"type": "AdamW", "params": {"lr": 0.1}}
    engines(make(Net), 1, config(1, optimizer=adamw), lambda engine, rank: engine.save_checkpoint(tmp_path))

    def body(engine: Any, rank: int) -> None:
        run(engine, rank, 1)
        engine.load_checkpoint(tmp_path)
        assert not any(engine.basic_optimizer.state.values())
        run(engine, rank, 1)

    cfg = config(1, zero_allow_untested_optimizer=True)
    engines(make(Net), 1, cfg, body, client=lambda p: torch.optim.NAdam(p))


def test_a_step_of_another_form_is_taken(tmp_path: Path) -> None:
    def body(engine: Any, rank: int) -> None:
        run(engine, rank, 1)
        engine.save_checkpoint(tmp_path, tag="t")
        with_blob(tmp_path / "t", "optimizer-0", {name: {"step": 5} for name, _ in engine.module.named_parameters()})
        engine.load_checkpoint(tmp_path)
        run(engine, rank, 1)
        assert {float(state["step"]) for state in engine.basic_optimizer.state.values()} == {6.0}

    cfg = config(1, zero_allow_untested_optimizer=True)
    engines(make(Net), 1, cfg, body, client=lambda p: torch.optim.Adamax(p))


@pytest.mark.parametrize("value", [{}, [], {"last_epoch": "x"}, {"last_epoch": 2, "base_lrs": ["x"]}, 3])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_of_torch_that_cannot_be_is_named(kind: str, value: Any, tmp_path: Path) -> None:
    check_refused(tmp_path, config(2), "schedule", value, "schedule", lr_scheduler=SCHEDULES[kind])


def test_a_damaged_step_is_named_by_a_conversion(tmp_path: Path) -> None:
    model = make(Net)
    cfg = config(1, zero_allow_untested_optimizer=True)
    engine = tessera.Engine(model, cfg, optimizer=torch.optim.Adamax(model.parameters()))
    run(engine, 0, 1)
    engine.save_checkpoint(tmp_path, tag="t")
    with_blob(tmp_path / "t", "optimizer-0", {"embed.weight": {"step": "x"}})
    with pytest.raises(IoError, match=r"embed\.weight', 'step' is damaged"):
        tessera.checkpoints.to_deepspeed(tmp_path, tmp_path / "out", stage=1, world_size=1)
    engine.destroy()


def test_a_client_state_is_a_dict(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="client_state is a dict, not a list"):
        engine_of().save_checkpoint(tmp_path, client_state=[1])
