"""Layers and losses that run over a long sequence a tile at a time: Note [Tiles] in tessera/parallel/tiles.h."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from tessera import _core
from tessera.errors import ConfigError

IGNORED = -100  # labels of tokens that do not count


def _of_one_tensor(fn: Callable[[list[torch.Tensor]], Any]) -> Callable[[list[torch.Tensor]], torch.Tensor]:
    def call(pieces: list[torch.Tensor]) -> torch.Tensor:
        output = fn(pieces)
        if not isinstance(output, torch.Tensor):
            raise ConfigError(f"[tiled] the function must return one tensor, got {type(output).__name__}")
        return output

    return call


@dataclass
class _Tiles:
    """`fn` of the tensors, of which those in `cut` are given a tile of `dim` at a time."""

    fn: Callable[[list[torch.Tensor]], Any]
    tensors: list[torch.Tensor]
    cut: list[bool]
    dim: int
    count: int

    def __post_init__(self) -> None:
        length = next(t.size(self.dim) for t, cut in zip(self.tensors, self.cut, strict=True) if cut)
        self.ranges = _core.tile_ranges(length, self.count)

    def run(self, join: int, weights: Callable[[], list[float]]) -> torch.Tensor:
        """Outputs of one element are reduced, others are joined along `join`."""
        return _core.tiled(_of_one_tensor(self.fn), self.tensors, self.cut, self.dim, self.count, join, weights)

    def run_with_gradients(self, weights: list[float]) -> torch.Tensor:
        """The weighted sum of the tiles' losses, whose gradients are computed now."""
        return _core.tiled_with_gradients(
            _of_one_tensor(self.fn), self.tensors, self.cut, self.dim, self.count, weights
        )


def _factors(tiles: _Tiles, reduction: str | None, valid: torch.Tensor | None) -> list[float]:
    """What each tile's loss counts for: 1 in a sum, its share of the tokens (those that are `valid`) in a mean."""
    if reduction == "sum":
        return [1.0] * len(tiles.ranges)
    if reduction != "mean":
        raise ConfigError(f"[tiled] a loss needs output_reduction 'mean' or 'sum', got {reduction!r}")
    if valid is None:
        counts = [float(length) for _, length in tiles.ranges]
    else:
        parts = [valid.narrow(tiles.dim, begin, length).sum() for begin, length in tiles.ranges]
        counts = [float(count) for count in torch.stack(parts).tolist()]
    return [count / max(sum(counts), 1.0) for count in counts]


def _in_fp16(tensors: list[torch.Tensor]) -> bool:
    kinds = {"cpu", *(t.device.type for t in tensors)}
    autocast = [torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)]
    return torch.float16 in (tensors[0].dtype, *autocast)


def _check_reduction(reduction: str | None) -> None:
    if reduction not in ("mean", "sum", None):
        raise ConfigError(f"[tiled] output_reduction must be 'mean', 'sum' or None, got {reduction!r}")


def sequence_tiled_compute(
    fn: Callable[..., torch.Tensor],
    seqlen: int,
    shards: int,
    kwargs_to_shard: dict[str, Any],
    kwargs_to_pass: dict[str, Any],
    grad_requiring_tensor_key: str | None = None,
    compute_params: Iterable[torch.Tensor] | None = None,
    output_unshard_dimension: int = 1,
    output_reduction: str | None = "mean",
) -> torch.Tensor:
    """fn(**kwargs), whose tensors in `kwargs_to_shard` are given `shards` tiles of dim 1 one after the other.

    Outputs of the tiles are joined along `output_unshard_dimension`, or if they are scalars (a loss), reduced: "sum",
    or "mean", in which a tile counts with its tokens; where a cut tensor's name ends with "labels", with its labels
    that are not -100. Every tensor that requires gradients gets them, as do parameters that `fn` reads, each once a
    backward: `grad_requiring_tensor_key` and `compute_params` need not be given. The backward computes the tiles again.
    """
    _check_reduction(output_reduction)
    tensors = {name: t for name, t in kwargs_to_shard.items() if isinstance(t, torch.Tensor)}
    if not tensors:
        raise ConfigError("[tiled] kwargs_to_shard has no tensor to cut")
    for name, t in tensors.items():
        if t.dim() < 2 or t.size(1) != seqlen:
            raise ConfigError(
                f"[tiled] {name} has the sizes {list(t.shape)}; its dim 1 must be the sequence of {seqlen} tokens"
            )
    if grad_requiring_tensor_key is not None and grad_requiring_tensor_key not in kwargs_to_shard | kwargs_to_pass:
        raise ConfigError(f"[tiled] grad_requiring_tensor_key {grad_requiring_tensor_key!r} names no argument")
    passed = {name: t for name, t in kwargs_to_pass.items() if isinstance(t, torch.Tensor) and t.requires_grad}
    names = [*tensors, *passed]
    others = {name: v for name, v in (kwargs_to_shard | kwargs_to_pass).items() if name not in names}
    labels = next((t for name, t in tensors.items() if name.endswith("labels") and not t.is_floating_point()), None)
    tiles = _Tiles(
        lambda pieces: fn(**dict(zip(names, pieces, strict=True)), **others),
        [*tensors.values(), *passed.values()],
        [True] * len(tensors) + [False] * len(passed),
        1,
        shards,
    )
    valid = None if labels is None else labels != IGNORED
    return tiles.run(output_unshard_dimension, lambda: _factors(tiles, output_reduction, valid))


