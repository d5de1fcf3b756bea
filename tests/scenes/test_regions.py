"""Connected flagged tiles as boxes, with their map, in pixels and in map coordinates."""

import numpy as np
import pytest

from gepc.scenes.reading import Georeference
from gepc.scenes.tiling import Grid
from gepc.scenes.writing import COLUMNS, find_regions, geojson

GRID = Grid.over(40, 60, (8, 8), (4, 4))
SHAPE = (len(GRID.tops), len(GRID.lefts))


def regions_of(*flagged, field=None, scale=1.0, grid=GRID):
    shape = (len(grid.tops), len(grid.lefts))
    flags = np.zeros(shape, dtype=bool)
    scores = np.arange(np.prod(shape), dtype=float).reshape(shape)
    for place in flagged:
        flags[place] = True
    return find_regions(grid, flags, scores, 1.0 / (1.0 + scores), field, scale)


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


def test_the_map_gives_peak_and_hot_box_inside_the_tiles_only():
    field = np.zeros((40, 60), np.float32)
    field[2, 3], field[5, 6], field[30, 30] = 2.0, 3.0, 9.0
    field[0, 0] = np.nan
    (region,) = regions_of((0, 0), field=field)
    assert region.peak == 3.0
    assert region.peak_place == (5, 6)
    assert region.hot == (2, 3, 6, 7)
    (cold,) = regions_of((0, 0), field=field, scale=5.0)
    assert cold.hot is None
    (dark,) = regions_of((0, 0), field=np.full((40, 60), np.nan, np.float32))
    assert dark.peak is None


@pytest.mark.parametrize("place", [None, Georeference((10.0, 2.0, 500.0, 1.0, -10.0, 900.0), "WKT", 32631)])
def test_geojson_is_a_ring_of_the_corners(place):
    found = regions_of((0, 1))
    collection = geojson(found, place)
    (ring,) = collection["features"][0]["geometry"]["coordinates"]
    corners = [(4, 0), (4, 8), (12, 8), (12, 0), (4, 0)]
    if place is None:
        assert ring == [[float(x), float(y)] for x, y in corners]
        assert "pixels" in collection["coordinates"]
    else:
        assert ring == [[10 * x + 2 * y + 500, x - 10 * y + 900] for x, y in corners]
        assert collection["crs"]["properties"]["name"] == "urn:ogc:def:crs:EPSG::32631"
    assert len(found[0].row(place)) == len(COLUMNS)
    middle = (8.0, 4.0) if place is None else place(8, 4)
    assert tuple(map(float, found[0].row(place)[-2:])) == middle


def test_a_crs_without_a_number_is_written_out():
    assert geojson([], Georeference((1, 0, 0, 0, 1, 0), "LOCAL"))["crs"]["properties"]["name"] == "LOCAL"
