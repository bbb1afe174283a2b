"""What checkpoints have of the optimizer beside the core's tensors: param groups, schedules, other states."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import OPTIMIZERS, Net, assert_close, batch, config, engines, make, run, weights
from tessera.errors import ConfigError

import tessera

# How the parameters are grouped, by whether they have more than one dim.
SPLITS: dict[str, Callable[[list[Any], list[Any]], list[list[Any]]]] = {
    "as saved": lambda big, small: [big, small],
    "turned": lambda big, small: [small, big],
    "split": lambda big, small: [small[:2], big, small[2:]],
    "one": lambda big, small: [[*big, *small]],
}


def grouped(split: str, seed: int, form: str, stage: int) -> Any:
    model = make(Net, seed=seed)
    parts = [[p for p in model.parameters() if (p.dim() > 1) == big] for big in (True, False)]
    groups = [
        {"params": part, "lr": 0.5, "weight_decay": 0.5, "betas": (0.5, 0.5)}
        if split != "as saved"
        else {"params": part, "lr": 0.1 / (n + 1), "weight_decay": 0.3 * n, "betas": (0.8, 0.9 + 0.05 * n)}
        for n, part in enumerate(SPLITS[split](*parts))
    ]
    cfg = config(
        stage, optimizer={"type": "AdamW", "params": {"lr": 0.3}}, checkpoint={"format": form}, gradient_clipping=0.0
    )
    scheduler = lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)  # noqa: E731
    return tessera.Engine(model, cfg, model_parameters=groups, lr_scheduler=scheduler)


def values(engine: Any) -> dict[str, Any]:
    """By parameter."""
    names = {id(p): name for name, p in engine.module.named_parameters()}
    keys = ("lr", "initial_lr", "weight_decay", "betas")
    return {names[id(p)]: [g[key] for key in keys] for g in engine.optimizer.param_groups for p in g["params"]}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(("form", "stage"), [("tessera", 0), ("tessera", 3), ("deepspeed", 2), ("deepspeed", 3)])
def test_param_groups_are_found_by_their_parameters(form: str, stage: int, split: str, tmp_path: Path) -> None:
    saved = grouped("as saved", 0, form, stage)
    run(saved, 0, 2)
    saved.save_checkpoint(tmp_path)
    known = values(saved)
    run(saved, 5, 2)
    loaded = grouped(split, 1, form, stage)
    before = weights(loaded.module)
    if split == "one":
        with pytest.raises(ConfigError, match=r"group 0 here.*'embed\.weight'.*of group 0.*'gain'.*of group 1"):
            loaded.load_checkpoint(tmp_path)
        assert all(torch.equal(value, before[name]) for name, value in weights(loaded.module).items())
        loaded.load_checkpoint(tmp_path, load_optimizer_states=False)
        return
    loaded.load_checkpoint(tmp_path)
    assert values(loaded) == known
    run(loaded, 5, 2)
    assert values(loaded) == values(saved)
    after = weights(saved.module)
    assert all(torch.equal(value, after[name]) for name, value in weights(loaded.module).items())


RATES = {
    "tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), weight_decay=0.1),
    "number": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "other": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, amsgrad=True),
}


@pytest.mark.parametrize("schedule", [False, True])
@pytest.mark.parametrize(("there", "here"), [("tensor", "number"), ("number", "tensor"), ("tensor", "tensor")])
def test_rates_take_the_kind_that_the_group_has(there: str, here: str, schedule: bool, tmp_path: Path) -> None:
    cfg = config(1, zero_allow_untested_optimizer=True)
    more: dict[str, Any] = {}
    if schedule:
        more["lr_scheduler"] = lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    def save(engine: Any, rank: int) -> Any:
        run(engine, rank, 2)
        engine.save_checkpoint(tmp_path)
        run(engine, rank, 2)
        return weights(engine.module), float(engine.client_optimizer.param_groups[0]["lr"])

    def load(engine: Any, rank: int) -> Any:
        kind = type(engine.client_optimizer.param_groups[0]["lr"])
        engine.load_checkpoint(tmp_path)
        run(engine, rank, 2)
        assert type(engine.client_optimizer.param_groups[0]["lr"]) is kind
        return weights(engine.module), float(engine.client_optimizer.param_groups[0]["lr"])

    known, rate = engines(make(Net), 2, cfg, save, client=RATES[there], **more)[0]
    found, rate_after = engines(make(Net, seed=3), 2, cfg, load, client=RATES[here], **more)[0]
    assert rate_after == pytest.approx(rate)
    for name, value in known.items():
        torch.testing.assert_close(found[name], value)


class Blocks(torch.optim.Optimizer):
    """Momentum with one more number for each 4 elements of what a rank has, as optimizers of 8 bits."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(mean=torch.zeros_like(p), blocks=torch.zeros(-(-p.numel() // 4)))
                flat = state["mean"].lerp_(p.grad, 0.1).flatten()
                padded = torch.cat([flat, flat.new_zeros(-flat.numel() % 4)])
                state["blocks"].lerp_(padded.view(-1, 4).abs().amax(1), 0.5)
                p.sub_(group["lr"] * state["mean"] / (1 + state["blocks"].repeat_interleave(4)[: p.numel()].view_as(p)))


