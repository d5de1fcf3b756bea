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
from gepc.scenes.folder import MapFile, ScanFolder
from gepc.scenes.overview import write_overview
from gepc.scenes.plan import ScanPlan
from gepc.scenes.reading import CACHE_BYTES, PIXELS, Georeference, Scene
from gepc.scenes.regions import Detection, TileRegion, find_detections, find_regions, statement

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
            detections = find_detections(fitted, field, plan.grid, flags, count, alpha)
            self._write_layer("detections", Detection.COLUMNS, detections)
        caption = (
            f"{len(detections)} detections (circles); {len(regions)} regions, {int(flags.sum())} of {count} tiles "
        )
        caption += f"flagged ({plan.rule.control}, {alpha:g})"
        write_overview(path / "overview.png", self.scene, field, scale, regions, detections, caption)
        if field is not None:
            self._write_map(field, scale or 1.0)
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
            "guarantee": plan.rule.scene_statement(count, plan.calibration_images),
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
        """Regions or detections as CSV and GeoJSON, with a style for QGIS."""
        self.files |= {name: f"{name}.csv", f"{name}_geojson": f"{name}.geojson", f"{name}_style": f"{name}.qml"}
        path, place = self.folder.path, self.scene.place
        rows = ([_cell(value) for value in item.properties(place).values()] for item in items)
        write_rows(path / f"{name}.csv", columns, rows)
        write_json(path / f"{name}.geojson", geojson(items, place))
        write_text(path / f"{name}.qml", (STYLES / f"{name}.qml").read_text(encoding="utf-8"))

    def _write_map(self, field: MapFile, scale: float) -> None:
        """The map in its final place, with a style for QGIS if it is a TIFF."""
        path, name = self.folder.path, f"map.{self.plan.map_format}"
        self.files["map"] = name
        if self.plan.map_format == "npy":
            os.replace(field.path, path / name)
            return
        self.files["map_style"] = "map.qml"
        with replacing(path / name) as draft:
            write_tiff(draft, field, self.scene.place)
        style = (STYLES / "map.qml").read_text(encoding="utf-8").format(most=scale, half=scale / 2)
        write_text(path / "map.qml", style)

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


def _cell(value: Any) -> Any:
    """A value as a CSV cell."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.10g}" if isinstance(value, float) else value


def write_tiff(path: Path, field: MapFile, place: Georeference) -> None:
    """Write a map as a cloud-optimised GeoTIFF with overviews, BigTIFF if needed, with NaN as the no-data value."""
    import rasterio
    from rasterio.errors import NotGeoreferencedWarning
    from rasterio.shutil import copy
    from rasterio.transform import Affine
    from rasterio.windows import Window

    height, width = field.shape
    plain = path.with_name(f"{path.name}.plain.part")  # a cloud-optimised file can only be written as a copy
    layout = {"driver": "GTiff", "tiled": True, "blockxsize": BLOCK, "blockysize": BLOCK, "BIGTIFF": "IF_SAFER"}
    where = {} if place == PIXELS else {"transform": Affine(*place.transform), "crs": place.crs}
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


def geojson(items: Sequence[TileRegion | Detection], place: Georeference) -> dict[str, Any]:
    """A FeatureCollection in the coordinates of the file, with their CRS, or else in pixels with y downwards."""
    collection: dict[str, Any] = {"type": "FeatureCollection"}
    if place == PIXELS:
        collection["coordinates"] = "pixels: x to the right, y downwards, (0, 0) the upper left corner"
    elif place.crs is not None:
        name = place.crs if place.epsg is None else f"urn:ogc:def:crs:EPSG::{place.epsg}"
        collection["crs"] = {"type": "name", "properties": {"name": name}}
    collection["features"] = [
        {"type": "Feature", "geometry": item.geometry(place), "properties": item.properties(place)} for item in items
    ]
    return collection
