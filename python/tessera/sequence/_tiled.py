"""Layers and losses that run over a long sequence a tile at a time: Note [Tiles] in tessera/parallel/tiles.h."""

from __future__ import annotations

from collections.abc import Callable
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
    """The weight of each tile's loss: 1 in a sum, the tile's share of the tokens (those that are `valid`) in a mean."""
    if reduction == "sum":
        return [1.0] * len(tiles.ranges)
    if reduction != "mean":
        raise ConfigError(f"[tiled] a loss needs reduction 'mean' or 'sum', got {reduction!r}")
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
        raise ConfigError(f"[tiled] reduction must be 'mean', 'sum' or None, got {reduction!r}")


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
    _check_reduction(reduction)
    given = cut | (whole or {})
    tensors = {name: t for name, t in cut.items() if isinstance(t, torch.Tensor)}
    if not tensors:
        raise ConfigError("[tiled] there is no tensor to cut")
    first, length = next((name, t.shape[1:2]) for name, t in tensors.items())
    for name, t in tensors.items():
        if t.dim() < 2 or t.shape[1:2] != length:
            raise ConfigError(
                f"[tiled] {name} has the sizes {list(t.shape)}, {first} {list(tensors[first].shape)}: dim 1 of all "
                "that is cut must be the sequence"
            )
    passed = {n: t for n, t in (whole or {}).items() if isinstance(t, torch.Tensor) and t.requires_grad}
    names = [*tensors, *passed]
    others = {name: v for name, v in given.items() if name not in names}
    labels = next((t for name, t in tensors.items() if name.endswith("labels") and not t.is_floating_point()), None)
    run = _Tiles(
        lambda pieces: fn(**dict(zip(names, pieces, strict=True)), **others),
        [*tensors.values(), *passed.values()],
        [True] * len(tensors) + [False] * len(passed),
        1,
        tiles,
    )
    valid = None if labels is None else labels != IGNORED
    return run.run(join_dim, lambda: _factors(run, reduction, valid))


def tiled_mlp(fn: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, tiles: int) -> torch.Tensor:
    """fn(x), which treats each token by itself, in `tiles` tiles of x [..., sequence, hidden]. The backward computes
    the tiles again."""
    if x.dim() < 2:
        raise ConfigError(f"[tiled_mlp] x must be [..., sequence, hidden], got the sizes {list(x.shape)}")
    dim = x.dim() - 2
    run = _Tiles(lambda pieces: fn(pieces[0]), [x], [True], dim, tiles)
    return run.run(dim, lambda: _factors(run, None, None))


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
    if reduction not in ("mean", "sum"):
        raise ConfigError(f"[tiled_loss] reduction must be 'mean' or 'sum', got {reduction!r}")
    for name, t in (("x", x), ("labels", labels), ("mask", mask)):
        if t is not None and (t.dim() < 2 or t.shape[:2] != x.shape[:2]):
            raise ConfigError(
                f"[tiled_loss] {name} has the sizes {list(t.shape)}, x {list(x.shape)}: all begin with "
                "[batch, sequence]"
            )
    given = [x, labels] if mask is None else [x, labels, mask]
    run = _Tiles(lambda pieces: fn(*pieces), given, [True] * len(given), 1, tiles)
    valid = None if labels.is_floating_point() else labels != IGNORED
    if valid is not None and labels.dim() > 2:
        valid = valid.flatten(2).any(2)
    if mask is not None:
        valid = mask != 0 if valid is None else valid & (mask != 0)
    if _in_fp16(given) or not torch.is_grad_enabled():
        return run.run(0, lambda: _factors(run, reduction, valid))
    return run.run_with_gradients(_factors(run, reduction, valid))
