"""For packages that stand before engines: Front, and what they need beside what users have."""

from __future__ import annotations

import contextlib
import json
from typing import Any, Generic, TypeVar

import torch

from tessera import _core
from tessera._config import load_config, text_of
from tessera._device import group_device
from tessera._mesh import RankOrder, core_group
from tessera.optim.engines import Optimizer

__all__ = [
    "Front",
    "RankOrder",
    "core_group",
    "engine_behind",
    "load_config",
    "put_script",
    "text_of",
    "values_of_all",
]

put_script = _core.put_script  # zero_to_fp32.py


def engine_behind(given: Any) -> Any:
    """The engine that an object stands before, its attribute `tessera_engine`; an engine itself."""
    return getattr(given, "tessera_engine", given)


def values_of_all(own: Any) -> list[Any]:
    """Returns what each process passes, as JSON can say it, in the order of ranks. Collective."""
    device = group_device(None) or torch.device("cpu")
    texts = _core.texts_of(core_group(None), json.dumps(own), "values of all processes", device)
    return [json.loads(text) for text in texts]


E = TypeVar("E")  # the class of the engine, which this module does not see


class Front(Generic[E]):
    """The calls by which an object that has an Engine takes part in its work: here none does anything. An object that
    needs more is of a derived class, and is passed to the engine (Engine(front=...))."""

    counts_empty_steps = False
    """An update that no backward preceded is counted as any other, with one warning; else it is an error."""

    def built(self, settings: _core.Config, client: Any, base: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer that the engine runs, from here on; `client`: what the caller gave for it, None where `base` is
        of the configuration. Errors refuse it: nothing of the model has changed."""
        return base

    def optimizer_class(self, engine: E) -> type[Optimizer]:
        """The class of engine.optimizer where that is not the client's own."""
        return Optimizer

    def settle(self, engine: E) -> None:
        """Called before all ranks save, load or read whole parameters. May be collective."""

    def stepping(self, engine: E) -> contextlib.AbstractContextManager[None]:
        """Around every step()."""
        return contextlib.nullcontext()
