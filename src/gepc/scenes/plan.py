"""What a scan will do: its options, the tiles, the rule that flags them, and everything that the results depend on."""

import importlib.util
from dataclasses import dataclass
from typing import Any

import numpy as np

from gepc.conformal.decision import DecisionRule
from gepc.conformal.p_values import UNGROUPED, Labels
from gepc.core.errors import OptionError
from gepc.core.options import check_fields, one_of
from gepc.detector.fitted import FittedDetector
from gepc.detector.storage import detector_digest
from gepc.images.preprocessing import OWN_SIZE
from gepc.methods.base import Cost
from gepc.scenes.reading import Scene
from gepc.scenes.tiling import Grid, Size

OVERLAP = 0.5


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
    map_format : {"auto", "tif", "npy"}
        `auto` is TIFF if rasterio is installed.

    Examples
    --------
    >>> from gepc.scenes import ScanOptions
    >>> ScanOptions(tile=64, overlap=0.25).control
    'bh'
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
    map_format: str = one_of("auto", "tif", "npy")

    def __post_init__(self) -> None:
        if self.stride is not None and self.overlap is not None:
            raise OptionError("give stride or overlap, not both: one follows from the other")
        for name, value in (("overlap", self.overlap), ("max_missing", self.max_missing)):
            if value is not None and not 0.0 <= value < 1.0:
                raise OptionError(f"{name} is a share of a tile, at least 0 and less than 1, got {value}")
        check_fields(self)
        if self.map_format == "tif" and importlib.util.find_spec("rasterio") is None:
            raise OptionError("map_format='tif' needs rasterio; install it with: pip install 'gepc[scenes]'")


@dataclass(frozen=True)
class ScanPlan:
    """What a scan will do: which tiles it flags by which procedure, what a tile costs, and what is written."""

    grid: Grid
    rule: DecisionRule
    group: str | None  # of the calibration images that tiles are compared with
    calibration_images: int
    cost: Cost
    with_map: bool
    map_format: str
    max_missing: float
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
        return None if self.group is None else np.full(count, self.group)


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
    map_format = settings.map_format
    if map_format == "auto":
        map_format = "npy" if importlib.util.find_spec("rasterio") is None else "tif"
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
        "map_format": map_format if with_map else None,
    }
    grid = Grid.over(scene.height, scene.width, tile, stride, str(scene.path))
    cost = fitted.cost()
    return ScanPlan(grid, rule, group, calibration, cost, with_map, map_format, settings.max_missing, identity)


def _tile(fitted: FittedDetector, settings: ScanOptions) -> Size:
    size, resize = fitted.input_size, fitted.preprocessing.resize
    if fitted.preprocessing.ignore is not None:
        raise OptionError(
            "this detector ignores regions of whole images, and the tiles of a scene have no such regions"
        )
    reduced = OWN_SIZE.get(resize, 1)
    tile = _pair(settings.tile) or (size[0] * reduced, size[1] * reduced)
    if tile != size and resize in ("exact", "cut"):
        raise OptionError(f"this detector takes tiles of {size[0]}x{size[1]} pixels only; leave tile out")
    if tile[0] * size[1] != tile[1] * size[0] and resize == "crop":
        raise OptionError(f"this detector crops to the shape of {size[0]}x{size[1]}; give a tile of that shape")
    return tile


def _pair(value: int | tuple[int, int] | None) -> Size | None:
    return (value, value) if isinstance(value, int) else value
