"""One map from many: constants stay, seams do not show, memory and order of rows do not matter."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gepc.scenes.stitching import Stitcher, weights
from gepc.scenes.tiling import Grid


def stitch(grid, field_of, skip=()):
    stitcher, lines = Stitcher(grid), []
    for row in range(len(grid.tops)):
        for tile in grid.tiles([row], range(len(grid.lefts))):
            if (tile.row, tile.column) not in skip:
                stitcher.add(tile.left, field_of(tile))
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
                stitcher.add(left, maps[row, column])
        lines = grid.lines_done_after(row)
        assert np.array_equal(whole.advance(lines), broken.advance(lines))
