"""Names that were DeepSpeed's go on, with a warning that says what took their place."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support import config, make

import tessera
from tessera import pipeline, sequence, zero


def calls(folder: Path) -> dict[str, tuple[tuple[Any, ...], dict[str, Any], str]]:
    """Positional and keyword arguments of tessera.initialize, and what the warning names."""
    model, cfg = make(), config(1)
    file = folder / "config.json"
    file.write_text(json.dumps(cfg))
    return {
        "config_params": ((), {"model": model, "config_params": cfg}, "here it is config="),
        "args": ((), {"model": model, "args": argparse.Namespace(deepspeed_config=str(file))}, "here it is config="),
        "a dict": ((), {"model": model, "args": {"deepspeed_config": str(file), "local_rank": 0}}, "config="),
        "mesh_param": ((), {"model": model, "config": cfg, "mesh_param": (1, 1)}, "here it is sequence_parallel="),
        "dist_init_required": ((), {"model": model, "config": cfg, "dist_init_required": False}, "not read"),
        "positional": ((None, model), {"config": cfg}, "here it is keywords"),
        "all positional": ((None, model, None, None, None, None, 29500, None, None, None, cfg), {}, "keywords"),
    }


FORMS = ["config_params", "args", "a dict", "mesh_param", "dist_init_required", "positional", "all positional"]


@pytest.mark.parametrize("form", FORMS)
def test_arguments_of_initialize(form: str, tmp_path: Path) -> None:
    args, kwargs, text = calls(tmp_path)[form]
    with pytest.warns(FutureWarning, match="DeepSpeed's name") as caught:
        engine = tessera.initialize(*args, **kwargs)[0]
    assert any(text in str(warning.message) for warning in caught)
    assert all(warning.filename == __file__ for warning in caught)
    assert engine(torch.ones(2, 5)).requires_grad


def test_today_s_names_warn_of_nothing(recwarn: pytest.WarningsRecorder) -> None:
    for args, kwargs in (((), {"model": make(), "config": config(1)}), ((make(), config(1)), {})):
        tessera.initialize(*args, **kwargs)
    with zero.Init(config=config(3)):
        make()
    assert not [w for w in recwarn if issubclass(w.category, FutureWarning)]


def test_two_names_of_one_argument_and_an_mpu_are_refused() -> None:
    with pytest.warns(FutureWarning), pytest.raises(TypeError, match="config_params and config are two names"):
        tessera.initialize(model=make(), config=config(0), config_params=config(1))

    class Mpu:
        def get_data_parallel_group(self) -> None: ...

    with pytest.raises(TypeError, match=r"an mpu is for deepspeed\.initialize"):
        tessera.initialize(model=make(), config=config(0), mpu=Mpu())


def test_other_names(recwarn: pytest.WarningsRecorder) -> None:
    model = make()
    assert zero.set_z3_leaf_modules(model, [torch.nn.Linear]) == zero.get_leaf_modules(model)
    assert zero.z3_leaf_module is zero.is_leaf_module
    engine = tessera.initialize(model=model, config=config(0))[0]
    assert engine.get_global_grad_norm() is engine.global_grad_norm() is None
    engine.num_local_io_workers = engine.num_local_io_workers + 1
    assert engine.num_workers == 1
    assert engine.data_loader([torch.ones(5)] * 2, num_local_io_workers=0) is not None
    engine.load_module_state_dict(engine.module_state_dict(), fetch_z3_params=True)
    spec = pipeline.LayerSpec(torch.nn.Linear, 2, 2)
    assert pipeline.PipelineModule([spec], 1, partition_method="best").bounds == [0, 1]
    assert isinstance(spec.build(log=True), torch.nn.Linear)
    with zero.Init(config_dict_or_path=config(3), mem_efficient_linear=True):
        make()
    texts = [str(w.message) for w in recwarn if issubclass(w.category, FutureWarning)]
    norm = "get_global_grad_norm() is DeepSpeed's name, and goes with 0.3.0; here it is global_grad_norm()"
    assert len(texts) == 11 and norm in texts
    with pytest.raises(AttributeError, match="no_such"):
        _ = zero.no_such


def of_sequences() -> dict[str, tuple[Any, Any]]:
    """What a former name of tessera.sequence gives, and what took its place."""
    group, x, target = tessera.single_group(), torch.arange(24.0).view(1, 4, 3, 2), torch.tensor([[0, 1, 0, 1]])
    old: Any = sequence

    def local(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, factor: float = 1) -> torch.Tensor:
        return q * k + factor * v

    def plus(layer: float, x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        return layer + (x.mean() if more else x)

    cut = {"layer": 1.0}
    angles = (torch.zeros(4, 1, 1, 2), torch.ones(4, 1, 1, 2))
    attend = sequence.SequenceAttention(local, group)
    before = old.DistributedAttention(local, group, 2, 0)
    return {
        "DistributedAttention": (before(x, x, x, 0, angles, 2.0), attend(x, x, x, 2.0, rotary=angles)),
        "seq_all_to_all": (old.seq_all_to_all(group, x, 2, 1), sequence.to_heads(x, group)),
        "back": (old.seq_all_to_all(group, x, 1, 2, 0, heads=3), sequence.to_sequence(x, group, heads=3)),
        "sequence_tiled_compute": (
            old.sequence_tiled_compute(plus, 4, 2, {"x": x}, cut, "x", None, 1, None),
            sequence.tiled(plus, {"x": x}, cut, tiles=2, reduction=None),
        ),
        "SequenceTiledCompute": (
            old.SequenceTiledCompute.apply(plus, 4, 2, ["x"], ["layer"], "x", None, 1, None, x, 1.0),
            1 + x,
        ),
        "TiledMLP": (old.TiledMLP.apply(plus, 1.0, x, 2, []), 1 + x),
        "TiledFusedLogitsLoss": (
            old.TiledFusedLogitsLoss.apply(plus, 1.0, x[..., 0], target, None, 2, [], "sum"),
            sequence.tiled_loss(lambda x, y: 1 + x.mean(), x[..., 0], target, tiles=2, reduction="sum"),
        ),
        "vocab_sequence_parallel_cross_entropy": (
            old.vocab_sequence_parallel_cross_entropy(x[..., 0], target, group),
            sequence.sequence_cross_entropy(x[..., 0], target, group),
        ),
        "initialize_sequence_parallel": (old.initialize_sequence_parallel, sequence.make_groups),
    }


def test_names_of_sequences() -> None:
    with pytest.warns(
        FutureWarning, match=r"tessera\.sequence\..* is DeepSpeed's name, and goes with 0\.3\.0"
    ) as caught:
        found = of_sequences()
    assert all(warning.filename == __file__ for warning in caught)
    for name, (old, new) in found.items():
        assert torch.equal(old, new) if isinstance(new, torch.Tensor) else old is new, name
