"""Everything that needs all tiles: flags, regions, map, overview, `scene.json`."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from gepc.core.errors import InputError
from gepc.core.files import replacing, write_json
from gepc.detector.detector import Detector
from gepc.detector.storage import describe
from gepc.scenes.folder import RECORD, RunFolder, StoredMap
from gepc.scenes.overview import write_overview
from gepc.scenes.plan import Plan
from gepc.scenes.reading import Georeference, Scene
from gepc.scenes.regions import COLUMNS, Region, find_regions, geojson


class SceneWriter:
    """The last files of a run, written from its tile records; repeated from the start where it was interrupted."""

    def __init__(self, detector: Detector, scene: Scene, plan: Plan, folder: RunFolder) -> None:
        self.detector, self.scene, self.plan, self.folder = detector, scene, plan, folder
        shape = (len(plan.grid.tops), len(plan.grid.lefts))
        self.scores, self.p_values = np.full(shape, np.nan), np.full(shape, np.nan)
        self.flags = np.zeros(shape, dtype=bool)
        self.left_out = 0
        self.failed = 0

    def write(self) -> dict[str, Any]:
        """Write all files, `scene.json` last, and return that."""
        self._gather()
        scored = ~np.isnan(self.p_values)
        self.flags[scored] = self.plan.control.flags(self.p_values[scored])
        field, scale = (self.folder.map(), self.detector.map_scale_) if self.plan.with_map else (None, None)
        regions = find_regions(self.plan.grid, self.flags, self.scores, self.p_values, field, scale or 1.0)
        place = self.scene.place
        self.folder.write_rows("tiles.csv", _header(), self._rows())
        self.folder.write_rows("regions.csv", COLUMNS, (region.row(place) for region in regions))
        write_json(self.folder.path / "regions.geojson", geojson(regions, place))
        caption = f"{len(regions)} regions, {self.flags.sum()} of {scored.sum()} tiles flagged"
        caption += f" ({self.plan.control.name}, {self.plan.control.alpha:g})"
        write_overview(self.folder.path / "overview.png", self.scene, field, scale, regions, caption)
        summary = self._summary(regions, int(scored.sum()))
        if field is not None:
            self._write_map(field)
        self.folder.finish(summary)
        return self.folder.summary()

    def _gather(self) -> None:
        first: str | None = None
        for row, column, _, _, missing, score, p_value, error in self.folder.records():
            if score:
                self.scores[int(row), int(column)] = float(score)
                self.p_values[int(row), int(column)] = float(p_value)
            elif error.startswith("left out") and missing:
                self.left_out += 1
            else:
                self.failed += 1
                first = first or error
        if self.left_out + self.failed < len(self.plan.grid):
            return
        self.folder.discard()
        if first is None:
            share = self.plan.max_missing
            raise InputError(
                f"{self.scene.path} has no tile to score: each of its {len(self.plan.grid)} tiles has more than "
                f"{share:.0%} no-data (max_missing)"
            )
        raise InputError(f"no tile of {self.scene.path} can be scored; the first: {first}")

    def _rows(self) -> Iterator[tuple[Any, ...]]:
        for row, column, top, left, missing, score, p_value, error in self.folder.records():
            flag = str(bool(self.flags[int(row), int(column)])).lower() if score else ""
            yield (row, column, top, left, missing, score, p_value, flag, error)

    def _write_map(self, field: StoredMap) -> None:
        if self.plan.map_format == "npy":
            self.folder.keep_map()
        else:
            with replacing(self.folder.path / "map.tif") as draft:
                write_tiff(draft, field, self.scene.place)

    def _summary(self, regions: list[Region], scored: int) -> dict[str, Any]:
        plan, progress = self.plan, self.folder.progress()
        place, n = self.scene.place, self.plan.calibration_images
        files = {"tiles": "tiles.csv", "regions": "regions.csv", "geojson": "regions.geojson"}
        files["overview"] = "overview.png"
        if plan.with_map:
            files["map"] = f"map.{plan.map_format}"
        return {
            "schema": 1,
            "scene": {"path": str(self.scene.path), **plan.asked["scene"]},
            "georeference": None if place is None else dataclasses.asdict(place),
            "detector": {"method": self.detector.extractor.name, "digest": plan.asked["detector"]},
            "options": {name: value for name, value in plan.asked.items() if name not in ("scene", "detector")},
            "counts": {
                "tiles": len(plan.grid),
                "scored": scored,
                "left_out": self.left_out,
                "failed": self.failed,
                "flagged": int(self.flags.sum()),
                "regions": len(regions),
            },
            "grid": {"rows": len(plan.grid.tops), "columns": len(plan.grid.lefts)},
            "network_passes": {"forward": progress.forward, "jvp": progress.jvp},
            "calibration_images": n,
            "smallest_p_value": 1.0 / (n + 1),
            "guarantee": plan.control.statement(scored, n),
            "warning": plan.control.shortfall(scored, n),
            "map_scale": self.detector.map_scale_ if plan.with_map else None,
            "files": files,
            "versions": _versions(self.detector),
        }


def _header() -> tuple[str, ...]:
    return (*RECORD[:-1], "alarm", RECORD[-1])


def write_tiff(path: Path, field: StoredMap, place: Georeference | None, side: int = 256) -> None:
    """A float32 map as a tiled TIFF, BigTIFF where it must be, NaN declared as no-data, in the scene's coordinates."""
    import rasterio
    from rasterio.errors import NotGeoreferencedWarning
    from rasterio.transform import Affine
    from rasterio.windows import Window

    height, width = field.shape
    layout = {"driver": "GTiff", "tiled": True, "blockxsize": side, "blockysize": side, "BIGTIFF": "IF_SAFER"}
    where = {} if place is None else {"transform": Affine(*place.transform), "crs": place.crs}
    across = 64 * side
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotGeoreferencedWarning)
        with rasterio.open(
            path, "w", width=width, height=height, count=1, dtype="float32", nodata=np.nan, **layout, **where
        ) as file:
            for top in range(0, height, side):
                for left in range(0, width, across):
                    part = field[top : top + side, left : left + across]
                    file.write(part, 1, window=Window(left, top, part.shape[1], part.shape[0]))


def _versions(detector: Detector) -> dict[str, str]:
    found: dict[str, str] = dict(describe(detector)["versions"])
    for package in ("pillow", "scipy", "rasterio"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
