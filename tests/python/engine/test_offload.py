"""Optimizer states and parameters in host memory and on a disk: what a user sees of it. The bits are compared in
test_parity.py, test_distributed.py and in C++."""

from __future__ import annotations

import copy
import enum
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import OPTIMIZERS, Net, batch, config, engines, make, run, run_ranks, same_bits, weights

import tessera

PROGRAM = Path(__file__).parents[1] / "offload_program.py"
ADAM = {"type": "AdamW", "params": {"lr": 0.01}}


def away(stage: int, folder: Path, params: bool = False, **more: Any) -> dict[str, Any]:
    disk = {"device": "nvme", "nvme_path": str(folder)}
    zero = {"offload_optimizer": disk} | ({"offload_param": disk | {"max_in_cpu": 0}} if params else {})
    return config(stage, optimizer=ADAM, bf16=True, zero=zero, **more)


PLACES = pytest.mark.parametrize(("stage", "params"), [(1, False), (2, False), (3, False), (3, True)])


@PLACES
@pytest.mark.parametrize("world", [1, 2])
def test_frozen_parameters_leaf_modules_and_several_backwards(
    stage: int, params: bool, world: int, tmp_path: Path
) -> None:
    def body(engine: Any, rank: int) -> Any:
        for k in range(3):
            for _ in range(2):  # before one step
                engine(*batch(10 * rank + k)).backward()
            engine.step()
        return weights(engine.module)

    model = make()
    model.blocks[0].requires_grad_(False)
    if stage == 3:
        tessera.zero.set_leaf_modules(model, [type(model.blocks[1])])
    here = engines(model, world, config(stage, optimizer=ADAM, bf16=True), body)
    for results, want in zip(engines(model, world, away(stage, tmp_path, params), body), here, strict=True):
        assert same_bits(results, want)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", [1, 2])
def test_unused_parameters_are_an_error_where_the_configuration_says_so(stage: int, world: int) -> None:
    def body(engine: Any, rank: int) -> None:
        for _ in range(2):  # of a step
            engine(*batch(rank)).backward()
            engine.step()
        assert engine.global_steps == 1
        engine.module.skips = True
        engine(*batch(rank)).backward()
        engine.step()
        for odd in (False, True):  # on all ranks, or on the last one
            engine.module.skips = rank + 1 == world or not odd
            engine(*batch(rank)).backward()
            with pytest.raises(AssertionError, match=r"gain.*zero_optimization\.ignore_unused_parameters"):
                engine.step()
            assert engine.global_steps == 1
            engine.zero_grad()

    class Skipping(Net):
        skips = False

        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            if self.skips:
                return self.head(self.embed(x)).square().mean()
            return super().forward(x, y)

    zero = {"ignore_unused_parameters": False, "offload_optimizer": {"device": "cpu"}}
    engines(make(Skipping), world, config(stage, accumulation=2, optimizer=ADAM, zero=zero), body)


@PLACES
def test_memory_says_where_states_are(stage: int, params: bool, tmp_path: Path) -> None:
    def body(engine: Any, rank: int) -> Any:
        return engine.core.memory()

    for memory in engines(make(), 2, away(stage, tmp_path, params), body):
        assert memory.disk == memory.master + memory.states + (memory.params if params else 0) > 0
        assert memory.host == 0


@PLACES
def test_states_are_read_and_written_where_they_are(stage: int, params: bool, tmp_path: Path) -> None:
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
        tessera.state.set_full_fp32_param(engine, param, torch.full((3, 7), 0.75))
        with tessera.zero.GatheredParameters(param):
            assert param.eq(0.75).all()

    engines(make(), 2, away(stage, tmp_path, params), body)


