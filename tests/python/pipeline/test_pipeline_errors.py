"""Bad use of a pipeline: named errors, on all stages, and nothing hangs."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from stages import WIDTH, Block, batch, config, data, in_processes, layers, loss_fn, module, pipeline, start
from support import PROCESSES, free_port
from torch import nn

import tessera
from tessera.pipeline import LayerSpec, PipelineModule, StageFailed, TiedLayerSpec


def test_calls_that_one_stage_alone_cannot_make() -> None:
    engine = pipeline(module(1), config())
    for call in ("forward", "backward", "step", "no_sync", "coalesce_grad_reduction"):
        with pytest.raises(tessera.UsageError, match=rf"engine\.{call}\] .*train_batch\(\)"):
            getattr(engine, call)()
    with pytest.raises(tessera.UsageError, match="train_batch"):
        engine.optimizer.step()
    with pytest.raises(tessera.UsageError, match="reads data and has none"):
        engine.train_batch()
    assert float(engine.train_batch(data(0))) > 0, "it goes on"
    engine.destroy()
    with pytest.raises(tessera.UsageError, match="destroyed"):
        engine.train_batch(data(0))


def test_models_and_configurations_that_are_refused() -> None:
    with pytest.raises(tessera.ConfigError, match="2 stages need the ranks, which have no process group yet"):
        module(2)
    with pytest.raises(tessera.ConfigError, match="layer 1 is 3"):
        PipelineModule([nn.Linear(1, 1), 3], num_stages=1)
    twice = nn.Linear(1, 1)
    with pytest.raises(tessera.ConfigError, match=r"layer 1 \(Linear\) is in the list twice"):
        PipelineModule([twice, twice], num_stages=1)
    with pytest.raises(tessera.ConfigError, match="several only beside another stage; got 2 chunks with 1 stages"):
        module(1, num_chunks=2)
    with pytest.raises(tessera.ConfigError, match="takes a class"):
        LayerSpec(nn.Linear(1, 1).weight)
    with pytest.raises(tessera.ConfigError, match="managed_gradient_accumulation must be true"):
        pipeline(module(1), config(managed_gradient_accumulation=False))
    with pytest.raises(tessera.ConfigError, match=r"1f1b.*gpipe.*interleaved"):
        pipeline(module(1), config(pipeline={"schedule": "2f2b"}))
    engine = pipeline(PipelineModule([nn.Linear(4, 2)], 1), config())
    for wrong in ([torch.ones(3, 4)], [(torch.ones(3, 4), torch.ones(3))]):
        with pytest.raises(tessera.ConfigError, match=r"a pair \(inputs, labels\)|tensor of one element"):
            engine.train_batch(iter(wrong * 4))


def refused_together(rank: int) -> None:
    with pytest.raises(NotImplementedError, match=r"zero_optimization\.stage 3 .* use stage 1 or 2"):
        pipeline(module(2), config(3))
    with pytest.raises(tessera.ConfigError, match=r"gradient_accumulation_steps is \d on rank \d and \d on rank \d"):
        pipeline(module(2), config(micro_batches=4 + rank))
    low = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
    with pytest.raises(NotImplementedError, match="round at random"):
        pipeline(module(2, tied=True), config(1, **low))
    own = module(2)
    listed = [{"params": list(own.parameters())}]
    chosen: dict[str, Any] = {"client": torch.optim.AdamW(own.parameters())}
    cases: list[tuple[str, dict[str, Any]]] = [
        (
            "has no optimizer, stage . .rank .. has one; .* a function",
            {"optimizer": None if rank else chosen["client"]},
        ),
        ("is a torch.optim.sgd.SGD on .* and a ", {"optimizer": torch.optim.AdamW if rank else torch.optim.SGD}),
        ("has 1 param groups on stage 0 .* and 2 on stage 1", {"model_parameters": listed + [{"params": []}] * rank}),
        ("param group 1 takes no parameter of any stage", {"model_parameters": [*listed, {"params": []}]}),
        (
            r"group 0 has lr 0\.01 on stage 0 .* and 0\.5 on",
            {"model_parameters": [listed[0] | {"lr": [0.01, 0.5][rank]}]},
        ),
    ]
    without = {key: value for key, value in config(1).items() if key != "optimizer"}
    for words, more in cases:
        with pytest.raises(tessera.ConfigError, match=words):
            pipeline(own, without if "optimizer" in more else config(1), **more)
    with pytest.raises(tessera.ConfigError if rank else StageFailed, match="lr_scheduler must be a scheduler"):
        pipeline(module(2), config(1), lr_scheduler=3 if rank else None)
    engine = pipeline(module(2), config())
    with pytest.raises(NotImplementedError, match=r"save_16bit_model\] .* over several stages.*tessera export"):
        engine.save_16bit_model("nowhere")
    with pytest.raises(NotImplementedError, match=r"checkpoint\.format.* over several stages"):
        other = pipeline(module(2), config(checkpoint={"format": "deepspeed"}))
        other.save_checkpoint("nowhere")
    engine.set_train_batch_size(3 * (4 + rank))
    with pytest.raises(tessera.UsageError, match=r"stage \d \(rank \d\) has \d micro-batches for this batch"):
        engine.train_batch(data(0))
    engine.set_train_batch_size(12)
    with pytest.raises(tessera.UsageError, match="ended after 3 of 4 micro-batches"):
        engine.train_batch(iter([batch(0)] * (3 + rank)))
    with pytest.raises(tessera.UsageError, match="the data of rank 0 has ended"):
        engine.train_batch(iter([batch(0)] * (4 * rank)))
    with pytest.raises(StopIteration):
        engine.train_batch(iter([]))
    with pytest.raises(
        tessera.UsageError if rank else StageFailed, match=r"pass data_iter there|could not read its data"
    ):
        engine.train_batch(data(0) if rank == 0 else None)
    linear = next(m for m in engine.module.modules() if isinstance(m, nn.Linear))
    old = linear.bias
    linear.bias = nn.Parameter(torch.zeros(old.shape)) if rank else old
    with pytest.raises(
        tessera.UsageError, match="bias: replaced after" if rank else "cannot step, see the error there"
    ):
        engine.train_batch(data(0))
    linear.bias = old
    assert float(engine.train_batch(data(0))) > 0, "it goes on"
    engine.destroy()


def test_what_stages_must_agree_on() -> None:
    in_processes(2, refused_together)


def loses_its_connection(rank: int) -> None:
    def optimizer(params: Any) -> torch.optim.Optimizer:
        raise dist.DistBackendError("[comm] rank 7 is lost")

    begun = time.monotonic()
    with pytest.raises(dist.DistBackendError, match="rank 7 is lost") as caught:
        pipeline(module(2), config(1), optimizer=optimizer if rank else torch.optim.SGD)
    assert rank == 1 or "stage 1 (rank 1) failed while it was built" in str(caught.value)
    assert time.monotonic() - begun < 20
    if rank:
        time.sleep(5)  # its end would tell the other


def test_a_connection_lost_by_a_stage_that_is_built_is_an_error_on_all() -> None:
    in_processes(2, loses_its_connection)


class Odd(PipelineModule):
    """Raises where it is asked for what `word` names."""

    def __init__(self, word: str, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.word = word

    def __getattribute__(self, name: str) -> Any:
        if name == object.__getattribute__(self, "__dict__").get("word"):
            raise OSError(f"no {name} today")
        return super().__getattribute__(name)


def built_on_one_rank_only(rank: int, world: int) -> None:
    more: dict[str, Any] = {"num_stages": 2, "loss_fn": loss_fn, "partition_method": "uniform"}
    spoiled = config(1, pipeline={"activation_checkpoint_interval": 1})
    rows: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
        # what is asked of the module, the configuration, arguments, and what is said
        ("", config(1, gradient_clipping="x"), {}, "gradient_clipping"),
        ("num_stages", config(1), {}, "no num_stages today"),  # check()
        ("", config(1), {"tensor_parallel": "2"}, "mesh_shape"),  # Grid
        ("", config(1), {"tensor_parallel": 3}, "tensor_parallel"),
        ("tied_stages", config(1), {}, "no tied_stages today"),  # tied(), Ties
        ("activation_checkpoint_interval", spoiled, {}, "no activation_checkpoint_interval"),  # _connect()
    ]
    last = world - 1
    for word, bad, arguments, said in rows:
        mine = rank == last
        model: Any = Odd(word, layers(True), **more) if mine else module(2, tied=True, partition_method="uniform")
        begun = time.monotonic()
        with pytest.raises(Exception, match=said) as caught:
            pipeline(model, bad if mine else config(1), **(arguments if mine else {}))
        assert time.monotonic() - begun < 20, said
        named = rf"(rank {last}|stage 1 \(rank {last}\)) failed while it was built: "
        assert mine or (caught.type is StageFailed and re.search(named, str(caught.value))), (said, caught.value)
    engine = pipeline(module(2, tied=True), config(1))
    assert float(engine.train_batch(data(rank % (world // 2)))) > 0, "nothing is left behind"
    engine.destroy()


@pytest.mark.parametrize("world", [2, 4])
def test_what_one_rank_cannot_build_is_an_error_on_all(world: int) -> None:
    in_processes(world, built_on_one_rank_only, world)


def stages_that_differ(rank: int) -> None:
    """In how many they are: before process groups are made for them."""
    model = PipelineModule(layers(), num_stages=1 + rank, loss_fn=loss_fn)
    with pytest.raises(tessera.ConfigError, match=r"num_stages is \d on rank \d and \d on rank \d"):
        pipeline(model, config(1))


def test_ranks_that_count_stages_differently() -> None:
    in_processes(2, stages_that_differ)


class Fails(Block):
    """In its third forward, in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__(WIDTH)
        self.how = how
        self.calls = 0

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        y = super().forward(x)
        if self.calls != 3:
            return y
        if self.how == "raises":
            raise ValueError("an unlucky batch")
        if self.how == "frees":
            y.sum().backward()
        if self.how == "object":
            return {y}
        if self.how == "dies":
            os._exit(7)
        return y


