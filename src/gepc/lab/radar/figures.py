"""The paper's two radar figures: patches, their residual maps on one scale, and overlays."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gepc.detector.plots import drawing
from gepc.images.preprocessing import log_magnitude
from gepc.lab.radar.bench import Fitted, PatchSets, score_patches
from gepc.lab.radar.patches import PatchImages
from gepc.lab.report.figures import save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANEL, TITLE = 1.9, 0.35  # inches


def write_figures(folder: Path, name: str, item: Fitted, sets: PatchSets) -> None:
    """Write `NAME-main.png` (clutter and a ship) and `NAME-appendix.png` (all sets, with overlays).

    Each set is shown by the patch with the median score. Residual maps have the scale v_global, the median over
    in-distribution patches of the 0.99 quantile of their maps, so that colours compare.
    """
    rows = []
    for title, patches in {"clutter": sets.clutter, **sets.ships}.items():
        order = np.argsort(item.scores[title], kind="stable")
        chosen = [patches[int(order[len(order) // 2])]]
        pixels = PatchImages(chosen)[0].pixels
        assert pixels is not None
        label = "ID (sea clutter)" if title == "clutter" else f"OOD ({title} targets)"
        rows.append((label, log_magnitude(pixels), score_patches(item.detector, chosen)[1][0]))
    scale = item.detector.map_limit(raw=True)

    def residual(axes: Axes, field: np.ndarray) -> None:
        shown = axes.imshow(field, cmap="inferno", vmin=0.0, vmax=scale)
        axes.figure.colorbar(shown, ax=axes, fraction=0.046)

    with drawing(PANEL + TITLE) as figure:
        figure.set_size_inches(4.2 * PANEL, PANEL + TITLE)
        panels = figure.subplots(1, 4)
        for two, kind, (_, picture, field) in zip(panels.reshape(2, 2), ("ID", "OOD"), rows, strict=False):
            two[0].imshow(picture, cmap="gray", vmin=0.0, vmax=1.0)
            two[0].set_title(f"{kind}: log-mag")
            residual(two[1], field)
            two[1].set_title(f"{kind}: GEPC")
        _bare(panels)
        save(figure, folder / f"{name}-main", ("png",))
    with drawing(len(rows) * (PANEL + TITLE)) as figure:
        figure.set_size_inches(3.4 * PANEL, len(rows) * (PANEL + TITLE))
        grid = figure.subplots(len(rows), 3, squeeze=False)
        for line, (label, picture, field) in zip(grid, rows, strict=True):
            line[0].imshow(picture, cmap="gray", vmin=0.0, vmax=1.0)
            residual(line[1], field)
            line[2].imshow(picture, cmap="gray", vmin=0.0, vmax=1.0)
            line[2].imshow(field, cmap="inferno", vmin=0.0, vmax=scale, alpha=0.55)
            for axes, title in zip(line, (f"{label}\nLog-magnitude", "GEPC residual", "Overlay"), strict=True):
                axes.set_title(title)
        _bare(grid)
        save(figure, folder / f"{name}-appendix", ("png",))


def _bare(panels: np.ndarray) -> None:
    for axes in panels.flat:
        axes.set_axis_off()
