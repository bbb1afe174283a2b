"""Engines whose model is on an accelerator, the stand-in of tests/stand_in: usage device_program.py PATH-OF-LIBRARY.
A program of its own, because the device becomes the whole process's accelerator. What is computed there has the bits of
the CPU, and host code that touches device memory crashes."""

from __future__ import annotations

import copy
import gc
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "stand_in"))

import pytest
import stand_in
import torch
import torch.distributed as dist
from support import Net, batch, config, losses_of, make
from tessera.state import get_full_fp32_param, get_full_grad, set_full_fp32_param
from torch import nn

import tessera
from tessera.zero import GatheredParameters, partition_info

DEVICE = "privateuseone"
LOW = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
MODES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp32 master": {"bf16": {"enabled": True}, "tessera": {"state_bytes": 16}},
    "10 bytes": {"bf16": LOW},
    "8 bytes": {"bf16": LOW, "tessera": {"state_bytes": 8}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
    "fp16 overflow": {"fp16": {"enabled": True, "initial_scale_power": 40, "hysteresis": 1}},
    "fp16 master": {
        "fp16": {"enabled": True, "fp16_master_weights_and_grads": True, "initial_scale_power": 8},
        "tessera": {"state_bytes": 12},
    },
}
ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "gradient_clipping": 0.5}


def engine_on(device: str, cfg: dict[str, Any], **more: Any) -> tessera.Engine:
    return tessera.initialize(model=make().to(device), config=cfg, **more)[0]


def train(engine: tessera.Engine, steps: int = 4, first: int = 0) -> list[float]:
    return losses_of(engine, 0, first, steps)


def masters(engine: tessera.Engine) -> list[torch.Tensor]:
    found = [get_full_fp32_param(engine, p) for p in engine.module.parameters()]
    assert all(master.device == engine.device for master in found)
    return [master.cpu() for master in found]


