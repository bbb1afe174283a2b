"""DeepSpeed's checkpoints as manifests of our own (checkpoint/manifest.h), made in memory: every tensor where it lies
in the .pt files. What is no tensor goes into the manifest as the blobs that the engine's own checkpoints have.

    stage 0       everything in mp_rank_00_model_states.pt; masters and moments by parameter, or flat by param group
    stages 1, 2   every param group flat, padded, cut into equal parts: one *_optim_states.pt for each rank
    stage 3       every parameter cut into equal parts, padded; a rank's parts of a (sub) group one after the other
    universal     zero/<parameter>/<state>.pt, whole tensors
"""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import dataclass, field
from typing import Any

import torch

from tessera import _core
from tessera._blobs import CUT, cut_of, pickled
from tessera._deepspeed._pickle import Inert, TensorRef
from tessera._deepspeed._pieces import (
    DTYPE_NAMES,
    OWN_BUFFERS,
    OWN_KEYS,
    OWN_STEPS,
    Ordered,
    Piece,
    file_record,
    names_in,
    number_of,
    ranks_of,
    ranks_text,
    shape_of,
    sharded,
    some_of,
    whole,
)
from tessera._deepspeed._pt import PtFile
from tessera.errors import IoError

LOOKED_FOR = "DeepSpeed's '*_model_states.pt'"
_OPTIM = re.compile(r"(bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")


@dataclass
class Hints:
    """What the files do not say, and the engine that loads them knows."""

    # The optimizer's parameters by group, in order, with whether they are trained: files of stage 0 have no names.
    groups: list[list[tuple[str, bool]]] | None = None
    accumulation: int | None = None
    optimizer: bool = True  # its states are wanted


@dataclass
class _Trained:
    """A parameter that the optimizer has."""

    shape: tuple[int, ...]
    tensors: dict[str, tuple[torch.dtype, list[Piece]]] = field(default_factory=dict)  # by kind
    step: int = 0
    numbers: dict[str, Any] = field(default_factory=dict)  # states that are not one value for each element


