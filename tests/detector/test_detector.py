"""The detector as a whole: what fitting learns, what scoring promises, and an error of its own for every bad input."""

from __future__ import annotations

import logging
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image as PILImage
from toys import LEVELS, as_uint8, pictures, toy_backbone, toy_detector

import gepc
from gepc.core.errors import BackboneError, InputError, NotFittedError, OptionError, ValueRangeWarning
from gepc.images.sources import open_images
from gepc.lab.analytic import GaussianBackbone
from gepc.lab.metrics import auroc
from gepc.methods.gepc import PAPER_LEVELS

ID = pictures(30)
NEW = pictures(5, seed=1)


@pytest.fixture(scope="module")
def fitted() -> gepc.GEPC:
    return toy_detector().fit(ID)  # type: ignore[return-value]


# --- what fitting learns ---------------------------------------------------------------------------------------------


def test_the_fitted_state() -> None:
    detector = toy_detector(keep=2)
    assert "not fitted" in repr(detector)
    assert detector.fit(ID) is detector
    assert detector.levels_.tolist() == list(detector.extractor.timesteps(detector.backbone))
    kept = [detector.levels_.tolist().index(t) for t in detector.kept_]
    assert sorted(np.argsort(detector.cv_)[:2]) == kept
    assert detector.weights_.sum() == pytest.approx(1)
    assert detector.fitted.fit_images == 20
    assert len(detector.calibration_scores_) == 10
    assert (np.diff(detector.calibration_scores_) >= 0).all()
    assert "fitted on 20+10" in repr(detector)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mc_samples": 2, "group_samples": 2},
        {"level_samples": 1},
        {"level_samples": 2, "keep": 3, "aggregate": "max"},
        {"level_samples": 1, "calibration": "zscore", "keep": None, "weights": "uniform"},
    ],
    ids=str,
)
def test_a_calibration_score_is_the_score_that_its_image_gets(options: dict[str, object]) -> None:
    """The guarantee needs it: calibration images and new ones are scored in the same way, random subsets included."""
    detector = toy_detector(**options).fit(ID)
    scores = detector.score(ID)
    distance = np.abs(detector.calibration_scores_[:, None] - scores) / np.abs(scores)
    matched = distance.argmin(1)
    assert distance.min(1).max() < 1e-5
    assert len(set(matched)) == 10
    given = toy_detector(**options).fit(ID, calibration_images=NEW)
    np.testing.assert_allclose(given.calibration_scores_, np.sort(given.score(NEW)), rtol=1e-5)


def test_the_order_of_the_images_changes_nothing() -> None:
    """Which images are held out is decided by their content, so a shuffled set gives the same detector."""
    order = np.random.default_rng(0).permutation(len(ID))
    plain, shuffled = toy_detector(batch_size=64).fit(ID), toy_detector(batch_size=7).fit(ID[order])
    np.testing.assert_array_equal(shuffled.kept_, plain.kept_)
    np.testing.assert_allclose(shuffled.calibration_scores_, plain.calibration_scores_, rtol=1e-5)
    np.testing.assert_allclose(shuffled.score(NEW), plain.score(NEW), rtol=1e-5)


def test_calibration_images_are_the_reference_and_all_others_are_fitted_on() -> None:
    detector = toy_detector().fit(ID, calibration_images=NEW)
    assert (detector.fitted.fit_images, len(detector.calibration_scores_)) == (30, 5)


def test_calibrating_on_images_that_were_fitted_on_is_noticed() -> None:
    with pytest.warns(UserWarning, match="3 calibration images are among the images fitted on"):
        toy_detector().fit(ID, calibration_images=np.concatenate([ID[4:7], NEW]))


