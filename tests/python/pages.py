"""Programs of the documentation's pages, and the program that runs one: `pages.py PAGE NUMBER FOLDER`.

The ```python blocks of a page are one program, in their order. Comments of HTML, which no reader sees, say what else
holds:

    <!-- run:                        code of the program, where it stands: what a fragment needs, what is true after it
    code
    -->
    <!-- run: from here ranks=2 -->  a new program begins, on two ranks
    <!-- run: alone ranks=2 -->      the next block is a program of its own
    <!-- run: not (reason) -->       the next block is not run

Options: ranks=N (default 1) and needs=PACKAGE, without which the program is skipped. A block with `file=NAME` behind
its language is a file in the folder of every program of its page, and python ones are run as well. A ```text block
after one of python is what rank 0 prints in it, with `...` for what varies.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PART = re.compile(r"^```(\S*)(?: file=(\S+))?\n(.*?)^```$|^<!-- run:(.*?)-->$", re.M | re.S)
HEAD = re.compile(r"(from here|alone|not \(.{5,}\))?((?: ?\b(?:ranks=\d|needs=\w+))*)$")


@dataclass
class Block:
    line: int  # of the page, where its text begins
    text: str
    prints: str | None = None


@dataclass
class Program:
    ranks: int = 1
    needs: str | None = None
    blocks: list[Block] = field(default_factory=list)


@dataclass
class Page:
    programs: list[Program]
    files: dict[str, str]
    others: list[tuple[str, int, str]]  # language, line, text: all but python and text
    skipped: list[tuple[int, str]]  # line and reason


def read(path: Path) -> Page:
    text = path.read_text()
    programs, page = [Program()], Page([], {}, [], [])
    alone, reason, last = None, "", None
    for found in PART.finditer(text):
        language, file, code, note = found.groups()
        line = text.count("\n", 0, found.start()) + 2
        if note is not None and note.startswith("\n"):
            programs[-1].blocks.append(Block(line, note[1:]))
        elif note is not None:
            head = HEAD.match(note.strip())
            assert head, f"{path.name}:{line - 1}: what is `run:{note}`? tests/python/pages.py has the words"
            options = dict(option.split("=") for option in head[2].split())
            program = Program(int(options.get("ranks", 1)), options.get("needs"))
            if head[1] == "from here":
                programs.append(program)
            elif head[1] == "alone":
                alone = program
            else:
                reason = (head[1] or "").removeprefix("not ")
                assert reason, f"{path.name}:{line - 1}: options without `from here` or `alone`"
        else:
            if file:
                page.files[file] = code
            if language == "text" and last is not None:
                last.prints = code
            elif language not in ("python", "text"):
                page.others.append((language, line, code))
            last = None
            if language == "python" and reason:
                page.skipped.append((line, reason))
            elif language == "python":
                last = Block(line, code)
                (programs[-1] if alone is None else alone).blocks.append(last)
                if alone is not None:
                    page.programs.append(alone)
            if language == "python":
                alone, reason = None, ""
    page.programs += [program for program in programs if program.blocks]
    return page


def run(path: Path, program: Program) -> list[str]:
    """What each block prints."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    printed = []
    for block in program.blocks:
        # Lines as in the page, so that errors show them.
        code = compile("\n" * (block.line - 1) + block.text, str(path), "exec", dont_inherit=True)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(code, module.__dict__)
        printed.append(out.getvalue())
    return printed


if __name__ == "__main__":
    page_file, number = Path(sys.argv[1]), int(sys.argv[2])
    sys.path.insert(0, "")
    results = run(page_file, read(page_file).programs[number])
    print("\n" + json.dumps(results), flush=True)
