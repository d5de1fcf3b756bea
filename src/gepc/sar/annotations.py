"""Annotated radar images as plain data: where a file lies, and the boxes and outlines of the ships in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gepc.core.errors import InputError
from gepc.images.formats import EXTENSIONS

Mask = npt.NDArray[np.bool_]
Point = tuple[float, float]


@dataclass(frozen=True)
class Box:
    """A rectangle in pixels: left and top edge, width and height."""

    x: float
    y: float
    width: float
    height: float

    @property
    def area(self) -> float:
        """Width times height."""
        return max(0.0, self.width) * max(0.0, self.height)

    def clipped(self, columns: float, rows: float) -> Box:
        """The part inside an image of that size; its area is 0 where nothing is inside."""
        left, top = min(max(self.x, 0.0), columns), min(max(self.y, 0.0), rows)
        right, bottom = min(self.x + self.width, columns), min(self.y + self.height, rows)
        return Box(left, top, max(0.0, right - left), max(0.0, bottom - top))

    def moved(self, x: float, y: float) -> Box:
        """The same box seen from an origin at (x, y)."""
        return replace(self, x=self.x - x, y=self.y - y)


@dataclass(frozen=True)
class Ship:
    """One annotated target: its box, and its outline where the data set has one."""

    box: Box
    polygons: tuple[tuple[Point, ...], ...] = ()


@dataclass(frozen=True)
class Scene:
    """One image file with its ships. `place` is (panorama, left, top) where the file is a known cut of a larger one."""

    path: Path
    width: int
    height: int
    ships: tuple[Ship, ...] = ()
    place: tuple[str, int, int] | None = None


@dataclass(frozen=True)
class SceneSet:
    """The scenes of one split, and what was wrong with its boxes."""

    name: str
    scenes: tuple[Scene, ...]
    clipped_boxes: int = 0
    dropped_boxes: int = 0


def box_mask(boxes: Iterable[Box], rows: int, columns: int) -> Mask:
    """True on every pixel that a box touches."""
    mask = np.zeros((rows, columns), dtype=bool)
    for box in boxes:
        inside = box.clipped(columns, rows)
        if inside.area > 0:
            top, left = int(np.floor(inside.y)), int(np.floor(inside.x))
            bottom, right = int(np.ceil(inside.y + inside.height)), int(np.ceil(inside.x + inside.width))
            mask[top:bottom, left:right] = True
    return mask


def polygon_mask(ships: Iterable[Ship], rows: int, columns: int) -> Mask:
    """True inside the outlines; the box stands in for a ship without one."""
    from PIL import Image, ImageDraw

    canvas = Image.new("1", (columns, rows))
    pen = ImageDraw.Draw(canvas)
    without = []
    for ship in ships:
        for polygon in ship.polygons:
            pen.polygon(list(polygon), fill=1, outline=1)
        if not ship.polygons:
            without.append(ship.box)
    return np.asarray(canvas, dtype=bool) | box_mask(without, rows, columns)


def assemble(name: str, scenes: Sequence[Scene]) -> SceneSet:
    """A split from its scenes: boxes clipped to the image with a count, those wholly outside dropped with a count."""
    if not scenes:
        raise InputError(f"{name}: the split is empty")
    clipped = dropped = 0
    checked = []
    for scene in scenes:
        kept = []
        for ship in scene.ships:
            box = ship.box.clipped(scene.width, scene.height)
            if box.area == 0:
                dropped += 1
                continue
            clipped += box != ship.box
            kept.append(replace(ship, box=box))
        checked.append(replace(scene, ships=tuple(kept)))
    return SceneSet(name, tuple(checked), clipped, dropped)


def image_files(folder: Path) -> dict[str, Path]:
    """The image files right in `folder`, by name."""
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder")
    return {path.name: path for path in sorted(folder.iterdir()) if path.suffix.lower() in EXTENSIONS}


def image_size(path: Path) -> tuple[int, int]:
    """(width, height) from the file's head, without decoding it."""
    from PIL import Image, UnidentifiedImageError

    if path.suffix.lower() == ".npy":
        try:
            shape = np.load(path, mmap_mode="r", allow_pickle=False).shape
        except (OSError, ValueError, EOFError) as error:
            raise InputError(f"{path} is not a plain .npy array") from error
        if len(shape) != 2:
            raise InputError(f"{path} holds an array of shape {shape}; a radar image is (rows, columns)")
        return int(shape[1]), int(shape[0])
    try:
        with Image.open(path) as picture:
            return int(picture.size[0]), int(picture.size[1])
    except (OSError, SyntaxError, UnidentifiedImageError) as error:
        raise InputError(f"{path} is not an image that can be decoded") from error


def check_pairs(name: str, wanted: Iterable[str], present: Iterable[str], images: Path, annotations: Path) -> None:
    """Refuse an annotation without its image."""
    missing = sorted(set(wanted) - set(present))
    if missing:
        raise InputError(
            f"{name}: {annotations.name} names {len(missing)} images that are not in {images}, first {missing[0]}; "
            "add them or take them out of the annotations"
        )
