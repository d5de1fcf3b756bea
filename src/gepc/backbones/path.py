"""Gaussian paths: how a network sees x_t = sqrt(abar) x_0 + sigma n, and what its answer says about the noise n.

Every path y = a x_0 + b n becomes x_t = y/sqrt(a^2 + b^2) with abar = a^2/(a^2 + b^2). The answer F gives the noise by

    eps = (y_gain y + answer_gain F) / divisor

where noise (F = n):                       eps = F
      v = sqrt(abar) n - sigma x_0:        eps = sigma y + sqrt(abar) F
      x_0, or a denoiser D(y, sigma):      eps = (y - a F) / b
      EDM, D = c_skip y + c_out F:         eps = ((1 - c_skip) y - c_out F) / sigma      (Karras et al., NeurIPS 2022)
      the score of y = x_0 + sigma n:      eps = -sigma F                                (Song et al., ICLR 2021)
      flow, y = (1-s) x_0 + s n, F = n - x_0:  eps = y + (1-s) F                         (Lipman et al., ICLR 2023)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gepc.backbones.schedule import FloatArray, Scheduler, build_scheduler, check_alphas_cumprod
from gepc.core.errors import BackboneError, InputError, OptionError, check_choice

LookUp = Callable[[FloatArray], torch.Tensor]


def look_up(table: FloatArray, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """`table[t]` for the index of every image, (N,), shaped to multiply a batch like `x`."""
    return torch.tensor(table, dtype=x.dtype, device=x.device)[t].reshape(-1, *([1] * (x.ndim - 1)))


def check_timesteps(t: int | torch.Tensor, x: torch.Tensor, n_steps: int) -> torch.Tensor:
    """Return an index into a schedule for each image of `x`; raise `InputError` unless it lies below `n_steps`."""
    if not isinstance(t, torch.Tensor) or t.ndim == 0:
        ends, steps = [int(t)], torch.full((len(x),), int(t), dtype=torch.int64, device=x.device)
    elif t.shape != (len(x),) or t.is_floating_point():
        raise InputError(f"t must hold one whole number per image: {len(x)} images, t of shape {tuple(t.shape)}")
    else:
        ends = [int(t.min()), int(t.max())] if len(t) else []
        steps = t.to(device=x.device, dtype=torch.int64)
    for index in ends:
        if not 0 <= index < n_steps:
            raise InputError(f"timestep {index} is outside the schedule, 0 to {n_steps - 1}")
    return steps


class NoiseSchedule:
    """The noise schedule of a backbone: tables with a number for each timestep."""

    alphas_cumprod: FloatArray

    @property
    def n_steps(self) -> int:
        """T, the number of timesteps of the schedule."""
        return len(self.alphas_cumprod)

    def sigma(self, x: torch.Tensor, t: int | torch.Tensor) -> torch.Tensor:
        """Look up sigma_t = sqrt(1 - abar_t) for every image.

        Parameters
        ----------
        x, t : as for `eps`.

        Returns
        -------
        torch.Tensor (N, 1, 1, 1)
            sigma_t, which multiplies a batch like `x`.

        Examples
        --------
        >>> import gepc, torch
        >>> backbone = gepc.Backbone.from_callable(lambda x, t: x, [0.99, 0.75], channels=1)
        >>> backbone.sigma(torch.zeros(2, 1, 8, 8), 1).shape, float(backbone.sigma(torch.zeros(1, 1, 8, 8), 1))
        (torch.Size([2, 1, 1, 1]), 0.5)
        """
        return self.per_image(np.sqrt(1.0 - self.alphas_cumprod), x, t)

    def sqrt_abar(self, x: torch.Tensor, t: int | torch.Tensor) -> torch.Tensor:
        """Look up sqrt(abar_t) for every image.

        Parameters
        ----------
        x, t : as for `eps`.

        Returns
        -------
        torch.Tensor (N, 1, 1, 1)
            sqrt(abar_t), which multiplies a batch like `x`.

        Examples
        --------
        >>> import gepc, torch
        >>> backbone = gepc.Backbone.from_callable(lambda x, t: x, [0.99, 0.25], channels=1)
        >>> float(backbone.sqrt_abar(torch.zeros(1, 1, 8, 8), 1))
        0.5
        """
        return self.per_image(np.sqrt(self.alphas_cumprod), x, t)

    def per_image(self, table: FloatArray, x: torch.Tensor, t: int | torch.Tensor) -> torch.Tensor:
        """Look up a table with a number for each timestep.

        Parameters
        ----------
        table : an array (T,).
        x, t : as for `eps`.

        Returns
        -------
        torch.Tensor (N, 1, 1, 1)
            table[t] in the type of `x`, which multiplies a batch.

        Examples
        --------
        >>> import gepc, torch
        >>> backbone = gepc.Backbone.from_callable(lambda x, t: x, [0.99, 0.25], channels=1)
        >>> backbone.per_image([3.0, 4.0], torch.zeros(2, 1, 8, 8), torch.tensor([1, 0])).flatten().tolist()
        [4.0, 3.0]
        """
        return look_up(table, x, check_timesteps(t, x, self.n_steps))


@dataclass(frozen=True)
class GaussianPath:
    """A noise schedule with the coordinates and the answers of one network. Tables have one number per index."""

    alphas_cumprod: FloatArray  # the schedule of x_t
    times: FloatArray | None = None  # what the network is called with; None calls it with the index itself
    scale: FloatArray | None = None  # y = scale x_t; None is 1
    input_gain: FloatArray | None = None  # the network is given input_gain y + input_offset; None is 1
    input_offset: float = 0.0
    y_gain: FloatArray | None = None  # this and what follows: see the formula of the module; None is 0, 1 and 1
    answer_gain: FloatArray | None = None
    divisor: FloatArray | None = None

    @classmethod
    def of_scheduler(cls, scheduler: Scheduler) -> GaussianPath:
        """The variance-preserving path of a scheduler with betas, for a network that predicts noise, v or x_0."""
        abar, times = scheduler.alphas_cumprod(), scheduler.network_times()
        signal, sigma = np.sqrt(abar), np.sqrt(1.0 - abar)
        if scheduler.prediction_type == "v_prediction":
            return cls(abar, times, y_gain=sigma, answer_gain=signal)
        if scheduler.prediction_type == "sample":
            return cls(abar, times, y_gain=np.ones_like(abar), answer_gain=-signal, divisor=sigma)
        return cls(abar, times)

    @classmethod
    def of_denoiser(cls, sigmas: npt.ArrayLike) -> GaussianPath:
        """y = x_0 + sigma n, and D(y, sigma) estimates x_0."""
        levels = _ascending(sigmas, "sigmas")
        one = np.ones_like(levels)
        return cls(_exploding(levels), levels, np.sqrt(1.0 + levels**2), y_gain=one, answer_gain=-one, divisor=levels)

    @classmethod
    def of_flow(cls, shares: npt.ArrayLike, data_time: float, noise_time: float) -> GaussianPath:
        """y = (1-s) x_0 + s n, and the velocity is dy/ds, or dy/d(1-s) where time runs from noise to data."""
        s = _ascending(shares, "levels")
        if s[-1] > 1.0:
            raise InputError(f"levels of a flow must be shares of noise in (0, 1], got {s[-1]:g}")
        if data_time == noise_time:
            raise OptionError(f"data_time and noise_time must differ, got {data_time:g} for both")
        length = np.hypot(1.0 - s, s)
        forward = 1.0 if noise_time > data_time else -1.0
        times = data_time + s * (noise_time - data_time)
        abar = ((1.0 - s) / length) ** 2
        return cls(abar, times, length, y_gain=np.ones_like(s), answer_gain=forward * (1.0 - s))

    def network_input(self, x: torch.Tensor, look_up: LookUp) -> tuple[torch.Tensor, torch.Tensor]:
        """y, and what the network is given; `look_up` gives a table's value for every image."""
        y = x if self.scale is None else x * look_up(self.scale)
        given = y if self.input_gain is None else y * look_up(self.input_gain)
        return y, given + self.input_offset if self.input_offset else given

    def eps(self, answer: torch.Tensor, y: torch.Tensor, look_up: LookUp) -> torch.Tensor:
        """The noise from the network's answer to y."""
        if self.answer_gain is not None:
            answer = answer * look_up(self.answer_gain)
        if self.y_gain is not None:
            answer = y * look_up(self.y_gain) + answer
        return answer if self.divisor is None else answer / look_up(self.divisor)


