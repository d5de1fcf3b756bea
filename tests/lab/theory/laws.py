"""Random Gaussians, mixtures and groups small enough for closed forms."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gepc.lab.analytic import GaussianBackbone, MixtureBackbone
from gepc.lab.theory import Array, Gaussian

SHAPE = (1, 2, 2)
D = 4
ABAR = (0.99, 0.9, 0.5, 0.1)

QUARTER = np.kron(np.eye(2), [[0.0, -1.0], [1.0, 0.0]])
GROUPS = {
    "sign": [np.eye(D), -np.eye(D)],
    "quarter turns": [np.linalg.matrix_power(QUARTER, k) for k in range(4)],
    "cyclic shifts": [np.roll(np.eye(D), k, axis=0) for k in range(D)],
}


def covariance(rng: np.random.Generator, size: int = D) -> Array:
    factor = rng.standard_normal((size, size))
    return factor @ factor.T / size + 0.05 * np.eye(size)


def gaussian(rng: np.random.Generator, size: int = D) -> Gaussian:
    return Gaussian(rng.standard_normal(size), covariance(rng, size))


def gaussian_backbone(rng: np.random.Generator) -> GaussianBackbone:
    law = gaussian(rng)
    return GaussianBackbone(law.mean.reshape(SHAPE), law.cov, SHAPE, ABAR)


def mixture_backbone(rng: np.random.Generator, components: int = 3) -> MixtureBackbone:
    laws = [gaussian(rng) for _ in range(components)]
    weights = rng.dirichlet(np.full(components, 3.0)).tolist()
    return MixtureBackbone(weights, [law.mean.reshape(SHAPE) for law in laws], [law.cov for law in laws], SHAPE, ABAR)


@dataclass(frozen=True)
class Bent:
    """x -> W tanh(V x + c): a smooth field that is nobody's score, Lipschitz with |W| |V|."""

    W: Array
    V: Array
    c: Array

    @classmethod
    def random(cls, rng: np.random.Generator) -> Bent:
        return cls(rng.standard_normal((D, D)), rng.standard_normal((D, D)), rng.standard_normal(D))

    def __call__(self, x: Array) -> Array:
        return np.tanh(x @ self.V.T + self.c) @ self.W.T

    @property
    def lipschitz(self) -> float:
        return float(np.linalg.norm(self.W, 2) * np.linalg.norm(self.V, 2))
