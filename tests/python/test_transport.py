"""Shared memory as the back end "tessera" of torch.distributed: every collective in real processes, by reference."""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from support import PROCESSES, batch, config, make, weights
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import tessera

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
REDUCTIONS: dict[str, Any] = {
    "SUM": lambda rows: sum(rows[1:], start=rows[0]),
    "AVG": lambda rows: sum(rows[1:], start=rows[0]) / len(rows),
    "PRODUCT": lambda rows: torch.stack(rows).prod(0) if len(rows) == 1 else _fold(torch.mul, rows),
    "MIN": lambda rows: _fold(torch.minimum, rows),
    "MAX": lambda rows: _fold(torch.maximum, rows),
    "BAND": lambda rows: _fold(torch.bitwise_and, rows),
    "BOR": lambda rows: _fold(torch.bitwise_or, rows),
    "BXOR": lambda rows: _fold(torch.bitwise_xor, rows),
}


def _fold(op: Callable[..., torch.Tensor], rows: list[torch.Tensor]) -> torch.Tensor:
    result = rows[0].clone()
    for row in rows[1:]:
        result = op(result, row)
    return result


def reduced(rows: list[torch.Tensor], op: str) -> torch.Tensor:
    """In rank order, sixteen-bit floats in fp32 and rounded once; sum and product of bool are or and and."""
    dtype = rows[0].dtype
    if dtype == torch.bool:
        op = {"SUM": "BOR", "PRODUCT": "BAND", "MAX": "BOR", "MIN": "BAND"}.get(op, op)
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    return REDUCTIONS[op]([row.to(wide) for row in rows]).to(dtype)


def values(call: int, rank: int, shape: Any, dtype: torch.dtype) -> torch.Tensor:
    """What rank `rank` brings to call number `call`: every rank can tell that of every other."""
    generator = torch.Generator().manual_seed(call * 100 + rank)
    numbers = torch.randint(-50, 50, shape if isinstance(shape, (tuple, list)) else (shape,), generator=generator)
    return numbers > 0 if dtype == torch.bool else (numbers / (8 if dtype.is_floating_point else 1)).to(dtype)


Rendezvous = tuple[int, str]  # port of the test's store, and a prefix of its own for each body


def start(rank: int, world: int, rendezvous: Rendezvous, timeout: float = 120.0, backend: str = "tessera") -> None:
    port, number = rendezvous
    torch.set_num_threads(1)
    tessera.distributed.register_backend()
    tessera.distributed.register_backend()
    store = dist.PrefixStore(number, dist.TCPStore("127.0.0.1", port, is_master=False))
    limit = datetime.timedelta(seconds=timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)


Body = Callable[..., None]


def one_after_the_other(rank: int, world: int, port: int, bodies: list[tuple[Any, ...]]) -> None:
    for number, (body, *args) in enumerate(bodies):
        body(rank, world, (port, str(number)), *args)


def run(world: int, *bodies: Body | tuple[Any, ...], method: str = "forkserver") -> None:
    """Each body, with its arguments, in the same `world` processes. Nothing may stay behind in /dev/shm."""
    before = set(os.listdir("/dev/shm"))
    calls = [body if isinstance(body, tuple) else (body,) for body in bodies]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.start_processes(one_after_the_other, (world, store.port, calls), nprocs=world, start_method=method)
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "tessera" in name]


def finish() -> None:
    dist.barrier()
    dist.destroy_process_group()