def test_the_seed_decides_and_nothing_else() -> None:
    first, again, other = (toy_detector(seed=seed).fit(ID).score(NEW) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.isclose(first, other, rtol=1e-3).any()


def test_a_failing_fit_leaves_the_fitted_detector_as_it_was() -> None:
    detector = toy_detector().fit(ID)
    before = detector.score(NEW)
    with pytest.raises(InputError):
        detector.fit(ID[:3])
    np.testing.assert_array_equal(detector.score(NEW), before)


@pytest.mark.parametrize("calibration", ["kde", "zscore", "raw", "mvn"])
def test_false_alarms_are_held_on_new_images_of_the_same_kind(calibration: str) -> None:
    """120 calibration and 400 new images from one law: the rate lies in the 99.8 % range of its beta-binomial law."""
    from scipy.stats import betabinom

    backbone = toy_backbone(channels=1, image_size=6)
    images = pictures(600, size=6, channels=1)
    detector = toy_detector(backbone, features=("s", "d"), levels=LEVELS[:2], calibration=calibration)
    detector.fit(images[:80], calibration_images=images[80:200])
    alarms = detector.predict(images[200:], alpha=0.1).sum()
    k, n = 12, 120
    law = betabinom(400, k, n + 1 - k)
    assert law.ppf(0.001) <= alarms <= law.ppf(0.999)


# --- scoring ---------------------------------------------------------------------------------------------------------


def test_verdicts_follow_from_scores(fitted: gepc.GEPC) -> None:
    scores, reference = fitted.score(NEW), fitted.calibration_scores_
    expected = (1 + (reference >= scores[:, None]).sum(1)) / 11
    np.testing.assert_array_equal(fitted.p_value(NEW), expected)
    np.testing.assert_array_equal(fitted.predict(NEW, alpha=0.3), expected <= 0.3)
    with pytest.warns(DeprecationWarning, match="call score"):
        np.testing.assert_array_equal(fitted.decision_function(NEW), scores)
    assert scores.dtype == np.float64


def test_a_rate_that_cannot_be_held_is_refused_before_any_pass() -> None:
    detector = toy_detector().fit(ID)
    detector.backbone.reset_counts()
    with pytest.raises(OptionError, match=r"alpha=0\.05 needs at least 19 calibration images, there are 10"):
        detector.predict(NEW)
    assert detector.backbone.forward_count == 0


def test_no_images_no_scores(fitted: gepc.GEPC) -> None:
    assert fitted.score([]).shape == fitted.p_value(NEW[:0]).shape == (0,)


def test_one_image_as_bytes_and_as_floats_is_one_image() -> None:
    """Fitted and asked with the same pictures as bytes, as floats in [-1, 1] and in [0, 1]: the same scores."""
    id_bytes, new_bytes = as_uint8(ID), as_uint8(NEW)
    id_unit, new_unit = (part.astype(np.float32) / np.float32(255) for part in (id_bytes, new_bytes))
    expected = toy_detector().fit(id_bytes).score(new_bytes)
    np.testing.assert_allclose(toy_detector().fit(id_unit * 2 - 1).score(new_unit * 2 - 1), expected, rtol=1e-5)
    told = toy_detector(value_range=(0, 1)).fit(id_unit)
    np.testing.assert_allclose(told.score(new_unit), expected, rtol=1e-5)


def test_results_come_one_batch_at_a_time_with_progress() -> None:
    """An iterator: after the first result the network has seen one batch, not the collection."""
    detector = toy_detector(batch_size=4).fit(ID)
    detector.backbone.reset_counts()
    seen: list[int] = []
    results = detector.results(pictures(10, seed=3), on_progress=seen.append)
    first = next(results)
    assert detector.backbone.forward_count == 4 * detector.cost().forward
    rest = list(results)
    assert [first.index, *(result.index for result in rest)] == list(range(10))
    assert seen == [4, 4, 2]


def test_other_images_stand_out(data_folder: Path) -> None:
    """Faces against house numbers at 16x16 in grey, with the Gaussian fitted to other faces: found far above chance."""

    def grey(name: str, part: slice) -> np.ndarray:
        with np.load(data_folder / name) as archive:
            images = archive["test_x"][part].astype(np.float64).mean(3)
        halves = images.reshape(-1, 16, 2, 16, 2).mean((2, 4))
        return (halves / 127.5 - 1)[:, None].astype(np.float32)

    backbone = GaussianBackbone.fitted(grey("celeba32.npz", slice(600)))
    detector = gepc.GEPC(backbone, levels=(0.99, 0.95), keep=2, features=("s", "d"))
    detector.fit(grey("celeba32.npz", slice(600, 900)))
    faces, numbers = grey("celeba32.npz", slice(900, 1100)), grey("svhn32.npz", slice(200))
    assert auroc(detector.score(faces), detector.score(numbers)) > 0.8
    assert detector.predict(faces, alpha=0.1).mean() < 0.2
    assert detector.predict(numbers, alpha=0.1).mean() > 0.4


# --- features --------------------------------------------------------------------------------------------------------


def test_features_need_no_fit_and_do_not_depend_on_the_batch() -> None:
    table = toy_detector(batch_size=64, features=("s", "d")).features(NEW)
    small = toy_detector(batch_size=2, features=("s", "d")).features(NEW)
    assert table["s"].shape == (5, 4, 7)
    for name in table:
        np.testing.assert_allclose(small[name], table[name], rtol=1e-5, atol=1e-7)


def test_given_noise_replaces_the_drawn_one_image_by_image() -> None:
    """Split over batches as the images are; another shape or several draws are refused."""
    noise = np.random.default_rng(0).standard_normal((4, 5, 3, 8, 8)).astype(np.float32)
    table = toy_detector(batch_size=2).features(NEW, noise=noise)["s"]
    alone = toy_detector().features(NEW[3:4], noise=noise[:, 3:4])["s"]
    np.testing.assert_allclose(table[3:4], alone, rtol=1e-5)
    for wrong in (noise[:2], noise[:, :4], noise[0]):
        with pytest.raises(InputError, match=r"noise must be \(levels, N, C, H, W\) = \(4, 5, \.\.\.\)"):
            toy_detector().features(NEW, noise=wrong)
    with pytest.raises(InputError, match="does not fit images"):
        toy_detector().features(NEW, noise=noise[..., :4])
    with pytest.raises(InputError, match="draw 1"):
        toy_detector(mc_samples=2).features(NEW, noise=noise)


# --- folders ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def mixed_folder(tmp_path: Path) -> Path:
    """Two sound pictures between a text file, a truncated PNG and an array with NaN."""
    sound = as_uint8(pictures(2, seed=4))
    PILImage.fromarray(sound[0]).save(tmp_path / "a.png")
    (tmp_path / "b.png").write_text("this is text")
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    PILImage.fromarray(noise).save(tmp_path / "c.png")
    (tmp_path / "c.png").write_bytes((tmp_path / "c.png").read_bytes()[:4000])
    np.save(tmp_path / "d.npy", np.full((8, 8), np.nan))
    PILImage.fromarray(sound[1]).save(tmp_path / "e.png")
    return tmp_path


@pytest.mark.parametrize("batch_size", [1, 2, 64])
def test_a_folder_run_has_a_row_for_every_file(mixed_folder: Path, batch_size: int) -> None:
    """A reason for what cannot be scored; the others get the score they get alone."""
    detector = toy_detector(batch_size=batch_size).fit(ID)
    rows = list(detector.results(mixed_folder))
    assert [Path(row.name).name for row in rows] == ["a.png", "b.png", "c.png", "d.npy", "e.png"]
    reasons = [None, "not an image", "damaged or cut short", "NaN or infinite", None]
    for row, reason in zip(rows, reasons, strict=True):
        if reason is None:
            assert row.error is None
            np.testing.assert_allclose(row.score, detector.score(row.name)[0], rtol=1e-5)
            assert 0 < row.p_value <= 1
        else:
            assert reason in (row.error or "")
            assert np.isnan([row.score, row.p_value]).all()
    with pytest.raises(InputError, match=r"b\.png is not an image"):
        detector.score(mixed_folder)


def test_bad_items_of_a_list_are_rows_too(fitted: gepc.GEPC) -> None:
    items = [NEW[0], np.zeros((2, 2, 2, 2)), NEW[1] * np.inf]
    with np.errstate(invalid="ignore"):
        rows = list(fitted.results(items))
    assert [row.error is None for row in rows] == [True, False, False]


def test_fitting_leaves_unreadable_files_out_with_a_warning(tmp_path: Path) -> None:
    for index, image in enumerate(as_uint8(ID)):
        PILImage.fromarray(image).save(tmp_path / f"{index:02d}.png")
    (tmp_path / "zz.png").write_text("this is text")
    with pytest.warns(UserWarning, match=r"1 of 31 images left out; the first error: .*zz\.png is not an image"):
        detector = toy_detector().fit(tmp_path)
    expected = toy_detector().fit(as_uint8(ID))
    np.testing.assert_array_equal(detector.score(NEW), expected.score(NEW))


def test_a_folder_of_nothing_readable(tmp_path: Path) -> None:
    for index in range(3):
        (tmp_path / f"{index}.png").write_text("this is text")
    with pytest.raises(InputError, match="none of the 3 images can be read; the first"):
        toy_detector().fit(tmp_path)


# --- images that cannot be fitted on ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (ID[:9], "9 in-distribution images leave 6 to fit on; at least 8 are needed"),
        (ID[:0], "no in-distribution images"),
        (np.repeat(ID[:1], 30, axis=0), "all the same image"),
        (np.where(np.arange(30)[:, None, None, None] == 7, np.nan, ID), "image 7 has NaN or infinite pixels"),
        (np.where(np.arange(30)[:, None, None, None] == 7, np.inf, ID), "image 7 has NaN or infinite pixels"),
        (ID * 200, r"outside \[-1, 1\].*value_range"),
        (ID[:, :2], "image 0 has 2 channels, the backbone takes 3"),
    ],
    ids=["too few", "none", "constant", "NaN", "inf", "range", "channels"],
)
def test_images_that_cannot_be_fitted_on(images: np.ndarray, message: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(InputError, match=message):
            toy_detector().fit(images)


def test_a_backbone_that_is_equivariant_leaves_nothing_to_choose_by() -> None:
    """Every residual is 0: said so, not divided by."""
    backbone = gepc.Backbone.from_callable(lambda x, t: x, toy_backbone().alphas_cumprod, 3, 8)
    with pytest.raises(InputError, match="constant over the in-distribution images"):
        toy_detector(backbone).fit(ID)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_backbone_that_answers_nonsense(bad: float) -> None:
    def eps(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        answer = x.clone()
        answer[0, 0, 0, 0] = bad
        return answer

    backbone = gepc.Backbone.from_callable(eps, toy_backbone().alphas_cumprod, 3, 8)
    with pytest.raises(BackboneError, match="returned NaN or infinite values"):
        toy_detector(backbone).fit(ID)
    detector = toy_detector().fit(ID)
    detector.fitted_ = replace(detector.fitted, backbone=backbone)
    for ask in (detector.score, detector.score_map):
        with pytest.raises(BackboneError, match="returned NaN or infinite values"):
            ask(NEW)


def test_a_backbone_of_another_shape() -> None:
    backbone = gepc.Backbone.from_callable(lambda x, t: x[:, :1], toy_backbone().alphas_cumprod, 3, 8)
    with pytest.raises(BackboneError, match=r"answered shape \(30, 1, 8, 8\) to an input of shape \(30, 3, 8, 8\)"):
        toy_detector(backbone).fit(ID)


# --- ranges and sizes ------------------------------------------------------------------------------------------------


def test_floats_without_a_negative_value_are_warned_about_everywhere(fitted: gepc.GEPC) -> None:
    unit = (NEW + 1) / 2
    for ask in (fitted.score, fitted.p_value, fitted.score_map, fitted.features, lambda x: list(fitted.results(x))):
        with pytest.warns(ValueRangeWarning, match=r"`value_range` to \(0, 1\)"):
            ask(unit)
    with pytest.warns(ValueRangeWarning, match="value_range"):
        toy_detector().fit((ID + 1) / 2)


def test_the_size_is_the_backbones_or_that_of_the_first_image() -> None:
    """A net of one size has images resized to it; a net of any size takes the size of the first and keeps it."""
    fixed = toy_detector().fit(pictures(24, size=12))
    assert fixed.fitted.preprocessing.size == (8, 8)
    assert np.isfinite(fixed.score(pictures(2, size=(9, 20)))).all()
    free = toy_detector(toy_backbone(image_size=None)).fit(pictures(24, size=12))
    assert free.fitted.preprocessing.size == (12, 12)
    with pytest.raises(InputError, match=r"image 0 has 20x9 pixels \(width x height\) but 12x12 is expected"):
        free.score(pictures(2, size=(9, 20)))
    mixed = [*pictures(12, size=12), *pictures(12, size=10)]
    with pytest.raises(InputError, match=r"image 12 has 10x10 pixels \(width x height\) but 12x12 is expected"):
        toy_detector(toy_backbone(image_size=None)).fit(mixed)
    sized = toy_detector(toy_backbone(image_size=None), size=(10, 10)).fit(mixed)
    assert sized.fitted.preprocessing.size == (10, 10)


def test_sizes_that_a_network_cannot_take() -> None:
    with pytest.raises(
        InputError, match=r"of 16x16 pixels \(width x height\) do not fit this backbone, which takes 8x8"
    ):
        toy_detector(size=16)
    even = gepc.Backbone.from_callable(lambda x, t: x, toy_backbone().alphas_cumprod, 3, size_multiple=4)
    with pytest.raises(InputError, match="both sides must be multiples of 4"):
        toy_detector(even).fit(pictures(24, size=10))


def test_non_square_images_work_without_quarter_turns(caplog: pytest.LogCaptureFixture) -> None:
    detector = toy_detector(toy_backbone(image_size=None))
    with caplog.at_level(logging.INFO, logger="gepc"):
        detector.fit(pictures(24, size=(6, 9)))
    assert "images of 6x9 are not square: rot90 left out" in caplog.messages
    detector.backbone.reset_counts()
    images = pictures(3, size=(6, 9), seed=1)
    assert np.isfinite(detector.score(images)).all()
    assert detector.cost().forward == 12
    assert detector.backbone.forward_count == 36
    assert detector.score_map(images).shape == (3, 6, 9)


def test_grey_images_and_one_channel_networks() -> None:
    grey = np.random.default_rng(0).integers(0, 2**16, (24, 8, 8), dtype=np.uint16)
    for channels in (1, 3):
        detector = toy_detector(toy_backbone(channels=channels)).fit(grey)
        assert np.isfinite(detector.score(grey[:2])).all()


# --- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"calibraton": "kde"}, "GEPC has no option 'calibraton'; did you mean 'calibration'"),
        ({"calibration": "kd"}, "did you mean 'kde'"),
        ({"keep": 5}, "keep must be between 1 and 4"),
        ({"keep": 0}, "keep must be between 1 and 4"),
        ({"weights": "inverse"}, "unknown weights 'inverse'; valid: inv_cv, uniform"),
        ({"aggregate": "median"}, "unknown aggregate 'median'"),
        ({"fuse": "median"}, "unknown fuse 'median'"),
        ({"calibration_share": 1.0}, "calibration_share must be between 0 and 1"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"resize": "pad"}, "unknown resize 'pad'"),
        ({"size": 0}, "size must be"),
        ({"value_range": (1, 1)}, "low < high"),
        ({"levels": "rho:x"}, "cannot read levels"),
        ({"levels": ()}, "at least one noise level"),
        ({"group": "c5"}, "unknown group 'c5'"),
        ({"group": "id,rotate(30)"}, "unknown group 'id,rotate.*give several elements as a list"),
        ({"features": "s,cos"}, "unknown feature 's,cos'"),
    ],
)
def test_impossible_options_are_refused_when_the_detector_is_made(options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        toy_detector(**options)


def test_a_backbone_must_be_one() -> None:
    with pytest.raises(OptionError, match=r"backbone must be a gepc\.Backbone, got str; see gepc\.load_backbone"):
        gepc.GEPC("celeba32-tiny")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["score", "p_value", "predict", "score_map", "decision_function", "flag"])
