"""tp_model_init: recorded for the process, until the next initialize hands it to the model that it is given. And layers
that are cut by hand, their whole values, and sizes of slices."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from tessera.engine.front import core_group
from tessera.errors import ConfigError, UsageError
from tessera.parallel.engines import cut_of, cuts_of
from torch import nn

import tessera
from deepspeed._config import users_dict
from tessera import _core, parallel

ROOT = __name__.split(".")[0]
_RECORD = "_TP_MODEL_INIT_ARGS"  # the package's: programs set it to None by hand
_NOTE = "_tessera_tp_model_init"  # on models: Record
_training = True


def set_autotp_mode(training: bool = False) -> None:
    global _training
    _training = training


def is_autotp_training_mode() -> bool:
    return _training


@dataclasses.dataclass(frozen=True)
class Record:
    size: int
    dtype: torch.dtype
    group: Any = None  # of torch: the ranks that hold slices of one model


def _recorded() -> Record | None:
    found: dict[str, Any] | None = sys.modules[ROOT].__dict__.get(_RECORD)
    return None if found is None else Record(found["tp_size"], found["dtype"], found["tp_group"])


def tp_model_init(model: nn.Module, tp_size: int, dtype: torch.dtype, config: Any = None, **kwargs: Any) -> nn.Module:
    """Returns the model as it is; the next initialize cuts it into `tp_size` slices."""
    record = _made(tp_size, dtype, kwargs.get("tp_group"), _recorded())
    setattr(sys.modules[ROOT], _RECORD, {"tp_size": record.size, "dtype": record.dtype, "tp_group": record.group})
    return model


def _made(tp_size: int, dtype: torch.dtype, group: Any, before: Record | None) -> Record:
    """A record of what is asked for. ConfigError where it is wrong, or contradicts the one `before`."""
    if not isinstance(tp_size, int) or isinstance(tp_size, bool) or tp_size < 1:
        raise ConfigError(f"[tp_model_init] tp_size must be an integer of 1 or more, got {tp_size!r}")
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"[tp_model_init] dtype must be a torch.dtype, got {dtype!r}")
    if group is not None and _size(group) != tp_size:
        raise ConfigError(f"[tp_model_init] tp_group has {_size(group)} ranks, tp_size is {tp_size}")
    record = Record(tp_size, dtype, group)
    if before is not None and (
        (before.size, before.dtype, _size(before.group)) != (record.size, record.dtype, _size(record.group))
    ):
        raise ConfigError(f"[tp_model_init] Conflicting tp_model_init: {before}, then {record}")
    return record


def _size(group: Any) -> int:
    return 0 if group is None else int(group.size() if callable(group.size) else group.size)


def handed_over(given: Any, model: nn.Module | None) -> Any:
    """Notes what was recorded on the model, from where take_record() gets it; the record is used up. Returns the
    configuration without the group that only this package knows, with the size."""
    record = _recorded()
    if record is None or model is None:
        return given
    if isinstance(given, (str, os.PathLike)):
        given = users_dict(given)
    section = given.get("tensor_parallel") if isinstance(given, Mapping) else None
    inner = (section or {}).get("tp", (section or {}).get("tensor_parallel", {}))
    if not isinstance(inner, Mapping):
        raise ConfigError("[initialize] tensor_parallel.tp must be a dict")
    if inner.get("tp_group", record.group) is not record.group:
        raise ConfigError("[initialize] tensor_parallel.tp.tp_group is another group than tp_model_init's")
    setattr(sys.modules[ROOT], _RECORD, None)
    vars(model)[_NOTE] = _made(record.size, record.dtype, record.group, vars(model).get(_NOTE))
    if not isinstance(given, Mapping):
        return given
    tp = {key: value for key, value in inner.items() if key != "tp_group"}
    size = (section or {}).get("autotp_size") or tp.get("tp_size") or record.size
    return {**given, "tensor_parallel": {**(section or {}), **({"tp": tp} if inner else {}), "autotp_size": size}}


def take_record(model: nn.Module, config: tessera.Config, mpu: Any) -> Record | None:
    """Takes what was asked for off the model, checked against the configuration."""
    record: Record | None = vars(model).get(_NOTE)
    if record is None:
        return None
    if record.group is not None and mpu is not None:
        raise ConfigError("[initialize] tp_model_init provided tp_group, and mpu is given too; pass one of them")
    section = config.tensor_parallel
    for key, value, off in (("tp.tp_size", section.tp.tp_size, 1), ("autotp_size", section.autotp_size, 0)):
        if value not in (record.size, off):
            raise ConfigError(
                f"[initialize] Conflicting tensor_parallel.{key}: the configuration says {value}, tp_model_init said "
                f"{record.size}"
            )
    for key, part, dtype in (("bf16", config.bf16, torch.bfloat16), ("fp16", config.fp16, torch.float16)):
        if part.enabled and record.dtype != dtype:
            raise ConfigError(f"[initialize] Conflicting dtype: {key}.enabled, but tp_model_init said {record.dtype}")
    if section.dtype not in (None, record.dtype):
        raise ConfigError(
            f"[initialize] Conflicting tensor_parallel.dtype: the configuration says "
            f"{section.dtype}, tp_model_init said {record.dtype}"
        )
    del vars(model)[_NOTE]
    return record


# ---- layers


class _CutLayer(type):
    """Called with a linear layer, makes it one that is cut; those are its instances."""

    _kind: str

    def __call__(cls, module: nn.Module, mp_group: Any = None, *args: Any, **kwargs: Any) -> nn.Module:
        if mp_group is None:
            return module  # a layer that stays whole
        with _whole_for_good(module):
            layer = cls._cut(module, _core_group_of(mp_group), *args, **kwargs)  # type: ignore[attr-defined]
        mark(layer)
        return layer

    def __instancecheck__(cls, instance: object) -> bool:
        cut = cut_of(instance) if isinstance(instance, nn.Module) else None
        return cut is not None and cut.kind == cls._kind


_core_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # groups take a rendezvous to make


def _core_group_of(group: Any) -> Any:
    if group not in _core_groups:
        _core_groups[group] = core_group(group)
    return _core_groups[group]


class LinearLayer(metaclass=_CutLayer):
    """A linear layer of which this rank keeps its outputs: the same object, changed. `name` and `tp_meta` say whether
    they are dealt out by whole heads."""

    _kind = "column"

    @staticmethod
    def _cut(
        module: nn.Module,
        group: Any,
        skip_partition: bool = False,
        gather_output: bool = False,
        name: str = "",
        tp_meta: AutoTPMeta | None = None,
    ) -> nn.Module:
        if skip_partition:
            raise UsageError("[LinearLayer] skip_partition with a group is not served; give it the whole layer")
        heads = _kv_heads_of(tp_meta)
        return parallel.column_linear(module, group, gather=gather_output, kv_heads=heads, name=str(name))

    @classmethod
    def from_weights(
        cls,
        weight_shape: Any = None,
        dtype: torch.dtype = torch.half,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        gather_output: bool = False,
    ) -> nn.Module:
        """A whole layer of these values."""
        out, inputs = weight_shape if weight is None else weight.shape
        layer = nn.Linear(inputs, out, bias=bias is not None, dtype=None if weight is None else weight.dtype)
        if weight is not None:
            layer.weight = nn.Parameter(weight)
        if bias is not None:
            layer.bias = nn.Parameter(bias)
        return layer


class LinearAllreduce(metaclass=_CutLayer):
    """A linear layer of which this rank keeps its inputs; its outputs are the sum over the ranks."""

    _kind = "row"

    @staticmethod
    def _cut(module: nn.Module, group: Any, name: str = "", tp_meta: AutoTPMeta | None = None) -> nn.Module:
        return parallel.row_linear(module, group, kv_heads=_kv_heads_of(tp_meta), name=str(name))


@contextlib.contextmanager
def _whole_for_good(module: nn.Module) -> Any:
    from tessera.zero.engines import whole_for_good

    for param in module.parameters(recurse=False):
        if tessera.zero.partition_info(param) is not None:
            whole_for_good(param)
    yield


class _Whole:
    """p.gather_params([p]) and p._tp_partition([p]) of the parameters of one layer."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self._open: dict[int, parallel.WholeSlices] = {}

    def gather(self, params: Iterable[torch.Tensor | None]) -> None:
        for param in params:
            if param is not None and id(param) not in self._open:
                self._open[id(param)] = parallel.WholeSlices([param], self._layer)
                self._open[id(param)].__enter__()

    def part(self, params: Iterable[torch.Tensor | None]) -> None:
        for param in params:
            held = self._open.pop(id(param), None)
            if held is not None:
                held.__exit__()

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()