@pytest.mark.parametrize("world", [1, 2])
def test_parameters_on_a_disk_are_read_and_written_in_regions(world: int, tmp_path: Path) -> None:
    def body(engine: Any, rank: int) -> Any:
        params = list(engine.module.parameters())
        info = tessera.zero.partition_info(params[0])
        assert info is not None and info.local.numel() == info.end - info.begin
        if engine.core.memory().disk:
            with pytest.raises(RuntimeError, match="is partitioned"):
                params[0].sum()
            with (
                pytest.raises(RuntimeError, match="in-place modification"),
                tessera.zero.GatheredParameters(params),
                torch.no_grad(),
            ):
                params[0].zero_()
        with tessera.zero.GatheredParameters(params, modifier_rank=0), torch.no_grad():
            for param in params:
                param.mul_(2)
        run(engine, rank, 2)
        assert engine.save_16bit_model(tmp_path / "weights")
        return weights(engine.module)

    found = []
    for cfg in (config(3, optimizer=ADAM, bf16=True), away(3, tmp_path / "disk", params=True)):
        cfg["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
        found += [*engines(make(), world, cfg, body), torch.load(tmp_path / "weights" / "pytorch_model.bin")]
    assert all(map(same_bits, found[: world + 1], found[world + 1 :]))


@pytest.mark.parametrize("world", [1, 2])
def test_parameters_on_a_disk_and_the_update_in_the_backward(world: int, tmp_path: Path) -> None:
    def body(engine: Any, rank: int) -> Any:
        run(engine, rank, 3)
        return weights(engine.module)

    finite = {"bf16": {"enabled": True, "check_grad_overflow": False}}
    more = {"tessera": {"update_in_backward": True, "min_unit_elements": 1}}
    here = engines(make(), world, config(3, optimizer=ADAM) | finite, body)
    there = engines(make(), world, away(3, tmp_path, params=True, **more) | finite, body)
    assert all(map(same_bits, here, there))


def test_models_that_are_built_on_a_disk(tmp_path: Path) -> None:
    """One rank partitions too; what is built never is in memory as a whole."""
    cfg = away(3, tmp_path, params=True)
    torch.manual_seed(0)
    with tessera.zero.Init(config=cfg):
        model = Net()
        assert all(tessera.zero.partition_info(p).partitioned for p in model.embed.parameters())  # type: ignore[union-attr]
    assert files_held_in(tmp_path) > 0
    engine = tessera.initialize(model=model, config=cfg)[0]
    plain = tessera.initialize(model=make(), config=config(3, optimizer=ADAM, bf16=True))[0]
    for one in (engine, plain):
        run(one, 0, 2)
    assert same_bits(weights(engine.module), weights(plain.module))
    for one in (engine, plain):
        one.destroy()

    def built(rank: int, group: tessera.Group) -> Any:
        with lock:
            start = make(seed=rank)  # rank 0's values hold
        tessera.zero.Init(module=start, group=group, config=cfg)
        engine = tessera.Engine(start, cfg, group=group)
        run(engine, rank, 2)
        found = weights(engine.module)
        engine.destroy()
        return found

    lock = threading.Lock()  # torch's generator is one for all threads

    def body(engine: Any, rank: int) -> Any:
        run(engine, rank, 2)
        return weights(engine.module)

    assert all(map(same_bits, run_ranks(2, built), engines(make(), 2, config(3, optimizer=ADAM, bf16=True), body)))
    with pytest.raises(ValueError, match=r"offload_param\.nvme_path"):
        tessera.zero.Init(remote_device="nvme")
    with pytest.raises(ValueError, match="remote_device must be one of"):
        tessera.zero.Init(remote_device="disk")


def files_held_in(folder: Path) -> int:
    links = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    return sum(link.startswith(str(folder)) for link in links)


class Word(str, enum.Enum):  # as DeepSpeed's callers have them
    nvme = "nvme"
    lp_params = "lp_params"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_states_away_for_a_while(stage: int, tmp_path: Path) -> None:
    """Between a forward and a backward of another engine, as in loops of several models."""

    def body(engine: Any, rank: int) -> Any:
        other = tessera.Engine(make(seed=3), config(0))
        for k in range(3):
            run(engine, rank, 1)
            loss = other(*batch(k))
            if moves:
                engine.offload_states(device=Word.nvme)
                engine.offload_states(include=[Word.lp_params, "optim_states"], device="nvme")
                assert engine.core.memory().disk > engine.core.memory().params
                for call in (lambda: engine(*batch(0)), engine.step, lambda: engine.save_checkpoint(tmp_path)):
                    with pytest.raises(RuntimeError, match=r"reload_states\(\)"):
                        call()
            loss.backward()
            other.step()
            if moves:
                engine.reload_states()
                assert engine.core.memory().disk == 0
        return weights(engine.module)

    zero = {"offload_optimizer": {"device": "none", "nvme_path": str(tmp_path)}}
    cfg = config(stage, optimizer=ADAM, bf16=True, zero=zero)
    moves = False
    here = engines(make(), 2, cfg, body)
    moves = True
    assert all(map(same_bits, engines(make(), 2, cfg, body), here))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_engine_ends_with_states_away(stage: int, tmp_path: Path) -> None:
    """Parameters are whole again; of the states, which have no room, the optimizer says that they ended."""
    model = make()
    zero = {"offload_optimizer": {"device": "none", "nvme_path": str(tmp_path)}}
    engine, optimizer, *_ = tessera.initialize(model=model, config=config(stage, optimizer=ADAM, bf16=True, zero=zero))
    run(engine, 0, 1)
    want = engine.module_state_dict()
    engine.offload_states(device="nvme")
    engine.destroy()
    assert all(torch.equal(value, want[name]) for name, value in model.state_dict().items())
    assert all("exp_avg" not in state for state in optimizer.state.values())
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def test_states_that_cannot_go_away(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def refused(cfg: dict[str, Any], error: type[Exception], match: str, *args: Any, **kwargs: Any) -> None:
        engine = tessera.initialize(model=make(), config=cfg)[0]
        with pytest.raises(error, match=match):
            engine.offload_states(*args, **kwargs)
        engine.destroy()

    refused(config(0), ValueError, "stage 1, 2 or 3")
    refused(config(1), ValueError, "nvme_path", device="nvme")
    refused(config(1), ValueError, r"no such states: \['moments'\]", include=["moments"])
    refused(config(1), ValueError, "device must be one of", device="cuda")
    refused(
        away(3, tmp_path, params=True),
        ValueError,
        "offload_param is configured: parameters do not live on",
    )
    rmsprop = tessera.initialize(
        model=(model := make()),
        optimizer=torch.optim.RMSprop(model.parameters()),
        config={k: v for k, v in config(1).items() if k != "optimizer"} | {"zero_allow_untested_optimizer": True},
    )[0]
    with pytest.raises(AssertionError, match="a client's own optimizer holds tensors of its own; name one of"):
        rmsprop.offload_states()
    rmsprop.destroy()
    engine = tessera.initialize(model=make(), config=config(1))[0]
    with pytest.warns(UserWarning, match="nothing is moved"):
        engine.offload_states(device="none")
    capfd.readouterr()
    engine.offload_states()
    engine.offload_states()
    assert capfd.readouterr().err.count("changes nothing") == 1
    run(engine, 0, 1)
    engine.destroy()


@PLACES
def test_checkpoints_of_states_on_a_disk(stage: int, params: bool, tmp_path: Path) -> None:
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

    here, there = config(stage, optimizer=ADAM, bf16=True), away(stage, tmp_path / "disk", params)
    for first, second in ((here, there), (there, here), (there, there)):
        want = engines(make(), 2, first, body)[0]
        assert same_bits(engines(make(seed=5), 2, second, resumed)[0], want)


def test_host_memory_on_a_cpu_says_so_once(recwarn: pytest.WarningsRecorder) -> None:
    cfg = config(1, optimizer=ADAM, zero={"offload_optimizer": {"device": "cpu"}})
    engine = tessera.initialize(model=make(), config=cfg)[0]
    assert ["changes nothing" in str(each.message) for each in recwarn].count(True) == 1
    assert engine.core.memory().host == 0
    run(engine, 0, 1)
    engine.destroy()


def test_an_update_of_a_model_on_the_cpu_does_not_run_on(tmp_path: Path) -> None:
    def body(engine: Any, rank: int) -> Any:
        for k in range(3):
            engine(*batch(10 * rank + k)).backward()
            engine.step()
        found = weights(engine.module)
        engine.finish_update()
        return found

    model = make()
    expected = engines(model, 2, away(1, tmp_path), body)
    found = engines(model, 2, away(1, tmp_path, tessera={"update_runs_on": True}), body)
    for got, want in zip(found, expected, strict=True):
        assert same_bits(got, want)


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


def stepped(name: str) -> Callable[[Any], torch.optim.Optimizer]:
    """That has stepped before there is an engine: also one whose moments came with load_state_dict()."""

    def make_it(params: Any) -> torch.optim.Optimizer:
        params = list(params)
        optimizer = OPTIMIZERS[name](params)
        for k, param in enumerate(params):
            param.grad = torch.linspace(0, 1 + k, param.numel()).view(param.shape)
        optimizer.step()
        optimizer.zero_grad()
        if name != "adamw":
            return optimizer
        other = OPTIMIZERS[name](params)
        other.load_state_dict(optimizer.state_dict())
        return other

    return make_it


@pytest.mark.parametrize("name", ["adagrad", "adamw", "momentum"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_optimizers_that_bring_states(stage: int, name: str, tmp_path: Path) -> None:
    """Ranks hold parts of other parameters each, one-dimensional ones whole or not at all. Loaded later, too."""

    def body(engine: Any, rank: int) -> Any:
        early = copy.deepcopy(engine.basic_optimizer.state_dict())
        run(engine, rank, 2)
        engine.basic_optimizer.load_state_dict(early)
        run(engine, rank, 2)
        engine.save_checkpoint(folder := tmp_path / str(engine.core.memory().disk > 0))
        run(engine, rank, 1)
        engine.load_checkpoint(folder)
        run(engine, rank, 1)
        return weights(engine.module)

    zero = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    for more in ({}, {"bf16": True}):
        here = engines(make(Net), 2, config(stage, **more), body, client=stepped(name))
        there = engines(make(Net), 2, config(stage, zero=zero, **more), body, client=stepped(name))
        assert all(same_bits(a, b) for a, b in zip(here, there, strict=True))


def test_ranks_that_bring_other_states_are_an_error_on_all() -> None:
    def body(rank: int, group: Any) -> None:
        model = make(Net)
        optimizer = (stepped("adamw") if rank == 0 else OPTIMIZERS["adamw"])(model.parameters())
        with pytest.raises(ValueError, match="bring states of different steps"):
            tessera.Engine(model, config(1), group=group, optimizer=optimizer)

    run_ranks(2, body)


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


def test_a_file_system_without_direct_transfers() -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("there is no file system in memory")
    assert program("shm").endswith("well\n")


def test_a_killed_process_leaves_no_file(tmp_path: Path) -> None:
    command = [sys.executable, PROGRAM, "endless", tmp_path]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "training\n"
    assert list(tmp_path.iterdir()) == []
    process.kill()
    process.wait()
    assert list(tmp_path.iterdir()) == []


def test_memory_is_the_buffers_whatever_the_states(tmp_path: Path) -> None:
    """Peaks beyond what the process had before, with an allocator that gives back what is freed: weights and, in
    training, gradients and three tiles of each state, within 10%, at states of four times these buffers."""
    elements = 12 << 22
    buffers = 3 * 2 * 4 * (1 << 22)  # of two moments, in bytes
    assert 4 * buffers == 8 * elements
    said = program("memory", tmp_path, elements, environment={"MALLOC_MMAP_THRESHOLD_": "1000000"})
    construction, training = map(int, said.split())
    assert construction == pytest.approx(4 * elements, rel=0.1)
    assert training == pytest.approx(8 * elements + buffers, rel=0.1)


@pytest.mark.long
def test_memory_is_buffers_and_a_unit_whatever_the_model(tmp_path: Path) -> None:
    """Parameters and states on a disk, and no gradients: a bound that has no part of the 32 units in it. How much
    of it is in use at once depends on how fast the disk is."""
    unit, units = 4 << 22, 32
    said = program("parameters", tmp_path, units << 22, environment={"MALLOC_MMAP_THRESHOLD_": "1000000"})
    construction, training = map(int, said.split())
    # 3 tiles of the file that zero.Init writes and 3 of the engine's, a unit whole, gathered and cut.
    assert construction < (6 + 3) * unit * 1.1
    # 3 tiles of weights and of both moments, what is read ahead, 3 buckets for units, 3 for gradients.
    assert training < (9 + 1 + 3 + 3) * unit * 1.1
    assert 5 * training < 3 * units * unit  # of what weights and moments take
