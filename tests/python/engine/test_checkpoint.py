"""save_checkpoint and load_checkpoint: what Python has of a run. Spreads and modes of the core's part are in
tests/engine/checkpoint_test.cpp."""

from __future__ import annotations

import concurrent.futures
import io
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import OPTIMIZERS, Net, config, engines, losses_of, make, run, run_processes, same_bits, weights
from torch import nn

import tessera


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_goes_on_with_every_optimizer(name: str, stage: int, tmp_path: Path) -> None:
    cfg = config(stage, zero_allow_untested_optimizer=True)

    def save(engine: Any, rank: int) -> Any:
        losses_of(engine, rank, 0, 3)
        engine.client_optimizer.param_groups[0]["lr"] = engine.client_optimizer.param_groups[0]["lr"] * 0.5
        assert engine.save_checkpoint(tmp_path)
        return losses_of(engine, rank, 3, 3), weights(engine.module)

    def load(engine: Any, rank: int) -> Any:
        path, state = engine.load_checkpoint(tmp_path)
        assert path == str(tmp_path / "global_step3")
        assert state == {}
        assert engine.global_steps == 3
        return losses_of(engine, rank, 3, 3), weights(engine.module)

    saved = engines(make(Net), 2, cfg, save, client=OPTIMIZERS[name])
    loaded = engines(make(Net, seed=5), 2, cfg, load, client=OPTIMIZERS[name])
    for (losses, values), (losses_after, values_after) in zip(saved, loaded, strict=True):
        assert losses == losses_after
        assert same_bits(values, values_after)


@pytest.mark.parametrize("name", ["adamw", "amsgrad", "rmsprop"])
def test_states_of_a_clients_optimizer_move_between_ranks_and_stages(name: str, tmp_path: Path) -> None:
    def states(engine: Any) -> dict[str, Any]:
        keys = [k for k in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "square_avg", "step") if k in KEYS[name]]
        return {
            f"{n} {k}": tessera.state.get_full_optimizer_state(engine, p, k)
            for n, p in engine.module.named_parameters()
            for k in keys
        }

    def save(engine: Any, rank: int) -> Any:
        run(engine, rank, 2)
        engine.save_checkpoint(tmp_path)
        return states(engine)

    def load(engine: Any, rank: int) -> Any:
        engine.load_checkpoint(tmp_path)
        return states(engine)

    saved = engines(make(Net), 2, config(2, zero_allow_untested_optimizer=True), save, client=OPTIMIZERS[name])
    for world, stage in ((1, 0), (3, 1), (2, 3)):
        cfg = config(stage, zero_allow_untested_optimizer=True)
        for values in engines(make(Net, seed=5), world, cfg, load, client=OPTIMIZERS[name]):
            assert same_bits(values, saved[0])


KEYS = {
    "adamw": ("exp_avg", "exp_avg_sq", "step"),
    "amsgrad": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"),
    "rmsprop": ("square_avg", "step"),
}


