"""Backbones that give energies: loading, counting, and who may use them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from families import energy_net

import gepc
from gepc.core.errors import BackboneError, OptionError
from gepc.lab.energy.network import EnergyBackbone

IMAGES = np.random.default_rng(0).uniform(-1, 1, (20, 8, 8, 3)).astype(np.float32)


def test_energies_are_those_of_the_network_and_counted(tmp_path: Path) -> None:
    net = energy_net(tmp_path)
    backbone = gepc.load_backbone(tmp_path, device="cpu")
    assert isinstance(backbone, EnergyBackbone)
    x = torch.from_numpy(IMAGES.transpose(0, 3, 1, 2))
    backbone.rows = 7
    torch.testing.assert_close(backbone.energy(x), net(x).detach())
    assert backbone.counts == (20, 0, 0)
    assert backbone.describe()["family"] == "energy"
    assert backbone.fingerprint is not None


def test_methods_and_networks_that_do_not_fit(tmp_path: Path) -> None:
    energy_net(tmp_path)
    backbone = gepc.load_backbone(tmp_path, device="cpu")
    for method in ("gepc", "gepc+", "msma", "ufcod", "lmd"):
        with pytest.raises(OptionError, match=f"'{method.replace('+', '.')}' needs a network that gives noise predi"):
            gepc.create_detector(backbone, method)
    noise = gepc.Backbone.from_callable(lambda x, t: x, [0.9, 0.5], 3, 8)
    with pytest.raises(OptionError, match=r"'energy' needs a network that gives energies, .* gives noise predictions"):
        gepc.create_detector(noise, "energy")
    with pytest.raises(BackboneError, match="gives energies, not noise"):
        backbone.eps(torch.zeros(1, 3, 8, 8), 0)
    assert np.isfinite(gepc.create_detector(backbone, "pixel_stats").fit(IMAGES).score(IMAGES[:2])).all()


def test_one_sided_and_two_sided_scores(tmp_path: Path) -> None:
    """The published score is E itself; in the density of E both tails are unusual."""
    energy_net(tmp_path)
    backbone = gepc.load_backbone(tmp_path, device="cpu")
    one, two = (gepc.create_detector(backbone, "energy", preset=name).fit(IMAGES) for name in ("paper", "two_sided"))
    energies = backbone.energy(torch.from_numpy(IMAGES.transpose(0, 3, 1, 2))).double().numpy()  # type: ignore[attr-defined]
    np.testing.assert_allclose(one.score(IMAGES), energies, rtol=1e-6)
    scores = two.score(IMAGES)
    middle = np.argsort(energies)[8:12]
    assert scores[middle].max() < min(scores[energies.argmin()], scores[energies.argmax()])


def test_damaged_folders_and_options(tmp_path: Path) -> None:
    energy_net(tmp_path)
    with pytest.raises(OptionError, match="a network of the class EnergyNet has its options in it; leave out `dtype`"):
        gepc.load_backbone(tmp_path, dtype="bfloat16")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "channels": [4, 4]}))
    with pytest.raises(BackboneError, match="has shape"):
        gepc.load_backbone(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "EnergyNet"}))
    with pytest.raises(BackboneError, match="does not describe an energy network"):
        gepc.load_backbone(tmp_path)