def failing(how: str, stages: int = 3) -> PipelineModule:
    """On the second stage."""
    list_of = layers()
    list_of[{2: 5, 3: 5, 4: 3}[stages]] = LayerSpec(Fails, how)
    return PipelineModule(list_of, num_stages=stages, loss_fn=loss_fn, partition_method="uniform")


def one_fails(rank: int, how: str, words: str, error: type[Exception]) -> None:
    engine = pipeline(failing(how), config(1, 6))
    assert [5 in engine.module.layers_of(0, stage) for stage in range(3)] == [False, True, False]
    begun = time.monotonic()
    with pytest.raises(error if rank == 1 else StageFailed, match=words) as caught:
        engine.train_batch(data(0))
    assert time.monotonic() - begun < 20
    assert rank == 1 or "stage 1 (rank 1) failed in this batch" in str(caught.value)
    with pytest.raises(tessera.UsageError, match="a batch has failed before"):
        engine.train_batch(data(0))
    for call in (engine.save_checkpoint, engine.load_checkpoint):
        with pytest.raises(tessera.UsageError, match=r"\w+_checkpoint: a batch has failed before"):
            call("nowhere")
    engine.destroy()


@pytest.mark.parametrize(
    ("how", "words", "error"),
    [
        ("raises", "an unlucky batch", ValueError),
        ("frees", "graph of micro-batch 2 was freed before its backward", tessera.UsageError),
        ("object", "a layer returned a set", tessera.UsageError),
    ],
)
def test_an_error_of_one_stage_is_an_error_on_all(how: str, words: str, error: type[Exception]) -> None:
    in_processes(3, one_fails, how, words, error)


