"""Saving and loading a run: what only Python has goes beside the core's part as blobs, which are read without running
anything (torch.load with weights_only), but for a client_state that the caller trusts."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import random
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch

from tessera import _core
from tessera._copies import own_copies
from tessera._deepspeed._read import LOOKED_FOR, OWN_KEYS, Hints, manifest_of
from tessera.checkpoints import shard_bytes
from tessera.errors import ConfigError, IoError
from tessera.optim._runners import ExternalRunner, NativeRunner

if TYPE_CHECKING:
    from tessera.engine._engine import Engine

# Kinds of tensors that are no optimizer's states.
_OWN_KINDS = frozenset({"weight", "master", "buffer", "gradient", "partial_gradient"})
# A param group's values that the core has by the same name, for runs that were saved from C++; "betas" beside them.
_FROM_CORE = ("lr", "eps", "weight_decay", "momentum", "dampening", "nesterov", "lr_decay")


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
        `trusted`: a client_state of any objects is unpickled, which can run code. Collective."""
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
        if engine.config.placements.shards_params and not engine.zero_gather_16bit_weights_on_model_save():
            warnings.warn(
                "[engine.save_16bit_model] nothing is written: parameters are partitioned; set "
                "zero_optimization.stage3_gather_16bit_weights_on_model_save to gather them for the file",
                stacklevel=2,
            )
            return False
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
    if not save_dir:
        raise ConfigError("[engine.save_checkpoint] save_dir is empty; name a folder")
    if "checkpoint_parallel_dimensions" in client_state:
        raise KeyError("[engine.save_checkpoint] client_state must not contain 'checkpoint_parallel_dimensions'")
    config = engine.config
    asynchronous = config.get("checkpoint.asynchronous") if asynchronous is None else asynchronous
    keep_last = config.get("checkpoint.keep_last") if keep_last is None else keep_last
    as_deepspeed = config.get("checkpoint.format") == "deepspeed"
    if as_deepspeed and asynchronous:
        raise ConfigError('[engine.save_checkpoint] checkpoint.format "deepspeed" cannot be written asynchronously')
    if as_deepspeed and not OWN_KEYS.isdisjoint(client_state):
        own = ", ".join(sorted(OWN_KEYS & client_state.keys()))
        raise ConfigError(f"[engine.save_checkpoint] client_state has keys that are DeepSpeed's own: {own}")
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
    blobs: dict[str, bytes] = {}
    place = _core.checkpoint_place(engine.core)
    if place == 0:
        blobs["client_state"] = _pickled(client_state)
        blobs["python"] = _pickled(_python_part(engine))
    numbers, states = _client_states(engine, names)
    if numbers:
        blobs[f"optimizer-{place}"] = _pickled(numbers)
    if config.get("checkpoint.random_state") if random_state is None else random_state:
        blobs[f"random-{place}"] = _pickled(_random_states())
    run = {}
    if hasattr(engine.lr_scheduler, "last_batch_iteration"):
        run["schedule_steps"] = engine.lr_scheduler.last_batch_iteration + 1
    buffers = [(name, "buffer", tensor) for name, tensor in _buffers(engine).items()]

    def save(folder: str) -> str:
        aliases = _aliases(engine, names)
        return _core.save_checkpoint(engine.core, folder, options, json.dumps(run), blobs, buffers, states, aliases)

    folder = os.fspath(save_dir)
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
    optimizer = optimizer and not module_only
    restore = _core.open_checkpoint(
        engine.core,
        folder,
        "" if tag is None else str(tag),
        strict=strict and custom_load_fn is None,
        optimizer=optimizer,
        run=not module_only,
        from_master=engine.config.get("zero_optimization.load_from_fp32_weights"),
        latest="latest_universal" if engine.config.get("checkpoint.load_universal") else "latest",
        manifest=lambda found: manifest_of(found, _hints(engine), trusted),
        names=LOOKED_FOR,
    )
    if restore is None:
        warnings.warn(
            f"[engine.load_checkpoint] there is no file 'latest' in '{folder}', nothing is loaded", stacklevel=3
        )
        return None, None
    reader = restore.reader
    blobs = set(reader.blobs())
    # All that can be refused is looked at before anything changes.
    python = _unpickled(reader.blob("python"), "the run's state", False) if "python" in blobs else {}
    client = _unpickled(reader.blob("client_state"), "client_state", trusted) if "client_state" in blobs else {}
    buffers = _buffers_from(engine, reader, strict and custom_load_fn is None)
    states = _states_from(engine, restore, blobs) if optimizer and isinstance(engine._runner, ExternalRunner) else None
    restore.apply()
    for buffer, value in buffers:
        with torch.no_grad():
            buffer.copy_(value)
    _load_extra(engine, python.get("extra", {}))
    if custom_load_fn is not None:
        engine.load_module_state_dict(
            _state_dict(reader), custom_load_fn=lambda src, dst: custom_load_fn(src=src, dst=dst)
        )
    if states is not None:
        _put_states(engine, states)
    if optimizer:
        _put_groups(engine, python.get("param_groups"))
    if not module_only:
        if schedule:
            _put_schedule(engine, python.get("schedule"), json.loads(restore.run))
        elif json.loads(reader.run()).get("source") and "schedule" in python:
            client.setdefault("lr_scheduler", python["schedule"])  # as DeepSpeed gives what it does not load
        _put_progress(engine, python, blobs, reader)
    return restore.folder, client


