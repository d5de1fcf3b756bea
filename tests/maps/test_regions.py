"""Regions of maps: boxes and files."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from toys import as_uint8, pictures, toy_detector

from gepc.images.sources import open_images
from gepc.maps.regions import MapRegion, coco, in_image
from gepc.runs.maps import MapOptions, write_maps


def test_regions_are_where_the_map_exceeds_its_limit() -> None:
    detector = toy_detector().fit(pictures(40))
    field = np.zeros((1, 8, 8), dtype=np.float32)
    limit = detector.map_limit(0.1)
    field[0, 1:3, 1:3] = limit + 1.0
    field[0, 3, 3] = limit + 2.0  # touches at a corner
    field[0, 6, 5:7] = limit + 5.0
    found = detector.fitted.regions({"sum": field, "residual": field}, 0, 0.1)
    assert [(one.number, one.box, one.area, one.peak) for one in found] == [
        (1, (6, 5, 7, 7), 2, (6, 5)),
        (2, (1, 1, 4, 4), 5, (3, 3)),
    ]
    assert found[0].part == "residual"
    assert all(one.p_value <= 0.1 for one in found)
    assert detector.fitted.regions({"sum": field[:, :1] * 0.0}, 0) == []


def test_a_region_in_pixels_of_the_image() -> None:
    """A map of 8 x 8 shows lines 10 to 26 and columns 0 to 32."""
    region = MapRegion(1, 5.0, 0.01, (1, 2, 3, 4), 4, (1, 2))
    found = in_image(region, (10, 0, 16, 32), (8, 8))
    assert found.box == (12, 8, 16, 16)
    assert found.area == 4 * 2 * 4
    annotation = coco([("a.png", (30, 32), [found])])["annotations"][0]
    assert annotation["bbox"] == [8, 12, 8, 4]
    assert annotation["segmentation"] == [[8, 12, 16, 12, 16, 16, 8, 16]]


def test_regions_are_written_for_spreadsheets_and_labelling_tools(tmp_path: Path) -> None:
    """In pixels of the images as they were given, here twice as large as the network's input."""
    detector = toy_detector(size=8).fit(pictures(40))
    image = as_uint8(pictures(1, 16, seed=3))[0]
    image[4:10, 4:10] = 255
    entries = write_maps(detector.fitted, open_images([image]), tmp_path, MapOptions(alpha=0.9))
    assert entries[0]["regions"] >= 1
    assert {"score", "p_value", "alarm"} <= set(entries[0])
    with open(tmp_path / "regions.csv", newline="") as handle:
        rows = list(csv.DictReader(handle))
    stored = json.loads((tmp_path / "regions.json").read_text())
    assert stored["images"] == [{"id": 1, "file_name": "0", "height": 16, "width": 16}]
    for row, annotation in zip(rows, stored["annotations"], strict=True):
        top, left, bottom, right = (int(row[side]) for side in ("top", "left", "bottom", "right"))
        assert annotation["bbox"] == [left, top, right - left, bottom - top]
        assert 0 <= top < bottom <= 16
        assert float(row["p_value"]) == pytest.approx(annotation["p_value"], rel=1e-5)
    assert len(rows) == entries[0]["regions"]


def test_the_box_of_a_whole_map_is_the_whole_image() -> None:
    """Also where the ratio of the sides has no exact binary form, as 7/25."""
    for side, cells in ((7, 25), (37, 12), (100, 60), (389, 189)):
        region = in_image(MapRegion(1, 5.0, 0.01, (0, 0, cells, cells)), (2, 3, side, side), (cells, cells))
        assert region.box == (2, 3, 2 + side, 3 + side)
