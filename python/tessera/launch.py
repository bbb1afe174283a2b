"""`tessera launch`: a process for each rank of this host, by the elastic agent of torch; started by hand on each of
several hosts, those of one job.

    tessera launch [options] program.py arguments...
    tessera launch --no_python ./program arguments...
    tessera launch --num_nodes 2 --node_rank N --master_addr HOST program.py    # on host number N
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any, NoReturn, TextIO, cast

from tessera import _core
from tessera._command import guarded
from tessera.errors import ConfigError

__all__ = ["Parser", "add_option", "add_options", "check", "exit_code", "main", "own_devices", "run_here"]

PORT = _core.launch_port
VISIBLE = "CUDA_VISIBLE_DEVICES"


# ---------------------------------------------------------------- arguments


class _FromOne(argparse.Action):
    """A number that is at least 1; ConfigError names the option as it was written."""

    most: int | None = None

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        value = _core.option_number(values, 1, self.most)
        if value is None:
            raise ConfigError(f"[launch] {_core.why_no_number(str(option_string), values, 1, self.most)}")
        setattr(namespace, self.dest, value)


class _Port(_FromOne):
    most = _core.highest_port


class Parser(argparse.ArgumentParser):
    """Of a command line that ends with a program and its arguments."""

    def error(self, message: str) -> NoReturn:
        if "required: program" in message:
            message = f"the program is missing: {self.prog} [options] program arguments..."
        super().error(message)


def add_option(made: argparse.ArgumentParser, *names: str, **options: object) -> None:
    """Adds the option in both spellings, with `-` and with `_`."""
    both = [name for name in names if not name.startswith("--") or "_" not in name]
    for name in names:
        if name.startswith("--") and "_" in name:
            both += [name, name.replace("_", "-").replace("--", "--", 1)]
    made.add_argument(*both, **options)  # type: ignore[arg-type]


def add_options(made: argparse.ArgumentParser) -> None:
    """Adds the options that every host that runs ranks gets, and the program."""

    def add(*names: str, **options: object) -> None:
        add_option(made, *names, **options)

    add("--num_nodes", action=_FromOne, default=-1, metavar="N", help="hosts of the job; default: this one")
    add("-n", "--num_gpus", "--num_accelerators", "--nproc_per_node", dest="num_gpus", action=_FromOne, default=-1,
        metavar="N",
        help="processes on each host; default: its devices, on the CPU 1")  # fmt: skip
    add("--master_addr", default="", metavar="HOST", help="where rank 0 is")
    add(
        "--master_port",
        action=_Port,
        default=0,
        metavar="PORT",
        help=f"default: a free port on one host, {PORT} on several",
    )
    add("--node_rank", type=int, default=-1, metavar="N", help="this host's number, where each is started by hand")
    add("--module", action="store_true", help="the program is the name of a module")
    add("--no_python", action="store_true", help="the program is not Python")
    add("--with_local_rank", action="store_true", help="the program gets an argument --local_rank=N")
    add("--enable_each_rank_log", "--log_dir", default="", metavar="DIR", help="what each rank prints, into files")
    add("--log_level", choices=("debug", "info", "warning", "error", "critical"), default=None,
        help="of the messages of torch's agent; default: critical, or what LOGLEVEL says")  # fmt: skip
    add("-q", "--quiet", action="store_true", help="nothing of torch's agent, whatever LOGLEVEL says")
    made.add_argument("program")
    made.add_argument("arguments", nargs=argparse.REMAINDER)


def check(options: argparse.Namespace) -> None:
    """ConfigError for options that exclude each other."""
    if options.module and options.no_python:
        raise ConfigError("[launch] --module and --no_python exclude each other")


def _check_program(program: str, runs: bool) -> None:
    """`runs`: it is no program of Python."""
    if runs and shutil.which(program) is None:
        raise ConfigError(f"[launch] there is no program '{program}' that may be run; give its path or chmod +x it")
    if not runs and not os.path.exists(program):
        raise ConfigError(f"[launch] there is no file '{program}'; --module takes the name of a module")


def own_devices() -> int:
    """The number of ranks that this host has where nobody says it."""
    visible = os.environ.get(VISIBLE)
    if visible is not None:
        return _core.listed_devices(visible)
    import torch

    return max(1, torch.accelerator.device_count())


# ---------------------------------------------------------------- one host


def run_here(options: argparse.Namespace, slots: Sequence[int], named: bool, nodes: int = 1, node: int = 0) -> int:
    """The ranks of this host, one a slot; `named`: slots are the numbers of its devices. Returns the exit code of the
    first that failed, whose errors are shown last, or 128 + the number of a signal that ended them; else 0. ConfigError
    for a program that is not there, a host that is not known, a folder of logs that cannot be written into, a port that
    is in use, and where several tasks of srun do this."""
    if nodes == 1 and options.num_nodes < 1 and (why := _core.why_not_started_here()):
        raise ConfigError(f"[launch] {why}")
    if not options.module:
        _check_program(options.program, options.no_python)
    if options.master_addr and (why := _core.why_no_host(options.master_addr)):
        raise ConfigError(f"[launch] {why}")
    if options.enable_each_rank_log and (why := _core.why_no_logs(options.enable_each_rank_log)):
        raise ConfigError(f"[launch] {why}")
    try:
        return _run_here(options, slots, named, nodes, node)
    except (KeyboardInterrupt, SystemExit):
        return _interrupted(signal.SIGINT)


def _interrupted(number: int) -> int:
    print(_core.interrupted_by(number), file=sys.stderr, flush=True)
    return exit_code(-number)


class _Errors:
    """What ranks print to stderr, passed on but for what the core leaves out. Such a rank's last lines are shown all
    the same where it has failed by itself."""

    def __init__(self, to: TextIO) -> None:
        self._to = to
        self._ranks: dict[str, _core.Tracebacks] = {}

    def write(self, text: str) -> int:
        rank, bracket, line = text.partition("] ")
        if not rank.startswith("[rank ") or not bracket:
            return self._to.write(text)
        self._pass(rank, self._ranks.setdefault(rank, _core.Tracebacks()).take(line))
        return len(text)

    def flush(self) -> None:
        self._to.flush()

    def end(self) -> None:
        for rank, tracebacks in self._ranks.items():
            self._pass(rank, tracebacks.rest())

    def _pass(self, rank: str, lines: list[str]) -> None:
        self._to.write("".join(f"{rank}] {line}" for line in lines))


def _run_here(options: argparse.Namespace, slots: Sequence[int], named: bool, nodes: int, node: int) -> int:
    from torch.distributed import DistNetworkError
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.utils.api import macros
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    command = [] if options.no_python else [sys.executable, "-u"]
    command += ["-m", options.program] if options.module else [options.program]
    if options.with_local_rank:
        command.append(f"--local_rank={macros.local_rank}")
    command += options.arguments
    if len(slots) > 1:
        os.environ.setdefault("OMP_NUM_THREADS", str(_core.threads_of_rank(len(slots))))
    port = options.master_port or (_core.free_port() if nodes == 1 else PORT)
    if named:
        os.environ[VISIBLE] = ",".join(map(str, slots))
    _set_level(options)
    with tempfile.TemporaryDirectory(prefix="tessera-launch-") as scratch:
        logs = options.enable_each_rank_log or scratch
        every = Std.ALL if options.enable_each_rank_log else Std.ERR
        config = LaunchConfig(
            min_nodes=nodes,
            max_nodes=nodes,
            nproc_per_node=len(slots),
            run_id="tessera",  # known to tessera/comm/launch.cpp
            rdzv_backend="static",
            rdzv_endpoint=f"{options.master_addr or '127.0.0.1'}:{port}",
            rdzv_configs={"rank": node, "timeout": 900},
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=logs, tee=every),
            log_line_prefix_template="[rank ${rank}] ",
        )
        errors = _Errors(sys.stderr)
        try:
            with redirect_stderr(cast(TextIO, errors)):
                elastic_launch(config, command[0])(*command[1:])
        except ChildFailedError as failure:
            errors.end()
            rank, first = failure.get_first_failure()
            _show_last(rank, first.exitcode, logs)
            return exit_code(first.exitcode)
        except DistNetworkError as error:
            if "EADDRINUSE" not in str(error):
                raise
            raise ConfigError(f"[launch] {_core.port_in_use(port, '--master_port', nodes)}") from None
        except BaseException as error:
            if type(error).__name__ == "SignalException":  # sent on to the ranks
                return _interrupted(int(getattr(error, "sigval", signal.SIGTERM)))
            raise
        errors.end()
    return 0


def _set_level(options: argparse.Namespace) -> None:
    """Sets the level of the loggers of torch's agent, each of which has its own. What a user needs of their messages
    this module says itself."""
    usual = None if "LOGLEVEL" in os.environ and not options.quiet else "critical"
    level: str = options.log_level or usual or ""
    for name in list(logging.root.manager.loggerDict) if level else []:
        if name.startswith(("torch.distributed.elastic", "torch.distributed.launcher")):
            logging.getLogger(name).setLevel(level.upper())


def exit_code(code: int) -> int:
    """A shell's exit code for the return code of a process: 128 + the number of a signal."""
    return _core.shell_code(code)


def _show_last(rank: int, code: int, logs: str) -> None:
    files = sorted(Path(logs).glob(f"**/{rank}/stderr.log"), key=lambda file: file.stat().st_mtime)
    text = files[-1].read_text(errors="replace").splitlines()[-_core.shown_lines :] if files else []
    print(_core.failed_first(rank, code), *text, sep="\n", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """The command `tessera launch`; returns the exit code of the first rank that failed, else 0."""
    made = Parser("tessera launch", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add_options(made)
    options = made.parse_args(argv)
    check(options)
    nodes = max(1, options.num_nodes)
    node = 0 if nodes == 1 and options.node_rank < 0 else options.node_rank
    if why := _core.why_no_node(nodes, node, options.master_addr):
        raise ConfigError(f"[launch] {why}")
    ranks = options.num_gpus if options.num_gpus > 0 else own_devices()
    return run_here(options, list(range(ranks)), False, nodes, node)


if __name__ == "__main__":
    sys.exit(guarded(main))
