"""Calibrated maps: no border glow, units of standard deviations, and a family-wise error rate that holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from toys import LEVELS, as_uint8, pictures, toy_backbone, toy_detector, toy_network

import gepc
from gepc.conformal.p_values import CalibrationScores, images_needed
from gepc.core.errors import InputError, OptionError
from gepc.maps.statistics import BANDS, TOGETHER, MapStatistics
from gepc.methods.base import MapModel, MapParts

ONE = np.ones(1)


def glowing(images: Sequence[npt.NDArray[np.float32]]) -> MapParts:
    """Exponential noise with a border that is ten times as bright, a function of the image's first pixel."""
    fields = []
    for image in images:
        rng = np.random.default_rng(abs(int(image.flat[0] * 1e6)))
        field = rng.exponential(size=image.shape[1:]).astype(np.float32)
        field[[0, -1]] *= 10.0
        field[:, [0, -1]] *= 10.0
        fields.append(field)
    return {"residual": np.stack(fields)[:, None]}


def blanks(count: int, size: tuple[int, int], seed: int = 0) -> list[npt.NDArray[np.float32]]:
    rng = np.random.default_rng(seed)
    return [rng.random((1, *size)).astype(np.float32) for _ in range(count)]


def test_the_border_does_not_glow_and_sizes_may_differ() -> None:
    """Outside two pixels and inside, the excess over the usual has the same mean, also at a size never seen."""
    fitting = [*blanks(20, (24, 24)), *blanks(20, (32, 20), 1)]
    found = MapStatistics.fit(glowing, fitting, blanks(30, (24, 24), 2), ONE, model=MapModel(window=1))
    for size in ((24, 24), (40, 28)):
        z = found.z(glowing(blanks(60, size, 3)), size)["residual"]
        inner = np.zeros(size, dtype=bool)
        inner[2:-2, 2:-2] = True
        excess = np.maximum(z, 0.0)
        assert excess[:, ~inner].mean() == pytest.approx(excess[:, inner].mean(), rel=0.1)
        assert abs(z.mean()) < 0.1
        assert z.std() == pytest.approx(1.0, abs=0.1)
    raw = glowing(blanks(60, (24, 24), 3))["residual"][:, 0]
    assert raw[:, 0].mean() > 5 * raw[:, 5:-5, 5:-5].mean()


def test_the_share_of_usual_images_with_any_alarm_is_at_most_alpha() -> None:
    """p <= alpha for any pixel happens to an ID image with probability alpha at most, on average over calibrations."""
    alarms = []
    for seed in range(20):
        images = [blanks(count, (12, 12), 100 * seed + place) for place, count in enumerate((8, 9, 20))]
        found = MapStatistics.fit(glowing, images[0], images[1], ONE)
        z = found.z(glowing(images[2]), (12, 12))[TOGETHER]
        alarms += [bool((found.p_values(field) <= 0.1).any()) for field in z]
        limit = found.limit(alpha=0.1)
        np.testing.assert_array_equal(z > limit, found.p_values(z) <= 0.1 + 1e-12)
        assert found.limit(alpha=0.01) == found.maxima[0].max()  # nine images cannot hold less than a tenth
    assert images_needed(0.1) == 9
    assert 0.03 < np.mean(alarms) <= 0.1 + 2 * (0.09 / len(alarms)) ** 0.5


def test_an_image_that_is_unusual_as_a_whole_glows_as_a_whole() -> None:
    found = MapStatistics.fit(glowing, blanks(30, (16, 16)), blanks(20, (16, 16), 1), ONE)
    parts = glowing(blanks(1, (16, 16), 2))
    usual = found.z(parts, (16, 16))[TOGETHER]
    bright = found.z({"residual": 100.0 * parts["residual"]}, (16, 16))[TOGETHER]
    lift = bright - usual
    assert lift.min() > 5.0
    np.testing.assert_allclose(lift, lift.mean(), rtol=1e-3)


def test_a_target_does_not_lift_the_rest_of_its_image() -> None:
    """Clutter that is a little louder as a whole is no target, however constant its median is otherwise."""

    def targets(images: Sequence[npt.NDArray[np.float32]]) -> MapParts:
        return {"target": glowing(images)["residual"]}

    found = MapStatistics.fit(targets, blanks(30, (16, 16)), blanks(20, (16, 16), 1), ONE)
    parts = targets(blanks(1, (16, 16), 2))
    usual, loud = (found.z({"target": gain * parts["target"]}, (16, 16))[TOGETHER] for gain in (1.0, 100.0))
    np.testing.assert_allclose(loud, usual, atol=1e-3)


