"""examples/hybrid: Qwen2.5-VL in two groups of actors has the losses of one process; its parts are Transformers'."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from link_ranks import RAY_ENVIRONMENT, both_sides
from support import run_ranks
from tessera.hybrid import Link

import tessera

EXAMPLE = Path(__file__).parents[3] / "examples" / "hybrid"
pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def example():
    """The modules of the example."""
    sys.path.insert(0, str(EXAMPLE))
    import model
    import pictures

    yield model, pictures
    sys.path.remove(str(EXAMPLE))
    for name in ("model", "pictures", "ranks"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_parts_are_the_model_of_transformers(example, ranks):
    """Losses and gradients; windows that the ranks' parts cut through, and pictures whose edges cut windows."""
    model, pictures = example
    batch = pictures.batch(0, 2, 168)
    config = model.configuration()
    whole = model.whole_model(config)
    loss = model.whole_loss(whole, batch)
    loss.backward()

    parts = [model.whole_model(config) for _ in range(ranks)]

    def rank_tokens(rank, group):
        tower = model.Tower(parts[rank], group, rank, ranks)
        tokens = tower(batch.patches, batch.grid)
        return tower, tokens

    towers, tokens = zip(*run_ranks(ranks, rank_tokens), strict=True)
    images = torch.cat([t.detach() for t in tokens]).requires_grad_()
    language = model.language_of(model.whole_model(config))
    found = language(images, batch.ids, batch.grid, batch.labels)
    torch.testing.assert_close(found, loss, rtol=1e-5, atol=0)
    found.backward()
    cut = images.grad.tensor_split(ranks)
    run_ranks(ranks, lambda rank, group: tokens[rank].backward(cut[rank]))  # in the exchange they meet again
    expected = {name: p.grad for name, p in whole.model.visual.named_parameters()}
    for name, value in expected.items():
        total = sum(dict(tower.tower.named_parameters())[name].grad for tower in towers)
        torch.testing.assert_close(total, value, rtol=1e-4, atol=1e-6)
    for name, param in language.named_parameters():
        torch.testing.assert_close(param.grad, dict(whole.named_parameters())[name].grad, rtol=1e-4, atol=1e-6)


def test_the_tower_works_ahead(example):
    """While the language model is at a micro-batch, the tower computes the next one: here the one waits for the other
    to have done so."""
    from ranks import turns

    assert turns(3, 2) == [
        ("forward", 0),
        ("forward", 1),
        ("backward", 0),
        ("forward", 2),
        ("backward", 1),
        ("backward", 2),
    ]
    assert turns(2, 5) == [("forward", 0), ("forward", 1), ("backward", 0), ("backward", 1)]
    computed = [threading.Event() for _ in range(4)]

    def tower(sender, rank):
        for what, micro in turns(4, 2):
            if what == "forward":
                sender.send(torch.ones(2, requires_grad=True) * micro, micro)
                computed[micro].set()
            else:
                sender.backward(micro)
        sender.step()

    def language(receiver, rank):
        for micro in range(4):
            images = receiver.receive(micro)
            assert computed[min(micro + 1, 3)].wait(20)
            images.sum().backward()
            receiver.give_back(micro)
        receiver.step()

    both_sides(Link("x", timeout=20), tower, language)


def test_tokens_that_cannot_be_dealt_out(example):
    model, pictures = example
    tower = model.Tower(model.whole_model(model.configuration()), tessera.single_group(), 0, 3)
    batch = pictures.batch(0, 1, 112)
    with pytest.raises(ValueError, match="16 tokens cannot be dealt out evenly to 3 ranks"):
        tower(batch.patches, batch.grid)


# fp32: sums in another order, which four updates of AdamW make larger. Low: bf16 keeps 8 bits.
@pytest.mark.long
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 2e-4), ("low", 2e-2)])
def test_losses_of_one_process(precision, tolerance):
    pytest.importorskip("ray")
    command = [sys.executable, EXAMPLE / "train.py", "--steps", "4", "--micro-batches", "3", "--precision", precision]
    paths = [os.path.abspath(folder) for folder in sys.path if folder]
    environment = os.environ | RAY_ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    pairs = re.findall(r"loss (\d+\.\d+), of one process in fp32 (\d+\.\d+)", done.stdout)
    assert len(pairs) == 4, done.stdout
    for hybrid, one in pairs:
        assert float(hybrid) == pytest.approx(float(one), abs=tolerance)
    assert float(pairs[-1][0]) < float(pairs[0][0]) - 0.1  # it learns
