"""Every way to train, in every mode, stage and place of the states, on the stand-in accelerator of tests/stand_in or a
real one: usage device_grid.py PATH-OF-LIBRARY|cuda [--sample] [--part 0/7] [--only TEXT]. A row has the bits of a plain
run of its mode on the default stream, and the stand-in's race detector finds nothing. With WORLD_SIZE it is one of the
ranks of each row, which have a device and batches of their own."""

from __future__ import annotations

import argparse
import copy
import os
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "stand_in"))

import stand_in
import torch
import torch.distributed as dist
from device_net import Net
from tessera.utils import safe_get_full_fp32_param, safe_get_full_grad
from torch.utils.checkpoint import checkpoint

import tessera
from tessera.zero import GatheredParameters

DEVICE = "cuda" if sys.argv[1:2] == ["cuda"] else "privateuseone"
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
STEPS = 3
FOLDER = tempfile.TemporaryDirectory()
LOW = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
BF16, FP16 = {"enabled": True}, {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
CAST = {"enabled": True, "dtype": "bfloat16"}

MODES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "14 bytes": {"bf16": BF16},
    "16 bytes": {"bf16": BF16, "tessera": {"state_bytes": 16}},
    "12 bytes": {"bf16": BF16, "tessera": {"state_bytes": 12}},
    "10 bytes": {"bf16": LOW},
    "8 bytes": {"bf16": LOW, "tessera": {"state_bytes": 8}},
    "8 bytes, nearest": {"bf16": LOW, "tessera": {"state_bytes": 8, "rounding": "nearest"}},
    "fp16": {"fp16": FP16},
    "fp16, overflow": {"fp16": FP16 | {"initial_scale_power": 40}},
    "autocast": {"torch_autocast": CAST},
    "autocast, fp16": {"torch_autocast": CAST | {"dtype": "float16"}},
    "10 bytes, autocast": {"bf16": LOW, "torch_autocast": CAST},
    "8 bytes, autocast": {"bf16": LOW, "tessera": {"state_bytes": 8}, "torch_autocast": CAST},
    "SGD": {"bf16": BF16, "optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}},
    "Lion": {"bf16": BF16, "optimizer": {"type": "Lion", "params": {"lr": 0.001}}},
    "Adagrad": {"bf16": BF16, "optimizer": {"type": "Adagrad", "params": {"lr": 0.01}}},
    "Lamb": {"bf16": BF16, "optimizer": {"type": "Lamb", "params": {"lr": 0.01}}},
    "Muon": {"bf16": BF16, "optimizer": {"type": "Muon", "params": {"lr": 0.01}}},
}


def away(states: str | None, weights: str | None, pin: bool = True, ratio: float | str = 1.0) -> dict[str, Any]:
    more = {"nvme_path": FOLDER.name, "pin_memory": pin}
    found = {}
    if states:
        found["offload_optimizer"] = more | {"device": states, "ratio": ratio}
    if weights:
        found["offload_param"] = more | {"device": weights, "max_in_cpu": 0}
    return found


# Where states and weights are -> the stages that can have them there, more of zero_optimization. "shared": the device
# updates some of what the host would.
PLACES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "device": ((0, 1, 2, 3), {}),
    "states in host memory": ((1, 2, 3), away("cpu", None)),
    "half of the states in host memory": ((1, 2, 3), away("cpu", None, ratio=0.5)),
    "states that fit on the device": ((2,), away("cpu", None, ratio="auto")),
    "shared states in host memory": ((1, 2, 3), away("cpu", None)),
    "shared states in pageable memory": ((2,), away("cpu", None, pin=False)),
    "shared states on a disk": ((1, 3), away("nvme", None)),
    "all in host memory, shared": ((3,), away("cpu", "cpu")),
    "states in pageable memory": ((1, 2), away("cpu", None, pin=False)),
    "states on a disk": ((1, 2, 3), away("nvme", None)),
    "weights in host memory": ((3,), away(None, "cpu")),
    "weights in pageable memory": ((3,), away(None, "cpu", pin=False)),
    "weights on a disk": ((3,), away(None, "nvme")),
    "all in host memory": ((3,), away("cpu", "cpu")),
    "weights on a disk, states in host memory": ((3,), away("cpu", "nvme")),
    "all on a disk": ((3,), away("nvme", "nvme")),
}


SHARED = {place for place in PLACES if "shared" in place}
# What an update that runs on does differs by the place of states and weights; of modes, by who updates and by whether a
# step may be skipped.
RUN_ON = ("fp32", "14 bytes", "10 bytes", "8 bytes", "fp16, overflow", "autocast")


