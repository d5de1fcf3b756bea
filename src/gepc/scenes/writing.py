"""The results of a scan, from its tile records: flags, regions, detections, map, overview and `scene.json`."""

import dataclasses
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gepc.core.errors import InputError
from gepc.core.files import replacing, write_json, write_text
from gepc.core.tables import write_rows
from gepc.detector.fitted import FittedDetector
from gepc.detector.storage import versions
from gepc.scenes.detections import COLUMNS as DETECTION_COLUMNS
from gepc.scenes.detections import Detection, find_detections, statement
from gepc.scenes.folder import MapFile, ScanFolder
from gepc.scenes.overview import write_overview
from gepc.scenes.plan import ScanPlan
from gepc.scenes.reading import CACHE_BYTES, Georeference, Scene
from gepc.scenes.regions import COLUMNS, TileRegion, find_regions

TILE_COLUMNS = ("row", "column", "top", "left", "missing", "score", "p_value", "alarm", "error")
BLOCK = 256  # pixels of a block of the TIFF
STYLES = Path(__file__).parent  # of QGIS, which applies a style that has the name of the layer


class SceneWriter:
    """Writes the results of a scan whose tiles are all scored; if interrupted, it starts over."""

    def __init__(self, fitted: FittedDetector, scene: Scene, plan: ScanPlan, folder: ScanFolder) -> None:
        self.fitted, self.scene, self.plan, self.folder = fitted, scene, plan, folder
        shape = (len(plan.grid.tops), len(plan.grid.lefts))
        self.scores, self.p_values = np.full(shape, np.nan), np.full(shape, np.nan)
        self.flags = np.zeros(shape, dtype=bool)
        self.left_out = self.failed = 0

    def write(self) -> dict[str, Any]:
        """Write all files, `scene.json` last, and return its content."""
        self._gather()
        plan, fitted, path, place = self.plan, self.fitted, self.folder.path, self.scene.place
        scored = ~np.isnan(self.p_values)
        self.flags[scored] = plan.rule.alarms(self.p_values[scored], fitted.reference, plan.labels(int(scored.sum())))
        field, scale = (self.folder.map, fitted.map_limit()) if plan.with_map else (None, None)
        regions = find_regions(plan.grid, self.flags, self.scores, self.p_values, field, scale or 1.0)
        detections = []
        if field is not None:
            detections = find_detections(fitted, field, plan.grid, self.flags, int(scored.sum()), plan.rule.alpha)
        counts = {
            "tiles": len(plan.grid),
            "scored": int(scored.sum()),
            "left_out": self.left_out,
            "failed": self.failed,
            "flagged": int(self.flags.sum()),
            "regions": len(regions),
            "detections": len(detections),
        }
        write_rows(path / "tiles.csv", TILE_COLUMNS, self._rows())
        self._write_layer("regions", COLUMNS, regions)
        if field is not None:
            self._write_layer("detections", DETECTION_COLUMNS, detections)
        caption = f"{len(detections)} detections (circles); {len(regions)} regions, {counts['flagged']} of "
        caption += f"{counts['scored']} tiles flagged ({plan.rule.control}, {plan.rule.alpha:g})"
        write_overview(path / "overview.png", self.scene, field, scale, regions, detections, caption)
        if field is not None and plan.map_format == "tif":
            with replacing(path / "map.tif") as draft:
                write_tiff(draft, field, place)
            limit = scale or 1.0
            style = (STYLES / "map.qml").read_text(encoding="utf-8").format(most=limit, half=limit / 2)
            write_text(path / "map.qml", style)
        elif field is not None:
            os.replace(field.path, path / "map.npy")
        self.folder.finish(self._summary(counts))
        return self.folder.summary()

    def _write_layer(self, name: str, columns: Sequence[str], items: Sequence[TileRegion | Detection]) -> None:
        """Regions or detections as CSV and GeoJSON, with a style for QGIS."""
        path, place = self.folder.path, self.scene.place
        write_rows(path / f"{name}.csv", columns, (item.row(place) for item in items))
        write_json(path / f"{name}.geojson", geojson(items, place))
        write_text(path / f"{name}.qml", (STYLES / f"{name}.qml").read_text(encoding="utf-8"))

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
        if first is None:
            raise InputError(
                f"{self.scene.path} has no tile to score: each of its {len(self.plan.grid)} tiles has more than "
                f"{self.plan.max_missing:.0%} no-data (max_missing)"
            )
        raise InputError(f"no tile of {self.scene.path} can be scored; the first error: {first}")

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for record in self.folder.log.rows():
            flagged = self.flags[int(record["row"]), int(record["column"])]
            record["alarm"] = str(bool(flagged)).lower() if record["score"] else ""
            yield tuple(record[name] for name in TILE_COLUMNS)

    def _summary(self, counts: dict[str, int]) -> dict[str, Any]:
        plan, state, place = self.plan, self.folder.state(), self.scene.place
        n, alpha = plan.calibration_images, plan.rule.alpha
        layers = ("regions", "detections") if plan.with_map else ("regions",)
        files = {"tiles": "tiles.csv", "overview": "overview.png", "geojson": "regions.geojson"}
        files |= {name: f"{name}.csv" for name in layers} | {f"{name}_style": f"{name}.qml" for name in layers}
        if plan.with_map:
            files |= {"detections_geojson": "detections.geojson", "map": f"map.{plan.map_format}"}
            files |= {"map_style": "map.qml"} if plan.map_format == "tif" else {}
        scale = limit = promise = None
        if plan.with_map:
            scale, limit = self.fitted.map_limit(), self.fitted.map_limit(alpha)
            promise = statement(self.fitted, counts["scored"], alpha)
        return {
            "schema": 1,
            "scene": {"path": str(self.scene.path), **plan.identity["scene"]},
            "georeference": None if place is None else dataclasses.asdict(place),
            "detector": {"method": self.fitted.method.name, "digest": plan.identity["detector"]},
            "options": {name: value for name, value in plan.identity.items() if name not in ("scene", "detector")},
            "counts": counts,
            "grid": {"rows": len(plan.grid.tops), "columns": len(plan.grid.lefts)},
            "network_passes": {"forward": state.forward, "jvp": state.jvp},
            "calibration_images": n,
            "smallest_p_value": 1.0 / (n + 1),
            "guarantee": plan.rule.scene_statement(counts["scored"], n),
            "warning": plan.rule.shortfall(counts["scored"], n),
            "map_scale": scale,
            "detection_limit": limit,
            "detection_guarantee": promise,
            "files": files,
            "versions": versions("pillow", "scipy", "rasterio"),
        }


