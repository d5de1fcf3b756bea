"""A map is the raw score spread over the pixels: its mean is the score, its place is that of the disagreement."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageColor, ImageDraw
from toys import LEVELS, as_uint8, pictures, toy_backbone, toy_detector

import gepc
from gepc.backbones.schedule import cosine_alphas_cumprod
from gepc.core.errors import OptionError
from gepc.core.palette import LIGHT
from gepc.detector.detector import Detector
from gepc.detector.fitted import FittedDetector
from gepc.images.sources import open_images
from gepc.maps.drawing import FRAME, colour_bar, drawn, overlay, readable_range, resized
from gepc.maps.regions import Region
from gepc.methods.extraction import ImageSample
from gepc.methods.groups import Group
from gepc.methods.pooling import combine
from gepc.runs.maps import MapOptions, write_maps

ID = pictures(24)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mc_samples": 3},
        {"group_samples": 2},
        {"level_samples": 1},
        {"mc_samples": 2, "group_samples": 3, "level_samples": 2, "keep": 3},
        {"weights": "uniform", "keep": None, "group": "d4"},
    ],
    ids=str,
)
def test_the_spatial_mean_of_a_map_is_the_raw_score(options: dict[str, object]) -> None:
    """With mean pooling, for any number of draws and any random subset."""
    detector = toy_detector(pool="mean", calibration="raw", **options).fit(ID)
    images = pictures(6, seed=1)
    maps = detector.score_map(images, raw=True)
    assert maps.shape == (6, 8, 8)
    assert (maps >= 0).all()
    np.testing.assert_allclose(maps.mean((1, 2)), detector.score(images), rtol=1e-5)


def test_a_map_shows_where_the_network_disagrees_with_itself() -> None:
    """eps(x) = x + bump: r_g = P_g^-1 bump - bump whatever x, so the map is known pixel by pixel."""
    bump = torch.zeros(1, 3, 8, 8)
    bump[0, :, 1, 2] = torch.tensor([1.0, 2.0, 3.0])
    backbone = gepc.Backbone.from_callable(lambda x, t: x + bump, cosine_alphas_cumprod(1000), 3, 8)
    detector = toy_detector(backbone, pool="mean", levels=LEVELS[:2], keep=1, weights="uniform").fit(ID)
    image = pictures(1, seed=1)
    group = Group.of("paper")
    gaps = torch.stack([(g.inverse(bump) - bump).square().mean(1) for g in group]).mean(0)[0].numpy()
    found = detector.score_map(image, raw=True)[0]
    np.testing.assert_allclose(found / found.sum(), gaps / gaps.sum(), atol=1e-6)
    assert np.unravel_index(found.argmax(), (8, 8)) == (1, 2)


def test_one_image_has_one_map_whatever_the_batch() -> None:
    detector = toy_detector(batch_size=4).fit(ID)
    images = pictures(6, seed=1)
    together = detector.score_map(images)
    alone = np.concatenate([detector.score_map(image[None]) for image in images])
    np.testing.assert_allclose(together, alone, rtol=1e-4, atol=1e-4)
    assert detector.score_map(images[:0]).shape == (0, 8, 8)


def test_the_common_scale_is_the_median_of_the_99th_percentiles() -> None:
    detector = toy_detector().fit(ID)
    quantiles = [np.quantile(field, 0.99) for field in detector.score_map(ID, raw=True)]
    assert detector.map_scale_ == pytest.approx(np.median(quantiles), rel=1e-5)


def test_the_common_scale_does_not_depend_on_the_order_of_the_images() -> None:
    """Also with more images than the sample of maps holds."""
    images = pictures(150, size=5)
    backbone = toy_backbone(image_size=5)
    order = np.random.default_rng(0).permutation(len(images))
    scales = [
        toy_detector(backbone, batch_size=size).fit(part).map_scale_
        for part, size in ((images, 64), (images[order], 7))
    ]
    assert scales[0] == pytest.approx(scales[1], rel=1e-5)


def test_the_sample_of_images_is_bounded_and_does_not_depend_on_their_order() -> None:
    """The smallest keys stay, once each, within the number and the memory allowed."""
    images = [np.full((1, 2, 2), number, dtype=np.float32) for number in range(20)]
    for order in (range(20), reversed(range(20))):
        sample = ImageSample(5)
        for number in [*order, 3]:
            sample.add(bytes([number]), images[number])
        assert list(sample.of([bytes([number]) for number in range(20)], 4)) == [bytes([n]) for n in range(4)]
    small = ImageSample(20, max_bytes=3 * images[0].nbytes)
    for number in range(20):
        small.add(bytes([number]), images[number])
    assert len(small.of([bytes([number]) for number in range(20)], 20)) == 3


def test_levels_are_combined_by_weight_over_those_looked_at() -> None:
    levels = np.zeros((2, 3, 1, 1), dtype=np.float32)
    levels[:, :, 0, 0] = [[1.0, 2.0, 4.0], [1.0, np.nan, 4.0]]
    found = combine(levels, np.array([0.25, 0.5, 0.25]))
    np.testing.assert_allclose(found[:, 0, 0], [2.25, 2.5])


def test_features_without_a_group_have_no_map() -> None:
    """b and d compare nothing; fitting spends no pass on maps for them."""
    detector = toy_detector(features=("d", "b"), keep=1).fit(ID)
    assert detector.map_scale_ is None
    assert detector.backbone.forward_count == len(ID) * len(LEVELS)
    with pytest.raises(OptionError, match="no maps of d, b"):
        detector.score_map(ID[:1])


def test_maps_are_written_beside_their_pictures(tmp_path: Path) -> None:
    """An image that cannot be used is an entry with a reason; the others have their files."""
    detector = toy_detector().fit(ID)
    images = [as_uint8(ID[:1])[0], np.full((8, 8, 3), np.nan), np.zeros((2, 2, 2, 2)), as_uint8(ID[1:2])[0]]
    entries = write_maps(detector.fitted, open_images(images), tmp_path / "maps")
    assert [entry["error"] is None for entry in entries] == [True, False, False, True]
    assert "NaN" in entries[1]["error"]
    written = sorted(path.name for path in (tmp_path / "maps").iterdir())
    pictures_and_maps = [entry[kind] for entry in (entries[0], entries[3]) for kind in ("map", "picture")]
    assert written == sorted([*pictures_and_maps, "regions.csv", "regions.json"])
    stored = np.load(tmp_path / "maps" / entries[3]["map"])
    np.testing.assert_allclose(stored, detector.score_map([images[3]])[0], rtol=1e-5, atol=1e-5)


def test_pictures_share_one_scale_or_have_each_their_own(tmp_path: Path) -> None:
    detector = toy_detector().fit(ID)
    images = open_images([as_uint8(ID[:1])[0], as_uint8(ID[1:2])[0]])
    common = write_maps(detector.fitted, images, tmp_path / "global", MapOptions("global"))
    assert [entry["scale"] for entry in common] == [detector.map_limit()] * 2
    raw = write_maps(detector.fitted, images, tmp_path / "raw", MapOptions("global", raw=True))
    assert [entry["scale"] for entry in raw] == [detector.map_scale_] * 2
    own = write_maps(detector.fitted, images, tmp_path / "image", MapOptions("image"))
    for entry in own:
        field = np.load(tmp_path / "image" / entry["map"])
        assert entry["scale"] == pytest.approx(np.quantile(field, 0.99))
    with pytest.raises(OptionError, match="scale"):
        MapOptions("pixel")


def test_a_fitted_detector_shows_its_parts_apart() -> None:
    """Raw parts add up to their sum on one scale; calibrated ones are those of one call; the score stays."""
    detector = gepc.create_detector(toy_backbone(), "gepc+", levels=LEVELS).fit(ID)
    images = pictures(5, seed=1)
    parts = {part: Detector.of(detector.fitted.showing(part)) for part in ("sum", "residual", "error")}
    raw = {part: shown.score_map(images, raw=True) for part, shown in parts.items()}
    np.testing.assert_allclose(raw["residual"] + raw["error"], raw["sum"], rtol=1e-5)
    _, together, _ = detector.fitted.evaluate(list(images), maps=True)
    assert together is not None
    for part, shown in parts.items():
        assert shown.map_scale_ == detector.map_scale_
        np.testing.assert_allclose(shown.score_map(images), together[part], atol=1e-5)
        np.testing.assert_array_equal(shown.score(images), detector.score(images))
    with pytest.raises(OptionError, match="unknown map_part 'errors'"):
        detector.fitted.showing("errors")
    with pytest.raises(OptionError, match="unknown map_part 'activations'"):  # a plain function has no layers
        detector.fitted.showing("activations")


def test_other_methods_have_no_parts() -> None:
    with pytest.raises(OptionError, match="the maps of 'gepc' have no parts"):
        toy_detector().fit(ID).fitted.showing("residual")


def test_the_colour_bar_has_the_overlays_colours() -> None:
    bar = colour_bar(100, 0.02)
    field = np.array([[0.02], [0.0]], dtype=np.float32)
    ends = (overlay(np.full((2, 1, 3), 0.5), field, 0.02) * 255).round()
    np.testing.assert_array_equal(bar[[0, -1], 5], ends[:, 0])
    assert bar.shape == (100, 64, 3)


@pytest.mark.parametrize(
    ("level", "heat"),
    [(0.1, (0.3, 0.0, 0.01)), (0.4, (0.8, 0.0, 0.04)), (0.5, (1.0, 0.2, 0.05)), (1.0, (1.0, 1.0, 0.1))],
)
def test_the_colours_of_an_overlay(level: float, heat: tuple[float, ...]) -> None:
    """Dark red, red, orange, yellow, over the picture with three quarters of the level as opacity."""
    picture = np.full((1, 1, 3), 0.5)
    found = overlay(picture, np.full((1, 1), 2.0 * level, dtype=np.float32), scale=2.0)
    opacity = 0.75 * level
    np.testing.assert_allclose(found[0, 0], 0.5 * (1 - opacity) + opacity * np.array(heat), atol=1e-6)


def test_the_box_of_a_region_is_drawn_where_the_region_is_with_its_number_in_the_corner() -> None:
    """On the overlay, right of the image, every pixel of it 256 // 16 = 16 pixels large; the line of text is above."""
    picture, field = np.zeros((16, 16, 3), dtype=np.float32), np.zeros((16, 16), dtype=np.float32)
    region = Region(1, 3.0, 0.01, (4, 2, 10, 9))
    plain, boxed = (np.asarray(drawn(picture, field, 1.0, found, "score 3"), dtype=int) for found in ([], [region]))
    text = len(plain) - 16 * 16
    changed = (plain != boxed).any(axis=2)
    inside = changed[text + 64 : text + 160, 256 + 32 : 256 + 144]
    assert changed.sum() == inside.sum()
    assert inside[[0, 1, -2, -1]].all()
    assert inside[:, [0, 1, -2, -1]].all()
    lines, columns = np.nonzero(inside[2:-2, 2:-2])
    assert 0 < len(lines) < 100
    assert max(lines.max(), columns.max()) < 16


