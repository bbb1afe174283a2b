"""Optimizers of whole parameters: an engine's slices give what one process gives; Muon is torch's, Lamb the paper's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support import PAIR_SPECS, Pair, batch, config, engines, make, run, train_plain, weights
from torch import nn

import tessera
from tessera.optim import Adafactor, Lamb, Muon

STAGES = [0, 1, 2, 3]


def muon(params: Any) -> Muon:
    params = list(params)
    matrices, rest = [p for p in params if p.dim() >= 2], [p for p in params if p.dim() < 2]
    groups = [{"params": matrices, "lr": 0.02}, {"params": rest, "use_muon": False, "lr": 0.01}]
    return Muon(groups, weight_decay=0.1)


FACTORIES: dict[str, Any] = {
    "lamb": lambda p: Lamb(p, lr=0.05, weight_decay=0.1),
    "muon": muon,
    "adafactor": lambda p: Adafactor(p, lr=0.05, weight_decay=0.1, d=1.5),
}
STATES = {
    "lamb": {"step", "exp_avg", "exp_avg_sq"},
    "muon": {"step", "exp_avg", "exp_avg_sq", "momentum_buffer"},
    "adafactor": {"step", "row_var", "col_var", "variance"},
}


@pytest.mark.parametrize("kind", FACTORIES)
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_slices_are_updated_as_whole_parameters(stage: int, world: int, kind: str) -> None:
    """Gradients differ in the last bit of fp32; Muon's iteration runs in bf16, where such a bit may turn a rounding."""
    model, plain = make(), make()
    train_plain(plain, FACTORIES[kind], world, 3)

    def body(engine: tessera.Engine, rank: int) -> dict[str, torch.Tensor | None]:
        run(engine, rank, 3)
        return weights(engine.module)

    for found in engines(model, world, config(stage), body, client=FACTORIES[kind]):
        for name, value in weights(plain).items():
            assert found[name] is not None and value is not None
            torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-3 if kind == "muon" else 1e-5)


@pytest.mark.parametrize("kind", FACTORIES)
def test_states_outlive_the_engine_and_steps_that_lack_gradients(kind: str) -> None:
    def body(engine: tessera.Engine, rank: int) -> None:
        run(engine, rank, 2)
        engine(*batch(rank)).backward()
        engine.step()
        assert engine.was_step_applied()
        engine.destroy()
        for param in engine.module.parameters():
            param.grad = torch.ones_like(param)
        engine.client_optimizer.step()  # parameters are whole again
        names = {name for state in engine.client_optimizer.state.values() for name in state}
        assert names == STATES[kind]

    engines(make(), 2, config(0), body, client=FACTORIES[kind])


@pytest.mark.parametrize("kind", FACTORIES)
@pytest.mark.parametrize("stage", [1, 3])
def test_bf16_masters_move_in_fp32(stage: int, kind: str) -> None:
    def body(engine: tessera.Engine, rank: int) -> None:
        run(engine, rank, 2)
        for param in engine.module.parameters():
            assert tessera.state.get_full_fp32_param(engine, param).dtype == torch.float32

    engines(make(), 2, config(stage, bf16=True), body, client=FACTORIES[kind])


def check_goes_on(folder: Any, before: tuple[int, Any], after: tuple[int, Any], atol: float) -> None:
    """A run of two ranks, resumed by three: the slices lie elsewhere. `before`, `after`: stage and optimizer."""

    def save(engine: tessera.Engine, rank: int) -> Any:
        run(engine, 0, 2)
        engine.save_checkpoint(folder)
        run(engine, 0, 2)
        return weights(engine.module)

    def load(engine: tessera.Engine, rank: int) -> Any:
        engine.load_checkpoint(folder)
        run(engine, 0, 2)
        return weights(engine.module)

    expected = engines(make(), 2, config(before[0]), save, client=before[1])[0]
    for found in engines(make(seed=5), 3, config(after[0]), load, client=after[1]):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-3, atol=atol)


@pytest.mark.parametrize("kind", FACTORIES)
def test_checkpoints_hold_the_states(kind: str, tmp_path: Any) -> None:
    factory = FACTORIES[kind]
    check_goes_on(tmp_path, (2, factory), (2, factory), 1e-3 if kind == "muon" else 1e-5)


