"""The stages `kernel_test`, `sanitizer` and `ctests`: the project's own C++ tests, of the kit or of a build tree; and
`examples`: what a newcomer runs first. Usage: programs.py STAGE."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from common import ASKED, CUDA, DEVICE, DRY, ROOT, WORK, Asked, Results, seconds_left
from device_table import device_library

HERE = Path(__file__).parent
BUILT = ROOT / "build" / "release"
KIT = Path(ASKED.kit or "/nowhere")


def program(name: str) -> Path | None:
    found = [p for p in (KIT / name, BUILT / "tests" / "kernels" / "cuda" / name) if p.exists()]
    return found[0] if found else None


def ended(command: list[str], environment: dict[str, str] | None = None) -> dict[str, Any]:
    """What a program says at its end; one that fails is a failed case."""
    libraries = [str(Path(str(torch.__file__)).parent / "lib")]
    if CUDA:
        libraries.append(str(device_library().parent))
    more = {"LD_LIBRARY_PATH": os.pathsep.join([*libraries, os.environ.get("LD_LIBRARY_PATH", "")])}
    more |= {"ASAN_OPTIONS": "detect_leaks=0"} | (environment or {})
    limit = max(5.0, seconds_left() - 2)
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | more,
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        said = (error.stdout or b"").decode(errors="replace") if isinstance(error.stdout, bytes) else str(error.stdout)
        return {"ok": False, "said": said[-1500:], "rc": "too long"}
    print(done.stdout, flush=True)
    return {"ok": done.returncode == 0, "rc": done.returncode, "said": done.stdout[-1500:]}


def kernel_test(r: Results) -> None:
    name = "kernels_cuda_test" if CUDA else "kernels_cuda_on_host_test"
    if found := program(name):
        r.case(name, ended, [str(found), "--gtest_brief=1"])
    else:
        r.left_out(name, "not built")


def sanitizer(r: Results) -> None:
    """CUDA's own checks of the kernels' accesses; dry: the kernels for the host under the compilers' sanitizers."""
    if not CUDA:
        kernel_test(r)
        return
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(tool).exists():
        r.left_out("sanitizer", "no compute-sanitizer")
        return
    small = Asked(**(asdict(ASKED) | {"small": True, "work": str(WORK / "sanitizer")}))
    bits = [sys.executable, str(HERE / "kernels_bits.py")]
    if test := program("kernels_cuda_test"):
        command = [tool, "--tool", "memcheck", "--error-exitcode", "9", str(test), "--gtest_brief=1"]
        r.case("memcheck, the project's test", ended, command)
    for kind in ("memcheck", "initcheck", "racecheck", "synccheck"):
        checked = [tool, "--tool", kind, "--error-exitcode", "9", *bits]
        r.case(f"{kind}, every form", ended, checked, small.environment(), need=10)


def configured() -> dict[str, Any]:
    """A tree with tests, of this checkout and this torch, without a network."""
    python = sys.executable
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_UNITY_BUILD=ON", "-DTESSERA_BUILD_TESTS=ON"]
    options += [f"-DPython3_EXECUTABLE={python}", f"-DPython_EXECUTABLE={python}", "-DTESSERA_BUILD_PYTHON=OFF"]
    if (KIT / "googletest").exists():
        options.append(f"-DFETCHCONTENT_SOURCE_DIR_GOOGLETEST={KIT / 'googletest'}")
    return ended(["cmake", "-S", str(ROOT), "-B", str(WORK / "build"), "-G", "Ninja", *options])


def ctests(r: Results) -> None:
    """Kernels, the table, the stand-in, and what needs few seconds. Without a build tree one is made first."""
    tree = BUILT
    if not (BUILT / "CTestTestfile.cmake").exists():
        tree = WORK / "build"
        if DRY:
            r.left_out("ctests", "no build tree")
            return
        r.case("configure", configured)
        r.case("build", ended, ["cmake", "--build", str(tree), "-j", str(os.cpu_count())])
    if DRY and program("kernels_cuda_on_host_test") is None:
        r.left_out("ctests", "not built")
        return
    choice = ["-R", "^kernels_cuda_on_host$"] if DRY else ["-E", "consumer|comm_|hosts|shm"]
    r.case("ctest", ctest, tree, choice)


def ctest(tree: Path, choice: list[str]) -> dict[str, Any]:
    command = ["ctest", "--test-dir", str(tree), "-j", str(os.cpu_count()), "--timeout", "60", "--output-on-failure"]
    found = ended([*command, *choice])
    failed = re.findall(r"^\s*\d+ - (\S+) \((.*?)\)", found["said"], re.MULTILINE)
    return found | {"failed": [f"{name}: {how}" for name, how in failed]}


def readme() -> dict[str, Any]:
    """README's first loop as it stands: it learns, and its model is where it should be."""
    blocks = re.findall(r"```python\n(.*?)\n```", (ROOT / "README.md").read_text(), re.DOTALL)
    (WORK / "loop.py").write_text(blocks[0] + '\nprint("on", engine.device, "end")\n')
    found = ended([sys.executable, str(WORK / "loop.py")])
    losses = [float(text) for text in re.findall(r"^loss ([\d.]+)$", found["said"], re.MULTILINE)]
    places = set(re.findall(r"^on (\w+)", found["said"], re.MULTILINE))
    right = bool(losses) and losses[0] < 1 and places == {DEVICE.type}
    return found | {"ok": found["ok"] and right, "losses": losses, "devices": sorted(places)}


def examples(r: Results) -> None:
    r.case("the README's loop", readme)
    demo = [
        sys.executable,
        str(ROOT / "examples" / "python" / "demo.py"),
        f"--out={WORK / 'demo'}",
        "--sample=20",
    ]
    small = ["--steps", "4", "--layers", "1", "--width", "48", "--context", "24"] if DRY else ["--steps", "40"]
    r.case("the demo", ended, [*demo, *small, *([] if CUDA else ["--ranks", "1"])])


if __name__ == "__main__":
    stage = sys.argv[1]
    results = Results(stage, starts_cuda=False)
    {"kernel_test": kernel_test, "sanitizer": sanitizer, "ctests": ctests, "examples": examples}[stage](results)
    results.end()
