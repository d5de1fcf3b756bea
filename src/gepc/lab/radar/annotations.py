"""Annotated radar images: ship boxes, and readers of HRSID, SSDD and plain folders."""

from __future__ import annotations

import csv
import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import numpy.typing as npt

from gepc.core.errors import InputError, OptionError, check_choice, raising
from gepc.core.files import StrPath, read_json
from gepc.images.formats import EXTENSIONS, read_pixels
from gepc.images.sources import FileImages

Mask = npt.NDArray[np.bool_]

SPLITS = ("train", "test")
BOX_COLUMNS = ("file", "x", "y", "width", "height")
LAYOUTS = {
    "hrsid": "JPEGImages/ with the images, annotations/train2017.json and annotations/test2017.json (COCO)",
    "ssdd": "JPEGImages/ with the images and Annotations/NAME.xml (VOC) for each",
    "folder": f"image files, and optionally a boxes.csv with the columns {', '.join(BOX_COLUMNS)}",
}
LARGEST_XML, LARGEST_SIDE = 1 << 20, 1_000_000
# HRSID files are crops of panoramas: P0049_2400_3200_3600_4400 is P0049, rows 2400 to 3200, columns 3600 to 4400
CROP = re.compile(r"(P\d+)_(\d+)_\d+_(\d+)_\d+$")


@dataclass(frozen=True)
class Box:
    """A rectangle in pixels: left and top edge, width and height."""

    x: float
    y: float
    width: float
    height: float

    def clipped(self, columns: float, rows: float) -> Box:
        """The part inside an image of that size; its area is 0 if the box lies outside."""
        left, top = min(max(self.x, 0.0), columns), min(max(self.y, 0.0), rows)
        right, bottom = min(self.x + self.width, columns), min(self.y + self.height, rows)
        return Box(left, top, max(0.0, right - left), max(0.0, bottom - top))

    @property
    def area(self) -> float:
        """Width times height."""
        return max(0.0, self.width) * max(0.0, self.height)


@dataclass(frozen=True)
class AnnotatedScene:
    """One image file, its size according to the annotation, and the boxes of the ships in it."""

    path: Path
    width: int
    height: int
    ships: tuple[Box, ...] = ()
    place: tuple[str, int, int] | None = None  # (panorama, left, top) if the file is a known crop of a larger image

    @property
    def source(self) -> str:
        """Name of the panorama, or of the file if the panorama is unknown."""
        return self.path.name if self.place is None else self.place[0]


@dataclass(frozen=True)
class SceneSet:
    """The scenes of one split."""

    name: str
    scenes: tuple[AnnotatedScene, ...]


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


def detect_layout(root: Path) -> str:
    """Name of the layout of `root` (a key of `LAYOUTS`), from its subfolders."""
    if not root.is_dir():
        expected = f"HRSID ({LAYOUTS['hrsid']}), SSDD ({LAYOUTS['ssdd']}) or {LAYOUTS['folder']}"
        raise InputError(f"{root} is not a folder; give {expected}")
    if (root / "annotations").is_dir() and (root / "JPEGImages").is_dir() and list(root.glob("annotations/*2017.json")):
        return "hrsid"
    if (root / "Annotations").is_dir() and list(root.glob("Annotations/*.xml")):
        return "ssdd"
    if (root / "JPEGImages").is_dir():
        expected = f"HRSID ({LAYOUTS['hrsid']}) or SSDD ({LAYOUTS['ssdd']})"
        raise InputError(f"{root} has JPEGImages but no annotations in a known format; expected {expected}")
    return "folder"


def open_scenes(root: StrPath, split: str = "test") -> SceneSet:
    """Read the annotations of one split, `train` or `test`.

    Only HRSID is divided; all images of other layouts are test images.
    """
    place = Path(root)
    check_choice("split", split, SPLITS)
    layout = detect_layout(place)
    if layout == "hrsid":
        return read_hrsid(place, split)
    if split == "train":
        raise InputError(f"{place} ({layout}) has no training split; only HRSID has one")
    return read_ssdd(place) if layout == "ssdd" else read_folder(place)


