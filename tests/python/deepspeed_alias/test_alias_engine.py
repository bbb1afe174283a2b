"""deepspeed.initialize, its engine and its optimizers, as old callers expect them."""

from __future__ import annotations

import argparse
import base64
import gc
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from support import batch, config, losses_of, make
from torch import nn

import tessera


def start(stage: int = 0, **more: Any) -> Any:
    keywords = more.pop("keywords", {})
    return deepspeed.initialize(model=make(), config=config(stage, **more), **keywords)


def test_returns_an_engine_of_exactly_this_type() -> None:
    engine, optimizer, loader, schedule = start(2)
    assert type(engine) is deepspeed.DeepSpeedEngine
    assert optimizer is engine.optimizer and loader is None and schedule is None
    assert torch.distributed.is_initialized()
    assert {name.partition(".")[0] for name, _ in engine.named_parameters()} == {"module"}
    assert len(losses_of(engine)) == 2


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_config_is_the_users_own_dict(stage: int) -> None:
    given = {**config(stage, steps_per_print=float("inf")), "bf16": {"enabled": False}}
    engine, *_ = deepspeed.initialize(model=make(), config=given)
    assert engine.config is given
    assert engine.config.get("fp16") is None and engine.config.get("gradient_accumulation_stepz") is None
    assert engine.config.get("zero_optimization.stage") is None, "no path: a key of the dict"
    assert engine.config["zero_optimization"]["stage"] == stage
    assert engine.config.get("zero_optimization", {}).get("stage") == stage
    assert engine.config.get("not there") is None and engine.config.get("not there", 7) == 7
    assert engine.config.get("bf16") == {"enabled": False}
    assert engine.zero_optimization_stage() == stage and engine.steps_per_print() is None
    assert engine._config.zero_config.stage == stage
    assert engine._config.train_micro_batch_size_per_gpu == 4
    losses_of(engine)


FORMS = {
    "path": lambda text, folder: str(folder / "c.json"),
    "path object": lambda text, folder: folder / "c.json",
    "text": lambda text, folder: text,
    "base64": lambda text, folder: base64.urlsafe_b64encode(text.encode()).decode(),
}


@pytest.mark.parametrize("form", FORMS)
def test_config_is_what_a_file_or_text_holds(form: str, tmp_path: Path) -> None:
    text = """{ // a "comment", and # another
      "train_batch_size": 4, # micro: 4 /* not yet
      "optimizer": {"type": "SGD", "params": {"lr": 0.1,}}, /* several
      lines, */ "zero_optimization": {"stage": 2}, "of the user's own": "//, # /* \\" */,}",
      "steps_per_print": Infinity,
    }"""
    (tmp_path / "c.json").write_text(text)
    engine, *_ = deepspeed.initialize(model=make(), config=FORMS[form](text, tmp_path))
    assert engine.config == {
        "train_batch_size": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 2},
        "of the user's own": '//, # /* " */,}',
        "steps_per_print": float("inf"),
    }


def test_getters() -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 1}, "stage3_max_reuse_distance": 7}
    checks = {"tag_validation": "FAIL"}
    engine, *_ = start(zero_optimization=zero, optimizer={"type": "Adam"}, bf16={"enabled": True}, checkpoint=checks)
    assert engine.zero_cpu_offload() is engine.zero_use_cpu_optimizer() is True
    assert engine.zero_nvme_offload_optimizer() is False and engine.zero_partial_offload() == 1.0
    assert engine.zero_offload_optimizer().device == "cpu" and engine.zero_max_reuse_distance() == 7
    assert engine.checkpoint_tag_validation_enabled() and engine.checkpoint_tag_validation_fail()
    assert engine.get_data_types() == (torch.bfloat16, torch.bfloat16)
    assert engine.initial_dynamic_scale() == engine.dynamic_loss_scale_args()["init_scale"] == 2**16
    assert engine.torch_autocast_lower_precision_safe_modules()[0].endswith(".Linear")
    assert engine.tensor_parallel_config().autotp_size == 0 and engine.is_first_weights_partition_group()
    assert engine.param_names[engine.module.gain] == "gain" and engine.mpu is None
    assert engine.is_map_style_dataset([]) and not engine.is_iterable_style_dataset([])
    assert engine.bfloat16_enabled() and engine.zero_optimization() and engine.managed_gradient_accumulation()
    assert not (engine.fp16_enabled() or engine.dynamic_loss_scale() or engine.torch_autocast_enabled())
    assert engine.get_tensor_parallel_rank() == 0 and engine.autotp_size() == 0
    assert (
        engine.get_data_parallel_rank() == engine.get_sequence_parallel_rank() == engine.get_model_parallel_rank() == 0
    )
    assert engine.get_batch_info() == (4, 4, 1) and engine.mp_world_size == 1
    assert engine.get_mom() == [(0.9, 0.999)] and engine.get_global_grad_norm() is None
    assert not hasattr(engine, "sparse_allreduce")
    with pytest.raises(NotImplementedError, match=r"engine\.sparse_allreduce is not served.*no_sync"):
        engine.sparse_allreduce()
    engine, *_ = start(2)
    assert engine.zero_cpu_offload() is engine.zero_use_cpu_optimizer() is False


