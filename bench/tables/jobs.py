"""Runs tasks in processes of their own, several at a time."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tables.worker import Task

# Freed memory goes back to the system at once, so that resident memory is what is really held.
EXACT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536"}
PROGRAM = Path(__file__).parent


class JobError(RuntimeError):
    pass


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def run_task(task: Task, ranks: int, stop: threading.Event) -> dict[str, Any]:
    """All ranks of one task; what rank 0 wrote. A rank that fails ends the others, `stop` ends all."""
    task.path(".task").write_text(json.dumps(asdict(task)))
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(ranks),
    }
    if task.kind == "memory":
        environment |= EXACT_MEMORY
    command = [sys.executable, str(PROGRAM), "--worker", str(task.path(".task"))]
    logs = [task.path(f".{rank}.log") for rank in range(ranks)]
    processes = []
    for rank, log in enumerate(logs):
        with log.open("w") as out:
            where = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(subprocess.Popen(command, env=environment | where, stdout=out, stderr=subprocess.STDOUT))
    try:
        while any(p.poll() is None for p in processes) and not any(p.returncode for p in processes):
            if stop.wait(0.05):
                raise JobError("stopped")
    finally:
        end(processes)
    codes = [process.returncode for process in processes]
    failed = sorted((rank for rank, code in enumerate(codes) if code), key=lambda rank: codes[rank] < 0)
    if failed:  # those that ended by themselves before those that were ended
        tail = "\n".join(logs[failed[0]].read_text().splitlines()[-25:])
        raise JobError(f"{task.kind} of {task.key}, seed {task.seed}, rank {failed[0]} failed:\n{tail}")
    found: dict[str, Any] = json.loads(task.path(".json").read_text())
    return found


def end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.terminate()
    for process in processes:
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Progress:
    """One line on a terminal's stderr; silent elsewhere."""

    def __init__(self, tasks: int) -> None:
        self.tasks, self.done, self.start = tasks, 0, time.monotonic()
        self.active = sys.stderr.isatty()

    def finished(self, task: Task) -> None:
        self.done += 1
        if self.active:
            minutes = (time.monotonic() - self.start) / 60
            line = f"{self.done}/{self.tasks} runs, {minutes:.1f} min; last: {task.kind} {task.key}, seed {task.seed}"
            print(f"\r{line:78}", end="" if self.done < self.tasks else "\n", file=sys.stderr, flush=True)


def run_all(
    tasks: Sequence[Task], ranks: Callable[[Task], int], workers: int, progress: Progress
) -> dict[Task, dict[str, Any]]:
    """Results by task. The first failure ends everything that runs and is raised."""
    stop = threading.Event()
    with ThreadPoolExecutor(workers) as pool:

        def run(task: Task) -> dict[str, Any]:
            result = run_task(task, ranks(task), stop)
            progress.finished(task)
            return result

        futures = {pool.submit(run, task): task for task in tasks}
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
    return {task: future.result() for future, task in futures.items()}
