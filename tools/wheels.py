"""Wheels for each torch of requirements/matrix.txt and each Python of pyproject.toml, for the CPU and for CUDA: an
sdist of what is committed, a wheel of the unpacked sdist in an environment of its own, audited, installed in another
one with nothing but its dependencies, and used there by Python, by commands and by a C++ program.

    python tools/wheels.py [--all] [--torch 2.15.0] [--python 3.13] [--kind cpu|cuda] [--policy manylinux_2_28] [--list]

Without options: the torch of requirements/torch.txt, this Python, the CPU. torch for the CPU is asked for as
torch==VERSION+cpu, which PyPI does not have: pip's own settings (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS) say where it is.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
# torch's, which finds its own, and the driver's: never inside the wheel.
FOREIGN = ("libtorch*", "libc10*", "libgomp*", "libcuda.so*")
# What of this environment would make it another build; of PATH what belongs to the checkout, and compilers of CUDA.
STRANGE = re.compile(
    r"CMAKE|CUDA|NVCC|PYTHON|SKBUILD|TESSERA|TORCH|NLOHMANN|LD_|CPATH|CPLUS_|C_INCLUDE|LIBRARY_PATH|VIRTUAL_ENV"
)


@dataclass(frozen=True)
class Entry:
    torch: str
    python: str
    cuda: str = ""  # "cu130"; empty: for the CPU

    @property
    def label(self) -> str:
        """Of the wheel's version: 0.1.0+torch2.13.cpu."""
        return f"torch{'.'.join(self.torch.split('.')[:2])}.{self.cuda or 'cpu'}"

    @property
    def requirement(self) -> str:
        """PyPI's torch is the one for CUDA; === does not take one with +cpu for it."""
        return f"torch==={self.torch}" if self.cuda else f"torch=={self.torch}+cpu"


def torches() -> list[tuple[str, str]]:
    """Versions, and the CUDA of each."""
    lines = (REQUIREMENTS / "matrix.txt").read_text().splitlines()
    return [(line.split()[0], line.split()[1]) for line in lines if line and not line.startswith("#")]


def pythons() -> list[str]:
    return re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())


