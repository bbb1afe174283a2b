"""Layers and losses that run over a long sequence a tile at a time: Note [Tiles] in tessera/parallel/tiles.h."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tessera import _core
from tessera.errors import ConfigError

IGNORED = -100  # labels of tokens that do not count
_REDUCTIONS = {"mean": _core.TileReduction.Mean, "sum": _core.TileReduction.Sum}


def _one_tensor(output: Any) -> torch.Tensor:
    if not isinstance(output, torch.Tensor):
        raise ConfigError(f"[tiled] the function must return one tensor, got {type(output).__name__}")
    return output


def tiled(
    fn: Callable[..., torch.Tensor],
    cut: dict[str, Any],
    whole: dict[str, Any] | None = None,
    *,
    tiles: int,
    join_dim: int = 1,
    reduction: str | None = "mean",
) -> torch.Tensor:
    """fn(**cut, **whole), which is given the tensors in `cut` in `tiles` tiles of dim 1, one after the other.

    Outputs of the tiles are joined along `join_dim`, or if they are scalars (a loss), reduced: "sum", or "mean", in
    which a tile counts with its tokens; where a cut tensor's name ends with "labels", with its labels that are not
    -100. Every tensor that requires gradients gets them, as do parameters that `fn` reads, each once a backward. The
    backward computes the tiles again.
    """
    if reduction is not None and reduction not in _REDUCTIONS:
        raise ConfigError(f"[tiled] reduction must be 'mean', 'sum' or None, got {reduction!r}")
    given = cut | (whole or {})
    tensors = {name: t for name, t in cut.items() if isinstance(t, torch.Tensor)}
    passed = {n: t for n, t in (whole or {}).items() if isinstance(t, torch.Tensor) and t.requires_grad}
    names = [*tensors, *passed]
    others = {name: v for name, v in given.items() if name not in names}
    labels = next((t for name, t in tensors.items() if name.endswith("labels") and not t.is_floating_point()), None)
    return _core.tiled(
        lambda pieces: _one_tensor(fn(**dict(zip(names, pieces, strict=True)), **others)),
        [*tensors.values(), *passed.values()],
        [True] * len(tensors) + [False] * len(passed),
        tiles,
        names,
        join_dim,
        None if reduction is None else _REDUCTIONS[reduction],
        None if labels is None else labels != IGNORED,
    )


def tiled_mlp(fn: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, tiles: int) -> torch.Tensor:
    """fn(x), which treats each token by itself, in `tiles` tiles of x [..., sequence, hidden]. The backward computes
    the tiles again."""
    return _core.tiled_mlp(lambda piece: _one_tensor(fn(piece)), x, tiles)


def tiled_loss(
    fn: Callable[..., torch.Tensor],
    x: torch.Tensor,
    labels: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    tiles: int,
    reduction: str = "mean",
) -> torch.Tensor:
    """The loss fn(x, labels) or, with a mask, fn(x, labels, mask), a tile at a time, so that all logits are never there
    at once: `fn` gets tiles of x [batch, sequence, ...], labels [batch, sequence, ...] and mask [batch, sequence], and
    returns a scalar.

    "mean": `fn` returns a mean over its tokens (those whose label is not -100 and whose mask is not 0), and the
    result is the mean over all; "sum": the sum of what `fn` returns. The gradients are computed with the loss, in
    one pass over the tiles, but in fp16, where a gradient must not be computed before the loss scale is known: then
    the backward runs the tiles again.
    """
    if reduction not in _REDUCTIONS:
        raise ConfigError(f"[tiled_loss] reduction must be 'mean' or 'sum', got {reduction!r}")
    return _core.tiled_loss(lambda pieces: _one_tensor(fn(*pieces)), x, labels, mask, tiles, _REDUCTIONS[reduction])