def write_tiff(path: Path, field: MapFile, place: Georeference | None) -> None:
    """Write a map as a cloud-optimised GeoTIFF with overviews, BigTIFF if needed, with NaN as the no-data value."""
    import rasterio
    from rasterio.errors import NotGeoreferencedWarning
    from rasterio.shutil import copy
    from rasterio.transform import Affine
    from rasterio.windows import Window

    height, width = field.shape
    plain = path.with_name(f"{path.name}.plain.part")  # a cloud-optimised file can only be written as a copy
    layout = {"driver": "GTiff", "tiled": True, "blockxsize": BLOCK, "blockysize": BLOCK, "BIGTIFF": "IF_SAFER"}
    where = {} if place is None else {"transform": Affine(*place.transform), "crs": place.crs}
    with warnings.catch_warnings(), rasterio.Env(GDAL_CACHEMAX=CACHE_BYTES):
        warnings.simplefilter("ignore", NotGeoreferencedWarning)
        try:
            with rasterio.open(
                plain, "w", width=width, height=height, count=1, dtype="float32", nodata=np.nan, **layout, **where
            ) as file:
                for top in range(0, height, BLOCK):
                    for left in range(0, width, 64 * BLOCK):
                        part = field[top : top + BLOCK, left : left + 64 * BLOCK]
                        file.write(part, 1, window=Window(left, top, part.shape[1], part.shape[0]))
            copy(plain, path, driver="COG", BLOCKSIZE=BLOCK, COMPRESS="DEFLATE", BIGTIFF="IF_SAFER")
        finally:
            plain.unlink(missing_ok=True)


def geojson(items: Sequence[TileRegion | Detection], place: Georeference | None) -> dict[str, Any]:
    """A FeatureCollection in the coordinates of the file, with their CRS, or else in pixels with y downwards."""
    collection: dict[str, Any] = {"type": "FeatureCollection"}
    if place is None:
        collection["coordinates"] = "pixels: x to the right, y downwards, (0, 0) the upper left corner"
    elif place.crs is not None:
        name = place.crs if place.epsg is None else f"urn:ogc:def:crs:EPSG::{place.epsg}"
        collection["crs"] = {"type": "name", "properties": {"name": name}}
    collection["features"] = [item.feature(place) for item in items]
    return collection
