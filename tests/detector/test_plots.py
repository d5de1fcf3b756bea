"""The plot of one's own scores shows every image once, and alarms in another colour."""

import numpy as np
import pytest
from toys import pictures, toy_detector

from gepc.core.errors import InputError
from gepc.detector.plots import COLOURS, plot_results

SCORES, P_VALUES = [0.1, 0.2, np.nan, 9.0], [0.8, 0.6, np.nan, 0.01]
ALARMS = [False, False, False, True]


def test_images_without_a_score_are_left_out_and_alarms_stand_out():
    figure = plot_results(SCORES, P_VALUES, ALARMS)
    usual, alarms = figure.axes[1].lines
    assert (list(usual.get_xdata()), list(usual.get_ydata())) == ([1, 2], [0.8, 0.6])
    assert (list(alarms.get_xdata()), list(alarms.get_ydata())) == ([4], [0.01])
    assert (usual.get_color(), alarms.get_color()) == COLOURS
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["no alarm (2)", "alarm (1)"]


@pytest.mark.parametrize("alarm", [False, True])
def test_one_kind_alone_can_be_drawn(alarm, tmp_path):
    plot_results([1.0, 2.0], [0.5, 0.1], [alarm, alarm]).savefig(tmp_path / "figure.png")


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(InputError, match="2 scores, 1 p-values and 2 alarms"):
        plot_results([1.0, 2.0], [0.5], [True, False])
    with pytest.raises(InputError, match="given scores are empty"):
        plot_results([np.nan], [np.nan], [False])


def test_a_detector_plots_the_results_of_images():
    detector = toy_detector().fit(pictures(30))
    seen = []
    images = pictures(6, seed=3)
    figure = detector.plot(images, alpha=0.2, on_progress=seen.append)
    points = np.concatenate([line.get_ydata() for line in figure.axes[1].lines])
    assert sorted(points) == pytest.approx(sorted(detector.p_value(images)))
    assert sum(seen) == 6
