"""What programs for Gloo also use of a process group: sparse sums, profiles, callbacks that wait, splits."""

from __future__ import annotations

import datetime

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torn_down
from test_transport import Rendezvous, finish, run, start
from torch.nn.parallel import DistributedDataParallel


def sparse(rank: int, entries: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Some of its entries lie at one place."""
    generator = torch.Generator().manual_seed(10 * rank + entries)
    places = torch.randint(0, 50, (1, entries), generator=generator)
    return torch.sparse_coo_tensor(places, torch.randn(entries, 8, generator=generator).to(dtype), (50, 8))


def sparse_sums(rank: int, world: int, rendezvous: Rendezvous) -> None:
    start(rank, world, rendezvous)
    for entries in (0, 1, 30, 5000):
        want = torch.zeros(50, 8)
        for r in range(world):
            want += sparse(r, entries * r).to_dense()
        tensor = sparse(rank, entries * rank)
        dist.all_reduce(tensor)
        assert tensor.is_coalesced()
        torch.testing.assert_close(tensor.to_dense(), want)
        tensor = sparse(rank, entries * rank)
        (result,) = dist.all_reduce(tensor, async_op=True).get_future().wait()
        torch.testing.assert_close(result.to_dense(), want)
        assert torch.equal(result.to_dense(), tensor.to_dense())
    with pytest.raises(ValueError, match="sparse tensors can only be added"):
        dist.all_reduce(sparse(rank, 3), dist.ReduceOp.MAX)
    # gradients of an embedding
    torch.manual_seed(1)
    plain = torch.nn.EmbeddingBag(20, 4, sparse=True)
    model = DistributedDataParallel(torch.nn.EmbeddingBag(20, 4, sparse=True))
    model.module.load_state_dict(plain.state_dict())
    rows = [torch.tensor([[r, 7, 7 + r]]) for r in range(world)]
    for _ in range(2):
        for net, mine in ((plain, rows), (model, [rows[rank]])):
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            (sum(net(row).square().sum() for row in mine) / len(mine)).backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(model.module.weight, plain.weight)
    finish()


def profiles(rank: int, world: int, rendezvous: Rendezvous) -> None:
    start(rank, world, rendezvous)
    tensor, large = torch.ones(4, 3), torch.ones(8, 3)
    with torch.profiler.profile(record_shapes=True) as profile:
        dist.all_reduce(tensor)
        dist.broadcast(tensor, 0, async_op=True).wait()
        dist.all_gather_into_tensor(large, tensor)
        dist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0)
        dist.barrier()
    events = {e.name: e for e in profile.events() if e.name.startswith("tessera:")}
    message = "tessera:send" if rank == 0 else "tessera:recv"
    assert set(events) == {
        "tessera:all_reduce", "tessera:broadcast", "tessera:all_gather", "tessera:barrier", message
    }  # fmt: skip
    assert events["tessera:all_reduce"].input_shapes == [[4, 3]] and events["tessera:all_reduce"].is_async
    assert events["tessera:all_gather"].input_shapes == [[4, 3]]
    assert events[message].input_shapes == [[4, 3]]
    finish()


def chains(rank: int, world: int, rendezvous: Rendezvous) -> None:
    """Callbacks of futures that wait for further collectives, as DDP's PowerSGD has them."""
    start(rank, world, rendezvous)

    def summed(n: int) -> torch.futures.Future[list[torch.Tensor]]:
        return dist.all_reduce(torch.ones(n), async_op=True).get_future()

    for n in (1000, 2_000_000):  # the second is more than a ring holds
        early = summed(n)
        chain = summed(n)
        for _ in range(3):
            chain = chain.then(lambda f: [f.value()[0] + early.wait()[0] + summed(n).wait()[0]])  # noqa: B023
        assert chain.wait()[0].eq(7 * world).all()
    finish()


def test_sparse_sums_profiles_and_chains() -> None:
    run(2, sparse_sums, profiles, chains)


def splits(rank: int, world: int, rendezvous: Rendezvous) -> None:
    """Ranks 1 and 3 leave the whole together, then a group of all is made of both halves."""
    start(rank, world, rendezvous)
    limit = datetime.timedelta(seconds=50)
    whole = dist.group.WORLD
    odd = whole.split_group([1, 3], timeout=limit, group_name="odd")
    assert (odd is None) == (rank % 2 == 0)
    half = whole.split_group([0, 1] if rank < 2 else [2, 3], timeout=limit, group_name=f"half {rank // 2}")
    merged = half.merge_remote_group(dist.PrefixStore("merged", dist.distributed_c10d._get_default_store()), world)
    for group, want in ((odd, 4.0), (half, [1.0, 5.0][rank // 2]), (merged, 6.0)):
        if group is not None:
            tensor = torch.full((3,), float(rank))
            group.allreduce(tensor).wait()
            assert tensor.eq(want).all()
    finish()


def test_groups_that_are_split_and_merged() -> None:
    run(4, splits)


@pytest.mark.long
def test_futures_at_the_end_of_python() -> None:
    """New interpreters, each with an end of its own: torn_down.py."""
    for body in (torn_down.at_once, torn_down.after_destroying, torn_down.in_a_handler):
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        mp.spawn(body, (store.port,), nprocs=2)
