"""Synthetic outliers: each kind takes one property of an image away and keeps the others."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from toys import pictures

from gepc.core.errors import OptionError
from gepc.images.synthetic import GRID, KINDS, synthetic_outlier

IMAGE = pictures(1, size=16, seed=3)[0]


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
