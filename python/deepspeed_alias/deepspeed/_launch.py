"""The launcher of the command `deepspeed`: tessera's on this host, or on the hosts of a hostfile over ssh."""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tessera.errors import ConfigError
from tessera.launch import VISIBLE

from tessera import launch

HOSTFILE = "/job/hostfile"
# Variables of the environment that the processes of other hosts get too.
EXPORTED = ("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL", "GLOO", "TORCH", "OMP_", "TESSERA")
DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"  # a file of NAME=VALUE lines, in the home and the working directory
_NONE = "None"  # how scripts write that no logs are wanted

Hosts = dict[str, int]  # host -> slots
Slots = dict[str, list[int]]  # host -> the slots that are used


def fetch_hostfile(path: str | None) -> Hosts | None:
    """Lines `host slots=N`, blank ones and comments apart. None without the file. ConfigError for what is wrong."""
    if path is None or not os.path.isfile(path):
        return None
    hosts: Hosts = OrderedDict()
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        text = line.split("#")[0].strip()
        if not text:
            continue
        host, *slots = text.split()
        count = slots[0].removeprefix("slots=") if len(slots) == 1 and slots[0].startswith("slots=") else ""
        if not count.isdecimal():
            raise ConfigError(f"[launch] {path}, line {number}: must be `host slots=N`, got {line!r}")
        if host in hosts:
            raise ConfigError(f"[launch] {path}, line {number}: host {host} is there twice")
        hosts[host] = int(count)
    if not hosts:
        raise ConfigError(f"[launch] {path} names no host")
    return hosts


def parse_resource_filter(
    host_info: Mapping[str, Sequence[int]], include_str: str = "", exclude_str: str = ""
) -> Slots:
    """`node1@node2:0,2@node3:0-3`: of `include_str` only these, of `exclude_str` all but these."""
    if include_str and exclude_str:
        raise ConfigError("[launch] --include and --exclude exclude each other")
    if not include_str and not exclude_str:
        return OrderedDict((host, list(slots)) for host, slots in host_info.items())
    named: Slots = {}
    for part in (include_str or exclude_str).split("@"):
        host, _, slots = part.strip().partition(":")
        if host not in host_info:
            raise ConfigError(f"[launch] host {host!r} is not in the hostfile ({', '.join(host_info)})")
        wanted = _slots(slots) if slots else list(host_info[host])
        unknown = sorted(set(wanted) - set(host_info[host]))
        if unknown:
            raise ConfigError(f"[launch] host {host} has no slot {', '.join(map(str, unknown))}")
        named[host] = sorted({*named.get(host, []), *wanted})
    found: Slots = OrderedDict()
    for host, slots_of in host_info.items():
        there = named.get(host, [])
        kept = there if include_str else [slot for slot in slots_of if slot not in there]
        if kept:
            found[host] = list(kept)
    if not found:
        raise ConfigError("[launch] no slot is left")
    return found


def parse_inclusion_exclusion(resource_pool: Mapping[str, int], inclusion: str, exclusion: str) -> Slots:
    return parse_resource_filter({host: list(range(n)) for host, n in resource_pool.items()}, inclusion, exclusion)


def _slots(text: str) -> list[int]:
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ConfigError(f"[launch] slots must be like 0,2 or 0-3, got {text!r}")
        found.extend(range(int(first), int(last or first) + 1))
    return found


def encode_world_info(world_info: Mapping[str, object]) -> str:
    return base64.urlsafe_b64encode(json.dumps(world_info).encode()).decode()


# ---------------------------------------------------------------- arguments


_REFUSED = (
    "autotuning", "elastic_training", "min_elastic_nodes", "max_elastic_nodes", "bind_cores_to_rank", "bind_core_list",
)  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    made = launch.Parser("deepspeed", description=__doc__)

    def add(*names: str, **options: object) -> None:
        launch.add_option(made, *names, **options)

    add("-H", "--hostfile", default=HOSTFILE, help="lines `host slots=N`; without the file this host alone")
    add("-i", "--include", default="", help="node1@node2:0,2@node3:0-3")
    add("-e", "--exclude", default="", help="the same, of what is not used")
    add("--no_local_rank", action="store_true", help="the program gets no argument --local_rank=N")
    add("--no_ssh", action="store_true", help="start this host's processes only")
    add("--no_ssh_check", action="store_true", help="do not try ssh first")
    add("--force_multi", action="store_true", help="over ssh, also on one host")
    add("--save_pid", action="store_true",
        help="while it runs, its number N is in the file N.deepspeed of the folder for temporary files")  # fmt: skip
    add("--ssh_port", type=int, default=None)
    add("--venv_script", type=os.path.abspath, default=None, help="sourced on each host first")
    add("--launcher", type=str.lower, default="ssh", help="ssh; under mpirun and srun start the program itself")
    add("--launcher_args", default="", help="more options of ssh")
    for name in _REFUSED:
        flag = name in ("elastic_training", "bind_cores_to_rank")
        add(f"--{name}", help=argparse.SUPPRESS, **({"action": "store_true"} if flag else {"default": None}))
    launch.add_options(made)
    made.set_defaults(master_port=launch.PORT)  # DeepSpeed's, on one host too
    return made


