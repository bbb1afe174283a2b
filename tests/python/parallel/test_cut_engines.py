"""Engines of models that are cut: every stage and precision, state dicts, checkpoints, what is given and taken back."""

from __future__ import annotations

import copy
import functools
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from support import assert_close, engines, masters, run_mesh
from test_models import (
    COMPUTES_WITHOUT_HEADS,
    assert_near,
    assert_same,
    compare,
    settings,
    train,
    train_and_end,
    train_plain,
)
from tiny_models import LEARNED, LLAMA, MODELS, learned, learned_rules, of, text
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.checkpoint import checkpoint

import tessera
from tessera.parallel import ColumnLinear, RowLinear

REGIONS = {"tessera": {"sequence_parallel_norms": True}}
ADAM = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}}


def llama() -> nn.Module:
    return MODELS["llama, preset"][0]()


def adam(tp: int, stage: int = 0, **more: Any) -> dict[str, Any]:
    return settings(tp, {}, stage=stage, **more) | {"optimizer": ADAM}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["llama", "qwen3", "deepseek_v2", "falcon, one key", "gpt_oss"])
def test_every_stage_with_two_batches(name: str, stage: int) -> None:
    compare(name, tp=2, dp=2, stage=stage)


PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "bf16 states": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
}


ALONG_TOO = [("bf16", 1, REGIONS), ("autocast", 3, REGIONS), ("bf16 states", 2, REGIONS)]


@pytest.mark.parametrize(
    ("precision", "stage", "regions"), [(name, stage, {}) for name in PRECISIONS for stage in (1, 3)] + ALONG_TOO
)
def test_precisions_follow_the_whole_model(precision: str, stage: int, regions: dict[str, Any]) -> None:
    batches = [text(step, length=8) for step in range(3)]
    body = lambda engine, rank: train(engine, batches)  # noqa: E731
    more = PRECISIONS[precision]
    want = engines(llama(), {"tp": 1}, adam(1, stage, **more), body)[0]
    for got in engines(llama(), {"tp": 2}, adam(2, stage, **more, **regions), body):
        torch.testing.assert_close(got["losses"], want["losses"], rtol=2e-2, atol=0)
        torch.testing.assert_close(got["norms"], want["norms"], rtol=5e-2, atol=0)
        assert_close(got["weights"], want["weights"], bf16=True)


def test_accumulation_and_direct_backward_of_several_losses() -> None:
    model = llama()
    plain = copy.deepcopy(model)
    (plain(**text(0)).loss / 2 + plain(**text(1)).loss / 2).backward()

    def body(engine: tessera.Engine, rank: int) -> Any:
        for step in range(2):
            engine(**text(step)).loss.backward()
            if step == 0:
                engine.step()
        return {n: tessera.state.get_full_grad(engine, p) for n, p in engine.module.named_parameters()}

    for grads in engines(model, {"tp": 2}, adam(2, stage=2, accumulation=2), body):
        for name, param in plain.named_parameters():
            assert_near(name, grads[name], param.grad, 1e-5, 1e-2)


@pytest.mark.usefixtures("threads_compile")
@pytest.mark.parametrize("how", ["checkpointing", "compile"])
def test_blocks_that_are_replayed_or_compiled(how: str) -> None:
    model = llama().train()
    batches = [text(0), text(1)]
    want = train_plain(copy.deepcopy(model), [[b] for b in batches])
    if how == "checkpointing":
        model.gradient_checkpointing_enable()

    def body(engine: tessera.Engine, rank: int) -> Any:
        if how == "compile":
            for layer in engine.module.model.layers:
                layer.compile(backend="eager")
        return train(engine, batches)

    cfg = settings(2, {}, stage=3)
    if how == "compile":  # dynamo is not for several threads
        cfg = settings(2, {})
    for got in engines(model, {"tp": 2}, cfg, body):
        assert_same(got, want)


