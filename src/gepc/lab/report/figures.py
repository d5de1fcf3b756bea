"""Figures of detection results, as matplotlib `Figure` objects.

Each is one panel that is readable at the width of a phone; a page shows several side by side. The background is
transparent, and the colours are those of `gepc.core.palette`, for which a page has a dark form.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gepc.core.errors import InputError
from gepc.core.files import replacing
from gepc.detector.plots import WIDTH, Array, drawing
from gepc.maps.drawing import overlay

if TYPE_CHECKING:
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

Images = Sequence[npt.NDArray[Any]]


def save(figure: Figure, path: Path, formats: Sequence[str] = ("png", "svg")) -> None:
    """Write the figure as `path` with each format's ending: PNG on white, for pages of any colour; SVG transparent."""
    for kind in formats:
        with replacing(path.with_name(f"{path.name}.{kind}")) as draft:
            figure.savefig(draft, format=kind, dpi=200, facecolor="white" if kind == "png" else "none")


def maps(images: Images, fields: Images, labels: Sequence[str], scale: float) -> Figure:
    """Each image above its map and its overlay, with the colour bar of the common scale 0 ... `scale`.

    `scale` is a detector's `map_scale_`, the same for every figure, so that colours compare. What lies above it has
    the colour of the scale's end.
    """
    if not images:
        raise InputError("there are no images to show")
    heat = _heat()
    with drawing(3 * WIDTH / max(3, len(images)) + 0.5) as figure:
        grid = figure.subplots(3, len(images), squeeze=False)
        for column, image, field, label in zip(grid.T, images, fields, labels, strict=True):
            shown = picture(image)
            column[0].imshow(shown, interpolation="none")
            drawn = column[1].imshow(field, heat, vmin=0.0, vmax=scale, interpolation="none")
            column[2].imshow(overlay(shown, field, scale).clip(0.0, 1.0), interpolation="none")
            column[0].set_title(label, fontsize=8)
        for axes, name in zip(grid[:, 0], ("image", "map", "overlay"), strict=True):
            axes.set_ylabel(name)
        for axes in grid.flat:
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
        bar = figure.colorbar(drawn, ax=grid, location="bottom", extend="max", aspect=30)
        bar.set_ticks([0.0, scale / 2, scale], labels=["0", f"{scale / 2:.2g}", f"≥ {scale:.2g}"])
    return figure


def picture(image: npt.NDArray[Any]) -> Array:
    """uint8 pixels (H, W) or (H, W, C) as (H, W, 3) in [0, 1]."""
    pixels = np.asarray(image, dtype=np.float64) / 255.0
    if pixels.ndim == 2:
        pixels = pixels[..., None]
    return pixels[..., :3] if pixels.shape[2] >= 3 else np.repeat(pixels[..., :1], 3, axis=2)


def _heat() -> Colormap:
    """The overlay's colours on black, so that a map and its overlay share one colour bar."""
    from matplotlib.colors import ListedColormap

    ramp = np.linspace(0.0, 1.0, 256, dtype=np.float32)[None]
    return ListedColormap(overlay(np.zeros((1, 256, 3)), ramp, 1.0, strength=1.0)[0])