class Tied(nn.Module):
    """A tied weight, buffers of two kinds, a frozen parameter and state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(5)
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.calls = 0

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = self.second(self.first(x.to(self.first.weight.dtype)))
        return (self.norm(hidden)[:, :3] * self.frozen - y).square().mean()

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


@pytest.mark.parametrize("stage", range(4))
def test_the_module_comes_back_with_all_it_has(stage: int, tmp_path: Path) -> None:
    def save(engine: Any, rank: int) -> Any:
        losses_of(engine, rank, 0, 2)
        engine.save_checkpoint(tmp_path, exclude_frozen_parameters=False)
        engine.save_checkpoint(tmp_path / "trained", exclude_frozen_parameters=True)
        return engine.module_state_dict()

    def load(engine: Any, rank: int) -> Any:
        frozen = engine.module.frozen.detach().clone() if stage < 3 else None
        with pytest.raises(tessera.errors.ConfigError, match="not in the checkpoint: 'frozen'"):
            engine.load_checkpoint(tmp_path / "trained")
        engine.load_checkpoint(tmp_path / "trained", load_module_strict=False)
        if frozen is not None:
            assert torch.equal(engine.module.frozen, frozen)
        engine.load_checkpoint(tmp_path)
        return engine.module_state_dict()

    saved = engines(make(Tied), 2, config(stage), save)
    loaded = engines(make(Tied, seed=5), 2, config(stage), load)
    extra = "_extra_state"
    for before, after in zip(saved, loaded, strict=True):
        assert before.pop(extra) == after.pop(extra) == {"calls": 2}
        for name in before:
            assert torch.equal(after[name], before[name]), name


@pytest.mark.parametrize("schedule", ["WarmupLR", "client"])
def test_schedules_go_on(schedule: str, tmp_path: Path) -> None:
    cfg = config(1)
    more: dict[str, Any] = {}
    if schedule == "client":
        more["lr_scheduler"] = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    else:
        cfg["scheduler"] = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.3, "warmup_num_steps": 9}}

    def save(engine: Any, rank: int) -> Any:
        losses_of(engine, rank, 0, 3)
        engine.save_checkpoint(tmp_path, tag="a")
        losses_of(engine, rank, 3, 3)
        return engine.get_lr()

    def load(engine: Any, rank: int) -> Any:
        engine.load_checkpoint(tmp_path, tag="a")
        losses_of(engine, rank, 3, 3)
        return engine.get_lr()

    assert engines(make(Net), 1, cfg, save, **more) == engines(make(Net), 1, cfg, load, **more)


def test_client_state_tags_and_latest(tmp_path: Path) -> None:
    def body(engine: Any, rank: int) -> None:
        assert engine.load_checkpoint(tmp_path, missing_ok=True) == (None, None)
        engine.save_checkpoint(str(tmp_path), tag=7, client_state={"epoch": 3, "best": torch.ones(2)})
        losses_of(engine, rank, 0, 1)
        engine.save_checkpoint(tmp_path, save_latest=False)
        assert (tmp_path / "latest").read_text() == "7"
        path, state = engine.load_checkpoint(tmp_path)
        assert path is not None
        assert os.path.basename(path) == "7"
        assert state["epoch"] == 3
        assert engine.global_steps == 0
        engine.load_checkpoint(tmp_path, "global_step1")
        assert engine.global_steps == 1
        for wrong in ("", None):
            with pytest.raises(tessera.errors.ConfigError, match="save_dir"):
                engine.save_checkpoint(wrong)
        with pytest.raises(tessera.ConfigError, match="DeepSpeed's own: checkpoint_parallel_dimensions"):
            engine.save_checkpoint(tmp_path, client_state={"checkpoint_parallel_dimensions": 1})
        with pytest.raises(tessera.errors.IoError, match="no complete checkpoint 'none'"):
            engine.load_checkpoint(tmp_path, "none")

    engines(make(Net), 1, config(2), body)


class Custom:
    """Not plain data."""

    def __init__(self) -> None:
        self.value = 4


def test_objects_are_unpickled_only_where_the_caller_trusts_them(tmp_path: Path) -> None:
    def body(engine: Any, rank: int) -> None:
        engine.save_checkpoint(tmp_path, client_state={"custom": Custom()})
        losses_of(engine, rank, 0, 1)
        with pytest.raises(tessera.errors.IoError, match="trusted=True"):
            engine.load_checkpoint(tmp_path)
        assert engine.global_steps == 1  # nothing has changed
        _, state = engine.load_checkpoint(tmp_path, trusted=True)
        assert state["custom"].value == 4

    engines(make(Net), 1, config(0), body)


def test_parts_of_a_load(tmp_path: Path) -> None:
    def body(engine: Any, rank: int) -> None:
        losses_of(engine, rank, 0, 2)
        engine.save_checkpoint(tmp_path)
        saved = weights(engine.module)
        losses_of(engine, rank, 2, 1)
        engine.load_checkpoint(tmp_path, load_module_only=True)
        assert engine.global_steps == 3
        assert same_bits(weights(engine.module), saved)
        seen: list[str] = []

        def custom(src: dict[str, torch.Tensor], dst: nn.Module) -> None:
            seen.extend(src)
            dst.load_state_dict(src)

        losses_of(engine, rank, 3, 1)
        engine.load_checkpoint(tmp_path, custom_load_fn=custom, load_optimizer_states=False)
        assert same_bits(weights(engine.module), saved)
        assert set(seen) == set(saved)
        assert engine.global_steps == 2

    engines(make(Net), 2, config(3), body)


@pytest.mark.parametrize("stage", [0, 3])
def test_asynchronous_saves(stage: int, tmp_path: Path) -> None:
    cfg = config(stage, checkpoint={"asynchronous": True, "keep_last": 2})

    def body(engine: Any, rank: int) -> Any:
        at = {}
        for k in range(4):
            losses_of(engine, rank, k, 1)
            engine.save_checkpoint(tmp_path)
            at[k + 1] = weights(engine.module)
        engine.wait_for_checkpoint()
        for k in (3, 4):
            engine.load_checkpoint(tmp_path, f"global_step{k}")
            assert same_bits(weights(engine.module), at[k])

    engines(make(Net), 2, cfg, body)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["global_step3", "global_step4", "latest"]


@pytest.mark.parametrize("form", ["tessera", "deepspeed"])
def test_engines_that_save_into_one_folder_at_once(form: str, tmp_path: Path) -> None:
    """Also into a folder relative to one that is left while a save in the background goes on."""

    def body(number: int) -> None:
        engine = tessera.Engine(make(Net), config(1, checkpoint={"format": form}))
        for k in range(6):
            engine.save_checkpoint(tmp_path, tag=f"{number}-{k}", asynchronous=form == "tessera")
        engine.wait_for_checkpoint()

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        list(pool.map(body, range(3)))
    for tag in (f"{number}-{k}" for number in range(3) for k in range(6)):
        tessera.checkpoints.open_checkpoint(tmp_path, tag).verify()
    assert not [p for p in tmp_path.rglob("*") if "saving" in p.name or p.name.endswith(".part")]


def test_a_save_in_the_background_outlives_a_change_of_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    engine = tessera.Engine(make(Net), config(1))
    engine.save_checkpoint("run", asynchronous=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    engine.wait_for_checkpoint()
    tessera.checkpoints.open_checkpoint(tmp_path / "run").verify()


def test_a_file_latest_that_names_no_tag(tmp_path: Path) -> None:
    engine = tessera.Engine(make(Net), config(1))
    engine.save_checkpoint(tmp_path / "run")
    for text in (b"", b"\xff\xfe", b"../run/global_step0"):
        (tmp_path / "run" / "latest").write_bytes(text)
        for use in (engine.load_checkpoint, tessera.checkpoints.open_checkpoint):
            with pytest.raises(tessera.errors.IoError, match="latest"):
                use(tmp_path / "run")


def test_random_generators_where_asked_for(tmp_path: Path) -> None:
    def body(engine: Any, rank: int) -> None:
        torch.manual_seed(3)
        random.seed(4)
        engine.save_checkpoint(tmp_path, random_state=True)
        expected = torch.rand(3), random.random()
        engine.save_checkpoint(tmp_path / "without")
        engine.load_checkpoint(tmp_path)
        assert torch.equal(torch.rand(3), expected[0])
        assert random.random() == expected[1]
        torch.manual_seed(9)
        engine.load_checkpoint(tmp_path / "without")
        torch.manual_seed(9)

    engines(make(Net), 1, config(0), body)


def test_a_full_disk_or_a_folder_without_rights_is_an_error_and_training_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")

    def body(engine: Any, rank: int) -> None:
        with pytest.raises(tessera.errors.IoError, match="cannot make the folder"):
            engine.save_checkpoint(tmp_path / "file" / "deeper")
        losses_of(engine, rank, 0, 1)
        assert engine.save_checkpoint(tmp_path)

    engines(make(Net), 2, config(2), body)


def exports_what_the_other_does(rank: int, folder: Path) -> None:
    engine = tessera.initialize(model=make(Net, seed=rank), config=config())[0]
    own, others = (make(Net, seed=seed).state_dict() for seed in (rank, 1 - rank))
    for _ in range(30):
        assert engine.save_16bit_model(folder, "both.bin")
        found = torch.load(folder / "both.bin")
        assert same_bits(found, own) or same_bits(found, others)
    engine.destroy()


def test_two_processes_that_export_one_file(tmp_path: Path) -> None:
    """It is always whole, and of one of them."""
    run_processes(2, exports_what_the_other_does, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["both.bin"]


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("world", [1, 2])
def test_16bit_weights_of_a_live_engine(stage: int, world: int, tmp_path: Path) -> None:
    cfg = config(
        stage, bf16=True, zero={"stage3_gather_16bit_weights_on_model_save": True}, data_types={"buffer_dtype": "bf16"}
    )
    load_file = pytest.importorskip("safetensors.torch").load_file

    def body(engine: Any, rank: int) -> Any:
        losses_of(engine, rank, 0, 1)
        assert engine.save_16bit_model(tmp_path)
        assert engine.save_16bit_model(tmp_path, "trained.safetensors")
        assert engine.save_16bit_model(tmp_path, "small.bin", exclude_frozen_parameters=True)
        assert engine.save_16bit_model(tmp_path / "st", "model.safetensors", True, max_shard_size=100)
        assert engine.save_16bit_model(tmp_path / "bin", max_shard_size="100")
        with pytest.raises(tessera.errors.IoError, match=r"pytorch_model\.bin"):
            engine.save_16bit_model(tmp_path / "trained.safetensors" / "deeper")
        with pytest.raises(tessera.errors.IoError, match="cannot make the folder"):
            engine.save_16bit_model(tmp_path / "trained.safetensors", "x.safetensors")
        held = engine.module_state_dict()
        copies = {name: value.clone() for name, value in held.items() if name != "_extra_state"}
        losses_of(engine, rank, 1, 1)
        return copies

    model = make(Tied)
    held = engines(model, world, cfg, body)[0]
    state = torch.load(tmp_path / "pytorch_model.bin")
    assert state.keys() == model.state_dict().keys()
    assert state["second.weight"].data_ptr() == state["first.weight"].data_ptr()
    assert state["first.weight"].dtype == torch.bfloat16
    assert state.pop("_extra_state") == {"calls": 1}
    assert same_bits(state, held)
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in state.values()), "no more than the tensor"
    assert torch.load(tmp_path / "small.bin").keys() == model.state_dict().keys() - {"frozen"}
    model.load_state_dict(state, strict=False)

    whole = load_file(tmp_path / "trained.safetensors")
    assert whole.keys() == state.keys() - {"second.weight"}
    for kind, files in (("st", "model-*.safetensors"), ("bin", "pytorch_model-*.bin")):
        found: dict[str, torch.Tensor] = {}
        paths = sorted((tmp_path / kind).glob(files))
        for path in paths:
            found |= load_file(path) if kind == "st" else torch.load(path)
        assert len(paths) > 1
        assert found.keys() == (whole.keys() - {"frozen"} if kind == "st" else state.keys())
        assert all(torch.equal(found[name], state[name]) for name in found)
    assert all(torch.equal(whole[name], state[name]) for name in whole)
    assert not list(tmp_path.glob("**/*.part"))


PROGRAMS = Path(__file__).parents[1]


def program(name: str, *arguments: str, before: tuple[str, ...] = ()) -> None:
    command = [*before, sys.executable, str(PROGRAMS / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and done.stdout.endswith("well\n"), done.stdout + done.stderr


def test_a_small_file_system(tmp_path: Path) -> None:
    mount = 'mount -t tmpfs -o size=20m tmpfs "$0" && exec "$@"'
    before = ("unshare", "-rm", "sh", "-c", mount, str(tmp_path))
    if subprocess.run([*before, "true"], capture_output=True).returncode != 0:
        pytest.skip("this system lets nobody mount a file system in a user namespace")
    program("small_disk_program.py", str(tmp_path), before=before)


def test_a_limit_of_the_size_of_files(tmp_path: Path) -> None:
    program("small_disk_program.py", str(tmp_path), "1000000")


def test_a_rank_killed_at_any_moment_of_a_save(tmp_path: Path) -> None:
    program("killed_save_program.py", str(tmp_path), "10")


class WithExtra(Net):
    """A module with state of its own, of a kind that TransformerEngine's have."""

    def __init__(self) -> None:
        super().__init__()
        self.extra: Any = {"stream": io.BytesIO(b"\x00scales\xff"), "array": np.arange(3.0), "number": np.float32(2)}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize("where", ["extra state", "custom load"])