@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
def test_an_unfitted_detector_says_so(name: str) -> None:
    with pytest.raises(NotFittedError, match=r"not fitted yet; call fit\(id_images\) first"):
        getattr(toy_detector(), name)(NEW)


def test_unknown_methods_presets_and_ties(fitted: gepc.GEPC) -> None:
    with pytest.raises(OptionError, match="unknown method 'gpec'; did you mean 'gepc'"):
        gepc.create_detector(toy_backbone(), "gpec")
    with pytest.raises(OptionError, match="has no preset 'fast'"):
        gepc.create_detector(toy_backbone(), "gepc", preset="fast")
    with pytest.raises(OptionError, match="unknown ties"):
        fitted.p_value(NEW, ties="even")
    with pytest.raises(OptionError, match="unknown ties"):
        fitted.results(NEW, ties="even")  # before a result is asked for
    with pytest.raises(OptionError, match=r"lmd: steps must be int, got 2\.5"):
        gepc.create_detector(toy_backbone(), "lmd", steps=2.5)


def test_forgiving_is_a_choice(fitted: gepc.GEPC) -> None:
    bad = np.where(np.arange(5)[:, None, None, None] == 2, np.nan, NEW)
    with pytest.raises(InputError, match="image 2 has NaN"):
        list(fitted.results(bad, "raise"))
    assert [row.error is None for row in fitted.results(bad)] == [True, True, False, True, True]


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("gepc", {}),
        ("gepc", {"keep": 3, "level_samples": 2}),
        ("gepc", {"keep": 3, "group_samples": 2}),
        ("gepc+", {"preset": "full"}),
        ("gepc+", {"preset": "full", "elements": "mean", "level_samples": 2}),
        ("ddpm_ood", {"keep": 1, "steps": 8, "distances": "mse"}),
        ("msma", {"keep": 4, "calibration": "kde"}),
    ],
)
def test_the_reference_is_scored_by_the_rule_that_scores_images(method: str, options: dict[str, object]) -> None:
    """What fitting keeps of the held-out images is what `score` says of them: the guarantee rests on it."""
    images = pictures(45, 8, seed=5)
    detector = gepc.create_detector(toy_backbone(), method, **options).fit(images)
    scores = detector.score(images)
    for kept in detector.calibration_scores_:
        assert np.abs(scores - kept).min() < 1e-4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 1.5}, "batch_size must be int, got 1.5"),
        ({"topk": "much"}, "topk must be float, got 'much'"),
        ({"seed": "zero"}, "seed must be int"),
        ({"window": 3.5}, "window must be int"),
        ({"calibration": 3}, "calibration must be str"),
    ],
)
def test_options_of_the_wrong_type_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        gepc.create_detector(toy_backbone(), "gepc", **options)


