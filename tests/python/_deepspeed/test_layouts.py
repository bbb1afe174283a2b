"""DeepSpeed's layouts without DeepSpeed: what is written is read again as it was; what is damaged, missing or of two
checkpoints is refused; a save is whole or not at all. Tests with DeepSpeed itself are in tests/peers."""

from __future__ import annotations

import os
import random
import resource
import shutil
import sys
import types
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import Net, batch, config, engines, make, run, same_bits, weights
from tessera.errors import ConfigError, IoError
from torch import nn

import tessera
from tessera import checkpoints

FORMAT = {"checkpoint": {"format": "deepspeed"}, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
TAG = "global_step2"
TAG0 = "global_step0"


class Tied(Net):
    """With a buffer, a frozen parameter, an empty one and one whose elements are in another order."""

    def __init__(self) -> None:
        super().__init__(width=5)
        self.blocks[1].linear.weight = self.blocks[0].linear.weight
        self.register_buffer("scale", torch.arange(6).view(2, 3).t())
        self.blocks[0].norm.bias.requires_grad_(False)
        self.turned = nn.Parameter(torch.randn(5, 3).t())

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        assert y is not None
        return super().forward(x, y) + (self.turned.float() ** 2).mean()


def full(engine: Any) -> dict[str, torch.Tensor]:
    found: dict[str, Any] = dict(weights(engine.module))
    for name, param in engine.module.named_parameters():
        if param.requires_grad:
            found[name] = tessera.state.get_full_fp32_param(engine, param)
            for kind in ("exp_avg", "exp_avg_sq", "step"):
                found[f"{name} {kind}"] = tessera.state.get_full_optimizer_state(engine, param, kind)
    return found


def saved(folder: Path, stage: int = 2, world: int = 2, **more: Any) -> dict[str, torch.Tensor]:
    def body(engine: Any, rank: int) -> Any:
        run(engine, rank, 2)
        engine.save_checkpoint(folder, client_state={"epoch": 3})
        return full(engine)

    result: dict[str, torch.Tensor] = engines(make(Tied), world, config(stage, bf16=True, **{**FORMAT, **more}), body)[
        0
    ]
    return result


def loaded(folder: Path, stage: int = 1, world: int = 1, **more: Any) -> dict[str, torch.Tensor]:
    def body(engine: Any, rank: int) -> Any:
        engine.load_checkpoint(folder, **more)
        return full(engine)

    result: dict[str, torch.Tensor] = engines(make(Tied, seed=4), world, config(stage, bf16=True, **FORMAT), body)[0]
    return result


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("stage", range(4))
def test_comes_back(stage: int, world: int, tmp_path: Path) -> None:
    known = saved(tmp_path / "a", stage, world)
    assert same_bits(loaded(tmp_path / "a", (stage + 1) % 4, 3 - world // 2), known)
    # Once more from there, without an engine, to another stage and number of ranks; stage 0 has no names.
    if stage > 0:
        assert checkpoints.to_deepspeed(tmp_path / "a", tmp_path / "b", stage=(stage + 2) % 4, world_size=4) == TAG
        assert same_bits(loaded(tmp_path / "b"), known)
        name = checkpoints.to_universal(tmp_path / "a", tmp_path / "b", name="of_any_number")
        assert same_bits(loaded(tmp_path / "b", tag=name), known)
        state = checkpoints.state_dict(tmp_path / "b", name)
        assert state["blocks.1.linear.weight"] is state["blocks.0.linear.weight"]
        assert all(torch.equal(state[name], value.float()) for name, value in known.items() if " " not in name)
        assert torch.equal(state["scale"], make(Tied).scale)


def test_a_saved_run_of_ours_becomes_theirs(tmp_path: Path) -> None:
    known = saved(tmp_path / "ours", checkpoint={})
    assert (tmp_path / "ours" / TAG / "manifest.json").exists()
    for stage, world in ((0, 1), (1, 3), (2, 1), (3, 2)):
        out = tmp_path / f"out{stage}"
        command = ["deepspeed", str(tmp_path / "ours"), str(out), "--stage", str(stage), "--world-size", str(world)]
        assert checkpoints.main(command) == 0
        assert same_bits(loaded(out), known)
        names = sorted(path.name for path in (out / TAG).iterdir())
        assert len(names) == (1 if stage == 0 else 2 * world if stage == 3 else 1 + world)
        assert all(name.startswith("bf16_") for name in names if "optim" in name)
    assert checkpoints.main(["universal", str(tmp_path / "ours"), str(tmp_path / "u")]) == 0
    assert (tmp_path / "u" / "latest_universal").read_text() == f"{TAG}_universal"


def test_what_is_loaded_can_be_chosen(tmp_path: Path) -> None:
    known = saved(tmp_path, stage=3)
    only = loaded(tmp_path, load_optimizer_states=False)
    assert torch.equal(only["turned"], known["turned"]) and not torch.equal(
        only["turned exp_avg"], known["turned exp_avg"]
    )

    def body(engine: Any, rank: int) -> Any:
        with pytest.raises(ConfigError, match="latest_universal"):
            engine.load_checkpoint(tmp_path)
        path, client = engine.load_checkpoint(tmp_path, TAG, load_module_only=True)
        assert client == {"epoch": 3} and engine.global_steps == 0
        return path

    cfg = config(1, bf16=True, **{**FORMAT, "checkpoint": {"load_universal": True}})
    assert engines(make(Tied), 2, cfg, body) == [str(tmp_path / TAG)] * 2


STATES = {
    "SGD": ["momentum_buffer"],
    "NAdam": ["exp_avg", "exp_avg_sq", "mu_product", "step"],
    "RMSprop": ["square_avg", "step"],
}


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("name", STATES)
def test_states_of_a_clients_optimizer(name: str, stage: int, tmp_path: Path) -> None:
    cfg = config(stage, zero_allow_untested_optimizer=True, checkpoint={"format": "deepspeed"})
    factory = partial(getattr(torch.optim, name), lr=0.01, **({"momentum": 0.9} if name == "SGD" else {}))

    def state(engine: Any) -> dict[str, Any]:
        get = tessera.state.get_full_optimizer_state
        params = [(n, param) for n, param in engine.module.named_parameters() if param.requires_grad]
        return {f"{n} {kind}": get(engine, param, kind) for n, param in params for kind in STATES[name]}

    def save(engine: Any, rank: int) -> Any:
        run(engine, rank, 3)
        engine.save_checkpoint(tmp_path)
        return state(engine), [float(engine(*batch(k)).detach()) for k in range(2)], run(engine, rank, 2)

    def load(engine: Any, rank: int) -> Any:
        run(engine, rank, 1)
        engine.load_checkpoint(tmp_path)
        return state(engine), [float(engine(*batch(k)).detach()) for k in range(2)], run(engine, rank, 2)

    first = engines(make(Tied), 2, cfg, save, optimizer=factory)
    for before, after in zip(first, engines(make(Tied, seed=4), 2, cfg, load, optimizer=factory), strict=True):
        assert before[0] and same_bits(before[0], after[0])
        assert before[1] == after[1]


def test_objects_of_the_client_and_frozen_parameters_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def save(engine: Any, rank: int) -> None:
        engine.save_checkpoint(tmp_path, client_state={"where": Path("a")}, exclude_frozen_parameters=True)

    def load(engine: Any, rank: int) -> None:
        with pytest.raises(IoError, match="pathlib"):
            engine.load_checkpoint(tmp_path)
        with pytest.raises(ConfigError, match=r"blocks\.0\.norm\.bias"):
            engine.load_checkpoint(tmp_path, trusted=True)
        _, client = engine.load_checkpoint(tmp_path, trusted=True, load_module_strict=False)
        assert client == {"where": Path("a")}

    engines(make(Tied), 1, config(3, bf16=True, **FORMAT), save)
    engines(make(Tied), 1, config(2, bf16=True, **FORMAT), load)
    # Weights need no trust: what is unknown is skipped.
    known = checkpoints.state_dict(tmp_path)
    assert "turned" in known and checkpoints.main(["inspect", str(tmp_path), "--verify"]) == 0
    assert checkpoints.main(["export", str(tmp_path), str(tmp_path / "out")]) == 0
    assert "turned" in checkpoints.state_dict(tmp_path)
    for command in (["universal"], ["deepspeed", "--stage", "2", "--world-size", "1"]):
        arguments = [command[0], str(tmp_path), str(tmp_path / command[0]), *command[1:]]
        assert checkpoints.main(arguments) == 1
        assert "pathlib" in capsys.readouterr().err
        assert checkpoints.main([*arguments, "--trusted"]) == 0
        assert same_bits(
            checkpoints.state_dict(tmp_path / command[0], f"{TAG0}_universal" if len(command) == 1 else None), known
        )


def optim(folder: Path, rank: int) -> Path:
    return folder / TAG / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def flip(path: Path) -> None:
    """A bit of the largest tensor."""
    with zipfile.ZipFile(path) as archive:
        largest = max(archive.infolist(), key=lambda info: info.file_size)
    data, begin = bytearray(path.read_bytes()), largest.header_offset
    name, extra = (int.from_bytes(data[begin + at : begin + at + 2], "little") for at in (26, 28))  # their lengths
    data[begin + 30 + name + extra + 5] ^= 16
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path, Path], Any]] = {
    "a byte": lambda a, b: flip(optim(a, 1)),
    "short": lambda a, b: os.truncate(optim(a, 0), 700),
    "a missing rank": lambda a, b: optim(a, 1).unlink(),
    "no model states": lambda a, b: (
        (a / TAG / "mp_rank_00_model_states.pt").unlink(missing_ok=True)
        or [p.unlink() for p in (a / TAG).glob("*model_states.pt")]
    ),
    "of another run": lambda a, b: shutil.copy(optim(b, 1), optim(a, 1)),
    "of other ranks": lambda a, b: shutil.copy(optim(a, 0), optim(a, 2)),
    "two precisions": lambda a, b: shutil.copy(optim(a, 0), a / TAG / "zero_pp_rank_0_mp_rank_00_optim_states.pt"),
    "tensor parallel": lambda a, b: torch.save({}, a / TAG / "mp_rank_01_model_states.pt"),
    "experts": lambda a, b: torch.save({}, a / TAG / "layer_0_expert_0_mp_rank_00_model_states.pt"),
    "nothing inside": lambda a, b: torch.save({}, next((a / TAG).glob("*rank_0*model_states.pt"))),
}


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("how", DAMAGE)
def test_damage_is_refused_and_named(how: str, stage: int, tmp_path: Path) -> None:
    """Before the engine has changed."""
    a, b = tmp_path / "a", tmp_path / "b"
    saved(a, stage)
    if how == "of another run":
        cfg = config(stage, bf16=True, **FORMAT)
        engines(make(Tied), 2, cfg, lambda e, r: (run(e, r, 3), e.save_checkpoint(b, tag=TAG)))
    DAMAGE[how](a, b)

    def body(engine: Any, rank: int) -> None:
        before = full(engine)
        with pytest.raises(IoError, match=str(a)):
            engine.load_checkpoint(a)
        assert same_bits(full(engine), before)

    engines(make(Tied, seed=4), 2, config(1, bf16=True, **FORMAT), body)


