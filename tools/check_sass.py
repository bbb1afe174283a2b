"""Reads the machine code of the CUDA kernels and checks what makes them fast. The pass over whole eights
(tessera/kernels/cuda/eight.cuh) of each kernel
  * accesses memory 16 bytes at a time: as many bytes as the edges of ranges do, element by element,
  * marks them as read and written once (.EF),
  * has all of its loads on their way before anything waits for one, with no branch among them but the one for a copy
    that is adopted, and none before them but the search of the segment and the ends of a range: no dtype is asked for,
  * keeps nothing in local memory.
Prints the instructions that a thread executes for each element, at least.
Usage: check_sass.py CUOBJDUMP LIBRARY ARCH ..."""

from __future__ import annotations

import heapq
import re
import subprocess
import sys
from typing import NamedTuple

ELEMENTS = {"update_eights": 8, "each_eight": 8}  # of a thread, by kernel
BRANCHES_BEFORE = 4  # the search's two, the range's end, and whether an eight is whole

WIDTHS = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}


class Instruction(NamedTuple):
    address: int
    guard: str  # "@!P0 " or nothing
    opcode: str
    operands: str

    def is_wide(self, what: str) -> bool:
        return self.opcode.startswith(what) and ".128" in self.opcode

    def width(self) -> int:
        """Bytes, of an access to memory."""
        return next((width for part, width in WIDTHS.items() if part in self.opcode.split(".")), 4)

    def target(self) -> int | None:
        """Where a branch goes, unless into a register."""
        found = re.search(r"0x([0-9a-f]+)\s*$", self.operands)
        return int(found[1], 16) if self.opcode.startswith("BRA") and found else None

    def reads(self) -> set[int]:
        """Registers. The first operand is written, except in stores and branches."""
        text = self.operands
        if not re.match(r"ST|BRA|EXIT|RET|CALL|RED|ATOM", self.opcode):
            text = text.partition(",")[2]
        found = set()
        for number, wide in re.findall(r"\bR(\d+)(\.64)?", text):
            found |= {int(number), int(number) + (1 if wide else 0)}
        return found

    def loaded(self) -> set[int]:
        first = int(re.match(r"R(\d+)", self.operands)[1])  # type: ignore[index]
        return set(range(first, first + 4))


class Kernel(NamedTuple):
    name: str
    code: list[Instruction]

    def kind(self) -> str:
        return next((kind for kind in ELEMENTS if kind in self.name), "")


def parse(text: str) -> list[Kernel]:
    kernels: list[Kernel] = []
    for line in text.splitlines():
        if found := re.match(r"\s*Function : (\w+)", line):
            kernels.append(Kernel(found[1], []))
        elif found := re.match(r"\s*/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;", line):
            kernels[-1].code.append(Instruction(int(found[1], 16), found[2] or "", found[3], found[4]))
    return kernels


def shortest(code: list[Instruction], begin: int, end: set[int]) -> tuple[int, int]:
    """How many instructions are executed at least from one to one of `end`, by indices; and which one that is. What
    subroutines do counts as nothing: they are the rare cases of divisions and roots."""
    at = {instruction.address: i for i, instruction in enumerate(code)}
    costs, queue = {begin: 0}, [(0, begin)]
    while queue:
        cost, i = heapq.heappop(queue)
        if i in end:
            return cost, i
        instruction = code[i]
        next_ones = []
        target = instruction.target()
        if target is not None:
            next_ones.append(at[target])
        goes_on = target is None or instruction.guard or re.match(r"!?U?P\d", instruction.operands)
        if goes_on and not (re.match(r"EXIT|RET", instruction.opcode) and not instruction.guard):
            next_ones.append(i + 1)
        for n in next_ones:
            if n < len(code) and cost + 1 < costs.get(n, 1 << 30):
                costs[n] = cost + 1
                heapq.heappush(queue, (cost + 1, n))
    raise ValueError(f"no way from {code[begin].address:#x}")


def executed(kernel: Kernel) -> float:
    """Instructions an element."""
    code, total, i = kernel.code, 0, 0
    for ends in (
        {i for i, one in enumerate(code) if one.is_wide("LDG")},
        {i for i, one in enumerate(code) if one.is_wide("STG")},
        {i for i, one in enumerate(code) if one.opcode == "EXIT" and not one.guard},
    ):
        cost, i = shortest(code, i, ends)
        total += cost
    return (total + 1) / ELEMENTS[kernel.kind()]


def faults_of_streams(kernel: Kernel) -> list[str]:
    found = []
    for what, does in (("LDG", "loads"), ("STG", "stores")):
        accesses = [one for one in kernel.code if one.opcode.startswith(what)]
        wide = sum(one.width() for one in accesses if one.is_wide(what))
        narrow = sum(one.width() for one in accesses if not one.is_wide(what))
        if wide != narrow:
            found.append(f"{does} {wide} bytes 16 at a time, where its elements have {narrow}")
        found += [
            f"{one.opcode} at {one.address:#x}: no streaming hint"
            for one in accesses
            if one.is_wide(what) and ".EF" not in one.opcode
        ]
    return found


def faults(kernel: Kernel) -> list[str]:
    code = kernel.code
    found = [f"{one.opcode} at {one.address:#x}: local memory" for one in code if re.match(r"(LD|ST)L\b", one.opcode)]
    loads = [i for i, one in enumerate(code) if one.is_wide("LDG")]
    if not loads:
        return [*found, "no load of 16 bytes"]
    if kernel.kind() and not any(one.is_wide("STG") for one in code):
        found.append("no store of 16 bytes")
    if kernel.kind():
        found += faults_of_streams(kernel)
    branches = [i for i, one in enumerate(code) if one.target() is not None]
    before = sum(i < loads[0] for i in branches)
    if kernel.kind() and before > BRANCHES_BEFORE:
        found.append(f"{before} branches before the first load of 16 bytes, at most {BRANCHES_BEFORE}")
    among = sum(loads[0] < i < loads[-1] for i in branches)
    if among > ("MasterAndCopy" in kernel.name):
        found.append(f"{among} branches among the loads of 16 bytes")
    on_their_way: set[int] = set()
    for one in code[loads[0] : loads[-1] + 1]:
        if waits := one.reads() & on_their_way:
            found.append(f"{one.opcode} at {one.address:#x} waits for R{min(waits)} before all loads are on their way")
        if one.is_wide("LDG"):
            on_their_way |= one.loaded()
    return found


def main(cuobjdump: str, library: str, archs: list[str]) -> int:
    wrong = 0
    for arch in archs:
        text = subprocess.run(
            [cuobjdump, "-sass", "-arch", arch, library], capture_output=True, text=True, check=True
        ).stdout
        kernels = parse(text)
        good = []
        for kernel in kernels:
            found = faults(kernel)
            wrong += len(found)
            for fault in found:
                print(f"check_sass: {kernel.name} ({arch}): {fault}")
            if not found:
                good.append(kernel)
        for kind in ELEMENTS:
            counts = [executed(kernel) for kernel in good if kernel.kind() == kind]
            if not any(kernel.kind() == kind for kernel in kernels):
                wrong += 1
                print(f"check_sass: no kernel {kind} for {arch}")
            elif counts:
                least, most = round(min(counts)), round(max(counts))
                print(f"{arch}: {len(counts)} kernels {kind}, {least} to {most} instructions an element")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
