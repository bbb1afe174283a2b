"""Checkpoints in DeepSpeed's layouts, from any that can be read. Every rank writes the files of its own ranks there;
tensors pass through memory in pieces."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tessera import _core
from tessera._blobs import CUT, OWN_KINDS, Saved, check_like, cut_of, of_kind
from tessera._deepspeed._pieces import OWN_BUFFERS, OWN_STEPS, ranks_text
from tessera._deepspeed._pt_writer import Made, Streamed, write_pt
from tessera.errors import ConfigError

VERSION = "0.19.8"  # of DeepSpeed whose files these are
_CHUNK = 1 << 22  # elements in memory
_ALIGNMENT = 2  # of flat groups of stages 1 and 2, in elements for each rank
_SUB_GROUP = 1_000_000_000  # elements, the default of its stage3_sub_group_size
_UNIVERSAL = {"universal_checkpoint_version": 0.4}

SCRIPT = '''#!/usr/bin/env python
"""Full fp32 weights of the checkpoint in this folder: zero_to_fp32.py CHECKPOINT_DIR OUTPUT_DIR [--help]"""

import argparse

from tessera.checkpoints import export

parser = argparse.ArgumentParser(description="Full fp32 weights of a checkpoint.")
parser.add_argument("checkpoint_dir", help="the folder that save_checkpoint() was called with")
parser.add_argument("output_dir")
parser.add_argument("--max_shard_size", default="5GB")
parser.add_argument("--safe_serialization", action="store_true", help="safetensors instead of pytorch_model.bin")
parser.add_argument("-t", "--tag", help="default: what the file `latest` names")
parser.add_argument("--exclude_frozen_parameters", action="store_true")
parser.add_argument("-d", "--debug", action="store_true", help="errors with where they came from")

if __name__ == "__main__":
    a = parser.parse_args()
    form = {"exclude_frozen": a.exclude_frozen_parameters, "safetensors": a.safe_serialization}
    try:
        export(a.checkpoint_dir, a.output_dir, a.tag, max_shard_size=a.max_shard_size, **form)
    except (ValueError, OSError) as error:
        if a.debug:
            raise
        raise SystemExit(str(error))
'''


@dataclass
class _Group:
    """What is one flat tensor there: a param group, or in stage 3 a part of one."""

    number: int  # of the param group
    names: list[str]


class Source:
    """A checkpoint that is read, in terms of what DeepSpeed's files hold."""

    def __init__(self, reader: _core.CheckpointReader, trusted: bool = False) -> None:
        """`trusted`: objects of any kind are unpickled, which can run code."""
        self.reader = reader
        self.params = {param.name: param for param in reader.params()}
        self.kinds: dict[str, dict[str, tuple[list[int], torch.dtype]]] = {}
        for name, kind, shape, dtype in reader.tensors():
            self.kinds.setdefault(name, {})[kind] = shape, dtype
        saved = Saved(reader, trusted)
        self.run: dict[str, Any] = json.loads(reader.run())
        self.client: dict[str, Any] = saved.blob("client_state", {})
        self.config: dict[str, Any] = of_kind(saved.run.get("config") or {}, dict, "'python', 'config'")
        self.extra: dict[str, Any] = saved.part("extra", {})
        self._group_names: list[list[str]] | None = saved.group_names()
        self._param_groups: list[dict[str, Any]] | None = saved.param_groups()
        self._schedule: Any = saved.part("schedule", kind=object)
        # States of a client's optimizer that are not one value for each element, by parameter.
        self.numbers: dict[str, dict[str, Any]] = {}
        for _, states in saved.optimizers():
            self.numbers.update(states)
        for name, state in self.numbers.items():
            check_like(state.get("step", 0), 0, f"the optimizer's state of '{name}', 'step'", finite=True)
            shape = self.params[name].shape if name in self.params else []
            if state.pop(CUT, None) not in (None, cut_of(0, math.prod(shape), shape)):
                self.refuse(name)
        self.trained = [param.name for param in self.params.values() if param.trained]
        self.frozen = [param.name for param in self.params.values() if not param.trained]

    def refuse(self, name: str) -> None:
        """States of the parameter that DeepSpeed's files cannot hold."""
        of = [repr(key) for key, v in self.numbers.get(name, {}).items() if isinstance(v, torch.Tensor) and v.dim() > 0]
        if of:
            raise ConfigError(
                f"[checkpoints] {', '.join(of)} of '{name}' are neither numbers nor one value for each element, which "
                "DeepSpeed's files cannot hold"
            )

    def groups(self) -> list[list[str]]:
        """Names by param group, in the optimizer's order."""
        names = self._group_names
        if names is None:
            if len(self.run["groups"]) > 1:
                raise ConfigError(
                    "[checkpoints] this checkpoint does not say which parameters its groups have, and DeepSpeed's "
                    "files need that: save it from Python by this version"
                )
            names = [self.trained]
        return [[name for name in group if name in self.params] for group in names if group]

    def param_groups(self, params: list[list[int]]) -> list[dict[str, Any]]:
        saved = self._param_groups
        if saved is None:
            saved = [
                {"lr": g["lr"], "betas": (g["beta1"], g["beta2"]), "eps": g["eps"], "weight_decay": g["weight_decay"]}
                for g in self.run["groups"]
            ]
        # Its own Adam needs the first of these.
        own = {"bias_correction": True} if saved and "betas" in saved[0] else {}
        return [{**own, **group, "params": numbers} for group, numbers in zip(saved, params, strict=False)]

    def torch_optimizer(self) -> bool:
        """Whether the optimizer there is one of torch.optim, rather than DeepSpeed's own of the same name."""
        optimizer = self.config.get("optimizer") or {}
        own = str(optimizer.get("type", "")).lower() in ("adam", "adamw")
        return not own or bool((optimizer.get("params") or {}).get("torch_adam"))

    def step(self, names: list[str]) -> Any:
        """Of a flat group, in the form that the optimizer there has."""
        step = max((int(self.numbers.get(name, {}).get("step", self.params[name].step)) for name in names), default=0)
        return torch.tensor(float(step)) if self.torch_optimizer() else step

    def steps_beside(self, groups: list[list[str]]) -> dict[str, Any]:
        """Of parameters that had fewer updates than their flat group, as they joined later: how many. A key of our own,
        as DeepSpeed has one number for all of a group."""
        steps: dict[str, int] = {}
        for names in groups:
            own = {name: int(self.step([name])) for name in names}
            steps |= {name: step for name, step in own.items() if step != max(own.values())}
        return {OWN_STEPS: steps} if steps else {}

    def scalars(self, names: list[str]) -> dict[str, Any]:
        """States that a flat group has beside its tensors."""
        return {**(self.numbers.get(names[0], {}) if names else {}), "step": self.step(names)}

    def moments(self, name: str) -> list[str]:
        return [kind for kind in self.kinds.get(name, {}) if kind not in OWN_KINDS]

    def value_kind(self, name: str) -> str:
        return "master" if "master" in self.kinds.get(name, {}) else "weight"

    def numel(self, name: str) -> int:
        return math.prod(self.params[name].shape)

    def chunks(self, name: str, kind: str, dtype: torch.dtype, begin: int, end: int) -> Iterator[torch.Tensor]:
        for at in range(begin, end, _CHUNK):
            yield self.reader.read_range(name, kind, at, min(at + _CHUNK, end)).to(dtype)

    def whole(self, name: str, kind: str, dtype: torch.dtype) -> Streamed:
        shape = tuple(self.kinds[name][kind][0]) if name in self.kinds else tuple(self.params[name].shape)
        return Streamed(dtype, shape, lambda: self.chunks(name, kind, dtype, 0, math.prod(shape)))

    def module(self, rank: int = 0) -> OrderedDict[str, Any]:
        """The state dict in the dtypes that the module computed in; tied names have one tensor. Buffers as `rank` has
        them."""
        state: OrderedDict[str, Any] = OrderedDict()
        for param in self.params.values():
            value = self.whole(param.name, self.value_kind(param.name), param.dtype)
            for name in (param.name, *param.aliases):
                state[name] = value
        for name in self.buffers():
            own = f"{name}@rank={rank}"
            name_of, kind = (own, "rank_buffer") if own in self.kinds else (name, "buffer")
            state[name] = self.whole(name_of, kind, self.kinds[name_of][kind][1])
        for prefix, value in self.extra.items():
            state[f"{prefix}._extra_state" if prefix else "_extra_state"] = value
        return state

    def buffers(self) -> list[str]:
        return [name for name, kinds in self.kinds.items() if "buffer" in kinds]

    def rank_buffers(self) -> dict[str, Any]:
        """Those that ranks have otherwise than rank 0."""
        own = {name: kinds["rank_buffer"] for name, kinds in self.kinds.items() if "rank_buffer" in kinds}
        return {name: self.whole(name, "rank_buffer", dtype) for name, (_, dtype) in own.items()}

    def schedule(self) -> Any:
        steps = self.run.get("client", {}).get("schedule_steps")
        if self._schedule is None and steps is not None:
            return {"last_batch_iteration": steps - 1}
        return self._schedule

    def loss_scaler(self) -> Made:
        module = "deepspeed.runtime.fp16.loss_scaler"
        fp16 = self.config.get("fp16") or {}
        scaler = self.run.get("scaler", {"scale": 1.0, "steps": 0, "good_steps": 0, "budget": 1})
        if not fp16.get("enabled") or fp16.get("loss_scale"):
            return Made(module, "LossScaler", {"cur_scale": float(scaler["scale"]), "dynamic": False})
        state = {
            "cur_scale": float(scaler["scale"]),
            "dynamic": True,
            "cur_iter": scaler["steps"],
            "last_overflow_iter": scaler["steps"] - scaler["good_steps"] - 1,
            "scale_factor": 2.0,
            "scale_window": fp16.get("loss_scale_window", 1000),
            "min_scale": fp16.get("min_loss_scale", 1),
            "delayed_shift": fp16.get("hysteresis", 2),
            "cur_hysteresis": scaler["budget"],
            "consecutive_hysteresis": bool(fp16.get("consecutive_hysteresis", False)),
            "raise_error_at_min_scale": True,
            "dtype": torch.float16,
        }
        return Made(module, "DynamicLossScaler", state)

    def is_bf16(self) -> bool:
        section = self.config.get("bf16") or self.config.get("bfloat16") or {}
        return bool(section.get("enabled")) or any(p.dtype == torch.bfloat16 for p in self.params.values())