def test_statistics_by_position_of_version_0_2_are_restored() -> None:
    """At each position the stored mean and deviation count, and a grid coarser than the map is interpolated."""
    found = MapStatistics.fit(glowing, blanks(20, (24, 24)), blanks(20, (24, 24), 1), ONE, model=MapModel(window=1))
    state, shown = found.state(), glowing(blanks(2, (24, 24), 2))
    free = found.z(shown, (24, 24))["residual"]
    for side in (24, 12):
        grid = np.full((2, side, side), found.mean[1, BANDS])
        grid[1, side // 2, side // 2] -= 3.0 * found.std[1, BANDS]
        by_position = {**state, "mean": grid, "std": np.full_like(grid, found.std[1, BANDS])}
        restored = MapStatistics.restore(("residual",), ONE, by_position, MapModel(window=1))
        z = restored.z(shown, (24, 24))["residual"]
        middle = 24 // 2
        assert (z[:, middle, middle] > free[:, middle, middle] + (2.9 if side == 24 else 1.0)).all()
        np.testing.assert_allclose(z[:, 9, 9], free[:, 9, 9], atol=1e-4)


def test_small_images_take_the_statistics_of_the_nearest_band() -> None:
    found = MapStatistics.fit(glowing, blanks(10, (6, 6)), blanks(10, (6, 6), 1), ONE)
    assert found.mean.shape == (2, BANDS + 1)
    np.testing.assert_array_equal(found.mean[:, 2:], found.mean[:, [2]].repeat(BANDS - 1, axis=1))


def test_activations_point_at_what_the_layers_have_not_seen(tmp_path: Path) -> None:
    """With layers the map has an activation part, small on disk, the same after loading."""
    detector = gepc.create_detector(toy_network(image_size=16), "gepc+", levels=LEVELS[:1])
    detector.fit(pictures(40, size=16))
    assert detector.fitted.maps is not None
    assert detector.fitted.maps.names[0] == "sum"
    assert set(detector.fitted.maps.names) == {"sum", "residual", "inner", "error", "activations"}
    images = pictures(4, size=16, seed=1)
    images[:, :, 5:9, 6:10] = 1.0
    _, fields, _ = detector.fitted.evaluate(list(images), maps=True)
    assert fields is not None
    for field in fields["activations"]:
        inside = np.zeros((16, 16), dtype=bool)
        inside[4:10, 5:11] = True
        assert field[inside].mean() > field[~inside].mean() + 0.5
    detector.save(tmp_path / "det")
    assert sum(path.stat().st_size for path in (tmp_path / "det").iterdir()) < 5_000_000
    again = gepc.load_detector(tmp_path / "det", detector.backbone)
    np.testing.assert_array_equal(again.score_map(images), detector.score_map(images))
    assert again.map_limit() == detector.map_limit()


def test_a_detector_may_score_by_its_map() -> None:
    """The score is the mean of the highest 0.3 % of the map, in small maps its largest value."""
    detector = toy_detector(score_from="map").fit(pictures(40))
    assert detector.fitted.maps is not None
    z = np.arange(2 * 1024, dtype=np.float32).reshape(2, 32, 32)
    np.testing.assert_array_equal(detector.fitted.maps.map_scores({TOGETHER: z}), [1022.0, 2046.0])
    images = pictures(5, seed=1)
    maps = detector.score_map(images)
    np.testing.assert_allclose(detector.score(images), maps.max((1, 2)), rtol=1e-5)
    assert detector.fitted.maps is not None
    np.testing.assert_allclose(detector.p_value(images), detector.fitted.maps.p_values(maps).min((1, 2)))
    for options in ({"maps": "raw"}, {"features": ("d",)}):
        with pytest.raises(OptionError, match="score_from='map' needs"):
            toy_detector(score_from="map", **options)
    raw = toy_detector(maps="raw").fit(pictures(40))
    assert raw.fitted.maps is None
    assert raw.map_limit() == raw.map_scale_
    np.testing.assert_array_equal(raw.score_map(images), raw.score_map(images, raw=True))


def test_images_that_keep_their_size() -> None:
    """Fitted on images of several sizes; a score does not depend on its neighbours, a map has the image's size."""
    backbone = toy_backbone(image_size=None)
    backbone.size_multiple = 2
    images = [as_uint8(pictures(1, (8 + place % 3, 12), seed=place))[0] for place in range(30)]
    detector = gepc.create_detector(backbone, "gepc+", "inspect", levels=LEVELS[:1], resize="native").fit(images)
    together = detector.score(images[:6])
    np.testing.assert_allclose(together, [detector.score([image])[0] for image in images[:6]], rtol=1e-4)
    assert detector.score_map(images[1:2]).shape == (1, 8, 12)
    assert detector.score_map(images[2:3]).shape == (1, 10, 12)
    with pytest.raises(OptionError, match="several sizes"):
        detector.score_map(images[:3])
    with pytest.raises(OptionError, match="leave rot90 out"):
        gepc.create_detector(backbone, "gepc+", resize="native")
    with pytest.raises(OptionError, match="leave `size` out"):
        gepc.create_detector(toy_backbone(), "gepc+", "inspect")


def test_images_at_half_their_resolution() -> None:
    """The network sees the largest centred window of which half is a multiple of what it takes."""
    backbone = toy_backbone(image_size=None)
    backbone.size_multiple = 2
    images = [as_uint8(pictures(1, (16 + place % 4, 26), seed=place))[0] for place in range(30)]
    detector = gepc.create_detector(backbone, "gepc+", "inspect", levels=LEVELS[:1]).fit(images)
    assert detector.fitted.preprocessing.window((19, 26)) == (1, 1, 16, 24)
    assert detector.score_map(images[3:4]).shape == (1, 8, 12)
    resized = gepc.Preprocessing(size=(8, 12), channels=backbone.channels)(images[3][1:17, 1:25])
    np.testing.assert_array_equal(detector.fitted.preprocessing(images[3]), resized)
    with pytest.raises(InputError, match="smaller than 4 pixels"):
        detector.fitted.preprocessing(images[0][:3])


def test_maps_and_scores_lose_the_same_number_of_images_by_trimming() -> None:
    """0.29 of 100 images are 29, whatever the rounding of the product."""
    scores = np.arange(100.0)
    statistics = MapStatistics((), ONE, *(np.empty(0),) * 3, np.stack([scores]), scores)
    assert len(statistics.trim(0.29).scores) == len(CalibrationScores.of(scores, None).trim(0.29).scores) == 71
