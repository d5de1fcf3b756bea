"""What a diffusers scheduler config says of the noise, in float64: abar_t, the network's times, what it predicts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gepc.backbones.schedule import FloatArray, check_alphas_cumprod, cosine_alphas_cumprod, sub_schedule
from gepc.core.errors import BackboneError, OptionError, check_choice
from gepc.core.options import build

PREDICTION_TYPES = ("epsilon", "v_prediction", "sample")
VARIANCE_TYPES = ("fixed_small", "fixed_small_log", "fixed_large", "fixed_large_log", "learned", "learned_range")


@dataclass(frozen=True)
class Scheduler:
    """The forward process and the meaning of the network's answer, under diffusers' own names.

    The last two fields are not diffusers': with `rescale_timesteps` the network is called with t*1000/T instead of t
    (OpenAI's nets), and `timestep_respacing` keeps a part of the timesteps, written as OpenAI writes it ("250",
    "ddim50", "10,10,20"): index i then means the i-th kept timestep, and the network still sees the original one.
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
    timestep_respacing: str = ""

    def __post_init__(self) -> None:
        check_choice("prediction_type", self.prediction_type, PREDICTION_TYPES)
        if self.variance_type is not None:
            check_choice("variance_type", self.variance_type, VARIANCE_TYPES)
        if self.trained_betas is None:
            check_choice("beta_schedule", self.beta_schedule, _BETAS)
            if self.num_train_timesteps < 1:
                raise OptionError(f"num_train_timesteps must be at least 1, got {self.num_train_timesteps}")

    @classmethod
    def from_config(cls, config: Mapping[str, Any], where: str) -> Scheduler:
        """Read a `scheduler_config.json`; what only concerns sampling (clipping, spacing, solver) is left aside."""
        if "beta_schedule" not in config and config.get("trained_betas") is None:
            name = config.get("_class_name", "a scheduler")
            raise BackboneError(
                f"{where} describes {name}, which has no beta schedule; wrap such a network with "
                "Backbone.from_denoiser (noise given as sigma) or Backbone.from_callable"
            )
        names = {field.name for field in dataclasses.fields(cls)}
        try:
            return build(cls, {name: value for name, value in config.items() if name in names}, where)
        except OptionError as error:
            raise BackboneError(f"{where}: {error}") from error

    @property
    def n_train(self) -> int:
        """T, the number of timesteps the network was trained on."""
        return self.num_train_timesteps if self.trained_betas is None else len(self.trained_betas)

    def kept_timesteps(self) -> npt.NDArray[np.int64]:
        """The original timestep of each index: 0 ... T-1, or the part that respacing keeps."""
        if not self.timestep_respacing:
            return np.arange(self.n_train, dtype=np.int64)
        return np.asarray(respace(self.n_train, self.timestep_respacing), dtype=np.int64)

    def network_times(self) -> FloatArray:
        """What the network is called with at each index: the original timestep, times 1000/T where it is rescaled."""
        scale = 1000.0 / self.n_train if self.rescale_timesteps else 1.0
        return self.kept_timesteps().astype(np.float64) * scale

    def alphas_cumprod(self) -> FloatArray:
        """abar_t at each index."""
        if self.trained_betas is not None:
            betas = np.asarray(self.trained_betas, dtype=np.float64)
        else:
            betas = _BETAS[self.beta_schedule](self.num_train_timesteps, self.beta_start, self.beta_end)
        abar: FloatArray = np.cumprod(1.0 - betas, dtype=np.float64)
        if self.rescale_betas_zero_snr:
            abar = _zero_terminal_snr(abar)
        return check_alphas_cumprod(sub_schedule(abar, self.kept_timesteps().tolist()))

    def to_config(self) -> dict[str, Any]:
        """The fields a `DDPMScheduler` takes, as its config file holds them."""
        values = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        for ours in ("rescale_timesteps", "timestep_respacing"):
            del values[ours]
        return values


