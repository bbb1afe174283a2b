"""The commands that DeepSpeed installs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from tessera import checkpoints


def _status(error: BaseException) -> int:
    print(error, file=sys.stderr)
    return 1


def launch(args: Sequence[str] | None = None) -> int:
    """`deepspeed`."""
    from deepspeed import _launch

    try:
        return _launch.main(args)
    except (ValueError, NotImplementedError) as error:
        return _status(error)


def report(args: Sequence[str] | None = None) -> int:
    """`ds_report`."""
    from deepspeed import __version__
    from deepspeed._ops import compatible_ops
    from tessera import report as tessera_report

    status = tessera_report.main(args)
    served = ", ".join(name for name, there in compatible_ops.items() if there)
    print(f"deepspeed: {__version__} (this package stands for it)\nparts without compiling: {served}")
    return status


def zero_to_fp32(args: Sequence[str] | None = None) -> int:
    """`zero_to_fp32 CHECKPOINT_DIR OUTPUT_DIR`."""
    from deepspeed import _to_fp32

    parser = argparse.ArgumentParser(prog="zero_to_fp32", description="fp32 weights of a checkpoint")
    parser.add_argument("checkpoint_dir")
    parser.add_argument("output_dir")
    parser.add_argument("--max_shard_size", default="5GB")
    parser.add_argument("--safe_serialization", action="store_true", help="safetensors")
    parser.add_argument("-t", "--tag", default=None)
    parser.add_argument("--exclude_frozen_parameters", action="store_true")
    parser.add_argument("-d", "--debug", action="store_true")
    given = parser.parse_args(args)
    try:
        _to_fp32.convert_zero_checkpoint_to_fp32_state_dict(
            given.checkpoint_dir,
            given.output_dir,
            given.max_shard_size,
            given.safe_serialization,
            given.tag,
            given.exclude_frozen_parameters,
        )
    except (ValueError, OSError) as error:
        return _status(error)
    return 0


def universal(args: argparse.Namespace | Sequence[str] | None = None) -> None:
    """deepspeed.checkpoint.ds_to_universal.main: a checkpoint of Tessera's or DeepSpeed's as a universal one."""
    given = args if isinstance(args, argparse.Namespace) else _universal_parser().parse_args(args)
    folder, tag = os.path.split(os.path.abspath(given.input_folder))
    parent, wanted = os.path.split(os.path.abspath(given.output_folder))
    checkpoints.to_universal(folder, parent, tag, name=wanted)


def _universal_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ds_to_universal", description=universal.__doc__)
    parser.add_argument("--input_folder", required=True, help="DIR/TAG of a checkpoint")
    parser.add_argument("--output_folder", required=True)
    for name in ("--num_extract_workers", "--num_merge_workers"):
        parser.add_argument(name, type=int, default=1, help="no effect: one process streams it")
    for name in ("--keep_temp_folder", "--no_strict", "--inject_missing_state"):
        parser.add_argument(name, action="store_true", help="no effect: nothing is missing and nothing is left")
    return parser


def to_universal(args: Sequence[str] | None = None) -> int:
    """`ds_to_universal`."""
    try:
        universal(args)
    except (ValueError, OSError, NotImplementedError) as error:
        return _status(error)
    return 0
