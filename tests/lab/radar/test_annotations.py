"""HRSID, SSDD and plain folders: what is read, and which errors name what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from radar_files import speckle, voc, write_hrsid, write_ssdd

from gepc.core.errors import InputError, OptionError
from gepc.lab.radar.annotations import Box, box_mask, divide, open_scenes

NAMES = {"train": {"P0001_0_64_0_64.jpg": [(10, 20, 8, 4)], "P0002_0_64_0_64.jpg": []}, "test": {"P0003_5.jpg": []}}


def test_hrsid_boxes_and_places(tmp_path: Path) -> None:
    scenes = open_scenes(write_hrsid(tmp_path / "HRSID", NAMES), "train").scenes
    assert [scene.path.name for scene in scenes] == ["P0001_0_64_0_64.jpg", "P0002_0_64_0_64.jpg"]
    assert scenes[0].ships == (Box(10, 20, 8, 4),)
    assert scenes[0].place == ("P0001", 0, 0)
    assert open_scenes(tmp_path / "HRSID", "test").scenes[0].place is None


def test_hrsid_rows_come_before_columns_in_file_names(tmp_path: Path) -> None:
    root = write_hrsid(tmp_path, {"test": {"P0007_600_664_1200_1264.jpg": []}})
    assert open_scenes(root).scenes[0].place == ("P0007", 1200, 600)


def test_voc_corners_count_from_one_and_belong_to_the_box(tmp_path: Path) -> None:
    root = write_ssdd(tmp_path / "SSDD", {"000001": [(1, 1, 64, 2)], "000002": []})
    scenes = open_scenes(root).scenes
    assert scenes[0].ships == (Box(0, 0, 64, 2),)
    assert scenes[1].ships == ()


def test_a_folder_with_and_without_boxes(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    Image.fromarray(speckle(0)).save(tmp_path / "sub" / "a.png")
    np.save(tmp_path / "b.npy", speckle(1).astype(np.complex64))
    assert [scene.ships for scene in open_scenes(tmp_path).scenes] == [(), ()]
    boxes = tmp_path / "boxes.csv"
    boxes.write_text("file,x,y,width,height\nsub/a.png,1,2,3,4.5\n")
    by_name = {scene.path.name: scene.ships for scene in open_scenes(tmp_path).scenes}
    assert by_name == {"b.npy": (), "a.png": (Box(1, 2, 3, 4.5),)}


def test_boxes_outside_are_clipped_or_dropped(tmp_path: Path) -> None:
    boxes = [(-4.0, 60.0, 10.0, 10.0), (100.0, 0.0, 5.0, 5.0), (1.0, 1.0, 2.0, 2.0)]
    found = open_scenes(write_hrsid(tmp_path, {"test": {"a.jpg": boxes}}))
    assert found.scenes[0].ships == (Box(0, 60, 6, 4), Box(1, 1, 2, 2))


def _break(root: Path, how: str) -> None:
    coco = root / "HRSID" / "annotations" / "test2017.json"
    content = json.loads(coco.read_text())
    if how == "image gone":
        (root / "HRSID" / "JPEGImages" / "P0003_5.jpg").unlink()
    elif how == "image unnamed":
        Image.fromarray(speckle(9)).save(root / "HRSID" / "JPEGImages" / "new.jpg")
    elif how == "empty":
        coco.write_text(json.dumps({**content, "images": []}))
        (root / "HRSID" / "JPEGImages" / "P0003_5.jpg").unlink()
    elif how == "stray annotation":
        coco.write_text(json.dumps({**content, "annotations": [{"id": 7, "image_id": 99, "bbox": [0, 0, 1, 1]}]}))
    elif how == "bad box":
        coco.write_text(json.dumps({**content, "annotations": [{"id": 7, "image_id": 0, "bbox": [0, 0, "wide"]}]}))
    elif how == "not coco":
        coco.write_text("[]")
    elif how == "no file":
        coco.unlink()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("image gone", "annotated images that are not in .*: 1, first"),
        ("image unnamed", "images without an annotation: 1, first new.jpg"),
        ("empty", "the split is empty"),
        ("stray annotation", "annotation 7 belongs to image 99"),
        ("bad box", "annotation 7: a box is four numbers"),
        ("not coco", "is not a COCO file: 'images' must be a list"),
        ("no file", "expected JPEGImages/"),
    ],
)
def test_what_is_wrong_with_hrsid_is_said(tmp_path: Path, how: str, message: str) -> None:
    write_hrsid(tmp_path / "HRSID", NAMES)
    _break(tmp_path, how)
    with pytest.raises(InputError, match=message):
        open_scenes(tmp_path / "HRSID", "test")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('<!DOCTYPE a [<!ENTITY x "y">]><annotation>&x;</annotation>', "document type or entities"),
        ('<!doctype a SYSTEM "file:///etc/passwd"><annotation/>', "document type or entities"),
        ("<annotation><size>", "not a readable XML file"),
        ("<annotation/>", "size/width is 'missing'"),
        (voc(64, 64, [(1, 2, 3, 4)]).replace("<xmax>3", "<xmax>three"), "bndbox/xmax is 'three'"),
    ],
)
def test_what_is_wrong_with_an_xml_file_is_said(tmp_path: Path, text: str, message: str) -> None:
    root = write_ssdd(tmp_path, {"000001": []})
    (root / "Annotations" / "000001.xml").write_text(text)
    with pytest.raises(InputError, match=message):
        open_scenes(root)


def test_ssdd_needs_both_of_a_pair(tmp_path: Path) -> None:
    root = write_ssdd(tmp_path, {"000001": [], "000002": []})
    (root / "Annotations" / "000002.xml").unlink()
    with pytest.raises(InputError, match=r"images without an annotation: 1, first 000002\.jpg"):
        open_scenes(root)
    (root / "JPEGImages" / "000002.jpg").rename(root / "JPEGImages" / "000003.jpg")
    (root / "Annotations" / "000002.xml").write_text(voc(64, 64, []))
    with pytest.raises(InputError, match=r"annotated images that are not in .*: 1, first"):
        open_scenes(root)


@pytest.mark.parametrize(
    ("csv", "message"),
    [
        ("a,b\n", "must begin with the line file,x,y,width,height"),
        ("file,x,y,width,height\nc.png,1,2,3,4\n", "line 2: there is no image c.png"),
        ("file,x,y,width,height\na.png,1,2,3,\n", "line 2: a box is four numbers"),
    ],
)
def test_what_is_wrong_with_boxes_is_said(tmp_path: Path, csv: str, message: str) -> None:
    Image.fromarray(speckle(0)).save(tmp_path / "a.png")
    (tmp_path / "boxes.csv").write_text(csv)
    with pytest.raises(InputError, match=message):
        open_scenes(tmp_path)


def test_layouts_and_splits_that_do_not_fit(tmp_path: Path) -> None:
    root = write_ssdd(tmp_path, {"000001": []})
    with pytest.raises(InputError, match="has no training split"):
        open_scenes(root, "train")
    with pytest.raises(OptionError, match="did you mean 'test'"):
        open_scenes(root, "tets")
    with pytest.raises(InputError, match="is not a folder; give HRSID"):
        open_scenes(tmp_path / "nowhere")
    (root / "Annotations" / "000001.xml").unlink()
    with pytest.raises(InputError, match="no annotations in a known format"):
        open_scenes(root)


def test_dividing_keeps_panoramas_together_and_moves_none_when_images_come(tmp_path: Path) -> None:
    names = [f"P{k:04d}_{row}_{row + 64}_0_64.jpg" for k in range(12) for row in (0, 40)]
    few = open_scenes(write_hrsid(tmp_path / "few", {"train": {n: [] for n in names[:16]}}), "train")
    many = open_scenes(write_hrsid(tmp_path / "many", {"train": {n: [] for n in names}}), "train")
    held = [{scene.path.name for scene in divide(scenes, 0.5)[1].scenes} for scenes in (few, many)]
    assert held[0] == held[1] & set(names[:16])
    rest = {scene.path.name for scene in divide(many, 0.5)[0].scenes}
    assert rest | held[1] == set(names)
    assert not {name[:5] for name in rest} & {name[:5] for name in held[1]}


def test_a_box_that_touches_a_pixel_covers_it() -> None:
    assert box_mask([Box(1.5, 0, 1, 2), Box(-3, -3, 1, 1)], 3, 4).sum() == 4
