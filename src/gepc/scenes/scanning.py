"""Scan a scene with a fitted detector: options and plan, tiles, map, regions, detections, overview, `scene.json`.

The tiles go through the detector a block of rows at a time, and every finished block is saved.
"""

import contextlib
import dataclasses
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gepc.conformal.decision import DecisionRule
from gepc.conformal.p_values import UNGROUPED, Labels
from gepc.core.errors import InputError, OptionError
from gepc.core.files import StrPath, read_json, write_json
from gepc.core.options import build, check_fields, checked
from gepc.core.progress import OnProgress
from gepc.core.run_folder import storage_errors
from gepc.core.tables import escape_cell, write_rows
from gepc.detector.detector import Detector
from gepc.detector.fitted import FittedDetector
from gepc.detector.storage import detector_digest, versions
from gepc.detector.stream import Result, stream
from gepc.images.formats import Pixels
from gepc.images.preprocessing import OWN_SIZE
from gepc.maps.drawing import resized
from gepc.methods.base import Cost
from gepc.methods.pooling import Map
from gepc.scenes.folder import ScanFolder, ScanState
from gepc.scenes.reading import PIXELS, Scene, Valid, open_scene
from gepc.scenes.regions import Detection, TileRegion, find_detections, find_regions, statement
from gepc.scenes.tiling import Grid, Size, Stitcher, Tile, TileImages
from gepc.scenes.writing import geojson, write_overview

OVERLAP = 0.5
TILE_COLUMNS = ("row", "column", "top", "left", "missing", "score", "p_value", "alarm", "error")


def _share_of_a_tile(default: float | None) -> Any:
    return checked(default, lambda share: 0.0 <= share < 1.0, "a share of a tile, at least 0 and less than 1")


@dataclass(frozen=True)
class ScanOptions:
    """Options of a scan.

    Parameters
    ----------
    tile : int or (height, width), optional
        The tiles in pixels; by default the detector's input size, to which it resizes others.
    stride : int or (vertical, horizontal), optional
        Pixels from tile to tile.
    overlap : float, optional
        Instead of `stride`, the share of a tile that overlaps the next one; 0.5 by default.
    bands : tuple of int, optional
        The bands to use, counted from 1, in the order of the backbone's channels.
    nodata : float, optional
        Pixel value of missing data, in addition to what the file declares.
    max_missing : float
        Tiles with a larger share of missing pixels are left out.
    control : str
        Which error rate the flags control; see `gepc.DecisionRule`.
    alpha : float
        Level of that error rate.
    group : str, optional
        The group of calibration images to compare with, for a detector fitted with groups.

    Examples
    --------
    >>> from gepc.scenes import ScanOptions
    >>> ScanOptions(tile=64, overlap=0.25).control
    'bh'
    """

    tile: int | tuple[int, int] | None = None
    stride: int | tuple[int, int] | None = None
    overlap: float | None = _share_of_a_tile(None)
    bands: tuple[int, ...] | None = None
    nodata: float | None = None
    max_missing: float = _share_of_a_tile(0.1)
    control: str = "bh"
    alpha: float = 0.05
    group: str | None = None

    def __post_init__(self) -> None:
        if self.stride is not None and self.overlap is not None:
            raise OptionError("give either stride or overlap, not both; one follows from the other")
        check_fields(self)


@dataclass(frozen=True)
class ScanPlan:
    """What a scan will do: which tiles it flags by which procedure, what a tile costs, and what is written."""

    grid: Grid
    rule: DecisionRule
    options: ScanOptions
    calibration_images: int
    cost: Cost
    with_map: bool
    identity: dict[str, Any]  # everything that the results depend on
    done: int = 0  # tiles that are finished already

    @property
    def tiles(self) -> int:
        """Number of tiles; those that are left out for missing data cost nothing."""
        return len(self.grid)

    @property
    def shortfall(self) -> str | None:
        """A warning if the calibration images are too few to flag single tiles of this scene."""
        return self.rule.shortfall(self.tiles, self.calibration_images)

    def labels(self, count: int) -> Labels | None:
        """The group of each of `count` tiles; None for a detector without groups."""
        return None if self.options.group is None else np.full(count, self.options.group)


