"""What a step of a vision-language model takes in three layouts: arithmetic, bytes that a rank sends, bytes of
activations that a rank touches. The time is a sum of these, with factors that are fitted to two of the layouts and
checked on the third."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_KEPT = 100_000  # elements of a weight that stage 3 keeps whole: the default of stage3_param_persistence_threshold
HYBRID, UNIFORM, ZERO3 = "hybrid", "tensor parallel", "ZeRO-3"


@dataclass(frozen=True)
class Sizes:
    """Of Qwen2.5-VL. `window`: patches of a window; `full`: blocks of the tower that look at whole pictures."""

    vision_layers: int
    vision_hidden: int
    vision_inner: int
    full: int
    window: int
    text_layers: int
    text_hidden: int
    text_inner: int
    key_share: float  # of key/value heads in heads
    vocabulary: int

    @property
    def block(self) -> int:
        """Parameters of a block of the tower."""
        return 4 * self.vision_hidden**2 + 3 * self.vision_hidden * self.vision_inner

    @property
    def embedding(self) -> int:
        """Parameters that read a patch: 3 colors, 2 frames, 14 * 14 pixels."""
        return 3 * 2 * 14**2 * self.vision_hidden

    @property
    def merger(self) -> int:
        return 4 * self.vision_hidden * (4 * self.vision_hidden + self.text_hidden)

    @property
    def layer(self) -> int:
        """Parameters of a layer of the language model."""
        return int((2 + 2 * self.key_share) * self.text_hidden**2) + 3 * self.text_hidden * self.text_inner

    @property
    def partitioned(self) -> int:
        """Parameters in weights of layers that are gathered for the forward and again for the backward in stage 3."""
        h, wide = self.vision_hidden, self.text_hidden
        tower = [(self.vision_layers, n) for n in (3 * h * h, h * h, *[h * self.vision_inner] * 3)]
        heads = int(wide * wide * self.key_share)
        text = [(self.text_layers, n) for n in (*[wide * wide] * 2, *[heads] * 2, *[wide * self.text_inner] * 3)]
        return sum(layers * size for layers, size in tower + text if size > _KEPT)

    @property
    def vision(self) -> int:
        return self.vision_layers * self.block + self.embedding + self.merger

    @property
    def text(self) -> int:
        return self.text_layers * self.layer + 2 * self.vocabulary * self.text_hidden


@dataclass(frozen=True)
class Step:
    """`pictures` of `patches` patches each, with `words` more tokens a row; of all ranks together. `width`: bytes of an
    element. `recompute`: activation checkpointing, whose backward runs the forward once more."""

    sizes: Sizes
    ranks: int
    pictures: int
    patches: int
    words: int
    width: int = 4
    recompute: bool = False

    @property
    def tokens(self) -> int:
        """Of the language model, all rows."""
        return self.pictures * (self.patches // 4 + self.words)


@dataclass(frozen=True)
class Cost:
    """Of the rank with the most. `flops`: of forward and backward; `sent`: bytes; `touched`: bytes of activations that
    elementwise work reads or writes."""

    flops: float
    sent: float
    touched: float


def arithmetic(step: Step) -> tuple[float, float]:
    """Of all ranks, the tower's and the language model's: 2 a parameter and token forward, twice that backward;
    attention 4 a pair of tokens and width, half of them in the causal one."""
    s, patches = step.sizes, step.pictures * step.patches
    pairs = s.full * step.patches + (s.vision_layers - s.full) * min(s.window, step.patches)
    linear = s.vision_layers * s.block + s.embedding + s.merger / 4
    vision = patches * (2 * linear + 4 * s.vision_hidden * pairs)
    row = step.patches // 4 + step.words
    text = step.tokens * (2 * s.text_layers * (s.layer + s.text_hidden * row) + 2 * s.vocabulary * s.text_hidden)
    passes = 4 if step.recompute else 3
    return passes * vision, passes * text


def cost(layout: str, step: Step) -> Cost:
    s, others = step.sizes, (step.ranks - 1) / step.ranks
    patches = step.pictures * step.patches * s.vision_hidden * step.width  # bytes of the tower's activations
    tokens = step.tokens * s.text_hidden * step.width
    images = step.pictures * step.patches // 4 * s.text_hidden * step.width
    flops = sum(arithmetic(step)) / step.ranks
    passes = 6 if step.recompute else 4  # all-reduces of a block: two a forward, two in the backward
    tensor_text = 2 * others * passes * s.text_layers * tokens
    touched_text, touched_vision = s.text_layers * tokens, s.vision_layers * patches
    if layout == UNIFORM:
        merger = images + patches  # of its output, and of its input's gradient
        return Cost(
            flops,
            tensor_text + 2 * others * (passes * s.vision_layers * patches + merger),
            touched_text + touched_vision,
        )
    if layout == ZERO3:
        gathered = 2 * (s.vision + s.text) + s.partitioned  # or reduced: all twice, these three times
        return Cost(flops, others * gathered * step.width, (touched_text + touched_vision) / step.ranks)
    exchanges = passes // 2 * 4 * s.vision_layers * patches / step.ranks * others  # query, key, value and the result
    states = 2 * others * s.vision * step.width
    link = images / step.ranks + images
    return Cost(flops, tensor_text + exchanges + states + link, touched_text + touched_vision / step.ranks)


@dataclass(frozen=True)
class Rates:
    """Seconds of a step, whatever it holds; for an operation, a byte that is sent, a byte that is touched."""

    step: float
    flop: float
    sent: float
    touched: float

    def seconds(self, cost: Cost) -> float:
        return self.step + self.flop * cost.flops + self.sent * cost.sent + self.touched * cost.touched


def fit(costs: Sequence[Cost], seconds: Sequence[float]) -> Rates:
    """Factors, none negative, with the least sum of squared relative errors: the best of the least-squares fits of
    any of the terms that has no negative factor."""
    rows = torch.tensor([[1.0, c.flops, c.sent, c.touched] for c in costs], dtype=torch.float64)
    rows = rows / torch.tensor(seconds, dtype=torch.float64).unsqueeze(1)
    best, least = [0.0] * 4, float("inf")
    for count in range(1, min(4, len(costs)) + 1):
        for terms in itertools.combinations(range(4), count):
            part = rows[:, terms]
            scale = part.abs().amax(0).clamp(min=1e-300)
            found = torch.linalg.lstsq(part / scale, torch.ones(len(costs), 1, dtype=torch.float64)).solution[:, 0]
            error = float((part / scale @ found - 1).square().sum())
            if bool((found >= 0).all()) and error < least * 0.999:
                best, least = [0.0] * 4, error
                for term, value in zip(terms, (found / scale).tolist(), strict=True):
                    best[term] = value
    return Rates(*best)


def idle(micro_batches: int, vision: float, text: float, ranks: int) -> tuple[int, float]:
    """Two groups on ranks of their own that work on micro-batches in turn: how many ranks the tower should have, and
    the share of time that ranks then wait: the faster group for the slower one, and each at the begin or the end."""
    shares = []
    for mine in range(1, ranks):
        slow, fast = sorted((vision / mine, text / (ranks - mine)), reverse=True)
        shares.append((1 - micro_batches * (vision + text) / ((micro_batches * slow + fast) * ranks), mine))
    share, mine = min(shares)
    return mine, share


def idle_rows() -> list[list[str]]:
    rows = []
    for n, step in published_steps().items():
        vision, text = arithmetic(step)
        ranks, few = idle(4, vision, text, step.ranks)
        many = idle(32, vision, text, step.ranks)[1]
        rows.append([f"{n // 1024} k", f"{vision / (vision + text):.0%}", str(ranks), f"{few:.0%}", f"{many:.0%}"])
    return rows


# Qwen2.5-VL-32B on 8 H100 of 80 GB; tokens/s as published for these layouts (batch of 8 at the most), by patches of a
# picture. None: out of memory.
PUBLISHED = {
    1024: (3354, 3108, 4264),
    4096: (13702, 11342, 15464),
    9216: (26802, 16222, 21296),
    16384: (None, 18207, 23600),
    25600: (None, 17207, 22496),
    65536: (None, 16631, 20985),
}
QWEN_32B = Sizes(32, 1280, 3420, 4, 64, 64, 5120, 27648, 8 / 40, 152064)
_WORDS, _BATCH = 128, 8  # assumptions


def published_steps() -> dict[int, Step]:
    return {n: Step(QWEN_32B, 8, _BATCH, n, _WORDS, 2, recompute=True) for n in PUBLISHED}


def published_rates() -> Rates:
    """Fitted to what was published of tensor parallel and ZeRO-3."""
    known = [
        (cost(layout, step), step.pictures * step.patches / rate)
        for (n, step), column in itertools.product(published_steps().items(), (0, 1))
        for layout, rate in [((ZERO3, UNIFORM)[column], PUBLISHED[n][column])]
        if rate is not None
    ]
    return fit([c for c, _ in known], [seconds for _, seconds in known])


def published_rows() -> list[list[str]]:
    """Tokens/s as published and as the model has them; hybrid is what it predicts."""
    rates, rows = published_rates(), []
    for n, step in published_steps().items():
        tokens = step.pictures * step.patches
        found = {layout: tokens / rates.seconds(cost(layout, step)) for layout in (ZERO3, UNIFORM, HYBRID)}
        zero3, uniform, hybrid = PUBLISHED[n]
        row = [f"{n // 1024} k"]
        for layout, value in ((ZERO3, zero3), (UNIFORM, uniform), (HYBRID, hybrid)):
            row += ["out of memory" if value is None else str(value), f"{found[layout]:.0f}"]
        rows.append([*row, f"{hybrid / uniform:.2f}", f"{found[HYBRID] / found[UNIFORM]:.2f}"])
    return rows
