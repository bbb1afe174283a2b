"""deepspeed.ops: optimizers under their old names, and what is said about compiled parts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

from deepspeed._lazy import NotServed
from tessera import optim


def _check_states(name: str, fp32_optimizer_states: bool) -> None:
    if not fp32_optimizer_states:
        raise NotServed(
            f"[{name}] fp32_optimizer_states=False is not served; bf16.bf16_optimizer_states keeps moments in bf16"
        )


class FusedAdam(optim.FusedAdam):
    same_update_as = optim.FusedAdam

    def __init__(self, *args: Any, set_grad_none: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


class DeepSpeedCPUAdam(optim.FusedAdam):
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
        _check_states("DeepSpeedCPUAdam", fp32_optimizer_states)
        super().__init__(model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad)
        self.fp32_optimizer_states = fp32_optimizer_states


class FusedLamb(optim.Lamb):
    """LAMB with the arguments of old; what they choose beside the arithmetic changes nothing."""

    def __init__(
        self,
        params: Iterable[Any],
        *args: Any,
        eps_inside_sqrt: bool = False,
        max_grad_norm: float = 0.0,
        amsgrad: bool = False,
        **kwargs: Any,
    ) -> None:
        if eps_inside_sqrt or max_grad_norm or amsgrad:
            raise NotServed(
                "[FusedLamb] eps_inside_sqrt, max_grad_norm and amsgrad are not served; clip by gradient_clipping"
            )
        if len(args) > 4:
            raise TypeError("[FusedLamb] give what follows eps by name")
        super().__init__(params, *args, **kwargs)


class FusedLion(optim.Lion):
    same_update_as = optim.Lion

    def __init__(self, *args: Any, set_grad_none: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


class DeepSpeedCPULion(optim.Lion):
    same_update_as = optim.Lion

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        _check_states("DeepSpeedCPULion", fp32_optimizer_states)
        super().__init__(model_params, lr, betas, weight_decay)


class DeepSpeedCPUAdagrad(optim.Adagrad):
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
        _check_states("DeepSpeedCPUAdagrad", fp32_optimizer_states)
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
}

compatible_ops = dict(_PARTS.values())


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
