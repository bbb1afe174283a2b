"""One rank over the device's own back end (NCCL): where things go and a group's calls. Two ranks on one device over
Gloo, with tensors of the device: c10d's own collectives. Two ranks with a device each, where there are two."""

from __future__ import annotations

import datetime
import os
import time
import traceback
from dataclasses import dataclass
from socket import socket
from typing import Any

import torch
import torch.distributed as dist
from common import CUDA, DEVICE, DRY, WORK, Results, no_differences, seconds_left, sync
from engines import ALL, HOST, apart, batch, config, early, engine_of, exact, masters, net, stages_of, train, unlike

import tessera

TIMEOUT = datetime.timedelta(seconds=300 if DRY else 15)


@dataclass(frozen=True)
class Case:
    mode: str
    stage: int
    zero: dict[str, Any] | None = None
    early: bool = False
    saves: bool = False  # in the background, while it trains

    @property
    def title(self) -> str:
        words = [", host" if self.zero else "", ", update in the backward" if self.early else ""]
        return (
            f"{self.mode}, stage {self.stage}{''.join(words)}{', an asynchronous save meanwhile' if self.saves else ''}"
        )

    @property
    def config(self) -> dict[str, Any]:
        return config(self.stage, self.mode, zero=self.zero, **(early(self.mode) if self.early else {}))


def cases() -> list[Case]:
    found = []
    for mode in ("bf16 14", "fp32", "bf16 8"):
        found += [Case(mode, stage) for stage in stages_of(mode)] + [Case(mode, 3, ALL), Case(mode, 2, HOST)]
        found += [Case(mode, 3, early=True), Case(mode, 3, ALL, early=True)]
    if DRY:
        found = [found[3], found[4]]
    # Last, because they may hang: the thread that saves makes calls of its own.
    return found + [Case("bf16 14", 3, saves=True), Case("fp32", 2, saves=True)][: 1 if DRY else 2]


CASES = cases()
# Ranks are forked from a process that has only imported these, which takes seconds.
mp: Any = torch.multiprocessing
mp.get_context("forkserver").set_forkserver_preload(["torch._dynamo", "tessera"])


