"""Figures of the memory benchmark, and what they are compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from report import Goal
from trainers import Spec, parse


@dataclass
class Figures:
    """Bytes a parameter. `kept` and `formula`, after a step and at the peak, are 0 where there are none."""

    resident: float  # after the steps
    later: float  # peak of all steps but the first
    first: float  # peak of construction and first step
    buckets: float
    host: float = 0.0  # after the steps, all ranks together; what they share counts once
    kept: float = 0.0
    formula: float = 0.0
    peer: str = ""

    @property
    def peak(self) -> float:
        return max(self.resident, self.later, self.first)

    @property
    def spec(self) -> Spec:
        return parse(self.peer)

    def most(self, other: Figures) -> Figures:
        pairs = ((self.resident, other.resident), (self.later, other.later), (self.first, other.first))
        return Figures(*(max(pair) for pair in pairs), max(self.buckets, other.buckets), self.host + other.host)

    def data(self) -> dict[str, Any]:
        found = {"resident": self.resident, "peak": self.later, "first_peak": self.first, "host": self.host}
        own = {"kept": self.kept, "formula": self.formula, "buckets": self.buckets}
        return found | (own if self.formula else {})


def best_peak(name: str, found: dict[str, Figures], default: dict[str, Figures]) -> float:
    """With the allocator that suits the engine better."""
    return min(of[name].peak for of in (found, default) if name in of)


# States of Tessera (None: default of the precision), peer, its states, limit of own peak over the peer's.
COMPARED = (
    (None, "deepspeed", None, 0.65),
    (None, "fsdp2", None, 0.8),
    (10, "deepspeed", 10, 0.65),
    (10, "fsdp2", 8, 1.0),
    (8, "fsdp2", 8, 0.85),
)
# Plain PyTorch's, each rank of which holds everything.
PLAIN = ("ddp", "bare")


def formula_goals(title: str, found: dict[str, Figures]) -> list[Goal]:
    """The worst stage of each form."""
    goals = []
    for states in (None, 16, 10, 8):
        mine = [f for f in found.values() if f.formula and f.spec.states == states]
        if not mine:
            continue
        form = "" if states is None else f", {states} bytes"
        for text, ratio in (
            ("after the steps over what is kept", lambda f: f.resident / f.kept),
            ("peak of later steps over formula", lambda f: f.later / f.formula),
        ):
            worst = max(mine, key=ratio)
            goals.append(Goal(f"{title}{form}: {text} (stage {worst.spec.stage})", ratio(worst), 1.05))
    return goals


def goals_of(title: str, found: dict[str, Figures], default: dict[str, Figures]) -> list[Goal]:
    goals = formula_goals(title, found)
    plain = next((name for name, f in found.items() if f.spec.kind in PLAIN), None)
    usual = {name: f.spec for name, f in found.items() if not (f.spec.shared or f.spec.early)}
    names = {(spec.kind, spec.stage, spec.states): name for name, spec in usual.items()}
    for states, kind, of, limit in COMPARED:
        for stage in (1, 2, 3):
            own, peer = names.get(("tessera", stage, states)), names.get((kind, stage, of))
            if own and peer:
                ratio = best_peak(own, found, default) / best_peak(peer, found, default)
                goals.append(Goal(f"{title}: peak of {own} over that of {peer}", ratio, limit))
    if plain:
        mine = [name for name, spec in usual.items() if spec.kind == "tessera"]
        worst = max(mine, key=lambda name: best_peak(name, found, default), default=None)
        if worst:
            ratio = best_peak(worst, found, default) / best_peak(plain, found, default)
            goals.append(Goal(f"{title}: highest peak, of {worst}, over that of {plain}", ratio, 1.0))
    for own, spec in ((name, f.spec) for name, f in found.items() if f.spec.early):
        if peer := names.get(("fsdp2", spec.stage, spec.states)):
            ratio = best_peak(own, found, default) / best_peak(peer, found, default)
            goals.append(Goal(f"{title}: peak of {own} over that of {peer}", ratio, 0.75))
    return goals


def headline_of(title: str, found: dict[str, Figures]) -> list[str]:
    names = ("Tessera 1", "Tessera 3", "Tessera 3, 10 bytes", "Tessera 3, 8 bytes", "FSDP2 as ZeRO-3", "DeepSpeed 3")
    shown = [f"{name} {found[name].peak:.1f}" for name in names if name in found]
    return [f"{title}, peak in bytes a parameter: {', '.join(shown)}"] if shown else []