class _Of:
    """A method of _Whole, on parameters: copies and pickles of them have none."""

    def __init__(self, whole: _Whole, method: str) -> None:
        self._call = getattr(whole, method)

    def __call__(self, params: Iterable[torch.Tensor | None]) -> None:
        self._call(params)

    __deepcopy__, __reduce__ = _Whole.__deepcopy__, _Whole.__reduce__


def mark(model: nn.Module) -> None:
    """Gives slices in `model` the attributes that callers look for."""
    for module in model.modules():
        cuts = cuts_of_one(module)
        if not cuts:
            continue
        vars(module)["ds_is_replaced_module"] = True
        whole = _Whole(module)
        for param in cuts:
            vars(param).update(
                ds_is_replaced_module=True, gather_params=_Of(whole, "gather"), _tp_partition=_Of(whole, "part")
            )


def cuts_of_one(module: nn.Module) -> list[nn.Parameter]:
    cut = cut_of(module)
    return [p for name in (cut.params if cut is not None else ()) if (p := module._parameters.get(name)) is not None]


class GatherReplacedLayerParams:
    """Makes slices among `params` whole inside, and those that stage 3 partitions too. Values written to them
    stay, but for partitioned ones. Collective."""

    def __init__(self, params: torch.Tensor | Iterable[torch.Tensor], module: nn.Module, enabled: bool = True) -> None:
        given = [params] if isinstance(params, torch.Tensor) else list(params)
        model: Any = module.module if hasattr(module, "parallel_plan") else module  # of an engine
        cuts = cuts_of(model)
        self.enabled = enabled and any(id(param) in cuts for param in given)
        self.params, self.module = given, module
        self._model = model
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> None:
        if self.enabled:
            with contextlib.ExitStack() as entered:  # both or none
                entered.enter_context(tessera.zero.GatheredParameters(self.params))
                entered.enter_context(parallel.WholeSlices(self.params, self._model))
                self._stack = entered.pop_all()

    def __exit__(self, *error: Any) -> None:
        self._stack.close()


