"""The residual as a function of the rotation angle: its Fourier coefficients as a feature."""

from __future__ import annotations

import numpy as np
import torch

from gepc.methods.features import Array, feature, nanmean, relative_residual
from gepc.methods.operators import Operator
from gepc.methods.passes import ElementAnswers, LevelAnswers

HARMONICS = 4


def amplitudes(values: Array) -> Array:
    """c_0 and |c_k|, k = 1 ... 4, from (N, levels, elements, 9): means over the rotations that were evaluated.

    With angles drawn uniformly from the circle, each coefficient is unbiased before its absolute value is taken.
    """
    means = nanmean(np.moveaxis(values, 2, 3))
    cosines, sines = means[..., 1 : 1 + HARMONICS], means[..., 1 + HARMONICS :]
    return np.concatenate([means[..., :1], np.hypot(cosines, sines)], axis=-1)


@feature("steer", per="element", average=amplitudes, joint=True)
def steer(level: LevelAnswers, g: ElementAnswers) -> torch.Tensor | None:
    """R(a) (1, cos k a, sin k a), whose mean over rotations by a are the Fourier coefficients of R = pool(r_g^2)/b."""
    operator = g.action.apply
    if not isinstance(operator, Operator) or operator.family != "rotate":
        return None
    degrees = torch.as_tensor(operator.numbers[0], dtype=torch.float64).flatten().expand(len(g.rows))
    phases = torch.deg2rad(degrees)[:, None] * torch.arange(1, HARMONICS + 1)
    waves = torch.cat([torch.ones(len(g.rows), 1), phases.cos(), phases.sin()], dim=1)
    return relative_residual(level, g).double()[:, None] * waves.to(level.eps.device)
