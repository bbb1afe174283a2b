"""Sections as objects, classes of errors, tp_model_init."""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.config import DeepSpeedBF16Config, DeepSpeedConfig, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig, ZeroStageEnum, get_zero_config
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, OffloadDeviceEnum
from support import config, make
from torch import nn

import tessera


def section_error() -> type[BaseException]:
    """What a wrong value of a section raises: pydantic's where it is installed."""
    if importlib.util.find_spec("pydantic") is None:
        return deepspeed.DeepSpeedConfigError
    from pydantic import ValidationError

    return ValidationError


SECTIONS = {DeepSpeedZeroConfig: "zero_optimization", DeepSpeedFP16Config: "fp16", DeepSpeedBF16Config: "bf16"}


@pytest.mark.parametrize("cls", SECTIONS)
def test_every_key_of_a_section_is_an_attribute(cls: Any) -> None:
    made = cls()
    tree = tessera.Config.from_json("{}").to_dict()[SECTIONS[cls]]
    assert made.model_dump() == tree
    for key, value in tree.items():
        if isinstance(value, (bool, int, float, str)):
            assert getattr(made, key) == value
            assert getattr(made, key.removeprefix("stage3_")) == value


def test_values_both_spellings_and_offload() -> None:
    made = DeepSpeedZeroConfig(stage=3, stage3_max_live_parameters=5e8, prefetch_bucket_size=7)
    assert made.stage == ZeroStageEnum.weights and made.max_live_parameters == 500_000_000
    assert made.stage3_prefetch_bucket_size == made.prefetch_bucket_size == 7
    assert made.offload_optimizer is None
    made = DeepSpeedZeroConfig(stage=2, offload_optimizer={"device": "cpu"})
    assert made.offload_optimizer.device is OffloadDeviceEnum.cpu and made.offload_optimizer.pin_memory
    assert DeepSpeedZeroOffloadOptimizerConfig(device="cpu", ratio=0.5).ratio == 0.5
    assert get_zero_config({"zero_optimization": True}).stage == 1
    leaves = deepspeed.runtime.zero.leaf_module_config.DeepSpeedZeroLeafModuleConfig(classes=["a.B"], names=["c"])
    assert (leaves.classes, leaves.names, leaves.name_suffixes) == (["a.B"], ["c"], [])


WRONG = [
    {"zero_optimization": {"stage": 7}},
    {"zero_optimization": {"stagee": 1}},
    {"fp16": {"enabled": True, "loss_scale": -1}},
    {"bf16": {"initial_scale_power": 3}},
]


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_values_of_sections(wrong: dict[str, Any]) -> None:
    key = next(iter(next(iter(wrong.values()))))
    with pytest.raises(section_error(), match=key if key == "stagee" else None) as caught:
        deepspeed.initialize(model=make(), config={**config(), **wrong})
    assert isinstance(caught.value, ValueError)


def test_other_errors_of_a_configuration() -> None:
    with pytest.raises(TypeError, match="leaf_module"):
        deepspeed.initialize(model=make(), config=config(zero_optimization={"stage": 3, "leaf_module": 3}))
    with pytest.raises(RuntimeError, match="amsgrad"):
        deepspeed.initialize(model=make(), config=config(optimizer={"type": "Adam", "params": {"amsgrad": True}}))
    with pytest.raises(AssertionError, match="nccl_start_alignment_factor"):
        deepspeed.initialize(model=make(), config=config(zero_optimization={"stage": 1, "allgather_bucket_size": 3}))
    with pytest.raises(deepspeed.DeepSpeedConfigError):
        deepspeed.initialize(model=make(), config=config(checkpoint={"tag_validation": "perhaps"}))
    both = {"bf16": {"enabled": True}, "fp16": {"enabled": True}}
    with pytest.raises(AssertionError):
        deepspeed.initialize(model=make(), config={**config(), **both})
    with pytest.raises(AssertionError):
        deepspeed.DeepSpeedConfig({"gradient_accumulation_steps": 2})


