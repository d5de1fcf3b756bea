"""One call for annotated radar images in any known layout, and the division of a split's images into two."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path

from gepc.core.errors import InputError, OptionError, check_choice
from gepc.sar import folder, hrsid, ssdd
from gepc.sar.annotations import Scene, SceneSet

LAYOUTS = ("hrsid", "ssdd", "folder")
SPLITS = ("train", "test")


def detect_layout(root: Path) -> str:
    """Which layout `root` has, by its folders; a folder of images that is none of them is `folder`."""
    if not root.is_dir():
        raise InputError(
            f"{root} is not a folder; give HRSID ({hrsid.LAYOUT}), SSDD ({ssdd.LAYOUT}) or {folder.LAYOUT}"
        )
    if (root / "annotations").is_dir() and (root / "JPEGImages").is_dir() and list(root.glob("annotations/*2017.json")):
        return "hrsid"
    if (root / "Annotations").is_dir() and list(root.glob("Annotations/*.xml")):
        return "ssdd"
    if (root / "JPEGImages").is_dir():
        raise InputError(
            f"{root} has JPEGImages but no annotations that are known; expected HRSID ({hrsid.LAYOUT}) "
            f"or SSDD ({ssdd.LAYOUT})"
        )
    return "folder"


def open_scenes(
    root: str | os.PathLike[str],
    split: str = "test",
    layout: str | None = None,
    boxes: str | os.PathLike[str] | None = None,
) -> SceneSet:
    """The scenes of a split. SSDD and folders are not divided: all their images are test images."""
    place = Path(root)
    check_choice("split", split, SPLITS)
    known = detect_layout(place) if layout is None else layout
    check_choice("layout", known, LAYOUTS)
    if boxes is not None and known != "folder":
        raise OptionError(f"boxes= belongs to a plain folder; {place} is read as {known}, which has its own")
    if known == "hrsid":
        return hrsid.read_hrsid(place, split)
    if split == "train":
        raise InputError(f"{place} ({known}) has no training split; only HRSID has one")
    if known == "ssdd":
        return ssdd.read_ssdd(place)
    return folder.read_folder(place, None if boxes is None else Path(boxes))


def divide(scenes: SceneSet, share: float, seed: int = 0) -> tuple[SceneSet, SceneSet]:
    """(the rest, about that share held out), by a hash of each file's name: adding images moves no other.

    Cuts of one panorama, which may overlap, stay on one side.
    """
    if not 0.0 < share < 1.0:
        raise OptionError(f"the share to hold out must be between 0 and 1, got {share}")

    def rank(name: str) -> float:
        digest = hashlib.blake2b(f"{seed}|{name}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") / 2.0**64

    parts: tuple[list[Scene], list[Scene]] = ([], [])
    for scene in scenes.scenes:
        parts[rank(scene.path.name if scene.place is None else scene.place[0]) < share].append(scene)
    rest, held = (replace(scenes, scenes=tuple(part), clipped_boxes=0, dropped_boxes=0) for part in parts)
    if not rest.scenes or not held.scenes:
        raise InputError(f"{scenes.name}: {len(scenes.scenes)} images cannot be divided with a share of {share}")
    return rest, replace(held, name=f"{scenes.name}, held out")