def rank_environment(rank: int, world: int, port: int, local: int) -> None:
    rank_words = {
        "RANK": rank,
        "LOCAL_RANK": local,
        "WORLD_SIZE": world,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ.update({k: str(v) for k, v in rank_words.items()})


def trained(case: Case, rank: int) -> dict[str, Any]:
    engine = engine_of(case.config)
    losses = []
    for k in range(16 if case.saves else 4):
        loss = engine(*batch(10 * rank + k))
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
        if case.saves and k % 3 == 0:
            engine.save_checkpoint(str(WORK / "two-saved"), asynchronous=True)
    if case.saves:
        engine.wait_for_checkpoint()
    found = {"losses": torch.stack(losses).cpu(), "masters": masters(engine), "device": str(engine.device)}
    if case.saves:  # what was saved can be read again
        again = engine_of(config(1 if case.stage == 3 else 3, case.mode))
        again.load_checkpoint(str(WORK / "two-saved"))
        train(config(3, case.mode), steps=1, engine=again, keep=True)
        again.destroy()
    engine.destroy()
    sync()
    return found


def keep(found: dict[str, Any], name: str) -> None:
    file = WORK / name
    torch.save(found, f"{file}.new")
    os.replace(f"{file}.new", file)


def rank_of_gloo(rank: int, world: int, port: int) -> None:
    exact()
    rank_environment(rank, world, port, 0)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    torch.set_num_threads(1 if DRY else 2)
    for number, case in enumerate(CASES):
        try:
            found = trained(case, rank)
        except BaseException as error:
            text = f"{type(error).__name__}: {str(error)[:800]}"
            found = {"error": text, "trace": traceback.format_exc()[-1500:]}
        keep(found, f"two-{number}-{rank}.pt")
        if "error" in found:
            os._exit(3)  # the other rank would wait
    os._exit(0)


def rank_of_a_program(rank: int, world: int, port: int) -> None:
    """The README's loop, started for two ranks: init_distributed() chooses what they talk over, and where."""
    exact()
    rank_environment(rank, world, port, rank)
    torch.set_num_threads(1 if DRY else 2)
    try:
        tessera.init_distributed(timeout=TIMEOUT)
        dist.barrier()
        engine = tessera.initialize(model=net(), config=config(2, "bf16 14"))[0]
        found = train(config(2, "bf16 14"), steps=2, engine=engine, keep=True)
        found = {"masters": found["masters"], "device": str(engine.device), "back end": dist.get_backend()}
        if CUDA:  # where another rank computes this one holds nothing
            held = [torch.cuda.memory_reserved(k) for k in range(torch.cuda.device_count())]
            found["elsewhere"] = sum(n for k, n in enumerate(held) if torch.device("cuda", k) != engine.device)
    except BaseException as error:
        found = {"error": f"{type(error).__name__}: {str(error)[:800]}"}
    keep(found, f"program-{rank}.pt")
    os._exit(0)


def start(body: Any, seconds: float) -> None:
    """Two ranks of body(rank, world, port), killed after `seconds`."""
    with socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context: Any = mp.start_processes(body, (2, port), nprocs=2, start_method="forkserver", join=False)
    end = time.monotonic() + seconds
    while any(p.is_alive() for p in context.processes) and time.monotonic() < end:
        time.sleep(0.1)
    for p in context.processes:
        if p.is_alive():
            p.kill()


def one_rank() -> dict[str, Any]:
    """init_distributed() of a lone process; initialize() and zero.Init put the model where the rank computes."""
    tessera.init_distributed()
    found: dict[str, Any] = {"backend": dist.get_backend(), "config": str(dist.get_backend_config())}
    engine = tessera.initialize(model=net(), config=config(3, "bf16 14"))[0]
    found["device"] = str(engine.device)
    train(config(3, "bf16 14"), steps=2, engine=engine)
    with tessera.zero.Init(config=config(3, "bf16 14")):
        built = net()
    found["built on"] = str(next(built.parameters()).device)
    tessera.initialize(model=built, config=config(3, "bf16 14"))[0].destroy()
    found["ok"] = all(found[what].startswith(DEVICE.type) for what in ("device", "built on"))
    return found


def world_name() -> str:
    group = dist.group.WORLD
    assert group is not None
    return str(group.group_name)


def calls_of_a_group() -> dict[str, Any]:
    """Each gives what it should, on the device and, for what ranks tell each other, on the CPU where the group can."""
    group = tessera.c10d_group(world_name())
    x = torch.arange(8.0, device=DEVICE)
    out, sent = torch.full_like(x, -1), x.clone()
    group.all_gather(out, x, "a check")
    group.broadcast(sent, 0, "a check")
    group.barrier()
    sync()
    off = [what for what, t in {"all_gather": out, "broadcast": sent}.items() if not torch.equal(t, x)]
    return {"ok": not off and group.size == 1, "differ": off, "size": group.size}


def over_the_group(stage: int) -> dict[str, Any]:
    """The same bits with the group as without one."""
    group = tessera.c10d_group(world_name())
    cfg = config(stage, "bf16 14")
    engine = tessera.Engine(net().to(DEVICE), cfg, group=group)
    with_group = train(cfg, engine=engine)
    alone = train(cfg, engine=tessera.Engine(net().to(DEVICE), cfg, group=tessera.single_group()))
    return no_differences(unlike(with_group, alone))


def loaded(names: list[str]) -> list[dict[str, Any]]:
    there = [k for k, name in enumerate(names) if (WORK / name).exists()]
    if len(there) < len(names):
        raise TimeoutError(f"it did not end (ranks that did: {there})")
    found: list[dict[str, Any]] = [torch.load(WORK / name) for name in names]
    return found


def of_two(number: int, bases: dict[str, Any]) -> dict[str, Any]:
    case = CASES[number]
    found = loaded([f"two-{number}-{rank}.pt" for rank in range(2)])
    for f in found:
        if "error" in f:
            raise RuntimeError(f["error"] + f["trace"])
    differ = unlike(found[0], found[1], losses=False)
    if case.saves:
        return {"ok": not differ, "ranks differ": differ}
    # A back end's own collectives have their own order of summation: stages may differ in the last place.
    base = bases.setdefault(f"{case.mode} {case.early}", found[0])
    worst, same = apart(found[0], base), not unlike(found[0], base)
    return {"ok": not differ and worst < 0.5, "worst_in_lr": worst, "same bits": same, "ranks differ": differ}


def of_a_program() -> dict[str, Any]:
    """Both train to the same weights, each on a device of its own; or both say that they share one."""
    found = loaded([f"program-{rank}.pt" for rank in range(2)])
    errors = [f["error"] for f in found if "error" in f]
    if errors:
        said = all("device" in e or "GPU" in e or "LOCAL_RANK" in e for e in errors)
        told = {f"rank {r}": f.get("error", "none")[-160:] for r, f in enumerate(found)}
        return {"ok": said and len(errors) == 2 and torch.cuda.device_count() < 2, **told}
    where = [f["device"] for f in found]
    alone = not CUDA or where[0] != where[1] or found[0]["back end"] == "gloo"
    ok = alone and not unlike(found[0], found[1], losses=False) and not any(f.get("elsewhere") for f in found)
    return {"ok": ok, "devices": where, "back end": found[0]["back end"]}


def main() -> None:
    exact()
    r = Results("two_ranks")
    for old in [*WORK.glob("two-*.pt"), *WORK.glob("program-*.pt")]:
        old.unlink()
    over = "NCCL" if CUDA else "Gloo"
    r.case(f"one rank over {over}", one_rank, need=5)
    r.case(f"one rank over {over}: calls of the group", calls_of_a_group)
    for stage in (0, 2, 3):
        r.case(f"one rank over {over}: stage {stage} over the group itself", over_the_group, stage)
    start(rank_of_a_program, seconds_left() / 2 if DRY else min(30, seconds_left() / 3))
    r.case("two ranks of a program", of_a_program)
    start(rank_of_gloo, seconds_left() - 4)
    bases: dict[str, Any] = {}
    for number, case in enumerate(CASES):
        r.case(f"two ranks over Gloo: {case.title}", of_two, number, bases)
    r.end()


if __name__ == "__main__":
    main()
