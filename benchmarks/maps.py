"""How the default of calibrated maps was chosen: on in-distribution images and synthetic defects made from them.

    python benchmarks/maps.py [--data DATA] [--backbone celeba32-tiny]

Patches of the demo's gravel, and with --data also faces (celeba32.npz) and good magnetic tiles, get a pasted patch, a
scratch or a blur. For every choice of parts the table shows the mean pixel AUROC, the pointing game, the AUROC of
images with and without a defect by the largest value of the map, and the excess at the border over that inside on
images without a defect. No real defect is used. About two minutes on one core.

    python benchmarks/maps.py --data DATA --whole [--backbone photos-small]

shows how the preset `inspect` was chosen: whole tiles at their own and at half their resolution, scored by the mean of
the highest share of the map. About seven minutes on one core.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from scipy.ndimage import gaussian_filter

import gepc
from gepc.core.tables import ResultTable
from gepc.images.noise import image_key
from gepc.images.preprocessing import Preprocessing
from gepc.lab.metrics import auroc, localisation
from gepc.lab.report.demo import FIT_ROWS, INSIDE, TEST_ROWS, patches
from gepc.maps import statistics as map_statistics
from gepc.maps.drawing import resized
from gepc.maps.statistics import TOGETHER, MapStatistics
from gepc.methods.base import Batch, MapParts, extract_map_parts

FIT, CALIBRATE, TEST = 64, 30, 60
DEFECT = 0.2  # of the shorter side
SKIPPED, WHOLE, SHARES = 100, 40, (0.0, 0.003, 0.01, 0.03)
ALL = ("residual", "inner", "error", "activations")
CHOICES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "residual": (("residual",), ()),
    "inner": (("inner",), ()),
    "error": (("error",), ()),
    "|error|": (("error",), ("error",)),
    "activations": (("activations",), ()),
    "all": (("residual", "inner", "error", "activations"), ()),
    "all, both directions": (
        ("residual", "inner", "error", "activations"),
        ("residual", "inner", "error", "activations"),
    ),
    "error, activations": (("error", "activations"), ()),
    "|error|, activations": (("error", "activations"), ("error",)),
    "|error|, inner, activations": (("error", "inner", "activations"), ("error",)),
}


def paste(image: np.ndarray, other: np.ndarray, rng: np.random.Generator, side: float) -> tuple[np.ndarray, np.ndarray]:
    """A rectangle of another image, turned by 180 degrees."""
    height, width = (max(3, int(side * rng.uniform(0.6, 1.4))) for _ in range(2))
    top, up = rng.integers(0, image.shape[0] - height + 1, 2)
    left, along = rng.integers(0, image.shape[1] - width + 1, 2)
    out, mask = image.copy(), np.zeros(image.shape[:2], dtype=bool)
    mask[top : top + height, left : left + width] = True
    out[top : top + height, left : left + width] = other[::-1, ::-1][up : up + height, along : along + width]
    return out, mask


def scratch(image: np.ndarray, rng: np.random.Generator, side: float) -> tuple[np.ndarray, np.ndarray]:
    """A straight line, brighter or darker."""
    lines, columns, angle = *_place(image, rng), rng.uniform(0, np.pi)
    across = np.abs(lines * np.cos(angle) - columns * np.sin(angle))
    along = np.abs(lines * np.sin(angle) + columns * np.cos(angle))
    mask = (across <= max(0.6, side / 12)) & (along <= side * rng.uniform(0.75, 1.5))
    out = image.astype(np.float64)
    out[mask] += rng.choice([-1, 1]) * rng.uniform(0.6, 1.2) * max(image.std(), 20.0)
    return out.clip(0, 255).astype(np.uint8), mask


def blur(image: np.ndarray, rng: np.random.Generator, side: float) -> tuple[np.ndarray, np.ndarray]:
    """A disc out of focus."""
    lines, columns = _place(image, rng)
    mask = lines**2 + columns**2 <= (0.7 * side) ** 2
    smooth = gaussian_filter(image.astype(np.float64), (side / 6, side / 6, 0))
    return np.where(mask[..., None], smooth, image).round().astype(np.uint8), mask


def _place(image: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Coordinates around a random point that is not too near to the border."""
    lines, columns = np.mgrid[: image.shape[0], : image.shape[1]]
    return lines - rng.uniform(0.15, 0.85) * image.shape[0], columns - rng.uniform(0.15, 0.85) * image.shape[1]