def test_what_is_brighter_than_white_is_white() -> None:
    field = np.zeros((8, 8), dtype=np.float32)
    found = np.asarray(drawn(np.full((8, 8, 3), 1.3, dtype=np.float32), field, 1.0, [], ""))
    assert (found[-256:, :512] == 255).all()


def white_with(size: tuple[int, int], *texts: tuple[tuple[int, int], str]) -> np.ndarray:
    """A white picture of (width, height) with texts at (x, y)."""
    canvas = Image.new("RGB", size, "white")
    for place, text in texts:
        ImageDraw.Draw(canvas).text(place, text, fill="black")
    return np.array(canvas)


@pytest.mark.parametrize(("height", "zero_at"), [(100, 86), (29, 15), (28, 14), (20, 14)])
def test_a_colour_bar_is_a_strip_with_its_ends_in_numbers(height: int, zero_at: int) -> None:
    """16 of 64 columns, four from the left; 0 stands at the lower end, below the other number in any case."""
    found = colour_bar(height, 0.02)
    expected = white_with((64, height), ((24, 2), "0.02"), ((24, zero_at), "0"))
    levels = np.linspace(0.02, 0.0, height, dtype=np.float32)[:, None]
    expected[:, 4:20] = (overlay(np.full((height, 1, 3), 0.5), levels, 0.02) * 255).round()
    np.testing.assert_array_equal(found, expected)
    assert colour_bar(height, 0.02, width=80).shape == (height, 80, 3)