def lonely(rank: int, port: int, answers: Any, heard: Any) -> None:
    start(rank, 4, port, seconds=60)
    model = failing("dies", stages=4)
    engine = pipeline(model, config(1, 6))
    begun = time.monotonic()
    try:
        engine.train_batch(data(0))
    except (dist.DistBackendError, StageFailed) as error:
        answers.put((rank, type(error).__name__, str(error), time.monotonic() - begun))
        answers.close()
        answers.join_thread()
        heard.wait(60)  # a connection that closes would tell the others
    os._exit(0)


def test_a_lost_stage_is_named_in_bounded_time_on_all() -> None:
    port, answers, heard = free_port(), PROCESSES.Queue(), PROCESSES.Event()
    ranks = [PROCESSES.Process(target=lonely, args=(rank, port, answers, heard)) for rank in range(4)]
    for process in ranks:
        process.start()
    found = sorted(answers.get(timeout=60) for _ in range(3))
    heard.set()
    for process in ranks:
        process.join(30)
    assert ranks[1].exitcode == 7
    assert [rank for rank, *_ in found] == [0, 2, 3]
    for rank, kind, text, seconds in found:
        assert kind == "DistBackendError" or rank == 3, "on its neighbours"
        assert seconds < 30
        assert "stage 1 (rank 1) is lost" in text


