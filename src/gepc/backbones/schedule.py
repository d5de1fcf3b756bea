"""Noise schedules and noise levels. All arithmetic is float64: a float32 product is 0.3 % off at the first step."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gepc.core.errors import InputError, OptionError, check_choice

FloatArray = npt.NDArray[np.float64]

SCALES = ("sqrt_abar", "snr", "rho", "index")


def cosine_alphas_cumprod(steps: int, max_beta: float = 0.999) -> FloatArray:
    """abar_t of the cosine schedule, f(u) = cos^2(pi/2 (u + 0.008)/1.008), with beta_t clipped at `max_beta`."""
    u = np.arange(steps + 1, dtype=np.float64) / steps
    f = np.cos((u + 0.008) / 1.008 * math.pi / 2) ** 2
    betas = np.minimum(1.0 - f[1:] / f[:-1], max_beta)
    return np.asarray(np.cumprod(1.0 - betas), dtype=np.float64)


def linear_alphas_cumprod(steps: int, beta_start: float | None = None, beta_end: float | None = None) -> FloatArray:
    """abar_t of the linear schedule; the default end points are 1e-4 and 0.02 scaled by 1000/steps."""
    scale = 1000.0 / steps
    start = scale * 1e-4 if beta_start is None else beta_start
    end = scale * 0.02 if beta_end is None else beta_end
    return np.asarray(np.cumprod(1.0 - np.linspace(start, end, steps, dtype=np.float64)), dtype=np.float64)


def check_alphas_cumprod(alphas_cumprod: npt.ArrayLike) -> FloatArray:
    """The schedule as a float64 vector; it must fall strictly inside (0, 1], zero allowed at the very end."""
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


@dataclass(frozen=True)
class Levels:
    """Noise levels as a user gives them: values on one scale, mapped to timesteps by nearest neighbour.

    Scales: `sqrt_abar` (the paper's released configurations), `snr` = abar/(1-abar) (its appendix),
    `rho` = sqrt(1/abar - 1), and `index`, a bare timestep. A bare index means another noise level on every
    schedule; prefer the others.
    """

    values: tuple[float, ...]
    scale: str = "sqrt_abar"

    def __post_init__(self) -> None:
        check_choice("level scale", self.scale, SCALES)
        object.__setattr__(self, "values", tuple(float(value) for value in self.values))
        if not self.values:
            raise OptionError("levels must name at least one noise level")
        self._check_range()

    def _check_range(self) -> None:
        for value in self.values:
            inside = {
                "sqrt_abar": 0.0 < value < 1.0,
                "snr": value > 0.0,
                "rho": value > 0.0,
                "index": value >= 0.0 and value == int(value),
            }[self.scale]
            if not (math.isfinite(value) and inside):
                wanted = {
                    "sqrt_abar": "between 0 and 1",
                    "snr": "positive",
                    "rho": "positive",
                    "index": "a whole number from 0",
                }
                raise OptionError(f"a level on the scale {self.scale!r} must be {wanted[self.scale]}; got {value:g}")

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


def sub_schedule(alphas_cumprod: npt.ArrayLike, timesteps: Sequence[int]) -> FloatArray:
    """abar restricted to the retained timesteps (respacing): betas follow from the ratios of what is kept."""
    return np.asarray(alphas_cumprod, dtype=np.float64)[np.asarray(timesteps, dtype=np.int64)]
