"""SSDD in the VOC layout: `JPEGImages/` and one `Annotations/NAME.xml` per image."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree as ET

from gepc.core.errors import InputError
from gepc.sar.annotations import Box, Scene, SceneSet, Ship, assemble, check_pairs, image_files

LAYOUT = "JPEGImages/ with the images and Annotations/NAME.xml (VOC) for each"
LARGEST_XML = 1 << 20


def read_ssdd(root: Path) -> SceneSet:
    """All images: the subset has no partition of its own, and serves for testing alone."""
    images, folder = root / "JPEGImages", root / "Annotations"
    if not images.is_dir() or not folder.is_dir():
        raise InputError(f"{root} is not SSDD; expected {LAYOUT}")
    files = {path.stem: path for path in image_files(images).values()}
    notes = {path.stem: path for path in sorted(folder.glob("*.xml"))}
    check_pairs(str(root), notes, files, images, folder)
    alone = sorted(set(files) - set(notes))
    if alone:
        raise InputError(f"{root}: {len(alone)} images have no annotation, first {files[alone[0]].name}")
    return assemble(str(root), [_scene(files[stem], notes[stem]) for stem in sorted(notes)])


def _scene(image: Path, notes: Path) -> Scene:
    tree = parse_xml(notes)
    ships = []
    for item in tree.iter("object"):
        left, top, right, bottom = (_number(item, f"bndbox/{edge}", notes) for edge in ("xmin", "ymin", "xmax", "ymax"))
        # VOC counts pixels from 1, and the last one belongs to the box
        ships.append(Ship(Box(left - 1.0, top - 1.0, right - left + 1.0, bottom - top + 1.0)))
    width, height = (int(_number(tree, f"size/{side}", notes)) for side in ("width", "height"))
    return Scene(image, width, height, tuple(ships))


def parse_xml(path: Path) -> ET.Element:
    """A small XML file without a document type: no entity can be declared, so none can grow or reach other files."""
    try:
        if path.stat().st_size > LARGEST_XML:
            raise InputError(f"{path} has over {LARGEST_XML} bytes, too many for one image's annotation")
        text = path.read_text(encoding="utf-8-sig")
        if "<!DOCTYPE" in text.upper() or "<!ENTITY" in text.upper():
            raise InputError(f"{path} declares a document type or entities, which annotations have no use for; refused")
        return ET.fromstring(text)  # noqa: S314 - what makes it unsafe is refused above
    except (OSError, UnicodeDecodeError, ET.ParseError) as error:
        raise InputError(f"{path} is not a readable XML file: {error}") from error


def _number(element: ET.Element, place: str, path: Path) -> float:
    text = element.findtext(place)
    try:
        return float(text if text is not None else "")
    except ValueError as error:
        raise InputError(f"{path}: {place} is {'missing' if text is None else repr(text)}") from error
