"""Figures show the numbers they were given, on the scale they were given."""

from __future__ import annotations

import html
import io

import matplotlib
import numpy as np
import pytest

from gepc.core.errors import InputError
from gepc.detector import plots
from gepc.detector.plots import histogram, score_limits

RNG = np.random.default_rng(0)
INSIDE = RNG.normal(-5.0, 0.4, 64)
OUTSIDE = np.exp(RNG.normal(3.0, 2.0, 60)) - 5.0
PATCHES = list(RNG.integers(0, 256, (9, 32, 32, 1), dtype=np.uint8))


def _axes(figure):
    return figure.axes[0]


def _saved(figure, kind: str = "svg") -> bytes:
    target = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(target, format=kind)
    return target.getvalue()


def test_a_histogram_holds_every_score_and_the_threshold():
    figure = histogram(INSIDE, OUTSIDE, -3.0, ("gravel", "moon"))
    axes = _axes(figure)
    shares = [patch.get_data().values for patch in axes.patches]
    assert [share.sum() for share in shares] == pytest.approx([1.0] * len(shares))
    assert [line.get_xdata()[0] for line in axes.lines] == [-3.0]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["gravel", "moon", "threshold"]


def test_histograms_with_the_same_limits_share_their_axis():
    limits = score_limits([INSIDE, OUTSIDE, [1e6]])
    assert limits[0] < INSIDE.min()
    assert limits[1] > 1e6
    first, second = (_axes(histogram(INSIDE, scores, limits=limits)) for scores in (OUTSIDE, [1e6]))
    assert first.get_xlim() == second.get_xlim() == pytest.approx(limits)
    assert first.patches[0].get_data().edges == pytest.approx(second.patches[0].get_data().edges)


@pytest.mark.parametrize("outside", [[3.0], [-5.0, -5.0], [1e9, -1e9], np.linspace(-6, -4, 500)])
@pytest.mark.parametrize("inside", [[-5.0], [0.0, 0.0, 0.0], INSIDE])
def test_any_finite_scores_can_be_drawn(inside, outside):
    assert _saved(histogram(inside, outside, 0.5)).startswith(b"<?xml")


@pytest.mark.parametrize("bad", [[], [1.0, np.nan], [np.inf]])
def test_scores_that_cannot_be_drawn_are_refused(bad):
    with pytest.raises(InputError, match="OOD scores are empty or not all finite"):
        histogram(INSIDE, bad)


@pytest.mark.parametrize("limits", [(-6.0, 5000.0), (-0.2, 0.1), (3.0, 4.0), (-1e6, 1e6)])
def test_ticks_are_round_inside_the_limits_and_apart(limits):
    ticks = plots._ticks(np.array(limits), np.arcsinh, np.sinh)
    assert all(limits[0] <= tick <= limits[1] for tick in ticks)
    assert len(ticks) == 4
    begin, end = np.arcsinh(limits)
    places = (np.arcsinh(ticks) - begin) / (end - begin)
    assert np.diff(places).min() >= 0.1


def test_nothing_to_show_is_refused():
    with pytest.raises(InputError, match="no images"):
        plots.maps([], [], [], 1.0)


def test_maps_have_one_scale_whatever_else_is_shown():
    weak, strong = np.full((32, 32), 0.01, np.float32), np.full((32, 32), 5.0, np.float32)
    alone = plots.maps(PATCHES[:1], [weak], ["weak"], 0.04)
    beside = plots.maps(PATCHES[:2], [weak, strong], ["weak", "strong"], 0.04)
    heat = [alone.axes[1].images[0], beside.axes[2].images[0], beside.axes[3].images[0]]
    assert {image.get_clim() for image in heat} == {(0.0, 0.04)}
    assert heat[2].to_rgba(5.0) == pytest.approx(plots._heat()(1.0))
    assert [text.get_text() for text in beside.axes[-1].get_xticklabels()] == ["0", "0.02", "≥ 0.04"]


def test_the_three_rows_are_image_map_and_overlay():
    field = RNG.random((32, 32)).astype(np.float32)
    *rows, _ = plots.maps(PATCHES[:1], [field], ["a"], 1.0).axes
    assert [axes.get_ylabel() for axes in rows] == ["image", "map", "overlay"]
    assert rows[0].get_title() == "a"
    image, heat, overlay = (axes.images[0].get_array() for axes in rows)
    assert np.allclose(image * 255.0, np.repeat(PATCHES[0], 3, axis=2))
    assert np.array_equal(heat, field)
    assert 0.0 <= overlay.min() < overlay.max() <= 1.0


@pytest.mark.parametrize("shape", [(8, 8), (8, 8, 1), (8, 8, 3), (8, 8, 4)])
def test_grey_and_colour_become_pictures(shape):
    pixels = RNG.integers(0, 256, shape, dtype=np.uint8)
    picture = plots.picture(pixels)
    assert picture.shape == (8, 8, 3)
    assert np.allclose(picture[..., 0] * 255.0, pixels if len(shape) == 2 else pixels[..., 0])


@pytest.mark.parametrize("name", ["_hidden", "a $5 and $6", "$\\oops", "<b>&"])
def test_names_are_shown_as_they_are(name):
    shown = histogram(INSIDE, OUTSIDE, names=("gravel", name))
    for figure in (shown, plots.maps(PATCHES[:1], [PATCHES[0][..., 0]], [name], 1.0)):
        text = html.unescape(_saved(figure).decode())
        assert name in text


@pytest.mark.parametrize("kind", ["png", "pdf", "svg"])
def test_figures_can_be_saved_as_files(kind):
    assert len(_saved(histogram(INSIDE, OUTSIDE), kind)) > 1000
