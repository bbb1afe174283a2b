"""The part of an engine that users see of checkpoints."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, Literal, Protocol, overload

import torch.distributed as dist

from tessera import _core
from tessera._warnings import caught_warnings
from tessera.engine._export import export
from tessera.engine._load import LoadRequest, load
from tessera.engine._run import Run
from tessera.engine._save import SaveRequest, save


@contextlib.contextmanager
def _called_by_all(core: _core.Engine, call: str) -> Iterator[None]:
    """Where ranks wait for others, a frequent reason."""
    core.check_live(call)
    try:
        yield
    except dist.DistBackendError as error:
        raise type(error)(f"{error}\n[engine.{call}] all ranks call it, not the first alone") from None


class Restorable(Run, Protocol):
    def load_module_state_dict(self, checkpoint: dict[str, Any], *, custom_load_fn: Callable[..., None]) -> None: ...


class Checkpoints:
    def __init__(self, run: Restorable) -> None:
        self._run = run

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | int | None = None,
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
        request = SaveRequest(
            save_dir,
            tag,
            client_state or {},
            save_latest,
            exclude_frozen_parameters,
            asynchronous,
            keep_last,
            random_state,
        )
        with caught_warnings(self._run._warn_user), _called_by_all(self._run.core, "save_checkpoint"):
            save(self._run, request)
        return True

    def wait_for_checkpoint(self) -> None:
        """Returns when an asynchronous save_checkpoint() is complete; raises its error. Collective."""
        self._run.core.check_live("wait_for_checkpoint")
        _core.wait_for_checkpoint(self._run.core)

    @overload
    def load_checkpoint(
        self: Any,
        load_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., None] | None = None,
        *,
        trusted: bool = False,
        missing_ok: Literal[False] = False,
    ) -> tuple[str, dict[str, Any]]: ...
    @overload
    def load_checkpoint(
        self: Any,
        load_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., None] | None = None,
        *,
        trusted: bool = False,
        missing_ok: bool,
    ) -> tuple[str | None, dict[str, Any] | None]: ...
    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., None] | None = None,
        *,
        trusted: bool = False,
        missing_ok: bool = False,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Goes on from save_dir/tag (default: what `latest` names; a folder without that file, or none, is an IoError,
        with `missing_ok` the result (None, None)). Returns the folder and the client_state. The checkpoint may come
        from other ranks, another stage, precision or front end. IoError for what is damaged or missing, ConfigError for
        what does not fit, with nothing changed. `custom_load_fn(src=state_dict, dst=module)` puts the weights into the
        module in place of load_state_dict. `trusted`: objects of any kind are unpickled (of a client_state, a schedule,
        a module's extra state), which can run code. Collective."""
        request = LoadRequest(
            load_dir,
            tag,
            load_module_strict,
            load_optimizer_states,
            load_lr_scheduler_states,
            load_module_only,
            custom_load_fn,
            trusted,
            missing_ok,
        )
        with caught_warnings(self._run._warn_user), _called_by_all(self._run.core, "load_checkpoint"):
            return load(self._run, request, self._run.load_module_state_dict)

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
        self._run.core.check_live("save_16bit_model")
        settings = self._run._settings
        gathers = settings.zero_optimization.stage3_gather_16bit_weights_on_model_save
        if settings.placements.shards_params and not gathers:
            self._run._warn_user([_core.NOTHING_EXPORTED])
            return False
        with _called_by_all(self._run.core, "save_16bit_model"):
            export(self._run, save_dir, save_filename, exclude_frozen_parameters, max_shard_size)
        return True
