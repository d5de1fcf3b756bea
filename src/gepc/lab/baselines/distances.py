"""Distances between two batches of pictures: dist(a, b) -> (N,) for a, b (N, C, H, W) in [0, 1].

    mse       mean of (a - b)^2
    msgms     1 - gradient magnitude similarity of the luminance (Prewitt), mean over pixels and three scales
    ssim      1 - structural similarity with a 7x7 uniform window, mean over two scales
    lpips     Zhang et al., CVPR 2018 (Alex), if the package and its weights are installed

Each is symmetric, and 0 for equal pictures. Scales differ: calibrate before adding them.
"""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import torch

from gepc.core.errors import OptionError, check_choice
from gepc.methods.diffpath import SSIM_WINDOW, similarity

Distance = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

OTHERWISE = "or take msgms, as the presets `light` do"
DISTANCES = ("mse", "msgms", "ssim", "lpips")
GMS_CONSTANT = 170.0 / 255.0**2
SMALLEST_SIDE = 4


def mse(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Mean squared difference."""
    return (a - b).double().square().flatten(1).mean(1)


def msgms(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """1 - mean of (2 m_a m_b + c)/(m_a^2 + m_b^2 + c), m the gradient magnitude; at full, half and quarter size."""
    gaps = []
    for left, right in _pyramid(_luminance(a), _luminance(b), 3, SMALLEST_SIDE):
        m_a, m_b = _gradient(left), _gradient(right)
        similarity = (2.0 * m_a * m_b + GMS_CONSTANT) / (m_a.square() + m_b.square() + GMS_CONSTANT)
        gaps.append(1.0 - similarity.flatten(1).mean(1))
    return torch.stack(gaps).mean(0)


def ssim(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """1 - SSIM of every channel (data range 1) over all windows that fit; at full and half size where one fits."""
    pairs = _pyramid(a.double(), b.double(), 2, SSIM_WINDOW)
    gaps = [1.0 - similarity(*pair, min(SSIM_WINDOW, *pair[0].shape[2:])).flatten(1).mean(1) for pair in pairs]
    return torch.stack(gaps).mean(0)


def _pyramid(a: torch.Tensor, b: torch.Tensor, scales: int, smallest: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The pair at up to `scales` sizes, halved by averaging 2x2 pixels, down to `smallest` pixels a side."""
    pairs = [(a, b)]
    for _ in range(scales - 1):
        if min(pairs[-1][0].shape[2:]) < 2 * smallest:
            break
        left, right = pairs[-1]
        pairs.append((torch.nn.functional.avg_pool2d(left, 2), torch.nn.functional.avg_pool2d(right, 2)))
    return pairs


def _luminance(x: torch.Tensor) -> torch.Tensor:
    if x.shape[1] != 3:
        return x.double().mean(1, keepdim=True)
    weights = torch.tensor([0.299, 0.587, 0.114], dtype=torch.float64, device=x.device)
    return (x.double() * weights.reshape(1, 3, 1, 1)).sum(1, keepdim=True)


def _gradient(x: torch.Tensor) -> torch.Tensor:
    """Prewitt gradient magnitude; the border is replicated."""
    row = torch.tensor([1.0, 0.0, -1.0], dtype=x.dtype, device=x.device) / 3.0
    kernel = row.repeat(3, 1)
    padded = torch.nn.functional.pad(x, (1, 1, 1, 1), mode="replicate")
    both = torch.nn.functional.conv2d(padded, torch.stack([kernel, kernel.T])[:, None])
    return both.square().sum(1, keepdim=True).sqrt()


class LPIPS:
    """LPIPS with AlexNet on the given device, from files on disk; nothing is downloaded."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        if importlib.util.find_spec("lpips") is None:
            raise OptionError(f"the distance 'lpips' needs the package lpips: pip install 'gepc[lpips]'; {OTHERWISE}")
        weights = Path(torch.hub.get_dir()) / "checkpoints"
        if not any(weights.glob("alexnet*")):
            raise OptionError(f"the distance 'lpips' needs AlexNet's weights in {weights}; {OTHERWISE}")
        self.net = importlib.import_module("lpips").LPIPS(net="alex", verbose=False).eval().to(device)

    def __call__(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """(N,) float64."""
        with torch.no_grad():
            distances: torch.Tensor = self.net(self._prepared(a), self._prepared(b))
        return distances.flatten().double()

    @staticmethod
    def _prepared(x: torch.Tensor) -> torch.Tensor:
        """In [-1, 1], three channels, at least 32 pixels a side (zeros around)."""
        x = x.float().repeat(1, 3 // x.shape[1], 1, 1) * 2.0 - 1.0
        high, wide = (max(0, 32 - side) for side in x.shape[2:])
        return torch.nn.functional.pad(x, (wide // 2, wide - wide // 2, high // 2, high - high // 2))


def distance_of(name: str, device: torch.device | str = "cpu") -> Distance:
    """The distance of that name, for pictures on the device; `OptionError` for `lpips` if it is not installed."""
    check_choice("distance", name, DISTANCES)
    if name == "lpips":
        return LPIPS(device)
    return {"mse": mse, "msgms": msgms, "ssim": ssim}[name]
