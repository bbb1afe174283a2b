"""Groups of Ray actors: one rank each, with a torch.distributed process group of their own."""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from tessera.distributed import free_port, init_distributed
from tessera.errors import ConfigError, UsageError
from tessera.hybrid._joining import C10D, Store
from tessera.hybrid._object_store import Relay, RendezvousStore

_GRACE = 2.0  # seconds after a first failure for the others to say theirs
_STRATEGIES = {"pack": "PACK", "spread": "SPREAD", "strict_pack": "STRICT_PACK", "strict_spread": "STRICT_SPREAD"}


def import_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise ConfigError("[hybrid] actor groups need Ray: pip install tessera[ray]") from None
    return ray


class ActorError(RuntimeError):
    """Ranks of actor groups that failed or died: `ranks` has (group, rank) of each, the message what happened to
    them."""

    def __init__(self, message: str, ranks: Sequence[tuple[str, int]] = ()) -> None:
        super().__init__(message)
        self.ranks = list(ranks)


@dataclass(frozen=True)
class Rendezvous:
    """The store that the ranks of all groups of a program reach, in the driver's process."""

    address: str
    port: int
    name: str  # a secret of this start of the program: begins all keys of the store

    def store(self, timeout: float) -> Store:
        """A client of the caller's own."""
        client = C10D.TCPStore(self.address, self.port, is_master=False, timeout=timedelta(seconds=timeout))
        return RendezvousStore(self.name, client, lambda: self.relay)

    @functools.cached_property
    def relay(self) -> Any:
        """The actor that hands references on. The first rank that needs it makes it; it ends with that rank."""
        ray = import_ray()
        return ray.remote(Relay).options(name=self.name, get_if_exists=True, num_cpus=0).remote()


@dataclass(frozen=True)
class Place:
    """Which rank of which group an actor is; the first argument of its object."""

    group: str
    rank: int
    ranks: int
    timeout: float
    rendezvous: Rendezvous | None

    def store(self) -> Store:
        """The store for Link.sender() and Link.receiver()."""
        if self.rendezvous is None:
            raise UsageError(f"[hybrid] group '{self.group}' is not part of a Program, so there is no store for links")
        return self.rendezvous.store(self.timeout)


class Host:
    """The actor: holds one rank's object."""

    def __init__(self) -> None:
        self.object: Any = None
        self.place: Place | None = None  # lives as long as this process: see Rendezvous.relay

    def address(self) -> tuple[str, int]:
        """The address of the ranks' store."""
        return import_ray().util.get_node_ip_address(), free_port()

    def build(self, place: Place, master: tuple[str, int], backend: str | None, make: Any) -> None:
        os.environ.update(
            RANK=str(place.rank),
            WORLD_SIZE=str(place.ranks),
            LOCAL_RANK="0",  # Ray shows an actor its own devices only
            MASTER_ADDR=master[0],
            MASTER_PORT=str(master[1]),
            TORCHELASTIC_USE_AGENT_STORE="False",  # True where torchrun started the driver, whose environment this is
        )
        init_distributed(backend, timeout=timedelta(seconds=place.timeout))
        kind, args, kwargs = make
        self.place = place
        self.object = kind(place, *args, **kwargs)

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if method.startswith("engine."):
            return getattr(self.object.engine, method.removeprefix("engine."))(*args, **kwargs)
        return getattr(self.object, method)(*args, **kwargs)

    def process(self) -> int:
        return os.getpid()


@dataclass
class Pending:
    """A call that runs on all ranks of a group."""

    group: ActorGroup
    method: str
    refs: list[Any]