def test_code_of_the_users_that_fails_on_one_rank_is_an_error_of_all(where: str, tmp_path: Path) -> None:
    def body(engine: Any, rank: int) -> None:
        engine.save_checkpoint(tmp_path)

        def fails(*_: Any, **__: Any) -> None:
            if rank == 1:
                raise OSError("no more of it")

        custom = {"custom_load_fn": fails} if where == "custom load" else {}
        if not custom:
            engine.module.set_extra_state = fails
        with pytest.raises((OSError, tessera.errors.ConfigError), match="no more of it" if rank else "no more.*rank 1"):
            engine.load_checkpoint(tmp_path, **custom)
        engine.module.__dict__.pop("set_extra_state", None)
        engine.load_checkpoint(tmp_path)
        losses_of(engine, rank, 0, 1)

    engines(make(WithExtra), 2, config(2), body)


class Half:
    """A schedule with a number of NumPy's."""

    def __init__(self) -> None:
        self.scale = np.float64(0.5)

    def __call__(self, step: int) -> Any:
        return self.scale ** np.float64(step)


def set_rate(engine: Any, value: Any) -> None:
    engine.optimizer.param_groups[0]["lr"] = value


@pytest.mark.parametrize("form", ["tessera", "deepspeed"])
@pytest.mark.parametrize("what", ["cosine", "callable", "rate", "extra", "client_state"])
def test_what_is_of_numpy_needs_no_trust(what: str, form: str, tmp_path: Path) -> None:
    """A run that is saved loads."""
    schedules = {"cosine": lambda step: 0.5 * (1 + np.cos(np.pi * step / 10)), "callable": Half()}
    more: dict[str, Any] = {}
    if what in schedules:
        more["lr_scheduler"] = lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, schedules[what])
    cfg = config(2, checkpoint={"format": form})
    client = {"best": np.float64(0.5), "at": [np.int64(3)]} if what == "client_state" else {}
    model = make(WithExtra if what == "extra" else Net)

    def save(engine: Any, rank: int) -> Any:
        losses_of(engine, rank, 0, 2)
        if what == "rate":
            set_rate(engine, np.float64(0.05))
        engine.save_checkpoint(tmp_path, client_state=client)
        return losses_of(engine, rank, 2, 2), engine.get_lr()

    def load(engine: Any, rank: int) -> Any:
        engine.module.extra = None
        assert engine.load_checkpoint(tmp_path)[1] == client
        if what == "extra":
            assert engine.module.extra["stream"].getvalue() == b"\x00scales\xff"
            assert np.array_equal(engine.module.extra["array"], np.arange(3.0)) and engine.module.extra["number"] == 2
        return losses_of(engine, rank, 2, 2), engine.get_lr()

    assert engines(model, 2, cfg, save, **more) == engines(model, 2, cfg, load, **more)


