"""A differentiable hand-over between two engines: outputs go forward, gradients come back. See docs/hybrid.md."""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch.utils import _pytree

from tessera.errors import ConfigError, UsageError
from tessera.hybrid._layout import Box, Dims, Layout, wanted_boxes, whole_boxes
from tessera.hybrid._letters import Letter, Meta, Post, join
from tessera.hybrid._mailbox import Mailbox

_SIDES = ("source", "target")
_ONE_RANK = Layout()
_PLAIN = (type(None), bool, int, float, str)  # leaves of outputs that are no tensors


class _Slot:
    """Stands for a tensor in outputs whose nesting travels."""


@dataclass(frozen=True)
class Link:
    """What both sides of a hand-over must agree on; plain data, which may travel to other processes.

    `name`: unique among the links of a store. `source`, `target`: the ranks of both sides. `batch_dim`: the dim of
    every tensor along which batches of ranks lie; `sequence_dim`: the one that ranks of a sequence cut, which for
    packed tokens may be the same. `sides`: what the two are called in errors. `timeout`: seconds that a rank waits for
    another one. `transport`: "auto" (memory between processes of one host, a Gloo process group between hosts) or
    "group" (the process group everywhere).
    """

    name: str
    source: Layout = _ONE_RANK
    target: Layout = _ONE_RANK
    batch_dim: int = 0
    sequence_dim: int | None = None
    sides: tuple[str, str] = _SIDES
    timeout: float = 600.0
    transport: str = "auto"

    def __post_init__(self) -> None:
        if self.transport not in ("auto", "group"):
            raise ConfigError(f"[hybrid] transport must be 'auto' or 'group', got {self.transport!r}")
        for layout, side in zip((self.source, self.target), self.sides, strict=True):
            self.dims.check(layout, f"link '{self.name}', {side}")

    @property
    def dims(self) -> Dims:
        return Dims(self.batch_dim, self.sequence_dim)

    def sender(self, store: Any, rank: int, engine: Any = None) -> Sender:
        """This process as rank `rank` of the source. `store`: a torch.distributed store that all ranks of both sides
        reach, through a client of this rank's own. `engine`: the one whose outputs are sent; its mesh is checked, and
        its loss scale holds in backward(). Waits for nobody."""
        return Sender(self, store, rank, engine)

    def receiver(self, store: Any, rank: int, engine: Any = None) -> Receiver:
        """This process as rank `rank` of the target, as sender() is of the source."""
        return Receiver(self, store, rank, engine)


