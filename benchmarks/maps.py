"""How the default of calibrated maps was chosen: on in-distribution images and synthetic defects made from them.

    python benchmarks/maps.py [--data DATA] [--backbone celeba32-tiny]

Patches of the demo's gravel, and with --data also faces (celeba32.npz) and good magnetic tiles, get a pasted patch, a
scratch or a blur. For every choice of parts the table shows the mean pixel AUROC, the pointing game, the AUROC of
images with and without a defect by the largest value of the map, and the excess at the border over that inside on
images without a defect. No real defect is used. About two minutes on one core.

    python benchmarks/maps.py --data DATA --whole --backbone photos-small

shows how the preset `inspect` was chosen. Detectors are fitted on the 120 good tiles of the protocol `tiles`. The tiles
that this protocol neither fits nor tests with appear as they are and with the defects of `defects.py`. Each row changes
one setting of the row above it. The standard errors are those of a bootstrap over test images, and a gain is the
difference from the first row on the same images. The demo's gravel, in patches of 32x32 pixels, is seen at its own
resolution only.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from defects import KINDS, with_defect
from PIL import Image
from scipy.ndimage import gaussian_filter

import gepc
from gepc.core.tables import ResultTable
from gepc.images.formats import read_file
from gepc.images.noise import image_key
from gepc.images.preprocessing import Preprocessing
from gepc.lab.bench.protocol import load_inspection
from gepc.lab.metrics import auroc, localisation
from gepc.lab.report.demo import FIT_ROWS, INSIDE, TEST_ROWS, patches
from gepc.maps import statistics as map_statistics
from gepc.maps.drawing import resized
from gepc.maps.statistics import TOGETHER, MapStatistics
from gepc.methods.base import Batch, Extractor, MapModel, MapParts, extract_map_parts

FIT, CALIBRATE, TEST = 64, 30, 60
DEFECT = 0.2  # of the shorter side
BOOTSTRAP = 200
Images = Sequence[np.ndarray]
Estimate = tuple[float, np.ndarray]
WIDE = MapModel(band=4)
MEMORY = replace(WIDE, positions="level_local_memory:size=1000", images=128, learnt=0.6)
CHOSEN = replace(MEMORY, leading=("activations",))
SETTINGS = (
    ("before: level 0.998", 0.998, "half", MapModel()),
    ("bands of 4 pixels", 0.998, "half", WIDE),
    ("memory of 1,000 positions", 0.998, "half", MEMORY),
    ("activations only", 0.998, "half", CHOSEN),
    ("level 0.9997", 0.9997, "half", CHOSEN),
    ("**level 0.9999**", 0.9999, "half", CHOSEN),
    ("score: highest 1 %", 0.9999, "half", replace(CHOSEN, share=0.01)),
    ("not compared with the median", 0.9999, "half", replace(CHOSEN, centred=False)),
    ("native resolution", 0.9999, "native", CHOSEN),
)
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


def parts_of(backbone: gepc.Backbone, method: Extractor, seen: Images) -> dict[bytes, MapParts]:
    """The parts of the maps of preprocessed images by content, from one evaluation."""
    found: dict[bytes, MapParts] = {}
    for image in seen:
        batch = Batch(image[None], [image_key(image)])
        _, found[batch.keys[0]] = extract_map_parts(method, backbone, batch, method.timesteps(backbone))
    return found


def reader(known: dict[bytes, MapParts]) -> Any:
    """A function from images to the parts of their maps."""

    def read(images: Images) -> MapParts:
        each = [known[image_key(image)] for image in images]
        return {part: np.concatenate([one[part] for one in each]) for part in each[0]}

    return read


def measure(fit: Images, test: Images, bad: Images, masks: np.ndarray, read: Any, model: MapModel) -> list[float]:
    """Pixel AUROC, pointing game, image AUROC, and the excess at the border over that inside."""
    statistics = MapStatistics.fit(read, fit[:FIT], fit[FIT:], np.ones(1), model=model)
    size = masks.shape[1:]
    usual, unusual = (statistics.z(read(images), size)[TOGETHER] for images in (test, bad))
    found = localisation(unusual, masks)
    border = np.ones(size, dtype=bool)
    border[2:-2, 2:-2] = False
    excess = np.maximum(usual, 0.0)
    image = auroc(usual.max((1, 2)), unusual.max((1, 2)))
    return [found.auroc.mean(), found.hit.mean(), image, excess[:, border].mean() / excess[:, ~border].mean()]


def whole_images(name: str, fit: Images, calibrate: Images, test: Images, backbone: gepc.Backbone) -> ResultTable:
    """Each of `SETTINGS`, changed one after the other, on good images with and without each kind of defect."""
    own = ("native",) if name == "gravel" else ("half", "native")
    made = [[with_defect(image, kind, seed) for seed, image in enumerate(test)] for kind in KINDS]
    everything = [*fit, *calibrate, *test, *(image for kind in made for image, _ in kind)]
    tested = len(fit) + len(calibrate)
    rows, known, first = [], {}, None
    for label, level, resize, model in SETTINGS:
        resize = resize if resize in own else own[0]
        detector = gepc.create_detector(backbone, "gepc+", "inspect", levels=(level,), resize=resize)
        seen = [detector.preprocessing()(image) for image in everything]
        if (level, resize) not in known:
            known = {(level, resize): parts_of(backbone, detector.extractor, seen)}
        read = reader(known[level, resize])
        fitting, calibrating = seen[: min(len(fit), model.images)], seen[len(fit) : tested]
        statistics = MapStatistics.fit(read, fitting, calibrating, np.ones(1), model=model)
        each_kind = np.empty((2, 1 + len(KINDS), len(test)))  # scores of good images and of each kind, pixel AUROC
        for place, image in enumerate(seen[tested:]):
            kind, number = divmod(place, len(test))
            z = statistics.z(read([image]), image.shape[1:])
            each_kind[0, kind, number] = statistics.map_scores(z)[0]
            if kind:
                mask = made[kind - 1][number][1]
                top, left, height, width = detector.preprocessing().window(mask.shape)
                mask = mask[top : top + height, left : left + width]
                field = resized(z[TOGETHER][0], mask.shape)
                each_kind[1, kind, number] = auroc(field[~mask], field[mask]) if 0.0 < mask.mean() < 1.0 else np.nan
        found = with_error(each_kind)
        first = found if first is None else first
        measured = []
        for (value, spread), (value_before, spread_before) in zip(found[1:], first[1:], strict=True):
            measured.append(f"{value:.3f} ± {spread.std():.3f}")
            measured.append(f"{value - value_before:+.3f} ± {(spread - spread_before).std():.3f}")
        rows.append((label, *found[0], *measured))
    header = ("setting", *KINDS, "image AUROC", "gain", "pixel AUROC", "gain")
    return ResultTable(name, f"{name}, whole images with synthetic defects", header, tuple(rows))


def with_error(values: np.ndarray) -> tuple[list[float], Estimate, Estimate]:
    """Image AUROC of each kind, and the means over kinds for images and pixels with bootstrap samples of the images."""

    def means(chosen: Any) -> tuple[list[float], float, float]:
        scores, pixels = values[:, :, chosen]
        images = [auroc(scores[0], kind) for kind in scores[1:]]
        return images, float(np.mean(images)), float(np.nanmean(pixels[1:], axis=1).mean())

    rng, count = np.random.default_rng(0), values.shape[2]
    images, *both = means(slice(None))
    drawn = np.array([means(rng.integers(count, size=count))[1:] for _ in range(BOOTSTRAP)])
    return images, (both[0], drawn[:, 0]), (both[1], drawn[:, 1])


def whole_sets(data: Path | None, tiles: int) -> Iterator[tuple[str, Images, Images, Images]]:
    """Name, good images to fit on, to calibrate on and to test with, all grey (H, W)."""
    known, new = (patches(INSIDE, rows)[..., 0] for rows in (FIT_ROWS, TEST_ROWS))
    yield "gravel", known[:FIT], known[FIT : FIT + CALIBRATE], new[:TEST]
    if data is not None:
        protocol = load_inspection("tiles")
        assert protocol is not None
        _, (part,) = protocol.parts(data)
        used = {*part.fit, *part.good}
        free = [path for path in sorted((data / protocol.good).glob("*.jpg")) if path not in used]
        good, third = [read_file(path) for path in part.fit], len(part.fit) // 3
        yield "tiles", good[:-third], good[-third:], [read_file(path) for path in free[:tiles]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with celeba32.npz and magnetic-tiles")
    parser.add_argument("--backbone", default="celeba32-tiny")
    parser.add_argument("--whole", action="store_true", help="how the preset inspect was chosen, on whole tiles")
    parser.add_argument("--tiles", type=int, default=40, help="good tiles that --whole tests with")
    options = parser.parse_args()
    backbone = gepc.load_backbone(options.backbone)
    if options.whole:
        for name, fitted, calibrating, tested in whole_sets(options.data, options.tiles):
            print(whole_images(name, fitted, calibrating, tested, backbone).markdown(), flush=True)
        return
    for name, fit_pixels, test_pixels in image_sets(options.data):
        bad_pixels, masks = with_defects(test_pixels)
        fit, test, bad = ([Preprocessing()(pixels) for pixels in p] for p in (fit_pixels, test_pixels, bad_pixels))
        read = reader(parts_of(backbone, gepc.create_detector(backbone).extractor, [*fit, *test, *bad]))
        rows = []
        for label, (leading, two_sided) in CHOICES.items():
            map_statistics.TWO_SIDED = two_sided
            measured = measure(fit, test, bad, masks, read, MapModel(leading=leading))
            rows.append((label, *map(float, measured)))
        header = ("parts", "pixel AUROC", "pointing game", "image AUROC", "border / inside")
        print(
            ResultTable(name, f"{name}, {masks.shape[1]}x{masks.shape[2]}", header, tuple(rows)).markdown(), flush=True
        )


if __name__ == "__main__":
    main()