# ---------------------------------------------------------------- pieces of a save


def _pickled(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def _unpickled(data: bytes, what: str, trusted: bool) -> Any:
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=not trusted)
    except pickle.UnpicklingError as error:
        raise IoError(
            f"[engine.load_checkpoint] {what} holds objects that are not plain data: {error}\nIf you trust the file, "
            "call load_checkpoint(..., trusted=True), or name their types with torch.serialization.add_safe_globals"
        ) from None


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


def _python_part(engine: Engine) -> dict[str, Any]:
    base = engine.basic_optimizer
    groups = [] if base is None else base.param_groups
    part: dict[str, Any] = {
        "param_groups": [{key: value for key, value in group.items() if key != "params"} for group in groups],
        "group_names": [[name for name, trained in group if trained] for group in engine._group_names],
        "extra": _extra(engine),
        "config": engine.config.to_dict(),
    }
    if hasattr(engine.lr_scheduler, "state_dict"):
        part["schedule"] = engine.lr_scheduler.state_dict()
    if hasattr(engine.training_dataloader, "state_dict"):
        part["loader"] = engine.training_dataloader.state_dict()
    return part


def _client_states(engine: Engine, names: dict[int, str]) -> tuple[dict[str, Any], list[tuple[int, str, torch.Tensor]]]:
    """Of an optimizer that runs itself: what is not a value for each element of this rank's part, by parameter, and
    what is."""
    numbers: dict[str, Any] = {}
    states: list[tuple[int, str, torch.Tensor]] = []
    runner = engine._runner
    if not isinstance(runner, ExternalRunner):
        return numbers, states
    for number, param, target in runner.targets:
        name = names[id(param)]
        for key, value in runner.base.state.get(target, {}).items():
            if isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == target.shape:
                if key in _OWN_KINDS:
                    raise ConfigError(f"[engine.save_checkpoint] an optimizer state cannot be named {key!r}")
                states.append((number, key, value))
            else:
                numbers.setdefault(name, {})[key] = value
    return numbers, states


def _random_states() -> dict[str, Any]:
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy"] = (name, torch.from_numpy(keys.astype("int64")), *rest)
    if torch.accelerator.is_available():
        module = torch.get_device_module(torch.accelerator.current_accelerator())
        states["device"] = module.get_rng_state()
    return states


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


def _hints(engine: Engine) -> Hints:
    return Hints(engine._group_names or None, engine.gradient_accumulation_steps())


def _put_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if "numpy" in states:
        import numpy

        name, keys, *rest = states["numpy"]
        numpy.random.set_state((name, keys.numpy().astype("uint32"), *rest))
    if "device" in states and torch.accelerator.is_available():
        torch.get_device_module(torch.accelerator.current_accelerator()).set_rng_state(states["device"])


