"""DeepSpeed's memory estimators by Tessera's own formula (tessera.estimate): bf16 with fp32 masters and Adam.

Bytes of model states; activations are not in them. "per CPU" is what the processes of one node need in host memory: for
the model while it is built in fp32, or what is offloaded, whichever is more, times `additional_buffer_factor`.
"""

from __future__ import annotations

from tessera.engine.front import load_config
from tessera.estimate import estimate
from torch import nn

from tessera import _core

_CONFIG = {"bf16": {"enabled": True}, "optimizer": {"type": "Adam"}}
_BUILT = 4  # bytes of a parameter of a model that is built in fp32


def _weight() -> int:
    return _core.precision(load_config(_CONFIG)).param.itemsize


def _host(total: float, held: float, processes: int, factor: float) -> int:
    return int(max(_BUILT * total, held) * processes * factor)


def estimate_zero2_model_states_mem_needs(
    total_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """(bytes of a node's host memory, bytes of a device). Optimizer offload takes gradients along."""
    rank = estimate(int(total_params), _CONFIG, num_gpus_per_node * num_nodes, stage=2)
    away = rank.states + rank.grads if cpu_offload else 0
    return _host(total_params, away, num_gpus_per_node, additional_buffer_factor), rank.total - away


def estimate_zero3_model_states_mem_needs(
    total_params: float,
    largest_layer_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """Returns (bytes of a node's host memory, bytes of a device, and those of gathered layers among these: the one that
    runs and the one that is fetched). With `zero_init` no process ever holds more of the built model than a layer."""
    rank = estimate(int(total_params), _CONFIG, num_gpus_per_node * num_nodes, stage=3)
    layers = 2 * _weight() * int(largest_layer_params)
    away = (rank.states + rank.grads if cpu_offload else 0) + (rank.params if cpu_offload_params else 0)
    built = largest_layer_params if zero_init else total_params
    return _host(built, away, num_gpus_per_node, additional_buffer_factor), layers + rank.total - away, layers


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Prints a line for each choice of offload."""
    estimate_zero2_model_states_mem_needs_all_cold(
        _sizes(model)[0], num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: float, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Estimates so for a number of parameters."""
    _head(f"{total_params / 1e6:.0f}M parameters", num_gpus_per_node, num_nodes)
    for away in (True, False):
        host, device = estimate_zero2_model_states_mem_needs(
            total_params, num_gpus_per_node, num_nodes, away, additional_buffer_factor
        )
        _line(host, device, offload_optimizer=_place(away))


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Prints a line for each choice of offload and of zero.Init."""
    estimate_zero3_model_states_mem_needs_all_cold(
        *_sizes(model), num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: float,
    largest_layer_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Estimates so for numbers of parameters."""
    sizes = f"{total_params / 1e6:.0f}M parameters, {largest_layer_params / 1e6:.0f}M in the largest layer"
    _head(sizes, num_gpus_per_node, num_nodes)
    for optimizer, params in ((True, True), (True, False), (False, False)):
        for zero_init in (True, False):
            host, device, _ = estimate_zero3_model_states_mem_needs(
                total_params,
                largest_layer_params,
                num_gpus_per_node,
                num_nodes,
                optimizer,
                params,
                zero_init,
                additional_buffer_factor,
            )
            places = {"offload_param": _place(params), "offload_optimizer": _place(optimizer)}
            _line(host, device, **places, zero_init=str(int(zero_init)))


def _sizes(model: nn.Module) -> tuple[int, int]:
    """Elements of all parameters, shared ones once, and of the largest module's own."""
    own = [sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules()]
    return sum(p.numel() for p in model.parameters()), max(own)


def _place(away: bool) -> str:
    return "cpu " if away else "none"


def _head(sizes: str, devices: int, nodes: int) -> None:
    print(f"Model states of {sizes}, on {nodes} node(s) of {devices} device(s), by Tessera in bf16:")
    print("  per CPU  |  per GPU |   Options")


def _line(host: int, device: int, **options: str) -> None:
    text = ", ".join(f"{name}={value}" for name, value in options.items())
    print(f" {host / 2**30:7.2f}GB | {device / 2**30:6.2f}GB | {text}")
