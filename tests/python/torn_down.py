"""Ranks whose last collective is in flight when Python ends. Imports little: each is a new interpreter."""

from __future__ import annotations

import atexit
import sys
import time

import torch
import torch.distributed as dist

import tessera


def start(rank: int, port: int) -> None:
    tessera.distributed.register_backend()
    dist.init_process_group("tessera", store=dist.TCPStore("127.0.0.1", port, is_master=False), rank=rank, world_size=2)
    dist.barrier()


def last_future() -> None:
    """A thread lets go of the tensor while this one holds the interpreter's lock, as it will until Python's end."""
    sys.setswitchinterval(1000.0)
    dist.all_reduce(torch.ones(4), async_op=True).get_future()
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        pass


def at_once(rank: int, port: int) -> None:
    start(rank, port)
    last_future()


def after_destroying(rank: int, port: int) -> None:
    at_once(rank, port)
    dist.destroy_process_group()


def in_a_handler(rank: int, port: int) -> None:
    atexit.register(last_future)
    start(rank, port)
