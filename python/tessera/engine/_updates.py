"""The parameters that an engine updates, and the optimizer that does it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tessera import _core
from tessera.errors import ConfigError, UsageError
from tessera.optim.engines import OptimizerStates, Runner


@dataclass(eq=False)
class Updates:
    core: _core.Engine
    runner: Runner | None  # None: this engine only evaluates
    index: dict[int, int]  # the number in the core of all parameters, by id
    optimized: frozenset[int]  # numbers
    # By param group, in its order: names, and whether each is trained. An optimizer may get other objects in their
    # place.
    group_names: list[list[tuple[str, bool]]]
    params_are_masters: bool  # the optimizer gets the module's own parameters, whole and exact
    cuts_states: bool  # this rank has a part of the optimizer's states

    def trained_by(self, call: str) -> Runner:
        """The runner. UsageError where engine.`call` has none."""
        self.core.check_live(call)
        if self.runner is None:
            raise UsageError(f"[engine.{call}] there is no optimizer; pass one to tessera.initialize or configure one")
        return self.runner

    def optimizes(self, param: torch.Tensor) -> bool:
        """Whether the optimizer has it."""
        return self.index.get(id(param)) in self.optimized

    def number(self, param: torch.Tensor) -> int | None:
        """The parameter's number in core.params(); None where the module does not have it."""
        return self.index.get(id(param))

    def numbers(self) -> frozenset[int]:
        """Places in core.params() of all that the optimizer has."""
        return self.optimized

    def optimizer_states(self) -> OptimizerStates:
        """The states that the optimizer has, by number."""
        return self.trained_by("optimizer_states").states

    def masters(self) -> dict[str, torch.Tensor]:
        """This rank's part of the fp32 masters by name; empty where the parameters are the masters."""
        if self.core.options().zero.precision.master_is_param():
            return {}
        views = {name: self.core.local_view(number, _core.Quantity.Master) for name, number in self._named().items()}
        return {name: view for name, view in views.items() if view is not None}

    def load_masters(self, masters: dict[str, torch.Tensor]) -> None:
        """Takes this rank's parts of the masters, as masters() gave them. ConfigError for other names. Collective: the
        parameters are refreshed on all ranks."""
        numbers = self._named()
        if numbers.keys() != masters.keys():
            names = ", ".join(sorted(numbers.keys() ^ masters.keys()))
            raise ConfigError(f"[optimizer.load_state_dict] the masters are of another model; only one has {names}")
        for name, number in numbers.items():
            self.core.set_local(number, _core.Quantity.Master, masters[name])
        self.core.refresh_params()

    def _named(self) -> dict[str, int]:
        """Numbers of what is optimized, in the order of the core."""
        params = self.core.params()
        return {params[number].name: number for number in sorted(self.optimized)}