def test_mutated_folders(tmp_path: Path) -> None:
    saved(tmp_path)
    files = sorted((tmp_path / TAG).iterdir())
    good = {file: file.read_bytes() for file in files}
    known = checkpoints.state_dict(tmp_path)
    rng = random.Random(3)
    for _ in range(300):
        file = rng.choice(files)
        bad = bytearray(good[file])
        bad[rng.randrange(len(bad))] = rng.randrange(256)
        file.write_bytes(bad)
        try:
            reader = checkpoints.open_checkpoint(tmp_path)
            reader.verify()
            state = checkpoints.state_dict(tmp_path)
            assert all(torch.equal(state[name], value) for name, value in known.items())
        except IoError as error:
            assert str(tmp_path) in str(error)
        file.write_bytes(good[file])


@pytest.mark.parametrize("command", [["universal"], ["deepspeed", "--stage", "0", "--world-size", "1"], ["export"]])
def test_a_file_in_the_place_of_a_folder_is_a_message(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path / "a")
    (tmp_path / "file").write_text("x")
    for arguments in ((tmp_path / "a", tmp_path / "file"), (tmp_path / "file", tmp_path / "b")):
        assert checkpoints.main([command[0], *map(str, arguments), *command[1:]]) == 1
        assert "file" in capsys.readouterr().err


