"""The picture of a radar benchmark: one patch of each set; its log-magnitude, its residual map, both together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gepc.core.errors import GepcError
from gepc.core.palette import LIGHT
from gepc.detector.maps import overlay
from gepc.images.preprocessing import log_magnitude
from gepc.sar.bench import Run, SarBench
from gepc.sar.localisation import smoothed
from gepc.sar.measure import Measured
from gepc.sar.patches import Patch, PatchImages

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = npt.NDArray[np.float64]
ROWS = ("log-magnitude", "residual", "overlay")


def draw(bench: SarBench, normalise: str | None = None) -> Figure:
    """The patch of median score of each set, so that none is picked by eye; one colour scale for all maps.

    Maps are shown under the box filter of local pooling, from 0 to the larger of v_global (the median over clutter of
    the 0.99 quantile) and the 0.998 quantile of the shown maps.
    """
    try:
        import matplotlib
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import LinearSegmentedColormap, Normalize
        from matplotlib.figure import Figure
    except ImportError as error:
        raise GepcError("figures need matplotlib; install it with: pip install 'gepc[report]'") from error
    run = bench.runs[normalise or next(iter(bench.runs))]
    columns = _columns(bench, run)
    top = scale(bench, run, [field for _, _, field in columns])
    heat = LinearSegmentedColormap.from_list(
        "residual", [overlay(np.zeros((1, 1, 3)), np.full((1, 1), v), 1.0, 1.0)[0, 0] for v in np.linspace(0, 1, 32)]
    )
    with matplotlib.rc_context({"font.family": "DejaVu Sans", "font.size": 9, "text.color": LIGHT["ink"]}):
        figure = Figure(figsize=(2.3 * len(columns) + 1.0, 7.2), layout="constrained", facecolor=LIGHT["paper"])
        grid = figure.subplots(len(ROWS), len(columns), squeeze=False)
        for column, (title, patch, field) in enumerate(columns):
            picture = np.repeat(_picture(patch)[..., None], 3, axis=2)
            grid[0, column].imshow(picture, vmin=0, vmax=1)
            grid[1, column].imshow(field, cmap=heat, vmin=0, vmax=top)
            grid[2, column].imshow(overlay(picture, field, top).clip(0.0, 1.0))
            grid[0, column].set_title(title, fontsize=9)
            for axes in grid[:, column]:
                _frame(axes, patch if axes is not grid[1, column] else None)
        window = bench.protocol.extractors()[bench.protocol.local].window
        for axes, name in zip(grid[:, 0], (ROWS[0], f"{ROWS[1]}, {window}x{window} mean", ROWS[2]), strict=True):
            axes.set_ylabel(name)
        bar = figure.colorbar(ScalarMappable(Normalize(0, top), heat), ax=grid[1:, :], shrink=0.6, extend="max")
        bar.ax.locator_params(nbins=5)
        bar.set_label("residual energy, one scale for all", color=LIGHT["ink"])
    return figure


def scale(bench: SarBench, run: Run, shown: list[npt.NDArray[np.float32]]) -> float:
    """White of the colour bar, the same for every map."""
    window = bench.protocol.extractors()[bench.protocol.local].window
    fit = smoothed(bench.maps(run, run.fit), window)
    v_global = float(np.median([np.quantile(field, 0.99) for field in fit]))
    return max(v_global, *(float(np.quantile(field, 0.998)) for field in shown))


def _columns(bench: SarBench, run: Run) -> list[tuple[str, Patch, npt.NDArray[np.float32]]]:
    inside, outside = bench.scores(run, bench.protocol.local, "z")
    sets = [("ID: sea clutter", run.clutter, inside)]
    sets += [(f"OOD: {name} ship", run.ships[name], found) for name, found in outside.items()]
    window = bench.protocol.extractors()[bench.protocol.local].window
    found = []
    for title, part, scores in sets:
        place = int(np.argsort(scores, kind="stable")[len(scores) // 2])
        field = smoothed(bench.maps(run, _only(part, place)), window)[0]
        found.append((f"{title}\nz = {scores[place]:.1f}", part.patches[place], field))
    return found


def _only(part: Measured, place: int) -> Measured:
    assert part.maps is not None
    columns = {name: values[place : place + 1] for name, values in part.columns.items()}
    return Measured(part.patches[place : place + 1], columns, part.maps[place : place + 1])


def _picture(patch: Patch) -> Array:
    pixels = PatchImages([patch])[0].pixels
    assert pixels is not None
    return log_magnitude(pixels)


def _frame(axes: Axes, patch: Patch | None) -> None:
    from matplotlib.patches import Rectangle

    axes.set_xticks([])
    axes.set_yticks([])
    for box in patch.boxes if patch is not None else ():
        corner = (box.x - 0.5, box.y - 0.5)
        axes.add_patch(Rectangle(corner, box.width, box.height, fill=False, edgecolor=LIGHT["inside"], linewidth=1.0))
