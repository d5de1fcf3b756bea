"""The demonstration takes the photographs and patches it says it takes, and reports what the detector says."""

from __future__ import annotations

import socket
from dataclasses import replace

import numpy as np
import pytest
from pages import ReadPage, outside_references
from toys import toy_backbone

from gepc.lab.report import demo
from gepc.lab.report.beach import THINGS, Lost, beach, lose
from gepc.lab.report.demo import FULL, INSIDE, OUTSIDE, SIDE, TEST_ROWS, Amounts
from gepc.maps.regions import Region

SMALL = Amounts(128, 384, 3, fit_patches=12, held_out_patches=7, other_patches=2, calibration_patches=19)


@pytest.fixture(scope="module")
def finished() -> tuple[demo.Demo, list[int], list[int]]:
    """A small run on a toy network: the result, and the photographs and patches told along the way."""
    photographs: list[int] = []
    patches: list[int] = []
    return demo.run(toy_backbone(image_size=None), SMALL, photographs.append, patches.append), photographs, patches


# --- the beach -------------------------------------------------------------------------------------------------------


def test_a_seed_gives_one_photograph_and_another_seed_another():
    first, again, other = beach(0, 64, 96), beach(0, 64, 96), beach(1, 64, 96)
    assert first.shape == (64, 96, 3)
    assert first.dtype == np.uint8
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("seed", range(5))
def test_lost_things_lie_inside_and_apart(seed):
    lost = lose(THINGS, seed, 128, 384)
    assert [item.thing for item in lost] == list(THINGS)
    for item in lost:
        reach = item.thing.reach
        assert reach <= item.line < 128 - reach
        assert reach <= item.column < 384 - reach
        assert item.touches(at(item))
        assert not any(item.touches(at(other)) for other in lost if other is not item)


def at(item: Lost) -> Region:
    return Region(1, 9.0, 0.05, (item.line, item.column, item.line + 1, item.column + 1))


def test_a_photograph_changes_at_the_lost_thing_alone():
    (item,) = lose(THINGS[2:3], 3, 200, 200)
    changed = (beach(3, 200, 200) != beach(3, 200, 200, [item])).any(axis=2)
    lines, columns = np.nonzero(changed)
    reach = item.thing.reach + 36  # light and blur reach as far as their filters
    assert changed.any()
    assert abs(lines - item.line).max() <= reach
    assert abs(columns - item.column).max() <= reach


def test_finds_are_the_things_that_a_box_touches(finished):
    search = finished[0].search
    first, *others = search.lost
    shown = replace(search, regions=(at(first), Region(2, 8.0, 0.05, (0, 0, 1, 1))))
    assert shown.finds[0] == (first, shown.regions[0])
    assert [region for _, region in shown.finds[1:]] == [None] * len(others)
    assert shown.found == shown.elsewhere == 1
    rows = demo.things_table(shown).rows
    assert [row[1] for row in rows] == ["box 1", *["missed"] * len(others)]


def test_boxes_and_map_are_drawn_on_the_photograph(finished):
    search = finished[0].search
    one = replace(search, regions=(Region(1, 9.0, 0.05, (40, 40, 60, 60)),))
    before, after = search.photograph, np.asarray(one.boxed)
    assert (before[40:60, 40:60] == after[40:60, 40:60]).all()
    assert (before[32, 40:60] != after[32, 40:60]).any(axis=-1).all()
    assert search.mapped.size == one.boxed.size


def test_alarms_on_new_photographs_are_the_detectors(finished):
    search = finished[0].search
    seeds = range(27, 27 + SMALL.new_photographs)
    new = np.stack([beach(seed, SMALL.height, SMALL.width) for seed in seeds])
    assert search.usual == len(new)
    assert search.false_alarms == search.detector.predict(new, alpha=demo.ALPHA).sum()
    assert search.p_value == search.detector.p_value(search.photograph[None])[0]


# --- textures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("photograph", [INSIDE, *OUTSIDE])
def test_photographs_need_no_download(photograph, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a download was tried")

    monkeypatch.setattr(socket, "socket", refuse)
    pixels = demo.load_photograph(photograph)
    assert pixels.dtype == np.uint8
    assert pixels.ndim == 3


def test_patches_are_cut_from_a_grid_without_overlap():
    pixels, patches = demo.load_photograph("moon"), demo.patches("moon")
    corners = [(top, left) for top in range(0, 512, SIDE) for left in range(0, 512, SIDE)]
    cut = {pixels[top : top + SIDE, left : left + SIDE].tobytes() for top, left in corners}
    assert len(patches) == len(corners)
    assert {patch.tobytes() for patch in patches} == cut


def test_what_is_fitted_on_lies_a_patch_apart_from_what_is_scored():
    rows = demo.load_photograph(INSIDE).shape[0] // SIDE
    fitted, scored = (range(*rows_of.indices(rows)) for rows_of in (demo.FIT_ROWS, TEST_ROWS))
    assert min(scored) - max(fitted) > 1
    assert max(scored) == rows - 1


def test_a_photograph_has_patches_enough():
    assert len(demo.patches(INSIDE, demo.FIT_ROWS)) >= FULL.fit_patches
    assert len(demo.patches(INSIDE, TEST_ROWS)) >= FULL.calibration_patches + FULL.held_out_patches
    assert all(len(demo.patches(other)) >= FULL.other_patches for other in OUTSIDE)


def test_scores_and_alarms_are_the_detectors(finished):
    textures = finished[0].textures
    for other in OUTSIDE:
        patches = demo.patches(other)[: SMALL.other_patches]
        assert np.allclose(textures.scores[other], textures.detector.score(patches))
        assert textures.alarms[other] == textures.detector.predict(patches, alpha=demo.ALPHA).sum()


# --- the run ---------------------------------------------------------------------------------------------------------


def test_every_image_is_told_once(finished):
    _, photographs, patches = finished
    assert (sum(photographs), sum(patches)) == SMALL.images


def test_the_report_holds_the_results_and_the_limits(finished):
    result = finished[0]
    page = ReadPage(demo.render_demo(result, "gepc demo --out demo"))
    text = " ".join(page.text)
    assert outside_references(page) == []
    assert page.unclosed == []
    assert len(page.all("img")) == 3 + len(OUTSIDE)
    for table in (demo.things_table(result.search), demo.textures_table(result.textures)):
        for row in table.rows:
            for cell in row:
                assert cell in text
    guarantee = result.search.detector.guarantee(demo.ALPHA)
    for wanted in (
        f"{guarantee.low:.3f} and {guarantee.high:.3f}",
        f"{result.passes:,} counted",
        "gepc demo --out demo",
        "A quick run.",
        "torch ",
    ):
        assert wanted in text
