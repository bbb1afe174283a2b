"""Models of Transformers with a shared sequence train as one rank with the whole sequence does."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import transformers
from readme_text import BATCH, LENGTH, llama, plain_loss, shared_part, text_batch
from support import assert_close, config, engines, full_grads, run_mesh, weights
from tessera.sequence import SequenceParallelGroups, TransformersAttention, mean_over_sequence
from torch import nn
from torch.nn import functional as F

import tessera

PACKED = (7, 13, 12)  # documents, none of which ends where a rank's part does


def groups_of(mesh: tessera.Mesh) -> SequenceParallelGroups:
    sp, dp = tessera.Axis.Sp, tessera.Axis.DpShard
    return SequenceParallelGroups(mesh.group(sp), mesh.group(dp), mesh.group([dp, sp]))


def register(model: nn.Module, mesh: tessera.Mesh, **more: Any) -> SequenceParallelGroups:
    groups = groups_of(mesh)
    size = groups.size()
    options: dict[str, Any] = {"core_attn_implementation": "sdpa", "sequence_parallel_size": size} | more
    given = TransformersAttention.register_with_transformers(model, micro_batch_size=BATCH, groups=groups, **options)
    assert given is groups
    return groups


def shared_loss(model: Any, batch: dict[str, torch.Tensor], groups: SequenceParallelGroups) -> torch.Tensor:
    part = shared_part(batch, groups.rank(), groups.size())
    logits = model(input_ids=part["input_ids"], position_ids=part["position_ids"]).logits
    loss = F.cross_entropy(logits.flatten(0, 1), part["shift_labels"].flatten())
    return mean_over_sequence(loss, part["shift_labels"], groups.sequence)


def trained(model: nn.Module, batches: list[list[Any]], lr: float) -> tuple[list[float], list[float], Any, Any]:
    """Losses, gradient norms, first gradients and last weights of plain PyTorch; batches[step] are the ranks'."""
    losses, norms, first = [], [], None
    for step in batches:
        model.zero_grad()
        loss = sum(plain_loss(model, batch) for batch in step) / len(step)
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        losses.append(loss.item())
        norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item())
        first = first or {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        with torch.no_grad():
            for p in model.parameters():
                p -= lr * p.grad
    return losses, norms, first, {name: p.detach().clone() for name, p in model.named_parameters()}


# stage, ranks, ranks of a sequence, documents of a row
CASES = [
    *((stage, 2, 2, (LENGTH,)) for stage in range(4)),
    *((stage, 4, 2, PACKED) for stage in range(4)),
    (1, 4, 4, PACKED),
    (3, 4, 4, (LENGTH,)),
]


@pytest.mark.parametrize(("stage", "world", "sp", "lengths"), CASES)
def test_losses_gradients_norms_and_weights(stage: int, world: int, sp: int, lengths: tuple[int, ...]) -> None:
    model = llama(8, 4)
    dp, steps = world // sp, 3
    batches = [[text_batch(step * dp + rank, lengths) for rank in range(dp)] for step in range(steps)]
    losses, norms, first, last = trained(copy.deepcopy(model), batches, lr=0.1)
    copies = [copy.deepcopy(model) for _ in range(world)]

    def body(rank: int, mesh: tessera.Mesh) -> list[float]:
        groups = register(copies[rank], mesh)
        cfg = config(stage, train_micro_batch_size_per_gpu=BATCH, sequence_parallel_size=sp)
        engine = tessera.Engine(copies[rank], cfg, group=mesh)
        assert engine.train_batch_size() == BATCH * dp
        found = []
        for step in range(steps):
            loss = shared_loss(engine, batches[step][groups.rank("data")], groups)
            engine.backward(loss)
            if step == 0:
                assert_close(full_grads(engine), first)
            engine.step()
            assert engine.global_grad_norm() == pytest.approx(norms[step], rel=1e-4)
            found.append(loss.item())
        assert_close(weights(engine.module), last)
        engine.destroy()
        return found

    per_rank = torch.tensor(run_mesh(body, dp=dp, sp=sp))
    torch.testing.assert_close(per_rank.mean(0), torch.tensor(losses), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("kind", "heads", "keys", "sp", "parts"),
    [
        ("llama", 8, 2, 4, 1),
        ("llama", 8, 1, 2, 1),
        ("mistral", 4, 2, 2, 1),
        ("mistral", 8, 4, 2, 2),
        ("qwen2", 4, 4, 4, 1),
        ("mixtral", 4, 2, 2, 1),
    ],
)
def test_gradients_of_models(kind: str, heads: int, keys: int, sp: int, parts: int, checkpointing: bool) -> None:
    """Few key/value heads, sliding windows, and layers computed again; no engine. A window of 6 tokens. Hooks of one
    rank, as of an offload, give some layers copies of position_ids."""
    more: dict[str, Any] = {}
    if kind != "llama":
        more = {"sliding_window": 6} if kind != "qwen2" else {"sliding_window": 6, "use_sliding_window": True}
        if kind == "qwen2":
            more["max_window_layers"] = 1
    model = build(kind, heads, keys, **more)
    if checkpointing:
        model.gradient_checkpointing_enable()
    model.train()
    batch = text_batch(1, PACKED)
    whole = copy.deepcopy(model)
    loss = plain_loss(whole, batch)
    loss.backward()
    expected = {name: p.grad for name, p in whole.named_parameters()}
    copies = [copy.deepcopy(model) for _ in range(sp)]

    def body(rank: int, mesh: tessera.Mesh) -> dict[str, torch.Tensor | None]:
        if rank == 1:
            copies[rank].model.layers[1].register_forward_pre_hook(with_other_positions(0), with_kwargs=True)
        found = shared_loss(copies[rank], batch, register(copies[rank], mesh, parts=parts))
        torch.testing.assert_close(found, loss.detach(), rtol=1e-4, atol=1e-5)
        found.backward()
        return {name: p.grad for name, p in copies[rank].named_parameters()}

    ranks = run_mesh(body, sp=sp)
    mean = {n: None if g is None else sum(r[n] for r in ranks if r[n] is not None) / sp for n, g in expected.items()}
    assert_close(mean, expected)


def build(kind: str, heads: int, keys: int, **more: Any) -> nn.Module:
    options = llama(heads, keys).config.to_dict()
    for name in ("model_type", "architectures", "pad_token_id", "layer_types", "head_dim"):
        options.pop(name, None)
    if kind == "mixtral":
        more |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    made = transformers.AutoConfig.for_model(kind, **options | more, attn_implementation="sdpa")
    return transformers.AutoModelForCausalLM.from_config(made)


def test_eval_may_be_left_alone() -> None:
    model = llama().eval()
    batch = text_batch(0)
    expected = model(batch["input_ids"], position_ids=batch["position_ids"]).logits
    copies = [copy.deepcopy(model) for _ in range(2)]

    def body(rank: int, mesh: tessera.Mesh) -> None:
        register(copies[rank], mesh, disable_in_eval=True)
        torch.testing.assert_close(copies[rank](batch["input_ids"]).logits, expected)
        again = pickle.loads(pickle.dumps(copies[rank]))  # not registered
        torch.testing.assert_close(
            again.train()(**{k: batch[k] for k in ("input_ids", "position_ids")}).logits, expected
        )

    run_mesh(body, sp=2)


def test_no_mask_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part's mask means nothing, and would take memory by the square of its length."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    def body(rank: int, mesh: tessera.Mesh) -> None:
        model = llama()
        shared_loss(model, text_batch(0), register(model, mesh))

    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "sdpa", None)
    run_mesh(body, sp=2)


