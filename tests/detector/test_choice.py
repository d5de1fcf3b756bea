"""Choosing transforms and levels without out-of-distribution data: the outliers, the rules, what they may look at."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from toys import pictures, toy_backbone

import gepc
from gepc.backbones.schedule import cosine_alphas_cumprod
from gepc.core.errors import InputError, OptionError
from gepc.detector.choice import by_separation, by_violation, choose
from gepc.detector.outliers import GRID, KINDS, synthetic_outlier
from gepc.features.gepc_plus import GepcPlus
from gepc.features.groups import Group

ID = pictures(60)
LEVELS = (0.99, 0.97)
IMAGE = pictures(1, size=16, seed=3)[0]


def detector(**options: object) -> gepc.Detector:
    return gepc.create_detector("gepc+", toy_backbone(), **{"levels": LEVELS, **options})


# --- outliers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_an_outlier_is_another_image_of_the_same_shape_and_belongs_to_its_image(kind: str) -> None:
    for image in (IMAGE, IMAGE[:1], pictures(1, size=(9, 13))[0]):
        changed = synthetic_outlier(image, kind)
        assert changed.shape == image.shape
        assert changed.dtype == np.float32
        assert np.abs(changed).max() <= 1.0
        assert np.abs(changed - image).mean() > 0.01
        np.testing.assert_array_equal(changed, synthetic_outlier(image, kind))


def test_each_kind_keeps_what_it_says() -> None:
    quiet = 0.3 * IMAGE  # stays within [-1, 1] whatever is done to it
    made = {kind: synthetic_outlier(quiet, kind) for kind in KINDS}

    def blocks(image: npt.NDArray[np.float32]) -> set[bytes]:
        side = 16 // GRID
        places = range(0, 16, side)
        return {image[:, y : y + side, x : x + side].tobytes() for y in places for x in places}

    assert blocks(made["shuffle"]) == blocks(quiet)
    np.testing.assert_allclose(np.abs(np.fft.fft2(made["phase"])), np.abs(np.fft.fft2(quiet)), atol=1e-4)
    np.testing.assert_allclose(made["contrast"].mean(), quiet.mean(), atol=1e-6)
    np.testing.assert_allclose(made["contrast"].std(), 0.4 * quiet.std(), rtol=1e-5)
    np.testing.assert_array_equal(made["negative"], -quiet)
    np.testing.assert_array_equal(made["colour"], quiet[[2, 0, 1]])
    assert np.diff(made["blur"], axis=2).std() < np.diff(quiet, axis=2).std()
    assert np.diff(made["zoom"], axis=2).std() < np.diff(quiet, axis=2).std()
    assert (made["noise"] - quiet).std() == pytest.approx(0.2, rel=0.1)


def test_an_unknown_kind_is_named() -> None:
    with pytest.raises(OptionError, match="'blurr'"):
        synthetic_outlier(IMAGE, "blurr")


# --- the rules as arithmetic -----------------------------------------------------------------------------------------


def test_violation_prefers_what_is_broken_much_and_evenly() -> None:
    rng = np.random.default_rng(0)
    mean, cv = np.array([0.0, 0.01, 0.04, 0.04, 0.0]), np.array([0.0, 0.2, 0.2, 0.6, 0.0])
    s = mean * (1.0 + cv * rng.standard_normal((400, 2, 5)))
    group = Group.of(("flip_x", "flip_y", "rot90", "rot180"))
    trials = by_violation(s, group)
    assert [trial.element for trial in trials] == ["flip_y", "rot90", "flip_x", "rot180"]
    assert trials[0].timestep is None
    measured = s[:, :, 2]
    assert trials[0].value == pytest.approx(np.log(measured.mean(0) ** 2 / measured.std(0)).mean())
    assert trials[-1].value == -np.inf


def test_separation_finds_the_level_and_the_element_that_tell_outliers() -> None:
    """Only rot90 at the second level sees them; everything else is the same noise for both."""
    rng = np.random.default_rng(0)
    group = Group.of(("flip_x", "rot90"))
    method = GepcPlus(group=group, features=("s", "d"))
    inside, outside = ({"s": np.exp(rng.standard_normal((64, 2, 3))), "d": np.ones((64, 2))} for _ in range(2))
    for table in (inside, outside):
        table["d"] = np.exp(rng.standard_normal((64, 2)))
    outside["s"][:, 1, 2] *= 1e3
    trials = by_separation(inside, outside, method, "level_mahalanobis", (10, 20))
    assert (trials[0].element, trials[0].timestep) == ("rot90", 20)
    assert trials[0].value > 0.95
    assert len(trials) == 4
    assert all(abs(trial.value - 0.5) < 0.2 for trial in trials[1:])


# --- choosing for a detector -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "passes"), [("violation", 32 * 2 * 4), ("synthetic", 2 * 32 * 2 * 4)])
def test_a_choice_costs_what_it_says_and_does_not_depend_on_order(rule: str, passes: int) -> None:
    elements = ("flip_x", "rot180", "shift_y")
    unfitted = detector()
    choice = choose(unfitted, ID, rule, elements, count=32)
    assert choice.passes == passes == unfitted.backbone.forward_count
    order = np.random.default_rng(1).permutation(len(ID))
    again = choose(unfitted, ID[order], rule, elements, count=32)
    assert [(trial.element, trial.timestep) for trial in again.trials] == [
        (trial.element, trial.timestep) for trial in choice.trials
    ]
    np.testing.assert_allclose([t.value for t in again.trials], [t.value for t in choice.trials], rtol=1e-5)


@pytest.mark.parametrize("rule", ["violation", "synthetic"])
def test_the_chosen_detector_keeps_the_other_options(rule: str) -> None:
    unfitted = detector(map_part="error", seed=3, topk=0.5)
    choice = choose(unfitted, ID, rule, count=32)
    chosen = choice.apply(unfitted)
    assert chosen.extractor.options()["group"].names == ("id", choice.best.element)
    assert chosen.extractor.options()["topk"] == 0.5
    assert chosen.extractor.options()["map_part"] == "error"
    assert chosen.seed == 3
    levels = chosen.extractor.timesteps(chosen.backbone)
    assert levels == ((choice.best.timestep,) if rule == "synthetic" else unfitted.extractor.timesteps(chosen.backbone))
    assert np.isfinite(chosen.fit(ID).score(ID[:3])).all()


def test_images_held_out_for_p_values_are_never_looked_at() -> None:
    fitted = detector().fit(ID)
    learned = fitted.fitting_images(ID, 1000)
    assert len(learned) == fitted.n_fit_
    scores = fitted.score(np.stack(learned))
    distance = np.abs(scores[:, None] - fitted.calibration_scores_)
    assert distance.min() > 1e-6
    assert len(fitted.fitting_images(ID, 5)) == 5


def test_a_symmetry_that_the_network_keeps_exactly_is_never_chosen() -> None:
    def eps(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * torch.linspace(0.5, 1.5, x.shape[-1]))

    backbone = gepc.Backbone.from_callable(eps, cosine_alphas_cumprod(1000), 3, 8)
    unfitted = gepc.create_detector("gepc+", backbone, levels=LEVELS)
    assert choose(unfitted, ID, elements=("flip_y", "flip_x"), count=16).best.element == "flip_x"
    with pytest.raises(InputError, match="exactly equivariant under all"):
        choose(unfitted, ID, elements=("flip_y", "shift_y"), count=16)


def test_what_cannot_be_chosen_from() -> None:
    with pytest.raises(OptionError, match=r"rule.*'oracle'"):
        choose(detector(), ID, "oracle")
    with pytest.raises(OptionError, match=r"'gepc\+'"):
        choose(gepc.GEPC(toy_backbone()), ID)
    with pytest.raises(OptionError, match="feature s"):
        choose(detector(features=("d",)), ID)
    with pytest.raises(OptionError, match="count must be at least 16"):
        choose(detector(), ID, count=4)
    with pytest.raises(InputError, match="at least 16 different images"):
        choose(detector(), ID[:9])
