"""Connected flagged tiles as boxes, in pixels and in map coordinates."""

import numpy as np
import pytest

from gepc.scenes.reading import PIXELS, Georeference
from gepc.scenes.regions import TileRegion, find_regions
from gepc.scenes.tiling import Grid
from gepc.scenes.writing import geojson

GRID = Grid.over(40, 60, (8, 8), (4, 4))
SHAPE = (len(GRID.tops), len(GRID.lefts))


def regions_of(*flagged, grid=GRID):
    shape = (len(grid.tops), len(grid.lefts))
    flags = np.zeros(shape, dtype=bool)
    scores = np.arange(np.prod(shape), dtype=float).reshape(shape)
    for place in flagged:
        flags[place] = True
    return find_regions(grid, flags, scores, 1.0 / (1.0 + scores))


def test_no_flag_no_region():
    assert regions_of() == []


def test_overlapping_and_touching_tiles_are_one_region_and_others_are_not():
    (both,) = regions_of((0, 0), (1, 1))
    assert both.box == (0, 0, 12, 12)
    (touching,) = regions_of((0, 0), (2, 2))  # corner to corner
    assert touching.tiles == 2
    apart = regions_of((0, 0), (3, 3))
    assert [region.box for region in apart] == [(12, 12, 20, 20), (0, 0, 8, 8)]


def test_tiles_two_steps_apart_that_overlap_are_one_region():
    grid = Grid.over(20, 40, (8, 8), (3, 3))
    (region,) = regions_of((0, 0), (0, 2), grid=grid)
    assert region.box == (0, 0, 8, 14)


def test_a_region_has_its_best_tile_and_regions_are_sorted_by_score():
    first, second = regions_of((0, 0), (0, 1), (8, 13))
    assert (first.number, second.number) == (1, 2)
    assert first.score == 8 * SHAPE[1] + 13
    assert second.score == 1.0
    assert second.p_value == 0.5
    assert second.tiles == 2


@pytest.mark.parametrize("place", [PIXELS, Georeference((10.0, 2.0, 500.0, 1.0, -10.0, 900.0), "WKT", 32631)])
def test_geojson_is_a_ring_of_the_corners(place):
    found = regions_of((0, 1))
    collection = geojson(found, place)
    (ring,) = collection["features"][0]["geometry"]["coordinates"]
    corners = [(4, 0), (4, 8), (12, 8), (12, 0), (4, 0)]
    if place == PIXELS:
        assert ring == [[float(x), float(y)] for x, y in corners]
        assert "pixels" in collection["coordinates"]
    else:
        assert ring == [[10 * x + 2 * y + 500, x - 10 * y + 900] for x, y in corners]
        assert collection["crs"]["properties"]["name"] == "urn:ogc:def:crs:EPSG::32631"
    values = collection["features"][0]["properties"]
    assert tuple(values) == TileRegion.COLUMNS
    assert (values["x"], values["y"]) == ((8.0, 4.0) if place == PIXELS else (10 * 8 + 2 * 4 + 500, 8 - 10 * 4 + 900))


def test_a_crs_without_a_number_is_written_out():
    assert geojson([], Georeference((1, 0, 0, 0, 1, 0), "LOCAL"))["crs"]["properties"]["name"] == "LOCAL"