class _End:
    """What both ends of a link have."""

    def __init__(self, link: Link, side: str, store: Any, rank: int, engine: Any) -> None:
        self.link = link
        self.rank = rank
        self._side = side
        self._layouts = dict(zip(_SIDES, (link.source, link.target), strict=True))
        layout = self._layouts[side]
        names = {key: f"{name} (link '{link.name}')" for key, name in zip(_SIDES, link.sides, strict=True)}
        if not 0 <= rank < layout.ranks:
            raise ConfigError(f"[hybrid] rank {rank} of {names[side]}: there are {layout.ranks} ranks")
        if engine is not None and Layout.of(engine) != layout:
            raise ConfigError(f"[hybrid] {names[side]} is {layout}, but the mesh of its engine is {Layout.of(engine)}")
        self._engine = engine
        self._mailbox = Mailbox(store, f"link/{link.name}", (side, rank), names, link.timeout)
        self._post = Post(self._mailbox, self._layouts, link.transport == "group", link.timeout)
        self._part = rank // layout.replicas
        self._number = 0  # of the next message
        self._step = 0
        self._since = 0  # messages since the last step()
        self._me = f"[hybrid] {self._mailbox.name((side, rank))}"

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            self.abort(f"{type(error).__name__}: {error}")
        self.close()

    def abort(self, reason: str) -> None:
        """Whoever waits for this rank, now or later, raises DistBackendError with `reason`."""
        self._mailbox.abort(reason)

    def close(self) -> None:
        """Waits until the other side has taken what was sent to it, if its processes run."""
        if not self._mailbox.aborted:
            self._post.flush()

    def _peers(self) -> list[tuple[str, int]]:
        other = _SIDES[self._side == "source"]
        return [(other, rank) for rank in range(self._layouts[other].ranks)]

    def _outstanding(self) -> list[Hashable]:
        """Samples whose gradients have not come or gone back."""
        raise NotImplementedError

    def step(self) -> None:
        """Call it once for each optimizer step, on all ranks of both sides: checks that they had the same number of
        messages and that all gradients went back. Collective over both sides."""
        left = self._outstanding()
        if left:
            call = "backward" if self._side == "source" else "give_back"
            raise UsageError(
                f"{self._me}: step {self._step} ends, but the gradients of samples {left} are still out; call "
                f"{call}() for each before step()"
            )
        self._mailbox.put(self._ended(self._side, self.rank), json.dumps(self._since))
        for side, rank in self._peers():
            note = self._mailbox.take(self._ended(side, rank), (side, rank), f"word that step {self._step} has ended")
            if int(json.loads(note)) != self._since:
                raise UsageError(
                    f"{self._me}: {self._mailbox.name((side, rank))} had {note} micro-batches in step {self._step}, "
                    f"this rank {self._since}"
                )
        self._mailbox.drop(f"ended/{self._step - 1}/{self._side}/{self.rank}")
        self._step += 1
        self._since = 0

    def _ended(self, side: str, rank: int) -> str:
        return f"ended/{self._step}/{side}/{rank}"

    def _still_in_step(self, what: str, need: int) -> None:
        """Raises where a peer has ended the step with fewer than `need` messages, or (0) has ended it at all."""
        for side, rank in self._peers():
            note = self._mailbox.peek(self._ended(side, rank))
            if note is not None and (need == 0 or int(json.loads(note)) < need):
                raise UsageError(
                    f"{self._me} waits for {what}, but {self._mailbox.name((side, rank))} has ended step "
                    f"{self._step} after {note} micro-batches"
                )


