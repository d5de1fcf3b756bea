"""Export a detector: its network as an ONNX file, in a folder with the detector that uses it."""

import tempfile
import timeit
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from gepc.backbones.base import Backbone
from gepc.backbones.onnx import export_onnx
from gepc.core.errors import BackboneError, OptionError
from gepc.core.files import StrPath
from gepc.detector.fitted import FittedDetector
from gepc.detector.storage import save_detector
from gepc.detector.stream import scores_of
from gepc.images.preprocessing import OWN_SIZE
from gepc.images.sources import open_images

NETWORK = "net.onnx"
AGREEMENT = 1e-4


class Export(NamedTuple):
    """How an exported network compares with the original: differences are relative, `speed` is the ratio to torch."""

    predictions: float
    scores: float
    images: int
    speed: float


def export_detector(fitted: FittedDetector, folder: StrPath, images: Any = None) -> Export:
    """Write `net.onnx` and the detector that runs it; a `BackboneError` if its scores differ by more than 1e-4.

    The detector's network must be a torch one in pixel space on the CPU. Load the folder, new or an exported detector,
    with `load_detector(folder, folder / "net.onnx")`. Scores are compared on `images`, by default 8 of uniform noise; a
    difference is relative to the score, or to the range of the calibration scores where that is larger.
    """
    final, size, original = Path(folder), fitted.input_size, fitted.backbone
    if fitted.preprocessing.resize in OWN_SIZE:
        raise OptionError(
            f"an exported network takes images of one size, and resize={fitted.preprocessing.resize!r} keeps the size "
            "of every image; fit the detector with `size` instead"
        )
    if images is None:
        images = np.random.default_rng(0).integers(0, 256, (8, *size, original.channels), dtype=np.uint8)
    final.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{final.name}.", suffix=".part", dir=final.parent) as draft:
        path = Path(draft) / NETWORK
        exported = export_onnx(original, path, size, getattr(fitted.method, "layers", None))
        exported.source = str(final / NETWORK)
        options = {**fitted.options, "size": list(size), "resize": fitted.preprocessing.resize}
        other = replace(fitted, backbone=exported, options=options)
        sample = open_images(images)
        expected, found = scores_of(fitted, sample), scores_of(other, sample)
        unit = np.maximum(np.abs(expected), np.ptp(fitted.reference.scores))
        scores = float(np.max(np.abs(found - expected) / unit))
        x = torch.randn((8, original.channels, *size), generator=torch.Generator().manual_seed(0))
        t = torch.linspace(0, original.n_steps - 1, 8).long()
        eps = original.eps(x, t)
        predictions = float((exported.eps(x, t) - eps).abs().max() / eps.abs().max())
        if not max(scores, predictions) <= AGREEMENT:
            raise BackboneError(
                f"the exported network differs from torch's by {predictions:.1e} in its predictions and {scores:.1e} "
                f"in the scores, more than {AGREEMENT:g}; nothing was written"
            )
        save_detector(other, final, path)

    def seconds(network: Backbone) -> float:
        return min(timeit.repeat(lambda: network.eps(x, t), number=1, repeat=9))

    return Export(predictions, scores, len(expected), seconds(original) / seconds(exported))
