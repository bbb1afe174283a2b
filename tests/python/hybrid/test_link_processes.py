"""A link between processes of one host: memory, and peers that are lost."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import PROCESSES, free_port, run_processes
from tessera.hybrid import Layout, Link

LINK = Link("x", Layout(sequence=2), Layout(replicas=2), 0, 0, timeout=60)


def store_of(rank: int, port: int) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)


def trains(rank: int, port: int, transport: str) -> None:
    """Ranks 0 and 1 send halves of 1000 rows, 2 and 3 have them all. "hosts": 0 and 2 on one, 1 and 3 on another."""
    if transport == "hosts":
        os.environ["TESSERA_HOST_ID"] = f"host {rank % 2}"
    link = Link("x", LINK.source, LINK.target, 0, 0, timeout=60, transport="group" if transport == "group" else "auto")
    store = store_of(rank, port)
    whole = torch.arange(3000.0).view(1000, 3)
    if rank < 2:
        with link.sender(store, rank) as sender:
            x = whole[500 * rank : 500 * (rank + 1)].clone().requires_grad_()
            for sample in range(3):
                sender.send((x * sample, [x + sample]), sample)
            for sample in (2, 0, 1):
                sender.backward(sample)
            assert torch.equal(x.grad, (2 * whole * (0 + 1 + 2 + 3))[500 * rank : 500 * (rank + 1)])
            sender.step()
    else:
        with link.receiver(store, rank - 2) as receiver:
            for sample in range(3):
                a, (b,) = receiver.receive(sample)
                assert torch.equal(a, whole * sample) and torch.equal(b, whole + sample)
                ((a + b) * whole).sum().backward()
                receiver.give_back(sample)
            receiver.step()
    dist.PrefixStore("end", store).add("all", 1)
    while rank == 0 and dist.PrefixStore("end", store).add("all", 0) < 4:
        time.sleep(0.01)  # it has the store


@pytest.mark.parametrize("transport", ["auto", "group", "hosts"])
def test_four_processes(transport):
    run_processes(4, trains, free_port(), transport)


def loses_a_peer(rank: int, port: int, lost: str, folder: str) -> None:
    store = store_of(rank, port)
    link = Link("x", sides=("vision", "text"), timeout=60)
    end = link.receiver(store, 0) if (rank == 0) == (lost == "vision") else link.sender(store, 0)
    if rank == 1:
        if lost == "vision":
            end.send(torch.ones(1 << 20, requires_grad=True) * 1, 0)
        else:
            end.receive(0)
        Path(folder, "new").write_text(str(os.getpid()))
        Path(folder, "new").rename(Path(folder, "ready"))
        time.sleep(60)
        return
    if lost == "vision":
        end.receive(0)
        wait, what = (lambda: end.receive(1)), "sample 1"
    else:
        end.send(torch.ones(5, requires_grad=True) * 1, 0)
        wait, what = (lambda: end.backward(0)), "the gradient of sample 0"
    while not Path(folder, "ready").exists():
        time.sleep(0.01)
    os.kill(int(Path(folder, "ready").read_text()), signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(dist.DistBackendError, match=rf"waits for {what}, but rank 0 of {lost} .* is lost"):
        wait()
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize("lost", ["vision", "text"])
def test_a_killed_peer_is_named_within_seconds(lost, tmp_path):
    port = free_port()
    processes = [PROCESSES.Process(target=loses_a_peer, args=(rank, port, lost, str(tmp_path))) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, -signal.SIGKILL]