def with_other_positions(more: int) -> Any:
    return lambda layer, args, given: (args, given | {"position_ids": given["position_ids"] + more})


def wrong_call(case: str, rank: int, mesh: tessera.Mesh) -> None:
    model = llama()
    if case == "positions of a layer":
        model.model.layers[1].register_forward_pre_hook(with_other_positions(1), with_kwargs=True)
    options: dict[str, Any] = {}
    if case.startswith("fixed"):
        options = {"seq_length": LENGTH, "seq_length_is_variable": False}
    register(model, mesh, **options)
    tokens, length = text_batch(0)["input_ids"], LENGTH // 2
    if case == "lengths":
        length += rank
    elif case == "fixed length":
        length -= 1
    part, position_ids = tokens[:, :length], torch.arange(length)[None] + rank * length
    if case == "no positions":
        model(part)
    elif case == "cache":
        past = transformers.DynamicCache()
        past.update(torch.ones(BATCH, 8, 1, 8), torch.ones(BATCH, 8, 1, 8), 0)
        model(part, position_ids=position_ids, past_key_values=past, use_cache=True)
    elif case == "mask":
        model(part, position_ids=position_ids, attention_mask=(torch.arange(length) > 0).expand_as(part))
    elif case == "weights":
        model(part, position_ids=position_ids, output_attentions=True)
    elif case == "fixed batch":
        model(part[:1], position_ids=position_ids)
    else:
        model(part, position_ids=position_ids)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("no positions", "LlamaForCausalLM was called without position_ids; with sequence_parallel_size 2"),
        ("lengths", r"the 2 ranks have \[16, 17\] tokens of a sequence.*divisible by sequence_parallel_size"),
        ("fixed length", "15 tokens on each of 2 ranks, 30 together; seq_length is 32"),
        ("fixed batch", "a batch of 1; micro_batch_size is 2"),
        ("cache", r"from 16 tokens to 17: a cache \(use_cache=True\)"),
        ("mask", "attention_mask has zeros.*pad at the end"),
        ("weights", "output_attentions is not served"),
        ("positions of a layer", "layer 1 has other position_ids than the layer before: all layers of a forward"),
    ],
)
def test_wrong_calls(case: str, message: str) -> None:
    def body(rank: int, mesh: tessera.Mesh) -> None:
        with pytest.raises(ValueError, match=message):
            wrong_call(case, rank, mesh)

    run_mesh(body, sp=2)


