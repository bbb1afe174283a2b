"""Two actor groups that train as one: losses and weights of one process, checkpoints, a group that dies."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import pytest
import ray_ranks
import torch
from support import make
from tessera.errors import ConfigError, IoError, UsageError
from tessera.hybrid import ActorError, ActorGroup, Layout, Link, Program
from test_linked_engines import TP, Text, Vision, plain_weights

CLIP = 0.05  # far below the norms that these models have: a part of the norm that is missing shows


def program_of(folder, sequence=2, replicas=2, clip=0.0, transport="auto"):
    link = Link(
        "vision",
        Layout(sequence=sequence),
        Layout(replicas=replicas),
        batch_dim=0,
        sequence_dim=1,
        sides=("vision", "text"),
        timeout=300,
        transport=transport,
    )
    more = {"gradient_clipping": clip}
    tp = TP if replicas > 1 else {}
    groups = [
        ActorGroup("vision", ray_ranks.VisionRank, sequence, (link,), more, timeout=300),
        ActorGroup("text", ray_ranks.TextRank, replicas, (link,), {**more, **tp}, timeout=300),
    ]
    return Program(groups, folder)


def weights_of(program):
    found = program.run("weights")
    return [value for name in ("vision", "text") for value in found[name][0]]


def close(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)  # fp32, sums in another order


def test_weights_of_one_process(ray_cluster, tmp_path):
    with program_of(tmp_path, clip=CLIP, transport="ray") as program:  # "auto": the next test
        for step in range(3):
            losses = program.step("train", step)["text"]
            assert losses[0] == losses[1]
        found = weights_of(program)
    close(found, plain_weights(make(Vision, seed=1), make(Text, seed=2), CLIP))


def die_in_train(program):
    victim = program.group("vision").processes()[1]
    threading.Timer(0.5, os.kill, (victim, signal.SIGKILL)).start()
    with pytest.raises(ActorError, match=r"rank 1 of 'vision' died in train\(\)") as caught:
        program.step("train", 2, slow=2.0)
    assert ("vision", 1) in caught.value.ranks


def die_in_save(program):
    """While the only checkpoint is being replaced."""
    program.group("vision").call("die_in_save", 1)
    with pytest.raises(ActorError, match=r"rank 1 of 'vision' died in engine.save_checkpoint\(\)"):
        program.save("first", {"step": 2})


def go_on(program, state):
    assert state == {"step": 1}
    for step in range(state["step"], 3):
        program.step("train", step)
    return weights_of(program)


@pytest.mark.long
@pytest.mark.parametrize(("transport", "deaths"), [("auto", (die_in_train, die_in_save)), ("ray", (die_in_train,))])
def test_a_killed_rank_and_the_way_back(ray_cluster, tmp_path, transport, deaths):
    """Also with other numbers of ranks: each engine's part of the checkpoint reshards on its own."""
    expected = plain_weights(make(Vision, seed=1), make(Text, seed=2))
    with program_of(tmp_path, sequence=2, replicas=1, transport=transport) as program:
        program.step("train", 0)
        assert program.save("first", {"step": 1}) == tmp_path / "first"
        program.step("train", 1)
        for die in deaths:
            die(program)
            found = go_on(program, program.restore())
    close(found, expected)
    if transport == "ray":
        return  # what is on the disk is the same
    assert len(list((tmp_path / "first").glob("parts-*"))) == 2, "the good one, and what the dead rank left"
    with program_of(tmp_path, sequence=1, replicas=2) as program:
        state = program.load()
        program.save("first", state)
        without_parts(tmp_path / "first")
        close(go_on(program, program.load()), expected)
        program.save("first", {"step": 3})
        assert len(list((tmp_path / "first").iterdir())) == 2, "the manifest and its parts"


def without_parts(tag):
    """The layout of a checkpoint that has no `parts`. A save that is complete leaves nothing of those before it."""
    (parts,) = tag.glob("parts-*")
    for part in list(parts.iterdir()):
        part.rename(tag / part.name)
    parts.rmdir()
    manifest = json.loads((tag / "program.json").read_text())
    assert manifest.pop("parts") == parts.name
    (tag / "program.json").write_text(json.dumps(manifest))


def test_the_store_listens_where_the_driver_is_known(ray_cluster):
    """And finds no key for who does not know the program's secret."""
    groups = [ActorGroup("numbers", ray_ranks.Plain, 1, timeout=300)]
    with Program(groups) as program:
        (place,) = program.group("numbers").call("where")
        tables = [Path("/proc/net", name).read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
        lines = [line.split() for table in tables for line in table]
        ours = [line[1] for line in lines if line[3] == "0A" and line[1].endswith(f":{place.port:04X}")]
        assert ours and all(where.split(":")[0].strip("0") for where in ours), "0: any address"
        assert len(place.name) >= 32


def test_checkpoints_that_are_not_there(ray_cluster, tmp_path):
    groups = [ActorGroup("numbers", ray_ranks.Plain, 1, timeout=300)]
    with pytest.raises(ConfigError, match="names of their own"):
        Program(groups * 2)
    with pytest.raises(UsageError, match="needs a folder"):
        Program(groups).load()
    program = Program(groups, tmp_path)
    with pytest.raises(IoError, match="no complete checkpoint"):
        program.load()
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "program.json").write_text('{"groups": {"others": 1}, "state": null}')
    with pytest.raises(ConfigError, match=r"of the groups .'others'., the program has .'numbers'."):
        program.load("a")
    with pytest.raises(UsageError, match="does not run"):
        program.save("a")
    with pytest.raises(ConfigError, match=r"of the groups .'others'."):
        program.load("a")  # as it was
    for tag in ("../a", str(tmp_path / "a")):
        with pytest.raises(ConfigError, match="a tag is the name of one folder"):
            program.load(tag)
    (tmp_path / "latest").write_text("../b")
    with pytest.raises(IoError, match=r"latest' holds \"../b\", which is no tag"):
        program.load()
    for text in ("[" * 100_000 + "]" * 100_000, "nan", "{"):
        (tmp_path / "a" / "program.json").write_text(text)
        with pytest.raises(IoError, match=r"no complete checkpoint|is damaged"):
            program.load("a")
    for text in ("[]", '{"groups": 3, "state": 0}', '{"groups": {"numbers": 1}, "state": 0, "parts": "../b"}'):
        (tmp_path / "a" / "program.json").write_text(text)
        with pytest.raises(IoError, match=r"program\.json is damaged"):
            program.load("a")
