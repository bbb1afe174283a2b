"""Several actor groups that train together: started, stepped, saved and restored as one."""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
import socket
import uuid
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from tessera import _core
from tessera.errors import ConfigError, IoError, UsageError
from tessera.hybrid._actors import ActorGroup, Pending, Rendezvous, import_ray, start_together, wait
from tessera.hybrid._joining import C10D

_MANIFEST = "program.json"
_PARTS = "parts-"  # the folder of one save, which the manifest names


class Program:
    """The driver of actor groups, each of whose objects has an `engine`.

    `folder`: where save() puts checkpoints; all hosts must see it. Use it as a context manager, or call stop().
    """

    def __init__(self, groups: Sequence[ActorGroup], folder: str | os.PathLike[str] | None = None) -> None:
        self._groups = {group.name: group for group in groups}
        if len(self._groups) != len(groups):
            raise ConfigError(f"[hybrid] groups of a program need names of their own, got {[g.name for g in groups]}")
        self._folder = None if folder is None else Path(folder)
        self._store: Any = None

    def __enter__(self) -> Program:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Starts all groups, at the same address for their links."""
        ray = import_ray()
        if not ray.is_initialized():
            raise UsageError("[hybrid] there is no Ray cluster yet; call ray.init() first")
        address = ray.util.get_node_ip_address()
        if self._store is None:
            self._store = _serve(address)
        # Keys that ranks of an earlier start have left in the store are not for these: they lack this name.
        rendezvous = Rendezvous(address, self._store.port, f"tessera-{secrets.token_hex(16)}")
        start_together(list(self._groups.values()), rendezvous)

    def stop(self) -> None:
        """Ends all actors. Safe to call twice."""
        for group in self._groups.values():
            group.stop()

    def group(self, name: str) -> ActorGroup:
        """The group of that name; KeyError without one."""
        return self._groups[name]

    def run(self, method: str, *args: object, **kwargs: Any) -> dict[str, list[Any]]:
        """Calls a method of all ranks of all groups at the same time; results by group, in the order of ranks.
        ActorError, with name and traceback, when one fails or dies; then restore() or stop()."""
        calls = [group.begin(method, *args, **kwargs) for group in self._groups.values()]
        return dict(zip(self._groups, wait(*calls), strict=True))

    def step(self, method: str, *args: object, **kwargs: Any) -> dict[str, list[Any]]:
        """Makes one optimizer step: run() of a method that does the forwards and backwards of all micro-batches, with
        engine.step() after each but the last; then all engines step with the gradient norm of all of them, so that
        they clip by one factor and skip together. Returns what the method did."""
        results = self.run(method, *args, **kwargs)
        parts = self.run("engine.norm_contribution")
        self.run("engine.step", global_norm=math.sqrt(sum(part for ranks in parts.values() for part in ranks)))
        return results

    # ---------------------------------------------------------------- checkpoints

    def save(self, tag: str, state: object = None) -> Path:
        """Saves all engines below folder/tag, each as engine.save_checkpoint() into a folder with its group's name, and
        `state` (plain JSON). What the tag names, and folder/latest, changes when all are complete; until then an
        earlier save of the tag stays whole, and is removed after. Returns folder/tag."""
        _core.check_tag(tag)
        folder = self._whole_folder("save") / tag
        for group in self._groups.values():
            group.check_runs()
        json.dumps(state)  # a state that is none is an error before anything is written
        parts = f"{_PARTS}{uuid.uuid4().hex[:16]}"
        wait(*self._begin_each("engine.save_checkpoint", folder / parts))
        ranks = {name: group.ranks for name, group in self._groups.items()}
        manifest = json.dumps({"groups": ranks, "parts": parts, "state": state}, indent=1)
        _core.replace_text(str(folder / _MANIFEST), manifest)  # what the file replaces is removed next
        _core.set_latest(str(folder.parent), tag)
        for other in folder.iterdir():
            if other.is_dir() and other.name != parts and (other.name in self._groups or other.name.startswith(_PARTS)):
                shutil.rmtree(other, ignore_errors=True)  # of an earlier save, or of one that failed
        return folder

    def load(self, tag: str | None = None) -> Any:
        """Loads what save() saved (None: what folder/latest names) into all engines, which may have other numbers of
        ranks by now. Returns its state."""
        root = self._whole_folder("load")
        if tag is not None:
            _core.check_tag(tag)
        folder = root / (tag or _core.latest_tag(str(root)))
        try:
            manifest = json.loads((folder / _MANIFEST).read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise IoError(f"[hybrid] there is no complete checkpoint to load in {root}: {error}") from None
        if not _is_manifest(manifest):
            raise IoError(f"[hybrid] {folder / _MANIFEST} is damaged: it is no manifest of a program's checkpoint")
        if manifest["groups"].keys() != self._groups.keys():
            raise ConfigError(
                f"[hybrid] {folder} is of the groups {list(manifest['groups'])}, the program has {list(self._groups)}"
            )
        # Earlier versions wrote the groups' folders next to the manifest.
        wait(*self._begin_each("engine.load_checkpoint", folder / manifest.get("parts", "")))
        return manifest["state"]

    def restore(self, tag: str | None = None) -> Any:
        """Ends all actors after an ActorError, starts new ones and loads the last checkpoint. Returns the checkpoint's
        state."""
        self.stop()
        self.start()
        return self.load(tag)

    def _begin_each(self, method: str, folder: Path) -> list[Pending]:
        return [group.begin(method, str(folder / name), "engine") for name, group in self._groups.items()]

    def _whole_folder(self, call: str) -> Path:
        if self._folder is None:
            raise UsageError(f"[hybrid] {call}() needs a folder; give the Program one")
        return self._folder


def _serve(address: str) -> Any:
    """A store that listens on this address of the host, and no other."""
    family, kind, protocol, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as listening:
        listening.bind(where)
        listening.listen()
        port = listening.getsockname()[1]
        store = C10D.TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(minutes=10),
            master_listen_fd=listening.fileno(),
        )
        listening.detach()  # the socket is the store's
    return store


def _is_manifest(value: Any) -> bool:
    """`parts` is a folder beside it, and none elsewhere."""
    if not isinstance(value, dict) or not isinstance(value.get("groups"), dict) or "state" not in value:
        return False
    parts = value.get("parts", "")
    return isinstance(parts, str) and (not parts or (parts.startswith(_PARTS) and "/" not in parts))
