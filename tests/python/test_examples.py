"""The examples: the GPT in C++ is the twin of the one in Python, and the README shows code that runs."""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from support import PROCESSES, become, free_port, run_program

import tessera
import tessera.pipeline

ROOT = Path(__file__).parents[2]
TRAIN_PY = ROOT / "examples" / "python" / "train_gpt.py"
TRAIN_CPP = Path(os.environ.get("TESSERA_BUILD_DIR", ROOT / "build" / "release")) / "examples" / "train_gpt"
STEPS = 6
SIZES = ["--layers", "2", "--width", "48", "--heads", "3", "--context", "24", "--rows", "3"]

needs_cpp = pytest.mark.skipif(not TRAIN_CPP.exists(), reason="C++ examples are not built (TESSERA_BUILD_EXAMPLES)")


# Of torch.optim in Python, of torch::optim in C++.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "RMSprop": {"type": "RMSprop", "params": {"lr": 1e-4, "momentum": 0.5, "centered": True}},
    "amsgrad": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True, "amsgrad": True}},
    "ASGD": {"type": "ASGD", "params": {"lr": 0.05, "lambd": 0.01, "t0": 2}},
    "Rprop": {"type": "Rprop", "params": {"lr": 1e-3, "etas": [0.4, 1.3]}},
    "Adafactor": {"type": "Adafactor", "params": {"lr": 1e-2, "weight_decay": 0.1}},
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "StepLR": {"step_size": 2, "gamma": 0.5},
    "MultiStepLR": {"milestones": [1, 4], "gamma": 0.5},
    "ConstantLR": {"total_iters": 4},
    "LinearLR": {"start_factor": 0.5, "total_iters": 4},
    "ExponentialLR": {"gamma": 0.8},
    "CosineAnnealingLR": {"T_max": 3, "eta_min": 1e-4},
    "PolynomialLR": {"total_iters": 8, "power": 2.0},
    "CosineAnnealingWarmRestarts": {"T_0": 2, "T_mult": 2, "eta_min": 1e-4},
    "CyclicLR": {"base_lr": 1e-4, "max_lr": 1e-3, "step_size_up": 2, "mode": "triangular2"},
    "OneCycleLR": {"max_lr": 1e-3, "total_steps": 8},
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Text, initial weights and one configuration a case."""
    folder = tmp_path_factory.mktemp("examples")
    run_program([sys.executable, TRAIN_PY.with_name("text.py"), folder / "text.txt"])
    return folder


def config_file(folder: Path, stage: int, dtype: str, kind: str = "AdamW") -> Path:
    path = folder / f"config-{stage}-{dtype}-{kind}.json"
    config = json.loads((ROOT / "examples" / "config.json").read_text())
    config["optimizer"] |= OPTIMIZERS.get(kind, {})
    if kind in SCHEDULES:
        config["scheduler"] = {"type": kind, "params": SCHEDULES[kind]}
    config["zero_allow_untested_optimizer"] = kind in OPTIMIZERS
    config["train_micro_batch_size_per_gpu"] = 3
    config["zero_optimization"]["stage"] = stage
    config["bf16"]["enabled"] = dtype == "bf16"
    path.write_text(json.dumps(config))
    return path


def losses_of(output: str) -> list[float]:
    return [float(x) for x in re.findall(r"loss (\d+\.\d+)", output)]


def train(program: list, folder: Path, config: Path, ranks: int, *more: str | Path, steps: int = STEPS) -> list[float]:
    """Losses of every step on rank 0 and the held-out loss."""
    command = [*program, "--config", config, "--data", folder / "text.txt", "--weights", folder / "weights.pt"]
    command += ["--steps", str(steps), *SIZES, *more]
    losses = losses_of(run_program(command, ranks)[0])
    assert len(losses) in (STEPS + 1, STEPS // 2 + 1)  # the whole run, or a half
    return losses


@pytest.fixture(scope="module")
def weights(files):
    config = config_file(files, 0, "fp32")
    command = [sys.executable, TRAIN_PY, "--config", config, "--save-weights", files / "weights.pt", *SIZES]
    run_program(command)
    return files / "weights.pt"


@needs_cpp
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("stage", "dtype"), [(0, "fp32"), (1, "fp32"), (2, "fp32"), (2, "bf16")])
def test_cpp_and_python_twins_have_the_same_losses(files, weights, stage, dtype, ranks):
    config = config_file(files, stage, dtype)
    python = train([sys.executable, TRAIN_PY], files, config, ranks)
    cpp = train([TRAIN_CPP], files, config, ranks)
    # fp32: the same operations in the same order. bf16: products may be summed in another order before rounding.
    tolerance = {"fp32": 1e-5, "bf16": 2e-2}[dtype]
    assert cpp == pytest.approx(python, abs=tolerance)
    assert python[STEPS - 1] < python[0]


@needs_cpp
@pytest.mark.parametrize("first", ["python", "cpp"])
@pytest.mark.parametrize(
    ("stage", "dtype", "ranks", "kind"),
    [
        (0, "fp32", 1, "AdamW"),
        (2, "bf16", 2, "AdamW"),
        (3, "bf16", 2, "AdamW"),
        (1, "fp32", 2, "RMSprop"),
        (0, "fp32", 1, "amsgrad"),
        (2, "fp32", 2, "amsgrad"),
        (1, "fp32", 2, "ASGD"),
        (2, "fp32", 2, "Rprop"),
        (0, "fp32", 1, "Adafactor"),
        (2, "fp32", 2, "Adafactor"),
        *((1, "fp32", 1, kind) for kind in SCHEDULES),
    ],
)
def test_a_run_saved_in_one_language_goes_on_in_the_other(files, weights, tmp_path, first, stage, dtype, ranks, kind):
    programs = {"python": [sys.executable, TRAIN_PY], "cpp": [TRAIN_CPP]}
    second = "cpp" if first == "python" else "python"
    config = config_file(files, stage, dtype, kind)
    whole = train(programs[first], files, config, ranks)
    train(programs[first], files, config, ranks, "--save", tmp_path, steps=STEPS // 2)
    rest = train(programs[second], files, config, ranks, "--resume", tmp_path)
    assert rest == pytest.approx(whole[STEPS // 2 :], abs={"fp32": 1e-5, "bf16": 2e-2}[dtype])  # as the twins are
    again = train(programs[first], files, config, ranks, "--resume", tmp_path)
    assert again == whole[STEPS // 2 :]


# Programs of C++ beside train_gpt, the numbers of ranks that they run on, and how often they print each step's loss.
SMALL = [
    ("pretrain", (1, 2), 1),
    ("tensor_parallel", (2, 4), 1),
    ("ulysses", (2, 4), 1),
    ("stages", (2,), 2),
    ("gan", (1, 2), 1),
    ("finetune", (1, 2), 1),
]


@needs_cpp
@pytest.mark.parametrize(("name", "worlds", "times"), SMALL)
def test_small_programs_have_the_losses_of_plain_torch(name, worlds, times, tmp_path):
    program = TRAIN_CPP.with_name(name)
    plain = losses_of(run_program([program, "--plain"])[0])
    assert len(plain) == 8 + (name == "finetune") and plain[-1] < plain[0]
    for ranks in worlds:
        printed = losses_of("".join(run_program([program], ranks, tmp_path)))
        # fp32: sums over ranks, slices and micro-batches are in another order; updates of Adam carry that on.
        assert printed == pytest.approx(times * plain, abs=1e-4), ranks


@needs_cpp
@pytest.mark.parametrize("stage", [1, 3])
def test_cpp_program_cut_along_the_model_and_the_sequence_has_the_same_losses(files, weights, stage):
    config = config_file(files, stage, "fp32")
    whole = train([TRAIN_CPP], files, config, 1)
    for cuts in (["--tp", "2"], ["--sp", "2"], ["--tp", "3"], ["--sp", "2", "--tp", "2"]):
        ranks = 4 if len(cuts) == 4 else int(cuts[1])
        if len(cuts) == 4:
            cuts = [*cuts, "--heads", "4"]
            whole = train([TRAIN_CPP], files, config, 1, "--heads", "4")
        assert train([TRAIN_CPP], files, config, ranks, *cuts) == pytest.approx(whole, abs=1e-4)


@needs_cpp
def test_cpp_program_in_stages_has_the_same_losses(files, weights, tmp_path):
    config = config_file(files, 1, "fp32")
    whole = train([TRAIN_CPP], files, config, 1)
    assert train([TRAIN_CPP], files, config, 3, "--pp", "3") == pytest.approx(whole, abs=1e-5)
    train([TRAIN_CPP], files, config, 2, "--pp", "2", "--save", tmp_path, steps=STEPS // 2)
    rest = train([TRAIN_CPP], files, config, 4, "--pp", "4", "--resume", tmp_path)
    assert rest == pytest.approx(whole[STEPS // 2 :], abs=1e-5)


@needs_cpp
def test_stages_saved_in_one_language_go_on_in_the_other(files, weights, tmp_path, monkeypatch):
    config = config_file(files, 1, "fp32")
    half = STEPS // 2
    whole = train([TRAIN_CPP], files, config, 1)
    train([TRAIN_CPP], files, config, 2, "--pp", "2", "--save", tmp_path / "cpp", steps=half)
    monkeypatch.syspath_prepend(TRAIN_PY.parent)
    from gpt import Block, GptOptions, Linear
    from text import Text

    class Start(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.position = torch.nn.Embedding(256, 48), torch.nn.Embedding(24, 48)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.token(x) + self.position(torch.arange(x.shape[1]))

    def loss_fn(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(out.flatten(0, 1), y.flatten())

    blocks = [Block(GptOptions(2, 48, 3, 24)) for _ in range(2)]
    layers = [Start(), *blocks, torch.nn.LayerNorm(48), Linear(48, 256)]
    model = tessera.pipeline.PipelineModule(layers, num_stages=1, loss_fn=loss_fn)
    engine = tessera.initialize(model=model, config=str(config))[0]
    engine.load_checkpoint(tmp_path / "cpp")
    engine.save_checkpoint(tmp_path / "python")
    text = Text((files / "text.txt").read_bytes(), 24)
    loss = engine.train_batch(iter([text.batch(half, 0, 1, 3)]))
    assert loss.item() == pytest.approx(whole[half], abs=1e-5)
    rest = train([TRAIN_CPP], files, config, 3, "--pp", "3", "--resume", tmp_path / "python")
    assert rest == pytest.approx(whole[half:], abs=1e-5)


@needs_cpp
def test_torchrun_starts_the_cpp_program(files, weights):
    config = config_file(files, 2, "fp32")
    by_hand = train([TRAIN_CPP], files, config, 2)
    command = [sys.executable, "-m", "torch.distributed.run", "--no-python", "--nproc-per-node", "2"]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(free_port()), TRAIN_CPP, "--config", config]
    command += ["--data", files / "text.txt", "--weights", weights, "--steps", str(STEPS), *SIZES]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert losses_of(done.stdout) == by_hand


@needs_cpp
def test_cpp_example_reports_a_bad_option(files):
    done = subprocess.run([TRAIN_CPP, "--stepz", "3"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "--stepz" in done.stderr


def test_ranks_together_see_the_same_batches(files):
    sys.path.insert(0, str(TRAIN_PY.parent))
    from text import Text

    text = Text((files / "text.txt").read_bytes(), 24)
    whole = text.batch(5, 0, 1, 6)[0]
    parts = torch.cat([text.batch(5, rank, 2, 3)[0] for rank in range(2)])
    assert torch.equal(whole, parts)
    assert len(text.held_out) == (len(text.train) + len(text.held_out)) // 10


M_MMAP_THRESHOLD = -3  # of malloc.h


def run_within(limit: int, command: list[str], file: Path) -> None:
    """become() with so many KiB of data, if any."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1_000_000)  # what is freed is given back
    if limit:
        resource.setrlimit(resource.RLIMIT_DATA, (1024 * limit, 1024 * limit))
    become(command, file)


