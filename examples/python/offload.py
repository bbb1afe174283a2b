"""Trains a GPT whose optimizer states do not fit in the memory that this program may have. They live on a disk:

(ulimit -d 2000000; python examples/python/offload.py --nvme /local/nvme)

With --parameters its weights live there, too, and gradients are used up in the backward: nothing in memory grows with
the number of layers. `ulimit -d` is in KiB; without --nvme the same limit ends the program with an error.
"""

from __future__ import annotations

import argparse
import resource

import memory
import torch
from gpt import Gpt, GptOptions
from text import Text, load_text

import tessera

MIB = 1 << 20


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nvme", help="folder on a local disk for the states; without it they are in memory")
    parser.add_argument("--parameters", action="store_true", help="the weights go to the disk, too")
    parser.add_argument("--data", help="any text file; default: the language reference of this Python")
    for name, value in (("layers", 12), ("width", 1024), ("heads", 16), ("context", 128), ("rows", 1), ("steps", 10)):
        parser.add_argument(f"--{name}", type=int, default=value)
    return parser.parse_args()


def configuration(nvme: str | None, parameters: bool) -> dict[str, object]:
    zero: dict[str, object] = {"stage": 3 if parameters else 1}
    disk = {"device": "nvme", "nvme_path": nvme}
    if nvme:
        zero["offload_optimizer"] = disk
    if nvme and parameters:
        zero["offload_param"] = disk | {"max_in_cpu": 0, "buffer_count": 2}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
        "gradient_clipping": 0.0 if parameters else 1.0,  # the norm is known when the backward is over
        "zero_optimization": zero,
        "tessera": {"update_in_backward": parameters},
    }


def main() -> None:
    args = parse()
    torch.manual_seed(0)
    text = Text(load_text(args.data), args.context)
    config = configuration(args.nvme, args.parameters)
    with tessera.zero.Init(config=config, enabled=args.parameters):
        model = Gpt(GptOptions(args.layers, args.width, args.heads, args.context))
    engine, *_ = tessera.initialize(model=model, config=config)
    limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
    held = engine.core.memory()
    print(f"memory limit: {'none' if limit == resource.RLIM_INFINITY else f'{limit // MIB} MiB'}")
    print(f"weights and gradients: {(held.params + held.grads) // MIB} MiB; optimizer states: {held.states // MIB} MiB")
    print(f"of weights and states, on the disk: {held.disk // MIB} MiB")
    for step in range(args.steps):
        loss = engine(*(t.to(engine.device) for t in text.batch(step, 0, 1, args.rows)))
        loss.backward()
        engine.step()
        print(f"step {step} loss {loss.item():.6f}")
    print(f"peak memory: {memory.peak() // MIB} MiB")


if __name__ == "__main__":
    main()
