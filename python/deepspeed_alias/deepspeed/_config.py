"""Configurations as old callers look at them: sections as objects, and the classes of their errors."""

from __future__ import annotations

import contextlib
import enum
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from tessera.engine.front import core_group, load_config, text_of
from tessera.errors import ConfigError, Problem

import tessera
from deepspeed._elasticity import elastic_error
from tessera import _core

ZERO_OPTIMIZATION = "zero_optimization"


class DeepSpeedConfigError(ConfigError):
    """A configuration that makes no sense."""


class _AmsgradError(DeepSpeedConfigError, RuntimeError):
    """FusedAdam's own error for amsgrad."""


class OffloadDeviceEnum(str, enum.Enum):
    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, enum.Enum):
    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class ZeroStageEnum(int, enum.Enum):
    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3  # noqa: PIE796


def read(given: Any) -> Any:
    """The path of a file that is HJSON and not JSON as its dict; anything else as it is."""
    if not isinstance(given, (str, os.PathLike)) or not os.path.isfile(given):
        return given
    with open(given, encoding="utf-8", errors="replace") as file:
        text = file.read()
    try:
        _as_people_write(text)
    except ValueError as error:
        try:
            import hjson
        except ImportError:
            raise DeepSpeedConfigError(
                f"[config] '{os.fspath(given)}' is no JSON ({error}); HJSON is read where hjson is installed"
            ) from None
        try:
            return hjson.loads(text, object_pairs_hook=dict_raise_error_on_duplicate_keys)
        except hjson.HjsonDecodeError as worse:
            raise DeepSpeedConfigError(f"[config] '{os.fspath(given)}' is no JSON and no HJSON: {worse}") from None
    return given


def _as_people_write(text: str) -> Any:
    """Reads text with comments and commas before a closing bracket, as the core does. ValueError for what it would
    refuse."""
    return json.loads(_core.strict_json(text))


def users_dict(given: Any) -> dict[str, Any]:
    """A configuration as the user wrote it: the dict itself, or what a file or text (that the core accepts) holds."""
    if isinstance(given, tessera.Config):
        return given.to_dict(all=False)
    if isinstance(given, Mapping):
        return given if isinstance(given, dict) else dict(given)
    given = read(given)
    return given if isinstance(given, dict) else _as_people_write(text_of(given))


# Sections whose values pydantic checks in DeepSpeed.
_CHECKED = (
    *("zero_optimization", "fp16", "bf16", "bfloat16", "tensor_parallel", "compile"),
    *("tensorboard", "csv_monitor", "wandb", "comet", "comms_logger"),
)


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Inside, errors of the configuration have the classes that DeepSpeed raises: pydantic's ValidationError (where it
    is installed) for keys of its checked sections that are unknown or have values which are wrong by themselves, else
    DeepSpeedConfigError, as for keys that contradict each other."""
    try:
        yield
    except DeepSpeedConfigError:
        raise
    except ConfigError as error:
        raised = _as_deepspeeds(error)
        if raised is None:
            raise
        raise raised from error


def _as_deepspeeds(error: ConfigError) -> Exception | None:
    text, kinds = str(error), {problem.path: problem.kind for problem in error.problems}
    if kinds.get("zero_optimization.leaf_module") == "value":
        return TypeError(text)
    if "optimizer.params.amsgrad" in kinds:
        return _AmsgradError(text)
    by_themselves = [problem for problem in error.problems if problem.kind in ("unknown", "value")]
    checked = [problem for problem in by_themselves if problem.path.split(".")[0] in _CHECKED]
    if checked:
        return _validation_error(checked) or DeepSpeedConfigError(text)
    return elastic_error(error) or (DeepSpeedConfigError(text) if error.origin == "config" else None)


def _validation_error(found: list[Problem]) -> Exception | None:
    """Pydantic's; None where it is not installed."""
    try:
        from pydantic_core import PydanticCustomError, ValidationError
    except ImportError:
        return None
    lines = [
        {
            "type": PydanticCustomError("value_error", "{reason}", {"reason": problem.text}),
            "loc": tuple(problem.path.split(".")),
            "input": None,
        }
        for problem in found
    ]
    return ValidationError.from_exception_data("DeepSpeed configuration, read by Tessera", lines)


class Section:
    """One section of the configuration: its keys as attributes, by both spellings where there are two. ValidationError
    for wrong ones."""

    _path: tuple[str, ...] = ()  # in the configuration

    def __init__(self, strict: bool = False, **values: Any) -> None:
        given: dict[str, Any] = values
        for name in reversed(self._path):
            given = {name: given}
        with translated():
            tree: Any = tessera.Config.from_dict(given).to_dict()
        for name in self._path:
            tree = tree[name]
        self._fill(tree, values)

    @classmethod
    def _of(cls, tree: Mapping[str, Any], given: Mapping[str, Any]) -> Section:
        made = cls.__new__(cls)
        made._fill(tree, given)
        return made

    def _fill(self, tree: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        self._values = dict(tree)
        for name, value in tree.items():
            if name in _OFFLOAD:
                asked = given.get(name) or (value["device"] != "none" and {})  # also by the deprecated key
                value = _OFFLOAD[name]._of(value, asked) if asked is not False else None
            elif name == "device":
                value = OffloadDeviceEnum(value)
            elif isinstance(value, Mapping):
                value = Section._of(value, given.get(name) or {})
            setattr(self, name, value)
            if name.startswith("stage3_"):
                setattr(self, name.removeprefix("stage3_"), value)

    def model_dump(self, **_: Any) -> dict[str, Any]:
        return dict(self._values)

    dict = model_dump

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._values})"


