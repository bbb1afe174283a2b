"""Saved folders of both layouts: what programs do with them afterwards, and which layout it is."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.utils import zero_to_fp32
from deepspeed.utils.zero_to_fp32 import (
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from support import batch, config, free_port, make, run_processes

LAYOUTS = ["tessera", "deepspeed"]
ADAM = {"type": "AdamW", "params": {"lr": 0.01}}
SCHEDULE = {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 0.01}}


def settings(layout: str, stage: int, **more: Any) -> dict[str, Any]:
    return config(stage, optimizer=ADAM, scheduler=SCHEDULE, checkpoint={"format": layout}, **more)


def trained(engine: Any, first: int, rank: int = 0) -> list[float]:
    losses = []
    for step in range(first, first + 2):
        loss = engine(*batch(step))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def saver(rank: int, port: int, folder: str, layout: str, stage: int, bf16: bool) -> None:
    """Two ranks save after two steps, and go on for two: what the folder is compared with."""
    deepspeed.init_distributed("gloo", verbose=False, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    engine, *_ = deepspeed.initialize(model=make(), config=settings(layout, stage, bf16={"enabled": bf16}))
    trained(engine, 0)
    engine.save_checkpoint(folder, client_state={"epoch": 3})
    masters = {n: deepspeed.utils.safe_get_full_fp32_param(p).clone() for n, p in engine.module.named_parameters()}
    after = trained(engine, 2)
    if rank == 0:
        torch.save({"masters": masters, "after": after}, f"{folder}.pt")
    engine.destroy()


@pytest.fixture(scope="module", params=[(layout, stage) for layout in LAYOUTS for stage in (1, 2, 3)], ids=str)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, dict[str, Any]]:
    layout, stage = request.param
    folder = tmp_path_factory.mktemp("saved") / "folder"
    run_processes(2, saver, free_port(), str(folder), layout, stage, stage == 2)
    return folder, layout, {**torch.load(f"{folder}.pt"), "stage": stage}


def assert_same(found: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert found.keys() == want.keys()
    for name, value in want.items():
        assert found[name].dtype is torch.float32 and torch.equal(found[name], value), name


def test_is_the_layout_that_was_asked_for(saved: Any) -> None:
    folder, layout, _ = saved
    names = os.listdir(folder / "global_step2")
    assert any(name.endswith("_optim_states.pt") for name in names) == (layout == "deepspeed")
    assert sorted(os.listdir(folder)) == ["global_step2", "latest", "zero_to_fp32.py"]


def test_weights_by_program_and_by_function(saved: Any, tmp_path: Path) -> None:
    folder, _, want = saved
    assert_same(get_fp32_state_dict_from_zero_checkpoint(str(folder)), want["masters"])
    model = load_state_dict_from_zero_checkpoint(make(seed=9), str(folder))
    assert_same(dict(model.state_dict()), want["masters"])
    program = [sys.executable, str(folder / "zero_to_fp32.py"), ".", str(tmp_path / "out")]
    path = os.pathsep.join(entry for entry in sys.path if entry)
    subprocess.run(program, cwd=folder, env={**os.environ, "PYTHONPATH": path}, check=True, capture_output=True)
    assert_same(torch.load(tmp_path / "out" / "pytorch_model.bin"), want["masters"])


def test_options_of_program_and_functions(tmp_path: Path) -> None:
    model = make()
    model.gain.requires_grad_(False)
    engine, *_ = deepspeed.initialize(model=model, config=settings("tessera", 1))
    engine.save_checkpoint(tmp_path, tag="some")
    whole = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    lazy = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), "some", lazy_mode=True)
    assert lazy.keys() == whole.keys()
    for name, value in whole.items():
        assert lazy[name].shape == value.shape and torch.equal(lazy[name].contiguous(), value)
    reader, one = weakref.ref(lazy["gain"].reader), lazy["gain"]
    del lazy
    gc.collect()
    assert torch.equal(one.contiguous(), whole["gain"])
    del one
    gc.collect()
    assert reader() is None
    trained = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), exclude_frozen_parameters=True)
    assert whole.keys() - trained.keys() == {"gain"}
    with pytest.raises(ValueError, match="latest"):
        get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "some"))
    with pytest.raises(FileNotFoundError):
        get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), "none")
    path = os.pathsep.join(entry for entry in sys.path if entry)

    def ended(*arguments: str) -> tuple[int, str]:
        command = [sys.executable, str(tmp_path / "zero_to_fp32.py"), *arguments]
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
        return done.returncode, done.stderr

    out = tmp_path / "out"
    options = ["--safe_serialization", "-t", "some", "--exclude_frozen_parameters", "--max_shard_size", "1GB"]
    assert ended(str(tmp_path), str(out), *options)[0] == 0 and os.listdir(out) == ["model.safetensors"]
    assert zero_to_fp32.main([str(tmp_path), str(tmp_path / "again"), *options]) == 0
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "again" / "model.safetensors").read_bytes()
    status, text = ended(str(out), str(out))
    assert status == 1 and "latest" in text and "Traceback" not in text and "Traceback" in ended(str(out), "o", "-d")[1]
    assert zero_to_fp32.main([str(out), str(out)]) == 1
    engine.destroy()


def resumed(folder: Path, want: dict[str, Any], **checkpoint: Any) -> None:
    """One rank and another stage go on where two ranks were."""
    cfg = settings("tessera", 3 - want["stage"], bf16={"enabled": want["stage"] == 2})
    cfg["checkpoint"] |= checkpoint
    engine, *_ = deepspeed.initialize(model=make(seed=9), config=cfg)
    path, client = engine.load_checkpoint(str(folder), load_module_strict=True)
    assert path is not None and client["epoch"] == 3 and engine.global_steps == 2
    assert engine.lr_scheduler.last_batch_iteration == 1
    torch.testing.assert_close(trained(engine, 2), want["after"], rtol=2e-2 if want["stage"] == 2 else 1e-4, atol=1e-5)
    engine.destroy()


def test_another_number_of_ranks_and_another_stage(saved: Any) -> None:
    folder, _, want = saved
    resumed(folder, want)


def test_made_universal(saved: Any, tmp_path: Path) -> None:
    from deepspeed.checkpoint import ds_to_universal

    folder, _, want = saved
    copied = tmp_path / "copy"
    shutil.copytree(folder, copied)
    given = ["--input_folder", str(copied / "global_step2"), "--output_folder", str(copied / "global_step2_universal")]
    ds_to_universal.main([*given, "--num_extract_workers", "1", "--num_merge_workers", "1"])
    (copied / "latest").write_text("global_step2_universal")
    resumed(copied, want, load_universal=True)


def test_transformers_loader(saved: Any) -> None:
    from transformers.integrations.deepspeed import deepspeed_load_checkpoint

    folder, _, want = saved
    cfg = settings("tessera", want["stage"], bf16={"enabled": want["stage"] == 2})
    engine, *_ = deepspeed.initialize(model=make(seed=9), config=cfg)
    deepspeed_load_checkpoint(engine, str(folder))
    found = {n: deepspeed.utils.safe_get_full_fp32_param(p).clone() for n, p in engine.module.named_parameters()}
    assert_same(found, want["masters"])
    engine.destroy()


def test_the_first_save_says_which_layout(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    deepspeed.utils.logger.warning_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="tessera"):
        engine, *_ = deepspeed.initialize(model=make(), config=settings("tessera", 1))
        engine.save_checkpoint(str(tmp_path))  # it was asked for
        engine.destroy()
        assert "checkpoint" not in caplog.text
        for _ in range(2):
            engine, *_ = deepspeed.initialize(model=make(), config=config(1))
            engine.save_checkpoint(str(tmp_path))
            engine.save_checkpoint(str(tmp_path), tag="again")
            engine.destroy()
    assert caplog.text.count('"checkpoint": {"format": "deepspeed"}') == 1


def loads_with_trust(_: int, folder: Path) -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    deepspeed.utils.logger.addHandler(handler)
    engine, *_ = deepspeed.initialize(model=make(), config=config(1, optimizer=ADAM))
    trained(engine, 0)
    engine.save_checkpoint(folder, client_state={"any": Path("object")})
    for trusted in ({"trusted": True}, {}, {}):
        assert engine.load_checkpoint(str(folder), **trusted)[1] == {"any": Path("object")}
        assert sum("can run code" in text for text in said) == (0 if trusted else 1)


def test_trust_by_default_is_said_once(tmp_path: Path) -> None:
    """In a process, so that this is one of its own."""
    run_processes(1, loads_with_trust, tmp_path)
