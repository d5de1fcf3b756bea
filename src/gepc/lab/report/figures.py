"""Figures of detection results, as matplotlib `Figure` objects.

Each is one panel that is readable at the width of a phone; a page shows several side by side. The background is
transparent, and the colours are those of `gepc.core.palette`, for which a page has a dark form.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
from sklearn.metrics import roc_curve

from gepc.core.errors import GepcError, InputError, raising
from gepc.core.files import replacing
from gepc.core.palette import LIGHT, line_style
from gepc.lab.metrics import auroc
from gepc.maps.drawing import overlay

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

Array = npt.NDArray[np.float64]
Images = Sequence[npt.NDArray[Any]]

WIDTH, PANEL = 3.6, 2.5  # inches: the width of every figure, the height of a plot
MARGIN, GAP, LINE = 0.06, 0.07, 0.18  # inches: around tiles, between tiles, a line of small text
BINS = 32
TICK_GAP = 0.13  # of the axis: closer numbers would touch
_STYLE = {
    **dict.fromkeys(("axes.labelcolor", "legend.labelcolor", "text.color", "xtick.labelcolor"), LIGHT["ink"]),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), LIGHT["muted"]),
    **dict.fromkeys(("axes.facecolor", "figure.facecolor", "savefig.facecolor"), "none"),
    "ytick.labelcolor": LIGHT["ink"],
    "axes.labelsize": 9,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "text.parse_math": False,  # names are shown as they are, dollar signs too
}


@contextlib.contextmanager
def drawing(height: float, layout: Literal["constrained"] | None = "constrained") -> Iterator[Figure]:
    """A new figure, with this module's style for what is drawn inside the `with`."""
    with raising(GepcError, "figures need matplotlib; install it with: pip install 'gepc[report]'", ImportError):
        import matplotlib
        from matplotlib.figure import Figure
    with matplotlib.rc_context(_STYLE):
        yield Figure(figsize=(WIDTH, height), layout=layout)


def save(figure: Figure, path: Path, formats: Sequence[str] = ("png", "svg")) -> None:
    """Write the figure as `path` with each format's ending: PNG on white, for pages of any colour; SVG transparent."""
    for kind in formats:
        with replacing(path.with_name(f"{path.name}.{kind}")) as draft:
            figure.savefig(draft, format=kind, dpi=200, facecolor="white" if kind == "png" else "none")


def histogram(
    inside: npt.ArrayLike,
    outside: npt.ArrayLike,
    threshold: float | None = None,
    names: tuple[str, str] = ("ID", "OOD"),
    limits: tuple[float, float] | None = None,
    threshold_name: str = "threshold",
    label: str = "score",
) -> Figure:
    """Scores of in-distribution images (one colour) and of others (another), with the threshold of the alarm.

    The axis is linear around the in-distribution scores and logarithmic far from them, since scores of far images are
    larger by orders of magnitude. `limits` gives several histograms one axis; see `score_limits`.
    """
    sets = [_scores(inside, names[0]), _scores(outside, names[1])]
    forward, inverse = _score_axis(sets[0])
    low, high = limits or score_limits(sets)
    edges = inverse(np.linspace(forward(np.array(low)), forward(np.array(high)), BINS + 1))
    with drawing(PANEL) as figure:
        axes = figure.add_subplot()
        axes.set_xscale("function", functions=(forward, inverse))
        for scores, name, colour in zip(sets, names, (LIGHT["inside"], LIGHT["outside"]), strict=True):
            share = np.histogram(scores.clip(edges[0], edges[-1]), edges)[0] / len(scores)
            axes.stairs(share, edges, fill=True, color=colour, alpha=0.35)
            axes.stairs(share, edges, color=colour, linewidth=1.2, label=_visible(name))
        if threshold is not None:
            axes.axvline(threshold, color=LIGHT["ink"], linewidth=1.0, linestyle=(0, (4, 3)), label=threshold_name)
        axes.set(xlim=(low, high), ylim=(0.0, None), xlabel=label)
        axes.set_ylabel("share of images", rotation_mode="anchor")
        axes.set_xticks(_ticks(low, high, forward))
        axes.set_xticks([], minor=True)
        figure.legend(loc="outside upper center", ncols=3, handlelength=1.4, columnspacing=1.2)
    return figure


