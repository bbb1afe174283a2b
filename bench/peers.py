"""Compiles what DeepSpeed compiles when it is first used, so that no benchmark waits for it. Needs a compiler; what
cannot be built is named and left out of the benchmarks."""

from __future__ import annotations

import sys


def main() -> None:
    from deepspeed.accelerator import get_accelerator

    # AsyncIO, of the suites nvme and fits, needs the headers of libaio (libaio-dev).
    for name in ("FusedAdamBuilder", "CPUAdamBuilder", "ShareMemCommBuilder", "AsyncIOBuilder"):
        try:
            get_accelerator().create_op_builder(name).load()
        except Exception as error:
            print(f"[bench] DeepSpeed's {name}: {str(error).splitlines()[0]}", file=sys.stderr)


if __name__ == "__main__":
    main()
