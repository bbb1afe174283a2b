"""Drawn pictures and what they show, as Qwen2.5-VL reads them: patches of pixels and token ids."""

from __future__ import annotations

from dataclasses import dataclass

import torch

COLORS = {"red": (0.9, 0.2, 0.1), "green": (0.2, 0.8, 0.2), "blue": (0.2, 0.3, 0.9), "grey": (0.5, 0.5, 0.5)}
SHAPES = ("disc", "square", "cross", "stripes")
WORDS = ["<end>", "<vision>", "</vision>", "<image>", "a", "on", *COLORS, *SHAPES]
IDS = {word: number for number, word in enumerate(WORDS)}
PATCH, MERGE, FRAMES = 14, 2, 2  # pixels of a patch's side, patches of a token's side, frames of a patch


@dataclass(frozen=True)
class Batch:
    """`patches` [patches, channels * FRAMES * PATCH**2], of all pictures one after the other, the MERGE**2 patches of
    a token side by side; `grid` [pictures, 3] of patches; `ids` [rows, tokens]; `labels`, -100 where nothing is
    learned."""

    patches: torch.Tensor
    grid: torch.Tensor
    ids: torch.Tensor
    labels: torch.Tensor


def draw(shape: str, color: str, ground: str, size: int, generator: torch.Generator) -> torch.Tensor:
    """[3, size, size], values 0 to 1."""
    y, x = torch.meshgrid(torch.linspace(-1, 1, size), torch.linspace(-1, 1, size), indexing="ij")
    dx, dy, radius = (torch.rand(3, generator=generator) * torch.tensor([0.6, 0.6, 0.3])).tolist()
    x, y, radius = x - dx + 0.3, y - dy + 0.3, radius + 0.4
    inside = {
        "disc": x * x + y * y < radius * radius,
        "square": torch.maximum(x.abs(), y.abs()) < radius,
        "cross": (torch.minimum(x.abs(), y.abs()) < radius / 3) & (torch.maximum(x.abs(), y.abs()) < radius),
        "stripes": (x / radius * 4).floor() % 2 == 0,
    }[shape]
    front, back = (torch.tensor(COLORS[name]).view(3, 1, 1) for name in (color, ground))
    picture = torch.where(inside, front, back)
    return picture + 0.05 * torch.randn(picture.shape, generator=generator)


def patches_of(picture: torch.Tensor) -> torch.Tensor:
    """[channels, height, width] to [patches, channels * FRAMES * PATCH**2]; the picture is all frames of a patch."""
    channels, height, width = picture.shape
    side = PATCH * MERGE
    cut = picture.view(channels, height // side, MERGE, PATCH, width // side, MERGE, PATCH)
    cut = cut.permute(1, 4, 2, 5, 0, 3, 6).unsqueeze(5)  # rows, columns, 2 of a token, channels, frame, pixels
    return cut.expand(-1, -1, -1, -1, -1, FRAMES, -1, -1).reshape(-1, channels * FRAMES * PATCH**2)


def batch(seed: int, pictures: int, size: int) -> Batch:
    """`pictures` pictures of size * size pixels, a multiple of PATCH * MERGE, each with its caption."""
    generator = torch.Generator().manual_seed(seed)
    tokens = (size // PATCH // MERGE) ** 2
    patches, rows = [], []
    for _ in range(pictures):
        color, ground = (list(COLORS)[i] for i in torch.randperm(len(COLORS), generator=generator)[:2].tolist())
        shape = SHAPES[int(torch.randint(len(SHAPES), (), generator=generator))]
        patches.append(patches_of(draw(shape, color, ground, size, generator)))
        caption = ["a", color, shape, "on", ground, "<end>"]
        rows.append(["<vision>", *["<image>"] * tokens, "</vision>", *caption])
    ids = torch.tensor([[IDS[word] for word in row] for row in rows])
    labels = ids.clone()
    labels[:, : tokens + 2] = -100
    side = size // PATCH
    return Batch(torch.cat(patches), torch.tensor([[1, side, side]] * pictures), ids, labels)