def test_names_of_what_was_configured_or_given() -> None:
    schedule = {"type": "WarmupLR", "params": {}}
    engine, *_ = start(1, optimizer={"type": "Lamb"}, scheduler=schedule, fp16={"enabled": True})
    assert (engine.optimizer_name(), engine.scheduler_name()) == ("Lamb", "WarmupLR")
    assert engine.fp16_enabled() and engine.dynamic_loss_scale() and engine.loss_scale() == 0
    model, cfg = make(), config(gradient_clipping=0.5)
    given = torch.optim.Adagrad([{"params": model.parameters(), "type": "all"}])
    plan = torch.optim.lr_scheduler.ConstantLR(given)
    engine, *_ = deepspeed.initialize(model=model, config=cfg, optimizer=given, lr_scheduler=plan)
    assert (engine.optimizer_name(), engine.scheduler_name()) == ("Adagrad", "ConstantLR")
    assert engine.get_type() == ["all"] and engine.gradient_clipping() == 0.5 and not engine.zero_optimization()


def test_names_fall_through_to_the_module() -> None:
    class Model(nn.Linear):
        id = 11

        def __init__(self) -> None:
            super().__init__(5, 3)
            self.settings = {"a": 1}

        def generate(self) -> str:
            return "generated"

    engine, *_ = deepspeed.initialize(model=Model(), config=config())
    assert (engine.id, engine.settings, engine.generate()) == (11, {"a": 1}, "generated")
    assert engine.in_features == 5
    with pytest.raises(AttributeError, match="nothing_such"):
        engine.nothing_such  # noqa: B018


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_no_sync(stage: int) -> None:
    engine, *_ = start(stage)
    if stage >= 2:
        with pytest.raises(AssertionError, match="no_sync context manager is incompatible"), engine.no_sync():
            pass
        return
    with engine.no_sync():
        engine.backward(engine(*batch(0)))
        with pytest.raises(AssertionError, match="no_sync context manager reentry is unsupported"), engine.no_sync():
            pass
        with pytest.raises(AssertionError, match=r"illegal to call Engine\.step"):
            engine.step()
    with engine.no_sync():  # the refusals left nothing behind
        pass


@pytest.mark.parametrize("stage", [0, 1])
def test_reductions_are_coalesced_with_zero(stage: int) -> None:
    engine, *_ = start(stage)
    if stage == 0:
        with pytest.raises(NotImplementedError, match="requires ZeRO stage"), engine.coalesce_grad_reduction():
            pass
        return
    with engine.coalesce_grad_reduction():
        engine.backward(engine(*batch(0)))
    engine.step()
    assert engine.global_steps == 1


def test_what_callers_assign() -> None:
    engine, *_ = start(1)
    losses_of(engine, count=1)
    engine.global_steps, engine.skipped_steps, engine.global_samples = 7, 2, 99
    engine.micro_steps += 4
    losses_of(engine, count=1)
    counters = (engine.micro_steps, engine.global_steps, engine.skipped_steps, engine.global_samples)
    assert counters == (6, 8, 2, 103)
    engine.communication_data_type = torch.float32
    with pytest.raises(NotImplementedError, match="communication_data_type"):
        engine.communication_data_type = torch.bfloat16


