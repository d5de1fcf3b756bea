"""What every registered method keeps, whatever it computes. A new method is tested here without writing a test."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from families import energy_net
from toys import BRIEF, pictures

import gepc
from gepc.backbones.schedule import cosine_alphas_cumprod
from gepc.core.errors import BackboneError, InputError, NotFittedError, OptionError
from gepc.lab.energy.network import EnergyBackbone
from gepc.methods.base import Cost, MapModel, find_method
from gepc.methods.gepc import GepcExtractor

pytestmark = pytest.mark.usefixtures("trusted")

METHODS = gepc.list_detectors()
ID = pictures(36)
NEW = pictures(16, seed=1, contrast=0.8)
STEPS = 4000

every_method = pytest.mark.parametrize("name", METHODS)


def assert_same(name: str, found: npt.ArrayLike, expected: npt.NDArray[np.float64]) -> None:
    """Equal up to float rounding, relative to the size that such scores have: a log-score may pass through 0.

    GEPC promises 1e-5. Methods that run chains of answers or divide by a small spread amplify float32 rounding.
    """
    rtol = 1e-5 if name == "gepc" else 1e-3
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=rtol * float(np.abs(expected).mean()))


class ResBlock(torch.nn.Module):
    """tanh(x + a shifted copy of x), stronger to the right."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x + 0.3 * x.roll(1, -1) * torch.linspace(0.5, 1.5, x.shape[-1]))


class Quick(torch.nn.Module):
    """A denoiser of one line, with a layer that can be recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.block = ResBlock()

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return self.block(x)


class QuickEnergy(Quick):
    """An energy of one line."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.block(x).square().mean((1, 2, 3))


def quick_backbone(name: str, image_size: int | None = 8) -> gepc.Backbone:
    """For tests that need no network from disk: one of the kind that the method needs."""
    if find_method(name).needs == EnergyBackbone.gives:
        return EnergyBackbone(QuickEnergy(), 3, image_size)
    return gepc.Backbone.from_callable(Quick(), cosine_alphas_cumprod(STEPS), 3, image_size, size_multiple=2)


def create(name: str, backbone: gepc.Backbone, **options: object) -> gepc.Detector:
    """The method with few passes for each image."""
    return gepc.create_detector(backbone, name, **{**BRIEF.get(name, {}), **options})


@functools.cache
def quickly_fitted(name: str) -> gepc.Detector:
    """The method on the quick backbone, fitted once; do not change it."""
    return create(name, quick_backbone(name)).fit(ID)


# --- a score belongs to its image ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> gepc.Backbone:
    """A tiny random UNet for 8x8 images on the paper's schedule, loaded from a diffusers folder.

    It predicts x_0, so that eps = (x_t - sqrt(abar) net(x_t))/sigma falls off along x as a denoiser's does: methods
    that divide by the curvature of the score are well conditioned on it.
    """
    from diffusers import DDPMScheduler, UNet2DModel

    folder = tmp_path_factory.mktemp("network") / "tiny"
    with torch.random.fork_rng():
        torch.manual_seed(1)
        net = UNet2DModel(
            sample_size=8,
            block_out_channels=(4,),
            layers_per_block=1,
            norm_num_groups=2,
            add_attention=False,
            down_block_types=("DownBlock2D",),
            mid_block_type=None,
            up_block_types=("UpBlock2D",),
        )
    net.save_pretrained(folder)
    scheduler = DDPMScheduler(STEPS, beta_schedule="squaredcos_cap_v2", prediction_type="sample")
    scheduler.save_pretrained(folder)
    return gepc.load_backbone(folder, device="cpu")


@pytest.fixture(scope="module")
def fitted(backbone: gepc.Backbone, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], gepc.Detector]:
    """Every method on a network from disk of the kind it needs, fitted when first asked for."""
    folder = tmp_path_factory.mktemp("energies")
    energy_net(folder)
    energies = gepc.load_backbone(folder, device="cpu")

    def fit(name: str) -> gepc.Detector:
        network = energies if find_method(name).needs == energies.gives else backbone
        return create(name, network, size=8).fit(ID)

    return functools.cache(fit)


