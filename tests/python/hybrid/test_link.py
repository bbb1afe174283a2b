"""A link between ranks of any number on both sides: what arrives, what comes back, and what is refused."""

from __future__ import annotations

import collections
import os
import pickle
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from link_ranks import both_sides, split
from support import run_ranks
from tessera.distributed import register_backend
from tessera.errors import ConfigError, UsageError
from tessera.hybrid import Layout, Link, hand_over

LAYOUTS = {
    "1": Layout(),
    "tp2": Layout(replicas=2),
    "dp2": Layout(batch=2),
    "sp3": Layout(sequence=3),
    "dp2 sp2 tp2": Layout(2, 2, 2),
}
CASES = [("1", "1"), ("sp3", "tp2"), ("tp2", "sp3"), ("dp2", "1"), ("1", "dp2"), ("sp3", "dp2"), ("dp2 sp2 tp2", "sp3")]


def whole_of(step: int) -> torch.Tensor:
    """[rows, tokens, width]: other sizes in each step."""
    shape = (4 + step, 7 - step, 2)
    return torch.arange(float(shape[0] * shape[1] * shape[2])).view(shape) + 100 * step


def weight_of(whole: torch.Tensor) -> torch.Tensor:
    """The gradient of the whole."""
    return whole.sin()


@pytest.mark.parametrize("transport", ["auto", "group", "ray"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_slices_arrive_and_gradients_come_back(case, transport, store_for):
    link = Link("x", LAYOUTS[case[0]], LAYOUTS[case[1]], 0, 1, timeout=20, transport=transport)
    factor = link.source.parts / link.target.parts

    def source(sender, rank):
        grads = []
        for step in range(3):
            x = split(whole_of(step), link.source, rank, 0, 1).clone().requires_grad_()
            rows = torch.arange(x.size(0) * x.size(1)).view(x.shape[:2])
            sender.send({"x": 2 * x, "more": [rows, "text", None]}, step)
            grads.append((step, x))
        for step, x in reversed(grads):
            sender.backward(step)
            expected = 2 * factor * split(weight_of(whole_of(step)), link.source, rank, 0, 1)
            torch.testing.assert_close(x.grad, expected)
        sender.step()

    def target(receiver, rank):
        got = [receiver.receive(step) for step in range(3)]
        for step in (1, 0, 2):
            mine = split(whole_of(step), link.target, rank, 0, 1)
            assert torch.equal(got[step]["x"], 2 * mine)
            assert got[step]["more"][0].shape == mine.shape[:2]
            assert got[step]["more"][1:] == ["text", None]
            weight = split(weight_of(whole_of(step)), link.target, rank, 0, 1)
            (got[step]["x"] * weight).sum().backward()
            receiver.give_back(step)
        receiver.step()

    both_sides(link, source, target, store_for(transport))


def test_packed_tokens_of_samples_of_unequal_size():
    """Two batches of 3 and 1 samples, each cut over two ranks; on the other side two ranks with two samples each."""
    link = Link("x", Layout(batch=2, sequence=2), Layout(batch=2, replicas=2), 0, 0, timeout=20)
    samples = [[5, 1, 2], [3]]
    whole = torch.arange(22.0).view(11, 2)
    begins = [0, 4, 8, 10, 11]

    def source(sender, rank):
        x = whole[begins[rank] : begins[rank + 1]].clone().requires_grad_()
        sender.send(x * 1, 0, samples=samples[rank // 2])
        sender.backward(0)
        assert torch.equal(x.grad, 2 * whole[begins[rank] : begins[rank + 1]])
        sender.step()

    def target(receiver, rank):
        x = receiver.receive(0)
        assert torch.equal(x, whole[:6] if rank < 2 else whole[6:])
        receiver.give_back(0, [x.detach()])
        receiver.step()

    both_sides(link, source, target)


def test_one_piece_is_not_copied_again():
    link = Link("x", Layout(sequence=2), Layout(), 0, 0, timeout=20)

    def mapped(t):
        return any("memfd:tessera" in line and _within(line, t.data_ptr()) for line in open("/proc/self/maps"))

    def target(receiver, _):
        assert not mapped(receiver.receive(0))  # of two parts

    both_sides(link, lambda sender, rank: sender.send(torch.ones(100_000), 0), target)
    both_sides(
        Link("x", timeout=20),
        lambda sender, rank: sender.send(torch.ones(100_000), 0),
        lambda receiver, rank: pytest.fail("copied") if not mapped(receiver.receive(0)) else None,
    )


def _within(line: str, address: int) -> bool:
    begin, end = (int(text, 16) for text in line.split()[0].split("-"))
    return begin <= address < end


@pytest.mark.parametrize("transport", ["auto", "group", "ray"])
def test_writes_of_one_replica_stay_its_own(transport, store_for):
    link = Link("x", target=Layout(replicas=2), timeout=20, transport=transport)
    stores = store_for(transport)

    def target(receiver, rank):
        x = receiver.receive(0)
        x += rank
        dist.PrefixStore("wrote", stores).add("all", 1)
        while dist.PrefixStore("wrote", stores).add("all", 0) < 2:
            pass
        assert torch.equal(x, torch.ones(3) + rank)

    both_sides(link, lambda sender, rank: sender.send(torch.ones(3), 0), target, stores)


@pytest.mark.parametrize("transport", ["auto", "ray"])
def test_hand_over_inside_one_graph(transport, store_for):
    """Two processes' worth of ranks that have a part of the sequence in one model and a replica of the other."""
    link = Link("x", Layout(sequence=2), Layout(replicas=2), 0, 0, timeout=20, transport=transport)
    store = store_for(transport)
    whole = torch.arange(10.0).view(5, 2)

    def body(rank, _):
        x = split(whole, link.source, rank, 0, 0).clone().requires_grad_()
        with link.sender(store, rank) as sender, link.receiver(store, rank) as receiver:
            y, count = hand_over(sender, receiver, (x * x, torch.tensor(5.0)), "a")
            assert torch.equal(y, whole * whole) and float(count) == 5 and not count.requires_grad
            y.sin().sum().backward()
            with pytest.raises(UsageError, match=r"ends of hand_over\(\) have no step\(\)"):
                sender.step()
        expected = (whole * whole).cos() * 2 * whole
        torch.testing.assert_close(x.grad, 2 * split(expected, link.source, rank, 0, 0))  # an engine averages over 2

    run_ranks(2, body)


def test_hand_over_between_processes_of_which_one_is_of_both_sides(store_for):
    """Ranks 0 and 1 of the source, of which 1 is rank 0 of the target, too, whose rank 1 is another process."""
    link = Link("x", Layout(batch=2), Layout(batch=2), 0, None, timeout=20)
    store = store_for("auto")
    whole = torch.arange(8.0).view(4, 2)

    def body(process, _):
        x = split(whole, link.source, min(process, 1), 0, None).clone().requires_grad_()
        out = {"y": x * x, "more": [torch.tensor(5.0), "text"]}
        if process == 0:
            with link.sender(store, 0) as sender:
                sender.send(out, "a")
                sender.backward("a")
        elif process == 1:
            with link.sender(store, 1) as sender, link.receiver(store, 0) as receiver:
                got = hand_over(sender, receiver, out, "a")
                got["y"].sin().sum().backward()
        else:
            with link.receiver(store, 1) as receiver:
                got = hand_over(None, receiver, None, "a")
                assert got["more"][1] == "text" and not got["more"][0].requires_grad and not got["y"].is_leaf
                got["y"].sin().sum().backward()
        if process > 0:
            assert torch.equal(got["y"], split(whole * whole, link.target, process - 1, 0, None))
        if process < 2:
            expected = (whole * whole).cos() * 2 * whole
            torch.testing.assert_close(x.grad, split(expected, link.source, process, 0, None))

    run_ranks(3, body)


def send(*samples, **kwargs):
    def source(sender, rank):
        for sample in samples:
            sender.send(torch.ones(2, requires_grad=True) * 1, sample, **kwargs)
        return sender

    return source


def receive_all(*samples):
    def target(receiver, rank):
        for sample in samples:
            receiver.receive(sample).sum().backward()
            receiver.give_back(sample)

    return target


BAD_MESSAGES = {
    "another sample": (send(8), receive_all(7), UsageError, "asks for sample 7, .* is of sample 8"),
    "sent twice": (send(1, 1), receive_all(1, 1), UsageError, "sample 1 is on its way already"),
    "unknown object": (
        lambda s, r: s.send({"a": object()}, 0),
        lambda t, r: None,
        ConfigError,
        "outputs hold a object",
    ),
}


def freed(sender, rank):
    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    sender.send(y, 0)
    y.sum().backward()
    sender.backward(0)


def without_graph(sender, rank):
    sender.send(torch.ones(2), 0)
    sender.backward(0)


def wrong_shape(receiver, rank):
    receiver.receive(0)
    receiver.give_back(0, [torch.ones(3)])


def too_early(receiver, rank):
    receiver.receive(0)
    receiver.give_back(0)


def unfinished(receiver, rank):
    receiver.receive(0)
    receiver.step()


BAD_GRADIENTS = {
    "graph freed": (freed, receive_all(0), UsageError, "graph of sample 0 was freed"),
    "no graph": (without_graph, lambda t, r: t.receive(0), UsageError, "no graph of sample 0"),
    "wrong shape": (send(0), wrong_shape, ConfigError, r"sizes \[3\], its tensor \[2\]"),
    "too early": (send(0), too_early, UsageError, "no gradient has reached sample 0"),
    "not given back": (send(0), unfinished, UsageError, r"samples \[0\] are still out"),
    "never given back": (
        lambda s, r: (send(0)(s, r), s.backward(0)),
        lambda t, r: t.step(),
        UsageError,
        "has ended step 0",  # both sides say so, each as it sees it
    ),
}


BAD = BAD_MESSAGES | BAD_GRADIENTS


@pytest.mark.parametrize("transport", ["auto", "ray"])
@pytest.mark.parametrize("name", BAD)
def test_bad_use(name, transport, store_for):
    source, target, kind, message = BAD[name]
    with pytest.raises(kind, match=message):
        both_sides(Link("x", timeout=20, transport=transport), source, target, store_for(transport))


def counted(count):
    def source(sender, rank):
        send(*range(count))(sender, rank)
        for sample in range(count):
            sender.backward(sample)
        sender.step()

    return source


@pytest.mark.parametrize(("sent", "received"), [(2, 3), (3, 2)])
def test_different_numbers_of_micro_batches(sent, received):
    def target(receiver, rank):
        receive_all(*range(received))(receiver, rank)
        receiver.step()

    with pytest.raises(UsageError, match=r"has ended step 0 after [23]"):
        both_sides(Link("x", timeout=20), counted(sent), target)


@pytest.mark.parametrize("transport", ["auto", "group", "ray"])
@pytest.mark.parametrize("when", ["before they meet", "waited for", "not yet waited for"])
def test_a_side_that_fails_is_named_on_the_other(when, transport, store_for):
    took, gone = threading.Event(), threading.Event()

    def target(receiver, rank):
        if when != "before they meet":
            receiver.receive(0)
        took.set()
        if when == "not yet waited for":
            assert gone.wait(20)
        with pytest.raises(dist.DistBackendError, match=r"rank 0 of source .* failed: ValueError: broken"):
            receiver.receive(1)

    def source(sender, rank):
        if when != "before they meet":
            sender.send(torch.ones(2), 0)
            assert took.wait(20)  # what is under way is lost with its sender
        if when == "waited for":
            time.sleep(0.5)
        with pytest.raises(ValueError, match="broken"), sender:
            raise ValueError("broken")
        gone.set()

    both_sides(Link(when, timeout=20, transport=transport), source, target, store_for(transport))


def test_a_rank_that_gives_up_before_it_has_seen_another_that_connects():
    """The one that came last sees all and connects; the first has announced its end and will not."""
    link = Link("x", timeout=20)
    both = dist.HashStore()
    receiver = link.receiver(both, 0)
    sender = link.sender(Watched(inner=both, hidden="link/x/here/1"), 0)
    time.sleep(1)
    began = time.monotonic()
    sender.abort("ValueError: broken")
    with pytest.raises(dist.DistBackendError, match=r"rank 0 of source .* failed: ValueError: broken"):
        receiver.receive(1)
    assert time.monotonic() - began < 10
    sender.close()
    receiver.close()


def test_waiting_ends():
    link = Link("x", timeout=0.5)
    with pytest.raises(dist.DistBackendError, match=r"rank 0 of source .* did not send sample 3 within 0.5 s"):
        link.receiver(dist.HashStore(), 0).receive(3)


class Watched(dist.Store):
    """A store that counts its calls, may stop to answer as one whose host has stopped, and may hide a key."""

    def __init__(self, value=None, inner=None, hidden=None):
        super().__init__()
        self.inner, self.stopped, self.value = inner or dist.HashStore(), False, value
        self.hidden = hidden
        self.calls = collections.Counter()

    def _call(self, name, *args):
        self.calls[name] += 1
        while self.stopped:
            time.sleep(0.1)
        return getattr(self.inner, name)(*args)

    def set(self, key, value):
        self._call("set", key, value)

    def get(self, key):
        found = self._call("get", key)
        return found if self.value is None else self.value

    def check(self, keys):
        return self.hidden not in keys and self._call("check", keys)

    def add(self, key, more):
        return self._call("add", key, more)

    def compare_set(self, key, expected, desired):
        return self._call("compare_set", key, expected, desired)

    def wait(self, keys, timeout=None):
        return self._call("wait", keys)


def test_a_store_that_does_not_answer_ends_every_call():
    store = Watched()
    receiver = Link("x", timeout=0.5).receiver(store, 0)
    store.stopped = True
    try:
        for _ in range(2):
            with pytest.raises(dist.DistBackendError, match=r"the store of the link does not answer within 0\.5 s"):
                receiver.receive(3)
    finally:
        store.stopped = False
        receiver.close()


def test_who_waits_for_others_to_come_asks_the_store_seldom():
    store = Watched()
    receiver = Link("x", timeout=2).receiver(store, 0)
    with pytest.raises(dist.DistBackendError, match="no word of it has come"):
        receiver.receive(0)
    assert 10 < store.calls.total() < 200, "two questions, at most ten times a second"
    receiver.close()


def test_who_waits_for_a_message_asks_the_store_for_nothing():
    store, received = Watched(), threading.Event()

    def source(sender, rank):
        sender.send(torch.ones(2), 0)
        assert received.wait(20)
        before = store.calls.total()
        time.sleep(0.5)  # the other side waits
        assert store.calls.total() == before
        sender.send(torch.ones(2), 1)

    def target(receiver, rank):
        receiver.receive(0)
        received.set()
        receiver.receive(1)

    both_sides(Link("x", timeout=20), source, target, store)


class Bomb:
    def __reduce__(self):
        return pytest.fail, ("a note was run",)


def test_notes_of_the_store_are_not_run():
    """Who reaches the store may write what he likes."""
    store = Watched(pickle.dumps(Bomb()))
    with pytest.raises(dist.DistBackendError, match="is no note of a rank"):
        both_sides(
            Link("x", timeout=2), lambda sender, _: sender.send(torch.ones(2), 0), lambda r, _: r.receive(0), store
        )


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("transport", ["auto", "group"])
def test_what_was_sent_does_not_stay(transport):
    """Gloo does not say by itself what has been taken."""
    megabytes, count = 2, 240  # far more than may be under way, and than an allocator keeps
    most = begin = resident()
    ahead = threading.Semaphore(4)

    def source(sender, rank):
        nonlocal most
        for sample in range(count):
            assert ahead.acquire(timeout=20)
            sender.send(torch.full((megabytes << 18,), float(sample)), sample)
            most = max(most, resident())

    def target(receiver, rank):
        for sample in range(count):
            receiver.receive(sample)
            ahead.release()

    both_sides(Link("x", timeout=20, transport=transport), source, target)
    assert most - begin < 0.25 * (count * megabytes << 20)


@pytest.mark.parametrize("back_end", ["gloo", "tessera"])
def test_a_link_waits_as_long_as_the_group_of_its_process(back_end):
    register_backend()
    dist.init_process_group(back_end, store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=0.5))
    try:
        with pytest.raises(dist.DistBackendError, match=r"did not send sample 3 within 0.5 s"):
            Link("x").receiver(dist.HashStore(), 0).receive(3)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("transport", ["auto", "group"])
def test_both_sides_in_one_thread(transport):
    link, store = Link("x", transport=transport, timeout=20), dist.HashStore()
    x = torch.ones(2, requires_grad=True)
    with link.sender(store, 0) as sender, link.receiver(store, 0) as receiver:
        sender.send(2 * x, 0)
        receiver.receive(0).sum().backward()
        receiver.give_back(0)
        sender.backward(0)
    assert torch.equal(x.grad, torch.full((2,), 2.0))


@pytest.mark.parametrize("transport", ["auto", "group"])
def test_links_of_the_same_ranks_do_not_mix(transport):
    """One each way, and messages of both under way at a time."""
    there, back, store = (*(Link(name, timeout=20, transport=transport) for name in "ab"), dist.HashStore())

    def body(rank, _):
        ends = (there.sender, back.receiver) if rank == 0 else (back.sender, there.receiver)
        with ends[0](store, 0) as sender, ends[1](store, 0) as receiver:
            x = torch.full((100_000,), rank + 1.0, requires_grad=True)
            for sample in range(3):
                sender.send((sample + 1) * x, sample)
            for sample in range(3):
                y = receiver.receive(sample)
                assert torch.equal(y, torch.full_like(y, (sample + 1) * (2.0 - rank)))
                (y * (rank + 1)).sum().backward()
                receiver.give_back(sample)
            for sample in reversed(range(3)):
                sender.backward(sample)
            assert torch.equal(x.grad, torch.full_like(x, 6 * (2.0 - rank)))
            for end in (sender, receiver) if rank == 0 else (receiver, sender):
                end.step()

    run_ranks(2, body)


def test_ends_that_nobody_uses_hold_up_nobody():
    link, store = Link("x", timeout=20), dist.HashStore()
    begin = time.monotonic()
    with link.receiver(store, 0):
        pass
    with (
        pytest.raises(dist.DistBackendError, match=r"sample 0, but rank 0 of target .* is lost"),
        link.sender(store, 0) as sender,
    ):
        sender.send(torch.ones(2, requires_grad=True) * 1, 0)
        sender.backward(0)
    assert time.monotonic() - begin < 10


def test_links_are_checked():
    with pytest.raises(UsageError, match="is for links of actor groups"):
        link = Link("x", transport="ray", timeout=20)
        both_sides(link, lambda sender, _: sender.send(torch.ones(2), 0), lambda receiver, _: receiver.receive(0))
    with pytest.raises(ConfigError, match="transport"):
        Link("x", transport="pigeons")
    with pytest.raises(ConfigError, match="link 'x', target: 2 ranks share a sequence"):
        Link("x", target=Layout(sequence=2))
    with pytest.raises(ConfigError, match="batch=0"):
        Layout(batch=0)
    with pytest.raises(ConfigError, match="there are 1 ranks"):
        Link("x").sender(dist.HashStore(), 1)
