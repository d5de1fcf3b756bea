"""The paper's two radar figures: patches, their residual maps on one scale, and overlays."""

from pathlib import Path

import numpy as np

from gepc.images.preprocessing import log_magnitude
from gepc.lab.radar.bench import Fitted, PatchSets, score_patches
from gepc.lab.radar.patches import PatchImages
from gepc.lab.report.figures import maps, save


def write_figures(folder: Path, name: str, item: Fitted, sets: PatchSets) -> None:
    """Write `NAME-main.png` (clutter and a ship) and `NAME-appendix.png` (all sets).

    Each set is shown by the patch with the median score. Residual maps have the scale v_global, the median over
    in-distribution patches of the 0.99 quantile of their maps, so that colours compare.
    """
    images, fields, labels = [], [], []
    for title, patches in {"clutter": sets.clutter, **sets.ships}.items():
        order = np.argsort(item.scores[title], kind="stable")
        chosen = [patches[int(order[len(order) // 2])]]
        pixels = PatchImages(chosen)[0].pixels
        assert pixels is not None
        images.append(np.rint(255.0 * log_magnitude(pixels)).astype(np.uint8))
        fields.append(score_patches(item.detector, chosen)[1][0])
        labels.append("ID: sea clutter" if title == "clutter" else f"OOD: {title}")
    scale = item.detector.map_limit(raw=True)
    for part, count in (("main", 2), ("appendix", len(images))):
        save(maps(images[:count], fields[:count], labels[:count], scale), folder / f"{name}-{part}", ("png",))
