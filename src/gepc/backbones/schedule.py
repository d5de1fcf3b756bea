"""Noise schedules and noise levels. All arithmetic is in float64: a float32 product is 0.3 % off at the first step."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from gepc.core.errors import BackboneError, InputError, OptionError, check_choice, check_least, raising
from gepc.core.options import build

T = TypeVar("T")
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
    if hasattr(alphas_cumprod, "detach"):  # a tensor, also of a subclass that NumPy cannot read
        alphas_cumprod = alphas_cumprod.detach().cpu().numpy()
    abar = np.array(alphas_cumprod, dtype=np.float64).reshape(-1)
    if abar.size == 0 or not np.isfinite(abar).all():
        raise InputError("alphas_cumprod must hold at least one finite number")
    if abar.max() >= 1.0 or abar.min() < 0.0 or (np.diff(abar) > 0).any():
        raise InputError("alphas_cumprod must fall from below 1 towards 0 with the timestep; check its order and range")
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

    Examples
    --------
    The paper's levels on its schedule:

    >>> import gepc
    >>> from gepc.backbones.schedule import cosine_alphas_cumprod
    >>> gepc.Levels((0.99997, 0.9999, 0.9979, 0.9969)).timesteps(cosine_alphas_cumprod(4000))
    (5, 15, 136, 172)

    See Also
    --------
    Backbone : `alphas_cumprod` is its schedule.
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
        """Make levels from values of sqrt(abar_t).

        Parameters
        ----------
        *values : float
            The levels.

        Returns
        -------
        Levels
            The levels, on the scale `sqrt_abar`.

        Examples
        --------
        >>> from gepc import Levels
        >>> str(Levels.sqrt_abar(0.99))
        'sqrt_abar:0.99'
        """
        return cls(values, "sqrt_abar")

    @classmethod
    def snr(cls, *values: float) -> Levels:
        """Make levels from values of abar_t / (1 - abar_t).

        Parameters
        ----------
        *values : float
            The levels.

        Returns
        -------
        Levels
            The levels, on the scale `snr`.

        Examples
        --------
        >>> from gepc import Levels
        >>> str(Levels.snr(100.0, 9.0))
        'snr:100.0,9.0'
        """
        return cls(values, "snr")

    @classmethod
    def rho(cls, *values: float) -> Levels:
        """Make levels from values of sqrt(1/abar_t - 1).

        Parameters
        ----------
        *values : float
            The levels.

        Returns
        -------
        Levels
            The levels, on the scale `rho`.

        Examples
        --------
        >>> from gepc import Levels
        >>> str(Levels.rho(0.1, 0.3))
        'rho:0.1,0.3'
        """
        return cls(values, "rho")

    @classmethod
    def index(cls, *values: int) -> Levels:
        """Make levels from indices of one schedule.

        Parameters
        ----------
        *values : int
            The levels.

        Returns
        -------
        Levels
            The levels, on the scale `index`.

        Examples
        --------
        >>> from gepc import Levels
        >>> Levels.index(7, 3).timesteps([0.9] * 10)
        (3, 7)
        """
        return cls(tuple(float(value) for value in values), "index")

    @classmethod
    def of(cls, levels: Levels | str | float | Iterable[float]) -> Levels:
        """Read levels in any of the forms that options take.

        Parameters
        ----------
        levels : Levels or str or numbers
            Plain numbers are sqrt(abar). A text such as `rho:0.05,0.17` names its scale.

        Returns
        -------
        Levels
            The levels; a `Levels` is returned as it is.

        Raises
        ------
        OptionError : the text cannot be read, or a number is outside its scale.

        Examples
        --------
        >>> from gepc import Levels
        >>> Levels.of("rho:0.05,0.17") == Levels.rho(0.05, 0.17)
        True
        """
        if isinstance(levels, Levels):
            return levels
        if not isinstance(levels, str):
            return cls((float(levels),) if isinstance(levels, (int, float)) else tuple(levels))
        scale, _, numbers = levels.rpartition(":")
        example = "write for instance 0.99,0.999 or rho:0.05,0.17"
        with raising(OptionError, f"cannot read levels {levels!r}; {example}", ValueError):
            values = tuple(float(number) for number in re.split(r"[,\s]+", numbers.strip()) if number)
        return cls(values, scale.strip() or "sqrt_abar")

    def timesteps(self, alphas_cumprod: npt.ArrayLike) -> tuple[int, ...]:
        """Return the timesteps that are nearest to the levels on a schedule.

        sqrt(abar) is matched linearly, as the paper does; SNR and rho in log rho, where a schedule is nearly even.

        Parameters
        ----------
        alphas_cumprod : the schedule, an array (T,).

        Returns
        -------
        tuple of int
            The timesteps, ascending and distinct.

        Raises
        ------
        OptionError : an index is outside the schedule.

        Examples
        --------
        >>> from gepc import Levels
        >>> Levels.snr(1.0, 9.0).timesteps([0.99, 0.9, 0.5])
        (1, 2)
        """
        abar = np.asarray(alphas_cumprod, dtype=np.float64)
        if self.scale == "index":
            if max(self.values) >= len(abar):
                raise OptionError(f"there is no level index {max(self.values):g}: the schedule ends at {len(abar) - 1}")
            return tuple(sorted({int(value) for value in self.values}))
        if self.scale == "sqrt_abar":
            axis, targets = np.sqrt(abar), np.asarray(self.values)
        else:
            rho = np.asarray([value if self.scale == "rho" else value**-0.5 for value in self.values])
            axis, targets = np.log(rho_of(abar)), np.log(rho)
        return tuple(sorted({int(np.argmin(np.abs(axis - target))) for target in targets}))

    def __str__(self) -> str:
        return f"{self.scale}:" + ",".join(repr(value) for value in self.values)


PREDICTION_TYPES = ("epsilon", "v_prediction", "sample")
VARIANCE_TYPES = ("fixed_small", "fixed_small_log", "fixed_large", "fixed_large_log", "learned", "learned_range")


@dataclass(frozen=True)
class Scheduler:
    """The forward process and the meaning of the network's answer, under the names diffusers uses.

    One field is not from diffusers: with `rescale_timesteps` the network is called with t*1000/T instead of t, as
    OpenAI's networks are.
    """

    num_train_timesteps: int = 1000
    beta_start: float = 0.0001
    beta_end: float = 0.02
    beta_schedule: str = "linear"
    trained_betas: tuple[float, ...] | None = None
    rescale_betas_zero_snr: bool = False
    prediction_type: str = "epsilon"
    variance_type: str | None = None
    rescale_timesteps: bool = False

    def __post_init__(self) -> None:
        check_choice("prediction_type", self.prediction_type, PREDICTION_TYPES)
        if self.variance_type is not None:
            check_choice("variance_type", self.variance_type, VARIANCE_TYPES)
        if self.trained_betas is None:
            check_choice("beta_schedule", self.beta_schedule, _BETAS)
            check_least(1, num_train_timesteps=self.num_train_timesteps)

    @property
    def n_train(self) -> int:
        """T, the number of timesteps the network was trained on."""
        return self.num_train_timesteps if self.trained_betas is None else len(self.trained_betas)

    def network_times(self) -> FloatArray:
        """The time that the network is called with at each index: the index, times 1000/T if rescaled."""
        scale = 1000.0 / self.n_train if self.rescale_timesteps else 1.0
        return np.arange(self.n_train, dtype=np.float64) * scale

    def alphas_cumprod(self) -> FloatArray:
        """abar_t at each index."""
        if self.trained_betas is not None:
            betas = np.asarray(self.trained_betas, dtype=np.float64)
        else:
            betas = _BETAS[self.beta_schedule](self.num_train_timesteps, self.beta_start, self.beta_end)
        abar: FloatArray = np.cumprod(1.0 - betas, dtype=np.float64)
        if self.rescale_betas_zero_snr:
            # sqrt(abar) ends at 0 and keeps its first value (Lin et al., 2024, algorithm 1)
            root = np.sqrt(abar)
            abar = ((root - root[-1]) * root[0] / (root[0] - root[-1])) ** 2
        return check_alphas_cumprod(abar)

    def settings(self) -> dict[str, Any]:
        """The values that change a prediction in addition to weights and schedule."""
        return {"prediction_type": self.prediction_type, "rescale_timesteps": self.rescale_timesteps}

    def facts(self) -> dict[str, Any]:
        """The values that describe the schedule to a reader."""
        return {
            "schedule": self.beta_schedule if self.trained_betas is None else "trained_betas",
            "zero_terminal_snr": self.rescale_betas_zero_snr,
        }

    def to_config(self) -> dict[str, Any]:
        """The fields that a `DDPMScheduler` knows, for its config file."""
        values = dataclasses.asdict(self)
        return {name: value for name, value in values.items() if value is not None and name != "rescale_timesteps"}


def build_scheduler(cls: type[T], config: Mapping[str, Any], where: str) -> T:
    """Build the dataclass `cls` from the fields of a diffusers config that it has. `where` names the file in errors."""
    dataclass_type: Any = cls
    names = {field.name for field in dataclasses.fields(dataclass_type)}
    with raising(BackboneError, f"{where}: {{error}}", OptionError):
        return build(cls, {name: value for name, value in config.items() if name in names}, "the scheduler")


def _cosine(steps: int) -> FloatArray:
    abar = np.concatenate([[1.0], cosine_alphas_cumprod(steps)])
    return np.asarray(1.0 - abar[1:] / abar[:-1])


_BETAS: dict[str, Callable[[int, float, float], FloatArray]] = {
    "linear": lambda steps, start, end: np.linspace(start, end, steps),
    "scaled_linear": lambda steps, start, end: np.linspace(start**0.5, end**0.5, steps) ** 2,
    "squaredcos_cap_v2": lambda steps, _start, _end: _cosine(steps),
    "sigmoid": lambda steps, start, end: (end - start) / (1.0 + np.exp(-np.linspace(-6.0, 6.0, steps))) + start,
}
