"""The configurations of the AutoTP chapter of the training documentation, with tiny sizes."""

from __future__ import annotations

from typing import Any

import pytest
from test_models import compare

Q, KV = 32, 16
ROWS = {"patterns": [r".*\.o_proj\.weight$", r".*\.down_proj\.weight$"], "partition_type": "row"}
GATE_UP = {"patterns": [r".*\.gate_up_proj\.weight$"], "partition_type": "column", "shape": [2, -1], "partition_dim": 0}
QKV = {
    "patterns": [r".*\.qkv_proj\.weight$"],
    "partition_type": "column",
    "shape": [[Q, KV, KV], -1],
    "partition_dim": 0,
}
THIRDS = {**QKV, "shape": [3, -1]}
COLUMNS = {"patterns": [r".*\.[qkv]_proj\.weight$"], "partition_type": "column"}

# model, section, stage
CONFIGS: dict[str, tuple[str, dict[str, Any], int]] = {
    "autotp_size only": ("llama", {}, 2),
    "heuristics": ("bloom", {}, 2),
    "preset": ("llama", {"preset_model": "llama"}, 0),
    "custom specs": (
        "llama",
        {"partition_config": {"use_default_specs": False, "layer_specs": [ROWS, COLUMNS, GATE_UP]}},
        1,
    ),
    "custom specs over a preset": (
        "llama",
        {"preset_model": "llama", "partition_config": {"use_default_specs": True, "layer_specs": [ROWS]}},
        1,
    ),
    "packed gate and up, packed GQA": (
        "phi3",
        {"partition_config": {"use_default_specs": False, "layer_specs": [ROWS, QKV, GATE_UP]}},
        2,
    ),
    "model types": (
        "phi3",
        {
            "partition_config": {
                "layer_specs": [{**QKV, "model_types": ["phi3"]}, {**THIRDS, "model_types": ["qwen2"]}, ROWS, GATE_UP]
            }
        },
        0,
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configurations_of_the_documentation(name: str) -> None:
    model, rules, stage = CONFIGS[name]
    compare(model, tp=2, dp=2, rules=rules, stage=stage)