def make_plan(fitted: FittedDetector, scene: Scene, settings: ScanOptions) -> ScanPlan:
    """The plan for an open scene; options that do not fit are refused here, before anything is written."""
    tile = _tile(fitted, settings)
    stride = _pair(settings.stride)
    if stride is None:
        share = 1.0 - (OVERLAP if settings.overlap is None else settings.overlap)
        stride = (max(1, round(tile[0] * share)), max(1, round(tile[1] * share)))
    rule, group = DecisionRule(settings.alpha, control=settings.control), settings.group
    rule.check(fitted.reference, None if group is None else np.array([group]))
    calibration = len(fitted.reference.by_group[UNGROUPED if group is None else group])
    with_map = fitted.has_maps
    file, bands = scene.path.stat(), [band + 1 for band in scene.bands]
    same = {"bytes": file.st_size, "modified": file.st_mtime_ns, "changed": file.st_ctime_ns}
    identity = {
        "scene": {**same, "height": scene.height, "width": scene.width, "type": scene.dtype, "bands": bands},
        "detector": detector_digest(fitted),
        "tile": list(tile),
        "stride": list(stride),
        "nodata": None if settings.nodata is None else repr(settings.nodata),
        "max_missing": settings.max_missing,
        "control": rule.control,
        "alpha": rule.alpha,
        "group": group,
    }
    grid = Grid.over(scene.height, scene.width, tile, stride, str(scene.path))
    return ScanPlan(grid, rule, settings, calibration, fitted.cost(), with_map, identity)


def _tile(fitted: FittedDetector, settings: ScanOptions) -> Size:
    size, resize = fitted.input_size, fitted.preprocessing.resize
    if fitted.preprocessing.ignore is not None:
        raise OptionError("this detector ignores regions of whole images; fit one for scenes without `ignore`")
    reduced = OWN_SIZE.get(resize, 1)
    tile = _pair(settings.tile) or (size[0] * reduced, size[1] * reduced)
    if tile != size and resize in ("exact", "cut"):
        raise OptionError(f"this detector takes tiles of {size[0]}x{size[1]} pixels only; leave tile out")
    if tile[0] * size[1] != tile[1] * size[0] and resize == "crop":
        raise OptionError(f"this detector crops to the shape of {size[0]}x{size[1]}; give a tile of that shape")
    return tile


def _pair(value: int | tuple[int, int] | None) -> Size | None:
    return (value, value) if isinstance(value, int) else value


