"""Types of the compiled module, continued: tessera/parallel. At run time these names are in `tessera._core` only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import NoReturn

import torch

from tessera._core import Axis, Config, Group

class TileReduction(Enum):
    Mean = ...
    Sum = ...

def tiled(
    f: Callable[[list[torch.Tensor]], torch.Tensor],
    tensors: Sequence[torch.Tensor],
    cut: Sequence[bool],
    count: int,
    names: Sequence[str],
    join: int,
    reduction: TileReduction | None,
    valid: torch.Tensor | None,
) -> torch.Tensor: ...
def tiled_mlp(layer: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, tiles: int) -> torch.Tensor: ...
def tiled_loss(
    loss: Callable[[list[torch.Tensor]], torch.Tensor],
    x: torch.Tensor,
    labels: torch.Tensor,
    mask: torch.Tensor | None,
    tiles: int,
    reduction: TileReduction,
) -> torch.Tensor: ...
def cut_batch(batch: dict[str, torch.Tensor], ranks: int, others: list[str]) -> list[dict[str, torch.Tensor]]: ...
def check_dense(tensors: list[torch.Tensor]) -> None: ...
def part_sizes(total: int, parts: int, heads: int = ..., grain: int = ...) -> list[int]: ...
def heads_for(name: str, total: int, kv_heads: int) -> int: ...

class PackedShape: ...

# Cuts: sizes of the whole, the dim, and which ranges of it.
def take_slice(whole: torch.Tensor, cut: tuple[Sequence[int], int, Sequence[tuple[int, int]]]) -> torch.Tensor: ...
def join_slices(
    slice: torch.Tensor, cut: tuple[Sequence[int], int, Sequence[tuple[int, int]]], group: Group, label: str
) -> torch.Tensor: ...
def copy_to_ranks(x: torch.Tensor, group: Group, label: str = ...) -> torch.Tensor: ...
def reduce_from_ranks(x: torch.Tensor, group: Group, label: str = ...) -> torch.Tensor: ...
def gather_from_ranks(
    x: torch.Tensor, group: Group, dim: int, sizes: Sequence[int] = ..., label: str = ...
) -> torch.Tensor: ...
def split_to_ranks(
    x: torch.Tensor, group: Group, dim: int, sizes: Sequence[int] = ..., label: str = ...
) -> torch.Tensor: ...
def gather_for_use(
    x: torch.Tensor, group: Group, dim: int, sizes: Sequence[int] = ..., label: str = ...
) -> torch.Tensor: ...
def scatter_sum(
    x: torch.Tensor, group: Group, dim: int, sizes: Sequence[int] = ..., label: str = ...
) -> torch.Tensor: ...
def exchange(
    tensors: Sequence[torch.Tensor],
    group: Group,
    scatter_dim: int,
    gather_dim: int,
    scatter_sizes: Sequence[Sequence[int]] = ...,
    gather_sizes: Sequence[int] = ...,
    label: str = ...,
) -> list[torch.Tensor]: ...

class Entrance:
    def __init__(self, uses: int) -> None: ...
    def open(self, x: torch.Tensor, region: Region) -> torch.Tensor: ...

class Region:
    group: Group
    sequence_dim: int
    sequence_sizes: list[int]
    overlap: bool
    label: str
    keep_gathered: bool
    entrance: Entrance | None
    def __init__(
        self,
        group: Group,
        sequence_dim: int = ...,
        sequence_sizes: Sequence[int] = ...,
        overlap: bool = ...,
        label: str = ...,
        keep_gathered: bool = ...,
        entrance: Entrance | None = ...,
    ) -> None: ...

def column_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, region: Region) -> torch.Tensor: ...
def row_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, region: Region) -> torch.Tensor: ...
def join_outputs(
    own: torch.Tensor, group: Group, gather: bool, sizes: Sequence[int], tail: Sequence[int], label: str
) -> torch.Tensor: ...
def own_inputs(
    x: torch.Tensor, group: Group, total: int, ranges: Sequence[tuple[int, int]], label: str
) -> torch.Tensor: ...
def share_outputs(out: torch.Tensor, group: Group, own_use: tuple[int, int], label: str) -> torch.Tensor: ...

class RegionParam:
    def __init__(self, name: str, param: torch.Tensor, settled: bool = ..., layer: str = ...) -> None: ...

def whole_inside(path: str, x: torch.Tensor, params: Sequence[RegionParam], lists: Sequence[str]) -> list[int]: ...
def refuse_weight_alone(path: str) -> NoReturn: ...
def vocab_embedding(
    indices: torch.Tensor, weight: torch.Tensor, begin: int, vocabulary: int, padding_idx: int, region: Region
) -> torch.Tensor: ...
def vocab_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    begin: int,
    vocabulary: int,
    group: Group,
    ignore_index: int = ...,
    give_away: bool = ...,
) -> torch.Tensor: ...
def sequence_cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, group: Group, ignore_index: int = ..., sizes: Sequence[int] = ...
) -> torch.Tensor: ...
def mean_over_sequence(
    loss: torch.Tensor, labels: torch.Tensor, group: Group, ignore_index: int = ...
) -> torch.Tensor: ...

class SequenceCut:
    def __init__(
        self, group: Group, sequence_dim: int = ..., lengths: Sequence[int] = ..., parts: int = ...
    ) -> None: ...

class Heads:
    queries: list[int]
    keys: list[int]
    repeat: int

def check_parts(parts: int, label: str) -> None: ...
def deal_heads(queries: int, keys: int, ranks: int, label: str = "parallel") -> Heads: ...

class HeadParts:
    def __init__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cut: SequenceCut) -> None: ...
    def __len__(self) -> int: ...
    def take(self, part: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Heads]: ...
    def give(self, part: int, result: torch.Tensor) -> None: ...
    def join(self) -> torch.Tensor: ...

class BlockStack:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocabulary: int
    gated: bool
    bias: bool

class Training:
    ranks: dict[Axis, int]
    stage: int
    batch: int
    length: int
    micro_batches: int
    activation_bytes: int
    parameter_bytes: int
    gradient_bytes: int
    sequence_regions: bool
    whole_ends: bool
    keep_gathered: bool
    shared_inputs: bool
    vocab_parallel: bool
    recompute: bool

class Traffic:
    calls: int
    bytes: int

class Cost:
    axes: dict[str, dict[str, Traffic]]
    parameters: int
    def bytes(self, axis: str) -> int: ...
    def text(self) -> str: ...

def parallel_cost(model: BlockStack, training: Training) -> Cost: ...

class ModuleKind(Enum):
    Other = ...
    Linear = ...
    Conv1D = ...
    Embedding = ...
    Norm = ...
    Experts = ...
    List = ...

class Partition(Enum):
    Column = ...
    Row = ...
    Skip = ...

class PlanModule:
    def __init__(
        self,
        path: str,
        class_name: str,
        kind: ModuleKind,
        weight_sizes: Sequence[int] = ...,
        bias: int = ...,
        weight_identity: int = ...,
        param: str = ...,
        attributes: dict[str, int] = ...,
        params: int = ...,
    ) -> None: ...

class ModelFacts:
    model_type: str
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocabulary: int
    parts: dict[str, ModelFacts]

class PartitionRule:
    matches: Callable[[str], bool]
    pattern: str
    source: str
    partition: Partition
    shape: PackedShape | None
    model_types: list[str]
    gather_output: bool
    sum_gradient: bool

class PlanOptions:
    size: int
    rules: list[PartitionRule]
    strict: bool
    grain: int
    expert_grain: int
    embedding_dim: int
    head_names: list[str]
    vocab_parallel: bool

class Decision:
    path: str
    param: str
    partition: Partition
    dim: int
    total: int
    ranges: list[list[tuple[int, int]]]
    sizes: list[int]
    gather_output: bool
    sum_gradient: bool
    own_use: tuple[int, int] | None
    tail: list[int]
    vocabulary: bool
    rule: str

class ParallelPlan:
    size: int
    decisions: list[Decision]
    whole: list[str]
    warnings: list[str]
    widths: dict[str, dict[str, list[int]]]
    def text(self) -> str: ...

class SequenceRegions:
    first: str
    last: str
    inner: list[str]
    norms: list[str]
    mixed: list[str]
    sums: list[str]
    whole: list[str]
    def summed(self) -> list[str]: ...
    def text(self) -> str: ...

def find_sequence_regions(
    modules: Sequence[PlanModule], decisions: Sequence[Decision], model_type: str, router_loss: bool, jitter: set[str]
) -> SequenceRegions: ...

NO_SEQUENCE_REGIONS: str

def stays_whole(x: torch.Tensor, ranks: int, path: str) -> bool: ...

Matcher = Callable[[str], Callable[[str], bool]]

def check_matrix(path: str, dims: int, rule: str) -> None: ...
def check_bias(path: str, bias: torch.Tensor, outputs: int) -> None: ...
def check_same_ranks(rank: int, size: int, group: Group) -> None: ...
def make_plan(modules: Sequence[PlanModule], facts: ModelFacts, options: PlanOptions) -> ParallelPlan: ...
def left_whole(rules: Sequence[PartitionRule], names: Sequence[str]) -> tuple[list[str], list[str]]: ...

class PartitionRules:
    rules: list[PartitionRule]
    source: str

def partition_rules(
    config: Config, facts: ModelFacts, size: int, matcher: Callable[[str, str], Callable[[str], bool]]
) -> PartitionRules | None: ...
def plan_options(config: Config, size: int, rules: PartitionRules) -> PlanOptions: ...
def overlaps_tensor_parallel(config: Config) -> bool: ...
def width_names() -> list[str]: ...
def preset_names() -> list[str]: ...
def preset_rules(name: str, facts: ModelFacts, matcher: Matcher) -> list[PartitionRule]: ...