def test_modules_keep_their_identity_and_are_recognizable() -> None:
    model = of("Llama", LLAMA)()
    before = dict(model.named_modules())

    def body(engine: tessera.Engine, rank: int) -> None:
        q = engine.module.model.layers[0].self_attn.q_proj
        o = engine.module.model.layers[0].self_attn.o_proj
        assert isinstance(q, ColumnLinear) and isinstance(o, RowLinear) and isinstance(o, nn.Linear)
        assert (q.in_features, q.out_features, o.in_features, o.out_features) == (32, 16, 16, 32)
        assert q.weight.shape == (16, 32) and tessera.parallel.is_model_parallel_parameter(q.weight)
        assert not tessera.parallel.is_model_parallel_parameter(engine.module.model.norm.weight)
        assert "column of (32, 32), rank" in repr(q)
        assert "self_attn.q_proj" in str(engine.parallel_plan())
        copied = copy.deepcopy(engine.module)
        torch.testing.assert_close(copied(**text(0)).loss, engine(**text(0)).loss)

    engines(model, {"tp": 2}, adam(2), body)
    assert before.keys() == dict(model.named_modules()).keys()


@pytest.mark.parametrize("stage", [0, 3])
def test_state_dicts_are_whole_and_may_be_loaded(stage: int, tmp_path: Path) -> None:
    model = of("Llama", LLAMA, tie_word_embeddings=True)()
    want = {name: value.clone() for name, value in model.state_dict().items()}

    def body(engine: tessera.Engine, rank: int) -> None:
        state = {name: value.clone() for name, value in engine.module_state_dict().items()}
        assert_close(state, want)
        changed = {name: value + 1 for name, value in state.items()}
        engine.load_module_state_dict(changed)
        assert_close(engine.module_state_dict(), changed)
        engine.load_module_state_dict(state)
        engine.save_16bit_model(str(tmp_path))

    cfg = adam(2, stage)
    cfg["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    engines(model, {"tp": 2, "dp": 2}, cfg, body)
    assert_close(torch.load(tmp_path / "pytorch_model.bin"), want)


@pytest.mark.parametrize("name", ["llama", "falcon, one key", "gpt_oss"])
def test_checkpoints_load_at_other_sizes(name: str, tmp_path: Path) -> None:
    model = MODELS[name][0]()

    def states(engine: tessera.Engine) -> dict[str, Any]:
        found = {}
        for name, param in engine.module.named_parameters():
            found[name] = tessera.state.get_full_fp32_param(engine, param).clone()
            found[f"{name} exp_avg"] = tessera.state.get_full_optimizer_state(engine, param, "exp_avg").clone()
        return found

    def stage_of(number: int) -> int:
        return (2, 3, 1)[number]

    last: dict[str, Any] = {}
    widest = 4 if name != "gpt_oss" or COMPUTES_WITHOUT_HEADS else 2  # of 4 ranks two of its have no head
    for number, (tp, dp) in enumerate([(2, 2), (1, 2), (widest, 1)]):

        def body(engine: tessera.Engine, rank: int, number: int = number, last: dict[str, Any] = last) -> Any:
            if number:
                engine.load_checkpoint(str(tmp_path))
                assert engine.global_steps == number
                for name, value in states(engine).items():
                    assert value.equal(last[name]), name
            engine(**text(number)).loss.backward()
            engine.step()
            engine.save_checkpoint(str(tmp_path))
            return states(engine)

        last = engines(model, {"tp": tp, "dp": dp}, adam(tp, stage_of(number)), body)[0]


def test_a_failure_gives_the_model_back_whole() -> None:
    model = llama()
    want = copy.deepcopy(model)
    copies = [copy.deepcopy(model) for _ in range(2)]

    def policy(_: nn.Module) -> dict[str, str]:
        raise ArithmeticError("a policy that fails")

    def body(rank: int, mesh: tessera.Mesh) -> None:
        with pytest.raises(ArithmeticError):
            tessera.Engine(copies[rank], adam(2), group=mesh, unit_policy=policy)

    run_mesh(body, tp=2)
    for copied in copies:
        assert type(copied.model.layers[0].self_attn.q_proj) is nn.Linear
        assert copied.model.layers[0].self_attn.q_proj.out_features == 32
        assert_close(dict(copied.named_parameters()), dict(want.named_parameters()))
        torch.testing.assert_close(copied(**text(0)).loss, want(**text(0)).loss)
        assert not any(hasattr(p, "tensor_model_parallel") for p in copied.parameters())


def test_a_model_that_is_cut_gets_another_engine() -> None:
    copies = [MODELS["qwen3"][0]() for _ in range(2)]

    def body(rank: int, mesh: tessera.Mesh) -> list[Any]:
        found = []
        for stage in (1, 3, 0):
            model = copy.deepcopy(copies[rank]) if stage == 0 else copies[rank]
            engine = tessera.Engine(model, adam(2, stage), group=mesh)
            engine(**text(0)).loss.backward()
            found.append({n: tessera.state.get_full_grad(engine, p).clone() for n, p in model.named_parameters()})
            engine.destroy()
        return found

    for first, *others in run_mesh(body, tp=2):
        for other in others:
            assert_close(other, first)
    with pytest.raises(ValueError, match="the model is cut already, as rank 0 of 2; here is rank 0 of 1"):
        tessera.Engine(copies[0], adam(1))


@pytest.mark.parametrize("stage", [0, 2])
def test_a_clients_optimizer_and_its_states_are_cut_too(stage: int) -> None:
    model = llama()
    start = copy.deepcopy(model)
    plain = torch.optim.AdamW(start.parameters(), lr=1e-2)
    start(**text(0)).loss.backward()
    plain.step()
    plain.zero_grad()
    begun, states = copy.deepcopy(start), copy.deepcopy(plain.state_dict())
    start(**text(1)).loss.backward()
    plain.step()
    cfg = adam(2, stage) | {"gradient_clipping": 0.0}
    del cfg["optimizer"]

    def client(params: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(params, lr=1e-2)
        optimizer.load_state_dict(copy.deepcopy(states))
        return optimizer

    def body(engine: tessera.Engine, rank: int) -> Any:
        engine(**text(1)).loss.backward()
        engine.step()
        return masters(engine)

    for found in engines(begun, {"tp": 2}, cfg, body, client=client):
        for name, param in start.named_parameters():
            assert_near(name, found[name], param.detach(), 1e-4)


@pytest.mark.parametrize("client", [False, True])
@pytest.mark.parametrize("stage", [0, 2])
def test_optimizers_that_look_across_a_matrix_are_refused(stage: int, client: bool) -> None:
    """And taken where the configuration says that they do not."""
    kind = "Adafactor" if client else "Rprop"
    cfg = adam(2, stage) | {"optimizer": {"type": kind, "params": {"lr": 1e-2}}}
    where = r"stage 2 and tensor_parallel\.autotp_size give" if stage else r"tensor_parallel\.autotp_size gives"
    message = rf"{kind} is not known to work on slices of parameters, as {where} them"
    if client:
        del cfg["optimizer"]
    elif stage:
        message = "Rprop has no native rule"

    def body(rank: int, mesh: tessera.Mesh) -> None:
        model = llama()
        kwargs = {"optimizer": torch.optim.Adafactor(model.parameters(), lr=1e-2)} if client else {}
        with pytest.raises(ValueError, match=message):
            tessera.Engine(model, cfg, group=mesh, **kwargs)
        tessera.Engine(model, cfg | {"zero_allow_untested_optimizer": True}, group=mesh, **kwargs).destroy()

    run_mesh(body, tp=2)


def test_frozen_parameters_are_cut_and_shared_as_well() -> None:
    model = MODELS["qwen3"][0]()
    model.model.layers[0].requires_grad_(False)
    want = {name: value.clone() for name, value in model.state_dict().items()}

    def body(engine: tessera.Engine, rank: int) -> None:
        assert_close(engine.module_state_dict(), want)
        engine(**text(0)).loss.backward()
        engine.step()
        frozen = {n: v for n, v in engine.module_state_dict().items() if ".layers.0." in n}
        assert_close(frozen, {n: want[n] for n in frozen})

    engines(model, {"tp": 2, "dp": 2}, adam(2, 1), body)


class Own(nn.Module):
    """A layer of one's own, with the weight of nn.Linear."""

    def __init__(self, twice: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4))
        self.twice = twice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t() * (2 if self.twice else 1)


@pytest.mark.parametrize("twice", [False, True])
def test_a_class_of_ones_own_is_cut_where_it_computes_what_linear_does(twice: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Own(twice), nn.Tanh(), nn.Linear(6, 4))
    x = torch.randn(3, 4)
    specs = [{"patterns": [r"0\.weight$"]}, {"patterns": [r"2\.weight$"], "partition_type": "row"}]
    cfg = settings(2, {"partition_config": {"layer_specs": specs}})

    def body(rank: int, mesh: tessera.Mesh) -> Any:
        part = copy.deepcopy(model)
        if twice:
            with pytest.raises(ValueError, match=r"a Own does not compute what nn\.Linear would"):
                tessera.Engine(part, cfg, group=mesh)
            return model(x)
        engine = tessera.Engine(part, cfg, group=mesh)
        assert type(part[0]).__mro__[2].__name__ == "_CutModule" and isinstance(part[0], Own)
        out = engine(x)
        engine.destroy()
        return out

    for out in run_mesh(body, tp=2):
        torch.testing.assert_close(out, model(x))


# ---------------------------------------------------------------- models that are whole nowhere


@pytest.mark.parametrize("stage", [1, 3])
def test_models_that_zero_init_builds(stage: int) -> None:
    batches = [text(0), text(1), text(2)]
    want = train_plain(of("Llama", LLAMA)().train(), [[b] for b in batches])
    cfg = settings(2, {"preset_model": "llama"}, stage=stage)
    whole = of("Llama", LLAMA)().state_dict()

    def body(rank: int, mesh: tessera.Mesh) -> Any:
        with tessera.zero.Init(config=cfg, group=mesh.group([tessera.Axis.Tp])):
            model = tessera_llama()
        with tessera.zero.GatheredParameters(model.parameters(), modifier_rank=0):
            if rank == 0:
                model.load_state_dict(whole)
        engine = tessera.Engine(model, cfg, group=mesh)
        return train_and_end(engine, batches)

    for got in run_mesh(body, tp=2):
        assert_same(got, want)


def tessera_llama() -> nn.Module:
    import transformers

    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))