# ---- sizes


@dataclasses.dataclass(frozen=True)
class AutoTPMeta:
    """Settings by which a dim is dealt out."""

    num_kv_heads: int | None = None
    num_attention_heads: int | None = None
    n_embd: int | None = None
    tp_grain_size: int = 1

    @classmethod
    def from_model_config(cls, model_config: Any, tp_grain_size: int = 1) -> AutoTPMeta:
        from tessera.parallel.engines import facts_of_config

        if model_config is None:
            return cls(tp_grain_size=tp_grain_size)
        facts = facts_of_config(getattr(model_config, "text_config", None) or model_config)
        return cls(facts.kv_heads or None, facts.heads or None, facts.hidden or None, tp_grain_size)


_of_process: list[int | None] = [None, None]  # set by set_num_kv_heads() and set_tp_grain_size()


def set_num_kv_heads(num: int | None) -> None:
    """Sets the number for get_shard_size() without an AutoTPMeta, from now on."""
    _of_process[0] = num


def get_num_kv_heads() -> int | None:
    return _of_process[0]


def set_tp_grain_size(num: int) -> None:
    _of_process[1] = num


def _kv_heads_of(meta: AutoTPMeta | None) -> int:
    return (meta.num_kv_heads if meta is not None else _of_process[0]) or 0


def get_shard_size_list(total_size: int, mp_size: int, meta: Any = None, name: Any = None) -> list[int]:
    """The sizes of each rank's shard. `meta`: an AutoTPMeta; or, as in older versions, the name."""
    if meta is not None and not isinstance(meta, AutoTPMeta):
        meta, name = None, meta
    heads = _core.heads_for(str(name), total_size, _kv_heads_of(meta)) if _kv_heads_of(meta) else 0
    grain = (meta.tp_grain_size if meta is not None else _of_process[1]) or 1
    return list(_core.part_sizes(total_size, mp_size, heads, grain if total_size >= grain else 1))


def get_shard_size(
    total_size: int, mp_size: int, meta: Any = None, name: Any = None, rank: int | None = None, mp_group: Any = None
) -> int:
    """The size of one rank's shard: of `rank`, else this process's."""
    if meta is not None and not isinstance(meta, AutoTPMeta):
        # (total_size, mp_size, name, rank) of older versions.
        meta, name, rank = None, meta, name if rank is None else rank
    if rank is None:
        if mp_group is None and dist.get_world_size() != mp_size:
            raise ConfigError(f"[get_shard_size] which of {mp_size} ranks? Give rank or mp_group")
        rank = dist.get_rank(mp_group)
    return get_shard_size_list(total_size, mp_size, meta, name)[rank]
