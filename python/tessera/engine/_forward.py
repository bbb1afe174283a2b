"""A forward of an engine's module, between what the core does before and after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tessera import _core
from tessera._outputs import tensors_in
from tessera.autocast import cast_floating
from tessera.engine._look import Look
from tessera.parallel.engines import TensorParallel
from tessera.sequence.engines import attends_locally
from tessera.zero.engines import Partition


class Forward:
    """`warn`: tells the user; None on ranks that do not. `checks_attention`: ranks share sequences."""

    def __init__(
        self,
        core: _core.Engine,
        parallel: TensorParallel,
        partition: Partition,
        look: Look,
        device: torch.device,
        warn: Callable[[list[str]], None] | None,
        checks_attention: bool,
        casts_inputs: Callable[[], bool],
    ) -> None:
        self._core, self._parallel, self._partition, self._look = core, parallel, partition, look
        self._device, self._warn, self._checks_attention = device, warn, checks_attention
        self.input_dtype: torch.dtype | None = None  # that inputs are cast to, where this forward's are
        self._casts_inputs = casts_inputs

    def run(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        core, parallel = self._core, self._parallel
        self._look.before_forward()
        if self._checks_attention and self._warn is not None:  # now: registration may come after the engine
            self._checks_attention = False
            self._warn(attends_locally(module))
        if self.input_dtype is not None and self._casts_inputs():
            args, kwargs = cast_floating((args, kwargs), self.input_dtype)
        parallel.before_forward(args, kwargs, self._device)
        with self._partition.forward():
            switched_off = core.pre_forward()
            try:
                if switched_off and self._warn is not None:
                    self._warn(
                        [
                            "[engine] forward runs without autocast: its configuration does not enable torch_autocast, "
                            "so the torch.autocast region around it is switched off inside"
                        ]
                    )
                outputs = module(*args, **kwargs)
                core.post_forward(tensors_in(outputs))
                parallel.after_forward(self._device)
            except BaseException as error:
                explained = parallel.explained(error)
                core.abort_forward()
                raise explained  # noqa: B904 (mostly the same one)
            finally:
                parallel.end_forward(self._device)
        return outputs
