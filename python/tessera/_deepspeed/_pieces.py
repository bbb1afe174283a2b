"""Where the elements of a tensor lie in files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch

from tessera._blobs import LARGEST
from tessera._deepspeed._pickle import Block, Inert, TensorRef, dense_order
from tessera._deepspeed._pt import PtFile

DTYPE_NAMES = {
    torch.float32: "F32", torch.float64: "F64", torch.float16: "F16", torch.bfloat16: "BF16", torch.bool: "BOOL",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.complex64: "C64", torch.complex128: "C128",
}  # fmt: skip
OWN_STEPS = "tessera_steps"  # of optim-states, beside DeepSpeed's keys: by parameter
# A file of our own beside DeepSpeed's, which it ignores: buffers that ranks have otherwise than rank 0, "NAME@rank=N".
OWN_BUFFERS = "tessera_rank_buffers.pt"
# Keys of a model-states file that are DeepSpeed's own; all others are the client's.
OWN_KEYS = frozenset(
    [
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "shared_params",
        "frozen_param_fragments",
        "lr_scheduler",
        "data_sampler",
        "random_ltd",
        "sparse_tensor_module_names",
        "csr_tensor_module_names",
        "skipped_steps",
        "global_steps",
        "global_samples",
        "dp_world_size",
        "mp_world_size",
        "checkpoint_parallel_dimensions",
        "ds_config",
        "ds_version",
        "universal_checkpoint_info",
        "num_experts",
    ]
)
_MOST_RANKS = 1 << 20
_MOST_PIECES = 1 << 16  # of a tensor whose elements do not lie one after the other


@dataclass
class Piece:
    file: PtFile
    offset: int  # in bytes
    begin: int  # elements of the tensor
    end: int


@dataclass
class Ordered(Piece):
    """Of a tensor whose elements lie in another order of its dims."""

    order: list[int] = field(default_factory=list)


def whole(file: PtFile, ref: TensorRef) -> Iterator[Piece]:
    numel, size = ref.numel(), ref.dtype.itemsize
    if numel == 0:
        return
    order = dense_order(ref)
    if order == list(range(len(ref.shape))):
        yield Piece(file, ref.begin, 0, numel)
    elif order is not None:
        yield Ordered(file, ref.begin, 0, numel, order)
    else:
        # Runs of the last dims that lie one after the other.
        last, run = len(ref.shape), 1
        while last > 0 and (ref.shape[last - 1] == 1 or ref.stride[last - 1] == run):
            last, run = last - 1, run * ref.shape[last - 1]
        if numel // run > _MOST_PIECES:
            file.fail(f"has a tensor of shape {ref.shape} and strides {ref.stride}, in more than {_MOST_PIECES} pieces")
        for number, index in enumerate(product(*(range(n) for n in ref.shape[:last]))):
            at = sum(i * step for i, step in zip(index, ref.stride, strict=False))
            yield Piece(file, ref.begin + at * size, number * run, (number + 1) * run)


def sharded(files: list[PtFile], refs: list[TensorRef], at: int, numel: int) -> list[Piece]:
    """Of a parameter that stage 3 has cut: element `at` of each part is the first one of it."""
    part = -(-numel // len(files))
    pieces = []
    for rank, (file, ref) in enumerate(zip(files, refs, strict=True)):
        low, high = min(rank * part, numel), min((rank + 1) * part, numel)
        if high - low + at > ref.numel() or not ref.is_contiguous():
            file.fail(f"has {ref.numel()} elements where {high - low + at} are needed")
        if low < high:
            pieces.append(Piece(file, ref.begin + at * ref.dtype.itemsize, low, high))
    return pieces


# ---------------------------------------------------------------- small conversions


def shape_of(value: Any) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list)) or not all(type(n) is int and 0 <= n < 1 << 48 for n in value):
        raise ValueError(f"{value!r:.80} is no shape")
    return tuple(value)


def number_of(value: Any, most: int = LARGEST) -> int:
    """A plain number, or one of an enumeration."""
    number = int(value.args[0] if isinstance(value, Inert) else value)
    if not 0 <= number <= most:
        raise ValueError(f"{number!r:.40} is no number that can be")
    return number


def ranks_of(file: PtFile) -> int:
    """How many wrote a model-states file and those beside it."""
    try:
        return number_of(file.value["dp_world_size"], _MOST_RANKS)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        file.fail(f"does not say how many ranks wrote it: {error}")


def some_of(ranks: list[int]) -> str:
    return f"{ranks[:8]}" if len(ranks) <= 8 else f"{ranks[:8]} and {len(ranks) - 8} more"


def ranks_text(world: int) -> str:
    """What a run of ours says of data-parallel ranks (spread_of in engine/logical.h)."""
    return f"{world}: dp_shard {world}" if world > 1 else "1: "


def names_in(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def file_record(name: str, file: PtFile) -> dict[str, Any]:
    def line(block: Block) -> list[int]:
        return [block.begin, block.end, block.checksum]

    return {"name": name, "bytes": file.size, "blocks": [line(block) for block in file.blocks]}
