"""The compiled module and the version of torch."""

from __future__ import annotations

import pytest
import torch

from tessera import _core, _version


def test_another_minor_version_of_torch_is_refused() -> None:
    _version.check_torch(torch.__version__)
    _version.check_torch(_core.torch_version.split("+")[0] + "+other")
    with pytest.raises(ImportError, match=r"torch 1\.2\.3"):
        _version.check_torch("1.2.3")