@dataclass
class ActorGroup:
    """`ranks` actors, each with an object `kind(place, *args, **kwargs)`, where `place` says which rank it is and
    torch.distributed has a default process group of the group's ranks. An engine of the object is its attribute
    `engine`.

    `placement`: "pack" puts ranks on as few hosts as it can, "spread" on as many; "strict_" of either insists. `cpus`
    and `gpus` of a rank may be fractions: half a GPU each lets two groups share GPUs. `timeout`: seconds for the
    start and for a collective. `backend`: of torch.distributed; None: as init_distributed() chooses.
    """

    name: str
    kind: type
    ranks: int
    args: tuple[object, ...] = ()
    kwargs: Mapping[str, object] = field(default_factory=dict)
    placement: str = "pack"
    cpus: float = 1
    gpus: float = 0
    timeout: float = 600.0
    backend: str | None = None

    def __post_init__(self) -> None:
        if self.placement not in _STRATEGIES:
            raise ConfigError(f"[hybrid] placement must be one of {', '.join(_STRATEGIES)}, got {self.placement!r}")
        if self.ranks < 1:
            raise ConfigError(f"[hybrid] group '{self.name}' needs 1 rank at least, got {self.ranks}")
        self._actors: list[Any] = []
        self._bundles: Any = None

    def start(self) -> None:
        """Places the actors and builds their objects."""
        start_together([self])

    def begin_actors(self) -> Pending:
        """Places the actors; returns, from the first, the address of the ranks' store."""
        ray = import_ray()
        self._place(ray)
        remote = ray.remote(num_cpus=self.cpus, num_gpus=self.gpus, max_restarts=0)(Host)
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        self._actors = [
            remote.options(scheduling_strategy=strategy(self._bundles, rank)).remote() for rank in range(self.ranks)
        ]
        return Pending(self, "address", [self._actors[0].address.remote()])

    def begin_objects(self, master: tuple[str, int], rendezvous: Rendezvous | None) -> Pending:
        """Builds the object of every rank, and waits for none; a Program calls it once all groups have actors."""
        make = (self.kind, self.args, self.kwargs)
        places = [Place(self.name, rank, self.ranks, self.timeout, rendezvous) for rank in range(self.ranks)]
        refs = [a.build.remote(p, master, self.backend, make) for a, p in zip(self._actors, places, strict=True)]
        return Pending(self, "__init__", refs)

    def _place(self, ray: Any) -> None:
        bundle = {name: amount for name, amount in (("CPU", self.cpus), ("GPU", self.gpus)) if amount > 0}
        self._bundles = ray.util.placement_group([bundle] * self.ranks, strategy=_STRATEGIES[self.placement])
        if not self._bundles.wait(self.timeout):
            raise ConfigError(
                f"[hybrid] group '{self.name}': the cluster could not place {self.ranks} ranks of {bundle} "
                f"({self.placement}) within {self.timeout:g} s; it has {ray.cluster_resources()}"
            )

    def check_stopped(self) -> None:
        """UsageError while the group runs."""
        if self._actors:
            raise UsageError(f"[hybrid] group '{self.name}' runs already; call stop() first")

    def check_runs(self) -> None:
        """UsageError unless the group runs."""
        if not self._actors:
            raise UsageError(f"[hybrid] group '{self.name}' does not run; call start() first")

    def begin(self, method: str, *args: object, each: Sequence[object] | None = None, **kwargs: object) -> Pending:
        """Calls a method of all ranks' objects ("engine.x": of their engines) and waits for none. `each`: a first
        argument for each rank."""
        self.check_runs()
        if each is not None and len(each) != self.ranks:
            raise ConfigError(f"[hybrid] group '{self.name}' has {self.ranks} ranks, but each has {len(each)} values")
        firsts: list[tuple[object, ...]] = [()] * self.ranks if each is None else [(value,) for value in each]
        refs = [
            actor.call.remote(method, first + args, kwargs) for actor, first in zip(self._actors, firsts, strict=True)
        ]
        return Pending(self, method, refs)

    def call(self, method: str, *args: object, each: Sequence[object] | None = None, **kwargs: object) -> list[Any]:
        """begin(), and the results in the order of ranks. ActorError names ranks that fail or die."""
        return wait(self.begin(method, *args, each=each, **kwargs))[0]

    def processes(self) -> list[int]:
        """The ranks' process ids, each on its own host."""
        return wait(Pending(self, "process", [actor.process.remote() for actor in self._actors]))[0]

    def stop(self) -> None:
        """Ends the actors, whatever they do, and frees their resources. Safe to call twice."""
        ray = import_ray()
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
        if self._bundles is not None:
            ray.util.remove_placement_group(self._bundles)
            self._bundles = None


def start_together(groups: Sequence[ActorGroup], rendezvous: Rendezvous | None = None) -> None:
    """Starts all groups at the same time: most of a start is each process importing what it needs. All of them or
    none."""
    if not import_ray().is_initialized():
        raise UsageError("[hybrid] there is no Ray cluster yet; call ray.init() first")
    for group in groups:
        group.check_stopped()
    timeout = max((group.timeout for group in groups), default=0.0)
    try:
        addresses = wait(*(group.begin_actors() for group in groups), timeout=timeout)
        objects = [group.begin_objects(found[0], rendezvous) for group, found in zip(groups, addresses, strict=True)]
        wait(*objects, timeout=timeout)
    except BaseException:
        for group in groups:
            group.stop()
        raise


def wait(*calls: Pending, timeout: float | None = None) -> list[list[Any]]:
    """The results of calls that run at the same time, by call and rank. The first rank that fails or dies ends the
    wait: ActorError with its name and traceback, and those of others that failed soon after."""
    ray = import_ray()
    place = {ref: (call, rank) for call in calls for rank, ref in enumerate(call.refs)}
    left = list(place)
    failures: list[tuple[Pending, int, Exception]] = []
    deadline = None if timeout is None else time.monotonic() + timeout
    while left:
        seconds = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready, left = ray.wait(left, timeout=seconds)
        for ref in ready:
            try:
                ray.get(ref)
            except Exception as error:
                failures.append((*place[ref], error))
        if len(failures) == 1:
            deadline = min(deadline or math.inf, time.monotonic() + _GRACE)
        if not ready:
            break
    if failures:
        raise _error_of(failures)
    if left:
        late = [place[ref] for ref in left]
        names = ", ".join(f"rank {rank} of '{call.group.name}' in {call.method}()" for call, rank in late)
        raise ActorError(f"[hybrid] no answer within {timeout:g} s of {names}", [(c.group.name, r) for c, r in late])
    return [ray.get(call.refs) for call in calls]


def _error_of(failures: list[tuple[Pending, int, Exception]]) -> ActorError:
    """The error of ranks that died first: what others say follows from it."""
    ray = import_ray()
    dead = [f for f in failures if isinstance(f[2], ray.exceptions.RayActorError)]
    texts = []
    for call, rank, error in dead + [f for f in failures if f not in dead]:
        name = f"rank {rank} of '{call.group.name}'"
        if isinstance(error, ray.exceptions.RayTaskError):
            texts.append(f"{name} failed in {call.method}():\n{str(error).strip()}")
        else:
            reason = str(error).strip().replace("\n", "\n  ")
            texts.append(f"{name} died in {call.method}(): {reason}")
    ranks = [(call.group.name, rank) for call, rank, _ in dead or failures]
    return ActorError("[hybrid] " + "\n".join(texts), ranks)
