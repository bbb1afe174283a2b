"""Models, data and ranks for the tests."""

from __future__ import annotations

import copy
import io
import json
import math
import os
import runpy
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from tessera.distributed import free_port as free_port
from torch import nn

import tessera


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    """Repeated blocks, odd sizes, a parameter of one element. With `y` it returns the loss."""

    def __init__(self, width: int = 7, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Linear(5, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 3)
        self.gain = nn.Parameter(torch.tensor([1.5]))

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x.to(self.embed.weight.dtype))
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        out = self.head(self.features(x)) * self.gain
        return out if y is None else mse(out, y)


class Pair(nn.Module):
    """Two layers that tensor parallelism can cut: PAIR_SPECS. Returns a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x))).square().mean()


PAIR_SPECS = {
    "layer_specs": [{"patterns": ["up"], "partition_type": "column"}, {"patterns": ["down"], "partition_type": "row"}]
}


def mse(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ((out.float() - y) ** 2).mean()


def make(cls: Callable[..., nn.Module] = Net, *args: Any, seed: int = 0, **kwargs: Any) -> nn.Module:
    torch.manual_seed(seed)
    return cls(*args, **kwargs)


def batch(seed: int, rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randn(rows, 5, generator=generator), torch.randn(rows, 3, generator=generator)


def config(
    stage: int = 0, accumulation: int = 1, bf16: bool = False, zero: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    """Without clipping, so that plain PyTorch is easy to write beside it. Stage 3: every parameter is partitioned.
    `zero`: more of zero_optimization."""
    result: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage}
        | ({"stage3_param_persistence_threshold": 0} if stage == 3 else {})
        | (zero or {}),
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    if bf16:
        result["bf16"] = {"enabled": True}
    result.update(more)
    return result


# Processes that are forked from one that has only imported torch and the package: their bodies begin after 5 ms of CPU
# time, those of new interpreters after 2.5 s (torch 2.13, 2026-11-28). The tests start 340 of them at least, so that it
# saves 14 minutes of CPU time. They end without Python's own end: tests of that take "spawn".
PROCESSES = mp.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    ["pytest", "tessera", "hypothesis", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed._tensor"]
)


def run_processes(world: int, body: Callable[..., None], *args: Any) -> None:
    """body(rank, *args) in `world` processes; the first error is raised."""
    mp.start_processes(body, args, nprocs=world, start_method="forkserver")


def become(command: list[str], file: str | Path, folder: str | Path = ".", **environment: str) -> None:
    """Makes a process of PROCESSES the program, printing to `file`. Python's own run in the interpreter that it has."""
    with open(file, "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ.update(environment)
    os.chdir(folder)
    if command[0] != sys.executable:
        os.execv(command[0], command)
    sys.argv[:] = command[1:]
    sys.path.insert(0, str(Path(command[1]).parent))
    runpy.run_path(command[1], run_name="__main__")


def _become_rank(rank: int, command: list[str], files: list[Path], folder: Path, environment: dict[str, str]) -> None:
    become(command, files[rank], folder, **environment, RANK=str(rank), LOCAL_RANK=str(rank))


def run_program(
    command: Sequence[str | Path], ranks: int = 1, folder: Path | None = None, **environment: str
) -> list[str]:
    """What each rank of a program prints. Its processes find what torchrun gives them, a store that outlives them
    too, but start without its seconds of imports."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(ranks)}
    environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    with tempfile.TemporaryDirectory() as scratch:
        files = [Path(scratch, str(rank)) for rank in range(ranks)]
        try:
            run_processes(ranks, _become_rank, [*map(str, command)], files, folder or Path.cwd(), environment)
        except Exception as error:
            raise AssertionError("\n".join(file.read_text() for file in files if file.exists())) from error
        return [file.read_text() for file in files]


def run_ranks(world: int, body: Callable[[int, tessera.Group], Any], timeout: float = 60) -> list[Any]:
    """Runs body(rank, group) on `world` threads; the results in rank order. The first error stops all and is raised."""
    groups = tessera.thread_groups(world, timedelta(seconds=timeout))
    return _run(world, lambda rank: body(rank, groups[rank]), lambda rank, why: groups[rank].abort(why), timeout)


def run_mesh(
    body: Callable[[int, tessera.Mesh], Any],
    dp: int = 1,
    sp: int = 1,
    tp: int = 1,
    timeout: float = 60,
    replicas: int = 1,
) -> list[Any]:
    """run_ranks() on a mesh: body(rank, mesh). `replicas`: of the dp ranks, those that hold the same states."""
    world = dp * sp * tp
    numbers = torch.arange(world).view(replicas, dp // replicas, sp, tp)
    meshes = [tessera.Mesh() for _ in range(world)]
    mine: list[list[tessera.Group]] = [[] for _ in range(world)]
    axes = [tessera.Axis.DpReplicate, tessera.Axis.DpShard, tessera.Axis.Sp, tessera.Axis.Tp]
    for along in ([0], [1], [2], [3], [1, 2]):  # an engine's groups
        if min(numbers.size(dim) for dim in along) == 1:
            continue
        others = [dim for dim in range(4) if dim not in along]
        for ranks in numbers.permute(*others, *along).flatten(0, -1 - len(along)).flatten(1).tolist():
            for rank, group in zip(ranks, tessera.thread_groups(len(ranks), timedelta(seconds=timeout)), strict=True):
                mine[rank].append(group)
                meshes[rank].set([axes[dim] for dim in along], group)

    def abort(rank: int, why: str) -> None:
        for group in mine[rank]:
            group.abort(why)

    return _run(world, lambda rank: body(rank, meshes[rank]), abort, timeout)


def _run(world: int, body: Callable[[int], Any], abort: Callable[[int, str], None], timeout: float) -> list[Any]:
    results: list[Any] = [None] * world
    errors: list[tuple[int, BaseException]] = []
    lock = threading.Lock()

    def run(rank: int) -> None:
        try:
            results[rank] = body(rank)
        except BaseException as error:
            with lock:
                errors.append((rank, error))
            abort(rank, f"rank {rank} failed: {error}")

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout + 30)
        assert not thread.is_alive(), "a rank hangs"
    if errors:  # what another rank's failure makes of a call may be here before that
        raise min(errors, key=lambda found: isinstance(found[1], torch.distributed.DistBackendError))[1]
    return results


def engines(
    model: nn.Module,
    ranks: int | dict[str, int],
    cfg: dict[str, Any],
    body: Callable[[Any, int], Any],
    client: Callable[[Any], torch.optim.Optimizer] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """body(engine, rank) on every rank, each with its own copy of `model` and what client(its parameters) makes.
    `ranks`: how many, or the sizes of run_mesh()."""
    sizes = ranks if isinstance(ranks, dict) else {"dp": ranks}
    copies = [copy.deepcopy(model) for _ in range(math.prod(sizes.get(axis, 1) for axis in ("dp", "sp", "tp")))]

    def run(rank: int, group: Any) -> Any:
        own = {} if client is None else {"optimizer": client(copies[rank].parameters())}
        engine = tessera.Engine(copies[rank], cfg, group=group, **own, **kwargs)
        try:
            return body(engine, rank)
        finally:
            engine.destroy()

    return run_mesh(run, **sizes) if isinstance(ranks, dict) else run_ranks(ranks, run)


def shard_group(engine: tessera.Engine) -> tessera.Group:
    """The ranks that share the engine's model states."""
    return engine.core.mesh().group(tessera.Axis.DpShard)


def full_grads(engine: tessera.Engine) -> dict[str, torch.Tensor | None]:
    """Collective: the reduced gradients by name, None where there is none."""
    grads = {}
    for name, param in engine.module.named_parameters():
        value = tessera.state.get_full_grad(engine, param)
        grads[name] = None if value is None else value.clone()
    return grads


def gathered(engine: tessera.Engine) -> list[str]:
    """Names of the parameters that are whole now."""
    names = [name for name, _ in engine.module.named_parameters()]
    return [name for number, name in enumerate(names) if engine.core.is_gathered(number)]


def plain_grads(
    model: nn.Module, world: int, body: Callable[[nn.Module, int], Any], scale: float = 1.0
) -> dict[str, torch.Tensor | None]:
    """Mean over ranks of what body(model, rank) leaves in p.grad of plain PyTorch, times `scale`."""
    sums: dict[str, torch.Tensor | None] = {name: None for name, _ in model.named_parameters()}
    for rank in range(world):
        copied = copy.deepcopy(model)
        body(copied, rank)
        for name, param in copied.named_parameters():
            if param.grad is not None:
                part = param.grad.float() * (scale / world)
                before = sums[name]
                sums[name] = part if before is None else before + part
    return sums


def assert_close(
    actual: dict[str, torch.Tensor | None], expected: dict[str, torch.Tensor | None], bf16: bool = False
) -> None:
    tolerance = {"rtol": 0.05, "atol": 0.02} if bf16 else {"rtol": 1e-4, "atol": 1e-6}
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        got = actual[name]
        if value is None:
            assert got is None or not got.any(), name
        else:
            assert got is not None, name
            torch.testing.assert_close(got.float(), value.float(), msg=lambda m, n=name: f"{n}: {m}", **tolerance)


def micro(engine: Any, seed: int) -> None:
    engine(*batch(seed)).backward()
    engine.step()


def losses_of(engine: Any, rank: int = 0, first: int = 0, count: int = 2) -> list[float]:
    """Of micro-batches first, first + 1, ... of this rank, which are trained."""
    losses = []
    for k in range(first, first + count):
        loss = engine(*(t.to(engine.device) for t in batch(10 * rank + k)))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def masters(engine: tessera.Engine) -> dict[str, torch.Tensor]:
    """Collective: the fp32 values of trained parameters by name."""
    values = {name: tessera.state.get_full_fp32_param(engine, p) for name, p in engine.module.named_parameters()}
    return {name: value.clone() for name, value in values.items() if value is not None}


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def one_backward(model: Any, rank: int) -> None:
    model(*batch(rank)).backward()


def same_gradients(
    model: nn.Module,
    world: int,
    cfg: dict[str, Any],
    body: Callable[[Any, int], Any] = one_backward,
    plain: Callable[[Any, int], Any] | None = None,
    then: Callable[[Any, int], Any] | None = None,
    scale: float = 1.0,
    bf16: bool = False,
) -> None:
    """What body(engine, rank) leaves is `scale` times what `plain` (None: body) leaves in plain PyTorch.
    then(engine, rank): when the gradients were read."""
    want = plain_grads(model, world, body if plain is None else plain, scale)

    def on_engine(engine: tessera.Engine, rank: int) -> Any:
        body(engine, rank)
        grads = full_grads(engine)
        if then is not None:
            then(engine, rank)
        return grads

    for grads in engines(model, world, cfg, on_engine):
        assert_close(grads, want, bf16)


def applied_step(engine: tessera.Engine, rank: int) -> None:
    engine.step()
    assert engine.was_step_applied()


def weights(model: nn.Module) -> dict[str, torch.Tensor | None]:
    with tessera.zero.GatheredParameters(model.parameters()):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


Factory = Callable[[Any], torch.optim.Optimizer]


def train_plain(model: nn.Module, factory: Factory, world: int, steps: int) -> torch.optim.Optimizer:
    optimizer = factory(model.parameters())
    for k in range(steps):
        grads = plain_grads(model, world, lambda m, rank, k=k: m(*batch(10 * rank + k)).backward())
        for name, param in model.named_parameters():
            param.grad = grads[name]
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def run(engine: Any, rank: int, steps: int) -> None:
    for k in range(steps):
        engine(*batch(10 * rank + k)).backward()
        engine.step()


OPTIMIZERS: dict[str, Factory] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.8, 0.95), eps=1e-6),
    "adam maximize": lambda p: torch.optim.Adam(p, lr=0.01, maximize=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.1, initial_accumulator_value=0.2),
    # Run by themselves on the masters:
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
}


def with_blob(folder: Path, name: str, value: Any) -> None:
    """The checkpoint in `folder`, of one tag, says that, and its checksums are good. bytes: the whole blob."""
    path, out = folder / "manifest.json", io.BytesIO()
    manifest = json.loads(path.read_text())
    del manifest["crc32c"]
    torch.save(value, out)
    manifest["blobs"][name] = {"hex": (value if isinstance(value, bytes) else out.getvalue()).hex()}
    rest = json.dumps(manifest)[1:]
    path.write_text(f'{{"crc32c": "{_crc32c(rest.encode()):08x}",{rest}')


def _crc32c(data: bytes) -> int:
    table = list(range(256))
    for _ in range(8):
        table = [(row >> 1) ^ 0x82F63B78 * (row & 1) for row in table]
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ table[(crc ^ byte) & 255]
    return crc ^ 0xFFFFFFFF
