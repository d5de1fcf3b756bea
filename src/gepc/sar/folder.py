"""Any folder of radar images, with or without boxes: a CSV file with the columns file, x, y, width, height."""

from __future__ import annotations

import csv
from pathlib import Path

from gepc.core.errors import InputError
from gepc.images.sources import FileImages
from gepc.sar.annotations import Box, Scene, SceneSet, Ship, assemble, image_size

COLUMNS = ("file", "x", "y", "width", "height")
LAYOUT = "image files, and at most one boxes.csv with the columns " + ", ".join(COLUMNS)


def read_folder(root: Path, boxes: Path | None = None) -> SceneSet:
    """Every image below `root`. Files are named relative to it; without a CSV file no image shows a ship."""
    paths = {path.relative_to(root).as_posix(): path for path in FileImages.below(root).paths}
    if boxes is None and (root / "boxes.csv").is_file():
        boxes = root / "boxes.csv"
    ships: dict[str, list[Ship]] = {name: [] for name in paths}
    for line, name, box in [] if boxes is None else _rows(boxes):
        if name not in ships:
            raise InputError(f"{boxes}, line {line}: there is no image {name} in {root}")
        ships[name].append(Ship(box))
    return assemble(str(root), [Scene(path, *image_size(path), tuple(ships[name])) for name, path in paths.items()])


def _rows(path: Path) -> list[tuple[int, str, Box]]:
    try:
        with open(path, newline="", encoding="utf-8-sig") as handle:
            reader = csv.DictReader(handle)
            if tuple(reader.fieldnames or ()) != COLUMNS:
                raise InputError(f"{path} must begin with the line {','.join(COLUMNS)}, got {reader.fieldnames}")
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} is not a readable CSV file: {error}") from error
    return [(line, row["file"], _box(row, f"{path}, line {line}")) for line, row in enumerate(rows, start=2)]


def _box(row: dict[str, str], where: str) -> Box:
    try:
        return Box(*(float(row[name]) for name in COLUMNS[1:]))
    except (TypeError, ValueError) as error:
        raise InputError(f"{where}: x, y, width and height must be numbers") from error