def every_collective(group: Any, rank: int, world: int) -> None:
    same = torch.equal
    call = 0
    for dtype in [*FLOATS, *INTEGERS, torch.bool]:
        for n in (0, 1, 5, 1000, 40009):
            call += 1
            rows = [values(call, r, n, dtype) for r in range(world)]
            wholes = [values(call, r, (world, n), dtype) for r in range(world)]
            mine = rows[rank].clone()
            # gathers
            out = torch.empty(world * n, dtype=dtype)
            dist.all_gather_into_tensor(out, mine, group=group)
            assert same(out, torch.cat(rows))
            parts = [torch.empty(n, dtype=dtype) for _ in range(world)]
            dist.all_gather(parts, mine, group=group)
            assert all(same(a, b) for a, b in zip(parts, rows, strict=True))
            root = call % world
            parts = [torch.empty(n, dtype=dtype) for _ in range(world)] if rank == root else None
            dist.gather(mine, parts, group=group, group_dst=root)
            assert parts is None or all(same(a, b) for a, b in zip(parts, rows, strict=True))
            got = torch.empty(n, dtype=dtype)
            dist.scatter(got, list(wholes[root]) if rank == root else None, group=group, group_src=root)
            assert same(got, wholes[root][rank])
            got = mine.clone()
            dist.broadcast(got, group=group, group_src=root)
            assert same(got, rows[root])
            # exchanges
            got = torch.empty(world, n, dtype=dtype)
            dist.all_to_all_single(got, wholes[rank].clone(), group=group)
            assert same(got, torch.stack([w[rank] for w in wholes]))
            parts = [torch.empty(n + r, dtype=dtype) for r in range(world)]
            dist.all_to_all(parts, [values(call, rank, n + rank, dtype) for _ in range(world)], group=group)
            assert all(same(parts[r], values(call, r, n + r, dtype)) for r in range(world))
            # sums
            for op in REDUCTIONS:
                if (op == "AVG" and not dtype.is_floating_point) or (op[0] == "B" and dtype.is_floating_point):
                    continue
                how = getattr(dist.ReduceOp, op)
                got = mine.clone()
                dist.all_reduce(got, how, group=group)
                assert same(got, reduced(rows, op)), (dtype, n, op)
                got = mine.clone()
                dist.reduce(got, group_dst=root, op=how, group=group)
                assert same(got, reduced(rows, op) if rank == root else mine)
                got = torch.empty(n, dtype=dtype)
                dist.reduce_scatter_tensor(got, wholes[rank].flatten(), how, group=group)
                assert same(got, reduced([w[rank] for w in wholes], op))
                got = torch.empty(n, dtype=dtype)
                dist.reduce_scatter(got, list(wholes[rank]), how, group=group)
                assert same(got, reduced([w[rank] for w in wholes], op))


def collectives(rank: int, world: int, rendezvous: Rendezvous) -> None:
    start(rank, world, rendezvous)
    assert dist.get_backend() == "tessera"
    every_collective(None, rank, world)
    finish()


@pytest.mark.parametrize("world", [1, 3])
def test_every_collective_of_every_dtype(world: int) -> None:
    run(world, collectives)