def test_errors_of_arguments_are_assertions() -> None:
    with pytest.raises(AssertionError, match="model is required"):
        deepspeed.initialize(config=config())
    args = argparse.Namespace(deepspeed_config="a.json")
    with pytest.raises(AssertionError, match="both config"):
        deepspeed.initialize(args=args, model=make(), config=config())
    with pytest.raises(AssertionError, match="two names"):
        deepspeed.initialize(model=make(), config=config(), config_params=config())
    with pytest.raises(AssertionError, match=r"args\.local_rank must be an integer"):
        deepspeed.initialize(args=argparse.Namespace(local_rank="0"), model=make(), config=config())
    with pytest.raises(AssertionError, match="mesh_param asks for 2 data-parallel"):
        deepspeed.initialize(model=make(), config=config(), mesh_param=(2, 1))
    with pytest.raises(AssertionError, match="no configuration"):
        deepspeed.initialize(model=make())
    with pytest.raises(AssertionError, match="requires an optimizer"):
        deepspeed.initialize(model=make(), config={"train_batch_size": 4, "zero_optimization": {"stage": 1}})
    with pytest.raises(AssertionError, match="scalar tensor"):
        start()[0].backward(torch.ones(3))


def test_forms_of_arguments(tmp_path: Path) -> None:
    engine, *_ = deepspeed.initialize(args={"local_rank": 0}, model=make(), config_params=config(), mpu=None)
    losses_of(engine)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config(1)))
    for args in (argparse.Namespace(deepspeed_config=str(path), local_rank=0), {"deepspeed_config": str(path)}):
        assert deepspeed.initialize(args, make())[0].zero_optimization_stage() == 1
    without = {key: value for key, value in config(3).items() if key != "optimizer"}
    engine, optimizer, *_ = deepspeed.initialize(
        args=argparse.Namespace(device_rank=0), model=make(), config=without, model_parameters=[], optimizer=None
    )
    assert optimizer is None
    engine.eval()
    assert engine(*batch(0)).requires_grad
    model = make()
    engine, optimizer, *_, schedule = deepspeed.initialize(
        model=model,
        config=without,
        model_parameters=filter(lambda p: p.requires_grad, model.parameters()),
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=0.1),
        lr_scheduler=lambda base: torch.optim.lr_scheduler.LambdaLR(base, lambda step: 1 / (1 + step)),
    )
    losses_of(engine, count=1)
    assert schedule.get_last_lr() == [0.05]


CLASSES = [
    (1, {}, "deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer"),
    (2, {"bf16": {"enabled": True}}, "deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer"),
    (3, {}, "deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3"),
    (0, {"bf16": {"enabled": True}}, "deepspeed.runtime.bf16_optimizer", "BF16_Optimizer"),
    (0, {"fp16": {"enabled": True}}, "deepspeed.runtime.fp16.unfused_optimizer", "FP16_UnfusedOptimizer"),
    (
        0,
        {"fp16": {"enabled": True}, "optimizer": {"type": "Adam"}},
        "deepspeed.runtime.fp16.fused_optimizer",
        "FP16_Optimizer",
    ),
]


@pytest.mark.parametrize(("stage", "more", "module", "name"), CLASSES)
def test_class_of_the_optimizer_says_the_stage(stage: int, more: Any, module: str, name: str) -> None:
    import importlib

    engine, optimizer, *_ = start(stage, **more)
    assert isinstance(optimizer, getattr(importlib.import_module(module), name))
    assert isinstance(optimizer, deepspeed.runtime.base_optimizer.DeepSpeedOptimizer)
    assert isinstance(optimizer.optimizer, deepspeed.ops.adam.FusedAdam if "optimizer" in more else torch.optim.SGD)
    assert optimizer.clip_grad == 0 and getattr(optimizer, "cpu_offload", False) is False
    if name == "FP16_UnfusedOptimizer":
        assert [p.shape for p in optimizer.fp32_groups[0]] == [p.shape for p in optimizer.param_groups[0]["params"]]
    if stage > 0:
        numbers = [optimizer.get_param_id(p) for p in engine.module.parameters()]
        assert sorted(numbers) == list(range(len(numbers))) and optimizer.partition_gradients is (stage >= 2)
    assert optimizer.overflow is False and optimizer.loss_scale >= 1
    flat = {
        1: "single_partition_of_fp32_groups",
        2: "single_partition_of_fp32_groups",
        3: "fp32_partitioned_groups_flat",
    }
    parts = getattr(optimizer, flat.get(stage, "fp32_groups_flat"))
    assert all(part.dtype is torch.float32 for part in parts)
    assert sum(part.numel() for part in parts) == sum(p.numel() for p in engine.module.parameters())
    engine.backward(engine(*batch(0)))
    optimizer.step()  # a complete step
    assert engine.global_steps == 1


