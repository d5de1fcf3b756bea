"""The theory's closed forms on this machine: does the installed library compute what the mathematics says?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gepc.backbones.analytic import GaussianBackbone, MixtureBackbone
from gepc.backbones.schedule import Levels, cosine_alphas_cumprod
from gepc.detector.registry import GEPC
from gepc.features.groups import Action, Group
from gepc.verdicts.conformal import p_values

SHAPE = (3, 8, 8)
SIZE = 3 * 8 * 8


@dataclass(frozen=True)
class Check:
    """One identity: what the library gave, what it must be, and how far apart they may be."""

    name: str
    found: float
    expected: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Within the tolerance, which is relative to the expected value where that is not zero."""
        scale = abs(self.expected) or 1.0
        return bool(abs(self.found - self.expected) <= self.tolerance * scale)


def run_checks() -> list[Check]:
    """Every check, in a second or two."""
    return [check() for check in _CHECKS]


def _images(mean: float = 0.0, std: float = 0.3, count: int = 64) -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.clip(mean + std * rng.standard_normal((count, *SHAPE)), -1, 1).astype(np.float32)


def _residual(backbone: GaussianBackbone | MixtureBackbone, group: Group, images: np.ndarray) -> float:
    """mean over images and G of |r_g|^2 at the one level, from the library's own table: s times b, times D."""
    detector = GEPC(backbone, levels=(0.99,), keep=1, features=("s", "b"), group=group, pool="mean")
    table = detector.features(images)
    return float((table["s"].mean(2) * table["b"]).mean() * SIZE)


def _paper_levels() -> Check:
    found = Levels((0.99997, 0.9999, 0.9979, 0.9969)).timesteps(cosine_alphas_cumprod(4000))
    return Check(
        "the paper's levels on its schedule are t = 5, 15, 136, 172", float(found == (5, 15, 136, 172)), 1.0, 0
    )


def _mean_shift() -> Check:
    """E_g |r|^2 = 2 |mu_t|^2 / v_t^2 for G = {Id, -Id}, mu_t = sqrt(abar) mu, v_t = abar s^2 + 1 - abar."""
    mu, variance = 0.2, 0.09
    backbone = GaussianBackbone(mu, variance, SHAPE)
    (t,) = Levels((0.99,)).timesteps(backbone.alphas_cumprod)
    abar = backbone.alphas_cumprod[t]
    expected = 2 * SIZE * abar * mu**2 / (abar * variance + 1 - abar) ** 2
    found = _residual(backbone, Group.of("sign"), _images(mu))
    return Check("mean shift: E_g R = 2 |mu|^2 / sigma^4 under {Id, -Id}", found, float(expected), 1e-9)


def _channel_rotation() -> Group:
    """C4 on the plane of the first two channels, as in the paper's example with d = 2."""

    def turn(quarters: int) -> Callable[..., object]:
        def act(x: object) -> object:
            import torch

            assert isinstance(x, torch.Tensor)
            rotated = x.clone()
            for _ in range(quarters % 4):
                rotated = torch.cat([-rotated[:, 1:2], rotated[:, 0:1], rotated[:, 2:]], dim=1)
            return rotated

        return act

    return Group.of([Action(f"R{k}", turn(k), turn(-k)) for k in (1, 2, 3)])  # type: ignore[arg-type]


def _anisotropy() -> Check:
    """Every pixel: (1/2)(s2^-2 - s1^-2)^2 (x1^2 + x2^2) averaged over C4 acting on two channels, exact for each x."""
    first, second = 0.04, 0.25
    cov = np.broadcast_to(np.array([first, second, 0.1])[:, None, None], SHAPE)
    backbone = GaussianBackbone(0.0, cov, SHAPE)
    (t,) = Levels((0.99,)).timesteps(backbone.alphas_cumprod)
    abar = backbone.alphas_cumprod[t]
    images = _images()
    noise = np.random.default_rng(1).standard_normal((1, len(images), *SHAPE))
    detector = GEPC(backbone, levels=(0.99,), keep=1, features=("s", "b"), group=_channel_rotation(), pool="mean")
    table = detector.features(images, noise=noise)
    found = float((table["s"].mean(2) * table["b"]).mean() * SIZE)
    x_t = np.sqrt(abar) * images + np.sqrt(1 - abar) * noise[0]
    v1, v2 = abar * first + 1 - abar, abar * second + 1 - abar
    expected = 0.5 * (1 / v2 - 1 / v1) ** 2 * float((x_t[:, :2] ** 2).sum((1, 2, 3)).mean())
    return Check("anisotropy: E_g R = (1/2)(s2^-2 - s1^-2)^2 |x|^2 under C4", found, expected, 1e-9)


def _equivariance() -> Check:
    backbone = MixtureBackbone([0.3, 0.7], [0.4, -0.2], [0.04, 0.09], SHAPE)
    found = _residual(backbone, Group.of("d4"), _images())
    return Check("an invariant mixture has an equivariant score: residual 0", found, 0.0, 1e-12)


def _batch() -> Check:
    backbone = GaussianBackbone(np.linspace(-0.3, 0.3, SIZE).reshape(SHAPE), 0.09, SHAPE)
    detector = GEPC(backbone, levels=(0.99, 0.999)).fit(_images())
    images = _images(0.1, count=12)
    together, alone = detector.score(images), np.concatenate([detector.score(images[i : i + 1]) for i in range(12)])
    return Check("a score does not depend on its batch", float(np.abs(together - alone).max()), 0.0, 1e-9)


def _conformal() -> Check:
    calibration = np.arange(99.0)
    found = p_values(np.array([98.5, 98.0, -1.0]), calibration)
    return Check("p = (1 + #{cal >= s})/(n + 1)", float(np.abs(found - [0.01, 0.02, 1.0]).max()), 0.0, 1e-15)


_CHECKS: tuple[Callable[[], Check], ...] = (
    _paper_levels,
    _mean_shift,
    _anisotropy,
    _equivariance,
    _batch,
    _conformal,
)