@pytest.mark.parametrize("shape", [(5, 9), (8, 8), (16, 4)])
def test_muon_is_torchs(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    ours, theirs = nn.Linear(*shape, bias=False), nn.Linear(*shape, bias=False)
    theirs.load_state_dict(ours.state_dict())
    a = Muon(ours.parameters(), lr=0.02, weight_decay=0.1)
    b = torch.optim.Muon(theirs.parameters(), lr=0.02, weight_decay=0.1)
    for k in range(4):
        x = torch.randn(3, shape[0], generator=torch.Generator().manual_seed(k))
        for net, optimizer in ((ours, a), (theirs, b)):
            optimizer.zero_grad()
            net(x).square().sum().backward()
            optimizer.step()
        assert torch.equal(ours.weight, theirs.weight)


SHAPES: list[tuple[int, ...]] = [(5, 3), (1, 7), (7, 1), (4, 3, 2, 2), (6,), (1,), ()]
ARGUMENTS_OF_ADAFACTOR: list[dict[str, Any]] = [
    {},
    {"lr": 0.1, "weight_decay": 0.1, "maximize": True},
    {"beta2_decay": -0.5, "eps": (1e-5, 0.1), "d": 2.0},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("arguments", ARGUMENTS_OF_ADAFACTOR, ids=str)
def test_adafactor_is_torchs(arguments: dict[str, Any], dtype: torch.dtype) -> None:
    """And goes on with torch's states."""
    draw = torch.Generator().manual_seed(0)
    ours, theirs = ([nn.Parameter(torch.empty(shape, dtype=dtype)) for shape in SHAPES] for _ in range(2))
    for a, b in zip(ours, theirs, strict=True):
        a.data.normal_(generator=draw)
        b.data.copy_(a.data)
    optimizers = [Adafactor(ours, **arguments), torch.optim.Adafactor(theirs, **arguments)]

    def step() -> None:
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=draw).to(dtype)
            b.grad = a.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)

    for _ in range(4):
        step()
    states = [optimizer.state_dict() for optimizer in optimizers]
    assert states[0]["state"].keys() == states[1]["state"].keys()
    for number, state in states[1]["state"].items():
        assert all(torch.equal(states[0]["state"][number][key], value) for key, value in state.items())
    for optimizer, state in zip(optimizers, reversed(states), strict=True):
        (group,), (of,) = optimizer.param_groups, state["param_groups"]
        groups = [group | {"params": of["params"]}]
        optimizer.load_state_dict({"state": state["state"], "param_groups": groups})
    step()


@pytest.mark.parametrize("stage", STAGES)
def test_adafactor_of_a_configuration_has_torchs_bits(stage: int) -> None:
    plain = make()
    train_plain(plain, lambda p: torch.optim.Adafactor(p, lr=0.05, weight_decay=0.1), 1, 3)
    section = {"type": "adafactor", "params": {"lr": 0.05, "weight_decay": 0.1, "eps": [None, 1e-3]}}
    model = make()
    engine = tessera.initialize(model=model, config=config(stage, optimizer=section))[0]
    run(engine, 0, 3)
    engine.destroy()
    assert all(torch.equal(weights(model)[name], value) for name, value in weights(plain).items())  # type: ignore[arg-type]


@pytest.mark.parametrize("first", [0, 2])
def test_adafactor_and_torchs_class_load_each_others_checkpoints(first: int, tmp_path: Any) -> None:
    """torch's runs on whole parameters only."""

    kinds = {0: lambda p: torch.optim.Adafactor(p, lr=0.05), 2: lambda p: Adafactor(p, lr=0.05)}
    check_goes_on(tmp_path, (first, kinds[first]), (2 - first, kinds[2 - first]), 1e-5)


@pytest.mark.parametrize("stage", STAGES)
def test_adafactor_leaves_and_brings_whole_means(stage: int) -> None:
    """An engine that is built of an optimizer with states goes on where it was."""
    plain = make()
    reference = Adafactor(plain.parameters(), lr=0.05)

    def train_plain_one(seed: int) -> None:
        x, y = batch(seed)
        plain(x, y).backward()
        reference.step()
        reference.zero_grad()

    for seed in range(3):
        train_plain_one(seed)

    model = make()
    client = Adafactor(model.parameters(), lr=0.05)
    for seed in range(3):
        engine = tessera.Engine(model, config(stage), optimizer=client)
        engine(*batch(seed)).backward()
        engine.step()
        with tessera.zero.GatheredParameters(list(model.parameters())):
            engine.destroy()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_lamb_by_hand() -> None:
    w = nn.Parameter(torch.tensor([3.0, 4.0]))
    w.grad = torch.tensor([1.0, -1.0])
    Lamb([w], lr=0.1, weight_decay=0.0).step()
    direction = (0.1 * w.grad) / ((0.001 * w.grad**2).sqrt() + 1e-8)
    rate = 0.1 * (1 - 0.999) ** 0.5 / (1 - 0.9)
    expected = torch.tensor([3.0, 4.0]) - rate * (5.0 / direction.norm()) * direction
    torch.testing.assert_close(w.detach(), expected)