def test_the_file_that_arguments_name(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config(1)))
    for name in ("deepspeed_config", "deepscale_config"):
        for args in ({name: str(path)}, argparse.Namespace(**{name: path})):
            engine, *_ = deepspeed.initialize(args=args, model=make())
            assert engine.zero_optimization_stage() == 1
            engine.destroy()
    with pytest.raises(AssertionError, match="deepscale_config"):
        deepspeed.initialize(args={"deepspeed_config": "x", "deepscale_config": "x"}, model=make())


def test_resolved_configuration() -> None:
    given = {"train_batch_size": 8, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 2}}
    made = deepspeed.DeepSpeedConfig(dict(given))
    assert (made.train_batch_size, made.train_micro_batch_size_per_gpu) == (8, 4)
    assert made.zero_enabled and made.zero_optimization_stage == made.zero_config.stage == 2
    assert made.gradient_clipping == 1.0 and not made.fp16_enabled and made.optimizer_name is None
    assert not made.monitor_config.enabled and made.monitor_config.csv_monitor.job_name == "DeepSpeedJobName"


def test_refused_features_name_their_key() -> None:
    with pytest.raises(NotImplementedError, match=r"quantize_training"):
        deepspeed.initialize(model=make(), config=config(quantize_training={"enabled": True}))


@pytest.fixture(autouse=True)
def _no_record() -> Any:
    yield
    deepspeed._TP_MODEL_INIT_ARGS = None


def test_tp_model_init_is_recorded() -> None:
    """And used once: test_alias_tensor_parallel.py."""
    model = make()
    assert deepspeed.tp_model_init(model, 2, torch.bfloat16) is model
    deepspeed.tp_model_init(model, tp_size=2, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="Conflicting tp_model_init"):
        deepspeed.tp_model_init(model, 4, torch.bfloat16)
    with pytest.raises(ValueError, match="autotp_size 2 does not divide the 1 ranks"):
        deepspeed.initialize(model=model, config=config())
    deepspeed.initialize(model=model, config=config())[0].destroy()  # it is used up
    with pytest.raises(ValueError, match="tp_group has 3 ranks, tp_size is 2"):
        deepspeed.tp_model_init(model, 2, torch.float32, tp_group=tessera.thread_groups(3)[0])


CONFLICTS = [
    ({"tensor_parallel": {"autotp_size": 4}}, r"Conflicting tensor_parallel\.autotp_size"),
    ({"tensor_parallel": {"tp": {"tp_size": 4}}}, r"Conflicting tensor_parallel\.tp\.tp_size"),
    ({"tensor_parallel": {"tp": 3}}, "must be a dict"),
    ({"fp16": {"enabled": True}}, "Conflicting dtype"),
    ({"tensor_parallel": {"dtype": "fp16"}}, "Conflicting tensor_parallel.dtype"),
]


@pytest.mark.parametrize(("given", "text"), CONFLICTS)
def test_tp_model_init_against_the_configuration(given: dict[str, Any], text: str) -> None:
    deepspeed.tp_model_init(make(), 2, torch.bfloat16)
    with pytest.raises(ValueError, match=text):
        deepspeed.initialize(model=make(), config={**config(), **given})


def refused_keys() -> list[tuple[str, Any]]:
    """The rows of docs/migrate_from_deepspeed.md."""
    text = (Path(__file__).parents[3] / "docs" / "migrate_from_deepspeed.md").read_text()
    table = text.split("<!-- refused keys: begin -->")[1].split("<!-- refused keys: end -->")[0]
    return [(key, json.loads(value)) for key, value in re.findall(r"^\| `([\w.]+)` \| `(\w+)` \|", table, re.M)]


@pytest.mark.parametrize(("key", "value"), refused_keys())
def test_refused_keys_are_named(key: str, value: Any) -> None:
    given: Any = value
    for part in reversed(key.split(".")):
        given = {part: given}
    section = key.split(".")[0]
    if section == "zero_optimization":
        given[section]["stage"] = 3
    with pytest.raises(NotImplementedError, match=key.removesuffix(".enabled")):
        deepspeed.initialize(model=make(), config={**config(), **given})


HJSON = """{
  # as people write it
  train_batch_size: 4
  optimizer: {type: AdamW
              params: {lr: 0.25}}
  zero_optimization: {stage: 2}
}"""