class Opaque(torch.optim.lr_scheduler.LambdaLR):
    """With an object that is no plain data in its state."""

    def state_dict(self) -> Any:
        return {**super().state_dict(), "custom": Custom()}


@pytest.mark.parametrize("form", ["tessera", "deepspeed"])
def test_trust_is_for_all_of_a_checkpoint_and_only_what_is_asked_for_is_read(form: str, tmp_path: Path) -> None:
    more = {"lr_scheduler": lambda optimizer: Opaque(optimizer, lambda step: 0.5**step)}

    def body(engine: Any, rank: int) -> None:
        losses_of(engine, rank, 0, 2)
        engine.save_checkpoint(tmp_path)
        rate = engine.get_lr()
        losses_of(engine, rank, 2, 1)
        with pytest.raises(tessera.errors.IoError, match=r"test_checkpoint\.Custom.*trusted=True"):
            engine.load_checkpoint(tmp_path)
        assert engine.global_steps == 3
        engine.load_checkpoint(tmp_path, trusted=True)
        assert engine.get_lr() == rate
        if form == "tessera":
            engine.load_checkpoint(tmp_path, load_module_only=True)
            engine.load_checkpoint(tmp_path, load_lr_scheduler_states=False)

    engines(make(Net), 1, config(1, checkpoint={"format": form}), body, **more)