def with_defects(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Every image with a defect, the kinds in turn, and the masks."""
    rng, found = np.random.default_rng(0), []
    for index, image in enumerate(images):
        side = DEFECT * min(image.shape[:2])
        if index % 3 == 0:
            found.append(paste(image, images[(index + 1) % len(images)], rng, side))
        else:
            found.append((scratch if index % 3 == 1 else blur)(image, rng, side))
    return np.stack([image for image, _ in found]), np.stack([mask for _, mask in found])


def image_sets(data: Path | None) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Name, images to fit and calibrate on, and images to test with, (N, H, W, 3) bytes each."""
    count = FIT + CALIBRATE
    yield (
        "gravel",
        *(found.repeat(3, 3) for found in (patches(INSIDE, FIT_ROWS)[:count], patches(INSIDE, TEST_ROWS)[:TEST])),
    )
    if data is not None:
        faces = np.load(data / "celeba32.npz")["test_x"]
        yield "faces", faces[:count], faces[-TEST:]
        paths = sorted((data / "magnetic-tiles" / "MT_Free" / "Imgs").glob("*.jpg"))
        tiles = np.stack([_crop(path) for path in paths[: count + TEST]])
        yield "tiles", tiles[:count], tiles[count:]


def _crop(path: Path, side: int = 96) -> np.ndarray:
    pixels = np.asarray(Image.open(path).convert("L"))
    top, left = (pixels.shape[0] - side) // 2, (pixels.shape[1] - side) // 2
    return pixels[top : top + side, left : left + side, None].repeat(3, 2)


def parts_of(backbone: gepc.Backbone, images: np.ndarray) -> tuple[list[Any], dict[bytes, MapParts]]:
    """The images as the network sees them, and the parts of their maps by content, from one evaluation."""
    method = gepc.create_detector(backbone).extractor
    seen = [Preprocessing()(image) for image in images]
    found: dict[bytes, MapParts] = {}
    for image in seen:
        batch = Batch(image[None], [image_key(image)])
        _, found[batch.keys[0]], _ = extract_map_parts(method, backbone, batch, method.timesteps(backbone))
    return seen, found


def measure(fit: Sequence[Any], test: Sequence[Any], bad: Sequence[Any], masks: np.ndarray, read: Any) -> list[float]:
    """Pixel AUROC, pointing game, image AUROC, and the excess at the border over that inside."""
    statistics = MapStatistics.fit(read, fit[:FIT], fit[FIT:], np.ones(1))
    size = masks.shape[1:]
    usual, unusual = (statistics.z(read(images), size)[TOGETHER] for images in (test, bad))
    found = localisation(unusual, masks)
    border = np.ones(size, dtype=bool)
    border[2:-2, 2:-2] = False
    excess = np.maximum(usual, 0.0)
    image = auroc(usual.max((1, 2)), unusual.max((1, 2)))
    return [found.auroc.mean(), found.hit.mean(), image, excess[:, border].mean() / excess[:, ~border].mean()]


def whole_tiles(data: Path, backbone: gepc.Backbone) -> ResultTable:
    """Good tiles with and without synthetic defects of many sizes, at two resolutions."""
    folder = data / "magnetic-tiles" / "MT_Free" / "Imgs"
    rng = np.random.default_rng(0)
    paths = rng.permutation(np.array(sorted(folder.glob("*.jpg"))))[SKIPPED : SKIPPED + FIT + CALIBRATE + WHOLE]
    images = [np.asarray(Image.open(path).convert("L"))[..., None] for path in paths]
    test = images[FIT + CALIBRATE :]
    bad = [_with_defect(place, image, rng) for place, image in enumerate(test)]
    rows = []
    for resize in ("native", "half"):
        detector = gepc.create_detector(backbone, "gepc+", "inspect", resize=resize).fit(
            images[:FIT], images[FIT:-WHOLE]
        )
        usual = [detector.score_map([image])[0] for image in test]
        unusual = [detector.score_map([image])[0] for image, _ in bad]
        windows = [detector.fitted.preprocessing.window(image.shape[:2]) for image in test]
        masks = [
            mask[top : top + height, left : left + width]
            for (_, mask), (top, left, height, width) in zip(bad, windows, strict=True)
        ]
        pairs = [(resized(field, mask.shape), mask) for field, mask in zip(unusual, masks, strict=True) if mask.any()]
        pixel = float(np.mean([auroc(field[~mask], field[mask]) for field, mask in pairs]))
        for share in SHARES:
            inside, outside = ([_highest(field, share) for field in fields] for fields in (usual, unusual))
            rows.append((resize, f"{share:.1%}" if share else "largest", auroc(inside, outside), pixel))
    header = ("resolution", "score: highest", "image AUROC", "pixel AUROC")
    return ResultTable("whole", "Whole tiles with synthetic defects", header, tuple(rows))


def _with_defect(place: int, image: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A patch of the image itself, a scratch or a blur, of 4 to 25 % of the shorter side."""
    side = rng.uniform(0.04, 0.25) * min(image.shape[:2])
    if place % 3 == 0:
        return paste(image, image, rng, side)
    return (scratch if place % 3 == 1 else blur)(image, rng, side)


def _highest(field: np.ndarray, share: float) -> float:
    count = max(1, int(share * field.size))
    return float(np.sort(field, axis=None)[-count:].mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with celeba32.npz and magnetic-tiles")
    parser.add_argument("--backbone", default="celeba32-tiny")
    parser.add_argument("--whole", action="store_true", help="how the preset inspect was chosen, on whole tiles")
    options = parser.parse_args()
    backbone = gepc.load_backbone(options.backbone)
    if options.whole:
        if options.data is None:
            parser.error("--whole needs --data")
        print(whole_tiles(options.data, backbone).markdown())
        return
    for name, fit_pixels, test_pixels in image_sets(options.data):
        bad_pixels, masks = with_defects(test_pixels)
        (fit, known), (test, more), (bad, most) = (parts_of(backbone, p) for p in (fit_pixels, test_pixels, bad_pixels))
        known |= more | most

        def read(images: Sequence[Any], known: dict[bytes, MapParts] = known) -> MapParts:
            each = [known[image_key(image)] for image in images]
            return {part: np.concatenate([one[part] for one in each]) for part in each[0]}

        rows = []
        for label, (map_statistics.LEADING, map_statistics.TWO_SIDED) in CHOICES.items():
            rows.append((label, *map(float, measure(fit, test, bad, masks, read))))
        header = ("parts", "pixel AUROC", "pointing game", "image AUROC", "border / inside")
        print(
            ResultTable(name, f"{name}, {masks.shape[1]}x{masks.shape[2]}", header, tuple(rows)).markdown(), flush=True
        )


if __name__ == "__main__":
    main()