@pytest.mark.parametrize("there", [(0, 2), (1, 2), (3, 2), (1, 1)])
@pytest.mark.parametrize("here", [(0, 2), (0, 1), (1, 2), (1, 1), (3, 3)])
def test_states_of_other_shapes_go_on_with_the_same_cut_only(
    there: tuple[int, int], here: tuple[int, int], tmp_path: Path
) -> None:
    cfgs = [config(stage, zero_allow_untested_optimizer=True) for stage, _ in (there, here)]

    def parts(engine: Any, rank: int) -> set[Any]:
        stage = engine.config.get("zero_optimization.stage")
        ranges = [(n, *engine.core.local_range(n), stage == 0) for n in range(len(engine.core.params()))]
        return {part for part in ranges if part[1] < part[2]}

    model = make(Net, 64, 1)
    of = [
        set().union(*engines(model, n, cfg, parts, client=Blocks))
        for cfg, (_, n) in zip(cfgs, (there, here), strict=True)
    ]
    fits = of[1] <= of[0]
    assert fits == (here == there or here[0] == there[0] == 0)

    def save(engine: Any, rank: int) -> Any:
        run(engine, rank, 2)
        engine.save_checkpoint(tmp_path)
        run(engine, rank, 2)
        return weights(engine.module)

    def load(engine: Any, rank: int) -> Any:
        if fits:
            engine.load_checkpoint(tmp_path)
            run(engine, rank, 2)
            return weights(engine.module)
        before = weights(engine.module)
        with pytest.raises(ConfigError, match=r"'blocks' of '\S+'.*load_optimizer_states=False"):
            engine.load_checkpoint(tmp_path)
        after = weights(engine.module)
        assert all(torch.equal(value, after[name]) for name, value in before.items())
        engine.load_checkpoint(tmp_path, load_optimizer_states=False)
        return None

    known = engines(model, there[1], cfgs[0], save, client=Blocks)[0]
    found = engines(make(Net, 64, 1, seed=4), here[1], cfgs[1], load, client=Blocks)[0]
    if found is not None and there[1] == here[1]:
        assert all(torch.equal(value, found[name]) for name, value in known.items())
    if there[0] == 0:
        assert len(list(tmp_path.rglob("*optimizer-*"))) == 1, "what all ranks have is written once"


