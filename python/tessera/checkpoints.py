"""Checkpoints on the disk, without an engine: what they hold, whether they are whole, their weights for other tools.

    python -m tessera.checkpoints inspect DIR [--tag TAG] [--verify]
    python -m tessera.checkpoints export DIR OUT [--tag TAG] [--dtype fp32] [--max-shard-size 5GB] [--exclude-frozen]
                                                 [--format safetensors]
    python -m tessera.checkpoints deepspeed DIR OUT [--tag TAG] [--trusted] --stage 2 --world-size 8
    python -m tessera.checkpoints universal DIR OUT [--tag TAG] [--trusted]

`DIR` is the folder that save_checkpoint() was called with; its checkpoints may be DeepSpeed's, universal ones too. Also
installed as the command `tessera`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence

import torch

from tessera import _core
from tessera._command import run

__all__ = [
    "WeightReader",
    "export",
    "main",
    "open_checkpoint",
    "state_dict",
    "tags",
    "to_deepspeed",
    "to_universal",
    "write_weights",
]

_ALL_IN_ONE = 2**63 - 1


def tags(folder: str | os.PathLike[str]) -> list[str]:
    """Tags of the complete checkpoints of Tessera in `folder`, the newest first; none where there is no such folder."""
    return _core.tags(os.fspath(folder))


def open_checkpoint(folder: str | os.PathLike[str], tag: str | None = None) -> _core.CheckpointReader:
    """Opens `folder`/tag, ours or DeepSpeed's; default: the tag that `latest` names. IoError when there is none, or it
    is damaged. Objects of a client that lie in DeepSpeed's files are skipped, and nothing of them is run."""
    return _core.read_checkpoint(os.fspath(folder), tag or "")


def state_dict(
    folder: str | os.PathLike[str],
    tag: str | None = None,
    dtype: torch.dtype | None = torch.float32,
    exclude_frozen: bool = False,
) -> dict[str, torch.Tensor]:
    """All parameters and buffers, as module.load_state_dict() takes them. Floating parameters in `dtype`; None: in what
    the module computed in. Tied names share one tensor."""
    reader = open_checkpoint(folder, tag)
    state: dict[str, torch.Tensor] = {}
    for tensor in _core.list_export(reader, dtype, not exclude_frozen):
        state.update(dict.fromkeys(tensor.names, _core.read_export(reader, tensor)))
    return state


def export(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    tag: str | None = None,
    dtype: torch.dtype | None = torch.float32,
    max_shard_size: int | str = "5GB",
    exclude_frozen: bool = False,
    safetensors: bool = True,
) -> list[str]:
    """Writes model.safetensors (or pytorch_model.bin), or several files and the index that Transformers'
    from_pretrained reads. At most one file's tensors are in memory. Returns the names of the files."""
    reader = open_checkpoint(folder, tag)
    name = "model.safetensors" if safetensors else "pytorch_model.bin"
    return _core.export_checkpoint(reader, os.fspath(out), name, dtype, shard_bytes(max_shard_size), not exclude_frozen)


class WeightReader:
    """Safetensors in one file or in several, read whole or by slices; nothing else of a file is read. `path`: a file,
    an index ("model.safetensors.index.json") of files beside it, a folder, or several files. IoError for what is
    missing or damaged. Holds the files open; any number of threads may read."""

    def __init__(self, path: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> None:
        if isinstance(path, (str, os.PathLike)):
            self._reader = _core.WeightReader(os.fspath(path))
        else:
            self._reader = _core.WeightReader([os.fspath(file) for file in path])

    def tensors(self) -> dict[str, tuple[torch.dtype | str, list[int]]]:
        """Dtype and shape of each by name, also by the other names of tied ones. Of a dtype that torch does not have it
        is the format's word ("F6_E3M2"), and read() of that tensor is an IoError."""
        return {name: (one.dtype, one.shape) for one in self._reader.tensors() for name in one.names}

    def metadata(self) -> dict[str, str]:
        """Texts of the files."""
        return self._reader.metadata()

    def read(self, name: str, dim: int = 0, ranges: Sequence[tuple[int, int]] | None = None) -> torch.Tensor:
        """The tensor, in its dtype, on the CPU; with `ranges` only these [begin, end) along `dim`. ConfigError for a
        name or a range that is not there."""
        return self._reader.read(name) if ranges is None else self._reader.read(name, dim, ranges)


def write_weights(
    folder: str | os.PathLike[str],
    name: str,
    tensors: Mapping[str, torch.Tensor],
    max_shard_size: int | str | None = None,
    metadata: Mapping[str, str] | None = None,
) -> list[str]:
    """Writes `folder`/`name`, ".safetensors" or ".bin" for torch.load(), or several files and the index that
    Transformers reads: all or nothing. Names of one tensor (tied weights) have its values once. Returns the names of
    the files."""
    size = _ALL_IN_ONE if max_shard_size is None else shard_bytes(max_shard_size)
    pairs = [(key, value.detach()) for key, value in tensors.items()]
    return _core.write_weights(os.fspath(folder), name, pairs, size, dict(metadata or {}))


def to_deepspeed(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    tag: str | None = None,
    stage: int = 2,
    world_size: int = 1,
    *,
    trusted: bool = False,
) -> str:
    """Writes the checkpoint as DeepSpeed 0.19.8 would have at that ZeRO stage on `world_size` ranks, into `out` under
    its own tag, which is returned. The run that loads it there must have that stage and number of ranks. `trusted`:
    objects that are no plain data, as of a client_state, are written as they came; nothing of them is run here."""
    return _core.to_deepspeed(os.fspath(folder), os.fspath(out), tag or "", stage, world_size, _objects(trusted))


def to_universal(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    tag: str | None = None,
    *,
    trusted: bool = False,
    name: str | None = None,
) -> str:
    """Writes the checkpoint in DeepSpeed's universal layout, which loads at any stage and number of ranks (there with
    checkpoint.load_universal), into `out` under the tag `name` (default: its own with "_universal"), which is returned.
    `trusted`: see to_deepspeed()."""
    return _core.to_universal(os.fspath(folder), os.fspath(out), tag or "", _objects(trusted), name or "")


def _objects(trusted: bool) -> _core.Objects:
    return _core.Objects.Kept if trusted else _core.Objects.Refused


def shard_bytes(size: int | str) -> int:
    """5GB is 5 * 10^9, 5GiB is 5 * 2^30, as in Transformers. ConfigError for what is none."""
    return _core.shard_bytes(str(size))


def main(argv: Sequence[str] | None = None) -> int:
    """The commands inspect, export, deepspeed and universal of `tessera`; returns the exit code."""
    return run(sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
