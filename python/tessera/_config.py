"""Turns what users pass as configuration into the core's Config."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Union

from tessera import _core
from tessera.errors import ConfigError

ConfigLike = Union[_core.Config, Mapping[str, Any], str, "os.PathLike[str]"]
"""What load_config() takes."""


def load_config(config: Any) -> _core.Config:
    """A dict (left untouched), a path, JSON text (it begins with "{"), the same in url-safe base64, or a ready Config.
    ConfigError lists everything that is wrong; who uses it logs its `warnings`."""
    loaded = _parse(config)
    _core.check_served(loaded)
    return loaded


def _parse(config: Any) -> _core.Config:
    if isinstance(config, _core.Config):
        return config
    if isinstance(config, Mapping):
        return _core.Config.from_dict(config)
    if isinstance(config, os.PathLike):
        return _core.Config.from_file(os.fspath(config))
    if isinstance(config, str):
        return _core.config_of(config)
    raise ConfigError(
        f"[initialize] config must be a dict, a path, JSON text or base64 text, got {type(config).__module__}."
        f"{type(config).__qualname__}"
    )


def text_of(config: str | os.PathLike[str]) -> str:
    """The JSON text of a path, JSON text or base64 text that load_config() takes."""
    return _core.json_of(os.fspath(config))
