"""tessera estimate: the arithmetic, and what engines really hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import Net, config, engines, make
from tessera.estimate import estimate, main, model_of


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_is_what_an_engine_holds(stage: int, bf16: bool) -> None:
    """Up to the padding of shares."""
    cfg = config(stage, bf16=bf16, optimizer={"type": "Adam", "params": {"lr": 1e-3}})

    def body(engine: Any, rank: int) -> Any:
        return engine.core.memory()

    held = engines(make(Net, 64), 2, cfg, body)[0]
    found = estimate(make(Net, 64), cfg, 2)
    assert found.stage == stage
    assert found.params == pytest.approx(held.params, rel=0.05)
    assert found.states == pytest.approx(held.master + held.states, rel=0.05)
    if held.grads:  # stage 0 in fp32 leaves them in p.grad
        assert found.grads == pytest.approx(held.grads, rel=0.05)
    assert found.total == found.params + found.grads + found.states + found.gathered


def test_counts_frozen_parameters_and_numbers() -> None:
    model = make()
    total = sum(p.numel() for p in model.parameters())
    model.embed.requires_grad_(False)
    frozen = sum(p.numel() for p in model.embed.parameters())
    found = estimate(model, config(1), 1)
    assert found.params == 4 * total and found.grads == 4 * (total - frozen)
    assert model_of("1.5M") == 1_500_000
    assert estimate(1_000_000, config(0), 8, stage=3).params == 500_000


def test_command(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    import transformers

    transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64).save_pretrained(tmp_path)
    assert main([str(tmp_path), "--ranks", "2"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 5
    assert all(p.is_meta for p in model_of(str(tmp_path)).parameters())
    assert isinstance(torch.tensor(1), torch.Tensor) and main(["7B"]) == 0
