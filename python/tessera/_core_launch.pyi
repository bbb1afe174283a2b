"""Types of the compiled module, continued: tessera/comm/launch.h. They are in `tessera._core`."""

from __future__ import annotations

from typing import Final

class Launch:
    rank: Final[int]
    size: Final[int]
    local_rank: Final[int]
    local_size: Final[int]
    address: Final[str]
    port: Final[int]

def read_launch(rank: int, size: int, discover: bool, rendezvous: bool, port: int) -> Launch: ...
def launched_local_rank() -> int: ...
def why_not_started_here() -> str: ...
def why_no_host(host: str) -> str: ...
def why_no_logs(folder: str) -> str: ...
def free_port() -> int: ...
