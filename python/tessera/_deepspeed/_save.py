"""An engine's checkpoint in DeepSpeed's files: saved as ours into a folder beside first, then every rank writes its
part of the others from there, and the new folder takes its place in one step."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable

from tessera import _core
from tessera._deepspeed._write import SCRIPT, Layout, Source

_BESIDE = ".tessera-saving"  # in the folder of the checkpoints; removed at the end and by the next save
_MODEL_STATES = "_model_states.pt"


def save_as_deepspeed(
    core: _core.Engine,
    save_dir: str,
    save_ours: Callable[[str], str],
    stage: int,
    world: int,
    latest: bool,
    keep_last: int,
) -> str:
    """`save_ours` saves into a folder and returns the tag. Collective; an error of one rank is one on all, and what was
    there before is as it was. Returns the tag."""
    place = _core.checkpoint_place(core)
    beside = os.path.join(save_dir, _BESIDE)

    def together(work: Callable[[], None]) -> int:
        """Runs it on all ranks; their number."""
        error = ""
        try:
            work()
        except Exception as raised:
            error = str(raised) or type(raised).__name__
        return len(_core.checkpoint_exchange(core, "", error))

    def remove() -> None:
        if place == 0:
            shutil.rmtree(beside, ignore_errors=True)

    ranks = together(remove)
    try:
        tag = save_ours(beside)
        made = os.path.join(beside, "deepspeed")

        def write() -> None:
            layout = Layout(
                Source(_core.CheckpointReader(os.path.join(beside, tag)), trusted=True), stage, world
            )  # our own
            os.makedirs(made, exist_ok=True)
            for rank in range(place, world, ranks):
                layout.write(made, rank)

        def finish() -> None:
            if place == 0:
                finish_folder(made, save_dir, tag, stage, latest, keep_last)

        together(write)
        together(finish)
    finally:
        remove()
    return tag


def finish_folder(made: str, save_dir: str, tag: str, stage: int, latest: bool, keep_last: int = 0) -> None:
    """Puts the complete folder `made` into save_dir/tag, and beside it what belongs there."""
    _core.check_tag(tag)
    _core.put_in_place(made, os.path.join(save_dir, tag))
    if stage > 0:
        script = os.path.join(save_dir, "zero_to_fp32.py")
        with open(script + ".part", "w") as file:
            file.write(SCRIPT)
        os.chmod(script + ".part", 0o755)
        os.replace(script + ".part", script)
    if latest:
        _core.set_latest(save_dir, tag)
    if keep_last > 0:
        others = [
            entry.path for entry in os.scandir(save_dir) if entry.is_dir() and entry.name != tag and _is_one(entry.path)
        ]
        others.sort(key=os.path.getmtime, reverse=True)
        for folder in others[keep_last - 1 :]:
            shutil.rmtree(folder, ignore_errors=True)


def _is_one(folder: str) -> bool:
    return any(name.endswith(_MODEL_STATES) for name in os.listdir(folder))