def test_stage_0_in_fp32_gives_the_clients_own_optimizer() -> None:
    model = make()
    client = torch.optim.Adam(model.parameters())
    assert deepspeed.initialize(model=model, optimizer=client, config=config())[1] is client


OPTIMIZERS = {
    "adam.FusedAdam": {"adam_w_mode": False, "set_grad_none": True},
    "adam.DeepSpeedCPUAdam": {"adamw_mode": True, "fp32_optimizer_states": True},
    "adagrad.DeepSpeedCPUAdagrad": {},
    "lion.FusedLion": {},
    "lion.DeepSpeedCPULion": {},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("stage", [0, 2])
def test_optimizers_by_their_old_names_run_natively(name: str, stage: int) -> None:
    import importlib

    module, _, cls = name.partition(".")
    found = getattr(importlib.import_module(f"deepspeed.ops.{module}"), cls)
    model = make()
    client = found(model.parameters(), lr=1e-2, **OPTIMIZERS[name])
    engine, *_ = deepspeed.initialize(model=model, optimizer=client, config=config(stage))
    assert engine.core.options().rule.name != "External"
    first, *_, last = losses_of(engine, count=4)
    assert engine.global_steps == 4 and first != last


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if "CPU" in name])
def test_optimizers_of_the_cpu_without_an_engine(name: str) -> None:
    import importlib

    module, _, cls = name.partition(".")
    found = getattr(importlib.import_module(f"deepspeed.ops.{module}"), cls)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        param = nn.Parameter(torch.ones(5, dtype=dtype))
        optimizer = found(model_params=[param], lr=1e-2, weight_decay=0.01)
        param.grad = torch.ones_like(param)
        optimizer.step()
        torch.testing.assert_close(param.detach().float(), torch.full((5,), 0.99), rtol=0, atol=5e-3)
        assert all(value.dtype is torch.float32 for value in optimizer.state[param].values())
        optimizer = found([param], fp32_optimizer_states=False) if dtype is not torch.float16 else optimizer
        optimizer.step()
        moments = [value for key, value in optimizer.state[param].items() if key != "step"]
        assert {value.dtype for value in moments} == {torch.float32 if dtype is torch.float16 else dtype}
    away = nn.Parameter(torch.ones(2, device="meta"))
    optimizer = found([away])
    away.grad = torch.ones_like(away)
    with pytest.raises(AssertionError, match="is on meta"):
        optimizer.step()
    with pytest.raises(NotImplementedError, match="fp32_optimizer_states"):
        found([param], fp32_optimizer_states=False).step()


def test_members_that_programs_read() -> None:
    engine, optimizer, *_ = start(3, accumulation=2)
    assert engine._is_gradient_accumulation_boundary is engine.is_gradient_accumulation_boundary() is False
    engine.set_gradient_accumulation_boundary(is_boundary=True)
    assert engine._is_gradient_accumulation_boundary
    losses_of(engine, count=1)
    assert engine.global_steps == 1 and engine._global_grad_norm > 0
    engine._backward_epilogue()
    engine.empty_partition_cache()
    state = engine._zero3_consolidated_16bit_state_dict()
    assert state is not None and state.keys() == engine.module.state_dict().keys()
    assert engine._get_zero_param_shapes()[0]["gain"] == (1,)
    assert optimizer.leaf_parameters == {} and optimizer.parameter_offload.module is engine.module
    engine.lr_scheduler = None
    assert engine.amp_enabled() is engine.pld_enabled() is False
    assert "DeepSpeedEngine" in type(engine).__name__ and engine.device.type == "cpu"


def test_throughput_is_counted() -> None:
    engine, *_ = start()
    losses_of(engine, count=4)
    assert engine.tput_timer.global_step_count == 4 and engine.tput_timer.avg_samples_per_sec() > 0


def test_save_16bit_model_without_the_key_saves_nothing(tmp_path: Path) -> None:
    engine, *_ = start(3)
    assert engine.save_16bit_model(str(tmp_path)) is False and not list(tmp_path.iterdir())
    engine, *_ = start(2)
    assert engine.save_fp16_model(str(tmp_path), "weights.bin") is True
    assert torch.load(tmp_path / "weights.bin").keys() == engine.module.state_dict().keys()


