"""The report: figures from the runs' results, the two tables, what they say about the goals."""

from __future__ import annotations

import importlib.metadata
import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from index import write_index
from measure import ratio
from report import QUIET, Goal, Probe, cell, goals_data, machine, moved, probe_text, table

from tables import place
from tables.modes import BASELINE, MODES, PARTNERS, formula
from tables.place import CPU
from tables.settings import SIZES, Experiment, Settings
from tables.worker import FULL

TITLE = "Low-precision model states: memory, time and loss"
LAST = 20  # steps whose mean is the final loss
POINTS = 40  # of a loss curve in the JSON file
MB = 1e6


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

    def whole(self, key: str) -> list[float] | None:
        return next((found["whole"][key] for found in self.times if key in found.get("whole", {})), None)

    def phases(self, key: str) -> dict[str, Any]:
        phases: dict[str, Any] = next(found["phases"][key] for found in self.times if key in found.get("phases", {}))
        return phases

    def over(self, key: str, base: str) -> dict[str, float] | None:
        mine, other = self.whole(key), self.whole(base)
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
    def keys(self) -> list[str]:
        return list(self.train)


def final(losses: list[float]) -> float:
    return statistics.fmean(losses[-LAST:])


def over_seeds(values: list[float]) -> dict[str, float]:
    """Mean and range."""
    return {"median": statistics.fmean(values), "min": min(values), "max": max(values)}


def differences(results: Results, key: str, experiment: str) -> dict[str, float]:
    """Held-out loss over that of the baseline with the same seed: mean and range over seeds."""
    base = results.train[BASELINE]
    mine = results.train[key]
    return over_seeds([mine[s][experiment]["held_out"] - base[s][experiment]["held_out"] for s in mine])


def same_bits(results: Results, key: str) -> tuple[int, int]:
    """Trainings in which every loss, the held-out loss and the last masters equal those of the partner; all."""
    partner = results.train[PARTNERS[key]]
    runs = [(run, partner[seed][name]) for seed, found in results.train[key].items() for name, run in found.items()]
    return sum(mine == other for mine, other in runs), len(runs)


def comparable(results: Results, settings: Settings) -> list[str]:
    """Rows with a partner in the run. With several ranks the sums over ranks are another library's, and on a device
    torch's own operators are free to fuse what the partner writes out."""
    if settings.ranks > 1 or settings.device != CPU:
        return []
    return [k for k, p in PARTNERS.items() if k in results.train and p in results.train]


# ---- the tables


def state_row(key: str, states: States, settings: Settings) -> list[str]:
    named = [MODES[key].label, f"{formula(MODES[key], settings.stage, settings.ranks):.1f}"]
    found, count = states.memory[key], states.parameters
    whole, over = states.whole(key), states.over(key, BASELINE)
    named += ["does not fit"] * 2 if FULL in found else [
        f"{found[what] / MB:,.0f} MB ({found[what] / count:.1f})" for what in ("allocated", "peak")
    ]  # fmt: skip
    if whole is None:
        return named + ["-"] * 3
    phases = states.phases(key)
    return [*named, cell(phases["whole"], 0), cell(over, 2) if over else "-", cell(phases["step"])]


def state_table(states: States, settings: Settings) -> str:
    header = ["configuration", "formula", "allocated", "peak", "step time, ms", "over PyTorch", "of it update, ms"]
    return table(header, [state_row(key, states, settings) for key in states.memory])


def loss_table(results: Results, experiment: Experiment) -> str:
    rows = []
    for key, seeds in results.train.items():
        runs = [found[experiment.name] for found in seeds.values()]
        ends = over_seeds([final(run["losses"]) for run in runs])
        means = over_seeds([statistics.fmean(run["losses"]) for run in runs])
        held_out = over_seeds([run["held_out"] for run in runs])
        apart = "-" if key == BASELINE else cell(differences(results, key, experiment.name), 4, "+")
        rows.append([MODES[key].label, *(f"{v['median']:.4f}" for v in (ends, means)), cell(held_out, 4), apart])
        if experiment.from_start:
            own, whole = (gain(results, k, experiment.name) for k in (key, BASELINE))
            rows[-1].append(f"{own / whole:.0%}" if whole > 0 else "-")
    header = ["configuration", "final loss", "mean loss", "held-out loss", "difference to fp32 master, held out"]
    return table(header + ["share of its gain"] * experiment.from_start, rows)


