"""What users may pass as configuration."""

from __future__ import annotations

import argparse
import base64
import copy
import json
from pathlib import Path
from typing import Any

import pytest
from support import config, make

import tessera


def encoded(value: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode()


@pytest.mark.parametrize(
    "form", ["dict", "path", "str", "text", "base64", "config_params", "args", "args dict", "old args"]
)
def test_forms_of_configuration(form: str, tmp_path: Path) -> None:
    cfg = config(stage=1)
    path = tmp_path / "config.json"
    path.write_text("// comments are fine\n" + json.dumps(cfg))
    kwargs: dict[str, Any] = {
        "dict": {"config": cfg},
        "path": {"config": path},
        "str": {"config": str(path)},
        "text": {"config": " \n" + json.dumps(cfg)},
        "base64": {"config": encoded(cfg)},
        "config_params": {"config_params": cfg},
        "args": {"args": argparse.Namespace(deepspeed_config=str(path), local_rank=0)},
        "args dict": {"args": {"deepspeed_config": str(path)}},
        "old args": {"args": argparse.Namespace(deepscale_config=str(path))},
    }[form]
    before = copy.deepcopy(cfg)
    engine = tessera.initialize(model=make(), **kwargs)[0]
    assert engine.config.get("zero_optimization.stage") == 1
    assert cfg == before, "the caller's dict is never changed"
    engine.destroy()


def test_integers_beyond_64_bits_name_their_key() -> None:
    """What a config dict says about them is what a file says: the key, not a failed cast."""
    for key, section in (("seed", "tessera"), ("reduce_bucket_size", "zero_optimization")):
        cfg = config(stage=1)
        cfg.setdefault(section, {})[key] = 2**64
        with pytest.raises(ValueError, match=f"{section}.{key}"):
            tessera.initialize(model=make(), config=cfg)


def _holding_itself() -> dict[str, Any]:
    cfg = config(stage=1)
    cfg["again"] = cfg
    return cfg


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        (_holding_itself(), "contain itself"),
        (config(1, train_batch_size=10**5000), "integer is too large"),
        (config(1, **{"\udcff": 1}), "lone surrogate"),
        (config(1, optimizer={"type": "\udcff"}), "lone surrogate"),
        (config(1, gradient_clipping=float("inf")), "gradient_clipping.*inf"),
        ('{"train_batch_size": ', "JSON"),
    ],
)
def test_what_is_no_configuration_is_a_configuration_error(bad: Any, match: str) -> None:
    with pytest.raises(tessera.ConfigError, match=match):
        tessera.initialize(model=make(), config=bad)


def test_unknown_keys_are_named_up_to_a_number(caplog: pytest.LogCaptureFixture) -> None:
    tessera.initialize(model=make(), config=config(1, **{f"key{i}": i for i in range(100_000)}))[0].destroy()
    assert len(caplog.records) == 51 and "99950 more unknown keys" in caplog.text
