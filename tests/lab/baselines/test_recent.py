"""UFCOD, flow mismatch and local intrinsic dimension against closed forms."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.distance import cdist
from toys import pictures

import gepc
from gepc.calibration import create_calibrator
from gepc.calibration.joint import SoftMinimum
from gepc.core.errors import OptionError
from gepc.images.noise import image_key
from gepc.lab.analytic import GaussianBackbone
from gepc.lab.baselines.likelihood import FLIPD, LocalDimension
from gepc.lab.baselines.paths import UFCOD
from gepc.lab.baselines.score import FlowMismatch
from gepc.methods.base import Batch, extract_map_parts, extract_table
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


def test_flow_mismatch_is_the_error_of_the_velocity() -> None:
    """vhat = eps - xhat0 against v = noise - x_0."""
    method = FlowMismatch(draws=2)
    timesteps = method.timesteps(BACKBONE)
    found = extract_table(method, BACKBONE, BATCH, timesteps)["flow_mismatch"]
    x_0 = BATCH.clean(BACKBONE)
    for place, t in enumerate(timesteps):
        abar = float(BACKBONE.alphas_cumprod[t])
        errors = []
        for draw in range(2):
            x_t, noise = BATCH.noised(BACKBONE, t, draw)
            eps = BACKBONE.eps(x_t, t)
            velocity = eps - (x_t - (1.0 - abar) ** 0.5 * eps) / abar**0.5
            errors.append((velocity - (noise - x_0)).abs().flatten(1).mean(1))
        np.testing.assert_allclose(found[:, place], torch.stack(errors).mean(0).numpy(), rtol=1e-9)


def test_the_map_of_flow_mismatch_has_the_feature_as_its_mean() -> None:
    method = FlowMismatch()
    timesteps = method.timesteps(BACKBONE)
    table, _, maps = extract_map_parts(method, BACKBONE, BATCH, timesteps)
    assert maps.shape == (6, len(timesteps), *SHAPE[1:])
    np.testing.assert_allclose(maps.mean((2, 3)), table["flow_mismatch"], rtol=1e-5)


def test_the_dimension_of_a_gaussian() -> None:
    """D - sigma^2 tr(S^-1) + sigma^2 |S^-1 (x - sqrt(abar) mu)|^2, S = abar v + sigma^2: exact with random signs."""
    variances = np.linspace(0.0, 1.0, int(np.prod(SHAPE))).reshape(SHAPE)
    backbone = GaussianBackbone(0.1, variances, SHAPE)
    method = FLIPD(gepc.Levels((0.99,)))
    (t,) = method.timesteps(backbone)
    abar = float(backbone.alphas_cumprod[t])
    noised = abar * variances + 1.0 - abar
    centred = abar**0.5 * (IMAGES.astype(np.float64) - 0.1)
    expected = 1.0 + (1.0 - abar) * (np.square(centred / noised).mean((1, 2, 3)) - (1.0 / noised).mean())
    found = extract_table(method, backbone, BATCH, (t,))["flipd"][:, 0]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_flat_gaussian_has_the_dimension_of_its_support() -> None:
    """A quarter of the pixels vary: images of that law have LID = D/4 up to the noise level."""
    varies = np.zeros(SHAPE)
    varies[:, ::2, ::2] = 1.0
    images = (0.3 * np.random.default_rng(0).standard_normal((40, *SHAPE)) * varies).astype(np.float32)
    backbone = GaussianBackbone(0.0, 0.09 * varies, SHAPE)
    batch = Batch(images, [image_key(image) for image in images])
    method = FLIPD(gepc.Levels((0.9999,)))
    found = extract_table(method, backbone, batch, method.timesteps(backbone))["flipd"]
    np.testing.assert_allclose(found.mean(), 0.25, atol=0.002)


def test_lid_joins_both_parts_and_counts_their_passes() -> None:
    backbone = GaussianBackbone(0.1, 0.2, SHAPE)
    method = LocalDimension(strata=4)
    table = extract_table(method, backbone, BATCH, (0,))
    cost = method.cost(backbone, SHAPE[1:])
    assert (backbone.forward_count, backbone.jvp_count) == (6 * cost.forward, 6 * cost.jvp)
    bound, dimension = (part.extract(backbone, BATCH, part.timesteps(backbone)) for part in method.builds_on())
    columns = method.columns(table)
    assert columns.shape == (6, 1, 2)
    np.testing.assert_allclose(columns[:, 0, 0], bound["bpd"][:, 0])
    np.testing.assert_allclose(columns[:, 0, 1], -dimension["flipd"][:, 0])