@every_method
def test_a_score_does_not_depend_on_its_batch(name: str, fitted: Callable[[str], gepc.Detector]) -> None:
    """Alone, in a batch of 16, in another order among others: the same."""
    detector = fitted(name)
    together = detector.score(NEW)
    assert together.shape == (16,)
    assert together.dtype == np.float64
    assert np.isfinite(together).all()
    alone = np.concatenate([detector.score(NEW[i : i + 1]) for i in (0, 15)])
    assert_same(name, alone, together[[0, 15]])
    order = np.random.default_rng(0).permutation(16)[:6]
    assert_same(name, detector.score(NEW[order]), together[order])


FRESH_PROCESS = """
import json, sys, numpy, gepc
home, names = sys.argv[1], sys.argv[2:]
images = numpy.load(f"{home}/images.npy")
print(json.dumps({name: gepc.load_detector(f"{home}/{name}").score(images).tolist() for name in names}))
"""


def test_scores_are_the_same_after_save_and_load_in_a_fresh_process(
    fitted: Callable[[str], gepc.Detector], tmp_path: Path
) -> None:
    """Every method, loaded and asked by one other interpreter that knows only the folders."""
    for name in METHODS:
        fitted(name).save(tmp_path / name)
    np.save(tmp_path / "images.npy", NEW[:4])
    answer = subprocess.run(
        [sys.executable, "-c", FRESH_PROCESS, str(tmp_path), *METHODS],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout)
    for name in METHODS:
        assert_same(name, found[name], fitted(name).score(NEW[:4]))


# --- verdicts --------------------------------------------------------------------------------------------------------


@every_method
def test_p_values_and_verdicts(name: str) -> None:
    """In (0, 1], falling with the score; more alarms at a higher rate."""
    detector, images = quickly_fitted(name), NEW[:10]
    scores, p = detector.score(images), detector.p_value(images)
    assert ((p > 0) & (p <= 1)).all()
    assert (np.diff(p[np.argsort(scores)]) <= 0).all()
    few, many = detector.predict(images, alpha=0.1), detector.predict(images, alpha=0.6)
    assert few.dtype == bool
    assert (few <= many).all()
    np.testing.assert_array_equal(many, p <= 0.6)


@every_method
def test_held_out_images_are_the_reference_and_teach_nothing_else(name: str) -> None:
    """The p-values need it: fitted on the others alone, with these as calibration images, it is the same detector."""
    detector = quickly_fitted(name)
    scores = detector.score(ID)
    held_out = sorted(set(np.abs(detector.calibration_scores_[:, None] - scores).argmin(1).tolist()))
    assert len(held_out) == len(detector.calibration_scores_) == len(ID) - detector.fitted.fit_images
    assert_same(name, np.sort(scores[held_out]), detector.calibration_scores_)

    again = create(name, quick_backbone(name))
    again.fit(np.delete(ID, held_out, axis=0), calibration_images=ID[held_out])
    np.testing.assert_array_equal(again.kept_, detector.kept_)
    assert_same(name, again.cv_, detector.cv_)
    assert_same(name, again.weights_, detector.weights_)
    assert_same(name, again.calibration_scores_, detector.calibration_scores_)
    assert_same(name, again.score(NEW[:4]), detector.score(NEW[:4]))


# --- cost ------------------------------------------------------------------------------------------------------------


@every_method
def test_the_stated_cost_is_the_counted_one(name: str) -> None:
    """Of scoring, of the feature table, and of fitting, known before it."""
    backbone = quick_backbone(name)
    detector = create(name, backbone)
    to_fit = detector.fit_cost()
    detector.fit(ID)
    again = detector.map_images(24, 12) * detector.cost().forward  # for the statistics of maps
    assert (backbone.forward_count, backbone.jvp_count) == (len(ID) * to_fit.forward + again, len(ID) * to_fit.jvp)
    backbone.reset_counts()
    detector.score(NEW[:5])
    assert (backbone.forward_count, backbone.jvp_count) == (5 * detector.cost().forward, 5 * detector.cost().jvp)
    backbone.reset_counts()
    detector.features(NEW[:5])
    assert (backbone.forward_count, backbone.jvp_count) == (5 * to_fit.forward, 5 * to_fit.jvp)


