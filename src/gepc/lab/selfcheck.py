"""Checks of the installed library against closed forms of the theory, for `gepc selfcheck`."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from gepc.backbones.schedule import Levels, cosine_alphas_cumprod
from gepc.conformal.p_values import p_values
from gepc.detector.registry import GEPC
from gepc.lab.analytic import GaussianBackbone, MixtureBackbone
from gepc.lab.theory import Array, anisotropy_residual, components_of, mean_shift_residual
from gepc.methods.groups import Action, Group

SHAPE = (3, 8, 8)
SIZE = 3 * 8 * 8
LEVEL = Levels((0.99,))


@dataclass(frozen=True)
class Check:
    """One identity: its name, the library's value, that of the closed form, and the accepted relative difference."""

    name: str
    found: float
    expected: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether the two values agree within the tolerance."""
        scale = abs(self.expected) or 1.0
        return bool(abs(self.found - self.expected) <= self.tolerance * scale)


def run_checks() -> list[Check]:
    """Every check, in a second or two."""
    return [_paper_levels(), _mean_shift(), _anisotropy(), _equivariance(), _batch(), _conformal()]


def _images(mean: float = 0.0, std: float = 0.3, count: int = 64) -> Array:
    rng = np.random.default_rng(0)
    return np.clip(mean + std * rng.standard_normal((count, *SHAPE)), -1, 1).astype(np.float32)


def _residual(backbone: MixtureBackbone, group: Group | str, images: Array, noise: Array | None = None) -> float:
    """Mean over images and G of |r_g|^2 at the level, from the library's feature table: s times b times D."""
    detector = GEPC(backbone, levels=LEVEL, keep=1, features=("s", "b"), group=group, pool="mean")
    table = detector.features(images, noise=noise)
    return float((table["s"].mean(2) * table["b"]).mean() * SIZE)


def _abar(backbone: GaussianBackbone) -> float:
    (t,) = LEVEL.timesteps(backbone.alphas_cumprod)
    return float(backbone.alphas_cumprod[t])


def _paper_levels() -> Check:
    found = Levels((0.99997, 0.9999, 0.9979, 0.9969)).timesteps(cosine_alphas_cumprod(4000))
    name = "the paper's levels on its schedule are t = 5, 15, 136, 172"
    return Check(name, float(found == (5, 15, 136, 172)), 1.0, 0)


def _mean_shift() -> Check:
    backbone = GaussianBackbone(0.2, 0.09, SHAPE)
    ((_, law),) = components_of(backbone)
    noised = law.noised(_abar(backbone))
    expected = mean_shift_residual(noised.mean, noised.cov[0, 0])
    found = _residual(backbone, "sign", _images(0.2))
    return Check("mean shift: E_g R = 2 |mu|^2 / sigma^4 under {Id, -Id}", found, expected, 1e-9)


def _turn(x: torch.Tensor, quarters: int) -> torch.Tensor:
    """Quarter turns of the plane of the first two channels, as in the paper's example with d = 2."""
    for _ in range(quarters % 4):
        x = torch.cat([-x[:, 1:2], x[:, 0:1], x[:, 2:]], dim=1)
    return x


def _anisotropy() -> Check:
    """At every x, with |x|^2 of the two channels in place of its mean v1 + v2 in `anisotropy_residual`."""
    variances = np.array([0.04, 0.25, 0.1])
    backbone = GaussianBackbone(0.0, np.broadcast_to(variances[:, None, None], SHAPE), SHAPE)
    abar, images = _abar(backbone), _images()
    noise = np.random.default_rng(1).standard_normal((1, len(images), *SHAPE))
    turns = Group.of([Action(f"R{k}", partial(_turn, quarters=k), partial(_turn, quarters=-k)) for k in (1, 2, 3)])
    x_t = np.sqrt(abar) * images.astype(np.float64) + np.sqrt(1 - abar) * noise[0]
    v1, v2, _ = abar * variances + 1 - abar
    expected = anisotropy_residual(v1, v2) / (v1 + v2) * float(np.square(x_t[:, :2]).sum((1, 2, 3)).mean())
    found = _residual(backbone, turns, images, noise)
    return Check("anisotropy: E_g R = (1/2)(s2^-2 - s1^-2)^2 |x|^2 under C4", found, expected, 1e-9)


def _equivariance() -> Check:
    backbone = MixtureBackbone([0.3, 0.7], [0.4, -0.2], [0.04, 0.09], SHAPE)
    found = _residual(backbone, "d4", _images())
    return Check("an invariant mixture has an equivariant score: residual 0", found, 0.0, 1e-12)


def _batch() -> Check:
    backbone = GaussianBackbone(np.linspace(-0.3, 0.3, SIZE).reshape(SHAPE), 0.09, SHAPE)
    detector = GEPC(backbone, levels=(0.99, 0.999)).fit(_images())
    images = _images(0.1, count=12)
    together, alone = detector.score(images), np.concatenate([detector.score(images[i : i + 1]) for i in range(12)])
    return Check("a score does not depend on its batch", float(np.abs(together - alone).max()), 0.0, 1e-9)


def _conformal() -> Check:
    found = p_values(np.array([98.5, 98.0, -1.0]), np.arange(99.0))
    return Check("p = (1 + #{cal >= s})/(n + 1)", float(np.abs(found - [0.01, 0.02, 1.0]).max()), 0.0, 1e-15)
