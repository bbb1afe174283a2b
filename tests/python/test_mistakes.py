"""What a user does wrong, and what the message says: one table of calls, one of commands."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support import config, engines, free_port
from tessera.errors import ConfigError, IoError, UsageError
from torch import nn
from torch.distributed import DistBackendError

import tessera
from tessera import cli

BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True}}


def build(model: nn.Module | None = None, **more: Any) -> tessera.Engine:
    return tessera.initialize(model=model or nn.Linear(4, 4), config=config(**more))[0]


def forward(*args: Any, precision: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    return build(**(precision or {}))(*args, **kwargs)


def frozen(stage: int) -> tessera.Engine:
    return build(nn.Linear(4, 4).requires_grad_(False), stage=stage)


def load(folder: Path, **more: Any) -> Any:
    return build().load_checkpoint(folder, **more)


def load_other_shapes(folder: Path) -> None:
    adam = {"optimizer": {"type": "AdamW", "params": {}}}
    build(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)), **adam).save_checkpoint(folder)
    build(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)), **adam).load_checkpoint(folder)


class Counted(nn.Module):
    """With buffers of this size."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.net = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(size))
        self.register_buffer("kept", torch.zeros(2, size))


def load_other_buffers(folder: Path) -> None:
    build(Counted(2)).save_checkpoint(folder)
    build(Counted(3)).load_checkpoint(folder)


def load_one_checkpoint(folder: Path) -> None:
    build().save_checkpoint(folder, tag="a")
    load(folder / "a")


def load_a_file(folder: Path) -> None:
    (folder / "model.pt").write_text("weights")
    load(folder / "model.pt")


def read_broken(folder: Path) -> None:
    (folder / "config.json").write_text('{"bf16": ')
    tessera.initialize(model=nn.Linear(4, 4), config=str(folder / "config.json"))


def gather(params: Any) -> None:
    with tessera.zero.GatheredParameters(params):
        pass


def typed(kind: str, **params: Any) -> dict[str, Any]:
    return {"type": kind, "params": params}


@dataclass(frozen=True)
class Mistake:
    """A call that raises `kind`, whose text begins with the origin, or has it in the line that Tessera adds, and
    names `names`. `call` gets a folder."""

    name: str
    call: Callable[[Path], Any]
    kind: type[Exception]
    origin: str
    names: tuple[str, ...]


def in_ddp(model: nn.Module) -> nn.Module:
    tessera.init_distributed()
    return nn.parallel.DistributedDataParallel(model)


in_ddp.__name__ = "DistributedDataParallel"


@pytest.fixture(autouse=True)
def no_group_stays() -> Iterator[None]:
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def near(section: str, misspelt: str, meant: str, **more: Any) -> Mistake:
    path = f"{section}.{misspelt}" if section else misspelt
    names = (f"{path}: unknown ", f'did you mean "{meant}"')
    return Mistake(f"near miss: {path}", lambda _: build(**more), ConfigError, "config", names)