def test_numbers_that_yaml_reads_as_text_are_numbers() -> None:
    detector = gepc.create_detector(toy_backbone(), "gepc", topk="1e-1", calibration_share="2.5e-1")
    assert (detector.extractor.options()["topk"], detector.calibration_share) == (0.1, 0.25)


def test_a_file_added_while_fitting_does_not_shift_the_groups(tmp_path: Path) -> None:
    """Labels by folder belong to the files that were listed when the fit began."""
    for index, image in enumerate(as_uint8(ID)):
        folder = tmp_path / ("a" if index % 2 else "b")
        folder.mkdir(exist_ok=True)
        PILImage.fromarray(image).save(folder / f"{index:02d}.png")
    expected = toy_detector().fit(tmp_path, groups="folder").fitted.reference.by_group

    def add_file(_: int) -> None:
        PILImage.fromarray(as_uint8(ID)[0]).save(tmp_path / "a" / "00-late.png")

    found = toy_detector().fit(tmp_path, groups="folder", on_progress=add_file).fitted.reference.by_group
    assert {name: len(scores) for name, scores in found.items()} == {k: len(v) for k, v in expected.items()}
    for name, scores in expected.items():
        np.testing.assert_allclose(found[name], scores)


# --- images that the backbone was trained on -------------------------------------------------------------------------


