"""make wheels: the matrix, the environments, the audit; and what else packages Tessera goes by the same matrix. The
builds themselves are long: CI runs one of them in turns."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import wheels  # noqa: E402

NO_FOLDER = Path("/no/folder")
WHEEL = "tessera-0.1.0+torch2.13.cpu-cp311-cp311-linux_x86_64.whl"
PARTS = [
    "tessera/lib/libtessera.so.0.1",
    "tessera/include/tessera/tessera.h",
    "tessera/lib/cmake/Tessera/TesseraConfig.cmake",
    "tessera-0.1.0.data/scripts/tessera-run",
    "tessera-0.1.0.dist-info/entry_points.txt",
    "tessera/py.typed",
    "tessera/_core.cpython-311-x86_64-linux-gnu.so",
]
KERNELS = "tessera/lib/libtessera_cuda.so"
NCCL = "tessera/lib/libtessera_cuda_comm.so"
CPU, CUDA = wheels.Entry("2.13.0", "3.11"), wheels.Entry("2.13.0", "3.11", "cu130")


def asked(*words: str) -> list[wheels.Entry]:
    return wheels.chosen(wheels.arguments(words))


def test_the_whole_matrix():
    entries = asked("--all")
    assert len(entries) == len(set(entries)) == 2 * len(wheels.torches()) * len(wheels.pythons())
    assert {entry.python for entry in entries} == {"3.10", "3.11", "3.12", "3.13"}
    assert len({(entry.label, entry.python) for entry in entries}) == len(entries)


def test_what_is_chosen():
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert asked() == [wheels.Entry(wheels.default_torch(), here)]
    (cuda,) = asked("--torch", "2.15.0", "--python", "3.13", "--kind", "cuda")
    assert (cuda.label, cuda.requirement) == ("torch2.15.cu132", "torch===2.15.0")
    assert CPU.requirement == "torch==2.13.0+cpu" and CPU.label == "torch2.13.cpu"
    assert len(asked("--all", "--kind", "cpu")) == 20
    assert {entry.python for entry in asked("--all", "--torch", "2.12.1", "--kind", "cuda")} == set(wheels.pythons())
    with pytest.raises(SystemExit, match=r"torch 1\.0 with Python"):
        asked("--torch", "1.0")


def test_the_environment_of_a_build_has_nothing_of_this_one(tmp_path):
    compiler = tmp_path / "cuda" / "bin"
    compiler.mkdir(parents=True)
    (compiler / "nvcc").touch()
    given = {
        "PATH": f"{ROOT}/.venv/bin:{compiler}:/usr/bin",
        "HOME": "kept",
        "PIP_FIND_LINKS": "kept",
        **dict.fromkeys(["PYTHONPATH", "CMAKE_ARGS", "CUDACXX", "TESSERA_BUILD_DIR", "LD_LIBRARY_PATH"], "no"),
    }
    found = wheels.clean_environment(Path("/env/bin/python"), given)
    assert found == {"PATH": "/env/bin:/usr/bin", "HOME": "kept", "PIP_FIND_LINKS": "kept"}


def test_a_command_that_fails_says_how_it_ended(tmp_path):
    log, environment = tmp_path / "log", wheels.clean_environment()
    assert wheels.run("echo", "fine", folder=tmp_path, environment=environment, log=log) == "fine\n"
    with pytest.raises(SystemExit, match=r"reason\n\[wheels\] failed with 3: sh"):
        wheels.run("sh", "-c", "echo reason >&2; exit 3", folder=tmp_path, environment=environment, log=log)
    assert log.read_text().startswith("$ echo fine\nfine\n$ sh -c")


def made(folder: Path, name: str, parts: list[str], **contents: str) -> Path:
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / name, "w") as archive:
        for part in parts:
            archive.writestr(part, contents.get(Path(part).name.partition(".")[0], ""))
    return folder / name


@pytest.mark.parametrize(
    ("entry", "parts", "policy", "audited", "contents", "says"),
    [
        (CPU, PARTS, "", "manylinux_2_35", {}, ""),
        (CPU, PARTS, "manylinux_2_28", "manylinux_2_24_x86_64.manylinux_2_28", {}, ""),
        (CUDA, [*PARTS, KERNELS, NCCL], "", "manylinux_2_28", {}, ""),
        (CPU, PARTS, "manylinux_2_28", "manylinux_2_35", {}, "is not manylinux_2_28"),
        (CPU, PARTS, "manylinux_2_28", "linux", {}, "is not manylinux_2_28"),
        (CPU, PARTS[1:], "", "linux", {}, "lacks tessera/lib/libtessera.so"),
        (CUDA, [*PARTS, NCCL], "", "linux", {}, "lacks libtessera_cuda.so"),
        (CUDA, [*PARTS, KERNELS], "", "linux", {}, "lacks libtessera_cuda_comm.so"),
        (CPU, [*PARTS, KERNELS], "", "linux", {}, "a wheel for the CPU has tessera/lib/libtessera_cuda.so"),
        (CPU, [*PARTS, NCCL], "", "linux", {}, "a wheel for the CPU has tessera/lib/libtessera_cuda_comm.so"),
        (CPU, PARTS, "", "linux", {"TesseraConfig": "set(X /no/folder/torch)"}, "TesseraConfig.cmake names /no/folder"),
        (CPU, PARTS, "", "patched", {}, "needs libraries that are neither"),
    ],
)
def test_audit(entry, parts, policy, audited, contents, says, tmp_path):
    wheel = made(tmp_path, WHEEL, parts, **contents)

    def auditwheel(*words: object) -> None:
        new = WHEEL.replace("linux", "linux" if audited == "patched" else audited)
        more = {"libtessera": "another RUNPATH"} if audited == "patched" else {}
        made(tmp_path / "out", new, parts, **contents, **more)

    if says:
        with pytest.raises(SystemExit, match=says):
            wheels.audit(entry, wheel, auditwheel, tmp_path / "out", [NO_FOLDER], policy)
    else:
        assert wheels.audit(entry, wheel, auditwheel, tmp_path / "out", [NO_FOLDER], policy).exists()


def test_pages_and_checks_have_the_versions_of_the_matrix():
    versions = [torch for torch, _ in wheels.torches()]
    assert wheels.default_torch() in versions
    page = (ROOT / "docs" / "build.md").read_text().partition("## Versions of torch")[2].partition("\n## ")[0]
    assert sorted(re.findall(r"^\| (\d+\.\d+\.\d+),", page, re.MULTILINE)) == versions
    minors = [".".join(version.split(".")[:2]) for version in versions]
    for text in (ROOT / "README.md", ROOT / "docs" / "build.md"):
        assert f"{minors[0]} to {minors[-1]}" in text.read_text()
    assert f"VERSION_LESS {minors[0]}" in (ROOT / "cmake" / "TesseraTorch.cmake").read_text()
    turns = re.findall(r'other_torch "\$\{others\[(\d)\]\}"', (ROOT / ".ci" / "run").read_text())
    assert sorted(map(int, turns)) == list(range(len(versions) - 1))


def test_sources_that_a_dockerfile_copies_are_there():
    text = (ROOT / "Dockerfile").read_text()
    stages = set(re.findall(r"^FROM \S+ AS (\w+)", text, re.MULTILINE))
    assert {"builder", "wheels", "runtime"} <= stages
    assert set(re.findall(r"(?:--from=|from=)(\w+)", text)) <= stages
    targets = re.findall(r"-- make (\w+)", text)
    asked_for = subprocess.run(["make", "-n", *targets, "PYTHON=python3"], cwd=ROOT, capture_output=True, text=True)
    assert targets == ["wheels"] and asked_for.returncode == 0 and "tools/wheels.py" in asked_for.stdout
    found = re.search(r'ARGS="(.*)"', text)
    assert found is not None
    words = found[1].replace("${KIND}", "cuda").replace("${TORCH:+--torch ${TORCH}}", "--torch 2.15.0").split()
    assert isinstance(wheels.arguments(words), argparse.Namespace)
    left_out = (ROOT / ".dockerignore").read_text().splitlines()
    assert ".git" not in left_out, "an sdist has what git knows"


def test_the_conda_recipe_has_a_package_for_each_of_the_matrix():
    build = pytest.importorskip("rattler_build", reason="make lint installs it")
    recipe = build.Stage0Recipe.from_file(ROOT / "conda" / "recipe.yaml")
    packages = [one.recipe for one in recipe.render(build.VariantConfig.from_file(ROOT / "conda" / "variants.yaml"))]
    found = set()
    for package in packages:
        host = [str(need) for need in package.requirements.host]
        run = [str(need) for need in package.requirements.run]
        (torch,) = (need for need in host if need.startswith("pytorch "))
        (python,) = (need for need in host if need.startswith("python "))
        assert torch in run and any(need.startswith("scikit-build-core >=0.11") for need in host)
        found.add((torch.split()[1].removesuffix(".*"), python.split()[1].removesuffix(".*"), "cuda" in torch))
    minors = {entry: ".".join(entry.torch.split(".")[:2]) for entry in wheels.matrix()}
    assert found == {(minors[entry], entry.python, bool(entry.cuda)) for entry in wheels.matrix()}
    assert len({str(package.build.string) for package in packages}) == len(packages) == len(wheels.matrix())
    text = (ROOT / "tessera" / "base" / "version.h").read_text()
    assert f'TESSERA_VERSION "{packages[0].package.version}"' in text
    assert str(packages[0].about.license) == "Apache-2.0"