@pytest.mark.parametrize(("side", "enlarge"), [(16, 16), (100, 2), (128, 2), (200, 1), (300, 1)])
def test_a_picture_shows_the_image_its_overlay_and_the_bar_under_a_line_of_text(side: int, enlarge: int) -> None:
    """Pixels are enlarged by a whole number, as long as the image has at most 256 lines."""
    rng = np.random.default_rng(side)
    picture, field = rng.random((side, side, 3)).astype(np.float32), rng.random((side, side)).astype(np.float32)
    found = np.asarray(drawn(picture, field, 0.5, [], "score 3"))
    large = side * enlarge
    assert found.shape == (20 + large, 2 * large + 64, 3)
    np.testing.assert_array_equal(found[:20], white_with((2 * large + 64, 20), ((4, 4), "score 3")))
    for place, part in ((0, picture), (large, overlay(picture, field, 0.5))):
        pixels = np.kron(np.rint(255 * part), np.ones((enlarge, enlarge, 1)))
        np.testing.assert_array_equal(found[20:, place : place + large], pixels)
    np.testing.assert_array_equal(found[20:, 2 * large :], colour_bar(large, 0.5))


def test_a_map_is_resized_to_a_height_and_a_width() -> None:
    field = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert resized(field, (2, 3)) is field
    large = resized(field, (4, 9))
    assert (large.shape, large.dtype) == ((4, 9), np.float32)
    assert large[0, 0] == 0.0
    assert large[-1, -1] == 5.0
    np.testing.assert_allclose(large[:, 4], [1.0, 1.75, 3.25, 4.0])  # the middle column, bilinear between the lines