def write_data(file: Path) -> None:
    """What a process has that has only imported and computed something, in KiB."""
    (torch.ones(9, 9, requires_grad=True) @ torch.ones(9, 9)).sum().backward()
    status = Path("/proc/self/status").read_text().splitlines()
    file.write_text(next(line.split()[1] for line in status if line.startswith("VmData")))


@pytest.mark.long
def test_states_that_do_not_fit_in_the_memory_limit_live_on_a_disk(files, tmp_path):
    """50 million parameters: 400 MB of weights and gradients, as much of states. 150 million: 1.2 GB of weights and
    gradients, and neither is in memory as a whole where the weights are on the disk, too."""
    command = [sys.executable, str(TRAIN_PY.with_name("offload.py")), "--data", str(files / "text.txt"), "--steps", "2"]
    command += ["--layers", "4", "--width", "1024", "--context", "16"]
    file = tmp_path / "out"

    def process(target, *args) -> tuple[int, str]:
        forked = PROCESSES.Process(target=target, args=args)
        forked.start()
        forked.join(300)
        return forked.exitcode, file.read_text()

    def train_within(limit: int, *more: str) -> str:
        code, text = process(run_within, limit, [*command, *more], file)
        assert code == 0, text
        return text

    def fails_within(limit: int, *more: str) -> bool:
        code, text = process(run_within, limit, [*command, *more], file)
        return code != 0 and "memory" in text

    base = int(process(write_data, file)[1])
    free = train_within(0)
    limit = base + 400_000 + 150_000 + 150_000  # KiB: weights, gradients; buffers; half of the states
    assert fails_within(limit)
    done = train_within(limit, "--nvme", str(tmp_path))
    assert f"memory limit: {limit // 1024} MiB" in done and "on the disk: 0 MiB" not in done
    assert losses_of(done) == losses_of(free)
    limit, large = base + 900_000, ("--layers", "12", "--steps", "1", "--nvme", str(tmp_path))
    assert fails_within(limit, *large)
    train_within(limit, *large, "--parameters")


