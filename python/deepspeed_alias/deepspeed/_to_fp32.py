"""deepspeed.utils.zero_to_fp32, for the checkpoints that Tessera reads."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from deepspeed import _zero
from tessera import _core, checkpoints


@dataclass(frozen=True)
class LazyTensor:
    """A tensor of a checkpoint that is read when it is asked for."""

    reader: _core.CheckpointReader
    tensor: _core.ExportTensor

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def contiguous(self) -> torch.Tensor:
        return _core.read_export(self.reader, self.tensor)


def _check(checkpoint_dir: str, tag: str | None) -> None:
    if not os.path.isdir(checkpoint_dir):
        raise FileNotFoundError(f"[zero_to_fp32] there is no folder '{checkpoint_dir}'")
    if tag is None and not os.path.isfile(os.path.join(checkpoint_dir, "latest")):
        raise ValueError(f"[zero_to_fp32] there is no file 'latest' in '{checkpoint_dir}'; name a tag")
    if tag is not None and not os.path.isdir(os.path.join(checkpoint_dir, tag)):
        raise FileNotFoundError(f"[zero_to_fp32] there is no folder '{os.path.join(checkpoint_dir, tag)}'")


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, Any]:
    """All parameters in fp32, and the buffers; tied names share one tensor. `lazy_mode`: a value is read when its
    contiguous() is called."""
    _check(checkpoint_dir, tag)
    if not lazy_mode:
        return checkpoints.state_dict(checkpoint_dir, tag, torch.float32, exclude_frozen_parameters)
    reader = checkpoints.open_checkpoint(checkpoint_dir, tag)
    lazy: dict[str, Any] = {}
    for tensor in _core.list_export(reader, torch.float32, not exclude_frozen_parameters):
        lazy.update(dict.fromkeys(tensor.names, LazyTensor(reader, tensor)))
    return lazy


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str,
    output_dir: str,
    max_shard_size: str | int = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """pytorch_model.bin or model.safetensors in `output_dir`, or several files and their index."""
    _check(checkpoint_dir, tag)
    checkpoints.export(
        checkpoint_dir, output_dir, tag, torch.float32, max_shard_size, exclude_frozen_parameters, safe_serialization
    )


def load_state_dict_from_zero_checkpoint(model: nn.Module, checkpoint_dir: str, tag: str | None = None) -> Any:
    """The model with the checkpoint's values, also inside zero.GatheredParameters. Collective at stage 3."""
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model = model.cpu()
    with _zero.writable(model.parameters()):
        model.load_state_dict(state, strict=False)
    return model


def get_model_state_file(checkpoint_dir: str, zero_stage: int) -> str:
    """The path of rank 0's file with the module's states, in a folder of DeepSpeed's layout (DIR/TAG)."""
    name = "mp_rank_00_model_states.pt" if zero_stage <= 2 else "zero_pp_rank_0_mp_rank_00_model_states.pt"
    path = os.path.join(checkpoint_dir, name)
    if not os.path.exists(path):
        raise FileNotFoundError(
            f"[zero_to_fp32] there is no file '{path}'; `tessera export` reads Tessera's own layout"
        )
    return path


def get_optim_files(checkpoint_dir: str) -> list[str]:
    """The files with the ranks' optimizer states in a folder of DeepSpeed's layout, in the order of the ranks."""
    found = [name for name in os.listdir(checkpoint_dir) if name.endswith("_optim_states.pt")]
    if not found:
        raise FileNotFoundError(f"[zero_to_fp32] there are no files *_optim_states.pt in '{checkpoint_dir}'")
    return [os.path.join(checkpoint_dir, name) for name in sorted(found, key=lambda name: (len(name), name))]