def hashes_of(images: np.ndarray) -> np.ndarray:
    opened = open_images(images)
    return np.sort(np.asarray([opened[index].content_hash() for index in range(len(opened))], dtype=np.uint64))


def test_images_that_the_backbone_was_trained_on_are_a_warning() -> None:
    detector = toy_detector()
    detector.backbone.trained_on = hashes_of(ID[:7])
    with pytest.warns(UserWarning, match=r"7 of 30 images were used to train the backbone; .*`calibration_images`"):
        detector.fit(ID)
    with pytest.warns(UserWarning, match=r"2 of 12 images were used to train the backbone"):
        detector.fit(pictures(20, seed=5), np.concatenate([ID[5:7], pictures(10, seed=6)]))


def test_unseen_calibration_images_give_no_warning() -> None:
    detector = toy_detector()
    detector.backbone.trained_on = hashes_of(ID)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        detector.fit(ID, pictures(20, seed=5))
        detector.fit(pictures(30, seed=6))


def test_the_list_of_training_images_changes_no_score() -> None:
    plain, listed = toy_detector().fit(ID), toy_detector()
    listed.backbone.trained_on = hashes_of(NEW)
    np.testing.assert_array_equal(listed.fit(ID).score(NEW), plain.score(NEW))


BAD = np.where(np.arange(5)[:, None, None, None] == 2, np.nan, NEW)


