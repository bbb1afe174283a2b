"""The stand-in accelerator under Python: usage python_test.py PATH-OF-LIBRARY. A program of its own, because the device
becomes the whole process's accelerator."""

import copy
import io
import sys
import threading

import stand_in
import torch
from torch import nn

DEVICE = "privateuseone"


def test_tensors() -> None:
    t = torch.arange(6.0, device=DEVICE).view(2, 3)
    assert t.device == torch.device(DEVICE, 0)
    assert torch.equal(t.cpu(), torch.arange(6.0).view(2, 3))
    assert t.sum().item() == 15
    assert f"device='{DEVICE}:0'" in repr(t)
    t.t()[1].mul_(2)
    assert t.tolist() == [[0, 2, 2], [3, 8, 5]]
    assert torch.ones(2, device=f"{DEVICE}:1").sum().device.index == 1
    assert torch.ones(2).pin_memory().is_pinned()
    assert copy.deepcopy(t).data_ptr() != t.data_ptr()
    file = io.BytesIO()
    torch.save(t, file)
    file.seek(0)
    assert torch.equal(torch.load(file), t)


def test_random_numbers_are_those_of_the_cpu() -> None:
    torch.manual_seed(1)
    here = torch.randn(5, device=DEVICE)
    torch.manual_seed(1)
    assert torch.equal(here.cpu(), torch.randn(5))


def train(device: str) -> list[torch.Tensor]:
    torch.manual_seed(1)
    layers = [nn.Embedding(7, 8), nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 7)]
    model = nn.Sequential(*layers).to(device)
    adam = torch.optim.AdamW(model.parameters(), lr=0.1)
    ids = torch.arange(7, device=device)
    for _ in range(3):
        adam.zero_grad()
        nn.functional.cross_entropy(model(ids), ids.flip(0)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
    return [p.detach().cpu() for p in model.parameters()]


def test_training_has_the_bits_of_the_cpu() -> None:
    for here, there in zip(train("cpu"), train(DEVICE), strict=True):
        assert torch.equal(here, there)


def attention(device: str) -> list[torch.Tensor]:
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 2, 5, 8).to(device).requires_grad_() for _ in range(3))
    out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert out.device.type == device
    out.square().sum().backward()
    return [t.detach().cpu() for t in (out, q.grad, k.grad, v.grad)]


def test_attention_and_convolution_have_the_bits_of_the_cpu() -> None:
    for here, there in zip(attention("cpu"), attention(DEVICE), strict=True):
        assert torch.equal(here, there)
    conv = nn.Conv2d(3, 4, 3)
    images = torch.randn(2, 3, 6, 6)
    there = copy.deepcopy(conv).to(DEVICE)
    conv(images).square().sum().backward()
    there(images.to(DEVICE)).square().sum().backward()
    assert torch.equal(there.weight.grad.cpu(), conv.weight.grad)
    assert torch.equal(there.bias.grad.cpu(), conv.bias.grad)
    with torch.inference_mode():
        assert torch.equal(there(images.to(DEVICE)).cpu(), conv(images))


def test_hooks_run_on_the_thread_of_the_device() -> None:
    weight = nn.Parameter(torch.ones(3, device=DEVICE))
    seen = []

    def hook(parameter: torch.Tensor) -> None:
        seen.append((parameter.grad.tolist(), threading.get_ident() == threading.main_thread().ident))
        parameter.grad = None

    weight.register_post_accumulate_grad_hook(hook)
    for scale in (2, 3):
        (weight * scale).sum().backward()
    assert seen == [([2, 2, 2], False), ([3, 3, 3], False)]


def test_autocast() -> None:
    linear = nn.Linear(4, 3).to(DEVICE)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        out = linear(torch.ones(2, 4, device=DEVICE))
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert linear.weight.grad.dtype == torch.float32


def test_streams() -> None:
    side, other = torch.Stream(DEVICE), torch.Stream(DEVICE)
    assert side.stream_id != other.stream_id
    main = torch.accelerator.current_stream()
    t = torch.ones(8, device=DEVICE)
    for ordered in (True, False):
        with side:
            assert torch.accelerator.current_stream() == side
            side.wait_stream(main)
            t.add_(1)
        assert torch.accelerator.current_stream() == main
        if ordered:
            main.wait_event(side.record_event())
        t.mul_(2)
        found = stand_in.races(library)
        assert len(found) == 0 if ordered else "aten::mul (out) on stream 0 of device 0 writes" in found[1], found
        torch.accelerator.synchronize()
    assert t.tolist() == [10] * 8
    host = torch.zeros(8).pin_memory()
    host.copy_(t, non_blocking=True)
    assert host.isnan().all(), "nobody has waited"
    main.synchronize()
    assert host.tolist() == t.tolist()


if __name__ == "__main__":
    library = stand_in.load(sys.argv[1])
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
            assert not stand_in.races(library), name
            print(f"{name}: passed")
    assert library.tessera_stand_in_bytes() == 0, "memory of the device was not freed"
