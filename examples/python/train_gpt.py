"""Trains the byte-level GPT of gpt.py with Tessera. One process a rank:

torchrun --nproc-per-node 2 examples/python/train_gpt.py --config examples/config.json
"""

from __future__ import annotations

import argparse

import torch
from gpt import Gpt, GptOptions
from text import Text, load_text

import tessera


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True, help="DeepSpeed-style JSON")
    parser.add_argument("--data", help="any text file; default: the language reference of this Python")
    parser.add_argument("--weights", help="load initial weights from this file (torch.save of a plain dict)")
    parser.add_argument("--save-weights", help="write the initial weights to this file and stop")
    parser.add_argument("--save", help="save a checkpoint into this folder at the end")
    parser.add_argument("--resume", help="go on from the newest checkpoint in this folder")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rows", type=int, default=4, help="samples of one rank in one step")
    for name, value in (("layers", 6), ("width", 384), ("heads", 6), ("context", 128)):
        parser.add_argument(f"--{name}", type=int, default=value)
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.manual_seed(0)
    text = Text(load_text(args.data), args.context)
    model = Gpt(GptOptions(args.layers, args.width, args.heads, args.context))
    if args.weights:
        model.load_state_dict(torch.load(args.weights))
    if args.save_weights:
        torch.save(dict(model.state_dict()), args.save_weights)
        return

    tessera.init_distributed()
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    engine, *_ = tessera.initialize(model=model, config=args.config)
    if args.resume:
        engine.load_checkpoint(args.resume)
    for step in range(engine.global_steps, args.steps):
        x, y = (t.to(engine.device) for t in text.batch(step, rank, ranks, args.rows))
        loss = engine(x, y)
        loss.backward()
        engine.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.6f}")
    if args.save:
        engine.save_checkpoint(args.save)

    with torch.no_grad():
        batches = text.held_out_batches(rows=8, count=4)
        losses = [model(x.to(engine.device), y.to(engine.device)).item() for x, y in batches]
    if rank == 0:
        print(f"held-out loss {sum(losses) / len(losses):.6f}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
