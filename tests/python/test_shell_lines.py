"""Lines of shells on the pages of the documentation: those that start ranks run, with stand-ins for srun and mpirun;
the others name what is there."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pages import ROOT, read
from support import free_port

yaml = pytest.importorskip("yaml")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RUN = Path(os.environ.get("TESSERA_BUILD_DIR", ROOT / "build" / "release")) / "commands" / "tessera-run"


def blocks(*languages: str) -> Iterator[tuple[str, str]]:
    """Page and line, and the text, without the ends of lines that go on."""
    for page in PAGES:
        for language, line, text in read(page).others:
            if language in languages:
                yield f"{page.name}:{line}", text.replace("\\\n", " ")


def lines() -> list[tuple[str, list[str]]]:
    found = [(place, line) for place, text in blocks("", "bash") for line in re.split(r"\n| && ", text)]
    return [(place, words) for place, line in found if (words := shlex.split(line, comments=True))]


@functools.cache
def help_of(*command: str) -> str:
    return subprocess.run([*command, "--help"], capture_output=True, text=True, check=True).stdout


def unknown_options(words: list[str], known: str) -> list[str]:
    """Those of `words` that a text of help lacks."""
    options = {word.split("=")[0] for word in words if word.startswith("-")}
    return [option for option in sorted(options) if not re.search(rf"(?<![\w-]){option}(?![\w-])", known)]


def wrong_in_make(words: list[str]) -> list[str]:
    makefile = (ROOT / "Makefile").read_text()
    targets = [word for word in words if "=" not in word]
    names = [word.split("=")[0] for word in words if "=" in word]
    return [t for t in targets if not re.search(rf"^(?:[\w-]+ )*{t}(?: [\w-]+)*:", makefile, re.MULTILINE)] + [
        name for name in names if f"$({name}" not in makefile
    ]


def wrong_in_pip(words: list[str]) -> list[str]:
    assert words[0] == "install"
    given = [word for word in words[1:] if not word.startswith("-")]
    folders = [word for word in given if word.startswith(".")]
    options = unknown_options(words, help_of(sys.executable, "-m", "pip", "install"))
    known = {"torch", "scikit-build-core", "cmake", "ninja", "nlohmann-json", "dist/tessera-*.whl", *folders}
    return options + [f for f in folders if not (ROOT / f / "pyproject.toml").is_file()] + sorted(set(given) - known)


def wrong_in_docker(words: list[str]) -> list[str]:
    dockerfile = (ROOT / "Dockerfile").read_text()
    arguments = [words[i + 1].split("=")[0] for i, word in enumerate(words) if word == "--build-arg"]
    targets = [words[i + 1] for i, word in enumerate(words) if word == "--target"]
    return [name for name in arguments if not re.search(rf"^ARG {name}\b", dockerfile, re.MULTILINE)] + [
        target for target in targets if not re.search(rf"^FROM .* AS {target}$", dockerfile, re.MULTILINE)
    ]


def wrong_in_bench(words: list[str]) -> list[str]:
    assert words[0] == "bench/run.py"
    return unknown_options(words, help_of(sys.executable, str(ROOT / words[0]), words[1]))


def wrong_in_cmake(words: list[str]) -> list[str]:
    options = unknown_options([word for word in words if not word.startswith("-D")], help_of("cmake", "--help-full"))
    presets = {each["name"] for each in json.loads((ROOT / "CMakePresets.json").read_text())["configurePresets"]}
    components = re.findall(r"COMPONENT (\w+)", (ROOT / "cmake" / "TesseraInstall.cmake").read_text())
    known = {"--preset": presets, "--component": {*components}}
    return options + [words[i + 1] for i, word in enumerate(words) if word in known and words[i + 1] not in known[word]]


WRONG = {
    "make": wrong_in_make,
    "pip": wrong_in_pip,
    "python3": lambda words: wrong_in_pip(words[2:]),
    "docker": wrong_in_docker,
    ".venv/bin/python": wrong_in_bench,
    "cmake": wrong_in_cmake,
    "~/tessera/bin/tessera-run": lambda words: unknown_options(words[: words.index("build/train")], help_of(str(RUN))),
}
STARTS = ("srun", "mpirun", "torchrun")
ELSEWHERE = ("tessera",)  # test_pages.py


def test_lines_name_what_is_there() -> None:
    found, wrong = set(), []
    for place, (program, *words) in lines():
        if program in WRONG and (missing := WRONG[program](words)):
            wrong.append(f"{place}: {program} {' '.join(words)}: {missing}")
        if program not in WRONG and program not in STARTS + ELSEWHERE:
            wrong.append(f"{place}: nothing here knows {program}")
        found.add(program)
    assert wrong == [] and found == {*WRONG, *STARTS, *ELSEWHERE}


# What the launchers set, of two hosts with as many tasks each as the line or the script's #SBATCH says.
STAND_INS = {
    "srun": """
        each=$SBATCH_EACH
        while [[ $1 == --* ]]; do
          [[ $1 == --ntasks-per-node=* ]] && each=${1#*=}
          shift
        done
        export SLURM_JOB_ID=7 SLURM_NNODES=2 SLURM_NTASKS=$((2 * each)) SLURM_JOB_NODELIST='localhost,localhost'
        for node in 0 1; do
          for ((local = 0; local < each; ++local)); do
            SLURM_NODEID=$node SLURM_LOCALID=$local SLURM_PROCID=$((node * each + local)) "$@" &
          done
        done
        wait
    """,
    "scontrol": '[[ "$*" == "show hostnames localhost,localhost" ]] && printf "localhost\\nlocalhost\\n"',
    "mpirun": """
        while [[ $1 == -* ]]; do
          [[ $1 == -np ]] && ranks=$2
          [[ $1 == -x ]] && export "$2"
          shift 2
        done
        for ((rank = 0; rank < ranks; ++rank)); do
          OMPI_COMM_WORLD_SIZE=$ranks OMPI_COMM_WORLD_RANK=$rank "$@" &
        done
        wait
    """,
    # What a launcher starts.
    "python": 'echo "rank ${RANK:-${SLURM_PROCID:-$OMPI_COMM_WORLD_RANK}} $MASTER_ADDR"',
    "torchrun": f'exec "{sys.executable}" -m torch.distributed.run "$@"',
    "tessera": f'exec "{sys.executable}" -m tessera "$@"',
}
TRAIN = 'import os; os.write(1, f\'rank {os.environ["RANK"]} {os.environ["MASTER_ADDR"]}\\n\'.encode())'  # in one piece


def starts() -> list[tuple[str, str]]:
    """Blocks and lines that start ranks, with where they are."""
    found = [(place, text) for place, text in blocks("", "bash") if re.search(r"^(srun|mpirun|torchrun)\b", text, re.M)]
    found += [(p, text) for p, text in blocks("", "bash") if re.search(r"^tessera launch .*--num-nodes", text, re.M)]
    for page in PAGES:
        inline = re.findall(r"`((?:tessera-run|mpirun|srun) [^`\n]*HOST[^`\n]* \./train)`", page.read_text())
        found += [(page.name, line) for line in inline]
    for place, text in blocks("yaml"):
        (job,) = (each for each in yaml.safe_load_all(text) if each["kind"] == "Job")
        (container,) = job["spec"]["template"]["spec"]["containers"]
        assert container["command"] == ["bash", "-c"]
        found.append((place, container["args"][0]))
    return found


@pytest.fixture
def stand_ins(tmp_path: Path) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, body in STAND_INS.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
    (folder / "tessera-run").symlink_to(RUN)
    (tmp_path / "train").write_text(f"#!/bin/bash\n{STAND_INS['python']}\n")
    (tmp_path / "train.py").write_text(TRAIN)
    for program in (*map(folder.joinpath, STAND_INS), tmp_path / "train"):
        program.chmod(0o755)
    return folder


@pytest.mark.parametrize(("place", "text"), [pytest.param(*each, id=each[0]) for each in starts()])
def test_lines_that_start_ranks(place: str, text: str, stand_ins: Path, tmp_path: Path) -> None:
    """2 hosts of 8 ranks, both of which are this one."""
    for name, here in (("HOST", "127.0.0.1"), ("train-0.train", "127.0.0.1"), ("29500", str(free_port()))):
        text = text.replace(name, here)
    each = re.search(r"^#SBATCH .*--ntasks-per-node=(\d+)", text, re.MULTILINE)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "OMPI", "RANK"))}
    environment |= {"PATH": f"{stand_ins}:{os.environ['PATH']}", "SBATCH_EACH": each[1] if each else "1"}
    by_host = "--node-rank 0" in text or "JOB_COMPLETION_INDEX" in text
    running = [
        subprocess.Popen(
            ["bash", "-c", text.replace("--node-rank 0", f"--node-rank {host}")],
            cwd=tmp_path,
            env=environment | {"JOB_COMPLETION_INDEX": str(host)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for host in range(2 if by_host else 1)
    ]
    printed = "".join(process.communicate(timeout=200)[0] for process in running)
    assert [process.returncode for process in running] == [0] * len(running), printed
    assert sorted(map(int, re.findall(r"\brank (\d+) ", printed))) == list(range(16)), printed