def test_a_folder_of_neither_says_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    with pytest.raises(IoError, match=r"manifest\.json.*model_states"):
        checkpoints.open_checkpoint(tmp_path, "t")
    with pytest.raises(IoError, match=r"manifest\.json.*model_states"):
        loaded(tmp_path, tag="t")


@pytest.mark.parametrize("when", ["write", "finish"])  # finish: when the new one is in its place
def test_a_failed_save_leaves_one_that_is_whole(when: str, tmp_path: Path) -> None:
    known = saved(tmp_path)
    listed = sorted(os.listdir(tmp_path))
    largest = max(path.stat().st_size for path in (tmp_path / TAG).iterdir())
    script = tmp_path / "zero_to_fp32.py"

    def body(engine: Any, rank: int) -> None:
        run(engine, rank, 1)
        with pytest.raises(IoError, match=r"File too large|zero_to_fp32\.py' cannot be put in place"):
            engine.save_checkpoint(tmp_path, TAG)
        run(engine, rank, 1)

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if when == "write":
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest - 1, before[1]))
    else:
        script.unlink()
        (script / "in the way").mkdir(parents=True)
    try:
        engines(make(Tied, seed=4), 2, config(2, bf16=True, **FORMAT), body)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        if when == "finish":
            shutil.rmtree(script)
            listed.remove(script.name)
    assert {*listed} <= {*os.listdir(tmp_path)} and not (tmp_path / ".tessera-saving" / TAG).exists()
    now = loaded(tmp_path)
    assert same_bits(now, known) if when == "write" else now.keys() == known.keys()
    # Over the same tag, where a save before was killed.
    (tmp_path / ".tessera-saving" / TAG).mkdir(parents=True)
    assert same_bits(saved(tmp_path, stage=3, world=1), loaded(tmp_path))
    assert not (tmp_path / ".tessera-saving").exists()


