"""An engine's checkpoint in DeepSpeed's files: saved as ours into a folder beside first, then every rank writes its
part of the others from there, and the new folder takes its place in one step."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Callable

from tessera import _core
from tessera._deepspeed._write import SCRIPT, CheckpointFiles, Source
from tessera.errors import IoError

# In the folder of the checkpoints: a folder for every save that is on its way, and a file beside it whose lock its
# first rank holds. Removed at the end, and by the next save where nobody holds the lock.
_BESIDE = ".tessera-saving"
_MARK = ".saving"
_ATTEMPTS = 10
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
    if keep_last < 0:
        raise ValueError(f"[checkpoint] keep_last is a number of checkpoints, or 0 for all, not {keep_last}")
    place = _core.checkpoint_place(core)
    beside = os.path.join(save_dir, _BESIDE, _core.checkpoint_exchange(core, uuid.uuid4().hex, "")[0])
    mark: list[_core.FileLock] = []

    def together(work: Callable[[], None]) -> int:
        """Runs it on all ranks; their number."""
        error = ""
        try:
            work()
        except Exception as raised:
            error = str(raised) or type(raised).__name__
        return len(_core.checkpoint_exchange(core, "", error))

    def begin() -> None:
        if place == 0:
            _remove_left(os.path.dirname(beside))
            mark.append(_take(beside + _MARK))

    def end() -> None:
        if mark:
            shutil.rmtree(beside, ignore_errors=True)
            mark.pop().remove()
            _remove_left(os.path.dirname(beside))

    ranks = together(begin)
    try:
        tag = save_ours(beside)
        made = os.path.join(beside, "deepspeed")

        def write() -> None:
            files = CheckpointFiles(Source(_core.read_checkpoint(beside, tag), trusted=True), stage, world)  # our own
            os.makedirs(made, exist_ok=True)
            for rank in range(place, world, ranks):
                files.write(made, rank)

        def finish() -> None:
            if place == 0:
                finish_folder(made, save_dir, tag, stage, latest, keep_last)

        together(write)
        together(finish)
    finally:
        end()
    return tag


def _take(path: str) -> _core.FileLock:
    for attempt in range(_ATTEMPTS):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        try:
            return _core.FileLock.wait(path)
        except IoError:
            if attempt == _ATTEMPTS - 1:
                raise  # before that: another save has just found the folder empty and removed it
    raise AssertionError


def _remove_left(folder: str) -> None:
    """What saves that were cut off have left in it, and the folder when it is empty then."""
    names = []
    with contextlib.suppress(OSError):
        names = os.listdir(folder)
    for path in {os.path.join(folder, name.removesuffix(_MARK)) for name in names}:
        lock = _core.FileLock.take_left(path + _MARK)
        if lock is None and os.path.exists(path + _MARK):
            continue
        shutil.rmtree(path, ignore_errors=True)
        if lock is not None:
            lock.remove()
    with contextlib.suppress(OSError):
        os.rmdir(folder)


def put_script(save_dir: str, part: str) -> None:
    """zero_to_fp32.py, by way of the file `part` on the same file system."""
    with open(part, "w") as file:
        file.write(SCRIPT)
    os.chmod(part, 0o755)
    os.replace(part, os.path.join(save_dir, "zero_to_fp32.py"))


def finish_folder(made: str, save_dir: str, tag: str, stage: int, latest: bool, keep_last: int = 0) -> None:
    """Puts the complete folder `made` into save_dir/tag, and beside it what belongs there."""
    _core.check_tag(tag)
    _core.put_in_place(made, os.path.join(save_dir, tag))
    if stage > 0:
        put_script(save_dir, made + ".py")
    if latest:
        _core.set_latest(save_dir, tag)
    if keep_last > 0:
        others = [
            entry.path for entry in os.scandir(save_dir) if entry.is_dir() and entry.name != tag and _is_one(entry.path)
        ]
        others.sort(key=os.path.getmtime, reverse=True)
        named = _core.latest_tag(save_dir)
        for folder in others[keep_last - 1 :]:
            if os.path.basename(folder) != named:
                shutil.rmtree(folder, ignore_errors=True)


def _is_one(folder: str) -> bool:
    return any(name.endswith(_MODEL_STATES) for name in os.listdir(folder))
