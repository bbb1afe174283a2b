"""Resident memory of this process, in bytes (Linux; elsewhere only the peak since the start)."""

from __future__ import annotations

import contextlib
import ctypes
import resource
from pathlib import Path


def _status(field: str, file: str = "status") -> int | None:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self", file).read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    return None


def now() -> int:
    return _status("VmRSS") or 0


def held() -> int:
    """Without pages of files, which the system drops and reads again as it likes."""
    parts = _status("RssAnon"), _status("RssShmem")
    return now() if None in parts else sum(part or 0 for part in parts)


def trim() -> None:
    """Free memory goes back to the system (glibc): what is built afterwards would come to lie in it unseen."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def proportional() -> int:
    """Pages that several processes have are divided among them: the sum over processes is what they hold together."""
    return _status("Pss", "smaps_rollup") or now()


def of_others() -> int:
    """Of the shared memory in now(), what is beyond this process's part: pages that N processes have count 1/N each."""
    resident, part = _status("RssShmem"), _status("Pss_Shmem", "smaps_rollup")
    return 0 if resident is None or part is None else resident - part


def peak() -> int:
    return _status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_peak() -> None:
    """Starts a new peak where the kernel allows it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
