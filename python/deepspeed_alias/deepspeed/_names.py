"""Names that DeepSpeed has and the table has not: names.txt (by tools/index_deepspeed_names.py), and why each is
refused. Read when a name is not found in the table."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import NamedTuple

ROOT = __name__.split(".")[0]


class Entry(NamedTuple):
    """source: the module that it is taken from, "" for the module's own. mark: what follows its name in the list."""

    source: str
    mark: str

    @property
    def other(self) -> str:
        """The name that this is another name of, with its module before it."""
        return _long(self.mark[1:]) if self.mark.startswith("@") else ""

    @property
    def is_known(self) -> bool:
        return self.mark not in ("", "=") and not self.other

    def value(self, name: str) -> object:
        """The value of a constant that is_known."""
        return name.lower() if self.mark == "~" else json.loads(self.mark[1:])


Names = dict[str, dict[str, Entry]]


@functools.cache
def index() -> Names:
    """module -> name -> entry."""
    found: Names = {}
    source = ""
    for line in (Path(__file__).parent / "names.txt").read_text().splitlines()[1:]:
        if not line.startswith(" "):
            names = found[_long(line)] = {}
            continue
        words = line.split()
        if not line.startswith("    "):
            source = _long(words[1].removesuffix(":")) if words[0] == "from" else ""
            words = words[2:] if source else words
        for word in words:
            name = re.split("[~=@]", word)[0]
            names[name if name != "*" else f"*{source}"] = Entry(source, word[len(name) :])
    for module in found:
        _take_all(found, module)
    return found


def _long(name: str) -> str:
    return ROOT if name == "." else ROOT + name


def _take_all(found: Names, module: str) -> None:
    """Fills in what "from source: *" stands for."""
    names = found[module]
    for star in [name for name in names if name.startswith("*")]:
        source = names.pop(star).source
        _take_all(found, source)
        for name in found[source]:
            if not name.startswith("_"):
                names.setdefault(name, Entry(source, ""))


@functools.cache
def _takers() -> dict[tuple[str, str], list[str]]:
    """Maps (module, name of its own) to the modules that take it from there."""
    found: dict[tuple[str, str], list[str]] = {}
    for module, names in index().items():
        for name, entry in names.items():
            if entry.source:
                found.setdefault((entry.source, name), []).append(module)
    return found


def takers(module: str, name: str) -> list[str]:
    return _takers().get((module, name), [])


_MOE = "expert parallelism (section `expert_parallel`); leaf modules (zero_optimization.leaf_module) train MoE models"
_PIPELINE = "inner parts of pipelines; deepspeed.pipe.PipelineModule and its engine, tessera.pipeline"
_DATA = "section `data_efficiency`; a sampler and a collate_fn of your own"
_KERNELS = "kernels that are compiled at run time; Tessera's are built with it"
_OFFLOAD = "inner parts of offload; sections zero_optimization.offload_optimizer and offload_param"
_TP = "inner parts of tensor parallelism; section `tensor_parallel`, tessera.parallel.plan_for says how a model is cut"

# What is said of the names of a module and of the modules below it, unless a row of the table says it.
_WHY = {
    "": "an inner part of DeepSpeed; the engine and its configuration do what it is for",
    "accelerator": "accelerators as classes; get_accelerator() is the one that torch has",
    "autotuning": "autotuning (section `autotuning`); tessera estimate",
    "checkpoint": "inner parts of checkpoints; engine.save_checkpoint(), load_checkpoint(), `tessera export`",
    "comm": "back ends of its own; torch.distributed has them, deepspeed.comm its collectives",
    "compile": "DeepCompile (section `compile`); engine.compile() is torch.compile",
    "compression": "compression (section `compression_training`)",
    "inference": "inference engines; call the model itself, inside zero.GatheredParameters where it is partitioned",
    "io": "writers of files; engine.save_checkpoint(), section `checkpoint`",
    "launcher": "inner parts of the launcher; the command `deepspeed`, `tessera launch`",
    "linear": "OptimizedLinear; use PEFT's LoRA",
    "model_implementations": "models of its own; those of Transformers",
    "module_inject": _TP,
    "module_inject.containers": _KERNELS,
    "moe": _MOE,
    "nvme": _OFFLOAD,
    "ops": _KERNELS,
    "runtime.checkpoint_engine": "writers of checkpoints; engine.save_checkpoint(), section `checkpoint`",
    "runtime.comm": "compressed communication; `communication_data_type`",
    "runtime.data_pipeline": _DATA,
    "runtime.domino": _TP,
    "runtime.eigenvalue": "section `eigenvalue`",
    "runtime.fp16.onebit": "1-bit optimizers; optimizers of section `optimizer`",
    "runtime.hybrid_engine": "the hybrid engine; deepspeed.zero.unwrap_model_for_generation",
    "runtime.pipe": _PIPELINE,
    "runtime.quantize": "section `quantize_training`",
    "runtime.rollout": "rollouts; deepspeed.zero.unwrap_model_for_generation, tessera.hybrid for groups of ranks",
    "runtime.superoffload": _OFFLOAD,
    "runtime.swap_tensor": _OFFLOAD,
    "runtime.tensor_parallel": _TP,
    "runtime.weight_quantizer": "section `quantize_training`",
    "runtime.zenflow": _OFFLOAD,
    "sequence": "inner parts of sequence parallelism; `sequence_parallel_size`, tessera.sequence",
}


def why(module: str) -> str:
    path = module[len(ROOT) + 1 :]
    while path not in _WHY:
        path = path.rpartition(".")[0]
    return _WHY[path]
