"""Results of the radar benchmark: tables of detection and localisation with intervals, and a figure of maps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gepc.core.errors import GepcError, InputError
from gepc.core.files import replacing
from gepc.core.palette import LIGHT
from gepc.core.tables import Cell, ResultTable, write_each, write_tables
from gepc.detector.maps import overlay
from gepc.features.pooling import Map, box_filter
from gepc.images.preprocessing import log_magnitude
from gepc.sar.annotations import Mask
from gepc.sar.bench import TOPK, Array, FeatureSets, PatchSets, SarBench
from gepc.sar.patches import Patch, PatchImages
from gepc.scoring.metrics import aupr, auroc, auroc_interval, fpr_at_tpr

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CALIBRATIONS = {"z": "one-sided (z)", "abs_z": "two-sided (abs_z)", "kde": "two-sided (kde)"}
PUBLISHED = {"HRSID": (0.853, 0.619, 0.000), "SSDD": (1.000, 1.000, 0.000)}
METRICS = ("AUROC", "95 % interval", "AUPR", "95 % interval ", "FPR95", "95 % interval  ")
LOCALISATION = ("pixel AUROC", "95 % interval", "pointing game", "95 % interval ", "energy in boxes", "95 % interval  ")
ROWS = ("log-magnitude", "residual", "overlay")


def tables(bench: SarBench) -> list[ResultTable]:
    """All tables of a benchmark."""
    return [
        detection_table(bench),
        target_table(bench),
        localisation_table(bench),
        level_table(bench),
        patch_table(bench.sets),
    ]


def detection_table(bench: SarBench) -> ResultTable:
    """AUROC, AUPR and FPR95 by normalisation, pooling and calibration, with a baseline and the published figures."""
    rows: list[tuple[Cell, ...]] = []
    for found in bench.features.values():
        for pooling in (TOPK, bench.protocol.local):
            for calibration, label in CALIBRATIONS.items():
                inside, outside = bench.scores(found, pooling, calibration)
                for name, scores in outside.items():
                    metrics = _metrics(bench, inside, scores, name)
                    rows.append((f"{name} ships", found.normalise, pooling, label, *metrics))
    rows += _brightness_rows(bench)
    for name in bench.sets.ships:
        if name in PUBLISHED:
            a, p, f = PUBLISHED[name]
            rows.append((f"{name} ships", "patch", "published", "-", a, None, p, None, f, None))
    counts = ", ".join(f"{len(patches)} {name} ships" for name, patches in bench.sets.ships.items())
    return ResultTable(
        "detection",
        f"Ships against sea clutter, {bench.backbone.source or bench.backbone.family}",
        ("OOD set", "normalisation", "pooling", "calibration", *METRICS),
        tuple(rows),
        f"Fitted on {len(bench.sets.fit)} clutter patches, tested on {len(bench.sets.clutter)}, against {counts}. "
        "OOD is the positive class; AUPR depends on the counts. Intervals resample whole source images. Published: "
        "the paper's LSUN-256 backbone; its HRSID row cannot hold as printed, since an FPR95 of 0 puts 95 % of the "
        "ships above all clutter and the AUROC at .95 or more.",
    )


def _metrics(bench: SarBench, inside: Array, outside: Array, name: str) -> tuple[Cell, ...]:
    def all_three(a: Array, b: Array) -> tuple[float, float, float]:
        return auroc(a, b), aupr(a, b), fpr_at_tpr(a, b)

    sources = [[patch.scene.source for patch in patches] for patches in (bench.sets.clutter, bench.sets.ships[name])]
    intervals = bootstrap_intervals(all_three, (inside, outside), sources, bench.protocol.draws)
    values = all_three(inside, outside)
    return tuple(cell for value, pair in zip(values, intervals, strict=True) for cell in (float(value), _span(pair)))


def _brightness_rows(bench: SarBench) -> list[tuple[Cell, ...]]:
    """A baseline without a network: the log-magnitude under the same local pooling."""
    import torch

    pooling = bench.protocol.extractors()[bench.protocol.local].pooling

    def brightness(patches: Sequence[Patch]) -> Array:
        return np.array([float(pooling.pixels(torch.from_numpy(field)[None])[0]) for field in _log_magnitudes(patches)])

    inside = brightness(bench.sets.clutter)
    return [
        (
            *(f"{name} ships", "fixed", bench.protocol.local, "brightness, no network"),
            *_metrics(bench, inside, brightness(patches), name),
        )
        for name, patches in bench.sets.ships.items()
    ]


def _log_magnitudes(patches: Sequence[Patch]) -> list[Array]:
    images = PatchImages(patches)
    return [log_magnitude(np.asarray(images[index].pixels)) for index in range(len(images))]


def target_table(bench: SarBench) -> ResultTable:
    """Sensitivity to the target size."""
    rows: list[tuple[Cell, ...]] = []
    for pooling, extractor in bench.protocol.extractors().items():
        window = extractor.window if extractor.pool == "local" else None
        for found in bench.features.values():
            inside, outside = bench.scores(found, pooling, "z")
            for name, scores in outside.items():
                row = (pooling, window, f"{100 * extractor.topk:.2f} %", found.normalise, f"{name} ships")
                rows.append((*row, auroc(inside, scores), _span(auroc_interval(inside, scores))))
    return ResultTable(
        "target_size",
        "Pooling at other target sizes (one-sided)",
        ("pooling, pixels", "window", "share", "normalisation", "OOD set", "AUROC", "DeLong 95 %"),
        tuple(rows),
        f"A sensitivity check: the figures above use {bench.protocol.local}, which was given and not tuned on these "
        "ships; choosing another row here would use OOD data. DeLong's interval treats patches as independent.",
    )


def localisation_table(bench: SarBench) -> ResultTable:
    """Where the map points, as it is and after the box filter of local pooling."""
    window = bench.protocol.window
    rows: list[tuple[Cell, ...]] = []
    for found in bench.features.values():
        for name, part in found.ships.items():
            raw = bench.maps(found, part)
            masks = np.stack([patch.mask() for patch in part.patches])
            for label, maps in (("as it is", raw), (f"{window}x{window} box", smoothed(raw, window))):
                measured = localise(maps, masks)
                cells: list[Cell] = []
                for values in (measured.auroc, measured.hit, measured.energy):
                    (span,) = bootstrap_intervals(_mean, [values], [part.sources], bench.protocol.draws)
                    cells += [float(values.mean()), _span(span)]
                rows.append((f"{name} ships", found.normalise, label, *cells, float(measured.area.mean())))
    return ResultTable(
        "localisation",
        "Where the map points, against the boxes",
        ("OOD set", "normalisation", "map", *LOCALISATION, "chance"),
        tuple(rows),
        "Means over patches. Chance is the fraction of the patch inside boxes; for the pixel AUROC it is 0.5.",
    )


def _mean(values: Array) -> tuple[float]:
    return (float(values.mean()),)


def level_table(bench: SarBench) -> ResultTable:
    """Candidate levels with their coefficient of variation, the weights of those kept, and v_global."""
    rows: list[tuple[Cell, ...]] = []
    for found in bench.features.values():
        v_global = f"{_v_global(bench, found):.3g}"
        for pooling in (bench.protocol.local, TOPK):
            picked = bench.scorer(found, pooling).selection_
            steps = bench.protocol.extractors()[pooling].timesteps(bench.backbone)
            cv = ", ".join(f"{t} ({value:.3f})" for t, value in zip(steps, picked.cv, strict=True))
            kept = ", ".join(f"{steps[place]} ({w:.2f})" for place, w in zip(picked.kept, picked.weights, strict=True))
            rows.append((found.normalise, pooling, cv, kept, v_global))
    header = ("normalisation", "pooling", "timesteps (CV on clutter)", "kept (weight)", "v_global")
    return ResultTable("levels", "Levels, chosen on clutter alone", header, tuple(rows))


def _v_global(bench: SarBench, found: FeatureSets, window: int = 1) -> float:
    """Median over the clutter fitted on of the 0.99 quantile of the map, under a box filter."""
    return float(np.median([np.quantile(field, 0.99) for field in smoothed(bench.maps(found, found.fit), window)]))


def patch_table(sets: PatchSets) -> ResultTable:
    """Numbers of patches, and of those excluded by reason."""
    reasons = sorted({reason for found in sets.cuts.values() for reason in found.left_out})
    rows: list[tuple[Cell, ...]] = [
        (name, found.scenes, len(found.clutter), len(found.ships), *(found.left_out[reason] for reason in reasons))
        for name, found in sets.cuts.items()
    ]
    header = ("images of", "images", "clutter", "ships", *(f"left out: {reason}" for reason in reasons))
    return ResultTable("patches", "Patches before sampling", header, tuple(rows))


def _span(interval: Interval) -> str:
    return f"{interval[0]:.3f} to {interval[1]:.3f}"


def draw(bench: SarBench) -> Figure:
    """Log-magnitude, residual map and overlay of one patch per set, under the first normalisation.

    The patch has the median score of its set, so that none is hand-picked. Maps are shown under the box filter of
    local pooling on one colour scale, from 0 to the larger of v_global (the median over clutter of the 0.99 quantile)
    and the 0.998 quantile of the shown maps.
    """
    try:
        import matplotlib
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import LinearSegmentedColormap, Normalize
        from matplotlib.figure import Figure
    except ImportError as error:
        raise GepcError("figures need matplotlib; install it with: pip install 'gepc[report]'") from error
    found = next(iter(bench.features.values()))
    columns, window = _columns(bench, found), bench.protocol.window
    top = max(_v_global(bench, found, window), *(float(np.quantile(shown, 0.998)) for _, _, shown in columns))
    colours = [overlay(np.zeros((1, 1, 3)), np.full((1, 1), v), 1.0, 1.0)[0, 0] for v in np.linspace(0, 1, 32)]
    heat = LinearSegmentedColormap.from_list("residual", colours)
    with matplotlib.rc_context({"font.family": "DejaVu Sans", "font.size": 9, "text.color": LIGHT["ink"]}):
        figure = Figure(figsize=(2.3 * len(columns) + 1.0, 7.2), layout="constrained", facecolor=LIGHT["paper"])
        grid = figure.subplots(len(ROWS), len(columns), squeeze=False)
        for column, (title, patch, shown) in enumerate(columns):
            picture = np.repeat(_log_magnitudes([patch])[0][..., None], 3, axis=2)
            grid[0, column].imshow(picture, vmin=0, vmax=1)
            grid[1, column].imshow(shown, cmap=heat, vmin=0, vmax=top)
            grid[2, column].imshow(overlay(picture, shown, top).clip(0.0, 1.0))
            grid[0, column].set_title(title, fontsize=9)
            for axes in grid[:, column]:
                _frame(axes, patch if axes is not grid[1, column] else None)
        for axes, name in zip(grid[:, 0], (ROWS[0], f"{ROWS[1]}, {window}x{window} mean", ROWS[2]), strict=True):
            axes.set_ylabel(name)
        bar = figure.colorbar(ScalarMappable(Normalize(0, top), heat), ax=grid[1:, :], shrink=0.6, extend="max")
        bar.ax.locator_params(nbins=5)
        bar.set_label("residual energy, one scale for all", color=LIGHT["ink"])
    return figure


def _columns(bench: SarBench, found: FeatureSets) -> list[tuple[str, Patch, Map]]:
    """Title, patch and smoothed map of the patch of median score in each set."""
    inside, outside = bench.scores(found, bench.protocol.local, "z")
    sets = [("ID: sea clutter", found.clutter, inside)]
    sets += [(f"OOD: {name} ship", found.ships[name], scores) for name, scores in outside.items()]
    columns = []
    for title, part, scores in sets:
        place = int(np.argsort(scores, kind="stable")[len(scores) // 2])
        shown = smoothed(bench.maps(found, part)[[place]], bench.protocol.window)[0]
        columns.append((f"{title}\nz = {scores[place]:.1f}", part.patches[place], shown))
    return columns


def _frame(axes: Axes, patch: Patch | None) -> None:
    from matplotlib.patches import Rectangle

    axes.set_xticks([])
    axes.set_yticks([])
    for box in patch.boxes if patch is not None else ():
        corner = (box.x - 0.5, box.y - 0.5)
        axes.add_patch(Rectangle(corner, box.width, box.height, fill=False, edgecolor=LIGHT["inside"], linewidth=1.0))


def write_results(out: Path, found: list[ResultTable], figure: Figure, bench: SarBench, command: str) -> None:
    """Write `results.md`, `results.json`, a CSV and a LaTeX file per table, and the figure as PNG and SVG."""
    about = {
        "command": command,
        "backbone": bench.backbone.source or bench.backbone.family,
        "sha256": bench.backbone.sha256,
        "protocol": dataclasses.asdict(bench.protocol),
    }
    write_each(out / "tables", found)
    for kind in ("png", "svg"):
        with replacing(out / "figures" / f"sar.{kind}") as draft:
            figure.savefig(draft, format=kind, dpi=150)
    write_tables(out, "results", found, about)


Interval = tuple[float, float]
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Localisation:
    """How well maps point at boxes, one value per patch.

    Attributes
    ----------
    auroc : P(a pixel inside a box has a larger map value than one outside), ties counting half; chance is 0.5.
    hit : pointing game: 1 if the map's maximum lies inside a box; ties are averaged.
    energy : fraction of the map's sum inside boxes.
    area : fraction of the pixels inside boxes, the chance level of `hit` and `energy`.
    """

    auroc: Array
    hit: Array
    energy: Array
    area: Array


def localise(maps: npt.ArrayLike, masks: npt.ArrayLike) -> Localisation:
    """Compare non-negative maps (N, H, W) with box masks (N, H, W)."""
    fields, inside = np.asarray(maps, dtype=np.float64), np.asarray(masks, dtype=bool)
    if fields.shape != inside.shape or fields.ndim != 3:
        raise InputError(f"maps {fields.shape} and masks {inside.shape} must both be (N, H, W)")
    rows = [_localise(field, mask) for field, mask in zip(fields, inside, strict=True)]
    return Localisation(*(np.array(column, dtype=np.float64) for column in zip(*rows, strict=True)))


def _localise(field: Array, mask: Mask) -> tuple[float, float, float, float]:
    if not mask.any() or mask.all():
        raise InputError("a patch without a box, or covered by one, cannot be used to measure localisation")
    if not np.isfinite(field).all() or (field < 0).any():
        raise InputError("a map must be finite and not negative")
    total = field.sum()
    energy = float(field[mask].sum() / total) if total > 0 else float(mask.mean())
    return auroc(field[~mask], field[mask]), float(mask[field == field.max()].mean()), energy, float(mask.mean())


def smoothed(maps: npt.ArrayLike, window: int) -> npt.NDArray[np.float32]:
    """Apply the box filter of local pooling to maps (N, H, W): what the score is pooled from."""
    import torch

    fields = torch.from_numpy(np.ascontiguousarray(maps, dtype=np.float32))
    return np.asarray(box_filter(fields, window).numpy())


def resample(groups: Sequence[str], rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Positions of a bootstrap sample of whole groups: as many groups as there are, drawn with replacement.

    Patches of one image share sea state, sensor and often a ship, so intervals for independent patches would be too
    narrow.
    """
    names, membership = np.unique(np.asarray(groups), return_inverse=True)
    members = [np.flatnonzero(membership == position) for position in range(len(names))]
    return np.concatenate([members[pick] for pick in rng.integers(0, len(names), len(names))])


def bootstrap_intervals(
    measure: Callable[..., npt.ArrayLike], samples: Sequence[Array], groups: Sequence[Sequence[str]], draws: int
) -> list[Interval]:
    """95 % percentile bootstrap intervals of several metrics.

    Parameters
    ----------
    measure : function of the samples that returns the metrics, for instance of ID scores and OOD scores.
    samples : the samples, which are resampled independently of each other.
    groups : for each sample, the source image of every value.
    draws : number of bootstrap samples.
    """
    rng = np.random.default_rng(0)
    pairs = list(zip(samples, groups, strict=True))
    found = [measure(*(values[resample(names, rng)] for values, names in pairs)) for _ in range(draws)]
    low, high = np.quantile(np.array(found, dtype=np.float64), [0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2], axis=0)
    return [(float(a), float(b)) for a, b in zip(low, high, strict=True)]