def forms(rank: int, world: int, rendezvous: Rendezvous) -> None:
    """Shapes, layouts and kinds of call that are less common."""
    start(rank, world, rendezvous)
    # channels last, transposed, a slice with gaps: results land in the tensor itself
    for view in (
        lambda: torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda: torch.arange(12.0).view(3, 4).t(),
        lambda: torch.arange(24.0).view(4, 6)[:, ::2],
    ):
        tensor = view()
        kept = tensor
        dist.all_reduce(tensor)
        assert torch.equal(kept, view() * world)
        tensor = view() + rank
        dist.broadcast(tensor, src=world - 1)
        assert torch.equal(tensor, view() + world - 1)
    # rows of different lengths
    sizes = [3 * r for r in range(world)]
    parts = [torch.empty(n) for n in sizes]
    dist.all_gather(parts, torch.full((sizes[rank],), float(rank)))
    assert all(torch.equal(p, torch.full((n,), float(r))) for r, (n, p) in enumerate(zip(sizes, parts, strict=True)))
    out = torch.empty(sizes[rank])
    dist.reduce_scatter(out, [torch.ones(n) for n in sizes])
    assert torch.equal(out, torch.full((sizes[rank],), float(world)))
    sent = [(rank + to) % 3 for to in range(world)]
    received = [(source + rank) % 3 for source in range(world)]
    out = torch.empty(sum(received), 2)
    dist.all_to_all_single(out, torch.full((sum(sent), 2), float(rank)), received, sent)
    assert torch.equal(out[:, 0], torch.cat([torch.full((n,), float(r)) for r, n in enumerate(received)]))
    # several tensors in one call
    tensors = [torch.full((n,), float(rank)) for n in (1, 1000, 70000)]
    dist.all_reduce_coalesced(tensors)
    assert all(torch.equal(t, torch.full_like(t, world * (world - 1) / 2)) for t in tensors)
    outs, ins = [torch.empty(world * n) for n in (2, 30000)], [torch.full((n,), float(rank)) for n in (2, 30000)]
    with dist._coalescing_manager():
        for a, b in zip(outs, ins, strict=True):
            dist.all_gather_into_tensor(a, b)
    assert all(torch.equal(a.view(world, -1)[:, 0], torch.arange(float(world))) for a in outs)
    with dist._coalescing_manager():
        for a, b in zip(ins, outs, strict=True):
            dist.reduce_scatter_tensor(a, b)
    assert all(torch.equal(a, torch.full_like(a, float(world * rank))) for a in ins)
    # objects, complex numbers, 8-bit floats, gradients
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * 1000 * rank})
    assert [o["rank"] for o in objects] == list(range(world))
    number = torch.full((5,), complex(rank, 1))
    dist.all_reduce(number)
    assert torch.equal(number, torch.full((5,), complex(world * (world - 1) / 2, world)))
    small = torch.full((5,), float(rank)).to(torch.float8_e4m3fn)
    dist.broadcast(small, src=1)
    assert small.float().eq(1).all()
    weight = torch.nn.Parameter(torch.ones(3))
    dist.all_reduce(weight.data)
    assert weight.eq(world).all()
    # what cannot be
    for wrong, text in (
        (lambda: dist.all_reduce(torch.ones(2, dtype=torch.int32), dist.ReduceOp.AVG), "does not take dtype"),
        (lambda: dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND), "does not take dtype"),
        (lambda: dist.all_gather_into_tensor(torch.ones(3 * world), torch.ones(2)), "are needed in the large tensor"),
    ):
        with pytest.raises((ValueError, RuntimeError, NotImplementedError), match=text):
            wrong()
    every_collective(None, rank, world)  # nothing is left behind by an error of arguments
    finish()


def handles(rank: int, world: int, rendezvous: Rendezvous) -> None:
    start(rank, world, rendezvous)
    # many in flight, waited for in any order, polled, by future, and forgotten
    tensors = [torch.full((n,), float(rank + 1)) for n in (10, 200_000, 3, 1_000_000, 50)]
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    works[3].wait()
    while not works[1].is_completed():
        time.sleep(0.001)
    assert works[1].is_success() and works[0].is_success()
    (result,) = works[4].get_future().wait()
    assert result.data_ptr() == tensors[4].data_ptr()
    del works
    total = world * (world + 1) / 2
    dist.barrier()
    assert all(t.eq(total).all() for t in tensors)
    # a future completes although nobody waits for its handle, and its callbacks run
    tensor = torch.full((2_000_000,), float(rank + 1))
    doubled = dist.all_reduce(tensor, async_op=True).get_future().then(lambda f: f.value()[0] * 2)
    assert doubled.wait().eq(2 * total).all()
    # results of a non-contiguous output are there when the future is
    grid = torch.zeros(500, 300).t()
    dist.all_reduce(grid.add_(1), async_op=True).get_future().wait()
    assert grid.eq(world).all()
    # rank 1 does not look after its handle while rank 0 waits: the data moves all the same
    tensor = torch.full((3_000_000,), 1.0)
    work = dist.all_reduce(tensor, async_op=True)
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        work.wait()
        store.set("rank 0 is through", "yes")
    else:
        store.wait(["rank 0 is through"], datetime.timedelta(seconds=60))
        work.wait()
    assert tensor.eq(world).all()
    finish()