class Holder:
    def __init__(self, **more: Any) -> None:
        self.config = llama(**more).config


def t5() -> nn.Module:
    return transformers.T5Model(
        transformers.T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=8)
    )


def bloom() -> nn.Module:
    return transformers.BloomModel(transformers.BloomConfig(vocab_size=8, hidden_size=8, n_layer=1, n_head=2))


def bert() -> nn.Module:
    small = {
        "vocab_size": 8,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
    }
    return transformers.BertModel(transformers.BertConfig(**small, attn_implementation="sdpa"))


def gpt_neox_less() -> nn.Module:
    """A model with layers that are no attention."""
    model = llama()
    model.config.layer_types = ["full_attention", "linear_attention"]
    return model


WRONG: dict[str, tuple[Any, str]] = {
    "eager": (lambda: (Holder(), "eager", 2), "core_attn_implementation 'eager' is not served"),
    "unknown": (lambda: (Holder(), "spda", 2), "'spda' is unknown or not served; use one of .*sdpa"),
    "mismatch": (
        lambda: (llama(implementation="eager"), "sdpa", 2),
        "core_attn_implementation 'sdpa' does not match model config attn_implementation 'eager'",
    ),
    "heads": (
        lambda: (Holder(heads=6, keys=6), "sdpa", 4),
        "6 attention heads with 6 key/value heads are not divisible by sequence_parallel_size 4.*; 2, 3, 6 would do",
    ),
    "keys": (lambda: (Holder(heads=12, keys=6), "sdpa", 4), "12 attention heads with 6 key/value heads are not divis"),
    "length": (lambda: (Holder(), "sdpa", 4, 2, 30), "seq_length 30 is not divisible by sequence_parallel_size 4"),
    "no length": (lambda: (Holder(), "sdpa", 4, 2, None, False), "so seq_length must be given"),
    "no config": (lambda: (nn.Linear(2, 2), "sdpa", 2), r"a model or what has a \.config, got Linear"),
    "encoder-decoder": (lambda: (t5(), "sdpa", 2), "does not match|'t5' is an encoder-decoder"),
    "own attention": (lambda: (bloom(), "sdpa", 2), "BloomModel|does not match"),
    "encoder": (lambda: (bert(), "sdpa", 2), "BertModel has no causal attention"),
    "other layers": (lambda: (gpt_neox_less(), "sdpa", 2), "'llama' has layers of type linear_attention"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_registrations(case: str) -> None:
    make, message = WRONG[case]
    model, implementation, size, *rest = make()
    with pytest.raises(ValueError, match=message):
        TransformersAttention.register_with_transformers(model, implementation, size, *(rest or [2]))


@pytest.mark.parametrize("registered", [False, True])
def test_attention_that_stays_local_is_named(registered: bool, caplog: pytest.LogCaptureFixture) -> None:
    def body(engine: tessera.Engine, rank: int) -> None:
        mesh = engine.core.mesh()
        if registered:  # after the engine is early enough
            register(engine.module, mesh)
        for _ in range(2):
            shared_loss(engine, text_batch(0), groups_of(mesh)).backward()

    engines(llama(), {"sp": 2}, config(0, sequence_parallel_size=2), body)
    told = [record.message for record in caplog.records if "attention of LlamaForCausalLM is local" in record.message]
    assert len(told) == (0 if registered else 1)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_ranks_that_share_sequences_and_exchange_nothing_are_named_once(
    stage: int, caplog: pytest.LogCaptureFixture
) -> None:
    def body(engine: tessera.Engine, rank: int) -> None:
        for _ in range(2):
            engine(torch.ones(2, 8)).sum().backward()
            engine.step()

    engines(torch.nn.Linear(8, 8), {"sp": 2}, config(stage, sequence_parallel_size=2), body)
    named = [record.message for record in caplog.records if "no attention of the model has exchanged" in record.message]
    assert len(named) == 1 and named[0].startswith("[engine.step] the mesh has 2 ranks along 'sp'")


def test_groups_of_another_size() -> None:
    def body(rank: int, mesh: tessera.Mesh) -> None:
        with pytest.raises(ValueError, match="sequence_parallel_size is 4, the groups have 2 ranks a sequence"):
            register(llama(), mesh, sequence_parallel_size=4)

    run_mesh(body, sp=2)


def test_one_rank_a_sequence_changes_nothing() -> None:
    assert TransformersAttention.register_with_transformers("no such model", "none", 1, 2) is None
