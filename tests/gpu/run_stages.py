"""Whether Tessera is right and fast on this machine's GPU: `make gpu`, or `python tests/gpu/run_stages.py`; for an
installed Tessera without a checkout `python -m tessera.gpu`, which has the stages that need none.

Stages in time boxes, the most telling first, each a process of its own; a failed one stops no other. results.json,
page.md and logs.tar.gz are renewed after each, so that a run that is cut has told most. Names choose stages,
NAME=SECONDS with another box; `rest` is what earlier calls left out. docs/gpu_tests.md says more."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import page

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CHECKOUT = (ROOT / "bench").is_dir()  # else the folder is the package tessera.gpu


@dataclass(frozen=True)
class Stage:
    name: str
    box: int  # seconds at most
    program: tuple[str, ...]
    says: str
    dry: bool = True  # part of a dry run
    alone: bool = False  # needs no checkout


STAGES = [
    Stage("env", 30, ("machine.py",), "the machine, its tools and its bandwidth", alone=True),
    Stage(
        "install", 300, ("install.py",), "Tessera from the kit, as installed, or from the checkout; always", alone=True
    ),
    Stage("kernels_bits", 90, ("kernels_bits.py",), "kernels beside the same sources compiled for the host"),
    Stage(
        "parity",
        120,
        ("parity.py",),
        "modes, stages, offload, checkpoints: the same bits; beside plain PyTorch",
        alone=True,
    ),
    Stage("hazards", 150, ("hazards.py",), "streams, lifetimes, waits, page-locked memory, no memory left", alone=True),
    Stage("two_ranks", 100, ("two_ranks.py",), "one rank over NCCL, two over Gloo on one device", alone=True),
    Stage("llama", 240, ("llama.py", "1.3B"), "a Llama beside PyTorch, FSDP2 and DeepSpeed"),
    Stage("kernels_speed", 30, ("kernels_speed.py",), "bandwidth of each form of the kernels"),
    Stage("trace", 60, ("llama_trace.py",), "profiled steps: copies beside kernels, gaps, waits"),
    Stage("llama_7B", 110, ("llama.py", "7B"), "7 billion parameters on one device", dry=False),
    Stage("kernel_test", 30, ("programs.py", "kernel_test"), "the project's own test of the kernels"),
    Stage("device_program", 40, ("device_program.py",), "the tests of the stand-in accelerator on this device"),
    Stage("examples", 60, ("programs.py", "examples"), "the README's first loop, the demo"),
    Stage("pytests", 400, ("project_tests.py",), "the project's own Python tests"),
    Stage("sanitizer", 90, ("programs.py", "sanitizer"), "compute-sanitizer over the kernels"),
    Stage("ctests", 300, ("programs.py", "ctests"), "the project's own C++ tests"),
]
# The least that is worth starting a stage for, and what a stage has to end by itself.
LEAST, GRACE = 6, 3


@dataclass
class Run:
    """One call."""

    options: argparse.Namespace
    work: Path
    out: Path
    end: float  # by time.time()
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)  # status and seconds, also of earlier calls

    def left(self) -> int:
        return int(self.end - time.time())

    def environment(self, box: float) -> dict[str, str]:
        asked = {
            "dry": self.options.dry,
            "work": str(self.work),
            "out": str(self.out),
            "kit": str(Path(self.options.kit).resolve()) if self.options.kit else "",
            "end": time.time() + box - GRACE,
        }
        given = [Path(p).resolve() for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
        paths = [*(self.work / name for name in ("site", "peers", "tools")), *given]
        return (
            os.environ
            | {
                "GPU_STAGE": json.dumps(asked),
                "PYTHONPATH": os.pathsep.join(map(str, paths)),
                # cmake and ninja of this Python: an old cmake of the system does not know a new nvcc.
                "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
                "PYTHONUNBUFFERED": "1",
                "TORCH_EXTENSIONS_DIR": str(self.work / "extensions"),
                "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # torch's deterministic products
                "HF_HUB_OFFLINE": "1",
                "TRANSFORMERS_OFFLINE": "1",
                "TOKENIZERS_PARALLELISM": "false",
            }
            | ({"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} if self.options.dry else {})
        )

    def note(self, stage: Stage, status: str, seconds: float, rc: int | None = None) -> None:
        self.runs.pop(stage.name, None)
        self.runs[stage.name] = {"status": status, "seconds": round(seconds), "rc": rc}
        (self.work / "stages").write_text(json.dumps(self.runs))
        page.write(self.work, self.out, self.runs)
        found = page.collect(self.work, {stage.name: self.runs[stage.name]})[stage.name]
        cases, failed, left_out = page.counts(found)
        print(
            f"{stage.name}: {status}, {seconds:.0f} s, {cases} cases, {failed} failed, {left_out} left out", flush=True
        )
        for line in list(page.failures(found))[:8]:
            print(f"  failed: {line[:220]}", flush=True)

    def start(self, stage: Stage, box: int, behind: bool = False) -> Started | None:
        """None where no time is left. `behind`: the others have the first claim on the cores."""
        box = min(box, self.left())
        if box < LEAST:
            self.note(stage, "left out", 0)
            return None
        (self.work / f"{stage.name}.json").unlink(missing_ok=True)
        command = ["nice", "-n", "5"] if behind else []
        command += [sys.executable, str(HERE / stage.program[0]), *stage.program[1:]]
        with open(self.work / f"{stage.name}.log", "w") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=self.work, env=self.environment(box), start_new_session=True
            )
        return Started(stage, box, time.monotonic(), process)

    def finish(self, started: Started | None) -> str:
        """The process and all that it started are gone afterwards."""
        if started is None:
            return "left out"
        process, status = started.process, "timeout"
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = "ok" if process.wait(started.began + started.box - time.monotonic()) == 0 else "failed"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.note(started.stage, status, time.monotonic() - started.began, process.returncode)
        return status

    def all_of(self, stages: list[tuple[Stage, int]], beside: str | None) -> bool:
        """Whether all was well. `beside` runs as soon as there is something to run, while the others go on."""
        good, behind = True, None
        for stage, box in stages:
            if stage.name == beside:
                continue
            status = self.finish(self.start(stage, box))
            good = good and status == "ok"
            if stage.name == "install" and status != "ok":
                print(f"Tessera is not installed: {self.work / 'install.log'}")
                return False
            if stage.name == "install":
                behind = next((self.start(s, b, behind=True) for s, b in stages if s.name == beside), None)
        return self.finish(behind) == "ok" and good if beside else good


@dataclass(frozen=True)
class Started:
    stage: Stage
    box: int
    began: float  # by time.monotonic()
    process: subprocess.Popen[bytes]


def chosen(options: argparse.Namespace, runs: dict[str, dict[str, Any]]) -> list[tuple[Stage, int]]:
    """Stages and boxes: those named, in the order of their names, or in that of STAGES. `env` and `install` come first,
    and `install` always where another stage needs it."""
    boxes = dict(word.partition("=")[::2] for word in options.stages)
    known = {stage.name: stage for stage in STAGES if CHECKOUT or stage.alone}
    if unknown := [name for name in [*boxes, *filter(None, [options.beside])] if name not in known and name != "rest"]:
        raise SystemExit(f"no stage is called {', '.join(unknown)}; {', '.join(known)}, rest")
    run = [stage for stage in known.values() if stage.dry or not options.dry]
    if "rest" in boxes:
        run = [s for s in run if s.name in boxes or runs.get(s.name, {}).get("status") != "ok"]
    elif boxes:
        run = [known[name] for name in boxes]
    if options.beside and known[options.beside] not in run:
        run.append(known[options.beside])
    install = [known["install"]] if {s.name for s in run} - {"env"} else []
    first = [s for s in run if s.name == "env"] + install
    slack = 4 if options.dry else 1  # a dry run proves no times, and the machine may be busy
    return [(s, int(boxes.get(s.name) or slack * s.box)) for s in first + [s for s in run if s not in first]]


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "stages", nargs="*", metavar="STAGE[=SECONDS]", help="default: all; `rest`: what is not done yet"
    )
    parser.add_argument("--list", action="store_true", help="the stages")
    parser.add_argument("--dry", action="store_true", help="all of it on the CPU, tiny")
    parser.add_argument("--seconds", type=int, default=3600, metavar="N", help="for all stages together")
    out = str(ROOT / "build" / "gpu") if CHECKOUT else "tessera-gpu"
    parser.add_argument("--out", default=out, metavar="DIR", help=f"for results.json and page.md (default: {out})")
    parser.add_argument("--work", metavar="DIR", help="for logs and what is installed (default: OUT-work)")
    parser.add_argument("--beside", metavar="STAGE", help="runs beside the others, which then measure less well")
    parser.add_argument("--kit", metavar="DIR", help="what `make gpu-kit` made")
    return parser.parse_args(arguments)


def main() -> int:
    options = parsed()
    if options.list:
        print("\n".join(f"{s.name:15} {s.box:4} s  {s.says}" for s in STAGES if CHECKOUT or s.alone))
        return 0
    out = Path(options.out).resolve()
    work = Path(options.work or f"{out}-work").resolve()
    work.mkdir(parents=True, exist_ok=True)
    run = Run(options, work, out, time.time() + options.seconds)
    if options.stages and (work / "stages").exists():
        run.runs = json.loads((work / "stages").read_text())
    good = run.all_of(chosen(options, run.runs), options.beside)
    print(page.write(work, out, run.runs)[:9000])
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