def one_rank_of_a_stage_fails(rank: int) -> None:
    """The one beside it waits in a reduction."""
    engine = pipeline(failing("raises" if rank == 2 else "", stages=2), config(2, 6))
    begun = time.monotonic()
    with pytest.raises(ValueError if rank == 2 else StageFailed, match="an unlucky batch") as caught:
        engine.train_batch(data(rank % 2))
    assert time.monotonic() - begun < 20
    assert rank == 2 or "stage 1 (rank 2) failed in this batch" in str(caught.value)
    engine.destroy()
    again = pipeline(module(2), config(2, 6))
    assert float(again.train_batch(data(rank % 2))) > 0, "a new engine"
    again.destroy()


def test_an_error_of_one_rank_of_a_stage_is_one_of_all() -> None:
    in_processes(4, one_rank_of_a_stage_fails)


def damaged(rank: int) -> Any:
    yield batch(0)
    if rank == 2:
        raise OSError("a damaged sample")
    yield from data(0)


def data_fails_on_one_rank(rank: int) -> None:
    engine = pipeline(module(3), config(1))
    for call in (engine.train_batch, engine.eval_batch):
        with pytest.raises(OSError if rank == 2 else StageFailed, match="a damaged sample") as caught:
            call(damaged(rank))
        assert rank == 2 or "stage 2 (rank 2) could not read its data: OSError: " in str(caught.value)
    assert float(engine.train_batch(data(0))) > 0, "it goes on"
    engine.destroy()


def test_an_error_of_the_data_is_one_of_all() -> None:
    in_processes(3, data_fails_on_one_rank)


def tied_to_others(rank: int) -> None:
    def embedding(width: int, more: int, dtype: torch.dtype) -> nn.Module:
        made = nn.Embedding(11, width, dtype=dtype)
        for number in range(more):
            made.register_parameter(f"more{number}", nn.Parameter(torch.zeros(2)))
        return made

    middle = [LayerSpec(Block, WIDTH) for _ in range(4)]
    same = (WIDTH, 0, torch.float32)
    for other, said in (
        ((WIDTH, 1, torch.float32), r"weight \[11, 6\] Float, more0 \[2\] Float"),
        ((WIDTH + 1, 0, torch.float32), r"weight \[11, 7\] Float"),
        ((WIDTH, 0, torch.float64), r"weight \[11, 6\] Double"),
    ):
        ends = [TiedLayerSpec("ends", embedding, *which) for which in (same, other)]
        model = PipelineModule([ends[0], *middle, ends[1]], num_stages=3, loss_fn=loss_fn, partition_method="uniform")
        begun = time.monotonic()
        with pytest.raises(
            tessera.ConfigError, match=r"tied layers 'ends' .*stage 0 \(rank 0\) has .*; stage 2 .* has " + said
        ):
            pipeline(model, config(1))
        assert time.monotonic() - begun < 20


