"""The wheel requires the minor version of torch that it was compiled against, and says all that an index shows."""

import importlib.metadata
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import wheel_metadata  # noqa: E402


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("2.11.0", "torch==2.11.*"),
        ("2.13.0+cpu", "torch==2.13.*"),
        ("2.15.1+cu132", "torch==2.15.*"),
        ("3.0.0a0+git12", "torch==3.0.*"),
        (None, "torch"),
    ],
)
def test_requirement(version, expected):
    assert wheel_metadata.torch_requirement(version) == expected


def test_only_version_and_dependencies_are_made():
    (requirement,) = wheel_metadata.dynamic_metadata("dependencies")
    assert requirement == wheel_metadata.torch_requirement(importlib.metadata.version("torch"))
    with pytest.raises(ValueError, match="asked for readme"):
        wheel_metadata.dynamic_metadata("readme")


@pytest.mark.parametrize("label", ["", "torch2.13.cpu"])
def test_metadata_of_the_project(label, tmp_path, monkeypatch):
    """What the back end makes of pyproject.toml, without compiling."""
    back_end = pytest.importorskip("scikit_build_core.build")
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("TESSERA_WHEEL_LABEL", label)
    folder = back_end.prepare_metadata_for_build_wheel(str(tmp_path))
    found = importlib.metadata.PathDistribution(tmp_path / folder)
    assert found.metadata["Version"] == wheel_metadata.own_version(label)
    required = [text for text in found.requires if "extra" not in text]
    assert required == wheel_metadata.dynamic_metadata("dependencies")
    assert found.metadata["License-Expression"] == "Apache-2.0"
    assert "LICENSE" in found.metadata.get_all("License-File")
    assert len(found.metadata.get_all("Classifier")) > 5
    assert found.metadata.get_all("Provides-Extra") == ["ray", "tensorboard", "wandb", "comet"]
    assert not found.metadata.get_all("Project-URL"), "no host is ours"
