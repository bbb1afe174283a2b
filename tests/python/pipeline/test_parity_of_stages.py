"""A pipeline trains as the same model on one engine does: losses and weights, bit for bit where the sums are the
same."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from stages import (
    Whole,
    batch,
    config,
    data,
    in_processes,
    layers,
    loss_fn,
    module,
    pipeline,
    scale,
    weights,
)
from torch import nn

import tessera
from tessera import checkpoints
from tessera.pipeline import LayerSpec, PipelineModule

STEPS = 2


def train(engine: Any, place: int, steps: int = STEPS) -> list[float]:
    source = data(place)
    return [float(engine.train_batch(source)) for _ in range(steps)]


def compare(rank: int, stages: int, chunks: int, cfg: dict[str, Any], tied: bool = False) -> None:
    """With `tied` the sum of the two gradients rounds in another order."""
    engine = pipeline(module(stages, tied, num_chunks=chunks), cfg)
    size = dist.get_world_size() // stages
    place = rank % size
    rows = [list(range(stage * size, (stage + 1) * size)) for stage in range(stages)]
    stage_ranks = dist.new_subgroups_by_enumeration(rows)[0]
    whole = Whole(cfg, stage_ranks, tied)
    losses, source, expected = train(engine, place), data(place), []
    for _ in range(STEPS):
        means = [torch.zeros(()) for _ in range(size)]
        dist.all_gather(means, whole.train_batch(source), stage_ranks)
        expected.append(float(torch.tensor(sum(float(mean) for mean in means) / size)))
    same = weights(whole.module)
    low = "bf16" in cfg or "fp16" in cfg
    if tied or cfg["gradient_clipping"]:
        assert losses == pytest.approx(expected, rel=3e-2 if low else 1e-5)
        for name, value in weights(engine.module).items():
            torch.testing.assert_close(value.float(), same[name].float(), rtol=3e-2, atol=2e-2 if low else 1e-5)
    else:
        assert losses == expected, (losses, expected)
        for name, value in weights(engine.module).items():
            assert torch.equal(value, same[name]), name
    if cfg["gradient_clipping"]:
        assert engine.global_grad_norm() == pytest.approx(whole.engine.global_grad_norm(), rel=5e-2 if low else 1e-4)
    name = cfg.get("pipeline", {}).get("schedule", "1f1b")
    ahead = stages - engine.stage_id - 1  # of the stages behind
    warm_up = 2 * ahead + (chunks - 1) * stages if chunks > 1 else ahead
    most = engine.micro_batches * chunks
    assert engine.max_live_activations == (most if name == "gpipe" else min(warm_up + 1, most))
    assert engine.global_steps == STEPS and engine.micro_steps == STEPS * engine.micro_batches
    assert engine.global_samples == whole.engine.global_samples
    engine.destroy()
    whole.engine.destroy()


def untied_grid(rank: int, stages: int) -> None:
    for schedule, zero, (dtype, micro) in itertools.product(
        ("gpipe", "1f1b"), (0, 1, 2), (("fp32", 1), ("fp32", 5), ("bf16", 4), ("fp16", 4))
    ):
        if schedule == "gpipe" and (zero == 1 or micro == 1):
            continue
        compare(rank, stages, 1, config(zero, micro, dtype, pipeline={"schedule": schedule}))


@pytest.mark.parametrize("stages", [2, 4])
def test_schedules_stages_micro_batches_zero_and_precision(stages: int) -> None:
    in_processes(4, untied_grid, stages)


def interleaved_grid(rank: int, stages: int) -> None:
    for schedule, zero, dtype in itertools.product(("interleaved", "gpipe"), (0, 2), ("fp32", "fp16")):
        compare(rank, stages, 2, config(zero, 4, dtype, pipeline={"schedule": schedule}))


@pytest.mark.parametrize("stages", [2, 4])
def test_several_chunks_on_a_stage(stages: int) -> None:
    in_processes(4, interleaved_grid, stages)


def tied_grid(rank: int, stages: int) -> None:
    for zero, dtype, clip, chunks in itertools.product((0, 1, 2), ("fp32", "bf16"), (0.0, 0.05), (1, 2)):
        if chunks == 2 and (zero == 0 or clip == 0.0):
            continue
        units = {} if zero == 1 else {"tessera": {"min_unit_elements": 0}}
        cfg = config(zero, 4, dtype, gradient_clipping=clip, **units)
        compare(rank, stages, chunks, cfg, tied=True)


@pytest.mark.parametrize("stages", [2, 4])
def test_tied_weights_and_one_norm(stages: int) -> None:
    in_processes(4, tied_grid, stages)


def copies_stay_equal(rank: int) -> None:
    for zero in (0, 2):
        engine = pipeline(module(4, tied=True), config(zero, 4, "bf16", gradient_clipping=0.05))
        train(engine, 0)
        own = weights(engine.module).get("tied_modules.embed.weight", torch.zeros(11, 6, dtype=torch.bfloat16))
        copies = [torch.empty_like(own) for _ in range(4)]
        dist.all_gather(copies, own)
        assert torch.equal(copies[0], copies[3]) and copies[0].any()
        engine.destroy()


def test_copies_of_tied_weights_stay_equal() -> None:
    in_processes(4, copies_stay_equal)


def against_plain_pytorch(rank: int, tied: bool | str) -> None:
    reference = PipelineModule(layers(tied), num_stages=1, loss_fn=loss_fn, seed_layers=True)
    engine = pipeline(module(2, tied), config(0, 4, gradient_clipping=0.05))
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.01, weight_decay=0.0)
    source, expected = data(0), []
    for _ in range(STEPS):
        total = torch.zeros(())
        for _ in range(4):
            inputs, labels = next(source)
            loss = loss_fn(reference(inputs), labels)
            (loss / 4).backward()
            total = total + loss.detach()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(total / 4))
    assert train(engine, 0) == pytest.approx(expected, rel=1e-5)
    plain = weights(reference)
    for name, value in weights(engine.module).items():
        torch.testing.assert_close(value, plain[name], rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        held_out = [loss_fn(reference(inputs), labels) for inputs, labels in (batch(77), batch(78))]
    loss, outputs = engine.eval_batch(iter([batch(77), batch(78)]), return_logits=True, num_micro_batches=2)
    assert float(loss) == pytest.approx(float(sum(held_out)) / 2, rel=1e-4)
    assert (outputs is None) == (rank == 0)
    if outputs is not None:
        assert [tuple(output.shape) for output in outputs] == [(3, 5, 11)] * 2
    engine.destroy()


@pytest.mark.parametrize("tied", [False, True, "idle"])
def test_against_plain_pytorch(tied: bool | str) -> None:
    in_processes(2, against_plain_pytorch, tied)


def thawed(rank: int, zero: int, folder: Path) -> None:
    """Beside plain PyTorch, where both ends are one layer; two data-parallel ranks of each stage."""

    reference = PipelineModule(layers(tied=True), num_stages=1, loss_fn=loss_fn, seed_layers=True)
    model = module(2, tied=True)
    ends = list(model.tied_modules["embed"].parameters())

    def set_trained(trained: bool) -> None:
        for param in (*ends, *reference.tied_modules["embed"].parameters()):
            param.requires_grad_(trained)

    set_trained(False)
    cfg = config(zero, 4, gradient_clipping=0.05, tessera={"min_unit_elements": 0})
    engine = pipeline(model, cfg)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.01, weight_decay=0.0)
    places = dist.get_world_size() // 2
    source, sources = data(rank % places), [data(place) for place in range(places)]
    for step in range(5):
        if step > 0:
            set_trained(step != 2)  # the second time with moments
        for _ in range(4):
            for each in sources:
                inputs, labels = next(each)
                (loss_fn(reference(inputs), labels) / (4 * places)).backward()
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        engine.train_batch(source)
        assert engine.global_grad_norm() == pytest.approx(float(norm), rel=1e-4), step
        plain = weights(reference)
        for name, value in weights(engine.module).items():
            torch.testing.assert_close(value, plain[name], rtol=1e-4, atol=1e-5)
    engine.save_checkpoint(folder)
    for name, value in checkpoints.state_dict(folder).items():
        torch.testing.assert_close(value, plain[name], rtol=1e-4, atol=1e-5)
    if rank < places:
        ends[0].requires_grad_(False)
    for _ in range(2):
        with pytest.raises(tessera.UsageError, match=r"embed\.\w+' is trained on one stage and frozen on another"):
            engine.train_batch(source)
    ends[0].requires_grad_(True)
    engine.train_batch(source)
    assert engine.global_steps == 6
    engine.destroy()


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("world", [2, 4])
def test_a_tied_layer_that_is_frozen_and_thawed(world: int, zero: int, tmp_path: Path) -> None:
    in_processes(world, thawed, zero, tmp_path)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


CUTS = {
    "tensor_parallel": {
        "autotp_size": 2,
        "partition_config": {
            "use_default_specs": False,
            "layer_specs": [
                {"patterns": [r".*\.up\.weight$"], "partition_type": "column"},
                {"patterns": [r".*\.down\.weight$"], "partition_type": "row"},
            ],
        },
    }
}


def cut_stages(rank: int, zero: int) -> None:
    ends = layers(tied=True)
    specs = [ends[0], *[LayerSpec(Mlp) for _ in range(4)], ends[-1]]
    cfg = config(zero, 4, gradient_clipping=0.05)
    plain, model = (PipelineModule(specs, stages, loss_fn=loss_fn, seed_layers=True) for stages in (1, 2))
    reference = tessera.Engine(plain, cfg, group=tessera.single_group())
    engine = pipeline(model, cfg | CUTS)
    assert (engine.tp_world_size, engine.dp_world_size) == (2, 1)
    source, expected, norms = data(0), [], []
    for _ in range(STEPS):
        losses = []
        for _ in range(4):
            inputs, labels = next(source)
            losses.append(loss_fn(reference(inputs), labels))
            losses[-1].backward()
            reference.step()
        expected.append(float(sum(losses)) / 4)
        norms.append(reference.global_grad_norm())
    assert train(engine, 0) == pytest.approx(expected, rel=1e-5)
    assert engine.global_grad_norm() == pytest.approx(norms[-1], rel=1e-4)
    for name, value in engine.module_state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-3, atol=1e-5)
    engine.destroy()


@pytest.mark.parametrize("zero", [0, 2])
def test_stages_that_are_cut_by_tensor_parallelism(zero: int) -> None:
    in_processes(4, cut_stages, zero)


def overflow(rank: int) -> None:
    factor = [1.0]
    model = PipelineModule(
        layers(), 4, loss_fn=lambda outputs, labels: loss_fn(outputs, labels) * factor[0], seed_layers=True
    )
    engine = pipeline(model, config(0, 4, "fp16"))
    source = data(0)
    engine.train_batch(source)
    before, scale = weights(engine.module), engine.loss_scaler.loss_scale
    factor[0] = 1e30
    engine.train_batch(source)
    assert engine.skipped_steps == 1 and not engine.was_step_applied() and engine.loss_scaler.loss_scale == scale / 2
    assert all(torch.equal(before[name], value) for name, value in weights(engine.module).items())
    factor[0] = 1.0
    engine.train_batch(source)
    assert engine.was_step_applied() and engine.skipped_steps == 1
    engine.destroy()


def test_all_stages_skip_what_overflows() -> None:
    in_processes(4, overflow)


class Frozen(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.requires_grad_(False)


FROZEN, TRAINED = [LayerSpec(Frozen)] * 2, [LayerSpec(nn.Linear, 4, 4)] * 2
PLAIN = [LayerSpec(nn.Linear, 4, 4, bias=False)] * 2
ONE_SIDED = {
    "frozen first": FROZEN + TRAINED,
    "frozen last": TRAINED + FROZEN,
    "functions first": [scale, torch.tanh, *TRAINED],
    "functions last": [*TRAINED, torch.tanh, scale],
    "in place": [*TRAINED, LayerSpec(nn.ReLU, True), *TRAINED, torch.tanh],
    "no biases first": PLAIN + TRAINED,
    "no biases last": TRAINED + PLAIN,
}


def by_decay(model: nn.Module) -> list[dict[str, Any]]:
    """Some stages have nothing in one of them, or in both."""
    parts: list[list[nn.Parameter]] = [[], []]
    for param in model.parameters():
        if param.requires_grad:
            parts[param.dim() < 2].append(param)
    return [{"params": part, "weight_decay": decay} for part, decay in zip(parts, (0.1, 0.0), strict=True)]


def one_sided(rank: int, folder: Path, zero: int) -> None:
    generator = torch.Generator().manual_seed(3)
    batches = [tuple(torch.randn(2, 3, 4, generator=generator).unbind()) for _ in range(4 * STEPS)]
    for name, specs in ONE_SIDED.items():

        def built(stages: int, specs: list[Any] = specs) -> PipelineModule:
            return PipelineModule(specs, stages, loss_fn=nn.MSELoss(), seed_layers=True, partition_method="uniform")

        plain, cfg = built(1), config(zero, 4, gradient_clipping=0.05)
        optimizer = torch.optim.AdamW(by_decay(plain), lr=0.01)
        model = built(2)
        engine = pipeline(model, cfg, model_parameters=by_decay(model))
        source, losses = iter(batches), []
        for step in range(STEPS):
            for inputs, labels in batches[4 * step : 4 * step + 4]:
                losses.append(nn.MSELoss()(plain(inputs), labels))
                (losses[-1] / 4).backward()
            norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
            assert float(engine.train_batch(source)) == pytest.approx(float(sum(losses[-4:])) / 4, rel=1e-5), name
            assert engine.global_grad_norm() == pytest.approx(float(norm), rel=1e-4), name
        expected = dict(plain.named_parameters())
        for key, value in weights(engine.module).items():
            torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-5)
        assert engine.micro_steps == 4 * STEPS and len(engine.get_lr()) == 2
        engine.save_checkpoint(folder / name)
        assert checkpoints.state_dict(folder / name).keys() == expected.keys(), name
        following = [float(engine.train_batch(iter(batches))) for _ in range(2)]
        engine.destroy()
        model = built(2)
        again = pipeline(model, cfg, model_parameters=by_decay(model), optimizer=adamw)
        again.load_checkpoint(folder / name)
        assert [float(again.train_batch(iter(batches))) for _ in range(2)] == pytest.approx(following, rel=1e-5), name
        again.destroy()


def adamw(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.01)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_stages_that_have_nothing_to_train_or_nothing_in_a_group(tmp_path: Path, zero: int) -> None:
    in_processes(4, one_sided, tmp_path, zero)


def counts_operations(rank: int, file: str) -> None:
    """Of all chunks of the first stage, by whom the numbers are written. A profile is of one forward of each stage;
    that of the first one is shown."""
    for chunks in (1, 2):
        layers = [LayerSpec(nn.Linear, 4, 4) for _ in range(4)]
        model = PipelineModule(
            layers, num_stages=2, num_chunks=chunks, loss_fn=nn.functional.mse_loss, partition_method="uniform"
        )
        section = {"enabled": True, "profile_step": 0, "output_file": f"{file}{chunks}"}
        engine = pipeline(model, config(micro_batches=2, flops_profiler=section))
        seen: dict[str, float] = {}
        engine.monitor.on_metric(lambda name, value, _, seen=seen: seen.__setitem__(name, value))
        engine.count_flops()
        for _ in range(3):
            engine.train_batch(itertools.repeat((torch.ones(3, 4), torch.zeros(3, 4))))
        if rank == 0:
            a_sample = seen["Train/Samples/tflops"] * 1e12 / seen["Train/Samples/samples_per_second"]
            assert a_sample == pytest.approx(2 * 3 * 2 * 16)
            text = Path(f"{file}{chunks}").read_text()
            assert text.count("flops profile of step 0: PipelineModule") == text.count("flops profile") == 1
        assert engine.flops_profiler is not None
        assert engine.flops_profiler.get_total_flops() == 3 * 2 * 16 * 2 // chunks
        engine.destroy()


def test_operations_are_those_of_all_chunks(tmp_path: Path) -> None:
    in_processes(2, counts_operations, str(tmp_path / "flops"))
