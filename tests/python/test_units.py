"""Which parameters form a unit."""

from __future__ import annotations

import torch
from support import Net, config, engines, make, micro, run, weights
from torch import nn

import tessera


def test_custom_unit_policy_and_default() -> None:
    model = make(Net, 7, 3)
    units = tessera.default_unit_policy(model)
    assert set(units.values()) == {"blocks.0", "blocks.1", "blocks.2"}
    assert "embed.weight" not in units and units["blocks.1.norm.bias"] == "blocks.1"
    assert set(tessera.default_unit_policy(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))).values()) == {
        "0",
        "2",
    }
    nested = nn.Sequential(nn.Linear(2, 2), nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(2)))
    assert set(tessera.default_unit_policy(nested).values()) == {"1.0", "1.1"}
    own = {name: "all" for name, _ in model.named_parameters()}
    engine = tessera.initialize(model=model, config=config(2), unit_policy=lambda _: own)[0]
    assert {spec.unit for spec in engine.core.params()} == {"all"}
    micro(engine, 0)
    engine.destroy()


def test_net_with_a_wide_head() -> None:
    """Units above and below the size that is merged train alike."""
    cfg = config(2, tessera={"min_unit_elements": 1})
    small = engines(make(Net, 9, 3), 2, cfg, lambda e, r: (run(e, r, 2), weights(e.module))[1])[0]
    merged = engines(make(Net, 9, 3), 2, config(2), lambda e, r: (run(e, r, 2), weights(e.module))[1])[0]
    assert all(torch.equal(small[name], merged[name]) for name in small)
