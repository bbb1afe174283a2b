"""The pages of the documentation run: pages.py says how."""

from __future__ import annotations

import contextlib
import doctest
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from pages import ROOT, Program, read
from support import run_program

import tessera
from tessera import cli

FILES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = {path.relative_to(ROOT).as_posix(): read(path) for path in FILES}
PROGRAMS = [
    pytest.param(name, number, program, id=f"{name}:{program.blocks[0].line}")
    for name, page in PAGES.items()
    for number, program in enumerate(page.programs)
]
# Of Ray: tests/python/hybrid/link_ranks.py.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"}


@pytest.mark.parametrize(("name", "number", "program"), PROGRAMS)
def test_programs(name: str, number: int, program: Program, tmp_path: Path) -> None:
    if program.needs and importlib.util.find_spec(program.needs) is None:
        pytest.skip(f"{program.needs} is not installed")
    for file, text in PAGES[name].files.items():
        (tmp_path / file).write_text(text)
    paths = os.pathsep.join(os.path.abspath(path) for path in sys.path if path)
    command = [sys.executable, Path(__file__).with_name("pages.py"), ROOT / name, str(number)]
    outputs = run_program(command, program.ranks, tmp_path, PYTHONPATH=paths, **ENVIRONMENT)
    printed = json.loads(outputs[0].rstrip().splitlines()[-1])
    same = doctest.OutputChecker().check_output
    for block, got in zip(program.blocks, printed, strict=True):
        if block.prints is not None:
            assert same(block.prints, got, doctest.ELLIPSIS), f"{name}:{block.line} prints\n{got}"


def test_what_is_not_run_has_a_reason() -> None:
    skipped = {f"{name}:{line}": reason for name, page in PAGES.items() for line, reason in page.skipped}
    assert [place for place, reason in skipped.items() if not re.search("GPU|Ray|hosts", reason)] == []
    assert len(skipped) <= 2


# Blocks of other languages than Python -> what runs them.
RUN_BY = {
    "json": "test_configurations below",
    "cpp": "tests/consumer/pages.py",
    "cmake": "tests/consumer/pages.py: the file of cpp.md; test_lines_of_cmake below",
    "": "test_shell_lines.py",
    "bash": "test_shell_lines.py",
    "yaml": "test_shell_lines.py: the command of its job",
}


def test_every_block_is_run_by_something() -> None:
    found = {language for page in PAGES.values() for language, _, _ in page.others}
    assert found == set(RUN_BY)


def test_lines_of_cmake_are_of_the_file_that_is_built() -> None:
    blocks = {name: text for name, page in PAGES.items() for language, _, text in page.others if language == "cmake"}
    built = blocks.pop("docs/cpp.md").splitlines()
    lines = [line.partition("#") for text in blocks.values() for line in text.splitlines()]
    assert len(lines) > 1 and [line for line, _, _ in lines if line.rstrip() not in built] == []
    for code in re.findall(r'\$\(python -c "(.*?)"\)', "".join(note for _, _, note in lines)):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert (Path(done.stdout.strip()) / "share").is_dir() or Path(done.stdout.strip()).is_dir()


@pytest.mark.parametrize("name", [name for name, page in PAGES.items() if any(o[0] == "json" for o in page.others)])
def test_configurations(name: str) -> None:
    for language, line, text in PAGES[name].others:
        if language == "json":
            try:
                tessera.Config.from_json(text)
            except tessera.ConfigError as error:
                raise AssertionError(f"{name}:{line}: {error}") from error


def commands() -> dict[str, list[str]]:
    """Lines and words of pages that begin with `tessera COMMAND` -> where they are."""
    found: dict[str, list[str]] = {}
    for path, (name, page) in zip(FILES, PAGES.items(), strict=True):
        lines = [line for _, _, text in page.others for line in text.replace("\\\n", " ").splitlines()]
        lines += re.findall(r"`(tessera [^`\n]+)`", path.read_text())
        for line in lines:
            if line.startswith("tessera "):
                found.setdefault(line.split("  #")[0], []).append(name)
    return found


def test_commands_and_their_options_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    helps: dict[str, str] = {}
    wrong = []
    for line, places in commands().items():
        words = shlex.split(line, comments=True)[1:]
        program = next((number for number, word in enumerate(words) if word.endswith(".py")), len(words))
        words = words[:program]  # what comes after it is its own
        if words[0] in ("--version", "--help") or words[0].startswith("COMMAND"):
            continue
        if words[0] not in helps:
            with contextlib.suppress(SystemExit):
                cli.main([words[0], "--help"])
            helps[words[0]] = "".join(capsys.readouterr()).replace("_", "-")
        options = [word.split("=")[0].replace("_", "-") for word in words[1:] if word.startswith("-")]
        missing = [option for option in options if not re.search(rf"(?<![\w-]){option}(?![\w-])", helps[words[0]])]
        if words[0] not in cli.COMMANDS or missing:
            wrong.append(f"{', '.join(places)}: `{line}`: {missing}")
    assert wrong == [] and len(helps) >= 6