def _refuse(options: argparse.Namespace) -> None:
    wrong = []
    if options.launcher not in ("ssh", "pdsh"):
        wrong.append(
            f"--launcher {options.launcher}: start the program under it directly; ranks come from its environment"
        )
    wrong += [f"--{name}" for name in _REFUSED if getattr(options, name)]
    if wrong:
        raise NotImplementedError("[launch] not served: " + "; ".join(wrong))
    if (options.include or options.exclude) and (options.num_nodes >= 0 or options.num_gpus >= 0):
        raise ConfigError("[launch] --include and --exclude cannot be used with --num_nodes or --num_gpus")
    launch.check(options)
    if options.node_rank > 0 and not options.no_ssh:
        raise ConfigError(
            f"[launch] --node_rank {options.node_rank} needs --no_ssh; over ssh the hostfile's order numbers the hosts"
        )


# ---------------------------------------------------------------- which devices


def _place(options: argparse.Namespace) -> tuple[Slots, bool]:
    """The hosts and their slots, and whether these are the numbers of devices (else how many ranks, on the devices that
    this process sees)."""
    hosts = fetch_hostfile(options.hostfile)
    named = hosts is not None or bool(options.include or options.exclude)
    if hosts is None:
        hosts = _without_hostfile(options, named)
    slots = parse_inclusion_exclusion(hosts, options.include, options.exclude)
    if options.num_nodes > 0:
        slots = OrderedDict(list(slots.items())[: options.num_nodes])
    if options.num_gpus > 0:
        slots = OrderedDict((host, list(range(options.num_gpus))) for host in slots)
    return slots, named


def _without_hostfile(options: argparse.Namespace, named: bool) -> Hosts:
    if options.num_nodes > 1 and not options.no_ssh:
        raise ConfigError(f"[launch] --num_nodes {options.num_nodes} needs a hostfile; there is no {options.hostfile}")
    if options.num_nodes > 1 and not options.master_addr:
        raise ConfigError("[launch] --no_ssh without a hostfile needs --master_addr, where host number 0 is")
    if named and os.environ.pop(VISIBLE, None) is not None:
        print(f"[launch] {VISIBLE} is ignored: --include and --exclude name devices", file=sys.stderr, flush=True)
    own = options.num_gpus if options.num_gpus > 0 else launch.own_devices()
    names = ["localhost"] if options.num_nodes <= 1 else [f"host {n}" for n in range(options.num_nodes)]
    return OrderedDict((name, own) for name in names)


# ---------------------------------------------------------------- one host


def _run_node(options: argparse.Namespace, slots: Slots, named: bool) -> int:
    """Runs this host's part of the job's ranks; every host is started by hand."""
    nodes, node = len(slots), options.node_rank
    if nodes == 1 and node < 0:
        node = 0
    if not 0 <= node < nodes:
        raise ConfigError(f"[launch] --no_ssh on {nodes} hosts needs --node_rank 0 to {nodes - 1}, got {node}")
    options.master_addr = options.master_addr or (next(iter(slots)) if nodes > 1 else "")
    os.environ.update(_own_variables(slots, node))
    return launch.run_here(options, list(slots.values())[node], named, nodes, node)


def _own_variables(slots: Slots, node: int) -> dict[str, str]:
    """Variables that ranks find beside those of torch's agent."""
    ranks = len(list(slots.values())[node])
    return {"LOCAL_SIZE": str(ranks), "CROSS_RANK": str(node), "CROSS_SIZE": str(len(slots))}


def _source(script: str) -> None:
    """Gives this process the environment that a shell has after the script."""
    command = f". {shlex.quote(script)} >&2 && env -0"
    done = subprocess.run([shutil.which("bash") or "sh", "-c", command], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise ConfigError(f"[launch] --venv_script {script} failed (exit code {done.returncode})")
    for name, equals, value in (line.partition("=") for line in done.stdout.split("\0")):
        if equals:
            os.environ[name] = value


# ---------------------------------------------------------------- several hosts


def _exports(slots: Slots, node: int) -> str:
    """Lines that a shell on host number `node` reads: `export NAME=value`."""
    found = {name: value for name, value in os.environ.items() if name.startswith(EXPORTED)}
    found["PYTHONPATH"] = os.pathsep.join(filter(None, (os.getcwd(), found.get("PYTHONPATH"))))
    name = os.environ.get("DS_ENV_FILE", DEEPSPEED_ENVIRONMENT_NAME)
    for folder in (Path.home(), Path.cwd()):
        file = folder / name
        for line in file.read_text().splitlines() if file.is_file() else []:
            key, equals, value = line.partition("=")
            if equals and key.strip().isidentifier():
                found[key.strip()] = value.strip()
    found[VISIBLE] = ",".join(map(str, list(slots.values())[node]))
    found |= _own_variables(slots, node)
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in found.items())