def manifest_of(folder: str, hints: Hints | None = None, trusted: bool = False, skip: bool = False) -> str:
    """The text of a manifest of the DeepSpeed checkpoint in `folder`; empty where there is none. IoError that names the
    file for what is damaged, missing, or of a kind that cannot be read. `trusted`, `skip`: see PtFile."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return ""
    if not any(_MODEL.fullmatch(name) for name in names):
        return ""
    try:
        return _Folder(folder, names, hints or Hints(), trusted, skip).manifest()
    except IoError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, IndexError, OverflowError, RecursionError) as error:
        raise IoError(
            f"[checkpoint] '{folder}' is damaged, or no checkpoint of DeepSpeed's: {type(error).__name__}: {error}"
        ) from error


class _Folder:
    def __init__(self, folder: str, names: list[str], hints: Hints, trusted: bool, skip: bool) -> None:
        self.folder, self.hints, self._objects, self._skips = folder, hints, (trusted, skip), skip
        self.files: dict[str, PtFile] = {}
        self.trained: dict[str, _Trained] = {}
        self.groups: list[dict[str, Any]] = []  # hyper-parameters
        self.group_names: list[list[str]] = []
        self.scaler: dict[str, Any] | None = None
        self.has_buffers = OWN_BUFFERS in names
        self.universal = os.path.isdir(os.path.join(folder, "zero"))
        models, optims = self._ranks(names)
        self.model_file = self.open(models[min(models)])
        self.models = {rank: name for (rank, _), name in models.items()}
        self.state: dict[str, Any] = self.model_file.value
        if not isinstance(self.state, dict) or "module" not in self.state:
            self.model_file.fail("is no model-states file: it has no 'module'")
        for name, value in self.state["module"].items():
            if isinstance(value, Inert) and not name.endswith("_extra_state"):
                self.model_file.fail(f"has an object of '{value.module}.{value.name}' in the place of '{name}'")
        self.stage = self._read(optims, sharded=min(models)[0] >= 0)

    def _ranks(self, names: list[str]) -> tuple[dict[tuple[int, int], str], dict[int, str]]:
        """Model-states files by data-parallel (-1: of all) and tensor-parallel rank, optim-states by the former."""
        models: dict[tuple[int, int], str] = {}
        optims: dict[int, str] = {}
        for name in names:
            if name.startswith(("layer_", "expp_")):
                raise IoError(f"[checkpoint] '{self.folder}/{name}': checkpoints with experts cannot be read")
            if model := _MODEL.fullmatch(name):
                models[int(model[1] or -1), int(model[2])] = name
            if optim := _OPTIM.fullmatch(name):
                if int(optim[2]) in optims:
                    raise IoError(
                        f"[checkpoint] '{self.folder}': {optims[int(optim[2])]} and {name} are of two checkpoints"
                    )
                if int(optim[3]) > 0:
                    models[-1, int(optim[3])] = name
                optims[int(optim[2])] = name
        cut = [name for (_, tensor_rank), name in models.items() if tensor_rank > 0]
        if cut and not self.universal:
            raise IoError(
                f"[checkpoint] '{self.folder}/{cut[0]}': tensor-parallel checkpoints can be read as universal ones only"
            )
        if self.universal and any(rank < 0 for rank, _ in models):
            models = {ranks: name for ranks, name in models.items() if ranks[0] < 0}  # ours have both kinds
        if len({rank >= 0 for rank, _ in models}) > 1:
            raise IoError(f"[checkpoint] '{self.folder}' has files of stage 3 and of another stage: of two checkpoints")
        return models, optims

    def open(self, name: str) -> PtFile:
        if name not in self.files:
            self.files[name] = PtFile(os.path.join(self.folder, name), *self._objects)
        return self.files[name]

    # ------------------------------------------------------------ the optimizer's part

    def _read(self, optims: dict[int, str], sharded: bool) -> int:
        if self.universal:
            return self._read_universal(sharded)
        if not optims:
            if sharded:
                raise IoError(
                    f"[checkpoint] '{self.folder}' has no '*_optim_states.pt', which hold the weights of stage 3"
                )
            if self.state.get("param_shapes") and self.hints.optimizer and not self._skips:
                raise IoError(
                    f"[checkpoint] '{self.folder}' has no '*_optim_states.pt', which hold masters and moments of "
                    "stages 1 and 2; its weights alone are loaded with load_optimizer_states=False"
                )
            self._read_stage0()
            return 0
        world = ranks_of(self.model_file)
        missing = sorted(set(range(world)) - optims.keys())
        if missing or len(optims) != world:
            raise IoError(
                f"[checkpoint] '{self.folder}' was written by {world} ranks and has optim-states of {sorted(optims)}: "
                f"missing {some_of(missing)}"
            )
        files = [self.open(optims[rank]) for rank in range(world)]
        states = [file.value["optimizer_state_dict"] for file in files]
        stage = number_of(states[0].get("zero_stage", 1), 3)
        if sharded != (stage == 3):
            files[0].fail(f"is of stage {stage}, the model-states beside it are not: of two checkpoints")
        if sharded:
            self._read_stage3(files, states)
        else:
            self._read_flat(files, states)
        self._read_common(states[0])
        self._read_steps(files[0], files[0].value)
        return stage

    def _read_steps(self, file: PtFile, holder: dict[str, Any]) -> None:
        """Beside those of flat groups, where we wrote the file."""
        for name, step in holder.get(OWN_STEPS, {}).items():
            if name in self.trained:
                self.trained[name].step = self._step(file, {"step": step})

    def _read_common(self, state: dict[str, Any]) -> None:
        scaler = state.get("loss_scaler")
        if isinstance(scaler, Inert) and "cur_scale" in scaler.state:
            self._set_scaler(scaler.state)

    def _set_scaler(self, state: dict[str, Any]) -> None:
        scale, steps = float(state["cur_scale"]), number_of(state.get("cur_iter", 0))
        if scale == 1 and ("cur_iter" not in state or state.get("dynamic_loss_scale") is False):
            return  # what the modes without loss scaling have
        self.scaler = {
            "scale": scale,
            "steps": steps,
            "good_steps": max(0, steps - int(state.get("last_overflow_iter", -1)) - 1),
            "budget": max(1, int(state.get("cur_hysteresis", 1))),
            "overridden": False,
        }

    def _set_groups(self, file: PtFile, groups: list[dict[str, Any]]) -> None:
        self.groups = [{key: file.plain(value) for key, value in group.items() if key != "params"} for group in groups]

    def _shapes(self) -> list[dict[str, tuple[int, ...]]]:
        return [{name: shape_of(shape) for name, shape in group.items()} for group in self.state["param_shapes"]]

    def _read_flat(self, files: list[PtFile], states: list[dict[str, Any]]) -> None:
        """Stages 1 and 2. A rank's part of a group is as long as that of rank 0, but for the last parts, which are
        short of their padding; moments may have it."""
        base = [state["base_optimizer_state"] for state in states]
        elastic = not isinstance(base[0], dict)
        for number, shapes in enumerate(self._shapes()):
            masters = [state["single_partition_of_fp32_groups"][number] for state in states]
            own = [b[number] if elastic else b["state"].get(number, {}) for b in base]
            if elastic and "base_optimizer_state_step" in states[0]:
                own = [{"step": states[0]["base_optimizer_state_step"], **state} for state in own]
            parts, step, numbers = self._group_states(files, masters, own)
            length = masters[0].numel()
            at = 0
            for name, shape in shapes.items():
                numel = math.prod(shape)
                self._add(name, shape, step, numbers)
                for kind, refs in parts.items():
                    pieces = []
                    for rank, (file, ref) in enumerate(zip(files, refs, strict=True)):
                        low, high = (
                            max(at, rank * length),
                            min(at + numel, (rank + 1) * length, rank * length + ref.numel()),
                        )
                        if low < high:
                            offset = ref.begin + (low - rank * length) * ref.dtype.itemsize
                            pieces.append(Piece(file, offset, low - at, high - at))
                    self.trained[name].tensors[kind] = refs[0].dtype, pieces
                at += numel
            self.group_names.append(list(shapes))
        if not elastic:
            self._set_groups(files[0], base[0]["param_groups"])

    def _read_stage3(self, files: list[PtFile], states: list[dict[str, Any]]) -> None:
        world = len(files)
        base = [state["optimizer_state_dict"] for state in states]
        shapes = self._shapes()
        for number, sub_group in enumerate(shapes):
            masters = [state["fp32_flat_groups"][number] for state in states]
            parts, step, numbers = self._group_states(files, masters, [b["state"].get(number, {}) for b in base])
            at = 0
            for name, shape in sub_group.items():
                numel = math.prod(shape)
                part = -(-numel // world)
                self._add(name, shape, step, numbers)
                for kind, refs in parts.items():
                    self.trained[name].tensors[kind] = refs[0].dtype, sharded(files, refs, at, numel)
                at += part
        # Sub-groups of one group hold its parameters in order.
        self._set_groups(files[0], base[0]["param_groups"])
        for group in base[0]["param_groups"]:
            self.group_names.append([name for number in group["params"] for name in shapes[number]])

    def _group_states(
        self, files: list[PtFile], masters: list[TensorRef], states: list[dict[str, Any]]
    ) -> tuple[dict[str, list[TensorRef]], int, dict[str, Any]]:
        """Of a flat group: by kind what each rank has, the step count, and states that are no tensors of its length."""
        parts = {"master": masters}
        numbers: dict[str, Any] = {}
        steps = []
        for file, state in zip(files, states, strict=True):
            steps.append(self._step(file, state))
        for key, value in states[0].items():
            if key in ("master", "weight", "buffer"):
                files[0].fail(f"has a state of the optimizer that is named '{key}'")
            if isinstance(value, TensorRef) and len(value.shape) == 1:
                parts[str(key)] = [state[key] for state in states]
            elif isinstance(value, TensorRef) and value.shape:
                files[0].fail(f"has a state '{key}' of shape {value.shape}, which is not one value for each element")
            elif key != "step":
                numbers[str(key)] = files[0].plain(value)
        if len(set(steps)) > 1:
            names = [os.path.basename(file.path) for file in files]
            raise IoError(
                f"[checkpoint] '{self.folder}': {names} were saved after {steps} updates: of several checkpoints"
            )
        for kind, refs in parts.items():
            for file, ref, master in zip(files, refs, masters, strict=True):
                if not ref.is_contiguous() or len(ref.shape) != 1 or ref.numel() < master.numel():
                    file.fail(f"has {kind} of shape {ref.shape} for {master.numel()} elements of a group")
        return parts, steps[0], numbers

    def _step(self, file: PtFile, state: dict[str, Any]) -> int:
        value = file.plain(state.get("step", 0))
        return number_of(value.item() if isinstance(value, torch.Tensor) else value)

    def _add(self, name: str, shape: tuple[int, ...], step: int, numbers: dict[str, Any]) -> None:
        if name in self.trained:
            self.model_file.fail(f"lists parameter '{name}' twice")
        self.trained[name] = _Trained(shape, {}, step, numbers)

    def _read_stage0(self) -> None:
        saved = self.state.get("optimizer")
        if not isinstance(saved, dict):
            return
        file = self.model_file
        base = saved.get("optimizer_state_dict", saved)
        self._set_groups(file, base["param_groups"])
        if saved.get("cur_scale") is not None:
            self._set_scaler(saved)
        flat = saved.get("fp32_groups_flat")
        groups = self._named_groups(base["param_groups"], flat)
        if groups is None:
            return
        for number, (group, names) in enumerate(zip(base["param_groups"], groups, strict=True)):
            self.group_names.append(names)
            if flat is not None:
                self._read_stage0_flat(flat[number], base["state"].get(number, {}), names)
                continue
            for place, (index, name) in enumerate(zip(group["params"], names, strict=True)):
                value, state = self.state["module"][name], base["state"].get(index, {})
                masters = saved.get("fp32_groups")
                self._add(name, value.shape, self._step(file, state), {})
                tensors = {} if masters is None else {"master": masters[number][place]}
                for key, item in state.items():
                    if isinstance(item, TensorRef) and item.shape == value.shape and key != "step":
                        tensors[str(key)] = item
                    elif key != "step":
                        self.trained[name].numbers[str(key)] = file.plain(item)
                        if isinstance(item, TensorRef) and item.shape:
                            self.trained[name].numbers[CUT] = cut_of(0, math.prod(value.shape), value.shape)
                for kind, ref in tensors.items():
                    if ref.shape != value.shape:
                        file.fail(f"has {kind} of shape {ref.shape} for '{name}' of shape {value.shape}")
                    self.trained[name].tensors[kind] = ref.dtype, list(whole(file, ref))
        self._read_steps(file, saved)

    def _read_stage0_flat(self, master: TensorRef, state: dict[str, Any], names: list[str]) -> None:
        parts, step, numbers = self._group_states([self.model_file], [master], [state])
        at = 0
        for name in names:
            shape = self.state["module"][name].shape
            self._add(name, shape, step, numbers)
            for kind, refs in parts.items():
                offset = refs[0].begin + at * refs[0].dtype.itemsize
                piece = [Piece(self.model_file, offset, 0, math.prod(shape))] if 0 not in shape else []
                self.trained[name].tensors[kind] = refs[0].dtype, piece
            at += math.prod(shape)
        if at > master.numel():
            self.model_file.fail(f"has a group of {master.numel()} elements for parameters of {at}")

    def _named_groups(self, groups: list[dict[str, Any]], flat: list[TensorRef] | None) -> list[list[str]] | None:
        """The names of the optimizer's parameters by group. Without an engine's hint they are known where one group has
        all of them."""
        module, buffers = self.state["module"], set(self.state["buffer_names"])
        if self.hints.groups is not None:
            candidates = [
                [[name for name, _ in group] for group in self.hints.groups],
                [[name for name, trained in group if trained] for group in self.hints.groups],
            ]
        else:
            aliases = self._aliases()
            candidates = [
                [[n for n, v in module.items() if isinstance(v, TensorRef) and n not in aliases and n not in buffers]]
            ]
        for names in candidates:
            if len(names) != len(groups) or any(name not in module for group in names for name in group):
                continue
            if flat is not None:
                sizes = [sum(module[name].numel() for name in group) for group in names]
                if sizes == [ref.numel() for ref in flat]:
                    return names
            elif [len(group["params"]) for group in groups] == [len(group) for group in names]:
                return names
        if self.hints.groups is not None:
            self.model_file.fail(
                "has an optimizer of other parameters than the engine's: their names are not in files of stage 0, so "
                "groups must have the same parameters in the same order"
            )
        return None

    def _read_universal(self, sharded: bool) -> int:
        common_file = self.open("zero/optimizer_state.pt")
        common = common_file.value
        base = common.get("optimizer_state_dict", {})
        self._set_groups(common_file, common["param_groups"])
        for number, shapes in enumerate(self._shapes()):
            for name, shape in shapes.items():
                if "/" in name or name.startswith("."):
                    self.model_file.fail(f"has a parameter that is named '{name}'")
                at = f"zero/{name}"
                states = sorted(
                    n.removesuffix(".pt") for n in names_in(os.path.join(self.folder, at)) if n.endswith(".pt")
                )
                if "fp32" not in states:
                    raise IoError(f"[checkpoint] '{self.folder}/{at}/fp32.pt' is missing")
                self._add(name, shape, 0, {})
                record = self.trained[name]
                record.step = self._step(common_file, base.get("state", {}).get(number, {}))
                for state in states:
                    file = self.open(f"{at}/{state}.pt")
                    value = file.value["param"] if isinstance(file.value, dict) else file.value
                    if state == "step":
                        record.step = self._step(file, {"step": value})
                    elif not isinstance(value, TensorRef) or not value.is_contiguous():
                        file.fail("holds no tensor")
                    else:
                        if state == "fp32" and value.numel() != math.prod(shape):
                            record.shape = value.shape  # the model-states have a tensor-parallel part
                        record.tensors["master" if state == "fp32" else state] = value.dtype, list(whole(file, value))
        self.group_names = [list(shapes) for shapes in self._shapes()]
        self._read_common(common)
        return 3 if sharded else number_of(common.get("zero_stage", 1), 3)

    # ------------------------------------------------------------ the manifest

    def _aliases(self) -> dict[str, str]:
        """Other names of tied parameters."""
        shared = self.state.get("shared_params")
        if isinstance(shared, dict):
            return {str(alias): str(name) for alias, name in shared.items()}
        aliases: dict[str, str] = {}
        first: dict[tuple[Any, ...], str] = {}
        buffers = set(self.state["buffer_names"])
        for name, value in self.state["module"].items():
            if isinstance(value, TensorRef) and value.numel() > 0 and name not in buffers:
                known = first.setdefault((value.begin, value.shape, value.stride, value.dtype), name)
                if known != name:
                    aliases[name] = known
        return aliases

    def manifest(self) -> str:
        module, buffers = self.state["module"], list(self.state["buffer_names"])
        aliases = self._aliases()
        by_name: dict[str, list[str]] = {}
        for alias, name in aliases.items():
            by_name.setdefault(name, []).append(alias)
        params: list[dict[str, Any]] = []
        tensors: list[dict[str, Any]] = []
        blobs = {"python": self._python(), "client_state": self._client()}
        names = [n for n, v in module.items() if isinstance(v, TensorRef) and n not in aliases and n not in buffers]
        names += [name for name in self.trained if name not in module]
        frozen = self._frozen_parts()
        for name in names:
            known = self.trained.get(name)
            held = module.get(name)
            dtype = torch.float32 if held is None else held.dtype
            shape = known.shape if known is not None else frozen[name][0] if name in frozen else held.shape
            # Without hints, all parameters of a stage 0 whose optimizer is not understood may be trained.
            trained = known is not None or (self.stage == 0 and not self.trained)
            kinds = dict(known.tensors) if known is not None else {}
            if "master" not in kinds:
                kinds["weight"] = frozen[name][1:] if name in frozen else (dtype, list(whole(self.model_file, held)))
            params.append(
                {
                    "name": name,
                    "shape": shape,
                    "dtype": DTYPE_NAMES[dtype],
                    "trained": trained,
                    "step": 0 if known is None else known.step,
                    **({"aliases": by_name[name]} if name in by_name else {}),
                }
            )
            for kind, (kind_dtype, pieces) in kinds.items():
                tensors.append(self._tensor(name, kind, shape, kind_dtype, pieces))
        for name in buffers:
            value = module.get(name)
            if isinstance(value, TensorRef):
                tensors.append(self._buffer(name, "buffer", self.model_file, value))
        tensors += self._rank_buffers(buffers)
        numbers = {name: record.numbers for name, record in self.trained.items() if record.numbers}
        if numbers:
            blobs["optimizer-0"] = numbers
        return _core.sealed_manifest(
            json.dumps(
                {
                    "format": "tessera",
                    "version": 1,
                    "id": "",
                    "run": self._run(),
                    "files": [file_record(name, file) for name, file in self.files.items()],
                    "blobs": {name: {"hex": pickled(value, name).hex()} for name, value in blobs.items()},
                    "params": params,
                    "tensors": tensors,
                }
            )
        )

    def _tensor(
        self, name: str, kind: str, shape: tuple[int, ...], dtype: torch.dtype, pieces: list[Piece]
    ) -> dict[str, Any]:
        if dtype not in DTYPE_NAMES:
            raise IoError(f"[checkpoint] '{self.folder}': '{name}' ({kind}) has dtype {dtype}, which cannot be read")
        order = [piece for piece in pieces if isinstance(piece, Ordered)]
        numbers = {id(file): number for number, file in enumerate(self.files.values())}
        record: dict[str, Any] = {"name": name, "kind": kind, "dtype": DTYPE_NAMES[dtype], "shape": shape}
        if order:
            record["order"] = order[0].order
        record["pieces"] = [
            {"file": numbers[id(piece.file)], "offset": piece.offset, "range": [piece.begin, piece.end]}
            for piece in pieces
        ]
        return record

    def _rank_buffers(self, buffers: list[str]) -> list[dict[str, Any]]:
        """Those that are other ones than rank 0's: of stage 3, where every rank has files of its own, and in ours."""
        found = []
        for rank, name in sorted(self.models.items()) if self.stage == 3 and buffers else ():
            file = self.open(name)
            for buffer in buffers:
                value, first = file.value["module"].get(buffer), self.state["module"].get(buffer)
                if rank == 0 or not isinstance(value, TensorRef) or not isinstance(first, TensorRef):
                    continue
                if not torch.equal(file.read(value), self.model_file.read(first)):
                    found.append(self._buffer(f"{buffer}@rank={rank}", "rank_buffer", file, value))
        if self.has_buffers:
            file = self.open(OWN_BUFFERS)
            for name, value in file.value.items():
                if not isinstance(value, TensorRef) or name.rpartition("@rank=")[0] not in buffers:
                    file.fail(f"has {name!r:.80}, which is no tensor of a buffer")
                found.append(self._buffer(name, "rank_buffer", file, value))
        return found

    def _buffer(self, name: str, kind: str, file: PtFile, value: TensorRef) -> dict[str, Any]:
        return self._tensor(name, kind, tuple(value.shape), value.dtype, list(whole(file, value)))

    def _frozen_parts(self) -> dict[str, tuple[tuple[int, ...], torch.dtype, list[Piece]]]:
        """Of stage 3, whose module holds nothing of them."""
        if self.stage != 3 or not self.state.get("frozen_param_shapes"):
            return {}
        world = ranks_of(self.model_file)
        missing = sorted(set(range(world)) - self.models.keys())
        if missing:
            raise IoError(
                f"[checkpoint] '{self.folder}' has no model-states of ranks {some_of(missing)}, which hold frozen "
                "parameters"
            )
        files = [self.open(self.models[rank]) for rank in range(world)]
        parts = {}
        for file in files[1:]:
            if file.value["global_steps"] != self.state["global_steps"]:
                file.fail(f"was saved at another step than '{self.model_file.path}'")
        for name, saved in self.state["frozen_param_shapes"].items():
            refs = [file.value["frozen_param_fragments"][name] for file in files]
            shape = shape_of(saved)
            parts[str(name)] = shape, refs[0].dtype, sharded(files, refs, 0, math.prod(shape))
        return parts

    def _accumulation(self) -> int:
        config = self.state.get("ds_config")
        steps = config.get("gradient_accumulation_steps") if isinstance(config, dict) else None
        return self.hints.accumulation or (steps if isinstance(steps, int) and steps > 0 else 1)

    def _run(self) -> dict[str, Any]:
        steps = number_of(self.state["global_steps"])
        run: dict[str, Any] = {
            "counters": {
                "micro_steps": steps * self._accumulation(),
                "global_steps": steps,
                "skipped_steps": number_of(self.state["skipped_steps"]),
                "global_samples": number_of(self.state.get("global_samples", 0)),
            },
            "ranks": ranks_text(ranks_of(self.model_file)),
            "groups": [],
            "client": {},
            "source": {
                "format": "DeepSpeed, universal" if self.universal else "DeepSpeed",
                "version": str(self.state.get("ds_version")),
                "stage": self.stage,
                "ranks": ranks_of(self.model_file),
            },
        }
        for group in self.groups:
            numbers = {key: float(v) for key, v in group.items() if type(v) in (int, float) and math.isfinite(v)}
            one: dict[str, Any] = {key: numbers[key] for key in ("lr", "eps", "weight_decay") if key in numbers}
            betas = group.get("betas")
            if isinstance(betas, (tuple, list)) and [type(beta) in (int, float) for beta in betas] == [True, True]:
                one |= {"beta1": float(betas[0]), "beta2": float(betas[1])}
            run["groups"].append(one)
        if self.scaler is not None:
            run["scaler"] = self.scaler
        return run

    def _python(self) -> dict[str, Any]:
        file = self.model_file
        part: dict[str, Any] = {
            "extra": {
                name.removesuffix("_extra_state").removesuffix("."): file.plain(value)
                for name, value in self.state["module"].items()
                if name.endswith("_extra_state") and not isinstance(value, TensorRef)
            },
            "config": file.plain(self.state.get("ds_config")),
        }
        if self.groups:
            part["param_groups"] = self.groups
        if self.group_names:
            part["group_names"] = self.group_names
        if self.state.get("lr_scheduler") is not None:
            part["schedule"] = file.plain(self.state["lr_scheduler"])
        return part

    def _client(self) -> dict[str, Any]:
        return {key: self.model_file.plain(value) for key, value in self.state.items() if key not in OWN_KEYS}
