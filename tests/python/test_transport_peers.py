"""What programs for Gloo also use of a process group: callbacks that wait, profiles."""

from __future__ import annotations

import torch
import torch.distributed as dist
from test_transport import Meeting, finish, run, start


def profiles(rank: int, world: int, meeting: Meeting) -> None:
    start(rank, world, meeting)
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


def chains(rank: int, world: int, meeting: Meeting) -> None:
    """Callbacks of futures that wait for further collectives, as DDP's PowerSGD has them."""
    start(rank, world, meeting)

    def summed(n: int) -> torch.futures.Future[list[torch.Tensor]]:
        return dist.all_reduce(torch.ones(n), async_op=True).get_future()

    for n in (1000, 2_000_000):  # the second is more than a ring holds
        early = summed(n)
        chain = summed(n)
        for _ in range(3):
            chain = chain.then(lambda f: [f.value()[0] + early.wait()[0] + summed(n).wait()[0]])  # noqa: B023
        assert chain.wait()[0].eq(7 * world).all()
    finish()


def test_profiles_and_chains() -> None:
    run(2, profiles, chains)
