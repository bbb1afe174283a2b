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

import argparse
import functools
import os
import shutil
import sys
from collections.abc import Callable, Sequence

import torch

from tessera import _core
from tessera._command import run
from tessera._deepspeed import LOOKED_FOR, CheckpointFiles, Source, finish_folder, manifest_of, write_universal
from tessera.errors import ConfigError, IoError

__all__ = [
    "export",
    "main",
    "open_checkpoint",
    "state_dict",
    "to_deepspeed",
    "to_universal",
]


def open_checkpoint(folder: str | os.PathLike[str], tag: str | None = None) -> _core.CheckpointReader:
    """Of `folder`/tag, ours or DeepSpeed's; default: the tag that `latest` names. IoError when there is none, or it is
    damaged. Objects of a client that lie in DeepSpeed's files are skipped, and nothing of them is run."""
    return _open(folder, tag, skip=True)


def _open(
    folder: str | os.PathLike[str], tag: str | None, trusted: bool = False, skip: bool = False
) -> _core.CheckpointReader:
    manifest = functools.partial(_manifest, trusted=trusted, skip=skip)
    return _core.read_checkpoint(os.fspath(folder), tag or "", manifest, LOOKED_FOR)


def _manifest(path: str, trusted: bool = False, skip: bool = False) -> str:
    return manifest_of(path, None, trusted, skip)


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
    objects that are no plain data, as of a client_state, are unpickled to be written, which can run code."""
    source, name = _source(folder, tag, trusted)
    files = CheckpointFiles(source, stage, world_size)

    def write(made: str) -> None:
        for rank in range(world_size):
            files.write(made, rank)

    _put(out, name, write, lambda made: finish_folder(made, os.fspath(out), name, stage, latest=True))
    return name


def to_universal(
    folder: str | os.PathLike[str], out: str | os.PathLike[str], tag: str | None = None, *, trusted: bool = False
) -> str:
    """Writes the checkpoint in DeepSpeed's universal layout, which loads at any stage and number of ranks (there with
    checkpoint.load_universal), into `out` under its own tag with "_universal", which is returned. `trusted`: see
    to_deepspeed()."""
    source, name = _source(folder, tag, trusted)
    name += "_universal"

    def finish(made: str) -> None:
        _core.put_in_place(made, os.path.join(out, name))
        _core.set_latest(os.fspath(out), name, "latest_universal")

    _put(out, name, lambda made: write_universal(source, made), finish)
    return name


def _source(folder: str | os.PathLike[str], tag: str | None, trusted: bool) -> tuple[Source, str]:
    return Source(_open(folder, tag, trusted), trusted), tag or _core.latest_tag(os.fspath(folder))


def _put(out: str | os.PathLike[str], name: str, write: Callable[[str], None], finish: Callable[[str], None]) -> None:
    """Into a folder beside that takes its place when it is complete."""
    made = os.path.join(out, f".{name}.part")
    shutil.rmtree(made, ignore_errors=True)
    try:
        os.makedirs(made)
    except OSError as error:
        raise IoError(f"[checkpoints] cannot make the folder '{made}': {error.strerror or error}") from None
    try:
        write(made)
        finish(made)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def shard_bytes(size: int | str) -> int:
    """5GB is 5 * 10^9, 5GiB is 5 * 2^30, as in Transformers. ConfigError for what is none."""
    return _core.shard_bytes(str(size))


def main(argv: Sequence[str] | None = None) -> int:
    """The commands inspect, export, deepspeed and universal of `tessera`; returns the exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    if not given or given[0] in ("inspect", "export"):
        return run(given, manifest_of=functools.partial(_manifest, skip=True), other_files=LOOKED_FOR)
    parser = argparse.ArgumentParser(prog="tessera", description="Checkpoints as DeepSpeed's.")
    commands = parser.add_subparsers(dest="command", required=True)
    deepspeed = commands.add_parser("deepspeed", help="as DeepSpeed would have written it")
    universal = commands.add_parser("universal", help="in DeepSpeed's universal layout")
    for command in (deepspeed, universal):
        command.add_argument("dir", help="the folder that save_checkpoint() was called with")
        command.add_argument("out")
        command.add_argument("--tag", help="default: what its file `latest` names")
        command.add_argument("--trusted", action="store_true", help="unpickle objects of any kind, which can run code")
    deepspeed.add_argument("--stage", type=int, choices=range(4), required=True)
    deepspeed.add_argument("--world-size", type=int, required=True)
    options = parser.parse_args(given)
    try:
        if options.command == "universal":
            print(to_universal(options.dir, options.out, options.tag, trusted=options.trusted))
        else:
            ranks = options.world_size
            print(to_deepspeed(options.dir, options.out, options.tag, options.stage, ranks, trusted=options.trusted))
    except (ConfigError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