def test_eps_inside_the_root() -> None:
    w = nn.Parameter(torch.tensor([3.0, 4.0]))
    w.grad = torch.tensor([1.0, -1.0])
    Lamb([w], lr=0.1, bias_correction=False, eps=0.5, eps_inside_sqrt=True).step()
    direction = (0.1 * w.grad) / (0.001 * w.grad**2 + 0.5).sqrt()
    torch.testing.assert_close(w.detach(), torch.tensor([3.0, 4.0]) - 0.1 * 10.0 * direction)


@pytest.mark.parametrize("decoupled", [False, True])
def test_vectors_beside_muon_are_updated_as_by_adam(decoupled: bool) -> None:
    ours, theirs = (nn.Parameter(torch.ones(5)) for _ in range(2))
    cls = torch.optim.AdamW if decoupled else torch.optim.Adam
    a = Muon([{"params": [ours], "use_muon": False}], lr=0.1, weight_decay=0.3, adam_w_mode=decoupled)
    b = cls([theirs], lr=0.1, weight_decay=0.3)
    for k in range(3):
        for param, optimizer in ((ours, a), (theirs, b)):
            param.grad = torch.linspace(-1, 1, 5) * (k + 1)
            optimizer.step()
    torch.testing.assert_close(ours, theirs)


# Arguments that DeepSpeed's configurations have -> what the group of vectors has of them.
ARGUMENTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("Lamb", {"eps_inside_sqrt": False, "amsgrad": False}, {"eps_inside_sqrt": False}),
    ("Lamb", {"eps_inside_sqrt": True, "eps": 1e-3}, {"eps_inside_sqrt": True, "eps": 1e-3}),
    ("Muon", {}, {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "adam_w_mode": True}),
    ("Muon", {"lr": 0.5, "muon_lr": 0.1}, {"lr": 0.5}),
    (
        "Muon",
        {"lr": 0.5, "adam_lr": 0.1, "betas": [0.8, 0.9], "eps": 1e-6},
        {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6},
    ),
    ("Muon", {"adam_w_mode": False, "torch_adam": True, "fp32_optimizer_states": True}, {"adam_w_mode": False}),
]


@pytest.mark.parametrize(("kind", "params", "found"), ARGUMENTS)
def test_arguments_of_configurations(kind: str, params: dict[str, Any], found: dict[str, Any]) -> None:
    engine = tessera.initialize(model=make(), config=config(1, optimizer={"type": kind, "params": params}))[0]
    assert engine.basic_optimizer is not None
    group = engine.basic_optimizer.param_groups[-1]
    assert {name: group[name] for name in found} == found
    run(engine, 0, 1)
    engine.destroy()


def test_lamb_keeps_its_trust_within_bounds_and_leaves_zeros_alone() -> None:
    big, zero = nn.Parameter(torch.full((4,), 1e6)), nn.Parameter(torch.zeros(2))
    big.grad, zero.grad = torch.ones(4), torch.ones(2)
    Lamb([big, zero], lr=1.0, bias_correction=False).step()
    moved = 0.1 / (0.001**0.5 + 1e-8)
    assert (1e6 - big.detach() - 10 * moved).abs().max() < 0.1  # max_coeff
    torch.testing.assert_close(zero.detach(), torch.full((2,), -moved))


def test_the_configuration_names_them() -> None:
    for type_, cls in (("Lamb", Lamb), ("muon", Muon), ("Muon", Muon), ("Adafactor", Adafactor)):
        params = {"lr": 0.1, "muon_lr": 0.02, "adam_lr": 0.01} if cls is Muon else {"lr": 0.1}
        cfg = config(2, optimizer={"type": type_, "params": params})
        engine, optimizer, _, _ = tessera.initialize(model=make(), config=cfg)
        assert optimizer is not None and type(optimizer.optimizer) is cls
        if cls is Muon:
            names = {id(p): name for name, p in engine.module.named_parameters()}
            by_kind = {g["use_muon"]: (g["lr"], g["params"]) for g in optimizer.param_groups}
            assert by_kind[True][0] == 0.02 and by_kind[False][0] == 0.01
            assert names
        run(engine, 0, 2)
        engine.destroy()


