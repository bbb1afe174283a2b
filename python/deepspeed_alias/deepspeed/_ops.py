"""deepspeed.ops: optimizers under their old names, and what is said about compiled parts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from tessera.errors import ConfigError
from tessera.optim.engines import AUX_ADAM, orthogonal

from deepspeed._lazy import NotServed
from tessera import optim


class _OnCpu:
    """The base of optimizers for parameters on the CPU. `fp32_optimizer_states` False: states have their parameter's
    dtype, in an engine the configuration's."""

    fp32_optimizer_states = True

    def _state_dtype(self, param: torch.Tensor) -> torch.dtype:
        if self.fp32_optimizer_states:
            return torch.float32
        if param.dtype is torch.float16:
            raise NotServed(
                f"[{type(self).__name__}] fp32_optimizer_states=False is not served for float16 parameters, whose "
                "squares it cannot hold; for bfloat16 and float32 it is"
            )
        return param.dtype


class FusedAdam(optim.FusedAdam):
    same_update_as = optim.FusedAdam

    def __init__(self, *args: Any, set_grad_none: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


class DeepSpeedCPUAdam(_OnCpu, optim.FusedAdam):
    same_update_as = optim.FusedAdam
    _on_cpu_only = True

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        self.fp32_optimizer_states = fp32_optimizer_states
        super().__init__(model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad)


class FusedLamb(optim.Lamb):
    """LAMB with the arguments of old, in their order."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        if max_grad_norm:
            raise NotServed("[FusedLamb] max_grad_norm is not served; clip by gradient_clipping")
        super().__init__(
            params, lr, bias_correction, betas, eps, weight_decay, max_coeff, min_coeff, eps_inside_sqrt, amsgrad
        )


class Muon(optim.Muon):
    """Muon for matrices alone, with the arguments of old."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.02,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        ns_method: str = "gram",
    ) -> None:
        super().__init__(params, lr, momentum, weight_decay, ns_method=ns_method)


class MuonWithAuxAdam(optim.Muon):
    """Muon, and AdamW for what is no matrix: every group says `use_muon`."""

    def __init__(
        self,
        param_groups: Iterable[dict[str, Any]],
        adam_optimizer: Any = None,
        adam_optimizer_kwargs: dict[str, Any] | None = None,
        adam_w_mode: bool = True,
        fallback_to_inline: bool = False,
    ) -> None:
        """`adam_optimizer`, a class, and `fallback_to_inline` choose between implementations elsewhere."""
        groups = [dict(group) for group in param_groups]
        if any("use_muon" not in group for group in groups):
            raise ConfigError("[MuonWithAuxAdam] a param group does not say use_muon: True for matrices, else False")
        for group in groups:
            if not group["use_muon"]:
                group.update({**AUX_ADAM, **(adam_optimizer_kwargs or {}), **group})
        super().__init__(groups, adam_w_mode=adam_w_mode)


zeropower_via_newtonschulz5 = zeropower_via_gram_newtonschulz = orthogonal
SingleDeviceMuon = Muon
SingleDeviceMuonWithAuxAdam = MuonWithAuxAdam


class FusedLion(optim.Lion):
    same_update_as = optim.Lion

    def __init__(self, *args: Any, set_grad_none: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


class DeepSpeedCPULion(_OnCpu, optim.Lion):
    same_update_as = optim.Lion

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        self.fp32_optimizer_states = fp32_optimizer_states
        super().__init__(model_params, lr, betas, weight_decay)


class DeepSpeedCPUAdagrad(_OnCpu, optim.Adagrad):
    same_update_as = optim.Adagrad

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        self.fp32_optimizer_states = fp32_optimizer_states
        if amsgrad:
            raise NotServed("[DeepSpeedCPUAdagrad] amsgrad is not served")
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)


# Parts that DeepSpeed compiles: the class of the builder -> (name, served without compiling).
_PARTS = {
    "AsyncIOBuilder": ("async_io", False),
    "GDSBuilder": ("gds", False),
    "CPUAdamBuilder": ("cpu_adam", True),
    "CPUAdagradBuilder": ("cpu_adagrad", True),
    "CPULionBuilder": ("cpu_lion", True),
    "FusedAdamBuilder": ("fused_adam", True),
    "FusedLionBuilder": ("fused_lion", True),
    "FusedLambBuilder": ("fused_lamb", True),
    "TransformerBuilder": ("transformer", False),
    "StochasticTransformerBuilder": ("stochastic_transformer", False),
    "SparseAttnBuilder": ("sparse_attn", False),
    "InferenceBuilder": ("transformer_inference", False),
    "QuantizerBuilder": ("quantizer", False),
    "RandomLTDBuilder": ("random_ltd", False),
    "SpatialInferenceBuilder": ("spatial_inference", False),
    "UtilsBuilder": ("utils", True),
    "PinMemoryBuilder": ("pin_memory", True),
    "CCLCommBuilder": ("deepspeed_ccl_comm", False),
    "ShareMemCommBuilder": ("deepspeed_shm_comm", True),
    "EvoformerAttnBuilder": ("evoformer_attn", False),
    "FPQuantizerBuilder": ("fp_quantizer", False),
    "DeepCompileBuilder": ("dc", False),
    "InferenceCoreBuilder": ("inference_core_ops", False),
    "InferenceCutlassBuilder": ("cutlass_ops", False),
    "RaggedOpsBuilder": ("ragged_device_ops", False),
    "RaggedUtilsBuilder": ("ragged_ops", False),
}

compatible_ops = dict(_PARTS.values())
accelerator_name = ""  # none that parts were compiled for
# Facts of the installed torch, in DeepSpeed's writing: versions as "major.minor", "0.0" for what there is not.
torch_info = {
    "version": ".".join(torch.__version__.split(".")[:2]),
    "cuda_version": torch.version.cuda or "0.0",
    "nccl_version": "0.0",
    "hip_version": getattr(torch.version, "hip", None) or "0.0",
    "bf16_support": True,
}


class OpBuilder:
    """A part that DeepSpeed compiles at run time. Tessera compiles nothing then."""

    NAME = ""

    def is_compatible(self, verbose: bool = False) -> bool:
        return compatible_ops[self.NAME]

    def load(self, verbose: bool = True) -> NoReturn:
        raise NotServed(f"[deepspeed.ops] {self.NAME} has no module to load: Tessera compiles nothing at run time")


def __getattr__(name: str) -> Any:
    if name not in _PARTS:
        raise AttributeError(name)
    found = globals()[name] = type(name, (OpBuilder,), {"NAME": _PARTS[name][0]})
    return found