def test_an_entry_has_the_verdict_of_the_detector(tmp_path: Path) -> None:
    detector = toy_detector().fit(ID, calibration_images=pictures(19, seed=2))
    images = as_uint8(pictures(5, seed=1, contrast=1.5))
    seen: list[int] = []
    entries = write_maps(detector.fitted, open_images(list(images)), tmp_path, MapOptions(alpha=0.3), seen.append)
    assert sum(seen) == 5
    for entry, score, p, alarm in zip(
        entries, detector.score(images), detector.p_value(images), detector.predict(images, 0.3), strict=True
    ):
        assert entry["score"] == pytest.approx(score, rel=1e-5)
        assert (entry["p_value"], entry["alarm"]) == (pytest.approx(p), bool(alarm))
        assert entry["mean"] == pytest.approx(np.load(tmp_path / entry["map"]).mean())


@pytest.mark.parametrize(("alpha", "has_verdict"), [(1 - 0.9, True), (0.1, True), (0.099, False)])
def test_there_is_no_verdict_at_a_rate_that_the_calibration_images_cannot_guarantee(
    tmp_path: Path, alpha: float, has_verdict: bool
) -> None:
    """Nine of them guarantee a tenth, however it was computed, and nothing below."""
    detector = toy_detector().fit(ID, calibration_images=pictures(9, seed=2))
    (entry,) = write_maps(
        detector.fitted, open_images([as_uint8(ID[:1])[0]]), tmp_path, MapOptions(raw=True, alpha=alpha)
    )
    assert ("alarm" in entry) == ("p_value" in entry) == has_verdict
    assert np.isfinite(entry["score"])


def test_there_is_no_verdict_without_the_group_of_the_image(tmp_path: Path) -> None:
    detector = toy_detector().fit(ID, groups=["day", "night"] * 12)
    (entry,) = write_maps(
        detector.fitted, open_images([as_uint8(ID[:1])[0]]), tmp_path, MapOptions(raw=True, alpha=0.5)
    )
    assert "score" in entry
    assert not {"p_value", "alarm"} & set(entry)


def test_regions_are_written_in_pixels_of_the_images_as_they_were_given(tmp_path: Path) -> None:
    """Images of 16 x 24 pixels for a detector of 8 x 8: two lines and three columns for each pixel of the map."""
    detector = toy_detector(size=(8, 8)).fit(ID)
    images = [as_uint8(pictures(1, size=(16, 24), seed=seed))[0] for seed in range(4)]
    entries = write_maps(detector.fitted, open_images(images), tmp_path, MapOptions(raw=True))
    boxes = {number: [] for number in range(1, 5)}
    stored = json.loads((tmp_path / "regions.json").read_text())
    assert {(one["height"], one["width"]) for one in stored["images"]} == {(16, 24)}
    for one in stored["annotations"]:
        boxes[one["image_id"]].append(one["bbox"])
    assert sum(map(len, boxes.values())) > 0
    for number, (image, entry) in enumerate(zip(images, entries, strict=True), start=1):
        field = detector.score_map([image], raw=True)
        found = detector.fitted.regions({detector.fitted.map_part: field}, 0, raw=True)
        expected = [
            (box[1] * 3, box[0] * 2, 3 * (box[3] - box[1]), 2 * (box[2] - box[0])) for box in (r.box for r in found)
        ]
        assert [tuple(box) for box in boxes[number]] == expected
        assert entry["regions"] == len(found)


