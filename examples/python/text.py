"""Text for the examples: bytes, a held-out part, and a batch order that Python and C++ share (examples/cpp/text.h).

usage: text.py FILE      writes the default text, so that the C++ example can read it
"""

from __future__ import annotations

import pydoc_data.topics
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

MASK = (1 << 64) - 1


def load_text(path: str | None = None) -> bytes:
    """The bytes of `path`; without a path the language reference that every CPython carries."""
    if path is not None:
        return Path(path).read_bytes()
    return "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items())).encode()


def mix(x: int) -> int:
    """SplitMix64: a counter in, 64 well mixed bits out."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


class Text:
    """The first nine tenths train, the last tenth is held out."""

    def __init__(self, data: bytes, context: int) -> None:
        cut = len(data) - len(data) // 10
        if len(data) - cut <= context + 1:
            raise ValueError(f"a context of {context} needs a text of {10 * (context + 2)} bytes; it has {len(data)}")
        tokens = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.train, self.held_out, self.context = tokens[:cut], tokens[cut:], context

    def _cut(self, part: Tensor, starts: list[int]) -> tuple[Tensor, Tensor]:
        rows = torch.stack([part[start : start + self.context + 1] for start in starts]).long()
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def batch(self, step: int, rank: int, ranks: int, rows: int) -> tuple[Tensor, Tensor]:
        """(x, y) of one rank, each (rows, context). The ranks' batches together do not depend on their number."""
        first = (step * ranks + rank) * rows
        places = len(self.train) - self.context
        return self._cut(self.train, [mix(first + row) % places for row in range(rows)])

    def held_out_batches(self, rows: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """`count` fixed batches, evenly spread over the held-out part."""
        places = len(self.held_out) - self.context
        starts = [i * places // (rows * count) for i in range(rows * count)]
        for i in range(count):
            yield self._cut(self.held_out, starts[i * rows : (i + 1) * rows])


if __name__ == "__main__":
    Path(sys.argv[1]).write_bytes(load_text())
