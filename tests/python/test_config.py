"""What users may pass as configuration."""

from __future__ import annotations

import base64
import collections
import copy
import enum
import json
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from support import config, engines, make
from tessera.errors import ConfigError

import tessera


def encoded(value: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode()


@pytest.mark.parametrize("form", ["dict", "path", "str", "text", "base64"])
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
    }[form]
    before = copy.deepcopy(cfg)
    engine = tessera.initialize(model=make(), **kwargs)[0]
    assert engine.config.zero_optimization.stage == 1
    assert cfg == before, "the caller's dict is never changed"
    engine.destroy()


def test_keys_are_attributes_with_their_types() -> None:
    settings = tessera.Config.from_dict(
        {
            "train_batch_size": 4,
            "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "sub_group_size": 7},
            "torch_autocast": {"enabled": True, "dtype": "half"},
            "optimizer": {"type": "Adam", "params": {"lr": 0.5}},
        }
    )
    zero = settings.zero_optimization
    assert (settings.train_batch_size, settings.gradient_clipping, settings.log_level) == (4, 1.0, None)
    assert (zero.stage, zero.offload_param.device, zero.leaf_module.names) == (3, "cpu", [])
    assert settings.torch_autocast.dtype is torch.float16 and settings.communication_data_type is None
    assert settings.optimizer.params == {"lr": 0.5} and zero.offload_optimizer.ratio == 1
    assert "stage" in dir(zero) and "zero_optimization" in dir(settings) and "'stage': 3" in repr(zero)
    with pytest.raises(AttributeError, match=r"zero_optimization.stagee; did you mean stage"):
        _ = zero.stagee  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"sub_group_size has no effect"):
        _ = zero.sub_group_size  # type: ignore[attr-defined]
    assert settings.get("zero_optimization.sub_group_size") == 7
    with pytest.raises(AttributeError):
        zero.stage = 1  # type: ignore[misc]


class Wide(enum.Enum):
    BF16 = "bf16"


def test_values_as_programs_have_them() -> None:
    """Any mapping; dtypes, enums and paths as their texts; what is no JSON is refused with its type."""
    given = types.MappingProxyType(
        {
            "communication_data_type": torch.bfloat16,
            "seq_parallel_communication_data_type": Wide.BF16,
            "csv_monitor": collections.OrderedDict(output_path=Path("runs"), enabled=False),
            "torch_autocast": {"lower_precision_safe_modules": ("torch.nn.Linear",)},
        }
    )
    settings = tessera.Config.from_dict(given)
    assert settings.communication_data_type is settings.seq_parallel_communication_data_type is torch.bfloat16
    assert settings.csv_monitor.output_path == "runs"
    assert settings.torch_autocast.lower_precision_safe_modules == ["torch.nn.Linear"]
    with pytest.raises(ConfigError, match=r"type <class 'torch.Tensor'>"):
        tessera.Config.from_dict({"gradient_clipping": torch.ones(1)})


def batch_of(engine: tessera.Engine) -> tuple[int, int, int]:
    return engine.train_batch_size(), engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()


@pytest.mark.parametrize("as_text", [False, True])
def test_an_error_lists_its_problems(as_text: bool) -> None:
    wrong = {"zero_optimization": {"stage": 4, "stagee": 1}, "gradient_clipping": -1}
    with pytest.raises(ConfigError) as caught:
        tessera.Config.from_json(json.dumps(wrong)) if as_text else tessera.Config.from_dict(wrong)
    kinds = {problem.path: problem.kind for problem in caught.value.problems}
    assert kinds == {
        "zero_optimization.stage": "value",
        "zero_optimization.stagee": "unknown",
        "gradient_clipping": "value",
    }
    assert all(f"{problem.path}: {problem.text}" in str(caught.value) for problem in caught.value.problems)
    assert caught.value.origin == "config" and ConfigError("x").problems == () and ConfigError("x").origin == ""
    with pytest.raises(ConfigError) as caught:
        tessera.Config.from_dict({"bf16": {"enabled": True}, "fp16": {"enabled": True}})
    assert [problem.kind for problem in caught.value.problems] == ["rule"]


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


def test_an_elastic_batch_is_the_same_in_every_world() -> None:
    """The section's rules: tests/config/elastic_test.cpp."""
    elastic = {"elasticity": {"enabled": True, "max_train_batch_size": 1000, "micro_batch_sizes": [2, 4, 6]}}
    cfg = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **elastic}
    settings = tessera.Config.from_dict(cfg)
    samples, ranks = settings.elastic_batch()
    assert {1, 2, 3} <= {*ranks}
    for world in (1, 2, 3):
        micro = max(settings.elastic_micro_batches(world))
        want = (samples, micro, samples // (micro * world))
        assert engines(make(), world, cfg, lambda engine, rank: batch_of(engine)) == [want] * world
    cfg["elasticity"]["max_gpus"] = 1  # type: ignore[index]
    with pytest.raises(ConfigError, match=r"2 data-parallel ranks do not fit") as caught:
        engines(make(), 2, cfg, lambda engine, rank: None)
    assert [problem.kind for problem in caught.value.problems] == ["ranks"]
