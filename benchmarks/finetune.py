"""What a user with 300 images gains by fine-tuning an embedded backbone, against training from scratch.

    python benchmarks/finetune.py --data data/ --out results/finetune --init photos-small --minutes 15

The images are the first 300 training images of SVHN. Three backbones are compared: the embedded one as it is, the same
fine-tuned on them for that many minutes by the clock (leave the machine alone meanwhile), and a network of the same
architecture trained on them from scratch for as long. The table `finetune.md` gives the error of the predicted noise on
500 test images, and the AUROC of `gepc+ fast`, fitted on the 300 images, against other data sets. An interrupted run
resumes.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

import gepc
from gepc.core.allocator import keep_freed_memory
from gepc.core.tables import Cell, ResultTable, write_tables
from gepc.lab.metrics import auroc
from gepc.lab.training.choices import recipe_for
from gepc.lab.training.evaluate import denoising_errors, fit_linear
from gepc.lab.training.loop import train

IMAGES, TEST = 300, 500
OTHERS = {"C10": "cifar10", "CelebA": "celeba32", "C100": "cifar100", "TinyIN": "tinyimagenet32"}
SHOWN = (0.9979, 0.99, 0.97, 0.9)


def trained(data: Path, out: Path, init: str, minutes: float, scratch: bool) -> Path:
    """The folder of a network that starts from `init`, or only has its architecture."""
    recipe, _ = recipe_for(data, out, overrides={"init": init, "held_out": 0})
    if scratch:
        recipe = replace(recipe, init=None, learning_rate=1e-3, warmup_steps=100)
    train(recipe, data, out, minutes)
    return out


def row(label: str, source: str, data: Path, images: npt.NDArray[np.uint8], test: npt.NDArray[np.uint8]) -> list[Cell]:
    """Errors at the levels shown, then AUROC against each of the other sets and their mean."""
    backbone = gepc.load_backbone(source)
    training, held_out = (np.float32(pixels.transpose(0, 3, 1, 2) / 127.5 - 1.0) for pixels in (images, test))
    errors = denoising_errors(backbone, fit_linear(training), held_out)
    detector = gepc.create_detector(backbone, "gepc+", "fast").fit(images)
    inside = detector.score(test)
    found = [auroc(inside, detector.score(np.load(data / f"{file}.npz")["test_x"][:TEST])) for file in OTHERS.values()]
    return [label, *(error.net for error in errors if error.asked in SHOWN), *found, float(np.mean(found))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--init", default="photos-small", help="the embedded backbone")
    parser.add_argument("--minutes", type=float, default=15.0)
    options = parser.parse_args()
    keep_freed_memory()

    options.out.mkdir(parents=True, exist_ok=True)
    few = options.out / "few.npz"
    with np.load(options.data / "svhn32.npz") as svhn:
        images, test = svhn["train_x"][:IMAGES], svhn["test_x"][:TEST]
    np.savez(few, train_x=images)
    folders = {
        f"{options.init}, fine-tuned": trained(few, options.out / "tuned", options.init, options.minutes, False),
        "from scratch": trained(few, options.out / "scratch", options.init, options.minutes, True),
    }
    sources = {f"{options.init} as it is": options.init, **{name: str(path) for name, path in folders.items()}}
    rows = tuple(tuple(row(name, source, options.data, images, test)) for name, source in sources.items())
    header = ("backbone", *(f"error at {level:g}" for level in SHOWN), *(f"SVHN:{name}" for name in OTHERS), "average")
    note = f"{IMAGES} training images, {options.minutes:g} minutes of training each; {TEST} test images of each set."
    table = ResultTable("finetune", "Fine-tuning against training from scratch", header, rows, note)
    print(write_tables(options.out, "finetune", [table], {"init": options.init, "minutes": options.minutes}))


if __name__ == "__main__":
    main()
