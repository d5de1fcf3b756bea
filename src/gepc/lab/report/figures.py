"""Figures of detection results, as matplotlib `Figure` objects.

Each is one panel that is readable at the width of a phone; a page shows several side by side. The background is
transparent, and the colours are those of `gepc.core.palette`, for which a page has a dark form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from sklearn.metrics import roc_curve

from gepc.core.errors import InputError
from gepc.core.files import replacing
from gepc.core.palette import LIGHT, line_style
from gepc.detector.plots import PANEL, WIDTH, drawing, finite_scores, visible
from gepc.detector.plots import histogram as histogram
from gepc.detector.plots import score_limits as score_limits
from gepc.lab.metrics import auroc
from gepc.maps.drawing import overlay

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

Array = npt.NDArray[np.float64]
Images = Sequence[npt.NDArray[Any]]

MARGIN, GAP, LINE = 0.06, 0.07, 0.18  # inches: around tiles, between tiles, a line of small text


def save(figure: Figure, path: Path, formats: Sequence[str] = ("png", "svg")) -> None:
    """Write the figure as `path` with each format's ending: PNG on white, for pages of any colour; SVG transparent."""
    for kind in formats:
        with replacing(path.with_name(f"{path.name}.{kind}")) as draft:
            figure.savefig(draft, format=kind, dpi=200, facecolor="white" if kind == "png" else "none")


def roc(pairs: Mapping[str, tuple[npt.ArrayLike, npt.ArrayLike]]) -> Figure:
    """One ROC curve for each named (ID scores, OOD scores): OOD images caught against false alarms."""
    side = 1.85
    with drawing(PANEL, layout=None) as figure:
        axes = figure.add_axes((0.48 / WIDTH, 0.44 / PANEL, side / WIDTH, side / PANEL))
        axes.plot([0, 1], [0, 1], color=LIGHT["muted"], linewidth=0.8, linestyle=(0, (1, 2)))
        for position, (name, (inside, outside)) in enumerate(pairs.items()):
            label, style = f"{visible(name)} {auroc(inside, outside):.3f}", line_style(position)
            sets = [finite_scores(inside, "ID"), finite_scores(outside, "OOD")]
            is_ood = np.repeat([False, True], [len(scores) for scores in sets])
            rates = roc_curve(is_ood, np.concatenate(sets), drop_intermediate=False)[:2]
            axes.plot(*rates, **style, linewidth=1.6, label=label, clip_on=False)
        axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="false alarms (ID)")
        axes.set_ylabel("caught (OOD)", rotation_mode="anchor", labelpad=2)
        axes.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
        axes.set_yticks([0, 0.5, 1], ["0", "0.5", "1"])
        place = {"loc": "center left", "bbox_to_anchor": (1.02, 0.5)}
        axes.legend(**place, title="AUROC", alignment="left", title_fontsize=8.5, handlelength=1.6, handletextpad=0.4)
    return figure


def maps(images: Images, fields: Images, labels: Sequence[str], scale: float) -> Figure:
    """Each image above its map and its overlay, with the colour bar of the common scale 0 ... `scale`.

    `scale` is a detector's `map_scale_`, the same for every figure, so that colours compare. What lies above it has
    the colour of the scale's end.
    """
    side = _tile_side(len(images), max(3, len(images)), LINE)
    heat = _heat()
    with drawing(LINE + 3 * (side + GAP) + 0.42, layout=None) as figure:
        sheet = _sheet(figure)
        for column, (image, field, label) in enumerate(zip(images, fields, labels, strict=True)):
            shown, left = picture(image), MARGIN + LINE + column * (side + GAP)
            colours = heat(np.clip(field / scale, 0.0, 1.0))[..., :3]
            for row, pixels in enumerate((shown, colours, overlay(shown, field, scale).clip(0.0, 1.0))):
                _put(sheet, pixels, left, LINE + row * (side + GAP), side)
            sheet.text(left + side / 2, LINE - 0.04, label, fontsize=8, ha="center", va="bottom")
        for row, name in enumerate(("image", "map", "overlay")):
            middle = LINE + row * (side + GAP) + side / 2
            sheet.text(LINE, middle, name, rotation=90, rotation_mode="anchor", ha="center", va="bottom")
        _colour_bar(figure, heat, scale)
    return figure


def _tile_side(images: int, columns: int, left: float = 0.0) -> float:
    """Side of square tiles that fill a figure's width, in inches."""
    if images == 0:
        raise InputError("there are no images to show")
    return (WIDTH - left - 2 * MARGIN - (columns - 1) * GAP) / columns


def _sheet(figure: Figure) -> Axes:
    """Empty axes over the whole figure, in inches from its upper left corner: far quicker than axes for every tile."""
    width, height = figure.get_size_inches()
    sheet = figure.add_axes((0.0, 0.0, 1.0, 1.0), xlim=(0.0, width), ylim=(height, 0.0))
    sheet.set_axis_off()
    return sheet


def _put(sheet: Axes, pixels: Array, left: float, top: float, side: float) -> None:
    place = (left, left + side, top + side, top)
    sheet.imshow(pixels, extent=place, aspect="auto", interpolation="none", clip_on=False)


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


def _colour_bar(figure: Figure, heat: Colormap, scale: float) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    width, height = figure.get_size_inches()
    left = MARGIN + LINE
    place = figure.add_axes((left / width, 0.27 / height, (width - left - MARGIN) / width, 0.1 / height))
    bar = figure.colorbar(ScalarMappable(Normalize(0.0, scale), heat), place, location="bottom", extend="max")
    bar.set_ticks([0.0, scale / 2, scale], labels=["0", f"{scale / 2:.2g}", f"≥ {scale:.2g}"])
    bar.outline.set_edgecolor(LIGHT["muted"])
    place.tick_params(labelsize=8)
