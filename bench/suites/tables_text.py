"""What the results of the tables say: the tables, the goals, the figures for the JSON file, the picture's curves."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

import device
from limits import state_bytes
from measure import ratio
from report import Goal, Result, cell, table
from trainers import parse

from suites.tables_runs import FULL, Experiment, Settings, context_of

BASELINE = "bare"
# An engine -> the loop in plain PyTorch that has its bits, at any stage.
PARTNERS = {
    f"tessera:{stage}{states}": loop for states, loop in (("+16", BASELINE), ("", "bare+up")) for stage in range(4)
}
LAST = 20  # steps whose mean is the final loss
POINTS = 40  # of a loss curve in the JSON file
MB = 1e6


def label(peer: str) -> str:
    return parse(peer).label


def formula(peer: str, ranks: int) -> float:
    """Bytes a parameter and rank: weight, gradient, master and moments, as the stage divides them. The plain loop: all
    of them on every rank."""
    spec = parse(peer)
    return state_bytes(True, spec.states or (None if spec.kind == "tessera" else 16), spec.stage, ranks)


@dataclass
class States:
    """Memory by row; times of one process a rank that has all rows, or of one for each row. A row that the device had
    no room for is missing in the times, and says so in the memory."""

    parameters: int
    memory: dict[str, dict[str, Any]]
    times: list[dict[str, Any]]

    @property
    def took_turns(self) -> bool:
        return len(self.times) == 1

    def whole(self, peer: str) -> list[float] | None:
        return next((found["whole"][peer] for found in self.times if peer in found.get("whole", {})), None)

    def phases(self, peer: str) -> dict[str, Any]:
        phases: dict[str, Any] = next(found["phases"][peer] for found in self.times if peer in found.get("phases", {}))
        return phases

    def over(self, peer: str, base: str) -> dict[str, float] | None:
        mine, other = self.whole(peer), self.whole(base)
        return ratio(mine, other) if mine and other else None

    @property
    def probes(self) -> list[Any]:
        return [probe for found in self.times for probe in found.get("probe", ())]


@dataclass
class Results:
    """What the tasks gave. train: by row and seed, then experiment. states: by size."""

    train: dict[str, dict[int, dict[str, Any]]]
    states: dict[str, States]

    @property
    def probes(self) -> list[Any]:
        return [probe for states in self.states.values() for probe in states.probes]

    @property
    def peers(self) -> list[str]:
        return list(self.train)


def final(losses: list[float]) -> float:
    return statistics.fmean(losses[-LAST:])


def over_seeds(values: list[float]) -> dict[str, float]:
    """Mean and range."""
    return {"median": statistics.fmean(values), "min": min(values), "max": max(values)}


def differences(results: Results, peer: str, experiment: str) -> dict[str, float]:
    """Held-out loss over that of the baseline with the same seed: mean and range over seeds."""
    base = results.train[BASELINE]
    mine = results.train[peer]
    return over_seeds([mine[s][experiment]["held_out"] - base[s][experiment]["held_out"] for s in mine])


def same_bits(results: Results, peer: str) -> tuple[int, int]:
    """Trainings in which every loss, the held-out loss and the last masters equal those of the partner; all."""
    partner = results.train[PARTNERS[peer]]
    runs = [(run, partner[seed][name]) for seed, found in results.train[peer].items() for name, run in found.items()]
    return sum(mine == other for mine, other in runs), len(runs)


def comparable(results: Results, settings: Settings) -> list[str]:
    """Rows with a partner in the run. With several ranks the sums over ranks are another library's, and on a device
    torch's own operators are free to fuse what the partner writes out."""
    if settings.ranks > 1 or settings.device != device.CPU:
        return []
    return [k for k, p in PARTNERS.items() if k in results.train and p in results.train]


# ---- the tables


def state_row(peer: str, states: States, settings: Settings) -> list[str]:
    named = [label(peer), f"{formula(peer, settings.ranks):.1f}"]
    found, count = states.memory[peer], states.parameters
    whole, over = states.whole(peer), states.over(peer, BASELINE)
    named += ["does not fit"] * 2 if FULL in found else [
        f"{found[what] / MB:,.0f} MB ({found[what] / count:.1f})" for what in ("allocated", "peak")
    ]  # fmt: skip
    if whole is None:
        return named + ["-"] * 3
    phases = states.phases(peer)
    return [*named, cell(phases["whole"], 0), cell(over, 2) if over else "-", cell(phases["step"])]