def test_files_are_named_by_number_and_name_without_strange_letters(tmp_path: Path) -> None:
    detector = toy_detector().fit(ID)
    (tmp_path / "in").mkdir()
    for name in ("a b:c-d_e.png", "x" * 80 + ".png"):
        Image.fromarray(as_uint8(ID[:1])[0]).save(tmp_path / "in" / name)
    entries = write_maps(detector.fitted, open_images(tmp_path / "in"), tmp_path / "new" / "out")
    assert [entry["map"] for entry in entries] == ["000000_a_b_c-d_e.npy", f"000001_{'x' * 60}.npy"]


def test_maps_are_calibrated_on_one_scale_at_a_rate_of_a_twentieth_unless_told_otherwise() -> None:
    assert MapOptions() == MapOptions(scale="readable", raw=False, alpha=0.05, bands=None)
    with pytest.raises(OptionError, match="alpha must be between 0 and 1, got 0"):
        MapOptions(alpha=0.0)


@pytest.mark.parametrize(
    ("side", "box", "corner"), [(16, (288, 84, 399, 179), (291, 85)), (100, (204, 28, 217, 39), (207, 29))]
)
def test_a_number_stands_three_columns_and_one_line_within_the_corner_of_its_box(
    side: int, box: tuple[int, int, int, int], corner: tuple[int, int]
) -> None:
    """Lines 4 to 9 and columns 2 to 8, 256 // side times as large, right of the image and below the text."""
    picture, field = np.zeros((side, side, 3), dtype=np.float32), np.zeros((side, side), dtype=np.float32)
    expected = drawn(picture, field, 1.0, [], "score 3")
    pen = ImageDraw.Draw(expected)
    pen.rectangle(box, outline=LIGHT["inside"], width=2)
    pen.text(corner, "12", fill=LIGHT["inside"])
    found = drawn(picture, field, 1.0, [Region(12, 3.0, 0.01, (4, 2, 10, 9))], "score 3")
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


def test_a_map_of_nothing_is_drawn_from_0_to_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own 0.99 quantile is 0, and no scale ends there."""
    detector = toy_detector().fit(ID)
    nothing = {detector.fitted.map_part: np.zeros((1, 8, 8), dtype=np.float32)}
    monkeypatch.setattr(FittedDetector, "evaluate", lambda *_, **__: (np.ones(1), nothing, {}))
    (entry,) = write_maps(detector.fitted, open_images([as_uint8(ID[:1])[0]]), tmp_path, MapOptions("image", raw=True))
    assert (entry["scale"], entry["mean"], entry["regions"]) == (1.0, 0.0, 0)


def test_the_structure_of_an_image_that_is_unusual_as_a_whole_stays_visible() -> None:
    """On the common scale every pixel has the last colour; from the median on, a brighter half is told apart."""
    picture, field = np.zeros((64, 64, 3), dtype=np.float32), np.full((64, 64), 9.0, dtype=np.float32)
    field[:20] = 12.0
    start, scale = readable_range(field, 2.0)
    assert (start, scale) == (9.0, 3.0)
    flat, shown = (np.asarray(drawn(picture, field, *args)) for args in ((2.0, [], ""), (scale, [], "", start)))
    inside = (slice(20 + FRAME, None), slice(256 + FRAME, 512 - FRAME))
    upper, lower = (image[inside][[4, 150], 200].astype(int) for image in (flat, shown))
    assert (upper[0] == upper[1]).all()
    assert np.abs(lower[0] - lower[1]).max() > 100
    assert tuple(shown[21, 300]) == ImageColor.getrgb(LIGHT["outside"])
    assert tuple(flat[21, 300]) != ImageColor.getrgb(LIGHT["outside"])


def test_a_usual_map_has_the_common_scale_and_a_defect_extends_it() -> None:
    field = np.zeros((32, 32), dtype=np.float32)
    assert readable_range(field, 2.0) == (0.0, 2.0)
    field[:4, :4] = 10.0
    assert readable_range(field, 2.0) == (0.0, 10.0)