def equal(mine: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(mine) == len(other) and all(map(torch.equal, mine, other))


def train_alike(engines: list[tessera.Engine], what: Any = None) -> None:
    """To the same losses and the same masters."""
    losses = [train(engine) for engine in engines]
    assert losses[0] == losses[1], (what, losses)
    assert equal(*map(masters, engines)), what


def on_both(cfg: dict[str, Any]) -> list[tessera.Engine]:
    return [engine_on(device, cfg) for device in ("cpu", DEVICE)]


def test_every_mode_and_stage() -> None:
    for name, mode in MODES.items():
        for stage in range(4):
            cfg = config(stage, accumulation=2, **ADAM, **mode)
            if name == "fp16 master" and stage == 0:
                continue  # refused, as anywhere
            engines = on_both(cfg)
            train_alike(engines, (name, stage))
            assert engines[0].skipped_steps == engines[1].skipped_steps
            assert (engines[0].skipped_steps > 0) == (name == "fp16 overflow"), (name, engines[0].skipped_steps)


def test_states_in_host_memory_and_on_a_disk() -> None:
    """The host updates them; the device holds nothing of them, nor of gradients."""
    with tempfile.TemporaryDirectory() as folder:
        for name, mode in MODES.items():
            for stage, where in ((1, "cpu"), (2, "nvme"), (3, "cpu"), (3, "nvme")):
                cfg = config(stage, accumulation=2, **ADAM, **mode)
                engines = [engine_on("cpu", cfg)]
                away = cfg["zero_optimization"] | {"offload_optimizer": {"device": where, "nvme_path": folder}}
                if stage == 3:
                    away["offload_param"] = {"device": where, "nvme_path": folder, "max_in_cpu": 0}
                engines.append(engine_on(DEVICE, cfg | {"zero_optimization": away}))
                memory = engines[1].core.memory()
                params = memory.params if stage == 3 else 0
                moved = memory.master + memory.states + params
                found = (memory.grads, moved) if where == "nvme" else (moved + memory.grads, 0)
                assert (memory.host, memory.disk) == found and memory.grads > 0, (name, stage, where)
                train_alike(engines, (name, stage, where))
                engines[1].destroy()


@contextmanager
def logged() -> Iterator[list[str]]:
    """The lines that the engines log meanwhile."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("tessera")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def test_host_and_device_share_an_update() -> None:
    """In the share that is given or found; the plan says who has what, and a line of it is logged."""
    for share, ratio, says in ((0.5, 1, False), ("auto", 1, True), (0, "auto", True), ("auto", "auto", True)):
        cfg = config(2, **ADAM, bf16=True, tessera={"device_share": share, "min_unit_elements": 1})
        zero = cfg["zero_optimization"] | {"offload_optimizer": {"device": "cpu", "ratio": ratio}}
        with logged() as lines:
            engines = [engine_on("cpu", cfg), engine_on(DEVICE, cfg | {"zero_optimization": zero})]
        plan = engines[1].core.offload_plan()
        assert (plan.text() in lines) == says
        assert (plan.rates is not None) == (share == "auto")
        assert (plan.milliseconds > 0) == (share == "auto" and ratio == 1)
        measured = engines[1].core.offload_plan(measure=True)
        assert measured.rates is not None and measured.rates.bus > 0
        assert measured.step(1, 2, micro_batches=2) == pytest.approx(6 + measured.milliseconds)
        assert sum(row.elements for row in plan.units) >= sum(p.numel() for p in engines[1].module.parameters())
        by = {row.by.name for row in plan.units}
        if share == 0.5:
            assert by == {"Host", "Through"} and plan.device_share == 0.5
        if ratio == "auto":  # there is room for all of it
            assert by == {"Device"} and plan.ratio == 0
        train_alike(engines, (share, ratio))


def test_states_away_for_a_while() -> None:
    for stage in (1, 2, 3):
        engines = on_both(config(stage, **ADAM, **MODES["fp16"]))
        train_alike(engines)
        library = stand_in.load(sys.argv[1])
        before = library.tessera_stand_in_bytes()
        engines[1].offload_states()
        memory = engines[1].core.memory()
        assert memory.host == memory.params + memory.grads + memory.master + memory.states
        assert before - library.tessera_stand_in_bytes() >= memory.host
        engines[1].reload_states()
        assert engines[1].core.memory().host == 0
        train_alike(engines)


def test_autocast_as_a_plain_loop() -> None:
    """On the device itself, because torch's lists of what autocast does differ from device to device."""
    for dtype, scale in (("bfloat16", 1.0), ("float16", 65536.0)):
        model = make().to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        expected = []
        for step in range(4):
            with torch.autocast(DEVICE, dtype=getattr(torch, dtype), cache_enabled=False):
                loss = model(*(t.to(DEVICE) for t in batch(step)))
            (loss * scale).backward()
            for p in model.parameters():
                p.grad.div_(scale)
            if all(p.grad.isfinite().all() for p in model.parameters()):
                optimizer.step()
            else:
                scale /= 2
            optimizer.zero_grad()
            expected.append(loss.item())
        section = {"enabled": True, "dtype": dtype}
        for stage in range(4):
            engine = engine_on(DEVICE, config(stage, torch_autocast=section))
            assert train(engine) == expected, (dtype, stage)
            assert equal(masters(engine), [p.detach().cpu() for p in model.parameters()]), (dtype, stage)


def test_optimizers() -> None:
    for kind in ("Adam", "SGD", "Lion", "Adagrad"):
        train_alike(on_both(config(1, optimizer={"type": kind, "params": {"lr": 0.01}}, bf16=True)), kind)


def test_a_client_optimizer() -> None:
    engines = []
    for device in ("cpu", DEVICE):
        model = make().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        engines.append(tessera.initialize(model=model, optimizer=optimizer, config=config(2, bf16=True))[0])
    train_alike(engines)


def test_regions_and_state() -> None:
    engine = engine_on(DEVICE, config(3, **ADAM, bf16=True))
    train(engine, 2)
    weight = engine.module.head.weight
    value = torch.full((3, 7), 0.25, device=DEVICE)
    set_full_fp32_param(engine, weight, value)
    assert get_full_fp32_param(engine, weight).equal(value)
    with GatheredParameters(weight, modifier_rank=0), torch.no_grad():
        weight.fill_(0.5)
    assert get_full_fp32_param(engine, weight).eq(0.5).all()
    loss = engine(*(t.to(DEVICE) for t in batch(9)))
    engine.backward(loss)
    assert get_full_grad(engine, weight).device == engine.device
    engine.step()
    state = copy.deepcopy([engine.module.state_dict(), engine.optimizer.state_dict()])
    expected = train(engine, 2, first=20), masters(engine)
    other = engine_on(DEVICE, config(3, **ADAM, bf16=True))
    other.module.load_state_dict(state[0])
    other.optimizer.load_state_dict(state[1])
    assert train(other, 2, first=20) == expected[0]
    assert equal(masters(other), expected[1])


def test_zero_init() -> None:
    cfg = config(3, **ADAM, bf16=True)
    engines = []
    for device in ("cpu", DEVICE):
        torch.manual_seed(0)
        with tessera.zero.Init(config=cfg), torch.device(device):
            model = Net()
        engines.append(tessera.initialize(model=model, config=cfg)[0])
    train_alike(engines)


def test_backward_as_pytorch_does_it() -> None:
    def losses(device: str) -> list[Any]:
        first, second = (engine_on(device, config(stage, **ADAM)) for stage in (2, 3))
        found: list[Any] = []
        for step in range(3):
            x, y = (t.to(device) for t in batch(step))
            out = first(x)
            (out.square().mean() + second(x, y)).backward()
            first.step()
            second.step()
            out = second(x)
            out.backward(torch.ones_like(out))
            second.step()
            found.append(out.sum().item())
        return [*found, *masters(first), *masters(second)]

    mine, other = losses(DEVICE), losses("cpu")
    assert mine[:3] == other[:3]
    assert equal(mine[3:], other[3:])


def test_checkpointing_and_hooks() -> None:
    """Recomputation and a user's hook run on the device's own thread."""

    calls: dict[str, int] = {"cpu": 0, DEVICE: 0}
    engines = []
    for device in calls:
        model = make().to(device)
        for block in model.blocks:
            plain = block.forward
            block.forward = lambda x, plain=plain: torch.utils.checkpoint.checkpoint(plain, x, use_reentrant=False)
        engines.append(tessera.initialize(model=model, config=config(3, **ADAM))[0])
        model.head.weight.register_post_accumulate_grad_hook(
            lambda _, device=device: calls.update({device: 1 + calls[device]})
        )
    train_alike(engines)
    assert calls["cpu"] == calls[DEVICE]


@contextmanager
def process_group(back_ends: str) -> Iterator[None]:
    dist.init_process_group(back_ends, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_a_model_goes_to_the_device_of_its_ranks() -> None:
    def back_end(*args: Any) -> Any:
        return dist.ProcessGroupGloo(*args)

    dist.Backend.register_backend("of_the_device", back_end, devices=[DEVICE])
    cfg = config(2, bf16=True)
    results = []
    for back_ends in ("gloo", f"cpu:gloo,{DEVICE}:of_the_device"):
        with process_group(back_ends):
            model = make()
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            with pytest.raises(ValueError, match="Nonsense"):
                tessera.initialize(model=model, optimizer=optimizer, config=cfg | {"scheduler": {"type": "Nonsense"}})
            assert {p.device.type for p in model.parameters()} == {"cpu"}, "back where it was"
            engine = tessera.initialize(model=model, optimizer=optimizer, config=cfg)[0]
            assert engine.device.type == (DEVICE if DEVICE in back_ends else "cpu"), (back_ends, engine.device)
            results.append((train(engine), masters(engine)))
            assert tessera.initialize(model=make().to(f"{DEVICE}:1"), config=cfg)[0].device.index == 1
            engine.destroy()
    assert results[0][0] == results[1][0]
    assert equal(results[0][1], results[1][1])


def test_a_partitioned_model_is_built_on_the_device_of_its_ranks() -> None:
    cfg = config(3, **ADAM, bf16=True)
    found = []
    for back_ends in ("gloo", f"cpu:gloo,{DEVICE}:of_the_device"):
        with process_group(back_ends):
            torch.manual_seed(0)
            with tessera.zero.Init(config=cfg):
                model = Net()
                model.register_buffer("made_inside", torch.zeros(2))
            assert torch.zeros(2).device.type == "cpu"
            engine = tessera.initialize(model=model, config=cfg)[0]
            assert model.made_inside.device == engine.device
            built = make()
            tessera.zero.Init(module=built, config=cfg)
            assert all(p.device == engine.device for p in built.parameters())
            if engine.device.type == DEVICE:
                away = make()
                tessera.zero.Init(module=away, config=cfg, remote_device="cpu")
                assert all(partition_info(p).partitioned for p in away.parameters())  # type: ignore[union-attr]
            found.append((engine.device.type, train(engine), masters(engine)))
    assert [where for where, *_ in found] == ["cpu", DEVICE]
    assert found[0][1] == found[1][1]
    assert equal(found[0][2], found[1][2])


def test_the_device_of_a_local_rank() -> None:
    os.environ["LOCAL_RANK"] = "1"
    try:
        with process_group(f"{DEVICE}:of_the_device"):
            engine = tessera.initialize(model=make(), config=config(1, bf16=True))[0]
            assert engine.device == torch.device(DEVICE, 1)
            assert torch.accelerator.current_device_index() == 1
            train(engine, 1)
    finally:
        del os.environ["LOCAL_RANK"]
        torch.accelerator.set_device_index(0)


def test_errors() -> None:
    engine = engine_on(DEVICE, config(1, **MODES["fp16"]))
    loss = engine(*(t.to(DEVICE) for t in batch(0)))
    with pytest.raises(RuntimeError, match="scale"):
        loss.backward()
    train(engine, 1)
    model = make().to(DEVICE)
    model.gain = nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match="an engine trains a model on one device"):
        tessera.initialize(model=model, config=config(1))
    with pytest.raises((NotImplementedError, ValueError), match="meta"):
        tessera.initialize(model=make().to("meta"), config=config(1))


def with_and_without_offload() -> Iterator[dict[str, Any]]:
    yield config(2, **ADAM, bf16=True)
    host = {"device": "cpu", "pin_memory": True}
    everything = {"stage": 3, "stage3_param_persistence_threshold": 0, "offload_optimizer": host, "offload_param": host}
    yield config(3, **ADAM, bf16=True) | {"zero_optimization": everything}


def no_memory(body: Any) -> Iterator[str]:
    gc.collect()  # engines of before
    for error in stand_in.each_allocation(stand_in.load(sys.argv[1]), body):
        assert isinstance(error, torch.OutOfMemoryError), repr(error)
        assert "has no room for" in str(error)
        yield str(error)


def build_without_memory(cfg: dict[str, Any]) -> None:
    expected = train(engine_on(DEVICE, cfg), 2)
    models = [make().to(DEVICE)]

    def build() -> tessera.Engine:
        return tessera.initialize(model=models[0], config=cfg)[0]

    failed = 0
    for said in no_memory(build):
        failed += 1
        assert "no memory for" in said, said
        assert models[0](*(t.to(DEVICE) for t in batch(0))).isfinite(), said
        assert train(build(), 2) == expected, (failed, said)
        models[0] = make().to(DEVICE)
    assert failed > 10, failed


def test_no_memory_in_the_construction() -> None:
    """The model is a plain one again, where it was, and can be given to another engine."""
    for cfg in with_and_without_offload():
        build_without_memory(cfg)
    with process_group(f"{DEVICE}:of_the_device"):
        models, failed = [make()], 0
        for _ in no_memory(lambda: tessera.initialize(model=models[-1], config=config(2, bf16=True))):
            failed += 1
            assert {p.device.type for p in models[-1].parameters()} == {"cpu"}, failed
            models.append(make())
        assert failed > 10, failed


def step_without_memory(cfg: dict[str, Any]) -> None:
    engine = engine_on(DEVICE, cfg)
    expected = train(engine, 4), masters(engine)
    engine = engine_on(DEVICE, cfg)
    losses, failed = train(engine, 1), 0
    for _ in no_memory(lambda: losses.extend(train(engine, 1, first=1))):
        failed += 1
        engine.zero_grad()
    assert failed > 3, failed
    assert losses + train(engine, 2, first=2) == expected[0]
    assert equal(masters(engine), expected[1])


def test_no_memory_in_a_step() -> None:
    """It can be done again."""
    for cfg in with_and_without_offload():
        step_without_memory(cfg)


def test_no_memory_to_look_at_parameters() -> None:
    """What it was for; and training goes on."""
    for cfg in with_and_without_offload():
        engine = engine_on(DEVICE, cfg)
        expected = train(engine, 3)
        engine = engine_on(DEVICE, cfg)
        losses, failed = train(engine, 1), 0
        params = list(engine.module.parameters())

        def region(params: list[torch.Tensor] = params) -> None:
            with GatheredParameters(params):
                pass

        def value(engine: tessera.Engine = engine, params: list[torch.Tensor] = params) -> None:
            get_full_fp32_param(engine, params[0])

        for look in (region, value, engine.module_state_dict):
            for said in no_memory(look):
                failed += 1
                assert "] no memory for" in said, said
        assert failed > 1, failed
        assert losses + train(engine, 2, first=1) == expected


def test_no_memory_at_the_end_of_a_region() -> None:
    """The error is the device's, and the region of every engine ends."""
    engines = [engine_on(DEVICE, config(2, **ADAM, bf16=True)) for _ in range(2)]
    for engine in engines:
        train(engine, 1)
    params = [list(engine.module.parameters()) for engine in engines]
    library = stand_in.load(sys.argv[1])
    said = "no memory for what was written to parameter"
    with pytest.raises(torch.OutOfMemoryError, match=said), GatheredParameters(params[0] + params[1], modifier_rank=0):
        library.tessera_stand_in_fail_allocation(0, 0)
    library.tessera_stand_in_fail_allocation(0, -1)
    with pytest.raises(tessera.errors.IoError, match="load a checkpoint"):
        train(engines[0], 1, first=1)
    with GatheredParameters(params[1], modifier_rank=0):
        pass
    assert train(engines[1], 1, first=1)


def load_without_memory(cfg: dict[str, Any], folder: str) -> None:
    engines = [engine_on(DEVICE, cfg)]
    train(engines[0], 2)
    engines[0].save_checkpoint(folder)
    expected = train(engines[0], 1, first=2), masters(engines[0])
    engines[0] = engine_on(DEVICE, cfg)
    before, failed, refused = masters(engines[0]), 0, 0
    for said in no_memory(lambda: engines[0].load_checkpoint(folder)):
        failed += 1
        if "load again" in said:
            with pytest.raises(tessera.errors.IoError, match="load a checkpoint"):
                train(engines[0], 1)
            engines[0] = engine_on(DEVICE, cfg)
        else:
            refused += 1
            assert equal(masters(engines[0]), before), said
    assert refused > 0, failed
    assert train(engines[0], 1, first=2) == expected[0]
    assert equal(masters(engines[0]), expected[1])


def test_no_memory_in_a_load() -> None:
    """It is refused, and nothing has changed; or steps are errors until another load."""
    for cfg in with_and_without_offload():
        with tempfile.TemporaryDirectory() as folder:
            load_without_memory(cfg, folder)


def refused_while_captured(call: str, does: Any) -> Any:
    """What does() returns outside of a capture, after it was refused inside one."""
    library = stand_in.load(sys.argv[1])
    library.tessera_stand_in_capture(True)
    with pytest.raises(RuntimeError, match=rf"\[engine\] {call}: the current stream is being captured"):
        does()
    library.tessera_stand_in_capture(False)
    return does()


def test_nothing_that_trains_is_captured() -> None:
    """Refused before anything is done."""
    for stage in (0, 2, 3):
        engines = on_both(config(stage, accumulation=2, **ADAM))
        losses = []
        for number in range(2):
            inputs = [t.to(DEVICE) for t in batch(number)]
            loss = refused_while_captured("forward", lambda e=engines[1], i=inputs: e(*i))
            refused_while_captured("backward", lambda e=engines[1], of=loss: e.backward(of))
            refused_while_captured("step", engines[1].step)
            losses.append(loss.item())
        assert train(engines[0], 2) == losses
        train_alike(engines, stage)


def test_destroy_comes_to_its_end() -> None:
    """Whatever fails in it, which it tells: copies of the optimizer's states, and weights that were moved away."""
    library = stand_in.load(sys.argv[1])
    for away in (False, True):
        for memory in (False, True):
            engine = engine_on(DEVICE, config(2, **ADAM, bf16=True))
            train(engine, 1)
            if away:
                engine.offload_states()
            library.tessera_stand_in_fail(not memory)
            library.tessera_stand_in_fail_allocation(0, 0 if memory else -1)
            with pytest.raises(RuntimeError, match="has no room for" if memory else "the device fails") as caught:
                engine.destroy()
            assert isinstance(caught.value, torch.OutOfMemoryError) == memory
            library.tessera_stand_in_fail(False)
            library.tessera_stand_in_fail_allocation(0, -1)
            engine.destroy()
            assert all("exp_avg" not in state for state in engine.optimizer.state.values())
            assert away or not engine.optimizer.state
            with pytest.raises(RuntimeError, match="was destroyed"):
                engine.step()
            if not away:
                assert train(engine_on(DEVICE, config(2, **ADAM, bf16=True)), 1)
                assert tessera.initialize(model=engine.module, config=config(2, **ADAM, bf16=True))
            stand_in.races(library)  # of what a device that fails was not told


if __name__ == "__main__":
    torch.set_num_threads(1)
    library = stand_in.load(sys.argv[1])
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            before = library.tessera_stand_in_launches()
            test()
            found = stand_in.races(library)
            assert not found, (name, found)
            print(f"{name}: passed, {library.tessera_stand_in_launches() - before} kernels")
