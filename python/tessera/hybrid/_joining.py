"""How an end of a link finds the others at a torch.distributed store, beside the program: making an end waits for
nobody. Notes in the store are JSON, and are read once: messages go another way. Why a rank gives up is such a note,
too: it outlives that rank's connections."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store as Store

from tessera import _core
from tessera.errors import UsageError

_PAUSES = (1e-3, 0.1)  # seconds before the store is asked again: at first, and in the end
_ANNOUNCING = 1.0  # seconds for the store to take or give the word that a rank gives up
_LOOK = 0.5  # seconds between looks for that word while ranks connect

C10D: Any = torch._C._distributed_c10d  # the stores; torch.distributed does not list them


class Joining:
    """One rank's way to a link. `names`: of all ranks, in errors; `connect(store, processes)`: makes the end once all
    have come, where `processes` are those of all ranks. Runs on a thread of its own, also because a client of torch's
    waits for the answer of a store without end."""

    def __init__(
        self,
        store: Store,
        names: Sequence[str],
        number: int,
        timeout: float,
        connect: Callable[[Any, list[dict[str, Any]]], Any],
    ) -> None:
        self._store = store
        self._names = names
        self._number = number
        self._timeout = timeout
        self._lock = threading.Lock()
        self._came = threading.Event()  # the end, or an error
        self._announced = threading.Event()
        self._end: Any = None
        self._error: Exception | None = None
        self._missing: list[int] = []
        self._connects = False  # all have come, but one of them may have given up before it saw that
        self._processes: dict[int, dict[str, Any]] = {}
        self._asked = 0.0  # since when the store has not answered; 0: it has
        self._failure = ""  # why this rank gives up
        self._closes = 0.0  # since when nobody wants the end
        threading.Thread(target=self._run, args=(connect,), name="tessera link", daemon=True).start()

    def end(self, what: str) -> Any:
        """The end, where all have come within the timeout. `what` it is needed for: in errors."""
        me = f"[hybrid] {self._names[self._number]}"
        came = self._wait_for_end(f"{me} waits for {what}, but ")
        if self._end is not None:
            return self._end
        if came and self._error is not None:
            raise dist.DistBackendError(f"{me} waits for {what}, but {self._error}") from None
        if came:
            raise UsageError(f"{me} is closed")
        if self._asked and time.monotonic() - self._asked > self._timeout / 2:
            raise dist.DistBackendError(
                f"{me} cannot reach the others: the store of the link does not answer within {self._timeout:g} s; the "
                "process that hosts it may be stopped"
            )
        if self._connects:
            raise dist.DistBackendError(
                f"{me} waits for {what}, but the ranks of the link have not connected within {self._timeout:g} s"
            )
        missing = ", ".join(self._names[other] for other in self._missing)
        raise dist.DistBackendError(
            f"{me}: {missing} did not send {what} within {self._timeout:g} s: no word of it has come yet"
        )

    def _wait_for_end(self, text: str) -> bool:
        """Whether the end came, or an error. DistBackendError that begins with `text` where a rank who has come gives
        up."""
        until = time.monotonic() + self._timeout
        while not self._came.wait(max(0.0, min(_LOOK, until - time.monotonic()))):
            if self._connects and (reason := self._within(_ANNOUNCING, self._failure_of_others)):
                raise dist.DistBackendError(text + reason)
            if time.monotonic() >= until:
                return False
        return True

    def call(self, what: str, method: str, *args: Any) -> Any:
        """Calls a method of the end. Where another rank is lost that has announced why, DistBackendError has that,
        too."""
        end = self.end(what)
        try:
            return getattr(end, method)(*args)
        except dist.DistBackendError as error:
            reason = self._within(_ANNOUNCING, self._failure_of_others)
            if reason is None or reason in str(error):
                raise
            raise dist.DistBackendError(
                f"[hybrid] {self._names[self._number]} waits for {what}, but {reason}"
            ) from None

    def abort(self, reason: str) -> None:
        """Announces the reason to all others; waits for none."""
        with self._lock:
            self._failure, end = reason, self._end
        if self._came.is_set():
            self._within(_ANNOUNCING, self._announce)
        else:
            self._announced.wait(_ANNOUNCING)
        if end is not None:
            end.abort(reason)

    def close(self) -> None:
        """Waits until what was sent is taken, and lets go of the end. Others that are still to come find that."""
        with self._lock:
            end, self._end = self._end, None
            self._closes = time.monotonic()
        if end is not None and not self._failure:
            end.close()

    # ---------------------------------------------------------------- on a thread

    def _within(self, seconds: float, call: Callable[[], Any]) -> Any:
        """Returns what `call`, of the store, returns; None where it fails, or takes longer."""
        found: list[Any] = []

        def run() -> None:
            with contextlib.suppress(RuntimeError):
                found.append(call())

        thread = threading.Thread(target=run, name="tessera link", daemon=True)
        thread.start()
        thread.join(seconds)
        return found[0] if found else None

    def _run(self, connect: Callable[[Any, list[dict[str, Any]]], Any]) -> None:
        try:
            processes = self._find_others()
            self._connects = True
            end = connect(self._store, processes)
            with self._lock:
                failure = self._failure
                if not self._closes:
                    self._end = end
            if failure:
                self._announce()
                end.abort(failure)
        except Exception as error:
            self._error = error
        finally:
            self._announced.set()
            self._came.set()

    def _find_others(self) -> list[dict[str, Any]]:
        own = {"host": _core.host_id(), "pid": os.getpid(), "start": _core.start_of_process(os.getpid())}
        self._ask(lambda: self._store.set(f"here/{self._number}", json.dumps(own)))
        self._processes = {self._number: own}
        pause = _PAUSES[0]
        while True:
            for number in range(len(self._names)):
                if number not in self._processes and self._has(f"here/{number}"):
                    self._processes[number] = self._note(f"here/{number}")
            self._missing = [number for number in range(len(self._names)) if number not in self._processes]
            self._look()
            if not self._missing:
                return [self._processes[number] for number in range(len(self._names))]
            time.sleep(pause)
            pause = min(2 * pause, _PAUSES[1])

    def _look(self) -> None:
        """Raises where they will never find each other."""
        if self._failure:
            self._announce()
            raise RuntimeError(f"it has given up: {self._failure}")
        if reason := self._failure_of_others():
            raise RuntimeError(reason)
        for number, process in self._processes.items():
            if has_ended(process):
                raise RuntimeError(f"{self._names[number]} (process {process['pid']}) has ended")
        if self._closes and time.monotonic() - self._closes > self._timeout:
            raise RuntimeError("it was closed before all had come")

    def _announce(self) -> None:
        self._ask(lambda: self._store.set(f"failed/{self._number}", json.dumps(self._failure)))

    def _failure_of_others(self) -> str | None:
        for number, name in enumerate(self._names):
            if number != self._number and self._has(f"failed/{number}"):
                return f"{name} failed: {self._note(f'failed/{number}')}"
        return None

    def _has(self, key: str) -> bool:
        return bool(self._ask(lambda: self._store.check([key])))

    def _note(self, key: str) -> Any:
        try:
            return json.loads(self._ask(lambda: self._store.get(key)))
        except ValueError:
            raise RuntimeError(f"what the store of the link has under {key} is no note of a rank") from None

    def _ask(self, call: Callable[[], Any]) -> Any:
        self._asked = time.monotonic()
        try:
            return call()
        except RuntimeError as error:
            reason = str(error).split("\n", 1)[0]
            raise RuntimeError(f"the store of the link is gone ({reason})") from None
        finally:
            self._asked = 0.0


def has_ended(process: dict[str, Any]) -> bool:
    """Whether a process of this host has ended, by what a rank says of itself when it comes."""
    here: bool = process["host"] == _core.host_id()
    return here and _core.start_of_process(process["pid"]) != process["start"]
