"""Tiles cover a scene and nothing else; missing pixels; one map from the maps of the tiles."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gepc.core.errors import InputError, OptionError
from gepc.images.preprocessing import window_starts
from gepc.scenes.tiling import Grid, Stitcher, TileImages, fill, weights

grids = st.tuples(st.integers(1, 9), st.integers(0, 40), st.data())


@given(grids)
def test_tiles_cover_every_pixel_and_end_with_the_scene(case):
    tile, more, data = case
    length, stride = tile + more, data.draw(st.integers(1, tile))
    found = window_starts(length, tile, stride)
    assert found[0] == 0
    assert found[-1] == length - tile
    assert all(0 < b - a <= stride for a, b in pairwise(found))
    assert {pixel for start in found for pixel in range(start, start + tile)} == set(range(length))


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

    images = TileImages(grid.tiles(range(1)), cut, max_missing=1 / 16)
    records = [images[index] for index in range(3)]
    assert [record.pixels is None for record in records] == [False, False, True]
    assert records[2].error == "left out: 50% no-data"
    assert [images.missing(index) for index in range(3)] == [0.0, 1 / 16, 0.5]
    assert images.left_out == {2}


def test_a_tile_that_cannot_be_read_is_not_left_out_whatever_its_error_says():
    def cut(tile):
        raise InputError("left out: damaged")

    images = TileImages(Grid.over(4, 4, (4, 4), (4, 4)).tiles(range(1)), cut, max_missing=0.1)
    assert images[0].error == "left out: damaged"
    assert images.left_out == set()
    assert np.isnan(images.missing(0))


def stitch(grid, field_of, skip=(), missing=()):
    stitcher, lines = Stitcher(grid), []
    there = np.ones((grid.height, grid.width), dtype=bool)
    for pixel in missing:
        there[pixel] = False
    for row in range(len(grid.tops)):
        for tile in grid.tiles([row]):
            if (tile.row, tile.column) not in skip:
                part = (slice(tile.top, tile.top + grid.tile[0]), slice(tile.left, tile.left + grid.tile[1]))
                stitcher.add(tile.left, field_of(tile), there[part])
        lines.append(stitcher.advance(grid.lines_done_after(row)))
    return np.concatenate(lines)


@given(
    st.integers(1, 12),
    st.integers(0, 30),
    st.integers(0, 30),
    st.data(),
    st.floats(-1e6, 1e6, width=32, allow_nan=False),
)
def test_a_constant_is_exactly_that_constant_whatever_the_overlap(tile, more_lines, more_columns, data, value):
    stride = (data.draw(st.integers(1, tile)), data.draw(st.integers(1, tile)))
    grid = Grid.over(tile + more_lines, tile + more_columns, (tile, tile), stride)
    found = stitch(grid, lambda _: np.full((tile, tile), value, np.float32))
    assert found.dtype == np.float32
    assert (found == np.float32(value)).all()


def test_any_field_cut_into_tiles_is_put_together_again():
    grid = Grid.over(37, 53, (12, 16), (5, 7))
    field = np.random.default_rng(0).standard_normal((37, 53)).astype(np.float32)
    found = stitch(grid, lambda t: field[t.top : t.top + 12, t.left : t.left + 16])
    np.testing.assert_allclose(found, field, rtol=3e-7)


@pytest.mark.parametrize("overlap", [8, 16, 24])
def test_blending_has_no_step_where_a_tile_begins(overlap):
    """Neighbouring tiles that say 0 and 1: no pixel-to-pixel step above pi/overlap, where a hard seam would be 1."""
    grid = Grid.over(32, 64 - overlap, (32, 32), (32 - overlap, 32 - overlap))
    assert len(grid.lefts) == 2
    found = stitch(grid, lambda t: np.full((32, 32), float(t.column), np.float32))
    steps = np.diff(found, axis=1)
    assert found[0, 0] == 0.0
    assert found[0, -1] == 1.0
    assert (steps >= 0).all()
    assert steps.max() <= np.pi / overlap


def test_weights_are_a_partition_of_unity_at_half_a_tile():
    w = weights(16)
    assert (w > 0).all()
    np.testing.assert_allclose(w[:8] + w[8:], 1.0, atol=1e-15)
    np.testing.assert_allclose(w, w[::-1], atol=1e-15)


def test_pixels_without_a_tile_are_nan_and_the_others_do_not_notice():
    grid = Grid.over(16, 24, (8, 8), (4, 4))
    skip = {(row, column) for row in range(2) for column in range(2)}
    found = stitch(grid, lambda _: np.full((8, 8), 0.7, np.float32), skip)
    assert np.isnan(found[:8, :8]).all()
    assert (found[~np.isnan(found)] == np.float32(0.7)).all()
    assert np.isnan(found).sum() == 64


def test_missing_pixels_are_nan_and_the_others_do_not_notice():
    grid = Grid.over(16, 24, (8, 8), (4, 4))
    field = np.random.default_rng(2).standard_normal((16, 24)).astype(np.float32)

    def field_of(tile):
        return field[tile.top : tile.top + 8, tile.left : tile.left + 8]

    whole, holed = stitch(grid, field_of), stitch(grid, field_of, missing=[(0, 0), (7, 9), (15, 23)])
    assert np.argwhere(np.isnan(holed)).tolist() == [[0, 0], [7, 9], [15, 23]]
    known = ~np.isnan(holed)
    assert np.array_equal(holed[known], whole[known])


def test_a_stitcher_taken_up_from_its_state_goes_on_to_the_same_bits():
    grid = Grid.over(30, 20, (8, 8), (3, 3))
    maps = np.random.default_rng(1).random((len(grid.tops), len(grid.lefts), 8, 8)).astype(np.float32)
    whole, broken = Stitcher(grid), Stitcher(grid)
    for row in range(len(grid.tops)):
        if row == 4:
            state = {name: array.copy() for name, array in broken.state().items()}
            broken = Stitcher(grid)
            broken.restore(state)
        for stitcher in (whole, broken):
            for column, left in enumerate(grid.lefts):
                stitcher.add(left, maps[row, column], np.ones((8, 8), dtype=bool))
        lines = grid.lines_done_after(row)
        assert np.array_equal(whole.advance(lines), broken.advance(lines))