def test_tied_layers_that_differ_are_named_on_all_stages() -> None:
    in_processes(3, tied_to_others)


def frozen_on_one_stage(rank: int) -> None:
    model = module(2, tied=True)
    model.tied_modules["embed"].requires_grad_(rank == 0)
    with pytest.raises(tessera.UsageError, match=r"'tied_modules\.embed\.positions' is trained on one stage and"):
        pipeline(model, config(1))


def test_a_tied_layer_that_one_stage_freezes() -> None:
    in_processes(2, frozen_on_one_stage)


def thawed_on_one_rank(rank: int, folder: Path) -> None:
    def linears(model: Any) -> list[Any]:
        return [part.linear for part in model.modules() if isinstance(part, Block)]

    fresh = pipeline(module(2), config(1))
    fresh.train_batch(data(0))
    model = module(2)
    for linear in linears(model):
        linear.requires_grad_(False)
    engine = pipeline(model, config(1))
    begun = time.monotonic()
    for linear in linears(engine.module):
        linear.requires_grad_(rank != 0)
    said = r"do not train the same parameters|do not step alike|no engine was stepped: the norm failed on rank \d"
    with pytest.raises((tessera.ConfigError, tessera.UsageError), match=said):
        engine.train_batch(data(1))
    with pytest.raises(tessera.ConfigError, match=said):
        engine.save_checkpoint(folder)
    assert time.monotonic() - begun < 30 and engine.global_steps == 0
    for linear in linears(engine.module):
        linear.requires_grad_(True)
    rates = engine.optimizer.param_groups[0]
    old = rates["lr"]
    rates["lr"] = 0.3 if rank == 3 else old
    with pytest.raises((ValueError, tessera.UsageError), match=said if rank < 2 else r"rank 1 has lr 0\.3"):
        engine.train_batch(data(1))
    assert time.monotonic() - begun < 30 and engine.global_steps == 0
    rates["lr"] = old
    engine.train_batch(data(0))
    assert engine.global_grad_norm() == pytest.approx(fresh.global_grad_norm(), rel=1e-5)
    for one in (fresh, engine):
        one.destroy()


def test_what_joins_or_differs_on_one_rank_of_a_stage_is_an_error_on_all(tmp_path: Path) -> None:
    in_processes(4, thawed_on_one_rank, tmp_path)


def evaluates_without_a_loss(rank: int) -> None:
    engine = pipeline(PipelineModule(layers(), num_stages=2, seed_layers=True), config(1))
    *_, part = engine.module.modules()
    part.eval()
    found = engine.eval_batch(data(0), num_micro_batches=2)
    assert engine.module.training and not part.training
    part.train()
    both = engine.eval_batch(data(0), return_logits=True, num_micro_batches=2)
    assert both[0] is None and (found is None) == (both[1] is None) == (rank == 0)
    if rank == 1:
        assert [tuple(output.shape) for output in found] == [(3, 5, 11)] * 2 and torch.equal(found[1], both[1][1])
    with pytest.raises(
        tessera.ConfigError,
        match=r"^\[pipeline\] 2 ranks cannot be 3 stages of equal size; start a mul",
    ):
        PipelineModule([nn.Linear(4, 4)], num_stages=3)
    said = r"the loss must be a tensor of one element.*PipelineModule\(loss_fn=\.\.\.\)"
    with pytest.raises(tessera.ConfigError if rank else StageFailed, match=said):
        engine.train_batch(data(0))
    engine.destroy()


def test_a_model_without_a_loss_can_be_evaluated() -> None:
    in_processes(2, evaluates_without_a_loss)
