"""Checkpoints on the disk, without an engine: what they hold, whether they are whole, their weights for other tools.

    python -m tessera.checkpoints inspect DIR [--tag TAG] [--verify]
    python -m tessera.checkpoints export DIR OUT [--tag TAG] [--dtype fp32] [--max-shard-size 5GB] [--exclude-frozen]
                                                 [--format safetensors]

`DIR` is the folder that save_checkpoint() was called with. Also installed as the command `tessera`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence

import torch

from tessera import _core
from tessera.errors import ConfigError, IoError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "saved": None}
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def open_checkpoint(folder: str | os.PathLike[str], tag: str | None = None) -> _core.CheckpointReader:
    """Of `folder`/tag; default: the tag that `latest` names. IoError when there is none, or it is damaged."""
    folder = os.fspath(folder)
    tag = tag or _core.latest_tag(folder)
    if not tag:
        raise IoError(f"[checkpoints] there is no file 'latest' in '{folder}'; name a tag")
    return _core.CheckpointReader(os.path.join(folder, tag))


def state_dict(
    folder: str | os.PathLike[str],
    tag: str | None = None,
    dtype: torch.dtype | None = torch.float32,
    exclude_frozen: bool = False,
) -> dict[str, torch.Tensor]:
    """All parameters and buffers, as module.load_state_dict() takes them. Floating parameters in `dtype`; None: in what
    the module computed in. Tied names share one tensor."""
    state: dict[str, torch.Tensor] = {}

    def take(names: list[str], value: torch.Tensor) -> None:
        state.update(dict.fromkeys(names, value))

    _core.each_weight(open_checkpoint(folder, tag), dtype, not exclude_frozen, take)
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


def shard_bytes(size: int | str) -> int:
    """5GB is 5 * 10^9, 5GiB is 5 * 2^30, as in Transformers."""
    match = re.fullmatch(r"\s*(\d+)\s*([KMG]?I?B?)\s*", str(size).upper())
    if match is None or match[2] not in _UNITS or int(match[1]) == 0:
        raise ConfigError(f"[checkpoints] max_shard_size must be like 500MB, 5GB or 4GiB, got {size!r}")
    return int(match[1]) * _UNITS[match[2]]


def describe(reader: _core.CheckpointReader) -> str:
    """What a checkpoint holds, for people."""
    run = json.loads(reader.run())
    params = reader.params()
    kinds: dict[str, list[int]] = {}
    for _, kind, shape, dtype in reader.tensors():
        numel = int(torch.Size(shape).numel())
        total = kinds.setdefault(f"{kind} ({str(dtype).removeprefix('torch.')})", [0, 0, 0])
        total[0] += 1
        total[1] += numel
        total[2] += numel * dtype.itemsize
    lines = [f"{key}: {value}" for key, value in run["counters"].items()]
    lines.append(f"parameters: {len(params)}, of them {sum(p.trained for p in params)} trained")
    for kind, (count, numel, size) in kinds.items():
        lines.append(f"  {kind:28} {count:6} tensors {numel:15,} elements {size / 1e6:12,.1f} MB")
    lines.append(f"files: {len(reader.files())}, {sum(size for _, size in reader.files()) / 1e6:,.1f} MB")
    lines.append(f"also: {', '.join(reader.blobs()) or 'nothing'}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tessera", description="Checkpoints of Tessera.")
    commands = parser.add_subparsers(dest="command", required=True)
    inspect = commands.add_parser("inspect", help="what a checkpoint holds")
    exporter = commands.add_parser("export", help="weights for other tools")
    for command in (inspect, exporter):
        command.add_argument("dir", help="the folder that save_checkpoint() was called with")
        command.add_argument("--tag", help="default: what its file `latest` names")
    inspect.add_argument("--verify", action="store_true", help="read every byte and compare checksums")
    exporter.add_argument("out")
    exporter.add_argument("--dtype", choices=DTYPES, default="fp32")
    exporter.add_argument("--max-shard-size", default="5GB")
    exporter.add_argument("--exclude-frozen", action="store_true")
    exporter.add_argument("--format", choices=("safetensors", "bin"), default="safetensors")
    arguments = parser.parse_args(argv)
    try:
        return _run(arguments)
    except (ConfigError, IoError) as error:
        print(error, file=sys.stderr)
        return 1


def _run(arguments: argparse.Namespace) -> int:
    if arguments.command == "inspect":
        reader = open_checkpoint(arguments.dir, arguments.tag)
        print(describe(reader))
        if arguments.verify:
            reader.verify()
            print("every byte is as it was written")
        return 0
    names = export(
        arguments.dir,
        arguments.out,
        arguments.tag,
        DTYPES[arguments.dtype],
        arguments.max_shard_size,
        arguments.exclude_frozen,
        arguments.format == "safetensors",
    )
    print("\n".join(names))
    return 0


if __name__ == "__main__":
    sys.exit(main())
