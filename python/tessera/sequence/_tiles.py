"""A function over a long sequence, a tile of it at a time, as one node of autograd.

Note [Tiles]
What a tile saves for its backward lives while that tile runs, not for the whole sequence: the backward computes the
tile again. Gradients of parameters are summed inside, in fp32 where they are narrower, and handed over once: the
parameter's accumulator, and an engine's hooks on it, see one gradient a backward. The first tile of a forward runs
with a graph: its leaves are the parameters that the function uses, whether the caller names them or not. The tile's
nested backwards (torch.autograd.grad) run no hooks of accumulators.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import get_device_states, set_device_states

from tessera.errors import ConfigError

_NARROW = (torch.float16, torch.bfloat16)


class Surroundings:
    """Autocast and random numbers of a forward, for computing it again."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        kinds = {"cpu", *(t.device.type for t in tensors)}
        self.autocast = {kind: torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)}
        self._cpu = torch.get_rng_state()
        self._devices, self._states = get_device_states(*tensors)
        self._kind = next((t.device.type for t in tensors if t.device.type != "cpu"), "cuda")
        self._drew = True

    def forward_is_over(self) -> None:
        self._drew = bool(self._devices) or not torch.equal(self._cpu, torch.get_rng_state())

    @contextlib.contextmanager
    def region(self) -> Iterator[None]:
        """Autocast as then. Without its cache: a weight that it cast for one tile would belong to that tile's graph."""
        with contextlib.ExitStack() as stack:
            for kind, dtype in self.autocast.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=False))
            yield

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Autocast as then, and the same random numbers."""
        if not self._drew:
            with self.region():
                yield
            return
        with torch.random.fork_rng(self._devices, device_type=self._kind), self.region():
            torch.set_rng_state(self._cpu)
            set_device_states(self._devices, self._states, device_type=self._kind)
            yield


class GradientSum:
    """The sum of a tensor's gradients over the tiles."""

    def __init__(self, like: torch.Tensor) -> None:
        self._like = like
        self._dtype = torch.float32 if like.dtype in _NARROW else like.dtype
        self._sum: torch.Tensor | None = None

    def add(self, gradient: torch.Tensor | None) -> None:
        if gradient is None:
            return
        if self._sum is None:  # a copy: other holders may see the gradient
            self._sum = torch.empty_like(self._like, dtype=self._dtype, requires_grad=False).copy_(gradient)
        else:
            self._sum.add_(gradient)

    def value(self) -> torch.Tensor | None:
        return None if self._sum is None else self._sum.to(self._like.dtype)


class JoinedGradient:
    """The gradient of a tensor that is cut, put together from the tiles'."""

    def __init__(self, like: torch.Tensor, dim: int) -> None:
        self._like, self._dim = like, dim
        self._joined: torch.Tensor | None = None

    def add(self, gradient: torch.Tensor | None, begin: int, length: int) -> None:
        if self._joined is None:
            self._joined = torch.empty_like(self._like, requires_grad=False)
        part = self._joined.narrow(self._dim, begin, length)
        if gradient is None:
            part.zero_()
        else:
            part.copy_(gradient)

    def value(self) -> torch.Tensor | None:
        return self._joined