class DeepSpeedZeroOffloadOptimizerConfig(Section):
    def __init__(self, **values: Any) -> None:
        whole = DeepSpeedZeroConfig(stage=3, offload_optimizer={"device": "none", **values})
        self._fill(whole._values["offload_optimizer"], values)


class DeepSpeedZeroOffloadParamConfig(Section):
    def __init__(self, **values: Any) -> None:
        whole = DeepSpeedZeroConfig(stage=3, offload_param={"device": "none", **values})
        self._fill(whole._values["offload_param"], values)


_OFFLOAD: dict[str, type[Section]] = {
    "offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
    "offload_param": DeepSpeedZeroOffloadParamConfig,
}


class DeepSpeedZeroConfig(Section):
    _path = (ZERO_OPTIMIZATION,)

    def _fill(self, tree: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        super()._fill(tree, given)
        if tree.get("overlap_comm") is None:
            self.overlap_comm = tree["stage"] == 3  # DeepSpeed's value where the key is not given


class DeepSpeedFP16Config(Section):
    _path = ("fp16",)


class DeepSpeedBF16Config(Section):
    _path = ("bf16",)


def get_zero_config(param_dict: Mapping[str, Any]) -> DeepSpeedZeroConfig:
    section = param_dict.get(ZERO_OPTIMIZATION, {})
    return DeepSpeedZeroConfig(**({"stage": int(section)} if isinstance(section, bool) else section))


class DeepSpeedZeroLeafModuleConfig(Section):
    _path = (ZERO_OPTIMIZATION, "leaf_module")


class TensorBoardConfig(Section):
    _path = ("tensorboard",)


class CSVConfig(Section):
    _path = ("csv_monitor",)


class WandbConfig(Section):
    _path = ("wandb",)


class CometConfig(Section):
    _path = ("comet",)


_MONITORS = ("tensorboard", "csv_monitor", "wandb", "comet")


class DeepSpeedMonitorConfig:
    """The monitors' sections."""

    def __init__(self, **values: Any) -> None:
        self.resolved = tessera.Config.from_dict(values)
        tree = self.resolved.to_dict()
        for name in _MONITORS:
            setattr(self, name, Section._of(tree[name], values.get(name) or {}))
        self.enabled = any(tree[name]["enabled"] for name in _MONITORS)


def get_monitor_config(param_dict: Mapping[str, Any]) -> DeepSpeedMonitorConfig:
    return DeepSpeedMonitorConfig(**{name: param_dict.get(name) or {} for name in _MONITORS})


def dict_raise_error_on_duplicate_keys(ordered_pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A hook for json.load(object_pairs_hook=...)."""
    found = dict(ordered_pairs)
    if len(found) < len(ordered_pairs):
        names = [name for name, _ in ordered_pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"[config] given twice: {', '.join(twice)}")
    return found


def get_scalar_param(param_dict: Mapping[str, Any], param_name: str, param_default_value: Any) -> Any:
    return param_dict.get(param_name, param_default_value)


class DeepSpeedConfig:
    """A configuration (dict, path or base64), resolved: its keys and what is derived of them as attributes."""

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None, world_size: int | None = None) -> None:
        with translated():
            resolved = load_config(read(config))
            if world_size is None:
                world_size = mpu.get_data_parallel_world_size() if mpu is not None else core_group().size
            self._fill(resolved, users_dict(config), world_size)

    @classmethod
    def of_engine(cls, engine: tessera.Engine, given: dict[str, Any]) -> DeepSpeedConfig:
        """`given`: as the user wrote it."""
        made = cls.__new__(cls)
        made._fill(engine.config, given, engine.dp_world_size)
        return made

    def _fill(self, resolved: tessera.Config, given: dict[str, Any], world_size: int) -> None:
        batch, tree = resolved.resolve_batch(world_size), resolved.to_dict()
        self._param_dict = given
        self.world_size = world_size
        for name, value in tree.items():
            setattr(self, name, value)
        self.train_batch_size = batch.train_batch_size
        self.train_micro_batch_size_per_gpu = batch.micro_batch_size
        self.gradient_accumulation_steps = batch.gradient_accumulation_steps
        zero = given.get(ZERO_OPTIMIZATION) or {}
        zero_given = zero if isinstance(zero, Mapping) else {}
        self.zero_config = DeepSpeedZeroConfig._of(tree[ZERO_OPTIMIZATION], zero_given)
        self.zero_optimization_stage = resolved.zero_optimization.stage
        self.zero_enabled = self.zero_optimization_stage > 0
        self.fp16_enabled, self.bfloat16_enabled = resolved.fp16.enabled, resolved.bf16.enabled
        self.float16_config = DeepSpeedFP16Config._of(tree["fp16"], {})
        self.bfloat16_config = DeepSpeedBF16Config._of(tree["bf16"], {})
        self.loss_scale = resolved.fp16.loss_scale
        self.optimizer_name, self.optimizer_params = resolved.optimizer.type or None, resolved.optimizer.params
        self.scheduler_name, self.scheduler_params = resolved.scheduler.type or None, resolved.scheduler.params
        self.monitor_config = get_monitor_config(tree)
        self.load_universal_checkpoint = resolved.checkpoint.load_universal

    def print_user_config(self) -> str:
        return str(self._param_dict)
