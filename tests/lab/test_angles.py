"""The residual by angle: Fourier coefficients of a known curve, the feature in a detector, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from toys import as_uint8, pictures, toy_backbone

import gepc
from gepc.cli.app import run
from gepc.lab.angles import amplitudes
from gepc.methods.features import find_feature


def test_amplitudes_of_a_known_curve() -> None:
    """R(a) = 2 + cos(a) + 0.5 sin(3 a) on a regular grid: c_0 = 2, |c_1| = 1/2, |c_3| = 1/4; NaN is left out."""
    a = np.deg2rad(np.arange(0, 360, 15))
    curve = 2 + np.cos(a) + 0.5 * np.sin(3 * a)
    k = np.arange(1, 5)[:, None]
    waves = np.concatenate([np.ones((1, len(a))), np.cos(k * a), np.sin(k * a)])
    values = np.concatenate([(curve * waves).T, np.full((1, 9), np.nan)])[None, None]
    np.testing.assert_allclose(amplitudes(values)[0, 0], [2, 0.5, 0, 0.25, 0], atol=1e-12)


def test_the_feature_has_five_columns_and_needs_rotations() -> None:
    images = pictures(12)
    detector = gepc.create_detector(
        toy_backbone(), "gepc+", features=("s", "steer"), group="so2:samples=4", maps="raw", elements="each"
    )
    table = detector.features(images)
    assert table["steer"].shape == (12, 1, 5, 9)
    np.testing.assert_allclose(table["steer"][..., 0], table["s"])
    columns = find_feature("steer").columns(table["steer"], each=True, transformed=True)
    assert columns.shape == (12, 1, 5)
    assert np.isfinite(detector.fit(images).score(images[:2])).all()
    with pytest.raises(gepc.GepcError, match="no feature steer"):
        gepc.create_detector(toy_backbone(), "gepc+", features=("steer",), group="flips").fit(images)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    light = np.linspace(150, -150, 8)[:, None, None]
    images = (as_uint8(pictures(40)) * 0.3 + 90 + light * 0.5).clip(0, 255).astype(np.uint8)
    np.save(tmp_path / "normal.npy", images)
    monkeypatch.setattr("gepc.backbones.load.load_backbone", lambda *_, **__: toy_backbone())
    out = tmp_path / "out"
    assert run(["symmetries", str(tmp_path / "normal.npy"), "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "the data are not invariant (p = 0.00" in text
    assert "--set group=auto" in text
    facts = json.loads((out / "symmetries.json").read_text())
    assert facts["images"] == 40
    assert {item["action"]: item["holds"] for item in facts["transforms"]}["flip_y"] is False
    assert run(["symmetries", str(tmp_path / "normal.npy"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["group"] == facts["group"]
