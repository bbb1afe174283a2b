"""The stage `pytests`: the project's own Python tests on a machine that has a GPU, to their end if time allows it."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from common import DRY, ROOT, WORK, Results, seconds_left

LINE = re.compile(
    r"(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) (?:\[.*?\] )?(tests/\S+)|(tests/\S+::\S+) (PASSED|FAILED|ERROR|SKIPPED)"
)


def command(junit: Path) -> list[str]:
    found = [sys.executable, "-m", "pytest", "-v", "-o", "addopts=", "-p", "no:cacheprovider", "-rfE", "--tb=short"]
    found += ["--junitxml", str(junit)]
    if importlib.util.find_spec("xdist") and not DRY:
        workers = min(12, os.cpu_count() or 1)
        found += ["-n", str(workers), "--dist", "loadfile", "--no-loadscope-reorder"]
    if importlib.util.find_spec("pytest_timeout"):
        found += ["--timeout", "120"]
    if importlib.util.find_spec("ray") is None:
        found += ["--ignore", "tests/python/hybrid"]
    return [*found, "tests/python/test_version.py"] if DRY else [*found, "tests/python"]


def followed(junit: Path) -> tuple[int, list[str]]:
    """The exit status and the lines. Interrupted before the stage's time is over, so that pytest can still sum up."""
    lines = []
    with subprocess.Popen(
        command(junit), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as tests:
        enough = threading.Timer(max(1.0, seconds_left() - 15), tests.send_signal, (signal.SIGINT,))
        enough.start()
        assert tests.stdout is not None
        for line in tests.stdout:
            print(line, end="", flush=True)
            lines.append(line)
        enough.cancel()
    return tests.returncode, lines


def messages(junit: Path) -> dict[str, str]:
    """Of tests that failed: the last line of why."""
    if not junit.exists():
        return {}
    found = {}
    for case in ElementTree.parse(junit).iter("testcase"):
        for bad in [*case.iter("failure"), *case.iter("error")]:
            text = (bad.get("message") or "") + "\n" + (bad.text or "")[-700:]
            found[f"{case.get('classname')}::{case.get('name')}"] = text.strip()
    return found


def tests() -> dict[str, Any]:
    junit = WORK / "pytests.xml"
    junit.unlink(missing_ok=True)
    began = time.monotonic()
    rc, lines = followed(junit)
    counts: dict[str, int] = {}
    failed = []
    for line in lines:
        if "short test summary" in line:
            break  # says the failed ones again
        if match := LINE.search(line):
            status, name = match[1] or match[4], match[2] or match[3]
            counts[status] = counts.get(status, 0) + 1
            if status in ("FAILED", "ERROR") and name not in failed:
                failed.append(name)
    whole = rc in (0, 1)
    print(f"{counts}, {'to their end' if whole else f'stopped (rc {rc})'}, {time.monotonic() - began:.0f} s")
    return {
        "ok": rc == 0,
        "whole": whole,
        "counts": counts,
        "failed": failed,
        "messages": messages(junit),
        "said": lines[-3:],
    }


if __name__ == "__main__":
    results = Results("pytests", starts_cuda=False)
    results.case("tests/python", tests)
    results.end()
