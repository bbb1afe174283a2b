"""What programs for Gloo also use of a process group: callbacks that wait."""

from __future__ import annotations

import torch
import torch.distributed as dist
from test_transport import Meeting, finish, run, start


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


def test_chains() -> None:
    run(2, chains)