def test_muon_groups_follow_names_and_marks() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.hidden, self.lm_head = nn.Embedding(3, 2), nn.Linear(2, 2), nn.Linear(2, 3, bias=False)
            self.other = nn.Linear(2, 2, bias=False)
            self.other.weight.use_muon = False  # type: ignore[assignment]

    model = Model()
    cfg = config(optimizer={"type": "Muon", "params": {"lr": 1.0}})
    optimizer = tessera.initialize(model=model, config=cfg)[1]
    assert optimizer is not None
    groups = {group["use_muon"]: group for group in optimizer.param_groups}
    assert [p is model.hidden.weight for p in groups[True]["params"]] == [True] and groups[True]["lr"] == 1.0
    assert len(groups[False]["params"]) == 4


@pytest.mark.parametrize(("kind", "cls"), [("Lamb", Lamb), ("Muon", Muon), ("Adafactor", Adafactor)])
def test_configurations_have_the_defaults_of_the_class(kind: str, cls: type[torch.optim.Optimizer]) -> None:
    built = tessera.initialize(model=make(), config=config(1, optimizer={"type": kind}))[0].basic_optimizer
    assert built is not None
    group, alone = built.param_groups[0], cls([nn.Parameter(torch.ones(2, 2))]).param_groups[0]
    assert {name: group[name] for name in alone.keys() - {"params", "ns_method"}} == {
        name: alone[name] for name in alone.keys() - {"params", "ns_method"}
    }


@pytest.mark.parametrize("cls", [Lamb, Muon, Adafactor, tessera.optim.AdamW, tessera.optim.Lion])
def test_groups_that_are_wrong_later(cls: Any) -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = cls([weight], lr=0.1)
    weight.grad = torch.ones(2, 2)
    for rate in (-1.0, float("nan")):
        optimizer.param_groups[0]["lr"] = rate
        with pytest.raises(tessera.ConfigError, match="param group 0: lr must be >= 0"):
            optimizer.step()
    assert torch.equal(weight, torch.ones(2, 2))


def test_wrong_arguments() -> None:
    matrix, vector = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    with pytest.raises(tessera.ConfigError, match="fewer than two dimensions"):
        Muon([vector])
    with pytest.raises(tessera.ConfigError, match="momentum"):
        Muon([matrix], momentum=1.0)
    with pytest.raises(tessera.ConfigError, match="ns_method must be one of standard, gram"):
        Muon([matrix], ns_method="other")
    for wrong in ({"d": 0.5}, {"beta2_decay": 0.5}, {"eps": (-1.0, 1e-3)}, {"eps": (None, -1e-3)}):
        with pytest.raises(tessera.ConfigError, match=rf"\[Adafactor\] {next(iter(wrong))}"):
            Adafactor([matrix], **wrong)  # type: ignore[arg-type]
    with pytest.raises(tessera.ConfigError, match="min_coeff"):
        Lamb([matrix], min_coeff=2.0, max_coeff=1.0)
    cfg = config(1, optimizer={"type": "Lamb", "params": {"lr": 0.1, "nonsense": 1}})
    with pytest.raises(tessera.ConfigError, match=r"optimizer\.params\.nonsense: unknown"):
        tessera.initialize(model=make(), config=cfg)


@pytest.mark.parametrize("kind", FACTORIES)
def test_matrices_that_tensor_parallelism_cuts(kind: str) -> None:
    """The whole matrix counts, not a rank's slice of it."""
    cfg = config(2, tensor_parallel={"autotp_size": 2, "partition_config": PAIR_SPECS})
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))
    model = make(Pair)
    plain, optimizer = copy.deepcopy(model), None
    optimizer = FACTORIES[kind](plain.parameters())
    for _ in range(2):
        plain(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    def body(engine: tessera.Engine, rank: int) -> dict[str, Any]:
        for _ in range(2):
            engine(x).backward()
            engine.step()
        return engine.module_state_dict()

    for found in engines(model, {"dp": 2, "tp": 2}, cfg, body, client=FACTORIES[kind]):
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-3 if kind == "muon" else 1e-5)
