"""Loading a run: what only Python has is read without running anything (torch.load with weights_only), but where the
caller trusts it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tessera import _core
from tessera._blobs import Saved, check_taken, count_of, of_kind
from tessera._random import put_random_states, try_random_states
from tessera.data import Loader
from tessera.engine._on_all import on_all
from tessera.engine._optimizer_parts import (
    SavedGroup,
    check_groups,
    groups_from,
    put_groups,
    put_schedule,
    put_states,
    schedule_from,
    states_from,
)
from tessera.engine._run import Run, buffers_of, names_of
from tessera.errors import IoError


@dataclass(frozen=True)
class LoadRequest:
    """The arguments of load_checkpoint()."""

    folder: str | os.PathLike[str]
    tag: Any
    strict: bool
    optimizer: bool
    schedule: bool
    module_only: bool
    custom_load_fn: Callable[..., None] | None
    trusted: bool
    missing_ok: bool


@dataclass(frozen=True)
class Found:
    """What a checkpoint has for this rank beside the core's part, looked at and not put in its place yet; None where
    there is none, or it is not to be loaded."""

    client: dict[str, Any]
    extra: dict[str, Any]
    buffers: list[tuple[torch.Tensor, torch.Tensor]]
    states: dict[int, dict[str, Any]] | None
    groups: list[SavedGroup | None] | None
    schedule: Any
    random: dict[str, Any] | None
    loader: Any


def load(run: Run, request: LoadRequest, load_weights: Callable[..., None]) -> tuple[str | None, dict[str, Any] | None]:
    """`load_weights`: load_module_state_dict() of the engine. Collective."""
    run.join_thawed()
    with on_all(run.core):
        run._contents.check(run.module, "load_checkpoint")
    optimizer = request.optimizer and not request.module_only
    latest = "latest_universal" if run._settings.checkpoint.load_universal else "latest"
    restore = _core.open_checkpoint(
        run.core,
        os.fspath(request.folder),
        "" if request.tag is None else str(request.tag),
        strict=request.strict and request.custom_load_fn is None,
        optimizer=optimizer,
        run=not request.module_only,
        from_master=run._settings.zero_optimization.load_from_fp32_weights,
        latest=latest,
        objects=_core.Objects.Kept if request.trusted else _core.Objects.Refused,
        groups=run._updates.group_names or None,
    )
    if restore is None:
        if request.missing_ok:
            return None, None
        raise IoError(
            f"[engine.load_checkpoint] {_core.why_no_latest(os.fspath(request.folder), latest)}. With missing_ok=True "
            "that is no error, and the result is (None, None)"
        )
    # All that can be refused is looked at before anything changes, on any rank.
    with on_all(run.core):
        found = _look(run, request, restore)
    restore.apply()
    # From here on the run has changed: an error of the user's code is an error of all ranks, too.
    with on_all(run.core):
        _put(run, request, restore, found, load_weights)
    return restore.folder, found.client


def _look(run: Run, request: LoadRequest, restore: _core.Restore) -> Found:
    reader = restore.reader
    saved = Saved(reader, request.trusted)
    whole_run, schedule = not request.module_only, request.schedule and not request.module_only
    optimizer = request.optimizer and whole_run
    client = saved.blob("client_state", {})
    extra = _extra_from(run, saved)
    buffers = restore.buffers(buffers_of(run))
    states = states_from(run, restore, saved, names_of(run)) if optimizer else None
    groups = groups_from(run, saved, reader) if optimizer else None
    check_groups(run, groups)
    foreign = whole_run and "source" in json.loads(reader.run())
    schedule_state = None
    if (schedule or foreign) and saved.has("schedule"):
        schedule_state = saved.part("schedule", kind=object)
        if schedule:
            schedule_state = schedule_from(run, schedule_state, groups)
    own = f"random-{_core.checkpoint_place(run.core)}"
    random = saved.blob(own) if whole_run else None
    if random is not None:
        _check_random_states(random, own)
    loader = _loader_from(run, saved, random or {}) if whole_run else None
    return Found(client, extra, buffers, states, groups, schedule_state, random, loader)


def _put(
    run: Run, request: LoadRequest, restore: _core.Restore, found: Found, load_weights: Callable[..., None]
) -> None:
    for buffer, value in found.buffers:
        with torch.no_grad():
            buffer.copy_(value)
    modules = dict(run.module.named_modules())
    for prefix, value in found.extra.items():
        if prefix in modules:
            modules[prefix].set_extra_state(value)
    if (custom := request.custom_load_fn) is not None:
        load_weights(_state_dict(restore.reader), custom_load_fn=lambda src, dst: custom(src=src, dst=dst))
    if found.states is not None:
        put_states(run, found.states)
    if found.groups is not None:
        put_groups(run, found.groups)
    if request.module_only:
        return
    if request.schedule:
        put_schedule(run, found.schedule, json.loads(restore.run))
    elif found.schedule is not None:
        found.client.setdefault("lr_scheduler", found.schedule)  # DeepSpeed gives what it does not load, too
    if found.loader is not None:
        run.training_dataloader.load_state_dict(found.loader)
    if found.random is not None:
        put_random_states(found.random)


def _check_random_states(states: dict[str, Any], name: str) -> None:
    try:
        try_random_states(states)
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError, RuntimeError) as error:
        raise IoError(f"[checkpoint] '{name}' is damaged: no state of the generators: {error}") from None


def _extra_from(run: Run, saved: Saved) -> dict[str, Any]:
    """The extra state for set_extra_state() of modules here."""
    extra: dict[str, Any] = saved.part("extra", {})
    modules = dict(run.module.named_modules())
    for prefix, value in extra.items():
        if (module := modules.get(prefix)) is not None:
            what = f"'extra', get_extra_state() of '{prefix}',"
            check_taken(what, module, module.set_extra_state, value, module.get_extra_state())
    return extra


def _loader_from(run: Run, saved: Saved, random: dict[str, Any]) -> Any:
    """The state that the loader here shall take; None for none."""
    loader, state = run.training_dataloader, saved.run.get("loader")
    if state is None or not hasattr(loader, "load_state_dict"):
        return None
    if not isinstance(loader, Loader):
        check_taken("the loader's state", loader, loader.load_state_dict, state, loader.state_dict())
        return state
    for key in ("epoch", "samples", *(key for key in ("size", "workers") if key in state)):
        count_of(of_kind(state, dict, "the loader's state").get(key), f"the loader's '{key}'")
    name = f"loader-{_core.checkpoint_place(run.core)}"
    own = saved.blob(name, {})
    if (begin := own.get("begin")) is not None:
        _check_random_states(of_kind(begin, dict, f"'{name}'"), name)
    before = {"begin": random["pass"]} if "pass" in random else {}  # before there was such a blob
    state = state | before | own
    loader.check(state)
    return state


def _state_dict(reader: _core.CheckpointReader) -> dict[str, torch.Tensor]:
    state = {}
    for param in reader.params():
        value = reader.read(param.name, "master")
        value = reader.read(param.name, "weight") if value is None else value
        if value is not None:
            state.update(dict.fromkeys([param.name, *param.aliases], value.to(param.dtype)))
    for name, kind, *_ in reader.tensors():
        if kind == "buffer":
            value = reader.read(name, kind)
            assert value is not None
            state[name] = value
    return state
