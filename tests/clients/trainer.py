"""transformers.Trainer with deepspeed=: what it trains, saves and resumes, beside the same Trainer without."""

from __future__ import annotations

import functools
import glob
import os
from typing import Any

import torch
import transformers
from accelerate.state import AcceleratorState, PartialState
from common import LENGTH, ROWS, STEPS, Rows, assert_equal, assert_losses, llama, run, shared_folder, whole, world
from transformers.integrations.deepspeed import unset_hf_deepspeed_config


def config(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
        },
        **more,
    }


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}


def arguments(folder: str, deepspeed: dict[str, Any] | None, **more: Any) -> transformers.TrainingArguments:
    AcceleratorState._reset_state(True)
    unset_hf_deepspeed_config()
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "false" if deepspeed is None else "true"
    PartialState(backend="gloo", cpu=deepspeed is None)
    options: dict[str, Any] = {
        "output_dir": os.path.join(shared_folder(), folder),
        "per_device_train_batch_size": ROWS,
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": 7,
        "accelerator_config": {"use_configured_state": True},
    }
    if deepspeed is None:
        options["use_cpu"] = True
    else:
        options["deepspeed"] = deepspeed
    return transformers.TrainingArguments(**{**options, **more})


def trainer(args: transformers.TrainingArguments, model: Any = None, **more: Any) -> transformers.Trainer:
    return transformers.Trainer(
        model=llama() if model is None else model, args=args, train_dataset=Rows(32), eval_dataset=Rows(8, 1), **more
    )


def losses(of: transformers.Trainer) -> list[float]:
    return [entry["loss"] for entry in of.state.log_history if "loss" in entry]


@functools.cache
def plain(scheduler: str = "constant") -> tuple[list[float], dict[str, torch.Tensor], float]:
    made = trainer(arguments("plain", None, lr_scheduler_type=scheduler))
    made.train()
    weights = {name: p.detach().clone() for name, p in made.accelerator.unwrap_model(made.model).named_parameters()}
    return losses(made), weights, made.evaluate()["eval_loss"]


def trains_as_plain(stage: int, own: bool) -> None:
    """`own`: with the Trainer's own optimizer and schedule, where the configuration has none."""
    expected, weights, evaluation = plain()
    chosen = config(stage)
    made = trainer(arguments(f"stage{stage}", without(chosen, "scheduler", *(["optimizer"] if own else []))))
    made.train()
    assert type(made.deepspeed).__name__ == "DeepSpeedEngine"
    assert_losses(losses(made), expected, 1e-4)
    assert_equal(whole(made.model), weights, 1e-4)
    assert_losses([made.evaluate()["eval_loss"]], [evaluation], 1e-4)


def resumes(stage: int) -> None:
    """Bit for bit what a run without the break has."""
    folder = f"resume{stage}"
    chosen = without(config(stage), "optimizer", "scheduler")
    options = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "linear"}
    first = trainer(arguments(folder, chosen, **options))
    first.train()
    state, weights = first.state, whole(first.model)
    again = trainer(arguments(folder, chosen, **options))
    again.train(resume_from_checkpoint=os.path.join(shared_folder(), folder, "checkpoint-2"))
    assert losses(again) == losses(first), (losses(again), losses(first))
    assert again.state.global_step == state.global_step
    for name, value in whole(again.model).items():
        assert torch.equal(value, weights[name]), name


def saved_weights(stage: int) -> None:
    """save_model, for from_pretrained without an engine; save_only_model; the best model at the end."""
    folder = f"saved{stage}"
    options = {
        "save_strategy": "steps",
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_only_model": stage < 3,
        "load_best_model_at_end": stage >= 3,
        "metric_for_best_model": "loss",
    }
    made = trainer(arguments(folder, without(config(stage), "scheduler", "optimizer"), **options))
    made.train()
    made.save_model()
    made.accelerator.wait_for_everyone()  # only rank 0 writes
    weights = whole(made.model)
    place = os.path.join(shared_folder(), folder)
    if stage < 3:
        assert not glob.glob(os.path.join(place, "checkpoint-2", "global_step*"))
    unset_hf_deepspeed_config()
    read = transformers.LlamaForCausalLM.from_pretrained(place)
    assert_equal({name: p.detach() for name, p in read.named_parameters()}, weights, 0)


def from_pretrained() -> None:
    """Under ZeRO-3, with HfDeepSpeedConfig: loaded, resized, with checkpointed activations, trained."""
    place = os.path.join(shared_folder(), "pretrained")
    source = llama(tie_word_embeddings=True)
    source.save_pretrained(place)
    if world() > 1:
        torch.distributed.barrier()
    args = arguments("from", without(config(3), "scheduler"), gradient_checkpointing=True)
    model = transformers.LlamaForCausalLM.from_pretrained(place)
    partitioned = [p for p in model.parameters() if hasattr(p, "ds_id")]
    assert partitioned, "from_pretrained did not use zero.Init"
    assert_equal(whole(model), {name: p.detach() for name, p in source.named_parameters()}, 0)
    if world() > 1:
        assert all(p.shape == (0,) and p.ds_numel > 0 for p in partitioned)
    model.resize_token_embeddings(80)
    assert model.get_input_embeddings().weight.shape == (
        80,
        32,
    )  # built outside of zero.Init: whole until there is an engine
    made = trainer(args, model)
    made.train()
    assert len(losses(made)) == STEPS
    assert whole(made.model)["model.embed_tokens.weight"].shape == (80, 32)
    with torch.no_grad():
        ids = torch.full((1, LENGTH), 5)
        assert made.model.generate(ids, max_new_tokens=3, synced_gpus=world() > 1).shape[1] <= LENGTH + 3


def fp16_skips() -> None:
    """A first step whose scaled gradients overflow is skipped; the scale falls."""
    chosen = without(config(2, fp16={"enabled": True, "initial_scale_power": 40}), "scheduler")
    made = trainer(arguments("fp16", chosen, fp16=True, max_steps=2))
    made.train()
    assert made.deepspeed.skipped_steps == 2
    assert made.deepspeed.optimizer.cur_scale < 2**40


def main() -> None:
    paths = {}
    for stage in (0, 1, 2, 3):
        paths[f"trains as plain, stage {stage}"] = functools.partial(trains_as_plain, stage, stage % 2 == 0)
    for stage in (1, 3):
        paths[f"resumes, stage {stage}"] = functools.partial(resumes, stage)
    for stage in (2, 3):
        paths[f"saved weights, stage {stage}"] = functools.partial(saved_weights, stage)
    paths["from_pretrained under ZeRO-3"] = from_pretrained
    paths["fp16 skips"] = fp16_skips
    run(paths)


if __name__ == "__main__":
    main()