class Sender(_End):
    """The outputs' end of a link, on one rank. Link.sender() makes it."""

    def __init__(self, link: Link, store: Any, rank: int, engine: Any) -> None:
        super().__init__(link, "source", store, rank, engine)
        self._sent: dict[Hashable, tuple[int, list[torch.Tensor]]] = {}

    def send(self, outputs: Any, sample: Hashable, samples: Sequence[int] | None = None) -> None:
        """Hands outputs over: tensors in any nesting of tuples, lists and dicts; sizes may change from call to call.
        Tensors with a graph arrive as leaves that require gradients. `sample`: the micro-batch, by a name or number of
        your own, which receive() must ask for. `samples`: how many rows of batch_dim each sample of this rank's batch
        has (all parts of its sequence together), where batches are dealt out to another number of ranks and a sample
        is more than one row. Waits for nobody, but the first time for the other ranks to come."""
        if sample in self._sent:
            raise UsageError(f"{self._me}: sample {sample!r} is on its way already; call backward() for it first")
        leaves, tree = _pytree.tree_flatten(outputs)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        for leaf in leaves:
            if not isinstance(leaf, (torch.Tensor, *_PLAIN)):
                raise ConfigError(
                    f"{self._me}: outputs hold a {type(leaf).__name__}; send tensors, numbers and texts in tuples, "
                    "lists and dicts"
                )
        trained = [t for t in tensors if t.requires_grad]
        places = [_Slot() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        number = self._announce(sample, tensors, _pytree.tree_unflatten(places, tree), samples)
        if trained:
            self._sent[sample] = (number, trained)

    def _announce(self, sample: Hashable, tensors: list[torch.Tensor], outputs: Any, samples: Any) -> int:
        number, self._number, self._since = self._number, self._number + 1, self._since + 1
        metas = tuple(Meta(t.dtype, tuple(t.shape), t.requires_grad) for t in tensors)
        letter = Letter(sample, metas, outputs, None if samples is None else tuple(samples))
        kind = f"out/{number}"
        wired = self._post.wired()
        self._post.announce(kind, letter, tensors, self.link.source.parts - 1 if wired else 0)
        if wired:
            what = f"its part of sample {sample!r}"
            letters = self._post.read(kind, what, lambda: None, side="source")
            wholes = _wholes(self.link, letters, self._me)
            together = _samples_of(self.link, letters)
            wanted = [wanted_boxes(self.link.target, self.link.dims, whole, together, self._me) for whole, _ in wholes]
            replicas = self.link.target.replicas
            self._post.push(
                kind, metas, tensors, [held for _, held in wholes], lambda rank: [w[rank // replicas] for w in wanted]
            )
            self._post.taken(kind, side="source")
        return number

    def backward(self, sample: Hashable) -> None:
        """Waits for the gradient of a sample and runs the backward of its outputs with it. In any order; once for each
        sample that was sent with a graph."""
        if sample not in self._sent:
            raise UsageError(
                f"{self._me}: there is no graph of sample {sample!r} (it was not sent, sent under no_grad, or its "
                f"backward has run); waiting for gradients are {list(self._sent)}"
            )
        number, outputs = self._sent.pop(sample)
        grads = self._gradients(number, sample, [output.device for output in outputs])
        pairs = [(output, grad) for output, grad in zip(outputs, grads, strict=True) if grad is not None]
        if not pairs:
            return
        roots = [self._engine.scale(output) if self._engine is not None else output for output, _ in pairs]
        try:
            torch.autograd.backward(roots, [grad for _, grad in pairs])
        except RuntimeError as error:
            if "through the graph a second time" not in str(error):
                raise
            raise UsageError(
                f"{self._me}: the graph of sample {sample!r} was freed before its gradient came: another backward "
                "went through it; call that with retain_graph=True"
            ) from error

    def _gradients(self, number: int, sample: Hashable, devices: Sequence[torch.device]) -> list[torch.Tensor | None]:
        """Of the outputs that have a graph, for an engine that averages over the source's ranks."""
        what = f"the gradient of sample {sample!r}"
        kind = f"back/{number}"
        letters = self._post.read(kind, what, lambda: self._still_in_step(what, 0))
        held = [[letter.box[i] for letter in letters] for i in range(len(devices))]
        wanted = [letters[0].held[i][self._part] for i in range(len(devices))]
        message = self._post.open(kind, letters, held, wanted, what)
        factor = self.link.source.parts / self.link.target.parts
        grads = []
        for i, device in enumerate(devices):
            grad = join(message, i, held[i], wanted[i], device)
            grads.append(grad if grad is None or factor == 1 else grad * factor)
        self._post.taken(kind)
        return grads

    def _outstanding(self) -> list[Hashable]:
        return list(self._sent)


@dataclass
class _Received:
    number: int
    leaves: list[torch.Tensor]  # that require gradients
    metas: list[Meta]
    held: tuple[tuple[Box, ...], ...]  # by the source's parts
    wanted: tuple[tuple[Box, ...], ...]  # by the target's


class Receiver(_End):
    """The inputs' end of a link, on one rank. Link.receiver() makes it."""

    def __init__(self, link: Link, store: Any, rank: int, engine: Any) -> None:
        super().__init__(link, "target", store, rank, engine)
        self._open: dict[Hashable, _Received] = {}
        self.device = torch.device("cpu") if engine is None else engine.device

    def receive(self, sample: Hashable) -> Any:
        """Waits for the next message and returns this rank's part of it, in the nesting in which it was sent. It must
        be of `sample`. Tensors that were sent with a graph are leaves that require gradients."""
        letters = self._letters(sample)
        tensors, received = self._take(letters, sample)
        if received.leaves:
            self._open[sample] = received
        filled = iter(tensors)
        return _pytree.tree_map(lambda leaf: next(filled) if isinstance(leaf, _Slot) else leaf, letters[0].outputs)

    def _letters(self, sample: Hashable) -> list[Letter]:
        if sample in self._open:
            raise UsageError(f"{self._me}: sample {sample!r} was received already; call give_back() for it first")
        what = f"sample {sample!r}"
        need = self._since + 1
        letters = self._post.read(f"out/{self._number}", what, lambda: self._still_in_step(what, need))
        for part, letter in enumerate(letters):
            if letter.sample != sample:
                peer = ("source", self.link.source.holder(part, self.rank))
                raise UsageError(
                    f"{self._me} asks for sample {sample!r}, but the next message of {self._mailbox.name(peer)} is of "
                    f"sample {letter.sample!r}"
                )
            kinds = [(meta.dtype, meta.trained) for meta in letter.metas]
            if kinds != [(meta.dtype, meta.trained) for meta in letters[0].metas]:
                raise ConfigError(f"{self._me}: ranks of {self.link.sides[0]} sent other tensors of sample {sample!r}")
        return letters

    def _take(self, letters: list[Letter], sample: Hashable) -> tuple[list[torch.Tensor], _Received]:
        link, kind = self.link, f"out/{self._number}"
        wholes = _wholes(link, letters, self._me)
        samples = _samples_of(link, letters)
        held = tuple(tuple(boxes) for _, boxes in wholes)
        wanted = tuple(tuple(wanted_boxes(link.target, link.dims, whole, samples, self._me)) for whole, _ in wholes)
        mine = [boxes[self._part] for boxes in wanted]
        self._post.wired()
        message = self._post.open(kind, letters, held, mine, f"sample {sample!r}")
        metas = letters[0].metas
        tensors: list[torch.Tensor] = []
        for i, meta in enumerate(metas):
            tensor = join(message, i, held[i], mine[i], self.device)
            assert tensor is not None
            tensors.append(tensor.requires_grad_() if meta.trained else tensor)
        self._post.taken(kind)
        trained = [i for i, meta in enumerate(metas) if meta.trained]
        received = _Received(
            self._number,
            [tensors[i] for i in trained],
            [metas[i] for i in trained],
            tuple(held[i] for i in trained),
            tuple(wanted[i] for i in trained),
        )
        self._number, self._since = self._number + 1, self._since + 1
        return tensors, received

    def give_back(self, sample: Hashable, gradients: Any = None) -> None:
        """Sends the gradients of what receive(sample) returned: those in .grad, or `gradients`, in the nesting of
        receive() or a list of those of the tensors that require some; None for one that is zero. After the backward of
        the sample; waits for nobody. Of a loss scale of the engine they are freed."""
        received = self._open.get(sample)
        if received is None:
            raise UsageError(
                f"{self._me}: sample {sample!r} has no gradient to give back (it was not received, came without a "
                f"graph, or its gradient has gone); those that have: {list(self._open)}"
            )
        grads = [leaf.grad for leaf in received.leaves] if gradients is None else self._given(received, gradients)
        if all(grad is None for grad in grads):
            raise UsageError(
                f"{self._me}: no gradient has reached sample {sample!r}; call give_back() after the backward of its "
                "loss"
            )
        scale = 1.0
        if self._engine is not None and self._engine.core.scaler().needed():
            scale = self._engine.core.gradient_loss_scale()
        self._return(sample, received, [grad if grad is None or scale == 1 else grad / scale for grad in grads])
        del self._open[sample]

    def _given(self, received: _Received, gradients: Any) -> list[torch.Tensor | None]:
        given = _pytree.tree_leaves(gradients, is_leaf=lambda leaf: leaf is None)
        if len(given) != len(received.leaves):
            raise ConfigError(
                f"{self._me}: give_back() got {len(given)} gradients for {len(received.leaves)} tensors that require "
                "some"
            )
        for grad, leaf in zip(given, received.leaves, strict=True):
            if grad is not None and grad.shape != leaf.shape:
                raise ConfigError(
                    f"{self._me}: a gradient has the sizes {list(grad.shape)}, its tensor {list(leaf.shape)}"
                )
        return [None if g is None else g.to(leaf.dtype) for g, leaf in zip(given, received.leaves, strict=True)]

    def _return(self, sample: Hashable, received: _Received, grads: Sequence[torch.Tensor | None]) -> None:
        metas = tuple(
            Meta(meta.dtype, tuple(leaf.shape), False, grad is not None)
            for meta, leaf, grad in zip(received.metas, received.leaves, grads, strict=True)
        )
        present = [grad for grad in grads if grad is not None]
        mine = tuple(boxes[self._part] for boxes in received.wanted)
        kind = f"back/{received.number}"
        self._post.announce(kind, Letter(sample, metas, held=received.held, box=mine), present)
        if self._post.wired():
            replicas = self.link.source.replicas
            self._post.push(
                kind, metas, present, received.wanted, lambda rank: [held[rank // replicas] for held in received.held]
            )

    def _outstanding(self) -> list[Hashable]:
        return list(self._open)


class _HandOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sender: Sender, receiver: Receiver, sample: Any, samples: Any, *tensors: torch.Tensor) -> Any:
        ctx.ends, ctx.sample = (sender, receiver), sample
        ctx.number = sender._announce(sample, list(tensors), None, samples)
        ctx.devices = [t.device for t in tensors if t.requires_grad]
        found, ctx.received = receiver._take(receiver._letters(sample), sample)
        ctx.set_materialize_grads(False)
        plain = [f for f, t in zip(found, tensors, strict=True) if not t.requires_grad]
        ctx.mark_non_differentiable(*plain)
        return tuple(t.detach() for t in found)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        sender, receiver = ctx.ends
        needed = ctx.needs_input_grad[4:]
        given = [grad for grad, need in zip(grads, needed, strict=True) if need]
        receiver._return(ctx.sample, ctx.received, given)
        back = iter(sender._gradients(ctx.number, ctx.sample, ctx.devices))
        return None, None, None, None, *(next(back) if need else None for need in needed)


def hand_over(
    sender: Sender, receiver: Receiver, outputs: Any, sample: Hashable, samples: Sequence[int] | None = None
) -> Any:
    """For processes that have a rank of both sides: what Receiver.receive() would return of Sender.send(outputs),
    inside one graph, so that loss.backward() goes through both engines. Collective over both sides, in the backward
    too."""
    leaves, tree = _pytree.tree_flatten(outputs)
    where = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    tensors = _HandOver.apply(sender, receiver, sample, samples, *(leaves[place] for place in where))
    for place, tensor in zip(where, tensors, strict=True):
        leaves[place] = tensor
    return _pytree.tree_unflatten(leaves, tree)


def _wholes(link: Link, letters: list[Letter], where: str) -> list[tuple[tuple[int, ...], list[Box]]]:
    """Of each tensor of a message: its sizes, and what each part of the source has."""
    where = where.removeprefix("[hybrid] ")
    count = len(letters[0].metas)
    if any(len(letter.metas) != count for letter in letters):
        raise ConfigError(f"[hybrid] {where}: ranks of {link.sides[0]} sent {[len(x.metas) for x in letters]} tensors")
    return [
        whole_boxes(link.source, link.dims, [letter.metas[i].shape for letter in letters], where) for i in range(count)
    ]


def _samples_of(link: Link, letters: list[Letter]) -> list[int] | None:
    """The rows of all samples, in the order of the batches."""
    rows = letters[:: link.source.sequence]
    if any(letter.samples is None for letter in rows):
        return None
    return [size for letter in rows for size in letter.samples or ()]