def respace(steps: int, sections: str) -> list[int]:
    """The timesteps that OpenAI's `timestep_respacing` keeps.

    "10,10,20" cuts 0 ... steps-1 into three equal sections and keeps 10, 10 and 20 evenly spaced timesteps of them,
    both ends included; "ddim50" keeps every k-th timestep, with the smallest k that leaves exactly 50.
    """
    text = sections.strip()
    if text.startswith("ddim"):
        wanted = _whole_numbers(text[4:], sections)[0]
        for stride in range(1, steps):
            if len(range(0, steps, stride)) == wanted:
                return list(range(0, steps, stride))
        raise OptionError(f"timestep_respacing {sections!r}: no whole stride keeps {wanted} of {steps} timesteps")
    counts = _whole_numbers(text, sections)
    size, extra = divmod(steps, len(counts))
    kept: list[int] = []
    start = 0
    for number, count in enumerate(counts):
        length = size + (number < extra)
        if not 0 <= count <= length:
            raise OptionError(
                f"timestep_respacing {sections!r}: cannot keep {count} of a section of {length} timesteps"
            )
        kept += _spread(start, length, count)
        start += length
    if not kept:
        raise OptionError(f"timestep_respacing {sections!r} keeps no timestep")
    return kept


def _spread(start: int, length: int, count: int) -> list[int]:
    stride = 1.0 if count == 1 else (length - 1) / (count - 1)
    position, kept = 0.0, []
    for _ in range(count):
        kept.append(start + round(position))
        position += stride
    return kept


def _whole_numbers(text: str, given: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise OptionError(
            f"cannot read timestep_respacing {given!r}; write for instance 250, ddim50 or 10,20"
        ) from error


def _zero_terminal_snr(abar: FloatArray) -> FloatArray:
    """sqrt(abar) shifted to end at 0 and scaled to keep its first value (Lin et al., 2024, algorithm 1)."""
    root = np.sqrt(abar)
    return np.asarray(((root - root[-1]) * root[0] / (root[0] - root[-1])) ** 2)


def _betas_of(abar: Callable[[float], float], steps: int) -> FloatArray:
    """beta_t = 1 - abar((t+1)/T)/abar(t/T), at most 0.999."""
    values = np.asarray([abar(step / steps) for step in range(steps + 1)])
    return np.asarray(np.minimum(1.0 - values[1:] / values[:-1], 0.999), dtype=np.float64)


def _linear(steps: int, start: float, end: float) -> FloatArray:
    return np.linspace(start, end, steps, dtype=np.float64)


def _scaled_linear(steps: int, start: float, end: float) -> FloatArray:
    return np.linspace(start**0.5, end**0.5, steps, dtype=np.float64) ** 2


def _cosine(steps: int, _start: float, _end: float) -> FloatArray:
    abar = np.concatenate([[1.0], cosine_alphas_cumprod(steps)])
    return np.asarray(1.0 - abar[1:] / abar[:-1], dtype=np.float64)


def _sigmoid(steps: int, start: float, end: float) -> FloatArray:
    return np.asarray((end - start) / (1.0 + np.exp(-np.linspace(-6.0, 6.0, steps))) + start, dtype=np.float64)


def _exponential(steps: int, _start: float, _end: float) -> FloatArray:
    return _betas_of(lambda u: math.exp(-12.0 * u), steps)


def _laplace(steps: int, _start: float, _end: float) -> FloatArray:
    def abar(u: float) -> float:
        half_log_snr = -0.5 * math.copysign(1.0, 0.5 - u) * math.log(1.0 - 2.0 * abs(0.5 - u) + 1e-6)
        snr = math.exp(half_log_snr)
        return math.sqrt(snr / (1.0 + snr))

    return _betas_of(abar, steps)


_BETAS: dict[str, Callable[[int, float, float], FloatArray]] = {
    "linear": _linear,
    "scaled_linear": _scaled_linear,
    "squaredcos_cap_v2": _cosine,
    "sigmoid": _sigmoid,
    "exp": _exponential,
    "laplace": _laplace,
}