def test_old_ones_go_and_options_are_checked(tmp_path: Path) -> None:
    def body(engine: Any, rank: int) -> None:
        for tag in "abc":
            engine.save_checkpoint(tmp_path, tag=tag, keep_last=2)
        engine.save_checkpoint(tmp_path, tag="d", save_latest=False)
        engine.save_checkpoint(tmp_path, tag="e", save_latest=False, keep_last=1)
        with pytest.raises(ValueError, match="keep_last"):
            engine.save_checkpoint(tmp_path, keep_last=-1)
        with pytest.raises(ConfigError, match="asynchronously"):
            engine.save_checkpoint(tmp_path, asynchronous=True)
        with pytest.raises(ConfigError, match="global_steps"):
            engine.save_checkpoint(tmp_path, client_state={"global_steps": 1})
        with pytest.raises(ValueError, match="tag"):
            engine.save_checkpoint(tmp_path, tag="../x")

    engines(make(Tied), 2, config(1, bf16=True, **FORMAT), body)
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["c", "e"]
    assert (tmp_path / "latest").read_text() == "c"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_optim_states_that_are_all_missing(stage: int, tmp_path: Path) -> None:
    known = saved(tmp_path, stage)
    for path in tmp_path.rglob("*_optim_states.pt"):
        path.unlink()
    with pytest.raises(IoError, match=r"has no '\*_optim_states\.pt', which hold"):
        loaded(tmp_path)
    if stage == 3:
        return
    for more in ({"load_optimizer_states": False}, {"load_module_only": True}):
        weights_only = loaded(tmp_path, **more)
        assert torch.equal(weights_only["head.weight"], known["head.weight"].bfloat16().float())
    with pytest.raises(IoError, match="has no"):
        checkpoints.to_deepspeed(tmp_path, tmp_path / "out", stage=1, world_size=1)


