"""Scan a scene with a fitted detector: tiles, map, regions, detections, overview and `scene.json`."""

import contextlib
import dataclasses
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gepc.core.files import StrPath, read_json
from gepc.core.options import build
from gepc.core.progress import OnProgress
from gepc.core.run_folder import storage_errors
from gepc.detector.detector import Detector
from gepc.detector.fitted import FittedDetector
from gepc.scenes.folder import ScanFolder
from gepc.scenes.plan import ScanOptions, ScanPlan, make_plan
from gepc.scenes.reading import Scene, open_scene
from gepc.scenes.scoring import SceneScorer
from gepc.scenes.writing import SceneWriter


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
    """What `scan` with the same arguments would do; `out` is to count the tiles that an interrupted scan finished."""
    settings = build(ScanOptions, options, "scan")
    fitted = detector.fitted
    with _opened(fitted, path, settings) as scene:
        plan = make_plan(fitted, scene, settings)
    if out is None:
        return plan
    folder = ScanFolder(out)
    return dataclasses.replace(plan, done=plan.tiles if folder.done else folder.state().rows * len(plan.grid.lefts))


def scan(
    detector: Detector,
    path: StrPath,
    out: StrPath,
    *,
    on_progress: OnProgress | None = None,
    **options: Any,
) -> SceneReport:
    """Score every tile of a scene and write the results to a folder.

    The folder receives `tiles.csv` (score, p-value and flag of every tile), the stitched map (`map.tif` or `map.npy`,
    NaN where there is no data), `regions.csv` and `regions.geojson` (connected flagged tiles), `detections.csv` and
    `detections.geojson` (connected pixels of the map above its limit), `overview.png` and finally `scene.json`. An
    interrupted scan resumes when it is called again with the same arguments.

    A tile is passed to the detector as it is in the file, so its score is that of the same crop given to `score`.
    Memory does not grow with the height of the scene. It grows with the width by 16 bytes for each line of a tile
    (twice that while progress is written), and with the number of tiles by about 20 bytes each.

    Parameters
    ----------
    detector : a fitted detector.
    path : the scene.
    out : folder for the results; one that holds a scan with other parameters is an `InputError`.
    on_progress : called with numbers of tiles.
    options : those of `ScanOptions`.
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
