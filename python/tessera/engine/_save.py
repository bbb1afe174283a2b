"""Saving a run: what only Python has goes beside the core's part as blobs."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

import torch

from tessera import _core
from tessera._blobs import pickled
from tessera._random import random_states
from tessera.data import Loader
from tessera.engine._on_all import on_all
from tessera.engine._optimizer_parts import client_states, steps_of
from tessera.engine._run import Run, buffers_of, names_of
from tessera.engine.program import Names
from tessera.errors import ConfigError
from tessera.optim.engines import NativeRunner


@dataclass(frozen=True)
class SaveRequest:
    """The arguments of save_checkpoint(); None: as the section `checkpoint` says."""

    folder: str | os.PathLike[str] | None
    tag: Any
    client_state: dict[str, Any]
    latest: bool
    exclude_frozen: bool
    asynchronous: bool | None
    keep_last: int | None
    random_state: bool | None


def save(run: Run, request: SaveRequest) -> None:
    """Collective."""
    config = run._settings
    asynchronous = _given(request.asynchronous, config.checkpoint.asynchronous)
    keep_last = _given(request.keep_last, config.checkpoint.keep_last)
    as_deepspeed = config.checkpoint.format == "deepspeed"
    _core.wait_for_checkpoint(run.core)
    run.join_thawed()
    group_names = run._program.group_names(run._updates.group_names)
    # An error of one rank comes here, before the first of them counts on the others.
    with on_all(run.core):
        _check(request, as_deepspeed)
        run._contents.check(run.module, "save_checkpoint")
        options = _core.SaveOptions(
            tag="" if request.tag is None else str(request.tag),
            latest=request.latest,
            frozen=not request.exclude_frozen,
            asynchronous=asynchronous,
            keep_last=keep_last,
            tags=config.checkpoint.tag_validation,
            deepspeed=(config.zero_optimization.stage, run._ranks.dp_world_size) if as_deepspeed else None,
        )
        if isinstance(run._updates.runner, NativeRunner):
            run._updates.runner.publish_groups()
        names = names_of(run)
        numbers, states = client_states(run, names)
        blobs = _blobs(run, request.client_state, numbers, group_names)
        place, random_state = (
            _core.checkpoint_place(run.core),
            _given(request.random_state, config.checkpoint.random_state),
        )
        if random_state:
            blobs[f"random-{place}"] = pickled(random_states(), "the random generators")
        if of_loader := _of_loader(run.training_dataloader, random_state):
            blobs[f"loader-{place}"] = pickled(of_loader, "the loader's random generators")
        values = {}
        if (steps := steps_of(run.lr_scheduler)) is not None:
            values["schedule_steps"] = steps
        buffers = [(name, "buffer", tensor) for name, tensor in buffers_of(run).items()]
        folder = os.fspath(request.folder or "")

    aliases = _aliases(run, names)
    _core.save_checkpoint(run.core, folder, options, json.dumps(values), blobs, buffers, states, aliases)


def _given(value: Any, configured: Any) -> Any:
    return configured if value is None else value


def _check(request: SaveRequest, as_deepspeed: bool) -> None:
    client_state = request.client_state
    if not isinstance(client_state, dict):
        raise ConfigError(f"[engine.save_checkpoint] client_state is a dict, not a {type(client_state).__name__}")
    _core.check_client_keys([key for key in client_state if isinstance(key, str)], as_deepspeed)


def _of_loader(loader: Any, random_state: bool) -> dict[str, Any]:
    """Where random generators of this rank are for the loader's pass. What rows draw (`data`, `drawn`) goes with
    `random_state`; the order of the pass (all of `begin` but that) always."""
    if not isinstance(loader, Loader) or (begin := loader.begin) is None:
        return {}
    if random_state:
        return {"begin": begin, "drawn": loader.drawn}
    return {"begin": {name: state for name, state in begin.items() if name != "data"}}


def _aliases(run: Run, names: dict[int, str]) -> dict[str, list[str]]:
    aliases: dict[str, list[str]] = {}
    for name, param in run.module.named_parameters(remove_duplicate=False):
        own = names.get(id(param), name)
        if own != name:
            aliases.setdefault(own, []).append(name)
    return aliases


def _extra(run: Run) -> dict[str, Any]:
    """The extra state that modules add to a state dict by get_extra_state()."""
    extra = {}
    for prefix, module in run.module.named_modules():
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
            extra[prefix] = module.get_extra_state()
    return extra


def _blobs(run: Run, client_state: dict[str, Any], numbers: dict[str, Any], group_names: Names) -> dict[str, bytes]:
    """This rank's blobs. Each can be read without the others."""
    place = _core.checkpoint_place(run.core)
    blobs = {f"optimizer-{place}": pickled(numbers, "the optimizer's state")} if numbers else {}
    if place != 0:
        return blobs
    base = run.basic_optimizer
    groups = [] if base is None else base.param_groups
    part: dict[str, Any] = {
        "group_names": [[name for name, trained in group if trained] for group in group_names],
        "config": run._settings.to_dict(),
    }
    if hasattr(run.training_dataloader, "state_dict"):
        part["loader"] = run.training_dataloader.state_dict()
    blobs["python"] = pickled(part, "the run's state")
    blobs["client_state"] = pickled(client_state, "client_state")
    plain = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    blobs["param_groups"] = pickled(plain, "a param group")
    if hasattr(schedule := run.lr_scheduler, "state_dict") and schedule is not None:
        blobs["schedule"] = pickled(schedule.state_dict(), "the schedule's state")
    if extra := _extra(run):
        blobs["extra"] = pickled(extra, f"get_extra_state() of {', '.join(map(repr, extra))}")
    return blobs
