"""The calibrators that benchmarks/evidence.py adds."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest

from gepc.calibration import calibrators
from gepc.calibration.joint import LevelPCA


@pytest.fixture(scope="module")
def evidence() -> Iterator[ModuleType]:
    """The benchmark; its calibrators are registered while these tests run only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrators, "_CALIBRATORS", dict(calibrators._CALIBRATORS))
        yield importlib.import_module("evidence")


def test_level_lof_is_the_ratio_to_the_radii_of_the_neighbours(evidence: ModuleType) -> None:
    """By hand: with all components, d is the Euclidean distance of standardised columns."""
    train, new = (np.random.default_rng(seed).standard_normal((count, 1, 3)) for seed, count in ((0, 90), (1, 7)))
    found = evidence.LevelLOF(rank=2).fit(train).per_level(new)[:, 0]
    z, asked = ((values[:, 0] - train[:, 0].mean(axis=0)) / train[:, 0].std(axis=0) for values in (train, new))
    _, _, axes = np.linalg.svd(z, full_matrices=False)

    def squares(first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """The third direction of two images is orthogonal."""
        lengths = (first**2).sum(axis=1)[:, None] + (second**2).sum(axis=1)
        return lengths - 2.0 * (first @ axes[:2].T) @ (second @ axes[:2].T).T

    own, others = squares(z, z), squares(asked, z)
    np.fill_diagonal(own, np.inf)
    radii, near = np.sort(own, axis=1)[:, 4], np.argsort(others, axis=1)[:, :5]
    expected = np.sort(others, axis=1)[:, 4] / np.exp(np.log(radii[near]).mean(axis=1))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_level_lof_finds_what_lies_between_two_clouds(evidence: ModuleType) -> None:
    """The common mean is the most usual point of one Gaussian, and far from every image."""
    rng = np.random.default_rng(0)
    train = rng.standard_normal((200, 1, 40))
    train[:100] += 3.0
    train[100:] -= 3.0
    between = train.mean(axis=0, keepdims=True)
    local, gaussian = evidence.LevelLOF().fit(train), LevelPCA().fit(train)
    assert local.per_level(between) > local.per_level(train).max()
    assert gaussian.per_level(between) < gaussian.per_level(train).min()
