"""Stub of python/src/commands.cpp: part of _core."""

from collections.abc import Callable, Sequence
from typing import Final, overload

from tessera._core import Config, ParallelPlan

class ModelSizes: ...

class Estimate:
    stage: Final[int]
    params: Final[int]
    grads: Final[int]
    states: Final[int]
    gathered: Final[int]
    host: Final[int]
    disk: Final[int]
    total: Final[int]

@overload
def sizes_of(count: int, config: Config) -> ModelSizes: ...
@overload
def sizes_of(params: Sequence[tuple[str, str, int, bool]], plan: ParallelPlan | None) -> ModelSizes: ...
def estimate(sizes: ModelSizes, config: Config, ranks: int) -> Estimate: ...
def with_stage(config: Config, stage: int) -> Config: ...
def json_of(given: str) -> str: ...
def config_of(given: str) -> Config: ...
def shard_bytes(size: str) -> int: ...
def command_names() -> list[tuple[str, str]]: ...
def run_command(
    arguments: Sequence[str],
    sizes_of: Callable[[str, Config], ModelSizes],
    facts: Sequence[tuple[str, str]],
) -> tuple[int, str, str]: ...
