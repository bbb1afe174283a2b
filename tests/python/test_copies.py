"""Values for files: what is tied stays tied, every view keeps its own shape and strides."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import Net, config, engines, make

import tessera


class Views(Net):
    """Buffers over one memory, most from its first element on, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.head
        table = torch.arange(12.0)
        views = {
            "flat": table,
            "table": table.view(3, 4),
            "tied": table.view(3, 4),
            "turned": table.view(3, 4).t(),
            "row": table[:4],
            "even": table[::2],
            "wide": table[:4].expand(5, 4),
            "bits": table.view(torch.int32),
            "one": table[0],
            "none": table[:0],
        }
        for name, view in views.items():
            self.register_buffer(name, view)
        self.register_buffer("sparse", torch.eye(3).to_sparse())
        self.register_buffer("meta", torch.empty(2, 3, device="meta"), persistent=False)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_views_of_one_memory_keep_their_own_form(stage: int, tmp_path: Path) -> None:
    model = make(Views)
    want = dict(model.state_dict())
    cfg = config(stage, zero={"stage3_gather_16bit_weights_on_model_save": True})

    def body(engine: tessera.Engine, rank: int) -> None:
        assert engine.save_16bit_model(str(tmp_path), f"{rank}.bin")
        state = engine.module_state_dict()
        for found in [state] if rank else [state, torch.load(tmp_path / "0.bin")]:
            assert found.keys() == want.keys()
            for name, value in want.items():
                assert found[name].dtype == value.dtype and torch.equal(found[name].to_dense(), value.to_dense()), name
                if value.layout == torch.strided:
                    assert found[name].stride() == value.stride(), name
            assert found["head.weight"].data_ptr() == found["again.weight"].data_ptr()
            assert found["table"].data_ptr() == found["tied"].data_ptr()
        if rank == 0:
            names = ["flat", "table", "turned", "row", "even", "wide", "bits", "one"]
            sizes = [found[name].untyped_storage().nbytes() // 4 for name in names]
            assert sizes == [12, 12, 12, 4, 11, 4, 12, 1], "no more than what a view spans"
            assert len({found[name].data_ptr() for name in names}) == len(names)

    engines(model, 2, cfg, body)