def gain(results: Results, key: str, experiment: str) -> float:
    """By how much training lowered the held-out loss, from that of the shared start weights; mean over seeds."""
    base = results.train[BASELINE]
    values = [base[s][experiment]["before"] - run[experiment]["held_out"] for s, run in results.train[key].items()]
    return statistics.fmean(values)


def bits_text(results: Results, settings: Settings) -> str:
    lines = []
    for key in comparable(results, settings):
        equal, count = same_bits(results, key)
        verdict = "bit for bit the same" if equal == count else f"**the same in {equal} of {count} trainings only**"
        lines.append(
            f"* {MODES[key].label} and {MODES[PARTNERS[key]].label}: {verdict} (every loss of {count} trainings, the "
            "held-out losses, and all fp32 masters at the end)."
        )
    return "\n".join(lines)


def state_goals(size: str, states: States, settings: Settings) -> list[Goal]:
    goals = []
    several = f" ({size})" if len(settings.state_sizes) > 1 else ""
    for key, found in states.memory.items():
        if MODES[key].kind != "tessera" or FULL in found:
            continue
        held = found["allocated"] / states.parameters / formula(MODES[key], settings.stage, settings.ranks)
        goals.append(Goal(f"{MODES[key].label}: allocated over formula{several}", held, 1.05))
        over = states.over(key, BASELINE)
        if over:
            title = f"{MODES[key].label}: step time over {MODES[BASELINE].label}{several}"
            goals.append(Goal(title, over["median"], 1.0))
    return goals


def goals_of(results: Results, settings: Settings) -> list[Goal]:
    goals = []
    for key in comparable(results, settings):
        equal, count = same_bits(results, key)
        partner = MODES[PARTNERS[key]].label
        goals.append(Goal(f"{MODES[key].label}: trainings with the bits of {partner}", equal, count, at_least=True))
    for key in ("tessera-10", "tessera-8"):
        for experiment in settings.experiments if key in results.train else ():
            apart = abs(differences(results, key, experiment.name)["median"])
            goals.append(Goal(f"{MODES[key].label}: {experiment.name}, held-out loss from fp32 master's", apart, 0.01))
    for size, states in results.states.items():
        goals += state_goals(size, states, settings)
    return goals


# ---- the page


def memory_text(settings: Settings) -> str:
    if settings.device != CPU:
        return "what construction and training add to torch's allocations on the device"
    return "what construction and training add to the resident memory of a process of its own"


def state_text(size: str, states: States, settings: Settings) -> str:
    left_out = ", what the matrix library keeps for a plain model of that size is not" if settings.device == CPU else ""
    rounds = f"of {settings.rounds} rounds in which all rows take turns"
    if not states.took_turns:
        rounds = f"of {settings.rounds} rounds, every row in a process of its own because not all fit at once"
    return (
        f"A GPT of {states.parameters / 1e6:,.1f} M parameters ({size}), one sequence of {SIZES[size].context} bytes a "
        f"rank. Memory: {memory_text(settings)}, after the steps and at the peak; activations are in it{left_out}; in "
        "brackets, and in the formula (weight + gradient + master + moments), bytes a parameter. The plain loops and "
        f"DeepSpeed hold no gradients between steps. Step time: medians (min-max) {rounds}; update: clipping, "
        "optimizer and new weights. PyTorch here is clip_grad_norm_ and fused AdamW."
    )


def experiment_text(experiment: Experiment, settings: Settings, results: Results) -> str:
    tokens = settings.rows * settings.ranks * SIZES[settings.size].context
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


def setup_text(settings: Settings, results: Results) -> str:
    rows = [[MODES[k].label, f"`{json.dumps(MODES[k].config)}`"] for k in results.keys if MODES[k].config]
    exact = (
        "In the loss tables the plain loops have AdamW, clipping and rounding written out (bench/tables/reference.py), "
        "so that their bits are defined: Tessera's kernels have the same. Ties up: the loop whose bf16 weights round "
        "ties away from zero, as the exact mode must; otherwise ties go to even."
    )
    return table(["configuration", f"precision in the JSON, ZeRO-{settings.stage}"], rows) + "\n\n" + exact