@dataclass(frozen=True)
class Row:
    mode: str
    stage: int
    place: str
    way: str

    def __str__(self) -> str:
        return f"{self.mode} / stage {self.stage} / {self.place} / {self.way}"


def net() -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net().to(DEVICE)


@cache
def batch(k: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + k + 1000 * RANK)
    ids = torch.stack([torch.randperm(19, generator=generator)[:3] for _ in range(4)]).flatten()
    return ids.to(DEVICE), torch.randn(ids.numel(), 7, generator=generator).to(DEVICE)


def config(
    mode: str, stage: int, place: str, accumulation: int = 1, early: bool = False, previous: bool = False
) -> dict[str, Any]:
    """`early`: what the update in the backward asks of a configuration, without it, but for `previous`: the norm of the
    step before clips there."""
    own = copy.deepcopy(MODES[mode])
    own.setdefault("tessera", {})["min_unit_elements"] = 1
    if place in SHARED:
        own["tessera"]["device_share"] = 0.5
    cfg = {
        "train_micro_batch_size_per_gpu": 12,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0} | PLACES[place][1],
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
        **own,
    }
    if previous:
        own["tessera"] |= {"update_in_backward": True, "clip": "previous"}
        cfg["gradient_clipping"] = 0.1
    elif early:
        cfg["gradient_clipping"] = 0
    if early and "bf16" in cfg:
        cfg["bf16"] |= {"check_grad_overflow": False}
    return cfg


def engine_of(cfg: dict[str, Any], model: Net | None = None) -> tessera.Engine:
    return tessera.initialize(model=model or net(), config=cfg)[0]


def micro(engine: tessera.Engine, k: int) -> torch.Tensor:
    loss = engine(*batch(k))
    engine.backward(loss)
    engine.step()
    return loss.detach()


def train(engine: tessera.Engine, first: int = 0, steps: int = STEPS) -> list[torch.Tensor]:
    count = engine.gradient_accumulation_steps()
    return [micro(engine, k) for k in range(first * count, (first + steps) * count)]


Found = dict[str, torch.Tensor]


def found_in(engine: tessera.Engine, losses: list[torch.Tensor]) -> Found:
    """What is compared; the engine is gone."""
    masters = {name: safe_get_full_fp32_param(p).cpu() for name, p in engine.module.named_parameters()}
    engine.destroy()
    return masters | {"losses": torch.stack(losses).cpu()}


@contextmanager
def on(stream: torch.Stream, after: torch.Stream) -> Iterator[None]:
    """`stream` comes after all of `after`, and `after` goes on after it."""
    stream.wait_stream(after)
    try:
        with stream:
            yield
    finally:
        after.wait_stream(stream)


# ---- ways to train: each finds what plain() does.
def plain(cfg: dict[str, Any]) -> Found:
    engine = engine_of(cfg)
    return found_in(engine, train(engine))


@contextmanager
def users_stream() -> Iterator[None]:
    with on(torch.Stream(DEVICE), torch.accelerator.current_stream()):
        yield


def on_a_stream(cfg: dict[str, Any]) -> Found:
    engine = engine_of(cfg)
    with users_stream():
        losses = train(engine)
    return found_in(engine, losses)


def all_on_a_stream(cfg: dict[str, Any]) -> Found:
    with users_stream():
        return plain(cfg)


def a_stream_for_each_part(cfg: dict[str, Any]) -> Found:
    engine, losses = engine_of(cfg), []
    main, streams = torch.accelerator.current_stream(), [torch.Stream(DEVICE) for _ in range(3)]
    for k in range(STEPS * engine.gradient_accumulation_steps()):
        with on(streams[0], main):
            loss = engine(*batch(k))
        with on(streams[1], main):
            engine.backward(loss)
        with on(streams[2], main):
            engine.step()
        losses.append(loss.detach())
    return found_in(engine, losses)


def recomputed(cfg: dict[str, Any], reentrant: bool = False) -> Found:
    model = net()
    for block in model.blocks:
        forward = block.forward
        block.forward = lambda x, f=forward: checkpoint(f, x, use_reentrant=reentrant)
    engine = engine_of(cfg, model)
    with users_stream():
        losses = train(engine)
    return found_in(engine, losses)


def recomputed_reentrant(cfg: dict[str, Any]) -> Found:
    return recomputed(cfg, reentrant=True)