def _remote_command(options: argparse.Namespace, slots: Slots, node: int, environment: str) -> str:
    """The command that ssh runs on host number `node`, where the file `environment` has the exports, and goes."""
    host = list(slots)[node]
    own = ["-m", "tessera.launch", "--node_rank", str(node), "--num_nodes", str(len(slots))]
    own += ["--num_gpus", str(len(slots[host]))]
    own += ["--master_addr", options.master_addr or next(iter(slots)), "--master_port", str(options.master_port)]
    own += [f"--{name}" for name in ("module", "no_python", "with_local_rank", "quiet") if getattr(options, name)]
    for name in ("enable_each_rank_log", "log_level"):
        own += [f"--{name}", getattr(options, name)] if getattr(options, name) else []
    gone = f"rm -f {shlex.quote(environment)}"
    parts = [f"cd {shlex.quote(os.getcwd())}"]
    if options.venv_script:
        parts.append(f". {shlex.quote(options.venv_script)}")
    parts += [f". {shlex.quote(environment)}", gone, "trap - EXIT"]
    parts.append(shlex.join([sys.executable, *own, options.program, *options.arguments]))
    return f"trap {shlex.quote(gone)} EXIT; " + " && ".join(parts)


def _send_exports(ssh: Sequence[str], slots: Slots) -> list[str]:
    """Sends the exports into a file on each host that this user alone can read; returns the files. By ssh's input:
    every user of both hosts sees its command line, and a terminal would show what is typed into it."""
    keep = 'umask 077 && f=$(mktemp) && cat > "$f" && echo "$f"'
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    children = [subprocess.Popen([*ssh, host, keep], **pipes) for host in slots]  # type: ignore[call-overload]
    files = [child.communicate(_exports(slots, node))[0].split()[-1:] for node, child in enumerate(children)]
    for host, child, file in zip(slots, children, files, strict=True):
        if child.returncode != 0 or not file:
            _remove_exports(ssh, slots, files)
            raise ConfigError(f"[launch] ssh {host} could not write a file for temporary use (code {child.returncode})")
    return [file for (file,) in files]


def _remove_exports(ssh: Sequence[str], slots: Slots, files: list[list[str]]) -> None:
    """Removes the files where nothing will read them: from every host that has one and can be reached."""
    for host, file in zip(slots, files, strict=True):
        if file:
            subprocess.run([*ssh, host, f"rm -f {shlex.quote(file[0])}"], stdin=subprocess.DEVNULL, check=False)


def _run_hosts(options: argparse.Namespace, slots: Slots) -> int:
    """Runs one ssh for each host. Any that fails ends the others, and its code is returned."""
    port = ["-p", str(options.ssh_port)] if options.ssh_port else []
    ssh = ["ssh", *port, *shlex.split(options.launcher_args)]
    first = next(iter(slots))
    check = [*ssh, "-oBatchMode=yes", first, "hostname"]
    if not options.no_ssh_check and subprocess.run(check, capture_output=True).returncode != 0:
        raise ConfigError(f"[launch] ssh {first} does not work without a password; set it up, or pass --no_ssh_check")
    files = _send_exports(ssh, slots)
    children = [
        subprocess.Popen([*ssh, "-tt", host, _remote_command(options, slots, node, file)])
        for node, (host, file) in enumerate(zip(slots, files, strict=True))
    ]

    def forward(number: int, _frame: object) -> None:
        for child in children:
            child.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return _wait(dict(zip(slots, children, strict=True)))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(children: dict[str, subprocess.Popen[bytes]]) -> int:
    left = dict(children)
    while left:
        for host, child in list(left.items()):
            code = child.poll()
            if code is None:
                continue
            del left[host]
            if code != 0:
                for other in left.values():
                    other.terminate()
                for other in left.values():
                    other.wait()
                print(f"[launch] host {host} failed first (exit code {code})", file=sys.stderr)
                return launch.exit_code(code)
        time.sleep(0.1)
    return 0


@contextlib.contextmanager
def _pid_file(wanted: bool) -> Iterator[None]:
    file = Path(tempfile.gettempdir()) / f"{os.getpid()}.deepspeed"
    if wanted:  # others know the name, and may have put something there
        file.unlink(missing_ok=True)
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
            opened.write(str(os.getpid()))
    try:
        yield
    finally:
        if wanted:
            file.unlink(missing_ok=True)


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    options.with_local_rank = not options.no_local_rank
    if options.enable_each_rank_log == _NONE:
        options.enable_each_rank_log = ""
    _refuse(options)
    slots, named = _place(options)
    over_ssh = not options.no_ssh and (len(slots) > 1 or options.force_multi)
    if options.venv_script and not over_ssh:
        _source(options.venv_script)
    with _pid_file(options.save_pid):
        return _run_hosts(options, slots) if over_ssh else _run_node(options, slots, named)
