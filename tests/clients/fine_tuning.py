"""PEFT's adapters and TRL's SFTTrainer over the Trainer, beside the same without DeepSpeed; TRL's generation inside a
model of stage 3 and its frozen reference model."""

from __future__ import annotations

import functools
import os
from typing import Any

import datasets
import peft
import tokenizers
import torch
import transformers
import trl
from accelerate.state import PartialState
from common import ROWS, STEPS, VOCABULARY, assert_equal, assert_losses, llama, mixture, rows, run, shared_folder, whole
from trainer import arguments, config, losses, trainer, without
from trl.models.utils import prepare_deepspeed, unwrap_model_for_generation


def lora() -> peft.LoraConfig:
    return peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


# PEFT's ways to take hold of a model that differ in kind: a layer around one, a weight that is another one while its
# module runs, layers that are copies of each other, a penalty on parameters outside of the modules that own them.
ADAPTERS: dict[str, dict[str, Any]] = {
    "LoRA": {"target_modules": ["q_proj", "v_proj"]},
    "packed experts": {
        "target_modules": ["q_proj"],
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
    },
    "replicated layers": {"target_modules": ["q_proj", "v_proj"], "layer_replication": [[0, 2], [1, 2]]},
    "AdaLoRA": {"target_modules": ["q_proj", "v_proj"], "init_r": 6, "target_r": 4, "total_step": 100},
}


def adapted(kind: str, stage: int = 0) -> Any:
    """In stage 3 the model was partitioned as it was built."""
    import deepspeed

    with deepspeed.zero.Init(dtype=torch.float32, enabled=stage == 3):
        model = mixture() if kind == "packed experts" else llama()
    torch.manual_seed(3)
    make = peft.AdaLoraConfig if kind == "AdaLoRA" else functools.partial(peft.LoraConfig, r=4)
    return peft.get_peft_model(model, make(lora_alpha=8, task_type="CAUSAL_LM", **ADAPTERS[kind]))


def chosen(stage: int) -> dict[str, Any]:
    return without(config(stage), "scheduler", "optimizer")


@functools.cache
def plain_lora(kind: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    made = trainer(arguments("plain-lora", None), adapted(kind))
    made.train()
    model = made.accelerator.unwrap_model(made.model)
    return losses(made), {name: p.detach().clone() for name, p in model.named_parameters()}


def trains_lora(kind: str, stage: int) -> None:
    expected, weights = plain_lora(kind)
    args = arguments(f"lora{stage}", chosen(stage))
    made = trainer(args, adapted(kind, stage))
    made.train()
    assert_losses(losses(made), expected, 1e-4)
    assert_equal(whole(made.model), weights, 1e-4)
    if kind != "LoRA":
        return
    made.save_model()
    place = os.path.join(shared_folder(), f"lora{stage}")
    PartialState().wait_for_everyone()
    again = peft.PeftModel.from_pretrained(llama(), place)
    weights = {name: value for name, value in whole(made.model).items() if "lora_" in name}
    assert_equal({name: p.detach() for name, p in again.named_parameters() if "lora_" in name}, weights, 0)


def tokenizer() -> Any:
    words = {f"w{number}": number for number in range(VOCABULARY)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w3"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="w0", bos_token="w1", eos_token="w2")


def sft(folder: str, deepspeed: dict[str, Any] | None, model: Any, **more: Any) -> Any:
    base = arguments(folder, deepspeed)  # readies the states of accelerate
    options = {"output_dir": base.output_dir, "per_device_train_batch_size": ROWS, "gradient_accumulation_steps": 2}
    options |= {"max_steps": STEPS, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "logging_steps": 1}
    options |= {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "seed": 7, "max_length": 16}
    options |= {"accelerator_config": {"use_configured_state": True}, "bf16": False, "gradient_checkpointing": False}
    options |= {"use_cpu": True} if deepspeed is None else {"deepspeed": deepspeed}
    data = datasets.Dataset.from_dict({"input_ids": rows(32).tolist()})
    args = trl.SFTConfig(**options)
    return trl.SFTTrainer(model=model, args=args, train_dataset=data, processing_class=tokenizer(), **more)


@functools.cache
def plain_sft() -> list[float]:
    made = sft("plain-sft", None, llama())
    made.train()
    return losses(made)


def trains_sft(stage: int, adapter: bool) -> None:
    if adapter:
        made = sft(f"sft-lora{stage}", chosen(stage), llama(), peft_config=lora())
        made.train()
        assert len(losses(made)) == STEPS and losses(made)[0] > 0
        return
    expected = plain_sft()
    made = sft(f"sft{stage}", chosen(stage), llama())
    made.train()
    assert_losses(losses(made), expected, 1e-4)


def generates() -> None:
    """Inside TRL's unwrap_model_for_generation, then a step; a frozen reference model of its own engine beside it."""
    made = trainer(arguments("generate", chosen(3)))
    made.train()
    reference = prepare_deepspeed(llama(), made.accelerator)
    ids = torch.full((1, 4), 5)
    with torch.no_grad():
        logits = reference(input_ids=ids).logits
        torch.testing.assert_close(logits, llama().eval()(input_ids=ids).logits, rtol=1e-5, atol=1e-5)
    before = whole(made.model)
    with unwrap_model_for_generation(made.model_wrapped, made.accelerator) as model, torch.no_grad():
        assert model.generate(ids, max_new_tokens=2).shape[1] > 4
    loss = made.model_wrapped(input_ids=ids, labels=ids).loss
    made.model_wrapped.set_gradient_accumulation_boundary(True)
    made.model_wrapped.backward(loss)
    made.model_wrapped.step()
    assert any(not torch.equal(value, before[name]) for name, value in whole(made.model).items())
    reference.destroy()


def main() -> None:
    paths: dict[str, Any] = {}
    for stage in (0, 1):
        paths[f"packed experts, stage {stage}"] = functools.partial(trains_lora, "packed experts", stage)
    for stage in (2, 3):
        for kind in ADAPTERS:
            paths[f"{kind}, stage {stage}"] = functools.partial(trains_lora, kind, stage)
        paths[f"SFTTrainer, stage {stage}"] = functools.partial(trains_sft, stage, False)
    paths["SFTTrainer with LoRA, stage 3"] = functools.partial(trains_sft, 3, True)
    paths["generation and a reference model, stage 3"] = generates
    run(paths)


if __name__ == "__main__":
    main()
