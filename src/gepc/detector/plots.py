"""Plots as matplotlib `Figure` objects: scores, p-values and alarms of images, histograms, and maps beside images.

Each is readable at the width of a phone. The background is transparent, and the colours are those of
`gepc.core.palette`, for which a page has a dark form.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gepc.core.errors import GepcError, InputError, raising
from gepc.core.files import replacing
from gepc.core.palette import LIGHT
from gepc.maps.drawing import overlay

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

Array = npt.NDArray[np.float64]
Images = Sequence[npt.NDArray[Any]]
Transform = Callable[[Array], Array]

WIDTH, PANEL = 3.6, 2.5  # inches: the width of every figure, the height of a plot
BINS = 32
COLOURS = (LIGHT["inside"], LIGHT["outside"])
DASHED = (0, (4, 3))
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
def drawing(height: float) -> Iterator[Figure]:
    """A new figure, with this module's style for what is drawn inside the `with`."""
    with raising(GepcError, "figures need matplotlib; install it with: pip install 'gepc[report]'", ImportError):
        import matplotlib
        from matplotlib.figure import Figure
    with matplotlib.rc_context(_STYLE):
        yield Figure(figsize=(WIDTH, height), layout="constrained")


def plot_results(scores: npt.ArrayLike, p_values: npt.ArrayLike, alarms: npt.ArrayLike) -> Figure:
    """Plot the scores of images as a histogram, and their p-values in order, with alarms in another colour.

    Parameters
    ----------
    scores : array (N,)
        Higher = more out of distribution. An image that could not be scored is NaN and is left out.
    p_values : array (N,)
        Their p-values.
    alarms : bool array (N,)
        Which images raise an alarm.

    Returns
    -------
    matplotlib.figure.Figure
        The figure. Save it with `figure.savefig("scores.png")`; a notebook shows it by itself.

    Raises
    ------
    InputError
        If the three arrays differ in length, or if no score is finite.

    See Also
    --------
    gepc.Detector.plot : score images and plot the results.

    Examples
    --------
    >>> from gepc.detector.plots import plot_results
    >>> figure = plot_results([0.1, 0.4, 9.0], [0.7, 0.5, 0.01], [False, False, True])
    >>> [axes.get_ylabel() for axes in figure.axes]
    ['images', 'p-value']
    """
    score, p = (np.asarray(values, dtype=np.float64) for values in (scores, p_values))
    alarm = np.asarray(alarms, dtype=bool)
    if not len(score) == len(p) == len(alarm):
        raise InputError(f"{len(score)} scores, {len(p)} p-values and {len(alarm)} alarms; give one of each per image")
    position = np.arange(1, len(score) + 1)
    scored = np.isfinite(score)
    finite_scores(score[scored], "given")
    sets = [np.flatnonzero(scored & ~alarm), np.flatnonzero(scored & alarm)]
    names = [f"no alarm ({len(sets[0])})", f"alarm ({len(sets[1])})"]
    with drawing(2 * PANEL) as figure:
        upper, lower = figure.subplots(2, 1)
        _draw_histogram(upper, [score[rows] for rows in sets], [np.ones(len(rows)) for rows in sets], names)
        upper.set(xlabel="score", ylabel="images")
        for rows, colour in zip(sets, COLOURS, strict=True):
            lower.plot(position[rows], p[rows], ".", color=colour, markersize=5)
        lower.set(xlabel="image", ylabel="p-value", yscale="log", ylim=(None, 1.3))
        figure.legend(loc="outside upper center", ncols=2, handlelength=1.4, columnspacing=1.2)
    return figure


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
    sets = [finite_scores(inside, names[0]), finite_scores(outside, names[1])]
    with drawing(PANEL) as figure:
        axes = figure.add_subplot()
        shares = [np.full(len(scores), 1.0 / len(scores)) for scores in sets]
        _draw_histogram(axes, sets, shares, names, limits)
        if threshold is not None:
            axes.axvline(threshold, color=LIGHT["ink"], linewidth=1.0, linestyle=DASHED, label=threshold_name)
        axes.set_xlabel(label)
        axes.set_ylabel("share of images", rotation_mode="anchor")
        figure.legend(loc="outside upper center", ncols=3, handlelength=1.4, columnspacing=1.2)
    return figure


def _draw_histogram(
    axes: Axes,
    sets: Sequence[Array],
    weights: Sequence[Array],
    names: Sequence[str],
    limits: tuple[float, float] | None = None,
) -> None:
    """The weights of each set by score; the first set that is not empty decides where the axis is linear."""
    forward, inverse = _score_axis(next(scores for scores in sets if len(scores)))
    low, high = limits or score_limits([scores for scores in sets if len(scores)])
    edges = inverse(np.linspace(forward(np.array(low)), forward(np.array(high)), BINS + 1))
    axes.set_xscale("function", functions=(forward, inverse))
    for scores, weight, name, colour in zip(sets, weights, names, COLOURS, strict=True):
        height = np.histogram(scores.clip(edges[0], edges[-1]), edges, weights=weight)[0]
        axes.stairs(height, edges, fill=True, color=colour, alpha=0.35)
        # matplotlib leaves a name out of the legend that begins with an underscore
        axes.stairs(height, edges, color=colour, linewidth=1.2, label=f"\u200b{name}" if name[:1] == "_" else name)
    axes.set(xlim=(low, high), ylim=(0.0, None))
    axes.set_xticks(_ticks(np.array([low, high]), forward, inverse))
    axes.set_xticks([], minor=True)


def score_limits(sets: Sequence[npt.ArrayLike]) -> tuple[float, float]:
    """Ends of an axis on which all these scores fit, the first set being the in-distribution one."""
    arrays = [finite_scores(scores, "shown") for scores in sets]
    forward, inverse = _score_axis(arrays[0])
    together = forward(np.concatenate(arrays))
    margin = 0.02 * (float(np.ptp(together)) or 1.0)
    low, high = inverse(np.array([together.min() - margin, together.max() + margin]))
    return float(low), float(high)


def finite_scores(values: npt.ArrayLike, name: str) -> Array:
    """The scores as (N,); `InputError` if there are none, or if some are not finite."""
    scores = np.asarray(values, dtype=np.float64).ravel()
    if len(scores) == 0 or not np.isfinite(scores).all():
        raise InputError(f"the {name} scores are empty or not all finite; there is nothing to draw")
    return scores


def _score_axis(inside: Array) -> tuple[Transform, Transform]:
    """asinh((score - centre) / width) and its inverse: linear among ID scores, logarithmic beyond."""
    low, centre, high = np.quantile(inside, [0.02, 0.5, 0.98])
    width = float(high - low) or max(1.0, abs(float(centre)))
    return lambda x: np.arcsinh((x - centre) / width), lambda u: centre + width * np.sinh(u)


def _ticks(limits: Array, forward: Transform, inverse: Transform) -> list[float]:
    """Four numbers at about equal distances on the axis, each with as few digits as its neighbours allow."""
    begin, end = forward(limits)
    values = inverse(np.linspace(begin, end, 6))
    gaps = np.diff(values)
    nearest = np.minimum(gaps[:-1], gaps[1:])
    digits = -np.floor(np.log10(nearest)).astype(int)
    return [round(float(value), int(count)) for value, count in zip(values[1:-1], digits, strict=True)]


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