@dataclass(frozen=True)
class SceneReport:
    """The folder of a scan, the content of its `scene.json`, and how many tiles an interrupted scan had finished."""

    out: Path
    summary: dict[str, Any]
    resumed: int = 0

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of tiles, regions and detections."""
        return dict(self.summary["counts"])

    @property
    def guarantee(self) -> str:
        """The guarantee for the flags, with its assumptions."""
        return str(self.summary["guarantee"])

    @property
    def regions(self) -> list[dict[str, Any]]:
        """The regions, the highest score first."""
        return self._properties("regions.geojson")

    @property
    def detections(self) -> list[dict[str, Any]]:
        """The detections, the highest score first; empty for a method without maps."""
        return self._properties("detections.geojson") if "detections" in self.summary["files"] else []

    def _properties(self, name: str) -> list[dict[str, Any]]:
        return [feature["properties"] for feature in read_json(self.out / name)["features"]]


def plan_scan(detector: Detector, path: StrPath, out: StrPath | None = None, **options: Any) -> ScanPlan:
    """Compute what `scan` with the same arguments would do, without scoring a tile.

    Parameters
    ----------
    detector : a fitted detector.
    path : the scene.
    out : the folder of the results, to count the tiles that an interrupted scan finished.
    **options : those of `ScanOptions`.

    Returns
    -------
    ScanPlan

    Examples
    --------
    >>> import os, tempfile
    >>> from gepc.scenes import plan_scan
    >>> import gepc, numpy as np
    >>> from gepc.lab.analytic import GaussianBackbone
    >>> images = np.random.default_rng(0).normal(0.0, 0.2, (60, 1, 8, 8))
    >>> detector = gepc.create_detector(GaussianBackbone.fitted(images)).fit(images)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "scene.npy")
    ...     np.save(path, np.zeros((16, 16)))
    ...     plan_scan(detector, path, overlap=0.0, alpha=0.1).tiles
    4
    """
    settings = build(ScanOptions, options, "scan")
    fitted = detector.fitted
    with _opened(fitted, path, settings) as scene:
        plan = make_plan(fitted, scene, settings)
    if out is None:
        return plan
    folder = ScanFolder(out)
    return dataclasses.replace(plan, done=plan.tiles if folder.done else folder.state().rows * len(plan.grid.lefts))


def scan(
    detector: Detector, path: StrPath, out: StrPath, *, on_progress: OnProgress | None = None, **options: Any
) -> SceneReport:
    """Score every tile of a scene and write the results to a folder.

    The folder receives `tiles.csv` (score, p-value and flag of every tile), the stitched map (`map.npy`, NaN where
    there is no data), `regions.csv` and `regions.geojson` (connected flagged tiles), `detections.csv` and
    `detections.geojson` (connected pixels of the map above its limit), `overview.png` and finally `scene.json`. An
    interrupted scan resumes when it is called again with the same arguments.

    A tile is passed to the detector as it is in the file, so its score is that of the same crop given to `score`.
    Memory does not grow with the height of the scene. It grows with the width by 16 bytes for each line of a tile
    (twice that while progress is written), and with the number of tiles by about 20 bytes each.

    Parameters
    ----------
    detector : a fitted detector.
    path : the scene.
    out : folder for the results. A folder that contains a scan with other parameters raises `InputError`.
    on_progress : called with numbers of tiles.
    **options : those of `ScanOptions`.

    Returns
    -------
    SceneReport

    Examples
    --------
    >>> import os, tempfile
    >>> from gepc.scenes import scan
    >>> import gepc, numpy as np
    >>> from gepc.lab.analytic import GaussianBackbone
    >>> images = np.random.default_rng(0).normal(0.0, 0.2, (60, 1, 8, 8))
    >>> detector = gepc.create_detector(GaussianBackbone.fitted(images)).fit(images)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "scene.npy")
    ...     np.save(path, images.reshape(60, 8, 8)[:4].reshape(32, 8))
    ...     report = scan(detector, path, os.path.join(folder, "out"), control="tile", alpha=0.1)
    >>> report.counts["scored"]
    7
    """
    settings = build(ScanOptions, options, "scan")
    fitted = detector.fitted
    with _opened(fitted, path, settings) as scene:
        plan = make_plan(fitted, scene, settings)
        folder = ScanFolder(out)
        with folder.run.held(), storage_errors(folder.path):
            folder.run.begin(plan.identity)
            if folder.done:
                folder.complete()
                return SceneReport(folder.path, folder.summary(), plan.tiles)
            if plan.shortfall is not None:
                warnings.warn(plan.shortfall, UserWarning, stacklevel=2)
            resumed = SceneScorer(fitted, scene, plan, folder).run(on_progress)
            summary = SceneWriter(fitted, scene, plan, folder).write()
            return SceneReport(folder.path, summary, resumed)


def _opened(fitted: FittedDetector, path: StrPath, settings: ScanOptions) -> contextlib.closing[Scene]:
    return contextlib.closing(open_scene(path, settings.bands, settings.nodata, fitted.backbone.channels))


class SceneScorer:
    """Scores the tiles of a scene and saves every finished block of rows."""

    def __init__(self, fitted: FittedDetector, scene: Scene, plan: ScanPlan, folder: ScanFolder) -> None:
        self.fitted, self.scene, self.plan, self.folder = fitted, scene, plan, folder
        self.grid, self.stitcher = plan.grid, Stitcher(plan.grid)

    def run(self, on_progress: OnProgress | None) -> int:
        """Score the tiles that are not finished and return the number of those that were."""
        state = self.folder.resume()
        if self.plan.with_map:
            if state.rows == 0:
                self.folder.map.create(self.grid.height, self.grid.width)
            if state.sums:
                self.stitcher.restore(dict(state.sums))
        count, columns = len(self.grid.tops), len(self.grid.lefts)
        resumed = state.rows * columns
        advance = on_progress or (lambda _: None)
        advance(resumed)
        together = math.ceil(self.fitted.batch_size / columns)  # rows that fill a batch
        for first in range(state.rows, count, together):
            state = self._block(range(first, min(first + together, count)), state, advance)
        return resumed

    def _block(self, rows: range, state: ScanState, advance: Callable[[int], None]) -> ScanState:
        backbone = self.fitted.backbone
        before = backbone.forward_count, backbone.jvp_count
        images = TileImages(self.grid.tiles(rows), self._cut, self.plan.options.max_missing)
        records, last = [], len(self.grid.lefts) - 1
        for result, field in self._results(images):
            tile = images.items[result.index]
            records.append(_record(tile, result, images))
            valid = images.valid.pop(result.index, None)
            if field is not None and valid is not None:
                self.stitcher.add(tile.left, field, valid)
            if self.plan.with_map and tile.column == last:
                lines = self.stitcher.advance(self.grid.lines_done_after(tile.row))
                self.folder.map.write(tile.top, lines)
            advance(1)
        cost = (backbone.forward_count - before[0], backbone.jvp_count - before[1])
        sums = self.stitcher.state() if self.plan.with_map else None
        return self.folder.commit(state, rows[-1] + 1, records, cost, sums)

    def _cut(self, tile: Tile) -> tuple[Pixels, Valid]:
        return self.scene.read(tile.top, tile.left, *self.grid.tile)

    def _results(self, images: TileImages) -> Iterator[tuple[Result, Map | None]]:
        labels, first = self.plan.labels(len(images)), images.items[0].row == 0
        for scored in stream(self.fitted, images, maps=self.plan.with_map, labels=labels, check_range=first):
            for result in scored.results:
                field = None if result.error is not None else scored.map_of(result.index, self.fitted.map_part)
                yield result, None if field is None else resized(field, self.grid.tile)


def _record(tile: Tile, result: Result, images: TileImages) -> tuple[Any, ...]:
    """The row of the log, with all digits; a tile without a score has an error."""
    missing = images.missing(result.index)
    shown = "" if np.isnan(missing) else f"{missing:.6g}"
    numbers = ("", "") if result.error is not None else (repr(result.score), repr(result.p_value))
    left_out = "true" if result.index in images.left_out else ""
    return (tile.row, tile.column, tile.top, tile.left, shown, *numbers, left_out, escape_cell(result.error or ""))


class SceneWriter:
    """Writes the results of a scan whose tiles are all scored; if interrupted, it starts over."""

    def __init__(self, fitted: FittedDetector, scene: Scene, plan: ScanPlan, folder: ScanFolder) -> None:
        self.fitted, self.scene, self.plan, self.folder = fitted, scene, plan, folder
        shape = (len(plan.grid.tops), len(plan.grid.lefts))
        self.scores, self.p_values = np.full(shape, np.nan), np.full(shape, np.nan)
        self.flags = np.zeros(shape, dtype=bool)
        self.left_out = self.failed = 0
        self.files = {"tiles": "tiles.csv", "overview": "overview.png"}

    def write(self) -> dict[str, Any]:
        """Write all files, `scene.json` last, and return its content."""
        self._gather()
        plan, fitted, path = self.plan, self.fitted, self.folder.path
        scored = ~np.isnan(self.p_values)
        count, flags, alpha = int(scored.sum()), self.flags, plan.rule.alpha
        flags[scored] = plan.rule.alarms(self.p_values[scored], fitted.reference, plan.labels(count))
        regions = find_regions(plan.grid, flags, self.scores, self.p_values)
        write_rows(path / "tiles.csv", TILE_COLUMNS, self._rows())
        self._write_layer("regions", TileRegion.COLUMNS, regions)
        detections: list[Detection] = []
        field = scale = limit = promise = None
        if plan.with_map:
            field, scale, limit = self.folder.map, fitted.map_limit(), fitted.map_limit(alpha)
            promise = statement(fitted, count, alpha)
            self.files["map"] = "map.npy"
            detections = find_detections(fitted, field, plan.grid, flags, count, alpha)
            self._write_layer("detections", Detection.COLUMNS, detections)
        found = f"detections (circles): {len(detections)}; regions: {len(regions)}"
        caption = f"{found}; flagged tiles: {int(flags.sum())} of {count} ({plan.rule.control}, {alpha:g})"
        write_overview(path / "overview.png", self.scene, field, scale, regions, detections, caption)
        if field is not None:
            os.replace(field.path, path / "map.npy")
        state, georeference = self.folder.state(), dataclasses.asdict(self.scene.place)
        summary = {
            "schema": 1,
            "scene": {"path": str(self.scene.path), **plan.identity["scene"]},
            "georeference": None if self.scene.place == PIXELS else georeference,
            "detector": {"method": fitted.method.name, "digest": plan.identity["detector"]},
            "options": {name: value for name, value in plan.identity.items() if name not in ("scene", "detector")},
            "counts": {
                "tiles": len(plan.grid),
                "scored": count,
                "left_out": self.left_out,
                "failed": self.failed,
                "flagged": int(flags.sum()),
                "regions": len(regions),
                "detections": len(detections),
            },
            "grid": {"rows": len(plan.grid.tops), "columns": len(plan.grid.lefts)},
            "network_passes": {"forward": state.forward, "jvp": state.jvp},
            "calibration_images": plan.calibration_images,
            "smallest_p_value": 1.0 / (plan.calibration_images + 1),
            "guarantee": plan.rule.scene_statement(count, plan.calibration_images, fitted.reference.trimmed),
            "warning": plan.rule.shortfall(count, plan.calibration_images),
            "map_scale": scale,
            "detection_limit": limit,
            "detection_guarantee": promise,
            "files": self.files,
            "versions": versions("pillow", "scipy", "rasterio"),
        }
        self.folder.finish(summary)
        return self.folder.summary()

    def _write_layer(self, name: str, columns: Sequence[str], items: Sequence[TileRegion | Detection]) -> None:
        """Regions or detections as CSV and GeoJSON."""
        self.files |= {name: f"{name}.csv", f"{name}_geojson": f"{name}.geojson"}
        path, place = self.folder.path, self.scene.place
        rows = ([_cell(value) for value in item.properties(place).values()] for item in items)
        write_rows(path / f"{name}.csv", columns, rows)
        write_json(path / f"{name}.geojson", geojson(items, place))

    def _gather(self) -> None:
        first: str | None = None
        for record in self.folder.log.rows():
            place = int(record["row"]), int(record["column"])
            if record["score"]:
                self.scores[place], self.p_values[place] = float(record["score"]), float(record["p_value"])
            elif record["left_out"]:
                self.left_out += 1
            else:
                self.failed += 1
                first = first or record["error"]
        if self.left_out + self.failed < len(self.plan.grid):
            return
        self.folder.run.clear()
        no_data = f"each has more than {self.plan.options.max_missing:.0%} no-data (max_missing)"
        reason = no_data if first is None else f"the first error: {first}"
        raise InputError(f"no tile of {self.scene.path} can be scored; {reason}")

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for record in self.folder.log.rows():
            flagged = self.flags[int(record["row"]), int(record["column"])]
            record["alarm"] = str(bool(flagged)).lower() if record["score"] else ""
            yield tuple(record[name] for name in TILE_COLUMNS)


def _cell(value: Any) -> Any:
    """A value as a CSV cell."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.10g}" if isinstance(value, float) else value
