"""What a machine without a network needs for run_stages.py, in a folder of some 40 MB (`make gpu-kit`): Tessera's wheel
for the torch of a Python, the tests of the kernels, what a build there would want, DeepSpeed.

usage: prepare.py [--out DIR] [--build DIR] [--no-peers] [PYTHON]   PYTHON: of the machine's version, with its torch"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("kernels_cuda_test", "kernels_device_table_test", "kernels_cuda_on_host_test")
GOOGLETEST = "https://github.com/google/googletest"
# What DeepSpeed imports and a machine with torch may lack.
NEEDED_BY_PEERS = (
    *("hjson", "py-cpuinfo", "einops", "msgpack", "psutil", "tqdm", "pydantic", "pydantic-core", "annotated-types"),
    *("typing-inspection", "typing-extensions"),
)


def run(*command: str | Path, folder: Path = ROOT, environment: dict[str, str] | None = None) -> str:
    print("+", *command, flush=True)
    everything = os.environ | (environment or {})
    done = subprocess.run(
        [*map(str, command)], cwd=folder, env=everything, check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout


class Python:
    """One whose torch is that of the machine, and the tools beside it."""

    def __init__(self, path: str) -> None:
        self.path = Path(shutil.which(path) or path).absolute()
        self.environment = {"PATH": os.pathsep.join([str(self.path.parent), os.environ["PATH"]])}

    def __call__(self, *arguments: str | Path, **environment: str) -> str:
        return run(self.path, *arguments, environment=self.environment | environment)

    def tool(self, *command: str | Path) -> str:
        found = shutil.which(str(command[0]), path=self.environment["PATH"])
        return run(found or command[0], *command[1:], environment=self.environment)

    def pip(self, *arguments: str | Path, **environment: str) -> str:
        return self("-m", "pip", "--disable-pip-version-check", *arguments, **environment)


def versions(file: Path) -> dict[str, str]:
    """Pins of a file of requirements."""
    return dict(re.findall(r"^([\w-]+)==([\w.]+)", file.read_text(), re.MULTILINE))


def tessera(python: Python, build: Path, kit: Path, jobs: int) -> None:
    """The wheel as a user gets it, from the tree in which the tests of the kernels are built."""
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_UNITY_BUILD=ON", "-DCMAKE_UNITY_BUILD_BATCH_SIZE=8"]
    options += ["-DTESSERA_BUILD_PYTHON=ON", "-DTESSERA_BUILD_TESTS=ON"]
    options += [f"-DPython3_EXECUTABLE={python.path}", f"-DPython_EXECUTABLE={python.path}"]
    if not (build / "CMakeCache.txt").exists():
        python.tool("cmake", "-S", ROOT, "-B", build, "-G", "Ninja", *options)
    known = python.tool("cmake", "--build", build, "--target", "help")
    targets = [name for name in ("_core", "tessera_cuda", *PROGRAMS) if re.search(rf"^{name}:", known, re.MULTILINE)]
    python.tool("cmake", "--build", build, "-j", str(jobs), "--target", *targets)
    more = {"CMAKE_BUILD_PARALLEL_LEVEL": str(jobs)}
    python.pip("wheel", "-q", "--no-build-isolation", "--no-deps", "-w", kit, "-C", f"build-dir={build}", ROOT, **more)
    for name in PROGRAMS:
        if (found := build / "tests" / "kernels" / "cuda" / name).exists():
            shutil.copy2(found, kit / name)
            run("strip", "--strip-unneeded", kit / name)


def for_a_build(python: Python, kit: Path) -> None:
    """Where the wheel does not serve: headers, the builder, googletest's sources."""
    pins = versions(ROOT / "requirements" / "build.txt")
    wanted = [f"{name}=={pins[name]}" for name in ("nlohmann-json", "scikit-build-core")]
    python.pip("download", "-q", "--no-deps", "-d", kit / "tools", *wanted)
    with tempfile.TemporaryDirectory() as scratch:
        sources = googletest(Path(scratch))
        for part in ("CMakeLists.txt", "googletest", "googlemock"):
            copy = shutil.copytree if (sources / part).is_dir() else shutil.copy2
            (kit / "googletest").mkdir(exist_ok=True)
            copy(sources / part, kit / "googletest" / part)
    for part in ("googletest", "googlemock"):
        for extra in ("test", "docs", "samples"):
            shutil.rmtree(kit / "googletest" / part / extra, ignore_errors=True)


def googletest(scratch: Path) -> Path:
    """As the build fetches it, else the system's package of its sources."""
    tag = re.search(r"googletest/archive/refs/tags/(v[\d.]+)", (ROOT / "tests" / "CMakeLists.txt").read_text())
    assert tag is not None
    if Path("/usr/src/googletest/CMakeLists.txt").exists():
        return Path("/usr/src/googletest")
    try:
        run("git", "clone", "-q", "--depth", "1", "--branch", tag[1], GOOGLETEST, scratch / "cloned")
        return scratch / "cloned"
    except subprocess.CalledProcessError:
        run("apt-get", "download", "-q", "googletest", folder=scratch)
        run("dpkg", "-x", next(scratch.glob("googletest_*.deb")), scratch / "package")
        return scratch / "package" / "usr" / "src" / "googletest"


def peers(python: Python, kit: Path) -> None:
    """DeepSpeed; what it compiles is compiled on the machine."""
    pins = versions(ROOT / "requirements" / "bench.txt")
    python.pip("install", "-q", "setuptools", "wheel", *NEEDED_BY_PEERS)
    deepspeed = f"deepspeed=={pins['deepspeed']}"
    more = {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cuda"}
    python.pip("wheel", "-q", "--no-build-isolation", "--no-deps", "-w", kit / "peers", deepspeed, **more)
    frozen = dict(line.split("==") for line in python.pip("freeze").splitlines() if "==" in line)
    names = {name.lower().replace("_", "-"): f"{name}=={version}" for name, version in frozen.items()}
    wanted = [names[name] for name in NEEDED_BY_PEERS if name in names]
    python.pip("download", "-q", "--no-deps", "--only-binary=:all:", "-d", kit / "peers", *wanted)


def host_kernels(kit: Path) -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    from host_kernels import compile_for_the_host

    compile_for_the_host(kit / "libtessera_cuda_host.so")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", nargs="?", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--out", default=str(ROOT / "build" / "gpu-kit"), metavar="DIR")
    parser.add_argument("--build", metavar="DIR", help="a build tree to use (default: one under build/)")
    parser.add_argument("--no-peers", action="store_true", help="without DeepSpeed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 2)
    options = parser.parse_args()
    python, kit = Python(options.python), Path(options.out).resolve()
    shutil.rmtree(kit, ignore_errors=True)
    kit.mkdir(parents=True)
    host_kernels(kit)
    tessera(python, Path(options.build or ROOT / "build" / "gpu-kit-tree").resolve(), kit, options.jobs)
    for_a_build(python, kit)
    if not options.no_peers:
        peers(python, kit)
    size = sum(f.stat().st_size for f in kit.rglob("*") if f.is_file())
    print(f"{kit}: {size / 1e6:.0f} MB", *sorted(p.name for p in kit.iterdir()))


if __name__ == "__main__":
    main()