@dataclass
class Tiles:
    """`fn` of the tensors, of which those in `cut` are given a tile at a time: elements [begin, begin + length) of
    `dim`."""

    fn: Callable[[list[torch.Tensor]], torch.Tensor]
    tensors: list[torch.Tensor]
    cut: list[bool]
    dim: int
    count: int
    params: list[torch.Tensor] = field(default_factory=list)
    around: Surroundings = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        length = next(t.size(self.dim) for t, cut in zip(self.tensors, self.cut, strict=True) if cut)
        if self.count < 1:
            raise ConfigError(f"[tiled] there must be 1 tile at least, got {self.count}")
        step = max(1, math.ceil(length / self.count))
        self.ranges = [(begin, min(step, length - begin)) for begin in range(0, length, step)] or [(0, 0)]
        self.wanted = [number for number, t in enumerate(self.tensors) if t.requires_grad]
        self.around = self.around or Surroundings(self.tensors)

    def pieces(self, number: int) -> list[torch.Tensor]:
        """The tensors of one tile, as leaves of a graph of their own."""
        begin, length = self.ranges[number]
        result = []
        for t, cut in zip(self.tensors, self.cut, strict=True):
            piece = t.detach().narrow(self.dim, begin, length).contiguous() if cut else t.detach()
            result.append(piece.requires_grad_(t.requires_grad))
        return result

    def graph(self, number: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        """One tile with what its backward needs: (its tensors that require gradients, the output)."""
        with torch.enable_grad():
            pieces = self.pieces(number)
            return [pieces[k] for k in self.wanted], self._output(self.fn(pieces))

    def first(self) -> tuple[list[torch.Tensor], torch.Tensor]:
        """As graph(0), and notes the parameters."""
        with torch.enable_grad():
            mark = torch.zeros((), requires_grad=True).clone().grad_fn
        leaves, output = self.graph(0)
        self.params = _leaves(output, leaves, mark)
        return leaves, output

    def plain(self, number: int) -> torch.Tensor:
        with torch.no_grad():
            return self._output(self.fn(self.pieces(number)))

    def _output(self, output: Any) -> torch.Tensor:
        if not isinstance(output, torch.Tensor):
            raise ConfigError(f"[tiled] the function must return one tensor, got {type(output).__name__}")
        return output

    def grad_sums(self) -> Gradients:
        return Gradients(self)


class Gradients:
    """Of the tensors of `tiles` and of its parameters."""

    def __init__(self, tiles: Tiles) -> None:
        self._tiles = tiles
        self._joined = {k: JoinedGradient(tiles.tensors[k], tiles.dim) for k in tiles.wanted if tiles.cut[k]}
        self._sums = {k: GradientSum(tiles.tensors[k]) for k in tiles.wanted if not tiles.cut[k]}
        self._params = [GradientSum(param) for param in tiles.params]

    def add(
        self, number: int, leaves: list[torch.Tensor], output: torch.Tensor, incoming: torch.Tensor, use: bool
    ) -> None:
        """The backward of one tile. Not `use`: it takes part in what ranks do together, its gradients are dropped."""
        tiles = self._tiles
        targets = [*leaves, *tiles.params]
        found: Sequence[torch.Tensor | None] = [None] * len(targets)
        if output.requires_grad and targets:
            found = torch.autograd.grad(output, targets, incoming, allow_unused=True)
        if not use:
            found = [None] * len(targets)
        for k, gradient in zip(tiles.wanted, found, strict=False):
            if k in self._joined:
                self._joined[k].add(gradient, *tiles.ranges[number])
            else:
                self._sums[k].add(gradient)
        for total, gradient in zip(self._params, found[len(leaves) :], strict=True):
            total.add(gradient)

    def values(self) -> list[torch.Tensor | None]:
        """One for each tensor and then for each parameter."""
        of = {k: joined.value() for k, joined in self._joined.items()}
        of |= {k: total.value() for k, total in self._sums.items()}
        return [of.get(k) for k in range(len(self._tiles.tensors))] + [total.value() for total in self._params]


def _leaves(output: torch.Tensor, own: list[torch.Tensor], mark: Any) -> list[torch.Tensor]:
    """The leaves of `output`'s graph but for `own`. ConfigError where the graph leads to nodes older than `mark`."""
    oldest = mark._sequence_nr()
    known = {id(leaf) for leaf in own}
    found: list[torch.Tensor] = []
    seen: set[Any] = {None}
    stack: list[Any] = [output.grad_fn]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            if id(leaf) not in known:
                known.add(id(leaf))
                found.append(leaf)
        elif node._sequence_nr() < oldest:
            raise ConfigError(
                "[tiled] the function uses a tensor that was computed outside of it and requires gradients (by "
                f"{node.name()});"
                " pass it as an argument"
            )
        else:
            stack.extend(following for following, _ in node.next_functions)
    return found


class Recomputed(torch.autograd.Function):
    """Outputs of all tiles: joined along `dim`, or, where `weights` are given, their weighted sum. A tile of weight 0
    counts as nothing, even if it is NaN."""

    @staticmethod
    def forward(
        ctx: Any, tiles: Tiles, first: torch.Tensor, dim: int, weights: list[float] | None, *tensors: Any
    ) -> Any:
        ctx.set_materialize_grads(False)
        with tiles.around.region():
            rest = (tiles.plain(number) for number in range(1, len(tiles.ranges)))
            output, sizes = combine(tiles, first.detach(), rest, dim, weights)
        tiles.around.forward_is_over()
        ctx.save_for_backward(*tiles.tensors)
        # What autograd saved it hands out again; the rest of the plan stays.
        ctx.plan = (tiles.fn, tiles.cut, tiles.dim, tiles.count, tiles.params, tiles.around)
        ctx.dim, ctx.sizes, ctx.weights = dim, sizes, weights
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: torch.Tensor | None) -> Any:
        if incoming is None:
            return (None,) * len(ctx.needs_input_grad)
        fn, cut, tile_dim, count, params, around = ctx.plan
        tiles = Tiles(fn, list(ctx.saved_tensors), cut, tile_dim, count, params, around)
        gradients = tiles.grad_sums()
        begin = 0
        with around.again():
            for number in range(len(tiles.ranges)):
                leaves, output = tiles.graph(number)
                if ctx.weights is None:
                    part = incoming.narrow(ctx.dim, begin, ctx.sizes[number])
                    begin += ctx.sizes[number]
                    gradients.add(number, leaves, output, part, True)
                else:
                    weight = ctx.weights[number]
                    part = (incoming * weight).to(output.dtype).reshape(output.shape)
                    gradients.add(number, leaves, output, part, weight != 0)
                del leaves, output
        return None, None, None, None, *gradients.values()


class HandedOver(torch.autograd.Function):
    """A value whose gradients are known already, but for the factor that comes in."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, gradients: list[torch.Tensor | None], *tensors: Any) -> Any:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*gradients)
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: torch.Tensor | None) -> Any:
        if incoming is None:
            return (None,) * len(ctx.needs_input_grad)
        scaled = (None if g is None else (g * incoming).to(g.dtype) for g in ctx.saved_tensors)
        return None, None, *scaled


def combine(
    tiles: Tiles, first: torch.Tensor, rest: Iterator[torch.Tensor], dim: int, weights: list[float] | None
) -> tuple[torch.Tensor, list[int]]:
    """The outputs of all tiles as one, and their sizes along `dim` where they are joined."""
    if weights is not None:
        total = torch.zeros_like(first, dtype=torch.promote_types(first.dtype, torch.float32))
        for weight, output in zip(weights, _chain(first, rest), strict=True):
            if weight != 0:
                total += output * weight
        return total.to(first.dtype), []
    length = tiles.ranges[0][1]
    if first.size(dim) != length:  # not a tile of the same sequence
        outputs = list(_chain(first, rest))
        return torch.cat(outputs, dim), [output.size(dim) for output in outputs]
    shape = list(first.shape)
    shape[dim] = sum(size for _, size in tiles.ranges)
    joined = first.new_empty(shape)
    for (begin, size), output in zip(tiles.ranges, _chain(first, rest), strict=True):
        joined.narrow(dim, begin, size).copy_(output)
    return joined, [size for _, size in tiles.ranges]


def _chain(first: torch.Tensor, rest: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
    yield first
    yield from rest
