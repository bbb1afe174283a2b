"""Ten thousand damaged configurations: each is read, or one error says what is wrong; no crash, no hang."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
from tessera.estimate import estimate

import tessera

SEED, COUNT, SLOWEST = 29, 10_000, 2.0  # seconds for one; the mean is below a millisecond

WHOLE: dict[str, Any] = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "steps_per_print": 10,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 100, "warmup_num_steps": 10}},
    "bf16": {"enabled": True, "bf16_master_weights_and_grads": False},
    "fp16": {"enabled": False, "loss_scale": 0, "initial_scale_power": 16},
    "torch_autocast": {"enabled": False, "dtype": "bfloat16", "lower_precision_safe_modules": ["torch.nn.Linear"]},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "reduce_bucket_size": 5e8,
        "stage3_param_persistence_threshold": 1e5,
        "offload_optimizer": {"device": "none"},
        "offload_param": {"device": "none", "buffer_count": 5},
        "leaf_module": {"classes": ["a.B"], "names": [], "name_suffixes": ["mlp"]},
    },
    "tensor_parallel": {"autotp_size": 2, "partition_config": {"layer_specs": [{"patterns": ["a$"]}]}},
    "checkpoint": {"tag_validation": "Warn", "load_universal": False},
    "csv_monitor": {"enabled": True, "output_path": "x", "job_name": "y"},
    "flops_profiler": {"enabled": False, "module_depth": -1},
    "elasticity": {"enabled": False, "micro_batch_sizes": [2, 4]},
    "tessera": {"seed": 3, "rounding": "nearest"},
}
JUNK: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 10**30, 0.5, -0.0, 1e308, 1e-320, float("inf"), float("-inf"),
    float("nan"), "", "auto", "true", "0", "1e5", "none", "AdamW", "ä\u0000\u2028", "x" * 2000, [], [[]], {}, [None],
    {"": None}, {"a": {"b": {"c": 1}}}, [1, "2", {}], "bf16", "fp64", -1e9, [0.9], [0.9, 1.1],
]  # fmt: skip


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [p for key, value in items for p in [(*path, key), *places(value, (*path, key))]]


def at(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def replace(tree: Any, rng: random.Random) -> None:
    *path, key = rng.choice(places(tree))
    at(tree, tuple(path))[key] = rng.choice(JUNK)


def drop(tree: Any, rng: random.Random) -> None:
    *path, key = rng.choice(places(tree))
    del at(tree, tuple(path))[key]


def move(tree: Any, rng: random.Random) -> None:
    """A value of elsewhere."""
    *path, key = rng.choice(places(tree))
    at(tree, tuple(path))[key] = json.loads(json.dumps(at(tree, rng.choice(places(tree)))))


def misspell(tree: Any, rng: random.Random) -> None:
    *path, key = rng.choice(places(tree))
    holder = at(tree, tuple(path))
    if isinstance(holder, dict):
        cut = rng.randrange(len(key) + 1)
        holder[key[:cut] + rng.choice(["", "x", "_", ".", "Ü"]) + key[cut + 1 :]] = holder.pop(key)


CHANGES: list[Callable[[Any, random.Random], None]] = [replace, replace, drop, move, misspell]


def damaged_tree(rng: random.Random) -> Any:
    tree = json.loads(json.dumps(WHOLE))
    for section in rng.sample(list(tree), rng.randrange(len(tree) // 2)):
        del tree[section]
    for _ in range(rng.randrange(1, 6)):
        if places(tree):
            rng.choice(CHANGES)(tree, rng)
    return tree


def damaged_text(rng: random.Random) -> str:
    text = json.dumps(damaged_tree(rng), indent=rng.choice([None, 2]))
    for _ in range(rng.randrange(4)):
        begin = rng.randrange(len(text) + 1)
        end = min(len(text), begin + rng.choice([0, 1, 1, 5, 200]))
        text = (
            text[:begin]
            + rng.choice(["", ",", "{", "}", "]", '"', ":", "//", "/*", "\\", "\t", "\0", "é", "1e"])
            + text[end:]
        )
    return text


def outcome(read: Callable[[], tessera.Config]) -> str:
    """ "", or the error; anything but the errors that readers are promised is raised."""
    begun = time.perf_counter()
    try:
        config = read()
        config.to_dict()
        config.describe()
        try:
            estimate(1000, config, ranks=4)
            config.resolve_batch(4)
        except NotImplementedError as refusal:
            return str(refusal)
    except tessera.ConfigError as error:
        assert str(error).startswith("["), error
        return str(error)
    finally:
        assert time.perf_counter() - begun < SLOWEST
    return ""


@pytest.mark.parametrize("textual", [False, True])
def test_every_damaged_configuration_is_read_or_refused(textual: bool) -> None:
    rng = random.Random(SEED + textual)
    said = []
    for _ in range(COUNT // 2):
        if textual:
            text = damaged_text(rng)
            said.append(outcome(lambda text=text: tessera.Config.from_json(text)))
        else:
            tree = damaged_tree(rng)
            said.append(outcome(lambda tree=tree: tessera.Config.from_dict(tree)))
    read = sum(not text for text in said)
    assert COUNT // 100 < read < COUNT // 2 - COUNT // 100, read  # the damage is neither none nor all


def test_one_error_lists_everything() -> None:
    """Wrong values at places of their own: every path is in the message, whatever else is wrong."""
    wrong: dict[str, Any] = {
        "gradient_clipping": -1,
        "steps_per_print": "often",
        "zero_optimization.stage": 4,
        "zero_optimization.overlap_comm": "perhaps",
        "zero_optimization.nonsense": 1,
        "fp16.loss_scale": True,
        "bf16.enabled": [],
        "checkpoint.tag_validation": "Sometimes",
        "csv_monitor.job_name": {},
        "tessera.rounding": "up",
        "optimizer.params.betas": [2, 3],
    }
    rng = random.Random(SEED)
    for _ in range(200):
        chosen = rng.sample(list(wrong), rng.randrange(1, len(wrong) + 1))
        tree: dict[str, Any] = {"optimizer": {"type": "AdamW", "params": {}}}
        for path in chosen:
            *sections, key = path.split(".")
            holder = tree
            for section in sections:
                holder = holder.setdefault(section, {})
            holder[key] = wrong[path]
        with pytest.raises(tessera.ConfigError) as error:
            tessera.Config.from_dict(tree)
        assert not [path for path in chosen if path not in str(error.value)]
        assert f"{len(chosen)} problem" in str(error.value)