def test_one_policy_for_bad_images(fitted: gepc.GEPC) -> None:
    good = np.arange(5) != 2
    for name in ("score", "p_value", "predict", "results_frame"):
        rate = {"alpha": 0.5} if name in ("predict", "results_frame") else {}
        with pytest.raises(InputError, match="image 2 has NaN"):
            getattr(fitted, name)(BAD, on_error="raise", **rate)
        with pytest.raises(OptionError, match="unknown on_error 'skip'"):
            getattr(fitted, name)(BAD, on_error="skip", **rate)
    np.testing.assert_array_equal(np.isnan(fitted.score(BAD, on_error="row")), ~good)
    np.testing.assert_array_equal(np.isnan(fitted.p_value(BAD, on_error="row")), ~good)
    alarms = fitted.predict(BAD, alpha=0.5, on_error="row")
    assert not alarms[2]
    np.testing.assert_array_equal(alarms[good], fitted.predict(NEW[good], alpha=0.5))
    assert not fitted.predict(BAD, fdr=0.5, on_error="row")[2]


def test_a_data_frame_of_results(fitted: gepc.GEPC) -> None:
    frame = fitted.results_frame(BAD, alpha=0.5)
    assert list(frame.columns) == ["path", "score", "p_value", "alarm", "error"]
    assert list(frame["path"]) == [str(n) for n in range(5)]
    np.testing.assert_array_equal(frame["score"], fitted.score(BAD, on_error="row"))
    np.testing.assert_array_equal(frame["alarm"], fitted.predict(BAD, 0.5, on_error="row"))
    assert frame["alarm"].dtype == bool
    assert frame["error"].notna().tolist() == [False, False, True, False, False]
    with pytest.raises(OptionError, match="alpha"):
        fitted.results_frame(NEW, alpha=0.001)