def state_table(states: States, settings: Settings) -> str:
    header = ["configuration", "formula", "allocated", "peak", "step time, ms"]
    header += [f"over {label(BASELINE)}", "of it update, ms"]
    return table(header, [state_row(peer, states, settings) for peer in states.memory])


def loss_table(results: Results, experiment: Experiment) -> str:
    rows = []
    for peer, seeds in results.train.items():
        runs = [found[experiment.name] for found in seeds.values()]
        ends = over_seeds([final(run["losses"]) for run in runs])
        means = over_seeds([statistics.fmean(run["losses"]) for run in runs])
        held_out = over_seeds([run["held_out"] for run in runs])
        apart = "-" if peer == BASELINE else cell(differences(results, peer, experiment.name), 4, "+")
        rows.append([label(peer), *(f"{v['median']:.4f}" for v in (ends, means)), cell(held_out, 4), apart])
        if experiment.from_start:
            own, whole = (gain(results, k, experiment.name) for k in (peer, BASELINE))
            rows[-1].append(f"{own / whole:.0%}" if whole > 0 else "-")
    header = ["configuration", "final loss", "mean loss", "held-out loss", f"difference to {label(BASELINE)}, held out"]
    return table(header + ["share of its gain"] * experiment.from_start, rows)


def gain(results: Results, peer: str, experiment: str) -> float:
    """By how much training lowered the held-out loss, from that of the shared start weights; mean over seeds."""
    base = results.train[BASELINE]
    values = [base[s][experiment]["before"] - run[experiment]["held_out"] for s, run in results.train[peer].items()]
    return statistics.fmean(values)


def bits_text(results: Results, settings: Settings) -> str:
    lines = []
    for peer in comparable(results, settings):
        equal, count = same_bits(results, peer)
        verdict = "bit for bit the same" if equal == count else f"**the same in {equal} of {count} trainings only**"
        lines.append(
            f"* {label(peer)} and {label(PARTNERS[peer])}: {verdict} (every loss of {count} trainings, the "
            "held-out losses, and all fp32 masters at the end)."
        )
    return "\n".join(lines)


def state_goals(size: str, states: States, settings: Settings) -> list[Goal]:
    goals = []
    several = f" ({size})" if len(settings.state_sizes) > 1 else ""
    for peer, found in states.memory.items():
        if parse(peer).kind != "tessera" or FULL in found:
            continue
        held = found["allocated"] / states.parameters / formula(peer, settings.ranks)
        goals.append(Goal(f"{label(peer)}: allocated over formula{several}", held, 1.05))
        over = states.over(peer, BASELINE)
        if over:
            title = f"{label(peer)}: step time over {label(BASELINE)}{several}"
            goals.append(Goal(title, over["median"], 1.0))
    return goals


def goals_of(results: Results, settings: Settings) -> list[Goal]:
    goals = []
    for peer in comparable(results, settings):
        equal, count = same_bits(results, peer)
        partner = label(PARTNERS[peer])
        goals.append(Goal(f"{label(peer)}: trainings with the bits of {partner}", equal, count, at_least=True))
    for peer in results.peers:
        spec = parse(peer)
        stochastic = spec.kind == "tessera" and spec.states in (10, 8) and not spec.nearest
        for experiment in settings.experiments if stochastic else ():
            apart = abs(differences(results, peer, experiment.name)["median"])
            goals.append(Goal(f"{label(peer)}: {experiment.name}, held-out loss from {label(BASELINE)}'s", apart, 0.01))
    for size, states in results.states.items():
        goals += state_goals(size, states, settings)
    return goals


# ---- the report


def memory_text(settings: Settings) -> str:
    if settings.device != device.CPU:
        return "what construction and training add to torch's allocations on the device"
    return "what construction and training add to the resident memory of a process of its own"


def state_text(size: str, states: States, settings: Settings) -> str:
    on_cpu = settings.device == device.CPU
    left_out = ", what the matrix library keeps for a plain model of that size is not" if on_cpu else ""
    rounds = f"of {settings.rounds} rounds in which all rows take turns"
    if not states.took_turns:
        rounds = f"of {settings.rounds} rounds, every row in a process of its own because not all fit at once"
    return (
        f"A GPT of {states.parameters / 1e6:,.1f} M parameters ({size}), one sequence of {context_of(size)} bytes a "
        f"rank. Memory: {memory_text(settings)}, after the steps and at the peak; activations are in it{left_out}; in "
        "brackets, and in the formula (weight + gradient + master + moments), bytes a parameter. The plain loops and "
        f"DeepSpeed hold no gradients between steps. Step time: medians (min-max) {rounds}; update: clipping, "
        "optimizer and new weights. PyTorch here is clip_grad_norm_ and fused AdamW."
    )


