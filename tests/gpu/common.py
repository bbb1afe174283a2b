"""What the stages share: what the runner asked for, the device, results that grow case by case, clocks.

A stage is a process of its own. The runner tells it what it needs in one environment variable, GPU_STAGE (JSON),
which the ranks and tools that a stage starts inherit."""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Asking for a device starts no CUDA, so that a process may fork afterwards.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Asked:
    """By the runner."""

    dry: bool = False  # all on the CPU, tiny
    small: bool = False  # tiny, where the device is: under a tool that makes everything slow
    work: str = str(ROOT / "build" / "gpu-work")
    out: str = str(ROOT / "build" / "gpu")
    kit: str = ""  # folder of `make gpu-kit`
    end: float = float("inf")  # when the stage must have ended, by time.time()
    again: bool = False  # the stage was started again after an error that its process could not get rid of

    def environment(self) -> dict[str, str]:
        return {"GPU_STAGE": json.dumps(asdict(self))}


ASKED = Asked(**json.loads(os.environ.get("GPU_STAGE", "{}")))
DRY, SMALL, WORK, OUT = ASKED.dry, ASKED.dry or ASKED.small, Path(ASKED.work), Path(ASKED.out)
CUDA = torch.cuda.is_available() and not DRY
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")


def module_of(file: Path, name: str) -> Any:
    """A file of the checkout whose folder is not on the path, under another name."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, file
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def seconds_left() -> float:
    return ASKED.end - time.time()


def sync() -> None:
    if CUDA:
        torch.cuda.synchronize()


def plain(value: Any) -> Any:
    """For JSON."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain(v) for v in value]
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else str(value)
    return value if isinstance(value, (int, str, bool)) or value is None else str(value)


def device_is_lost() -> bool:
    """An error of CUDA that stays: nothing more can be shown in this process."""
    try:
        sync()
    except RuntimeError:
        return True
    return False


class Results:
    """Cases by name: {"ok": bool, "seconds": s, ...}. Written after each: a stage that is stopped has told most."""

    def __init__(self, stage: str, starts_cuda: bool = True) -> None:
        self.starts_cuda = starts_cuda and CUDA  # not in a process that forks
        self.path = WORK / f"{stage}.json"
        self.data: dict[str, Any] = {"cases": {}, "failed": [], "left_out": []}
        if ASKED.again and self.path.exists():
            self.data = json.loads(self.path.read_text())
        self.write()

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self.path.with_suffix(".tmp")
        scratch.write_text(json.dumps(plain(self.data), indent=1))
        scratch.replace(self.path)

    def case(self, name: str, body: Callable[..., Any], *args: Any, need: float = 1.0) -> None:
        """body(*args) gives a dict, whose "ok" counts, or raises. `need`: seconds that must be left."""
        if name in self.data["cases"]:  # before the stage was started again
            return
        if seconds_left() < need:
            self.left_out(name, "no time")
            return
        began = time.monotonic()
        entry: dict[str, Any] = {"ok": True}
        try:
            entry |= body(*args) or {}
            entry["ok"] = bool(entry["ok"])
            if self.starts_cuda:
                sync()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a stage goes on
            text = f"{type(error).__name__}: {str(error)[:1500]}"
            entry |= {"ok": False, "error": text, "trace": traceback.format_exc()[-2500:]}
        entry["seconds"] = round(time.monotonic() - began, 3)
        self.data["cases"][name] = entry
        if not entry["ok"]:
            self.data["failed"].append(name)
        print(f"{'ok    ' if entry['ok'] else 'FAILED'} {name} {entry['seconds']} s {why(entry)}", flush=True)
        self.write()
        if not entry["ok"] and self.starts_cuda and device_is_lost():
            print("the device is lost to this process; a new one goes on", flush=True)
            again = Asked(**(asdict(ASKED) | {"again": True}))
            os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | again.environment())

    def left_out(self, name: str, reason: str) -> None:
        self.data["left_out"].append(f"{name} ({reason})")
        print(f"left out: {name} ({reason})", flush=True)
        self.write()

    def note(self, **what: Any) -> None:
        self.data.update(what)
        self.write()

    def end(self) -> None:
        self.write()
        failed = len(self.data["failed"])
        print(f"{len(self.data['cases'])} cases, {failed} failed, {len(self.data['left_out'])} left out", flush=True)
        os._exit(1 if failed else 0)  # threads of process groups must not keep a stage


def why(entry: dict[str, Any]) -> str:
    """A failed case in one line."""
    if entry["ok"]:
        return ""
    rest = {k: v for k, v in entry.items() if k not in ("ok", "seconds", "trace")}
    return str(entry.get("error", plain(rest)))[:300]


def no_differences(off: Any) -> dict[str, Any]:
    """The result of a case that compares: what differs, by name; nothing should."""
    return {"ok": not off, "differ": off} if off else {}


# ---- time and memory
def times(f: Callable[[], Any], repeats: int, warm: int = 2) -> list[float]:
    """Milliseconds of what f() puts on the device, each by two events; on the CPU by the host's clock."""
    for _ in range(warm):
        f()
    sync()
    if not CUDA:
        found = []
        for _ in range(repeats):
            began = time.perf_counter()
            f()
            found.append((time.perf_counter() - began) * 1e3)
        return found
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for begin, end in pairs:
        begin.record()
        f()
        end.record()
    sync()
    return [begin.elapsed_time(end) for begin, end in pairs]


def median(values: list[float]) -> float:
    return statistics.median(values) if values else float("nan")


def gb(n: float) -> float:
    return round(n / 1e9, 3)


def allocated() -> int:
    return torch.cuda.memory_allocated() if CUDA else 0


def peak() -> int:
    return torch.cuda.max_memory_allocated() if CUDA else 0


def reset_peak() -> None:
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