def default_torch() -> str:
    found = re.search(r"^torch==(\S+)", (REQUIREMENTS / "torch.txt").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def matrix() -> list[Entry]:
    return [
        Entry(torch, python, of_kind) for torch, cuda in torches() for python in pythons() for of_kind in ("", cuda)
    ]


def chosen(options: argparse.Namespace) -> list[Entry]:
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    torch, python = options.torch or default_torch(), options.python or here
    kind = options.kind or "cpu"
    found = [
        entry
        for entry in matrix()
        if ((options.all and not options.torch) or entry.torch == torch)
        and ((options.all and not options.python) or entry.python == python)
        and ((options.all and not options.kind) or bool(entry.cuda) == (kind == "cuda"))
    ]
    if not found:
        raise SystemExit(
            f"[wheels] torch {torch} with Python {python} is not in requirements/matrix.txt or pyproject.toml"
        )
    return found


def clean_environment(python: Path | None = None, environment: dict[str, str] | None = None) -> dict[str, str]:
    """This one without what would change a build, with the programs of `python` first."""
    given = os.environ if environment is None else environment
    kept = {name: value for name, value in given.items() if not STRANGE.match(name)}
    folders = [
        folder
        for folder in given.get("PATH", "").split(os.pathsep)
        if folder and not Path(folder).is_relative_to(ROOT) and not Path(folder, "nvcc").exists()
    ]
    own = [] if python is None else [str(python.parent)]
    return kept | {"PATH": os.pathsep.join(own + folders)}


def run(*command: str | Path, folder: Path, environment: dict[str, str], log: Path) -> str:
    """What it printed, which `log` has, too. SystemExit with its end where it fails."""
    words = [str(word) for word in command]
    found = shutil.which(words[0], path=environment["PATH"]) or words[0]
    with log.open("a+b") as file:
        file.write(f"$ {' '.join(words)}\n".encode())
        file.flush()
        begin = file.tell()
        done = subprocess.run([found, *words[1:]], cwd=folder, env=environment, stdout=file, stderr=subprocess.STDOUT)
        file.seek(begin)
        text = file.read().decode(errors="replace")
    if done.returncode != 0:
        end = "\n".join(text.splitlines()[-30:])
        raise SystemExit(f"{end}\n[wheels] failed with {done.returncode}: {' '.join(words)}")
    return text


def interpreter(version: str) -> Path:
    """On the path, in an image of manylinux, or of pyenv."""
    cp = "cp" + version.replace(".", "")
    places = [shutil.which(f"python{version}"), f"/opt/python/{cp}-{cp}/bin/python"]
    places += sorted(map(str, (Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python")))
    for place in filter(None, [sys.executable, *places]):
        try:
            asked = [place, "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])"]
            if subprocess.run(asked, capture_output=True, text=True, timeout=60).stdout.strip() == version:
                return Path(place)
        except OSError:
            continue
    raise SystemExit(f"[wheels] there is no Python {version}; put python{version} on PATH")


class Environment:
    """A virtual environment in `folder`, made anew."""

    def __init__(self, folder: Path, version: str, log: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.log, self.folder, self.python = log, folder, folder / "bin" / "python"
        run(interpreter(version), "-m", "venv", folder, folder=folder, environment=clean_environment(), log=log)

    def __call__(self, *command: str | Path, folder: Path | None = None, **more: str) -> str:
        environment = clean_environment(self.python) | more
        return run(*command, folder=folder or self.folder, environment=environment, log=self.log)

    def pip(self, *arguments: str | Path, **more: str) -> str:
        return self("python", "-m", "pip", "--disable-pip-version-check", *arguments, **more)


def tracked() -> set[str]:
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True)
    return set(listing.stdout.splitlines())


def make_sdist(tools: Environment, out: Path) -> Path:
    """SystemExit where it has a file that is not committed."""
    program = f"import scikit_build_core.build as b; print(b.build_sdist({str(out)!r}))"
    name = tools("python", "-c", program, folder=ROOT).splitlines()[-1]
    with tarfile.open(out / name) as archive:
        files = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    if strange := sorted(files - tracked() - {"PKG-INFO"}):
        raise SystemExit(f"[wheels] the sdist has files that git does not know: {', '.join(strange[:10])}")
    print(f"[wheels] {name}: {len(files)} files, {(out / name).stat().st_size >> 10} KiB", flush=True)
    return out / name


def nvcc(work: Path, log: Path) -> Path:
    """PyPI's, in an environment of its own: torch asks for other versions of CUDA's packages."""
    home = Environment(work / "nvcc", f"{sys.version_info.major}.{sys.version_info.minor}", log)
    home.pip("install", "-q", "-r", REQUIREMENTS / "cuda.txt")
    return next(home.folder.glob("lib/python3*/site-packages/nvidia/cu*/bin/nvcc"))


def build(entry: Entry, sdist: Path, work: Path, log: Path, jobs: int) -> tuple[Path, Path]:
    """The wheel, and the unpacked sdist. Nothing of torch's is imported; of its dependencies CUDA's bring NCCL's header
    and others."""
    home = Environment(work / "builder", entry.python, log)
    home.pip("install", "-q", "-r", REQUIREMENTS / "build.txt")
    home.pip("install", "-q", *([] if entry.cuda else ["--no-deps"]), entry.requirement)
    with tarfile.open(sdist) as archive:
        archive.extractall(work, filter="data")
    source = work / sdist.name.removesuffix(".tar.gz")
    more = {"TESSERA_WHEEL_LABEL": entry.label, "CMAKE_BUILD_PARALLEL_LEVEL": str(jobs)}
    options = ["-C", f"cmake.define.TESSERA_CUDA={'ON' if entry.cuda else 'OFF'}"]
    if entry.cuda:
        more["CUDACXX"] = str(nvcc(work, log))
    made = ("--no-build-isolation", "--no-deps", "--no-index", "-w", work / "made")
    home.pip("wheel", "-v", *made, *options, source, **more)
    (wheel,) = (work / "made").glob("*.whl")
    return wheel, source


def contents(wheel: Path) -> dict[str, str]:
    """Digests of its files, without those that name them and the platform."""
    with zipfile.ZipFile(wheel) as archive:
        return {
            name: hashlib.sha256(archive.read(name)).hexdigest()
            for name in archive.namelist()
            if not name.endswith(("/", ".dist-info/RECORD", ".dist-info/WHEEL"))
        }


def audit(entry: Entry, wheel: Path, tools: Environment, out: Path, folders: Sequence[Path], policy: str) -> Path:
    """The wheel with the lowest tag that its symbols allow, and otherwise as it was. SystemExit where it would need a
    library of this machine, names a folder of it, lacks a part, or is above `policy`."""
    before = contents(wheel)
    shutil.rmtree(out, ignore_errors=True)
    excluded = [word for name in FOREIGN for word in ("--exclude", name)]
    tools("auditwheel", "repair", "--plat", "auto", *excluded, "-w", out, wheel)
    (audited,) = out.glob("*.whl")
    if contents(audited) != before:
        raise SystemExit(f"[wheels] {audited.name} needs libraries that are neither torch's nor of every Linux")
    if has := sorted(name for name in before if "libtessera_cuda" in name) if not entry.cuda else []:
        raise SystemExit(f"[wheels] a wheel for the CPU has {has[0]}")
    parts = ["tessera/lib/libtessera.so", "tessera/include/tessera/tessera.h", "/TesseraConfig.cmake"]
    parts += [".data/scripts/tessera-run", ".dist-info/entry_points.txt", "tessera/py.typed", "tessera/_core."]
    parts += ["libtessera_cuda.so", "libtessera_cuda_comm.so"] if entry.cuda else []
    if missing := [part for part in parts if not any(part in name for name in before)]:
        raise SystemExit(f"[wheels] {audited.name} lacks {', '.join(missing)}")
    with zipfile.ZipFile(audited) as archive:
        for name in archive.namelist():
            data = archive.read(name)
            for folder in folders:
                if f"{folder}/".encode() in data:
                    raise SystemExit(f"[wheels] {name} names {folder}, a folder of this machine")
    tags = re.findall(r"manylinux_2_(\d+)|(linux)_x86", audited.name)
    wanted = re.fullmatch(r"manylinux_2_(\d+)", policy) if policy else None
    if wanted and not any(minor and int(minor) <= int(wanted[1]) for minor, _ in tags):
        raise SystemExit(f"[wheels] {audited.name} is not {policy}: build it in an image of that policy")
    return audited


def first_loop(source: Path) -> str:
    found = re.search(r"```python\n(.*?)\n```", (source / "README.md").read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def use(entry: Entry, wheel: Path, source: Path, tools: Environment, work: Path, log: Path) -> None:
    """What somebody does who has installed it."""
    home = Environment(work / "user", entry.python, log)
    home.pip("install", "-q", entry.requirement, wheel)
    home.pip("check")
    folder = work / "project"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "loop.py").write_text(first_loop(source))

    def said(expected: str, *command: str | Path) -> str:
        text = home(*command, folder=folder, OMP_NUM_THREADS="1")
        if not re.search(expected, text):
            raise SystemExit(f"{text}\n[wheels] expected {expected!r} of {' '.join(map(str, command))}")
        return text

    own = wheel.name.split("-")[1].partition("+")[0]
    program = "import importlib.metadata as m, tessera; print(m.version('tessera'), tessera.__file__)"
    said(rf"(?m)^{re.escape(own)}\+{re.escape(entry.label)} {re.escape(str(home.folder))}", "python", "-c", program)
    for command in ("tessera", "tessera-run"):
        said(rf"\b{re.escape(own)}\n", command, "--version")
        said("usage: ", command, "--help")
    said(re.escape(entry.torch), "tessera", "report")
    said("GiB|GB", "tessera", "estimate", "7B", "--ranks", "8")
    said("kernels_bits|parity", "python", "-m", "tessera.gpu", "--list")
    said(r"loss 0\.\d+", "python", "loop.py")
    said(r"(?s)loss 0\.\d+.*loss 0\.\d+", "tessera-run", "-n", "2", "python", "loop.py")
    said(r"(?s)loss 0\.\d+.*loss 0\.\d+", "tessera", "launch", "-n", "2", "loop.py")
    if entry.cuda:
        for name in ("libtessera_cuda.so", "libtessera_cuda_comm.so"):
            loads = f"import ctypes, tessera as t; print(ctypes.CDLL(t.cmake_prefix_path + '/lib/{name}'))"
            said("CDLL", "python", "-c", loads)

    prefix = said("tessera", "python", "-c", "import tessera; print(tessera.cmake_prefix_path)").splitlines()[-1]
    programs = tools.folder / "bin"
    made = ("-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={programs / 'ninja'}", f"-DCMAKE_PREFIX_PATH={prefix}")
    consumer = source / "tests" / "consumer"
    said("", programs / "cmake", "-S", consumer, "-B", folder / "cpp", "-DCMAKE_BUILD_TYPE=Release", *made)
    said("", programs / "cmake", "--build", folder / "cpp")
    said("", folder / "cpp" / "consumer")
    said("", "tessera-run", "-n", "2", folder / "cpp" / "consumer")


def make(entry: Entry, sdist: Path, tools: Environment, options: argparse.Namespace) -> Path:
    name = f"{entry.label}-{entry.python}"
    work = options.work / name
    before = [*(work / "made").glob("*.whl"), work / sdist.name.removesuffix(".tar.gz")]
    again = options.again and len(before) == 2 and all(path.exists() for path in before)
    if not again:
        shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True, exist_ok=True)
    log, begin = work / "log.txt", time.monotonic()

    def tell(what: str) -> None:
        print(f"[wheels] {name} {time.monotonic() - begin:5.0f} s: {what}", flush=True)

    tell(f"building, log in {log}")
    wheel, source = before if again else build(entry, sdist, work, log, options.jobs)
    tell(f"built {wheel.name}, {wheel.stat().st_size >> 10} KiB")
    audited = audit(entry, wheel, tools, work / "audited", (ROOT, options.work), options.policy)
    tell(f"audited {audited.name}")
    use(entry, audited, source, tools, work, log)
    shutil.copy2(audited, options.out)
    for folder in ("builder", "user", "nvcc", source.name):  # gigabytes
        shutil.rmtree(work / folder, ignore_errors=True)
    tell("installed and used")
    return Path(options.out, audited.name)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--all", action="store_true", help="the whole matrix, less what other options leave out")
    made.add_argument("--torch", default="", help="one of requirements/matrix.txt")
    made.add_argument("--python", default="", help="as 3.12")
    made.add_argument("--kind", choices=["cpu", "cuda"])
    made.add_argument("--policy", default="", help="the highest tag that will do, as manylinux_2_28")
    made.add_argument("--work", type=Path, default=ROOT / "build" / "wheels")
    made.add_argument("--out", type=Path, default=ROOT / "dist")
    made.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    made.add_argument("--again", action="store_true", help="a wheel that was built and has failed is not built anew")
    made.add_argument("--list", action="store_true", help="names what would be built")
    return made.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    entries = chosen(options)
    if options.list:
        print(*(f"{entry.label}-{entry.python} {entry.requirement}" for entry in entries), sep="\n")
        return 0
    options.work, options.out = options.work.resolve(), options.out.resolve()
    for folder in (options.work, options.out):
        folder.mkdir(parents=True, exist_ok=True)
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    tools = Environment(options.work / "tools", here, options.work / "tools.txt")
    tools.pip("install", "-q", "-r", REQUIREMENTS / "wheels.txt")
    sdist = make_sdist(tools, options.out)
    done, failed = [], []
    for entry in entries:
        try:
            done.append(make(entry, sdist, tools, options).name)
        except SystemExit as problem:
            print(problem, file=sys.stderr, flush=True)
            failed.append(f"{entry.label}-{entry.python}")
    print(f"[wheels] {len(done)} in {options.out}: {', '.join(done)}")
    if failed:
        print(f"[wheels] {len(failed)} failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
