"""HRSID in its own layout: `JPEGImages/` and COCO files `annotations/train2017.json`, `annotations/test2017.json`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from gepc.core.errors import InputError
from gepc.core.files import read_json
from gepc.sar.annotations import Box, Scene, SceneSet, Ship, assemble, check_pairs, image_files

LAYOUT = "JPEGImages/ with the images, annotations/train2017.json and annotations/test2017.json (COCO)"
# a file is a cut of a panorama: P0049_2400_3200_3600_4400 is P0049, rows 2400 to 3200, columns 3600 to 4400
CUT = re.compile(r"(P\d+)_(\d+)_\d+_(\d+)_\d+$")


def read_hrsid(root: Path, split: str) -> SceneSet:
    """One split. An image that neither split's file names is an error, since nobody knows whether it shows a ship."""
    images, annotations = root / "JPEGImages", root / "annotations" / f"{split}2017.json"
    if not images.is_dir() or not annotations.is_file():
        raise InputError(f"{root} is not HRSID, {split} split; expected {LAYOUT}")
    files = image_files(images)
    content = _coco(annotations)
    names = [entry["file_name"] for entry in content["images"]]
    check_pairs(f"{root}, {split}", names, files, images, annotations)
    _check_all_named(root, files, names)
    ships: dict[Any, list[Ship]] = {entry["id"]: [] for entry in content["images"]}
    for entry in content["annotations"]:
        if entry["image_id"] not in ships:
            raise InputError(
                f"{annotations}: annotation {entry.get('id')} is for image {entry['image_id']}, not listed"
            )
        ships[entry["image_id"]].append(_ship(entry, annotations))
    scenes = [
        Scene(
            files[entry["file_name"]],
            int(entry["width"]),
            int(entry["height"]),
            tuple(ships[entry["id"]]),
            _place(entry["file_name"]),
        )
        for entry in sorted(content["images"], key=lambda entry: str(entry["file_name"]))
    ]
    return assemble(f"{root}, {split}", scenes)


def _coco(path: Path) -> dict[str, list[dict[str, Any]]]:
    content = read_json(path)
    needed = {"images": ("id", "file_name", "width", "height"), "annotations": ("image_id", "bbox")}
    for part, keys in needed.items():
        entries = content.get(part) if isinstance(content, dict) else None
        if not isinstance(entries, list):
            raise InputError(f"{path} is not a COCO file: it has no list {part!r}")
        for position, entry in enumerate(entries):
            absent = [key for key in keys if not isinstance(entry, dict) or key not in entry]
            if absent:
                raise InputError(f"{path}: entry {position} of {part!r} has no {', '.join(absent)}")
    return content  # type: ignore[no-any-return]


def _check_all_named(root: Path, files: dict[str, Path], names: list[str]) -> None:
    known = set(names)
    for other in sorted((root / "annotations").glob("*2017.json")):
        known |= {entry["file_name"] for entry in _coco(other)["images"]}
    unnamed = sorted(set(files) - known)
    if unnamed:
        raise InputError(
            f"{root}: {len(unnamed)} images are in no annotation file, first {unnamed[0]}; "
            "list them (with no ship if they show none) or take them out of JPEGImages"
        )


def _ship(entry: dict[str, Any], path: Path) -> Ship:
    try:
        box = Box(*(float(value) for value in entry["bbox"]))
        flat = entry.get("segmentation") or []
        polygons = [tuple(zip(ring[::2], ring[1::2], strict=True)) for ring in flat if len(ring) >= 6]
    except (TypeError, ValueError, KeyError) as error:
        raise InputError(f"{path}: annotation {entry.get('id')} has a box or outline that cannot be read") from error
    return Ship(box, tuple(polygons))


def _place(name: str) -> tuple[str, int, int] | None:
    found = CUT.match(Path(name).stem)
    return None if found is None else (found[1], int(found[3]), int(found[2]))
