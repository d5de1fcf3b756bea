"""`scan`: from a detector and a scene to tiles, map, regions, overview and `scene.json`, resumed where interrupted."""

from __future__ import annotations

import dataclasses
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gepc.core.files import read_json
from gepc.core.options import build
from gepc.detector.detector import Detector
from gepc.features.extraction import OnProgress
from gepc.scenes.ending import SceneWriter
from gepc.scenes.folder import RunFolder
from gepc.scenes.plan import Plan, ScanOptions, make_plan, opened
from gepc.scenes.scoring import Scoring


@dataclass(frozen=True)
class SceneReport:
    """What came out: the folder, `scene.json` as a mapping, and how many tiles an earlier, interrupted run had done."""

    out: Path
    summary: dict[str, Any]
    resumed: int = 0

    @property
    def counts(self) -> dict[str, int]:
        """Tiles, by what became of them, and regions."""
        return dict(self.summary["counts"])

    @property
    def guarantee(self) -> str:
        """What is promised of the flags, and what that rests on."""
        return str(self.summary["guarantee"])

    @property
    def regions(self) -> list[dict[str, Any]]:
        """The regions, the highest score first."""
        return [feature["properties"] for feature in read_json(self.out / "regions.geojson")["features"]]


def plan_scan(
    detector: Detector, path: str | os.PathLike[str], out: str | os.PathLike[str] | None = None, **options: Any
) -> Plan:
    """What `scan` with the same arguments would do: tiles, network passes, whether single tiles can be flagged."""
    settings = build(ScanOptions, options, "scan")
    with opened(detector, path, settings) as scene:
        plan = make_plan(detector, scene, settings)
    if out is None:
        return plan
    folder = RunFolder(out)
    return dataclasses.replace(plan, done=plan.tiles if folder.done else folder.rows_done() * len(plan.grid.lefts))


def scan(
    detector: Detector,
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    on_progress: OnProgress | None = None,
    **options: Any,
) -> SceneReport:
    """Score every tile of the scene at `path` and write the results to the folder `out`.

    `options` are those of `ScanOptions`. The folder gets `tiles.csv` (score, p-value and flag of every tile), the
    stitched map (`map.tif` or `map.npy`, NaN where there is no data), `regions.csv` and `regions.geojson`,
    `overview.png` and, last of all, `scene.json`. An interrupted scan goes on when it is called again with the same
    arguments; a folder with other parameters is an `InputError`. `on_progress` is called with numbers of tiles.

    A tile is handed to the detector as it is in the file, so its score is that of the same crop given to `score`.
    Memory does not grow with the scene's height, and with its width by 16 bytes for every line of a tile, twice that
    while progress is written; besides, some 20 bytes are kept for every tile.
    """
    settings = build(ScanOptions, options, "scan")
    with opened(detector, path, settings) as scene:
        plan = make_plan(detector, scene, settings)
        scene.check()
        folder = RunFolder(out)
        with folder.claimed(plan.asked):
            if folder.done:
                folder.tidy()
                return SceneReport(folder.path, folder.summary(), plan.tiles)
            if plan.shortfall is not None:
                warnings.warn(plan.shortfall, UserWarning, stacklevel=2)
            resumed = Scoring(detector, scene, plan, folder).run(on_progress)
            summary = SceneWriter(detector, scene, plan, folder).write()
            return SceneReport(folder.path, summary, resumed)
