"""Arguments that DeepSpeed adds to a program's own."""

from __future__ import annotations

import argparse


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    group = parser.add_argument_group("DeepSpeed", "read by deepspeed.initialize(args=...)")
    group.add_argument("--deepspeed", action="store_true", default=False, help="for the program's own use")
    group.add_argument("--deepspeed_config", type=str, default=None, help="path of the configuration")
    group.add_argument("--deepscale", action="store_true", default=False, help="old name of --deepspeed")
    group.add_argument("--deepscale_config", type=str, default=None, help="old name of --deepspeed_config")
    return parser


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The parameters of the learning-rate schedules."""
    group = parser.add_argument_group("Convergence Tuning", "learning-rate schedules")
    group.add_argument("--lr_schedule", type=str, default=None)
    rows: list[tuple[str, type, object]] = [
        ("lr_range_test_min_lr", float, 0.001),
        ("lr_range_test_step_rate", float, 1.0),
        ("lr_range_test_step_size", int, 1000),
        ("lr_range_test_staircase", bool, False),
        ("cycle_first_step_size", int, 1000),
        ("cycle_first_stair_count", int, -1),
        ("cycle_second_step_size", int, -1),
        ("cycle_second_stair_count", int, -1),
        ("decay_step_size", int, 1000),
        ("cycle_min_lr", float, 0.01),
        ("cycle_max_lr", float, 0.1),
        ("decay_lr_rate", float, 0.0),
        ("cycle_min_mom", float, 0.8),
        ("cycle_max_mom", float, 0.9),
        ("decay_mom_rate", float, 0.0),
        ("warmup_min_lr", float, 0.0),
        ("warmup_max_lr", float, 0.001),
        ("warmup_num_steps", int, 1000),
        ("warmup_type", str, "log"),
    ]
    for name, kind, default in rows:
        group.add_argument(f"--{name}", type=kind, default=default)
    group.add_argument("--cycle_momentum", default=False, action="store_true")
    return parser