MISTAKES = [
    near("", "gradient_acumulation_steps", "gradient_accumulation_steps", gradient_acumulation_steps=2),
    near("", "zero_optimisation", "zero_optimization", zero_optimisation={"stage": 2}),
    near("", "tesera", "tessera", tesera={}),
    near("zero_optimization", "stge", "stage", zero={"stge": 2}),
    near("zero_optimization.offload_optimizer", "devce", "device", zero={"offload_optimizer": {"devce": "cpu"}}),
    near("zero_optimization.leaf_module", "clases", "classes", zero={"leaf_module": {"clases": ["x"]}}),
    near("optimizer", "typ", "type", optimizer={"typ": "AdamW", "params": {}}),
    near("optimizer.params", "wieght_decay", "weight_decay", optimizer=typed("AdamW", wieght_decay=1)),
    near("scheduler", "parms", "params", scheduler={"type": "WarmupLR", "parms": {}}),
    near("scheduler.params", "warmup_num_step", "warmup_num_steps", scheduler=typed("WarmupLR", warmup_num_step=2)),
    near("fp16", "enabeld", "enabled", fp16={"enabeld": True}),
    near("tessera", "sedd", "seed", tessera={"sedd": 2}),
    near("tensor_parallel.partition_config", "layer_spec", "layer_specs",
         tensor_parallel={"autotp_size": 1, "partition_config": {"layer_spec": []}}),
    near("tensor_parallel.partition_config.layer_specs[0]", "pattern", "patterns",
         tensor_parallel={"partition_config": {"layer_specs": [{"pattern": ["a"]}]}}),
    Mistake("batch sizes that do not fit", lambda _: build(accumulation=2, train_batch_size=7), ConfigError, "config",
            ("train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps", "7 = 4 * 2 * 1")),
    Mistake("no batch size", lambda _: build(train_micro_batch_size_per_gpu=None, gradient_accumulation_steps=None),
            ConfigError, "config", ("give train_batch_size or train_micro_batch_size_per_gpu",)),
    Mistake("an optimizer misspelt", lambda _: build(optimizer=typed("AdmaW")), ConfigError, "config",
            ("'AdmaW'", "Adam, AdamW, SGD", "Lamb", "Muon", "torch.optim", "did you mean AdamW?")),
    Mistake("an optimizer misspelt, sharded", lambda _: build(stage=2, optimizer=typed("AdmaW")), ConfigError, "config",
            ("optimizer.type: AdmaW", 'did you mean "AdamW"', "zero_allow_untested_optimizer")),
    Mistake("an unknown optimizer", lambda _: build(optimizer=typed("Sophia")), ConfigError, "config",
            ("'Sophia'", "Adam, AdamW, SGD", "torch.optim")),
    Mistake("a schedule misspelt", lambda _: build(scheduler=typed("WarmupLRR")), ConfigError, "config",
            ("'WarmupLRR'", "WarmupDecayLR", "OneCycle", "torch.optim.lr_scheduler", "did you mean WarmupLR?")),
    Mistake("fp32 inputs of bf16", lambda _: forward(torch.ones(2, 4), precision=BF16), RuntimeError, "engine.forward",
            ("same dtype", "the engine has torch.bfloat16 on cpu", "input [0] is torch.float32 on cpu",
             "tessera.cast_inputs(engine", "engine.cast_forward_inputs = True")),
    Mistake("fp32 inputs of an LSTM in bf16", lambda _: build(nn.LSTM(4, 4), **BF16)(torch.ones(2, 4)), ValueError,
            "engine.forward", ("torch.bfloat16 on cpu", "input [0] is torch.float32 on cpu")),
    Mistake("fp32 inputs of fp16", lambda _: forward(input=torch.ones(2, 4), precision=FP16), RuntimeError,
            "engine.forward", ("torch.float16 on cpu", "input ['input'] is torch.float32", "fp16.auto_cast")),
    Mistake("fp64 inputs of fp32", lambda _: forward(torch.ones(2, 4, dtype=torch.float64)), RuntimeError,
            "engine.forward", ("the engine has torch.float32", "input [0] is torch.float64")),
    Mistake("inputs on another device", lambda _: forward(torch.ones(2, 4, device="meta")), RuntimeError,
            "engine.forward", ("on cpu; input [0] is torch.float32 on meta", ".to(engine.device)")),
    Mistake("a load from no folder", lambda folder: load(folder / "none"), IoError, "engine.load_checkpoint",
            ("there is no folder '", "/none'", "missing_ok=True")),
    Mistake("a load from an empty folder", load, IoError, "engine.load_checkpoint", ("'latest'", "missing_ok=True")),
    Mistake("a load of no tag", lambda folder: load(folder, tag="b", missing_ok=True), IoError, "checkpoint",
            ("no complete checkpoint 'b'",)),
    Mistake("a load of one checkpoint", load_one_checkpoint, IoError, "engine.load_checkpoint",
            ("/a' is one checkpoint; give the folder around it, '", "with the tag 'a'")),
    Mistake("a load of a file", load_a_file, IoError, "engine.load_checkpoint",
            ("model.pt' is a file; give the folder that save_checkpoint() was called with",)),
    Mistake("a load of other buffers", load_other_buffers, ConfigError, "engine.load_checkpoint",
            ("do not fit this model:\n", "\n  'seen' has shape [2] there and [3] here",
             "\n  'kept' has shape [2, 2] there and [2, 3] here")),
    Mistake("a file that is no JSON", read_broken, ConfigError, "config", ("config.json: parse error at line 1",)),
    Mistake("a parameter misspelt by a word", lambda _: build(scheduler=typed("WarmupLR", warmup_steps=2)), ConfigError,
            "config", ('did you mean "warmup_num_steps"',)),
    Mistake("more ranks of a cut than there are", lambda _: build(tensor_parallel={"autotp_size": 2}), ConfigError,
            "comm.mesh", ("does not divide the 1 ranks", "start a multiple of 2, or lower the two")),
    *(
        Mistake(f"{wrap.__name__} as a model", lambda _, wrap=wrap: build(wrap(nn.Linear(4, 4))), ConfigError,
                "initialize", (wrap.__name__, "hand over what it wraps (model.module)"))
        for wrap in (nn.DataParallel, in_ddp)
    ),
    Mistake("an engine as a model", lambda _: build(build()), ConfigError, "initialize",
            ("is an engine already", "destroy()")),
    Mistake("a model as parameters", lambda _: tessera.initialize(
        model=nn.Linear(4, 4), model_parameters=nn.Linear(4, 4), config=config()), ConfigError, "initialize",
            ("model_parameters", "model.parameters()")),
    Mistake("a collate_fn that is none", lambda _: tessera.initialize(
        model=nn.Linear(4, 4), training_data=torch.ones(4, 4), collate_fn=5, config=config()), ConfigError, "data",
            ("collate_fn", "got int")),
    Mistake("named parameters to gather", lambda _: gather(nn.Linear(4, 4).named_parameters()), ConfigError,
            "zero.GatheredParameters", ("list(model.parameters())",)),
    Mistake("a module to gather", lambda _: gather(nn.Linear(4, 4)), ConfigError, "zero.GatheredParameters",
            ("list(model.parameters())",)),
    Mistake("on_metric of no function", lambda _: build().monitor.on_metric(5), ConfigError, "monitor",
            ("(name, value, x)",)),
    Mistake("what the module has, of the engine", lambda _: build().weight, AttributeError, "engine",
            ("no 'weight'", "engine.module.weight")),
    Mistake("a load of other shapes", load_other_shapes, ConfigError, "checkpoint",
            ("does not fit this engine", "'0.weight' has shape [8, 4] there and [6, 4] here")),
    *(
        Mistake(f"{how.__name__} of an engine", lambda _, how=how: how(build()), TypeError, "engine",
                ("pickled or copied", "save_checkpoint()", "module_state_dict()", "tessera.initialize()"))
        for how in (pickle.dumps, copy.deepcopy, copy.copy)
    ),
    Mistake("torch.save of an engine", lambda folder: torch.save(build(), folder / "x.pt"), TypeError, "engine",
            ("save_checkpoint()", "module_state_dict()")),
    Mistake("pickle of its optimizer", lambda _: pickle.dumps(build(**BF16).optimizer), UsageError, "Optimizer",
            ("state_dict()",)),
]  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_calls(mistake: Mistake, tmp_path: Path) -> None:
    with pytest.raises(mistake.kind) as caught:
        mistake.call(tmp_path)
    text = str(caught.value)
    assert type(caught.value) is mistake.kind
    assert f"[{mistake.origin}]" in text and all(name in text for name in mistake.names), text