def test_a_detector_is_created_from_a_backbone_and_the_name_of_a_method() -> None:
    with pytest.raises(OptionError, match="method must be a name, such as 'gepc', got CallableBackbone"):
        gepc.create_detector(toy_backbone(), toy_backbone())  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"backbone must be a gepc\.Backbone, got str; see gepc\.load_backbone"):
        gepc.create_detector("gepc")  # type: ignore[arg-type]
    assert gepc.create_detector(toy_backbone()).extractor.name == "gepc+"
    assert gepc.create_detector(toy_backbone(), None).extractor.name == "gepc+"


def test_the_class_of_the_papers_method_takes_its_presets() -> None:
    detector = gepc.GEPC(toy_backbone(), preset="paper", keep=1)
    assert (detector.extractor.levels, detector.keep) == (gepc.Levels(PAPER_LEVELS), 1)


def test_the_old_order_of_the_arguments_still_works_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match=r"create_detector\(method, backbone\) is deprecated"):
        detector = gepc.create_detector("msma", toy_backbone())  # type: ignore[arg-type]
    assert detector.extractor.name == "msma"


def test_explanations_name_the_most_unusual_part(tiny_unet: gepc.Backbone) -> None:
    """The evidence of each part lies in (0, 1]; the reason is the smallest that is not all of the output together."""
    detector = gepc.create_detector(tiny_unet, maps="raw").fit(as_uint8(pictures(40, 16)))
    noisy = np.random.default_rng(0).integers(0, 256, (2, 16, 16, 3), dtype=np.uint8)
    for result in detector.explain(noisy):
        assert set(result.evidence) == {"output", "orientation", "texture and noise", "colour"}  # without inner layers
        assert all(0.0 < p <= 1.0 for p in result.evidence.values())
        named = {name: p for name, p in result.evidence.items() if name != "output"}
        assert result.reason == min(named, key=named.__getitem__)
    assert gepc.create_detector(tiny_unet, "msma").fit(as_uint8(pictures(40, 16))).explain(noisy)[0].reason is None


def test_a_score_and_its_reasons_are_computed_together(
    tiny_unet: gepc.Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gepc.calibration.evidence import Evidence

    detector = gepc.create_detector(tiny_unet, maps="raw").fit(as_uint8(pictures(40, 16)))
    calls: list[int] = []
    standing = Evidence.standing
    monkeypatch.setattr(Evidence, "standing", lambda self, columns: (calls.append(1), standing(self, columns))[1])
    detector.explain(as_uint8(pictures(2, 16, seed=1)))
    assert len(calls) == 1