def _buffers_from(
    engine: Engine, reader: _core.CheckpointReader, strict: bool
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    saved = {name for name, kind, *_ in reader.tensors() if kind == "buffer"}
    here = _buffers(engine)
    missing, more = sorted(here.keys() - saved), [] if engine._of_several else sorted(saved - here.keys())
    if strict and (missing or more):
        raise ConfigError(
            f"[engine.load_checkpoint] buffers do not fit: not in the checkpoint: {missing}, not in the model: {more}"
        )
    found = []
    for name, buffer in here.items():
        value = reader.read(name, "buffer")
        if value is None:
            continue
        if value.shape != buffer.shape:
            raise ConfigError(
                f"[engine.load_checkpoint] buffer '{name}' has shape {tuple(value.shape)} there and "
                f"{tuple(buffer.shape)} here"
            )
        found.append((buffer, value))
    return found


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


def _states_from(engine: Engine, restore: _core.Restore, blobs: set[str]) -> dict[int, dict[str, Any]]:
    """By number of the parameter: what the client's optimizer shall have."""
    runner = engine._runner
    assert isinstance(runner, ExternalRunner)
    reader = restore.reader
    kinds = sorted({kind for _, kind, *_ in reader.tensors()} - _OWN_KINDS)
    own = f"optimizer-{_core.checkpoint_place(engine.core)}"
    numbers: dict[str, dict[str, Any]] = {}
    for name in sorted(blobs, key=lambda blob: (blob == own, blob)):  # this rank's own last: it holds
        if name.startswith("optimizer-"):
            numbers.update(_unpickled(reader.blob(name), "the optimizer's state", False))
    records = {alias: p for p in reader.params() for alias in (p.name, *p.aliases)}
    result: dict[int, dict[str, Any]] = {}
    names = _names(engine)
    for number, param, target in runner.targets:
        record = records.get(names[id(param)])
        if record is None:
            continue
        state = dict(numbers.get(record.name, {}))
        for kind in kinds:
            part = restore.client_state(number, kind)
            if part is not None:
                state[kind] = part.to(target.device).as_strided(target.shape, target.stride())
        if state and "step" not in state and record.step > 0:
            state["step"] = torch.tensor(float(record.step))
        result[number] = state
    return result


def _put_states(engine: Engine, states: dict[int, dict[str, Any]]) -> None:
    runner = engine._runner
    assert isinstance(runner, ExternalRunner)
    for number, _, target in runner.targets:
        if states.get(number):
            runner.base.state[target] = states[number]
        else:
            runner.base.state.pop(target, None)


def _put_groups(engine: Engine, saved: list[dict[str, Any]] | None) -> None:
    if engine.basic_optimizer is None:
        return
    groups = engine.basic_optimizer.param_groups
    if saved is not None:
        for group, values in zip(groups, saved, strict=False):
            group.update({key: value for key, value in values.items() if key in group or key.startswith("initial_")})
        return
    for group, options in zip(groups, engine.core.groups(), strict=False):
        values = {key: getattr(options, key) for key in _FROM_CORE} | {"betas": (options.beta1, options.beta2)}
        group.update({key: value for key, value in values.items() if key in group})


def _put_schedule(engine: Engine, saved: dict[str, Any] | None, run: dict[str, Any]) -> None:
    schedule = engine.lr_scheduler
    if not hasattr(schedule, "load_state_dict"):
        return
    if saved is not None:
        schedule.load_state_dict(saved)
    elif "schedule_steps" in run and hasattr(schedule, "last_batch_iteration"):
        schedule.load_state_dict({"last_batch_iteration": run["schedule_steps"] - 1})
    rates_saved = any("lr" in group for group in run.get("groups", []))
    if not rates_saved and hasattr(schedule, "apply_last"):  # some of DeepSpeed's files lack them
        schedule.apply_last()


def _put_progress(engine: Engine, python: dict[str, Any], blobs: set[str], reader: _core.CheckpointReader) -> None:
    if "loader" in python and hasattr(engine.training_dataloader, "load_state_dict"):
        engine.training_dataloader.load_state_dict(python["loader"])
    own = f"random-{_core.checkpoint_place(engine.core)}"
    if own in blobs:
        _put_random_states(_unpickled(reader.blob(own), "the random generators", False))
