"""What the package says about itself: licences and the oldest versions that it needs."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from oldest import oldest

ROOT = Path(__file__).parents[1]
NETWORKS = {
    "photos-tiny": "CC-BY-SA-4.0",
    "photos-small": "CC-BY-SA-4.0",
    "celeba32-tiny": "LicenseRef-CelebA-Research",
    "celeba32-small": "LicenseRef-CelebA-Research",
    "sar-tiny": "LicenseRef-HRSID-Research",
    "sar-small": "LicenseRef-HRSID-Research",
}


@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_has_a_licence_beside_its_weights(name: str) -> None:
    text = (ROOT / "src" / "gepc" / "weights" / name / "LICENSE.md").read_text()
    assert f"SPDX: {NETWORKS[name]}" in text
    assert "https://" in text
    assert {path.name for path in (ROOT / "src" / "gepc" / "weights").iterdir()} == set(NETWORKS)


def test_the_wheel_has_all_licences_and_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = pytest.importorskip("hatchling.build", reason="the wheel is built with hatchling")
    monkeypatch.chdir(ROOT)
    wheel = tmp_path / build.build_wheel(str(tmp_path))
    assert wheel.stat().st_size < 20e6
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        lines = archive.read(metadata).decode().splitlines()
    expression = " AND ".join(dict.fromkeys(["Apache-2.0", *NETWORKS.values()]))
    assert f"License-Expression: {expression}" in lines
    for name in ("LICENSE", *(f"src/gepc/weights/{network}/LICENSE.md" for network in NETWORKS)):
        assert f"License-File: {name}" in lines
        assert any(path.endswith(f".dist-info/licenses/{name}") for path in names)
    for network in NETWORKS:
        assert f"gepc/weights/{network}/LICENSE.md" in names


def test_the_oldest_versions_are_those_that_the_code_needs() -> None:
    """`validate_data` of scikit-learn, `load_default(size)` of Pillow and `torch.OutOfMemoryError`."""
    bounds = oldest(ROOT / "pyproject.toml")
    assert {name: bounds[name] for name in ("scikit-learn", "pillow", "torch")} == {
        "scikit-learn": "1.6",
        "pillow": "10.1",
        "torch": "2.5",
    }
