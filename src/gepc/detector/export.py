"""Export a detector: its network as an ONNX file, and a script that scores images without torch and without gepc."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from gepc.backbones.onnx import export_onnx
from gepc.calibration.evidence import Evidence
from gepc.conformal.p_values import images_needed, threshold
from gepc.core.errors import BackboneError, InputError, OptionError
from gepc.core.files import StrPath, write_json
from gepc.detector import standalone
from gepc.detector.fitted import FittedDetector
from gepc.detector.storage import remember_networks, replacing_detector, write_detector
from gepc.detector.stream import scores_of
from gepc.images.preprocessing import OWN_SIZE, VALUE_RANGES
from gepc.images.sources import Images, open_images
from gepc.methods.gepc_plus import GepcPlus

NETWORK, SCRIPT = "net.onnx", "score.py"
AGREEMENT = 1e-4
RATES = (0.01, 0.05, 0.1)  # false-alarm rates whose thresholds are written down


class Export(NamedTuple):
    """How an exported network compares with the original: differences are relative.

    `script` is the difference of the scores of `score.py`, and `why_no_script` says why there is no such script.
    """

    predictions: float
    scores: float
    images: int
    script: float | None = None
    why_no_script: str | None = None


def export_detector(fitted: FittedDetector, folder: StrPath, images: Any = None) -> Export:
    """Write `net.onnx`, the detector that runs it, and `score.py`; a `BackboneError` if scores differ by over 1e-4.

    The detector's network must be a torch one in pixel space on the CPU. Load the folder, new or an exported detector,
    with `load_detector(folder, folder / "net.onnx")`. Scores are compared on `images`, by default 8 of uniform noise; a
    difference is relative to the score, or to the range of the calibration scores where that is larger. `score.py` is
    written for the detectors that `why_not_standalone` accepts.
    """
    final = Path(folder).absolute()
    if fitted.preprocessing.resize in OWN_SIZE:
        kept = f"resize={fitted.preprocessing.resize!r} keeps the size of every image"
        raise OptionError(f"an exported network takes images of one size, and {kept}; fit with `size` instead")
    if images is None:
        shape = (8, *fitted.input_size, fitted.backbone.channels)
        images = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    sample = open_images(images)
    if sample.once or len(sample) == 0:
        raise InputError("scores are compared on images that are read twice: give some, as a folder, list or array")
    with replacing_detector(final) as draft:
        other, export = _exported(fitted, draft, final, sample)
        write_detector(other, draft, final)
    remember_networks(other)
    return export


def _exported(fitted: FittedDetector, draft: Path, final: Path, sample: Images) -> tuple[FittedDetector, Export]:
    """Write network and script to `draft`, and compare them with torch; the detector runs the network in `final`."""
    size, original, path = fitted.input_size, fitted.backbone, draft / NETWORK
    exported = export_onnx(original, path, size, getattr(fitted.method, "layers", None))
    exported.source = exported.location = str(final / NETWORK)
    options = {**fitted.options, "size": list(size), "resize": fitted.preprocessing.resize}
    other = replace(fitted, backbone=exported, options=options)
    expected = scores_of(fitted, sample)
    scores = _difference(fitted, scores_of(other, sample), expected)
    x = torch.randn((8, original.channels, *size), generator=torch.Generator().manual_seed(0))
    t = torch.linspace(0, original.n_steps - 1, 8).long()
    eps = original.eps(x, t)
    predictions = float((exported.eps(x, t) - eps).abs().max() / eps.abs().max())
    if not max(scores, predictions) <= AGREEMENT:
        wrong = f"by {predictions:.1e} in its predictions and {scores:.1e} in the scores"
        raise BackboneError(f"the exported network differs from torch's {wrong}; nothing was written")
    reason, script = why_not_standalone(fitted, sample), None
    if reason is None:
        write_standalone(fitted, draft)
        alone = standalone.Detector(draft)
        found = [alone.score(record.pixels_for(original.channels)) for record in sample]
        script = _difference(fitted, np.array(found), expected)
        if not script <= AGREEMENT:
            raise BackboneError(f"the scores of {SCRIPT} differ by {script:.1e}; nothing was written")
    return other, Export(predictions, scores, len(expected), script, reason)


def _difference(fitted: FittedDetector, found: npt.NDArray[np.float64], expected: npt.NDArray[np.float64]) -> float:
    """The largest difference of scores, relative to them or to the range of the calibration scores."""
    unit = np.maximum(np.abs(expected), np.ptp(fitted.reference.scores))
    return float(np.max(np.abs(found - expected) / unit))


# --- the script that needs neither torch nor gepc --------------------------------------------------------------------


def why_not_standalone(fitted: FittedDetector, images: Images) -> str | None:
    """Why `score.py` cannot score as this detector does; None if it can.

    It can for the presets `fast`, `full` and `single` of gepc+ with their own calibration, and 8-bit images.
    """
    method, preprocessing = fitted.method, fitted.preprocessing
    if not isinstance(method, GepcPlus) or fitted.score_from != "features":
        return "it is written for the method gepc+ that scores by features"
    calibrator, group = fitted.scorer.calibrator_, method.acting(fitted.input_size)
    usual = ("fisher", 0.0, "level_mahalanobis", "level_lof")
    if (
        not isinstance(calibrator, Evidence)
        or (calibrator.rule, calibrator.left, calibrator.narrow, calibrator.wide) != usual
    ):
        return "it is written for the default calibration"
    if fitted.scorer.aggregate != "wmean" or fitted.reference.grouped:
        return "it is written for the weighted mean over levels and for calibration images without groups"
    unusual = set(method.features) - set(standalone.FEATURES)
    unusual |= {action.name for action in group.moving} - set(standalone.ELEMENTS)
    if unusual or any(action.weight != 1.0 for action in group.moving):
        return f"it has only the default features, rotations and flips ({', '.join(sorted(unusual)) or 'weights'})"
    if method.elements != "each" or method.pool != "topk" or method.mc_samples > 1:
        return "it has only the default options of the features"
    if method.group_samples is not None or method.level_samples is not None:
        return "it evaluates every level and element"
    if preprocessing.magnitude != "linear" or preprocessing.ignore is not None:
        return "it reads plain images without ignored regions"
    all_bytes = all(record.pixels is not None and record.pixels.dtype == np.uint8 for record in images)
    if preprocessing.resize not in ("stretch", "exact") or not all_bytes:
        return "it reads images with 8 bits for each channel, of the size of the network or stretched to it"
    return None


def write_standalone(fitted: FittedDetector, folder: Path) -> None:
    """Write `score.py`, `calibration.json` and `calibration.npz`."""
    calibrator, method = fitted.scorer.calibrator_, fitted.method
    assert isinstance(calibrator, Evidence)
    assert isinstance(method, GepcPlus)
    scores = fitted.reference.scores
    present = [kind.name for kind in method.kinds if kind.name != "ac" or fitted.backbone.channels > 1]
    parts = [
        {
            "name": part.name,
            "weight": calibrator.weight_of(part),
            "columns": part.columns.tolist(),
            "arrays": list(model.fitted),
        }
        for part, model in zip(calibrator.used, calibrator.models_, strict=True)
    ]
    facts = {
        "value_range": fitted.preprocessing.value_range or VALUE_RANGES["uint8"],
        "size": fitted.input_size,
        "resize": fitted.preprocessing.resize,
        "channels": fitted.backbone.channels,
        "seed": fitted.seed,
        "levels": [(t, float(fitted.backbone.alphas_cumprod[t])) for t in fitted.kept],
        "features": present,
        "elements": [action.name for action in method.acting(fitted.input_size).moving] if method.compares else [],
        "topk": method.topk,
        "parts": parts,
        "thresholds": {rate: threshold(scores, rate) for rate in RATES if len(scores) >= images_needed(rate)},
    }
    arrays: dict[str, Any] = {**calibrator.state(), "level_weights": fitted.weights, "calibration_scores": scores}
    write_json(folder / "calibration.json", facts)
    np.savez(folder / "calibration.npz", **arrays)
    shutil.copyfile(standalone.__file__, folder / SCRIPT)