def head_text(command: str, settings: Settings, where: dict[str, Any], probe: Probe) -> str:
    versions = ", ".join(f"{key} {value}" for key, value in where["versions"].items())
    ranks = f"{settings.ranks} rank" + ("s" if settings.ranks > 1 else "")
    device = "" if settings.device == CPU else f", models on {place.title(settings.device)}"
    return (
        f"`{command}` on {where['date']}, revision {where['revision']}. {where['cpu']}, {where['cores']} cores, "
        f"{ranks}, 1 thread a rank{device}; {versions}. Probes of the machine around the times, {probe_text(probe)}."
    )


def report_text(command: str, settings: Settings, results: Results, quick: bool, where: dict[str, Any]) -> list[str]:
    probe = results.probes
    parts = [f"# {TITLE}"]
    if quick:
        parts.append("Quick mode: few steps of a small model, to see that everything works.")
    if moved(probe) > QUIET:
        parts.append(
            f"**Noisy machine: a probe moved by {moved(probe):.0%}. The times are rough; losses and bytes "
            "do not depend on it.**"
        )
    parts += [head_text(command, settings, where, probe), setup_text(settings, results)]
    parts.append("## What the states cost")
    for size, states in results.states.items():
        parts += [state_text(size, states, settings), state_table(states, settings)]
    for experiment in settings.experiments:
        parts += [f"## {experiment.name.capitalize()}", experiment_text(experiment, settings, results)]
        parts.append(loss_table(results, experiment))
    bits = bits_text(results, settings)
    return parts + (["## Bits", bits] if bits else [])


def data_of(settings: Settings, results: Results) -> dict[str, Any]:
    def short(run: dict[str, Any]) -> dict[str, Any]:
        losses = run["losses"]
        width = max(1, len(losses) // POINTS)
        curve = [round(statistics.fmean(losses[i : i + width]), 4) for i in range(0, len(losses), width)]
        ends = {"final": final(losses), "mean": statistics.fmean(losses)}
        return {k: v for k, v in run.items() if k != "losses"} | ends | {"curve_width": width, "curve": curve}

    trained = {
        key: {seed: {name: short(run) for name, run in found.items()} for seed, found in seeds.items()}
        for key, seeds in results.train.items()
    }
    return {
        "settings": json.loads(settings.dump()),
        "train": trained,
        "states": {size: asdict(states) for size, states in results.states.items()},
    }


def index_data(settings: Settings, results: Results, goals: list[Goal], quick: bool) -> dict[str, Any]:
    """What the index of reports shows."""
    headline = []
    for experiment in settings.experiments:
        apart = [
            f"{MODES[key].label} {differences(results, key, experiment.name)['median']:+.4f}"
            for key in results.keys
            if key not in (BASELINE, "plain-ties-up")
        ]
        headline.append(f"{experiment.name}, held-out loss from fp32 master's: {', '.join(apart)}")
    return {
        "title": TITLE,
        "ranks": settings.ranks,
        "quick": quick,
        "noisy": moved(results.probes) > QUIET,
        "headline": headline,
        "goals": goals_data(goals),
    }


def name_of(settings: Settings) -> str:
    return f"tables-{settings.ranks}" + ("" if settings.device == CPU else f"-{settings.device}")


def write(folder: Path, name: str, command: str, settings: Settings, results: Results, quick: bool) -> str:
    """NAME.md, NAME.json and, where matplotlib is installed, NAME.png; returns the text."""
    folder.mkdir(parents=True, exist_ok=True)
    where = machine()
    if any(MODES[key].kind == "deepspeed" for key in results.keys):
        where["versions"]["deepspeed"] = importlib.metadata.version("deepspeed")
    goals = goals_of(results, settings)
    everything = {"machine": where, "command": command, **index_data(settings, results, goals, quick)}
    everything |= data_of(settings, results)
    (folder / f"{name}.json").write_text(json.dumps(everything, indent=1) + "\n")
    parts = report_text(command, settings, results, quick, where)
    try:
        from tables.picture import draw
    except ImportError as error:
        parts.append(f"No picture: {error.name} is not installed.")
    else:
        draw(folder / f"{name}.png", settings, results)
        parts.append(f"![Loss curves]({name}.png)")
    reached = table(["goal", "", "measured", "reached"], [goal.row() for goal in goals])
    text = "\n\n".join([*parts, "Goals:", reached]) + "\n"
    (folder / f"{name}.md").write_text(text)
    write_index(folder)
    return text
