"""What the C++ benchmark of the kernels prints, as rows, and what is asked of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from report import Goal

RULES = ("sgd", "momentum", "lion", "adagrad")
STOCHASTIC = "/stochastic"
LEAST = 0.8  # share of a probe
FULL = "adam/fp32+bf16/fp32_states/bf16_grad"  # fp32 master and moments beside a bf16 weight
FP32 = "adam/fp32/fp32_states/f32_grad"
IN_TURNS = "in_turns/threads:"
SMALLEST = "adam/bf16_alone/bf16_states/stochastic/bf16_grad"


@dataclass(frozen=True)
class Row:
    form: str
    threads: int
    table: str  # instruction set
    ns: float  # an element
    size: float  # bytes an element
    share: float  # of a probe of the same elements, maybe out of the cache as they are
    memory: float  # of a probe out of memory

    @property
    def group(self) -> str:
        rule = self.form.partition("/")[0]
        return rule if rule == "adam" else "rules" if rule in RULES else "elementwise"

    def data(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Turns:
    """Forms of Adam that took turns."""

    threads: int
    ns: dict[str, float]  # an element, by form


def entries(printed: dict[str, Any]) -> list[dict[str, Any]]:
    return [entry for entry in printed["benchmarks"] if entry.get("run_type", "iteration") == "iteration"]


def parse_turns(printed: dict[str, Any]) -> list[Turns]:
    """`printed`: the JSON of Google Benchmark; a name is in_turns/threads:N/TABLE/..., the forms are counters."""
    found = []
    for entry in entries(printed):
        if entry["name"].startswith(IN_TURNS):
            threads = int(entry["name"].removeprefix(IN_TURNS).partition("/")[0])
            ns = {form: value / 1e3 for form, value in entry.items() if form.startswith("adam/")}
            found.append(Turns(threads, ns))
    return found


def parse(printed: dict[str, Any]) -> list[Row]:
    """`printed`: the JSON of Google Benchmark; a name is FORM/threads:N/TABLE/manual_time."""
    rows = []
    for entry in entries(printed):
        if entry["name"].startswith(IN_TURNS):
            continue
        form, _, rest = entry["name"].partition("/threads:")
        threads, name = rest.split("/")[:2]
        ns, share, memory = entry["ps_per_element"] / 1e3, entry["%_of_probe"] / 100, entry["%_of_memory"] / 100
        rows.append(Row(form, int(threads), name, ns, entry["bytes_per_element"], share, memory))
    if not rows:
        raise ValueError("the benchmark of the kernels measured nothing")
    return rows


def rounding_pairs(rows: list[Row]) -> list[tuple[Row, Row]]:
    """A form with stochastic rounding, and the same to nearest."""
    known = {(row.form, row.threads): row for row in rows}
    pairs = [
        (row, known.get((row.form.replace(STOCHASTIC, ""), row.threads))) for row in rows if STOCHASTIC in row.form
    ]
    pairs += [
        (row, known.get((row.form.replace("scaled_add_stochastic", "scaled_add"), row.threads)))
        for row in rows
        if row.form.startswith("scaled_add_stochastic/")
    ]
    return [(row, other) for row, other in pairs if other is not None]


def counted(threads: int) -> str:
    return f"{threads} thread{'s' if threads > 1 else ''}"


def goals_of(title: str, rows: list[Row]) -> tuple[list[Goal], list[str]]:
    """A kernel's limit is its bytes over the bandwidth of memory; beside the cache it has a goal, too."""
    goals, headline = [], []
    for threads in sorted({row.threads for row in rows}):
        mine = [row for row in rows if row.threads == threads]
        where = f"{title}, {counted(threads)}"
        shares = []
        for group in ("adam", "rules", "elementwise"):
            of = [row for row in mine if row.group == group]
            if of:
                least = min(of, key=lambda row: row.memory)
                text = f"{where}: least share of memory's bandwidth, {group} ({least.form})"
                goals.append(Goal(text, least.memory, LEAST, True))
                shares.append(f"{group} {least.memory:.0%}")
                goals += same_data_goals(f"{where}: least share of the probe, {group}", of)
        headline.append(f"{where}, least share of memory's bandwidth: {', '.join(shares)}")
        goals += rounding_goals(where, mine)
    return goals, headline


def same_data_goals(text: str, rows: list[Row]) -> list[Goal]:
    """None where the probe of the same elements was the one out of memory."""
    if all(row.share == row.memory for row in rows):
        return []
    least = min(rows, key=lambda row: row.share)
    return [Goal(f"{text} ({least.form})", least.share, LEAST, True)]


def rounding_goals(where: str, rows: list[Row]) -> list[Goal]:
    """Each beside the probe that took turns with it, which has the same streams for both."""
    costs = {row.form: other.share / row.share for row, other in rounding_pairs(rows)}
    if not costs:
        return []
    worst = max(costs, key=lambda form: costs[form])
    return [Goal(f"{where}: time of stochastic over nearest rounding ({worst})", costs[worst], 1.1)]


def byte_goals(title: str, rows: list[Row], turns: list[Turns]) -> list[Goal]:
    """Forms of fewer bytes are faster in proportion."""
    sizes = {row.form: row.size for row in rows}
    goals = []
    for turn in turns:
        where = f"{title}, {counted(turn.threads)}, in turns"
        low = [form for form in turn.ns if form not in (FP32, FULL)]
        excess = {form: (turn.ns[form] / turn.ns[FULL]) / (sizes[form] / sizes[FULL]) for form in low}
        worst = max(excess, key=lambda form: excess[form])
        text = f"{where}: time a byte of a low-precision form over that of fp32 states ({worst})"
        goals.append(Goal(text, excess[worst], 1.1))
        gain = turn.ns[FP32] / turn.ns[SMALLEST]
        goals.append(Goal(f"{where}: time of Adam in fp32 over all bf16 with stochastic rounding", gain, 1.8, True))
    return goals
