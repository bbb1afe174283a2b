"""Checkpoints of a pipeline: one folder, of the whole list of layers, for any number of stages and for plain
engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from stages import WIDTH, Block, Whole, config, data, in_processes, layers, loss_fn, module, pipeline, weights

import tessera
from tessera import checkpoints
from tessera.pipeline import LayerSpec, PipelineModule

SCHEDULER = {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}
CONFIG = config(1, 4, "bf16", gradient_clipping=0.05, scheduler=SCHEDULER)
EXACT = config(1, 4, scheduler=SCHEDULER)  # sums are the same for any number of stages and of equal ranks


def go_on(engine: Any, steps: int = 2) -> list[float]:
    """Every data-parallel rank sees the same, so that their number does not matter."""
    source = data(5)
    return [float(engine.train_batch(source)) for _ in range(steps)]


def reshards(rank: int, folder: Path, tied: bool) -> None:
    cfg = CONFIG if tied else EXACT
    first = pipeline(module(4, tied), cfg)
    go_on(first)
    first.save_checkpoint(folder, client_state={"epoch": 3})
    saved: list[dict[str, torch.Tensor]] = [{} for _ in range(4)]
    dist.all_gather_object(saved, weights(first.module))
    everything = {name: value for stage in saved for name, value in stage.items()}
    expected = go_on(first)
    first.destroy()
    for stages, chunks in ((4, 1), (2, 1), (1, 1), (2, 2)):
        again = pipeline(module(stages, tied, num_chunks=chunks, base_seed=7), cfg)
        path, client = again.load_checkpoint(folder)
        assert path is not None and client == {"epoch": 3}
        assert again.global_steps == 2 and again.get_lr() == again.lr_scheduler.get_last_lr()
        for name, value in weights(again.module).items():
            assert torch.equal(value, everything[name]), name
        assert go_on(again) == (pytest.approx(expected, rel=2e-2) if tied else expected), stages
        again.destroy()
    whole = Whole(cfg, tessera.single_group(), tied)
    whole.engine.load_checkpoint(folder)
    loss = float(whole.train_batch(data(5)))
    assert loss == (pytest.approx(expected[0], rel=2e-2) if tied else expected[0])
    whole.engine.destroy()


@pytest.mark.parametrize("tied", [False, True])
def test_a_run_goes_on_with_another_number_of_stages(tmp_path: Path, tied: bool) -> None:
    in_processes(4, reshards, tmp_path, tied)
    state = checkpoints.state_dict(tmp_path)
    last = "tied_modules.embed.weight" if tied else "layers.8.weight"
    assert {"layers.1.linear.weight", last} <= state.keys()
    names = {name for name, _ in PipelineModule(layers(tied), num_stages=1).named_parameters()}
    assert set(state) == names, "each tensor once, and all of them"


def thawed_before_a_save(rank: int, folder: Path) -> None:
    def blocks(model: Any) -> list[Any]:
        return [part for part in model.modules() if isinstance(part, Block)]

    model = module(2)
    for block in blocks(model):
        block.linear.requires_grad_(False)
    first = pipeline(model, EXACT)
    go_on(first, 1)
    for block in blocks(first.module):
        block.linear.requires_grad_(True)
    first.save_checkpoint(folder)
    expected = go_on(first)
    first.destroy()
    again = pipeline(module(2, base_seed=7), EXACT)
    again.load_checkpoint(folder)
    assert go_on(again) == expected
    again.destroy()


def test_what_is_thawed_before_a_save(tmp_path: Path) -> None:
    in_processes(2, thawed_before_a_save, tmp_path)


def from_one_engine(rank: int, folder: Path) -> None:
    whole = Whole(CONFIG, None)
    go_on(whole, 1)
    whole.engine.save_checkpoint(folder)
    expected = weights(whole.module)
    whole.engine.destroy()
    engine = pipeline(module(2, base_seed=3), CONFIG)
    engine.load_checkpoint(folder)
    for name, value in weights(engine.module).items():
        assert torch.equal(value, expected[name]), name
    engine.destroy()


def test_a_pipeline_takes_the_checkpoint_of_one_engine(tmp_path: Path) -> None:
    in_processes(2, from_one_engine, tmp_path)


def misfits(rank: int, folder: Path) -> None:
    engine = pipeline(module(2), CONFIG)
    engine.save_checkpoint(folder, tag="right")
    engine.destroy()
    longer = PipelineModule([*layers()[:-1], LayerSpec(Block, WIDTH), layers()[-1]], num_stages=2, loss_fn=loss_fn)
    shorter = PipelineModule(layers()[:-1], num_stages=2, loss_fn=loss_fn)
    cases = [
        (longer, r"not in the checkpoint: .*layers\.9"),
        (shorter, r"not in the model: 'layers\.8\.(bias|weight)'"),
    ]
    for model, words in cases:
        engine = pipeline(model, CONFIG)
        before = weights(engine.module)
        with pytest.raises(ValueError, match=words):  # on every rank, whichever stage it is about
            engine.load_checkpoint(folder)
        assert all(torch.equal(before[name], value) for name, value in weights(engine.module).items())
        engine.destroy()


def test_a_list_that_does_not_fit_is_an_error_on_all_stages(tmp_path: Path) -> None:
    in_processes(2, misfits, tmp_path)


def own_data(rank: int, folder: Path) -> None:
    rows = [(torch.full((5,), i % 11), torch.full((5,), (i + 1) % 11)) for i in range(60)]

    def made() -> Any:
        return tessera.initialize(model=module(2), config=config(1, 4), training_data=rows)[0]

    def losses(engine: Any, steps: int) -> list[float]:
        return [float(engine.train_batch()) for _ in range(steps)]

    engine = made()
    losses(engine, 1)
    engine.save_checkpoint(folder)
    expected = losses(engine, 5)
    engine.load_checkpoint(folder)
    assert losses(engine, 5) == expected
    engine.destroy()
    engine = made()
    losses(engine, 3)
    engine.load_checkpoint(folder)
    assert losses(engine, 5) == expected
    engine.destroy()


def test_data_of_the_engine_goes_back_with_it(tmp_path: Path) -> None:
    in_processes(2, own_data, tmp_path)


def test_one_stage_writes_what_several_refuse(tmp_path: Path) -> None:
    """Files that hold the whole model's weights."""
    engine = pipeline(module(1), config(1, checkpoint={"format": "deepspeed"}))
    go_on(engine, 1)
    assert engine.save_16bit_model(tmp_path, "weights.bin")
    state = torch.load(tmp_path / "weights.bin")
    assert state.keys() == engine.module.state_dict().keys() and "layers.1.linear.weight" in state
    engine.save_checkpoint(tmp_path / "run")
    again = pipeline(module(1, base_seed=7), config(1))
    assert again.load_checkpoint(tmp_path / "run")[0] is not None and again.global_steps == 1
    for name, value in weights(again.module).items():
        assert torch.equal(value, state[name]), name
    assert go_on(again, 1) == go_on(engine, 1)
