"""One call for any backbone: names, folders, hub ids, and what happens without a connection."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch

import gepc
from gepc.backbones import load
from gepc.core.errors import BackboneError, InputError, OptionError

Maker = Callable[..., Path]


@pytest.fixture
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the network was touched")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)


@pytest.fixture
def embedded(make_folder: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package with one backbone in it, called faces-tiny."""
    home = tmp_path / "weights"
    home.mkdir()
    shutil.move(make_folder(), home / "faces-tiny")
    monkeypatch.setattr(load, "WEIGHTS", home)
    return "faces-tiny"


@pytest.mark.usefixtures("_offline")
def test_an_embedded_backbone_needs_no_network(embedded: str) -> None:
    assert gepc.list_backbones() == [embedded]
    backbone = gepc.load_backbone(embedded)
    assert backbone.source == embedded
    assert backbone.eps(torch.randn(1, 3, 8, 8), 3).shape == (1, 3, 8, 8)


def test_embedded_backbones_load() -> None:
    for name in gepc.list_backbones():
        backbone = gepc.load_backbone(name)
        side = 8 * backbone.size_multiple if backbone.image_size is None else backbone.image_size[0]
        assert backbone.eps(torch.zeros(1, backbone.channels, side, side), 3).isfinite().all()


@pytest.mark.usefixtures("_offline", "embedded")
def test_a_misspelt_name() -> None:
    with pytest.raises(OptionError, match=r"is called 'faces-tyni'; did you mean 'faces-tiny'\?"):
        gepc.load_backbone("faces-tyni")


@pytest.mark.parametrize("name", ["./somewhere", "/nowhere/net", "weights/net.pt", "a/b/c", "net.safetensors"])
@pytest.mark.usefixtures("_offline")
def test_a_path_that_does_not_exist(name: str) -> None:
    with pytest.raises(InputError, match=f"{name} does not exist"):
        gepc.load_backbone(name)


def test_a_backbone_is_returned_as_it_is() -> None:
    backbone = gepc.Backbone.from_callable(lambda x, t: x, [0.5])
    assert gepc.load_backbone(backbone) is backbone


def test_a_hub_id_without_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise ConnectionError("no route to host\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    message = r"no folder someone/net, and the hub did not give it either \(no route to host\).*hf download someone/net"
    with pytest.raises(BackboneError, match=message):
        gepc.load_backbone("someone/net")


@pytest.mark.parametrize("weights", ["safetensors", "bin"])
def test_a_hub_id_with_a_connection(make_folder: Maker, monkeypatch: pytest.MonkeyPatch, weights: str) -> None:
    folder = make_folder()
    file = folder / "diffusion_pytorch_model.safetensors"
    expected = gepc.load_backbone(folder).eps(torch.ones(1, 3, 8, 8), 3)
    asked: list[list[str]] = []
    if weights == "bin":
        from safetensors.torch import load_file

        torch.save(load_file(file), folder / "diffusion_pytorch_model.bin")
        file.unlink()

    def download(name: str, allow_patterns: list[str]) -> str:
        assert name == "someone/net"
        asked.append(allow_patterns)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    backbone = gepc.load_backbone("someone/net")
    assert torch.equal(backbone.eps(torch.ones(1, 3, 8, 8), 3), expected)
    assert backbone.source == "someone/net"
    assert ("*.bin" in asked[-1]) == (weights == "bin")


def test_scheduler_fields_from_a_file(make_folder: Maker, tmp_path: Path) -> None:
    (tmp_path / "scheduler.yaml").write_text("prediction_type: sample\ntimestep_respacing: '10'\n")
    backbone = gepc.load_backbone(make_folder(), config=tmp_path / "scheduler.yaml")
    assert backbone.n_steps == 10
    assert backbone.describe()["prediction_type"] == "sample"


def test_imports_are_light() -> None:
    """`import gepc` and the command line's frame load neither torch nor diffusers."""
    code = "import sys, gepc, gepc.cli; gepc.list_backbones(); print({'torch', 'diffusers'} & set(sys.modules))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "set()"