def score_limits(sets: Sequence[npt.ArrayLike]) -> tuple[float, float]:
    """Ends of an axis on which all these scores fit, the first set being the in-distribution one."""
    arrays = [_scores(scores, "shown") for scores in sets]
    forward, inverse = _score_axis(arrays[0])
    together = forward(np.concatenate(arrays))
    margin = 0.02 * (float(np.ptp(together)) or 1.0)
    low, high = inverse(np.array([together.min() - margin, together.max() + margin]))
    return float(low), float(high)


def _scores(values: npt.ArrayLike, name: str) -> Array:
    scores = np.asarray(values, dtype=np.float64).ravel()
    if len(scores) == 0 or not np.isfinite(scores).all():
        raise InputError(f"the {name} scores are empty or not all finite; there is nothing to draw")
    return scores


def _score_axis(inside: Array) -> tuple[Callable[[Array], Array], Callable[[Array], Array]]:
    """asinh((score - centre) / width) and its inverse: linear among ID scores, logarithmic beyond."""
    low, centre, high = np.quantile(inside, [0.02, 0.5, 0.98])
    width = float(high - low) or max(1.0, abs(float(centre)))
    return lambda x: np.arcsinh((x - centre) / width), lambda u: centre + width * np.sinh(u)


def _ticks(low: float, high: float, forward: Callable[[Array], Array]) -> list[float]:
    """Round numbers inside [low, high], the roundest first, none closer to another than `TICK_GAP` of the axis."""
    top = int(np.ceil(np.log10(max(abs(low), abs(high), 1e-12))))
    steps = (1.0, 5.0, 2.0, 4.0, 3.0, 6.0)
    powers = [sign * 10.0**power for power in range(top, top - 5, -1) for sign in (1.0, -1.0)]
    candidates = [0.0, *powers, *(value * step for step in steps[1:] for value in powers)]
    begin, end = forward(np.array([low, high]))
    chosen: dict[float, float] = {}
    for value in candidates:
        place = float((forward(np.array(value)) - begin) / (end - begin))
        if low <= value <= high and all(abs(place - other) >= TICK_GAP for other in chosen.values()):
            chosen[value] = place
    if len(chosen) < 2:  # a narrow range holds no round number: as few digits as tell its ends apart
        digits = max(0, 1 - int(np.floor(np.log10(high - low))))
        return [round(float(value), digits) for value in np.linspace(low, high, 5)[1:-1]]
    return sorted(chosen)


def roc(pairs: Mapping[str, tuple[npt.ArrayLike, npt.ArrayLike]]) -> Figure:
    """One ROC curve for each named (ID scores, OOD scores): OOD images caught against false alarms."""
    side = 1.85
    with drawing(PANEL, layout=None) as figure:
        axes = figure.add_axes((0.48 / WIDTH, 0.44 / PANEL, side / WIDTH, side / PANEL))
        axes.plot([0, 1], [0, 1], color=LIGHT["muted"], linewidth=0.8, linestyle=(0, (1, 2)))
        for position, (name, (inside, outside)) in enumerate(pairs.items()):
            label, style = f"{_visible(name)} {auroc(inside, outside):.3f}", line_style(position)
            sets = [_scores(inside, "ID"), _scores(outside, "OOD")]
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


def _visible(name: str) -> str:
    """A name for the legend, from which matplotlib leaves out what begins with an underscore."""
    return f"\u200b{name}" if name.startswith("_") else name


def gallery(images: Images, labels: Sequence[str], columns: int = 4) -> Figure:
    """Images in rows of `columns`, each with its label below; fewer images leave the last places empty."""
    side = _tile_side(len(images), columns)
    pitch = side + LINE + GAP
    with drawing(pitch * -(-len(images) // columns), layout=None) as figure:
        sheet = _sheet(figure)
        for place, (image, label) in enumerate(zip(images, labels, strict=True)):
            row, column = divmod(place, columns)
            left, top = MARGIN + column * (side + GAP), row * pitch
            _put(sheet, picture(image), left, top, side)
            sheet.text(left + side / 2, top + side + 0.04, label, fontsize=8, ha="center", va="top")
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