class SequenceTiledCompute:
    """sequence_tiled_compute() for code that calls its autograd function."""

    @staticmethod
    def apply(
        fn: Callable[..., torch.Tensor],
        seqlen: int,
        shards: int,
        keys_to_shard: list[str],
        keys_to_pass: list[str],
        grad_requiring_tensor_key: str | None,
        compute_params: Iterable[torch.Tensor] | None,
        output_unshard_dimension: int,
        output_reduction: str | None,
        *args: Any,
    ) -> torch.Tensor:
        """`args`: the values of keys_to_shard, then of keys_to_pass."""
        values = dict(zip([*keys_to_shard, *keys_to_pass], args, strict=True))
        return sequence_tiled_compute(
            fn,
            seqlen,
            shards,
            {name: values[name] for name in keys_to_shard},
            {name: values[name] for name in keys_to_pass},
            grad_requiring_tensor_key,
            compute_params,
            output_unshard_dimension,
            output_reduction,
        )


class TiledMLP:
    """A layer that treats each token by itself, a tile of the sequence at a time."""

    @staticmethod
    def apply(
        fn: Callable[[Any, torch.Tensor], torch.Tensor],
        self: Any,
        x: torch.Tensor,
        shards: int,
        compute_params: Iterable[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """fn(self, x) in `shards` tiles of x [..., sequence, hidden]; `self` is the layer, `fn` its own forward."""
        if x.dim() < 2:
            raise ConfigError(f"[TiledMLP] x must be [..., sequence, hidden], got the sizes {list(x.shape)}")
        dim = x.dim() - 2
        tiles = _Tiles(lambda pieces: fn(self, pieces[0]), [x], [True], dim, shards)
        return tiles.run(dim, lambda: _factors(tiles, None, None))


class TiledFusedLogitsLoss:
    """The logits of a sequence and their loss, a tile at a time: all logits are never there at once."""

    @staticmethod
    def apply(
        fn: Callable[..., torch.Tensor],
        self: Any,
        x: torch.Tensor,
        y: torch.Tensor,
        mask: torch.Tensor | None,
        shards: int,
        compute_params: Iterable[torch.Tensor] | None = None,
        output_reduction: str = "mean",
    ) -> torch.Tensor:
        """fn(self, x, y) or, with a mask, fn(self, x, y, mask): a scalar loss of a tile of x [batch, sequence, ...],
        y [batch, sequence, ...] and mask [batch, sequence].

        "mean": `fn` returns a mean over its tokens (those whose label is not -100 and whose mask is not 0), and the
        result is the mean over all; "sum": the sum of what `fn` returns. The gradients are computed with the loss, in
        one pass over the tiles, but in fp16, where a gradient must not be computed before the loss scale is known: then
        the backward runs the tiles again.
        """
        if output_reduction not in ("mean", "sum"):
            raise ConfigError(
                f"[TiledFusedLogitsLoss] output_reduction must be 'mean' or 'sum', got {output_reduction!r}"
            )
        for name, t, least in (("x", x, 2), ("y", y, 2), ("mask", mask, 2)):
            if t is not None and (t.dim() < least or t.shape[:2] != x.shape[:2]):
                raise ConfigError(
                    f"[TiledFusedLogitsLoss] {name} has the sizes {list(t.shape)}, x {list(x.shape)}: all begin with "
                    "[batch, sequence]"
                )
        given = [x, y] if mask is None else [x, y, mask]
        tiles = _Tiles(lambda pieces: fn(self, *pieces), given, [True] * len(given), 1, shards)
        valid = None if y.is_floating_point() else (y != IGNORED).flatten(2).any(2) if y.dim() > 2 else y != IGNORED
        if mask is not None:
            valid = mask != 0 if valid is None else valid & (mask != 0)
        if _in_fp16(given) or not torch.is_grad_enabled():
            return tiles.run(0, lambda: _factors(tiles, output_reduction, valid))
        return tiles.run_with_gradients(_factors(tiles, output_reduction, valid))
