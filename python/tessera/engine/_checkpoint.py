"""Saving and loading a run: what only Python has goes beside the core's part as blobs, which are read without running
anything (torch.load with weights_only), but where the caller trusts them."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch

from tessera import _core
from tessera._blobs import Saved, check_taken, count_of, of_kind, pickled
from tessera._copies import own_copies
from tessera._deepspeed._pieces import OWN_KEYS
from tessera._deepspeed._read import LOOKED_FOR, Hints, manifest_of
from tessera._random import put_random_states, random_states, try_random_states
from tessera.checkpoints import shard_bytes
from tessera.data import Loader
from tessera.engine._on_all import on_all
from tessera.engine._optimizer_parts import (
    check_groups,
    client_states,
    groups_from,
    put_groups,
    put_schedule,
    put_states,
    schedule_from,
    states_from,
)
from tessera.errors import ConfigError, IoError
from tessera.optim._runners import NativeRunner

if TYPE_CHECKING:
    from tessera.engine._engine import Engine


class EngineCheckpoints:
    """What an Engine does with checkpoints."""

    _of_several = False  # its checkpoints are those of several engines: engine/checkpoint.h

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: Any = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        asynchronous: bool | None = None,
        keep_last: int | None = None,
        random_state: bool | None = None,
    ) -> bool:
        """Saves the run into the folder save_dir/tag (default tag: global_step<N>), which all ranks must see; complete
        or not at all, and whatever was complete there before stays until then. Keywords that are None are as the
        `checkpoint` section says. `asynchronous` returns once the states are copied; wait_for_checkpoint() waits for
        the rest. `client_state`: anything that torch.save takes, rank 0's. Collective. See docs/checkpoints.md."""
        _save(
            cast("Engine", self),
            save_dir,
            tag,
            client_state or {},
            save_latest,
            exclude_frozen_parameters,
            asynchronous,
            keep_last,
            random_state,
        )
        return True

    def wait_for_checkpoint(self) -> None:
        """Until an asynchronous save_checkpoint() is complete; raises its error. Collective."""
        _core.wait_for_checkpoint(cast("Engine", self).core)

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., None] | None = None,
        *,
        trusted: bool = False,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Goes on from save_dir/tag (default: what `latest` names; without that file a warning and (None, None)).
        Returns the folder and the client_state. The checkpoint may come from other ranks, another stage, precision or
        front end. IoError for what is damaged or missing, ConfigError for what does not fit, with nothing changed.
        `custom_load_fn(src=state_dict, dst=module)` puts the weights into the module in place of load_state_dict.
        `trusted`: objects of any kind are unpickled (of a client_state, a schedule, a module's extra state), which can
        run code. Collective."""
        return _load(
            cast("Engine", self),
            load_dir,
            tag,
            load_module_strict,
            load_optimizer_states,
            load_lr_scheduler_states,
            load_module_only,
            custom_load_fn,
            trusted,
        )

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
        *,
        max_shard_size: int | str | None = None,
    ) -> bool:
        """Writes the module's state dict in the compute dtype: ".bin" for torch.load, ".safetensors" for that library;
        with `max_shard_size` ("5GB") in several files with the index that Transformers' from_pretrained reads. Complete
        or not at all. Rank 0 writes, and has one tensor of safetensors or one ".bin" file in memory. False, and nothing
        is written, in stage 3 without stage3_gather_16bit_weights_on_model_save. Collective."""
        engine = cast("Engine", self)
        if engine._settings.placements.shards_params and not engine.zero_gather_16bit_weights_on_model_save():
            warnings.warn(
                "[engine.save_16bit_model] nothing is written: parameters are partitioned; set "
                "zero_optimization.stage3_gather_16bit_weights_on_model_save to gather them for the file",
                stacklevel=2,
            )
            return False
        with on_all(engine):
            engine._contents.check(engine.module, "save_16bit_model")
        state = _module_state(engine, exclude_frozen_parameters)
        if save_filename.endswith(".safetensors") or max_shard_size is not None:
            limit = sys.maxsize if max_shard_size is None else shard_bytes(max_shard_size)
            _core.export_weights(engine.core, _rows(engine, state), os.fspath(save_dir), save_filename, limit)
        else:
            _save_state_dict(engine, state, os.path.join(save_dir, save_filename))
        return True

    def save_fp16_model(self, save_dir: str | os.PathLike[str], save_filename: str = "pytorch_model.bin") -> bool:
        """save_16bit_model() by its old name."""
        return self.save_16bit_model(save_dir, save_filename)


def _save(
    engine: Engine,
    save_dir: str | os.PathLike[str] | None,
    tag: Any,
    client_state: dict[str, Any],
    save_latest: bool,
    exclude_frozen: bool,
    asynchronous: bool | None,
    keep_last: int | None,
    random_state: bool | None,
) -> None:
    config = engine._settings
    asynchronous = config.get("checkpoint.asynchronous") if asynchronous is None else asynchronous
    keep_last = config.get("checkpoint.keep_last") if keep_last is None else keep_last
    as_deepspeed = config.get("checkpoint.format") == "deepspeed"
    engine.wait_for_checkpoint()
    engine._join()
    # Whatever fails on one rank fails here, before the first of them counts on the others.
    with on_all(engine):
        _check_arguments(save_dir, client_state, as_deepspeed, asynchronous)
        engine._contents.check(engine.module, "save_checkpoint")
        options = _core.SaveOptions(
            tag="" if tag is None else str(tag),
            latest=save_latest and not as_deepspeed,
            frozen=not exclude_frozen,
            asynchronous=asynchronous,
            keep_last=0 if as_deepspeed else keep_last,
            tags=config.get("checkpoint.tag_validation"),
        )
        if isinstance(engine._runner, NativeRunner):
            engine._runner.publish_groups()
        names = _names(engine)
        numbers, states = client_states(engine, names)
        blobs = _blobs(engine, client_state, numbers)
        if config.get("checkpoint.random_state") if random_state is None else random_state:
            random = random_states()
            if (begin := getattr(engine.training_dataloader, "begin", None)) is not None:
                random["pass"] = begin
            blobs[f"random-{_core.checkpoint_place(engine.core)}"] = pickled(random, "the random generators")
        run = {}
        if hasattr(engine.lr_scheduler, "last_batch_iteration"):
            run["schedule_steps"] = engine.lr_scheduler.last_batch_iteration + 1
        buffers = [(name, "buffer", tensor) for name, tensor in _buffers(engine).items()]
        folder = os.fspath(cast("str", save_dir))

    def save(folder: str) -> str:
        aliases = _aliases(engine, names)
        return _core.save_checkpoint(engine.core, folder, options, json.dumps(run), blobs, buffers, states, aliases)

    if as_deepspeed:
        stage = config.get("zero_optimization.stage")
        from tessera._deepspeed._save import save_as_deepspeed  # few call for it

        save_as_deepspeed(engine.core, folder, save, stage, engine._dp_size, save_latest, keep_last)
    else:
        save(folder)


def _load(
    engine: Engine,
    load_dir: str | os.PathLike[str],
    tag: Any,
    strict: bool,
    optimizer: bool,
    schedule: bool,
    module_only: bool,
    custom_load_fn: Callable[..., None] | None,
    trusted: bool,
) -> tuple[str | None, dict[str, Any] | None]:
    folder = os.fspath(load_dir)
    engine._join()
    with on_all(engine):
        engine._contents.check(engine.module, "load_checkpoint")
    optimizer = optimizer and not module_only
    restore = _core.open_checkpoint(
        engine.core,
        folder,
        "" if tag is None else str(tag),
        strict=strict and custom_load_fn is None,
        optimizer=optimizer,
        run=not module_only,
        from_master=engine._settings.get("zero_optimization.load_from_fp32_weights"),
        latest="latest_universal" if engine._settings.get("checkpoint.load_universal") else "latest",
        manifest=lambda found: manifest_of(found, _hints(engine, optimizer), trusted),
        names=LOOKED_FOR,
    )
    if restore is None:
        warnings.warn(
            f"[engine.load_checkpoint] there is no file 'latest' in '{folder}', nothing is loaded", stacklevel=3
        )
        return None, None
    reader = restore.reader
    # All that can be refused is looked at before anything changes, on any rank.
    with on_all(engine):
        saved = Saved(reader, trusted)
        client = saved.blob("client_state", {})
        extra = _extra_from(engine, saved)
        buffers = _buffers_from(engine, restore, strict and custom_load_fn is None)
        states = states_from(engine, restore, saved, _names(engine)) if optimizer else None
        groups = groups_from(engine, saved, reader) if optimizer else None
        check_groups(engine, groups)
        run = json.loads(reader.run())
        foreign = not module_only and "source" in run
        schedule_state = None
        if ((schedule and not module_only) or foreign) and saved.has("schedule"):
            schedule_state = saved.part("schedule", kind=object)
            if schedule and not module_only:
                schedule_state = schedule_from(engine, schedule_state, groups)
        own = f"random-{_core.checkpoint_place(engine.core)}"
        random = None if module_only else saved.blob(own)
        if random is not None:
            _check_random_states(random, own)
        loader = None if module_only else _loader_from(engine, saved, random)
    restore.apply()
    for buffer, value in buffers:
        with torch.no_grad():
            buffer.copy_(value)
    _load_extra(engine, extra)
    if custom_load_fn is not None:
        engine.load_module_state_dict(
            _state_dict(reader), custom_load_fn=lambda src, dst: custom_load_fn(src=src, dst=dst)
        )
    if states is not None:
        put_states(engine, states)
    if groups is not None:
        put_groups(engine, groups)
    if not module_only:
        if schedule:
            put_schedule(engine, schedule_state, json.loads(restore.run))
        elif schedule_state is not None:
            client.setdefault("lr_scheduler", schedule_state)  # as DeepSpeed gives what it does not load
        if loader is not None:
            engine.training_dataloader.load_state_dict(loader)
        if random is not None:
            put_random_states(random)
    return restore.folder, client


# ---------------------------------------------------------------- pieces of a save


def _check_arguments(save_dir: Any, client_state: dict[str, Any], as_deepspeed: bool, asynchronous: bool) -> None:
    if not save_dir:
        raise ConfigError("[engine.save_checkpoint] save_dir is empty; name a folder")
    if not isinstance(client_state, dict):
        raise ConfigError(f"[engine.save_checkpoint] client_state is a dict, not a {type(client_state).__name__}")
    if "checkpoint_parallel_dimensions" in client_state:
        raise KeyError("[engine.save_checkpoint] client_state must not contain 'checkpoint_parallel_dimensions'")
    if as_deepspeed and asynchronous:
        raise ConfigError('[engine.save_checkpoint] checkpoint.format "deepspeed" cannot be written asynchronously')
    if as_deepspeed and not OWN_KEYS.isdisjoint(client_state):
        own = ", ".join(sorted(OWN_KEYS & client_state.keys()))
        raise ConfigError(f"[engine.save_checkpoint] client_state has keys that are DeepSpeed's own: {own}")


def _names(engine: Engine) -> dict[int, str]:
    """Of every parameter, by id, the name that the core has for it."""
    return {id(spec.tensor): spec.name for spec in engine.core.params()}


def _aliases(engine: Engine, names: dict[int, str]) -> dict[str, list[str]]:
    aliases: dict[str, list[str]] = {}
    for name, param in engine.module.named_parameters(remove_duplicate=False):
        own = names.get(id(param), name)
        if own != name:
            aliases.setdefault(own, []).append(name)
    return aliases


def _buffers(engine: Engine) -> dict[str, torch.Tensor]:
    """Those that state_dict() has, each once."""
    found: dict[str, torch.Tensor] = {}
    for prefix, module in engine.module.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def _extra(engine: Engine) -> dict[str, Any]:
    """What modules add to a state dict by get_extra_state()."""
    extra = {}
    for prefix, module in engine.module.named_modules():
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
            extra[prefix] = module.get_extra_state()
    return extra


def _blobs(engine: Engine, client_state: dict[str, Any], numbers: dict[str, Any]) -> dict[str, bytes]:
    """This rank's. Each can be read without the others."""
    place = _core.checkpoint_place(engine.core)
    blobs = {f"optimizer-{place}": pickled(numbers, "the optimizer's state")} if numbers else {}
    if place != 0:
        return blobs
    base = engine.basic_optimizer
    groups = [] if base is None else base.param_groups
    part: dict[str, Any] = {
        "group_names": [[name for name, trained in group if trained] for group in engine._group_names],
        "config": engine._settings.to_dict(),
    }
    if hasattr(engine.training_dataloader, "state_dict"):
        part["loader"] = engine.training_dataloader.state_dict()
    blobs["python"] = pickled(part, "the run's state")
    blobs["client_state"] = pickled(client_state, "client_state")
    plain = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    blobs["param_groups"] = pickled(plain, "a param group")
    if hasattr(engine.lr_scheduler, "state_dict"):
        blobs["schedule"] = pickled(engine.lr_scheduler.state_dict(), "the schedule's state")
    if extra := _extra(engine):
        blobs["extra"] = pickled(extra, f"get_extra_state() of {', '.join(map(repr, extra))}")
    return blobs


# ---------------------------------------------------------------- weights for other tools


def _module_state(engine: Engine, exclude_frozen: bool) -> dict[str, Any]:
    """module.state_dict() with the parameters themselves, which may have no data now."""
    state = engine.module.state_dict(keep_vars=True)
    if exclude_frozen:
        for name, param in engine.module.named_parameters(remove_duplicate=False):
            if not param.requires_grad:
                state.pop(name, None)
    return state


def _numbers(engine: Engine) -> dict[int, int]:
    return {id(spec.tensor): number for number, spec in enumerate(engine.core.params())}


def _rows(engine: Engine, state: dict[str, Any]) -> list[tuple[list[str], int, torch.Tensor | None]]:
    """As export_weights() takes them; what is no tensor is left out."""
    numbers = _numbers(engine)
    rows: dict[int, tuple[list[str], int, torch.Tensor | None]] = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            number = numbers.get(id(value), -1)
            rows.setdefault(id(value), ([], number, None if number >= 0 else value.detach()))[0].append(name)
    return list(rows.values())


def _save_state_dict(engine: Engine, state: dict[str, Any], path: str) -> None:
    """torch.save() on rank 0; any object, tensors in their own form."""
    numbers = _numbers(engine)
    weights = _core.LiveWeights(engine.core)
    first = _core.checkpoint_place(engine.core) == 0
    whole: dict[int, torch.Tensor] = {}  # rank 0's
    for key in dict.fromkeys(number for number in map(id, state.values()) if number in numbers):
        weight = weights.whole(numbers[key])
        if weight is not None:
            whole[key] = weight
    error = ""
    if first:
        part = path + ".part"
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            copies = own_copies({name: value for name, value in state.items() if id(value) not in whole})
            with open(part, "wb") as file:  # a parameter's memory is its own (Note [Parameter storage])
                torch.save({name: whole.get(id(value), copies.get(name)) for name, value in state.items()}, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        except Exception as problem:
            error = f"[engine.save_16bit_model] cannot write '{path}': {problem}"
            with contextlib.suppress(OSError):
                os.unlink(part)
    _core.checkpoint_exchange(engine.core, "", error)


# ---------------------------------------------------------------- pieces of a load


def _hints(engine: Engine, optimizer: bool) -> Hints:
    return Hints(engine._group_names or None, engine.gradient_accumulation_steps(), optimizer)


def _check_random_states(states: dict[str, Any], name: str) -> None:
    try:
        try_random_states(states)
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError, RuntimeError) as error:
        raise IoError(f"[checkpoint] '{name}' is damaged: no state of the generators: {error}") from error


def _buffers_from(engine: Engine, restore: _core.Restore, strict: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    saved = {name for name, kind, *_ in restore.reader.tensors() if kind == "buffer"}
    here = _buffers(engine)
    missing, more = sorted(here.keys() - saved), [] if engine._of_several else sorted(saved - here.keys())
    if strict and (missing or more):
        raise ConfigError(
            f"[engine.load_checkpoint] buffers do not fit: not in the checkpoint: {missing}, not in the model: {more}"
        )
    found = []
    for name, buffer in here.items():
        value = restore.buffer(name)
        if value is None:
            continue
        if value.shape != buffer.shape:
            raise ConfigError(
                f"[engine.load_checkpoint] buffer '{name}' has shape {tuple(value.shape)} there and "
                f"{tuple(buffer.shape)} here"
            )
        found.append((buffer, value))
    return found


def _extra_from(engine: Engine, saved: Saved) -> dict[str, Any]:
    """What set_extra_state() of modules here takes."""
    extra: dict[str, Any] = saved.part("extra", {})
    modules = dict(engine.module.named_modules())
    for prefix, value in extra.items():
        if (module := modules.get(prefix)) is not None:
            what = f"'extra', get_extra_state() of '{prefix}',"
            check_taken(what, module, module.set_extra_state, value, module.get_extra_state())
    return extra


def _loader_from(engine: Engine, saved: Saved, random: dict[str, Any] | None) -> Any:
    """The state that the loader here shall take; None for none."""
    loader, state = engine.training_dataloader, saved.run.get("loader")
    if state is None or not hasattr(loader, "load_state_dict"):
        return None
    if not isinstance(loader, Loader):
        check_taken("the loader's state", loader, loader.load_state_dict, state, loader.state_dict())
        return state
    for key in ("epoch", "samples"):
        count_of(of_kind(state, dict, "the loader's state").get(key), f"the loader's '{key}'")
    return state if random is None or "pass" not in random else state | {"begin": random["pass"]}


def _load_extra(engine: Engine, extra: dict[str, Any]) -> None:
    modules = dict(engine.module.named_modules())
    for prefix, value in extra.items():
        if prefix in modules:
            modules[prefix].set_extra_state(value)


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
