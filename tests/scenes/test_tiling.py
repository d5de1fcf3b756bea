"""Tiles cover a scene and nothing else; what is missing in a tile."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gepc.core.errors import InputError, OptionError
from gepc.scenes.tiling import Grid, TileImages, fill, starts

grids = st.tuples(st.integers(1, 9), st.integers(0, 40), st.data())


@given(grids)
def test_tiles_cover_every_pixel_and_end_with_the_scene(case):
    tile, more, data = case
    length, stride = tile + more, data.draw(st.integers(1, tile))
    found = starts(length, tile, stride)
    assert found[0] == 0
    assert found[-1] == length - tile
    assert all(0 < b - a <= stride for a, b in pairwise(found))
    assert {pixel for start in found for pixel in range(start, start + tile)} == set(range(length))


@given(grids, st.integers(1, 50), st.integers(1, 400))
def test_blocks_and_segments_are_a_partition_that_respects_the_budget(case, tiles, pixels):
    tile, more, data = case
    stride = data.draw(st.integers(1, tile))
    grid = Grid.over(tile + more, tile + 2 * more, (tile, tile), (stride, stride))
    first = data.draw(st.integers(0, len(grid.tops)))
    blocks, segments = grid.blocks(first, tiles, pixels), grid.segments(pixels)
    assert [row for block in blocks for row in block] == list(range(first, len(grid.tops)))
    assert [column for segment in segments for column in segment] == list(range(len(grid.lefts)))
    for block in blocks:
        lines = grid.tops[block[-1]] + tile - grid.tops[block[0]]
        assert len(block) == 1 or lines * grid.width <= pixels
    for segment in segments:
        wide = grid.lefts[segment[-1]] + tile - grid.lefts[segment[0]]
        assert len(segment) == 1 or wide * tile <= pixels


def test_lines_done_add_up_to_the_scene():
    grid = Grid.over(23, 9, (8, 8), (3, 3))
    assert sum(grid.lines_done_after(row) for row in range(len(grid.tops))) == 23


def test_a_small_scene_and_a_stride_with_gaps_are_refused():
    with pytest.raises(InputError, match="7x20 pixels, less than one tile of 8x8"):
        Grid.over(7, 20, (8, 8), (4, 4))
    with pytest.raises(OptionError, match="leaves gaps"):
        Grid.over(20, 20, (8, 8), (8, 9))
    with pytest.raises(OptionError, match="at least 1"):
        Grid.over(20, 20, (8, 8), (0, 4))


def test_missing_pixels_get_the_nearest_value_of_their_tile():
    pixels = np.arange(16.0).reshape(4, 4)
    valid = np.ones((4, 4), dtype=bool)
    valid[0] = False
    assert fill(pixels, np.ones_like(valid)) is pixels
    assert np.array_equal(fill(pixels, valid)[0], pixels[1])
    assert np.array_equal(fill(np.stack([pixels] * 3, 2), valid)[0, :, 2], pixels[1])


def test_a_tile_with_too_much_missing_is_a_record_with_a_reason():
    grid = Grid.over(4, 12, (4, 4), (4, 4))
    pixels, valid = np.ones((4, 12)), np.ones((4, 12), dtype=bool)
    valid[0, 4], valid[:2, 8:] = False, False

    def cut(tile):
        return pixels[:, tile.left : tile.left + 4], valid[:, tile.left : tile.left + 4]

    images = TileImages(grid.tiles(range(1), range(3)), cut, max_missing=1 / 16)
    records = [images[index] for index in range(3)]
    assert [record.pixels is None for record in records] == [False, False, True]
    assert records[2].error == "left out: 50% no-data"
    assert images.missing.tolist() == [0.0, 1 / 16, 0.5]
