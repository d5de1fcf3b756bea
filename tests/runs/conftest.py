"""A fitted detector of one convolution, and files for it to look at."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image
from toys import as_uint8, pictures, toy_detector

import gepc


@pytest.fixture(scope="session")
def detector() -> gepc.GEPC:
    return toy_detector().fit(pictures(40, seed=1))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two folders, two file types, one image twice; a file of no bytes and one that is cut short."""
    for index, picture in enumerate(as_uint8(pictures(9, seed=2))):
        place = tmp_path / "images" / ("day" if index % 2 else "night") / f"{index}.{'png' if index < 5 else 'bmp'}"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(place)
    whole = (tmp_path / "images" / "day" / "1.png").read_bytes()
    (tmp_path / "images" / "night" / "again.png").write_bytes(whole)
    (tmp_path / "images" / "night" / "cut.png").write_bytes(whole[:50])
    (tmp_path / "images" / "day" / "empty.png").touch()
    return tmp_path / "images"
