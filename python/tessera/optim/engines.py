"""The part of optimizers for other packages, beside what users have in tessera.optim: how an engine builds one and runs
it."""

from __future__ import annotations

from tessera.optim._factory import (
    MakesOptimizer,
    MakesScheduler,
    as_lists,
    build_optimizer,
    build_schedule,
    class_of,
    describe,
    given_sizes,
    keep_optimizer,
    momentum_of,
    params_of,
    plain_values,
)
from tessera.optim._rules import NativeRule, is_tested, native_rule, read_group
from tessera.optim._runners import ExternalRunner, NativeRunner, Runner
from tessera.optim._slices import SlicesRunner
from tessera.optim._states import OptimizerStates
from tessera.optim._whole import AUX_ADAM, Muon, WholeOptimizer, is_matrix, orthogonal
from tessera.optim._wrapper import Optimizer, mark_stepped

__all__ = [
    "AUX_ADAM",
    "ExternalRunner",
    "MakesOptimizer",
    "MakesScheduler",
    "Muon",
    "NativeRule",
    "NativeRunner",
    "Optimizer",
    "OptimizerStates",
    "Runner",
    "SlicesRunner",
    "WholeOptimizer",
    "as_lists",
    "build_optimizer",
    "build_schedule",
    "class_of",
    "describe",
    "given_sizes",
    "is_matrix",
    "is_tested",
    "keep_optimizer",
    "mark_stepped",
    "momentum_of",
    "native_rule",
    "orthogonal",
    "params_of",
    "plain_values",
    "read_group",
]
