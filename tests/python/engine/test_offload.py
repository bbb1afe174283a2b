"""Optimizer states in host memory and on a disk: what a user sees of it. The bits are compared in test_parity.py,
test_distributed.py and in C++."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import batch, config, engines, make, run, weights

import tessera

PROGRAM = Path(__file__).parents[1] / "offload_program.py"
ADAM = {"type": "AdamW", "params": {"lr": 0.01}}


def away(stage: int, folder: Path, **more: Any) -> dict[str, Any]:
    cfg = config(stage, optimizer=ADAM, bf16=True, **more)
    cfg["zero_optimization"]["offload_optimizer"] = {"device": "nvme", "nvme_path": str(folder)}
    return cfg


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_frozen_parameters_leaf_modules_and_several_backwards(stage: int, tmp_path: Path) -> None:
    def body(engine: Any, rank: int) -> Any:
        for k in range(3):
            for _ in range(2):  # before one step
                engine(*batch(10 * rank + k)).backward()
            engine.step()
        return weights(engine.module)

    model = make()
    model.blocks[0].requires_grad_(False)
    if stage == 3:
        tessera.zero.set_z3_leaf_modules(model, [type(model.blocks[1])])
    here = engines(model, 2, config(stage, optimizer=ADAM, bf16=True), body)
    for results, want in zip(engines(model, 2, away(stage, tmp_path), body), here, strict=True):
        assert same(results, want)


def test_memory_says_where_states_are(tmp_path: Path) -> None:
    def body(engine: Any, rank: int) -> Any:
        return engine.core.memory()

    for memory in engines(make(), 2, away(1, tmp_path), body):
        assert memory.disk == memory.master + memory.states > 0
        assert memory.host == 0


def test_states_are_read_and_written_where_they_are(tmp_path: Path) -> None:
    def body(engine: Any, rank: int) -> None:
        run(engine, rank, 2)
        param = engine.module.head.weight
        tessera.state.set_full_optimizer_state(engine, param, "exp_avg", torch.full((3, 7), 0.5))
        assert tessera.state.get_full_optimizer_state(engine, param, "exp_avg").eq(0.5).all()
        state = engine.optimizer.state[param]
        state["exp_avg"].zero_()  # a copy
        assert tessera.state.get_full_optimizer_state(engine, param, "exp_avg").eq(0.5).all()
        engine.optimizer.state[param] = {"exp_avg": torch.full_like(state["exp_avg"], 0.25)}
        assert tessera.state.get_full_optimizer_state(engine, param, "exp_avg").eq(0.25).all()
        del engine.optimizer.state[param]
        assert tessera.state.get_full_optimizer_state(engine, param, "exp_avg").eq(0).all()

    engines(make(), 2, away(2, tmp_path), body)


@pytest.mark.parametrize("stage", [1, 3])
def test_checkpoints_of_states_on_a_disk(stage: int, tmp_path: Path) -> None:
    """Into an engine without offload and back; an asynchronous save is done when the call returns."""

    def body(engine: Any, rank: int) -> Any:
        run(engine, rank, 2)
        engine.save_checkpoint(tmp_path / "run", asynchronous=True)
        run(engine, rank, 2)
        return weights(engine.module)

    def resumed(engine: Any, rank: int) -> Any:
        engine.load_checkpoint(tmp_path / "run")
        run(engine, rank, 2)
        return weights(engine.module)

    here, there = config(stage, optimizer=ADAM, bf16=True), away(stage, tmp_path / "disk")
    for first, second in ((here, there), (there, here), (there, there)):
        want = engines(make(), 2, first, body)[0]
        assert same(engines(make(seed=5), 2, second, resumed)[0], want)


def test_host_memory_on_a_cpu_says_so_once(capfd: pytest.CaptureFixture[str]) -> None:
    cfg = config(1, optimizer=ADAM)
    cfg["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    engine = tessera.initialize(model=make(), config=cfg)[0]
    assert capfd.readouterr().err.count("changes nothing") == 1
    assert engine.core.memory().host == 0
    run(engine, 0, 1)
    engine.destroy()


def test_a_clients_own_optimizer(tmp_path: Path) -> None:
    model = make()
    rmsprop = torch.optim.RMSprop(model.parameters())
    cfg = away(1, tmp_path) | {"zero_allow_untested_optimizer": True}
    del cfg["optimizer"]
    with pytest.raises(ValueError, match=r"cannot be offloaded.*Adam.*offload_optimizer"):
        tessera.initialize(model=model, optimizer=rmsprop, config=cfg)
    cfg["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    engine = tessera.initialize(model=make(), optimizer=None, config=cfg | {"optimizer": ADAM})[0]
    engine.destroy()


def test_the_folder_is_made_or_named(tmp_path: Path) -> None:
    engine = tessera.initialize(model=make(), config=away(1, tmp_path / "a" / "b"))[0]
    assert list((tmp_path / "a" / "b").iterdir()) == []
    engine.destroy()
    with pytest.raises(tessera.errors.IoError, match=r"/proc/none"):
        tessera.initialize(model=make(), config=away(1, Path("/proc/none")))


def program(*arguments: object, environment: dict[str, str] | None = None) -> str:
    command = [sys.executable, PROGRAM, *map(str, arguments)]
    done = subprocess.run(command, env=os.environ | (environment or {}), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_disk_that_fills_up(tmp_path: Path) -> None:
    assert program("full", tmp_path).endswith("well\n")


@pytest.mark.parametrize("queue", ["threads", "auto"])
def test_a_file_system_without_direct_transfers(queue: str, tmp_path: Path) -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("there is no file system in memory")
    assert program("shm", environment={"TESSERA_IO": queue}).endswith("well\n")


def test_a_killed_process_leaves_no_file(tmp_path: Path) -> None:
    command = [sys.executable, PROGRAM, "endless", tmp_path]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "training\n"
    assert list(tmp_path.iterdir()) == []
    process.kill()
    process.wait()
    assert list(tmp_path.iterdir()) == []


def test_memory_is_the_buffers_whatever_the_states(tmp_path: Path) -> None:
    """Peaks beyond what the process had before, with an allocator that gives back what is freed: weights, gradients
    and, in training, three tiles of each state, within 10%, at states of four times these buffers."""
    buffers = 3 * 2 * 4 * (1 << 22)  # of two moments, in bytes
    training = {}
    for parts in (6, 12):
        elements = parts << 22
        said = program("memory", tmp_path, elements, environment={"MALLOC_MMAP_THRESHOLD_": "1000000"})
        construction, training[parts] = map(int, said.split())
        assert construction == pytest.approx(8 * elements, rel=0.1)
        assert training[parts] == pytest.approx(8 * elements + buffers, rel=0.1)
    assert 4 * buffers == 8 * (12 << 22)
    assert training[12] - training[6] == pytest.approx(8 * (6 << 22), rel=0.1)