class CheckpointFiles:
    """The files of a checkpoint for a stage and a number of ranks."""

    def __init__(self, source: Source, stage: int, world: int) -> None:
        if stage not in (0, 1, 2, 3) or world < 1:
            raise ConfigError(f"[checkpoints] there is no stage {stage} on {world} ranks")
        self.source, self.stage, self.world = source, stage, world
        self.groups = [_Group(number, names) for number, names in enumerate(source.groups())]
        if stage == 3:
            self.groups = [part for group in self.groups for part in self._sub_groups(group)]

    def _sub_groups(self, group: _Group) -> Iterator[_Group]:
        """Stage 3 cuts a param group after the parameter with which a part has this many elements on a rank."""
        limit = (self.source.config.get("zero_optimization") or {}).get("sub_group_size", _SUB_GROUP)
        sizes = [self._part(name) for name in group.names]
        if limit >= sum(sizes):
            yield group
            return
        names: list[str] = []
        size = 0
        for name, numel in zip(group.names, sizes, strict=True):
            names.append(name)
            size += numel
            if size >= limit or name == group.names[-1]:
                yield _Group(group.number, names)
                names, size = [], 0

    def _part(self, name: str) -> int:
        return -(-self.source.numel(name) // self.world)

    def names(self) -> list[str]:
        return [name for rank in range(self.world) for name, _ in self.files(rank)]

    def write(self, folder: str, rank: int) -> None:
        """The files of that rank."""
        for name, value in self.files(rank):
            write_pt(os.path.join(folder, name), value())

    def files(self, rank: int) -> list[tuple[str, Callable[[], Any]]]:
        files: list[tuple[str, Callable[[], Any]]] = []
        if self.stage == 3:
            files.append((f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt", lambda: self.model_states(rank)))
        elif rank == 0:
            files.append(("mp_rank_00_model_states.pt", lambda: self.model_states(rank)))
            if self.source.run.get("ranks") == ranks_text(self.world) and self.source.rank_buffers():
                files.append((OWN_BUFFERS, self.source.rank_buffers))
        if self.stage > 0:
            prefix = "bf16_" if self.source.is_bf16() else ""
            files.append((f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", lambda: self.optim_states(rank)))
        return files

    # ------------------------------------------------------------ model states

    def model_states(self, rank: int) -> dict[str, Any]:
        source, run = self.source, self.source.run
        counters = run["counters"]
        if rank == 0 and "accumulation" in run:
            warnings.warn(
                "[checkpoints] DeepSpeed's files hold no gradients: what has come of an accumulation since the last "
                "update is left out, and a load begins it anew",
                stacklevel=2,
            )
        sizes = {name: torch.Size(param.shape) for name, param in source.params.items()}
        frozen = OrderedDict((name, sizes[name]) for name in source.frozen) if self.stage >= 2 else None
        zero = self.stage > 0
        aliases = {alias: param.name for param in source.params.values() for alias in param.aliases}
        return {
            "module": self._sharded_module(rank) if self.stage == 3 else source.module(),
            "buffer_names": source.buffers(),
            "optimizer": None if zero else self._whole_optimizer(),
            "param_shapes": [OrderedDict((n, sizes[n]) for n in g.names) for g in self.groups] if zero else None,
            "frozen_param_shapes": frozen,
            "shared_params": (aliases if rank == 0 else {}) if zero else None,
            "frozen_param_fragments": self._frozen(rank) if self.stage >= 2 else None,
            "lr_scheduler": source.schedule(),
            "data_sampler": None,
            "random_ltd": None,
            "sparse_tensor_module_names": set(),
            "skipped_steps": counters["skipped_steps"],
            "global_steps": counters["global_steps"],
            "global_samples": counters["global_samples"],
            "dp_world_size": self.world,
            "mp_world_size": 1,
            "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
            "ds_config": source.config,
            "ds_version": VERSION,
            "universal_checkpoint_info": dict(_UNIVERSAL),
            **source.client,
        }

    def _sharded_module(self, rank: int) -> OrderedDict[str, Any]:
        """Nothing of the parameters: they are in the optim-states and the fragments."""
        state = self.source.module(rank if self.source.run.get("ranks") == ranks_text(self.world) else 0)
        for param in self.source.params.values():
            state.update(dict.fromkeys((param.name, *param.aliases), torch.empty(0, dtype=param.dtype)))
        return state

    def _frozen(self, rank: int) -> OrderedDict[str, Streamed]:
        fragments: OrderedDict[str, Streamed] = OrderedDict()
        for name in self.source.frozen:
            kind, dtype = self.source.value_kind(name), self.source.params[name].dtype
            if self.stage < 3:
                fragments[name] = self.source.whole(name, kind, dtype)
            else:
                fragments[name] = self._parts([name], kind, dtype, rank)
        return fragments

    def _whole_optimizer(self) -> dict[str, Any]:
        """Of stage 0."""
        source = self.source
        states: dict[int, dict[str, Any]] = {}
        numbers: list[list[int]] = []
        for group in self.groups:
            numbers.append(list(range(len(states), len(states) + len(group.names))))
            for number, name in zip(numbers[-1], group.names, strict=True):
                moments = {kind: source.whole(name, kind, torch.float32) for kind in source.moments(name)}
                states[number] = {**source.scalars([name]), **moments} if moments else {}
        low = any(source.params[name].dtype != torch.float32 for name in source.trained)
        if not low:
            return {"state": states, "param_groups": source.param_groups(numbers)}
        scaler = source.loss_scaler().state
        common = {
            "dynamic_loss_scale": scaler["dynamic"],
            "cur_scale": scaler["cur_scale"],
            "cur_iter": scaler.get("cur_iter", 0),
            "last_overflow_iter": scaler.get("last_overflow_iter", -1),
            "scale_factor": 2.0,
            "scale_window": scaler.get("scale_window", 1000),
            "clip_grad": self._clip(),
        }
        if source.torch_optimizer():
            masters = [[source.whole(n, source.value_kind(n), torch.float32) for n in g.names] for g in self.groups]
            optimizer = {"state": states, "param_groups": source.param_groups(numbers)}
            return {**common, "optimizer_state_dict": optimizer, "fp32_groups": masters}
        sizes = [sum(source.numel(name) for name in group.names) for group in self.groups]
        flat = {
            number: self._flat_state(group, partial(self._range, group, 0, size, size))
            for number, (group, size) in enumerate(zip(self.groups, sizes, strict=True))
        }
        optimizer = {"state": flat, "param_groups": source.param_groups([[n] for n in flat])}
        masters_flat = [self._range(g, 0, size, size, "master") for g, size in zip(self.groups, sizes, strict=True)]
        common |= source.steps_beside([group.names for group in self.groups])
        return {**common, "optimizer_state_dict": optimizer, "fp32_groups_flat": masters_flat}

    def _clip(self) -> float:
        return float(self.source.config.get("gradient_clipping", 0.0))

    # ------------------------------------------------------------ optim states

    def optim_states(self, rank: int) -> dict[str, Any]:
        state = self._sharded_state(rank) if self.stage == 3 else self._flat_group_state(rank)
        steps = self.source.steps_beside([group.names for group in self.groups])
        return {"optimizer_state_dict": state, "ds_config": self.source.config, "ds_version": VERSION, **steps}

    def _flat_group_state(self, rank: int) -> dict[str, Any]:
        """Stages 1 and 2."""
        source = self.source
        states, masters, paddings, mappings = {}, [], [], []
        for number, group in enumerate(self.groups):
            numel = sum(source.numel(name) for name in group.names)
            size = -(-numel // (_ALIGNMENT * self.world)) * _ALIGNMENT
            begin, end = min(rank * size, numel), min((rank + 1) * size, numel)
            paddings.append(size - (end - begin))
            masters.append(self._range(group, begin, end, end - begin, "master"))
            states[number] = self._flat_state(group, partial(self._range, group, begin, end, size))
            mappings.append(self._mapping(group, begin, end))
        scaler = source.loss_scaler()
        return {
            "loss_scaler": scaler,
            "dynamic_loss_scale": scaler.state["dynamic"],
            "overflow": False,
            "clip_grad": self._clip(),
            "base_optimizer_state": {"state": states, "param_groups": source.param_groups([[n] for n in states])},
            "single_partition_of_fp32_groups": masters,
            "zero_stage": self.stage,
            "group_paddings": paddings,
            "partition_count": [self.world] * len(self.groups),
            "ds_version": VERSION,
            "param_slice_mappings": mappings,
            "universal_checkpoint_info": dict(_UNIVERSAL),
        }

    def _sharded_state(self, rank: int) -> dict[str, Any]:
        """Stage 3."""
        source = self.source
        states = {
            number: self._flat_state(group, partial(self._group_part, group, rank))
            for number, group in enumerate(self.groups)
        }
        numbers: dict[int, list[int]] = {}
        for number, group in enumerate(self.groups):
            numbers.setdefault(group.number, []).append(number)
        scaler = source.loss_scaler()
        return {
            "zero_stage": self.stage,
            "loss_scaler": scaler,
            "dynamic_loss_scale": scaler.state["dynamic"],
            "overflow": False,
            "partition_count": self.world,
            "optimizer_state_dict": {"state": states, "param_groups": source.param_groups(list(numbers.values()))},
            "fp32_flat_groups": [self._group_part(group, rank, "master") for group in self.groups],
        }

    def _flat_state(self, group: _Group, part: Callable[[str], Streamed]) -> dict[str, Any]:
        kinds = self.source.moments(group.names[0])
        for name in group.names:
            self.source.refuse(name)
            if self.source.moments(name) != kinds and self.source.numel(name) > 0:
                raise ConfigError(
                    f"[checkpoints] '{name}' and '{group.names[0]}' are of one param group and have other states: "
                    "DeepSpeed's flat groups cannot hold that"
                )
        return {**self.source.scalars(group.names), **{kind: part(kind) for kind in kinds}} if kinds else {}

    def _mapping(self, group: _Group, begin: int, end: int) -> OrderedDict[str, Made]:
        """Where in this rank's part of the flat group its parameters are."""
        places: OrderedDict[str, Made] = OrderedDict()
        at = 0
        for name in group.names:
            low, high = max(at, begin), min(at + self.source.numel(name), end)
            at += self.source.numel(name)
            if low < high:
                place = {"numel": high - low, "start": low - begin}
                places[name] = Made("deepspeed.utils.tensor_fragment", "fragment_address", place)
        return places

    def _range(self, group: _Group, begin: int, end: int, size: int, kind: str) -> Streamed:
        """Elements [begin, end) of the parameters one after the other, then zeros."""

        def chunks() -> Iterator[torch.Tensor]:
            at = 0
            for name in group.names:
                low, high = max(at, begin), min(at + self.source.numel(name), end)
                own = self.source.value_kind(name) if kind == "master" else kind
                yield from self.source.chunks(name, own, torch.float32, low - at, high - at)
                at += self.source.numel(name)
            yield torch.zeros(size - (end - begin))

        return Streamed(torch.float32, (size,), chunks)

    def _group_part(self, group: _Group, rank: int, kind: str) -> Streamed:
        return self._parts(group.names, kind, torch.float32, rank)

    def _parts(self, names: list[str], kind: str, dtype: torch.dtype, rank: int) -> Streamed:
        """Stage 3: this rank's part of every parameter, padded with zeros."""

        def chunks() -> Iterator[torch.Tensor]:
            for name in names:
                size, numel = self._part(name), self.source.numel(name)
                low, high = min(rank * size, numel), min((rank + 1) * size, numel)
                own = self.source.value_kind(name) if kind == "master" else kind
                yield from self.source.chunks(name, own, dtype, low, high)
                yield torch.zeros(size - (high - low), dtype=dtype)

        return Streamed(dtype, (sum(self._part(name) for name in names),), chunks)


def write_universal(source: Source, folder: str) -> None:
    """Whole tensors, which DeepSpeed loads at any stage (1 to 3) and number of ranks. With model-states under the names
    that either stage looks for."""
    flat = CheckpointFiles(source, 2, 1)
    os.makedirs(folder, exist_ok=True)
    write_pt(os.path.join(folder, "mp_rank_00_model_states.pt"), flat.model_states(0))
    sharded = CheckpointFiles(source, 3, 1)
    write_pt(os.path.join(folder, "zero_pp_rank_0_mp_rank_00_model_states.pt"), sharded.model_states(0))
    common = flat.optim_states(0)["optimizer_state_dict"]
    base = common.pop("base_optimizer_state")
    for key in ("single_partition_of_fp32_groups", "param_slice_mappings"):
        del common[key]
    common["param_groups"] = base["param_groups"]
    states = {number: {"step": source.step(group.names)} for number, group in enumerate(sharded.groups)}
    common["optimizer_state_dict"] = {"state": states, "param_groups": base["param_groups"]}
    os.makedirs(os.path.join(folder, "zero"), exist_ok=True)
    write_pt(os.path.join(folder, "zero", "optimizer_state.pt"), common)
    for group in flat.groups:
        for name in group.names:
            if "/" in name or name.startswith("."):
                raise ConfigError(f"[checkpoints] a parameter named '{name}' cannot be the name of a folder")
            own = os.path.join(folder, "zero", name)
            os.makedirs(own, exist_ok=True)
            kinds = {"fp32": source.value_kind(name), **{kind: kind for kind in source.moments(name)}}
            for file, kind in kinds.items():
                value = source.whole(name, kind, torch.float32)
                write_pt(os.path.join(own, f"{file}.pt"), {"param": value, "cat_dim": 0})
            write_pt(os.path.join(own, "step.pt"), source.step([name]))
