"""The training set of `photos-tiny`: 32x32 crops of freely licensed pictures from Debian packages.

    python benchmarks/photos.py --out photos32.npz                    # download the packages with apt-get, then cut
    python benchmarks/photos.py --packages unpacked/ --out photos32.npz

Only pictures in the public domain or under a Creative Commons licence that allows commercial use (CC0, CC BY, CC BY-SA)
are used. The licence of a file is what its package states: the machine-readable `debian/copyright`, the wallpaper's
`metadata.json`, or `AUTHORS`. A file without such a statement is left out.

Writes `OUT` with `train_x` and `test_x` (uint8, N x 32 x 32 x 3; no picture contributes to both) and a manifest
(suffix `.json`): every picture with package, author, licence, SHA-256, split and number of crops, and the SHA-256 of
the arrays. Needs `python-debian`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from debian.copyright import Copyright, NotMachineReadableError
from PIL import Image

PACKAGES = (
    *("lomiri-wallpapers-16.04", "lomiri-wallpapers-20.04", "mate-backgrounds", "ukui-wallpapers"),
    *("gnome-backgrounds", "plasma-workspace-wallpapers", "supertuxkart-data"),
)
# The installed folder, and what it is called in the source tree that the copyright file describes.
PREFIXES = {
    "lomiri-wallpapers-16.04": ("usr/share/backgrounds/", "16.04/"),
    "lomiri-wallpapers-20.04": ("usr/share/backgrounds/", "20.04/"),
    "mate-backgrounds": ("usr/share/backgrounds/mate/", ""),
    "ukui-wallpapers": ("usr/share/backgrounds/", ""),
    "supertuxkart-data": ("usr/share/games/supertuxkart/", ""),
}
GNOME_AUTHORS = {
    "adwaita": "Jakub Steiner",
    "grid": "Jakub Steiner",
    "pixels": "Jakub Steiner",
    "wood": "Jakub Steiner",
}
FREE = re.compile(r"^(CC0|CC-BY-SA|CC-BY|public-domain)(-\d\.\d)?$")
# Not pictures of anything: normal maps, gloss and colour masks, fonts, icons, splash screens with text.
NOT_PICTURES = re.compile(
    r"(_nm|_nrm|normal|gloss|mask|_alpha|colori[sz]|icon|/gui/|/skins/|/ttf/|light|halo|glow|shadow)", re.I
)
SIDE = 32
SMALLEST = 96
# Crops of a picture: photographs many, drawn wallpapers some, textures by their area and at most these.
QUOTA = {
    "lomiri-wallpapers-16.04": 1500,
    "lomiri-wallpapers-20.04": 1500,
    "ukui-wallpapers": 700,
    "supertuxkart-data": 60,
}
QUOTA_OF_ART = 200
FILTERS = (Image.Resampling.BOX, Image.Resampling.BILINEAR, Image.Resampling.BICUBIC, Image.Resampling.LANCZOS)

Pixels = npt.NDArray[np.uint8]


@dataclass
class Picture:
    """A file with its provenance, and how many crops were cut from it."""

    package: str
    path: str
    author: str
    licence: str
    sha256: str = ""
    split: str = "train"
    crops: int = 0


def unpack(packages: Path) -> None:
    """Download each package by name and unpack it into a folder of its own; nothing is installed."""
    for package in PACKAGES:
        target = packages / package
        if target.is_dir():
            continue
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(["apt-get", "download", package], cwd=folder, check=True)
            (archive,) = Path(folder).glob("*.deb")
            subprocess.run(["dpkg-deb", "-x", str(archive), str(target)], check=True)


def pictures(packages: Path) -> Iterator[Picture]:
    """Every image file of the packages under a free licence, in a fixed order."""
    for package in PACKAGES:
        root = packages / package
        statements = list(root.glob("usr/share/doc/*/copyright"))
        try:
            terms = Copyright(statements[0].read_text(encoding="utf-8").splitlines(), strict=False)
        except NotMachineReadableError:
            terms = None
        for path in sorted(root.rglob("*")):
            if path.suffix.lower() not in (".jpg", ".png", ".webp") or not path.is_file() or path.is_symlink():
                continue
            name = path.relative_to(root).as_posix()
            if package == "supertuxkart-data" and NOT_PICTURES.search(name):
                continue
            if package == "plasma-workspace-wallpapers" and path != largest(path):
                continue
            author, licence = provenance(package, path, name, terms)
            if FREE.match(licence):
                yield Picture(package, name, author, licence)


def largest(path: Path) -> Path:
    """A wallpaper comes in several sizes, named WIDTHxHEIGHT, in one folder: the one with the most bytes."""
    return max(path.parent.glob("*x*.*"), key=lambda other: other.stat().st_size, default=path)


def provenance(package: str, path: Path, name: str, terms: Copyright | None) -> tuple[str, str]:
    """Author and licence as the package states them; an empty licence where it does not."""
    if package == "plasma-workspace-wallpapers":
        for parent in path.parents:
            if (parent / "metadata.json").is_file():
                plugin = json.loads((parent / "metadata.json").read_text(encoding="utf-8"))["KPlugin"]
                return ", ".join(author["Name"] for author in plugin.get("Authors", [])), plugin.get("License", "")
        return "", ""
    if package == "gnome-backgrounds":
        author = GNOME_AUTHORS.get(path.stem.split("-")[0], "")
        return author, "CC-BY-SA-3.0" if author else ""
    assert terms is not None
    installed, source = PREFIXES[package]
    paragraph = terms.find_files_paragraph(name.replace(installed, source, 1))
    if paragraph is None or paragraph.license is None:
        return "", ""
    return " ".join(paragraph.copyright.split()), paragraph.license.synopsis.strip()


def load(path: Path) -> Image.Image | None:
    """The picture in RGB; transparent areas make a cut-out, not a picture, so those are left out."""
    image = Image.open(path)
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        alpha = np.asarray(image.convert("RGBA").getchannel("A"))
        if (alpha < 255).mean() > 0.01:
            return None
    return image.convert("RGB") if min(image.size) >= SMALLEST else None


def is_flat(crop: Pixels) -> bool:
    """Whether a crop shows next to nothing: hardly any contrast, or one value nearly everywhere."""
    grey = crop.astype(np.float32).mean(axis=2)
    return bool(grey.std() < 5.0 or (np.abs(np.diff(grey, axis=1)) < 1.0).mean() > 0.8)


def crops(image: Image.Image, count: int, rng: np.random.Generator) -> list[Pixels]:
    """Random squares of a side log-uniform between 32 and the shorter side, resized to 32x32; no flat ones."""
    found: list[Pixels] = []
    for _ in range(6 * count):
        if len(found) == count:
            break
        side = round(np.exp(rng.uniform(np.log(SIDE), np.log(min(image.size)))))
        left, top = (int(rng.integers(0, length - side + 1)) for length in image.size)
        resampling = FILTERS[int(rng.integers(len(FILTERS)))]
        box = (left, top, left + side, top + side)
        crop = np.asarray(image.resize((SIDE, SIDE), resampling, box=box, reducing_gap=3.0), dtype=np.uint8)
        if not is_flat(crop):
            found.append(crop)
    return found


def gather(packages: Path, seed: int) -> tuple[dict[str, Pixels], list[Picture]]:
    """All crops by split; one picture in twelve, by its hash, is held out for `test_x`."""
    cut: dict[str, list[Pixels]] = {"train": [], "test": []}
    used: list[Picture] = []
    seen: set[str] = set()
    for picture in pictures(packages):
        content = (packages / picture.package / picture.path).read_bytes()
        picture.sha256 = hashlib.sha256(content).hexdigest()
        image = None if picture.sha256 in seen else load(packages / picture.package / picture.path)
        seen.add(picture.sha256)
        if image is None:
            continue
        # by author: several pictures of one place or one object stay on one side
        split = hashlib.sha256(f"{picture.author} {Path(picture.path).stem[:6]}".encode()).digest()[0] % 12
        picture.split = "test" if split == 0 else "train"
        count = min(QUOTA.get(picture.package, QUOTA_OF_ART), 1 + image.width * image.height // 4096)
        found = crops(image, count, np.random.default_rng([seed, int(picture.sha256[:8], 16)]))
        picture.crops = len(found)
        if found:
            used.append(picture)
            cut[picture.split] += found
    rng = np.random.default_rng(seed)
    return {split: np.stack(found)[rng.permutation(len(found))] for split, found in cut.items()}, used


def main() -> None:
    """Download where needed, cut, write the archive and its manifest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", type=Path, default=Path("photo-packages"), help="folder of unpacked packages")
    parser.add_argument("--out", type=Path, required=True, help="the .npz to write")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.packages.mkdir(parents=True, exist_ok=True)
    unpack(options.packages)
    splits, used = gather(options.packages, options.seed)
    np.savez_compressed(options.out, train_x=splits["train"], test_x=splits["test"])
    manifest = {
        "arrays": {f"{name}_x": hashlib.sha256(array.tobytes()).hexdigest() for name, array in splits.items()},
        "pictures": [asdict(picture) for picture in used],
    }
    options.out.with_suffix(".json").write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")
    sys.stdout.write(f"{len(used)} pictures; {len(splits['train'])} training and {len(splits['test'])} test crops\n")


if __name__ == "__main__":
    main()
