"""UFCOD: its two sums, and the soft minimum over ID images."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.distance import cdist
from toys import pictures

from gepc.calibration import create_calibrator
from gepc.calibration.joint import SoftMinimum
from gepc.core.errors import OptionError
from gepc.images.noise import image_key
from gepc.lab.analytic import GaussianBackbone
from gepc.lab.baselines.paths import UFCOD
from gepc.methods.base import Batch, extract_table
from gepc.methods.diffpath import DiffPath

IMAGES = pictures(6)
BATCH = Batch(IMAGES, [image_key(image) for image in IMAGES])
SHAPE = IMAGES.shape[1:]
BACKBONE = GaussianBackbone(0.1, 0.2, SHAPE)


def test_ufcod_reads_two_sums_of_diffpath() -> None:
    method = UFCOD(clip=False)
    (part,) = method.builds_on()
    expected = extract_table(DiffPath(dim=6, clip=False), BACKBONE, BATCH, (0,))
    table = extract_table(part, BACKBONE, BATCH, (0,))
    found = method.columns(method.complete([table], BATCH))
    np.testing.assert_allclose(found[:, 0], np.stack([expected["eps2"][:, 0], expected["d2"][:, 0]], axis=1))
    np.testing.assert_array_equal(method.columns(extract_table(method, BACKBONE, BATCH, (0,))), found)


def test_the_soft_minimum_is_its_formula() -> None:
    rng = np.random.default_rng(0)
    train, new = rng.normal(2.0, 3.0, (50, 2)), rng.normal(0.0, 5.0, (7, 2))
    model = SoftMinimum(temperature=0.5)
    model.learn(train)
    z = [(part - train.mean(0)) / train.std(0) for part in (train, new)]
    expected = -0.5 * np.log(np.exp(-cdist(z[1], z[0]) / 0.5).mean(1))
    np.testing.assert_allclose(model.distance(new), expected, rtol=1e-12)


@given(seed=st.integers(0, 1000), temperature=st.floats(0.01, 10.0))
def test_the_soft_minimum_is_between_the_least_and_the_mean_distance(seed: int, temperature: float) -> None:
    rng = np.random.default_rng(seed)
    train, new = rng.normal(size=(30, 2)), rng.normal(size=(5, 2))
    model = SoftMinimum(temperature)
    model.learn(train)
    distances = cdist(*((part - train.mean(0)) / train.std(0) for part in (new, train)))
    found = model.distance(new)
    assert (found >= distances.min(1) - 1e-9).all()
    assert (found <= distances.mean(1) + 1e-9).all()


def test_the_references_do_not_depend_on_the_order_of_the_images() -> None:
    columns = np.random.default_rng(1).normal(size=(250, 1, 2))
    one, other = (create_calibrator("soft_minimum").fit(part) for part in (columns, columns[::-1]))
    assert one.state()["samples"].shape == (100, 2)
    np.testing.assert_allclose(one.state()["samples"], other.state()["samples"], atol=1e-12)
    with pytest.raises(OptionError, match="temperature and references must be positive"):
        create_calibrator("soft_minimum:temperature=0")