def experiment_text(experiment: Experiment, settings: Settings, results: Results) -> str:
    tokens = settings.rows * settings.ranks * context_of(settings.size)
    begin = "from random weights"
    if experiment.from_start:
        before = [seeds[experiment.name]["before"] for seeds in results.train[BASELINE].values()]
        begin = (
            f"from weights that were trained in fp32 on {settings.start.text} ({settings.start.steps} steps), held-out "
            f"loss {statistics.fmean(before):.3f} before"
        )
    return (
        f"On {experiment.text}, {begin}: {experiment.steps} steps of {tokens} bytes, AdamW with lr {experiment.lr:g}, "
        f"betas {experiment.betas[0]:g} and {experiment.betas[1]:g}, {experiment.warmup} steps of warm-up, then a "
        f"cosine to a tenth. Losses in nats per byte, means over {len(settings.seeds)} seeds; brackets: range over "
        f"the seeds. Final: mean of the last {min(LAST, experiment.steps)} steps."
    )


EXACT_BITS = (
    "In the loss tables the plain loops have AdamW, clipping and rounding written out (bench/reference.py), so that "
    "their bits are defined: Tessera's kernels have the same. Ties up: the loop whose bf16 weights round ties away "
    "from zero, as those of 14 bytes must; otherwise ties go to even. Everything is in bf16; where no number of bytes "
    "is given, Tessera has 14 (exact), the others fp32 masters."
)


def data_of(settings: Settings, results: Results) -> dict[str, Any]:
    def short(run: dict[str, Any]) -> dict[str, Any]:
        losses = run["losses"]
        width = max(1, len(losses) // POINTS)
        curve = [round(statistics.fmean(losses[i : i + width]), 4) for i in range(0, len(losses), width)]
        ends = {"final": final(losses), "mean": statistics.fmean(losses)}
        return {k: v for k, v in run.items() if k != "losses"} | ends | {"curve_width": width, "curve": curve}

    trained = {
        peer: {seed: {name: short(run) for name, run in found.items()} for seed, found in seeds.items()}
        for peer, seeds in results.train.items()
    }
    return {
        "settings": {name: value for name, value in asdict(settings).items() if name != "folder"},
        "train": trained,
        "states": {size: asdict(states) for size, states in results.states.items()},
    }


def headline_of(settings: Settings, results: Results) -> list[str]:
    found = []
    for experiment in settings.experiments:
        apart = [
            f"{label(peer)} {differences(results, peer, experiment.name)['median']:+.4f}"
            for peer in results.peers
            if peer not in (BASELINE, "bare+up")
        ]
        found.append(f"{experiment.name}, held-out loss from {label(BASELINE)}'s: {', '.join(apart)}")
    return found


def result_of(settings: Settings, results: Results) -> Result:
    text = [EXACT_BITS, "## What the states cost"]
    for size, states in results.states.items():
        text += [state_text(size, states, settings), state_table(states, settings)]
    for experiment in settings.experiments:
        text += [f"## {experiment.name.capitalize()}", experiment_text(experiment, settings, results)]
        text.append(loss_table(results, experiment))
    bits = bits_text(results, settings)
    text += ["## Bits", bits] if bits else []

    def plot(path: Any) -> None:
        from plots import loss_curves

        curves = {
            e.name: {label(peer): mean_curve(results, peer, e.name) for peer in results.peers}
            for e in settings.experiments
        }
        loss_curves(path, curves, label(BASELINE))

    where = "" if settings.device == device.CPU else f"Models on {device.title(settings.device)}. "
    how = f"{where}The probes are around the times."
    goals, headline = goals_of(results, settings), headline_of(settings, results)
    return Result(text, data_of(settings, results), goals, plot, headline, how, results.probes)


def mean_curve(results: Results, peer: str, name: str) -> list[float]:
    runs = [found[name]["losses"] for found in results.train[peer].values()]
    return [sum(values) / len(values) for values in zip(*runs, strict=True)]