def divide(scenes: SceneSet, share: float) -> tuple[SceneSet, SceneSet]:
    """Divide a split into (the rest, held out).

    A hash of each name decides, so that about `share` of the images are held out, and adding images moves
    no other image. Crops of one panorama, which may overlap, stay together.
    """
    if not 0.0 < share < 1.0:
        raise OptionError(f"share must be between 0 and 1, got {share}")

    parts: tuple[list[AnnotatedScene], list[AnnotatedScene]] = ([], [])
    for scene in scenes.scenes:
        parts[name_rank(scene.source, 0) < share].append(scene)
    if not all(parts):
        raise InputError(
            f"{scenes.name}: a share of {share} cannot be held out, as the number of images is {len(scenes.scenes)}"
        )
    rest, held_out = map(tuple, parts)
    return SceneSet(scenes.name, rest), SceneSet(f"{scenes.name}, held out", held_out)


def name_rank(name: str, seed: int) -> float:
    """A number in [0, 1) that depends on the name and the seed only."""
    return int.from_bytes(hashlib.blake2b(f"{seed}|{name}".encode(), digest_size=8).digest(), "big") / 2.0**64


def read_hrsid(root: Path, split: str) -> SceneSet:
    """One split of HRSID. Every image must be listed in the annotations of a split."""
    images, annotations = root / "JPEGImages", root / "annotations" / f"{split}2017.json"
    if not annotations.is_file():
        raise InputError(f"{root} has no {split} split of HRSID; expected {LAYOUTS['hrsid']}")
    files, content = _image_files(images), _coco(annotations)
    listed = {entry["file_name"] for entry in content["images"]}
    others = {entry["file_name"] for path in annotations.parent.glob("*2017.json") for entry in _coco(path)["images"]}
    _check_pairs(f"{root}, {split}", listed, listed | others, files, images)
    ships: dict[Any, list[Box]] = {entry["id"]: [] for entry in content["images"]}
    for entry in content["annotations"]:
        where = f"{annotations}: annotation {entry.get('id')}"
        if entry["image_id"] not in ships:
            raise InputError(f"{where} belongs to image {entry['image_id']}, which is not listed")
        ships[entry["image_id"]].append(_box(entry["bbox"], where))
    scenes = []
    for entry in sorted(content["images"], key=lambda entry: str(entry["file_name"])):
        path, crop = files[entry["file_name"]], CROP.match(Path(entry["file_name"]).stem)
        place = None if crop is None else (crop[1], int(crop[3]), int(crop[2]))
        scenes.append(AnnotatedScene(path, entry["width"], entry["height"], tuple(ships[entry["id"]]), place))
    return _scene_set(f"{root}, {split}", scenes)


def read_ssdd(root: Path) -> SceneSet:
    """All images of SSDD, for testing: the data set has no official partition here."""
    images, annotations = root / "JPEGImages", root / "Annotations"
    if not images.is_dir():
        raise InputError(f"{root} is not SSDD; expected {LAYOUTS['ssdd']}")
    files = {path.stem: path for path in _image_files(images).values()}
    annotated = {path.stem: path for path in sorted(annotations.glob("*.xml"))}
    _check_pairs(str(root), set(annotated), set(annotated), files, images)
    return _scene_set(str(root), [_voc_scene(files[stem], path) for stem, path in sorted(annotated.items())])


def read_folder(root: Path) -> SceneSet:
    """Every image below `root`, with the boxes of its `boxes.csv`, if there is one; it names files relative to it."""
    paths = {path.relative_to(root).as_posix(): path for path in FileImages.below(root).paths}
    boxes = root / "boxes.csv"
    ships: dict[str, list[Box]] = {name: [] for name in paths}
    for line, row in enumerate(_csv_rows(boxes) if boxes.is_file() else [], start=2):
        if row["file"] not in ships:
            raise InputError(f"{boxes}, line {line}: there is no image {row['file']} in {root}")
        ships[row["file"]].append(_box([row[name] for name in BOX_COLUMNS[1:]], f"{boxes}, line {line}"))
    scenes = []
    for name, path in paths.items():
        rows, columns = read_pixels(path).shape[:2]
        scenes.append(AnnotatedScene(path, columns, rows, tuple(ships[name])))
    return _scene_set(str(root), scenes)