@pytest.mark.parametrize("what", ["client_state", "save_dir", "schedule", "extra", "optimizer"])
@pytest.mark.parametrize("form", ["tessera", "deepspeed"])
def test_what_fails_on_one_rank_is_an_error_on_all_and_training_goes_on(form: str, what: str, tmp_path: Path) -> None:
    cfg = config(1, zero_allow_untested_optimizer=True, checkpoint={"format": form})
    said = "save_dir" if what == "save_dir" else "cannot save"

    def body(engine: Any, rank: int) -> None:
        run(engine, rank, 1)
        bad = rank == (1 if what in ("save_dir", "optimizer") else 0)
        arguments: dict[str, Any] = {"client_state": {"f": lambda: 0} if bad and what == "client_state" else {}}
        if what == "schedule":
            engine.lr_scheduler.state_dict = lambda: {"f": lambda: 0}
        if what == "extra":
            engine.module.extra = lambda: 0
        if what == "optimizer" and bad:
            engine.client_optimizer.state[engine.client_optimizer.param_groups[0]["params"][0]]["f"] = lambda: 0
        with pytest.raises(tessera.errors.ConfigError, match=said):
            engine.save_checkpoint("" if bad and what == "save_dir" else tmp_path, **arguments)
        run(engine, rank, 1)

    more = {"lr_scheduler": lambda o: torch.optim.lr_scheduler.StepLR(o, 2)} if what == "schedule" else {}
    engines(make(WithExtra), 2, cfg, body, client=OPTIMIZERS["rmsprop"], **more)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def engine_of(model: nn.Module | None = None, **more: Any) -> Any:
    return tessera.initialize(model=make(Net) if model is None else model, config=config(1, **more))[0]


