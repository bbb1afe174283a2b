"""The C++ blocks of the documentation as one program, which a test compiles and runs: `pages.py FOLDER`.

The blocks of a page, or of pages that go on from each other, are the body of a function, in their order. Comments of
HTML, which no reader sees, say what else holds (tests/python/pages.py has the same for Python):

    <!-- cpp:                        code where it stands: what a fragment needs, what is true after it
    code
    -->
    <!-- cpp: outside                code before the function; without any, the next block stands there
    code
    -->
    <!-- cpp: file config.json   what stands in a file where the function runs, before any rank starts
    text
    -->
    <!-- cpp: from here ranks=1,2 -->  a new function begins, which runs on one rank and on two

An #include stands before everything. FOLDER gets main.cpp, whose first argument says which function it runs;
functions.txt, a line for each, its name and numbers of ranks; files/NAME, what it finds; the CMakeLists.txt that
docs/cpp.md shows; installed/CMakeLists.txt, the same with the lines of docs/build.md, for the Python package's layout;
and commands.txt, the lines of docs/cpp_recipes.md for a shell, which are for the folder that its program leaves.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
TOGETHER = [["cpp.md", "cpp_recipes.md"]]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PIECE = re.compile(r"^```cpp\n(.*?)^```$|^<!-- cpp:(.*?)-->$", re.MULTILINE | re.DOTALL)


@dataclass
class Function:
    name: str
    ranks: list[str] = field(default_factory=lambda: ["1"])
    outside: list[str] = field(default_factory=list)
    inside: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)


def functions(pages: list[str]) -> list[Function]:
    stem = Path(pages[0]).stem
    found = [Function(stem)]
    moves = False  # the next block to the outside
    for piece in PIECE.finditer("\n".join((DOCS / page).read_text() for page in pages)):
        block, hidden = piece.groups()
        if block is not None:
            (found[-1].outside if moves else found[-1].inside).append(block)
            moves = False
            continue
        head, _, code = hidden.partition("\n")
        if begins := re.fullmatch(r" from here ranks=([\d,]+) ?", head):
            if found[-1].inside or found[-1].outside:
                found.append(Function(f"{stem}_{len(found) + 1}"))
            found[-1].ranks = begins[1].split(",")
            found[-1].inside.append(code)
        elif head.strip() == "outside":
            moves = not code.strip()
            found[-1].outside.append(code)
        elif name := re.fullmatch(r" file ([\w.]+) ?", head):
            found[-1].files[name[1]] = code
        elif head.strip():
            raise SystemExit(f"{pages[0]}: '<!-- cpp:{head}' is not known")
        else:
            found[-1].inside.append(code)
    return [function for function in found if function.inside or function.outside]


def all_functions() -> list[Function]:
    """Of every page with a block of C++."""
    joined = {page for pages in TOGETHER for page in pages}
    alone = [[page.name] for page in sorted(DOCS.glob("*.md")) if page.name not in joined]
    return [function for pages in TOGETHER + alone for function in functions(pages)]


MAIN = """
int main(int, char** arguments) try {
  const std::string name = arguments[1];
%s  return 2;
} catch (const std::exception& error) {
  std::cerr << error.what();
  return 1;
}
"""
INCLUDE = re.compile(r"^#include .*\n", re.MULTILINE)


def program(known: list[Function]) -> str:
    parts = ((f.name, "".join(f.outside), "".join(f.inside)) for f in known)
    body = "".join(f"namespace {name} {{\n{outside}void run() {{\n{inside}}}\n}}\n" for name, outside, inside in parts)
    includes = sorted({*INCLUDE.findall(body), "#include <iostream>\n", "#include <string>\n"})
    choices = "".join(f'  if (name == "{f.name}") return {f.name}::run(), 0;\n' for f in known)
    return "".join(includes) + INCLUDE.sub("", body) + MAIN % choices


def blocks(page: str, language: str) -> list[str]:
    return [text for of, text in BLOCK.findall((DOCS / page).read_text()) if of == language]


def with_lines_of(some: str, whole: str) -> str:
    """A file of CMake in which lines of `some` take the place of those with the same command and name."""
    lines = {re.split(r"[ )]", line)[0]: line for line in some.splitlines()}
    taken = [
        lines.pop(re.split(r"[ )]", line)[0], line.replace("main.cpp", "../main.cpp")) for line in whole.splitlines()
    ]
    if lines:
        raise SystemExit(f"not a line of {list(lines)} is in\n{whole}")
    return "\n".join(taken) + "\n"


if __name__ == "__main__":
    known = all_functions()
    folder = Path(sys.argv[1])
    folder.mkdir(exist_ok=True)
    (folder / "main.cpp").write_text(program(known))
    (folder / "functions.txt").write_text("".join(f"{f.name} {' '.join(f.ranks)}\n" for f in known))
    for function in known:
        files = folder / "files" / function.name
        files.mkdir(parents=True, exist_ok=True)
        for name, text in function.files.items():
            (files / name).write_text(text)
    (shown,) = blocks("cpp.md", "cmake")
    (installed,) = blocks("build.md", "cmake")
    (folder / "CMakeLists.txt").write_text(shown)
    (folder / "installed").mkdir(exist_ok=True)
    (folder / "installed" / "CMakeLists.txt").write_text(with_lines_of(installed, shown))
    (commands,) = blocks("cpp_recipes.md", "")
    (folder / "commands.txt").write_text(re.sub(r" +#.*", "", commands))
