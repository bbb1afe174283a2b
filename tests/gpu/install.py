"""The stage `install`: Tessera from the kit, as it is installed, or built from this checkout with the torch that is
there; and DeepSpeed, where the kit has it. Usage: install.py, or `install.py compile` for
what DeepSpeed will want."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from common import ASKED, CUDA, DRY, ROOT, WORK, Results

KIT = Path(ASKED.kit or "/nowhere")
SITE, PEERS, TOOLS = WORK / "site", WORK / "peers", WORK / "tools"  # on the path of every stage
LOADED = "import torch, tessera; print(tessera.__file__, tessera._core.torch_version)"


def run(command: list[str], **environment: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, check=False)
    said = (done.stdout + done.stderr).strip()
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command[:6])} ...: {said[-1200:]}")
    return said


def pip(target: Path, *what: str | Path, **environment: str) -> None:
    """Without an index. A folder that was filled from the same files stays."""
    stamp, mark = target / "installed", json.dumps([[str(w), Path(w).stat().st_mtime] for w in what])
    if stamp.exists() and stamp.read_text() == mark:
        return
    shutil.rmtree(target, ignore_errors=True)
    options = ["--no-index", "--no-deps", "--no-compile", "--no-build-isolation", "--target", str(target)]
    run([sys.executable, "-m", "pip", "install", "-q", *options, *map(str, what)], **environment)
    stamp.write_text(mark)


def from_the_checkout() -> str:
    if tools := sorted(KIT.glob("tools/*.whl")):
        pip(TOOLS, *tools)
    more = {"CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count()), "CMAKE_ARGS": "-DCMAKE_UNITY_BUILD=ON"}
    pip(SITE, ROOT, **more)
    return run([sys.executable, "-c", LOADED])


def tessera() -> dict[str, Any]:
    wheels = sorted(KIT.glob("tessera-*.whl"))
    try:
        if wheels:
            pip(SITE, *wheels)
        return {
            "from": wheels[0].name if wheels else "what is installed",
            "loaded": run([sys.executable, "-c", LOADED]),
        }
    except RuntimeError as error:
        if DRY:
            raise
        shutil.rmtree(SITE, ignore_errors=True)
        return {"from": "the checkout", "because": str(error)[-400:], "loaded": from_the_checkout()}


def report() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run([sys.executable, "-m", "tessera.report", "--json"]))
    return found


def peers() -> dict[str, Any]:
    if wheels := sorted(KIT.glob("peers/*.whl")):
        pip(PEERS, *wheels)
    there = importlib.util.find_spec("deepspeed") is not None or (PEERS / "deepspeed").exists()
    if there and CUDA:  # beside the first stages, with a low claim on the cores
        log = open(WORK / "compile.log", "w")  # noqa: SIM115
        command = ["nice", "-n", "5", sys.executable, __file__, "compile"]
        subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)
    return {"deepspeed": there}


def for_compilers() -> None:
    """DeepSpeed compiles for the card that is there; it cannot read names such as 9.0a. nvcc may be of a package."""
    if CUDA:
        os.environ["TORCH_CUDA_ARCH_LIST"] = "{}.{}".format(*torch.cuda.get_device_capability(0))
    folders = [Path(path, "nvidia") for path in sys.path if path]
    found = [nvcc for folder in folders if folder.is_dir() for nvcc in sorted(folder.glob("*/bin/nvcc"))]
    nvcc = shutil.which("nvcc") or (str(found[0]) if found else None)
    if nvcc and "CUDA_HOME" not in os.environ:
        os.environ["CUDA_HOME"] = str(Path(nvcc).resolve().parents[1])


def compile_peers() -> None:
    for_compilers()
    importlib.import_module("deepspeed.ops.op_builder").CPUAdamBuilder().load()
    print("compiled")


def main() -> None:
    WORK.mkdir(parents=True, exist_ok=True)
    r = Results("install", starts_cuda=False)
    r.case("tessera", tessera)
    r.case("report", report)
    r.case("peers", peers)
    r.end()


if __name__ == "__main__":
    compile_peers() if sys.argv[1:] == ["compile"] else main()
