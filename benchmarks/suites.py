"""All suites of this project as protocols for `gepc bench`: nine pairs, others, digits, magnetic tiles, radar patches.

    python benchmarks/suites.py --data data --out suites
    gepc bench suites/nine.yaml --data suites --out results/suites/nine --methods training-free,gepc+:single
    python benchmarks/ranks.py results/suites

The first command writes the images of every suite as npz files and one YAML file each. The second runs one suite; give
it for each of them. The third ranks the methods over all pairs. `--data` holds the files that docs/guides/benchmark.md
lists. A suite whose data are not there is left out.
"""

from __future__ import annotations

import argparse
import gzip
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml
from fresh import FIRST, SECOND, TEST, TRAIN, write_sets
from PIL import Image

from gepc.core.errors import InputError
from gepc.images.formats import read_npz
from gepc.images.sources import Images
from gepc.lab.datasets import open_dataset, register
from gepc.lab.datasets.registry import PixelImages, first_of
from gepc.lab.radar.annotations import read_hrsid, read_ssdd
from gepc.lab.radar.patches import PatchRules, cut, sample, stack

Pixels = npt.NDArray[np.uint8]
KINDS = ("Blowhole", "Break", "Crack", "Fray", "Uneven")
TILE, PATCH = 64, 64
LARGE_IMAGES = 200, 100  # of 64x64, at most: a pass costs four times as much as at 32x32
FEWER = {"train_images": 40, "test_images": 30}
"""Images for methods of more than 30 passes per image."""
EXPENSIVE = ("nll_vlb", "ic", "ddpm_ood", "eigenscore", "lmd", "nll_ode")


def nine(data: Path, folder: Path, images: tuple[int, int]) -> dict[str, Any]:
    """The paper's pairs."""
    fitted = {"cifar10": "cifar10", "svhn": "svhn32", "celeba": "celeba32"}
    for name, file in {**fitted, "cifar100": "cifar100"}.items():
        path = data / f"{file}.npz"
        test = read_npz(path, "test_x")[: images[1]]
        train = read_npz(path, "train_x")[: images[0]] if name in fitted else test[:0]
        np.savez_compressed(folder / f"{name}.npz", train_x=train, test_x=test)
    pairs = {name: [other for other in (*fitted, "cifar100") if other != name] for name in fitted}
    return {"pairs": pairs}


def fresh(data: Path, folder: Path, _: tuple[int, int]) -> dict[str, Any]:
    """Photographs, radar, rotated and pasted faces, grey images: `benchmarks/fresh.py`."""
    write_sets(data, folder)
    names = dict.fromkeys((*FIRST, *SECOND))
    pairs = {name: list(dict.fromkeys((*FIRST.get(name, ()), *SECOND.get(name, ())))) for name in names}
    return {"pairs": pairs, "train_images": TRAIN, "test_images": TEST}


def digits(data: Path, folder: Path, images: tuple[int, int]) -> dict[str, Any]:
    """Fashion-MNIST against MNIST, the failure of likelihoods, and the reverse."""
    for name in ("mnist", "fashion-mnist"):
        splits = zip(("train", "test"), images, strict=True)
        parts = (open_dataset(name, data, split, most, 0) for split, most in splits)
        train, test = (np.stack([_pixels(part, place) for place in range(len(part))]) for part in parts)
        np.savez_compressed(folder / f"{name}.npz", train_x=train, test_x=test)
    return {"pairs": {"mnist": ["fashion-mnist"], "fashion-mnist": ["mnist"]}}


def _pixels(images: Images, place: int) -> Pixels:
    pixels = images[place].pixels
    assert pixels is not None
    return np.asarray(pixels, dtype=np.uint8)


def _read_idx(root: Path, split: str, folder: str) -> PixelImages:
    """A file as the owners distribute it, unpacked or not: a header of 16 bytes, and the pixels."""
    name = {"train": "train-images-idx3-ubyte", "test": "t10k-images-idx3-ubyte"}[split]
    path = first_of(root, f"{folder}/{name}", f"{folder}/{name}.gz")
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return PixelImages(np.frombuffer(content, np.uint8, offset=16).reshape(-1, 28, 28, 1), split)


