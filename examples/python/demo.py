"""The demo: a byte-level GPT learns real text with Tessera, beside the same training in plain PyTorch: on one or two
GPUs where there are any, else on two ranks of the CPU.

Starts one process a rank (on the CPU gloo, one thread each), first for Tessera, then for PyTorch's
DistributedDataParallel with bf16 weights and fp32 master weights. Writes losses.csv, losses.png, sample.txt, the
numbers of every step (*.jsonl) and a page of them, page.html, to demo-out/. Tessera's run is saved there, too, four
times; with --resume it goes on from the newest of them, as if it had not been stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path

DEFAULT_STEPS = 260
EVAL_ROWS, EVAL_BATCHES = 8, 8
MEMORY_STEPS = 5  # of the short runs that show the memory of the other stages


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", help="any text file; default: the language reference of this Python")
    parser.add_argument("--steps", type=int, default=DEFAULT_STEPS)
    parser.add_argument("--stage", type=int, default=2, choices=(0, 1, 2, 3))
    parser.add_argument("--ranks", type=int, help="default: a rank on each of the first two GPUs; on the CPU 2")
    parser.add_argument("--cpu", action="store_true", help="train on the CPU, whatever GPUs there are")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp32"))
    parser.add_argument("--rows", type=int, default=2, help="samples of one rank in one step")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--sample", type=int, default=300, help="bytes of text to generate")
    parser.add_argument("--out", default="demo-out")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in the folder --out")
    args = parser.parse_args()
    choose_device(args)
    return args


def choose_device(args: argparse.Namespace) -> None:
    """Whether the ranks have a GPU each (args.gpu), and how many ranks there are; the first line says so. This process
    only asks: its children use the GPUs."""
    import torch

    import tessera

    kind, why = torch.accelerator.current_accelerator(check_available=True), ""
    args.gpu = kind is not None and not args.cpu
    gpus = torch.accelerator.device_count() if args.gpu else 0
    if args.gpu and args.ranks is not None and args.ranks > gpus:
        args.gpu, why = False, f": {args.ranks} ranks, and {gpus} GPU(s)"
    try:
        if args.gpu:
            tessera._core.check_device(kind)
    except NotImplementedError as error:
        args.gpu, why = False, f": {str(error).splitlines()[0]}"
    args.ranks = args.ranks or (min(2, gpus) if args.gpu else 2)
    where = torch.cuda.get_device_name() if args.gpu and kind.type == "cuda" else kind.type if args.gpu else "the CPU"
    print(f"demo: {args.ranks} rank(s) on {where}{why}", flush=True)


def configuration(args: argparse.Namespace) -> dict:
    """The DeepSpeed-style configuration; the plain trainer reads its numbers too."""
    return {
        "train_micro_batch_size_per_gpu": args.rows,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": args.lr, "betas": [0.9, 0.95], "weight_decay": 0.01}},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {
                "total_num_steps": max(args.steps, 3),
                "warmup_num_steps": max(2, args.steps // 8),
                "warmup_type": "linear",
            },
        },
        "bf16": {"enabled": args.dtype == "bf16"},
        "zero_optimization": {"stage": args.stage},
    }


# ---- one rank


class Progress:
    """One line of step, loss, tokens/s and memory: live on a terminal, now and then elsewhere. Rank 0 only."""

    def __init__(self, name: str, steps: int, active: bool) -> None:
        from tqdm import tqdm

        self.steps, self.active, self.name = steps, active, name
        self.every = max(1, steps // 10)
        self.bar = tqdm(total=steps, desc=name) if active and sys.stderr.isatty() else None

    def show(self, step: int, loss: float, speed: float, memory: float) -> None:
        if not self.active:
            return
        text = f"loss {loss:.3f}, {speed:,.0f} tokens/s, {memory:,.0f} MB"
        if self.bar is not None:
            self.bar.set_postfix_str(text)
            self.bar.update()
        elif step % self.every == 0 or step == self.steps:
            print(f"{self.name}: step {step:4d}/{self.steps}, {text}", flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


class OnDevice:
    """What torch has allocated on a GPU, as the module `memory` has it of the process."""

    def __init__(self, device) -> None:
        import torch

        module = torch.get_device_module(device)
        self.now, self.peak = module.memory_allocated, module.max_memory_allocated
        self.reset_peak = module.reset_peak_memory_stats


def make_step(args, model, config):
    """A function (x, y) -> loss that does one whole training step, and the engine where there is one."""
    import torch
    from plain import PlainTrainer

    if args.worker == "plain":
        return PlainTrainer(model, config, torch.bfloat16 if args.dtype == "bf16" else torch.float32).train_step, None
    import tessera

    engine, *_ = tessera.initialize(model=model, config=config)
    engine.expect(args.steps, tokens_per_sample=args.context)
    engine.count_flops()  # as the core counts, in the first step

    def train_step(x, y):
        loss = engine(x, y)
        engine.backward(loss)  # which keeps the loss among the numbers
        engine.step()
        return loss

    return train_step, engine


def warm_up(args: argparse.Namespace, device, batch: tuple) -> None:
    """A few steps of a tiny model: code pages and imports are not model memory, so load them before the baseline."""
    from gpt import Gpt, GptOptions

    tiny = Gpt(GptOptions(layers=1, width=48, context=args.context)).to(device)
    train_step, _ = make_step(args, tiny, configuration(args))
    for _ in range(2):
        train_step(*batch)


def work(args: argparse.Namespace) -> None:
    import memory
    import torch
    import torch.distributed as dist
    import torch.distributed.nn  # before there is a group, so that destroy_process_group() ends it
    import tqdm  # noqa: F401
    from gpt import Gpt, GptOptions
    from tessera.monitor import JsonLines
    from text import Text, load_text

    import tessera

    torch.set_num_threads(1)
    tessera.init_distributed(None if args.gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device, used = torch.device("cpu"), memory
    if args.gpu:
        device = torch.accelerator.current_accelerator()
        used = OnDevice(device)
    text = Text(load_text(args.data), args.context)

    def batch(step):
        return (t.to(device) for t in text.batch(step, rank, ranks, args.rows))

    warm_up(args, device, tuple(batch(0)))
    dist.barrier()

    used.reset_peak()
    baseline = used.now()
    torch.manual_seed(0)
    model = Gpt(GptOptions(layers=args.layers, width=args.width, context=args.context)).to(device)
    config, numbers = configuration(args), numbers_of(args, rank)
    if args.worker == "tessera":
        config["tessera"] = {"json_lines": str(numbers)}
    train_step, engine = make_step(args, model, config)
    writer = JsonLines(numbers) if args.worker == "plain" and rank == 0 else None
    saved = str(Path(args.out, "checkpoint"))
    losses: list[float] = []
    if args.resume and args.worker == "tessera":
        _, state = engine.load_checkpoint(saved)
        losses = (state or {}).get("losses", [])[: args.steps - 1]
    first = len(losses)
    name = "plain PyTorch" if args.worker == "plain" else f"Tessera ZeRO-{args.stage}"
    progress = Progress(name, args.steps, rank == 0 and args.worker != "memory")
    tokens = args.rows * args.context * ranks
    start = warm = time.perf_counter()
    for step in range(first, args.steps):
        loss = train_step(*batch(step)).detach().float()
        own = 0.0 if writer is None else loss.item()
        dist.all_reduce(loss)
        losses.append(loss.item() / ranks)
        if step == min(first + 4, args.steps - 2):
            warm = time.perf_counter()
        speed = tokens * (step + 1 - first) / (time.perf_counter() - start)
        progress.show(step + 1, losses[-1], speed, (used.now() - baseline) / 1e6)
        if writer is not None:  # as an engine names them
            of_step = {"global_steps": step + 1, "train_loss": own, "tokens_per_second": speed}
            samples = (step + 1) * args.rows * ranks
            writer.write([(f"Train/Samples/{name}", value, samples) for name, value in of_step.items()])
        if args.worker == "tessera" and (step + 1) % max(1, args.steps // 4) == 0:
            began = time.perf_counter()
            engine.save_checkpoint(saved, client_state={"losses": losses}, keep_last=1)
            start, warm = (moment + time.perf_counter() - began for moment in (start, warm))
    steady = max(1, args.steps - 1 - min(first + 4, args.steps - 2))
    speed = tokens * steady / (time.perf_counter() - warm)
    progress.close()
    peaks = [0.0] * ranks
    dist.all_gather_object(peaks, (used.peak() - baseline) / 1e6)
    result = {"name": name, "losses": losses, "speed": speed, "peaks": peaks}
    with whole(args, model):
        if rank == 0:
            finish(args, model, device, text, result)
        dist.barrier()
    # Before the group: whoever holds that last waits for its threads, and DistributedDataParallel does so with the GIL.
    del train_step, engine
    dist.destroy_process_group()


def numbers_of(args: argparse.Namespace, rank: int) -> Path:
    """The file for the numbers of a run; a run that does not go on begins it anew."""
    path = Path(args.out, f"{args.worker}.jsonl")
    if rank == 0 and not (args.resume and args.worker == "tessera"):
        path.unlink(missing_ok=True)
    return path


def whole(args, model):
    """Rank 0 evaluates alone: in stage 3 that needs its parameters whole."""
    if args.worker == "plain":
        return contextlib.nullcontext()
    import tessera

    return tessera.zero.GatheredParameters(model.parameters())


def finish(args, model, device, text, result: dict) -> None:
    """Held-out loss and a sample, on rank 0 with all cores; results go to the parent as a file."""
    import torch

    if args.worker == "memory":
        Path(args.out, "memory.json").write_text(json.dumps(result))
        return
    torch.set_num_threads(os.cpu_count() or 1)
    with torch.no_grad():
        batches = text.held_out_batches(EVAL_ROWS, EVAL_BATCHES)
        result["held_out"] = sum(model(x.to(device), y.to(device)).item() for x, y in batches) / EVAL_BATCHES
    result["parameters"] = sum(p.numel() for p in model.parameters())
    if args.worker == "tessera":
        prompt = bytes(text.held_out[:64].tolist())
        result["prompt"] = prompt.decode(errors="replace")
        result["sample"] = model.generate(prompt, args.sample, temperature=0.6).decode(errors="replace")
    Path(args.out, f"{args.worker}.json").write_text(json.dumps(result))


# ---- the parent


def run_rank(args: argparse.Namespace, rank: int, port: int) -> None:
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": args.ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in place.items()})
    work(args)


def launch(args: argparse.Namespace, worker: str, **more: int) -> dict:
    """Runs all ranks of one trainer and returns what rank 0 wrote. A rank that fails ends the others. Ranks are forked
    from a process that has only imported, which takes longer than a short run."""
    os.environ["OMP_NUM_THREADS"] = "1"
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(["tessera", "torch._dynamo", "torch.distributed.nn", "tqdm"])
    from tessera.distributed import free_port

    options, port = argparse.Namespace(**{**vars(args), "worker": worker, **more}), free_port()
    ranks = [forks.Process(target=run_rank, args=(options, rank, port)) for rank in range(args.ranks)]
    for rank in ranks:
        rank.start()
    try:
        while any(rank.is_alive() for rank in ranks) and not any(rank.exitcode for rank in ranks):
            time.sleep(0.1)
    finally:
        for rank in ranks:
            rank.terminate()
            rank.join()
    failed = [i for i, rank in enumerate(ranks) if rank.exitcode]
    if failed:
        raise SystemExit(f"demo: {worker} rank {failed[0]} failed")
    return json.loads(Path(args.out, f"{worker}.json").read_text())


def print_table(args, results: list[dict]) -> None:
    rows = [
        ("held-out loss (nats per byte)", [f"{r['held_out']:.3f}" for r in results]),
        ("tokens/s, all ranks", [f"{r['speed']:,.0f}" for r in results]),
        ("peak memory per rank (MB)", [" / ".join(f"{p:,.0f}" for p in r["peaks"]) for r in results]),
    ]
    tokens = args.steps * args.ranks * args.rows * args.context
    print(
        f"\n{results[0]['parameters'] / 1e6:.1f} M parameters, {args.ranks} ranks, {args.dtype}, {args.steps} steps, "
        f"{tokens:,} bytes of text"
    )
    print(f"{'':32}{results[0]['name']:>18}{'plain PyTorch*':>18}")
    for label, cells in rows:
        print(f"{label:32}" + "".join(f"{cell:>18}" for cell in cells))
    masters = "bf16 weights with fp32 masters, " if args.dtype == "bf16" else ""
    print(f"* DistributedDataParallel on the same ranks and batches, {masters}clip_grad_norm_, fused AdamW")
    what = "torch's largest allocation on a rank's GPU" if args.gpu else "largest resident size of a rank"
    print(f"  peak memory: {what} above that before the model was made")


def print_memory(args, result: dict) -> None:
    """The peak of every stage: the run above, and a few steps in each of the others."""
    print(f"\npeak memory per rank (MB) by stage, {args.ranks} ranks, {args.dtype}")
    for stage in range(4):
        same = stage == args.stage
        peaks = (result if same else launch(args, "memory", stage=stage, steps=MEMORY_STEPS))["peaks"]
        print(f"  ZeRO-{stage}  " + " / ".join(f"{peak:,.0f}" for peak in peaks), flush=True)


def smooth(values: list[float], width: int) -> list[float]:
    return [sum(values[max(0, i - width) : i + 1]) / (i + 1 - max(0, i - width)) for i in range(len(values))]


def draw(args, results: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.8), dpi=120, layout="constrained")
    styles = [("#1f6fb4", "-", 2.2), ("#e07b1a", "--", 1.6)]
    steps = range(1, args.steps + 1)
    for result, (color, line, width) in zip(results, styles, strict=True):
        axes.plot(steps, result["losses"], color=color, alpha=0.18, linewidth=0.8)
        label = f"{result['name']}: {result['held_out']:.3f} held out, {result['speed']:,.0f} tokens/s"
        axes.plot(steps, smooth(result["losses"], max(1, args.steps // 30)), line, color=color, lw=width, label=label)
    axes.set_title(f"GPT of {results[0]['parameters'] / 1e6:.1f} M parameters, {args.ranks} ranks, {args.dtype}")
    axes.set_xlabel("step")
    axes.set_ylabel("training loss (nats per byte)")
    axes.set_xlim(1, max(2, args.steps))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)


def write_page(out: Path) -> None:
    """`tessera page`, which says what it has written."""
    from tessera import cli

    if cli.main(["page", str(out / "tessera.jsonl"), str(out / "plain.jsonl"), "--out", str(out / "page.html")]):
        raise SystemExit("demo: there is no page")


def main() -> None:
    args = parse()
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    results = [launch(args, "tessera"), launch(args, "plain")]
    lines = ["step,tessera,plain"]
    losses = zip(results[0]["losses"], results[1]["losses"], strict=True)
    lines += [f"{step},{a:.6f},{b:.6f}" for step, (a, b) in enumerate(losses, 1)]
    (out / "losses.csv").write_text("\n".join(lines) + "\n")
    (out / "sample.txt").write_text(results[0]["prompt"] + results[0]["sample"] + "\n")
    draw(args, results, out / "losses.png")
    print_table(args, results)
    print_memory(args, results[0])
    print(f"\nsample ({len(results[0]['prompt'])} bytes of held-out text, then the model's own):")
    print("  " + (results[0]["prompt"] + "|" + results[0]["sample"]).replace("\n", "\n  "))
    print(f"\nwritten: {out}/losses.png, {out}/losses.csv, {out}/sample.txt")
    write_page(out)


if __name__ == "__main__":
    main()
