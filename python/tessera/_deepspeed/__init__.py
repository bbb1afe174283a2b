"""Checkpoints in DeepSpeed's layouts, read in place and written, without DeepSpeed. See docs/checkpoints.md."""

from __future__ import annotations

from tessera._deepspeed._pieces import OWN_KEYS
from tessera._deepspeed._read import LOOKED_FOR, Hints, manifest_of
from tessera._deepspeed._save import finish_folder, put_script, save_as_deepspeed
from tessera._deepspeed._write import CheckpointFiles, Source, write_universal

__all__ = [
    "LOOKED_FOR",
    "OWN_KEYS",
    "CheckpointFiles",
    "Hints",
    "Source",
    "finish_folder",
    "manifest_of",
    "put_script",
    "save_as_deepspeed",
    "write_universal",
]