def looked_at(cfg: dict[str, Any]) -> Found:
    """Between all calls."""
    engine, losses = engine_of(cfg), []
    params = list(engine.module.parameters())
    with users_stream():
        for k in range(STEPS * engine.gradient_accumulation_steps()):
            with torch.no_grad():
                before = engine(*batch(50))
            with GatheredParameters(params):
                copies = [p.detach().clone() for p in params]
            loss = engine(*batch(k))
            engine.backward(loss)
            grads = [safe_get_full_grad(p) for p in params]
            engine.step()
            state = engine.module_state_dict()
            losses.append(loss.detach())
            del before, copies, grads, state
    return found_in(engine, losses)


@contextmanager
def common_folder() -> Iterator[str]:
    """One of all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        of_first = [folder]
        if WORLD > 1:
            dist.broadcast_object_list(of_first, device=torch.device("cpu"))
        yield of_first[0]
        if WORLD > 1:
            dist.all_reduce(torch.zeros(1))  # until all have read it


def resumed(cfg: dict[str, Any], into: dict[str, Any], after: int = 1) -> Found:
    """The steps after a checkpoint, which is written while the first engine goes on, are those of another one."""
    engine = engine_of(cfg)
    losses = train(engine, steps=after)
    with common_folder() as folder:
        engine.save_checkpoint(folder, asynchronous=True)
        train(engine, first=after, steps=1)
        engine.wait_for_checkpoint()
        engine.destroy()
        engine = engine_of(into)
        engine.load_checkpoint(folder)
    losses += train(engine, first=after, steps=STEPS - after)
    return found_in(engine, losses)


def resumed_alike(cfg: dict[str, Any]) -> Found:
    return resumed(cfg, cfg)


def resumed_on_a_stream(cfg: dict[str, Any]) -> Found:
    with users_stream():
        return resumed(cfg, cfg)


def resumed_in_another_stage(cfg: dict[str, Any]) -> Found:
    stage = 3 if cfg["zero_optimization"]["stage"] == 1 else 1
    return resumed(cfg, cfg | {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}})


def loaded_as_fp32(cfg: dict[str, Any]) -> Found:
    """The masters, which any mode with fp32 masters holds as they are."""
    return resumed(cfg, config("fp32", 3, "all in host memory"), after=STEPS)


def loaded_as_14_bytes(cfg: dict[str, Any]) -> Found:
    return resumed(cfg, config("14 bytes", 2, "device"), after=STEPS)


def away_for_a_while(cfg: dict[str, Any]) -> Found:
    engine = engine_of(cfg)
    with users_stream():
        losses = train(engine, steps=1)
        engine.offload_states()
    engine.reload_states()
    return found_in(engine, losses + train(engine, first=1, steps=STEPS - 1))


def one_loss(cfg: dict[str, Any]) -> Found:
    """Of two engines."""
    first, second = engine_of(cfg), engine_of(config("fp32", 2, "device"))
    losses = []
    with users_stream():
        for k in range(STEPS * first.gradient_accumulation_steps()):
            loss = first(*batch(k))
            (first.scale(loss) + 0 * second(*batch(k))).backward()
            first.step()
            second.step()
            losses.append(loss.detach())
    second.destroy()
    return found_in(first, losses)


def two_threads(cfg: dict[str, Any]) -> Found:
    """An engine each, on streams of their own."""
    cfgs = [cfg, config("14 bytes", 3, "all in host memory")]
    engines = [engine_of(c) for c in cfgs]
    results: list[Any] = [None, None]
    main = torch.accelerator.current_stream()

    def body(n: int) -> None:
        try:
            with on(torch.Stream(DEVICE), main):
                results[n] = train(engines[n])
        except BaseException as error:
            results[n] = error

    threads = [threading.Thread(target=body, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    found = [found_in(*pair) for pair in zip(engines, results, strict=True)]
    assert not unlike(found[1], base("14 bytes", 1, False)), "the other engine"
    return found[0]


class Asked(Exception):
    pass


def fail(*_: Any) -> None:
    raise Asked


def expect(body: Callable[[], Any]) -> None:
    try:
        body()
    except Asked:
        return
    raise AssertionError("no error")


def destroyed(cfg: dict[str, Any]) -> Found:
    """While units are gathered and gradients are on their way; others have their memory then."""
    for stream in (False, True):
        for backward in (False, True):
            engine = engine_of(cfg)
            block = engine.module.blocks[1]
            with users_stream() if stream else nullcontext():
                train(engine, steps=1)
                if backward:
                    loss = engine(*batch(1))
                    handle = block.up.weight.register_hook(fail)
                    expect(lambda engine=engine, loss=loss: engine.backward(loss))
                else:
                    handle = block.register_forward_hook(fail)
                    expect(lambda engine=engine: engine(*batch(1)))
                handle.remove()
                engine.destroy()
                torch.zeros(1, device=DEVICE)
    return plain(cfg)


def interrupted(cfg: dict[str, Any]) -> Found:
    """By errors in the forward and in the backward, amid gathers and copies."""
    engine, losses = engine_of(cfg), []
    block = engine.module.blocks[1]
    with users_stream():
        for k in range(STEPS * engine.gradient_accumulation_steps()):
            if k % engine.gradient_accumulation_steps() == 0:
                handle = block.register_forward_hook(fail)
                expect(lambda k=k: engine(*batch(k)))
                handle.remove()
                loss = engine(*batch(k))
                handle = block.up.weight.register_hook(fail)
                expect(lambda loss=loss: engine.backward(loss))
                handle.remove()
                engine.zero_grad()
            losses.append(micro(engine, k))
    return found_in(engine, losses)


def reads_elsewhere(cfg: dict[str, Any]) -> Found:
    """The first block reads parameters of the last one, which has not run."""
    found = []
    for later in (False, True):
        model = net()
        last, forward = model.blocks[2], model.blocks[0].forward
        model.blocks[0].forward = lambda x, f=forward, last=last: f(x) + last.down(torch.tanh(x @ last.up.weight.t()))
        engine = engine_of(cfg | {"tessera": cfg["tessera"] | {"update_runs_on": later}}, model)
        found.append(found_in(engine, train(engine)))
    assert not unlike(found[1], found[0]), "a parameter was read before its update"
    return plain(cfg)


@dataclass(frozen=True)
class Way:
    run: Callable[[dict[str, Any]], Found]
    accumulation: int = 1
    early: bool = False
    previous: bool = False
    later: bool = False  # the update runs on


WAYS = {
    "plain": Way(plain),
    "a user's stream": Way(on_a_stream),
    "all on a user's stream": Way(all_on_a_stream),
    "a stream for each part": Way(a_stream_for_each_part),
    "accumulation": Way(plain, accumulation=2),
    "accumulation, a user's stream": Way(on_a_stream, accumulation=2),
    "accumulation, a stream for each part": Way(a_stream_for_each_part, accumulation=2),
    "early update": Way(plain, early=True),
    "early update, a user's stream": Way(on_a_stream, early=True),
    "early update, a stream for each part": Way(a_stream_for_each_part, early=True),
    "clip by the step before, a user's stream": Way(on_a_stream, early=True, previous=True),
    "recomputation": Way(recomputed),
    "recomputation, re-entrant": Way(recomputed_reentrant),
    "looked at": Way(looked_at, accumulation=2),
    "checkpoint": Way(resumed_alike),
    "checkpoint, a user's stream": Way(resumed_on_a_stream),
    "checkpoint into another stage": Way(resumed_in_another_stage),
    "checkpoint into fp32": Way(loaded_as_fp32),
    "checkpoint into 14 bytes": Way(loaded_as_14_bytes),
    "away for a while": Way(away_for_a_while),
    "one loss of two engines": Way(one_loss),
    "two threads": Way(two_threads),
    "destroyed amid gathers": Way(destroyed),
    "errors": Way(interrupted, accumulation=2),
    "runs on": Way(plain, later=True),
    "runs on, accumulation, a user's stream": Way(on_a_stream, accumulation=2, later=True),
    "runs on, a stream for each part": Way(a_stream_for_each_part, later=True),
    "runs on, recomputation": Way(recomputed, later=True),
    "runs on, looked at": Way(looked_at, accumulation=2, later=True),
    "runs on, checkpoint": Way(resumed_on_a_stream, later=True),
    "runs on, away for a while": Way(away_for_a_while, later=True),
    "runs on, one loss of two engines": Way(one_loss, later=True),
    "runs on, two threads": Way(two_threads, later=True),
    "runs on, destroyed amid gathers": Way(destroyed, later=True),
    "runs on, parameters read elsewhere": Way(reads_elsewhere, later=True),
    "runs on, errors": Way(interrupted, accumulation=2, later=True),
    "early and on, clip by the step before": Way(on_a_stream, early=True, previous=True, later=True),
}
WAYS |= {
    name.replace("runs on", "early and on"): replace(way, early=True)
    for name, way in WAYS.items()
    if way.later and not way.early and way.accumulation == 1
}


@cache
def base(mode: str, accumulation: int, early: bool, previous: bool = False, stage: int = 1) -> Found:
    return plain(config(mode, stage, "device", accumulation, early, previous))


def unlike(found: Found, expected: Found) -> list[str]:
    return [name for name, value in expected.items() if not torch.equal(found[name], value)]


def is_served(row: Row) -> bool:
    """What engines refuse in words is not of the grid."""
    mode, cfg, way = MODES[row.mode], config(row.mode, row.stage, row.place), WAYS[row.way]
    zero = cfg["zero_optimization"]
    runs_itself = row.mode not in ("Lamb", "Muon")
    scales = "fp16" in mode or row.mode == "autocast, fp16"
    return not (
        (row.stage == 0 and (mode.get("bf16") is LOW or way.early or way.run is away_for_a_while))
        or (way.early and (scales or not runs_itself))
        or (way.later and (row.place == "device" or row.mode not in RUN_ON))
        or (way.run is away_for_a_while and ("offload_param" in zero or not runs_itself))
        or (way.run in (loaded_as_fp32, loaded_as_14_bytes) and "optimizer" in mode)
        or ("offload_optimizer" in zero and not runs_itself)
        or (row.place in SHARED and mode.get("bf16") is LOW)
        or (WORLD > 1 and way.run is two_threads)  # no common order of calls of two engines in threads
        or (WORLD > 2 and way.run is resumed_in_another_stage and row.stage in (1, 3))  # sums of two orders
        or (row.mode == "Muon" and (row.stage == 3 or way.run is resumed_in_another_stage))
    )


ROWS = [
    row
    for mode in MODES
    for place, (stages, _) in PLACES.items()
    for stage in stages
    for way in WAYS
    if is_served(row := Row(mode, stage, place, way))
]


def sample() -> list[Row]:
    """A third of all ways in all stages and places, with the modes in turns."""
    alike: dict[tuple[int, str, str], list[Row]] = {}
    for row in ROWS:
        alike.setdefault((row.stage, row.place, row.way), []).append(row)
    return [rows[i % len(rows)] for i, rows in enumerate(alike.values())][::3]


def check(row: Row, library: Any) -> str:
    """What is wrong with it; "" where nothing is."""
    way = WAYS[row.way]
    try:
        cfg = config(row.mode, row.stage, row.place, way.accumulation, way.early, way.previous)
        # With several ranks stages add up micro-batches before or after what ranks have, and with more than two by
        # collectives that add in orders of their own.
        of_stage = row.stage if WORLD > 2 or (WORLD > 1 and way.accumulation > 1) else 1
        expected = base(row.mode, way.accumulation, way.early, way.previous, of_stage)
        if way.early:
            cfg["tessera"]["update_in_backward"] = True
        cfg["tessera"]["update_runs_on"] = way.later
        found = way.run(cfg)
        off = unlike(found, expected)
        wrong = f"other bits: {', '.join(off)}" if off else ""
    except Exception as error:
        traceback.print_exc()
        wrong = f"{type(error).__name__}: {error}"
    races = stand_in.races(library) if library else []
    return "\n  ".join(filter(None, [wrong, *races]))


def join_ranks(library: Any) -> None:
    """The default process group, over a back end of the device's own, as NCCL."""
    torch.accelerator.set_device_index(RANK)
    back_end = "nccl"
    if library:
        back_end = "staged"
        dist.Backend.register_backend(back_end, lambda *args: dist.ProcessGroupGloo(*args), devices=[DEVICE])
    dist.init_process_group(f"cpu:gloo,{DEVICE}:{back_end}", timeout=timedelta(seconds=60))
    if library:
        library.tessera_stand_in_stage(dist.group.WORLD.group_name.encode())


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("library", help="of the stand-in accelerator, or 'cuda'")
    parser.add_argument("--sample", action="store_true", help="a third of the ways, each in one mode")
    parser.add_argument("--part", default="0/1", help="every n-th row, from the i-th: i/n")
    parser.add_argument("--only", default="", help="rows whose name has this")
    args = parser.parse_args()
    library = stand_in.load(args.library) if DEVICE != "cuda" else None
    if WORLD > 1:
        join_ranks(library)
    torch.use_deterministic_algorithms(DEVICE == "cuda", warn_only=True)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    first, every = map(int, args.part.split("/"))
    rows = [row for row in (sample() if args.sample else ROWS)[first::every] if args.only in str(row)]
    failed = 0
    for row in rows:
        if wrong := check(row, library):
            failed += 1
            print(f"{row}:\n  {wrong}", flush=True)
            if WORLD > 1:
                break  # the others may wait in another row
    print(f"{len(rows)} rows, {failed} failed")
    if WORLD > 1:
        dist.destroy_process_group()
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
