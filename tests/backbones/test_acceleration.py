"""Reduced precision and shapes without memory, on the CPU: the code path that a GPU takes."""

import numpy as np
import pytest
import torch

import gepc
from gepc.core.errors import OptionError
from tests.families import FAMILIES, SIDE, make

NOISED = torch.randn(3, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("net")
    make("pixels", place)
    return place


def test_reduced_precision_changes_predictions_and_scores_a_little(folder):
    images = np.random.default_rng(0).uniform(-1, 1, (30, 3, SIDE, SIDE)).astype(np.float32)
    exact, reduced = (gepc.load_backbone(folder, device="cpu", dtype=name) for name in ("float32", "bfloat16"))
    gap = (reduced.eps(NOISED, 10) - exact.eps(NOISED, 10)).norm() / exact.eps(NOISED, 10).norm()
    assert 0 < gap < 0.05
    assert {parameter.dtype for parameter in reduced.net.parameters()} == {torch.bfloat16}
    assert reduced.describe()["precision"] == "bfloat16"
    assert reduced.fingerprint != exact.fingerprint
    first, second = (gepc.create_detector(one, size=SIDE, maps="raw").fit(images) for one in (exact, reduced))
    ranks = [np.argsort(np.argsort(detector.score(images))) for detector in (first, second)]
    assert np.corrcoef(ranks)[0, 1] > 0.9


def test_an_unknown_precision_is_refused(folder):
    with pytest.raises(OptionError, match="unknown dtype 'mixed_bfloat16'; did you mean 'bfloat16'"):
        gepc.load_backbone(folder, dtype="mixed_bfloat16")


@pytest.mark.parametrize("family", ["pixels", "EDM", "Stable Diffusion", "DiT", "SD3", "Flux"])
def test_shapes_without_memory(family, tmp_path):
    """On the meta device nothing is computed: a tensor that was left on the CPU is an error."""
    assert family in FAMILIES
    backbone = gepc.load_backbone(tmp_path, device="meta", **make(family, tmp_path))
    shape = (2, *backbone.network_shape((SIDE, SIDE)))
    x = torch.empty(shape, device="meta")
    assert backbone.eps(x, 3).shape == shape
    answer, layers = backbone.eps_and_activations(x, 3)
    assert answer.is_meta
    assert all(values.is_meta and len(values) == 2 for values in layers.values())