@pytest.mark.parametrize(("name", "stage"), [("chatglm", 2), ("llama", 0), ("llama", 3)])
def test_models_of_the_meta_device_are_filled_slice_by_slice(name: str, stage: int, tmp_path: Path) -> None:
    """Llama's rotary embedding has buffers that are in no file."""
    from safetensors.torch import save_file

    model = MODELS[name][0]()
    half = {n: v.clone() for n, v in list(model.state_dict().items())[:9]}
    save_file(half, str(tmp_path / "a.safetensors"))
    save_file({n: v.clone() for n, v in model.state_dict().items() if n not in half}, str(tmp_path / "b.safetensors"))
    want = train_plain(copy.deepcopy(model), [[text(0)], [text(1)]])
    cfg = settings(2, {"preset_model": name}, stage=stage)

    def body(rank: int, mesh: tessera.Mesh) -> Any:
        with torch.device("meta"):
            meta = type(model)(model.config) if name == "llama" else type(model)()
        plan = tessera.parallel.shard_model(meta, cfg, group=mesh.group(tessera.Axis.Tp))
        assert plan.size == 2 and sum(p.numel() for p in meta.parameters()) < sum(p.numel() for p in model.parameters())
        assert tessera.parallel.load_slices(meta, tmp_path) == []
        with pytest.raises(ValueError, match=r"no file has .*layers.1.mlp"):
            tessera.parallel.load_slices(meta, tmp_path / "a.safetensors")
        engine = tessera.Engine(meta, cfg, group=mesh)
        return train_and_end(engine, [text(0), text(1)])

    for got in run_mesh(body, tp=2):
        assert_same(got, want)


