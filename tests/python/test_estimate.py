"""tessera estimate: the arithmetic, and what engines really hold."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from support import Net, config, engines, make
from tessera.estimate import estimate, main

MILLION = 1_000_000


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_is_what_an_engine_holds(stage: int, bf16: bool) -> None:
    """Up to the padding of shares."""
    cfg = config(stage, bf16=bf16, optimizer={"type": "Adam", "params": {"lr": 1e-3}})

    def body(engine: Any, rank: int) -> Any:
        engine(torch.ones(2, 5)).sum().backward()
        return engine.core.memory()

    held = engines(make(Net, 64), 2, cfg, body)[0]
    found = estimate(make(Net, 64), cfg, 2)
    assert found.stage == stage
    assert found.params == pytest.approx(held.params, rel=0.05)
    assert found.states == pytest.approx(held.master + held.states, rel=0.05)
    assert found.grads == pytest.approx(held.grads, rel=0.05)
    assert found.total == found.params + found.grads + found.states + found.gathered


# Values that an optimizer keeps for each element.
KEPT: list[tuple[str, dict[str, Any], int]] = [
    ("SGD", {}, 0),
    ("SGD", {"momentum": 0.9}, 1),
    ("Adagrad", {}, 1),
    ("Lion", {}, 1),
    ("AdamW", {}, 2),
    ("Lamb", {}, 2),
    ("Adafactor", {}, 0),
    ("ASGD", {}, 1),
    ("Rprop", {}, 2),
    ("Adam", {"torch_adam": True, "amsgrad": True}, 3),
    ("RMSprop", {"momentum": 0.9}, 2),
]


@pytest.mark.parametrize(("kind", "params", "kept"), KEPT)
@pytest.mark.parametrize("stage", [0, 2])
def test_counts_what_the_optimizer_keeps(kind: str, params: dict[str, Any], kept: int, stage: int) -> None:
    cfg = config(stage, optimizer={"type": kind, "params": params}, zero_allow_untested_optimizer=True)
    assert estimate(MILLION, cfg, 2).states == 4 * kept * MILLION // (2 if stage else 1)
    assert estimate(MILLION, {**cfg, "bf16": {"enabled": True}}, 1).states == (2 + 4 * kept) * MILLION
    if kind in ("SGD", "Adagrad", "Lion", "AdamW"):  # the core has them
        held = engines(make(Net, 64), 2, cfg, lambda engine, rank: engine.core.memory())[0]
        expected = pytest.approx(held.master + held.states, rel=0.05)
        assert estimate(make(Net, 64), cfg, 2).states == expected


def test_counts_frozen_parameters_and_numbers() -> None:
    model = make()
    total = sum(p.numel() for p in model.parameters())
    model.embed.requires_grad_(False)
    frozen = sum(p.numel() for p in model.embed.parameters())
    found = estimate(model, config(1), 1)
    assert found.params == 4 * total and found.grads == 4 * (total - frozen)
    assert [estimate(1_000_000, config(1, accumulation=k), 8).grads for k in (1, 2)] == [500_000, 4_000_000]
    assert estimate(1_000_000, config(0), 8, stage=3).params == 500_000


ADAM = {"optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}


@pytest.mark.parametrize("stage", [1, 3])
def test_is_what_an_engine_has_on_the_disk(stage: int, tmp_path: Any) -> None:
    """Of a model whose device is the host: states, and in stage 3 parameters."""
    disk = {"device": "nvme", "nvme_path": str(tmp_path)}
    cfg = config(stage, bf16=True, **ADAM)
    cfg["zero_optimization"] |= {"offload_optimizer": disk, "stage3_param_persistence_threshold": 0}
    if stage == 3:
        cfg["zero_optimization"]["offload_param"] = {**disk, "max_in_cpu": 0}
    held = engines(make(Net, 64), 2, cfg, lambda engine, rank: engine.core.memory())[0]
    found = estimate(make(Net, 64), cfg, 2)
    assert found.disk == pytest.approx(held.disk, rel=0.05) and found.states == 0
    assert found.params == (0 if stage == 3 else pytest.approx(held.params, rel=0.05))


BF16 = {"bf16": {"enabled": True}, **ADAM}
CPU, NVME = {"device": "cpu"}, {"device": "nvme", "nvme_path": "disk"}
# Of 10^6 parameters (2 bytes each, as are gradients; of states 10): ranks, section zero_optimization, tp; MB: params,
# grads, states, host, disk
PLACES = [
    (4, {"stage": 3}, 0, (0.5, 0.5, 2.5, 0, 0)),
    (4, {"stage": 3, "mics_shard_size": 2}, 0, (1, 1, 5, 0, 0)),
    (4, {"stage": 1, "mics_shard_size": 2}, 0, (2, 1, 5, 0, 0)),
    (4, {"stage": 3}, 2, (0.5, 0.5, 2.5, 0, 0)),
    (4, {"stage": 0}, 2, (1, 1, 5, 0, 0)),
    (8, {"stage": 2, "mics_shard_size": 2}, 2, (1, 0.5, 2.5, 0, 0)),
    (4, {"stage": 1, "offload_optimizer": CPU}, 0, (2, 0, 0, 3, 0)),
    (4, {"stage": 3, "offload_optimizer": CPU}, 0, (0.5, 0, 0, 3, 0)),
    (4, {"stage": 3, "offload_optimizer": {**CPU, "ratio": 0.5}}, 0, (0.5, 0.25, 1.25, 1.5, 0)),
    (4, {"stage": 3, "offload_optimizer": {**CPU, "ratio": "auto"}}, 0, (0.5, 0, 0, 3, 0)),
    (4, {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU}, 0, (0, 0, 0, 3.5, 0)),
    (4, {"stage": 2, "offload_optimizer": NVME}, 0, (2, 0, 0, 3, 2.5)),  # less than the tiles that pass
    (4, {"stage": 3, "offload_param": {**NVME, "max_in_cpu": 100_000}}, 0, (0, 0.5, 2.5, 0.5, 0.3)),
]


@pytest.mark.parametrize(("ranks", "zero", "tp", "megabytes"), PLACES)
def test_where_bytes_are(ranks: int, zero: dict[str, Any], tp: int, megabytes: tuple[float, ...]) -> None:
    cfg = {**BF16, "zero_optimization": zero, "tensor_parallel": {"autotp_size": tp}}
    found = estimate(MILLION, cfg, ranks)
    parts = (found.params, found.grads, found.states, found.host, found.disk)
    assert [part / 1e6 for part in parts] == list(megabytes)


LOW = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
# States of 6 bytes, and of 10 of which the device has a share.
PASSING: list[tuple[dict[str, Any], int, float, float]] = [
    ({"bf16": LOW}, 1, 0.5, 1.5),
    ({"bf16": LOW}, 2, 0, 2),
    ({**BF16, "tessera": {"device_share": 0.5}}, 1, 0.25, 2.75),
    ({**BF16, "tessera": {"device_share": 0.5}}, 2, 0, 3),
    ({**BF16, "tessera": {"device_share": "auto"}}, 1, 0, 3),
]


@pytest.mark.parametrize(("mode", "steps", "grads", "host"), PASSING)
def test_gradients_that_the_device_updates_with_stay(
    mode: dict[str, Any], steps: int, grads: float, host: float
) -> None:
    """Where an update has one backward."""
    cfg = {**ADAM, **mode, "zero_optimization": {"stage": 3, "offload_optimizer": CPU}}
    found = estimate(MILLION, {**cfg, "gradient_accumulation_steps": steps}, 4)
    assert [found.grads / 1e6, found.host / 1e6] == [grads, host]


def test_tensor_parallel_slices_of_a_model() -> None:
    model = transformer()
    whole, cut = (estimate(model, {**BF16, "tensor_parallel": {"autotp_size": tp}}, 2) for tp in (1, 2))
    left = sum(p.numel() for n, p in model.named_parameters() if "norm" in n or "embed" in n)
    assert cut.params == (whole.params + 2 * left) // 2


def transformer() -> Any:
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))


def test_what_a_stage_refuses(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Is a row that says why; the others are there."""
    file = tmp_path / "config.json"
    bf16 = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    zero = {"stage": 3, "mics_shard_size": 2, "offload_optimizer": {"device": "cpu"}}
    file.write_text(json.dumps({**ADAM, "bf16": bf16, "zero_optimization": zero}))
    assert main(["7B", "--config", str(file), "--ranks", "2", "3"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[-3:] == ["host", "disk", "(GB)"] and len(rows) == 8
    assert "refused: " in rows[0] and "needs zero_optimization.stage 1, 2 or 3; " in rows[0]
    assert all("refused" not in row for row in rows[1:4])
    assert all("mics_shard_size" in row for row in rows[5:])
    file.write_text(json.dumps({"no_such_section": {}, "fp16": {"enabled": True, "nonsense": 1}}))
    assert main(["7B", "--config", str(file)]) == 1 and "nonsense" in capsys.readouterr().err


def test_command(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    import transformers

    transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64).save_pretrained(tmp_path)
    assert main([str(tmp_path), "--ranks", "2"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 5
    assert main(["7B"]) == 0