def test_less_common_forms_and_handles() -> None:
    run(2, forms, handles)


def messages(rank: int, world: int, rendezvous: Rendezvous) -> None:
    start(rank, world, rendezvous)
    right, left = (rank + 1) % world, (rank - 1) % world
    for n in (0, 1, 1000, 1_000_000):  # the last is more than a ring holds
        sent, got = torch.full((n,), float(rank)), torch.empty(n)
        work = dist.isend(sent, right)
        dist.recv(got, left)
        work.wait()
        assert got.eq(left).all()
    # by tag, against the order of sending; a message that is not asked for yet does not hold up the others
    if rank == 0:
        works = [dist.isend(torch.full((300_000,), float(tag)), 1, tag=tag) for tag in (7, 8, 7, 9)]
        dist.all_reduce(torch.ones(5))  # collectives pass messages
        [w.wait() for w in works]
    elif rank == 1:
        dist.all_reduce(torch.ones(5))
        got = torch.empty(300_000)
        for tag in (9, 7, 8, 7):
            dist.recv(got, 0, tag=tag)
            assert got.eq(tag).all()
    else:
        dist.all_reduce(torch.ones(5))
    # from anybody
    if rank == 0:
        seen = set()
        for _ in range(world - 1):
            got = torch.empty(3)
            source = dist.recv(got, tag=3)
            assert got.eq(source).all()
            seen.add(source)
        assert seen == set(range(1, world))
    else:
        dist.send(torch.full((3,), float(rank)), 0, tag=3)
    # in batches
    got = torch.empty(1000)
    operations = [dist.P2POp(dist.isend, torch.full((1000,), float(rank)), right), dist.P2POp(dist.irecv, got, left)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert got.eq(left).all()
    # a receiver that is polled; a sender that does not wait
    if rank == 0:
        big = torch.arange(2_000_000.0)
        dist.isend(big, 1)
        dist.barrier()
        assert big[5] == 5
    elif rank == 1:
        got = torch.empty(2_000_000)
        work = dist.irecv(got, 0)
        while not work.is_completed():
            time.sleep(0.001)
        assert torch.equal(got, torch.arange(2_000_000.0))
        dist.barrier()
    else:
        dist.barrier()
    objects: list[Any] = [None]
    if rank == 0:
        dist.send_object_list([{"a": 1}], 1)
    elif rank == 1:
        dist.recv_object_list(objects, 0)
        assert objects == [{"a": 1}]
    finish()


def test_messages_between_two_ranks() -> None:
    run(3, messages)


def groups(rank: int, world: int, rendezvous: Rendezvous) -> None:
    start(rank, world, rendezvous)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    rows, columns = mesh.get_group("a"), mesh.get_group("b")
    odd = dist.new_group([1, 3])
    one = dist.new_group([2])
    x, y, z = (torch.full((100_000,), float(rank)) for _ in range(3))
    works = [dist.all_reduce(x, group=rows, async_op=True), dist.all_reduce(y, group=columns, async_op=True)]
    if rank % 2:
        dist.all_reduce(z, group=odd)
        assert z.eq(4).all()
    if rank == 2:
        dist.all_reduce(z, group=one)
        assert z.eq(2).all()
    for work in reversed(works):
        work.wait()
    assert x.eq(rank % 2 * 2 + 2).all() and y.eq(rank // 2 * 4 + 1).all()
    every_collective(rows, rank // 2, 2)
    dist.destroy_process_group(odd) if rank % 2 else None
    finish()


def test_several_groups_and_a_mesh() -> None:
    run(4, groups)


def plain(world: int, steps: int) -> dict[str, torch.Tensor]:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for k in range(steps):
        (sum(model(*batch(10 * r + k)) for r in range(world)) / world).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def engines_of_others(rank: int, world: int, rendezvous: Rendezvous) -> None:
    start(rank, world, rendezvous)
    want = plain(world, 3)
    for kind in ("ddp", "fsdp", "compiled"):
        model: Any = make()
        if kind == "ddp":
            model = DistributedDataParallel(model, bucket_cap_mb=1, find_unused_parameters=True)
        elif kind == "fsdp":
            for block in model.blocks:
                fully_shard(block)
            fully_shard(model)
        else:  # functional collectives, as compiled programs have them
            from torch.distributed._functional_collectives import all_gather_tensor, all_reduce, reduce_scatter_tensor

            tensor = torch.full((4,), float(rank))
            assert all_reduce(tensor, "sum", dist.group.WORLD).eq(1).all()
            assert all_gather_tensor(tensor, 0, dist.group.WORLD).numel() == 4 * world
            assert reduce_scatter_tensor(tensor, "avg", 0, dist.group.WORLD).eq(0.5).all()
            continue
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for k in range(3):
            model(*batch(10 * rank + k)).backward()
            optimizer.step()
            optimizer.zero_grad()
        for name, p in model.named_parameters():
            value = p.full_tensor() if kind == "fsdp" else p
            torch.testing.assert_close(value.detach(), want[name.removeprefix("module.")], rtol=1e-4, atol=1e-5)
    # ours on the same group, over memory of its own
    engine = tessera.Engine(
        make(), config(2, optimizer={"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}})
    )
    assert tessera.c10d_group("0").name == "shared memory"
    for k in range(3):
        engine(*batch(10 * rank + k)).backward()
        engine.step()
    for name, value in weights(engine.module).items():
        torch.testing.assert_close(value, want[name], rtol=1e-4, atol=1e-5)
    engine.destroy()
    finish()


def test_ddp_fsdp_and_functional_collectives() -> None:
    run(2, engines_of_others)


# ---- the choice


def chosen(rank: int, world: int, rendezvous: Rendezvous, backend: str, transport: str, hosts: int, want: str) -> None:
    os.environ["TESSERA_TRANSPORT"] = transport
    os.environ["TESSERA_HOST_ID"] = str(rank % hosts)
    start(rank, world, rendezvous, backend=backend)
    group = tessera.c10d_group("0")
    assert group.name == want, group.name
    group.barrier()
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.eq(world).all()
    finish()


def refused(rank: int, world: int, rendezvous: Rendezvous, transports: list[str], hosts: int, text: str) -> None:
    os.environ["TESSERA_TRANSPORT"] = transports[rank]
    os.environ["TESSERA_HOST_ID"] = str(rank % hosts)
    start(rank, world, rendezvous, backend="gloo")
    with pytest.raises((RuntimeError, ValueError), match=text):
        tessera.c10d_group("0")
    finish()


def across_hosts(rank: int, world: int, rendezvous: Rendezvous) -> None:
    """Engines over memory within two hosts and Gloo between them: all stages alike, and as plain PyTorch."""
    os.environ["TESSERA_TRANSPORT"] = "auto"
    os.environ["TESSERA_HOST_ID"] = str(rank // 2)
    start(rank, world, rendezvous, backend="gloo")
    assert tessera.c10d_group("0").name == "shared memory and gloo"
    want = plain(world, 3)
    first: dict[str, torch.Tensor] = {}
    for stage in (0, 1, 2, 3):
        engine = tessera.Engine(
            make(), config(stage, optimizer={"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}})
        )
        for k in range(3):
            engine(*batch(10 * rank + k)).backward()
            engine.step()
        got = weights(engine.module)
        first = first or got
        for name, value in got.items():
            assert torch.equal(value, first[name]), (stage, name)
            torch.testing.assert_close(value, want[name], rtol=1e-4, atol=1e-5)
        engine.destroy()
    finish()


def test_engines_on_several_hosts() -> None:
    run(3, across_hosts)


def test_the_choice_of_transport() -> None:
    run(
        2,
        (chosen, "gloo", "auto", 1, "shared memory"),
        (chosen, "cpu:gloo", "auto", 1, "shared memory"),
        (chosen, "gloo", "gloo", 1, "gloo"),
        (chosen, "gloo", "auto", 2, "gloo"),
        (chosen, "tessera", "shared_memory", 1, "shared memory"),
        (chosen, "tessera", "auto", 2, "custom"),
        (refused, ["pigeon", "pigeon"], 1, "may be auto, gloo or shared_memory"),
        (refused, ["auto", "gloo"], 1, "must be the same everywhere"),
        (refused, ["shared_memory", "shared_memory"], 2, "are on 2 hosts"),
    )


# ---- lost ranks


@contextlib.contextmanager
def error_of(rank: int, world: int) -> Iterator[list[str]]:
    caught: list[str] = []
    with pytest.raises(RuntimeError) as info:
        yield caught
    caught.append(str(info.value))
    assert f"rank {rank} of {world}" in caught[0], caught


def losing(rank: int, rendezvous: Rendezvous, moment: str) -> None:
    start(rank, 3, rendezvous, timeout=300)
    dist.barrier()
    big = torch.ones(8_000_000)
    if rank == 1:
        if moment == "future":
            dist.all_reduce(big, async_op=True)  # killed inside of it
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    with error_of(rank, 3) as text:
        if moment == "barrier":
            dist.barrier()
        elif moment == "future":
            dist.all_reduce(big, async_op=True).get_future().wait()
        else:
            work = dist.irecv(big, 1)
            while not work.is_completed():
                time.sleep(0.01)
            assert not work.is_success()
            work.wait()
    assert "lost rank 1" in text[0], text
    assert time.monotonic() - begin < 100  # far below the timeout
    with error_of(rank, 3) as again:  # for good
        dist.barrier()
    assert "lost rank 1" in again[0]
    os._exit(0)


@pytest.mark.parametrize("moment", ["barrier", "future", "message"])
def test_a_killed_rank_is_named(moment: str) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [PROCESSES.Process(target=losing, args=(rank, (store.port, "0"), moment)) for rank in range(3)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(200)
    assert [process.exitcode for process in ranks] == [0, -signal.SIGKILL, 0]


def late(rank: int, world: int, rendezvous: Rendezvous) -> None:
    start(rank, world, rendezvous, timeout=2)
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        with error_of(0, 2) as text:
            dist.barrier()
        assert "timed out after 2.0 s waiting for rank(s) 1 (alive" in text[0]
        store.set("told", "yes")
    else:
        store.wait(["told"], datetime.timedelta(seconds=60))
    with error_of(rank, 2) as text:
        dist.all_reduce(torch.ones(3))
    assert "rank 0 in barrier" in text[0] and "timed out" in text[0]
    dist.destroy_process_group()


def different(rank: int, world: int, rendezvous: Rendezvous) -> None:
    start(rank, world, rendezvous)
    with error_of(rank, 2) as text:
        dist.all_reduce(torch.ones(4 if rank == 0 else 5))
    assert "rank 0 called all_reduce (16 B, Float, sum), rank 1 called all_reduce (20 B, Float, sum)" in text[0]
    dist.destroy_process_group()


def different_sizes(rank: int, world: int, rendezvous: Rendezvous) -> None:
    start(rank, world, rendezvous)
    sizes = ([1, 2], [2, 2])[rank]
    with error_of(rank, 2) as text:
        dist.all_gather([torch.ones(n) for n in sizes], torch.ones(sizes[rank]))
    assert "the ranks disagree" in text[0]
    dist.destroy_process_group()


def test_late_ranks_and_different_calls_are_named() -> None:
    run(2, late, different, different_sizes)
