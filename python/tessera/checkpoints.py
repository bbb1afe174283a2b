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
from collections.abc import Sequence

import torch

from tessera import _core
from tessera._command import run

__all__ = [
    "export",
    "main",
    "open_checkpoint",
    "state_dict",
    "to_deepspeed",
    "to_universal",
]


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
    folder: str | os.PathLike[str], out: str | os.PathLike[str], tag: str | None = None, *, trusted: bool = False
) -> str:
    """Writes the checkpoint in DeepSpeed's universal layout, which loads at any stage and number of ranks (there with
    checkpoint.load_universal), into `out` under its own tag with "_universal", which is returned. `trusted`: see
    to_deepspeed()."""
    return _core.to_universal(os.fspath(folder), os.fspath(out), tag or "", _objects(trusted))


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