def _scene_set(name: str, scenes: Sequence[AnnotatedScene]) -> SceneSet:
    """Clip boxes to their image and drop those outside it."""
    if not scenes:
        raise InputError(f"{name}: the split is empty")
    clipped = []
    for scene in scenes:
        if not 1 <= min(scene.width, scene.height) <= max(scene.width, scene.height) <= LARGEST_SIDE:
            raise InputError(f"{scene.path} cannot have the annotated size of {scene.width}x{scene.height} pixels")
        inside = (box.clipped(scene.width, scene.height) for box in scene.ships)
        clipped.append(replace(scene, ships=tuple(box for box in inside if box.area > 0)))
    return SceneSet(name, tuple(clipped))


def _image_files(folder: Path) -> dict[str, Path]:
    return {path.name: path for path in sorted(folder.iterdir()) if path.suffix.lower() in EXTENSIONS}


def _check_pairs(name: str, annotated: set[str], known: set[str], files: dict[str, Path], images: Path) -> None:
    """Require an image for every annotation of this split, and an annotation in some split for every image."""
    missing = sorted(annotated - set(files))
    if missing:
        raise InputError(f"{name}: annotated images that are not in {images}: {len(missing)}, first {missing[0]}")
    unknown = sorted(set(files) - known)
    if unknown:
        raise InputError(f"{name}: images without an annotation: {len(unknown)}, first {files[unknown[0]].name}")


def _box(values: Any, where: str) -> Box:
    try:
        numbers = [float(value) for value in values]
        if isinstance(values, str) or not all(map(math.isfinite, numbers)):
            raise ValueError
        return Box(*numbers)
    except (TypeError, ValueError) as error:
        raise InputError(f"{where}: a box is four numbers x, y, width, height; got {str(values)[:80]}") from error


COCO = {
    "images": {"id": (int, str), "file_name": str, "width": int, "height": int},
    "annotations": {"image_id": (int, str), "bbox": list},
}


def _coco(path: Path) -> dict[str, list[dict[str, Any]]]:
    content = read_json(path)
    for part, types in COCO.items():
        entries = content.get(part) if isinstance(content, dict) else None
        if not isinstance(entries, list) or not all(_has_types(entry, types) for entry in entries):
            raise InputError(f"{path} is not a COCO file: {part!r} must be a list of entries with {sorted(types)}")
    checked: dict[str, list[dict[str, Any]]] = content
    return checked


def _has_types(entry: Any, types: Mapping[str, Any]) -> bool:
    return isinstance(entry, dict) and all(isinstance(entry.get(name), kind) for name, kind in types.items())


def _voc_scene(image: Path, annotation: Path) -> AnnotatedScene:
    tree = _parse_xml(annotation)

    def number(element: ET.Element, tag: str) -> int:
        text = element.findtext(tag, "missing")
        with raising(InputError, f"{annotation}: {tag} is {text!r}, not a number of pixels", ValueError):
            return int(text)

    ships = []
    for item in tree.iter("object"):
        left, top, right, bottom = (number(item, f"bndbox/{edge}") for edge in ("xmin", "ymin", "xmax", "ymax"))
        # VOC coordinates start at 1 and include the last pixel
        ships.append(Box(left - 1, top - 1, right - left + 1, bottom - top + 1))
    return AnnotatedScene(image, number(tree, "size/width"), number(tree, "size/height"), tuple(ships))


def _parse_xml(path: Path) -> ET.Element:
    """Parse a small XML file that declares no document type, so that entities can neither expand nor read files."""
    reason = f"{path} is not a readable XML file: {{error}}"
    with raising(InputError, reason, OSError, UnicodeDecodeError, ET.ParseError):
        if path.stat().st_size > LARGEST_XML:
            raise InputError(f"{path} is larger than {LARGEST_XML} bytes, too large for one image's annotation")
        text = path.read_text(encoding="utf-8-sig")
        if "<!DOCTYPE" in text.upper() or "<!ENTITY" in text.upper():
            raise InputError(f"{path} declares a document type or entities; remove them, annotations need neither")
        return ET.fromstring(text)  # noqa: S314 - the unsafe constructs are refused above


def _csv_rows(path: Path) -> list[dict[str, str]]:
    reason = f"{path} is not a readable CSV file: {{error}}"
    failing = raising(InputError, reason, OSError, UnicodeDecodeError, csv.Error)
    with failing, open(path, newline="", encoding="utf-8-sig") as handle:
        reader = csv.DictReader(handle)
        if tuple(reader.fieldnames or ()) != BOX_COLUMNS:
            raise InputError(f"{path} must begin with the line {','.join(BOX_COLUMNS)}, got {reader.fieldnames}")
        return list(reader)
