"""Which models ranks talk about before a forward: what they draw is agreed on. See Note [Random draws]; what is drawn,
and by replays, is in test_processes.py."""

from __future__ import annotations

import pytest
from support import engines
from test_models import settings
from tiny_models import LLAMA, MODELS, NEOX, of, text

import tessera

OPT = {"ffn_dim": 48, "word_embed_proj_dim": 32}


@pytest.mark.parametrize(
    ("model", "draws"),
    [
        (MODELS["llama"][0], False),
        (of("Llama", LLAMA, attention_dropout=0.1), True),
        (of("OPT", NEOX, **OPT, dropout=0.1), True),
        (of("OPT", NEOX, **OPT, dropout=0.0), False),
    ],
)
def test_models_that_drop_something_are_known(model, draws: bool) -> None:
    """Ranks that are threads share the CPU's generator, so that they go by what modules say."""

    def body(engine: tessera.Engine, rank: int) -> int:
        group = engine.core.mesh().group(tessera.Axis.Tp)
        engine(**text(0))  # the first one compares the ranks' inputs
        group.reset_stats()
        engine(**text(0))
        return group.stats().broadcast.calls

    assert engines(model().train(), {"tp": 2}, settings(2, {}), body) == [int(draws)] * 2