def test_files_that_are_hjson(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text(HJSON)
    for given in (path, str(path)):
        engine = deepspeed.initialize(model=make(), config=given)[0]
        assert engine.zero_optimization_stage() == 2 and engine.get_lr() == [0.25]
        assert engine.config["optimizer"]["params"]["lr"] == 0.25
        engine.destroy()
    assert DeepSpeedConfig(str(path)).train_batch_size == 4
    with deepspeed.zero.Init(config_dict_or_path=str(path), enabled=True):
        nn.Linear(2, 2)
    path.write_text("{a: 1, a: 2}")
    with pytest.raises(ValueError, match="given twice: a"):
        deepspeed.initialize(model=make(), config=str(path))
    path.write_text("{a: [1")
    with pytest.raises(deepspeed.DeepSpeedConfigError, match="no JSON and no HJSON"):
        deepspeed.initialize(model=make(), config=str(path))


def test_json_as_people_write_it() -> None:
    text = """{
      "train_batch_size": 4, // "of all", {
      "optimizer": {"type": "AdamW", /* }, # */ "params": {"lr": 0.25, },},
      "steps_per_print": Infinity, # ever
      "wandb": {"project": "// # ,} NaN",}
    }"""
    engine = deepspeed.initialize(model=make(), config=text)[0]
    assert engine.config["steps_per_print"] == float("inf") and engine.get_lr() == [0.25]
    assert engine.config["wandb"] == {"project": "// # ,} NaN"}
    engine.destroy()


def test_sections_of_a_programs_own() -> None:
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel
    from pydantic import Field, ValidationError

    class Inner(DeepSpeedConfigModel):
        size: int = 3

    class Mine(DeepSpeedConfigModel):
        rate: float = 0.5
        names: list[str] = []
        inner: Inner = Inner()
        name: str = Field(
            "", json_schema_extra={"deprecated": True, "new_param": "names", "new_param_fn": lambda x: [x]}
        )
        size: int = Field(0, json_schema_extra={"deprecated": True, "new_param": "inner.size"})

    assert Mine(rate=2, inner={"size": 4}).inner.size == 4 and Mine(rate="auto").rate == 0.5
    assert Mine(name="a").names == ["a"] and Mine(size=9).inner.size == 9
    with pytest.raises(ValidationError):
        Mine(no_such=1)
    with pytest.raises(ValidationError):
        Mine(strict=True, rate="auto")
    with pytest.raises(AssertionError, match="names"):
        Mine(name="a", names=["b"])


def test_what_deepspeed_resolves() -> None:
    assert DeepSpeedZeroConfig(stage=3, cpu_offload=True).offload_optimizer.device == "cpu"
    assert DeepSpeedZeroConfig(stage=3, cpu_offload_param=True).offload_param.device == "cpu"
    assert DeepSpeedZeroConfig(stage=3).offload_optimizer is None
    for stage in range(4):
        assert DeepSpeedZeroConfig(stage=stage).overlap_comm == (stage == 3)
        engine = deepspeed.initialize(model=make(), config=config(stage))[0]
        assert engine.zero_overlap_comm() == (stage == 3)
        engine.destroy()
    assert DeepSpeedZeroConfig(stage=2, overlap_comm=True).overlap_comm is True
    model = make()
    deepspeed.tp_model_init(model, tp_size=1, dtype=torch.float32)
    assert deepspeed.initialize(model=model, config=config())[0].autotp_size() == 1


def test_the_section_of_tensor_parallelism() -> None:
    from deepspeed.runtime.tensor_parallel.config import TPConfig, TPTrainingConfig, get_tensor_parallel_config
    from deepspeed.runtime.tensor_parallel.init_utils import infer_config_dtype, load_ds_config

    found = get_tensor_parallel_config({"tensor_parallel": {"autotp_size": 2, "tp": {"tp_grain_size": 8}}})
    assert (found.autotp_size, found.tensor_parallel.tp_grain_size) == (2, 8) and TPTrainingConfig().autotp_size == 0
    assert TPConfig(tp_size=2).tp_size == 2 and load_ds_config({"a": 1}) == {"a": 1}
    assert infer_config_dtype({"bf16": {"enabled": True}}) is torch.bfloat16 and infer_config_dtype({}) is None