def test_demo_writes_its_results(tmp_path):
    command = [sys.executable, TRAIN_PY.with_name("demo.py"), "--out", tmp_path / "out", "--steps", "6"]
    command += ["--layers", "1", "--width", "48", "--context", "24", "--rows", "2", "--sample", "5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for text in ("Tessera ZeRO-2: step", "held-out loss", "tokens/s", "peak memory per rank", "sample"):
        assert text in done.stdout
    rows = (tmp_path / "out" / "losses.csv").read_text().splitlines()
    assert rows[0] == "step,tessera,plain"
    assert len(rows) == 7
    for row in rows[1:]:
        _, tessera_loss, plain_loss = map(float, row.split(","))
        assert tessera_loss == pytest.approx(plain_loss, abs=0.02)
    assert (tmp_path / "out" / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert done.stdout.endswith(f"written: {tmp_path}/out/page.html\n")
    page = (tmp_path / "out" / "page.html").read_text()
    assert '"name":"tessera"' in page and '"name":"plain"' in page and "phase_ms_backward" in page
    assert "Train/Samples/tflops" in page


def marked(path: Path, comment: str) -> str:
    """The part of an example between its README marks, without indentation."""
    body = path.read_text().split(f"{comment} README begin\n")[1].split(f"{comment} README end")[0]
    return textwrap.dedent(body.rsplit("\n", 1)[0]).strip()


def test_readme_shows_the_example():
    blocks = re.findall(r"```cpp\n(.*?)\n```", (ROOT / "README.md").read_text(), re.S)
    assert marked(ROOT / "examples" / "cpp" / "train_gpt.cpp", "//") in [block.strip() for block in blocks]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_first_loop_of_the_readme_runs_as_it_stands(tmp_path, ranks):
    loop = re.search(r"```python\n(.*?)\n```", (ROOT / "README.md").read_text(), re.S).group(1)
    (tmp_path / "loop.py").write_text(loop)
    printed = run_program([sys.executable, tmp_path / "loop.py"], ranks, tmp_path)
    for text in printed:
        assert losses_of(text)[-1] < 1, "it learns: the variance of the target is 4"
    assert ["step=200" in text for text in printed] == [rank == 0 for rank in range(ranks)]
