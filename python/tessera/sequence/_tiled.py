"""Layers and losses that run over a long sequence a tile at a time: Note [Tiles]."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from tessera.errors import ConfigError
from tessera.sequence._tiles import HandedOver, Recomputed, Tiles, combine

IGNORED = -100  # labels of tokens that do not count


def _joined_or_reduced(tiles: Tiles, dim: int, weights: Callable[[], list[float]]) -> torch.Tensor:
    """Outputs of one element are reduced, others are joined along `dim`."""
    if not torch.is_grad_enabled():
        with tiles.around.region():
            outputs = (tiles.plain(number) for number in range(len(tiles.ranges)))
            first = next(outputs)
            return combine(tiles, first, outputs, dim, weights() if first.dim() == 0 else None)[0]
    with tiles.around.region():
        first = tiles.first()[1].detach()
    factors = weights() if first.dim() == 0 else None
    output: torch.Tensor = Recomputed.apply(tiles, first, dim, factors, *tiles.tensors, *tiles.params)
    return output


def _factors(tiles: Tiles, reduction: str | None, valid: torch.Tensor | None) -> list[float]:
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
    tiles = Tiles(
        lambda pieces: fn(**dict(zip(names, pieces, strict=True)), **others),
        [*tensors.values(), *passed.values()],
        [True] * len(tensors) + [False] * len(passed),
        1,
        shards,
    )
    valid = None if labels is None else labels != IGNORED
    return _joined_or_reduced(tiles, output_unshard_dimension, lambda: _factors(tiles, output_reduction, valid))


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
        tiles = Tiles(lambda pieces: fn(self, pieces[0]), [x], [True], dim, shards)
        return _joined_or_reduced(tiles, dim, lambda: _factors(tiles, None, None))


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
        tiles = Tiles(lambda pieces: fn(self, *pieces), given, [True] * len(given), 1, shards)
        valid = None if y.is_floating_point() else (y != IGNORED).flatten(2).any(2) if y.dim() > 2 else y != IGNORED
        if mask is not None:
            valid = mask != 0 if valid is None else valid & (mask != 0)
        fp16 = torch.float16 in (x.dtype, *tiles.around.autocast.values())
        if fp16 or not torch.is_grad_enabled():
            return _joined_or_reduced(tiles, 0, lambda: _factors(tiles, output_reduction, valid))
        return _with_gradients(tiles, _factors(tiles, output_reduction, valid))


def _with_gradients(tiles: Tiles, factors: list[float]) -> torch.Tensor:
    """The weighted sum of the tiles' losses, whose gradients are computed now."""
    total, gradients = None, None
    with tiles.around.region():
        for number, weight in enumerate(factors):
            leaves, loss = tiles.first() if number == 0 else tiles.graph(number)
            if loss.dim() != 0:
                raise ConfigError(
                    f"[TiledFusedLogitsLoss] the function must return a scalar, got the sizes {list(loss.shape)}"
                )
            gradients = gradients or tiles.grad_sums()
            if total is None:
                total = torch.zeros_like(
                    loss, dtype=torch.promote_types(loss.dtype, torch.float32), requires_grad=False
                )
            if weight != 0:
                total += loss.detach() * weight
            gradients.add(number, leaves, loss, torch.full_like(loss, weight, requires_grad=False), weight != 0)
            result_dtype = loss.dtype
            del leaves, loss
    assert total is not None and gradients is not None
    output: torch.Tensor = HandedOver.apply(total.to(result_dtype), gradients.values(), *tiles.tensors, *tiles.params)
    return output
