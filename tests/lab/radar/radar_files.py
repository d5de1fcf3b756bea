"""Small radar data sets in each layout, written to a folder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from PIL import Image

Box = tuple[float, float, float, float]


def speckle(seed: int, rows: int = 64, columns: int = 64) -> np.ndarray:
    """Dark 8-bit sea without a black line."""
    return np.random.default_rng(seed).integers(5, 60, (rows, columns), dtype=np.uint8)


def with_ships(seed: int, boxes: list[Box], rows: int = 64, columns: int = 64) -> np.ndarray:
    pixels = speckle(seed, rows, columns)
    for x, y, width, height in boxes:
        pixels[int(y) : int(y + height), int(x) : int(x + width)] = 250
    return pixels


def write_hrsid(root: Path, splits: dict[str, dict[str, list[Box]]], size: int = 64) -> Path:
    """`splits[split][file name]` are boxes."""
    (root / "JPEGImages").mkdir(parents=True)
    (root / "annotations").mkdir()
    seed = 0
    for split, files in splits.items():
        images, annotations = [], []
        for index, (name, boxes) in enumerate(files.items()):
            seed += 1
            Image.fromarray(with_ships(seed, boxes, size, size)).save(root / "JPEGImages" / name, quality=95)
            images.append({"id": index, "file_name": name, "width": size, "height": size})
            annotations += [{"id": 100 * index + k, "image_id": index, "bbox": list(b)} for k, b in enumerate(boxes)]
        content = {"images": images, "annotations": annotations, "categories": [{"id": 1, "name": "ship"}]}
        (root / "annotations" / f"{split}2017.json").write_text(json.dumps(content))
    return root


def voc(width: int, height: int, boxes: list[tuple[int, int, int, int]]) -> str:
    """VOC corners count from 1, both included."""
    objects = "".join(
        f"<object><name>ship</name><bndbox><xmin>{a}</xmin><ymin>{b}</ymin><xmax>{c}</xmax><ymax>{d}</ymax></bndbox></object>"
        for a, b, c, d in boxes
    )
    return f"<annotation><size><width>{width}</width><height>{height}</height></size>{objects}</annotation>"


def write_ssdd(root: Path, files: dict[str, list[tuple[int, int, int, int]]], size: int = 64) -> Path:
    (root / "JPEGImages").mkdir(parents=True)
    (root / "Annotations").mkdir()
    for seed, (stem, boxes) in enumerate(files.items()):
        pixels = with_ships(50 + seed, [(a - 1, b - 1, c - a + 1, d - b + 1) for a, b, c, d in boxes], size, size)
        Image.fromarray(pixels).save(root / "JPEGImages" / f"{stem}.jpg", quality=95)
        (root / "Annotations" / f"{stem}.xml").write_text(voc(size, size, boxes))
    return root


def write_folder(root: Path, count: int, boxes: list[Box], size: int = 64, first_seed: int = 100) -> Path:
    """`count` images with the same ships, and `boxes.csv`."""
    root.mkdir(parents=True)
    lines = ["file,x,y,width,height"]
    for index in range(count):
        Image.fromarray(with_ships(first_seed + index, boxes, size, size)).save(root / f"{index:04d}.png")
        lines += [",".join([f"{index:04d}.png", *map(str, box)]) for box in boxes]
    (root / "boxes.csv").write_text("\n".join([*lines, ""]))
    return root
