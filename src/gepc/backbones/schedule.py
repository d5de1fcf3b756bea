"""Noise schedules and noise levels. All arithmetic is float64: a float32 product is 0.3 % off at the first step."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gepc.core.errors import InputError, OptionError, check_choice

FloatArray = npt.NDArray[np.float64]

_SCALES: dict[str, tuple[Callable[[float], bool], str]] = {
    "sqrt_abar": (lambda value: 0.0 < value < 1.0, "between 0 and 1"),
    "snr": (lambda value: value > 0.0, "positive"),
    "rho": (lambda value: value > 0.0, "positive"),
    "index": (lambda value: value >= 0.0 and value == int(value), "a whole number from 0"),
}


def cosine_alphas_cumprod(steps: int) -> FloatArray:
    """abar_t of the cosine schedule, f(u) = cos^2(pi/2 (u + 0.008)/1.008), with beta_t at most 0.999."""
    u = np.arange(steps + 1, dtype=np.float64) / steps
    f = np.cos((u + 0.008) / 1.008 * math.pi / 2) ** 2
    betas = np.minimum(1.0 - f[1:] / f[:-1], 0.999)
    return np.asarray(np.cumprod(1.0 - betas), dtype=np.float64)


def linear_alphas_cumprod(steps: int) -> FloatArray:
    """abar_t of the linear schedule: beta_t from 1e-4 to 0.02, both times 1000/steps."""
    scale = 1000.0 / steps
    betas = np.linspace(scale * 1e-4, scale * 0.02, steps, dtype=np.float64)
    return np.asarray(np.cumprod(1.0 - betas), dtype=np.float64)


def check_alphas_cumprod(alphas_cumprod: npt.ArrayLike) -> FloatArray:
    """The schedule as a read-only float64 vector, after checking that it falls from below 1 towards 0."""
    abar = np.array(alphas_cumprod, dtype=np.float64).reshape(-1)
    if abar.size == 0 or not np.isfinite(abar).all():
        raise InputError("alphas_cumprod must hold at least one finite number")
    if abar.max() >= 1.0 or abar.min() < 0.0 or (np.diff(abar) > 0).any():
        raise InputError(
            "alphas_cumprod must fall from below 1 towards 0 as the timestep grows; check its order and range"
        )
    abar.setflags(write=False)
    return abar


def rho_of(abar: npt.ArrayLike) -> FloatArray:
    """rho = sqrt(1/abar - 1), the noise's standard deviation in data units; infinite where abar is 0."""
    with np.errstate(divide="ignore"):
        return np.asarray(np.sqrt(1.0 / np.asarray(abar, dtype=np.float64) - 1.0))


def log_variances(alphas_cumprod: FloatArray) -> tuple[FloatArray, FloatArray]:
    """log beta_t and log btilde_t for every t, btilde_t = beta_t (1 - abar_{t-1})/(1 - abar_t), at t = 0 that of t = 1.

    These are the two limits of the variance of the reverse step from t to t-1.
    """
    before = np.concatenate([[1.0], alphas_cumprod[:-1]])
    with np.errstate(invalid="ignore"):
        betas = np.where(before > 0.0, 1.0 - alphas_cumprod / before, 1.0)
    small = betas * (1.0 - before) / (1.0 - alphas_cumprod)
    small[0] = small[1] if len(small) > 1 else betas[0]
    return np.log(betas), np.log(small)


@dataclass(frozen=True)
class Levels:
    """Noise levels on one scale, mapped to the nearest timesteps of a schedule.

    Parameters
    ----------
    values : the levels.
    scale : `sqrt_abar` (the paper's released configurations), `snr` = abar/(1-abar) (its appendix),
        `rho` = sqrt(1/abar - 1), or `index`, a timestep. An index means a different noise level on every schedule;
        prefer the others.
    """

    values: tuple[float, ...]
    scale: str = "sqrt_abar"

    def __post_init__(self) -> None:
        check_choice("level scale", self.scale, _SCALES)
        object.__setattr__(self, "values", tuple(float(value) for value in self.values))
        if not self.values:
            raise OptionError("levels must name at least one noise level")
        valid, wanted = _SCALES[self.scale]
        for value in self.values:
            if not (math.isfinite(value) and valid(value)):
                raise OptionError(f"a level on the scale {self.scale!r} must be {wanted}; got {value:g}")

    @classmethod
    def sqrt_abar(cls, *values: float) -> Levels:
        """Levels given as sqrt(abar_t)."""
        return cls(values, "sqrt_abar")

    @classmethod
    def snr(cls, *values: float) -> Levels:
        """Levels given as abar_t / (1 - abar_t)."""
        return cls(values, "snr")

    @classmethod
    def rho(cls, *values: float) -> Levels:
        """Levels given as sqrt(1/abar_t - 1)."""
        return cls(values, "rho")

    @classmethod
    def index(cls, *values: int) -> Levels:
        """Levels given as bare timestep indices of one schedule."""
        return cls(tuple(float(value) for value in values), "index")

    @classmethod
    def of(cls, levels: Levels | str | float | Iterable[float]) -> Levels:
        """Read levels: a `Levels`, plain numbers (sqrt(abar)), or text such as `rho:0.05,0.17`."""
        if isinstance(levels, Levels):
            return levels
        if isinstance(levels, str):
            return cls._parse(levels)
        if isinstance(levels, (int, float)):
            levels = (float(levels),)
        return cls(tuple(levels))

    @classmethod
    def _parse(cls, text: str) -> Levels:
        scale, _, numbers = text.rpartition(":")
        try:
            values = tuple(float(number) for number in re.split(r"[,\s]+", numbers.strip()) if number)
        except ValueError as error:
            raise OptionError(f"cannot read levels {text!r}; write for instance 0.99,0.999 or rho:0.05,0.17") from error
        return cls(values, scale.strip() or "sqrt_abar")

    def timesteps(self, alphas_cumprod: npt.ArrayLike) -> tuple[int, ...]:
        """Ascending distinct timesteps nearest to the levels on this schedule.

        sqrt(abar) is matched linearly, as the paper does; SNR and rho in log rho, where a schedule is nearly even.
        """
        abar = np.asarray(alphas_cumprod, dtype=np.float64)
        if self.scale == "index":
            if max(self.values) >= len(abar):
                raise OptionError(
                    f"level index {max(self.values):g} does not exist: the schedule ends at {len(abar) - 1}"
                )
            return tuple(sorted({int(value) for value in self.values}))
        if self.scale == "sqrt_abar":
            axis, targets = np.sqrt(abar), np.asarray(self.values)
        else:
            rho = np.asarray([value if self.scale == "rho" else value**-0.5 for value in self.values])
            axis, targets = np.log(rho_of(abar)), np.log(rho)
        return tuple(sorted({int(np.argmin(np.abs(axis - target))) for target in targets}))

    def __str__(self) -> str:
        return f"{self.scale}:" + ",".join(repr(value) for value in self.values)
