"""Compiles what DeepSpeed compiles when it is first used, so that no benchmark or test waits for it. Needs a compiler;
what cannot be built is named and left out of the benchmarks. Usage: peers.py [BUILDER...]; none: all of benchmarks."""

from __future__ import annotations

import sys

# AsyncIO, of the suites nvme and fits, needs the headers of libaio (libaio-dev).
BUILDERS = ["FusedAdamBuilder", "CPUAdamBuilder", "ShareMemCommBuilder", "AsyncIOBuilder"]


def main() -> None:
    from deepspeed.accelerator import get_accelerator

    for name in sys.argv[1:] or BUILDERS:
        try:
            get_accelerator().create_op_builder(name).load()
        except Exception as error:
            print(f"[bench] DeepSpeed's {name}: {str(error).splitlines()[0]}", file=sys.stderr)


if __name__ == "__main__":
    main()
