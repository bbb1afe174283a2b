"""Bounds what the CUDA kernels take of a multiprocessor: reads the output of a build with -Xptxas=-v, passes all on
that is not ptxas's, and fails where a kernel spills, needs a stack or has too many registers, or none was compiled.
Usage: BUILD 2>&1 | check_ptxas.py sm_80 ..."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import NamedTuple

# At most, and of kernels with other blocks by a part of their name. With 64 a multiprocessor holds four blocks of 256
# threads, with 96 ten of 64.
REGISTERS, REGISTERS_OF = 64, {"block_sums": 96}


class Kernel(NamedTuple):
    name: str
    arch: str
    registers: int
    stack: int
    spills: int  # bytes stored and loaded


def parse(lines: Iterable[str]) -> tuple[list[Kernel], list[str]]:
    """The kernels, and the lines that do not tell of them."""
    kernels, others = [], []
    name = arch = ""
    stack = spills = 0
    for line in lines:
        if found := re.search(r"Compiling entry function '(\w+)' for '(\w+)'", line):
            name, arch = found.groups()
            stack = spills = 0
        elif found := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            stack, spills = int(found[1]), int(found[2]) + int(found[3])
        elif found := re.search(r"ptxas info\s*: Used (\d+) registers", line):
            kernels.append(Kernel(name, arch, int(found[1]), stack, spills))
        elif not re.search(r"ptxas info|Function properties for|^\s*$", line):
            others.append(line)
    return kernels, others


def faults(kernels: list[Kernel], archs: list[str]) -> list[str]:
    found = [f"no kernel was compiled for {arch}" for arch in archs if arch not in {k.arch for k in kernels}]
    for kernel in kernels:
        where = f"{kernel.name} ({kernel.arch})"
        most = next((most for name, most in REGISTERS_OF.items() if name in kernel.name), REGISTERS)
        if kernel.registers > most:
            found.append(f"{where}: {kernel.registers} registers, at most {most}")
        if kernel.stack or kernel.spills:
            found.append(f"{where}: {kernel.stack} bytes of stack, {kernel.spills} bytes of spills, none allowed")
    return found


def main(archs: list[str]) -> int:
    kernels, others = parse(sys.stdin)
    sys.stdout.writelines(others)
    wrong = faults(kernels, archs)
    for fault in wrong:
        print(f"check_ptxas: {fault}")
    for arch in archs:
        used = [kernel.registers for kernel in kernels if kernel.arch == arch]
        if used:
            print(f"{arch}: {len(used)} kernels, {min(used)} to {max(used)} registers")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