for family in ("mnist", "fashion-mnist"):
    register(family, f"{family}/ with the files of the owners")(partial(_read_idx, folder=family))


def tiles(data: Path, folder: Path, images: tuple[int, int]) -> dict[str, Any]:
    """Good magnetic tiles against five kinds of defects, resized to 64x64."""
    images = _at_most(images, LARGE_IMAGES)
    paths = sorted((data / "magnetic-tiles" / "MT_Free" / "Imgs").glob("*.jpg"))
    if not paths:
        raise InputError(f"no magnetic tiles in {data}")
    order = [paths[place] for place in np.random.default_rng(0).permutation(len(paths))]
    count = min(images[0], 2 * len(order) // 3)
    np.savez_compressed(folder / "good.npz", train_x=_tiles(order[:count]), test_x=_tiles(order[count:][: images[1]]))
    for kind in KINDS:
        found = _tiles(sorted((data / "magnetic-tiles" / f"MT_{kind}" / "Imgs").glob("*.jpg")))
        np.savez_compressed(folder / f"{kind.lower()}.npz", train_x=found[:0], test_x=found)
    kinds = [kind.lower() for kind in KINDS if kind != "Fray"]  # 16 frays are fewer than a protocol takes
    return {"pairs": {"good": kinds}, "size": TILE}


def _at_most(images: tuple[int, int], most: tuple[int, int]) -> tuple[int, int]:
    return min(images[0], most[0]), min(images[1], most[1])


def _tiles(paths: list[Path]) -> Pixels:
    found = []
    for path in paths:
        with Image.open(path) as picture:
            found.append(np.asarray(picture.convert("L").resize((TILE, TILE), Image.Resampling.BILINEAR)))
    return np.stack(found)


def radar(data: Path, folder: Path, images: tuple[int, int]) -> dict[str, Any]:
    """Sea clutter against ships of HRSID and of SSDD, as log-magnitude on the fixed scale."""
    images = _at_most(images, LARGE_IMAGES)
    train, test = (read_hrsid(data / "HRSID", split) for split in ("train", "test"))
    rules = PatchRules(PATCH)
    held_out = cut(test, rules)
    found = {
        "clutter": held_out.clutter,
        "ships": held_out.ships,
        "ssdd_ships": cut(read_ssdd(data / "SSDD"), rules).ships,
    }
    normal = stack(sample(cut(train, rules, apart=test.scenes).clutter, images[0]), log=True)
    for name, patches in found.items():
        fitted = normal if name == "clutter" else normal[:0]
        chosen = stack(sample(patches, images[1]), log=True)
        np.savez_compressed(folder / f"{name}.npz", train_x=fitted, test_x=chosen)
    return {"pairs": {"clutter": ["ships", "ssdd_ships"]}, "backbone": "sar-small", "size": PATCH}


SUITES: dict[str, Callable[[Path, Path, tuple[int, int]], dict[str, Any]]] = {
    "nine": nine,
    "fresh": fresh,
    "digits": digits,
    "tiles": tiles,
    "radar": radar,
}


def write_suite(name: str, data: Path, out: Path, backbone: str, images: tuple[int, int]) -> bool:
    """The images and the protocol of one suite; False if its data are not there."""
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    try:
        found = SUITES[name](data, folder, images)
    except InputError as error:
        print(f"{name} is left out: {error}")
        return False
    known = dict.fromkeys(one for id_set, others in found["pairs"].items() for one in (id_set, *others))
    protocol = {
        "backbone": backbone,
        "datasets": {one: {"dataset": f"npz:{name}/{one}.npz", "label": one} for one in known},
        "train_images": images[0],
        "test_images": images[1],
        "methods": dict.fromkeys(EXPENSIVE, FEWER),
        **found,
    }
    (out / f"{name}.yaml").write_text(yaml.safe_dump(protocol, sort_keys=False))
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("GEPC_DATA", ".")))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--backbone", default="photos-small", help="of all suites but radar")
    parser.add_argument("--images", type=int, nargs=2, default=(300, 200), help="to fit on, and of each test set")
    options = parser.parse_args()
    images = tuple(options.images)
    for name in SUITES:
        if write_suite(name, options.data, options.out, options.backbone, images):
            print(f"written: {options.out / name}.yaml")


if __name__ == "__main__":
    main()