@pytest.mark.parametrize("number", [2**31, 2**50, 2**53, 2**64, -1, 0, 1.5e300, "2", None, float("nan"), [2]])
@pytest.mark.parametrize("key", ["dp_world_size", "global_steps", "skipped_steps", "global_samples"])
@pytest.mark.parametrize("stage", [2, 3])
def test_numbers_that_cannot_be(stage: int, key: str, number: Any, tmp_path: Path) -> None:
    """In bounded time and memory."""
    saved(tmp_path, stage)
    for path in (tmp_path / TAG).glob("*model_states.pt"):
        value = torch.load(path, weights_only=False)
        torch.save({**value, key: number}, path)
    can_be = number in ((2, "2") if key == "dp_world_size" else (2**31, 2**50, 0, "2"))
    try:
        loaded(tmp_path)
        assert can_be
    except IoError as error:
        assert not can_be and str(tmp_path) in str(error) and len(str(error)) < 1000


def changed(value: Any, key: str, new: Any) -> Any:
    """A nested value with `new` under every `key`."""
    if isinstance(value, dict):
        pairs = ((name, new if name == key else changed(one, key, new)) for name, one in value.items())
        return type(value)(pairs)
    return [changed(one, key, new) for one in value] if isinstance(value, list) else value


# Whose objects are in such files.
CLASSES = [
    ("deepspeed", "DeepSpeedEngine"),  # of the package above
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
    ("deepspeed.utils.tensor_fragment", "fragment_address"),
]


@pytest.mark.parametrize(
    ("key", "value"),
    [("lr_scheduler", [1]), ("last_batch_iteration", "x"), ("lr", "x"), ("betas", (0.9, "x")), ("param_groups", [3])],
)
@pytest.mark.parametrize("stage", range(4))
def test_values_of_another_kind(
    stage: int, key: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the place of a schedule's or of a param group's: named on all ranks, and the engine is as it was."""
    warmup = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 8}}
    adam = {"type": "AdamW", "params": {"lr": 0.01}}
    cfg = config(stage, bf16=True, **{**FORMAT, "optimizer": adam}, scheduler=warmup)

    def save(engine: Any, rank: int) -> None:
        run(engine, rank, 1)
        engine.save_checkpoint(tmp_path)

    def load(engine: Any, rank: int) -> None:
        run(engine, rank, 2)
        before = full(engine), engine.lr_scheduler.state_dict(), engine.get_lr()
        with pytest.raises(IoError, match=r"damaged|model_states|optim_states"):
            engine.load_checkpoint(tmp_path)
        assert same_bits(full(engine), before[0]) and engine.global_steps == 2
        assert (engine.lr_scheduler.state_dict(), engine.get_lr()) == before[1:]
        run(engine, rank, 1)

    for module, name in CLASSES:
        stub = types.ModuleType(module)
        setattr(stub, name, type(name, (), {"__module__": module}))
        monkeypatch.setitem(sys.modules, module, stub)
    engines(make(Tied), 2, cfg, save)
    for path in tmp_path.rglob("*_states.pt"):
        torch.save(changed(torch.load(path, weights_only=False), key, value), path)
    engines(make(Tied), 2, cfg, load)