def _ascending(values: npt.ArrayLike, name: str) -> FloatArray:
    levels = np.array(values, dtype=np.float64).reshape(-1)
    if levels.size == 0 or not (np.isfinite(levels).all() and (levels > 0).all() and (np.diff(levels) > 0).all()):
        raise InputError(f"{name} must be positive, finite and ascending")
    return levels


def _exploding(sigmas: FloatArray) -> FloatArray:
    return check_alphas_cumprod(1.0 / (1.0 + sigmas**2))


_KINDS = {
    "EDMEulerScheduler": "edm",
    "EDMDPMSolverMultistepScheduler": "edm",
    "ScoreSdeVeScheduler": "ve",
    "CMStochasticIterativeScheduler": "consistency",
    "FlowMatchEulerDiscreteScheduler": "flow",
    "FlowMatchHeunDiscreteScheduler": "flow",
    "FlowMatchLCMScheduler": "flow",
}


@dataclass(frozen=True)
class SigmaScheduler:
    """A scheduler of diffusers without betas: its noise level is sigma. Fields have diffusers' names."""

    kind: str  # `edm`, `ve` (a network that answers the score), `consistency` or `flow`
    num_train_timesteps: int = 1000  # the number of noise levels
    # sigma_min, sigma_max, rho: the levels are even in sigma^(1/rho) (`karras`), or in log sigma (`exponential`).
    # Levels of a flow are s = 1/T ... 1: the network knows them all, so the shift of a sampler does not matter.
    sigma_min: float = 0.002
    sigma_max: float = 80.0
    rho: float = 7.0
    sigma_schedule: str = "karras"
    sigma_data: float = 0.5  # the standard deviation of the data in the scalings of EDM
    prediction_type: str = "epsilon"  # of EDM, `epsilon` or `v_prediction`, which changes the sign of c_out
    # the values of black and white that a `ve` network was trained with; [0, 1] as in diffusers' pipeline
    image_range: tuple[float, float] = (0.0, 1.0)
    variance_type: str | None = None

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, set(_KINDS.values()))
        if self.kind == "edm":
            check_choice("prediction_type", self.prediction_type, ("epsilon", "v_prediction"))

    def sigmas(self) -> FloatArray:
        """The noise levels, ascending."""
        ramp = np.linspace(0.0, 1.0, self.num_train_timesteps)
        low, high = self.sigma_min, self.sigma_max
        if self.kind == "ve" or self.sigma_schedule == "exponential":
            return np.asarray(low * (high / low) ** ramp)
        root = 1.0 / self.rho
        sigmas = np.asarray((low**root + ramp * (high**root - low**root)) ** self.rho)
        return sigmas[1:] if self.kind == "consistency" else sigmas  # at sigma_min its answer is the input

    def path(self) -> GaussianPath:
        """The path, with the scalings of that kind of network."""
        if self.kind == "flow":
            steps = self.num_train_timesteps
            return GaussianPath.of_flow(np.arange(1, steps + 1) / steps, 0.0, float(steps))
        sigma, data = self.sigmas(), self.sigma_data
        if self.kind == "ve":
            low, high = self.image_range
            half = (high - low) / 2.0  # an image of ours times this, and sigma/half in our units
            ours = sigma / half
            gain, scale = np.full_like(sigma, half), np.sqrt(1.0 + ours**2)
            middle = (high + low) / 2.0
            return GaussianPath(_exploding(ours), sigma, scale, gain, middle, answer_gain=-sigma)
        total = np.sqrt(sigma**2 + data**2)
        above = sigma - self.sigma_min if self.kind == "consistency" else sigma
        c_skip, c_out = data**2 / (above**2 + data**2), above * data / total
        if self.prediction_type == "v_prediction":
            c_out = -c_out
        times = (250.0 if self.kind == "consistency" else 0.25) * np.log(sigma)
        return GaussianPath(
            _exploding(sigma),
            times,
            np.sqrt(1.0 + sigma**2),
            input_gain=1.0 / total,
            y_gain=1.0 - c_skip,
            answer_gain=-c_out,
            divisor=sigma,
        )

    def settings(self) -> dict[str, Any]:
        """The values that change a prediction in addition to weights and schedule."""
        if self.kind == "flow":
            return {"prediction_type": "velocity"}
        if self.kind == "ve":
            return {"prediction_type": "score", "image_range": list(self.image_range)}
        return {"prediction_type": f"{self.kind}, {self.prediction_type}", "sigma_data": self.sigma_data}

    def facts(self) -> dict[str, Any]:
        """The values that describe the schedule to a reader."""
        return {"schedule": {"edm": "EDM", "ve": "variance exploding", "flow": "flow"}.get(self.kind, self.kind)}


def read_scheduler(config: Mapping[str, Any], where: str) -> Scheduler | SigmaScheduler:
    """The scheduler of a diffusers config; fields that only concern sampling are ignored."""
    kind = _KINDS.get(str(config.get("_class_name")))
    if kind is None and config.get("prediction_type") == "flow_prediction":
        kind = "flow"
    if kind is None:
        if "beta_schedule" not in config and config.get("trained_betas") is None:
            known = f"{where} describes {config.get('_class_name', 'a scheduler')}, which has no beta schedule"
            advice = "Backbone.from_denoiser (noise given as sigma) or Backbone.from_callable"
            raise BackboneError(f"{known}; wrap such a network with {advice}")
        return build_scheduler(Scheduler, config, where)
    unused = {"kind", "variance_type", *(("sigma_data", "prediction_type") if kind == "flow" else ())}
    fields = {name: value for name, value in config.items() if name not in unused and value is not None}
    if kind == "ve":
        fields = {"sigma_min": 0.01, "sigma_max": 1348.0, "num_train_timesteps": 2000, **fields}
    return build_scheduler(SigmaScheduler, {**fields, "kind": kind}, where)