class Grows(torch.optim.SGD):
    """Keeps what the gradients were, one row a step."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                state, row = self.state[param], param.grad.detach().clone()[None]
                state["rows"] = torch.cat([state["rows"], row]) if "rows" in state else row
        return super().step(closure)


def test_states_that_grow_are_loaded_into_the_engine_that_has_grown(tmp_path: Path) -> None:
    model = make()
    engine = tessera.Engine(model, config(), optimizer=Grows(model.parameters(), lr=0.1))
    for step in range(4):
        run(engine, 0, 1)
        if step == 1:
            engine.save_checkpoint(tmp_path)
    engine.load_checkpoint(tmp_path)
    assert {len(state["rows"]) for state in engine.optimizer.state.values()} == {2}
    engine.destroy()


def test_deepspeeds_files_cannot_hold_states_of_other_shapes(tmp_path: Path) -> None:
    def body(engine: Any, rank: int) -> None:
        run(engine, rank, 1)
        with pytest.raises((ConfigError, tessera.errors.IoError), match="'blocks' of"):
            engine.save_checkpoint(tmp_path)
        run(engine, rank, 1)

    cfg = config(2, zero_allow_untested_optimizer=True, checkpoint={"format": "deepspeed"})
    engines(make(Net), 2, cfg, body, client=Blocks)


@pytest.mark.parametrize("name", ["adamw", "amsgrad"])
def test_moments_that_are_not_loaded_stay(name: str, tmp_path: Path) -> None:
    """As with DeepSpeed and torch: only what is loaded changes. A new engine has none."""

    def moments(engine: Any) -> list[torch.Tensor]:
        get = tessera.state.get_full_optimizer_state
        return [get(engine, p, kind) for p in engine.module.parameters() for kind in ("exp_avg", "step")]

    def body(engine: Any, rank: int) -> None:
        run(engine, rank, 2)
        engine.save_checkpoint(tmp_path)
        known = weights(engine.module)
        run(engine, rank, 2)
        before = moments(engine)
        engine.load_checkpoint(tmp_path, load_optimizer_states=False)
        assert all(torch.equal(a, b) for a, b in zip(moments(engine), before, strict=True))
        for param_name, param in engine.module.named_parameters():
            assert torch.equal(tessera.state.get_full_fp32_param(engine, param), known[param_name])
        run(engine, rank, 1)

    engines(make(Net), 2, config(2, zero_allow_untested_optimizer=True), body, client=OPTIMIZERS[name])


# By whose states it is that they are: the same letter, the same meaning.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "AdamW": ("a", {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}),
    "Adam": ("a", {"optimizer": {"type": "Adam", "params": {"lr": 0.1}}}),
    "torch's AdamW": ("a", {"client": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=False)}),
    "Tessera's AdamW": ("a", {"client": lambda p: tessera.optim.AdamW(p, lr=0.1)}),
    "Lion": ("l", {"optimizer": {"type": "Lion", "params": {"lr": 0.1}}}),
    "SGD": ("s", {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}),
    "torch's SGD": ("s", {"client": lambda p: torch.optim.SGD(p, lr=0.1)}),
    "Lamb": ("m", {"optimizer": {"type": "Lamb", "params": {"lr": 0.1}}}),
    "NAdam": ("n", {"client": lambda p: torch.optim.NAdam(p, lr=0.1)}),
}


@pytest.mark.parametrize(
    ("there", "form"),
    [*((name, "tessera") for name in ("AdamW", "torch's SGD", "Lamb", "NAdam")), ("AdamW", "deepspeed")],
)
def test_states_of_another_optimizer_are_refused(there: str, form: str, tmp_path: Path) -> None:
    def engines_of(which: str, body: Callable[[Any, int], Any], seed: int) -> Any:
        of = dict(OTHERS[which][1])
        cfg = config(1, zero_allow_untested_optimizer=True, checkpoint={"format": form}, **of)
        cfg.pop("client", None)
        return engines(make(Net, seed=seed), 2, cfg, body, client=of.get("client"))

    def save(engine: Any, rank: int) -> None:
        run(engine, rank, 1)
        engine.save_checkpoint(tmp_path)

    def refuse(engine: Any, rank: int) -> None:
        before, rates = weights(engine.module), [group["lr"] for group in engine.optimizer.param_groups]
        with pytest.raises((ConfigError, tessera.errors.IoError), match=match):
            engine.load_checkpoint(tmp_path)
        assert all(torch.equal(value, before[name]) for name, value in weights(engine.module).items())
        assert rates == [group["lr"] for group in engine.optimizer.param_groups]
        engine.load_checkpoint(tmp_path, load_module_only=True)
        run(engine, rank, 1)

    def take(engine: Any, rank: int) -> None:
        engine.load_checkpoint(tmp_path)
        run(engine, rank, 1)

    engines_of(there, save, 0)
    for here, (letter, _) in OTHERS.items():
        match = r"its optimizer was \S*(AdamW|SGD|Lamb|NAdam), here it is \S+, .*load_module_only=True"
        same = letter == OTHERS[there][0]
        if form == "deepspeed":  # which does not name it: where one has states that the other cannot have
            if not same and here not in ("Lion", "SGD"):
                continue
            match = "its optimizer was another one, which has .*exp_avg_sq"
        engines_of(here, take if same else refuse, 4)


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.scale = make(Net), torch.nn.Parameter(torch.tensor(1.25))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.net(x) * self.scale - y).square().mean()


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("kind", ["sgd momentum", "adamw", "rmsprop", "nadam", "asgd", "rprop", "amsgrad"])
def test_a_parameter_without_dims_goes_on_at_any_stage(kind: str, before: bool, tmp_path: Path) -> None:
    """`before`: the optimizer has made steps of its own when it comes to the engine."""
    factories: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, maximize=False, nesterov=True),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
        "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
        "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
        "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
        "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
        "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    }

    def client(params: Any) -> torch.optim.Optimizer:
        optimizer = factories[kind](list(params))
        for k in range(2 if before else 0):
            for param in optimizer.param_groups[0]["params"]:
                param.grad = torch.full_like(param, 0.1 * (k + 1))
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    def steps(engine: tessera.Engine, rank: int, count: int) -> dict[str, torch.Tensor]:
        for k in range(count):
            engine(*batch(k)).backward()
            engine.step()
        return {name: value.float().clone() for name, value in engine.module_state_dict().items()}

    want: list[Any] = []
    for stage in range(4):

        def save(engine: tessera.Engine, rank: int, stage: int = stage) -> Any:
            steps(engine, rank, 2)
            engine.save_checkpoint(tmp_path / str(stage))
            return steps(engine, rank, 2)

        got = engines(Scaled(), 2, config(stage, zero_allow_untested_optimizer=True), save, client)
        want = want or got
        for values in got:
            assert_close(values, want[0])
    for there, here in [(0, 1), (0, 3), (2, 0), (0, 0), (3, 2)]:

        def load(engine: tessera.Engine, rank: int, there: int = there) -> Any:
            engine.load_checkpoint(tmp_path / str(there))
            return steps(engine, rank, 2)

        for values in engines(Scaled(), 2, config(here, zero_allow_untested_optimizer=True), load, client):
            assert_close(values, want[0])