def test_one_line_a_parameter_of_another_shape(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_other_shapes(tmp_path)
    lines = str(caught.value).splitlines()[1:]
    assert [line.split("'")[1] for line in lines] == ["0.weight", "0.bias", "1.weight"]


@pytest.mark.parametrize("call", ["save_checkpoint", "load_checkpoint", "save_16bit_model"])
def test_a_call_of_the_first_rank_alone(call: str, tmp_path: Path) -> None:
    def body(engine: tessera.Engine, rank: int) -> None:
        if rank == 0:
            says = rf"\n\[engine.{call}\] all ranks call it, not the first alone"
            with pytest.raises(DistBackendError, match=says) as caught:
                getattr(engine, call)(tmp_path)
            assert caught.value.__cause__ is None and caught.value.__suppress_context__  # one error is shown

    engines(nn.Linear(4, 4), 2, config(2), body)


def test_what_is_no_mistake(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load(tmp_path / "none", missing_ok=True) == (None, None)
    build(my_own_section={"a": 1}, lr=1e-3, batch_size=4)
    assert "my_own_section: unknown key, ignored" in caplog.text
    assert 'lr: unknown key, ignored; write "lr" inside "optimizer.params"' in caplog.text
    assert 'batch_size: unknown key, ignored; did you mean "train_batch_size"' in caplog.text
    layer = nn.Linear(2, 2, bias=False)
    with tessera.zero.GatheredParameters([layer.weight, layer.bias], modifier_rank=0):  # None, as Transformers does
        assert layer.weight.numel() == 4
    for stage in range(4):
        caplog.clear()
        frozen(stage)
        assert "nothing is trained: all parameters of the model are frozen" in caplog.text


class Several(nn.Module):
    """Of nested inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 4)
        self.seen: Any = None

    def forward(self, x: torch.Tensor, more: dict[str, Any]) -> torch.Tensor:
        self.seen = more
        return self.net(x) + self.net(more["list"][0])


@pytest.mark.parametrize("precision", [{}, BF16, FP16], ids=["fp32", "bf16", "fp16"])
def test_inputs_are_cast_where_asked_for(precision: dict[str, Any]) -> None:
    engine = build(Several(), **precision)
    dtype = next(engine.module.parameters()).dtype
    x = torch.ones(2, 4, dtype=torch.float64)
    more = {"list": [x], "ids": torch.arange(3), "mask": torch.ones(2, dtype=torch.bool), "n": 3}
    assert torch.equal(tessera.cast_inputs(engine, x), x.to(dtype))
    cast = tessera.cast_inputs(engine, x, more)
    assert engine(*cast).dtype == dtype and x.dtype == more["list"][0].dtype == torch.float64
    with pytest.raises(RuntimeError, match=r"input \[0\] is torch.float64 on cpu, input \['more'\]\['list'\]\[0\]"):
        engine(x, more=more)
    engine.cast_forward_inputs = True
    assert engine.cast_forward_inputs and engine(x, more=more).dtype == dtype
    assert engine.module.seen["ids"].dtype == torch.int64 and engine.module.seen["mask"].dtype == torch.bool
    engine.cast_forward_inputs = False
    with pytest.raises(RuntimeError, match="cast_inputs"):
        engine(x, more)


def test_other_errors_of_a_forward_stay_as_they_are() -> None:
    with pytest.raises(RuntimeError) as caught:
        forward(torch.ones(2, 5))
    assert "[engine.forward]" not in str(caught.value)


# ---------------------------------------------------------------- commands

WRONG = '{"bf16": {"enabledd": true}}'
COMMANDS = [
    (["check", '{"my_own": 1, "optimiser": {}, "zero_optimization": {"stge": 1, "cpu_offload": true}}'], 1,
     ["warning: my_own: unknown key, ignored", "warning: zero_optimization.cpu_offload: deprecated", "3 problems",
      'optimiser: unknown key; did you mean "optimizer"', 'zero_optimization.stge: unknown key; did you mean "stage"']),
    (["chek", "c.json"], 2, ["tessera: there is no command 'chek'; did you mean 'check'?"]),
    (["check", "./broken.json"], 1, ["broken.json: parse error at line 1"]),
    (["check", "./broken.json", "--ranks", "four"], 2, ["--ranks must be a whole number from 1, got 'four'"]),
    (["inspect", "./nofolder"], 1, ["[checkpoint] there is no folder './nofolder'"]),
    (["page", "./none.jsonl"], 1, ["[page] there is no './none.jsonl'", "tessera.json_lines", "csv_monitor"]),
    (["page", "./empty.jsonl"], 1, ["no numbers of a run", "after its first update"]),
    (["launch", "none.py"], 1, ["[launch] there is no file 'none.py'; --module takes"]),
    (["launch", "--no_python", "./none"], 1, ["[launch] there is no program './none' that may be run"]),
    (["estimate", "7X"], 1, ["[estimate] '7X' is no number of parameters, like 7B"]),
    (["estimate", "./nofolder"], 1, ["'./nofolder'", "no file or folder that exists"]),
    (["estimate", "7Bn", "--config", WRONG], 1, ["[estimate] '7Bn' is no number", "bf16.enabledd: unknown key"]),
    (["launch", "--num_gpus", "0", "x.py"], 1, ["[launch] --num_gpus must be a number from 1, got '0'"]),
    (["launch", "--num_gpus", "-1", "x.py"], 1, ["[launch] --num_gpus must be a number from 1, got '-1'"]),
    (["launch", "--nproc-per-node=two", "x.py"], 1, ["[launch] --nproc-per-node must be a number from 1, got 'two'"]),
    (["launch", "--num_nodes", "0", "x.py"], 1, ["[launch] --num_nodes must be a number from 1"]),
]  # fmt: skip


@pytest.mark.parametrize(("words", "code", "says"), COMMANDS, ids=[" ".join(row[0])[:30] for row in COMMANDS])
def test_commands(
    words: list[str],
    code: int,
    says: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.json").write_text('{"bf16": ')
    (tmp_path / "empty.jsonl").touch()
    assert cli.main(words) == code
    output, errors = capsys.readouterr()
    assert output == "" and all(text in errors for text in says), errors


def test_modules_say_one_line_as_their_commands(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "tessera.launch", "--num_gpus", "0", "x.py"]
    child = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert (child.returncode, child.stdout) == (1, "")
    assert child.stderr == "[launch] --num_gpus must be a number from 1, got '0'\n"


@contextlib.contextmanager
def listening() -> Iterator[int]:
    with socket.socket() as held:
        held.bind(("0.0.0.0", 0))
        held.listen()
        yield held.getsockname()[1]


TWO_HOSTS = ["--num_nodes", "2", "--node_rank", "0", "--master_addr", "127.0.0.1"]


@pytest.mark.parametrize(
    "options", [["--num_gpus", "2"], ["--nproc_per_node", "1"], ["--num_gpus", "1", *TWO_HOSTS]], ids=" ".join
)
def test_a_port_in_use_is_one_line(options: list[str]) -> None:
    with listening() as port:
        words = ["launch", *options, "--master_port", str(port), __file__]
        child = subprocess.run([sys.executable, "-m", "tessera", *words], capture_output=True, text=True, timeout=300)
    assert child.returncode == 1 and child.stderr.count("\n") == 1, child.stderr
    assert f"[launch] port {port} is in use on this host; name another with --master_port" in child.stderr


RANK = r"""
import os, sys, time
number = os.environ["RANK"]
sys.stdout.write(f"out {number}\n")  # at once, whatever others write
sys.stdout.flush()
print("err", number, file=sys.stderr, flush=True)
if sys.argv[1] == "fail" and number == "1":
    raise ValueError("the reason")
if sys.argv[1] != "end":
    time.sleep(300)
"""


def start(folder: Path, ranks: int, how: str) -> subprocess.Popen[str]:
    (folder / "rank.py").write_text(RANK)
    words = [sys.executable, "-m", "tessera", "launch", "-n", str(ranks), str(folder / "rank.py"), how]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = {name: value for name, value in os.environ.items() if name != "LOGLEVEL"}
    return subprocess.Popen(words, **pipes, text=True, start_new_session=True, env=environment)


@pytest.mark.parametrize(("number", "to_group"), [("SIGINT", True), ("SIGINT", False), ("SIGTERM", False)])
def test_an_interrupted_launch_says_one_line(number: str, to_group: bool, tmp_path: Path) -> None:
    child = start(tmp_path, 2, "wait")
    assert child.stdout is not None
    seen = [child.stdout.readline() for _ in range(2)]
    time.sleep(0.5)
    (os.killpg if to_group else os.kill)(child.pid, signal.Signals[number])
    out, errors = child.communicate(timeout=120)
    assert child.returncode == 128 + signal.Signals[number]
    assert sorted([*seen, *out.splitlines(keepends=True)]) == ["out 0\n", "out 1\n"]
    *ranks, last = errors.splitlines()
    assert sorted(ranks) == ["[rank 0] err 0", "[rank 1] err 1"], errors
    assert last == f"[launch] interrupted by {number}; all ranks have ended"


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_launch_prints_what_the_program_prints(ranks: int, tmp_path: Path) -> None:
    child = start(tmp_path, ranks, "end")
    out, errors = child.communicate(timeout=300)
    assert child.returncode == 0
    assert sorted(out.splitlines()) == [f"out {n}" for n in range(ranks)]
    assert sorted(errors.splitlines()) == [f"[rank {n}] err {n}" for n in range(ranks)]


def test_ranks_that_start_and_connect_print_nothing(tmp_path: Path) -> None:
    """Over gloo, with an engine of several ranks."""
    program = tmp_path / "train.py"
    program.write_text(
        "import tessera, torch\n"
        "c = {'train_micro_batch_size_per_gpu': 2, 'optimizer': {'type': 'AdamW'}}\n"
        "engine, *_ = tessera.initialize(torch.nn.Linear(4, 4), c)\n"
        "engine(torch.ones(2, 4)).sum().backward(); engine.step(); engine.destroy()\n"
        "torch.distributed.destroy_process_group()\n"
    )
    words = [sys.executable, "-m", "tessera", "launch", "-n", "2", "--master_port", str(free_port()), str(program)]
    child = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert (child.returncode, child.stdout, child.stderr) == (0, "", "")


def test_the_first_failure_is_the_only_summary(tmp_path: Path) -> None:
    child = start(tmp_path, 2, "fail")
    errors = child.communicate(timeout=120)[1]
    assert child.returncode == 1 and "torch/distributed/elastic" not in errors
    shown = errors.split("[launch] rank 1 failed first (exit code 1):\n")
    assert len(shown) == 2 and shown[1].rstrip().endswith("ValueError: the reason"), errors


# ---------------------------------------------------------------- all of them

# What goes wrong in a first hour -> the rows above that show its text, or the test, of another harness, that does.
INDEX = {
    "a key misspelt, at every level": "tests/config/parse_test.cpp ANearMissIsAnErrorThatNamesTheKeyAtEveryLevel",
    "warnings and errors of `tessera check` together": "check",
    "batch sizes": "batch sizes that do not fit",
    "an unknown optimizer": "an unknown optimizer",
    "an unknown schedule": "a schedule misspelt",
    "the dtype of inputs": "fp32 inputs of bf16",
    "the device of inputs": "inputs on another device",
    "inputs that are cast": "test_inputs_are_cast_where_asked_for",
    "a load without a folder": "a load from no folder",
    "a load without a folder that may be": "test_what_is_no_mistake",
    "no devices": "launch --num_gpus 0",
    "a port in use": "test_a_port_in_use_is_one_line",
    "a pickle of an engine": "dumps of an engine",
    "shapes of a checkpoint": "test_one_line_a_parameter_of_another_shape",
    "an estimate of a typo": "estimate 7X",
    "an interrupt": "test_an_interrupted_launch_says_one_line",
    "lines of torch while ranks start": "test_ranks_that_start_and_connect_print_nothing",
    "a world of one in each task": "tests/comm/launch_test.cpp torchrun in each task of a step",
    "a place in a larger dataset": "tests/python/test_data.py test_a_place_in_a_larger_dataset_is_refused",
}


def test_every_promise_has_a_row() -> None:
    rows = [mistake.name for mistake in MISTAKES] + [" ".join(words) for words, _, _ in COMMANDS] + list(globals())
    root = Path(__file__).parents[2]
    missing = []
    for promise, row in INDEX.items():
        path, _, name = row.partition(" ") if row.startswith("tests/") else ("", "", row)
        there = (
            name in (root / path).read_text()
            if path
            else any(one == name or one.startswith(f"{name} ") for one in rows)
        )
        missing += [] if there else [promise]
    assert missing == []
