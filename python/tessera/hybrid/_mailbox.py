"""Notes between the ranks of a link, through a torch.distributed store. Who waits for one learns within a second that
its sender has ended or given up, and in any case when the link's timeout has passed."""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from tessera.errors import UsageError
from tessera.hybrid._memory import Process

_LOOK = 0.25  # seconds between two looks at who is still there
# How long to sleep before asking the store again: a share of the wait so far, and these seconds at most. The store's
# own wait() cannot be left early without a warning on the terminal.
_SHARE, _SLEEP = 0.05, 2.5e-2

_ANSWER = 5.0  # seconds that a store may need for its part

Peer = tuple[str, int]  # side, rank


C10D: Any = torch._C._distributed_c10d  # the stores; torch.distributed does not list them


class _Asker:
    """Makes calls of a store on a thread of its own: a client of torch's waits for an answer without end, and the
    process that hosts the store may be stopped."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, args=(self._calls,), name="tessera link", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._calls.put, None)
        self.is_stuck = False

    @staticmethod
    def _serve(calls: queue.SimpleQueue[Callable[[], None] | None]) -> None:
        while (call := calls.get()) is not None:
            call()
            del call

    def ask(self, call: Callable[[], Any], seconds: float) -> Any:
        """What `call` returns or raises. TimeoutError after so many seconds, and from then on."""
        if threading.current_thread() is self._thread:  # inside another call
            return call()
        done, found = threading.Event(), list[Any]()

        def run() -> None:
            try:
                found.append((call(), None))
            except BaseException as error:
                found.append((None, error))
            finally:
                done.set()

        if not self.is_stuck:
            self._calls.put(run)
            self.is_stuck = not done.wait(seconds)
        if self.is_stuck:
            raise TimeoutError
        result, error = found[0]
        if error is not None:
            raise error
        return result


class Mailbox:
    """One rank's. `prefix`: the link's, of all its ranks; `names`: what the sides are called in errors."""

    def __init__(self, store: Any, prefix: str, me: Peer, names: dict[str, str], timeout: float) -> None:
        self._store: Any = C10D.PrefixStore(prefix, store)
        self._exchange: Callable[[], Any] | None = getattr(store, "exchange", None)
        self.link = f"{getattr(store, 'meeting', '')}/{prefix}"
        self.me = me
        self._names = names
        self._timeout = timeout
        self._asker = _Asker()
        self._peers: dict[Peer, Process] = {}
        self.aborted = False
        self.process = Process.this()
        self.put(f"hello/{me[0]}/{me[1]}", asdict(self.process))

    def name(self, peer: Peer) -> str:
        return f"rank {peer[1]} of {self._names[peer[0]]}"

    def store(self, prefix: str) -> Any:
        return C10D.PrefixStore(prefix, self._store)

    def exchange(self) -> Any:
        """The actor of transport="ray"."""
        if self._exchange is None:
            raise UsageError(
                f'[hybrid] {self.name(self.me)}: transport="ray" is for links of actor groups; make the end with '
                "place.store() of a Program's actor"
            )
        return self._exchange()

    def put(self, key: str, note: Any) -> None:
        """Plain values, as JSON: nothing of it is run where it is read."""
        self._ask("leave a note for", lambda: self._store.set(key, json.dumps(note)))

    def _note(self, key: str) -> Any:
        try:
            return json.loads(self._store.get(key))
        except ValueError:
            raise dist.DistBackendError(
                f"[hybrid] {self.name(self.me)}: what the store has under {key} is no note of a link"
            ) from None

    def take(self, key: str, peer: Peer, what: str, check: Callable[[Peer], None] | None = None) -> Any:
        """The note that `peer` leaves under `key`; it stays there. `check` raises where it will never come."""
        waits = self._timeout + _ANSWER
        return self._within(waits, f"read {what} of", lambda: self._take(key, peer, what, check))

    def _take(self, key: str, peer: Peer, what: str, check: Callable[[Peer], None] | None) -> Any:
        begin = look = time.monotonic()
        while not self._there(key):
            now = time.monotonic()
            if now - look > _LOOK:
                look = now
                try:
                    self.look(peer, what, check)
                except Exception:
                    if self._there(key):  # it came before what ended its sender
                        break
                    raise
            if now - begin > self._timeout:
                raise dist.DistBackendError(
                    f"[hybrid] {self.name(self.me)}: {self.name(peer)} did not send {what} within {self._timeout:g} s"
                )
            time.sleep(min(_SLEEP, 1e-4 + _SHARE * (now - begin)))
        with self._reaching(f"read {what} of"):
            return self._note(key)

    def _there(self, key: str) -> bool:
        with self._reaching("look for a note of"):
            return bool(self._store.check([key]))

    def peek(self, key: str) -> Any:
        """The note under `key`, None where there is none."""

        def look() -> Any:
            return self._note(key) if self._store.check([key]) else None

        return self._ask("look for a note of", look)

    def drop(self, key: str) -> None:
        with contextlib.suppress(RuntimeError):
            self._ask("take a note from", lambda: self._store.delete_key(key))

    def count(self, key: str, more: int = 1) -> int:
        """Adds to the number under `key`, 0 at first, and returns it."""
        return int(self._ask("leave a note for", lambda: self._store.add(key, more)))

    def process_of(self, peer: Peer) -> Process:
        """Waits until the peer has come."""
        if peer not in self._peers:
            note = self.take(f"hello/{peer[0]}/{peer[1]}", peer, "its first word (it was never made)")
            self._peers[peer] = Process(**note)
        return self._peers[peer]

    def abort(self, reason: str) -> None:
        """Whoever waits for this rank raises, with `reason`."""
        self.aborted = True
        with contextlib.suppress(RuntimeError):
            self.put(f"failed/{self.me[0]}/{self.me[1]}", reason)

    def runs(self, peer: Peer) -> bool:
        """False where `peer` is known to have failed or ended."""
        known = self._peers.get(peer)
        if known is None and (note := self.peek(f"hello/{peer[0]}/{peer[1]}")) is not None:
            known = self._peers[peer] = Process(**note)
        ended = known is not None and known.host == self.process.host and not known.runs()
        return not ended and self.peek(f"failed/{peer[0]}/{peer[1]}") is None

    def look(self, peer: Peer, what: str, check: Callable[[Peer], None] | None = None) -> None:
        """Raises where `peer` will not send anything any more."""
        if check is not None:
            check(peer)
        if self.runs(peer):
            return
        reason = self.peek(f"failed/{peer[0]}/{peer[1]}")
        end = f"(process {self._peers[peer].pid}) has ended" if reason is None else f"failed: {reason}"
        raise dist.DistBackendError(f"[hybrid] {self.name(self.me)} waits for {what}, but {self.name(peer)} {end}")

    def _ask(self, what: str, call: Callable[[], Any]) -> Any:
        """`call` of the store."""

        def reach() -> Any:
            with self._reaching(what):
                return call()

        return self._within(self._timeout, what, reach)

    def _within(self, seconds: float, what: str, call: Callable[[], Any]) -> Any:
        try:
            return self._asker.ask(call, seconds)
        except TimeoutError:
            raise dist.DistBackendError(
                f"[hybrid] {self.name(self.me)} cannot {what} the others: the store of the link does not answer within "
                f"{seconds:g} s; the process that hosts it may be stopped"
            ) from None

    @contextlib.contextmanager
    def _reaching(self, what: str) -> Any:
        try:
            yield
        except dist.DistBackendError:
            raise
        except RuntimeError as error:
            reason = str(error).split("\n", 1)[0]
            raise dist.DistBackendError(
                f"[hybrid] {self.name(self.me)} cannot {what} the others: the store of the link is gone ({reason})"
            ) from None
