"""Steps of diffusion samplers, in the coordinates y = x_t/sqrt(abar), rho = sqrt(1/abar - 1), where dy = eps drho."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from gepc.backbones.base import Backbone
from gepc.backbones.schedule import FloatArray, rho_of
from gepc.core.errors import OptionError

if TYPE_CHECKING:
    import torch

# Adams-Bashforth weights of the newest, the one before, ...; the order grows while the history does
ADAMS_BASHFORTH = (
    (1.0,),
    (3 / 2, -1 / 2),
    (23 / 12, -16 / 12, 5 / 12),
    (55 / 24, -59 / 24, 37 / 24, -9 / 24),
)


def ddim_grid(n_steps: int, count: int) -> tuple[int, ...]:
    """`count` evenly strided timesteps 0, stride, 2 stride, ...; an error where no stride gives exactly that many."""
    for stride in range(1, n_steps + 1):
        if len(range(0, n_steps, stride)) == count:
            return tuple(range(0, n_steps, stride))
    raise OptionError(f"no stride divides a schedule of {n_steps} timesteps into exactly {count} steps")


def even_in(axis: FloatArray, count: int, start: int = 0) -> list[int]:
    """`count` + 1 strictly ascending indices from `start` to the last of `axis`, as evenly spaced in it as they can be.

    `axis` is monotone over the schedule. Where it is too coarse, neighbours are taken one by one.
    """
    last = len(axis) - 1
    if count > last - start:
        raise OptionError(f"{count} steps do not fit between timesteps {start} and {last} of this schedule")
    values = np.abs(axis - axis[start])
    wanted = np.linspace(values[start], values[last], count + 1)
    edges = [start + int(np.argmin(np.abs(values[start:] - value))) for value in wanted]
    edges[0], edges[-1] = start, last
    for place in range(1, count + 1):
        edges[place] = max(edges[place], edges[place - 1] + 1)
    for place in range(count - 1, -1, -1):
        edges[place] = min(edges[place], edges[place + 1] - 1)
    return edges


def denoise(backbone: Backbone, x: torch.Tensor, t: int, clip: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(xhat0, eps) at x_t = x. With `clip`, xhat0 is brought into [-1, 1] and eps is the noise that goes with it."""
    abar = float(backbone.alphas_cumprod[t])
    rho = float(rho_of(abar))
    eps = backbone.eps(x, t)
    y = x / abar**0.5
    x0 = y - rho * eps
    if not clip:
        return x0, eps
    x0 = x0.clamp(-1.0, 1.0)
    return x0, (y - x0) / rho


def invert(backbone: Backbone, x0: torch.Tensor, timesteps: Sequence[int], clip: bool) -> Iterator[torch.Tensor]:
    """eps_n along the DDIM inversion of the image itself, which is taken for x_t at the first timestep."""
    abar = backbone.alphas_cumprod
    x = x0
    for place, t in enumerate(timesteps):
        estimate, eps = denoise(backbone, x, t, clip)
        yield eps
        if place + 1 < len(timesteps):
            ahead = float(abar[timesteps[place + 1]])
            x = ahead**0.5 * estimate + (1.0 - ahead) ** 0.5 * eps


def reconstruct(
    backbone: Backbone,
    x: torch.Tensor,
    timesteps: Sequence[int],
    order: int = 4,
    clip: bool = False,
    history: list[torch.Tensor] | None = None,
    stop_early: bool = False,
) -> torch.Tensor:
    """x_0 from x_t = x at the last of the ascending `timesteps`, down through all of them to rho = 0.

    Order 1 is DDIM. Higher orders mix the latest predictions by Adams-Bashforth weights as PLMS does, starting from
    order 1: a step costs one pass from the first on. Two habits of published code on request: a `history` of
    predictions, newest first, is taken over from another trajectory and left to the next; `stop_early` ends at the
    first timestep's x_t instead of x_0.
    """
    rho = np.concatenate([[0.0], rho_of(backbone.alphas_cumprod[list(timesteps)])])
    if stop_early:
        rho[0] = rho[1]
    y: torch.Tensor = x / float(np.sqrt(backbone.alphas_cumprod[timesteps[-1]]))
    seen = [] if history is None else history
    for place in range(len(timesteps), 0, -1):
        t = timesteps[place - 1]
        _, eps = denoise(backbone, y * float(backbone.alphas_cumprod[t]) ** 0.5, t, clip)
        seen[:] = [eps, *seen][:order]
        y = y + float(rho[place - 1] - rho[place]) * _adams_bashforth(seen)
    return y


def _adams_bashforth(history: Sequence[torch.Tensor]) -> torch.Tensor:
    weights = ADAMS_BASHFORTH[len(history) - 1]
    slope = weights[0] * history[0]
    for weight, older in zip(weights[1:], history[1:], strict=True):
        slope = slope + weight * older
    return slope
