"""Operators on images that depend on numbers, with their inverses: shifts, rotations, shears, scalings, colours.

Shifts by fractions of a pixel multiply Fourier coefficients by phases, so they are orthogonal on the torus. A rotation
is three shears, and a shear shifts every row by its own amount, so rotations are orthogonal, too, and undone exactly.
Scalings interpolate and are undone only approximately. Gain and gamma change intensities and are not linear.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
from torch.nn.functional import affine_grid, grid_sample

from gepc.core.errors import OptionError
from gepc.images.noise import generator

Number: TypeAlias = float | torch.Tensor
"""A number for all images, or a tensor (n, 1, 1, 1) with one for each."""
Range: TypeAlias = tuple[float, float]
PIXELS = (-2, -1)


def fourier_shift(x: torch.Tensor, by: Number, dim: int) -> torch.Tensor:
    """Shift by any number of pixels on the torus: coefficient k is multiplied by exp(-2 pi i k by / n).

    The real shift of the Nyquist frequency, which even sizes have, is cos(pi by) and loses energy. The sign of the
    nearest whole shift replaces it, so that the operator is orthogonal and whole shifts are exact.

    Parameters
    ----------
    x : (..., H, W).
    by : pixels to the right or down; a tensor must have size 1 along `dim`.
    dim : -1 for columns to the right, -2 for rows down.

    >>> fourier_shift(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), 1.0, -1).round(decimals=4)
    tensor([[4., 1., 2., 3.]])
    """
    size = x.shape[dim]
    frequency = torch.arange(size // 2 + 1, dtype=torch.float64).reshape(-1, *[1] * (-1 - dim))
    by = torch.as_tensor(by, dtype=torch.float64)
    angle = frequency * by * (-2.0 * math.pi / size)
    phase = torch.polar(torch.ones_like(angle), angle)
    if size % 2 == 0:
        phase.narrow(dim, size // 2, 1).copy_(1.0 - 2.0 * by.round().remainder(2.0))
    spectrum = torch.fft.rfft(_at_least_float32(x), dim=dim)
    shifted: torch.Tensor = torch.fft.irfft(spectrum * phase.to(x.device, spectrum.dtype), size, dim)
    return shifted.to(x.dtype)


def _at_least_float32(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def shear(x: torch.Tensor, slope: Number, dim: int = -1) -> torch.Tensor:
    """Shift each row (or with `dim` -2 each column) by `slope` times its distance from the centre."""
    size = x.shape[-3 - dim]
    distance = torch.arange(size, dtype=torch.float64) - (size - 1) / 2
    return fourier_shift(x, slope * (distance[:, None] if dim == -1 else distance), dim)


def shift(x: torch.Tensor, dx: Number, dy: Number) -> torch.Tensor:
    """Shift by `dx` pixels to the right and `dy` down; whole pixels are moved without arithmetic."""
    if not isinstance(dx, torch.Tensor) and not isinstance(dy, torch.Tensor) and dx % 1 == dy % 1 == 0:
        return torch.roll(x, (int(dy), int(dx)), PIXELS)
    return fourier_shift(fourier_shift(x, dx, -1), dy, -2)


def rotate(x: torch.Tensor, degrees: Number) -> torch.Tensor:
    """Rotate counter-clockwise on the torus: whole quarter turns, then three shears for the rest.

    On images that are not square, half turns take the place of quarter turns.
    """
    quarters, rest = _quarters_and_rest(x, degrees)
    return _three_shears(_turn(x, quarters), rest)


def rotate_back(x: torch.Tensor, degrees: Number) -> torch.Tensor:
    """Undo `rotate`."""
    quarters, rest = _quarters_and_rest(x, degrees)
    return _turn(_three_shears(x, -rest), -quarters)


def _quarters_and_rest(x: torch.Tensor, degrees: Number) -> tuple[torch.Tensor, torch.Tensor]:
    degrees = torch.as_tensor(degrees, dtype=torch.float64)
    step = 90.0 if x.shape[-1] == x.shape[-2] else 180.0
    turns = (degrees / step).round()
    return turns * (step / 90.0), degrees - turns * step


def _turn(x: torch.Tensor, quarters: torch.Tensor) -> torch.Tensor:
    if quarters.ndim == 0:
        return torch.rot90(x, int(quarters), PIXELS)
    numbers = quarters.flatten().tolist()
    return torch.stack([torch.rot90(image, int(k), PIXELS) for image, k in zip(x, numbers, strict=True)])


def _three_shears(x: torch.Tensor, degrees: torch.Tensor) -> torch.Tensor:
    """[1, tan(a/2); 0, 1] [1, 0; -sin a, 1] [1, tan(a/2); 0, 1] in coordinates with y down."""
    angle = degrees * (math.pi / 180.0)
    sideways = torch.tan(angle / 2.0)
    return shear(shear(shear(x, sideways), -torch.sin(angle), -2), sideways)


def scale(x: torch.Tensor, factor: Number) -> torch.Tensor:
    """Enlarge about the centre by bicubic interpolation; the border is reflected where the image shrinks."""
    real = _at_least_float32(x)
    flat = real if isinstance(factor, torch.Tensor) else real.reshape(1, -1, *x.shape[-2:])
    zoom = torch.as_tensor(1.0 / factor, dtype=torch.float64).reshape(-1, 1, 1).to(real) * torch.eye(2, 3).to(real)
    grid = affine_grid(zoom, list(flat.shape), align_corners=False)
    scaled = grid_sample(flat, grid, mode="bicubic", padding_mode="reflection", align_corners=False)
    return scaled.reshape(x.shape).to(x.dtype)


def hue(x: torch.Tensor, degrees: Number) -> torch.Tensor:
    """Rotate three colours about the grey axis; by 120 degrees the channels change places."""
    angle = torch.as_tensor(degrees, dtype=torch.float64).reshape(-1, 1, 1) * (math.pi / 180.0)
    cross = torch.tensor([[0.0, -1.0, 1.0], [1.0, 0.0, -1.0], [-1.0, 1.0, 0.0]], dtype=torch.float64) / math.sqrt(3.0)
    grey = torch.full((3, 3), 1.0 / 3.0, dtype=torch.float64)
    eye = torch.eye(3, dtype=torch.float64)
    matrix = angle.cos() * eye + angle.sin() * cross + (1.0 - angle.cos()) * grey
    return _mix(x, matrix if isinstance(degrees, torch.Tensor) else matrix[0])


def mix_channels(x: torch.Tensor, *entries: float) -> torch.Tensor:
    """Multiply the channels by the matrix with these entries, row by row."""
    return _mix(x, _square(entries))


def _mix(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    if x.ndim < 3 or x.shape[-3] != matrix.shape[-1]:
        raise OptionError(f"a group element that mixes colours needs images of {matrix.shape[-1]} channels")
    return torch.einsum("...ij,...jhw->...ihw", matrix.to(x.device, x.dtype), x)


def _square(entries: Sequence[float]) -> torch.Tensor:
    side = math.isqrt(len(entries))
    return torch.tensor(entries, dtype=torch.float64).reshape(side, side)


def _is_orthogonal(entries: Sequence[float]) -> bool:
    if math.isqrt(len(entries)) ** 2 != len(entries):
        return False
    matrix = _square(entries)
    return torch.allclose(matrix @ matrix.T, torch.eye(len(matrix), dtype=torch.float64), atol=1e-6)


def gain(x: torch.Tensor, factor: Number) -> torch.Tensor:
    """Multiply intensities, which are 0 at -1 and 1 at 1; brighter ones are clipped."""
    return ((x + 1.0) * torch.as_tensor(factor, dtype=torch.float64).to(x) - 1.0).clamp(-1.0, 1.0)


def gamma(x: torch.Tensor, power: Number) -> torch.Tensor:
    """Raise intensities, which are 0 at -1 and 1 at 1, to a power."""
    intensity: torch.Tensor = (x.clamp(-1.0, 1.0) + 1.0) / 2.0
    return 2.0 * intensity ** torch.as_tensor(power, dtype=torch.float64).to(x) - 1.0


def _is_single(numbers: Sequence[float]) -> bool:
    return len(numbers) == 1


def _is_positive(numbers: Sequence[float]) -> bool:
    return len(numbers) == 1 and numbers[0] > 0.0


@dataclass(frozen=True)
class Family:
    """Operators that differ in their numbers.

    Parameters
    ----------
    apply, inverse : functions of images and numbers.
    allows : whether there is an operator with these numbers.
    kind : `orthogonal`, `approximate` if the inverse undoes it approximately, or `intensity` if it acts on the clean
        image alone, so that the noise and the network's answer stay as they are.
    in_pixels : whether the numbers are lengths in pixels.
    on_layers : whether it acts alike on grids of any resolution, and so on the layers of a network.
    """

    apply: Callable[..., torch.Tensor]
    inverse: Callable[..., torch.Tensor]
    allows: Callable[[Sequence[float]], bool] = _is_single
    kind: str = "orthogonal"
    in_pixels: bool = False
    on_layers: bool = False


FAMILIES = {
    "shift": Family(shift, lambda x, dx, dy: shift(x, -dx, -dy), lambda two: len(two) == 2, in_pixels=True),
    "rotate": Family(rotate, rotate_back, on_layers=True),
    "shear": Family(shear, lambda x, slope: shear(x, -slope), on_layers=True),
    "scale": Family(scale, lambda x, factor: scale(x, 1.0 / factor), _is_positive, "approximate"),
    "hue": Family(hue, lambda x, degrees: hue(x, -degrees)),
    "channels": Family(mix_channels, lambda x, *entries: _mix(x, _square(entries).T), _is_orthogonal),
    "gain": Family(gain, lambda x, factor: gain(x, 1.0 / factor), _is_positive, "intensity"),
    "gamma": Family(gamma, lambda x, power: gamma(x, 1.0 / power), _is_positive, "intensity"),
}


@dataclass(frozen=True)
class Operator:
    """An operator of a family, or its inverse; numbers that are ranges are drawn for every image."""

    family: str
    numbers: tuple[Number | Range, ...]
    inverted: bool = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The moved images."""
        if self.is_random:
            raise OptionError(f"the numbers of a random {self.family} depend on the image; draw them first")
        family = FAMILIES[self.family]
        return (family.inverse if self.inverted else family.apply)(x, *self.numbers)

    @property
    def is_random(self) -> bool:
        """Whether a number is drawn for every image."""
        return any(isinstance(number, tuple) for number in self.numbers)

    def drawn(self, seed: int, keys: Sequence[bytes], purpose: str) -> Operator:
        """The operator with numbers uniform in their ranges: functions of the seed, an image's key and the purpose."""
        low, high = np.array([number if isinstance(number, tuple) else (number, number) for number in self.numbers]).T
        draws = [generator(seed, key, purpose).uniform(low, high) for key in keys]
        columns = torch.from_numpy(np.stack(draws)).T[:, :, None, None, None]
        return replace(self, numbers=tuple(columns))

    def times(self, factor: int) -> Operator:
        """The operator with numbers that are `factor` times as large."""
        larger = [
            (factor * number[0], factor * number[1]) if isinstance(number, tuple) else factor * number
            for number in self.numbers
        ]
        return replace(self, numbers=tuple(larger))

    @property
    def name(self) -> str:
        """The spelling that `gepc.methods.groups.find_action` reads."""
        return f"{self.family}({','.join(map(_spelling, self.numbers))})"


@dataclass(frozen=True, eq=False)
class PixelMap:
    """M x for the vector x of all pixels of each channel, with a square matrix M; for images of one size."""

    matrix: torch.Tensor

    @property
    def side(self) -> int:
        """Height and width of the images."""
        return math.isqrt(len(self.matrix))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The moved images."""
        x = torch.as_tensor(x)
        if x.shape[-2:] != (self.side, self.side):
            raise OptionError(f"a group element was learned on images of {self.side}x{self.side} pixels; set `size`")
        return torch.matmul(x.flatten(-2), self.matrix.T.to(x)).reshape(x.shape)


def _spelling(number: Number | Range) -> str:
    if isinstance(number, tuple):
        return "..".join(map(_spelling, number))
    if isinstance(number, torch.Tensor):
        return "drawn"
    return str(int(number)) if float(number).is_integer() else repr(number)
