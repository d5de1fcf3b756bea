"""Distances: zero on the diagonal, symmetric, growing with blur, indifferent to what they should be."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from scipy.ndimage import uniform_filter

from gepc.core.errors import OptionError
from gepc.lab.baselines.distances import (
    DISTANCES,
    distance_of,
    mse,
    msgms,
    ssim,
)
from gepc.methods.diffpath import unit

RNG = np.random.default_rng(0)


def picture(size: int = 32) -> np.ndarray:
    """Blocks and a ramp in [0.1, 0.9]: edges for the blur to soften."""
    blocks = np.kron(RNG.uniform(0.1, 0.9, (2, 3, size // 4, size // 4)), np.ones((1, 1, 4, 4)))
    return 0.7 * blocks + 0.2 * np.linspace(0, 1, size)


@pytest.mark.parametrize("name", ["mse", "msgms", "ssim"])
def test_zero_symmetric_and_growing_with_blur(name: str) -> None:
    distance, image = distance_of(name), picture()
    levels = [torch.from_numpy(uniform_filter(image, (0, 0, 2 * r + 1, 2 * r + 1))).float() for r in range(4)]
    found = torch.stack([distance(levels[0], blurred) for blurred in levels])
    torch.testing.assert_close(found[0], torch.zeros_like(found[0]), atol=1e-6, rtol=0)
    torch.testing.assert_close(distance(levels[2], levels[0]), found[2])
    assert (found.diff(dim=0) > 0).all()


def test_mse_by_hand() -> None:
    a, b = torch.zeros(2, 3, 4, 4), torch.full((2, 3, 4, 4), 0.5)
    torch.testing.assert_close(mse(a, b), torch.full((2,), 0.25, dtype=torch.float64))


def test_gradients_do_not_see_a_constant() -> None:
    a = torch.from_numpy(picture())
    b = torch.from_numpy(picture())
    torch.testing.assert_close(msgms(a + 0.1, b), msgms(a, b))
    assert (mse(a + 0.1, a) > 0.009).all()


def test_gradient_similarity_by_hand() -> None:
    """A flat picture against a ramp of slope g: (c)/(4 g^2 + c) inside, one-sided at the replicated border."""
    ramp = torch.linspace(0, 0.7, 8, dtype=torch.float64).reshape(1, 1, 1, 8).expand(1, 3, 8, 8)
    c = 170 / 255**2
    gaps = []
    for step, width in ((0.1, 8), (0.2, 4)):
        slope = np.full(width, 2 * step)
        slope[[0, -1]] = step
        gaps.append(1 - (c / (slope**2 + c)).mean())
    assert float(msgms(torch.full_like(ramp, 0.3), ramp)) == pytest.approx(np.mean(gaps), rel=1e-9)


def test_structural_similarity_is_skimages() -> None:
    skimage = pytest.importorskip("skimage.metrics")
    a = picture(16)
    b = np.clip(a + 0.1 * RNG.standard_normal(a.shape), 0, 1)
    halves = [torch.nn.functional.avg_pool2d(torch.from_numpy(field), 2).numpy() for field in (a, b)]
    expected = []
    for row in range(2):
        scales = [(a[row], b[row]), (halves[0][row], halves[1][row])]
        similar = [skimage.structural_similarity(x, y, win_size=7, data_range=1.0, channel_axis=0) for x, y in scales]
        expected.append(1 - np.mean(similar))
    np.testing.assert_allclose(ssim(torch.from_numpy(a), torch.from_numpy(b)), expected, rtol=1e-6)


@pytest.mark.parametrize("distance", [mse, msgms, ssim])
@pytest.mark.parametrize("shape", [(1, 4, 4), (3, 5, 9), (4, 8, 8)])
def test_small_and_grey_pictures(distance: object, shape: tuple[int, ...]) -> None:
    a, b = torch.rand(2, 2, *shape, generator=torch.Generator().manual_seed(0))
    found = distance(a, b)  # type: ignore[operator]
    assert found.shape == (2,)
    assert torch.isfinite(found).all()


def test_names() -> None:
    assert set(DISTANCES) == {"mse", "msgms", "ssim", "lpips"}
    with pytest.raises(OptionError, match="did you mean 'msgms'"):
        distance_of("msgm")
    if importlib.util.find_spec("lpips") is None:
        with pytest.raises(OptionError, match=r"needs the package lpips: pip install 'gepc\[lpips\]'"):
            distance_of("lpips")
    torch.testing.assert_close(unit(torch.tensor([-2.0, -1.0, 0.0, 1.0])), torch.tensor([0.0, 0.0, 0.5, 1.0]))


def test_lpips_sees_three_channels_in_its_range_and_at_least_32_pixels_a_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for the package, which keeps what it was given."""
    seen: list[torch.Tensor] = []

    class Kept(torch.nn.Module):
        def __init__(self, net: str, verbose: bool) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            seen.extend([a, b])
            return (a - b).abs().mean((1, 2, 3), keepdim=True)

    module = ModuleType("lpips")
    module.LPIPS, module.__spec__ = Kept, importlib.machinery.ModuleSpec("lpips", None)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lpips", module)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    with pytest.raises(OptionError, match=r"needs AlexNet's weights in .*checkpoints; or take msgms"):
        distance_of("lpips")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "alexnet-owt.pth").touch()
    distance_of("lpips")
    grey = torch.linspace(0.0, 1.0, 2 * 9 * 40, dtype=torch.float64).reshape(2, 1, 9, 40)
    found = distance_of("lpips")(grey, 1.0 - grey)
    assert (found.shape, found.dtype) == ((2,), torch.float64)
    assert seen[0].shape == (2, 3, 32, 40)
    expected = (2.0 * grey - 1.0).float().repeat(1, 3, 1, 1)
    torch.testing.assert_close(seen[0][:, :, 11:20], expected)
    assert not seen[0][:, :, :11].any()
    assert not seen[0][:, :, 20:].any()
    elsewhere = distance_of("lpips", torch.device("meta"))
    assert elsewhere.net.weight.device == torch.device("meta")  # type: ignore[attr-defined]