class Masked(nn.Linear):
    """A buffer that nobody else can compute, and its second name."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("mask", torch.ones(4), persistent=False)
        self.other = self.mask


def test_buffers_that_stay_empty_are_named(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    def to_meta(_module: nn.Module, _name: str, param: Any) -> Any:
        return None if param is None or param.is_meta else nn.Parameter(param.to("meta"), param.requires_grad)

    save_file(nn.Sequential(Masked()).state_dict(), str(tmp_path / "a.safetensors"))
    with torch.device("meta"):
        meta = nn.Sequential(Masked())
    cfg = settings(1, {"partition_config": {"layer_specs": [{"patterns": [".*"]}]}})
    tessera.parallel.shard_model(meta, cfg, group=tessera.thread_groups(1)[0])
    with pytest.raises(ValueError, match=r"the buffers 0\.mask, 0\.other of the meta.*tensor_parallel_weights\.md"):
        tessera.parallel.load_slices(meta, tmp_path)
    assert tessera.parallel.load_slices(meta, tmp_path, strict=False) == ["0.mask", "0.other"]
    handle = register_module_parameter_registration_hook(to_meta)  # as the documentation has it
    meta = nn.Sequential(Masked())
    handle.remove()
    tessera.parallel.shard_model(meta, cfg, group=tessera.thread_groups(1)[0])
    assert tessera.parallel.load_slices(meta, tmp_path) == []
    assert meta[0].mask.equal(torch.ones(4)) and not meta[0].weight.is_meta


@pytest.mark.parametrize(
    "entry",
    [
        {"data_offsets": [2**32, 2**32 + 64]},
        {"data_offsets": [-4, 60]},
        {"shape": [2**31, 2**33]},
        {"dtype": 3},
        3,
    ],
)
def test_a_file_whose_header_cannot_be_is_named(entry: Any, tmp_path: Path) -> None:
    good = {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}
    header = json.dumps({"0.weight": entry if entry == 3 else good | entry}).encode()
    for length in (len(header), 2**63, 2**64 - 1):
        (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", length) + header + bytes(64))
        with pytest.raises(tessera.errors.IoError, match=r"a\.safetensors"):
            tessera.parallel.load_slices(nn.Sequential(nn.Linear(4, 4, bias=False)), tmp_path)


# ---------------------------------------------------------------- wrong use


def test_ranks_with_different_data_are_named() -> None:
    def body(engine: tessera.Engine, rank: int) -> None:
        with pytest.raises(
            AssertionError,
            match=r"Data inconsistency within the TP group: labels of the first.*rank 1 of the 2.*autotp_size",
        ):
            batch = text(0)
            engine(input_ids=batch["input_ids"], labels=batch["labels"] + rank)
        engine(**text(0))
        engine(**text(1 + rank))  # once is enough

    engines(llama(), {"tp": 2}, adam(2), body)


@pytest.mark.parametrize(
    ("rules", "model", "message"),
    [
        ({"preset_model": "bloom"}, "llama", "match"),
        ({}, "gpt2", "gpt2"),
    ],
)
def test_what_cannot_be_cut_says_so(rules: dict[str, Any], model: str, message: str) -> None:
    make = llama if model == "llama" else of("GPT2", {"vocab_size": 32, "n_embd": 32, "n_layer": 2, "n_head": 4})

    def body(rank: int, mesh: tessera.Mesh) -> None:
        with pytest.raises((ValueError, AssertionError), match=message):
            tessera.Engine(make(), settings(2, rules), group=mesh)

    run_mesh(body, tp=2)


@pytest.mark.parametrize(
    ("how", "whole", "error", "message"),
    [
        ("up", LEARNED, RuntimeError, r"layers\.0\.up: its weight is used without a call of the module"),
        ("down", LEARNED, RuntimeError, r"layers\.1\.down: its weight is used without a call of the module"),
        ("beside", LEARNED, ValueError, r"layers\.0\.down: .*beside those of column layers \(through .*layers\.0\."),
        (
            "",
            LEARNED[:1],
            ValueError,
            r"temperature \(scalar\).*rule for 'layers\\.0\\.self.*and \"grad_allreduce\": true",
        ),
        ("", LEARNED[1:], ValueError, r"self_attention\.qn \(8\).*rule for '.*qn' .*and \"grad_allreduce\": true"),
    ],
)
def test_what_would_train_wrong_is_an_error(
    how: str, whole: tuple[str, ...], error: type[Exception], message: str
) -> None:
    copies = [learned(how).train() for _ in range(2)]

    def body(rank: int, mesh: tessera.Mesh) -> None:
        with pytest.raises(error, match=message):
            engine = tessera.Engine(copies[rank], settings(2, learned_rules(*whole)), group=mesh)
            engine.backward(engine(**text(0)).loss)

    run_mesh(body, tp=2)


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (
            [{"patterns": [".*dense_h_to_4h"], "shape": [2, -1]}],
            r"mlp\.dense_4h_to_h is whole and takes 48 features, and 24 came in: layers\.0\.mlp\.dense_h_to_4h is "
            r"cut, .* 48 of its 96 outputs .*layer_specs\[0\].*; in tensor_parallel\.partition_config give",
        ),
        (
            [{"patterns": [".*o_proj"], "partition_type": "skip"}, {"patterns": [".*[qkv]_proj"]}],
            r"self_attention\.o_proj is whole and takes 32 features, and 16 came in: layers\.0\.self_attention\.q_proj",
        ),
    ],
)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_column_without_its_row_is_named(specs: list[dict[str, Any]], message: str, stage: int) -> None:
    def body(engine: tessera.Engine, rank: int) -> None:
        with pytest.raises(ValueError, match=message):
            engine(**text(0))

    cfg = settings(2, {"partition_config": {"layer_specs": specs}}, stage=stage)
    engines(MODELS["own"][0](), {"tp": 2}, cfg, body)


@pytest.mark.usefixtures("threads_compile")
@pytest.mark.parametrize("how", ["reentrant", "replays", "compile", "again"])
@pytest.mark.parametrize("stage", [0, 3])
def test_learned_activations_in_engines_of_every_kind(how: str, stage: int) -> None:
    model = learned().train()
    batches = [text(0), text(1)]
    want = train_plain(copy.deepcopy(model), [[b] for b in batches])
    copies = [copy.deepcopy(model) for _ in range(2)]
    cfg = settings(2, learned_rules(*LEARNED), stage=stage)

    def body(rank: int, mesh: tessera.Mesh) -> Any:
        made = copies[rank]
        if how == "again":  # a second engine of a copy that is cut
            engine = tessera.Engine(made, cfg, group=mesh)
            engine(**text(0)).loss.backward()
            engine.destroy()
            made = copy.deepcopy(made)
        engine = tessera.Engine(made, cfg, group=mesh)
        for layer in engine.module.layers:
            if how == "compile":
                layer.compile(backend="eager")
            elif how != "again":
                options = {"use_reentrant": how == "reentrant"}
                layer.forward = functools.partial(checkpoint, layer.forward, **options)
        return train_and_end(engine, batches)

    for got in run_mesh(body, tp=2):
        assert_same(got, want)


def test_a_mesh_that_is_not_the_world() -> None:
    with pytest.raises(ValueError, match=r"tensor_parallel.autotp_size 2 does not divide the 1 ranks"):
        tessera.Engine(llama(), adam(2))