@pytest.mark.parametrize("checkpoint_format", ["tessera", "deepspeed"])
def test_what_latest_names_stays(checkpoint_format: str, tmp_path: Path) -> None:
    engine = engine_of(checkpoint={"format": checkpoint_format, "keep_last": 1})
    engine.save_checkpoint(tmp_path, tag="a")
    for tag in "bc":
        engine.save_checkpoint(tmp_path, tag=tag, save_latest=False)
    assert {"a", "c"} <= set(os.listdir(tmp_path)) and not (tmp_path / "b").exists()
    assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / "a")
    with pytest.raises(ValueError, match="keep_last"):
        engine.save_checkpoint(tmp_path, keep_last=-1)


COMPLEX = ["complex64", "complex128"]
UNUSUAL = ["uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]


class Buffers(nn.Module):
    def __init__(self, start: int, names: list[str]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        for name in names:
            dtype = getattr(torch, name)
            values = torch.arange(start, start + 6, dtype=torch.float64)
            self.register_buffer(name, (torch.polar(values, values) if dtype.is_complex else values).to(dtype))


@pytest.mark.parametrize(("form", "names"), [("tessera", COMPLEX + UNUSUAL), ("deepspeed", COMPLEX)])
def test_buffers_of_every_dtype(form: str, names: list[str], tmp_path: Path) -> None:
    saved, loaded = Buffers(1, names), Buffers(0, names)
    engine_of(saved, checkpoint={"format": form}).save_checkpoint(tmp_path)
    engine_of(loaded).load_checkpoint(tmp_path)
    found = tessera.checkpoints.state_dict(tmp_path)
    for name, buffer in saved.named_buffers():
        for other in (loaded.get_buffer(name), found[name]):
            assert other.dtype == buffer.dtype
            assert torch.equal(other.view(torch.uint8), buffer.view(torch.uint8)), name


@pytest.mark.parametrize("name", UNUSUAL)
def test_dtypes_that_deepspeeds_files_do_not_get(name: str, tmp_path: Path) -> None:
    with pytest.raises((ValueError, OSError), match=rf"torch\.{name}, which DeepSpeed's files"):
        engine_of(Buffers(1, [name]), checkpoint={"format": "deepspeed"}).save_checkpoint(tmp_path)


@pytest.mark.parametrize("checkpoint_format", ["tessera", "deepspeed"])
@pytest.mark.parametrize("before", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
def test_a_run_that_goes_on_in_fp16_begins_with_its_own_scale(
    before: dict[str, Any], checkpoint_format: str, tmp_path: Path
) -> None:
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 12}}
    engine_of(**before, checkpoint={"format": checkpoint_format}).save_checkpoint(tmp_path / "unscaled")
    engine = engine_of(**fp16)
    engine.load_checkpoint(tmp_path / "unscaled")
    assert engine.optimizer.cur_scale == 2**12
    engine.optimizer.cur_scale = 2**5
    engine.save_checkpoint(tmp_path / "scaled")
    other = engine_of(**fp16)
    other.load_checkpoint(tmp_path / "scaled")
    assert other.optimizer.cur_scale == 2**5