def test_checkpoints_and_fp32_weights(tmp_path: Path) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    engine, *_ = start(2)
    losses_of(engine)
    engine.save_checkpoint(tmp_path, client_state={"any": Path("object")})
    assert (tmp_path / "latest").read_text() == "global_step2"
    assert {entry.name for entry in tmp_path.iterdir()} == {"global_step2", "latest", "zero_to_fp32.py"}
    assert os.access(tmp_path / "zero_to_fp32.py", os.X_OK)
    command = [sys.executable, "zero_to_fp32.py", ".", "out"]
    subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, check=True)
    written = torch.load(tmp_path / "out" / "pytorch_model.bin")
    assert all(torch.equal(written[name], value) for name, value in engine.module.state_dict().items())
    again, *_ = start(2)
    path, client = again.load_checkpoint(str(tmp_path))
    assert path is not None and client == {"any": Path("object")}
    assert losses_of(again) == losses_of(engine)
    fp32 = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    assert fp32.keys() == engine.module.state_dict().keys()
    from deepspeed.checkpoint import ds_to_universal

    engine.save_checkpoint(tmp_path, tag="global_step2")  # objects are not carried over
    latest = tmp_path / "latest_universal"
    latest.write_text("former")
    with latest.open() as opened:  # who reads it meanwhile has it whole
        ds_to_universal.main(["--input_folder", f"{tmp_path}/global_step2", "--output_folder", f"{tmp_path}/new"])
        assert opened.read() == "former"
    assert not (tmp_path / "global_step2_universal").exists()
    assert latest.read_text() == "new" and (tmp_path / "new" / "zero" / "gain").is_dir()
    with pytest.raises(ValueError, match="latest"):
        get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "global_step2"))
    with pytest.raises(FileNotFoundError):
        get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "nowhere"))


def test_destroy_twice_and_another_engine_on_the_same_module() -> None:
    model = make()
    for stage in (3, 1, 2):
        engine, *_ = deepspeed.initialize(model=model, config=config(stage))
        losses_of(engine)
        engine.destroy()
        engine.destroy()
    assert type(next(model.parameters())) is nn.Parameter
    del engine
    gc.collect()


def test_groups_are_those_of_the_engine_built_last() -> None:
    from deepspeed.utils import groups

    engine, *_ = start(1)
    assert groups._get_data_parallel_world_size() == 1 and groups._get_sequence_parallel_rank() == 0
    assert engine.data_parallel_group is torch.distributed.group.WORLD
    engine.destroy()
    assert groups._get_data_parallel_rank() == 0


def test_nothing_leaks_into_tessera() -> None:
    assert not hasattr(tessera.Engine, "_backward_epilogue")
    engine = tessera.Engine(make(), config(3))
    assert not any(hasattr(p, "ds_id") for p in engine.parameters())
    assert isinstance(engine.config, tessera.Config)
    with pytest.raises(AttributeError):
        engine.embed  # noqa: B018


def test_is_a_module_that_has_an_engine() -> None:
    engine, *_ = start(3)
    module, plain = engine.module, make()
    assert isinstance(engine, nn.Module) and not isinstance(engine, tessera.Engine) and "get_lr" in dir(engine)
    assert engine.state_dict().keys() == {f"module.{name}" for name in plain.state_dict()}
    engine.eval()
    assert not (engine.training or module.training)
    engine.train()
    assert engine.training and module.training
    seen: list[Any] = []
    engine.register_forward_hook(lambda hooked, *_: seen.append(hooked))
    engine.backward(engine(*batch(0)))
    tessera.step_together(engine)
    engine.zero_grad()
    assert seen == [engine] and engine.global_steps == 1
    engine.steps_of_mine, engine.collate_fn, engine.lr_scheduler = 7, len, None
    assert engine.steps_of_mine == 7 and engine.lr_scheduler is None
    assert next(iter(engine.deepspeed_io([torch.ones(1)] * 8, batch_size=2))) == 2
    gone = weakref.ref(engine)
    seen.clear()
    del engine
    assert gone() is None and {type(param) for param in module.parameters()} == {nn.Parameter}
    losses_of(deepspeed.initialize(model=module, config=config(3))[0])


def test_a_load_from_nothing_is_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="no file 'latest' in .*nothing is loaded"):
        assert start()[0].load_checkpoint(str(tmp_path)) == (None, None)