class Stream:
    """Images of 64x64 that exist only while they are looked at."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> npt.NDArray[np.float32]:
        return pictures(1, size=64, seed=index)[0]


def peak_memory(work: Callable[[Stream], object], count: int) -> int:
    """The most that numpy held at once."""
    tracemalloc.start()
    try:
        work(Stream(count))
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def assert_bounded(work: Callable[[Stream], object], few: int) -> None:
    """Three times as many images raise the peak by less than a third of what the added ones weigh."""
    growth, weight = peak_memory(work, 3 * few) - peak_memory(work, few), 2 * few * pictures(1, size=64).nbytes
    assert growth < weight / 3


@every_method
def test_scoring_holds_a_bounded_number_of_images(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # the check of the value range holds up to 16 images at the start, more than are scored here
    monkeypatch.setattr("gepc.images.preprocessing._RANGE_SAMPLE", 1)
    detector = create(name, quick_backbone(name, image_size=None), batch_size=2).fit(Stream(12))
    # how many images are read ahead is a matter of threads: up to 4, beside a chunk of 2 and what is being read
    assert_bounded(detector.score, few=20)


@pytest.mark.parametrize("read_once", [False, True])
def test_fitting_holds_a_bounded_number_of_images_and_maps(monkeypatch: pytest.MonkeyPatch, read_once: bool) -> None:
    for name in ("SAMPLE_IMAGES", "CALIBRATION_IMAGES"):
        monkeypatch.setattr(f"gepc.detector.fitting.{name}", 4)
    monkeypatch.setattr(GepcExtractor, "map_model", MapModel(images=4))
    detector = gepc.GEPC(quick_backbone("gepc", image_size=None), batch_size=4)

    def fit(images: Stream) -> None:
        detector.fit((images[index] for index in range(len(images))) if read_once else images)

    assert_bounded(fit, few=30)


# --- errors ----------------------------------------------------------------------------------------------------------


@every_method
def test_before_and_after_fit(name: str) -> None:
    """Before it, every question is refused; fit returns the detector itself."""
    detector = create(name, quick_backbone(name))
    assert not detector.is_fitted
    assert "not fitted" in repr(detector)
    for question in (detector.score, detector.p_value, detector.predict, detector.score_map, detector.save):
        with pytest.raises(NotFittedError, match="call fit"):
            question(NEW[:1])
    assert detector.fit(ID) is detector
    assert detector.is_fitted


@every_method
def test_a_misspelt_option_names_the_nearest(name: str) -> None:
    with pytest.raises(OptionError, match="did you mean 'calibration_share'"):
        gepc.create_detector(quick_backbone(name), name, calibration_shar=0.5)


@every_method
def test_bad_images_are_refused_and_leave_rows_with_reasons(name: str) -> None:
    detector = quickly_fitted(name)
    broken = NEW[:4].copy()
    broken[2, 0, 3, 3] = np.nan
    with pytest.raises(InputError, match="image 2 has NaN or infinite pixels"):
        detector.score(broken)
    rows = list(detector.results(broken))
    assert [row.error is None for row in rows] == [True, True, False, True]
    kept = [0, 1, 3]
    assert_same(name, [rows[i].score for i in kept], detector.score(NEW[kept]))


@every_method
@pytest.mark.parametrize(
    ("images", "message"),
    [(ID[:4], "at least 8 are needed"), (np.repeat(ID[:1], 20, axis=0), "all the same image"), (ID[:0], "no .*images")],
    ids=["too few", "constant", "none"],
)
def test_images_that_cannot_be_fitted_on(name: str, images: npt.NDArray[np.float32], message: str) -> None:
    with pytest.raises(InputError, match=message):
        create(name, quick_backbone(name)).fit(images)


@every_method
def test_a_network_that_answers_nan_is_named_as_the_cause(name: str) -> None:
    backbone = quick_backbone(name)
    backbone.net.block.register_forward_hook(lambda _block, _inputs, output: output * torch.nan)
    detector = create(name, backbone)
    if detector.fit_cost() == Cost():
        pytest.skip("the method calls no network")
    with pytest.raises(BackboneError, match="returned NaN or infinite values"):
        detector.fit(ID)
