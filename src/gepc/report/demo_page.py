"""The report of the demonstration: its figures and numbers, for the text in `demo.html`."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from gepc._version import __version__
from gepc.core.tables import ResultTable
from gepc.report import figures
from gepc.report.demo import FIT_ROWS, FULL, SIDE, TEST_ROWS, Demo, Photograph, ScoredPatches, load_photograph
from gepc.report.page import FOLDER, Picture, render

COLUMNS = ("against", "patches", "AUROC", "95% interval", "AUPR", "FPR95", "alarms")
PACKAGES = ("torch", "diffusers", "numpy", "scikit-image", "matplotlib")
FACES = "celeba32-tiny"
SHOWN = 8
THUMBNAIL = 128


def render_demo(demo: Demo, command: str) -> str:
    """The report as HTML.

    Parameters
    ----------
    demo : the finished run.
    command : the command that repeats it.
    """
    import torch

    detector, method, backbone = demo.detector, demo.method, demo.detector.backbone
    scale = detector.map_scale_ or 1.0
    return render(
        FOLDER / "demo.html",
        demo=demo,
        table=_table(demo),
        photographs=_photographs(demo),
        scores=_score_figures(demo),
        patches=_patches(demo),
        maps=[_map_figure(scored, scale) for scored in demo.scored],
        map_scale=scale,
        features=", ".join(f"`{name}`" for name in method.features),
        pool=f"top {method.topk:.0%} of the pixels" if method.pool == "topk" else f"{method.pool} pooling",
        kept=", ".join(f"{t} (weight {w:.3f})" for t, w in zip(detector.kept_, detector.weights_, strict=True)),
        faces=backbone.source == FACES,
        backbone=backbone,
        threads=torch.get_num_threads(),
        command=command,
        versions=_versions(),
        side=SIDE,
        full=FULL,
        fit_rows=FIT_ROWS,
        test_rows=TEST_ROWS,
    )


def result_rows(demo: Demo) -> list[tuple[str, ...]]:
    """One row of text per other photograph, under `COLUMNS`."""
    rows: list[tuple[str, ...]] = []
    for other in demo.others:
        found = demo.detections[other.name]
        interval = f"{found.auroc_low:.3f} to {found.auroc_high:.3f}"
        numbers = (f"{found.auroc:.3f}", interval, f"{found.aupr:.3f}", f"{found.fpr95:.3f}")
        rows.append((other.name, str(found.n_ood), *numbers, f"{other.alarms} of {found.n_ood}"))
    return rows


def _table(demo: Demo) -> ResultTable:
    inside = demo.held_out.name
    title = f"{len(demo.held_out)} held-out patches of {inside} against each other photograph"
    note = (
        f"Out-of-distribution is the positive class. FPR95 is the share of {inside} patches flagged at the threshold "
        "that flags 95% of the other patches; lower is better. The interval is DeLong's, for independent patches, and "
        f"a wider, exact one if the separation is perfect. Alarms are patches with p ≤ {demo.alpha:g}."
    )
    return ResultTable("demo", title, COLUMNS, tuple(result_rows(demo)), note)


def _photographs(demo: Demo) -> Picture:
    shown = [scored.photograph for scored in demo.scored]
    tiles = [_thumbnail(photograph, band=photograph is shown[0]) for photograph in shown]
    alt = "The photographs: " + "; ".join(f"{one.name}, {one.shows}" for one in shown) + "."
    return Picture(figures.gallery(tiles, [one.name for one in shown], columns=3), alt)


def _thumbnail(photograph: Photograph, band: bool) -> Any:
    """The largest centred square, reduced; with `band` the unused rows of patches are dark."""
    from PIL import Image

    pixels = load_photograph(photograph).copy()
    if band:
        rows = slice(FIT_ROWS.stop * SIDE, TEST_ROWS.start * SIDE)
        pixels[rows] = pixels[rows] // 4
    side = min(pixels.shape[:2])
    top, left = (pixels.shape[0] - side) // 2, (pixels.shape[1] - side) // 2
    square = Image.fromarray(np.squeeze(pixels[top : top + side, left : left + side]))
    return np.asarray(square.resize((THUMBNAIL, THUMBNAIL), Image.Resampling.LANCZOS))


def _score_figures(demo: Demo) -> list[Picture]:
    """A histogram for every other photograph, and the ROC curves."""
    inside, threshold = demo.held_out, demo.threshold
    limits = figures.score_limits([scored.scores for scored in demo.scored])
    pictures = []
    for other in demo.others:
        names, label = (inside.name, other.name), f"α = {demo.alpha:g}"
        figure = figures.histogram(inside.scores, other.scores, threshold, names, limits, label)
        alt = f"Histogram of scores: {_spread(inside)}; {_spread(other)}; the threshold is {short(threshold)}."
        pictures.append(Picture(figure, alt))
    curves = figures.roc({other.name: (inside.scores, other.scores) for other in demo.others})
    areas = ", ".join(f"{name} {found.auroc:.3f}" for name, found in demo.detections.items())
    return [*pictures, Picture(curves, f"ROC curves with the area under each: {areas}.")]


def _spread(scored: ScoredPatches) -> str:
    low, middle, high = map(short, np.quantile(scored.scores, [0.0, 0.5, 1.0]))
    return f"{scored.name} from {low} to {high}, with median {middle}"


def _patches(demo: Demo) -> list[Picture]:
    inside = demo.held_out
    order = np.argsort(inside.scores, kind="stable")
    ends = [(other, other.shown[end]) for end in (-1, 0) for other in demo.others]
    return [
        _tiles(f"Most typical {inside.name}", [(inside, place) for place in order[:SHOWN]], 4),
        _tiles(f"Least typical {inside.name}", [(inside, place) for place in order[::-1][:SHOWN]], 4),
        _tiles("Others, highest and lowest", ends, len(demo.others), named=True),
    ]


def _tiles(title: str, picked: Sequence[tuple[ScoredPatches, Any]], columns: int, named: bool = False) -> Picture:
    scores = [short(scored.scores[place]) for scored, place in picked]
    labels = [f"{scored.name} {score}" for (scored, _), score in zip(picked, scores, strict=True)]
    images = [scored.pixels[place] for scored, place in picked]
    figure = figures.gallery(images, labels if named else scores, columns)
    return Picture(figure, f"{title}; patches and scores: {', '.join(labels)}.", title)


def _map_figure(scored: ScoredPatches, scale: float) -> Picture:
    places = ("lowest", "median", "highest")[-len(scored.shown) :]
    labels = [f"{place} {short(scored.scores[index])}" for place, index in zip(places, scored.shown, strict=True)]
    images = [scored.pixels[index] for index in scored.shown]
    bright = ", ".join(
        f"{label}: {(field >= scale).mean():.0%}" for label, field in zip(labels, scored.maps, strict=True)
    )
    alt = f"Maps of patches of {scored.name}. Score, and share of pixels at the end of the scale: {bright}."
    return Picture(figures.maps(images, list(scored.maps), labels, scale), alt, scored.name)


def _versions() -> str:
    """gepc, Python and the installed packages, with their versions."""
    found = [f"gepc {__version__}", f"Python {platform.python_version()}"]
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    return ", ".join(found)


def short(score: float) -> str:
    """A score in few characters: one digit after the point below 100, none above."""
    return f"{score:.{1 if abs(score) < 99.95 else 0}f}".replace("-", "−")
