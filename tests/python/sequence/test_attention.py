"""Attention over a sequence that ranks share is attention over the sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import run_ranks
from tessera.sequence import SequenceAttention, to_heads, to_sequence
from torch import nn
from torch.nn import functional as F

import tessera

BATCH, LENGTH, WIDTH = 2, 12, 4


class Local(nn.Module):
    """Causal, with as many key/value heads as there are."""

    def __init__(self, sequence: int, flat: bool = False) -> None:
        super().__init__()
        self.sequence, self.flat = sequence, flat

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool = True) -> Any:
        assert q.size(self.sequence) == LENGTH
        order = (0, 2, 1, 3) if self.sequence == 1 else (1, 2, 0, 3)
        q, k, v = (t.permute(*order) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=q.size(1) != k.size(1))
        back = (0, 2, 1, 3) if self.sequence == 1 else (2, 0, 1, 3)
        out = out.permute(*back)
        return out.flatten(2) if self.flat else out


def inputs(heads: tuple[int, int], batch_dim: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(heads))
    order = (BATCH, LENGTH) if batch_dim == 0 else (LENGTH, BATCH)
    return [torch.randn(*order, h, WIDTH, generator=generator) for h in (heads[0], heads[1], heads[1])]


def part(x: torch.Tensor, rank: int, world: int, batch_dim: int) -> torch.Tensor:
    return x.chunk(world, 1 - batch_dim)[rank]


CASES = [((8, 8), 2), ((8, 8), 4), ((6, 6), 4), ((8, 2), 4), ((12, 6), 4), ((8, 2), 3), ((4, 1), 3)]


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("batch_dim", [0, 1])
@pytest.mark.parametrize(("heads", "world", "parts"), [*((*case, 1) for case in CASES), ((8, 4), 2, 2)])
def test_equals_attention_on_the_full_sequence(
    heads: tuple[int, int], world: int, parts: int, batch_dim: int, flat: bool
) -> None:
    full = [t.requires_grad_() for t in inputs(heads, batch_dim)]
    local = Local(1 - batch_dim, flat)
    expected = local(*full, 0.3, causal=True)
    incoming = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    expected.backward(incoming)

    def body(rank: int, group: tessera.Group) -> None:
        mine = [part(t.detach(), rank, world, batch_dim).clone().requires_grad_() for t in full]
        attention = SequenceAttention(local, group, sequence_dim=1 - batch_dim, parts=parts)
        group.reset_stats()
        out = attention(*mine, 0.3, causal=True)
        out.backward(part(incoming, rank, world, batch_dim))
        assert group.stats().all_to_all.calls == 4 * parts  # two each way
        torch.testing.assert_close(out, part(expected.detach(), rank, world, batch_dim))
        for got, whole in zip(mine, full, strict=True):
            assert whole.grad is not None
            torch.testing.assert_close(got.grad, part(whole.grad, rank, world, batch_dim))

    run_ranks(world, body)


def test_exchanges_of_parts_are_on_their_way_while_others_attend() -> None:
    def body(rank: int, group: tessera.Group) -> list[int]:
        begun: list[int] = []  # exchanges, at the forward and the backward of each local attention

        def local(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            begun.append(group.stats().all_to_all.calls)
            out = q * k * v
            out.register_hook(lambda grad: begun.append(group.stats().all_to_all.calls))
            return out

        mine = [part(t, rank, 2, 0).clone().requires_grad_() for t in inputs((4, 4), 0)]
        group.reset_stats()
        out = SequenceAttention(local, group, parts=2)(*mine)
        torch.testing.assert_close(out, mine[0] * mine[1] * mine[2])
        out.sum().backward()
        torch.testing.assert_close(mine[0].grad, mine[1] * mine[2])
        return [*begun, group.stats().all_to_all.calls]

    assert run_ranks(2, body) == [[2, 3, 6, 7, 8]] * 2


@pytest.mark.parametrize("batch_dim", [0, 1])
def test_rotation_inside(batch_dim: int) -> None:
    angle = torch.arange(LENGTH)[:, None, None, None] * torch.tensor([0.1, 0.7])
    cos, sin = (torch.cat([t, t], -1)[..., :2] for t in (angle.cos(), angle.sin()))
    rotary = (cos, sin)
    full = inputs((4, 2), batch_dim)

    def body(rank: int, group: tessera.Group) -> torch.Tensor:
        attention = SequenceAttention(Local(1 - batch_dim), group, sequence_dim=1 - batch_dim)
        return attention(*(part(t, rank, 2, batch_dim) for t in full), 0.5, rotary=rotary)

    alone = SequenceAttention(Local(1 - batch_dim), tessera.single_group(), sequence_dim=1 - batch_dim)
    got = torch.cat(run_ranks(2, body), 1 - batch_dim)
    torch.testing.assert_close(got, alone(*full, 0.5, rotary=rotary))
    assert not torch.allclose(got, alone(*full, 0.5))
    # A rotation of the first half of the width by hand.
    c, s = (t if batch_dim == 1 else t.transpose(0, 1) for t in rotary)
    q, k = (
        torch.cat(
            [t[..., :1] * c[..., :1] - t[..., 1:2] * s[..., :1], t[..., 1:2] * c[..., 1:] + t[..., :1] * s[..., 1:]], -1
        )
        for t in full[:2]
    )
    q, k = (torch.cat([turned, t[..., 2:]], -1) for turned, t in zip((q, k), full[:2], strict=True))
    torch.testing.assert_close(got, alone(q, k, full[2], 0.5))


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("batch_dim", [0, 1])
@pytest.mark.parametrize(("heads", "world"), [(8, 4), (6, 4), (5, 2), (4, 3)])
def test_a_round_trip_is_the_identity(heads: int, world: int, batch_dim: int, known: bool) -> None:
    full = inputs((heads, 1), batch_dim)[0]
    sequence = 1 - batch_dim

    def body(rank: int, group: tessera.Group) -> None:
        mine = part(full, rank, world, batch_dim)
        inside = to_heads(mine, group, sequence_dim=sequence)
        assert torch.equal(inside, full.tensor_split(world, 2)[rank])
        back = to_sequence(inside, group, sequence_dim=sequence, heads=heads if known else None)
        assert torch.equal(back, mine)

    run_ranks(world, body)


def test_a_copy_has_the_same_ranks() -> None:
    import copy

    group = tessera.thread_groups(2)[0]
    attention = SequenceAttention(Local(1), group)
    copied = copy.deepcopy(attention)
    assert copied.group is group and copied.local_attn is not attention.local_attn


def wrong(case: str, group: tessera.Group) -> None:
    x = torch.ones(1, 6, 3, 2)
    if case == "heads":
        SequenceAttention(Local(1), group)(x, x, x)
    elif case == "parts":
        SequenceAttention(Local(1), group, parts=0)
    elif case == "dim":
        SequenceAttention(Local(1), group, sequence_dim=2)
    elif case == "few dims":
        SequenceAttention(Local(1), group)(x[0], x, x)
    elif case == "sizes":
        SequenceAttention(Local(1), group)(x, x[:, :4], x)
    elif case == "length":
        to_sequence(x, group)
    elif case == "few":
        to_heads(x, group)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("heads", r"^\[SequenceAttention\] sequence parallel attention: 3 query heads are too few for 4 ranks"),
        ("parts", "parts must be an integer of 1 or more, got 0"),
        ("dim", "sequence_dim must be 0 or 1, got 2"),
        ("few dims", r"^\[SequenceAttention\] query has the sizes \[6, 3, 2\], query \[6, 3, 2\]: all must be 4-D"),
        ("sizes", r"^\[SequenceAttention\] key has the sizes \[1, 4, 3, 2\], query \[1, 6, 3, 2\]"),
        ("length", "a sequence of 6 tokens is not divisible by the 4 ranks of sequence_parallel_size"),
        ("few", "3 heads cannot be dealt out to 4"),
    ],
)
def test_wrong_use(case: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wrong(case, tessera.thread_groups(4)[0])


def test_one_rank_refuses_what_several_do() -> None:
    x = torch.ones(1, 12, 3, 2)
    with pytest.raises(ValueError, match="2 key/value heads do not divide 3 query heads"):
        SequenceAttention(Local(1), tessera.single_group())(x, x[:, :, :2], x[:, :, :2], 1.0)


def test_an_output_with_other_heads() -> None:
    x = torch.ones(1, 4, 4, 2)

    def body(rank: int, group: tessera.Group) -> None:
        with pytest.raises(ValueError, match="does not have the 2 heads of its query"):
            SequenceAttention(lambda q, k, v: q[:, :, :1], group)(x, x, x)

    run_ranks(2, body)
