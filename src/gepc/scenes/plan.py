"""What a scan is asked to do and what that means for a scene: tiles, rates, and the words that name the run."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gepc.core.errors import NotFittedError, OptionError, check_choice
from gepc.detector.detector import Detector
from gepc.detector.storage import describe
from gepc.features.base import Cost
from gepc.scenes.reading import Scene, open_scene
from gepc.scenes.tiling import Grid, Size
from gepc.verdicts.conformal import UNGROUPED
from gepc.verdicts.multiple_testing import Control

FORMATS = ("auto", "tif", "npy")
OVERLAP = 0.5
_OF_A_PLACE = {"source", "load_options"}  # of a backbone's description: where it lies, not what it answers


@dataclass(frozen=True)
class ScanOptions:
    """How a scene is scanned.

    tile : (height, width) or one side of the tiles in pixels; None is the size that the detector was fitted at.
        Larger tiles are brought to that size by the detector's own preprocessing, as its images were.
    stride, overlap : pixels from one tile to the next, or the share of a tile that the next one shares with it
        (0.5 unless said).
    bands : which bands to use, counted from 1, in the order of the backbone's channels.
    nodata : a value that means no-data, besides what the file declares.
    max_missing : tiles with a larger share of missing pixels are left out.
    control, alpha : how tiles are flagged, and the rate; see `gepc.verdicts.multiple_testing.Control`.
    group : the group whose calibration images the tiles are compared with, for a detector fitted with groups.
    map_format : `tif`, `npy`, or `auto`: TIFF where rasterio is installed.
    """

    tile: int | tuple[int, int] | None = None
    stride: int | tuple[int, int] | None = None
    overlap: float | None = None
    bands: tuple[int, ...] | None = None
    nodata: float | None = None
    max_missing: float = 0.1
    control: str = "bh"
    alpha: float = 0.05
    group: str | None = None
    map_format: str = "auto"

    def __post_init__(self) -> None:
        if self.stride is not None and self.overlap is not None:
            raise OptionError("give stride or overlap, not both: one follows from the other")
        if self.overlap is not None and not 0.0 <= self.overlap < 1.0:
            raise OptionError(f"overlap is a share of a tile, at least 0 and less than 1, got {self.overlap}")
        if not 0.0 <= self.max_missing < 1.0:
            raise OptionError(f"max_missing is a share of a tile, at least 0 and less than 1, got {self.max_missing}")
        check_choice("map_format", self.map_format, FORMATS)
        if self.map_format == "tif" and importlib.util.find_spec("rasterio") is None:
            raise OptionError("map_format='tif' needs rasterio; install it with: pip install 'gepc[scenes]'")


@dataclass(frozen=True)
class Plan:
    """What a scan will do. `asked` is everything that its results depend on; `done` tiles are there already."""

    grid: Grid
    control: Control
    group: str
    calibration_images: int
    cost: Cost
    with_map: bool
    map_format: str
    max_missing: float
    asked: dict[str, Any]
    done: int = 0

    @property
    def tiles(self) -> int:
        """How many tiles the scene has; those with much no-data cost nothing."""
        return len(self.grid)

    @property
    def shortfall(self) -> str | None:
        """A warning where the detector has too few calibration images to flag single tiles of this scene."""
        return self.control.shortfall(self.tiles, self.calibration_images)


@contextlib.contextmanager
def opened(detector: Detector, path: str | os.PathLike[str], settings: ScanOptions) -> Iterator[Scene]:
    """The scene at `path`, for a detector that is fitted."""
    if not detector.is_fitted:
        raise NotFittedError("this detector is not fitted yet; call fit(id_images) first")
    scene = open_scene(Path(path), settings.bands, settings.nodata, detector.backbone.channels)
    try:
        yield scene
    finally:
        scene.close()


def make_plan(detector: Detector, scene: Scene, settings: ScanOptions) -> Plan:
    """The plan for an open scene; what cannot be done is refused here, before anything is written."""
    tile = _tile(detector, settings)
    stride = _pair(settings.stride)
    if stride is None:
        share = 1.0 - (OVERLAP if settings.overlap is None else settings.overlap)
        stride = (max(1, round(tile[0] * share)), max(1, round(tile[1] * share)))
    group = UNGROUPED if settings.group is None else settings.group
    detector.reference_.check(None if settings.group is None else np.array([group]))
    calibration = len(detector.reference_.by_group[group])
    control = Control(settings.control, settings.alpha)
    control.check(calibration)
    with_map = detector.extractor.has_maps and detector.map_scale_ is not None
    map_format = settings.map_format
    if map_format == "auto":
        map_format = "npy" if importlib.util.find_spec("rasterio") is None else "tif"
    file = scene.path.stat()
    asked = {
        "scene": {
            "bytes": file.st_size,
            "modified": file.st_mtime_ns,
            "height": scene.height,
            "width": scene.width,
            "type": scene.dtype,
            "bands": [band + 1 for band in scene.bands],
        },
        "detector": _digest(detector),
        "tile": list(tile),
        "stride": list(stride),
        "nodata": None if settings.nodata is None else repr(settings.nodata),
        "max_missing": settings.max_missing,
        "control": control.name,
        "alpha": control.alpha,
        "group": settings.group,
        "map_format": map_format if with_map else None,
    }
    grid = Grid.over(scene.height, scene.width, tile, stride, str(scene.path))
    return Plan(grid, control, group, calibration, detector.cost(), with_map, map_format, settings.max_missing, asked)


def _tile(detector: Detector, settings: ScanOptions) -> Size:
    size, resize = detector.input_size, detector.preprocessing_.resize
    tile = _pair(settings.tile) or size
    if tile != size and resize in ("exact", "cut"):
        raise OptionError(f"this detector takes tiles of {size[0]}x{size[1]} pixels only; leave tile out")
    if tile[0] * size[1] != tile[1] * size[0] and resize == "crop":
        raise OptionError(f"this detector crops to the shape of {size[0]}x{size[1]}; give a tile of that shape")
    return tile


def _pair(value: int | tuple[int, int] | None) -> Size | None:
    return (value, value) if isinstance(value, int) else value


def _digest(detector: Detector) -> str:
    """Of everything that a score of this detector depends on."""
    description = describe(detector)
    backbone = {name: value for name, value in description["backbone"].items() if name not in _OF_A_PLACE}
    options = {name: value for name, value in description["options"].items() if name != "batch_size"}
    what = [description["method"], options, description["preprocessing"], description["fitted"], backbone]
    digest = hashlib.blake2b(json.dumps(what, sort_keys=True, default=str).encode(), digest_size=16)
    state = {**detector.calibrator_.state(), **detector.reference_.by_group}
    for name in sorted(state):
        digest.update(name.encode() + np.ascontiguousarray(state[name]).tobytes())
    return digest.hexdigest()
