"""What cannot be undercut: bytes that an update must move, and what collectives between ranks of one host must copy, at
the memory bandwidth that the probe found."""

from __future__ import annotations

FP32, BF16 = 4, 2
DEFAULT_STATES = {False: 16, True: 14}  # bytes a parameter by whether it is bf16; fp32 has 4 + 4 + 8

# Read and written for one parameter by norm and update, by bytes of states: gradient (norm), gradient (update), and
# master and moments read and written; a bf16 weight beside a separate master is only written.
STEP_BYTES = {
    16: 2 + 2 + 3 * 8 + 2,  # fp32 master and moments, bf16 weight
    14: 2 + 2 + 2 * 4 + 2 * 8,  # weight and residual, fp32 moments
    10: 2 + 2 + 2 * 4 + 2 * 4,  # the same, bf16 moments
    8: 2 + 2 + 3 * 4,  # weight and moments in bf16
}
FP32_STEP_BYTES = 4 + 4 + 3 * 8


def states_of(bf16: bool, states: int | None) -> int:
    return DEFAULT_STATES[bf16] if states is None else states


def step_bytes(bf16: bool, states: int | None) -> int:
    """`states`: bytes of states a parameter, None for the default of the precision."""
    return STEP_BYTES[states_of(bf16, states)] if bf16 else FP32_STEP_BYTES


def step_seconds(bf16: bool, states: int | None, elements: int, stage: int, ranks: int, bandwidth: float) -> float:
    """`bandwidth`: bytes a second of one rank while all are busy. From stage 1 on a rank updates its share."""
    return step_bytes(bf16, states) * elements / (ranks if stage > 0 else 1) / bandwidth


def reduce_scatter_bytes(size: int, ranks: int) -> int:
    """Each rank's buffer is read once, the sum written once."""
    return (ranks + 1) * size if ranks > 1 else 0


def all_gather_bytes(size: int, ranks: int) -> int:
    """Every rank reads and writes everything."""
    return 2 * ranks * size if ranks > 1 else 0


def collective_bytes(stage: int, size: int, ranks: int, micro_steps: int = 1) -> int:
    """Read and written on the host for one update; `size`: bytes of all gradients, and of all weights."""
    reduce, gather = reduce_scatter_bytes(size, ranks), all_gather_bytes(size, ranks)
    if stage <= 1:
        return reduce + gather
    if stage == 2:
        return micro_steps * reduce + gather
    return micro_steps * (reduce + 2 * gather)


def update_seconds(
    bf16: bool, states: int | None, elements: int, stage: int, ranks: int, bandwidth: float, micro_steps: int = 1
) -> float:
    """The least that one update adds to its forwards and backwards: the optimizer's pass, and collectives of which
    nothing is hidden."""
    travel = collective_bytes(stage, elements * (BF16 if bf16 else FP32), ranks, micro_steps) / (ranks * bandwidth)
    return step_seconds(bf16, states, elements, stage, ranks, bandwidth) + travel


# Weight, gradient, and master with moments, by bytes of states.
PARTS = {16: (2, 2, 12), 14: (2, 2, 10), 10: (2, 2, 6), 8: (2, 2, 4)}
FP32_PARTS = (4, 4, 8)


def _shares(bf16: bool, states: int | None, stage: int, ranks: int) -> list[float]:
    parts = PARTS[states_of(bf16, states)] if bf16 else FP32_PARTS
    return [part / (ranks if stage >= first else 1) for part, first in zip(parts, (3, 2, 1), strict=True)]


def state_bytes(bf16: bool, states: int | None, stage: int, ranks: int) -> float:
    """Bytes a parameter that a rank holds: the stage says which parts are divided."""
    return sum(_shares(bf16, states, stage, ranks))


def gradient_bytes(bf16: bool, stage: int, ranks: int) -> float:
    """Of those, what is there only from the backward to the update."""
    return _shares(bf16, None, stage, ranks)[1]
